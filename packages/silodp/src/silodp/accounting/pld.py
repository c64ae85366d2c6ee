"""Privacy loss distributions on a grid: dp_accounting gives those of single steps, this module composes them.

dp_accounting composes two distributions at a time and searches ε in a Python loop, which underflows above
ε = 745. A run computes ε after every round. So this module takes dp_accounting's arrays and composes all steps
in one Fourier transform; ε is then found in one pass. All rounding makes ε larger.

Source: Koskela, Jälkö and Honkela 2020 (Computing tight differential privacy guarantees using FFT) for the transform;
Doroshenko et al. 2022 (Connect the dots) for distributions on a grid that dominate the true one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import LazyModule
from silodp.accounting import _gaussian
from silodp.accounting.accountant import Accountant, Composition, EventCount, WorstOfUnits
from silodp.accounting.events import (
    Composed,
    CorrelatedReleases,
    Event,
    ExtensionEvent,
    Gaussian,
    Group,
    Mechanism,
    NonPrivate,
    PoissonSampled,
    RevealedSample,
    SampledReplacement,
    SelfComposed,
    WorstOf,
    find_kind,
    list_nested,
)
from silodp.accounting.rdp import RdpComposition
from silodp.accounting.steps import Steps, flatten_per_unit, list_inner_steps
from silodp.errors import SilodpError

if TYPE_CHECKING:
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as library
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType
    from scipy import fft, signal, special, stats

    from silodp.accounting import _pld_mixture
else:  # a second to import: Gaussian releases alone have a closed form, and need none of them
    library, pld_pmf = (
        LazyModule(f"dp_accounting.pld.{name}") for name in ("privacy_loss_distribution", "pld_pmf")
    )
    fft, signal, special, stats = (
        LazyModule(f"scipy.{name}") for name in ("fft", "signal", "special", "stats")
    )
    _pld_mixture = LazyModule("silodp.accounting._pld_mixture")

Array = NDArray[np.float64]

USUAL_GRID = 1e-4
"""dp_accounting's default interval; a finer one is used only where the spread of a step is not much larger."""

FINEST_GRID = USUAL_GRID / 2**7
"""No grid is finer: a bucket's probability is a difference of δ(ε) at neighbors, and loses digits as they draw near.

What is lost this way is added as mass: ε becomes larger.
"""

_BUCKETS_PER_SPREAD = 128  # ε about 6e-6 of itself too large: connect-the-dots adds 0.1 (grid / spread)²
_MIN_BUCKETS_PER_SPREAD = 32  # to a spread, before the grid becomes finer than the usual one: 1e-4 of ε
_MAX_BUCKETS = 2**21
_MAX_FINE_BUCKETS = 2**18  # of a grid finer than the usual one, so that asking for ε stays fast
_TAIL = 1e-15  # probability cut off outside the window; charged as lost
_ROUNDING = 1e-16  # of every step in a Fourier transform; measured below 2e-17, charged as lost
_TILTS = 2.0 ** np.arange(-20, 11)  # orders of Chernoff's bound; a factor 2 apart costs 6 % of the width


