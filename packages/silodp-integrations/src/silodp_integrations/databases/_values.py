"""The cells of a query's result as Arrow columns that hold what the database holds, or an error with the data row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from numbers import Integral
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from silodp.data.tables.sources.source import FaultyCell, Values
from silodp.data.tables.sources.types import mark_outside_years

_MAX_DIGITS, _MAX_LONG_DIGITS = 38, 76
"""Digits of Arrow's decimal numbers of 128 and 256 bits."""
_MAX_EXACT = 2**53
"""Up to here a double holds every whole number."""


class Kind(Enum):
    """What a column is asked for as."""

    TEXT = "text"
    INTEGER = "a whole number"
    DECIMAL = "a decimal number"
    FLOAT = "a floating-point number"
    BOOLEAN = "a truth value"
    DATE = "a day"
    TIME = "a time"
    INSTANT = "a time with a zone"
    OTHER = "of another type"
    """Asked for as text, but no key."""


KEYS = (Kind.TEXT, Kind.INTEGER, Kind.DECIMAL)
"""What keys may be: of a day, or of a number with an exponent, text has many spellings."""


def convert(cells: pa.Array, kind: Kind) -> pa.Array:
    """Return cells (n,) as Arrow holds this kind, from the text of a database or from what is that already.

    Raises:
        FaultyCell: A cell is infinite, out of range or damaged.
    """
    if pa.types.is_dictionary(cells.type):
        cells = cells.dictionary_decode()
    if isinstance(cells, pa.ExtensionArray):
        cells = cells.storage
    if kind in (Kind.TEXT, Kind.OTHER):
        return _check_text(cells)
    if kind is Kind.DECIMAL:
        return convert_decimals(cells)
    if pa.types.is_string(cells.type):
        cells = _parse(cells, kind)
    if kind in (Kind.DATE, Kind.TIME, Kind.INSTANT):
        _check_years(cells)
    return cells


def check_keys(keys: pa.Array) -> None:
    """Refuse keys (n,) that were decimal numbers and have decimals: 12.1 and 12.10 are one number, or two keys."""
    _refuse_where(
        pc.match_substring(keys, "."), "a number with decimals, of which the last zeros may be lost"
    )


def convert_decimals(cells: pa.Array) -> pa.Array:
    """Return exact decimal numbers (n,) of text; none where it is NaN."""
    if not pa.types.is_string(cells.type):
        return cells
    texts = pc.if_else(pc.equal(pc.utf8_lower(cells), "nan"), pa.scalar(None, cells.type), cells)
    _refuse_where(pc.match_substring(texts, "inf", ignore_case=True), "an infinite number")
    plain = pc.utf8_ltrim(texts, "-+")
    length, point = pc.utf8_length(plain), pc.find_substring(plain, ".")
    whole = pc.if_else(pc.less(point, 0), length, point)
    scale = pc.max(pc.subtract(pc.subtract(length, whole), pc.if_else(pc.less(point, 0), 0, 1))).as_py() or 0
    digits = (pc.max(whole).as_py() or 0) + scale
    if digits > _MAX_LONG_DIGITS:
        raise FaultyCell(int(np.argmax(length.fill_null(0).to_numpy())), "a number of more than 76 digits")
    return texts.cast(_make_decimal(digits, scale))


def _make_decimal(digits: int, scale: int) -> pa.DataType:
    if digits <= _MAX_DIGITS:
        return pa.decimal128(_MAX_DIGITS, scale)
    return pa.decimal256(_MAX_LONG_DIGITS, scale)


def join(parts: Sequence[pa.Array]) -> pa.ChunkedArray:
    """Return one column of its parts, each (n_i,), in the smallest type that holds all of them exactly."""
    kinds = {part.type for part in parts}
    if not parts:
        return pa.chunked_array([], pa.null())
    if len(kinds) == 1:
        return pa.chunked_array(parts)
    targets = [pa.uint64()]  # whole numbers below and above 2^63
    if all(map(pa.types.is_decimal, kinds)):
        scale = max(kind.scale for kind in kinds)
        targets = [pa.decimal128(_MAX_DIGITS, scale), pa.decimal256(_MAX_LONG_DIGITS, scale)]
    elif all(map(pa.types.is_timestamp, kinds)):
        targets = [pa.timestamp("ns")]
    for target in targets[:-1]:
        try:
            return pa.chunked_array([part.cast(target) for part in parts], target)
        except pa.ArrowInvalid:
            continue
    return pa.chunked_array([part.cast(targets[-1]) for part in parts], targets[-1])


def _check_text(cells: pa.Array) -> pa.Array:
    if not pa.types.is_string(cells.type):
        _refuse_where(pc.is_valid(cells), "bytes, which are no text; write them in the query as text")
        return pa.nulls(len(cells), pa.string())
    try:
        cells.validate(full=True)
    except pa.ArrowInvalid:
        for row, cell in enumerate(cells):
            try:
                cell.as_py()
            except UnicodeDecodeError:
                raise FaultyCell(row, "text that is not in the encoding of the database") from None
        raise
    return cells


