"""`select` in whole runs: the sum is of every person's row from their primary silo; ε holds against everyone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from silodp.accounting.events import PoissonSampled, RevealedSample, SampledReplacement, Skellam
from silodp.aggregators.masked import Masked
from silodp.data.federation import Federation
from silodp.methods import roles
from silodp_private import _private_weights
from silodp_private.crypto import oblivious_transfer, primary_silos
from silodp_private.crypto.primary_silos import PrimarySiloParameters
from support.clear import described, released
from support.masked import at, charges
from support.oracles import small_federation
from support.private import PRIMARY, SELECT, counts_of, hidden_samples, in_clear, run, spec, with_empty_silo
from support.refusals import refused
from support.wires import wire  # noqa: F401

SAMPLED_PRIMARY = replace(PRIMARY, user_sampling=0.5)
HIDDEN = replace(SELECT, hidden_sample=10)


def assert_as_in_clear(aggregator, method, federation: Federation | None = None, rounds=2) -> None:
    ratio = aggregator.sampling_ratio(method)
    if ratio is None:
        with released() as hidden:
            result = run(aggregator, method, rounds, federation=federation)
        drawn = None
    else:
        with released() as hidden, hidden_samples(ratio) as both:
            result = run(aggregator, method, rounds, federation=federation)
        drawn = both.drawn
    with released() as clear:
        twin = run(in_clear(aggregator, drawn), method, rounds, federation=federation)
    assert len(hidden) == rounds
    np.testing.assert_array_equal(hidden, clear)
    assert described(result) == described(twin)
    assert [g.epsilon for g in result.guarantees.values()] == [g.epsilon for g in twin.guarantees.values()]


@settings(max_examples=4, deadline=None)
@given(
    silos=st.integers(2, 4),
    users=st.integers(1, 14),
    records=st.integers(0, 60),
    rate=st.sampled_from([1.0, 0.5]),
    hidden=st.booleans(),
    odd=st.booleans(),
)
@example(3, 20, 8, 1.0, False, False)  # persons without a record anywhere
@example(2, 3, 60, 0.5, True, False)  # two silos
@example(4, 12, 60, 0.5, True, True)  # a silo without records; three of four needed
@example(3, 5, 0, 0.5, False, False)  # no records at all
def test_sums_are_those_in_clear(silos, users, records, rate, hidden, odd):
    federation = small_federation(silos=silos, users=users, records=records)
    if odd:
        federation = with_empty_silo(federation)
    aggregator = replace(
        HIDDEN if hidden and rate < 1 else SELECT, min_silos=3 if odd and silos == 4 else None
    )
    assert_as_in_clear(aggregator, replace(PRIMARY, user_sampling=rate), federation)


def test_it_is_the_run_of_masked_with_primary_silos_in_clear_but_for_what_the_server_knows(monkeypatch):
    """The same grid, noise and rows, so the same model; ε against server and silos holds here alone."""
    federation = small_federation(silos=4)
    primary = PrimarySiloParameters(bytes(32), federation.users, 4).find_primary_silos(counts_of(federation))
    with released() as private:
        hidden = run(SELECT, PRIMARY, federation=federation)
    monkeypatch.setattr(roles, "weigh_primary_silo", lambda counts: primary * (counts > 0).astype(float))
    with released() as clear:
        masked = run(Masked(units=1 << 16), PRIMARY, federation=federation)
    np.testing.assert_array_equal(private, clear)
    assert described(hidden) == described(masked)
    assert hidden.guarantees["released"].epsilon == masked.guarantees["released"].epsilon
    for adversary in ("server", "silo"):
        assert hidden.guarantees[adversary].epsilon is not None
        assert masked.guarantees[adversary].epsilon is None


def test_everyone_counts_once_over_all_silos(monkeypatch):
    """Person u's row is the unit vector e_u in every silo, so the sum is Σ_s w[s,u], as the protocol gives it."""
    users = 6
    federation = small_federation(users=users, features=users - 1)
    still = replace(PRIMARY, noise_multiplier=0.0, clip=1.0)
    units = SELECT.grid(spec(still, size=users)).units
    rows = np.arange(users), np.eye(users, dtype=np.int64) * units
    monkeypatch.setattr(_private_weights, "integer_rows", lambda *_: iter([rows]))
    with released() as totals:
        run(SELECT, still, rounds=1, federation=federation)
    np.testing.assert_array_equal(totals[0], np.ones(users))


