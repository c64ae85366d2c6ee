"""Estimates from noisy counts against pandas and lifelines on the pooled records, and how often intervals hold."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from lifelines import KaplanMeierFitter
from lifelines.statistics import multivariate_logrank_test

from silodp_analytics.statistics.report.estimates import (
    NoisyTable,
    compare_survival,
    estimate_count,
    estimate_mean,
    estimate_quantiles,
    estimate_survival,
    is_certain,
    suggest_bin_range,
    suggest_mean_range,
)
from silodp_analytics.statistics.report.figures import find_bars
from silodp_analytics.statistics.statistic import read_table
from support.wards import TIMES, draw_wards

SEEDS = 400
FEWEST = 372
"""Of 400 intervals that hold with a probability of 95 % each, fewer hold with a probability below 5 %."""


@pytest.fixture(scope="module")
def pooled() -> pd.DataFrame:
    return draw_wards(600)


def count_survival(frame: pd.DataFrame, std: float, seed: int = 0) -> NoisyTable:
    """The counts of the records of all silos, with noise."""
    bins = np.digitize(frame.days, TIMES)
    exact = [
        ((frame.ward == ward) & (bins == b) & (frame.dead == event)).sum()
        for ward in "AB" for b in range(len(TIMES) + 1) for event in (0, 1)
    ]  # fmt: skip
    noise = std * np.random.default_rng(seed).standard_normal(len(exact))
    return NoisyTable("survival", "days", tuple(exact + noise), std, tuple(TIMES), ("A", "B"), by="ward")


def fit_pooled(frame: pd.DataFrame, ward: str) -> np.ndarray:
    own = frame[frame.ward == ward]
    fitted = KaplanMeierFitter().fit(own.days, own.dead)
    return fitted.survival_function_at_times(TIMES).to_numpy()


def test_without_noise_the_curve_brackets_that_of_exact_times(pooled: pd.DataFrame) -> None:
    curves = estimate_survival(count_survival(pooled, 0.0))
    assert [curve.group for curve in curves] == ["A", "B"]
    for curve in curves:
        exact = fit_pooled(pooled, curve.group)
        assert len(curve.times) == len(TIMES)
        assert (curve.low <= exact).all()
        assert (exact <= curve.high).all()
        assert curve.survival == pytest.approx(exact, abs=0.01)
        # What the bins leave open is little, and the sample's band is that of Greenwood's formula or wider.
        assert (curve.high - curve.low).max() < 0.12
        assert (curve.sample_high - curve.sample_low > curve.high - curve.low).all()


@pytest.mark.slow
def test_a_band_holds_for_the_pooled_curve_in_95_of_100_seeds(pooled: pd.DataFrame) -> None:
    exact = {ward: fit_pooled(pooled, ward) for ward in "AB"}
    inside, shown = {"A": 0, "B": 0}, 0
    for seed in range(SEEDS):
        for curve in estimate_survival(count_survival(pooled, 6.0, seed)):
            number = len(curve.times)
            shown += number
            true = exact[curve.group][:number]
            inside[curve.group] += bool(((curve.low <= true) & (true <= curve.high)).all())
    assert min(inside.values()) >= FEWEST
    assert shown > 0.8 * 2 * SEEDS * len(TIMES)  # a curve that ends at once is always inside its band


def test_a_curve_ends_where_its_number_at_risk_is_lost_in_the_noise(pooled: pd.DataFrame) -> None:
    for curve in estimate_survival(count_survival(pooled, 400.0)):
        assert len(curve.times) == 0
    assert compare_survival(count_survival(pooled, 400.0)) is None


def test_the_log_rank_test_is_that_of_lifelines_without_noise(pooled: pd.DataFrame) -> None:
    found = compare_survival(count_survival(pooled, 0.0))
    assert found is not None
    # In bins, as the counts are; the last one has no end.
    bins = np.digitize(pooled.days, TIMES)
    days, dead = np.minimum(bins, len(TIMES)), pooled.dead.where(bins < len(TIMES), 0)
    expected = multivariate_logrank_test(days, pooled.ward, dead)
    assert found.statistic == pytest.approx(expected.test_statistic, rel=1e-6)
    assert found.p_value == pytest.approx(expected.p_value, rel=1e-6)


@pytest.mark.slow
def test_equal_survival_is_seldom_called_different() -> None:
    called = 0
    for seed in range(150):
        frame = draw_wards(250, seed=seed)
        frame["ward"] = np.random.default_rng(seed).permutation(frame.ward)
        found = compare_survival(count_survival(frame, 3.0, seed))
        called += found is not None and found.p_value < 0.05
    assert called <= 14  # of 150 at 5 %, more with a probability below 2 %


def test_intervals_of_means_and_deviations_hold() -> None:
    values = np.random.default_rng(1).beta(2, 5, 500) * 70 + 20
    scaled = (values - 55) / 35
    exact = np.array([scaled.sum(), (scaled**2 - 0.5).sum(), len(scaled)])
    means = stds = 0
    for seed in range(SEEDS):
        noisy = exact + 12.0 * np.random.default_rng(seed).standard_normal(3)
        found = estimate_mean(NoisyTable("mean", "age", tuple(noisy), 12.0, (20.0, 90.0)))
        assert found is not None
        means += found.mean.low <= values.mean() <= found.mean.high
        stds += found.std.low <= values.std() <= found.std.high
        assert found.with_sample.high - found.with_sample.low > found.mean.high - found.mean.low
    assert means >= FEWEST
    assert stds >= FEWEST - 8  # its interval is a percentile of simulated noise, which is not exact
    silent = estimate_mean(NoisyTable("mean", "age", tuple(exact), 0.0, (20.0, 90.0)))
    assert silent is not None
    assert (silent.mean.value, silent.std.value) == pytest.approx((values.mean(), values.std()))


def test_a_mean_whose_number_is_lost_in_the_noise_is_not_shown() -> None:
    assert estimate_mean(NoisyTable("mean", "age", (1.0, 1.0, 20.0), 12.0, (0.0, 1.0))) is None


def test_intervals_of_quantiles_hold() -> None:
    values = np.random.default_rng(2).uniform(20, 90, 2000)
    edges = tuple(np.linspace(20, 90, 15))
    exact = np.histogram(values, edges)[0]
    silent = estimate_quantiles(NoisyTable("histogram", "age", tuple(map(float, exact)), 0.0, edges))
    for share, found in silent.items():
        assert found.value == pytest.approx(np.quantile(values, share), abs=1.5)
    inside = dict.fromkeys(silent, 0)
    for seed in range(SEEDS):
        noisy = exact + 15.0 * np.random.default_rng(seed).standard_normal(len(exact))
        for share, found in estimate_quantiles(
            NoisyTable("histogram", "age", tuple(noisy), 15.0, edges)
        ).items():
            inside[share] += found.low <= np.quantile(values, share) <= found.high
    assert min(inside.values()) >= FEWEST


def test_a_count_is_never_negative_and_shown_only_above_its_noise() -> None:
    assert (estimate_count(-5.0, 2.0).value, estimate_count(-5.0, 2.0).low) == (0.0, 0.0)
    assert estimate_count(-5.0, 2.0).high == pytest.approx(1.96 * 2.0, abs=0.01)
    assert [is_certain(value, 2.0) for value in (5.9, 6.0, -9.0)] == [False, True, False]
    assert not is_certain(0.0, 0.0)


def test_counts_that_do_not_fit_their_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="cells"):
        read_table(NoisyTable("mean", "age", (1.0, 2.0), 1.0, (0.0, 1.0)))


def test_a_narrower_range_is_suggested_where_the_declared_one_drowns_a_mean() -> None:
    """Of days in hospital: a mean of 6.4 in a declared range of 0 to 365 is known to ± 8 only."""
    found = suggest_mean_range((0, 365), 6.4, 8.0)
    assert found is not None
    assert (found.low, found.high) == (0, 72)  # five times as far as the mean may be
    assert found.error == pytest.approx(8.0 * 72 / 365)
    mirrored = suggest_mean_range((0, 365), 365 - 6.4, 8.0)
    assert mirrored is not None
    assert (mirrored.low, mirrored.high) == (365 - 72, 365)


@pytest.mark.parametrize(
    ("mean", "error"),
    [(65.0, 1.5), (6.4, 0.6), (6.4, 40.0), (180.0, 20.0)],
    ids=["small", "a tenth", "noise alone", "in the middle"],
)
def test_no_range_is_suggested_where_it_would_not_help(mean: float, error: float) -> None:
    assert suggest_mean_range((0, 365), mean, error) is None


def test_the_suggested_range_makes_the_error_of_the_mean_as_small_as_it_says() -> None:
    rng = np.random.default_rng(3)
    days, std = np.minimum(rng.gamma(1.6, 4, 3000), 365), 45.0

    def measure(high: float) -> tuple[float, float]:
        scaled = 2 * np.minimum(days, high) / high - 1
        sums = [scaled.sum(), (scaled**2 - 0.5).sum(), len(days)] + std * rng.standard_normal(3)
        found = estimate_mean(NoisyTable("mean", "days", tuple(sums), std, (0.0, high)))
        assert found is not None
        return found.mean.value, found.mean.reach

    wide = suggest_mean_range((0, 365), *measure(365))
    assert wide is not None
    value, error = measure(wide.high)
    assert error == pytest.approx(wide.error, rel=0.25)
    assert abs(value - days.mean()) < 1.5 * error
    assert error < measure(365)[1] / 3


def test_a_narrower_range_is_suggested_for_bins_that_are_mostly_empty() -> None:
    edges = tuple(np.linspace(0, 20, 11))
    full = NoisyTable("histogram", "x", (300.0,) * 10, 1.0, edges)
    few = NoisyTable("histogram", "x", (1500.0, 1400.0, 200.0, *[0.0] * 7), 1.0, edges)
    assert suggest_bin_range(full, estimate_quantiles(full)) is None
    found = suggest_bin_range(few, estimate_quantiles(few))
    assert found is not None
    assert (found.low, found.high) == (0, 6)


def test_a_count_lost_in_the_noise_has_no_bar_beside_its_upper_end() -> None:
    """A bar of 134 stood beside "< 226" once."""
    lengths, (below, above) = find_bars(np.array([134.0, 500.0, -20.0]), 46.6)
    assert lengths == [0, 500, 0]
    assert below == pytest.approx([0, 1.96 * 46.6, 0], rel=1e-3)
    assert above == pytest.approx([134 + 1.96 * 46.6, 1.96 * 46.6, 1.96 * 46.6], rel=1e-3)
