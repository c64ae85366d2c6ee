"""The Gaussian mechanism in closed form: N(μ, 1) against N(0, 1), μ = sensitivity / standard deviation.

δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ), the same in both directions. Rounding makes δ larger, so that every ε here is
an upper bound and every μ a lower one.

Source: Balle and Wang 2018 (Improving the Gaussian mechanism), Theorem 8.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from silodp._lazy import LazyModule

if TYPE_CHECKING:
    from scipy import optimize, special
else:
    optimize, special = LazyModule("scipy.optimize"), LazyModule("scipy.special")

Array = NDArray[np.float64]

_ROUNDING = 1e-15  # of log Φ, relative and absolute
_SLACK = 1e-12  # relative, of the roots
_MIN_MU, _MAX_MU = 1e-9, 1e6


def bound_delta(mu: ArrayLike, epsilon: ArrayLike) -> Array:
    """Return δ at ε ≥ 0, with μ > 0; both may be arrays.

    Source: Balle and Wang 2018, Theorem 8.
    """
    mu, epsilon = np.asarray(mu, float), np.asarray(epsilon, float)
    # In logarithms: far out, both terms are below the smallest float while their ratio still counts.
    first = special.log_ndtr(mu / 2 - epsilon / mu)
    second = epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
    # The difference of two nearly equal numbers: what rounding may have taken from it is added.
    lost = _ROUNDING * (1 + np.abs(first) + np.abs(second) + epsilon)
    # expm1 keeps the digits of 1 − e^(second − first), which is near 0 where μ is small; rounding could make it < 0.
    found: Array = np.minimum(np.exp(first) * (lost - np.expm1(np.minimum(second - first, 0.0))), 1.0)
    return found


def solve_epsilon(mu: float, target: float) -> float:
    """Return the smallest ε ≥ 0 with δ(ε) at most `target`, in (0, 1), rounded up."""

    def excess(candidate: float) -> float:
        found = float(bound_delta(mu, candidate))
        # A logarithm is nearly a parabola in ε, which the secants of Brent's method follow; δ itself is flat far out.
        return math.log(found / target) if found > 0 else -1e300

    if excess(0.0) <= 0:
        return 0.0
    high = mu**2 / 2 + mu  # about the mean of the loss, and a standard deviation more
    while excess(high) > 0:
        high *= 2
    root = float(optimize.brentq(excess, 0.0, high, xtol=_SLACK * high, rtol=_SLACK))
    # The root may lie a rounding on the wrong side; go up until δ is really met.
    step = _SLACK * high
    while excess(root) > 0:
        root, step = min(root + step, high), 2 * step
    return root


def solve_mu(epsilons: Array, target: float) -> Array:
    """Return the largest μ with δ(ε) at most `target`, rounded down, for every ε > 0 of an array (n,)."""
    low, high = np.full(len(epsilons), _MIN_MU), np.full(len(epsilons), _MAX_MU)
    # All epsilons at once, by bisection: a root finder of scipy would take one call for each record.
    while (high / low).max(initial=1.0) > 1 + _SLACK:
        middle = np.sqrt(low * high)
        fits = bound_delta(middle, epsilons) <= target
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    # Where even the smallest μ costs more than `target`, nothing may be released: μ = 0.
    return np.where(bound_delta(low, epsilons) <= target, low, 0.0)
