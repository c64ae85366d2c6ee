"""The result of a regression: coefficients in the units of the table, with errors, intervals and p-values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import LazyModule
from silodp.errors import SilodpError
from silodp.parsing import refuse_malformed
from silodp_analytics.regression.families import INTERCEPT, Total
from silodp_analytics.regression.method import Regression

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from scipy import stats

    from silodp.accounting.guarantee import Guarantee
    from silodp.accounting.views import Adversary
    from silodp.report.run_record import RunRecord
    from silodp.runtime.run_files import MetricsRow
else:
    stats = LazyModule("scipy.stats")  # which takes a second, and a silo does not need it

LOST = {
    "curvature": "the records say too little of it for this noise (few persons, a rare category, or separation)",
    "not converged": "the last step still moved it: more iterations, a better typical outcome, or separation",
    "noise": "more than 4/5 of its variance is noise",
}
"""Why a coefficient has no interval."""
_LEAST_P = 1e-300


@dataclass(frozen=True)
class Coefficient:
    """One coefficient, in the units of the table.

    Attributes:
        term: Its name.
        estimate: The coefficient.
        standard_error: Of sample and noise together.
        noise_share: The part of the variance that is noise.
        lost: A key of `LOST`; None where the coefficient can be used.
        level: The level of the interval.
    """

    term: str
    estimate: float
    standard_error: float
    noise_share: float
    lost: str | None
    level: float

    @property
    def interval(self) -> tuple[float, float] | None:
        """Lower and upper end; None where the coefficient is lost."""
        if self.lost is not None:
            return None
        reach = float(stats.norm.ppf(0.5 + self.level / 2)) * self.standard_error
        return self.estimate - reach, self.estimate + reach

    @property
    def sampling_error(self) -> float:
        """The part of the standard error that comes from the sampling of persons; squares of both parts add up."""
        return self.standard_error * math.sqrt(1 - self.noise_share)

    @property
    def noise_error(self) -> float:
        """The part of the standard error that is noise of the guarantee."""
        return self.standard_error * math.sqrt(self.noise_share)

    @property
    def texts(self) -> tuple[str, str, str]:
        """Estimate and ends of the interval for readers; of a lost coefficient, the estimate alone."""
        if self.interval is None:
            return format_by_width(self.estimate, 2 * self.standard_error), "", ""
        return _format_interval(self.estimate, *self.interval)

    @property
    def ratio_texts(self) -> tuple[str, str, str]:
        """exp of estimate and interval for readers; none of a lost coefficient."""
        if self.interval is None:
            return "", "", ""
        return _format_interval(*map(_exp, (self.estimate, *self.interval)))

    @property
    def z(self) -> float | None:
        """The estimate in standard errors; None where the coefficient is lost."""
        return None if self.lost is not None else self.estimate / self.standard_error

    @property
    def p(self) -> float | None:
        """The two-sided p-value, never below 10⁻³⁰⁰; None where the coefficient is lost."""
        return None if self.z is None else max(2 * float(stats.norm.sf(abs(self.z))), _LEAST_P)

    @property
    def p_text(self) -> str:
        """The p-value for readers."""
        if self.p is None:
            return ""
        return "< 1e-300" if self.p <= _LEAST_P else f"{self.p:.2g}" if self.p >= 1e-3 else "< 0.001"

    @property
    def more_persons(self) -> float:
        """How many times as many persons halve the standard error: 4 without noise, 2 where all is noise.

        The variance of the sample falls with the number of persons, that of the noise with its square.
        """
        # (1 − s)/m + s/m² = 1/4 for the share s of noise.
        share = self.noise_share
        return 2 * ((1 - share) + math.sqrt((1 - share) ** 2 + share))

    def to_json(self) -> dict[str, Any]:
        """Return all numbers, JSON-ready; those of a lost coefficient are None."""
        return {
            "term": self.term,
            "estimate": self.estimate,
            "standard_error": self.standard_error,
            "noise_share": self.noise_share,
            "lost": self.lost,
            "interval": None if self.interval is None else list(self.interval),
            "z": self.z,
            "p": self.p,
        }


@dataclass(frozen=True)
class RegressionResult:
    """What a regression has released.

    Attributes:
        method: The regression with its public constants.
        coefficients: The coefficients, the intercept first.
        covariance: Of the coefficients, (p, p), the noise included.
        baseline: The logarithms of the rates of intervals, for a record in the middle of all ranges and in the first
            categories; () where there is an intercept alone.
        silos: The number of silos.
        epsilon: ε by adversary; None where nothing is guaranteed.
        delta: δ.
        noise_std: The standard deviation of the noise in each number of a sum.
        totals: What the noisy sums say of all persons; () where their weights do not add up to 1.
    """

    method: Regression
    coefficients: tuple[Coefficient, ...]
    covariance: NDArray[np.float64]
    silos: int
    epsilon: dict[str, float | None]
    delta: float | None
    baseline: tuple[Coefficient, ...] = ()
    noise_std: float = 0.0
    totals: tuple[Total, ...] = ()

    def with_guarantees(self, guarantees: Mapping[Adversary, Guarantee]) -> RegressionResult:
        """Return the result with ε by adversary."""
        epsilon = {str(adversary): one.epsilon for adversary, one in guarantees.items()}
        return replace(self, epsilon=epsilon, delta=guarantees["released"].delta)

    @property
    def ratio(self) -> str | None:
        """The name of exp(coefficient), for example "odds ratio"."""
        return self.method.family.ratio

    @property
    def slopes(self) -> tuple[Coefficient, ...]:
        """The coefficients of columns."""
        return self.coefficients[len(self.method.design.baselines) :]

    @property
    def shown(self) -> tuple[Coefficient, ...]:
        """The coefficients of tables: all but those of which `baseline` tells more."""
        return self.slopes if self.baseline else self.coefficients

    @cached_property
    def estimand(self) -> str:
        """A sentence that says what the coefficients are of."""
        by = {
            "primary_silo": "once, in the silo with most of their records (of equals, the first one), by the mean over "
            "their records there",
            "uniform": "in every silo with the same weight, by the mean over their records there",
            "present": "with one weight in each silo where they have records, by the mean over their records there",
            "records": "once, by the mean over all their records",
        }[self.method.weighting]
        method = self.method
        kind = type(method.family).__name__
        outcome = method.outcome + (f" = {method.event}" if method.event else "")
        outcome += f" (time: {method.time})" if method.time else ""
        return (
            f"{kind} regression of {outcome}, without terms for silos. Each person counts {by}. At the coefficients of "
            f"{method.family.unit} the mean score over persons is zero (a score is the slope of a log likelihood)."
        )

    @property
    def counted(self) -> str:
        """The totals as a clause for readers, with the error that is noise; "" where there are none."""
        return ", ".join(
            f"{one.what} {format_by_width(one.value, one.error)}"
            + (f" (noise of standard deviation {format_by_width(one.error, one.error)})" if one.error else "")
            for one in self.totals
        )

    def table(self) -> pd.DataFrame:
        """Return one row for each coefficient: estimate, errors, interval, z, p, and the ratio with its interval."""
        import pandas as pd

        rows = []
        for one in self.shown:
            low, high = one.interval or (math.nan, math.nan)
            row = {
                "term": one.term,
                "coefficient": one.estimate,
                "standard error": one.standard_error,
                "share of noise": one.noise_share,
                "low": low,
                "high": high,
                "z": math.nan if one.z is None else one.z,
                "p": math.nan if one.p is None else one.p,
            }
            if self.ratio is not None:
                ratio = math.nan if one.lost else _exp(one.estimate)
                row |= {self.ratio: ratio, "ratio low": _exp(low), "ratio high": _exp(high)}
            rows.append({**row, "lost": one.lost or ""})
        return pd.DataFrame(rows)

    def to_json(self) -> dict[str, Any]:
        """Return all of it, JSON-ready."""
        rows = []
        for one in self.coefficients:
            row = one.to_json()
            if self.ratio is not None and one in self.slopes:
                interval = None if one.interval is None else list(map(_exp, one.interval))
                row |= {"ratio": None if one.lost else _exp(one.estimate), "ratio_interval": interval}
            rows.append(row)
        method = self.method
        return {
            "family": type(method.family).__name__.lower(),
            "outcome": method.outcome,
            "event": method.event or None,
            "weighting": method.weighting,
            "iterations": method.iterations,
            "interval": method.interval,
            "estimand": self.estimand,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "ratio": self.ratio,
            "coefficients": rows,
            "covariance": self.covariance.tolist(),
            "remarks": list(method.family.remarks),
            "baseline": [one.to_json() for one in self.baseline],
            "noise_std": self.noise_std,
            "totals": [asdict(one) for one in self.totals],
        }

    def plot(self) -> Figure:
        """Return the forest plot."""
        from silodp_analytics.regression.forest import plot_forest

        return plot_forest(self)

    def format(self) -> list[str]:
        """Return the lines of the terminal."""
        width = max(len(one.term) for one in (*self.shown, *self.baseline))
        lines = [self.estimand, *([f"By the noisy sums: {self.counted}."] if self.totals else [])]
        lines += self.method.family.remarks
        for one in self.shown:
            value, low, high = one.texts
            start = f"  {one.term:<{width}}  {value:>10} ± {format_error(one.standard_error):<9}"
            if one.interval is None:
                lines.append(f"{start} lost in the noise: {LOST[one.lost or 'noise']}")
                continue
            ratio = ""
            if self.ratio is not None and one in self.slopes:
                ratio = "  {} {} ({} to {})".format(self.ratio, *one.ratio_texts)
            p = one.p_text if one.p_text.startswith("<") else f"= {one.p_text}"
            parts = f"sampling {format_error(one.sampling_error)}, noise {format_error(one.noise_error)}"
            lines.append(f"{start} ({low} to {high})  p {p}{ratio}  {parts}")
        if self.baseline:
            lines.append("Rates in the middle of all ranges and in the first categories:")
        for one in self.baseline:
            if one.interval is None:
                lines.append(f"  {one.term:<{width}}  lost in the noise: {LOST[one.lost or 'noise']}")
                continue
            rate, low, high = one.ratio_texts
            lines.append(f"  {one.term:<{width}}  {rate:>10} ({low} to {high})")
        return lines


def format_by_width(value: float, width: float) -> str:
    """Return a number with two figures of the width of its interval: 1.0284 for a width of 0.0040."""
    if not 0 < width < math.inf:
        return f"{value:.4g}"
    places = 1 - math.floor(math.log10(width))
    if places <= 8 and abs(value) < 1e7:
        return f"{value:.{max(places, 0)}f}"
    figures = math.floor(math.log10(max(abs(value), width))) + places + 1
    return f"{value:.{min(max(figures, 2), 15)}g}"


def _format_interval(value: float, low: float, high: float) -> tuple[str, str, str]:
    """Return a number and the ends of its interval, alike."""
    width = high - low
    return format_by_width(value, width), format_by_width(low, width), format_by_width(high, width)


def format_error(error: float) -> str:
    """Return a standard error with three figures."""
    return format_by_width(error, error / 10)


def _exp(value: float) -> float:
    """Return exp(value), at most 10³⁰⁰."""
    return math.exp(min(value, 690.0)) if value == value else math.nan


def compute_result(
    method: Regression, sums: NDArray[np.float64], noise_std: float, silos: int
) -> RegressionResult:
    """Return the result of the noisy sums of all iterations, (iterations, sum_size)."""
    path = method.rounds.follow(sums, noise_std)
    if path.fit is None:
        raise SilodpError(
            f"the regression has {len(sums)} of {method.iterations} iterations: finish it (silodp run DIR --resume).",
            code="regression.rounds",
            field="rounds",
        )
    fit, design, family = path.fit, method.design, method.family
    change, k = design.change * family.scale, len(design.baselines)
    estimate = change @ fit.theta
    estimate[:k] += family.start * family.scale

    def describe(names: Sequence[str], rows: NDArray[np.float64]) -> tuple[Coefficient, ...]:
        """Return sums of coefficients, by the rows of their factors (n, p)."""
        found, moved = rows @ estimate, rows @ change
        variance, noise = (np.diag(moved @ one @ moved.T) for one in (fit.covariance, fit.noise))
        variance = np.maximum(variance, 1e-300)  # without records or noise there is nothing to divide by
        return tuple(
            Coefficient(
                name,
                float(found[j]),
                float(math.sqrt(variance[j])),
                float(min(max(noise[j] / variance[j], 0.0), 1.0)),
                why,
                method.interval,
            )
            for j, (name, why) in enumerate(zip(names, fit.find_lost(moved), strict=True))
        )

    of_baselines = np.eye(k, design.size) + design.middle
    baseline = () if design.baselines == (INTERCEPT,) else describe(design.baselines, of_baselines)
    coefficients = describe(design.names, np.eye(design.size))
    totals: list[Total] = []
    if method.weighting in ("primary_silo", "records"):  # a person's weights add up to 1
        first = method.rounds.read_release(sums[0], noise_std, 0)
        curvature = first.curvature.diagonal()[:k]
        totals = family.list_totals(first.score[:k], curvature, first.score_std, first.curvature_std)
    covariance = change @ fit.covariance @ change.T
    return RegressionResult(
        method, coefficients, covariance, silos, {}, None, baseline, noise_std, tuple(totals)
    )


def read_rows(rows: Sequence[MetricsRow]) -> RegressionResult | None:
    """Return the result in the rows of metrics.jsonl, without ε; None for another run.

    Raises:
        SilodpError: a row is damaged (code report.damaged), or the run is not complete (code regression.rounds).
    """
    found = [row["regression"] for row in rows if "regression" in row]
    if not found:
        return None
    from silodp.config.build import build_method

    with refuse_malformed("metrics.jsonl does not hold a regression: restore it.", code="report.damaged"):
        sums = np.array([one["sum"] for one in found], np.float64)
        noise_std, silos = float(found[-1]["noise_std"]), int(found[-1]["silos"])
        table = {name: value for name, value in found[-1]["method"].items() if name != "name"}
        method = build_method("regression", table, "method", len(found), 1e-5)
        assert isinstance(method, Regression)
        if sums.shape[1:] != (method.rounds.sum_size,) or not np.isfinite(sums).all():
            raise ValueError("not the sums of this regression")
    return compute_result(method, sums, noise_std, silos)


def read_regression(run: RunRecord) -> RegressionResult | None:
    """Return the result in the files of a run; None for another run. Raises what `read_rows` does."""
    result = read_rows(run.rows)
    return None if result is None else result.with_guarantees(run.guarantees)


def read_result(directory: str | Path) -> RegressionResult:
    """Return the result in the directory of a run.

    Raises:
        SilodpError: it has no regression, or is not complete.
    """
    from silodp.report.run_record import read_run

    found = read_regression(read_run(Path(directory)))
    if found is None:
        raise SilodpError(
            f"{directory} has no regression: make one with 'silodp regression'.", code="report.missing"
        )
    return found


__all__ = ["LOST", "Coefficient", "RegressionResult", "compute_result", "read_result"]
