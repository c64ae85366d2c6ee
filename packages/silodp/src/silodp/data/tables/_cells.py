"""Cells as text, and the numbers and days in them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import MAXYEAR, MINYEAR, date, datetime, time, timedelta
from decimal import Decimal
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from silodp.data.identity.spellings import clean_text
from silodp.data.tables._files import is_workbook
from silodp.data.tables.columns import Reader, text_of
from silodp.errors import SilodpError

Strings = NDArray[Any]  # (n,) object array of str
_WHOLE_COMMA = re.compile(r"-?\d+,0+")
_POINT_ZEROS = re.compile(r"[+-]?\d+\.000")
_MAX_LISTED = 10  # names or values that an error lists
_WIDTHS = {"%d": 2, "%m": 2, "%y": 2, "%Y": 4, "%j": 3, "%H": 2, "%I": 2, "%M": 2, "%S": 2}
"""Digits of the numbers of a layout."""
ROUNDED = "is a rounded number"
_HAS_DECIMALS = "is a number with decimals, of which the last zeros may be lost"
_LONG_FLOAT = re.compile(r"-?(\d{16,})[.,]0+")
MIN_ROUNDED = 1e15
"""From here on a number in a workbook may be rounded: spreadsheet programs keep 15 digits."""


def read_distinct(
    column: pd.Series[Any], path: Path, decimal: str = "."
) -> tuple[Strings, list[Any], NDArray[np.int64]]:
    """Return the distinct cells of a column.

    Returns:
        (d,) object array of their texts, "" for missing cells; the cells themselves; and (n,) the position of each
        row's cell. A text, a date and a number of one spelling are distinct cells.

    Raises:
        SilodpError: a cell is no text, number, date or truth value.
    """
    values, rows = _find_distinct(path, column)
    texts = []
    for place, value in enumerate(values):
        # As text "1.000" would become "1", and with a decimal comma it may be 1000.
        if isinstance(value, str) and decimal == "," and _POINT_ZEROS.fullmatch(value.strip()):
            found = f"has a point before three zeros in data row {np.argmax(rows == place) + 1}, which may separate "
            remedy = (
                "thousands where the decimal mark is ','; export the table without separators of thousands"
            )
            raise _refuse_cell(path, column, found + remedy)
        texts.append("" if pd.isna(value) else format_cell(value))
    return np.array(texts, dtype=object), values, rows


def _find_distinct(path: Path, column: pd.Series[Any]) -> tuple[list[Any], NDArray[np.int64]]:
    """Return the distinct cells in the order of their first rows, and (n,) the position of each row's cell."""
    kind = column.dtype
    if kind.kind == "O" and pd.api.types.infer_dtype(column, skipna=True) not in ("string", "empty"):
        return _find_distinct_objects(path, column)
    if isinstance(kind, np.dtype) and kind.kind == "f":
        # By their bits: -0.0 equals 0.0 and has another text.
        bits = column.to_numpy().view(f"i{kind.itemsize}")
        rows, found = pd.factorize(bits)
        return pd.Series(found.view(kind)).tolist(), rows
    rows, uniques = pd.factorize(column, use_na_sentinel=False)
    return list(pd.Series(uniques)), rows


def _find_distinct_objects(path: Path, column: pd.Series[Any]) -> tuple[list[Any], NDArray[np.int64]]:
    """Return the same of cells of several types, of which 1, 1.0 and True are equal and differ as texts."""
    known: dict[tuple[bool, bool, str], int] = {}
    values: list[Any] = []
    rows: list[int] = []
    for row, value in enumerate(column, start=1):
        if isinstance(value, bytes | bytearray | list | dict | np.ndarray):
            found = f"holds a {type(value).__name__} in data row {row}; give text or a number in every cell"
            raise _refuse_cell(path, column, found)
        text = value if isinstance(value, str) else "" if pd.isna(value) else format_cell(value)
        place = known.setdefault((isinstance(value, str), isinstance(value, date), text), len(values))
        if place == len(values):
            values.append(value)
        rows.append(place)
    return values, np.array(rows, dtype=np.int64)


def shorten_whole(text: str, reader: Reader) -> str:
    """Return a text in which "17,0" is "17" where the decimal mark is a comma, as "17.0" is everywhere."""
    return text.split(",")[0] if reader.decimal == "," and _WHOLE_COMMA.fullmatch(text) else text


def _refuse_cell(path: Path, column: pd.Series[Any], reason: str) -> SilodpError:
    return SilodpError(f"{path}: column '{column.name}' {reason}", code="data.value", field=str(column.name))


def find_key_fault(key: object, digits: int = 53, in_workbook: bool = False) -> str:
    """Return why a cell cannot be a user key, by its type; "" where it can, and where it is missing.

    As text, other types could be keys: programs make 3 May of 3-5, TRUE of true and 12.1 of 12.10, for some persons.

    Args:
        key: the cell as it is in the file, or an entry of a list of users.
        digits: the binary digits of the mantissa, if it is a floating-point number.
        in_workbook: whether a spreadsheet program, which rounds numbers from 16 digits on, has written it.
    """
    if isinstance(key, str):
        long = _LONG_FLOAT.fullmatch(key.strip())
        return ROUNDED if long is not None and int(long[1]) >= 2**53 else ""
    is_truth = isinstance(key, bool | np.bool_)
    if isinstance(key, Integral) and not is_truth:
        return ROUNDED if in_workbook and abs(int(key)) >= MIN_ROUNDED else ""
    limit = MIN_ROUNDED if in_workbook else 2.0**digits
    if isinstance(key, float | np.floating) and abs(float(key)) >= limit:
        return ROUNDED
    if isinstance(key, float | np.floating | Decimal):
        # Not by a remainder, which Python does not compute of a long decimal.
        is_whole = key == key.to_integral_value() if isinstance(key, Decimal) else key.is_integer()
        return "" if is_whole or math.isnan(key) else _HAS_DECIMALS
    if key is None or key is pd.NaT or isinstance(key, UUID):
        return ""
    is_time = isinstance(key, date | time | timedelta)
    what = "true or false" if is_truth else "a day or a time" if is_time else f"a {type(key).__name__}"
    return f"is {what}, and a program may have made it of another key"


