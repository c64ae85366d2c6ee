"""Stores do not grow with rounds; what was forgotten is not drawn or answered again, wherever a run is cut off."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from silodp.aggregators import Plain
from silodp.aggregators.masked import Masked
from silodp.errors import SilodpError
from silodp.methods import UldpAvg
from silodp.runtime.checkpoint import COMPLETED_ROUNDS_KEY
from silodp.runtime.run_directory import RunDirectory
from silodp.wire.store import DirectoryStore, MemoryStore, RoundStore
from silodp_private.lattice import Lattice
from support.clear import released
from support.masked import charges
from support.oracles import small_federation
from support.private import (
    HALF,
    HIDDEN,
    LATTICE,
    LAW,
    PAILLIER,
    SAMPLED,
    Parties,
    hidden_samples,
    in_clear,
    run,
)
from support.refusals import refused
from support.wires import wire  # noqa: F401

FEW = small_federation(users=6)
FOUR = small_federation(silos=4, users=6)
RUNS = {
    "plain": (Plain(), SAMPLED),
    "masked": (Masked(), SAMPLED),
    "lattice": (LATTICE, SAMPLED),
    "paillier": (PAILLIER, SAMPLED),
    "lattice, hidden": (HIDDEN["lattice"], HALF),
    "paillier, hidden": (HIDDEN["paillier"], HALF),
}
ALL = pytest.mark.parametrize(
    "name",  # with a hidden sample they keep, and forget, all that they do without one, and more
    [pytest.param(name, marks=pytest.mark.slow if name in ("lattice", "paillier") else ()) for name in RUNS],
)


def kept(out: Path) -> Counter[tuple[str, str]]:
    """How many entries each party has of each kind: names without numbers, keys and seeds."""
    stores = [out / "checkpoint" / "server", *sorted((out / "checkpoint" / "silos").iterdir())]
    kinds = [
        (store.name, re.sub(r"[0-9a-f]{32,}|\d+", "·", name))
        for store in stores
        for name in DirectoryStore(store).names()
    ]
    return Counter(kinds)


@pytest.mark.slow
@ALL
def test_stores_hold_after_five_rounds_what_they_held_after_two(name, tmp_path):
    aggregator, method = RUNS[name]
    run(aggregator, method, 2, federation=FEW, out=tmp_path)
    before = kept(tmp_path)
    run(aggregator, method, 5, federation=FEW, out=tmp_path, resume=True)
    assert kept(tmp_path) == before
    assert before["server", "round/·/clients"] == 1, "of the last round: it is over when the next one begins"
    assert before["server", "round/·/sample"] == (aggregator.sampled_by == "server"), "others draw none"


@pytest.mark.parametrize(
    "name",
    [
        "masked",
        pytest.param("lattice", marks=pytest.mark.slow),
        pytest.param("paillier", marks=pytest.mark.slow),
    ],
)
def test_nor_do_they_where_every_round_loses_a_silo(name, wire, tmp_path):  # noqa: F811
    """Each round takes two attempts, and has its progress kept."""
    aggregator, method = RUNS[name]
    aggregator = replace(aggregator, min_silos=3)
    wire.fails = staticmethod(
        lambda silo, message: "after" if (silo, message.kind) == ("silo3", "update") else None
    )
    run(aggregator, method, 2, federation=FOUR, out=tmp_path)
    before = kept(tmp_path)
    assert before["server", "round/·/progress"] == 1
    run(aggregator, method, 4, federation=FOUR, out=tmp_path, resume=True)
    assert kept(tmp_path) == before


# --- rounds that are over ---


@ALL
def test_a_server_that_is_set_back_plays_no_round_twice(name, tmp_path):
    """Checkpoint and ledger come from an older copy, the stores do not: a new sample would be drawn and shown."""
    aggregator, method = RUNS[name]
    old, now = tmp_path / "old", tmp_path / "now"
    run(aggregator, method, 1, federation=FEW, out=now, seed=None)
    shutil.copytree(now / "checkpoint", old)
    run(aggregator, method, 3, federation=FEW, out=now, resume=True, seed=None)
    for file in ("state.safetensors", "ledger.jsonl"):
        shutil.copy(old / file, now / "checkpoint" / file)
    with pytest.raises(SilodpError, match=r"^round 2 is over, and what was drawn for it is forgotten"):
        run(aggregator, method, 3, federation=FEW, out=now, resume=True, seed=None)


def test_a_server_that_is_set_back_says_nothing_of_fewer_rounds_either(tmp_path):
    """With nothing left to play, a guarantee for two of three rounds would be written."""
    aggregator, method = RUNS["plain"]
    old, now = tmp_path / "old", tmp_path / "now"
    run(aggregator, method, 1, federation=FEW, out=now, seed=None)
    shutil.copytree(now / "checkpoint", old)
    run(aggregator, method, 3, federation=FEW, out=now, resume=True, seed=None)
    for file in ("state.safetensors", "ledger.jsonl"):
        shutil.copy(old / file, now / "checkpoint" / file)
    with pytest.raises(SilodpError, match=r"^round 2 is over"):
        run(aggregator, method, 1, federation=FEW, out=now, resume=True, seed=None)


@ALL
@pytest.mark.parametrize("after", [1, 2])
def test_a_store_that_alone_is_set_back_is_noticed(name, after, tmp_path):
    """It would draw anew who joined which rounds, and count fewer attempts than its encryption has served."""
    aggregator, method = RUNS[name]
    old, now = tmp_path / "old", tmp_path / "now"
    run(aggregator, method, after, federation=FEW, out=now, seed=None)
    shutil.copytree(now / "checkpoint" / "server", old)
    run(aggregator, method, 3, federation=FEW, out=now, resume=True, seed=None)
    shutil.rmtree(now / "checkpoint" / "server")
    shutil.copytree(old, now / "checkpoint" / "server")
    for rounds in (3, 4):
        with pytest.raises(SilodpError, match=r"^the server's store knows nothing of round 3: it is older"):
            run(aggregator, method, rounds, federation=FEW, out=now, resume=True, seed=None)


def test_a_store_without_the_last_round_is_noticed(tmp_path):
    """Who joined it would be drawn anew."""
    aggregator, method = RUNS["plain"]
    run(aggregator, method, 3, federation=FEW, out=tmp_path, seed=None)
    RoundStore(DirectoryStore(tmp_path / "checkpoint" / "server")).round(2).drop("clients")
    with pytest.raises(SilodpError, match=r"^the server's store knows nothing of round 3"):
        run(aggregator, method, 4, federation=FEW, out=tmp_path, resume=True, seed=None)


@ALL
def test_a_silo_answers_nothing_about_a_round_that_it_has_forgotten(name):
    """Asked under another attempt, so that no stored answer decides; nor after it was started anew."""
    parties = Parties(*RUNS[name])
    for round_ in range(3):
        parties.run_round(round_)
    for silo in parties.names:
        asked = {(m.kind, m.round): m for to, m in parties.transport.asked if to == silo}
        kinds = {"update", "open", "sample", "chosen"} & {kind for kind, _ in asked}
        for kind in kinds:
            for attempt in (0, 5):
                old = replace(asked[kind, 1], attempt=attempt)
                for party in (parties.silos[silo], parties.started(silo)):
                    with refused("gate.past"):
                        party.answer(old)
    assert kinds >= {"update"}


# --- cut off ---


@ALL
def test_a_silo_that_dies_before_its_answer_is_kept_has_forgotten_nothing(name, monkeypatch):
    """The answer is the mark: without it, the round before would be answered once more."""
    parties = Parties(*RUNS[name])
    parties.run_round(0)
    parties.transport.lost = lambda silo, message: (silo, message.kind) == ("silo1", "update")
    with pytest.raises(SilodpError, match="silo1"):
        parties.run_round(1)
    before, put = set(parties.stores["silo1"].names()), MemoryStore.put

    def dying(self, key, value):
        if "/update/" in key:
            raise KeyboardInterrupt
        put(self, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "put", dying)
        with pytest.raises(KeyboardInterrupt):
            parties.silos["silo1"].answer(parties.last("update", "silo1", 1))
    assert before <= set(parties.stores["silo1"].names())


@ALL
def test_nothing_is_forgotten_before_the_checkpoint_can_do_without(name, monkeypatch, tmp_path):
    """The process dies before it writes the state after a round: the round is repeated, its sample and noise too."""
    aggregator, method = RUNS[name]
    keep, left = RunDirectory.save_state, [2]  # the untrained model, and the first round

    def dying(self, content):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        keep(self, content)

    with released() as totals:
        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, "save_state", dying)
            with pytest.raises(KeyboardInterrupt):
                run(aggregator, method, 3, federation=FEW, out=tmp_path, seed=None)
        run(aggregator, method, 3, federation=FEW, out=tmp_path, resume=True, seed=None)
    _, first, repeated, _ = totals
    np.testing.assert_array_equal(first, repeated)
    assert len(charges(tmp_path)) == 3


def dying_at(number: int, operation: str, key: str, after: bool = False):
    """That put or drop of such a key in a store on disk, done or not, is the last thing that a process does."""
    honest, left = getattr(DirectoryStore, operation), [number]

    def call(self, name, *value):
        due = re.search(key, name) is not None
        left[0] -= due
        dies = due and left[0] == -1
        if after or not dies:
            honest(self, name, *value)
        if dies:
            raise KeyboardInterrupt

    return operation, call


OF_A_ROUND = r"round/\d+/"
DEATHS = {
    "before rounds are over": (0, "put", COMPLETED_ROUNDS_KEY),
    "when rounds are over": (0, "put", COMPLETED_ROUNDS_KEY, True),
    "before anything is forgotten": (0, "drop", OF_A_ROUND),
    "when one thing is": (0, "drop", OF_A_ROUND, True),
    "when a silo forgets, too": (4, "drop", OF_A_ROUND),
}


@pytest.fixture(scope="module")
def straight_runs(tmp_path_factory):
    """Runs of three rounds that nothing cuts off, and their directories: each is run once."""
    folder = tmp_path_factory.mktemp("straight")

    @cache
    def straight(name):
        return run(*RUNS[name], 3, federation=FEW, out=folder / name), folder / name

    return straight


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if "lattice" in name or name == "paillier" else ())
        for name in RUNS
    ],
)
@pytest.mark.parametrize("death", DEATHS)
def test_a_run_that_dies_while_it_forgets_goes_on_as_if_it_had_not(
    name, death, straight_runs, monkeypatch, tmp_path
):
    aggregator, method = RUNS[name]
    out = tmp_path / "cut off"
    with hidden_samples(LAW) as both:
        with monkeypatch.context() as patch:
            patch.setattr(DirectoryStore, *dying_at(*DEATHS[death]))
            with pytest.raises(KeyboardInterrupt):
                run(aggregator, method, 3, federation=FEW, out=out)
        resumed = run(aggregator, method, 3, federation=FEW, out=out, resume=True)
    straight, whole = straight_runs(name)
    if method is HALF:  # no seed fixes whom the parties draw between them
        assert len(both.cells) == 3, "once a round"
        in_its_place = run(in_clear(aggregator, both.drawn), method, 3, federation=FEW)
        assert torch.equal(resumed.params, in_its_place.params)
    else:
        assert torch.equal(resumed.params, straight.params)
    assert resumed.epsilon == straight.epsilon
    assert len(charges(out)) == 3
    assert kept(out) == kept(whole)


class Drawn(UldpAvg):
    """Silos are drawn for every round."""

    samples_silos = True

    def sample_silos(self, population, stream):
        return stream.random(population.silos) < 0.5


@pytest.mark.parametrize("death", ["put", "drop", None])
def test_how_often_a_silo_took_part_is_known_when_the_draws_are_forgotten(death, monkeypatch):
    """By what the silos were told; the server dies before it counts, or between counting and forgetting."""
    parties = Parties(Plain(), Drawn(5.0, 0.5, SAMPLED.local))
    told = np.zeros(3, int)
    for round_ in range(8):
        if death and round_:
            with monkeypatch.context() as patch:
                gone = {"put": COMPLETED_ROUNDS_KEY, "drop": f"round/{round_ - 1}/clients"}[death]
                patch.setattr(MemoryStore, death, lambda self, key, *value, gone=gone: forbidden(key, gone))
                with pytest.raises(KeyboardInterrupt):
                    parties.run_round(round_)
        parties.run_round(round_)
        told += parties.last("update").arrays["clients"]
        np.testing.assert_array_equal(parties.server.participation.count(round_ + 1), told)
    assert 0 < told.sum() < 24
    assert sum(key.endswith("/clients") for key in parties.server.store.run.names()) == 1


def forbidden(key: str, gone: str) -> None:
    assert key.startswith("rounds over") or key.endswith(("/sample", "/clients"))
    if key == gone:
        raise KeyboardInterrupt


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("key", ["attempts made", "round/0/request/0"])
def test_an_attempt_is_counted_once_though_its_process_dies(key, after, monkeypatch, tmp_path):
    """Two attempts are allowed, two are made; and a third is not, though the keys of the first two are forgotten."""
    two = replace(LATTICE, attempts=2)
    with monkeypatch.context() as patch:
        patch.setattr(DirectoryStore, *dying_at(0, "put", key, after))
        with pytest.raises(KeyboardInterrupt):
            run(two, federation=FEW, out=tmp_path)
    run(two, federation=FEW, out=tmp_path, resume=True)
    monkeypatch.setattr(Lattice, "max_rounds", None)
    with pytest.raises(SilodpError, match="has made the 2 attempts its encryption was chosen for"):
        run(two, rounds=3, federation=FEW, out=tmp_path, resume=True)
