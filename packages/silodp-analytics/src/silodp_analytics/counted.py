"""Blocks of a public table of counts: which cells a record adds to, by its features and its label.

A block is one statistic of a column, or its subgroups. All of it is public, and nothing is computed from other
records, so that one record's part has a known 2-norm.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import torch
from silodp.data.inputs import CODES, NUMERIC, list_arrays
from silodp.data.public import PublicData
from silodp.data.tables.kinds.categorical import CategoricalColumn
from silodp.data.tables.kinds.numeric import NumericColumn
from silodp.data.tables.schema import Schema
from silodp.errors import SilodpError
from silodp.settings import Positive, Settings, Whole
from silodp.text import name_class
from silodp_analytics._count_rows import iterate_count_rows

Records = tuple[Mapping[str, NDArray[Any]], NDArray[Any]]
"""Arrays of features by name ("" for one array alone), and the labels, of the same records."""
_TRIED = 32
"""Made-up records on which a plug-in is tried."""
Entries = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Cells (n, e) that n records add to, and what they add to each of them, (n, e)."""


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


def fall_into_one(cells: NDArray[Any]) -> Entries:
    """Return the entries of records that fall into one cell each."""
    return cells.astype(np.int64)[:, None], np.ones((len(cells), 1))


@dataclass(frozen=True)
class NumberBlock(Block):
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
    def numeric(self) -> NumericColumn:
        """The public constants of the column."""
        return NumericColumn(self.range, self.typical, "indicator" if self.has_missing else None)

    def check(self, data: PublicData) -> None:
        """Refuse another feature at the place."""
        self._check_features(data, self.numeric.list_features(self.column))

    def read(self, records: Records) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the scaled values (n,), and which records have one."""
        x = take_numbers(records)
        known = x[:, self.place + 1] < 0.5 if self.has_missing else np.ones(len(x), bool)
        return x[:, self.place], known


def take_numbers(records: Records) -> NDArray[Any]:
    """Return the numeric features of records."""
    arrays, _ = records
    return arrays[NUMERIC] if NUMERIC in arrays else arrays[""]


@dataclass(frozen=True)
class NumericRanges(NumberBlock):
    """Counts of ranges between public bounds; the last cell has everyone else, and those whose number is missing.

    Attributes:
        bounds: Ascending numbers within `range`; a range has its lower bound, and the last one both.
    """

    bounds: tuple[float, ...] = ()

    kind = "categories"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "bounds", tuple(map(float, self.bounds)))
        if fault := self.numeric.find_group_fault(self.bounds):
            raise self._refuse(f"bounds = {list(self.bounds)}: {fault.rstrip('.')}")

    @property
    def size(self) -> int:
        """Number of ranges, and one for all other records."""
        return len(self.bounds)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the cells."""
        return (*self.numeric.name_groups(self.bounds), "others")

    def find_entries(self, records: Records) -> Entries:
        """Return the range of every record."""
        x = take_numbers(records)[:, self.place : self.place + 1 + self.has_missing]
        chosen = np.stack(self.numeric.split_rows(x, self.bounds), axis=1)
        return fall_into_one(np.where(chosen.any(1), chosen.argmax(1), self.size - 1))

    def describe(self) -> dict[str, Any]:
        """Return the names of the ranges."""
        return {"column": self.column, "names": list(self.names)}


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
            return fall_into_one(np.clip(arrays[CODES][:, self.place - width], 0, self.size - 1))
        return fall_into_one(take_numbers(records)[:, self.place : self.place + self.size].argmax(1))

    def describe(self) -> dict[str, Any]:
        """Return the names of the categories."""
        return {"column": self.column, "names": list(self.categories)}


def check_entries(block: Block, data: PublicData) -> None:
    """Refuse a block that adds more than its `reach` to its cells; tried on made-up records, by public facts alone.

    Rows of real records are clipped, so a `reach` that is too small costs no privacy: counts are too small. That must
    be seen before a run, since a silo that complained about its records would tell something of them.

    Raises:
        SilodpError: code plugin.returned.
    """
    from silodp.training.made_up import make_up_records  # torch

    x, labels = make_up_records(data, _TRIED)
    arrays = list_arrays(x)
    if NUMERIC in arrays or "" in arrays:
        # As tables give them: scaled numbers of a column within its range, and one category each.
        numbers = take_numbers((arrays, labels))
        np.clip(numbers, -1, 1, out=numbers)
        if isinstance(block, NumberBlock):
            numbers[:, block.place] = block.numeric.scale(np.linspace(*block.range, _TRIED))
            if block.has_missing:
                numbers[:, block.place + 1] = np.arange(_TRIED) % 4 == 1
        elif isinstance(block, CategoryCells) and not block.codes:
            categories = len(block.categories)
            numbers[:, block.place : block.place + categories] = np.eye(categories)[
                np.arange(_TRIED) % categories
            ]
    name, found = name_class(type(block)), block.find_entries((arrays, labels))
    are_two = isinstance(found, tuple) and len(found) == 2
    shapes = {(one.ndim, *one.shape) for one in map(np.asarray, found)} if are_two else set()
    if len(shapes) != 1 or shapes.pop()[:2] != (2, _TRIED) or np.asarray(found[0]).dtype.kind not in "iu":
        problem = "find_entries must return cells (n, k), whole numbers, and what is added to each, (n, k)"
        raise SilodpError(f"{name}.{problem}.", code="plugin.returned", field="statistics")
    cells, added = (torch.as_tensor(one) for one in found)
    for _, rows in iterate_count_rows(torch.arange(_TRIED), cells.long(), block.size, added.double()):
        longest = float(torch.linalg.vector_norm(rows, dim=1).max())
        if not longest <= block.reach * (1 + 1e-6):
            raise SilodpError(
                f"{name}.reach = {block.reach:g}, and a made-up record adds {longest:.4g} (2-norm) to its cells, so "
                "that counts would be too small: define reach as the largest 2-norm that one record adds.",
                code="plugin.returned",
                field="statistics",
            )


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
