"""Tests of the noise, the shifts and the samples of a canary run against what was charged.

They are far more sensitive than an attack on membership. A failure is a bug even where no ε is exceeded: the program
does not add the noise that it states. A test of right code fails with a probability of at most its level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from silodp.errors import SilodpError
from silodp.methods.participation import ALWAYS, Participation
from silodp_audit.attack.evidence import bound_share, check_level

Array = NDArray[np.float64]


@dataclass(frozen=True)
class NoiseTest:
    """One test against a charged constant.

    Attributes:
        test: What is tested, for example "noise of silo 0".
        value: The measured value.
        low: The lower end of the interval, at the level of the test.
        high: The upper end.
        expected: The value that was charged.
        passed: Whether the measurement agrees with what was charged.
    """

    test: str
    value: float
    low: float
    high: float
    expected: float
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Samples:
    """Who was drawn, as every silo has it.

    Attributes:
        drawn: Whether a unit was in the sample (silos, rounds, units); one silo where only one is known.
        rate: The sampling probability q that was charged.
        rule: The rule by which units are drawn; by default independent coins.
    """

    drawn: NDArray[np.bool_]
    rate: float
    rule: Participation = ALWAYS


def run_noise_tests(
    noise: Mapping[str, Array],
    *,
    shifts: Array | None = None,
    samples: Samples | None = None,
    level: float = 0.05,
) -> tuple[NoiseTest, ...]:
    """Run all tests that the data allow; together they fail on right code with a probability of at most `level`.

    Args:
        noise: What each part added to coordinates that no unit moves (rounds, coordinates), divided by the standard
            deviation that was charged for it. Parts are "silo 0", "silo 1" and so on, or "the sum" alone; give the sum
            beside silos only where it has noise that theirs do not determine.
        shifts: How far members that were drawn moved a sum, divided by the reach that was charged; of any shape. None
            leaves the test out.
        samples: Who was drawn; None leaves these tests out.
        level: The probability of a false alarm, for all tests together.

    Returns:
        One entry for each kind of test. Of tests for each round, or each pair, it is the most extreme one.

    Raises:
        SilodpError: an array has another shape than is needed, a value is not finite, or level is out of range.
    """
    check_level(level)
    parts = {name: _check_noise(name, values) for name, values in noise.items()}
    if len({values.shape for values in parts.values()}) > 1:
        raise _shape_error("noise", "arrays (rounds, coordinates) of the same shape")
    several_rounds = any(len(values) > 1 for values in parts.values())
    tests: list[Callable[[float], NoiseTest]] = []
    for name, values in parts.items():
        tests.append(partial(compare_variance, f"noise of {name}", values.reshape(1, -1)))
        if several_rounds:
            tests.append(partial(compare_variance, f"noise of {name}, worst round", values))
    if several_rounds:
        tests.append(partial(compare_correlation, "correlation between rounds", _pair_rounds(parts)))
    if len(parts) > 1:
        tests.append(partial(compare_correlation, "correlation between silos", _pair_silos(parts)))
    if parts:
        tests.append(partial(compare_distribution, [*parts.values()]))
    if shifts is not None:
        tests.append(partial(compare_shift, shifts))
    if samples is not None:
        tests.append(partial(compare_rate, samples))
        if samples.drawn.shape[0] > 1:
            tests.append(lambda _: compare_samples(samples))
        measured = samples.rule.measure_sample(np.logical_or.reduce(samples.drawn, axis=0))
        for name, share in measured.items():
            tests.append(partial(_compare_exactly, name, share))
        if samples.drawn.shape[1] >= 2 * samples.rule.rounds_drawn_together:
            tests.append(partial(compare_repetition, samples))
    return tuple(test(level / len(tests)) for test in tests)


def compare_variance(test: str, values: Array, level: float) -> NoiseTest:
    """Compare the standard deviation of each row (rows, n) with 1, by χ²; return the row that is furthest off."""
    # The mean that was charged is 0, so it is not estimated, and all n values count.
    number, share = values.shape[1], level / len(values)
    ratios = np.sqrt((values**2).mean(1))
    with np.errstate(divide="ignore"):
        worst = float(ratios[np.argmax(np.abs(np.log(ratios)))])
    low = worst * math.sqrt(number / stats.chi2.isf(share / 2, number))
    high = worst * math.sqrt(number / stats.chi2.ppf(share / 2, number))
    return NoiseTest(test, worst, low, high, 1.0, low <= 1 <= high)


def compare_correlation(test: str, correlations: Iterable[tuple[Array, int]], level: float) -> NoiseTest:
    """Compare correlations of independent noise with 0; return the largest one.

    Args:
        test: What is tested.
        correlations: Arrays of correlations, each with the number n of coordinates that it was computed from.
        level: Of all of them together.

    Source: for independent normal values r·√((n−2)/(1−r²)) has Student's distribution with n − 2 degrees of freedom
    (Fisher 1915).
    """
    arrays = [(np.nan_to_num(found), number) for found, number in correlations]  # no noise has no correlation
    number, pairs = arrays[0][1], sum(found.size for found, _ in arrays)
    quantile = float(stats.t.isf(level / pairs / 2, number - 2))
    limit = quantile / math.sqrt(number - 2 + quantile**2)
    values = np.concatenate([found.ravel() for found, _ in arrays])
    worst = float(values[np.argmax(np.abs(values))])
    return NoiseTest(test, worst, -limit, limit, 0.0, abs(worst) <= limit)


def compare_distribution(parts: Sequence[Array], level: float) -> NoiseTest:
    """Compare each part with the standard normal distribution by Kolmogorov and Smirnov; return the furthest off."""
    # By the asymptotic distribution, whose limit is above the exact one.
    limit = float(stats.kstwobign.isf(level / len(parts)))
    worst, number = max(
        (float(stats.ks_1samp(part.ravel(), special.ndtr, method="asymp").statistic), part.size)
        for part in parts
    )
    high = limit / math.sqrt(number)
    return NoiseTest("normal distribution", worst, 0.0, high, 0.0, worst <= high)


def compare_shift(shifts: Array, level: float) -> NoiseTest:
    """Compare the mean shift of members with the reach that was charged, 1; only a larger one fails."""
    values = _check_finite("shifts", np.asarray(shifts, float).ravel())
    if len(values) < 2:
        raise _shape_error("shifts", "at least two values")
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))
    width = float(stats.t.isf(level / 2, len(values) - 1)) * error
    return NoiseTest("shift of members", mean, mean - width, mean + width, 1.0, mean - width <= 1)


def compare_rate(samples: Samples, level: float) -> NoiseTest:
    """Compare the share of (round, unit) that were drawn in any silo with the sampling probability; exact."""
    drawn = samples.drawn.any(0)
    return _compare_share("sampling rate", int(drawn.sum()), drawn.size, samples.rate, level)


def compare_samples(samples: Samples) -> NoiseTest:
    """Compare the samples of all silos with each other: they must be the same."""
    share = float((samples.drawn == samples.drawn[:1]).all(0).mean())
    return NoiseTest("same sample in all silos", share, share, share, 1.0, share == 1)


def _compare_exactly(test: str, share: float, level: float) -> NoiseTest:
    return NoiseTest(test, share, share, share, 1.0, share == 1)


def compare_repetition(samples: Samples, level: float) -> NoiseTest:
    """Compare how often a unit is drawn in both of two rounds with q²; exact.

    The rounds are neighbors; where several are drawn together, one of them and that at the same place of the next ones.
    """
    drawn, apart = np.logical_or.reduce(samples.drawn, axis=0), samples.rule.rounds_drawn_together
    if apart > 1:
        # One place of each period, another one in each pair of them.
        pairs = np.arange(len(drawn) // (2 * apart))
        drawn = drawn[np.add.outer(2 * apart * pairs + pairs % apart, [0, apart]).ravel()]
    # Pairs of rounds that share no round, so that all of them are independent.
    count = len(drawn) // 2
    both = drawn[: 2 * count].reshape(count, 2, -1).all(axis=1)
    return _compare_share("sampled in two rounds", int(both.sum()), both.size, samples.rate**2, level)


def _compare_share(test: str, count: int, trials: int, expected: float, level: float) -> NoiseTest:
    low, high = bound_share(count, trials, level / 2)
    return NoiseTest(test, count / trials, low, high, expected, low <= expected <= high)


def _pair_rounds(parts: Mapping[str, Array]) -> list[tuple[Array, int]]:
    """Return the correlations of every two rounds within each part."""
    found = []
    for values in parts.values():
        normal = _normalize(values)
        found.append(((normal @ normal.T)[np.triu_indices(len(values), 1)], values.shape[1]))
    return found


def _pair_silos(parts: Mapping[str, Array]) -> list[tuple[Array, int]]:
    """Return the correlations of every two parts within each round."""
    normal = [_normalize(values) for values in parts.values()]
    number = normal[0].shape[1]
    return [((one * other).sum(1), number) for one, other in combinations(normal, 2)]


def _normalize(values: Array) -> Array:
    """Return rows with mean 0 and length 1; NaN for constant ones."""
    centered = values - values.mean(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        normal: Array = centered / np.linalg.norm(centered, axis=1, keepdims=True)
    return normal


def _check_noise(name: str, values: Array) -> Array:
    values = np.asarray(values, float)
    if values.ndim != 2 or len(values) < 1 or values.shape[1] < 3:
        raise _shape_error(name, "an array (rounds, coordinates) with three coordinates or more")
    return _check_finite(name, values)


def _check_finite(name: str, values: Array) -> Array:
    if not np.isfinite(values).all():
        raise SilodpError(f"{name}: a value is not finite; leave it out.", code="argument.value", field=name)
    return values


def _shape_error(name: str, must_be: str) -> SilodpError:
    return SilodpError(f"{name}: give {must_be}.", code="argument.shape", field=name)
