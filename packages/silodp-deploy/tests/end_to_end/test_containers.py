"""Server and silos in containers, by packaging/compose.yaml: the model of the simulation (`make test-containers`)."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import Silodp
from support.consortium import Processes
from support.deployed import LONG, assert_same_run, simulate, wait_for, wait_for_round

COMPOSE = shlex.split(os.environ.get("SILODP_COMPOSE", ""))
FILE = Path(__file__).parents[4] / "packaging" / "compose.yaml"
IN_IMAGE = 10_001
"""The user of the image."""
ROUNDS = 150
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not COMPOSE, reason="no command that runs a compose file: make test-containers"),
]


def compose(*arguments: str, check: bool = True) -> str:
    """Run a command on the containers of the file, and return what it prints."""
    done = subprocess.run(
        [*COMPOSE, "--file", str(FILE), *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout


def inside(service: str, code: str) -> str:
    """Run a line of Python in the container of a service, and return what it prints, or its last line of error."""
    done = subprocess.run(
        [*COMPOSE, "--file", str(FILE), "exec", "-T", service, "python", "-c", code],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return (done.stdout if done.returncode == 0 else done.stderr).strip()


@pytest.fixture
def started(tmp_path: Path, silodp: Silodp, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """A consortium whose server and four silos run in containers."""
    config = tmp_path / "run.toml"
    config.write_text(LONG.replace("rounds = 12", f"rounds = {ROUNDS}"))
    folder = tmp_path / "consortium"
    made = silodp("deploy", "init", config, "--local", "--host", "server", "--port", "8443", "--out", folder)
    assert made.status == 0, made
    for path in (folder, *folder.rglob("*")):
        os.chown(path, IN_IMAGE, IN_IMAGE, follow_symlinks=False)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid():
            parent.chmod(parent.stat().st_mode | 0o011)  # the image's user may pass through
    monkeypatch.setenv("CONSORTIUM", str(folder))
    try:
        compose("up", "--detach")
        yield Processes(folder)
    finally:
        compose("down", "--volumes", check=False)


def test_four_silos_in_containers_train_the_model_of_the_simulation(
    started: Processes, tmp_path: Path
) -> None:
    wait_for_round(started, 1)
    # A silo sees its own folder, and reaches the server; no other party and nothing outside.
    assert inside("silo-1", "import os; print(*sorted(os.listdir('/var/lib/silodp')))") == "public silo-1"
    assert (
        inside("silo-1", "import socket; socket.create_connection(('server', 8443), 5); print('yes')")
        == "yes"
    )
    assert "gaierror" in inside("silo-1", "import socket; socket.create_connection(('silo-2', 8443), 5)")
    assert "unreachable" in inside("silo-1", "import socket; socket.create_connection(('192.0.2.1', 443), 5)")
    assert "Read-only" in inside("silo-1", "open('/var/lib/silodp/public/new', 'w')")
    assert inside("silo-1", "import os; print(os.getuid())") == str(IN_IMAGE)
    metrics = started.run / "metrics.jsonl"
    assert len(metrics.read_text().splitlines()) < ROUNDS - 30  # the run is not over
    for party in ("silo-2", "server"):
        compose("kill", "--signal", "KILL", party)
        compose("start", party)
    wait_for(started, lambda: f'"round": {ROUNDS}' in metrics.read_text(), 240)
    wait_for(started, (started.run / "guarantee.json").exists)
    text = (tmp_path / "run.toml").read_text()
    assert_same_run(started, simulate(tmp_path, text))
