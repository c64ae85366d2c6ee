"""Skellam noise: its Rényi bound lies above the divergence computed from the distribution itself, sampled or not."""

import math

import numpy as np
import pytest
from scipy import stats

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import (
    Gaussian,
    PoissonSampled,
    RevealedSample,
    Skellam,
    event_from_dict,
    event_to_dict,
    to_discrete,
)
from silodp.accounting.rdp import compute_rdp
from silodp.errors import SilodpError


def probabilities(variance: float, shift: int, reach: int) -> np.ndarray:
    return stats.skellam.pmf(np.arange(-reach, reach + 1) - shift, variance / 2, variance / 2)


def renyi(p: np.ndarray, q: np.ndarray, alpha: float) -> float:
    with np.errstate(divide="ignore"):
        terms = alpha * np.log(p) + (1 - alpha) * np.log(q)
    return float(np.logaddexp.reduce(terms[np.isfinite(terms)]) / (alpha - 1))


@pytest.mark.parametrize("units", [1, 2, 5, 12])
@pytest.mark.parametrize("sigma", [0.8, 2.0, 5.0])
def test_the_bound_lies_just_above_the_true_divergence(units, sigma):
    """One coordinate that moves by `units` steps: the case the bound is about."""
    variance = (sigma * units) ** 2
    reach = int(14 * math.sqrt(variance) + 20 * units + 30)
    still, moved = probabilities(variance, 0, reach), probabilities(variance, units, reach)
    orders = (2.0, 3.0, 5.0, 9.0)
    bounds = compute_rdp(Skellam(sigma, units, 1), orders)
    for alpha, bound in zip(orders, bounds, strict=True):
        true = renyi(moved, still, alpha)
        assert true <= bound * (1 + 1e-9)
        if variance >= 25:  # with less noise the bound is loose; it never matters there
            assert bound <= 1.6 * true


@pytest.mark.parametrize(("sigma", "units", "dimension"), [(0.3, 2, 1), (2.0, 5, 9), (2.0, 3, 100)])
def test_the_bound_is_the_theorems(sigma, units, dimension):
    """Agarwal, Kairouz and Liu 2021, Theorem 3.5; the divergence of one coordinate may lie a little below it."""
    orders, mu, norm_1 = np.array([2.0, 3.0, 9.0]), (sigma * units) ** 2, min(dimension**0.5, units) * units
    curved = ((2 * orders - 1) * units**2 + 6 * norm_1) / (4 * mu**2)
    theorem = orders * units**2 / (2 * mu) + np.minimum(curved, 3 * norm_1 / (2 * mu))
    np.testing.assert_allclose(compute_rdp(Skellam(sigma, units, dimension), tuple(orders)), theorem)


@pytest.mark.parametrize("q", [0.05, 0.3, 0.8])
def test_the_sampled_bound_holds_in_both_directions(q):
    sigma, units = 1.5, 3
    variance = (sigma * units) ** 2
    still, moved = probabilities(variance, 0, 160), probabilities(variance, units, 160)
    mixed = (1 - q) * still + q * moved
    orders = (2.0, 4.0, 8.0)
    for alpha, bound in zip(
        orders, compute_rdp(PoissonSampled(q, Skellam(sigma, units, 1)), orders), strict=True
    ):
        worst = max(renyi(mixed, still, alpha), renyi(still, mixed, alpha))
        assert worst <= bound * (1 + 1e-9)
        assert bound <= 1.6 * worst


def test_between_integer_orders_the_bound_still_holds():
    sigma, units = 1.5, 3
    still, moved = (probabilities((sigma * units) ** 2, shift, 160) for shift in (0, units))
    orders = (1.1, 1.5, 2.5, 3.3, 7.9)
    for alpha, bound in zip(orders, compute_rdp(Skellam(sigma, units, 1), orders), strict=True):
        assert renyi(moved, still, alpha) <= bound


def test_on_a_fine_grid_it_costs_what_gaussian_noise_of_the_same_spread_costs():
    fine = Skellam(5.0, 1 << 18, 5012)
    for wrap in (lambda e: e, lambda e: PoissonSampled(0.3, e), lambda e: RevealedSample(0.3, e)):
        skellam = compute_epsilon([(wrap(fine), 100)], 1e-5, "rdp")
        gaussian = compute_epsilon([(wrap(Gaussian(5.0)), 100)], 1e-5, "rdp")
        assert gaussian <= skellam <= 1.02 * gaussian
    coarse, fine_too = (
        compute_epsilon([(Skellam(1.0, units, 5012), 1)], 1e-5, "rdp") for units in (4, 1 << 18)
    )
    assert coarse > 1.02 * fine_too


def test_fewer_units_are_never_charged_less():
    costs = [
        compute_epsilon([(Skellam(2.0, units, 1000), 10)], 1e-5, "rdp")
        for units in (1, 8, 64, 1 << 12, 1 << 18)
    ]
    assert costs == sorted(costs, reverse=True)


def test_only_renyi_orders_know_it():
    for event in (Skellam(5.0, 64, 10), PoissonSampled(0.5, Skellam(5.0, 64, 10))):
        with pytest.raises(SilodpError, match="choose 'rdp'"):
            compute_epsilon([(event, 1)], 1e-5, "pld")
    with pytest.raises(SilodpError, match="units"):
        compute_epsilon([(Skellam(5.0, 0, 10), 1)], 1e-5, "rdp")


def test_events_of_it_survive_json_and_are_made_from_gaussian_ones():
    for event in (Gaussian(5.0), PoissonSampled(0.5, Gaussian(5.0)), RevealedSample(0.5, Gaussian(5.0))):
        made = to_discrete(event, 64, 10, reach=2.0)
        assert event_from_dict(event_to_dict(made)) == made
        inner = made if isinstance(made, Skellam) else made.event
        assert inner == Skellam(2.5, 64, 10)
