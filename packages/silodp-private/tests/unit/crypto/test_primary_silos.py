"""Primary silos: shares add up to the silo with most records, and no party's part says anything."""

from __future__ import annotations

import copy
import secrets
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from silodp.crypto.sampling import SamplingRatio
from silodp.errors import SilodpError
from silodp_private.crypto.oblivious_transfer import BaseTransfers, TransferSender
from silodp_private.crypto.primary_silos import CLASSES, PrimarySiloParameters, classify_counts
from silodp_private.crypto.shares import SERVER_CHOOSES, FirstSilo, ShareServer, SiloShares

SESSION, SECRET = bytes(range(32)), secrets.token_bytes(32)
BASE = BaseTransfers(SESSION, SERVER_CHOOSES)
SENDER, REPLY = TransferSender.accept(SESSION, SERVER_CHOOSES, BASE.offer)
RECEIVER = BASE.receiver(REPLY)


def parties(plan: PrimarySiloParameters) -> tuple[ShareServer, FirstSilo]:
    """Both parties, on base transfers as if never used."""
    return ShareServer(plan, copy.copy(RECEIVER)), FirstSilo(SiloShares(plan, SECRET), copy.copy(SENDER))


def set_up(counts: NDArray[np.integer]) -> tuple[PrimarySiloParameters, FirstSilo, list[NDArray[np.integer]]]:
    """All that the server gets: masked classes, shares of wins, and its words."""
    plan = PrimarySiloParameters(SESSION, counts.shape[1], len(counts))
    server, zero = parties(plan)
    masked = np.stack([plan.mask_classes(zero.silo, s, own) for s, own in enumerate(counts)])
    pairs = plan.ask_comparisons(server, masked)
    won = pairs.entries(plan.offer_comparisons(zero, pairs.message), 1)
    asked = plan.ask_primary_silos(server, won)
    return (
        plan,
        zero,
        [masked, won, plan.pack(asked.entries(plan.offer_primary_silos(zero, asked.message), 1))],
    )


def primary_silo_in_words(plan: PrimarySiloParameters, counts: NDArray[np.integer], user: int) -> int:
    """The definition, in Python: the largest class, and among equals the largest number of the public order."""
    bounds = (0, 1, 2, 4, 8, 16, 32)
    order = plan.order()
    ranks = [
        (sum(int(n) > bound for bound in bounds), int(order[s, user])) for s, n in enumerate(counts[:, user])
    ]
    return ranks.index(max(ranks))


def test_classes_are_those_of_the_specification():
    lasts = [0, 1, 2, 4, 8, 16, 32]
    for number, last in enumerate(lasts):
        assert classify_counts(np.array([last])).tolist() == [number]
        assert classify_counts(np.array([last + 1])).tolist() == [number + 1]
    assert classify_counts(np.array([10**9, 2**53])).tolist() == [CLASSES - 1] * 2


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 9), st.integers(1, 12), st.integers(0, 80), st.integers(0, 2**32 - 1))
@example(64, 2, 40, 0)
@example(2, 5, 0, 0)  # nobody has a record anywhere
def test_everyone_has_one_primary_silo_with_most_of_their_records(silos, users, most, seed):
    counts = np.random.default_rng(seed).integers(0, most + 1, (silos, users))
    plan, zero, (_, _, words) = set_up(counts)
    primary = plan.unpack(words ^ zero.silo.shares())
    assert (primary.sum(axis=0) == 1).all()
    assert primary.argmax(axis=0).tolist() == [primary_silo_in_words(plan, counts, u) for u in range(users)]
    assert (primary == plan.find_primary_silos(counts)).all()


def uniform(values: NDArray[np.integer], size: int) -> bool:
    return bool(stats.chisquare(np.bincount(values.astype(int).ravel(), minlength=size)).pvalue > 1e-6)


