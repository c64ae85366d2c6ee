"""The columns of sources as distinct cells, and as numbers where all their cells are numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import MAXYEAR, MINYEAR, date, datetime, time
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from silodp.data.tables.columns import Reader, header_text, text_of
from silodp.data.tables.sources.source import Values
from silodp.data.tables.sources.types import count_seconds, is_text
from silodp.text import first_line

Strings = NDArray[Any]  # (n,) object array of str

_POINT_ZEROS = re.compile(r"[+-]?\d+\.000")
_NUMBER = r"^-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_IS_NUMBER = re.compile(_NUMBER)
_MAX_ARRAY = 2**31 - 1
_FIRST_OF_ZONES = np.iinfo(np.int64).min // 10**9 + 86_400
"""Before this second pandas looks for the offset of a zone outside of its table, and crashes."""


class CellError(ValueError):
    """A cell of a type that no rule knows; the message says which."""


@dataclass(frozen=True, eq=False)
class Distinct:
    """The distinct cells of a column; a text, a date and a number of one spelling are distinct.

    Attributes:
        values: The d cells as Python has them, None for missing ones.
        texts: (d,) object array of their texts, "" for missing ones.
        rows: (n,) int, the position of each row's cell.
    """

    values: Sequence[Any] = field(repr=False)
    texts: Strings = field(repr=False)
    rows: NDArray[Any] = field(repr=False)

    def mark(self, kind: type) -> NDArray[np.bool_]:
        """Return (d,) bool, whether a cell is of a type of Python."""
        return np.array([isinstance(value, kind) for value in self.values], dtype=bool)


def find_distinct(column: Values, decimal: str = ".") -> Distinct:
    """Return the distinct cells of a column.

    Args:
        column: The column (n,).
        decimal: The decimal mark of texts.

    Raises:
        CellError: A cell is no text, number, date or truth value, or may be written with separators of thousands.
    """
    if isinstance(column, np.ndarray):
        return _find_objects(column, decimal)
    if _has_objects(column.type):
        return _find_objects(column.to_pandas().to_numpy(dtype=object), decimal)
    found = _find_encoded(column)
    odd = [_may_have_thousands(value, decimal) for value in found.values] if decimal == "," else []
    if any(odd):
        raise _refuse_thousands(int(np.argmax(np.array(odd)[found.rows])))
    return found


def _may_have_thousands(value: Any, decimal: str) -> bool:
    # As text "1.000" would become "1", and with a decimal comma it may be 1000.
    return decimal == "," and isinstance(value, str) and bool(_POINT_ZEROS.fullmatch(value.strip()))


def _refuse_thousands(row: int) -> CellError:
    return CellError(
        f"has a point before three zeros in data row {row + 1}, which may separate thousands where the decimal mark is "
        "','; export the table without separators of thousands"
    )


def _find_encoded(column: pa.ChunkedArray) -> Distinct:
    """Return the distinct cells of a column of Arrow, which hashes them."""
    kind = column.type
    if pa.types.is_dictionary(kind) and not is_text(kind.value_type):
        # Rules look at the type of the values, not at how they are stored.
        column = column.cast(kind.value_type)
    if column.nbytes > _MAX_ARRAY and pa.types.is_string(column.type):
        column = column.cast(pa.large_string())  # a string array ends at two gigabytes
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    # In one piece, so that equal cells of several pieces are hashed once.
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    values = _list_values(pa.chunked_array([array.dictionary]))
    rows: NDArray[Any] = array.indices.fill_null(len(values)).to_numpy(zero_copy_only=False)
    if array.indices.null_count:
        values.append(None)
    counts = np.bincount(rows, minlength=len(values))
    if not counts.all():  # a dictionary may have values that no row has
        used = np.flatnonzero(counts)
        rows = np.searchsorted(used, rows).astype(np.int32)
        values = [values[place] for place in used]
    return Distinct(values, _format_all(values), rows)


def _list_values(distinct: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column as Python has them, None for missing ones."""
    if is_text(distinct.type):
        listed: list[Any] = distinct.to_pylist()
        return listed
    # Without it whole numbers with a gap among them would become floats, and lose digits.
    if getattr(distinct.type, "tz", None) and (count_seconds(distinct) < _FIRST_OF_ZONES).any():
        distinct = pc.local_timestamp(distinct)
    try:
        cells = distinct.to_pandas(integer_object_nulls=True)
    except Exception as error:  # types and numbers that pandas does not have
        raise CellError(f"cannot be read ({first_line(error)}); export it as text") from error
    pairs = zip(cells.tolist(), cells.isna().tolist(), strict=True)
    return [None if is_missing else value for value, is_missing in pairs]


def _find_objects(column: NDArray[Any], decimal: str) -> Distinct:
    """Return the distinct cells of a column of any types."""
    # Not by pandas, whose texts end at a zero character: two persons could become one.
    known: dict[tuple[object, ...] | str | None, int] = {}
    values: list[Any] = []
    rows = np.empty(len(column), dtype=np.int64)
    missing = pd.Series(column, dtype=object).isna()
    for row, (value, is_missing) in enumerate(zip(column, missing, strict=True)):
        if isinstance(value, bytes | bytearray | list | dict | np.ndarray):
            what = type(value).__name__
            raise CellError(f"holds a {what} in data row {row + 1}; give text or a number in every cell")
        key: Any = value
        if is_missing:
            key = value = None
        elif not isinstance(value, str):
            # 1, 1.0 and True are equal, and differ as texts.
            key = (isinstance(value, date), format_cell(value))
        rows[row] = place = known.setdefault(key, len(values))
        if place == len(values):
            if _may_have_thousands(value, decimal):
                raise _refuse_thousands(row)
            values.append(value)
    return Distinct(values, _format_all(values), rows)


