"""Weights that nobody sees, in whole runs: what the server releases is, bit for bit, what it would be in clear."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from silodp.methods import roles
from silodp.runtime.silo import Silo
from silodp.training.sgd.local import LocalTraining
from silodp_private import _private_weights
from silodp_private.lattice import Lattice
from silodp_private.paillier.aggregator import Paillier
from support.clear import described, released
from support.oracles import small_federation
from support.private import (
    LATTICE,
    PAILLIER,
    RECORDS,
    SAMPLED,
    counts_of,
    in_clear,
    run,
    spec,
    with_empty_silo,
)
from support.refusals import refused

BOTH = pytest.mark.parametrize("aggregator", [LATTICE, PAILLIER], ids=lambda a: a.name)


def assert_as_in_clear(aggregator, method, federation=None, rounds=2) -> None:
    with released() as hidden:
        result = run(aggregator, method, rounds, federation=federation)
    with released() as clear:
        twin = run(in_clear(aggregator), method, rounds, federation=federation)
    assert len(hidden) == rounds
    np.testing.assert_array_equal(hidden, clear)
    assert described(result) == described(twin)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(
    private=st.sampled_from([LATTICE, PAILLIER]),
    silos=st.integers(2, 4),
    users=st.integers(1, 14),
    records=st.integers(0, 60),
    cap=st.integers(1, 6),
    rate=st.sampled_from([1.0, 0.5]),
    sigma=st.sampled_from([0.0, 5.0]),
    odd=st.booleans(),
)
@example(LATTICE, 3, 20, 8, 2, 1.0, 5.0, False)  # persons without a record anywhere
@example(PAILLIER, 3, 20, 8, 2, 1.0, 5.0, False)
@example(LATTICE, 2, 3, 60, 1, 1.0, 5.0, False)  # everyone beyond the cap; two silos
@example(PAILLIER, 2, 3, 60, 1, 0.5, 5.0, False)
@example(LATTICE, 4, 12, 60, 6, 1e-9, 5.0, True)  # nobody drawn; a silo without records; three of four needed
@example(PAILLIER, 4, 12, 60, 6, 1e-9, 5.0, True)
@example(LATTICE, 3, 5, 0, 1, 0.5, 0.0, True)  # no records at all, and no noise
@example(PAILLIER, 3, 5, 0, 1, 0.5, 0.0, True)
def test_sums_are_those_in_clear(private, silos, users, records, cap, rate, sigma, odd):
    """`odd`: with a silo that has no records, and, of four, with three that suffice."""
    federation = small_federation(silos=silos, users=users, records=records)
    if odd:
        federation = with_empty_silo(federation)
    aggregator = replace(private, count_cap=cap, min_silos=3 if odd and silos == 4 else None)
    method = replace(RECORDS, user_sampling=rate, noise_multiplier=sigma)
    assert_as_in_clear(aggregator, method, federation, rounds=1 if rate == 1 else 2)


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize(
    "private",
    [Lattice(), Paillier(count_cap=20, key_bits=512, insecure_for_tests=True)],
    ids=lambda a: a.name,
)
@pytest.mark.slow
def test_a_training_run_on_heart_disease_is_the_one_in_clear(private, rate, heart):
    local = LocalTraining(learning_rate=0.001, epochs=2, batch_size=8)
    method = replace(RECORDS, clip=0.1, local=local, user_sampling=rate, server_momentum=0.5)
    assert_as_in_clear(private, method, heart)


def test_a_key_that_is_secure_adds_up_the_same():
    assert_as_in_clear(Paillier(count_cap=3), SAMPLED, small_federation(users=4), rounds=1)


@BOTH
@pytest.mark.parametrize("weighting", ["records", "present"])
def test_the_model_is_that_of_the_floating_run_up_to_what_is_stated(aggregator, weighting, monkeypatch):
    """Rows lose under a grid step per coordinate, weights under N/2^k; what stays of the noise is under a step each."""
    still = replace(RECORDS, noise_multiplier=0.0, weighting=weighting)
    private = replace(aggregator, count_cap=20)
    if aggregator.name == "paillier":  # a dummy record for everyone
        monkeypatch.setattr(roles, "weigh_by_records", lambda counts: counts / (counts.sum(axis=0) + 1))
    with released() as hidden:
        result = run(private, still, rounds=1)
    assert result.guarantees["server"].reason == "noise_multiplier is 0", "and not that counts were disclosed"
    with released() as floats:
        run("plain", still, rounds=1)
    persons, silos, most = 12, 3, counts_of(small_federation()).sum(axis=0).max()
    floored = persons * still.clip * most / 2**20 if aggregator.name == "lattice" else 0.0
    steps = (persons + silos) * in_clear(private).grid(spec(still)).step
    assert np.abs(hidden[0] - floats[0]).max() <= floored + steps
    assert np.abs(floats[0]).max() > 100 * (floored + steps), "a difference that would show"


@BOTH
def test_a_primary_silo_is_found_by_nobody_under_private_weighting(aggregator):
    with refused("argument.conflict") as error:
        run(aggregator, replace(RECORDS, weighting="primary_silo"))
    assert error.value.field == "aggregator"


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
@pytest.mark.parametrize("weighting", ["present", "records", "primary_silo"])
def test_weights_in_clear_show_what_they_need_and_nothing_is_promised_to_who_sees_it(
    aggregator, weighting, monkeypatch
):
    """By presence a silo sends ones for the persons it has; the others need counts."""
    sent = []
    counted = Silo._counts
    monkeypatch.setattr(Silo, "_counts", lambda self, asked: sent.append(counted(self, asked)) or sent[-1])
    result = run(aggregator, replace(RECORDS, weighting=weighting), rounds=1)
    counts = counts_of(small_federation())
    expected = np.minimum(counts, 1) if weighting == "present" else counts
    np.testing.assert_array_equal([answer.arrays["counts"] for answer in sent], expected)
    assert counts.max() > 1
    assert result.guarantees["released"].epsilon is not None
    for adversary in ("server", "silo"):
        assert result.guarantees[adversary].epsilon is None
        assert "counts disclosed" in str(result.guarantees[adversary].reason)


@BOTH
@pytest.mark.parametrize("cap", [2, 20])
def test_everyone_weighs_at_most_one_over_all_silos_and_no_count_lifts_it(aggregator, cap, monkeypatch):
    """Person u's row is the unit vector e_u in every silo, so the sum is Σ_s w[s,u], as the protocol gives it."""
    users, silos = 6, 3
    federation = small_federation(users=users, features=users - 1)
    private = replace(aggregator, count_cap=cap)
    still = replace(RECORDS, noise_multiplier=0.0, clip=1.0)
    units = in_clear(private).grid(replace_population(still, users)).units
    rows = np.arange(users), np.eye(users, dtype=np.int64) * units
    monkeypatch.setattr(_private_weights, "integer_rows", lambda *_: iter([rows]))
    with released() as totals:
        run(private, still, rounds=1, federation=federation)
    totals_of = counts_of(federation, cap).sum(axis=0)
    assert (counts_of(federation) > 2).any(), "some are beyond the cap"
    weights = totals_of / (totals_of + 1) if aggregator.name == "paillier" else np.ones(users)
    np.testing.assert_allclose(totals[0], weights, atol=silos * 2.0**-12)
    assert (totals[0] <= 1 + silos * 2.0**-16).all(), "but for the uniform part of the noise"


def replace_population(method, users: int):
    known = spec(method, size=users)
    return replace(known, data=replace(known.data, users=users))
