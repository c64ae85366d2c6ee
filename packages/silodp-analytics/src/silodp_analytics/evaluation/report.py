"""The last evaluation by noisy sums of a run, read back from its rows: metrics, their errors, subgroups and silos.

All of it is post-processing of sums that ε covers; parts with few records are left out where the rows are written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from silodp.parsing import refuse_malformed
from silodp.report.estimates import Estimate, format_estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from silodp.report.held_out import CalibrationBin
    from silodp.runtime.run_files import MetricsRow
    from silodp_analytics.decisions.decisions import Gap
    from silodp_analytics.statistics.report.estimates import SurvivalCurve


@dataclass(frozen=True)
class EvaluatedPart:
    """Noisy metrics of a silo or a subgroup.

    Attributes:
        of: "silo", or the column of a subgroup.
        name: The name of the silo or subgroup.
        shown: Whether it has enough records by the public rule.
        records: Noisy number of records; None where it is not shown.
        noise_std: Standard deviation of the noise in a count.
        estimates: Metrics by name; those that are lost in the noise are left out.
        counts: Noisy counts of a silo that is shown, by class, of two, and by step of the probability; () for others.
    """

    of: str
    name: str
    shown: bool
    records: float | None
    noise_std: float
    estimates: Mapping[str, Estimate]
    counts: Sequence[Sequence[float]] = ()

    @property
    def title(self) -> str:
        """What it is called in a table."""
        return f"{self.of} {self.name}" if self.of == "silo" else f"{self.of}: {self.name}"

    def describe(self, metric: str) -> str:
        """Return the metric with its 95 % interval."""
        found = self.estimates.get(metric)
        return "lost in the noise" if found is None else format_estimate(metric, found)


@dataclass(frozen=True)
class NoisyEvaluation:
    """An evaluation by noisy sums.

    Attributes:
        round: The round after which it was made.
        noise_std: Standard deviation of the noise in a count.
        estimates: Metrics by name, with their errors.
        confusion: Noisy counts by true and predicted class; None where labels are no classes.
        counts: Noisy counts of all cells, nested lists.
        times: Edges between bins of survival times; () for other labels.
        parts: Silos, then subgroups.
        least_group: The fewest records of a part that is shown.
    """

    round: int
    noise_std: float
    estimates: Mapping[str, Estimate]
    confusion: Sequence[Sequence[float]] | None = None
    counts: Sequence[object] = ()
    times: tuple[float, ...] = ()
    parts: tuple[EvaluatedPart, ...] = ()
    least_group: int = field(default=30, kw_only=True)

    def name_classes(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names of the classes; their numbers, where these are not the names of all."""
        classes = len(self.confusion or ())
        return names if len(names) == classes else [str(number) for number in range(classes)]

    @property
    def has_steps(self) -> bool:
        """Whether the counts are by class, of two, and by step of the predicted probability."""
        return len(self.confusion or ()) == 2 and len(self.counts) == 2

    def list_parts(self, of_silos: bool) -> list[EvaluatedPart]:
        """Return the silos, or the subgroups, that are shown."""
        return [part for part in self.parts if part.shown and (part.of == "silo") == of_silos]

    def list_hidden(self) -> list[str]:
        """Return the titles of the parts that are not shown."""
        return [part.title for part in self.parts if not part.shown]

    def estimate_survival(self) -> SurvivalCurve | None:
        """Return the Kaplan-Meier curve of the held-out records; None where labels are no survival times.

        Raises:
            ValueError: counts and times do not belong together.
        """
        if not self.times:
            return None
        from silodp_analytics.statistics.report.estimates import NoisyTable, estimate_survival

        counts, noise = [], 0.0
        for by_event in self.counts:
            for bins in by_event:  # type: ignore[attr-defined]
                counts.append(math.fsum(bins))
                noise = self.noise_std * math.sqrt(len(bins))  # a sum over the bins of scores
        (curve,) = estimate_survival(NoisyTable("survival", "time", tuple(counts), noise, self.times, ("",)))
        return curve

    def plot_survival(self) -> Figure | None:
        """Draw the curve of `estimate_survival`; None without one."""
        from silodp_analytics.statistics.report import figures  # matplotlib, which takes a second

        curve = self.estimate_survival()
        return None if curve is None or not len(curve.times) else figures.plot_survival([curve], "time")

    def calibrate(self) -> Sequence[CalibrationBin]:
        """Return the calibration that follows from counts that have steps."""
        from silodp_analytics.decisions.decisions import calibrate_counts

        return calibrate_counts(self.counts, self.noise_std)  # type: ignore[arg-type]

    def list_gaps(self) -> Sequence[Gap]:
        """Return the largest difference of every metric between the subgroups of a column."""
        from silodp_analytics.decisions.decisions import list_gaps

        return list_gaps(self.list_parts(False))


def find_evaluation(rows: Sequence[MetricsRow]) -> NoisyEvaluation | None:
    """Return the last evaluation by sums; None where there is none.

    It need not be that of the last round: an evaluation costs ε, so there are few.

    Raises:
        SilodpError: A row holds something else (code run.metrics_damaged).
    """
    for row in reversed(rows):
        found = row.get("evaluation")
        if found is not None:
            with refuse_malformed(
                f"the evaluation after round {row['round']} in metrics.jsonl cannot be read: restore the file from a "
                "copy.",
                code="run.metrics_damaged",
            ):
                return TypeAdapter(NoisyEvaluation).validate_python({**found, "round": row["round"]})
    return None
