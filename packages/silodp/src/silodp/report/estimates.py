"""Metrics with their errors, and the last evaluation by noisy sums of a run, which another package reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from silodp._lazy import Registry
from silodp.report.formatting import find_interval, format_measure

if TYPE_CHECKING:
    from silodp.runtime.run_files import MetricsRow


@dataclass(frozen=True)
class Estimate:
    """A metric computed from counts.

    Attributes:
        value: The metric.
        standard_error: The standard deviation of the value that the noise in the counts causes, to first order.
        low: The smallest value that the metric of the records themselves can have if counts have no noise.
        high: The largest such value. It differs from `low` where a bin holds several records whose order is not known.
        sampling_error: The standard error because the records are a sample, if they were independent; of R² an upper
            bound. None where it is not known.
    """

    value: float
    standard_error: float
    low: float
    high: float
    sampling_error: float | None = None


EVALUATIONS: Registry[Callable[[Sequence[MetricsRow]], Any]] = Registry("evaluations", {})
"""Functions that read the evaluation of a run from its rows."""

_LIMITS = {
    "r2": (-math.inf, 1.0),
    "mean_absolute_error": (0.0, math.inf),
    "perplexity": (1.0, math.inf),
    **dict.fromkeys(("net_benefit", "difference"), (-math.inf, math.inf)),
}
"""Values that a metric can have, where they are not 0 to 1."""


def find_error(estimate: Estimate) -> float:
    """Return √(a² + b²) of the errors of noise and sample, which are independent; a, where b is not known."""
    return math.hypot(estimate.standard_error, estimate.sampling_error or 0.0)


def find_limits(metric: str, estimate: Estimate) -> tuple[float, float]:
    """Return the 95 % interval of a metric, for the errors of noise and sample together."""
    return find_interval(estimate.value, find_error(estimate), *_LIMITS.get(metric, (0.0, 1.0)))


def format_estimate(metric: str, estimate: Estimate) -> str:
    """Return a metric with its 95 % interval, as "0.83 (0.78 to 0.88)"."""
    low, high = find_limits(metric, estimate)
    return f"{format_measure(estimate.value)} ({low:.3g} to {high:.3g})"


def find_evaluation(rows: Sequence[MetricsRow]) -> Any:
    """Return the last evaluation by noisy sums, as the package that made it reads it; None where there is none.

    Raises:
        SilodpError: A row holds something else, or that package is not installed (extension.missing).
    """
    if all(row.get("evaluation") is None for row in rows):
        return None
    # A report without what was measured, and charged, would mislead.
    return EVALUATIONS.load_required("evaluation", "analytics", "the evaluation of this run")(rows)
