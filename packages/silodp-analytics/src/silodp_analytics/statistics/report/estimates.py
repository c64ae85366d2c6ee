"""Estimates from noisy tables of counts: counts, means, quantiles, Kaplan-Meier curves, and their uncertainty.

Everything is computed from sums that noise was added to, so it costs no ε (post-processing). The noise in every count
is independent, with a known standard deviation. Two questions have two answers: an interval "of the noise" is for the
statistic of the records that were counted; one "with the sample" is for the population that they are drawn from, if
records are independent. All intervals are at 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.stats import chi2, norm

from silodp_analytics.counts import MIN_CERTAINTY
from silodp_analytics.statistics.mean import MOMENT_CENTER

Floats = NDArray[np.float64]
LEVEL = 0.95
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_Z = float(norm.ppf(0.5 + LEVEL / 2))
_DRAWS = 5_000
"""Draws of the noise in a simulation; their seed is fixed, so a report is the same again."""


@dataclass(frozen=True)
class NoisyTable:
    """A block of noisy counts, as `Statistics.describe_sum` describes it.

    Attributes:
        kind: What the counts are.
        column: The name of the column.
        counts: The noisy counts: "histogram": of the bins, and of missing cells; "mean": Σt, Σ(t² − 1/2) and n;
            "survival": by group, bin of time, and whether there was an event.
        noise_std: The standard deviation of the noise in every count.
        edges: The edges of bins; the range of a column; or the edges between bins of time.
        names: The names of categories, or of the groups of a survival table.
        has_missing: Whether cells may be missing.
        by: The column of the groups of a survival table, or of a part of a Table One.
        groups: The names of the groups of a part of a Table One, whose counts are by group.
        missing: The category that missing cells count as, where their count is apart.
    """

    kind: str
    column: str
    counts: tuple[float, ...]
    noise_std: float
    edges: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    has_missing: bool = False
    by: str | None = None
    groups: tuple[str, ...] = ()
    missing: str = ""

    @property
    def values(self) -> Floats:
        """The noisy counts."""
        return np.asarray(self.counts, dtype=float)


@dataclass(frozen=True)
class Interval:
    """A value and its interval."""

    value: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """How far the farther end is from the value; the other one may be cut off."""
        return max(self.high - self.value, self.value - self.low)


# --- counts ----------------------------------------------------------------------------------------------------------


def estimate_count(value: float, noise_std: float) -> Interval:
    """Return a count with its interval of the noise; neither is below 0."""
    value, reach = max(value, 0.0), _Z * noise_std
    return Interval(value, max(value - reach, 0.0), value + reach)


def is_certain(value: float, noise_std: float) -> bool:
    """Return whether a count is so large that it is shown as a number."""
    return value >= MIN_CERTAINTY * noise_std and value > 0


# --- numbers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeanEstimate:
    """A mean and a standard deviation.

    Attributes:
        mean: The mean, with its interval of the noise.
        with_sample: The interval of the mean of the population.
        std: The standard deviation, with its interval of the noise.
        count: The number of values, with its interval of the noise.
    """

    mean: Interval
    with_sample: Interval
    std: Interval
    count: Interval


def estimate_mean(table: NoisyTable) -> MeanEstimate | None:
    """Return mean and standard deviation of a column; None where its number of values is lost in the noise.

    Source: Fieller 1954, "Some problems in interval estimation", for the ratio of two noisy sums.
    """
    (total, squares, count), noise = table.counts, table.noise_std
    if not is_certain(count, noise):
        return None
    low, high = table.edges
    middle, half = (low + high) / 2, (high - low) / 2
    ratio = float(np.clip(total / count, -1, 1))
    variance = float(np.clip(squares / count + MOMENT_CENTER - ratio**2, 0, 1 - ratio**2))

    def to_unit(scaled: Interval) -> Interval:
        return Interval(*(middle + half * value for value in (scaled.value, scaled.low, scaled.high)))

    draws = draw_noise(3) * noise + np.array(table.counts)
    ratios = draws[:, 0] / draws[:, 2]
    spread = np.sqrt(np.clip(draws[:, 1] / draws[:, 2] + MOMENT_CENTER - ratios**2, 0, 1))
    ends = np.quantile(spread, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    # The largest deviation that the noise leaves open: the estimated one may be 0 by chance.
    of_sample = count * float(ends[1]) ** 2
    return MeanEstimate(
        to_unit(bound_ratio(ratio, total, count, noise, 0.0)),
        to_unit(bound_ratio(ratio, total, count, noise, of_sample)),
        Interval(*(float(half * value) for value in (math.sqrt(variance), *ends))),
        estimate_count(count, noise),
    )


def bound_ratio(
    ratio: float,
    total: float,
    count: float,
    noise: float,
    of_sample: float,
    *,
    least: float = -1.0,
    cells: int = 1,
    shared: int = 0,
) -> Interval:
    """Return the values r from `least` to 1 for which total − r·count is no larger than its noise explains.

    Args:
        ratio: The estimate.
        total: A noisy count or sum.
        count: A sum of so many noisy counts as `cells` says; `shared` says whether `total` is one of them.
        noise: The standard deviation of the noise in each.
        of_sample: The variance of total − r·count as a sample.
        least: The smallest value that the ratio can have.
        cells, shared: See above.
    """
    # (T − r·n)² ≤ z²·(s²(1 − 2·shared·r + cells·r²) + V), a quadratic inequality in r.
    square = (_Z * noise) ** 2
    a = count**2 - square * cells
    b = 2 * (square * shared - total * count)
    c = total**2 - square - _Z**2 * of_sample
    root = math.sqrt(max(b**2 - 4 * a * c, 0.0))
    ends = np.clip([(-b - root) / (2 * a), (-b + root) / (2 * a)], least, 1)
    return Interval(ratio, float(ends[0]), float(ends[1]))


def estimate_quantiles(table: NoisyTable, shares: tuple[float, ...] = QUANTILES) -> dict[float, Interval]:
    """Return quantiles of a column by its histogram, with their intervals of the noise.

    A quantile lies on the line between the edges of its bin, of the isotonic regression of the cumulative counts. Its
    interval ends at edges, at which the cumulative count differs from the share by more than the noise explains. Where
    the number of values is lost in the noise, there are none.

    Source: Barlow et al. 1972, "Statistical Inference under Order Restrictions" (pool adjacent violators).
    """
    edges, bins, noise = np.asarray(table.edges), len(table.edges) - 1, table.noise_std
    below = np.concatenate([[0.0], np.cumsum(table.values[:bins])])
    count = below[-1]
    if not is_certain(count, noise * math.sqrt(bins)):
        return {}
    # The first cumulative count is 0 for sure, which a large weight keeps.
    weights = np.concatenate([[1e9], np.ones(bins)])
    rising = np.clip(isotonic_regression(below, weights=weights).x, 0, None)
    found = {}
    for share in shares:
        excess = below - share * count
        # Σ(below)·(1 − q) − Σ(above)·q: the noise of b bins below and of the others above.
        number = np.arange(bins + 1)
        reach = _Z * noise * np.sqrt((1 - share) ** 2 * number + share**2 * (bins - number))
        too_low, too_high = excess < -reach, excess > reach
        first = max(int(np.argmin(too_low)) - 1, 0) if too_low[0] else 0
        last = bins + 1 - int(np.argmin(too_high[::-1])) if too_high[-1] else bins
        value = float(np.interp(share * rising[-1], *_strictly(rising, edges)))
        low, high = float(edges[first]), float(edges[min(last, bins)])
        found[share] = Interval(min(max(value, low), high), low, high)
    return found


def _strictly(rising: Floats, edges: Floats) -> tuple[Floats, Floats]:
    """Return the points of a cumulative count without its flat parts, so that it can be inverted."""
    kept = np.concatenate([[True], np.diff(rising) > 0])
    return rising[kept], edges[kept]


# --- ranges that are too wide -----------------------------------------------------------------------------------------

_USEFUL = 0.1
"""An error of a mean is large if it is more than this part of the distance from the mean to the end of its range."""
_REACH = 5.0
"""How many times as far as the mean most values are from the end of the range, where the mean is near that end."""
_NARROWER = 0.5
"""A narrower range is suggested if it is at most this part of the declared one."""


@dataclass(frozen=True)
class NarrowerRange:
    """A range that suits what was counted better than the declared one: the noise grows with the width of a range.

    Attributes:
        low, high: Its ends; values beyond are clipped to them.
        error: Half the width of the 95 % interval of the mean, of the noise, that this range gives; None for bins.
    """

    low: float
    high: float
    error: float | None = None


def suggest_mean_range(edges: Sequence[float], mean: float, error: float) -> NarrowerRange | None:
    """Return a narrower range for a mean with a large error; None where the error is small, or no range is known.

    Args:
        edges: The declared range (low, high).
        mean: The mean, or what is typical.
        error: Half the width of its 95 % interval, of the noise.

    Source: none; for an exponential distribution e⁻⁵ = .7 % of the values are beyond five times the mean.
    """
    low, high = edges
    nearer = min(mean - low, high - mean)
    width = float(f"{_REACH * (nearer + error):.2g}")
    if error <= _USEFUL * nearer or width > _NARROWER * (high - low):
        return None
    ends = (low, low + width) if mean - low <= high - mean else (high - width, high)
    return NarrowerRange(*ends, error * width / (high - low))


def suggest_bin_range(table: NoisyTable, quantiles: Mapping[float, Interval]) -> NarrowerRange | None:
    """Return a narrower range for a histogram most of whose bins are empty: that of nine of ten values."""
    if not quantiles:
        return None
    low, high = quantiles[QUANTILES[0]].low, quantiles[QUANTILES[-1]].high
    is_narrower = high - low <= _NARROWER * (table.edges[-1] - table.edges[0])
    return NarrowerRange(low, high) if is_narrower else None


# --- survival --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SurvivalCurve:
    """A Kaplan-Meier curve at the edges between bins of time.

    Attributes:
        group: The name of the group; "" for all records.
        times: (T',) the edges; fewer than were counted where too few were at risk for the noise.
        survival: (T',) the share that survived until then.
        low, high: (T',) the band of the noise, which holds for all times together.
        sample_low, sample_high: (T',) the band of the population, for all times together.
        at_risk: (T',) the noisy number at risk at the beginning of the bin that ends at the time.
    """

    group: str
    times: Floats
    survival: Floats
    low: Floats
    high: Floats
    sample_low: Floats
    sample_high: Floats
    at_risk: Floats


def read_survival(table: NoisyTable) -> Floats:
    """Return the noisy counts (groups, bins, 2) of a survival table; the last axis is censored, event."""
    return table.values.reshape(len(table.names), len(table.edges) + 1, 2)


def estimate_survival(table: NoisyTable) -> list[SurvivalCurve]:
    """Return the Kaplan-Meier curve of every group.

    In a bin with n at risk at its beginning, d events and c censored, the share 1 − d/(n − c/2) survives. Neither d nor
    this share is clamped, since that would raise every hazard by the positive part of the noise: the curve as a whole
    is made to fall, by isotonic regression. It ends where n is below three standard deviations of its noise.

    The bands hold whenever in its bin somebody was censored.

    Source: Kaplan and Meier 1958; Cutler and Ederer 1958 for times in bins; Greenwood 1926 for the sample; the noise to
    first order; bands for all times together by simulation of the correlated errors.
    """
    times = np.asarray(table.edges)
    return [
        _estimate_curve(name, times, counts, table.noise_std)
        for name, counts in zip(table.names, read_survival(table), strict=True)
    ]


def _estimate_curve(name: str, times: Floats, counts: Floats, noise: float) -> SurvivalCurve:
    censored, events = counts.T
    at_risk = _count_at_risk(counts)
    exposed = at_risk - censored / 2
    # At risk in bin j is a sum of two counts for every bin from j on.
    of_risk = noise * np.sqrt(2 * np.arange(len(counts), 0, -1))
    least = np.minimum(at_risk, at_risk - censored)
    usable = (at_risk >= MIN_CERTAINTY * of_risk) & (least > np.maximum(events, 0))
    usable[-1] = False  # the last bin has no end
    last = int(np.argmin(usable))
    times, at_risk, events, exposed = times[:last], at_risk[:last], events[:last], exposed[:last]
    raw, *ends = (
        np.cumsum(np.log1p(-events / number)) for number in (exposed, at_risk, (at_risk - censored[:last]))
    )
    # The curve of exact times lies between those for which all are censored at the end of a bin, or at its beginning.
    outer = np.minimum(raw, np.min(ends, 0)), np.maximum(raw, np.max(ends, 0))
    survival = np.exp(np.minimum(isotonic_regression(raw, increasing=False).x, 0)) if last else raw
    hazard = 1 - survival / np.concatenate([[1.0], survival[:-1]])
    deaths = hazard * exposed
    of_noise = noise**2 * _propagate_noise(deaths, exposed, len(counts))
    greenwood = np.cumsum(deaths / (exposed * (exposed - deaths)))
    # The increments of the sample's error are independent, so two times share that of the earlier one.
    of_sample = np.minimum.outer(greenwood, greenwood)
    low, high = _make_band(outer, of_noise)
    sample_low, sample_high = _make_band(outer, of_noise + of_sample)
    return SurvivalCurve(
        name, times, np.clip(survival, low, high), low, high, sample_low, sample_high, at_risk
    )


def _count_at_risk(counts: Floats) -> Floats:
    """Return the number at risk at the beginning of every bin, (..., bins), of counts (..., bins, 2)."""
    at_risk: Floats = counts.sum(-1)[..., ::-1].cumsum(-1)[..., ::-1]
    return at_risk


def _propagate_noise(deaths: Floats, exposed: Floats, bins: int) -> Floats:
    """Return the covariance (J, J) of ln S at the ends of J bins, for noise of variance 1 in each of `bins`·2 counts.

    With m = n − c/2 and g = 1/(m − d) − 1/m, the derivative of ln S_j by the events of bin k is Σ_{i ≤ min(j, k)} g_i,
    less 1/(m_k − d_k) if k ≤ j; by its censored records it is the same sum, less g_k/2 if k ≤ j.
    """
    number = len(deaths)
    step = 1 / (exposed - deaths) - 1 / exposed
    reached = np.concatenate([[0.0], np.cumsum(step)])
    ends, places = np.arange(number)[:, None], np.arange(bins)[None, :]
    common = reached[np.minimum(ends, places) + 1]
    inside = places <= ends
    padded = np.zeros((2, bins))
    padded[:, :number] = step / 2, 1 / (exposed - deaths)
    by_censored, by_events = common - inside * padded[0], common - inside * padded[1]
    covariance: Floats = by_censored @ by_censored.T + by_events @ by_events.T
    return covariance


def _make_band(log_survival: tuple[Floats, Floats], covariance: Floats) -> tuple[Floats, Floats]:
    """Return a band for all times together, given lower and upper ln S and the covariance (J, J) of their errors."""
    if len(covariance) == 0:
        return log_survival
    std = np.sqrt(np.maximum(np.diag(covariance), 1e-18))
    correlation = covariance / np.outer(std, std)
    values, vectors = np.linalg.eigh(correlation)
    errors = draw_noise(len(std)) @ (vectors * np.sqrt(np.maximum(values, 0))).T
    reach = np.quantile(np.abs(errors).max(1), LEVEL) * std
    low, high = (np.exp(np.minimum(end, 0)) for end in (log_survival[0] - reach, log_survival[1] + reach))
    # A curve that falls is above its later lower ends, and below its earlier upper ones.
    return np.maximum.accumulate(low[::-1])[::-1], np.minimum.accumulate(high)


@dataclass(frozen=True)
class LogRank:
    """A log-rank test of equal survival in all groups.

    Attributes:
        statistic: The quadratic form of observed less expected events.
        p_value: The probability of such a statistic if survival is equal, noise and sample together.
    """

    statistic: float
    p_value: float


def compare_survival(table: NoisyTable) -> LogRank | None:
    """Return the log-rank test of a survival table; None for one group, or where too few are at risk for the noise.

    Source: Mantel 1966; the covariance of the noise in the differences, found by simulation, is added to that of the
    sample.
    """
    counts, noise = read_survival(table), table.noise_std
    if len(counts) < 2:
        return None
    of_risk = noise * np.sqrt(2 * len(counts) * np.arange(counts.shape[1], 0, -1))
    usable = _count_at_risk(counts.sum(0)) >= np.maximum(MIN_CERTAINTY * of_risk, 2.0)
    usable[-1] = False
    last = int(np.argmin(usable))
    if last == 0:
        return None
    difference, of_sample = _compare_events(counts, last)
    if noise:
        draws = counts + noise * draw_noise(counts.size).reshape(-1, *counts.shape)[:2000]
        of_noise = np.cov(_compare_events(draws, last)[0].T)
    else:
        of_noise = np.zeros_like(of_sample)
    covariance = (of_sample + of_noise)[:-1, :-1]  # differences add up to 0
    statistic = float(difference[:-1] @ np.linalg.pinv(covariance) @ difference[:-1])
    return LogRank(statistic, float(chi2.sf(statistic, len(counts) - 1)))


def _compare_events(counts: Floats, last: int) -> tuple[Floats, Floats]:
    """Return observed less expected events (..., G) up to a bin, and their covariance under equality (..., G, G)."""
    at_risk, events = _count_at_risk(counts)[..., :last], counts[..., :last, 1]
    everyone, deaths = at_risk.sum(-2, keepdims=True), events.sum(-2, keepdims=True)
    share = at_risk / everyone
    difference: Floats = (events - share * deaths).sum(-1)
    scale = np.clip(deaths * (everyone - deaths) / (everyone - 1), 0, None)
    diagonal = np.eye(share.shape[-2]) * (share * scale).sum(-1)[..., None, :]
    covariance: Floats = diagonal - np.einsum("...gj,...hj->...gh", share * scale, share)
    return difference, covariance


def draw_noise(size: int) -> Floats:
    """Return standard normal numbers (draws, size), the same ones every time."""
    return np.random.default_rng(0).standard_normal((_DRAWS, size))