def list_identifiers(cells: pd.Series[Any], path: Path, missing: Sequence[str] = ()) -> list[object]:
    """Return text cells of a column of identifiers as they are, whole numbers as text, and "" where a cell is missing.

    A column of floating-point numbers is refused as a whole: large ones are rounded, and leading zeros are lost. So is
    a whole number of 16 digits in a workbook, where spreadsheet programs have rounded it.

    Args:
        cells: the cells of the column.
        path: the path of the table.
        missing: further texts that stand for no identifier.
    """
    where = f"{path}: column {str(cells.name)!r}"
    none = {_fold(text) for text in missing}
    # object, whole numbers: every other type may have changed identifiers already.
    if cells.dtype.kind not in "Oiu":
        raise _refuse_identifiers(f"{where}, every row", str(cells.dtype))
    listed: list[object] = []
    for row, (cell, is_missing) in enumerate(
        zip(cells.tolist(), cells.isna().tolist(), strict=True), start=1
    ):
        if is_missing:
            listed.append("")
        elif isinstance(cell, str):
            listed.append("" if none and _fold(cell) in none else cell)
        elif isinstance(cell, Integral) and not isinstance(cell, bool):
            # The digits that a spreadsheet program has rounded away told persons apart.
            if is_workbook(path) and abs(int(cell)) >= MIN_ROUNDED:
                raise _refuse_identifiers(f"{where}, data row {row}", "number with 16 digits or more")
            listed.append("" if str(int(cell)) in none else str(int(cell)))
        else:
            raise _refuse_identifiers(f"{where}, data row {row}", type(cell).__name__)
    return listed


def _fold(text: str) -> str:
    """Return the form in which identifiers are compared with texts that stand for none."""
    return text_of(clean_text(text) or text).lower()


def _refuse_identifiers(where: str, found: str) -> SilodpError:
    return SilodpError(
        f"{where}: type {found}, not text, so digits may be lost; export the identifiers as text",
        code="identity.column",
        field="data.schema.user",
    )


def format_cell(value: object) -> str:
    """Return a cell as text, a date without a time of 00:00."""
    if not isinstance(value, datetime) or not MINYEAR <= value.year <= MAXYEAR:  # pandas has other years, too
        return text_of(value)
    is_day = value == datetime.combine(value.date(), time.min, value.tzinfo)
    return value.date().isoformat() if is_day else text_of(value)


def needs_all_digits(layout: str | None) -> bool:
    """Return whether numbers of a layout touch, so that a text with fewer digits is no date of it."""
    return layout is not None and _compile_widths(layout) is not None


@cache
def _compile_widths(layout: str) -> re.Pattern[str] | None:
    """Return the pattern of texts with all digits where numbers of a layout touch; None where none do.

    `strptime` reads 1122020 by %d%m%Y as 11 February, also if it was 01122020 before a program took it for a number.
    """
    parts = re.findall(r"%.|[^%]+", layout)
    # Numbers touch where nothing stands between them, as in %d%m%Y.
    is_number = [False, *(part in _WIDTHS for part in parts), False]
    touches = [
        one and (before or after)
        for before, one, after in zip(is_number, is_number[1:], is_number[2:], strict=False)
    ]
    if not any(touches):
        return None
    patterns = (
        f"[0-9]{{{_WIDTHS[part]}}}" if touch else ".+" for part, touch in zip(parts, touches, strict=True)
    )
    return re.compile("".join(patterns))


def parse_date(text: str, layout: str | None = None) -> datetime | None:
    """Return the date in a text of a layout, or of ISO 8601, without its time zone; None where there is none.

    pandas would know no date after the year 2262, and registers write 31.12.9999 for an open end.
    """
    try:
        found = datetime.fromisoformat(text) if layout is None else datetime.strptime(text, layout)
    except ValueError:
        return None
    widths = None if layout is None else _compile_widths(layout)
    if widths and not widths.fullmatch(text):
        return None
    # Without a shift to another zone, which could make another day of a time near midnight.
    return found.replace(tzinfo=None)


def parse_numbers(text: Strings, decimal: str) -> NDArray[np.float64]:
    """Return (n,) numbers, NaN where the text is not a number with this decimal mark."""
    if decimal == ",":
        # "1.234" may be 1234 there: it becomes NaN.
        text = np.array([t.replace(".", "?").replace(",", ".") for t in text], dtype=object)
    return np.asarray(pd.to_numeric(pd.Series(text), errors="coerce").to_numpy(dtype=np.float64))


def describe_header(header: Sequence[str]) -> str:
    """Return the names of a header, and the likely fault where some are empty, for messages."""
    names = format_names([name for name in header if name])
    if "" not in header:
        return names
    return f"{names} in a first row with empty cells; delete what stands above the header, if it is a title"


def format_names(names: Sequence[str]) -> str:
    """Return the first names and the number of the others, for messages."""
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more:,} more" if more > 0 else "")