@dataclass(frozen=True, eq=False)
class Losses:
    """A privacy loss distribution in one direction (a person added, or removed).

    `probabilities[i]` is the probability of the loss `(lowest + i) · grid`, and `infinite` that of an infinite
    loss. They dominate the true distribution: every hockey-stick divergence computed from them is an upper
    bound.

    Attributes:
        grid: The interval between losses.
        lowest: The smallest loss, in units of the grid.
        probabilities: The probabilities (losses,) of finite losses.
        infinite: The probability of an infinite loss; with the others it may add to a little more than 1.

    Source: Doroshenko et al. 2022 (Connect the dots), on pessimistic estimates.
    """

    grid: float
    lowest: int
    probabilities: Array
    infinite: float

    @property
    def values(self) -> Array:
        """The losses, ascending."""
        return (self.lowest + np.arange(len(self.probabilities), dtype=np.float64)) * self.grid

    @cached_property
    def cumulants(self) -> Array:
        """ln E[e^(tL); L finite] at t = ±_TILTS, as (2, tilts)."""
        mass, values = self.probabilities, self.values
        return np.array([[special.logsumexp(t * values, b=mass) for t in row] for row in (_TILTS, -_TILTS)])

    def delta(self, epsilon: float) -> float:
        """δ(ε) = P(L = ∞) + E[(1 − e^(ε − L))₊]."""
        return float(self.deltas(np.array([epsilon]))[0])

    def deltas(self, epsilons: Array) -> Array:
        """Return δ at each ε (n,), in one pass over the losses."""
        upper, lower = self._sum_tails()
        # The first loss that is not below ε, counted from the lowest one; where there is none, only ∞ is left.
        first = np.ceil(epsilons / self.grid - self.lowest - 1e-9).astype(int)
        index = len(upper) - 1 - np.clip(first, 0, len(upper) - 1)
        below = np.maximum(self.values[::-1][index] - epsilons, 0.0)
        # U − e^(ε − l)·A = (U − A) + (1 − e^(ε − l))·A
        finite = upper[index] - np.exp(-below) * lower[index]
        found: Array = np.where(first < len(upper), finite, self.infinite)
        return np.clip(found, self.infinite, 1.0)

    def _sum_tails(self) -> tuple[Array, Array]:
        """Return U = P(L ≥ l) and A = E[e^(l − L); L ≥ l] for each loss l, from the largest one down.

        For ε between the next smaller loss and l, δ(ε) = U − e^(ε − l)·A. A is a linear recursion from the top, which
        neither over- nor underflows.
        """
        downwards = self.probabilities[::-1]
        upper = self.infinite + np.cumsum(downwards)
        return upper, signal.lfilter([1.0], [1.0, -math.exp(-self.grid)], downwards)

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε ≥ 0 with δ(ε) ≤ delta; infinity if there is none."""
        if self.infinite > delta:
            return math.inf  # an infinite loss counts in full at every ε
        # δ(ε) falls by one cumulative sum, so the bucket of ε is found without a loop in Python.
        upper, lower = self._sum_tails()
        at_next = upper - math.exp(-self.grid) * lower  # δ one grid step below each bucket
        beyond = np.flatnonzero(at_next > delta)
        i = int(beyond[0]) if len(beyond) else len(upper) - 1  # if none, ε lies below the lowest loss
        if upper[i] <= delta:
            return 0.0
        loss = (self.lowest + len(upper) - 1 - i) * self.grid
        return max(0.0, loss + math.log((upper[i] - delta) / lower[i]))

    def probability_above(self, epsilon: float) -> float:
        """Return the largest P(E) over all events E with P(E) ≥ e^ε·Q(E), randomized ones included.

        By the lemma of Neyman and Pearson (1933) E takes the largest losses. Those above ε leave P(E) − e^ε·Q(E) above
        0, and those below it use that up. It is min_x δ(ε − x)/(1 − e^(−x)), so it bounds the same of every pair that
        these dominate.
        """
        mass = self.probabilities[::-1]
        # P(L = l) − e^ε·Q(L = l), as Q(L = l) = e^(−l)·P(L = l); e^700 is about the largest float.
        gained = mass * -np.expm1(np.minimum(epsilon - self.values[::-1], 700.0))
        left = self.infinite + np.cumsum(gained)
        spent = np.flatnonzero(left < 0)
        last = int(spent[0]) if len(spent) else len(mass) - 1
        # Of the loss at which nothing is left, the event takes a part only.
        part = (left[last] - gained[last]) / -gained[last] if len(spent) else 1.0
        return min(1.0, self.infinite + float(mass[:last].sum() + part * mass[last]))


@lru_cache(maxsize=256)
def compute_losses(event: Mechanism, grid: float) -> tuple[Losses, ...]:
    """Return both directions of one step, or a single one where they are equal.

    The step of a `Group` is the mixture Σ_i Binom(k, γ)(i)·N(i, σ²) against N(0, σ²) (docs/privacy.md, section
    4, G). For a `RevealedSample` the steps inside it are composed, all their mass (the infinite loss included)
    is multiplied by q, and an atom of 1 − q is added at loss 0 (docs/privacy.md, sections 3 and 9).

    Args:
        event: a step, as `flatten_event` returns it for privacy loss distributions.
        grid: the interval between losses.

    Source: Doroshenko et al. 2022 (Connect the dots), as dp_accounting has it.
    """
    match event:
        case RevealedSample(q, inner):
            return tuple(
                _with_atom_at_zero(losses, q) for losses in compose_steps(list_inner_steps(inner), grid)
            )
        case Group(k, PoissonSampled(gamma, Gaussian(sigma))):
            both = (_pld_mixture.AdjacencyType.REMOVE, _pld_mixture.AdjacencyType.ADD)
            return tuple(_mixture(k, gamma, sigma, grid, way) for way in both)
        case ExtensionEvent():
            return event.compute_losses(grid)
        case Gaussian(sigma):
            built = library.from_gaussian_mechanism(sigma, value_discretization_interval=grid)
        case PoissonSampled(q, Gaussian(sigma)):
            built = library.from_gaussian_mechanism(
                sigma, value_discretization_interval=grid, sampling_prob=q
            )
        case SampledReplacement(q, Gaussian(sigma)):
            return (_replacement(q, sigma, grid),)
        case _:
            raise _no_losses_error(event)
    remove, add = built._pmf_remove, built._pmf_add
    return tuple(_read(pmf, grid) for pmf in ((remove,) if add is remove else (remove, add)))


def _read(pmf: pld_pmf.PLDPmf, grid: float) -> Losses:
    # dp_accounting has no public way to read its arrays; the tests compare with its public answers. Sparse ones, of few
    # losses, are made dense, since the Fourier transform needs every point of the grid.
    dense = pmf.to_dense_pmf()
    return Losses(grid, int(dense._lower_loss), dense._probs, float(dense._infinity_mass))


def _mixture(k: int, gamma: float, sigma: float, grid: float, direction: AdjacencyType) -> Losses:
    records = np.arange(k + 1)
    weights = stats.binom.pmf(records, k, gamma)
    mixture = _pld_mixture.GaussianMixture(sigma, records, weights, adjacency_type=direction)
    bounds = mixture.connect_dots_bounds()
    lowest, highest = math.floor(bounds.epsilon_lower / grid), math.ceil(bounds.epsilon_upper / grid)
    deltas = mixture.get_delta_for_epsilon(np.arange(lowest, highest + 1) * grid)
    return _read(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, lowest, highest, deltas), grid)


def _replacement(q: float, sigma: float, grid: float) -> Losses:
    """Return the losses of (1−q)·N(0, σ²) + q·N(1, σ²) against (1−q)·N(0, σ²) + q·N(−1, σ²), the same both ways.

    No other replacement loses more (docs/privacy.md, section 4, W). With s = sinh(ε/2), the loss is ε at
    x = σ²·(ε/2 + asinh(e^(1/(2σ²))·s·(1−q)/q)).
    """
    reach = 1 + 10 * sigma  # all but 1e-23 of the probability lies within
    log_odds = math.log(q) - math.log1p(-q)
    largest = float(
        np.logaddexp(0, log_odds + (reach - 0.5) / sigma**2)
        - np.logaddexp(0, log_odds - (reach + 0.5) / sigma**2)
    )
    highest = math.ceil(largest / grid)
    epsilons = np.arange(-highest, highest + 1) * grid
    half = np.abs(epsilons) / 2
    with np.errstate(divide="ignore"):  # ln sinh is −∞ at ε = 0
        log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
    exponents = log_sinh + 0.5 / sigma**2 - log_odds
    # Far out asinh(y) is ln 2y, and y itself overflows.
    far = np.where(exponents > 30, exponents + math.log(2), np.arcsinh(np.exp(np.minimum(exponents, 30.0))))
    x = sigma * (epsilons / 2 + np.sign(epsilons) * far)  # in standard deviations
    # δ(ε) = P(L > ε) − e^ε·Q(L > ε), where both worlds share the part in which the coin leaves the unit out.
    still = (1 - q) * special.ndtr(-x)
    other = special.logsumexp(
        [math.log1p(-q) + special.log_ndtr(-x), math.log(q) + special.log_ndtr(-x - 1 / sigma)], axis=0
    )
    deltas = np.maximum(still + q * special.ndtr(1 / sigma - x) - np.exp(epsilons + other), 0.0)
    return _read(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, -highest, highest, deltas), grid)


def _with_atom_at_zero(losses: Losses, q: float) -> Losses:
    lowest = min(losses.lowest, 0)
    highest = max(losses.lowest + len(losses.probabilities) - 1, 0)
    probabilities = np.zeros(highest - lowest + 1)
    start = losses.lowest - lowest
    probabilities[start : start + len(losses.probabilities)] = q * losses.probabilities
    probabilities[-lowest] += 1.0 - q  # index of loss 0: nothing about the unit is released
    return Losses(losses.grid, lowest, probabilities, q * losses.infinite)


def compose_steps(steps: Steps, grid: float) -> tuple[Losses, ...]:
    """Return both directions of all steps together, each repeated its number of times, composed adaptively.

    Source: Koskela, Jälkö and Honkela 2020. That dominating distributions compose adaptively: Zhu, Dong and Wang 2022
    (Optimal accounting of differential privacy via characteristic function), Theorem 10.
    """
    # A step with one distribution is the same both ways: direction 0 and −1 are then the same element.
    built = [(compute_losses(event, grid), count) for event, count in steps]
    if all(len(both) == 1 for both, _ in built):
        return (_convolve([(both[0], count) for both, count in built]),)
    return tuple(_convolve([(both[direction], count) for both, count in built]) for direction in (0, -1))


def _convolve(parts: list[tuple[Losses, int]]) -> Losses:
    """Return the distribution of the sum of all losses.

    Chernoff's bound gives a window; outside it lies less than _TAIL of the probability. The transform is
    cyclic, so this mass lands inside the window, possibly at a loss that is too small. Therefore _TAIL is also
    added to the probability of an infinite loss.

    Source: Koskela, Jälkö and Honkela 2020 (Computing tight differential privacy guarantees using FFT).
    """
    total = sum(count for _, count in parts)
    if total == 1:
        return parts[0][0]  # as it is: a transform would cost _TAIL and _ROUNDING
    grid = parts[0][0].grid
    start = sum(count * losses.lowest for losses, count in parts)
    end = sum(count * (losses.lowest + len(losses.probabilities) - 1) for losses, count in parts)
    cumulants = np.sum([count * losses.cumulants for losses, count in parts], axis=0)
    upwards, downwards = cumulants + math.log(2 / _TAIL)
    highest = min(end, math.ceil(np.min(upwards / _TILTS) / grid))
    lowest = max(start, math.floor(np.max(-downwards / _TILTS) / grid))
    width = highest - lowest + 1
    # At least the window, else the sum would wrap around inside it; and every factor must fit.
    points = fft.next_fast_len(max(width, *(len(losses.probabilities) for losses, _ in parts)), real=True)

    spectrum = np.prod([fft.rfft(losses.probabilities, points) ** count for losses, count in parts], axis=0)
    # The transform counts losses from the sum of all lowest ones, the window from `lowest`.
    probabilities = np.roll(fft.irfft(spectrum, points), -((lowest - start) % points))[:width]
    # A sum is infinite if any loss is: 1 − Π(1 − p). log1p keeps a p far below 1e-16 when it is taken a million times.
    survives = sum(count * math.log1p(-losses.infinite) for losses, count in parts)
    infinite = -math.expm1(survives) + _TAIL + _ROUNDING * total
    # Rounding leaves probabilities a little below 0; raised to 0 they only make δ larger.
    return Losses(grid, lowest, np.maximum(probabilities, 0.0), infinite)


def estimate_spread(event: Mechanism) -> float:
    """Estimate the standard deviation of one step's loss; only the choice of the grid depends on it.

    With μ = k/σ the loss of a Gaussian release has variance μ², and sampling adds the variance of its mean, at
    most μ⁴/4. For a step with small losses the variance is the χ² divergence, E[e^(IJ/σ²)] − 1, where I and J
    are the sizes of two independent samples of the k records.
    """
    match event:
        case Gaussian(sigma):
            return 1 / sigma
        case RevealedSample(q, inner):
            mu = _spread_of(list_inner_steps(inner))
            return math.sqrt(q * (mu**2 + mu**4 / 4))
        case PoissonSampled(q, Gaussian()):
            return estimate_spread(Group(1, event))
        case ExtensionEvent():
            return event.estimate_spread()
        case SampledReplacement(q, Gaussian(sigma)):
            # E[(P₁ − Q₁)²/P₀²] = 4·sinh(1/σ²); or as for a coin that is seen.
            seen = math.sqrt(q * (4 / sigma**2 + 4 / sigma**4))
            return min(seen, 2 * q * math.sqrt(math.sinh(min(sigma**-2, 700.0))))
        case Group(k, PoissonSampled(gamma, Gaussian(sigma))):
            mu = k / sigma
            bound = math.sqrt(mu**2 + mu**4 / 4)
            records = np.arange(k + 1)
            weights = stats.binom.pmf(records, k, gamma)
            exponents = np.outer(records, records) / sigma**2
            if exponents.max() > 700:  # e^x overflows; far from losing little
                return bound
            return min(bound, math.sqrt(float(weights @ np.expm1(exponents) @ weights)))
    raise _no_losses_error(event)


def _spread_of(steps: Steps) -> float:
    return math.sqrt(sum(count * estimate_spread(event) ** 2 for event, count in steps))


def choose_grid(steps: Steps) -> float:
    """Return the interval between losses: USUAL_GRID times a power of two.

    The interval is about a 128th of the smallest spread of a step, or larger where an array would otherwise
    have more than about 2·10⁶ buckets. It is smaller than USUAL_GRID only if USUAL_GRID is more than a 32nd of
    the smallest spread and the arrays stay below about 3·10⁵ buckets. Grids are nested, so a coarser one never
    gives a smaller ε.
    """
    window = 17 * _spread_of(steps)
    widest = max(window, *(_bound_width(event) for event, _ in steps))
    smallest = min(_find_smallest_spread(event) for event, _ in steps)
    fine = max(smallest / _MIN_BUCKETS_PER_SPREAD, widest / _MAX_FINE_BUCKETS, FINEST_GRID)
    wanted = max(smallest / _BUCKETS_PER_SPREAD, min(fine, USUAL_GRID))
    # Rounded down to a power of two, but not beyond what bounds the arrays.
    grid = USUAL_GRID * 2.0 ** math.floor(math.log2(wanted / USUAL_GRID))
    # Memory first: a coarser grid makes ε larger, and never wrong.
    while widest > grid * (_MAX_BUCKETS if grid >= USUAL_GRID else _MAX_FINE_BUCKETS):
        grid *= 2
    return grid


def _find_smallest_spread(event: Mechanism) -> float:
    """Return the smallest spread of a step, or of a step inside it: every one of them is put on the grid."""
    inside = list_inner_steps(event.event) if isinstance(event, RevealedSample) else ()
    return min(estimate_spread(event), *(_find_smallest_spread(inner) for inner, _ in inside), math.inf)


def _bound_width(event: Mechanism) -> float:
    """Bound the width of one step's distribution: 10 standard deviations each way, and the mean."""
    match event:
        case Gaussian(sigma) | PoissonSampled(_, Gaussian(sigma)) | ExtensionEvent(event=Gaussian(sigma)):
            mu = 1 / sigma
        case Group(k, PoissonSampled(_, Gaussian(sigma))):
            mu = k / sigma
        case SampledReplacement(_, Gaussian(sigma)):
            mu = 2 / sigma
        case RevealedSample(_, inner):
            inside = list_inner_steps(inner)
            mu = _spread_of(inside)
            return max(20 * mu + mu**2, *(_bound_width(step) for step, _ in inside), 0.0)
        case _:
            raise _no_losses_error(event)
    return 20 * mu + mu**2