def test_what_is_charged():
    """One clip against whoever sees the sum; two against another silo, which a primary silo may move into."""
    whole = {view: SELECT.event(spec(PRIMARY), v) for view, v in SELECT.views(PRIMARY, 3).items()}
    assert all(isinstance(event, Skellam) for event in whole.values())
    sigma, shares = PRIMARY.noise_multiplier, np.sqrt(2 / 3)
    assert whole["released"].noise_multiplier == whole["server"].noise_multiplier == pytest.approx(sigma)
    assert whole["silo"].noise_multiplier == pytest.approx(sigma * shares / 2)
    known, unknown = (
        {view: of.event(spec(SAMPLED_PRIMARY), v) for view, v in of.views(SAMPLED_PRIMARY, 3).items()}
        for of in (SELECT, HIDDEN)
    )
    assert isinstance(known["server"], RevealedSample)
    assert isinstance(unknown["server"], PoissonSampled)
    assert isinstance(known["silo"], SampledReplacement)
    assert isinstance(unknown["silo"], SampledReplacement)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_silo_that_is_lost_before_its_answer_costs_nothing(hidden, wire, tmp_path):  # noqa: F811
    """The further attempt sends no corrections again, and adds up the same release without the lost silo."""
    wire.fails = at("silo2", "update", 0, "before")
    assert_attempts(hidden, tmp_path)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_silo_that_is_lost_at_the_opening_costs_a_release(hidden, wire, tmp_path):  # noqa: F811
    wire.fails = at("silo2", "open", 0, "after")
    assert_attempts(hidden, tmp_path, releases=2)


def assert_attempts(hidden: bool, folder, releases: int = 1) -> None:
    four, aggregator = small_federation(silos=4), replace(HIDDEN if hidden else SELECT, min_silos=3)
    drawn = None
    if hidden:
        with released() as totals, hidden_samples(aggregator.sampling_ratio(SAMPLED_PRIMARY)) as both:
            result = run(aggregator, SAMPLED_PRIMARY, 1, federation=four, out=folder)
        drawn = both.drawn
    else:
        with released() as totals:
            result = run(aggregator, SAMPLED_PRIMARY, 1, federation=four, out=folder)
    assert len(charges(folder)) == releases
    with released() as clear:
        twin = run(in_clear(aggregator, drawn), SAMPLED_PRIMARY, 1, federation=four)
    np.testing.assert_array_equal(totals, clear)
    assert result.epsilon == twin.epsilon


def test_corrections_travel_once_in_a_release(wire):  # noqa: F811
    wire.fails = at("silo2", "update", 0, "before")
    run(replace(SELECT, min_silos=3), PRIMARY, 1, federation=small_federation(silos=4))
    sent = [(m.attempt, len(m.blobs["corrections"])) for _, m in wire.received if m.kind == "update"]
    assert {size for attempt, size in sent if attempt == 0} == {12 * 5 * 4}
    assert {size for attempt, size in sent if attempt == 1} == {0}


@pytest.mark.parametrize("weighting", ["uniform", "records", "present"])
def test_other_weights_are_refused(weighting):
    with refused("argument.conflict") as error:
        run(SELECT, replace(PRIMARY, weighting=weighting))
    assert error.value.field == "aggregator"
    assert "'primary_silo'" in str(error.value)


def test_more_silos_than_a_word_has_bits_are_refused():
    with refused("argument.value") as error:
        run(SELECT, PRIMARY, federation=small_federation(silos=65))
    assert "64 at most" in str(error.value)


@pytest.mark.parametrize("fewer", [0, 1])
def test_more_persons_than_transfers_compare_are_refused_before_anything_is_sent(fewer, wire, monkeypatch):  # noqa: F811
    # As many transfers at once as 12 persons in 3 silos need, or fewer: 3 pairs of silos, 6 bits of an entry's number.
    for module in (primary_silos, oblivious_transfer):
        monkeypatch.setattr(module, "MAX_TRANSFERS", 12 * 3 * 6 - fewer)
    federation = small_federation(silos=3, users=12)
    if not fewer:
        run(SELECT, PRIMARY, federation=federation)
        return
    with refused("argument.value") as error:
        run(SELECT, PRIMARY, federation=federation)
    assert error.value.field == "aggregator"
    assert "11 persons" in str(error.value)
    assert not wire.received
