"""ε of composed releases by numerical integration: an interval, from rounding losses up and down; nothing of silodp.

A release is a pair of mixtures of shifted noise, normal or Skellam, whose log ratio grows with the outcome. Its losses
are put on a grid twice:

- *up*: the mass between two grid points goes to both, so that it stays under either hypothesis ("connect the dots",
  Doroshenko et al. 2022). This dominates the pair.
- *down*: all outcomes around a grid point become one outcome. That is post-processing, so the pair dominates it. The
  loss of this outcome, which is no grid point, is lowered to one less a constant; tails are dropped.

Releases are composed by a Fourier transform of losses that are tilted to the tail that ε lies in, so that small δ are
as exact as large ones. `SLACK` of δ allows for what the transform and floats may err by, which is not proven.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import fft, special

SLACK = 1e-5
REACH = 13.0
"""Standard deviations of noise, beyond which it has less than 10⁻³⁸ of its mass."""
Array = np.ndarray[Any, Any]
Mixture = tuple[tuple[float, float], ...]
"""Shift → probability; shifts in standard deviations of normal noise, in steps of Skellam noise."""
NOTHING: Mixture = ((0.0, 1.0),)


@dataclass(frozen=True)
class Release:
    """One release.

    Attributes:
        present: What the unit moves the sum by.
        absent: The same in the world without it.
        variance: That of Skellam noise, in steps; None: normal noise of standard deviation 1.
    """

    present: Mixture
    absent: Mixture = NOTHING
    variance: float | None = None


@dataclass(frozen=True)
class Coin:
    """With a probability several releases of one kind, else nothing, and the coin is seen."""

    probability: float
    release: Release
    times: int = 1


Charges = Sequence[tuple[Release | Coin, int]]


@dataclass
class Losses:
    """Masses at the grid points (first + i)·grid, lowered by `shift`, and at infinity."""

    first: int
    masses: Array
    infinite: float
    shift: float = 0.0


def _log_skellam(variance: float, place: Array) -> Array:
    """Return ln of the probabilities of Poisson(V/2) − Poisson(V/2) at whole places, V ≥ 100: Debye's expansion."""
    order = np.abs(place)
    root = np.hypot(order, variance)
    p = order / root
    exponent = order**2 / (root + variance) - order * np.arcsinh(order / variance)
    first = (3 - 5 * p**2) / (24 * root)
    second = (81 - 462 * p**2 + 385 * p**4) / (1152 * root**2)
    return exponent - 0.5 * np.log(2 * math.pi * root) + np.log1p(first + second)


def _log_ratio(release: Release, x: Array) -> Array:
    def log_density(mixture: Mixture) -> Array:
        if release.variance is None:
            terms = [math.log(w) - (x - m) ** 2 / 2 for m, w in mixture if w]
        else:
            terms = [math.log(w) + _log_skellam(release.variance, x - m) for m, w in mixture if w]
        return np.logaddexp.reduce(terms)

    return log_density(release.present) - log_density(release.absent)


def _find_outcomes(release: Release, losses: Array, low: float, high: float) -> Array:
    """Return where the log ratio has these values (n,), by interpolation and Newton's method."""
    x = np.linspace(low, high, 400_001)
    table = np.maximum.accumulate(_log_ratio(release, x))
    found = np.interp(losses, table, x)
    lower = np.interp(losses, table, np.concatenate([x[:1], x[:-1]]))
    upper = np.interp(losses, table, np.concatenate([x[1:], x[-1:]]))
    for _ in range(3):
        step = 1e-5
        here = _log_ratio(release, found)
        slope = (_log_ratio(release, found + step) - _log_ratio(release, found - step)) / (2 * step)
        moved = found - (here - losses) / np.where(slope > 0, slope, np.inf)
        found = np.clip(moved, lower, upper)
    return np.maximum.accumulate(found)


