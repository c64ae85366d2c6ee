"""Calibration never overshoots, and is tight."""

import math

import pytest
from hypothesis import strategies as st

from silodp.accounting import calibration
from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.calibration import (
    calibrate_noise_multiplier,
    calibrate_rounds,
    calibrate_sampling_probability,
)
from silodp.accounting.events import Gaussian, Group, NonPrivate, PoissonSampled, RevealedSample
from silodp.errors import SilodpError
from support.examples import few_or_many

DELTA = 1e-5
MAKERS = {
    "gaussian": lambda q, s: Gaussian(s),
    "sampled": lambda q, s: PoissonSampled(q, Gaussian(s)),
    "known": lambda q, s: RevealedSample(q, Gaussian(s)),
    "group": lambda q, s: Group(3, PoissonSampled(q, Gaussian(s))),
}


def times(event):
    """Return the charges of T rounds that are alike, as a function of T."""
    return lambda rounds: [(event, rounds)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
@few_or_many(1, 3, q=st.floats(0.05, 0.9), rounds=st.integers(1, 300), target=st.floats(0.1, 20))
def test_noise_never_overshoots_and_is_tight(kind, q, rounds, target):
    def make(sigma):
        return [(MAKERS[kind](q, sigma), rounds)]

    sigma = calibrate_noise_multiplier(make, target, DELTA)
    assert compute_epsilon(make(sigma), DELTA) <= target
    assert compute_epsilon(make(sigma * (1 - 1e-4)), DELTA) > target


@pytest.mark.parametrize("kind", ["sampled", "known", pytest.param("group", marks=pytest.mark.slow)])
@few_or_many(1, 2, sigma=st.floats(1, 8), rounds=st.integers(1, 300), target=st.floats(0.1, 20))
def test_sampling_never_overshoots_and_is_tight(kind, sigma, rounds, target):
    def make(q):
        return [(MAKERS[kind](q, sigma), rounds)]

    q = calibrate_sampling_probability(make, target, DELTA)
    assert compute_epsilon(make(q), DELTA) <= target
    assert q == 1.0 or compute_epsilon(make(q * (1 + 1e-4)), DELTA) > target


@pytest.mark.parametrize("kind", MAKERS)
@few_or_many(1, 3, q=st.floats(0.05, 0.9), sigma=st.floats(1, 10), target=st.floats(0.1, 20))
def test_rounds_are_the_most_that_fit(kind, q, sigma, target):
    event = MAKERS[kind](q, sigma)
    most = calibrate_rounds(times(event), target, DELTA)
    assert compute_epsilon([(event, most)], DELTA) <= target < compute_epsilon([(event, most + 1)], DELTA)


def test_by_rdp():
    sigma = calibrate_noise_multiplier(lambda s: [(PoissonSampled(0.5, Gaussian(s)), 100)], 2.0, DELTA, "rdp")
    event = PoissonSampled(0.5, Gaussian(sigma))
    assert 2.0 * (1 - 1e-3) <= compute_epsilon([(event, 100)], DELTA, "rdp") <= 2.0
    most = calibrate_rounds(times(event), 2.0, DELTA, "rdp")
    assert (
        compute_epsilon([(event, most)], DELTA, "rdp")
        <= 2.0
        < compute_epsilon([(event, most + 1)], DELTA, "rdp")
    )


def test_specs_table_backwards():
    assert calibrate_noise_multiplier(lambda s: [(Gaussian(s), 100)], 9.9973, DELTA) == pytest.approx(
        5.0, rel=1e-4
    )
    assert calibrate_rounds(times(Gaussian(5.0)), 9.9973, DELTA) == 100
    assert calibrate_sampling_probability(
        lambda q: [(PoissonSampled(q, Gaussian(5.0)), 100)], 4.488, DELTA
    ) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_rounds_stop_at_the_most_asked_for(most):
    assert calibrate_rounds(times(Gaussian(1e5)), 5.0, DELTA, most=most) == most


def test_no_round_at_all():
    assert calibrate_rounds(times(Gaussian(0.1)), 0.5, DELTA) == 0
    assert calibrate_rounds(times(Gaussian(0.0)), 0.5, DELTA) == 0
    assert calibrate_rounds(times(Gaussian(5.0)), 5.0, DELTA, most=0) == 0


def test_edge_holds_where_the_cost_jumps():
    """A step, where every secant misleads."""
    calls = []

    def excess(x):
        calls.append(x)
        return 3.0 if x < math.pi else -1e-9

    edge = calibration._edge(excess, 8.0, 0.0, 1e-4)
    assert math.pi <= edge <= math.pi + 1e-4
    assert len(calls) < 80


def test_unreachable_targets_are_refused_in_one_sentence():
    with pytest.raises(SilodpError, match=r"out of reach in 1,000,000,000,000,000 rounds.*larger epsilon"):
        calibrate_noise_multiplier(lambda s: [(Gaussian(s), 10**15)], 1.0, DELTA)
    with pytest.raises(SilodpError, match="out of reach"):
        calibrate_sampling_probability(lambda q: [(PoissonSampled(q, Gaussian(0.0)), 100)], 1.0, DELTA)
    with pytest.raises(SilodpError, match="counts disclosed"):
        calibrate_noise_multiplier(lambda s: [(NonPrivate("counts disclosed"), 100)], 1.0, DELTA)
    for target in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(SilodpError, match="target"):
            calibrate_noise_multiplier(lambda s: [(Gaussian(s), 100)], target, DELTA)
    with pytest.raises(SilodpError, match="delta"):
        calibrate_rounds(times(Gaussian(5.0)), 1.0, 0.0)
