"""What is kept for a round is forgotten with it, whoever put it there; what is kept for the run is not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from silodp.aggregators.plain import Plain
from silodp.wire.store import DirectoryStore, MemoryStore, RoundStore
from support.private import Parties


@pytest.fixture(params=["memory", "directory"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else DirectoryStore(tmp_path / "party")


@pytest.mark.parametrize("prefix", ["", "run/"])
def test_rounds_are_dropped_whole_and_the_run_stays(store, prefix):
    store.put("identity", b"of the party")
    kept = RoundStore(store, prefix)
    kept.run.put("session", b"lasts")
    for round_ in (0, 1, 9, 10):
        kept.round(round_).put("noise/0", bytes([round_]))
        kept.round(round_).put("a name with / and ·", b"")
    kept.drop_rounds_before(10)
    assert [kept.round(round_).names() for round_ in (0, 1, 9)] == [[], [], []]
    assert sorted(kept.round(10).names()) == ["a name with / and ·", "noise/0"]
    assert kept.round(10).get("noise/0") == b"\x0a"
    assert kept.run.get("session") == b"lasts"
    assert store.get("identity") == b"of the party"
    kept.round(10).drop("noise/0")
    assert kept.round(10).get("noise/0") is None


def test_runs_in_one_store_are_apart():
    store = MemoryStore()
    one, other = RoundStore(store, "one/"), RoundStore(store, "other/")
    one.round(0).put("x", b"1")
    other.round(0).put("x", b"2")
    one.drop_rounds_before(5)
    assert (one.round(0).get("x"), other.round(0).get("x")) == (None, b"2")


@dataclass(frozen=True)
class Diary(Plain):
    """An aggregator that nobody else knows keeps something for every round, on both sides."""

    def server(self, spec):
        plain = super().server(spec)

        class Server:
            set_up = plain.set_up

            def total(self, desk, round_, arrays):
                desk.store.round(round_).put("diary", b"server")
                return plain.total(desk, round_, arrays)

        return Server()

    def silo(self, spec, own):
        plain = super().silo(spec, own)

        class Silo:
            handlers, group_secret = plain.handlers, plain.group_secret

            def update(self, request, work):
                own.store.round(request.round).put("diary", b"silo")
                return plain.update(request, work)

        return Silo()


def test_what_another_aggregator_keeps_for_a_round_is_forgotten_too():
    parties = Parties(Diary())
    for round_ in range(3):
        parties.run_round(round_)
    for store in (parties.server.store, *map(parties.store_of, parties.names)):
        assert [store.round(round_).get("diary") is not None for round_ in range(3)] == [False, False, True]
        assert not store.round(0).names()
        assert not store.round(1).names()
