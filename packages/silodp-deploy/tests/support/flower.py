"""Flower's processes on this machine: a SuperLink, a SuperNode beside every silo, and the app that carries messages."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from silodp_deploy.certificates import Authority, make_request
from silodp_deploy.setup import find_free_port
from support.consortium import Processes

ROOT = Path(__file__).resolve().parents[4]
APP = ROOT / "examples" / "flower"
# Absolute, because its commands run in other folders.
BIN = Path(os.environ.get("SILODP_FLOWER", ROOT / ".venv-flower")).absolute() / "bin"
"""Of the environment with Flower, which `make test-flower` makes."""
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


@contextmanager
def start_flower(folder: Path, processes: Processes) -> Iterator[Path]:
    """Start SuperLink, SuperNodes and the app, with TLS on loopback; yield the folder with their logs.

    The sockets are folder/server.sock, and folder/NAME.sock for each silo.
    """
    home = folder / "flower"
    home.mkdir()
    port = find_free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{home / "ca.pem"}"\n'
    )
    authority = Authority.fresh("flower")
    key, request = make_request("superlink")
    (home / "ca.pem").write_bytes(authority.certificate)
    (home / "superlink.key").write_bytes(key)
    (home / "superlink.pem").write_bytes(authority.sign(request, "superlink", ("127.0.0.1", "localhost")))
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}"}
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str) -> None:
        with (home / f"{name}.log").open("wb") as log:
            running.append(
                subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment, cwd=home, start_new_session=True
                )
            )

    try:
        start(
            "superlink",
            *(str(BIN / "flower-superlink"), "--port", str(port)),
            *(
                "--ssl-ca-certfile",
                "ca.pem",
                "--ssl-certfile",
                "superlink.pem",
                "--ssl-keyfile",
                "superlink.key",
            ),
            *("--database", str(home / "state.db"), "--disable-runtime-dependency-installation"),
        )
        for name in processes.names:
            start(
                name,
                *(str(BIN / "flower-supernode"), "--superlink", f"127.0.0.1:{port}"),
                *("--root-certificates", "ca.pem", "--port", str(find_free_port())),
                *("--node-config", f'silo="{name}" socket="{folder / name}.sock"'),
            )
        app = shutil.copytree(APP, home / "app", ignore=shutil.ignore_patterns("__pycache__"))
        submit = [str(BIN / "flwr"), "run", str(app), "here", "--run-config"]
        submit.append(f'socket="{folder / "server.sock"}" grace=300.0')
        _retry(submit, environment, home)
        yield home
    finally:
        for process in running:
            _kill_session(process)


def _retry(command: list[str], environment: dict[str, str], home: Path) -> None:
    """Run a command until the SuperLink listens."""
    for _ in range(30):
        done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)
        (home / "run.log").write_text(done.stdout + done.stderr)
        if done.returncode == 0:
            return
        time.sleep(2)
    raise AssertionError((home / "run.log").read_text())


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those that it has started; they are in a session of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait(30)
