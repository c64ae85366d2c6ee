"""Parties upgrade one after the other, during a run, to a second build of the packages; docs/deployment_admin.md."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from silodp_deploy import PROTOCOL
from support.consortium import COMMAND, Processes, start_consortium
from support.deployed import LONG, check_the_end, simulate, wait_for, wait_for_round

pytest.importorskip("setuptools", minversion="77")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PACKAGES = Path(__file__).resolve().parents[3]
VERSION = "0.2.0"
_BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"
_ALIVE = {"log.txt", "status.json", "lock"}
"""Files that a process writes whatever happens."""


def build(folder: Path, protocol: int = PROTOCOL) -> str:
    """Build wheels of another version from copies of the sources, and unpack them; return their PYTHONPATH."""
    for package in ("silodp", "silodp-deploy"):
        source = folder / package
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "tests", "build")
        shutil.copytree(PACKAGES / package, source, ignore=ignored)
        project = source / "pyproject.toml"
        project.write_text(
            project.read_text().replace('"0.1.0"', f'"{VERSION}"').replace("==0.1.0", f"=={VERSION}")
        )
        if package == "silodp-deploy":
            module = source / "src" / "silodp_deploy" / "__init__.py"
            module.write_text(
                module.read_text().replace(f"\nPROTOCOL = {PROTOCOL}\n", f"\nPROTOCOL = {protocol}\n")
            )
        done = subprocess.run(
            [sys.executable, "-c", _BUILD, str(folder)],
            cwd=source,
            capture_output=True,
            text=True,
            check=True,
        )
        with zipfile.ZipFile(folder / done.stdout.splitlines()[-1]) as wheel:
            wheel.extractall(folder / "installed")
    path = str(folder / "installed")
    # The extensions of the checkout stay; where both are found, the first one is imported.
    path = os.pathsep.join([path, *filter(None, [os.environ.get("PYTHONPATH")])])
    code = (
        "import silodp, silodp_deploy; print(silodp.__file__, silodp_deploy.__file__, silodp_deploy.PROTOCOL)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert [Path(one).is_relative_to(folder) for one in shown[:2]] == [True, True]
    assert shown[2] == str(protocol)
    return path


def stop(processes: Processes, name: str) -> None:
    """Stop a party as systemd does."""
    process = processes.running.pop(name)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def read_ledgers(processes: Processes) -> dict[Path, bytes]:
    """The ledgers of all silos."""
    return {path: path.read_bytes() for path in processes.folder.glob("silos/*/ledgers/*")}


def take_digests(home: Path) -> dict[Path, str]:
    """SHA-256 of what a party keeps."""
    files = [path for path in home.resolve().rglob("*") if path.is_file() and path.name not in _ALIVE]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_parties_upgrade_in_turn_to_a_version_with_the_same_protocol(tmp_path: Path) -> None:
    """Every party once while the run is in progress, then one of them back to the version before."""
    simulated = simulate(tmp_path, LONG)
    later = build(tmp_path / "later")
    with start_consortium(tmp_path, LONG) as processes:
        processes.start_all()
        first, *others = processes.names
        for done, name in enumerate((first, "server", *others), start=2):
            wait_for_round(processes, done)
            stop(processes, name)
            before = read_ledgers(processes)
            processes.start(name, PYTHONPATH=later)
        wait_for_round(processes, 8)
        stop(processes, first)
        processes.start(first)
        check_the_end(processes, simulated)
        assert VERSION in (processes.run / "report.html").read_text()
        # What older versions wrote, others have continued: no line was changed.
        after = read_ledgers(processes)
        assert before
        for path, content in before.items():
            assert after[path].startswith(content)
        for name in processes.names:
            shown = [*COMMAND, "audit-log", str(processes.home(name)), "--json"]
            done = subprocess.run(
                shown, env={**os.environ, "PYTHONPATH": later}, capture_output=True, check=False
            )
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("party", ["silo-2", "server"])
def test_a_party_with_another_protocol_is_refused_and_goes_on_with_its_old_version(
    party: str, tmp_path: Path
) -> None:
    """During a run. Nothing that the party keeps has changed by the try."""
    simulated = simulate(tmp_path, LONG)
    other = build(tmp_path / "other", PROTOCOL + 1)
    with start_consortium(tmp_path, LONG) as processes:
        processes.start_all()
        wait_for_round(processes, 3)
        stop(processes, party)
        ledger = processes.run / "checkpoint" / "ledger.jsonl"
        lines = ledger.read_text().splitlines() if party == "server" else []
        before = take_digests(processes.home(party))
        processes.start(party, PYTHONPATH=other)
        refused = "silo-2" if party == "silo-2" else "silo-1"
        wait_for(processes, lambda: "[deploy.version]" in processes.log(refused))
        wait_for(processes, lambda: "[deploy.version]" in processes.log("server"))
        stop(processes, party)
        after = take_digests(processes.home(party))
        if party == "server":  # each start is a line of its ledger, without a charge
            now = ledger.read_text().splitlines()
            assert now[: len(lines)] == lines
            assert [json.loads(line)["kind"] for line in now[len(lines) :]] == ["start"]
            after[ledger.resolve()] = before[ledger.resolve()]
        assert after == before
        processes.start(party)
        check_the_end(processes, simulated)
