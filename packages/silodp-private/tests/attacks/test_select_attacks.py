"""Attacks on `select`: the rules that hide every person's row, each with what happens where it is broken.

What the server holds of a person is a correction, a row under two streams of which it knows one. The rules are those of
docs/protocols.md, section 7; every test fails without its rule.
"""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from silodp.aggregators.base import CHOICES_BLOB
from silodp.crypto.secure_aggregation import WordGroup, open_sum
from silodp.errors import SilodpError
from silodp.runtime.silo import Silo
from silodp.wire.messages import Message
from silodp_private import _private_weights, select
from silodp_private.crypto import oblivious_transfer as ot
from silodp_private.crypto.oblivious_transfer import TransferReceiver
from silodp_private.crypto.primary_silos import PrimarySiloParameters
from support.clear import released
from support.masked import at
from support.oracles import small_federation
from support.private import LATTICE, PRIMARY, SAMPLED, SELECT, Parties, counts_of, hidden_samples, run
from support.refusals import refused
from support.stores import side_of
from support.wires import wire  # noqa: F401

SAMPLED_PRIMARY = replace(PRIMARY, user_sampling=0.5)
FOUR = replace(SELECT, min_silos=3)
USERS = 12


def choose_again(parties: Parties, name: str, counter: int, bits: np.ndarray) -> bytes:
    """A second choice under a counter, by the server that holds the secrets of its transfers with a silo."""
    packed = parties.server.store.run.get(f"products/{name}")
    receiver = TransferReceiver.unpack(packed[:32] + bytes(8) + packed[40:], counter)
    return receiver.choose(counter, bits)[0]


# --- B1: a pair of keys serves one row ---


def test_a_release_has_one_choice_whatever_attempt_asks_for_it():
    """With k_0 and k_1, both, a correction is the row itself."""
    parties = Parties(FOUR, PRIMARY, silos=4)
    parties.run_round(0)
    first = parties.last("update", "silo1")
    other = choose_again(parties, "silo1", 0, np.ones(USERS, np.int64))
    fields = {**first.fields, "roster": ["silo0", "silo1", "silo2"]}
    lie = replace(first, attempt=1, fields=fields, blobs={CHOICES_BLOB: other})
    silo = parties.silos["silo1"]
    with refused("gate.release"):  # the release was opened
        silo.answer(lie)
    parties = Parties(FOUR, PRIMARY, silos=4)
    parties.transport.lost = lambda name, request: name == "silo3" or request.kind == "open"
    with pytest.raises(Exception, match="needs 3"):
        parties.run_round(0)
    first = parties.last("update", "silo1")
    other = choose_again(parties, "silo1", 0, np.ones(USERS, np.int64))
    silo, lie = parties.silos["silo1"], replace(first, attempt=7, blobs={CHOICES_BLOB: other})
    with refused("crypto.reused"):
        side_of(silo).update(lie, lambda release: pytest.fail("nothing is trained twice for one release"))


def test_transfers_of_one_release_serve_no_other():
    """Corrections of two releases under one pair of keys differ by the difference of two rows."""
    parties = Parties(FOUR, PRIMARY, silos=4)
    parties.run_round(0)
    request = parties.last("update", "silo1")
    side, silo = side_of(parties.silos["silo1"]), parties.silos["silo1"]
    for release in (0, 1):
        replayed = replace(request, fields={**request.fields, "release": release})
        if release == 0:  # as if what was drawn for the release were lost, and the store restored without it
            parties.store_of("silo1").round(0).drop("noisy/0")
        with refused("crypto.reused", "message.malformed"):
            side.update(replayed, lambda r, asked=replayed: silo._prepare_release(asked, r))


def test_corrections_are_repeated_to_the_byte_after_a_restart():
    """A row that is trained anew may differ: its correction beside the first one would show by how much."""
    parties = Parties(SELECT, PRIMARY)
    parties.run_round(0)
    request = parties.last("update", "silo1")
    sent = next(m for n, m in parties.transport.answered if (n, m.kind) == ("silo1", "update"))
    # The answer was stored and is sent again. Without it: the process had died before it could store the answer.
    assert parties.started("silo1").answer(request).encode() == sent.encode()
    again, _ = side_of(parties.started("silo1")).update(
        request, lambda release: pytest.fail("the rows of a release are computed once")
    )
    assert again.blobs == sent.blobs


