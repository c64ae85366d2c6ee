"""Attacks on the sample of users that the silos draw, by a server that reads and signs what it likes.

Attacked is the secrecy of the sample, on which the server's amplified ε rests. A server that draws the sample itself,
or that finds one in a message, knows who took part in a round, and its ε is that of a known sample. Silos that disagree
on a coin, or toss it anew for another attempt, would show a person more often than the rate that is charged.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import replace

import numpy as np
import pytest

from silodp.aggregators import Plain
from silodp.aggregators._key_agreement import run_key_agreement
from silodp.aggregators.masked import Masked
from silodp.crypto.sampling import PersonCoins
from silodp.crypto.streams import derive_key
from silodp.data.federation import Federation
from silodp.methods import UldpAvg
from silodp.runtime.silo import Silo
from silodp.training.sgd.local import LocalTraining
from silodp.wire.messages import Message
from silodp_budgets.user_budgets import UserBudgets
from support.clear import released
from support.masked import AVG
from support.oracles import small_federation, without_user
from support.private import Parties, counts_of, holds, run
from support.refusals import refused
from support.stores import side_of

HALF = replace(AVG, user_sampling=0.5)
USERS = 40
PERSONS = small_federation(users=USERS, records=120)
BOTH = pytest.mark.parametrize("aggregator", [Plain(), Masked()], ids=lambda a: a.name)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, np.ndarray]]:
    """The silo, round and release of every training, and who has a weight above 0 in it: (U,) bool."""
    seen: list[tuple[str, int, int, np.ndarray]] = []
    compute = Silo._prepare_release

    def watched(self: Silo, request: Message, release: int):
        work = compute(self, request, release)
        seen.append((self.name, request.round, release, work.release.weights > 0))
        return work

    monkeypatch.setattr(Silo, "_prepare_release", watched)
    return seen


def everyones(seen: list[tuple[str, int, int, np.ndarray]], federation: Federation) -> dict[int, np.ndarray]:
    """By round, who was drawn, after a check that all silos agree on the persons whom they share."""
    samples: dict[int, np.ndarray] = {}
    for round_ in {round_ for _, round_, _, _ in seen}:
        found = np.full(federation.users, -1)
        for silo in federation.silos:
            here = np.unique(silo.user)
            for sample in (sample for name, r, _, sample in seen if (name, r) == (silo.name, round_)):
                known = here[found[here] >= 0]
                np.testing.assert_array_equal(found[known], sample[known])
                found[here] = sample[here]
        samples[round_] = found
    return samples


# --- every message of a run ---


def shape(message: Message) -> object:
    """All of a message but the values: what it is called, its fields, and how long each part is."""
    return (
        (message.kind, message.run, message.round, message.attempt),
        sorted((name, re.sub("[0-9a-f]", "0", repr(value))) for name, value in message.fields.items()),
        sorted((name, array.dtype.str, array.shape) for name, array in message.arrays.items()),
        sorted((name, len(blob)) for name, blob in message.blobs.items()),
        len(message.encode()),
    )


@BOTH
def test_with_and_without_one_person_every_message_is_of_the_same_form(aggregator):
    """The server may compare a run with one that lacks a person: it finds other noisy values, and nothing else."""
    person = int(np.argmax(PERSONS.counts().sum(axis=0)))
    transcripts = []
    for federation in (PERSONS, without_user(PERSONS, person)):
        parties = Parties(aggregator, HALF, federation=federation)
        for round_ in range(3):
            parties.run_round(round_)
        transcripts.append([*parties.transport.asked, *parties.transport.answered])
    one, other = transcripts
    assert [(name, shape(message)) for name, message in one] == [(n, shape(m)) for n, m in other]
    kinds = {message.kind for _, message in one}
    assert kinds >= {"setup", "hello", "roster", "confirm", "update"}
    for _, message in one:
        values = {"share", "masked"} if message.kind == "update" else set()
        assert set(message.arrays) <= values | {"params"}
        assert set(message.fields) <= {"order", "session", "roster", "release", "request"}
    for (_, first), (_, second) in zip(one, other, strict=True):
        if "params" in first.arrays:
            np.testing.assert_array_equal(first.arrays["params"], second.arrays["params"])


@BOTH
def test_no_message_holds_a_coin_a_pseudonym_a_count_or_a_sample(aggregator, drawn):
    parties = Parties(aggregator, HALF, federation=PERSONS)
    for round_ in range(3):
        parties.run_round(round_)
    messages = [message for _, message in (*parties.transport.asked, *parties.transport.answered)]
    samples = list(everyones(drawn, PERSONS).values())
    assert len(samples) == 3
    here = [sample for _, _, _, sample in drawn]
    counts = [*counts_of(PERSONS), counts_of(PERSONS).sum(0)]
    for message in messages:
        assert not any(holds(message, vector) for vector in (*(s > 0 for s in samples), *here, *counts))
    secret = side_of(parties.silos["silo0"]).group_secret("run")
    key = derive_key(secret, "person", "run", "")
    pseudonyms = [hmac.digest(key, str(person).encode(), "sha256")[:8] for person in range(USERS)]
    coins = PersonCoins(secret, "run", "", map(str, range(USERS)))
    assert coins._pseudonyms[:8] == pseudonyms[0]
    sent = b"".join(message.encode() for message in messages)
    for hidden in (secret, key, *pseudonyms):
        assert hidden not in sent
        assert hidden.hex().encode() not in sent


@BOTH
def test_a_sample_is_known_to_the_silos_and_not_to_the_server(aggregator):
    """Its store, messages included, holds neither the common secret nor a sample."""
    parties = Parties(aggregator, HALF, federation=PERSONS)
    parties.run_round(0)
    secrets = {side_of(silo).group_secret("run") for silo in parties.silos.values()}
    assert len(secrets) == 1
    kept = b"".join(parties.server.store.run._store._values.values())
    assert secrets.pop() not in kept
    assert parties.server.store.round(0).get("sample") is None


# --- one coin for a person and round ---


@BOTH
@pytest.mark.parametrize("seed", [None, 1])
def test_silos_agree_on_every_person_they_share(aggregator, seed, drawn):
    run(aggregator, HALF, 12, seed, PERSONS)
    samples = np.array(list(everyones(drawn, PERSONS).values()))
    shared = (PERSONS.counts() > 0).sum(axis=0) > 1
    assert shared.sum() > 20
    assert len(np.unique(samples, axis=0)) == 12, "every round draws its own"
    known = samples[:, (PERSONS.counts() > 0).any(axis=0)]
    assert abs(known.mean() - 0.5) < 5 * 0.5 / np.sqrt(known.size)


def test_a_seed_repeats_the_samples_and_secrets_differ(drawn):
    """Under `plain` and `masked` alike; two runs without a seed draw others, though everything else is equal."""
    found = []
    for aggregator, seed in ((Plain(), 1), (Masked(), 1), (Plain(), 2), (Plain(), None), (Plain(), None)):
        drawn.clear()
        run(aggregator, HALF, 3, seed, PERSONS)
        found.append(np.array(list(everyones(drawn, PERSONS).values())).tobytes())
    assert found[0] == found[1]
    assert len(set(found)) == 4


@BOTH
def test_a_silo_that_was_started_again_finds_the_same_coins(aggregator, drawn):
    parties = Parties(aggregator, HALF, federation=PERSONS)
    for round_ in range(4):
        parties.run_round(round_)
    for name in parties.names:
        again = parties.started(name)
        for round_ in range(4):
            sample = next(sample for n, r, _, sample in drawn if (n, r) == (name, round_))
            np.testing.assert_array_equal(again._draw_sample(round_), sample)


@BOTH
def test_in_a_later_session_no_silo_tosses_the_coins_of_an_earlier_one(aggregator):
    """A server can end a session after a silo has tossed: then silos that toss by two secrets agree on nobody."""
    parties = Parties(aggregator, HALF, federation=PERSONS)
    zero, one = (parties.silos[name] for name in ("silo0", "silo1"))
    before = zero._draw_sample(0)
    ask = lambda requests: {n: parties.silos[n].answer(m) for n, m in requests.items()}  # noqa: E731
    run_key_agreement("run", parties.names, ask, 1)
    shared = np.intersect1d(zero._persons, one._persons)
    after = zero._draw_sample(0)
    np.testing.assert_array_equal(after[shared], one._draw_sample(0)[shared])
    assert (after != before).any()


@pytest.mark.parametrize("change", [{"run": "another"}, {"profile": "ab" * 32}], ids=["run", "profile"])
def test_coins_of_another_run_or_another_reading_of_identifiers_are_other_coins(change, monkeypatch):
    """Even if the secret were the same: the session's secret is bound to both already."""
    parties = Parties(Plain(), HALF, federation=PERSONS)
    silo = parties.silos["silo0"]
    monkeypatch.setattr(side_of(silo), "group_secret", lambda run: bytes(32))
    before = silo._draw_sample(0)
    silo._tossed = None
    if "run" in change:
        silo._spec = replace(silo._spec, run=change["run"])
    else:
        silo._spec = replace(silo._spec, data=replace(silo._spec.data, identity_digest=change["profile"]))
    assert (silo._draw_sample(0) != before).any()


