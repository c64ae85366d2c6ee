"""Means and standard deviations of numeric columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp_analytics.counted import Entries, NumberBlock, Records
from silodp_analytics.statistics.statistic import Columns, Reading, Statistic, estimates

if TYPE_CHECKING:
    from silodp_analytics.statistics.report.estimates import MeanEstimate, NarrowerRange

MOMENT_CENTER = 0.5
"""A record adds t² − 1/2 for a value t in [−1, 1]: half as long as t² at the most, so that less noise is needed."""


@dataclass(frozen=True)
class MeanReading(Reading):
    """Three sums, and the mean by them."""

    layout = "row"

    @property
    def size(self) -> int:
        """The three sums."""
        return 3

    @cached_property
    def mean(self) -> MeanEstimate | None:
        """Mean and standard deviation; None where the number of values is lost in the noise."""
        return estimates.estimate_mean(self.table)

    @cached_property
    def narrower(self) -> NarrowerRange | None:
        """A range by which the mean has less noise."""
        mean = self.mean
        if mean is None:
            return None
        return estimates.suggest_mean_range(self.table.edges, mean.mean.value, mean.mean.reach)

    def to_json(self) -> dict[str, Any]:
        """Return the estimates."""
        if self.mean is None:
            return {}
        return {"estimate": {name: vars(one) for name, one in vars(self.mean).items()}, **super().to_json()}

    def describe(self, counted: str) -> list[str]:
        """Return mean and standard deviation."""
        if self.mean is None:
            return [f"{self.table.column}: its mean is lost in the noise"]
        mean, std = self.mean.mean, self.mean.std
        interval = f"{mean.low:.4g} to {mean.high:.4g}"
        # Noise alone may make it 0, which says nothing of the values.
        spread = f"standard deviation {f'{std.value:.3g}' if std.low else f'below {std.high:.3g}'}"
        return [f"{self.table.column}: mean {mean.value:.4g} ({interval}), {spread}{self.note}"]


@dataclass(frozen=True)
class Mean(NumberBlock, Statistic):
    """The sums behind a mean and a standard deviation: Σt, Σ(t² − 1/2) and their number, for t scaled to [−1, 1]."""

    kind = "mean"
    asked = tuple[str, ...]
    reading = MeanReading

    @classmethod
    def read_setting(cls, asked: tuple[str, ...], columns: Columns) -> list[Mean]:
        """Return the sums of each column."""
        return [cls(**columns.place_number(name, "mean")) for name in asked]

    @property
    def size(self) -> int:
        """The three sums."""
        return 3

    @property
    def reach(self) -> float:
        """√(1 + 1/4 + 1), at the ends of the range."""
        return math.sqrt(2 + (1 - MOMENT_CENTER) ** 2)

    def find_entries(self, records: Records) -> Entries:
        """Return the three sums' terms; a missing cell adds nothing."""
        values, known = self.read(records)
        low, high = self.numeric.scale(np.asarray(self.range)).astype(np.float64)
        # Clipped again: the bound must hold for whatever stands at the place.
        scaled = np.clip(2 * (values.astype(np.float64) - low) / (high - low) - 1, -1, 1)
        terms = np.stack([scaled, scaled**2 - MOMENT_CENTER, np.ones(len(scaled))], axis=1)
        return np.broadcast_to(np.arange(3), terms.shape), np.where(known[:, None], terms, 0.0)

    def describe(self) -> dict[str, Any]:
        """Return the range."""
        return {"column": self.column, "edges": list(self.range), "has_missing": self.has_missing}

    @property
    def spread(self) -> int:
        """All records are in one sum."""
        return 1

    def expect(self, noise_std: float, users: float) -> tuple[dict[str, float], list[str]]:
        """Return half the width of the 95 % interval of a mean of one value of every person, and advice on it."""
        low, high = self.range
        center = min(max(self.typical[0], low), high) if self.typical else high
        place = (2 * center - low - high) / (high - low)
        # The mean is a ratio of two noisy sums: its error is that of the first less `place` times the second.
        reach = estimates.estimate_count(0.0, noise_std).high * math.hypot(1, place) / users
        error = reach * (high - low) / 2
        narrower = estimates.suggest_mean_range(self.range, center, error) if self.typical else None
        if narrower is None:
            return {"mean_error": error}, []
        return {"mean_error": error}, [
            f"the mean of '{self.column}' has an error of about ± {error:.2g}, in proportion to its declared range, "
            f'{low:g} to {high:g}: with out_of_range = "clip", a range of {narrower.low:g} to {narrower.high:g} '
            f"would make it ± {narrower.error:.2g}"
        ]
