"""A consortium of real processes on this machine, made by `silodp deploy init --local`."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from silodp.config.resolve import load_config
from silodp_deploy.acceptance import write_policy
from silodp_deploy.consortium import Consortium
from silodp_deploy.policy import accept_digest
from silodp_deploy.setup import draft_public, find_free_port, make_keys, make_local, seal_public

COMMAND = (sys.executable, "-m", "silodp.cli.main")
_PRELOAD = [
    "silodp_deploy.cli.deploy",
    "silodp_deploy.server",
    "silodp.runtime.train",
    # What a party imports when it needs it; without these every party spends 0.6 s more on imports.
    "silodp.accounting.pld",
    "silodp.accounting.rdp",
    "silodp.aggregators.masked",
    "silodp.training.sgd.local",
    "httpcore",
    "scipy.stats",
    "torch.fx.experimental.proxy_tensor",
]


class Running(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


@dataclass(frozen=True)
class Forked:
    """A process that was forked from one that has imported everything, with the interface of one from `subprocess`."""

    process: BaseProcess

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("silodp", timeout or 0)
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, sig: int) -> None:
        if self.process.exitcode is None:
            os.kill(self.pid, sig)


@dataclass
class Processes:
    """The processes of a consortium.

    Attributes:
        folder: public/, server/, silos/NAME/.
        forked: whether processes are forked, which starts them at once; else each is a command of its own.
        running: processes by the name of their party.
    """

    folder: Path
    forked: bool = False
    running: dict[str, Running] = field(default_factory=dict)

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

    def start(self, name: str, *options: str, **environment: str) -> Running:
        """Start one party; with variables of the environment it is a command of its own."""
        start = fork_party if self.forked and not environment else start_party
        self.running[name] = start(self.public, self.home(name), name, *options, **environment)
        return self.running[name]

    def start_all(self) -> None:
        for name in (*self.names, "server"):
            self.start(name)

    def kill(self, name: str) -> None:
        """Kill one party, as a power cut does."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(30)

    def kill_all(self) -> None:
        for name in list(self.running):
            self.kill(name)

    def wait_for_server(self, seconds: float = 120) -> int:
        return self.running["server"].wait(seconds)

    @property
    def run(self) -> Path:
        return self.folder / "server" / "run"

    def guarantees(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads((self.run / "guarantee.json").read_text())["guarantees"]
        return found

    def audit(self, name: str) -> list[dict[str, object]]:
        """The lines of a silo's audit log; where a kill cut one off, nothing left the silo."""
        found = []
        for line in (self.home(name) / "audit.jsonl").read_text().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return found


def agree_on_tables(
    config: Path, folder: Path, tables: Mapping[str, Path], indexes: Mapping[str, str] | None = None
) -> Processes:
    """Set up a consortium whose silos have tables, as `silodp deploy init`, `keys`, `seal` and `accept` do.

    Args:
        config: of the run; its schema reads the tables.
        folder: of all parties.
        tables: silo -> its table.
        indexes: silo -> the file by which a trust center numbers its persons.
    """
    loaded = load_config(config)
    draft_public(loaded, folder / "public", loaded.read_public_data())
    requests, processes = folder / "requests", Processes(folder)
    requests.mkdir()
    for name in ("server", *tables):
        shutil.copy(make_keys(processes.home(name), name), requests)
    consortium = seal_public(folder, "127.0.0.1", find_free_port(), for_tests=True)
    accept_digest(processes.home("server"), consortium.digest)
    for name, table in tables.items():
        write_policy(
            processes.home(name), consortium, str(table), index=(indexes or {}).get(name, ""), allow_seed=True
        )
    return processes


def start_party(
    public: Path, home: Path, name: str, *options: str, **environment: str
) -> subprocess.Popen[bytes]:
    """Start the server or a silo; it writes its log beside its keys."""
    command = [*COMMAND, "server" if name == "server" else "silo", str(public), str(home), *options]
    with (home / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
        )


def fork_party(public: Path, home: Path, name: str, *options: str) -> Forked:
    """Start the server or a silo in a fork of a process that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    command = ["server" if name == "server" else "silo", str(public), str(home), *options]
    process = context.Process(target=_run_command, args=(command, home / "log.txt"), daemon=True)
    process.start()
    return Forked(process)


def _run_command(arguments: list[str], log: Path) -> None:
    """Run a command in this process, with its output in a file."""
    from silodp.cli.main import main

    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    main(arguments)


def make_parties(folder: Path, config: str, port: int = 1) -> Path:
    """Write a configuration and its local consortium into a folder; return the consortium's."""
    path = folder / "consortium.toml"
    path.write_text(config)
    settings = load_config(path)
    make_local(settings, settings.load_federation(), folder / "parties", port)
    return folder / "parties"


@contextmanager
def start_consortium(folder: Path, config: str, *, forked: bool = True) -> Iterator[Processes]:
    """Write a local consortium of a configuration; its processes are killed at the end."""
    processes = Processes(make_parties(folder, config, find_free_port()), forked)
    try:
        yield processes
    finally:
        processes.kill_all()