_TYPES = {
    Kind.INTEGER: (pa.int64(), pa.uint64()),
    Kind.FLOAT: (pa.float64(),),
    Kind.BOOLEAN: (pa.bool_(),),
    Kind.DATE: (pa.date32(),),
    Kind.TIME: (pa.timestamp("us"), pa.timestamp("ns")),
    Kind.INSTANT: (pa.timestamp("us", "UTC"),),
}


def _parse(texts: pa.Array, kind: Kind) -> pa.Array:
    """Return the values of texts (n,) that a database has written."""
    # A time with a zone is asked for in UTC, and written without it.
    texts = pc.binary_join_element_wise(texts, "Z", "") if kind is Kind.INSTANT else texts
    for type_ in _TYPES[kind]:
        try:
            return texts.cast(type_)
        except pa.ArrowInvalid:
            continue
    for row, text in enumerate(texts):
        try:
            text.cast(_TYPES[kind][-1])
        except pa.ArrowInvalid:
            what = f"no value that can be read as {kind.value}"
            is_time = kind in (Kind.DATE, Kind.TIME, Kind.INSTANT)
            raise FaultyCell(
                row, "a day that is none, or outside the years 1 to 9999" if is_time else what
            ) from None
    raise FaultyCell(0, f"values that are not all {kind.value}")


def _check_years(cells: pa.Array) -> None:
    outside = mark_outside_years(pa.chunked_array([cells]))
    if outside.any():
        raise FaultyCell(int(np.argmax(outside)), "a time outside the years 1 to 9999")


def _refuse_where(mask: pa.Array, what: str) -> None:
    bad = mask.fill_null(False)
    if pc.any(bad).as_py():
        raise FaultyCell(bad.index(True).as_py(), what)


class PythonColumn:
    """One column that a driver gives as Python objects, part by part."""

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self._types = set[type]()

    def add(self, cells: Sequence[Any]) -> None:
        """Add cells (n,).

        Raises:
            FaultyCell: One is of a type that no table has.
        """
        types = set(map(type, cells)) - {type(None)}
        for kind in types - self._types:
            if not issubclass(kind, str | float | Integral | Decimal | date | UUID):
                row = next(row for row, cell in enumerate(cells) if type(cell) is kind)
                raise FaultyCell(row, f"a value of the type {kind.__name__}; write it in the query as text")
        self._types |= types
        self._parts.append(_to_arrow(cells, types))

    def take(self) -> Values:
        """Return the column (n,): of Arrow where all cells are of one type, else an object array of the cells."""
        if not self._types:
            return pa.chunked_array([pa.nulls(sum(map(len, self._parts)))])
        if len(self._types) == 1 and all(isinstance(part, pa.Array) for part in self._parts):
            parts = [part for part in self._parts if not pa.types.is_null(part.type)]
            kind = join(parts).type
            return pa.chunked_array([part.cast(kind) for part in self._parts], kind)
        cells = [
            cell
            for part in self._parts
            for cell in (part.to_pylist() if isinstance(part, pa.Array) else part)
        ]
        # A database gives a whole number in a column of floating-point numbers, or of decimals.
        if self._types <= {int, float} and not any(isinstance(c, int) and abs(c) > _MAX_EXACT for c in cells):
            return pa.chunked_array([pa.array(cells, pa.float64())])
        if self._types == {int, Decimal}:
            return pa.chunked_array(
                [_to_arrow([None if c is None else Decimal(c) for c in cells], {Decimal})]
            )
        found = np.empty(len(cells), dtype=object)
        found[:] = cells
        return found


_FROM_PYTHON: dict[type, Callable[[Sequence[Any]], pa.Array]] = {
    str: lambda cells: pa.array(cells, pa.string()),
    float: lambda cells: pa.array(cells, pa.float64()),
    bool: lambda cells: pa.array(cells, pa.bool_()),
    date: lambda cells: pa.array(cells, pa.date32()),
    Decimal: lambda cells: convert_decimals(pa.array([None if c is None else format(c, "f") for c in cells])),
    UUID: lambda cells: pa.array([None if c is None else str(c) for c in cells], pa.string()),
}


def _to_arrow(cells: Sequence[Any], types: set[type]) -> Any:
    """Return cells (n,) as an Arrow array where they are of one type that it holds, else as a list."""
    if not types:
        return pa.nulls(len(cells))
    (kind, *others) = types
    if others:
        return list(cells)
    if kind is int:
        try:
            return pa.array(cells, pa.int64())
        except OverflowError:
            return _FROM_PYTHON[Decimal]([None if cell is None else Decimal(cell) for cell in cells])
    if kind is datetime:
        zones = {cell.tzinfo is None for cell in cells if cell is not None}
        if len(zones) > 1:
            return list(cells)
        if zones == {True}:
            return pa.array(cells, pa.timestamp("us"))
        return pa.array([c and c.astimezone(UTC) for c in cells], pa.timestamp("us", "UTC"))
    return _FROM_PYTHON[kind](cells) if kind in _FROM_PYTHON else list(cells)
