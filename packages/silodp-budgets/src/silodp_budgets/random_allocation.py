"""Random allocation: everyone is in exactly one round of each b, drawn at random; how silos draw, and what it costs.

P = (P₁+…+P_b)/b is the world with the unit, where P_i has it in release i, and Q the world without. With Y_i the
likelihood ratio of release i, given the releases before it, X = dP/dQ = (Y₁+…+Y_b)/b. Removing the unit costs
E_Q[X^α], adding it E_Q[X^(1−α)]; each accountant bounds both, also where releases depend on earlier ones.

Source: Feldman and Shenfeld 2025 (Privacy amplification by random allocation, arXiv:2502.08202) for the worlds, and
2026 (Efficient privacy loss accounting for subsampling and random allocation, arXiv:2602.17284) for distributions of
losses. The bound for adding the unit, and that spreading X over a grid is safe: docs/privacy.md, section 4, A.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import LazyModule
from silodp.accounting import events
from silodp.accounting.events import Additive, Event, ExtensionEvent, Gaussian, Mechanism
from silodp.accounting.views import View
from silodp.errors import SilodpError
from silodp.methods.participation import Participation, SampledRun
from silodp.settings import Whole

if TYPE_CHECKING:
    from scipy import special

    from silodp.accounting import pld, rdp
    from silodp.crypto.sampling import PersonCoins
else:  # a second to import, and a configuration needs none of them
    special = LazyModule("scipy.special")
    pld, rdp = (LazyModule(f"silodp.accounting.{name}") for name in ("pld", "rdp"))

Array = NDArray[np.float64]
_log = logging.getLogger(__name__)

MAX_ORDER = 256
"""The largest order at which less than one release is charged: the time grows with its square."""

LEAST_NOISE = 0.1
"""The smallest noise multiplier whose law is computed: with less, ε is that of one release, which is above 50."""

_MARGIN = 1e-11, 1e-14, 1e-15  # for rounding: added to moments, to their factor 1, and for every release
_NODES_PER_UNIT = 50  # of ln u, at which Laplace transforms are bounded
_LARGEST_LOSS = 12.0  # |ln Y| beyond which a law's transform is bounded by 1
_REACH = 9.0  # standard deviations of noise within which all but 1e-18 lies
_TAIL = 1e-17  # mass cut off at either end of a law, and charged as lost
_POINTS_PER_SPREAD = 32  # of the grid that a law is spread over
_MAX_POINTS = 2500  # of such a grid: where it is coarser, ε is larger


# --- Who takes part ---


@dataclass(frozen=True)
class RandomAllocation(Participation):
    """Everyone takes part in exactly one round, drawn at random, of each b rounds.

    Attributes:
        rounds: The number b of rounds of an allocation.

    Source: Feldman and Shenfeld 2025 (Privacy amplification by random allocation).
    """

    rounds: Annotated[int, Whole(2)]

    @property
    def rate(self) -> float:
        """1/b."""
        return 1 / self.rounds

    @property
    def rounds_drawn_together(self) -> int:
        """The rounds of an allocation, of which the first one bears the cost of all."""
        return int(self.rounds)

    def draw(self, coins: PersonCoins, round_: int, rates: float | NDArray[np.float64]) -> NDArray[np.bool_]:
        """Draw who takes part, by one coin for each allocation; each round has a probability within 2⁻⁶⁴ of 1/b."""
        allocation, place = divmod(round_, self.rounds_drawn_together)
        taking_part: NDArray[np.bool_] = (
            coins.draw("allocation", allocation) % np.uint64(self.rounds_drawn_together) == place
        )
        return taking_part

    def sample_event(self, release: Additive, view: View) -> Event:
        """Return the event of a round of an allocation."""
        is_first = bool(view.round % self.rounds_drawn_together == 0)
        return AllocatedRelease(self.rounds_drawn_together, release, is_first, view.knows_sample)

    def check_run(self, run: SampledRun) -> None:
        """Refuse a run whose silos do not draw the sample, or in which a participation might not be charged."""
        super().check_run(run)
        # A silo that missed the first round of an allocation would not have charged it; and the noise of a round must
        # not depend on who answers it.
        if run.min_silos < run.silos:
            raise self._conflict_error(
                f"and min_silos = {run.min_silos}: every silo must answer every round of an allocation; leave "
                f"min_silos out, or take user_sampling = {self.rate:g}"
            )
        if left := run.rounds % self.rounds_drawn_together:
            _log.warning(
                "participation = %r and rounds = %d: the last allocation ends after %d of its %d rounds, so some "
                "persons are in none of them, and ε counts it in full; take a multiple of %d",
                self, run.rounds, left, self.rounds_drawn_together, self.rounds_drawn_together,
            )  # fmt: skip

    def measure_sample(self, drawn: NDArray[np.bool_]) -> dict[str, float]:
        """Return the share of units that are in exactly one round of each allocation that has ended, if one has."""
        count = len(drawn) // self.rounds_drawn_together
        if not count:
            return {}
        blocks = drawn[: count * self.rounds_drawn_together].reshape(count, self.rounds_drawn_together, -1)
        return {"in one round of each allocation": float((blocks.sum(axis=1) == 1).mean())}


# --- The event ---


@dataclass(frozen=True)
class AllocatedRelease(ExtensionEvent):
    """One round of a random allocation: the unit is in exactly one of some consecutive rounds, drawn at random.

    Every round of an allocation is charged this event. The first one bears the cost of all, so that no later round can
    be charged to another allocation; the others cost nothing.

    Attributes:
        rounds: The number b of rounds of an allocation.
        event: The release of a round, with the unit in it.
        is_first: Whether this is the first round of its allocation.
        is_seen: Whether the adversary sees who is in which round.

    Source: Feldman and Shenfeld 2025 (Privacy amplification by random allocation).
    """

    rounds: int
    event: Additive
    is_first: bool = True
    is_seen: bool = False

    kind: ClassVar[str] = "RandomAllocation"

    def check(self) -> None:
        """Refuse a number of rounds that is none."""
        if not 1 <= self.rounds <= 10**9 or self.rounds != int(self.rounds):
            raise SilodpError(
                f"rounds is {self.rounds!r}: it must be a whole number from 1 to 10⁹.",
                code="argument.value",
                field="rounds",
            )

    def simplify(self, release: Additive) -> Mechanism | None:
        """Return nothing for later rounds: the first bears the cost of all; where it is seen, that of one release."""
        if not self.is_first:
            return None
        return release if self.rounds == 1 or self.is_seen else AllocatedRelease(int(self.rounds), release)

    def reveal_sample(self) -> Self:
        """Return the event against an adversary who sees the rounds."""
        return replace(self, is_seen=True)

    def replace_unit(self) -> Self:
        """Return the event as if the round were seen, which costs no less."""
        return replace(self, event=events.multiply_shift(self.event, 2), is_seen=True)

    def move_to_round(self, place: int, period: int) -> Self:
        """Return the event of another round of the same allocation."""
        return replace(self, rounds=period, is_first=place == 0)

    def isolate_round(self) -> Event:
        """Return what one round releases by itself: that a unit is in no second one is not used."""
        coin = events.RevealedSample if self.is_seen else events.PoissonSampled
        return coin(1 / self.rounds, self.event)

    def bound_moments(self, orders: Array) -> Array:
        """Bound (α−1)ρ(α) of all rounds at integer orders."""
        return compute_moments(self.rounds, partial(rdp.compute_release_rdp, self.event), orders)

    def compute_losses(self, grid: float) -> tuple[pld.Losses, ...]:
        """Return the losses ln x of removing the unit, under P, and −ln x of adding it, under Q."""
        sigma = self.event.noise_multiplier  # type: ignore[union-attr]  # of Gaussian noise: `pld` asks for no other
        if sigma < LEAST_NOISE:
            return pld.compute_losses(self.event, grid)
        law = allocate_gaussian(self.rounds, sigma)
        lowest, masses, above = law.spread(grid)
        # What rounding lost of either world counts as lost.
        lost = [1.0 - float(above.sum()), 1.0 - float(masses.sum())]
        infinite = [max(lost[0], law.infinite), max(lost[1], law.zero)]
        removed = pld.Losses(grid, lowest, above, infinite[0])
        return removed, pld.Losses(grid, 1 - lowest - len(masses), masses[::-1], infinite[1])

    def estimate_spread(self) -> float:
        """Estimate the standard deviation of the loss: by χ², or as for a coin that is seen."""
        sigma = self.event.noise_multiplier  # type: ignore[union-attr]
        chi_squared = math.expm1(min(sigma**-2, 700.0)) / self.rounds
        seen = pld.estimate_spread(events.RevealedSample(1.0, Gaussian(sigma)))
        return min(seen, math.sqrt(chi_squared))


# --- Rényi orders ---


def compute_moments(releases: int, release_rdp: Callable[[Array], Array], orders: Array) -> Array:
    """Bound (α−1)ρ(α) of an allocation over b ≥ 2 releases of one sum each, with any symmetric noise.

    Args:
        releases: b.
        release_rdp: Function of integer orders (n,) ≥ 2 that returns an upper bound ρ (n,) of one release.
        orders: Integer α ≥ 2, (n,).

    Returns:
        (n,), at most those of one release, which cover an allocation whose rounds are seen (joint convexity).
    """
    found: Array = (orders - 1) * release_rdp(orders)
    known = orders <= MAX_ORDER
    # ln E[Y^m] for m = 0, 1, 2, …; a power of order 1 has the mean 1.
    powers = np.arange(2.0, MAX_ORDER + 1)
    logs = np.concatenate([[0.0, 0.0], (powers - 1) * release_rdp(powers)])
    if known.any() and logs[2] <= LEAST_NOISE**-2:
        chosen = orders[known].astype(int)
        removed, added = _bound_removal(releases, logs)[chosen], _bound_addition(releases, logs, chosen - 1)
        fixed, relative, for_each = _MARGIN
        bound = (1 + relative) * np.maximum(removed, added) + fixed + for_each * releases
        found[known] = np.minimum(found[known], bound)
    return found


def _bound_removal(releases: int, logs: Array) -> Array:
    """Return ln E_Q[X^α] for α = 0, 1, …, from ln E[Y^m] (n,).

    It is α!·b^(−α) times the coefficient of t^α in (Σ E[Y^m]·t^m/m!)^b.

    All terms are positive, so upper bounds of the moments give upper bounds, and nothing cancels.
    """
    order = np.arange(len(logs))
    factorials = special.gammaln(order + 1)
    base = logs - factorials
    # Squaring and multiplying: some 2·log2(b) products of polynomials, in logarithms.
    bits = bin(releases)[3:]
    power = reduce(
        lambda known, bit: (
            _multiply(_multiply(known, known), base) if bit == "1" else _multiply(known, known)
        ),
        bits,
        base,
    )
    found: Array = power + factorials - order * math.log(releases)
    return found


def _multiply(first: Array, second: Array) -> Array:
    """Return the logarithms of the coefficients of a product of two polynomials, up to the same degree."""
    row = np.arange(len(first))
    place = row[:, None] - row
    terms = np.where(place >= 0, first[np.maximum(place, 0)] + second, -np.inf)
    product: Array = special.logsumexp(terms, axis=1)
    return product


def _bound_addition(releases: int, logs: Array, powers: NDArray[np.int64]) -> Array:
    """Bound ln E_Q[X^(−s)] for s ≥ 1 (n,), with X^(−s) = ∫ t^(s−1) e^(−tX) dt / Γ(s).

    Given the past, E[e^(−uY)] ≤ φ(u) for every release (`_bound_transforms`), so E[e^(−tX)] ≤ φ(t/b)^b. Of every law
    ln E[e^(−uY)] is convex in u, so between two points it lies below the chord, and an exponential is integrated.
    """
    # From t = bu = 10⁻³, before which it is nearly 1, to 4,000 and u = 20, beyond which a power of u bounds it.
    lowest, highest = math.log(1e-3 / releases), math.log(max(4000 / releases, 20.0))
    log_u = np.linspace(lowest, highest, math.ceil((highest - lowest) * _NODES_PER_UNIT))
    u, negative = np.exp(log_u), np.arange(1.0, len(logs) - 1)
    # e^(−x) ≤ (r/(ex))^r, and E[Y^(−r)] = E[Y^(r+1)] for symmetric noise.
    by_power = negative * (np.log(negative) - 1) + logs[2:]
    by_moments = (by_power[:, None] - np.multiply.outer(negative, log_u)).min(axis=0)
    log_phi = np.minimum(np.minimum(by_moments, _bound_transforms(u, math.expm1(logs[2]))), 0.0)
    # A transform falls with u.
    exponents = np.concatenate([[0.0], -np.minimum.accumulate(log_phi)]) * releases
    ends = np.concatenate([[0.0], u]) * releases
    slopes = np.diff(exponents) / np.diff(ends)
    # Integrated by Gauss and Legendre within each cell, in ln t, where the integrand is as smooth as e^(st).
    places, weights = np.polynomial.legendre.leggauss(8)
    width = log_u[1] - log_u[0]
    log_t = (log_u[:-1, None] + width * (places + 1) / 2 + math.log(releases)).ravel()
    falls = (
        exponents[1:-1, None] + slopes[1:, None] * (np.exp(log_t).reshape(-1, 8) - ends[1:-1, None])
    ).ravel()
    log_weights = np.tile(np.log(weights * width / 2), len(u) - 1)
    s = powers.astype(float)
    inside = special.logsumexp(np.multiply.outer(s, log_t) + (log_weights - falls), axis=1)
    # From 0 to the first point, e^(−x) ≤ 1 − x + x²/2.
    fall = slopes[0] * ends[1]
    first = s * math.log(ends[1]) - np.log(s) + np.log1p(-fall * s / (s + 1) + fall**2 / 2)
    # Beyond the last one: of b factors, k fall as a power r of u, faster in all than t^s grows, and the others stay.
    beyond = np.full(len(s), np.inf)
    for k in {min(2**i, releases) for i in range(releases.bit_length() + 1)}:
        excess = k * negative - s[:, None]
        tails = k * (by_power - negative * log_u[-1]) - (releases - k) * exponents[-1] / releases
        tails = np.where(excess > 0, tails - np.log(np.maximum(excess, 1e-9)), np.inf)
        beyond = np.minimum(beyond, tails.min(axis=1) + s * math.log(ends[-1]))
    found = special.logsumexp([first, inside, beyond], axis=0) - special.gammaln(s)
    bounded: Array = np.maximum(found, 0.0)
    return bounded


def _bound_transforms(u: Array, chi_squared: float) -> Array:
    """Bound ln E[e^(−uY)] at each u > 0 (n,), over all laws of Y of symmetric noise with E[Y²] ≤ 1 + χ².

    By reflection of the noise the law of Y under Q is that of 1/Y under P. It is therefore a mixture of laws on
    {a, 1/a}, a = e^λ, with P(a) = 1/(1+a), E[Y²] − 1 = w(λ) = 4·sinh²(λ/2) and the transform
    f(λ) = (e^(−ua) + a·e^(−u/a))/(1+a). So for every κ ≥ 0 the largest f(λ) − κ(w(λ) − χ²) is a bound, here over cells
    of λ.
    """
    centre = 2 * math.asinh(math.sqrt(chi_squared) / 2)
    # Cells are a twentieth of their distance from the law that has χ² itself, which mostly decides.
    apart = np.concatenate([[0.0], np.geomspace(1e-5, _LARGEST_LOSS, 200)])
    grid = np.unique(np.concatenate([centre + apart, centre - apart, [0.0]]))
    grid = grid[(grid >= 0) & (grid <= max(_LARGEST_LOSS, centre))]
    a, w = np.exp(grid), 4 * np.sinh(grid / 2) ** 2 - chi_squared
    f = (np.exp(-np.multiply.outer(u, a)) + a * np.exp(-np.multiply.outer(u, 1 / a))) / (1 + a)
    width = np.diff(grid)

    def maximize(slope: Array) -> tuple[Array, Array]:
        """Return the largest value over all cells for a κ of every u, and whether it lies above χ²."""
        values = f - slope[:, None] * w
        # How far a cell's largest value is above its ends: by |f''| ≤ 1 in λ, and by f = 1 − u + u²(1+w)/2 − r with
        # |r''| ≤ 5u³a².
        bend = 2 * np.cosh(grid[1:])
        by_rest = np.abs(slope - u**2 / 2)[:, None] * bend + np.multiply.outer(5 * u**3, a[1:] ** 2)
        beyond = (width**2 / 8) * np.minimum(1 + slope[:, None] * bend, by_rest)
        # f grows with λ: so it is also at most that at the right end, less the smallest cost.
        plain = f[:, 1:] - slope[:, None] * w[:-1]
        cells = np.minimum(np.maximum(values[:, :-1], values[:, 1:]) + beyond, plain)
        cells = np.concatenate([cells, (1 - slope * w[-1])[:, None]], axis=1)
        best = cells.argmax(axis=1)
        return cells[np.arange(len(u)), best], grid[best] >= centre

    # κ is found by bisection of its logarithm, around the slope of f in w at χ²: above the best one the largest value
    # lies below χ², and before it above. Any κ gives a bound.
    at, y = math.exp(centre), u * math.exp(-centre)
    x, p = u * at, 1 / (1 + at)
    rise = (1 - p) * np.exp(-y) * (y + p) - p * np.exp(-x) * (x + 1 - p)
    tangent = np.log(np.maximum(rise, 1e-30)) - math.log(max(2 * math.sinh(centre), 1e-30))
    # κ = u²/2 needs no cells.
    low, high, smallest = tangent - 4, tangent + 4, np.exp(-u) + u**2 * chi_squared / 2
    for _ in range(20):
        middle = (low + high) / 2
        largest, is_above = maximize(np.exp(middle))
        smallest = np.minimum(smallest, largest)
        low, high = np.where(is_above, middle, low), np.where(is_above, high, middle)
    return np.log(np.maximum(smallest, 1e-300))


# --- Privacy loss distributions ---


@dataclass(frozen=True, eq=False)
class Law:
    """A law of X = dP/dQ under Q, spread over points so that its mean stays 1; it costs no less than the true one.

    To spread a mass over two points with the same mean makes E[g(X)] larger for every convex g, also of averages and of
    products with independent factors: every δ(ε), in both directions and after composition, is an upper bound.

    Attributes:
        ratios: The points x > 0 (n,), ascending.
        masses: Their masses under Q (n,).
        zero: The mass under Q of the ratio 0, which has none under P.
        infinite: The mass under P of an infinite ratio, which has none under Q.
    """

    ratios: Array
    masses: Array
    zero: float
    infinite: float

    def spread(self, step: float) -> tuple[int, Array, Array]:
        """Return the law on a grid of ln x: the lowest point in units of `step`, masses (m,) under Q and under P."""
        logs = np.log(self.ratios) / step
        below = np.floor(logs).astype(int)
        # x lies between e^(kh) and e^((k+1)h): the share of the upper point keeps the mean.
        share = np.expm1((logs - below) * step) / math.expm1(step)
        lowest = int(below.min())
        size = int(below.max()) - lowest + 2
        found = np.zeros(size)
        for place, part in ((0, 1 - share), (1, share)):
            found += np.bincount(below - lowest + place, self.masses * part, size)
        return lowest, found, found * np.exp((lowest + np.arange(size)) * step)

    def gather(self, step: float) -> Law:
        """Return the law on a grid of ln x, without its tails, whose masses go to 0, to the ends and to infinity."""
        lowest, masses, above = self.spread(step)
        ratios = np.exp((lowest + np.arange(len(masses))) * step)
        first = min(int(np.searchsorted(np.cumsum(masses), _TAIL)), len(masses) - 1)
        last = len(masses) - 1 - min(int(np.searchsorted(np.cumsum(above[::-1]), _TAIL)), len(masses) - 1)
        if last - first > _MAX_POINTS:  # noise so small that tails are heavy
            return self.gather(step * math.ceil((last - first) / _MAX_POINTS))
        kept = masses[first : last + 1].copy()
        # Below, {0, the first point}; above, {the last point, infinity}.
        to_first = float(above[:first].sum()) / ratios[first]
        kept[0] += to_first
        kept[-1] += float(masses[last + 1 :].sum())
        return Law(
            ratios[first : last + 1],
            kept,
            self.zero + max(float(masses[:first].sum()) - to_first, 0.0),
            self.infinite + float((masses[last + 1 :] * (ratios[last + 1 :] - ratios[last])).sum()),
        )


def allocate_gaussian(releases: int, sigma: float) -> Law:
    """Return the law of X for b releases with Gaussian noise of multiplier σ.

    Averages are formed by the binary digits of b, on grids that keep pace with their spread, about 1/(σ√n) for n of
    them.
    """

    def step(count: int) -> float:
        return 1 / (sigma * math.sqrt(count) * _POINTS_PER_SPREAD)

    def average(first: tuple[int, Law], second: tuple[int, Law]) -> tuple[int, Law]:
        (m, one), (n, other) = first, second
        ratios = np.add.outer(m * one.ratios, n * other.ratios).ravel() / (m + n)
        masses = np.multiply.outer(one.masses, other.masses).ravel()
        # Of an average with a 0, the mass goes to 0 and to infinity: the other ratio has at most the mean 1.
        infinite = (m * (one.infinite + other.zero) + n * (other.infinite + one.zero)) / (m + n)
        return m + n, Law(ratios, masses, one.zero + other.zero, infinite).gather(step(m + n))

    def double(known: tuple[int, Law], bit: str) -> tuple[int, Law]:
        twice = average(known, known)
        return average(twice, single) if bit == "1" else twice

    single = (1, _spread_gaussian(sigma, step(1)))
    return reduce(double, bin(releases)[3:], single)[1]


def _spread_gaussian(sigma: float, step: float) -> Law:
    """Return the law of one ratio, ln Y ~ N(−1/(2σ²), 1/σ²) under Q and N(1/(2σ²), 1/σ²) under P."""
    middle, reach = 0.5 / sigma**2, _REACH / sigma
    lowest, highest = math.floor((-middle - reach) / step), math.ceil((middle + reach) / step)
    logs = np.arange(lowest, highest + 1) * step
    q, p = (_cut(sigma * (logs + shift)) for shift in (middle, -middle))
    # Of each cell the masses under Q and P are kept: those of its two ends follow.
    upper = np.clip((p[1:-1] * np.exp(-logs[:-1]) - q[1:-1]) / math.expm1(step), 0.0, q[1:-1])
    masses = np.zeros(len(logs))
    masses[:-1] += q[1:-1] - upper
    masses[1:] += upper
    to_first = p[0] * math.exp(-logs[0])
    masses[0] += to_first
    masses[-1] += q[-1]
    infinite = float(p[-1] - q[-1] * math.exp(logs[-1]))
    return Law(np.exp(logs), masses, max(float(q[0]) - to_first, 0.0), max(infinite, 0.0))


def _cut(ends: NDArray[np.floating]) -> Array:
    """Return the probabilities of N(0, 1) below the first end, between ends, and above the last one."""
    # Of the nearer tail, as differences near 1 lose all digits.
    lower, upper = special.ndtr(ends), special.ndtr(-ends)
    between = np.where(ends[:-1] < 0, np.diff(lower), -np.diff(upper))
    return np.concatenate([lower[:1], between, upper[-1:]])
