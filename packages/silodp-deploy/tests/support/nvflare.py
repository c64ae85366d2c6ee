"""NVFlare's processes on this machine: a server, a client beside every silo, and the job that carries messages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import yaml

from silodp_deploy.setup import find_free_port

ROOT = Path(__file__).resolve().parents[4]
EXAMPLE = ROOT / "examples" / "nvflare"
# Absolute, because its commands run in other folders.
BIN = Path(os.environ.get("SILODP_NVFLARE", ROOT / ".venv-nvflare")).absolute() / "bin"
"""Of the environment with NVFlare, which `make test-nvflare` makes."""
SERVER, ADMIN = "localhost", "admin@example.org"


class Federation:
    """The processes of a provisioned project, with mutual TLS on loopback; the page docs/couriers.md by hand.

    Args:
        folder: Of the sockets, server.sock and NAME.sock for each silo; NVFlare's files are in its folder "nvflare".
        silos: Names of the silos, and so of the clients.
        unguarded: Sites where jobs may have code, as NVFlare provisions them.
    """

    def __init__(self, folder: Path, silos: Iterable[str], unguarded: Iterable[str] = ()) -> None:
        self.home = folder / "nvflare"
        self._environment = {**os.environ, "HOME": str(self.home), "PATH": f"{BIN}:{os.environ['PATH']}"}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.home.mkdir()
        self._provision(tuple(silos))
        for name in unguarded:
            (self.kit(name) / "local" / "authorization.json").unlink()
        self.job = shutil.copytree(EXAMPLE / "job", self.home / "job")
        for path in (self.job / "app" / "config").iterdir():
            path.write_text(path.read_text().replace("/run/silodp", str(folder)))

    def _provision(self, silos: tuple[str, ...]) -> None:
        project = yaml.safe_load((EXAMPLE / "project.yml").read_text())
        server, client, _, admin = project["participants"]
        port = find_free_port()
        server.update(name=SERVER, fed_learn_port=port, admin_port=port)
        clients = [{**client, "name": name, "org": name.replace("-", "_")} for name in silos]
        project["participants"] = [server, *clients, admin]
        (self.home / "project.yml").write_text(yaml.safe_dump(project))
        self.call("provision", "-p", "project.yml", "-w", "work", "--force")
        for name in (SERVER, *silos):
            command = [sys.executable, str(EXAMPLE / "prepare_site.py"), str(self.kit(name))]
            subprocess.run(command, check=True)

    def kit(self, name: str) -> Path:
        """Return the folder of a startup kit."""
        return self.home / "work" / "silodp" / "prod_00" / name

    def call(self, *arguments: str) -> str:
        """Run a command of NVFlare to its end; return its output, whether it succeeds or not."""
        return subprocess.run(
            [BIN / "nvflare", *arguments],
            env=self._environment,
            cwd=self.home,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
        ).stdout

    def start(self, name: str) -> None:
        """Start the server or a client; it starts its Python process again whenever that ends."""
        self._start(name, "bash", str(self.kit(name) / "startup" / "sub_start.sh"))

    def carry(self) -> subprocess.Popen[bytes]:
        """Have the job submitted, again and again until it ends without a failure."""
        return self._start("carry", "sh", str(EXAMPLE / "carry.sh"), str(self.job), str(self.kit(ADMIN)))

    def describe_job(self) -> str:
        """Return what the server says of the job that was submitted last, as JSON."""
        jobs = re.findall(r"Waiting for job (\S+)", self.log("carry"))
        command = ("--format", "json", "job", "meta", "--startup-kit", str(self.kit(ADMIN)))
        return self.call(*command, jobs[-1]) if jobs else ""

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.home / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command, env=self._environment, cwd=self.home, stdout=log, stderr=log, start_new_session=True
            )
        return self._running[name]

    def log(self, name: str) -> str:
        """Return what a process has printed."""
        return (self.home / f"{name}.log").read_text()

    def kill(self, name: str) -> None:
        """Kill the server or a client with its jobs; `startup/sub_start.sh` starts it again."""
        _kill(psutil.Process(self._running[name].pid).children(recursive=True))

    def close(self) -> None:
        """Kill all processes."""
        for process in self._running.values():
            with suppress(psutil.NoSuchProcess):
                found = psutil.Process(process.pid)
                children = found.children(recursive=True)
                # The script first, which would start others; jobs are in sessions of their own.
                _kill([found, *children])
            process.wait(30)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@contextmanager
def start_federation(
    folder: Path, silos: Iterable[str], unguarded: Iterable[str] = ()
) -> Iterator[Federation]:
    """Start a server, and a client for each silo."""
    federation = Federation(folder, silos, unguarded)
    try:
        for name in (SERVER, *silos):
            federation.start(name)
        yield federation
    finally:
        federation.close()
