"""A consortium of real processes on this machine, made by `silodp deploy init --local`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from silodp.config.schema import load_config
from silodp.deploy.consortium import Consortium
from silodp.deploy.setup import make_local
from support.ports import find_free_port

COMMAND = (sys.executable, "-m", "silodp.cli.main")


@dataclass
class Processes:
    """The processes of a consortium.

    Attributes:
        folder: public/, server/, silos/NAME/.
        running: processes by the name of their party.
    """

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def public(self) -> Path:
        return self.folder / "public"

    @property
    def names(self) -> tuple[str, ...]:
        return Consortium.load(self.public).data.silos

    def home(self, name: str) -> Path:
        return self.folder / "server" if name == "server" else self.folder / "silos" / name

    def log(self, name: str) -> str:
        path = self.home(name) / "log.txt"
        return path.read_text() if path.exists() else ""

    def start(self, name: str, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start one party."""
        process = start_party(self.public, self.home(name), name, *options, **environment)
        self.running[name] = process
        return process

    def start_all(self) -> None:
        for name in (*self.names, "server"):
            self.start(name)

    def kill(self, name: str) -> None:
        """Kill one party, as a power cut does."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(30)

    def wait_for_server(self, seconds: float = 120) -> int:
        return self.running["server"].wait(seconds)

    @property
    def run(self) -> Path:
        return self.folder / "server" / "run"

    def guarantees(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads((self.run / "guarantee.json").read_text())["guarantees"]
        return found

    def audit(self, name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.home(name) / "audit.jsonl").read_text().splitlines()]


def start_party(
    public: Path, home: Path, name: str, *options: str, **environment: str
) -> subprocess.Popen[bytes]:
    """Start the server or a silo; it writes its log beside its keys."""
    command = [*COMMAND, "server" if name == "server" else "silo", str(public), str(home), *options]
    with (home / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
        )


@contextmanager
def start_consortium(folder: Path, config: str) -> Iterator[Processes]:
    """Write a local consortium of a configuration; its processes are killed at the end."""
    path = folder / "consortium.toml"
    path.write_text(config)
    settings = load_config(path)
    make_local(settings, settings.federation(), folder / "parties", find_free_port())
    processes = Processes(folder / "parties")
    try:
        yield processes
    finally:
        for name in list(processes.running):
            processes.kill(name)
