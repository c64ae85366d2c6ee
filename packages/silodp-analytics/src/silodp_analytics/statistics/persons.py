"""The number of persons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from silodp.data.public import PublicData
from silodp_analytics.counted import Entries, Records, fall_into_one
from silodp_analytics.statistics.statistic import Reading, Statistic, estimates, show_count


@dataclass(frozen=True)
class PersonReading(Reading):
    """One count."""

    layout = "headline"

    @property
    def size(self) -> int:
        """The one cell."""
        return 1

    def to_json(self) -> dict[str, Any]:
        """Return the number with its interval."""
        return {"estimate": vars(estimates.estimate_count(self.table.counts[0], self.table.noise_std))}

    def describe(self, counted: str) -> list[str]:
        """Return the number with its interval."""
        is_by_silo = counted.endswith("by_silo")
        how = "persons, once in every silo where they have records" if is_by_silo else "different persons"
        shown = show_count(self.table.counts[0], self.table.noise_std)
        return [f"{shown} {how} ({self.total.low:,.0f} to {self.total.high:,.0f})"]


@dataclass(frozen=True)
class PersonCell(Statistic):
    """One cell, to which every person with a record adds 1 in every silo, however many records they have there."""

    column: str = "persons"

    kind = "persons"
    reading = PersonReading
    of_persons = True

    @property
    def size(self) -> int:
        """The one cell."""
        return 1

    def find_entries(self, records: Records) -> Entries:
        """Return the one cell for every record."""
        return fall_into_one(np.zeros(len(records[1])))

    def check(self, data: PublicData) -> None:
        """Pass: every record is somebody's."""

    def describe(self) -> dict[str, Any]:
        """Return the name."""
        return {"column": self.column}
