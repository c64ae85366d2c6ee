"""Cells as text, and the numbers and days in them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import MAXYEAR, MINYEAR, date, datetime, time, timedelta
from decimal import Decimal
from numbers import Integral
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from silodp.data.identity.spellings import clean_text
from silodp.data.tables._files import is_workbook
from silodp.data.tables.columns import text_of
from silodp.errors import SilodpError

Strings = NDArray[Any]  # (n,) object array of str
_POINT_ZEROS = re.compile(r"[+-]?\d+\.000")
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
        (d,) object array of their texts, "" for missing cells; the cells themselves, None for missing ones; and (n,)
        the position of each row's cell. A text, a date and a number of one spelling are distinct cells.

    Raises:
        SilodpError: a cell is no text, number, date or truth value.
    """
    if (typed := _read_typed(column)) is not None:
        return typed
    # Not by pandas, whose texts end at a zero character: two persons could become one.
    known: dict[tuple[object, ...] | str | None, int] = {}
    texts: list[str] = []
    values: list[Any] = []
    rows = np.empty(len(column), dtype=np.int64)
    for row, (value, gone) in enumerate(zip(column, column.isna().tolist(), strict=True)):
        is_text = isinstance(value, str)
        if gone or is_text:
            key = None if gone else value
        else:
            if isinstance(value, bytes | bytearray | list | dict | np.ndarray):
                found = f"holds a {type(value).__name__} in data row {row + 1}; give text or a number in every cell"
                raise _refuse_cell(path, column, found)
            # 1, 1.0 and True are equal, and differ as texts.
            key = (isinstance(value, date), format_cell(value))
        place = known.setdefault(key, len(values))
        if place == len(values):
            # As text "1.000" would become "1", and with a decimal comma it may be 1000.
            if is_text and decimal == "," and _POINT_ZEROS.fullmatch(value.strip()):
                found = f"has a point before three zeros in data row {row + 1}, which may separate thousands where the "
                remedy = "decimal mark is ','; export the table without separators of thousands"
                raise _refuse_cell(path, column, found + remedy)
            values.append(None if gone else value)
            texts.append("" if gone else format_cell(value))
        rows[row] = place
    return np.array(texts, dtype=object), values, rows


def _read_typed(column: pd.Series[Any]) -> tuple[Strings, list[Any], NDArray[np.int64]] | None:
    """Return the same of a column of numpy's numbers or times; None for any other."""
    kind = column.dtype
    if not isinstance(kind, np.dtype) or kind.kind not in "biufmM" or kind.itemsize > 8 or not kind.isnative:
        return None
    # By their bits: -0.0 equals 0.0 and has another text.
    rows, bits = pd.factorize(column.to_numpy().view(f"i{kind.itemsize}"))
    found = pd.Series(bits.view(kind))
    values = [
        None if gone else value for value, gone in zip(found.tolist(), found.isna().tolist(), strict=True)
    ]
    return np.array(["" if x is None else format_cell(x) for x in values], dtype=object), values, rows


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


def parse_numbers(text: Strings, decimal: str) -> NDArray[np.float64]:
    """Return (n,) numbers, NaN where the text is not a number with this decimal mark."""
    if decimal == ",":
        # "1.234" may be 1234 there: it becomes NaN.
        text = np.array([t.replace(".", "?").replace(",", ".") for t in text], dtype=object)
    return np.asarray(pd.to_numeric(pd.Series(text), errors="coerce").to_numpy(dtype=np.float64))
