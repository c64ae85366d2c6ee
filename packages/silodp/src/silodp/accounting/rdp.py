"""Rényi differential privacy (RDP) of one step, and its conversion to (ε, δ), through dp_accounting.

Steps add up at every order α > 1 (Mironov 2017, Proposition 1), and ε is the smallest over the orders (Canonne, Kamath
and Steinke 2020, Proposition 12; dp_accounting has this conversion). Here is what dp_accounting has no rule for:
integer noise, group privacy, samples that an adversary sees, and replaced units.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import LazyModule
from silodp.accounting.accountant import Accountant, Composition, EventCount, WorstOfUnits
from silodp.accounting.events import (
    Additive,
    CorrelatedReleases,
    Event,
    ExtensionEvent,
    Gaussian,
    Group,
    Mechanism,
    PoissonSampled,
    RevealedSample,
    SampledReplacement,
    Skellam,
    list_nested,
    multiply_shift,
)
from silodp.accounting.steps import Steps, flatten_per_unit, list_inner_steps

if TYPE_CHECKING:
    import dp_accounting
    from dp_accounting.rdp import rdp_privacy_accountant as library
    from scipy import special
else:  # half a second, and a configuration is refused without them
    dp_accounting = LazyModule("dp_accounting")
    library = LazyModule("dp_accounting.rdp.rdp_privacy_accountant")
    special = LazyModule("scipy.special")

Array = NDArray[np.float64]

ORDERS: tuple[float, ...] = tuple(
    sorted({*(1 + n / 10 for n in range(1, 100)), *map(float, [*range(2, 257), 512, 1024, 2048, 4096])})
)
"""The library's default orders, the integers 2–256, and 512, 1024, 2048, 4096.

