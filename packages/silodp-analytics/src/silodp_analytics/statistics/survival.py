"""Survival times in bins: Kaplan-Meier curves and the log-rank test."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from silodp.data.public import PublicData
from silodp.settings import Settings
from silodp_analytics.counted import CategoryCells, Entries, Records, fall_into_one
from silodp_analytics.statistics.statistic import Columns, Reading, Statistic, estimates, figures
from silodp_analytics.times import find_bins

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from silodp_analytics.statistics.report.estimates import LogRank, SurvivalCurve


@dataclass(frozen=True)
class SurvivalRequest(Settings, prefix="statistics.survival."):
    """Survival times to be counted.

    Attributes:
        times: Public edges between bins of time, ascending.
        by: A categorical column whose categories are compared; None compares nothing.
    """

    times: tuple[float, ...]
    by: str | None = None


@dataclass(frozen=True)
class SurvivalReading(Reading):
    """Counts by group, bin of the time and kind of end, and the curves by them."""

    layout = "curves"

    @property
    def size(self) -> int:
        """Cells of all groups, bins and kinds of end."""
        return len(self.table.names) * (len(self.table.edges) + 1) * 2

    @property
    def title(self) -> str:
        """What is compared."""
        return f"Survival by {self.table.by}" if self.table.by else "Survival"

    @cached_property
    def curves(self) -> list[SurvivalCurve]:
        """The curve of each group."""
        return estimates.estimate_survival(self.table)

    @cached_property
    def test(self) -> LogRank | None:
        """The log-rank test of equal survival."""
        return estimates.compare_survival(self.table)

    def to_json(self) -> dict[str, Any]:
        """Return the curves and the test."""
        curves = [
            {name: value if name == "group" else value.tolist() for name, value in vars(curve).items()}
            for curve in self.curves
        ]
        return {"curves": curves, "log_rank": self.test and vars(self.test)}

    def describe(self, counted: str) -> list[str]:
        """Return the last point of each curve."""
        return [_format_curve(self.table.column, curve) for curve in self.curves]

    def plot(self, unit: str) -> tuple[str, Figure, str] | None:
        """Draw the curves; None where all are lost in the noise."""
        if not any(len(curve.times) for curve in self.curves):
            return None
        caption = "Kaplan-Meier curves; the bands hold the curves of the counted records with 95 %."
        return "survival", figures.plot_survival(self.curves, self.table.column), caption


def _format_curve(column: str, curve: SurvivalCurve) -> str:
    group = f" in group {curve.group}" if curve.group else ""
    if not len(curve.times):
        return f"survival{group}: lost in the noise"
    return (
        f"survival{group} at {column} {curve.times[-1]:g}: {curve.survival[-1]:.3f} "
        f"({curve.low[-1]:.3f} to {curve.high[-1]:.3f})"
    )


@dataclass(frozen=True)
class Survival(Statistic):
    """Counts by group, bin of the time, and whether there was an event.

    Attributes:
        times: The public edges between bins of time, ascending, above 0; the last bin has no end.
        by: The column whose categories are the groups; None puts all records into one group.
    """

    times: tuple[float, ...] = ()
    by: CategoryCells | None = None
    most_bins: ClassVar[int] = 1000

    kind = "survival"
    asked = SurvivalRequest
    of_columns = False
    reading = SurvivalReading

    @classmethod
    def read_setting(cls, asked: SurvivalRequest, columns: Columns) -> list[Survival]:
        """Return the cells of the survival times."""
        groups = None if asked.by is None else columns.place_categories(asked.by, "survival.by")
        column = (columns.schema.time if columns.schema else None) or "time"
        return [cls(column, times=asked.times, by=groups, weight=columns.weigh("survival"))]

    def __post_init__(self) -> None:
        super().__post_init__()
        times = tuple(map(float, self.times))
        is_ascending = times and times[0] > 0 and all(a < b for a, b in pairwise(times))
        if not is_ascending or not math.isfinite(times[-1]) or len(times) > self.most_bins:
            raise self._refuse(
                f"times = {list(self.times)[:5]}: give at most {self.most_bins} finite times above 0 in ascending order"
            )
        object.__setattr__(self, "times", times)

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups; one without a name where there is no column."""
        return ("",) if self.by is None else self.by.categories

    @property
    def size(self) -> int:
        """Cells of all groups, bins and kinds of end."""
        return len(self.groups) * (len(self.times) + 1) * 2

    def check(self, data: PublicData) -> None:
        """Refuse labels that are no survival times, and other features of the groups."""
        if data.labels != "survival":
            raise self._refuse(f"the labels are of kind '{data.labels}', and no survival times")
        if self.by is not None:
            self.by.check(data)

    def find_entries(self, records: Records) -> Entries:
        """Return the cell of every record; a time equal to an edge belongs to the bin above it."""
        y = records[1]
        bins = find_bins(y[:, 1], self.times)
        groups = 0 if self.by is None else self.by.find_entries(records)[0][:, 0]
        return fall_into_one((groups * (len(self.times) + 1) + bins) * 2 + (y[:, 0] > 0))

    def describe(self) -> dict[str, Any]:
        """Return the groups and the edges between times."""
        by = None if self.by is None else self.by.column
        return {"column": self.column, "by": by, "names": list(self.groups), "edges": list(self.times)}
