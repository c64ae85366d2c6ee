"""Couriers of somebody's own between real processes: the model of the simulation, whatever a courier does."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from silodp.crypto.keys import Identity
from silodp.wire.messages import Message
from silodp.wire.transport import sign
from silodp_deploy.courier import ask_silo
from support.consortium import COMMAND, Processes, start_consortium
from support.deployed import AVG, MASKED, PLAIN, assert_same_run, config, count_charges, simulate, wait_for
from support.places import SOURCES

ROOT = Path(__file__).resolve().parents[4]
COURIER = ROOT / "examples" / "folder" / "folder_courier.py"


@contextmanager
def start_couriers(
    folder: Path,
    processes: Processes,
    program: str,
    *,
    by_hand: bool = False,
    parties: tuple[str, ...] | None = None,
) -> Iterator[None]:
    """Start a courier beside every party; it has the standard library and the package's source, and nothing else.

    Args:
        folder: of the sockets and of the files that are carried.
        processes: the parties.
        program: text of the courier.
        by_hand: whether each end has folders of its own; else they share one folder.
        parties: beside whom; None: all.
    """
    (folder / "courier.py").write_text(program)
    command = [sys.executable, "-S", str(folder / "courier.py")]

    def name_folders(party: str) -> tuple[str, str]:
        if by_hand:
            return str(folder / party / "out"), str(folder / party / "in")
        shared = folder / "letters" / ("" if party == "server" else party)
        return str(shared), str(shared)

    with (folder / "couriers.txt").open("wb") as log:
        running = [
            subprocess.Popen(
                [
                    *command,
                    "server" if party == "server" else "silo",
                    str(folder / f"{party}.sock"),
                    *name_folders(party),
                ],
                stderr=log,
                env={"PYTHONPATH": SOURCES},
            )
            for party in (("server", *processes.names) if parties is None else parties)
        ]
        try:
            yield
        finally:
            for process in running:
                process.kill()
                process.wait()


def start_parties(folder: Path, processes: Processes, *options: str) -> None:
    for name in processes.names:
        processes.start(name, "--socket", str(folder / f"{name}.sock"))
    processes.start("server", "--socket", str(folder / "server.sock"), *options)


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["masked", "plain"])
def test_the_courier_of_files_trains_the_model_of_the_simulation(name: str, tmp_path: Path) -> None:
    text = {"masked": MASKED, "plain": PLAIN}[name]
    simulated = simulate(tmp_path, text)
    with (
        start_consortium(tmp_path, text) as processes,
        start_couriers(tmp_path, processes, COURIER.read_text()),
    ):
        start_parties(tmp_path, processes)
        wait_for(processes, (tmp_path / "server.sock").exists)
        for socket in tmp_path.glob("*.sock"):
            assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        assert processes.wait_for_server() == 0, processes.log("server")
        assert_same_run(processes, simulated)
        for silo in processes.names:
            audit = processes.audit(silo)
            assert [one["round"] for one in audit if one["kind"] == "update"] == [0, 1, 2]
            assert audit[0]["kind"] == "join"
            # Two exchanges in a round at most: every one costs a courier's delay.
            kinds = [one["kind"] for one in audit if one["round"] == 1]
            assert kinds == {"plain": ["update"], "masked": ["update", "open"]}[name]


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["masked", "plain"])
def test_a_person_who_carries_files_trains_the_model_of_the_simulation(name: str, tmp_path: Path) -> None:
    """Both ways between separated folders: one half of each file first, which nobody may take, and some files twice."""
    text = {"masked": MASKED, "plain": PLAIN}[name].replace("rounds = 3", "rounds = 2")
    simulated = simulate(tmp_path, text)
    carried: list[str] = []

    def carry(source: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for path in [one for one in source.glob("*") if one.suffix in (".request", ".answer", ".refused")]:
            data = path.read_bytes()
            (target / path.name).write_bytes(data[: len(data) // 2])
            time.sleep(0.2)
            assert (target / path.name).exists()
            (target / path.name).write_bytes(data)
            path.unlink()
            carried.append(path.suffix)
            if len(carried) % 3 == 0:
                wait_for(processes, lambda path=path: not (target / path.name).exists())
                (target / path.name).write_bytes(data)  # the same file once more

    with (
        start_consortium(tmp_path, text) as processes,
        start_couriers(tmp_path, processes, COURIER.read_text(), by_hand=True),
    ):
        start_parties(tmp_path, processes, "--patience", "600", "--repeat", "600")
        end = time.monotonic() + 200
        while processes.running["server"].poll() is None and time.monotonic() < end:
            for silo in processes.names:
                carry(tmp_path / "server" / "out" / silo, tmp_path / silo / "in")
                carry(tmp_path / silo / "out", tmp_path / "server" / "in" / silo)
            time.sleep(0.1)
        assert processes.wait_for_server() == 0, processes.log("server")
        assert_same_run(processes, simulated)
        assert ".refused" not in carried
        # How often somebody has to go there and back (docs/couriers.md).
        assert carried.count(".request") == {"plain": 2 + 2, "masked": 5 + 2 * 2}[name] * len(processes.names)


BAD_COURIER = """
import silodp_deploy
import random, zlib

taken, asked = silodp_deploy.take_request, silodp_deploy.ask_silo
old = []

def take_request(path, wait):
    request = taken(path, wait)
    if request is None or random.random() < 0.3:
        return None  # lost
    return request