The best order is about 1 + √(ln(1/δ)/(ρ(α)/α)). So small orders serve a large ε, and those from 512 on an ε of some
thousandths. All integers up to 256, since most noise is bounded at integers only. Fewer orders never make ε smaller.
"""

_MIN_RHO = 1e-15


def compute_group_exponent(k: int) -> int:
    """Return c = ⌈log2 k⌉: k is rounded up to a power of two, never down (docs/privacy.md, section 4, G)."""
    return (k - 1).bit_length()


def choose_orders(steps: Steps, orders: tuple[float, ...] = ORDERS) -> tuple[float, ...]:
    """Return the orders at which the steps are added up.

    A group of 2^c records turns the order α into α/2^c, and only α ≥ 2^(c+1) is valid, so with groups the
    orders are α/2^c ≥ 2 for the α of `orders` and the largest c.

    Source: Mironov 2017, Proposition 2; ULDP-FL (Kato et al.), Lemma 6.
    """
    groups = [
        compute_group_exponent(inner.size)
        for event, _ in steps
        for inner in list_nested(event)
        if isinstance(inner, Group)
    ]
    factor = 2.0 ** max(groups, default=0)
    # Of groups of several sizes the largest decides, as the sum needs every step at the same orders.
    return orders if not groups else tuple(a / factor for a in orders if a >= 2 * factor)


@lru_cache(maxsize=256)
def compute_rdp(event: Mechanism, orders: tuple[float, ...]) -> Array:
    """Return ρ(α) of one step at each order; infinity where no bound is known.

    Gaussian α/(2σ²). Revealed sample ln(1 − q + q e^((α−1)ρ(α)))/(α−1), ρ of everything inside. A group of 2^c:
    3^c ρ(2^c α), for α ≥ 2.

    Args:
        event: a step, as `flatten_event` returns it.
        orders: (n,) orders α > 1.

    Returns:
        ρ (n,) ≥ 0.

    Source: Mironov 2017, Corollary 3 (Gaussian) and Proposition 2 (groups); rPDP-FL, Lemma 6 (revealed sample); the
    proofs are in docs/privacy.md, sections 3 and 4, G.
    """
    alpha = np.array(orders)
    match event:
        case Gaussian(sigma):
            return alpha / (2 * sigma**2)
        case Skellam() | CorrelatedReleases():
            return _between_integers(lambda whole: (whole - 1) * compute_release_rdp(event, whole), orders)
        case PoissonSampled(q, Gaussian(sigma)):
            return _sampled_gaussian(q, sigma, orders)
        case PoissonSampled(q, release):
            # Any other noise has a bound at integer orders only.
            return _between_integers(
                lambda whole: compute_sampled_moments(np.array([q]), release, whole)[:, 0], orders
            )
        case ExtensionEvent():
            return _between_integers(event.bound_moments, orders)
        case SampledReplacement(q, replaced):
            return _between_integers(lambda whole: compute_replaced_moments(q, replaced, whole), orders)
        case RevealedSample(q, inner):
            mixed: Array = compute_mixture_rdp(
                q, (alpha - 1) * sum_steps(list_inner_steps(inner), orders)
            ) / (alpha - 1)
            return mixed
        case Group(k, inner):
            factor = compute_group_exponent(k)
            # c doublings of the group: each turns ρ(α) into 3ρ(2α), so the inner steps are taken at 2^c·α.
            rho = 3.0**factor * sum_steps(list_inner_steps(inner), tuple(2.0**factor * alpha))
            return rho if factor == 0 else np.where(alpha >= 2, rho, np.inf)


def compute_mixture_rdp(q: float, exponents: Array) -> Array:
    """Return ln(1 − q + q e^x) for 0 < q < 1 and x ≥ 0, exact where it is small and finite where e^x is not.

    Source: rPDP-FL, Lemma 6, whose λ is q, with x = (α−1)ρ(α).
    """
    # Near 0, ln(1 − q + q e^x) loses all digits of x; expm1 keeps them. Far out, e^x overflows; logaddexp does not.
    small = np.log1p(q * np.expm1(np.minimum(exponents, 1.0)))
    mixed: Array = np.where(exponents < 1.0, small, np.logaddexp(math.log1p(-q), math.log(q) + exponents))
    return mixed


@lru_cache(maxsize=256)
def _sampled_gaussian(q: float, sigma: float, orders: tuple[float, ...]) -> Array:
    """Return ρ(α) of the Poisson-sampled Gaussian mechanism: integer orders summed, between them by a series.

    `compute_sampled_moments` takes the sum, and not dp_accounting, because it keeps all digits where q is small.

    Source: Mironov, Talwar and Zhang 2019 (Rényi DP of the sampled Gaussian mechanism), section 3.3.
    """
    alpha = np.array(orders)
    whole = (alpha == np.floor(alpha)) & (alpha >= 2)
    rho = np.empty(len(orders))
    if whole.any():
        rho[whole] = compute_sampled_moments(np.array([q]), Gaussian(sigma), alpha[whole])[:, 0] / (
            alpha[whole] - 1
        )
    if not whole.all():
        accountant = library.RdpAccountant([float(order) for order in alpha[~whole]])
        # Between integers only the library's series converges to the true value; it is slow, so it is asked only there.
        with _quiet():
            accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)))
        rho[~whole] = accountant.rdp
    return rho


def compute_release_rdp(event: Additive, alpha: Array) -> Array:
    """Return ρ(α) of a noisy sum, with integer noise for integer α ≥ 2 only; independent releases of a sum add up."""
    match event:
        case Gaussian(sigma):
            return alpha / (2 * sigma**2)
        case CorrelatedReleases(first, second):
            return compute_release_rdp(first, alpha) + compute_release_rdp(second, alpha)
        case Skellam():
            return compute_skellam_rdp(event, alpha)


def compute_skellam_rdp(event: Skellam, alpha: Array) -> Array:
    """Return ρ(α) of Skellam noise on an integer vector, for integer α ≥ 2.

    With the sensitivity Δ2 = s in grid steps and Δ1 ≤ min(√d, s)·s, since |x| ≤ x² for integers.

    Source: Agarwal, Kairouz and Liu 2021 (The Skellam mechanism for differentially private federated learning),
    Theorem 3.5.
    """
    # σ is in units of the sensitivity, so the variance in squared grid steps, which the theorem calls μ, is (sσ)².
    s, sigma = float(event.units), event.noise_multiplier
    reach = min(math.sqrt(event.dimension), s)  # Δ1 / s
    curvature = (2 * alpha - 1) / (4 * s**2 * sigma**4) + 3 * reach / (2 * s**3 * sigma**4)
    rho: Array = alpha / (2 * sigma**2) + np.minimum(curvature, 3 * reach / (2 * s * sigma**2))
    return rho


def compute_sampled_moments(q: Array, event: Additive, orders: Array) -> Array:
    """Return (α−1)ρ(α) of a Poisson-sampled release, (orders, n), for 0 < q < 1 (n,) and integer α ≥ 2:

    ln[(1−q)^(α−1)(αq−q+1) + Σ_{l=2..α} binom(α,l)(1−q)^(α−l) q^l e^((l−1)ρ(l))]. Holds for Gaussian and Skellam noise
    and for correlated releases, because they are symmetric. Without the last factor the sum is 1; what it adds is the
    sum over l ≥ 2 with e^((l−1)ρ(l)) − 1 in its place, in which all terms are positive: nothing cancels, however small
    q is.

    Source: rPDP-FL, Lemma 6; Mironov, Talwar and Zhang 2019, section 3.3; for other noise Zhu and Wang 2019 (Poisson
    subsampled Rényi differential privacy) and Wang, Balle and Kasiviswanathan 2019.
    """
    # All in logarithms, as binom(4096, 2048) is no float; gammaln(l + 1) stands for ln l!.
    l = np.arange(2, orders.max() + 1)  # noqa: E741
    growth = (l - 1) * compute_release_rdp(event, l)
    beyond = _log_expm1(growth) - special.gammaln(l + 1)
    odds, log_rest = np.log(q) - np.log1p(-q), np.log1p(-q)
    moments = np.empty((len(orders), len(q)))
    for i, alpha in enumerate(orders):
        upto = l[: int(alpha) - 1]
        terms = np.multiply.outer(upto, odds)
        terms += (beyond[: len(upto)] + special.gammaln(alpha + 1) - special.gammaln(alpha - upto + 1))[
            :, None
        ]
        # Relative to the largest term, as e^terms overflows; in place, as the arrays are the largest of a run.
        top = terms.max(axis=0)
        terms -= top
        np.exp(terms, out=terms)
        moments[i] = np.logaddexp(0.0, alpha * log_rest + top + np.log(terms.sum(axis=0)))
    return moments


def compute_replaced_moments(q: float, event: Additive, orders: Array) -> Array:
    """Return a bound of (α−1)ρ(α) of `SampledReplacement`, at integer orders α ≥ 2, for 0 < q < 1.

    The worlds are P = (1−q)P₀ + qP₁ and Q = (1−q)P₀ + qQ₁, with P₁ and Q₁ one sensitivity from P₀ and two from each
    other. The smallest of three bounds of ln ∫P^α Q^(1−α); nothing is used of the noise but that it is symmetric.

    By joint convexity it is that of a coin which is seen, before a release that moves two sensitivities; the others are
    `_by_hoelder` and `_by_expansion`.

    Source: proofs in docs/privacy.md, section 4, W.
    """
    seen = compute_mixture_rdp(q, (orders - 1) * compute_release_rdp(multiply_shift(event, 2), orders))
    return np.minimum(seen, np.minimum(_by_hoelder(q, event, orders), _by_expansion(q, event, orders)))


def _by_hoelder(q: float, event: Additive, orders: Array) -> Array:
    """Bound the moments by Hölder's inequality around P₀: for every integer k > α, and with n = k(α−1)/(k−α),

    ln ∫P^α Q^(1−α) ≤ (α/k)·ln E[(P/P₀)^k] + (1−α/k)·ln E[(P₀/Q)^n], expectations under P₀.

    The first is the sampled release's. The second is at most that at order n + 1; at most n·ln(1/(1−q)), as
    Q ≥ (1−q)P₀; and at most ln(1 + n(n+1)/2·q²χ²/(1−q)^(n+2)), by Taylor, where χ² = E[(Q₁/P₀ − 1)²] ≤ e^ρ(2) − 1.
    """
    # No k beyond 2α is tried: the first term grows with k, and n is at most 2(α−1) there already.
    known = _integers_up_to(2 * orders.max())
    first = compute_sampled_moments(np.array([q]), event, known)[:, 0]
    log_chi = float(_log_expm1(compute_release_rdp(event, np.array([2.0])))[0])

    def second(n: Array) -> Array:
        taylor = np.log(n) + np.log1p(n) - math.log(2) + 2 * math.log(q) + log_chi - (n + 2) * math.log1p(-q)
        # Linear between integers, as the moments are convex in the order: the chord lies above them.
        sampled = np.interp(n + 1, [1, *known], [0.0, *first], right=np.inf)
        smaller = np.minimum(np.logaddexp(0.0, taylor), -n * math.log1p(-q))
        smallest: Array = np.minimum(smaller, sampled)
        return smallest

    moments = np.empty(len(orders))
    for i, alpha in enumerate(orders):
        above = known > alpha
        k = known[above]
        sums = (alpha / k) * first[above] + (1 - alpha / k) * second(k * (alpha - 1) / (k - alpha))
        moments[i] = sums.min()
    return moments


def _by_expansion(q: float, event: Additive, orders: Array) -> Array:
    """Bound the moments by the binomial expansion of (1 + q(P₁−Q₁)/Q)^α under Q, whose second term is 0:

    ∫P^α Q^(1−α) ≤ 1 + Σ_{j=2..α} binom(α,j) q^j (1−q)^(1−j) min(2^j (M_j − 1), 2M_j), M_j = e^((j−1)ρ(j)).

    For Q ≥ (1−q)P₀, |P₁−Q₁|^j ≤ P₁^j + Q₁^j, and E|P₁/P₀ − 1|^j ≤ M_j − 1 under P₀.
    """
    j = np.arange(2, orders.max() + 1)
    growth = (j - 1) * compute_release_rdp(event, j)
    terms = np.minimum(j * math.log(2) + _log_expm1(growth), math.log(2) + growth)
    terms += j * math.log(q) - (j - 1) * math.log1p(-q) - special.gammaln(j + 1)
    moments = np.empty(len(orders))
    for i, alpha in enumerate(orders):
        upto = slice(int(alpha) - 1)
        moments[i] = np.logaddexp(
            0.0,
            special.logsumexp(
                terms[upto] + special.gammaln(alpha + 1) - special.gammaln(alpha - j[upto] + 1)
            ),
        )
    return moments


def _log_expm1(x: Array) -> Array:
    """Return ln(e^x − 1) for x > 0, finite where e^x is not."""
    # From 30 on, −1 is below the last digit of e^x.
    found: Array = np.where(x < 30, np.log(np.expm1(np.minimum(x, 30.0))), x)
    return found


def _integers_up_to(most: float) -> Array:
    """Return the integers from 2 to 400, and from there some 120 up to `most`."""
    dense = np.arange(2, 401, dtype=np.float64)
    return dense if most <= 400 else np.unique([*dense, *np.floor(np.geomspace(400, most, 120))])


def _between_integers(moments: Callable[[Array], Array], orders: tuple[float, ...]) -> Array:
    """Bound ρ at any order > 1 from (α−1)ρ(α) at integer orders: it is convex, and 0 at α = 1.

    Source: Wang, Balle and Kasiviswanathan 2019 (Subsampled Rényi differential privacy and analytical moments
    accountant), Corollary 10.
    """
    alpha = np.array(orders)
    # The chord of a convex function lies above it, so this is an upper bound.
    known = np.unique(np.concatenate([np.floor(alpha), np.ceil(alpha)]))
    known = known[known > 1]
    between = np.interp(alpha, [1, *known], [0.0, *moments(known)])
    bounds: Array = between / (alpha - 1)
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


def compose_steps(steps: Steps, orders: tuple[float, ...] = ORDERS) -> tuple[tuple[float, ...], Array]:
    """Return the orders at which the steps are added up, and the sum of ρ(α) over all steps."""
    orders = choose_orders(steps, orders)
    return orders, sum_steps(steps, orders)


def sum_steps(steps: Steps, orders: tuple[float, ...]) -> Array:
    """Return the sum of ρ(α) over all steps, (n,), at exactly these n orders."""
    total: Array = np.sum([count * compute_rdp(event, orders) for event, count in steps], axis=0)
    return total


@dataclass(frozen=True)
class RdpComposition(Composition):
    """Rényi bounds of one kind of unit.

    Attributes:
        steps: All steps; None where nothing is promised.
        orders: The orders α > 1 to choose from.
    """

    steps: Steps | None
    orders: tuple[float, ...] = ORDERS

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε over the orders, by dp_accounting's conversion.

        Source: Canonne, Kamath and Steinke 2020 (The discrete Gaussian for differential privacy), Proposition 12.
        """
        return _epsilon(self.steps, self.orders, delta) if self.steps else self._trivial(math.inf)

    def delta(self, epsilon: float) -> float:
        """Return the smallest δ over the orders, as dp_accounting computes it; source as of `epsilon`."""
        return self.deltas([epsilon])[0]

    def deltas(self, epsilons: Sequence[float]) -> list[float]:
        """As `Composition`."""
        if not self.steps:
            return [self._trivial(1.0)] * len(epsilons)
        orders, rho = compose_steps(self.steps, self.orders)
        # ln(1 − e^−ρ) is NaN where ρ is below the last digit of 1; more is no less safe.
        rho, alpha = np.maximum(rho, _MIN_RHO), np.asarray(orders)
        # All ε at once: a curve has 80, and dp_accounting's `compute_delta` takes a millisecond for each.
        by_divergence = 0.5 * np.log1p(-np.exp(-rho))  # Bretagnolle and Huber: √(1 − e^(−KL))
        beyond = rho - np.asarray(epsilons)[:, None]
        by_order = (alpha - 1) * (beyond + np.log1p(-1 / alpha)) - np.log(alpha)
        # Near 1 the second one has no digits left, as in dp_accounting.
        by_order = np.where(alpha > 1.01, by_order, np.inf)
        smallest = np.minimum(by_divergence, by_order).min(axis=1)
        return np.exp(np.minimum(smallest, 0.0)).tolist()  # type: ignore[no-any-return]

    def total_variation(self) -> float:
        """Return the smallest of three upper bounds of t = δ(0).

        1. dp_accounting's δ(0), in which is Bretagnolle and Huber's √(1 − e^(−KL)). 2. Pinsker's √(KL/2). In both KL is
        at most ρ at any order, since D_α grows with α (van Erven and Harremoës 2014, Theorem 3). 3. From
        χ² = e^(D_2) − 1: on the event A where the first world is likelier, Q(A) = q and P(A) = q + t, so by data
        processing χ² ≥ t²/(q(1−q)). As q(1−q) ≤ ¼, t ≤ √χ²/2; and where t > ½, q ≤ 1 − t < ½ gives χ² ≥ t/(1−t),
        t ≤ χ²/(1+χ²).

        Source: Bretagnolle and Huber 1979; Pinsker's inequality; van Erven and Harremoës 2014 (Rényi divergence and
        Kullback-Leibler divergence), Theorem 3. The third one is proven here.
        """
        if not self.steps:
            return self._trivial(1.0)
        orders, rho = compose_steps(self.steps, self.orders)
        renyi_2 = float(
            min((r for order, r in zip(orders, rho, strict=True) if order >= 2), default=math.inf)
        )
        # e^700 is about the largest float; the bound is 1 to the last digit long before.
        chi_squared = math.expm1(min(renyi_2, 700.0))
        by_chi_squared = math.sqrt(chi_squared) / 2 if chi_squared <= 1 else chi_squared / (1 + chi_squared)
        return min(1.0, self.delta(0.0), math.sqrt(float(np.min(rho)) / 2), by_chi_squared)

    def probability_above(self, epsilon: float) -> float:
        """Return Chernoff's bound, the smallest e^((α−1)(ρ(α) − ε)): E[e^((α−1)L)] = e^((α−1)D_α).

        D_α of whatever is computed from what is seen is no larger, so it bounds events of that, too.
        """
        if not self.steps:
            return self._trivial(1.0)
        orders, rho = compose_steps(self.steps, self.orders)
        exponents = (np.array(orders) - 1) * (rho - epsilon)
        return float(np.exp(min(0.0, float(np.min(exponents)))))

    def curve(self) -> tuple[Array, Array]:
        """Return the orders (n,) and ρ(α) (n,) of all steps: 0 of none, infinity where nothing is promised."""
        if not self.steps:
            return np.array(self.orders), np.full(len(self.orders), self._trivial(math.inf))
        orders, rho = compose_steps(self.steps, self.orders)
        return np.array(orders), rho

    def _trivial(self, worst: float) -> float:
        return worst if self.steps is None else 0.0


