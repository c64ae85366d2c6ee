"""Parts of a silo's folder are restored from a backup: the silo sees it from the parts that were not, and refuses.

Without the comparison a silo whose ledgers were set back would open, state an ε that is too small, and answer a new
run beyond the limit of its policy.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from silodp.aggregators.series import name_series
from silodp.errors import SilodpError
from silodp.methods.base import SeriesMethod
from silodp.wire.messages import Message
from silodp.wire.transport import sign
from silodp_deploy import silo as silo_module
from silodp_deploy.consortium import Consortium
from silodp_deploy.history import end_runs
from silodp_deploy.lifetime import read_spent
from silodp_deploy.limits import read_audit
from silodp_deploy.silo import SiloService, load_identity, open_silo
from support.consortium import make_parties
from support.refusals import refused

CONFIG = """
name = "small"
rounds = 3
[data]
source = "embedded"
users = 20
silos = 3
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.01
[evaluation]
across = "sums"
every = 1
noise_multiplier = 1.0
"""
RUN, OTHER = "a" * 32, "b" * 32


class KilledError(BaseException):
    """The process dies here: nothing may catch it."""


@dataclass(frozen=True)
class Silo:
    """The folder of one silo, and its server, which may ask it anything."""

    folder: Path
    public: Path
    server: Path

    def open(self):  # type: ignore[no-untyped-def]
        return open_silo(self.folder, Consortium.load(self.public))

    def ask(self, service: SiloService, request: Message) -> bytes:
        return service.receive(sign(request, load_identity(self.server, "server"), service.name))

    def copy(self, to: Path, *parts: str) -> None:
        for part in parts:
            shutil.copytree(self.folder / part, to / part, dirs_exist_ok=True)

    def restore(self, copy: Path, *parts: str) -> None:
        for part in parts:
            shutil.rmtree(self.folder / part)
            shutil.copytree(copy / part, self.folder / part)


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parties(tmp_path_factory.mktemp("set_back"), CONFIG)


@pytest.fixture
def silo(parties: Path, tmp_path: Path) -> Silo:
    shutil.copytree(parties / "silos" / "silo-1", tmp_path / "silo-1")
    return Silo(tmp_path / "silo-1", parties / "public", parties / "server")


def list_requests(silo: Silo, run: str = RUN) -> list[Message]:
    """The set-up of a run and its evaluation, and three rounds of training with an evaluation after each."""
    params = np.zeros(Consortium.load(silo.public).spec.size, np.float32)
    found = [Message("setup", run), Message("setup", name_series(run, "evaluation"))]
    for round_ in range(3):
        state = {f"state.{SeriesMethod.ROUNDS}": np.array([round_ + 1], np.int64)}
        found += [
            Message("update", run, round_, arrays={"params": params}),
            Message("update", name_series(run, "evaluation"), round_, arrays={"params": params, **state}),
        ]
    return found


def ask_all(silo: Silo, requests: list[Message]) -> None:
    with silo.open() as service:
        for request in requests:
            silo.ask(service, request)


def test_a_silo_whose_ledgers_were_set_back_answers_nothing(silo: Silo, tmp_path: Path) -> None:
    """The store alone shows it: the audit log is gone. A new run would be charged to what looks unspent."""
    requests = [request for request in list_requests(silo) if request.run == RUN]
    with silo.open() as service:
        for request in requests[:2]:
            silo.ask(service, request)
        silo.copy(tmp_path / "old", "ledgers")
        for request in requests[2:]:
            silo.ask(service, request)
    silo.copy(tmp_path / "new", "ledgers")
    silo.restore(tmp_path / "old", "ledgers")
    (silo.folder / "audit.jsonl").unlink()
    with refused("gate.rollback_detected"):
        ask_all(silo, list_requests(silo, OTHER))
    silo.restore(tmp_path / "new", "ledgers")
    ask_all(silo, list_requests(silo, OTHER)[:1])


def test_an_evaluation_that_the_ledger_lost_is_noticed(silo: Silo, tmp_path: Path) -> None:
    requests = list_requests(silo)
    with silo.open() as service:
        for request in requests[:3]:
            silo.ask(service, request)
        silo.copy(tmp_path / "old", "ledgers")
        silo.ask(service, requests[3])
    silo.restore(tmp_path / "old", "ledgers")
    (silo.folder / "audit.jsonl").unlink()
    with refused("gate.rollback_detected"):
        ask_all(silo, [])


def test_the_audit_log_shows_that_store_and_ledgers_were_set_back(silo: Silo, tmp_path: Path) -> None:
    """Without it the server would get each round again with other noise, charged once."""
    requests = list_requests(silo)
    ask_all(silo, requests[:3])
    silo.copy(tmp_path / "old", "store", "ledgers")
    ask_all(silo, requests)
    silo.restore(tmp_path / "old", "store", "ledgers")
    with refused("gate.rollback_detected"):
        ask_all(silo, requests[3:])
    for part in ("store", "ledgers"):  # as before the run: all that knows of it is the log
        for path in (silo.folder / part).iterdir():
            path.unlink()
    with refused("ledger.missing"):
        ask_all(silo, requests)


def test_an_audit_log_that_is_older_or_gone_locks_no_silo(silo: Silo) -> None:
    requests = list_requests(silo)
    ask_all(silo, requests[:4])
    log = silo.folder / "audit.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    ask_all(silo, requests[4:6])
    log.unlink()
    ask_all(silo, requests[6:])


def test_what_a_silo_has_spent_is_not_read_off_an_old_copy(silo: Silo, tmp_path: Path) -> None:
    """`silodp audit-log` would print an ε that is too small."""
    requests = list_requests(silo)
    ask_all(silo, requests[:3])
    silo.copy(tmp_path / "old", "ledgers")
    ask_all(silo, requests[3:])
    entries, _ = read_audit(silo.folder / "audit.jsonl")
    spent = read_spent(silo.folder, entries)
    assert spent is not None
    assert spent["epsilon"]["server"] > 0
    silo.restore(tmp_path / "old", "ledgers")
    with refused("gate.rollback_detected"):
        read_spent(silo.folder, entries)


def test_runs_whose_store_is_lost_are_ended_and_stay_counted(silo: Silo, tmp_path: Path) -> None:
    """Else a silo with a damaged file of its store would stay closed, or its old store would count as the newest."""
    requests = list_requests(silo)
    ask_all(silo, requests[:3])
    silo.copy(tmp_path / "old", "store")
    ask_all(silo, requests)
    silo.restore(tmp_path / "old", "store")
    with refused("gate.rollback_detected"):
        ask_all(silo, [])
    next((silo.folder / "store").iterdir()).write_bytes(b"damaged")
    assert end_runs(silo.folder) == [RUN]
    assert end_runs(silo.folder) == []
    for request in requests:
        with refused("gate.run"):
            ask_all(silo, [request])
    ask_all(silo, list_requests(silo, OTHER)[:2])
    with silo.open() as service:
        assert set(service.lifetime.runs) == {RUN, OTHER}
        assert len(service.lifetime.runs[RUN].history) == 6
    shutil.rmtree(silo.folder / "ledgers")
    with refused("ledger.missing"):
        end_runs(silo.folder)


# --- a kill is no backup ------------------------------------------------------------------------------------------


@contextmanager
def die_at(operation: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Die when the n-th fsync, write, rename or deletion begins."""
    left = [operation]

    def count(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise KilledError
            return function(*arguments, **named)

        return call

    with monkeypatch.context() as patched:
        for place, name in ((os, "fsync"), (os, "write"), (Path, "replace"), (Path, "unlink")):
            patched.setattr(place, name, count(getattr(place, name)))
        yield left


@pytest.mark.slow
def test_a_silo_that_died_at_any_write_goes_on(
    silo: Silo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ledger, answer, state and log are written one after the other: no order of them looks like a backup."""
    requests, operation, died = list_requests(silo)[:6], 0, True
    shutil.copytree(silo.folder, tmp_path / "fresh")
    while died:
        operation += 1
        shutil.rmtree(silo.folder)
        shutil.copytree(tmp_path / "fresh", silo.folder)
        done, died = 0, False
        try:
            with die_at(operation, monkeypatch), silo.open() as service:
                for request in requests:
                    silo.ask(service, request)
                    done += 1
        except KilledError:
            died = True
        ask_all(silo, requests[done:])
        lines = [json.loads(line) for line in (silo.folder / "audit.jsonl").read_text().splitlines()]
        answers = {(line["about"], line["kind"], line["round"]): line for line in lines}
        assert len(answers) == len(requests)
        assert all(answers[key]["sha256"] == line["sha256"] for line in lines for key in [
            (line["about"], line["kind"], line["round"])
        ])  # fmt: skip
        assert lines[-1]["charges"] == 4
    assert operation > 60


@pytest.mark.slow
def test_a_silo_that_died_while_it_forgot_a_run_sends_nothing_of_it_without_a_charge(
    silo: Silo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server begins a run only to have another forgotten, kills the silo, and asks the forgotten one for a sum."""
    monkeypatch.setattr(silo_module, "_MAX_UNCHARGED", 1)
    ask_all(silo, list_requests(silo)[:2])
    shutil.copytree(silo.folder, tmp_path / "begun")
    operation, died, forgotten, went_on = 0, True, 0, 0
    while died:
        operation += 1
        shutil.rmtree(silo.folder)
        shutil.copytree(tmp_path / "begun", silo.folder)
        died = False
        try:
            with silo.open() as service, die_at(operation, monkeypatch):
                silo.ask(service, list_requests(silo, OTHER)[0])
        except KilledError:
            died = True
        with silo.open() as service:
            answered = 0
            for request in (*list_requests(silo)[:4], *list_requests(silo)[2:4]):
                with suppress(SilodpError):
                    silo.ask(service, request)
                    answered += request.kind == "update"
            ledger = service.lifetime.runs.get(RUN)
            charges = 0 if ledger is None else len(ledger.history)
            sums = answered // 2  # each was sent twice
            # Of what was dropped in part a charge may come to nothing; no sum leaves without one.
            assert charges >= sums
            forgotten += ledger is None
            went_on += sums == 2
        lines = [json.loads(line) for line in (silo.folder / "audit.jsonl").read_text().splitlines()]
        sent = {line["sha256"] for line in lines if line["run"] == RUN and line["kind"] == "update"}
        assert len(sent) == sums  # a repeated one with the same noise
        if sums:
            (silo.folder / "ledgers" / f"{RUN}.jsonl").unlink()
            for path in (silo.folder / "store").glob(f"{RUN}*"):
                path.unlink()
            with refused("ledger.missing"):
                ask_all(silo, [])
    assert forgotten
    assert went_on