def ask_silo(path, body):
    if old and random.random() < 0.5:
        asked(path, random.choice(old))  # played back; nobody sees the answer
    old.append(body)
    reply = asked(path, body)
    repeated = asked(path, body)
    if random.random() < 0.3:
        raise OSError("lost on the way back")
    return random.choice([reply, repeated])

silodp_deploy.take_request, silodp_deploy.ask_silo = take_request, ask_silo
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_courier_that_loses_and_repeats_messages_changes_nothing(tmp_path: Path) -> None:
    simulated = simulate(tmp_path, MASKED)
    with (
        start_consortium(tmp_path, MASKED) as processes,
        start_couriers(tmp_path, processes, textwrap.dedent(BAD_COURIER) + COURIER.read_text()),
    ):
        start_parties(tmp_path, processes, "--repeat", "0.5")
        assert processes.wait_for_server(200) == 0, processes.log("server")
        assert_same_run(processes, simulated)
        assert "lost on the way back" in (tmp_path / "couriers.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_silo_answers_nobody_but_its_server_at_its_socket(tmp_path: Path) -> None:
    with start_consortium(tmp_path, PLAIN) as processes:
        (silo, *_) = processes.names
        processes.start(silo, "--socket", str(tmp_path / "silo.sock"))
        wait_for(processes, (tmp_path / "silo.sock").exists)
        request = Message("join", "-", blobs={"nonce": bytes(32)})
        for body in (b"", b"x" * 1000, sign(request, Identity.fresh("server"), silo)):
            reply = ask_silo(tmp_path / "silo.sock", body)
            assert (reply.body, reply.refused) == (b"", "message.signature")
        assert not (processes.home(silo) / "audit.jsonl").exists()


SLOW = config(AVG, silos=2).replace("rounds = 3", "rounds = 2") + "epochs = 80\n"
"""A silo computes for seconds, so that a job can be killed meanwhile."""


def start_job(folder: Path, processes: Processes, silo: str) -> subprocess.Popen[bytes]:
    """Start what a scheduler starts at a silo, in a process group as it kills them."""
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    for name, command in {"silodp": shlex.join(COMMAND), "python": sys.executable}.items():
        (binaries / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (binaries / name).chmod(0o700)
    arguments = [processes.public, processes.home(silo), folder / silo / "out", folder / silo / "in"]
    environment = {"PATH": f"{binaries}:{os.environ['PATH']}", "COURIER": str(COURIER), "TMPDIR": str(folder)}
    with (processes.home(silo) / "log.txt").open("ab") as log:
        return subprocess.Popen(
            ["sh", str(COURIER.with_name("job.sh")), *map(str, arguments)],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            start_new_session=True,
        )


def kill_while_it_computes(processes: Processes, silo: str, job: subprocess.Popen[bytes]) -> None:
    """Kill a job when the silo's ledger is charged and its answer is not in the audit log yet."""

    def count_lines(pattern: str, kind: str) -> int:
        found = [path.read_text() for path in processes.home(silo).glob(pattern)]
        return sum(text.count(f'"kind": "{kind}"') + text.count(f'"kind":"{kind}"') for text in found)

    answered = count_lines("audit.jsonl", "update")
    wait_for(processes, lambda: count_lines("ledgers/*.jsonl", "charge") > 0)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait(30)
    assert count_lines("audit.jsonl", "update") == answered
    assert list((processes.folder.parent / silo / "in").glob("*.request"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_silos_that_are_jobs_train_the_model_of_the_simulation_though_one_is_killed(tmp_path: Path) -> None:
    """Between two jobs no process of a silo runs. The next job answers the killed one's request without a charge."""
    simulated = simulate(tmp_path, SLOW)
    killed = False
    with (
        start_consortium(tmp_path, SLOW) as processes,
        start_couriers(tmp_path, processes, COURIER.read_text(), by_hand=True, parties=("server",)),
    ):
        processes.start(
            "server", "--socket", str(tmp_path / "server.sock"), "--patience", "300", "--repeat", "300"
        )
        end = time.monotonic() + 250
        while processes.running["server"].poll() is None and time.monotonic() < end:
            for silo in processes.names:
                for source, target in (
                    (tmp_path / "server" / "out" / silo, tmp_path / silo / "in"),
                    (tmp_path / silo / "out", tmp_path / "server" / "in" / silo),
                ):
                    target.mkdir(parents=True, exist_ok=True)
                    for path in [*source.glob("*.request"), *source.glob("*.answer")]:
                        path.rename(target / path.name)
                job = start_job(tmp_path, processes, silo)
                has_update = (
                    len(processes.audit(silo)) if (processes.home(silo) / "audit.jsonl").exists() else 0
                )
                if (
                    not killed
                    and silo == "silo-1"
                    and has_update >= 2
                    and list((tmp_path / silo / "in").iterdir())
                ):
                    kill_while_it_computes(processes, silo, job)
                    killed = True
                else:
                    assert job.wait(120) == 0, processes.log(silo)
            time.sleep(0.2)
        assert processes.wait_for_server() == 0, processes.log("server")
        assert killed
        assert_same_run(processes, simulated)
        for silo in processes.names:
            assert count_charges(processes, silo) == 2
            assert [one["round"] for one in processes.audit(silo) if one["kind"] == "update"] == [0, 1]