def _no_losses_error(event: Mechanism) -> TypeError:
    return TypeError(f"{event!r} has no loss distribution here: `steps` refuses it")


@dataclass(frozen=True)
class PldComposition(Composition):
    """Bounds for one kind of unit: the smaller one of the distributions and of the Rényi orders.

    Rényi orders give the smaller bound if δ is near the precision of the arithmetic, and for very many steps of
    very small loss.

    Attributes:
        steps: All steps, rewritten so that this accountant has a rule for each; None where nothing is promised.
        by_orders: The bounds of the same charges by Rényi orders.
    """

    steps: Steps | None
    by_orders: RdpComposition

    def epsilon(self, delta: float) -> float:
        """As `Composition`."""
        by_losses = _epsilon(self.steps, delta)
        # Nothing is smaller than the exact value, and orders take a second to import.
        is_exact = self.steps is not None and _only_gaussian(self.steps) is not None
        return by_losses if is_exact else min(by_losses, self.by_orders.epsilon(delta))

    def delta(self, epsilon: float) -> float:
        """As `Composition`."""
        return self.deltas([epsilon])[0]

    def deltas(self, epsilons: Sequence[float]) -> list[float]:
        """As `Composition`."""
        by_losses = self._deltas(np.array(epsilons))
        if self.steps is not None and _only_gaussian(self.steps) is not None:
            return by_losses
        # Both are upper bounds of the same δ, so the smaller one holds.
        return list(map(min, by_losses, self.by_orders.deltas(epsilons)))

    def probability_above(self, epsilon: float) -> float:
        """As `Composition`."""
        if not self.steps:
            return 1.0 if self.steps is None else 0.0
        # Both are upper bounds of the same probability, so the smaller one holds.
        both = compose_steps(self.steps, choose_grid(self.steps))
        by_losses = max(direction.probability_above(epsilon) for direction in both)
        return min(by_losses, self.by_orders.probability_above(epsilon))

    def _deltas(self, epsilons: Array) -> list[float]:
        if not self.steps:
            return [1.0 if self.steps is None else 0.0] * len(epsilons)
        # Without a grid, which would make δ larger.
        if (sigma := _only_gaussian(self.steps)) is not None:
            closed: list[float] = _gaussian.bound_delta(1 / sigma, epsilons).tolist()
            return closed
        both = compose_steps(self.steps, choose_grid(self.steps))
        found: list[float] = np.max([losses.deltas(epsilons) for losses in both], axis=0).tolist()
        return found


