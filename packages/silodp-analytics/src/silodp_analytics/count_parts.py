"""The public parts into which held-out records are split before they are counted: subgroups, and silos."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from silodp._lazy import torch
from silodp.errors import SilodpError
from silodp.settings import Settings, Whole
from silodp.text import suggest_name
from silodp_analytics.counted import CategoryCells, NumericRanges, Records, place_categories, place_number

if TYPE_CHECKING:
    from torch import Tensor

    from silodp.data.tables.schema import Schema

Grouping = CategoryCells | NumericRanges
"""A column whose cells are the subgroups: every record lies in exactly one of them."""


@dataclass(frozen=True)
class CountParts(Settings):
    """One table of counts for every subgroup of every column, and all of them for every silo.

    A record adds to one table of each of c columns.

    Attributes:
        columns: The columns with their subgroups; () counts all records in one table.
        silos: The number S of silos that have tables of their own; 1 adds up the tables of all silos.
    """

    columns: tuple[Grouping, ...] = ()
    silos: Annotated[int, Whole(1)] = 1

    @property
    def tables(self) -> int:
        """The number of tables in a silo's sum."""
        return sum(column.size for column in self.columns) or 1

    @property
    def repetitions(self) -> int:
        """The number of tables that a record adds to: one for each column."""
        return len(self.columns) or 1

    def find_cells(self, records: Records, cells: Tensor, size: int) -> Tensor:
        """Return the cells of every record in all tables.

        Args:
            records: The features and labels of the records.
            cells: Their cells in one table, (n, e) int64.
            size: The number of cells k of a table.

        Returns:
            (n, c·e) int64.
        """
        if not self.columns:
            return cells
        found, first = [], 0
        for column in self.columns:
            group = torch.from_numpy(column.find_entries(records)[0][:, 0])
            found.append((first + group)[:, None] * size + cells)
            first += column.size
        return torch.cat(found, dim=1)

    def list_tables(self) -> list[tuple[str, str, int]]:
        """Return the column, the name and the number of every subgroup's table."""
        names = [(column.column, name) for column in self.columns for name in column.names]
        return [(column, name, number) for number, (column, name) in enumerate(names)]

    def pool(self, counts: Tensor) -> tuple[Tensor, float]:
        """Return the counts of all records from those of the subgroups.

        The tables of each column add up to those of all records. Over several columns it is the mean of these sums,
        each weighted by the inverse of its variance, which is the number of tables that were added.

        Args:
            counts: (tables, k) float64.

        Returns:
            (k,) float64, and the standard deviation of their noise, in that of a count.
        """
        if not self.columns:
            return counts[0], 1.0
        total, above, first = counts.new_zeros(counts.shape[1]), 0.0, 0
        for column in self.columns:
            total += counts[first : first + column.size].sum(0) / column.size
            above += 1 / column.size
            first += column.size
        return total / above, 1 / math.sqrt(above)


def find_groupings(
    schema: Schema | None, names: Sequence[str], bounds: Mapping[str, Sequence[Any]]
) -> tuple[Grouping, ...]:
    """Return the subgroups of columns: the categories of the schema, or ranges between public bounds.

    Args:
        schema: The schema of the tables; None where the data have none.
        names: Columns of features.
        bounds: By numeric column the ascending bounds of its ranges ([card.subgroups]).

    Raises:
        SilodpError: a name is no such column, or a numeric column has no bounds (code evaluation.by).
    """
    numeric = {} if schema is None else schema.numeric_columns()
    categorical = {} if schema is None else schema.categorical_columns()
    found: list[Grouping] = []
    for name in names:
        if schema is not None and name in categorical:
            found.append(place_categories(schema, name))
        elif schema is not None and name in numeric:
            if name not in bounds:
                raise _refuse(
                    name, f"it is a number: set card.subgroups.{name} to ascending bounds of public ranges"
                )
            found.append(NumericRanges(**place_number(schema, name), bounds=tuple(bounds[name])))
        else:
            known = sorted({*numeric, *categorical})
            hint = suggest_name(name, known)
            listed = f"{hint} ({', '.join(known)})" if known else "the data have no schema"
            raise _refuse(name, f"subgroups are those of a column of features: {listed}")
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise _refuse(twice[0], "it is named twice: name each column once")
    return tuple(found)


def _refuse(name: str, problem: str) -> SilodpError:
    return SilodpError(
        f"evaluation.by names '{name}': {problem}.", code="evaluation.by", field="evaluation.by"
    )
