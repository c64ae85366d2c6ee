"""Histograms of numeric columns, and quantiles by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from silodp.settings import Whole
from silodp_analytics.counted import Entries, NumberBlock, Records, fall_into_one
from silodp_analytics.statistics.statistic import Columns, Reading, Statistic, estimates

if TYPE_CHECKING:
    from silodp_analytics.statistics.report.estimates import Interval, NarrowerRange


@dataclass(frozen=True)
class HistogramReading(Reading):
    """Counts of bins, and their quantiles."""

    @cached_property
    def quantiles(self) -> Mapping[float, Interval]:
        """The quantiles; none where the records are lost in the noise."""
        return estimates.estimate_quantiles(self.table)

    @cached_property
    def narrower(self) -> NarrowerRange | None:
        """The range of nine of ten values, where most bins are empty."""
        return estimates.suggest_bin_range(self.table, self.quantiles)

    def to_json(self) -> dict[str, Any]:
        """Return the quantiles."""
        return {
            **super().to_json(),
            "quantiles": {f"{share:g}": vars(one) for share, one in self.quantiles.items()},
        }

    def describe(self, counted: str) -> list[str]:
        """Return the median."""
        median = self.quantiles.get(0.5)
        found = (
            "its quantiles are lost in the noise"
            if median is None
            else (f"median {median.value:.4g} ({median.low:.4g} to {median.high:.4g})")
        )
        return [f"{self.table.column}: {found}{self.note}"]


@dataclass(frozen=True)
class Histogram(NumberBlock, Statistic):
    """A histogram: equal bins of the public range, and one for missing cells; quantiles follow from it."""

    bins: Annotated[int, Whole(2, limit=1000)] = 10

    kind = "histogram"
    asked = Mapping[str, int]
    reading = HistogramReading

    @classmethod
    def read_setting(cls, asked: Mapping[str, int], columns: Columns) -> list[Histogram]:
        """Return a histogram for each column → number of bins."""
        return [cls(**columns.place_number(name, "histogram"), bins=bins) for name, bins in asked.items()]

    @property
    def size(self) -> int:
        """Number of bins, and one for missing cells."""
        return self.bins + self.has_missing

    @property
    def edges(self) -> NDArray[np.float64]:
        """The edges of the bins, (bins + 1,), in the unit of the column."""
        return np.linspace(*self.range, self.bins + 1)

    def find_entries(self, records: Records) -> Entries:
        """Return the bin of every record; a bin has its lower edge, the last one both."""
        values, known = self.read(records)
        # Scaled as the cells were, edges have their rounding, too: a value on an edge stays on it.
        inner = self.numeric.scale(self.edges[1:-1])
        return fall_into_one(np.where(known, np.searchsorted(inner, values, side="right"), self.bins))

    def describe(self) -> dict[str, Any]:
        """Return the edges."""
        edges = [float(f"{edge:.12g}") for edge in self.edges]
        return {"column": self.column, "edges": edges, "has_missing": self.has_missing}