def test_a_process_that_dies_with_its_draw_stored_sends_that_draw(monkeypatch):
    parties = Parties(SELECT, PRIMARY)

    def die(self, request, release):
        raise SystemExit("killed after the draw was stored")

    with monkeypatch.context() as patch:
        patch.setattr(select._Silo, "_use_up", die)
        with pytest.raises(SystemExit):
            parties.run_round(0)
    stored = parties.store_of("silo0").round(0).get("noisy/0")
    request = parties.last("update", "silo0")
    answer = parties.started("silo0").answer(request)
    assert answer.blobs["corrections"] == Message.decode(stored).arrays["corrections"].tobytes()


@pytest.mark.parametrize("how", ["other choices", "another model"])
def test_a_silo_that_was_set_back_sends_its_rows_under_other_keys(how):
    """Store and ledger are copies of one moment, so nobody notices; with the same keys both would open every row."""
    parties = Parties(SELECT, PRIMARY, rounds=10)
    sent, copies = [], []
    with Parties.watch("silo1", sent, copies):
        parties.run_round(0)
    before = next(copy for message, copy in zip(sent, copies, strict=True) if message.kind == "update")
    request = parties.last("update", "silo1")
    first = next(m for n, m in parties.transport.answered if (n, m.kind) == ("silo1", "update"))
    kept = Message.decode(parties.server.store.round(0).get("choices/0/silo1") or b"")
    other = choose_again(parties, "silo1", 0, 1 - kept.arrays["bits"].astype(np.int64))
    lie = (
        replace(request, blobs={CHOICES_BLOB: other})
        if how == "other choices"
        else replace(request, arrays={**request.arrays, "params": request.arrays["params"] + np.float32(1)})
    )
    second = parties.restored("silo1", before).answer(lie)
    one, two = (
        np.frombuffer(answer.blobs["corrections"], "<u4").reshape(USERS, -1) for answer in (first, second)
    )
    for seen in (one + two, one - two):  # twice the row; the difference of two rows
        # A row is at most 2^16 steps of the grid: these are as long as random words.
        assert (np.abs(seen.view(np.int32).astype(float)).max(axis=1) > 2**24).all()


# --- B2: every silo has transfers of its own ---


def test_a_silo_knows_no_key_of_another():
    """With one set of transfers for all, the server and any one silo could open every row."""
    parties = Parties(SELECT, PRIMARY)
    parties.run_round(0)
    kept = [parties.store_of(name).run.get(f"products/{parties.session}") for name in parties.names]
    # Each alone: with δ and what the server holds, whoever knows only δ opens every row.
    for part in (slice(40, 168), slice(168, None)):  # δ, and the seeds
        assert len({one[part] for one in kept}) == len(kept)
    # What the other silos know opens no correction: the keys they would compute differ from those that were used.
    request = parties.last("update", "silo1")
    choices = request.blobs[CHOICES_BLOB]
    own, *others = (
        ot.TransferSender.unpack(one[:32] + bytes(8) + one[40:], 0) for one in (kept[1], kept[0], kept[2])
    )
    keys = own.keys(0, USERS, choices)
    for other in others:
        with refused("session.transfers_ended"):  # the columns do not even agree
            other.keys(0, USERS, choices)
    assert keys.shape == (2, USERS, 32)


def test_no_message_carries_what_another_silo_could_open_rows_with():
    """Choices differ between silos, and each silo is sent its own alone."""
    parties = Parties(SELECT, PRIMARY)
    parties.run_round(0)
    sent = {n: m.blobs[CHOICES_BLOB] for n, m in parties.transport.asked if m.kind == "update"}
    assert len(set(sent.values())) == len(parties.names)


# --- B3: a silo's share leaves under masks and a seal alone, with its noise in it ---