def test_attempts_and_releases_of_a_round_have_one_sample(drawn):
    """With a new sample for every release, a server that breaks rounds off would see many samples for one charge."""
    four = small_federation(silos=4, users=USERS, records=120)
    parties = Parties(Masked(min_silos=3), HALF, federation=four)
    lost: list[tuple[str, int]] = []

    def loses(name: str, message: Message) -> bool:
        hit = (name, message.kind) == ("silo3", "open") and message.round == 1
        lost.extend([(name, message.round)] if hit else [])
        return hit

    parties.transport.lost = loses
    for round_ in range(3):
        parties.run_round(round_)
    assert lost
    releases = {(round_, release) for _, round_, release, _ in drawn}
    assert {(1, 0), (1, 1)} <= releases
    everyones(drawn, four)  # compares all releases of a round, too
    for silo in ("silo0", "silo1", "silo2"):
        first, second = (sample for name, round_, _, sample in drawn if (name, round_) == (silo, 1))
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_rates_of_ones_own_are_kept(drawn):
    """personal.by = "sampling": whoever has a larger budget takes part more often, by coins that all silos share."""
    budgets = np.where(np.arange(USERS) % 2 == 0, 0.6, 3.0)
    federation = replace(PERSONS, user_budgets=budgets)
    personal = UserBudgets("sampling", 40, 3.0, mean_sampling=0.5, adversary="server")
    method = UldpAvg(5.0, 0.5, AVG.local, server_learning_rate=20.0, personal=personal)
    run(Plain(), method, 40, None, federation)
    samples = np.array(list(everyones(drawn, federation).values()))
    here = (PERSONS.counts() > 0).any(axis=0)
    few, many = (samples[:, here & (np.arange(USERS) % 2 == odd)].mean() for odd in (0, 1))
    assert 0 < few < 0.7 * many


