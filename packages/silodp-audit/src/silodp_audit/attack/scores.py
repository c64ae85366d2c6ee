"""Scores of canaries: the likelihood ratio under the charged event, and the best linear attack under the real noise.

Of a charged event, `Signal` keeps what an attacker needs: a canary moves the noisy sum of a round by J shifts under
noise of standard deviation 1, where J counts its draws. Both scores are larger for "was in".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import LazyModule
from silodp.accounting import events
from silodp.accounting.events import Event

stats = LazyModule("scipy.stats")

Array = NDArray[np.float64]
_NEGLIGIBLE = 1e-12  # probability of a number of draws that is left out


@dataclass(frozen=True)
class Signal:
    """How far one round moves a sum along a canary's direction, by the charged event.

    The sum is J·reach + N(0, variance·reach²) with J ~ Binomial(draws, rate); reach is the distance of one draw.

    Attributes:
        variance: The variance of the noise in units of the squared reach.
        draws: The number of independent coins: steps times records.
        rate: The probability of each coin.
        coin: The probability of a coin that the adversary sees, before all others; 1 where there is none.
    """

    variance: float
    draws: int = 1
    rate: float = 1.0
    coin: float = 1.0

    @property
    def shift(self) -> float:
        """The reach of one draw in standard deviations of the noise."""
        return float(self.variance**-0.5)

    @property
    def mean(self) -> float:
        """The mean number of draws where the coin that is seen lets the canary in."""
        return self.draws * self.rate

    @classmethod
    def of(cls, event: Event) -> Signal | None:
        """Return the signal of a round's event; None where it has none: no guarantee, no noise, or no release."""
        match event:
            case events.Gaussian(sigma) | events.Skellam(sigma):
                return cls(sigma**2) if 0 < sigma < np.inf else None
            case events.CorrelatedReleases(_, second):  # the first one moves a model that nobody sees
                return cls.of(second)
            case events.PoissonSampled(rate, inner) | events.SampledReplacement(rate, inner):
                found = cls.of(inner)
                return found and replace(found, rate=found.rate * rate)
            case events.RevealedSample(rate, inner):
                found = cls.of(inner)
                return found and replace(found, coin=found.coin * rate)
            case events.ExtensionEvent():
                return cls.of(event.isolate_round())
            case events.Group(size, inner):
                found = cls.of(inner)
                return found and replace(found, draws=found.draws * size)
            case events.SelfComposed(inner, count):
                return _add([cls.of(inner)] * count)
            case events.Composed(parts):
                return _add([cls.of(part) for part in parts])
            case events.WorstOf(alternatives):
                # The kinds differ in their noise; the costliest one is that of the canaries.
                found_all = [cls.of(part) for part in alternatives]
                known = [signal for signal in found_all if signal is not None]
                return min(known, key=lambda one: one.variance) if known else None
        return None

    def score(self, observed: Array, known: NDArray[np.bool_] | None = None) -> Array:
        """Return the log likelihood ratio of "in" against "out", summed over all rows, (n,).

        Args:
            observed: What is seen of every canary (rounds, n), in standard deviations of the noise.
            known: Whether the coin that the adversary sees let a canary in, (rounds, n); None: it always did.
        """
        number = np.arange(self.draws + 1)
        chance = stats.binom.pmf(number, self.draws, self.rate)
        number, chance = number[chance > _NEGLIGIBLE], chance[chance > _NEGLIGIBLE]
        ratio = np.full(observed.shape, -np.inf)
        # One number of draws after the other: all at once take the memory of as many copies.
        for j, p in zip(number, chance, strict=True):
            np.logaddexp(ratio, np.log(p) + j * self.shift * observed - (j * self.shift) ** 2 / 2, out=ratio)
        if known is not None:
            ratio = np.where(known, ratio, 0.0)
        total: Array = ratio.sum(axis=0)
        return total


def _add(parts: list[Signal | None]) -> Signal | None:
    """Return the signal of the sum of several steps; rates that differ become their mean, which costs power alone."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    variance, draws = sum(part.variance for part in known), sum(part.draws for part in known)
    return replace(known[0], variance=variance, draws=draws, rate=sum(part.mean for part in known) / draws)


def score_whitened(features: Array, direction: Array, spare: Array) -> Array:
    """Return the best linear score under the noise that is really there, (n,).

    Noise that is missing somewhere, or repeated, is found by the covariance of the features: the score leans on what is
    seen with little noise.

    Args:
        features: What is seen of every canary (F, n).
        direction: How far a member moves each feature (F,).
        spare: The same features (F, c) of canaries that are out and not scored, at least ten times as many as F.
    """
    covariance = np.cov(spare)
    # A feature without any noise has no inverse; a millionth of the mean variance decides nothing else.
    ridge = 1e-6 * max(float(np.trace(covariance)) / len(covariance), 1e-300)
    weights = np.linalg.solve(covariance + ridge * np.eye(len(covariance)), direction)
    found: Array = weights @ features
    return found
