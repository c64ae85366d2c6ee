"""The features of a table's rows, made from its columns when it is known which rows are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silodp.data.inputs import CODES, NUMERIC, NamedArrays

_ROWS = 4096
"""Rows that are filled at once: with their features they stay in the processor's cache."""


@dataclass(frozen=True, eq=False)
class EncodedColumn:
    """The features of one column.

    Attributes:
        values: (d, k) the features of its distinct cells.
        rows: (n,) int, the position of each row's cell; None where every row has its own.
        is_code: whether they are codes, for the array of codes.
    """

    values: NDArray[Any] = field(repr=False)
    rows: NDArray[Any] | None = field(repr=False)
    is_code: bool


class Features:
    """The features of all columns, by row."""

    def __init__(self, columns: Sequence[EncodedColumn]) -> None:
        self._numbers = [column for column in columns if not column.is_code]
        self._codes = [column for column in columns if column.is_code]

    def take(self, rows: NDArray[np.bool_]) -> NDArray[np.float32] | NamedArrays:
        """Return the features of marked rows.

        Args:
            rows: (n,) bool, which ones.

        Returns:
            (m, features) float32; with codes the arrays of `Schema.list_inputs`.
        """
        places = np.flatnonzero(rows)
        numbers = _fill(self._numbers, places, np.float32)
        if not self._codes:
            return numbers
        numeric = {NUMERIC: numbers} if self._numbers else {}
        return NamedArrays({**numeric, CODES: _fill(self._codes, places, np.int64)})


def _fill(columns: Sequence[EncodedColumn], places: NDArray[np.intp], kind: Any) -> NDArray[Any]:
    """Return the features (m, k) of the rows at m places, all columns side by side."""
    filled = np.empty((len(places), sum(column.values.shape[1] for column in columns)), dtype=kind)
    # Column after column, every row of the result would come into the cache once for each.
    for start in range(0, len(places), _ROWS):
        piece, end = places[start : start + _ROWS], 0
        for column in columns:
            first, end = end, end + column.values.shape[1]
            cells = piece if column.rows is None else column.rows[piece]
            filled[start : start + _ROWS, first:end] = column.values[cells]
    return filled
