"""Counts of the categories of a column, and of the classes of the label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from silodp.data.public import PublicData
from silodp_analytics.counted import CategoryCells, Entries, Records, fall_into_one
from silodp_analytics.statistics.statistic import Columns, Statistic


@dataclass(frozen=True)
class CategoryCount(CategoryCells, Statistic):
    """Counts of the public categories of a column."""

    asked = tuple[str, ...]

    @classmethod
    def read_setting(cls, asked: tuple[str, ...], columns: Columns) -> list[Statistic]:
        """Return the cells of each column, those of the label last."""
        found: list[Statistic] = []
        for name in sorted(asked, key=columns.labels.__contains__):
            if name in columns.labels:
                found.append(ClassCount(name, classes=columns.name_classes(), weight=columns.weigh(name)))
            else:
                found.append(cls(**vars(columns.place_categories(name, "count"))))
        return found


@dataclass(frozen=True)
class ClassCount(Statistic):
    """Counts of the classes of the label.

    Attributes:
        classes: Their names, in the order of their numbers.
    """

    classes: tuple[str, ...] = ()

    kind = "categories"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "classes", tuple(self.classes))

    @property
    def size(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def check(self, data: PublicData) -> None:
        """Refuse labels that are no such classes."""
        if data.labels != "classes" or data.label_shape or data.classes != self.size:
            raise self._refuse(f"the labels are no {self.size} classes")

    def find_entries(self, records: Records) -> Entries:
        """Return the class of every record."""
        return fall_into_one(np.clip(records[1], 0, self.size - 1))

    def describe(self) -> dict[str, Any]:
        """Return the names of the classes."""
        return {"column": self.column, "names": list(self.classes)}