def _cut_normal(
    release: Release, grid: float, offset: float
) -> tuple[int, Array, Array, tuple[float, float]]:
    """Return k, and the masses in both worlds between the losses (k+i+offset)·grid; and those above the last."""
    means = [m for m, _ in (*release.present, *release.absent)]
    low, high = min(means) - REACH, max(means) + REACH
    bottom, top = _log_ratio(release, np.array([low, high]))
    first, last = math.floor(bottom / grid - offset), math.ceil(top / grid - offset)
    losses = (np.arange(first, last + 1) + offset) * grid
    edges = _find_outcomes(release, losses, low, high)
    edges[0] = -np.inf  # everything below lies in the first cell

    def measure(mixture: Mixture) -> tuple[Array, float]:
        total, above = np.zeros(len(edges) - 1), 0.0
        for m, w in mixture:
            below, beyond = special.ndtr(edges - m), special.ndtr(m - edges)
            total += w * np.where(edges[:-1] > m, -np.diff(beyond), np.diff(below))
            above += w * float(beyond[-1])
        return total, above

    (present, more), (absent, less) = measure(release.present), measure(release.absent)
    return first, present, absent, (more, less)


def _cut_integers(
    release: Release, grid: float, offset: float
) -> tuple[int, Array, Array, tuple[float, float]]:
    """Do the same for Skellam noise, every place of which lies in one cell."""
    assert release.variance is not None
    means = [m for m, _ in (*release.present, *release.absent)]
    spread = 11 * math.sqrt(release.variance)
    x = np.arange(math.floor(min(means) - spread), math.ceil(max(means) + spread))
    cell = np.floor(_log_ratio(release, x) / grid - offset).astype(np.int64)

    def measure(mixture: Mixture) -> Array:
        density = sum(w * np.exp(_log_skellam(release.variance, x - m)) for m, w in mixture)  # type: ignore[arg-type]
        return np.bincount(cell - cell.min(), density)

    return int(cell.min()), measure(release.present), measure(release.absent), (0.0, 0.0)


@lru_cache(maxsize=4)
def round_losses(release: Release, grid: float, up: bool, add: bool) -> Losses:
    """Return the losses of one release on a grid.

    Args:
        release: The pair; of Skellam noise only `up=False` is a bound.
        grid: The interval.
        up: Round so that ε grows; else so that it falls.
        add: The world without the unit is the first one.
    """
    offset = 0.0 if up else -0.5
    cut = _cut_normal if release.variance is None else _cut_integers
    first, p, q, (above_p, _above_q) = cut(release, grid, offset)
    if add:
        # The loss is minus the log ratio: what lay above the last edge is now below the first one.
        first, p, q = (-first - len(p) if up else 1 - first - len(p)), q[::-1], p[::-1]
        above_p = 0.0
    if up:
        low = np.exp(-(first + np.arange(len(p))) * grid)
        raised = np.clip((p * low - q) / (-low * math.expm1(-grid)), 0, p)
        masses = np.concatenate([p - raised, [0.0]])
        masses[1:] += raised
        return Losses(first, masses, above_p)
    kept = (p > 1e-290) & (q > 1e-290)
    true = np.log(p[kept] / q[kept]) / grid
    caps = [2.0**-j for j in range(1, 14)]
    cap = min(caps, key=lambda c: float(p[kept] @ (true - np.floor(true + c) + c)))
    place = np.floor(true + cap).astype(np.int64)
    return Losses(int(place.min()), np.bincount(place - place.min(), p[kept]), 0.0, cap * grid)