def test_the_share_leaves_masked_sealed_and_noisy(monkeypatch):
    drawn = {}
    multiply = select._Silo._multiply

    def watched(self, request, attempt, work):
        result = multiply(self, request, attempt, work)
        drawn[self._member.identity.name] = result["share"].copy()
        return result

    monkeypatch.setattr(select._Silo, "_multiply", watched)
    parties = Parties(SELECT, PRIMARY)
    parties.run_round(0)
    answers = {name: m for name, m in parties.transport.answered if m.kind == "update"}
    masked = {name: np.frombuffer(m.blobs["masked"], "<u4") for name, m in answers.items()}
    assert masked.keys() == drawn.keys() == set(parties.names)
    assert all((masked[name] != drawn[name]).all() for name in masked)
    # The pair masks cancel in the sum; what is left are the seals, without which it is not the sum of the shares.
    assert (sum(masked.values()) != sum(drawn.values())).all()
    # Opened seals give the sum, and of no silo its own share.
    seals = {name: m.blobs["seal"] for name, m in parties.transport.answered if m.kind == "open"}
    ring = WordGroup(len(drawn["silo0"]), 32)
    assert (open_sum(masked.values(), seals, ring) == sum(drawn.values())).all()
    for name in parties.names:
        assert (open_sum([masked[name]], {name: seals[name]}, ring) != drawn[name]).all()


def test_every_share_has_its_noise(monkeypatch):
    """With rows of 0 the sum is the noise of all silos, at the scale that is charged."""
    federation = small_federation(users=4, features=600)
    monkeypatch.setattr(
        _private_weights, "integer_rows", lambda *_: iter([(np.zeros(0, int), np.zeros((0, 601), np.int64))])
    )
    with released() as totals:
        run(SELECT, PRIMARY, rounds=8, seed=None, federation=federation)
    std = PRIMARY.noise_multiplier * PRIMARY.clip
    noise = np.concatenate(totals) / std
    limits = stats.chi2.ppf([5e-7, 1 - 5e-7], noise.size) / noise.size
    assert limits[0] < (noise**2).mean() < limits[1]


@pytest.mark.parametrize(("aggregator", "method"), [(SELECT, SAMPLED_PRIMARY), (LATTICE, SAMPLED)])
def test_a_rounds_sample_depends_on_no_other_round(aggregator, method):
    """The server knows its own part of a round; with one κ for all rounds it would learn of the next."""
    hidden = replace(aggregator, hidden_sample=10)
    with hidden_samples(hidden.sampling_ratio(method)) as seen:
        run(hidden, method, rounds=2, federation=small_federation(users=400, records=800))
    first, second = seen.shifts[0], seen.shifts[1]
    assert (first == second).mean() < 0.6  # half of them by chance


# --- B4: all persons are sent, and look alike ---


def test_persons_without_records_are_sent_as_the_others_are():
    parties = Parties(SELECT, PRIMARY, federation=small_federation(users=400, records=200, features=20))
    counts = counts_of(small_federation(users=400, records=200, features=20))
    assert (counts[1] == 0).sum() > 100
    parties.run_round(0)
    answer = next(m for n, m in parties.transport.answered if (n, m.kind) == ("silo1", "update"))
    rows = np.frombuffer(answer.blobs["corrections"], np.uint8).reshape(400, 21 * 4)
    for part in (rows[counts[1] == 0], rows[counts[1] > 0]):
        assert stats.chisquare(np.bincount(part.ravel(), minlength=256)).pvalue > 1e-6
    assert (rows != 0).any(axis=1).all()


# --- B5: a further attempt masks the same share anew, and nothing else ---


def test_a_further_attempt_shows_one_share_under_other_masks(wire):  # noqa: F811
    wire.fails = at("silo3", "update", 0, "before")
    run(FOUR, PRIMARY, 1, federation=small_federation(silos=4))
    answers = {m.attempt: m for s, m in wire.received if (s, m.kind) == ("silo1", "update")}
    assert answers.keys() == {0, 1}
    assert len(answers[0].blobs["corrections"]) == USERS * 5 * 4
    assert answers[1].blobs["corrections"] == b""
    first, second = (np.frombuffer(answers[a].blobs["masked"], "<u4") for a in (0, 1))
    assert (first != second).all()


def test_corrections_that_are_not_all_persons_stop_the_round_by_name():
    parties = Parties(SELECT, PRIMARY)
    answer = Silo.answer

    def short(self, request):
        sent = answer(self, request)
        if request.kind == "update" and self.name == "silo2":
            return replace(sent, blobs={**sent.blobs, "corrections": sent.blobs["corrections"][:-4]})
        return sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Silo, "answer", short)
        with refused("message.malformed") as error:
            parties.run_round(0)
    assert "silo2" in str(error.value)


