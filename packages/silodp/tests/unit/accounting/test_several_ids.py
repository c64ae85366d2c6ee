"""A person under several ids, each with another coin: the estimate against the divergences themselves."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.special import logsumexp

from silodp.accounting.events import (
    Gaussian,
    PoissonSampled,
    RevealedSample,
    SampledReplacement,
    Skellam,
    remove_amplification,
    replace_unit,
    reveal_samples,
    scale_shift,
)
from silodp.accounting.rdp import compute_rdp

ORDERS = (2.0, 3.0, 5.0, 8.0, 16.0, 32.0)
X = np.linspace(-60, 60, 24_001)
_DX = X[1] - X[0]

# By pattern, how far each id moves the sum in clips: S silos with weights 1/S.
PATTERNS = {
    "another id in each of 4 silos": [0.25] * 4,
    "two ids in one silo of 4": [0.5 + 0.25, 0.25, 0.25],
    "two ids in one silo, linked elsewhere": [0.25, 1.0],
    "two ids in every silo": [1.0, 1.0],
    "eight ids in 4 silos": [0.25] * 8,
    "another id in each of 10 silos": [0.1] * 10,
}


def log_mixture(moves: list[float], q: float, sigma: float) -> np.ndarray:
    """ln of the density of the noisy sum, in units of the noise, over all ways the coins may fall."""
    means: dict[float, float] = {}  # of ways that move it equally far, only their number counts
    for fallen in product((False, True), repeat=len(moves)):
        share = float(np.prod([q if one else 1 - q for one in fallen]))
        mean = round(sum(move for move, one in zip(moves, fallen, strict=True) if one), 9)
        means[mean] = means.get(mean, 0.0) + share
    parts = [np.log(share) - (X - mean / sigma) ** 2 / 2 for mean, share in means.items()]
    return np.asarray(logsumexp(parts, axis=0)) - np.log(2 * np.pi) / 2


def divergence(p: np.ndarray, q: np.ndarray, order: float) -> float:
    """D_order(P‖Q) by summing on a grid."""
    return float(logsumexp(order * p + (1 - order) * q) + np.log(_DX)) / (order - 1)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 5.0])
@pytest.mark.parametrize("q", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_coin_for_all_ids_costs_most(pattern, q, sigma):
    moves = PATTERNS[pattern]
    orders = tuple(order for order in ORDERS if order * sum(moves) / sigma < 50)  # else beyond the grid
    event = scale_shift(PoissonSampled(q, Gaussian(sigma)), sum(moves))
    bound = compute_rdp(event, orders)
    present, absent = log_mixture(moves, q, sigma), log_mixture([], q, sigma)
    for order, most in zip(orders, bound, strict=True):
        assert divergence(present, absent, order) <= most * (1 + 1e-6) + 1e-12
        assert divergence(absent, present, order) <= most * (1 + 1e-6) + 1e-12


def test_the_bound_is_reached_by_one_id():
    bound = compute_rdp(PoissonSampled(0.1, Gaussian(1.0)), ORDERS)
    present, absent = log_mixture([1.0], 0.1, 1.0), log_mixture([], 0.1, 1.0)
    found = [divergence(present, absent, order) for order in ORDERS]
    np.testing.assert_allclose(found, bound, rtol=1e-5)


def test_for_single_events_it_is_false():
    # Total variation of ten ids with ten coins exceeds that of one coin: so the rows are estimates by Rényi orders.
    several = log_mixture([0.1] * 10, 0.1, 0.5)
    one = log_mixture([1.0], 0.1, 0.5)
    absent = log_mixture([], 0.1, 0.5)
    distance = [float(np.abs(np.exp(p) - np.exp(absent)).sum() * _DX / 2) for p in (several, one)]
    assert distance[0] / distance[1] == pytest.approx(1.156, abs=0.002)


def test_events_are_changed_where_the_noise_is():
    skellam = Skellam(4.0, 1000, 10)
    assert scale_shift(PoissonSampled(0.1, skellam), 2) == PoissonSampled(0.1, Skellam(2.0, 1000, 10))
    assert replace_unit(Gaussian(4.0)) == Gaussian(2.0)
    assert replace_unit(PoissonSampled(0.1, Gaussian(4.0))) == SampledReplacement(0.1, Gaussian(4.0))
    assert replace_unit(RevealedSample(0.1, Gaussian(4.0))) == RevealedSample(0.1, Gaussian(2.0))
    assert reveal_samples(PoissonSampled(0.1, skellam)) == RevealedSample(0.1, skellam)
    assert reveal_samples(SampledReplacement(0.1, Gaussian(4.0))) == RevealedSample(0.1, Gaussian(2.0))
    assert remove_amplification(reveal_samples(PoissonSampled(0.1, skellam))) == skellam
