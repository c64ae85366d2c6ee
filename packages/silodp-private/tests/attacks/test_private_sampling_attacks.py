"""Attacks on sampling that nobody knows: a server that lies, a silo 0 that lies, and processes that die.

Attacked is the secret sample, on which the amplified ε against server and silos depends. A second draw in a round, a
second table or a replayed box would tell who is sampled; the guarantee would then be that of a known sample. Each
attack is refused by name or repeats what was already drawn, and nothing is charged twice.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from silodp.errors import SilodpError
from silodp.runtime.silo import Silo
from silodp.wire.store import DirectoryStore
from silodp_private._private_sampling import OtClient
from support.clear import released
from support.masked import at, charges
from support.oracles import small_federation
from support.private import BOTH, HALF, HIDDEN, LAW, Parties, hidden_samples, in_clear, run
from support.refusals import refused
from support.stores import side_of
from support.wires import (
    wire,  # noqa: F401
)


def refuses(parties: Parties, name: str, lie, *codes: str) -> None:
    with refused(*codes):
        parties.silos[name].answer(lie)


@BOTH
@pytest.mark.parametrize("kind", ["sample", "chosen"])
def test_the_draw_of_a_round_is_made_once_whatever_attempt_it_calls_itself(aggregator, kind):
    """A second i, or a second table: two entries of one person are the sampled share and the other."""
    parties, other = Parties(aggregator, HALF), Parties(aggregator, HALF)
    parties.run_round(0)
    other.run_round(0)
    first, zero = parties.last(kind), parties.silos["silo0"]
    lie = replace(first, blobs=other.last(kind).blobs, fields=first.fields)
    if lie.blobs != first.blobs:  # paillier asks without a word
        refuses(parties, "silo0", lie, "gate.answered")
    for attempt in (1, 7):
        for request in (first, lie):
            refuses(parties, "silo0", replace(request, attempt=attempt), "gate.order")
    assert zero.answer(first).encode() == zero.answer(first).encode(), "the same request has its answer"
    parties.run_round(1)
    refuses(parties, "silo0", replace(first, attempt=9), "gate.past")


@BOTH
@pytest.mark.parametrize("kind", ["sample", "chosen", "choice base", "choice keys"])
def test_only_silo_0_chooses(aggregator, kind):
    parties = Parties(aggregator, HALF)
    parties.run_round(0)
    refuses(parties, "silo1", parties.last(kind), "gate.kind")


@BOTH
def test_base_transfers_of_the_choices_are_made_once_in_a_session(aggregator):
    parties = Parties(aggregator, HALF)
    for kind in ("choice base", "choice keys"):
        lie = replace(parties.last(kind), attempt=1)
        refuses(parties, "silo0", lie, "gate.order")


@BOTH
def test_every_message_of_the_choices_names_its_session(aggregator):
    """Base transfers or tables of another session would be answered with secrets of this one."""
    parties = Parties(aggregator, HALF)
    parties.run_round(0)
    zero = parties.silos["silo0"]
    for kind in ("choice base", "choice keys", "sample", "chosen"):
        with refused("session.unknown"):
            zero._handlers[kind](replace(parties.last(kind), fields={"session": "00" * 32}))
    # A second reply to the same offer would be keys of the server's choice under choices made before.
    assert not [key for key in parties.store_of("silo0").run.names() if key.startswith("choice base/")]


@BOTH
@pytest.mark.parametrize("how", ["a bit", "another silo's", "last round's", "none"])
def test_a_forwarded_box_that_is_not_the_one_names_silo_0(aggregator, how):
    """And who found it; nothing of the round is answered."""
    parties = Parties(aggregator, HALF)
    parties.run_round(0)
    old = parties.last("update", "silo1", 0)
    parties.transport.lost = lambda name, m: m.kind == "update" and name == "silo1"
    with pytest.raises(SilodpError, match="2 silos left"):
        parties.run_round(1)
    asked = parties.last("update", "silo1", 1)
    box = asked.blobs["sampled"]
    wrong = {
        "a bit": box[:5] + bytes([box[5] ^ 1]) + box[6:],
        "another silo's": parties.last("update", "silo2", 1).blobs["sampled"],
        "last round's": old.blobs["sampled"],
        "none": b"",
    }[how]
    lie = replace(asked, blobs={**asked.blobs, "sampled": wrong})
    with pytest.raises(SilodpError, match=r"what silo 'silo0' sent to silo 'silo1' was altered|malformed"):
        parties.silos["silo1"].answer(lie)
    if how == "none":
        assert parties.silos["silo1"].answer(asked).blobs, "what is malformed was not charged"
        return
    with refused("gate.charged"):  # the release was charged for the other request
        parties.silos["silo1"].answer(asked)


@BOTH
def test_a_box_serves_every_attempt_of_its_round(aggregator):
    """Replayed under another attempt it opens to the same: there is one sample a round."""
    parties = Parties(replace(aggregator, min_silos=3), HALF, silos=4)
    parties.transport.lost = lambda name, m: (name, m.kind) == ("silo3", "update")
    parties.run_round(0)
    silo = side_of(parties.silos["silo1"])
    asked = [m for name, m in parties.transport.asked if (name, m.kind) == ("silo1", "update")]
    assert [m.attempt for m in asked] == [0, 1]
    assert asked[0].blobs["sampled"] == asked[1].blobs["sampled"]
    assert silo._choices.round_entries(asked[0]) == silo._choices.round_entries(asked[1])


@BOTH
def test_silo_0_asks_once_and_a_failed_check_ends_what_the_server_offers(aggregator, monkeypatch):
    parties = Parties(aggregator, HALF)
    honest = OtClient.choice

    def lied(self, request):
        message = honest(
            self, request
        )  # the first choice flipped in every other column: half of them are noticed
        size = (len(message) - 8 - 129 * 20) // 128
        columns = bytearray(message[8 : 8 + 128 * size])
        columns[:: 2 * size] = bytes(b ^ 0x80 for b in columns[:: 2 * size])
        return message[:8] + bytes(columns) + message[8 + 128 * size :]

    monkeypatch.setattr(OtClient, "choice", lied)
    with pytest.raises(SilodpError, match=r"silo 'silo0': .*columns disagree"):
        parties.run_round(0)
    assert not [m for _, m in parties.transport.asked if m.kind == "chosen"]
    monkeypatch.undo()
    with pytest.raises(SilodpError, match="request of silo 'silo0' failed the check of its transfers"):
        parties.run_round(0)


@BOTH
def test_silo_0_that_asks_for_other_entries_gets_none(aggregator, tmp_path, wire):  # noqa: F811
    """The server died when the tables were out; all of silo 0 was set back, and it draws its request anew."""
    parties = Parties(aggregator, HALF)
    parties.transport.lost = lambda name, m: m.kind == "chosen"
    before = parties.backup("silo0")
    with pytest.raises(SilodpError, match="gave no answer"):
        parties.run_round(0)
    parties.restored("silo0", before)
    parties.transport._silos["silo0"] = parties.started("silo0", before.ledger)
    parties.transport.lost = lambda name, m: False
    with pytest.raises(SilodpError, match="'silo0' sent a second, different request"):
        parties.run_round(0)


# The draw is the same code under both encryptions; what is chosen, and what is done with it, is not.
LOST = [
    pytest.param(
        aggregator,
        kind,
        id=f"{kind}-{aggregator.name}",
        marks=pytest.mark.slow if aggregator.name == "lattice" and kind not in ("chosen", "open") else (),
    )
    for kind in ("choice base", "choice keys", "sample", "chosen", "update", "open")
    for aggregator in HIDDEN.values()
]


@pytest.mark.slow
@pytest.mark.parametrize(("aggregator", "kind"), LOST)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_goes_on_wherever_silo_0_was_lost(aggregator, kind, when, wire, tmp_path):  # noqa: F811
    """Both parties draw once: resumed, the sums are those in clear of one sample a round; nothing is charged twice."""
    round_ = 0 if kind.startswith("choice") else 1
    wire.fails = at("silo0", kind, round_, when)
    with released() as totals, hidden_samples(LAW) as both:
        with pytest.raises(SilodpError, match="silo0"):
            run(aggregator, HALF, out=tmp_path)
        wire.fails = staticmethod(lambda name, message: None)
        resumed = run(aggregator, HALF, out=tmp_path, resume=True)
    assert len(both.cells) == 2
    with released() as clear:
        twin = run(in_clear(aggregator, both.drawn), HALF)
    np.testing.assert_array_equal(totals, clear)
    assert torch.equal(resumed.params, twin.params)
    assert resumed.epsilon == twin.epsilon
    assert len(charges(tmp_path)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aggregator", "kind"), [case for case in LOST if case.values[1] in ("choice base", "sample", "chosen")]
)
@pytest.mark.parametrize("how", ["cut", "nothing"])
def test_an_answer_of_the_wrong_length_names_silo_0_and_the_run_goes_on(
    aggregator, kind, how, monkeypatch, tmp_path
):
    honest = Silo.answer

    def short(self, request):
        answer = honest(self, request)
        if (self.name, request.kind) != ("silo0", kind):
            return answer
        kept = {key: blob[:-1] for key, blob in answer.blobs.items()} if how == "cut" else {}
        return replace(answer, blobs=kept)

    with released() as totals, hidden_samples(LAW) as both:
        with monkeypatch.context() as patch:
            patch.setattr(Silo, "answer", short)
            with pytest.raises(SilodpError, match="silo 'silo0'"):
                run(aggregator, HALF, out=tmp_path)
        run(aggregator, HALF, out=tmp_path, resume=True)
    assert len(both.cells) == 2
    with released() as clear:
        run(in_clear(aggregator, both.drawn), HALF)
    np.testing.assert_array_equal(totals, clear)


# --- processes that die ---

OF_A_DRAW = ("hidden", "weights", "sample", "chosen", "choice", "drawn")


@pytest.mark.parametrize(
    "aggregator",
    [pytest.param(HIDDEN["lattice"], marks=pytest.mark.slow), HIDDEN["paillier"]],
    ids=lambda a: a.name,
)
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_dying_at_any_write_of_a_draw_repeats_nothing(aggregator, when, monkeypatch, tmp_path):
    """Server and silo 0 stop, both, at each write of the second round's draw in turn; resumed, there was one draw."""
    put, few = DirectoryStore.put, small_federation(users=4)
    for number in range(40):
        left = [number]

        def dies(self, key, value, left=left):
            due = "round/1/" in key and any(part in key for part in OF_A_DRAW)
            left[0] -= due
            if due and left[0] == -1 and when == "before":
                raise KeyboardInterrupt
            put(self, key, value)
            if due and left[0] == -1:
                raise KeyboardInterrupt

        out = tmp_path / str(number)
        with released() as totals, hidden_samples(LAW) as both:
            monkeypatch.setattr(DirectoryStore, "put", dies)
            try:
                run(aggregator, HALF, out=out, federation=few)
            except KeyboardInterrupt:
                died = True
            else:
                died = False
            monkeypatch.setattr(DirectoryStore, "put", put)
            if not died:
                break
            totals.clear()
            resumed = run(aggregator, HALF, out=out, federation=few, resume=True)
        # What was drawn, but not kept, was not used: the last draw counts.
        both.cells = {0: both.cells[0], 1: both.cells[max(both.cells)]}
        with released() as clear:
            run(in_clear(aggregator, both.drawn), HALF, federation=few)
        np.testing.assert_array_equal(totals, clear[1:])
        assert len(charges(out)) == 2
        assert resumed.epsilon is not None
    assert number > 6, "there were so many writes"