# --- the transfers' check, the primary silos, and what leaks to whom ---


def test_a_failed_check_ends_a_silos_products_for_good():
    """Each failed check tells a cheating server one bit of what all transfers rest on."""
    parties = Parties(SELECT, PRIMARY)
    parties.run_round(0)
    request = parties.last("update", "silo1")
    good = choose_again(parties, "silo1", 1, np.zeros(USERS, np.int64))
    bad = good[:-1] + bytes([good[-1] ^ 1])
    side, silo = side_of(parties.silos["silo1"]), parties.silos["silo1"]
    for choices, code in ((bad, "session.transfers_ended"), (good, "crypto.reused")):
        lie = replace(request, round=1, blobs={CHOICES_BLOB: choices})
        with refused(code):
            side.update(lie, lambda r, lie=lie: silo._prepare_release(lie, r))


@pytest.mark.parametrize("kind", ["base", "masked classes", "comparisons", "primary silos", "product base"])
def test_the_set_up_is_made_once_in_a_session(kind):
    """A second comparison under other places would show classes; second base transfers repeat every stream."""
    parties = Parties(SELECT, SAMPLED_PRIMARY)
    asked = parties.last(kind)
    for attempt in (0, 1):
        lie = replace(asked, attempt=attempt, blobs={k: bytes(len(b)) for k, b in asked.blobs.items()})
        if lie != asked:
            with refused("gate.answered", "gate.order"):
                parties.silos["silo0"].answer(lie)


def test_neither_party_alone_knows_a_primary_silo():
    """η of the server and θ of the silos are uniform; what they add up to is one primary silo for everyone."""
    federation = small_federation(users=600, records=900)
    parties = Parties(SELECT, PRIMARY, federation=federation)
    words = parties.kept("weights/shares").arrays["shares"]
    side = side_of(parties.silos["silo1"])
    theirs = side.silo_shares("run").shares()
    for part in (words, theirs):
        assert stats.chisquare(np.bincount(part.astype(int), minlength=8)).pvalue > 1e-6
    plan = PrimarySiloParameters(bytes.fromhex(parties.session), 600, 3)
    assert (plan.unpack(words ^ theirs) == plan.find_primary_silos(counts_of(federation))).all()


def test_the_server_with_one_silo_knows_primary_silos_and_still_no_row_of_another():
    """The stated limit: the common secret opens primary silos. Rows of other silos stay under their own keys."""
    parties = Parties(SELECT, PRIMARY)
    parties.run_round(0)
    words = parties.kept("weights/shares").arrays["shares"]
    plan = PrimarySiloParameters(bytes.fromhex(parties.session), USERS, 3)
    primary = plan.unpack(words ^ side_of(parties.silos["silo0"]).silo_shares("run").shares())
    assert (primary == plan.find_primary_silos(counts_of(small_federation()))).all()
    # The server's keys of silo 1: of each person one of two, whichever it chose.
    kept = parties.server.store.round(0).get("choices/0/silo1")
    assert kept is not None
    stored = parties.store_of("silo1").run.get(f"products/{parties.session}")
    sender = ot.TransferSender.unpack(stored[:32] + bytes(8) + stored[40:], 0)
    both = sender.keys(0, USERS, parties.last("update", "silo1").blobs[CHOICES_BLOB])
    chosen, bits = (Message.decode(kept).arrays[name] for name in ("keys", "bits"))
    everyone = np.arange(USERS)
    assert (both[bits.astype(int), everyone] == chosen).all()
    assert (both[1 - bits.astype(int), everyone] != chosen).any(axis=1).all()


def test_masked_classes_that_cannot_be_stop_the_set_up_by_name():
    answer = Silo.answer

    def wrong(self, request):
        sent = answer(self, request)
        if request.kind == "masked classes" and self.name == "silo2":
            return replace(sent, arrays={"masked": sent.arrays["masked"] | np.uint8(0x80)})
        return sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Silo, "answer", wrong)
        with pytest.raises(SilodpError, match="silo2"):
            Parties(SELECT, PRIMARY)
