"""A server that asks too much cannot fill a silo's disk: what policy.toml bounds, and what is kept then."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import numpy as np
import pytest

from silodp.accounting.ledger import Ledger
from silodp.config.resolve import load_config
from silodp.crypto.keys import Identity
from silodp.runtime.train import run
from silodp.wire.messages import Message
from silodp.wire.store import DirectoryStore, MemoryStore, RoundStore
from silodp.wire.transport import DeliveryFailure, Traffic, sign, verify
from silodp_deploy import silo as silo_module
from silodp_deploy.acceptance import write_policy
from silodp_deploy.consortium import Consortium
from silodp_deploy.history import find_plan
from silodp_deploy.lifetime import count_plan
from silodp_deploy.limits import SiloLimits
from silodp_deploy.policy import Policy, find_max_bytes
from silodp_deploy.server import RemoteParties
from silodp_deploy.setup import make_local
from silodp_deploy.silo import SiloService, load_identity, open_silo
from silodp_private.lattice import Lattice
from support.commands import CONFIG
from support.consortium import make_parties
from support.refusals import refused

MASKED = 'aggregator = "masked"\n' + CONFIG


class StopError(Exception):
    """The server of a test has asked enough."""


@dataclass
class Recorder:
    """A transport that keeps the first request, and stops the run."""

    requests: list[dict[str, bytes]] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None
    ) -> tuple[dict[str, bytes], dict[str, DeliveryFailure]]:
        self.requests.append(dict(requests))
        raise StopError


@dataclass
class Asked:
    """One silo, and a server that may ask it anything."""

    service: SiloService
    server: Identity
    hello: Message
    folder: Path

    def ask(self, session: int) -> bytes:
        return self.service.receive(
            sign(replace(self.hello, attempt=session), self.server, self.service.name)
        )

    def count_bytes(self) -> int:
        paths = [path for top in ("store", "ledgers") for path in (self.folder / top).iterdir()]
        return sum(path.stat().st_size for path in (*paths, self.folder / "audit.jsonl"))


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parties(tmp_path_factory.mktemp("limits"), MASKED)


@contextmanager
def ask_silo(parties: Path, tmp_path: Path, **changes: int) -> Iterator[Asked]:
    """A silo with these limits, whose folder is a fresh copy."""
    folder = tmp_path / "silo-1"
    shutil.copytree(parties / "silos" / "silo-1", folder)
    policy = Policy.load(folder / "policy.toml").model_copy(update=changes)
    (folder / "policy.toml").write_text(policy.to_toml())
    consortium = Consortium.load(parties / "public")
    server, recorder = load_identity(parties / "server", "server"), Recorder()
    with suppress(StopError):
        run(consortium.spec, RemoteParties(consortium, recorder, server, lambda: None), out=tmp_path / "run")
    with open_silo(folder, consortium) as service:
        setup = recorder.requests[0]["silo-1"]  # "hello" follows it
        service.receive(setup)
        hello = Message("hello", verify(setup, server.public, "the server", "silo-1").run)
        yield Asked(service, server, hello, folder)


def test_sessions_of_a_set_up_are_bounded(parties: Path, tmp_path: Path) -> None:
    with ask_silo(parties, tmp_path, max_sessions=4) as silo:
        for session in range(4):
            silo.ask(session)
        kept = silo.count_bytes()
        with refused("policy.limit") as caught:
            silo.ask(4)
        assert caught.value.field == "max_sessions"
        assert silo.count_bytes() == kept
        silo.ask(3)  # the last one may be asked again


def test_repeated_requests_are_bounded(parties: Path, tmp_path: Path) -> None:
    with ask_silo(parties, tmp_path, max_answers=10) as silo:
        for _ in range(9):  # "setup" was the first
            silo.ask(0)
        with refused("policy.limit") as caught:
            silo.ask(0)
        assert caught.value.field == "max_answers"
        assert len((silo.folder / "audit.jsonl").read_text().splitlines()) == 10
    with (
        open_silo(silo.folder, Consortium.load(parties / "public")) as again,
        refused("policy.limit"),
    ):  # counted by the audit log, so it holds after a restart
        again.receive(sign(silo.hello, silo.server, again.name))


def test_runs_that_were_begun_in_advance_are_not_charged_beyond_the_policy(tmp_path: Path) -> None:
    """A set-up costs nothing, so the number of runs that were charged is checked again before the first charge."""
    (tmp_path / "one.toml").write_text(CONFIG)
    settings = load_config(tmp_path / "one.toml")
    make_local(settings, settings.load_federation(), tmp_path / "plain", 1)
    home, consortium = tmp_path / "plain" / "silos" / "silo-1", Consortium.load(tmp_path / "plain" / "public")
    policy = Policy.load(home / "policy.toml")
    much = dict.fromkeys(policy.lifetime_epsilon, 50.0)
    policy = policy.model_copy(update={"most_runs": 2, "lifetime_epsilon": much})
    (home / "policy.toml").write_text(policy.to_toml())
    server = load_identity(tmp_path / "plain" / "server", "server")
    params = np.zeros(consortium.spec.size, np.float32)
    runs = [f"{number:032x}" for number in range(4)]
    with open_silo(home, consortium) as service:

        def ask(kind: str, run: str, round_: int = 0) -> bytes:
            arrays = {"params": params} if kind == "update" else {}
            return service.receive(sign(Message(kind, run, round_, arrays=arrays), server, service.name))

        for run in runs:
            ask("setup", run)
        for run in runs[:2]:
            ask("update", run)
        for run in runs[2:]:
            with refused("gate.run"):
                ask("update", run)
            assert not service.lifetime.runs[run].history
        assert service.lifetime.charged_runs == 2
        ask("update", runs[0], 1)  # what was begun within the policy goes on


def test_a_silo_keeps_the_plan_of_its_first_charge(tmp_path: Path) -> None:
    """With two plans in force, each at half of δ, a filter would hold at one and a half times its δ."""
    parties = make_parties(tmp_path, CONFIG)
    home, consortium = parties / "silos" / "silo-1", Consortium.load(parties / "public")
    server, params = load_identity(parties / "server", "server"), np.zeros(consortium.spec.size, np.float32)
    plan = count_plan(consortium.spec, "silo-1")
    with open_silo(home, consortium) as service:

        def ask(kind: str, run: str = "a" * 32, **arrays: np.ndarray) -> bytes:
            return service.receive(sign(Message(kind, run, 0, arrays=arrays), server, service.name))

        ask("setup")
        ask("setup", run="b" * 32)  # a run that is not charged decides nothing
        assert find_plan(service.lifetime.runs) is None
        ask("update", params=params)
        ask("update", run="b" * 32, params=params)
        assert find_plan(service.lifetime.runs) == plan
        assert service.lifetime.plan == plan
    with open_silo(home, consortium) as service:
        assert service.lifetime.plan == plan
    more = Consortium.load(parties / "public")
    vars(more)["spec"] = replace(more.spec, rounds=more.spec.rounds + 1)
    with open_silo(home, more) as service:
        assert service.lifetime.plan == plan


def test_two_requests_at_once_are_one_release_for_one_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A courier may call from several threads, as clients of message queues do, and a server may send two models."""
    parties = make_parties(tmp_path, CONFIG)
    home, consortium = parties / "silos" / "silo-1", Consortium.load(parties / "public")
    server, run_id = load_identity(parties / "server", "server"), "a" * 32
    meeting, ask_ledger = Barrier(2), Ledger.charged

    def charged(*arguments: Any) -> bool:
        found = ask_ledger(*arguments)
        with suppress(BrokenBarrierError):  # where only one comes this far at a time, nobody meets
            meeting.wait(1)
        return found

    with open_silo(home, consortium) as service:

        def ask(kind: str, **arrays: np.ndarray) -> bytes:
            return service.receive(sign(Message(kind, run_id, 0, arrays=arrays), server, service.name))

        ask("setup")
        monkeypatch.setattr(Ledger, "charged", charged)
        params = np.zeros(consortium.spec.size, np.float32)
        with ThreadPoolExecutor(2) as threads:
            both = [threads.submit(ask, "update", params=params + k) for k in range(2)]
        failed = [one for one in both if one.exception() is not None]
        assert len(failed) == 1
        with refused("gate.model", "gate.answered"):
            failed[0].result()
        assert len(service.lifetime.runs[run_id].history) == 1


