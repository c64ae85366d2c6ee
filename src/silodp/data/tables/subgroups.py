"""Subgroups of records by a public column of the schema; the features of a record say which it is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silodp.data.inputs import CODES, NUMERIC, NamedArrays, list_arrays
from silodp.data.tables.schema import Schema, text_of
from silodp.errors import SilodpError

Groups = Mapping[str, Sequence[Any]]
"""Column of a feature -> its categories, or ascending bounds of ranges."""


def find_groups(
    x: NDArray[Any] | NamedArrays, schema: Schema | None, groups: Groups
) -> list[tuple[str, str, NDArray[np.bool_]]]:
    """Return (column, name, rows) of every subgroup; the model's inputs say who is in it.

    A record whose number is missing is in no range, where the schema has an indicator of that.

    Args:
        x: (n, features) as the schema gives them, or n rows of the arrays of `schema.list_inputs`.
        schema: the schema of the tables.
        groups: column -> categories, or ascending bounds; a range has its lower bound, the last one both.

    Raises:
        SilodpError: a column that is no feature, or values that it does not have.
    """
    found = []
    for column, values in groups.items():
        names = list_group_names(schema, column, values)
        assert schema is not None
        if column in (coded := schema.code_columns()):
            codes = x[CODES][:, list(coded).index(column)]
            categories = [text_of(one) for one in coded[column].categories]
            found += [(column, name, codes == categories.index(name)) for name in names]
            continue
        numbers = list_arrays(x).get(NUMERIC, x)
        if column in schema.categorical:
            for name in names:
                place = schema.features.index(f"{column}={_written(schema, column, name)}")
                found.append((column, name, numbers[:, place] > 0.5))
            continue
        place = schema.features.index(column)
        known = np.ones(len(x), dtype=bool)
        if schema.numeric_columns()[column].has_indicator:
            known = numbers[:, schema.features.index(f"{column} is missing")] < 0.5
        edges = schema.scale_numbers(column, np.asarray(values, dtype=float))
        for name, (start, end) in zip(names, pairwise(edges), strict=True):
            below = numbers[:, place] <= end if name == names[-1] else numbers[:, place] < end
            found.append((column, name, known & (numbers[:, place] >= start) & below))
    return found


def list_group_names(schema: Schema | None, column: str, values: Sequence[Any]) -> list[str]:
    """Return the names of the subgroups of a column: two declarations with equal names mean the same records.

    Args:
        schema: the schema of the tables.
        column: the name of a column of features.
        values: its categories, or ascending bounds.

    Raises:
        SilodpError: as `check_group`.
    """
    check_group(schema, column, values)
    assert schema is not None
    if column in schema.categorical:
        return [text_of(value) for value in values]
    # 15 digits, so that bounds that are close to each other have different names.
    ranges = [f"{low:.15g} to below {high:.15g}" for low, high in pairwise(values)]
    return [*ranges[:-1], f"{values[-2]:.15g} to {values[-1]:.15g}"]


def _written(schema: Schema, column: str, name: str) -> Any:
    """Return a category as the schema writes it."""
    return next(one for one in schema.categorical_columns()[column].categories if text_of(one) == name)


def check_group(schema: Schema | None, column: str, values: Sequence[Any]) -> None:
    """Refuse subgroups that the public schema does not declare.

    Raises:
        SilodpError: there is no such column, or it has no such categories or range.
    """

    def refuse(reason: str) -> SilodpError:
        where = f"card.subgroups.{column}"
        return SilodpError(f"{where}: {reason}", code="config.value", field=where)

    if schema is None or column not in schema.feature_columns:
        known = ", ".join(schema.feature_columns) if schema else "none: the data have no schema"
        raise refuse(f"a subgroup is declared by a column of features of the schema ({known}): name one.")
    if column in schema.categorical:
        declared = {text_of(value) for value in schema.categorical_columns()[column].categories}
        given = {text_of(value) for value in values}
        if not values or len(given) < len(values) or given - declared:
            raise refuse(
                f"list categories that the schema declares ({', '.join(sorted(declared))}), each once."
            )
        return
    low, high = schema.find_range(column)
    are_numbers = all(isinstance(value, int | float) and low <= value <= high for value in values)
    if not are_numbers or len(values) < 2 or any(b <= a for a, b in pairwise(values)):
        raise refuse(
            f"list at least two ascending numbers within the declared range {low:g} to {high:g}, between which the "
            "subgroups lie."
        )