def test_nothing_that_the_server_gets_depends_on_anyones_primary_silo():
    """For persons who are all alike, with all their records in silo 2 of 4."""
    counts = np.zeros((4, 3000), int)
    counts[2] = 50
    plan, zero, (masked, won, words) = set_up(counts)
    assert all(uniform(of_silo, CLASSES) for of_silo in masked)
    assert all(uniform(of_pair, plan.wins) for of_pair in won.reshape(6, -1))
    assert uniform(words, 16)
    assert uniform(zero.silo.shares(), 16)
    # Two vectors together, too: what is uniform alone may be known from the other.
    assert uniform(masked[0].astype(int) * 8 + masked[2], 64)
    first, second = won.reshape(6, -1)[:2].astype(int)
    assert uniform(first * 4 + second, 16)


def test_masks_are_of_one_session_and_one_use():
    plan = PrimarySiloParameters(SESSION, 4000, 3)
    other = replace(plan, session=bytes(32))
    one, another = SiloShares(plan, SECRET), SiloShares(other, SECRET)
    zeros = np.zeros(4000, int)
    drawn = [plan.mask_classes(one, s, zeros) for s in range(3)] + [other.mask_classes(another, 0, zeros)]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert abs((a == b).mean() - 1 / CLASSES) < 0.03
    assert abs((one.shares() == another.shares()).mean() - 1 / 8) < 0.03
    assert abs((one.masks(0, "users") == one.masks(1, "users")).mean() - 1 / 8) < 0.03


def test_the_order_is_public_and_favors_no_silo():
    plan = PrimarySiloParameters(SESSION, 6000, 3)
    firsts = plan.order().argmax(axis=0)
    assert stats.chisquare(np.bincount(firsts, minlength=3)).pvalue > 1e-6
    assert all(len(set(column)) == 3 for column in plan.order().T.tolist())
    # The same in every session, so that a run that is repeated or resumed has the same primary silos.
    assert (plan.order() == replace(plan, session=bytes(32)).order()).all()
    assert (plan.order() != replace(plan, users=6001).order()[:, :6000]).mean() > 0.9


def test_a_sampled_persons_primary_silo_stays_and_the_others_have_none():
    counts = np.random.default_rng(0).integers(0, 9, (5, 40))
    plan, zero, (_, _, words) = set_up(counts)
    server, primary = ShareServer(plan, copy.copy(RECEIVER)), plan.find_primary_silos(counts)
    for round_, rate in ((0, 0.0), (1, 0.5), (4, 1.0)):
        drawn = (np.random.default_rng(round_).random(40) < rate).astype(int)
        asked = server.sample(round_, words, drawn)
        mine = asked.finish(zero.sample(round_, "use", asked.message))
        assert (plan.unpack(mine ^ zero.silo.masks(round_, "use")) == primary * drawn).all()


def test_the_rate_of_a_hidden_sample_is_that_of_the_cells():
    plan = PrimarySiloParameters(SESSION, 30, 3)
    server, zero = parties(plan)
    asked = server.sample_unknown(0, SamplingRatio(1, 4))
    answer = zero.sample_unknown(0, "use", SamplingRatio(1, 4), asked.message)
    assert int(asked.finish(answer).max()) < 8


def test_each_lookup_is_answered_once_in_a_session():
    """A second comparison of the same silos would show both classes' order."""
    plan = PrimarySiloParameters(SESSION, 5, 3)
    _, zero = parties(plan)
    first, second = (
        plan.ask_comparisons(parties(plan)[0], np.full((3, 5), masked, np.uint8)) for masked in (0, 1)
    )
    plan.offer_comparisons(zero, first.message)
    with pytest.raises(SilodpError, match="was used"):
        plan.offer_comparisons(zero, second.message)


def test_what_cannot_be_is_refused():
    for silos in (1, 65):
        with pytest.raises(SilodpError, match="2 to 64"):
            PrimarySiloParameters(SESSION, 3, silos)
    plan = PrimarySiloParameters(SESSION, 3, 2)
    for wrong in (np.full((2, 3), 8, np.uint8), np.zeros((3, 3), np.uint8)):
        with pytest.raises(SilodpError, match="masked classes"):
            plan.ask_comparisons(parties(plan)[0], wrong)