def test_runs_that_are_begun_without_end_close_no_silo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set-up costs no ε, and each keeps files, one of them open: those that were never charged are forgotten."""
    monkeypatch.setattr(silo_module, "_MAX_UNCHARGED", 3)
    parties = make_parties(tmp_path, CONFIG)
    home, consortium = parties / "silos" / "silo-1", Consortium.load(parties / "public")
    policy = Policy.load(home / "policy.toml")
    much = dict.fromkeys(policy.lifetime_epsilon, 50.0)
    (home / "policy.toml").write_text(policy.model_copy(update={"lifetime_epsilon": much}).to_toml())
    server = load_identity(parties / "server", "server")
    arrays = {"params": np.zeros(consortium.spec.size, np.float32)}
    runs = [f"{number:032x}" for number in range(20)]

    def ask(service: SiloService, kind: str, run: str) -> None:
        message = Message(kind, run, arrays=arrays if kind == "update" else {})
        service.receive(sign(message, server, service.name))

    with open_silo(home, consortium) as service:
        ask(service, "setup", runs[0])
        ask(service, "update", runs[0])
        for run in runs[1:]:
            ask(service, "setup", run)
        assert set(service.lifetime.runs) == {runs[0], *runs[-3:]}
        assert {path.stem for path in (home / "ledgers").iterdir()} == {runs[0], *runs[-3:]}
        kept = [name for name in service._store.names() if name.partition("/")[0] in runs[1:-3]]
        assert kept == []
        with refused("gate.run"):
            ask(service, "setup", runs[1])
    with open_silo(home, consortium) as service:
        with refused("gate.run"):  # a silo that was started again knows it by the audit log
            ask(service, "setup", runs[1])
        ask(service, "update", runs[-1])
        ask(service, "setup", "f" * 32)
        ask(service, "update", "f" * 32)
        assert service.lifetime.charged_runs == 3
    (home / "ledgers" / f"{runs[0]}.jsonl").unlink()
    with refused("ledger.missing"), open_silo(home, consortium):
        pass


def test_a_silo_that_dies_while_it_forgets_a_run_is_not_closed(
    parties: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silo_module, "_MAX_UNCHARGED", 1)
    with ask_silo(parties, tmp_path) as silo:
        keys = len([name for name in silo.service._store.names() if name.startswith(silo.hello.run)])
        folder = silo.folder
        server, name = silo.server, silo.service.name
    consortium = Consortium.load(parties / "public")
    for died_after in range(keys + 1):
        copy = tmp_path / f"copy-{died_after}"
        shutil.copytree(folder, copy)
        with monkeypatch.context() as patch, open_silo(copy, consortium) as service:
            left = died_after

            def drop(self: DirectoryStore, key: str) -> None:
                nonlocal left
                if not left:
                    raise StopError
                left -= 1
                _DROP(self, key)

            patch.setattr(DirectoryStore, "drop", drop)
            with suppress(StopError):
                service.receive(sign(Message("setup", "f" * 32), server, name))
        with open_silo(copy, consortium) as service:
            service.receive(sign(Message("setup", "e" * 32), server, name))
            assert list(service.lifetime.runs) == ["e" * 32]


_DROP = DirectoryStore.drop


def test_without_a_seed_no_two_runs_have_the_same_noise(tmp_path: Path) -> None:
    """Two answers to one model under the same noise differ by what changed in the records, in clear."""
    parties = make_parties(tmp_path, CONFIG.replace("seed = 1\n", ""))
    consortium, server = Consortium.load(parties / "public"), load_identity(parties / "server", "server")
    home, params = parties / "silos" / "silo-1", np.zeros(consortium.spec.size, np.float32)
    policy = Policy.load(home / "policy.toml")
    much = dict.fromkeys(policy.lifetime_epsilon, 50.0)
    (home / "policy.toml").write_text(policy.model_copy(update={"lifetime_epsilon": much}).to_toml())
    shares = []
    with open_silo(home, consortium) as service:
        for run_id in ("a" * 32, "b" * 32):
            update = Message("update", run_id, arrays={"params": params})
            for message in (Message("setup", run_id), update):
                answer = service.receive(sign(message, server, service.name))
            key = consortium.sealed.silos[service.name]
            answered = verify(answer, key, service.name, "server", update.digest())
            shares.append(answered.arrays["share"])
    assert (shares[0] != shares[1]).all()


def test_joins_are_bounded_and_belong_to_no_run(parties: Path, tmp_path: Path) -> None:
    join = Message("join", "-", blobs={"nonce": bytes(32)})
    with ask_silo(parties, tmp_path, max_answers=10) as silo:

        def ask(request: Message) -> None:
            silo.service.receive(sign(request, silo.server, silo.service.name))

        with refused("gate.run"):
            ask(replace(join, run=silo.hello.run))
        for _ in range(10):
            ask(join)
        kept = silo.count_bytes()
        with refused("policy.limit"):
            ask(join)
        assert silo.count_bytes() == kept
        silo.ask(0)  # the run goes on


@pytest.mark.parametrize("run", ["", "run", "..", "f" * 31, "f" * 33, "F" * 32, "f" * 31 + "é"])
def test_a_run_has_an_id_that_names_a_file(run: str, parties: Path, tmp_path: Path) -> None:
    """The id becomes the name of a ledger, by which the ledgers of all runs are found again."""
    with ask_silo(parties, tmp_path) as silo:
        kept = silo.count_bytes()
        with refused("gate.run"):
            silo.service.receive(sign(Message("setup", run), silo.server, silo.service.name))
        assert silo.count_bytes() == kept
        silo.service.receive(sign(Message("setup", "f" * 32), silo.server, silo.service.name))


@pytest.mark.parametrize(
    "request_",
    [
        Message("hello", "f" * 32),
        Message("setup", "f" * 32 + "-evaluation"),
        Message("setup", "f" * 32, arrays={"weights": np.ones(20)}),
    ],
    ids=["out of order", "an evaluation", "malformed"],
)
def test_nothing_is_kept_of_a_run_that_does_not_begin_as_agreed(
    request_: Message, parties: Path, tmp_path: Path
) -> None:
    with ask_silo(parties, tmp_path) as silo:
        kept = silo.count_bytes()
        with refused("gate.order", "message.malformed"):
            silo.service.receive(sign(request_, silo.server, silo.service.name))
        assert silo.count_bytes() == kept
        assert len(silo.service.lifetime.runs) == 1


def test_sessions_of_an_evaluation_count_too(parties: Path, tmp_path: Path) -> None:
    with ask_silo(parties, tmp_path, max_sessions=4) as silo:
        limits, run = silo.service._limits, silo.hello.run
        for session in range(3):
            name = f"{run}-evaluation/"
            RoundStore(limits._store, name).run.put(f"answer/hello/0/{session}", b"answered")
        silo.ask(0)
        with refused("policy.limit"):
            silo.ask(1)
        with refused("policy.limit"):
            limits.check(replace(silo.hello, run=f"{run}-evaluation", attempt=3), run)
        limits.check(replace(silo.hello, run=f"{run}-evaluation", attempt=2), run)


@pytest.mark.parametrize("entry", ["setup", "memory/3/0"])
def test_the_number_of_records_does_not_show_in_what_is_refused(
    entry: str, parties: Path, tmp_path: Path
) -> None:
    with ask_silo(parties, tmp_path) as silo:
        limits, run = silo.service._limits, silo.hello.run
        counted = limits._count_bytes(run), limits._count_bytes()
        RoundStore(limits._store, f"{run}/").run.put(entry, bytes(10_000))
        assert (limits._count_bytes(run), limits._count_bytes()) == counted


@pytest.mark.parametrize("field", ["max_run_bytes", "max_disk_bytes"])
def test_the_disk_of_a_silo_is_bounded(field: str, parties: Path, tmp_path: Path) -> None:
    most = find_max_bytes(Consortium.load(parties / "public").spec) + 30_000
    with ask_silo(parties, tmp_path, **{field: most, "max_sessions": 10**6}) as silo:
        sessions = iter(range(10**4))
        with refused("policy.limit") as caught:
            while True:
                silo.ask(next(sessions))
        assert caught.value.field == field
        assert next(sessions) > 5
        assert silo.count_bytes() <= most


def test_a_run_that_began_long_ago_is_not_answered(parties: Path, tmp_path: Path) -> None:
    with ask_silo(parties, tmp_path, max_run_days=30) as silo:
        limits = silo.service._limits
        now = datetime.now(UTC)
        limits.check(silo.hello, silo.hello.run, now + timedelta(days=29))
        with refused("policy.limit") as caught:
            limits.check(silo.hello, silo.hello.run, now + timedelta(days=31))
        assert caught.value.field == "max_run_days"
        limits.check(replace(silo.hello, run="f" * 32), "f" * 32, now + timedelta(days=31))  # another run


def test_messages_of_a_run_are_bounded(parties: Path, tmp_path: Path) -> None:
    consortium = Consortium.load(parties / "public")
    spec, columns = consortium.spec, consortium.list_columns("silo-1")
    policy = Policy.load(parties / "silos" / "silo-1" / "policy.toml")
    digest = policy.accepted[0]
    policy.model_copy(update={"max_message_bytes": find_max_bytes(spec)}).check(digest, spec, columns)
    with refused("policy.not_allowed") as caught:
        policy.model_copy(update={"max_message_bytes": find_max_bytes(spec) - 1}).check(digest, spec, columns)
    assert caught.value.field == "max_message_bytes"


def test_counts_leave_a_silo_in_clear_only_where_its_operator_allows_it(parties: Path) -> None:
    consortium = Consortium.load(parties / "public")
    spec, columns = consortium.spec, consortium.list_columns("silo-1")
    policy = Policy.load(parties / "silos" / "silo-1" / "policy.toml").model_copy(update={"aggregators": []})
    digest = policy.accepted[0]
    by_records = replace(spec, method=replace(spec.method, weighting="records"))
    policy.check(digest, spec, columns)
    with refused("policy.not_allowed") as caught:
        policy.check(digest, by_records, columns)
    assert caught.value.field == "allow_counts"
    policy.model_copy(update={"allow_counts": True}).check(digest, by_records, columns)
    nobody_sees_them = Lattice(count_cap=3, attempts=20)
    policy.check(digest, replace(by_records, aggregator=nobody_sees_them), columns)


def test_an_operator_accepts_a_first_run_with_counts_in_clear(parties: Path, tmp_path: Path) -> None:
    home = tmp_path / "silo-1"
    shutil.copytree(parties / "silos" / "silo-1", home)
    (home / "policy.toml").unlink()
    consortium = Consortium.load(parties / "public")
    method = replace(consortium.stated_spec.method, weighting="records")
    vars(consortium)["stated_spec"] = replace(consortium.stated_spec, method=method)
    with refused("policy.not_allowed"):
        write_policy(home, consortium, "records.npz", allow_seed=True)
    assert not (home / "policy.toml").exists()
    write_policy(home, consortium, "records.npz", allow_counts=True, allow_seed=True)
    assert write_policy(home, consortium, "records.npz").allow_counts


def test_what_a_silo_keeps_is_for_its_operator_alone(parties: Path, tmp_path: Path) -> None:
    """Each file by itself: a folder may be copied, or restored from a backup, with other rights."""
    with ask_silo(parties, tmp_path) as silo:
        silo.ask(0)
        files = {path: path.stat().st_mode & 0o077 for path in silo.folder.rglob("*") if path.is_file()}
        assert {path.name for path, others in files.items() if others} == {"silo-1.request.json"}  # public
        assert {"records.npz", "policy.toml", "identity.key", "audit.jsonl"} <= {path.name for path in files}


def test_lines_that_a_crash_cut_off_are_counted_for_no_run(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    line = '{"run": "a", "charges": 0, "head": "0"}\n'
    audit.write_text(line + line + '{"ru\n[]\n')
    policy = Policy(accepted=[], data="t.csv", lifetime_epsilon={}, filter_bounds=[])
    limits = SiloLimits(tmp_path, "north", policy, MemoryStore(), 10)
    assert limits.answers == {"a": 2, "": 2}


def test_an_unknown_field_is_named_with_the_known_ones(parties: Path, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("most_run = 3\n" + (parties / "silos" / "silo-1" / "policy.toml").read_text())
    with refused("config.unknown_field") as caught:
        Policy.load(path)
    assert all(name in str(caught.value) for name in Policy.model_fields)