@lru_cache(maxsize=4096)  # rounds × adversaries of a run, needed again for the next seed
def _epsilon(steps: Steps | None, delta: float) -> float:
    if not steps:
        return math.inf if steps is None else 0.0
    if (sigma := _only_gaussian(steps)) is not None:
        return _gaussian.solve_epsilon(1 / sigma, delta)
    try:
        return max(losses.epsilon(delta) for losses in compose_steps(steps, choose_grid(steps)))
    except OverflowError:  # losses too large for any grid: Rényi orders still have a bound
        return math.inf
    except SilodpError:
        raise
    except (
        ArithmeticError,
        ValueError,
        MemoryError,
    ) as error:  # of dp_accounting or numpy, far beyond what is useful
        raise SilodpError(
            "no ε can be computed: noise_multiplier, a sampling probability or the number of steps is beyond what the "
            "accountant can represent; choose it closer to 1.",
            code="accounting.out_of_range",
        ) from error


def _only_gaussian(steps: Steps) -> float | None:
    """Return σ where all steps together are one Gaussian release, whose δ(ε) is known exactly."""
    match steps:
        case ((Gaussian(sigma), 1),):
            return sigma
    return None


def compute_gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Return ε at δ of one Gaussian release in closed form, however small its noise is.

    `compute_epsilon` promises nothing below a noise multiplier of 0.01; this is for settings of others, to say how far
    they are from a guarantee.

    Args:
        noise_multiplier: standard deviation over sensitivity, above 0.
        delta: δ in (0, 1).

    Source: Balle and Wang 2018, Theorem 8.
    """
    return _gaussian.solve_epsilon(1 / noise_multiplier, delta)


_KINDS = (
    Gaussian
    | CorrelatedReleases
    | PoissonSampled
    | SampledReplacement
    | RevealedSample
    | Group
    | SelfComposed
    | Composed
    | WorstOf
    | NonPrivate
)
"""The events that this accountant has a rule for. An event of a new kind is refused until somebody adds a rule."""


@dataclass(frozen=True, repr=False)
class PldAccountant(Accountant):
    """Privacy loss distributions: exact for Gaussian releases alone, else tight up to the grid; no integer noise.

    Source: Koskela, Jälkö and Honkela 2020; Doroshenko et al. 2022 (Connect the dots); Balle and Wang 2018, Theorem 8,
    where all is one Gaussian release.
    """

    name: str = "pld"
    exact: bool = True

    def supports(self, event: Event) -> bool:
        """Return whether every part is of a kind in `_KINDS` or `EVENTS`; integer (Skellam) noise is not."""
        return all(
            isinstance(inner, _KINDS)
            or (isinstance(inner, ExtensionEvent) and find_kind(type(inner)) is not None)
            for inner in list_nested(event)
        )

    def compose(self, charges: Iterable[EventCount]) -> Composition:
        """As `Accountant.compose`."""
        charges = list(charges)
        both = zip(flatten_per_unit(charges, for_pld=True), flatten_per_unit(charges), strict=True)
        return WorstOfUnits(tuple(PldComposition(p, RdpComposition(r)) for p, r in dict.fromkeys(both)))