@lru_cache(maxsize=4096)  # rounds × adversaries of a run, needed again for the next seed
def _epsilon(steps: Steps, orders: tuple[float, ...], delta: float) -> float:
    orders, rho = compose_steps(steps, orders)
    with _quiet():
        return float(library.compute_epsilon(orders, rho, delta)[0])


@dataclass(frozen=True, repr=False)
class RdpAccountant(Accountant):
    """Rényi orders: the only accountant that knows integer (Skellam) noise and groups of composed events.

    Attributes:
        name: The name that ledgers store; with other orders than the default ones another name is needed.
        orders: The orders α > 1 to choose from.

    Source: Mironov 2017 (Rényi differential privacy), Proposition 1 for adaptive composition; Canonne, Kamath and
    Steinke 2020 (The discrete Gaussian for differential privacy), Proposition 12, for ε.
    """

    name: str = "rdp"
    orders: tuple[float, ...] = ORDERS

    def supports(self, event: Event) -> bool:
        """Return True: there is a rule for every event."""
        return True

    def compose(self, charges: Iterable[EventCount]) -> WorstOfUnits[RdpComposition]:
        """As `Accountant.compose`."""
        kinds = dict.fromkeys(flatten_per_unit(charges))
        return WorstOfUnits(tuple(RdpComposition(self._bounded(steps), self.orders) for steps in kinds))

    def _bounded(self, steps: Steps | None) -> Steps | None:
        """None where none of the orders is large enough for the groups among the steps."""
        return steps if steps is None or choose_orders(steps, self.orders) else None
