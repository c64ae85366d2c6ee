"""Rényi differential privacy of one step, and its conversion to (ε, δ), through dp_accounting."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as library
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from silodp.privacy.events import Gaussian, GroupSampled, KnownSample, Mechanism, PoissonSampled, Skellam

ORDERS: tuple[float, ...] = tuple(
    float(order) for order in sorted({*library.DEFAULT_RDP_ORDERS, *range(2, 257), 512, 1024, 2048, 4096})
)
"""The library's default orders, the integers 2–256, and 512, 1024, 2048, 4096 (SPEC section 1)."""


def group_exponent(k: int) -> int:
    """c = ⌈log2 k⌉: k is rounded up to a power of two, never down (SPEC section 1, G)."""
    return (k - 1).bit_length()


def orders_for(steps: Sequence[tuple[Mechanism, int]]) -> tuple[float, ...]:
    """The orders at which the steps are added up.

    A group of 2^c records turns the order α into α/2^c, and only α ≥ 2^(c+1) is valid, so with groups the
    orders are α/2^c ≥ 2 for the α of ORDERS and the largest c.
    """
    groups = [group_exponent(event.group_size) for event, _ in steps if isinstance(event, GroupSampled)]
    factor = 2.0 ** max(groups, default=0)
    return ORDERS if not groups else tuple(a / factor for a in ORDERS if a >= 2 * factor)


@lru_cache(maxsize=256)
def of_step(event: Mechanism, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """ρ(α) of one step at each order; infinity where no bound is known.

    Gaussian α/(2σ²). Known sample ln(1 − q + q e^((α−1)ρ(α)))/(α−1) (SPEC section 2). A group of 2^c records:
    3^c ρ(2^c α), for α ≥ 2 (SPEC section 1, G).
    """
    alpha = np.array(orders)
    match event:
        case Gaussian(sigma):
            return alpha / (2 * sigma**2)
        case Skellam():
            return _between_integers(lambda order: float(skellam(event, np.array(order))), orders)
        case PoissonSampled(q, inner):
            if isinstance(inner, Skellam):
                return _sampled_skellam(q, inner, orders)
            return _sampled_gaussian(q, inner.noise_multiplier, orders)
        case KnownSample(q, inner):
            exponent = (alpha - 1) * of_step(inner, orders)
            mixed: NDArray[np.float64] = np.logaddexp(math.log1p(-q), math.log(q) + exponent) / (alpha - 1)
            return mixed
        case GroupSampled(k, gamma, sigma):
            c = group_exponent(k)
            rho = 3.0**c * _sampled_gaussian(gamma, sigma, tuple(2.0**c * alpha))
            return rho if c == 0 else np.where(alpha >= 2, rho, np.inf)


@lru_cache(maxsize=256)
def _sampled_gaussian(q: float, sigma: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """ρ(α) of the Poisson-sampled Gaussian mechanism."""
    accountant = library.RdpAccountant(orders)
    with _quiet():
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)))
    return np.asarray(accountant.rdp, float)


def skellam(event: Skellam, alpha: NDArray[np.float64]) -> NDArray[np.float64]:
    """ρ(α) of Skellam noise on an integer vector (Agarwal et al. 2021, Theorem 3.5; SPEC section 3), integer α ≥ 2.

    With the sensitivity Δ2 = s in grid steps and Δ1 ≤ min(√d, s)·s, since |x| ≤ x² for integers.
    """
    s, sigma = float(event.units), event.noise_multiplier
    reach = min(math.sqrt(event.dimension), s)  # Δ1 / s
    curvature = (2 * alpha - 1) / (4 * s**2 * sigma**4) + 3 * reach / (2 * s**3 * sigma**4)
    rho: NDArray[np.float64] = alpha / (2 * sigma**2) + np.minimum(curvature, 3 * reach / (2 * s * sigma**2))
    return rho


@lru_cache(maxsize=256)
def _sampled_skellam(q: float, event: Skellam, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """ρ(α) of the Poisson-sampled mechanism at integer orders (SPEC section 4, ρ_PoiSG with Skellam's own ρ(l)):

    ln[(1−q)^(α−1)(αq−q+1) + Σ_{l=2..α} binom(α,l)(1−q)^(α−l) q^l e^((l−1)ρ(l))]/(α−1). Holds for Skellam noise because
    it is symmetric (Zhu and Wang 2019).
    """
    log_q, log_rest = math.log(q), math.log1p(-q)

    def rho(alpha: int) -> float:
        l = np.arange(2, alpha + 1, dtype=float)  # noqa: E741
        binomial = gammaln(alpha + 1) - gammaln(l + 1) - gammaln(alpha - l + 1)
        terms = binomial + (alpha - l) * log_rest + l * log_q + (l - 1) * skellam(event, l)
        first = (alpha - 1) * log_rest + math.log(alpha * q - q + 1)
        return float(logsumexp([first, *terms])) / (alpha - 1)

    return _between_integers(rho, orders)


def _between_integers(rho: Callable[[int], float], orders: tuple[float, ...]) -> NDArray[np.float64]:
    """A bound at any order > 1 from ρ at integer orders: (α−1)ρ(α) is convex, and 0 at α = 1."""
    known = sorted({bound for order in orders for bound in (math.floor(order), math.ceil(order))} - {1})
    moments = [0.0, *((alpha - 1) * rho(alpha) for alpha in known)]
    alpha = np.array(orders)
    bounds: NDArray[np.float64] = np.interp(alpha, [1, *known], moments) / (alpha - 1)
    return bounds


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back dp_accounting's warnings.

    Its series need not converge at orders just above 1; it then warns, once for each order, and leaves the
    order out, which is sound and makes ε no smaller.
    """
    logger = logging.getLogger("absl")
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def composed(steps: Sequence[tuple[Mechanism, int]]) -> tuple[tuple[float, ...], NDArray[np.float64]]:
    """The orders and the sum of ρ over all steps."""
    orders = orders_for(steps)
    return orders, np.sum([count * of_step(event, orders) for event, count in steps], axis=0)


def epsilon(steps: Sequence[tuple[Mechanism, int]], delta: float) -> float:
    """The smallest ε over the orders, by dp_accounting's conversion."""
    orders, rho = composed(steps)
    with _quiet():
        return float(library.compute_epsilon(orders, rho, delta)[0])


def delta(steps: Sequence[tuple[Mechanism, int]], epsilon: float) -> float:
    """The smallest δ over the orders, by dp_accounting's conversion."""
    orders, rho = composed(steps)
    with _quiet():
        return float(library.compute_delta(orders, rho, epsilon)[0])
