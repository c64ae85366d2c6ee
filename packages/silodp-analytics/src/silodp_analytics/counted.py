"""Blocks of a public table of counts: which cells a record adds to, by its features and its label.

A block is one statistic of a column: a histogram, counts of categories, the sums behind a mean, or survival times. All
of it is public, and nothing is computed from other records, so that one record's part has a known 2-norm.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from silodp.data.inputs import CODES, NUMERIC
from silodp.data.public import PublicData
from silodp.data.tables.columns import CategoricalColumn, NumericColumn
from silodp.data.tables.schema import Schema
from silodp.errors import SilodpError
from silodp.settings import Positive, Settings, Whole

Records = tuple[Mapping[str, NDArray[Any]], NDArray[Any]]
"""Arrays of features by name ("" for one array alone), and the labels, of the same records."""
Entries = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Cells (n, e) that n records add to, and what they add to each of them, (n, e)."""
MOMENT_CENTER = 0.5
"""A record adds t² − 1/2 for a value t in [−1, 1]: half as long as t² at the most, so that less noise is needed."""


@dataclass(frozen=True)
class Block(Settings, ABC):
    """One statistic of a column.

    Attributes:
        column: The name of the column.
        place: The position of its first feature among those of a record; for labels it has no meaning.
        weight: The factor a of the block: its counts have noise in proportion to 1/a, all others have more.
    """

    column: str
    place: Annotated[int, Whole(0)] = 0
    weight: Positive = field(default=1.0, kw_only=True)

    kind: ClassVar[str]
    """How a report reads the counts."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of cells."""

    @property
    def reach(self) -> float:
        """The largest 2-norm of what one record adds, without the weight; 1 where it falls into one cell."""
        return 1.0

    @abstractmethod
    def find_entries(self, records: Records) -> Entries:
        """Return the cells of every record, in 0..size−1, and what it adds to them."""

    @abstractmethod
    def check(self, data: PublicData) -> None:
        """Refuse a block that names another column than the records have at its place.

        Raises:
            SilodpError: it does (code statistics.column).
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what the cells mean, JSON-ready, by the names of `report.estimates.NoisyTable`."""

    def _refuse(self, problem: str) -> SilodpError:
        return SilodpError(
            f"statistics of '{self.column}': {problem}.", code="statistics.column", field="statistics"
        )

    def _check_features(self, data: PublicData, names: list[str]) -> None:
        found = list(data.features[self.place : self.place + len(names)])
        if found != names:
            raise self._refuse(
                f"the records have {found or 'no feature'} at place {self.place}, and not {names}: name a column of "
                "the schema in [statistics], which finds the places"
            )


def _one_cell(cells: NDArray[Any]) -> Entries:
    """Return the entries of records that fall into one cell each."""
    return cells.astype(np.int64)[:, None], np.ones((len(cells), 1))


@dataclass(frozen=True)
class _OfNumbers(Block):
    """A block of a numeric column.

    Attributes:
        range: The public range (low, high).
        typical: (center, spread) by which values were standardized; None where the range scales them.
        has_missing: Whether the next feature says where cells are missing.
    """

    range: tuple[float, float] = (0.0, 1.0)
    typical: tuple[float, float] | None = None
    has_missing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = map(float, self.range)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise self._refuse(f"range = {list(self.range)}: give finite numbers [low, high] with low < high")
        # A configuration gives lists; a method is hashed.
        object.__setattr__(self, "range", (low, high))
        if self.typical is not None:
            object.__setattr__(self, "typical", tuple(map(float, self.typical)))

    @property
    def _numeric(self) -> NumericColumn:
        return NumericColumn(self.range, self.typical, "indicator" if self.has_missing else None)

    def check(self, data: PublicData) -> None:
        """Refuse another feature at the place."""
        self._check_features(data, self._numeric.list_features(self.column))

    def read(self, records: Records) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the scaled values (n,), and which records have one."""
        x = _numbers(records)
        known = x[:, self.place + 1] < 0.5 if self.has_missing else np.ones(len(x), bool)
        return x[:, self.place], known


def _numbers(records: Records) -> NDArray[Any]:
    arrays, _ = records
    return arrays[NUMERIC] if NUMERIC in arrays else arrays[""]


@dataclass(frozen=True)
class NumericBins(_OfNumbers):
    """A histogram: equal bins of the public range, and one for missing cells; quantiles follow from it."""

    bins: Annotated[int, Whole(2, limit=1000)] = 10

    kind = "histogram"

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
        inner = self._numeric.scale(self.edges[1:-1])
        return _one_cell(np.where(known, np.searchsorted(inner, values, side="right"), self.bins))

    def describe(self) -> dict[str, Any]:
        """Return the edges."""
        edges = [float(f"{edge:.12g}") for edge in self.edges]
        return {"column": self.column, "edges": edges, "has_missing": self.has_missing}


@dataclass(frozen=True)
class NumericRanges(_OfNumbers):
    """Counts of ranges between public bounds; the last cell has everyone else, and those whose number is missing.

    Attributes:
        bounds: Ascending numbers within `range`; a range has its lower bound, and the last one both.
    """

    bounds: tuple[float, ...] = ()

    kind = "categories"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "bounds", tuple(map(float, self.bounds)))
        if fault := self._numeric.find_group_fault(self.bounds):
            raise self._refuse(f"bounds = {list(self.bounds)}: {fault.rstrip('.')}")

    @property
    def size(self) -> int:
        """Number of ranges, and one for all other records."""
        return len(self.bounds)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the cells."""
        return (*self._numeric.name_groups(self.bounds), "others")

    def find_entries(self, records: Records) -> Entries:
        """Return the range of every record."""
        x = _numbers(records)[:, self.place : self.place + 1 + self.has_missing]
        chosen = np.stack(self._numeric.split_rows(x, self.bounds), axis=1)
        return _one_cell(np.where(chosen.any(1), chosen.argmax(1), self.size - 1))

    def describe(self) -> dict[str, Any]:
        """Return the names of the ranges."""
        return {"column": self.column, "names": list(self.names)}