# --- numbers that differ from silo to silo ---


def renumbered(federation: Federation, seed: int) -> Federation:
    """Every silo numbers persons by itself, at random; identifiers say who is who."""
    generator = np.random.default_rng(seed)
    silos = []
    for silo in federation.silos:
        place = generator.permutation(federation.users)
        identifiers = [""] * federation.users
        for person, number in enumerate(place):
            identifiers[number] = f"person {person}"
        silos.append(replace(silo, user=place[silo.user], identifiers=tuple(identifiers)))
    return replace(federation, silos=tuple(silos))


@BOTH
def test_a_sum_does_not_depend_on_how_silos_number_persons(aggregator):
    """Without one public list of ids: coins and uniform weights go by identifiers alone."""
    method = replace(HALF, local=LocalTraining(learning_rate=0.1, epochs=2))  # full batches draw nothing
    sums = []
    for federation in (renumbered(PERSONS, 1), renumbered(PERSONS, 2), renumbered(PERSONS, 3)):
        with released() as totals:
            run(aggregator, method, 3, 1, federation)
        sums.append(np.array(totals))
    assert np.abs(sums[0]).max() > 0
    for other in sums[1:]:
        # Updates are float32, and persons are computed in another order: on every CPU a sum of 12 clipped updates is
        # rounded by less than 10⁻⁶, and the sample of another person would move it by some 10⁻².
        np.testing.assert_allclose(other, sums[0], rtol=0, atol=1e-6)


def test_without_identifiers_other_numbers_are_other_persons():
    """Else the test above would compare runs that cannot differ."""
    method = replace(HALF, local=LocalTraining(learning_rate=0.1, epochs=2))
    sums = []
    for seed in (1, 2):
        federation = renumbered(PERSONS, seed)
        bare = tuple(replace(silo, identifiers=None) for silo in federation.silos)
        with released() as totals:
            run(Plain(), method, 1, 1, replace(federation, silos=bare))
        sums.append(totals[0])
    assert np.abs(sums[0] - sums[1]).max() > 1e-3


# --- a server that would draw the sample itself ---


@BOTH
def test_a_silo_takes_no_sample_from_the_server(aggregator):
    parties = Parties(aggregator, HALF, federation=PERSONS)
    parties.run_round(0)
    asked = replace(parties.last("update"), round=1)
    for sample in (np.arange(USERS) == 3, np.ones(USERS, bool), np.zeros(USERS, bool)):
        with refused("message.malformed"):
            parties.silos["silo0"].answer(replace(asked, arrays={**asked.arrays, "sample": sample}))


def test_under_plain_silos_that_sample_do_nothing_before_they_share_a_secret():
    parties = Parties(Plain(), HALF, federation=PERSONS)
    kinds = [kind.name for kind in parties.silos["silo0"].gate.script.setup]
    assert kinds == ["setup", "hello", "roster", "confirm"]
    fresh = parties.restored("silo0")
    fresh.answer(parties.last("setup"))
    ahead = Message("update", "run", fields={"session": "0" * 64}, arrays={"params": np.zeros(5, np.float32)})
    with refused("gate.order"):
        fresh.answer(ahead)
    unsampled = Parties(Plain(), AVG, federation=PERSONS)
    assert [kind.name for kind in unsampled.silos["silo0"].gate.script.setup] == ["setup"]


def test_under_plain_a_silo_of_another_session_sends_nothing():
    """A silo with an old copy of its store would toss other coins than the others."""
    parties = Parties(Plain(), HALF, federation=PERSONS)
    parties.run_round(0)
    asked = replace(parties.last("update"), round=1)
    with refused("session.unknown"):
        parties.silos["silo0"].answer(replace(asked, fields={"session": "0" * 64}))