def _has_objects(kind: pa.DataType) -> bool:
    """Return whether Arrow hashes no values of a type; its cells are then looked at one by one."""
    others = (
        pa.types.is_nested,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_float16,
        pa.types.is_null,
    )
    return isinstance(kind, pa.BaseExtensionType) or any(is_other(kind) for is_other in others)


def _format_all(values: Sequence[Any]) -> Strings:
    """Return (d,) the texts of cells, "" for missing ones."""
    # Most keys and categories are letters and digits, which are their own texts.
    return np.array(
        [
            value
            if type(value) is str and value.isascii() and value.isalnum()
            else "" if value is None else format_cell(value)
            for value in values
        ],
        dtype=object,
    )  # fmt: skip


def read_floats(
    column: Values, reader: Reader, stands_for_none: Callable[[str], bool]
) -> NDArray[np.float64] | None:
    """Return a column of numbers without a look at single cells; None where a cell is neither number nor missing.

    Args:
        column: The column (n,).
        reader: How texts are written.
        stands_for_none: Whether a text stands for no value.

    Returns:
        (n,) numbers, NaN where a cell is missing.
    """
    if isinstance(column, np.ndarray):
        return None
    kind, decimal = column.type, reader.decimal
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
    if pa.types.is_decimal(kind):  # by their digits: Arrow's own conversion rounds twice
        column, decimal = column.cast(pa.string()), "."
    elif not is_text(kind):
        return None
    found = np.empty(len(column), dtype=np.float64)
    start = 0
    for chunk in column.chunks:
        numbers = _parse_texts(chunk, decimal, stands_for_none)
        if numbers is None:
            return None
        found[start : start + len(chunk)] = numbers
        start += len(chunk)
    return found


def _parse_texts(
    texts: pa.Array, decimal: str, stands_for_none: Callable[[str], bool]
) -> NDArray[np.float64] | None:
    """Return (n,) numbers, NaN where a text stands for no value; None where one is neither."""
    plain, is_number = texts, None
    if decimal == ",":
        plain = pc.replace_substring(texts, ",", ".")
        has_point = pc.match_substring(texts, ".")
        is_number = pc.invert(has_point) if pc.any(has_point).as_py() else None
    if is_number is None and (numbers := _try_cast(plain)) is not None and np.isfinite(numbers).all():
        return numbers
    matches = pc.match_substring_regex(plain, _NUMBER)
    is_number = pc.fill_null(matches if is_number is None else pc.and_(matches, is_number), False)
    # What is left are marks for no value, and numbers with a sign or space before them: few different texts.
    others = texts.filter(pc.invert(is_number)).dictionary_encode()
    listed = [header_text(text or "") for text in others.dictionary.to_pylist()]
    values = parse_numbers(np.array(listed, dtype=object), decimal)
    is_missing = np.array([stands_for_none(text) for text in listed], dtype=bool)
    values[is_missing] = np.nan
    numbers = _try_cast(plain.filter(is_number))
    if numbers is None or (np.isnan(values) & ~is_missing).any():
        return None
    found = np.empty(len(texts), dtype=np.float64)
    where = is_number.to_numpy(zero_copy_only=False)
    found[where] = numbers
    found[~where] = np.append(values, np.nan)[others.indices.fill_null(-1).to_numpy(zero_copy_only=False)]
    return found


def _try_cast(texts: pa.Array) -> NDArray[np.float64] | None:
    try:
        return np.asarray(texts.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)
    except pa.ArrowInvalid:
        return None


class LazyTexts(Sequence[str]):
    """The texts of the cells of a column of numbers, (n,): made only where a message shows one."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int | np.integer):
            (value,) = _list_values(self._column.slice(int(place), 1))
            return "" if value is None else format_cell(value)
        places = np.arange(len(self))[place]
        return np.array([self[one] for one in places], dtype=object)


def format_cell(value: object) -> str:
    """Return a cell as text, a date without a time of 00:00."""
    if not isinstance(value, datetime) or not MINYEAR <= value.year <= MAXYEAR:  # pandas has other years, too
        return text_of(value)
    is_day = value == datetime.combine(value.date(), time.min, value.tzinfo)
    return value.date().isoformat() if is_day else text_of(value)


def parse_numbers(texts: Strings, decimal: str) -> NDArray[np.float64]:
    """Return (n,) numbers, NaN where a text is not a number with this decimal mark."""
    if decimal == ",":
        # "1.234" may be 1234 there: it becomes NaN.
        texts = np.array([text.replace(".", "?").replace(",", ".") for text in texts], dtype=object)
    # By Python, which rounds as Arrow does: a number must not depend on what else is in its column. pandas reads the
    # others, such as infinities, and rounds some numbers to another one.
    is_number = np.array([_IS_NUMBER.fullmatch(text) is not None for text in texts], dtype=bool)
    found = np.empty(len(texts), dtype=np.float64)
    found[is_number] = [float(text) for text in texts[is_number]]
    if not is_number.all():
        others = pd.Series(texts[~is_number], dtype=object)
        found[~is_number] = pd.to_numeric(others, errors="coerce").to_numpy(dtype=np.float64)
    return found