@dataclass(frozen=True)
class Moments(_OfNumbers):
    """The sums behind a mean and a standard deviation: Σt, Σ(t² − 1/2) and their number, for t scaled to [−1, 1]."""

    kind = "mean"

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
        low, high = self._numeric.scale(np.asarray(self.range)).astype(np.float64)
        # Clipped again: the bound must hold for whatever stands at the place.
        scaled = np.clip(2 * (values.astype(np.float64) - low) / (high - low) - 1, -1, 1)
        terms = np.stack([scaled, scaled**2 - MOMENT_CENTER, np.ones(len(scaled))], axis=1)
        return np.broadcast_to(np.arange(3), terms.shape), np.where(known[:, None], terms, 0.0)

    def describe(self) -> dict[str, Any]:
        """Return the range."""
        return {"column": self.column, "edges": list(self.range), "has_missing": self.has_missing}


@dataclass(frozen=True)
class CategoryCells(Block):
    """Counts of the public categories of a column.

    Attributes:
        categories: Their names, as features have them.
        codes: Whether the column is given as codes.
    """

    categories: tuple[str, ...] = ()
    codes: bool = False

    kind = "categories"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "categories", tuple(self.categories))

    @property
    def size(self) -> int:
        """Number of categories."""
        return len(self.categories)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the cells."""
        return self.categories

    def check(self, data: PublicData) -> None:
        """Refuse other features at the place."""
        column = CategoricalColumn(self.categories, None, self.codes)
        self._check_features(data, column.list_features(self.column))

    def find_entries(self, records: Records) -> Entries:
        """Return the category of every record."""
        arrays, _ = records
        if self.codes:
            # Codes come last among the features, in an array of their own.
            width = arrays[NUMERIC].shape[1] if NUMERIC in arrays else 0
            return _one_cell(np.clip(arrays[CODES][:, self.place - width], 0, self.size - 1))
        return _one_cell(_numbers(records)[:, self.place : self.place + self.size].argmax(1))

    def describe(self) -> dict[str, Any]:
        """Return the names of the categories."""
        return {"column": self.column, "names": list(self.categories)}


@dataclass(frozen=True)
class ClassCells(Block):
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
        return _one_cell(np.clip(records[1], 0, self.size - 1))

    def describe(self) -> dict[str, Any]:
        """Return the names of the classes."""
        return {"column": self.column, "names": list(self.classes)}


@dataclass(frozen=True)
class SurvivalCells(Block):
    """Counts by group, bin of the time, and whether there was an event.

    Attributes:
        times: The public edges between bins of time, ascending, above 0; the last bin has no end.
        by: The column whose categories are the groups; None puts all records into one group.
    """

    times: tuple[float, ...] = ()
    by: CategoryCells | None = None
    most_bins: ClassVar[int] = 1000

    kind = "survival"

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
        bins = np.searchsorted(np.asarray(self.times), y[:, 1].astype(np.float64), side="right")
        groups = 0 if self.by is None else self.by.find_entries(records)[0][:, 0]
        return _one_cell((groups * (len(self.times) + 1) + bins) * 2 + (y[:, 0] > 0))

    def describe(self) -> dict[str, Any]:
        """Return the groups and the edges between times."""
        by = None if self.by is None else self.by.column
        return {"column": self.column, "by": by, "names": list(self.groups), "edges": list(self.times)}


@dataclass(frozen=True)
class PersonCell(Block):
    """One cell, to which every person with a record adds 1 in every silo, however many records they have there."""

    column: str = "persons"

    kind = "persons"

    @property
    def size(self) -> int:
        """The one cell."""
        return 1

    def find_entries(self, records: Records) -> Entries:
        """Return nothing: persons add to it, not records."""
        return np.zeros((len(records[1]), 0), np.int64), np.zeros((len(records[1]), 0))

    def check(self, data: PublicData) -> None:
        """Pass: every record is somebody's."""

    def describe(self) -> dict[str, Any]:
        """Return the name."""
        return {"column": self.column}


def place_number(schema: Schema, name: str) -> dict[str, Any]:
    """Return the fields of a block of a numeric column that follow from the schema."""
    column = schema.numeric_columns()[name]
    return {
        "column": name,
        "place": schema.features.index(name),
        "range": column.range,
        "typical": column.typical,
        "has_missing": column.has_indicator,
    }


def place_categories(schema: Schema, name: str, weight: float = 1.0) -> CategoryCells:
    """Return the cells of a categorical column."""
    column = schema.categorical_columns()[name]
    texts = column.texts if column.codes else [str(value) for value in column.categories]
    place = schema.features.index(column.list_features(name)[0])
    return CategoryCells(name, place, tuple(texts), column.codes, weight=weight)


__all__ = [
    "Block",
    "CategoryCells",
    "ClassCells",
    "Moments",
    "NumericBins",
    "NumericRanges",
    "PersonCell",
    "SurvivalCells",
    "place_categories",
    "place_number",
]
