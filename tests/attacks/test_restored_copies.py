"""Copies of a party's files are restored, one group or several, from every earlier moment of a run.

A silo keeps a store, a ledger and (in a deployment) an audit log; a server a checkpoint, a store and a ledger; a cohort
one file. Before one file, the ledger, decided which copy is the newest, a silo with an old store answered the sampling
of a round once more with other choices, and every primary silo was read; and a directory that was copied during a run
was continued under the same entry of its cohort. Here a server goes on honestly, and another one asks the same again
with other content. Each request is refused, or answered with the same bytes, or charged once more. Where everything
that a party has is of one earlier moment, nothing can notice it: docs/protocols.md, section 6, says what happens then.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import silodp as package
from silodp.accounting.ledger import Ledger
from silodp.aggregators import Plain
from silodp.aggregators.masked import Masked
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.runtime.gate import State
from silodp.runtime.server import Server
from silodp.runtime.silo import Silo
from silodp.wire.messages import Message
from silodp.wire.store import MemoryStore, RoundStore
from silodp.wire.transport import SERVER, InProcess, SignedChannel
from silodp_deploy.consortium import Consortium
from silodp_deploy.silo import load_identity, open_silo
from support.consortium import make_parties
from support.masked import AVG
from support.oracles import logistic_task, small_federation
from support.private import HALF, HIDDEN, LATTICE, PRIMARY, RECORDS, SELECT, Parties
from support.refusals import refused
from support.stores import Backup, copy_entries, set_back

RUNS = {
    "plain": (Plain(), AVG),
    "masked": (Masked(), AVG),
    "select": (SELECT, replace(PRIMARY, user_sampling=0.5)),
    "lattice": (LATTICE, replace(RECORDS, user_sampling=0.5)),
    "hidden sample": (HIDDEN["lattice"], HALF),
}
ROUNDS = 2
T = TypeVar("T")
REFUSALS = {
    "gate.rollback_detected",
    "gate.answered",
    "gate.past",
    "gate.order",
    "gate.round_left_out",
    "gate.charged",
}


# --- a silo: its store and its ledger ---


@dataclass
class Moment:
    """All that there is when silo 0 gets a message."""

    request: Message
    silos: dict[str, Backup]


class Watched(Parties):
    """A run of two rounds, with copies of all silos before every message of a round to silo 0, and at the end."""

    def __init__(self, name: str) -> None:
        self.moments: list[Moment] = []
        self.sent: dict[str, tuple[str, bytes]] = {}
        super().__init__(*RUNS[name], rounds=10)
        answer = Silo.answer

        def watched(silo: Silo, request: Message) -> Message:
            if silo.name == "silo0":
                self.moments.append(Moment(request, self.look()))
            answered = answer(silo, request)
            if silo.name == "silo0":
                self.sent[request.key] = request.digest(), answered.encode()
            return answered

        self.starts: list[tuple[dict[str, bytes], Ledger]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Silo, "answer", watched)
            for round_ in range(ROUNDS):
                store = self.server.store.run._store
                self.starts.append((copy_entries(store), deepcopy(self.server.ledger)))
                self.run_round(round_)
        self.end = self.look()

    def look(self) -> dict[str, Backup]:
        return {name: self.backup(name) for name in self.names}

    def restore(self, name: str, copy: Backup) -> Silo:
        self.silos[name] = self.transport._silos[name] = silo = self.restored(name, copy)
        return silo

    def ask_again(self, moment: Moment, parts: tuple[str, ...]) -> list[str]:
        """What silo 0 answers that it should not, and the codes of its refusals, with these parts set back."""
        older, newest = moment.silos["silo0"], self.end["silo0"]
        mixed = Backup(
            (older if "store" in parts else newest).entries, (older if "ledger" in parts else newest).ledger
        )
        found: list[str] = []
        for server in (self.repeat, self.lie):
            try:
                silo = self.restore("silo0", mixed)
            except SilodpError as error:
                return [error.code]
            for request, answer in server(silo, moment):
                found += [answer] if isinstance(answer, str) else self.judge(silo, request, answer)
        return found

    def repeat(self, silo: Silo, moment: Moment) -> Iterator[tuple[Message, Message | str]]:
        """The server goes on honestly: it repeats what it asked."""
        for asked in self.moments:
            try:
                yield asked.request, silo.answer(asked.request)
            except SilodpError as error:
                yield asked.request, error.code

    def lie(self, silo: Silo, moment: Moment) -> Iterator[tuple[Message, Message | str]]:
        """The server draws and chooses anew, and asks about another model under the same keys."""
        for name in self.names[1:]:  # they work together with the server
            self.restore(name, moment.silos[name])
        for round_ in range(moment.request.round, ROUNDS):
            entries, spent = self.starts[round_]
            store, begun = MemoryStore(), (len(self.transport.asked), len(self.transport.answered))
            set_back(store, entries)
            randomness = Randomness.secret()
            server = Server(self.spec, self.transport, deepcopy(spent), RoundStore(store), randomness)
            with suppress(SilodpError):
                server.run_round(round_, self.params + 0.5)
            requests = {m.key: m for name, m in self.transport.asked[begun[0] :] if name == "silo0"}
            for name, answer in self.transport.answered[begun[1] :]:
                if name == "silo0":
                    yield requests[answer.key], answer

    def judge(self, silo: Silo, request: Message, answer: Message) -> Iterator[str]:
        digest, content = self.sent.get(request.key, ("", b""))
        if digest == request.digest() and content != answer.encode():
            yield f"other bytes for {request.key}"
        if digest and digest != request.digest():
            yield f"another request under {request.key}"
        charged = {charge.place for charge in silo.gate.ledger.history}
        lost = {charge.place for charge in self.end["silo0"].ledger.history} - charged
        if not digest and request.kind == "update" and lost:
            yield f"a release {request.key} after charges were lost"


def list_wrong(found: list[str]) -> list[str]:
    return [one for one in found if " " in one]


@pytest.mark.parametrize("name", [*RUNS])
def test_a_silo_of_which_a_part_was_set_back_answers_nothing_twice(name: str) -> None:
    """At the opening: neither an old store beside the newest ledger, nor the reverse, comes to an answer."""
    parties = Watched(name)
    assert len(parties.moments) >= 2 * ROUNDS - (name == "plain") * ROUNDS
    noticed = 0
    for moment, parts in product(parties.moments, ("store", "ledger")):
        found = parties.ask_again(moment, (parts,))
        assert list_wrong(found) == [], (moment.request, parts)
        noticed += found == ["gate.rollback_detected"]
    # Only what was set back by a single line can be mended: the store has the line that the ledger lacks.
    assert noticed >= 2 * len(parties.moments) - 2


@pytest.mark.parametrize("name", [*RUNS])
def test_a_silo_of_which_everything_was_set_back_answers_again(name: str) -> None:
    """The limit of docs/protocols.md, section 6: nothing in its folder is of a later moment."""
    parties = Watched(name)
    wrong = list_wrong(parties.ask_again(parties.moments[0], ("store", "ledger")))
    kind = "sample" if name in ("select", "lattice", "hidden sample") else "update"
    assert f"another request under run/{kind}/0/0" in wrong


def test_an_answer_of_which_only_the_line_is_missing_is_listed_as_sent() -> None:
    """Whether it was sent is not known: so it is repeated, and nothing else is answered in its place."""
    parties = Watched("masked")
    end = parties.end["silo0"]
    opened = next(one for one in reversed(parties.moments) if one.request.kind == "open")
    silo = parties.restore("silo0", Backup(end.entries, opened.silos["silo0"].ledger))
    assert silo.gate.state == State.from_dict(end.ledger.answers[-1].state)
    assert silo.gate.ledger.head == end.ledger.head


# --- a deployed silo: its store, its ledgers and its audit log ---

GROUPS = ("store", "ledgers", "audit.jsonl")
CONFIG = """
name = "small"
rounds = 3
{aggregator}
[data]
source = "embedded"
users = 20
silos = 3
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
{method}
[method.local]
learning_rate = 0.01
"""
DEPLOYED = {
    "plain": CONFIG.format(aggregator="", method=""),
    "masked": CONFIG.format(aggregator='aggregator = "masked"', method=""),
    "select": CONFIG.format(
        aggregator='aggregator = "select"', method='weighting = "primary_silo"\nuser_sampling = 0.5'
    ),
}


def put_back(folder: Path, copy: Path, groups: Iterable[str]) -> None:
    for group in groups:
        if (folder / group).is_dir():
            shutil.rmtree(folder / group)
        (folder / group).unlink(missing_ok=True)
        if (copy / group).is_dir():
            shutil.copytree(copy / group, folder / group)
        elif (copy / group).exists():
            shutil.copy2(copy / group, folder / group)


def choose(items: Sequence[T], most: int) -> list[T]:
    """Some of them, the same ones every time."""
    return random.Random(1).sample(items, min(most, len(items)))


@pytest.mark.parametrize(
    ("name", "most"),
    [("plain", 4), *(pytest.param(name, 60, marks=pytest.mark.slow) for name in DEPLOYED)],
    ids=["plain, few", *DEPLOYED],
)
def test_a_deployed_silo_of_which_a_part_was_set_back_does_not_start(
    name: str, most: int, tmp_path: Path
) -> None:
    """An older audit log alone does no harm: what it knows of is in the ledgers."""
    parties = make_parties(tmp_path, DEPLOYED[name])
    consortium = Consortium.load(parties / "public")
    names, home = consortium.spec.names, parties / "silos" / consortium.spec.names[0]
    spec, moments = replace(consortium.spec, run="a" * 32), []
    server = load_identity(parties / "server", SERVER)
    with ExitStack() as opened:
        services = {
            silo: opened.enter_context(
                open_silo(parties / "silos" / silo, Consortium.load(parties / "public"))
            )
            for silo in names
        }
        receive = services[names[0]].receive

        def watched(data: bytes) -> bytes:
            copy = tmp_path / "moments" / str(len(moments))
            copy.mkdir(parents=True)
            put_back(copy, home, GROUPS)
            moments.append((copy, data))
            return receive(data)

        services[names[0]].receive = watched  # type: ignore[method-assign]
        channel = SignedChannel(InProcess(services), server, consortium.sealed.silos)
        ledger = Ledger(None, 1e-5, "rdp", run=spec.run)
        driver = Server(spec, channel, ledger, RoundStore(MemoryStore()), Randomness.secret())
        driver.set_up()
        for round_ in range(2):
            driver.run_round(round_, torch.zeros(spec.size))
    end = tmp_path / "end"
    end.mkdir()
    put_back(end, home, GROUPS)
    subsets = chain.from_iterable(combinations(GROUPS, size) for size in (1, 2))
    for (copy, data), groups in choose([*product(moments[1:], subsets)], most):
        put_back(home, end, GROUPS)
        put_back(home, copy, groups)
        told = (copy.name, groups)
        code, head = "", read_head(end)
        try:
            with open_silo(home, consortium) as service:
                # What it had answered is the same; only a last line can be written again, from the store.
                assert "store" not in groups, told
                assert service.lifetime.runs[spec.run].head == head, told
                with suppress(SilodpError):
                    service.receive(data)
                assert service.lifetime.runs[spec.run].head == head, told
        except SilodpError as error:
            code = error.code
        assert code in (
            ("",) if groups == ("audit.jsonl",) else ("", "gate.rollback_detected", "ledger.missing")
        ), told


def read_head(folder: Path) -> str:
    (path,) = (folder / "ledgers").glob("*.jsonl")
    return str(json.loads(path.read_bytes().splitlines()[-1])["hash"])


# --- the directory of a run ---

PARTS = {
    "checkpoint": ("checkpoint/state.safetensors", "metrics.jsonl"),
    "store": ("checkpoint/server",),
    "ledger": ("checkpoint/ledger.jsonl",),
    "silos": ("checkpoint/silos", "checkpoint/silo_ledgers"),
}


def train(out: Path, name: str, rounds: int, **more: Any) -> package.Result:
    aggregator, method = {**RUNS, "select unsampled": (SELECT, PRIMARY)}[name]
    return package.train(
        small_federation(users=8),
        logistic_task(),
        method,
        rounds=rounds,
        aggregator=aggregator,
        out=out,
        **more,
    )


def read_lines(out: Path) -> list[dict[str, Any]]:
    path = out / "checkpoint" / "ledger.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def list_released(lines: list[dict[str, Any]]) -> list[tuple[int, str, int]]:
    """Of every completed round: its number, its result, and how often it was charged before."""
    found, charges = [], Counter[int]()
    for line in lines:
        if line.get("kind") == "charge":
            charges[line["round"] + 1] += 1
        if line.get("kind") == "completed":
            found.append((line["round"], line["checkpoint"], charges[line["round"]]))
    return found


def stop(done: package.RoundResult) -> None:
    if done.round == ROUNDS:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "most"),
    [("plain", 5), ("select", 5), *(pytest.param(name, 40, marks=pytest.mark.slow) for name in RUNS)],
    ids=["plain, few", "select, few", *RUNS],
)
def test_a_run_of_which_a_part_was_set_back_shows_no_second_result_for_one_charge(
    name: str, most: int, tmp_path: Path
) -> None:
    """Whether silos or server were set back, or both: what is shown again is the same, or was charged once more."""
    out, moments, answer = tmp_path / "run", [], Silo.answer

    def watched(silo: Silo, request: Message) -> Message:
        if silo.name == "silo0" and request.kind != "setup":
            copy = tmp_path / "moments" / str(len(moments))
            shutil.copytree(out, copy)
            moments.append(copy)
        return answer(silo, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Silo, "answer", watched)
        with pytest.raises(KeyboardInterrupt):
            train(out, name, ROUNDS + 1, callbacks=[stop])
    end = tmp_path / "end"
    shutil.copytree(out, end)
    known = {number: (result, charges) for number, result, charges in list_released(read_lines(end))}
    subsets = chain.from_iterable(combinations(PARTS, size) for size in (1, 2, 3))
    noticed = 0
    for copy, parts in choose([*product(moments, subsets)], most):
        shutil.rmtree(out)
        shutil.copytree(end, out)
        put_back(out, copy, chain.from_iterable(PARTS[part] for part in parts))
        told = (copy.name, parts)
        begun = len(read_lines(out))
        code = ""
        try:
            train(out, name, ROUNDS + 1, resume=True)
        except SilodpError as error:
            code = error.code
        assert code in REFUSALS | {"", "checkpoint.mismatch", "ledger.missing", "session.missing"}, told
        noticed += code != ""
        released = list_released(read_lines(out))
        for line in read_lines(out)[begun:]:
            if line["kind"] == "completed" and line["round"] <= ROUNDS:
                result, charges = known[line["round"]]
                again = next(n for _, found, n in released if found == line["checkpoint"])
                assert line["checkpoint"] == result or again > charges, told
    assert noticed


def test_a_run_of_which_all_but_the_ledger_was_set_back_shows_no_other_result(tmp_path: Path) -> None:
    """As before a round that is completed: new choices would come to other noise, under the charge of the first."""
    out, copies, run_round = tmp_path / "run", [], Server.run_round

    def watched(server: Server, round_: int, *more: Any) -> Any:
        shutil.copytree(out, tmp_path / "moments" / str(round_))
        copies.append(tmp_path / "moments" / str(round_))
        return run_round(server, round_, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "run_round", watched)
        with pytest.raises(KeyboardInterrupt):
            train(out, "select", ROUNDS + 1, callbacks=[stop])
    put_back(out, copies[ROUNDS - 1], chain.from_iterable(PARTS[part] for part in PARTS if part != "ledger"))
    asked, shown, answer = [], [], Silo.answer

    def listen(silo: Silo, request: Message) -> Message:
        asked.append(request)
        return answer(silo, request)

    def resume() -> None:
        with refused("checkpoint.mismatch"):
            train(out, "select", ROUNDS + 1, resume=True, callbacks=[lambda done: shown.append(done.round)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Silo, "answer", listen)
        resume()
        assert asked == []
        patch.setattr(Server, "check_draws", lambda self, progress: None)  # the defense behind it
        resume()
    assert asked
    assert ROUNDS not in shown


def test_a_ledger_of_another_continuation_is_refused(tmp_path: Path) -> None:
    """Run, rounds, draws and the number of charges are the same."""
    one, other = tmp_path / "one", tmp_path / "other"
    train(one, "select unsampled", 1)
    shutil.copytree(one, other)
    for out in (one, other):
        train(out, "select unsampled", 2, resume=True)
    put_back(one, other, PARTS["ledger"])
    with refused("checkpoint.mismatch"):
        train(one, "select unsampled", 3, resume=True)


def test_an_evaluation_that_the_ledger_lost_is_not_shown_again(tmp_path: Path) -> None:
    """The server's store has its result, so it would be shown without a charge."""
    out, copy = tmp_path / "run", tmp_path / "copy"
    run_round, complete = Server.run_round, Ledger.record_completed
    settings = {
        "rounds": 3,
        "evaluation": {"across": "sums", "noise_multiplier": 5.0, "every": 1},
        "out": out,
    }
    federation = small_federation(held_out=20)

    def watched(server: Server, round_: int, *more: Any) -> Any:
        if round_ == 1 and not copy.exists():
            shutil.copytree(out, copy)
        return run_round(server, round_, *more)

    def dying(ledger: Ledger, rounds: int, *more: Any) -> None:
        if rounds == 2:
            raise KeyboardInterrupt
        complete(ledger, rounds, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "run_round", watched)
        patch.setattr(Ledger, "record_completed", dying)
        with pytest.raises(KeyboardInterrupt):
            package.train(federation, logistic_task(), AVG, **settings)
    put_back(out, copy, PARTS["ledger"])
    with refused("checkpoint.mismatch"):
        package.train(federation, logistic_task(), AVG, resume=True, **settings)