class _Composition:
    """Charges in one direction with one rounding."""

    def __init__(self, charges: Charges, grid: float, up: bool, add: bool) -> None:
        self.grid = grid
        self.parts: list[tuple[int, float, int, Losses]] = []
        self.shift = self.log_finite = 0.0
        for charge, count in charges:
            release = charge.release if isinstance(charge, Coin) else charge
            losses = round_losses(release, grid, up, add)
            # Where a coin leaves out releases, their loss 0 is lowered as theirs is, so that all stays on the grid.
            times, chance = (charge.times, charge.probability) if isinstance(charge, Coin) else (1, 1.0)
            self.shift += count * times * losses.shift
            self.log_finite += count * math.log1p(-chance * times * losses.infinite)
            self.parts.append((times, chance, count, losses))

    def log_moment(self, tilt: float) -> float:
        """Return ln Σ mass·e^(tilt·loss) of the composition."""
        return sum(
            count * float(_add_coin(times * _log_moment(losses, self.grid, tilt), chance)[0])
            for times, chance, count, losses in self.parts
        )

    def epsilon(self, delta: float) -> float:
        """Return ε at δ."""
        allowed = delta + math.expm1(self.log_finite)
        if allowed <= 0:
            return math.inf
        tilts = np.geomspace(1e-2, 1e3, 60)
        logs = np.array([self.log_moment(t) for t in tilts])
        tilt = float(tilts[np.argmin((logs - math.log(allowed)) / tilts)])
        log = self.log_moment(tilt)
        step = tilt * 1e-4
        mean = (self.log_moment(tilt + step) - self.log_moment(tilt - step)) / (2 * step)
        # Chernoff: tilted losses farther from their mean than this have a mass below e^-44.
        away = np.geomspace(1e-3, 1e3, 40)
        right = min((self.log_moment(tilt + s) - log - s * mean + 44) / s for s in away)
        left = min((self.log_moment(tilt - s) - log + s * mean + 44) / s for s in away)
        begin = math.floor((mean - left) / self.grid)
        size = fft.next_fast_len(math.ceil((left + right) / self.grid) + 2, real=True)
        if size > 2**27:
            raise MemoryError(f"{size} points")
        product = np.ones(size // 2 + 1, dtype=complex)
        for times, chance, count, losses in self.parts:
            places = self.grid * (losses.first + np.arange(len(losses.masses)))
            moment = _log_moment(losses, self.grid, tilt)
            with np.errstate(divide="ignore"):
                tilted = np.exp(np.log(losses.masses) + tilt * places - moment)
            _, inside, outside = _add_coin(times * moment, chance)
            wave = fft.rfft(_wrap(tilted, losses.first, size)) ** times
            product *= (math.exp(inside) * wave + math.exp(outside)) ** count
        tilted = np.maximum(fft.irfft(product, size), 0)
        tilted = np.roll(tilted, -(begin % size))
        places = (begin + np.arange(size)) * self.grid
        with np.errstate(divide="ignore"):
            logs = np.log(tilted) + log - tilt * places
        masses = np.exp(np.minimum(logs, 0))
        above = np.cumsum(masses[::-1])[::-1]
        # Relative to the mean, so that e^-loss does not underflow.
        weighed = np.cumsum(np.exp(np.minimum(logs, 0) - (places - mean))[::-1])[::-1]
        crossing = int(np.searchsorted(-(above - np.exp(places - mean) * weighed), -allowed))
        if crossing in (0, size):
            raise ArithmeticError("ε lies outside the transform")
        found = mean + math.log((above[crossing] - allowed) / weighed[crossing])
        return max(found - self.shift, 0.0)


def _add_coin(inside: float, chance: float) -> tuple[float, float, float]:
    """Return ln(chance·e^inside + 1 − chance), and the logs of the shares that both terms have in it."""
    if chance == 1:
        return inside, 0.0, -math.inf
    both = float(np.logaddexp(math.log(chance) + inside, math.log1p(-chance)))
    return both, math.log(chance) + inside - both, math.log1p(-chance) - both


def _log_moment(losses: Losses, grid: float, tilt: float) -> float:
    places = grid * (losses.first + np.arange(len(losses.masses)))
    return float(special.logsumexp(tilt * places, b=losses.masses))


def _wrap(values: Array, first: int, size: int) -> Array:
    """Return values at first, first + 1, … added up modulo a size."""
    start = first % size
    padded = np.zeros(-(-(start + len(values)) // size) * size)
    padded[start : start + len(values)] = values
    return padded.reshape(-1, size).sum(0)


def choose_grid(charges: Charges, cells: float) -> float:
    """Return the interval: so many to the least standard deviation of a loss, and at most some millions in all."""
    found = []
    for charge, _ in charges:
        coarse = round_losses(charge.release if isinstance(charge, Coin) else charge, 1e-3, False, False)
        places = 1e-3 * (coarse.first + np.arange(len(coarse.masses)))
        spread = math.sqrt(float(coarse.masses @ (places - coarse.masses @ places) ** 2))
        found.append(max(spread / cells, 1e-3 * len(places) / 1.5e6))
    return min(found)


def bound_epsilon(charges: Charges, delta: float, cells: float = 300.0) -> tuple[float, float]:
    """Return a lower and an upper bound of ε, of removing and of adding a unit.

    With Skellam noise the upper bound is for one coordinate alone.

    Args:
        charges: Releases, or coins, and how often.
        delta: δ.
        cells: Grid points in a standard deviation of the loss of one release.
    """
    grid = choose_grid(charges, cells)
    bounds = [
        max(
            _Composition(charges, grid, up, add).epsilon(delta * (1 + (-SLACK if up else SLACK)))
            for add in (False, True)
        )
        for up in (False, True)
    ]
    return bounds[0], bounds[1]
