"""Subgroups of records by a public column of the schema; the features of a record say which it is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silodp.data.inputs import CODES, NUMERIC, NamedArrays, list_arrays
from silodp.data.tables.schema import Schema
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
        declared = schema.kinds[column]
        if column in (coded := list(schema.code_columns())):
            features = x[CODES][:, [coded.index(column)]]
        else:
            places = [schema.features.index(feature) for feature in declared.list_features(column)]
            features = list_arrays(x).get(NUMERIC, x)[:, places]
        rows = declared.split_rows(features, values)
        found += [(column, name, each) for name, each in zip(names, rows, strict=True)]
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
    return schema.kinds[column].name_groups(values)


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
    fault = schema.kinds[column].find_group_fault(values)
    if fault is not None:
        raise refuse(fault)
