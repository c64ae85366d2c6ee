"""The keys of persons: which cells may be one, and which person each row belongs to."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from numbers import Integral
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from silodp.data.identity import IdentityProfile
from silodp.data.identity.spellings import clean_text, names_no_person
from silodp.data.tables._values import Distinct, Strings
from silodp.data.tables.cells import Cells, mark_missing
from silodp.data.tables.columns import text_of
from silodp.data.tables.sources.source import Source, Values
from silodp.errors import SilodpError
from silodp.text import pluralize

_log = logging.getLogger(__name__)

ROUNDED = "is a rounded number"
_HAS_DECIMALS = "is a number with decimals, of which the last zeros may be lost"
_LONG_FLOAT = re.compile(r"-?(\d{16,})[.,]0+")
MIN_ROUNDED = 1e15
"""From here on a number in a workbook may be rounded: spreadsheet programs keep 15 digits."""
_ROUNDED = re.compile(r"-?\d+([.,]\d+)?[eE]\+\d+|-?\d+[.,]\d+[eE]-?\d+")
"""A rounded number with an exponent, as SAS writes a long one (1.2345679E12). 1E12 may be a code and does not match."""
_WHOLE_FLOAT = re.compile(r"-?\d+[.,]0+")
_HAS_LETTER = re.compile(r"[^\W\d_]")
_FAULTY_KEYS = [
    # Programs write ="0017" and '0017 to keep the zeros.
    (
        re.compile(r"\A(=?\".*\"|'.*'|'\d.*)\Z", re.DOTALL),
        "stands in quotes, or begins with an apostrophe",
        "export the user key without them",
    ),
    (
        re.compile(
            r"\A(#(REF|VALUE|DIV/0|NUM|NULL|SPILL|CALC|FIELD|BLOCKED|CONNECT|BUSY|UNKNOWN)!|#NAME\?|#GETTING_DATA|"
            r"Err:\d{3})\Z"
        ),
        "is an error of a spreadsheet program",
        "correct its formula, or write the user key there",
    ),
    (
        re.compile(r"\A([+-]?inf(inity)?|[+-]nan(\(.*\))?|[+-]?1[.,]#(inf|ind|q?nan).*)\Z", re.IGNORECASE),
        "is what programs write for a number that they cannot hold, such as 123E4567",
        "export the user key as text",
    ),
    (re.compile("\ufffd"), "has lost a character", "export the table again as UTF-8"),
    (re.compile(r"[\r\n]"), "has a line break", "export the user key without it"),
]
"""Pattern of a user key, what is wrong with it, and the remedy."""
_PLAIN_KEY = re.compile("[A-Za-z]*[0-9]{1,15}")
"""Keys about which no rule above says anything: most of them, so that the rules look at few."""


@dataclass(frozen=True, eq=False)
class Persons:
    """Which person each row of a table belongs to.

    Attributes:
        keys: (d,) object array of user keys as text, none missing; "" for rows that are dropped.
        rows: (n,) int, the position of each row's key. Two positions may have one key.
    """

    keys: Strings = field(repr=False)
    rows: NDArray[Any] = field(repr=False)

    def expand(self, values: Sequence[Any], kind: Any) -> NDArray[Any]:
        """Return values of the keys as values of the rows, (n,)."""
        return np.asarray(np.array(values, dtype=kind)[self.rows])

    def list_keys(self, marked: NDArray[np.bool_]) -> set[str]:
        """Return the keys of marked rows (n,)."""
        return set(self.keys[np.flatnonzero(np.bincount(self.rows[marked], minlength=len(self.keys)))])

    def number(self, known: Mapping[str, int]) -> NDArray[np.int64]:
        """Return (n,) the number of every row's key; -1 for a key without one."""
        return self.expand([known.get(key, -1) for key in self.keys], np.int64)


def find_persons(cells: Cells, typed_keys: Sequence[Any], digits: int) -> Persons:
    """Return which person each row belongs to, where no identity profile says so.

    Args:
        cells: the cells of the user keys.
        typed_keys: the distinct keys as they are in the file.
        digits: the binary digits of their mantissa, if they are floating-point numbers.

    Raises:
        SilodpError: a key names nobody, or may have been another one: persons could fall together, or apart.
    """
    # Rules look at the others alone, which are few.
    others = [place for place, key in enumerate(typed_keys) if not _is_plain(key)]

    def mark(test: Callable[[str], object]) -> NDArray[np.bool_]:
        found = np.zeros(len(typed_keys), dtype=bool)
        found[others] = [bool(test(cells.texts[place])) for place in others]
        return found

    faults = np.full(len(typed_keys), "", dtype=object)
    faults[others] = [find_key_fault(typed_keys[place], digits, cells.in_workbook) for place in others]
    faults[mark(_ROUNDED.fullmatch)] = ROUNDED
    for fault in sorted(set(faults[others]) - {""}):
        cells.refuse(faults == fault, fault, "export the user key as text or as an integer")
    # A text that is declared to stand for no value may look like any key.
    is_missing = cells.is_missing if cells.reader.missing else mark(mark_missing(cells.reader))
    _warn_of_floats(cells, [typed_keys[place] for place in others], others, is_missing)
    cells.refuse(mark(names_no_person) | is_missing, "names no user", "give every record a user key")
    for pattern, fault, remedy in _FAULTY_KEYS:
        remedy = f"{remedy}, since only equal keys are one person"
        cells.refuse(mark(pattern.search), fault, remedy)
    assert cells.rows is not None
    return Persons(np.asarray(cells.texts), cells.rows)


def _is_plain(key: Any) -> bool:
    """Return whether no rule says anything about a key."""
    if type(key) is str:
        return _PLAIN_KEY.fullmatch(key) is not None
    return type(key) is int and abs(key) < MIN_ROUNDED


def _warn_of_floats(
    cells: Cells, keys: Sequence[Any], places: Sequence[int], is_missing: NDArray[np.bool_]
) -> None:
    """Warn of keys written as numbers with decimals beside keys with letters."""
    is_float = np.zeros(len(cells.texts), dtype=bool)
    is_float[places] = [isinstance(key, str) and bool(_WHOLE_FLOAT.fullmatch(key.strip())) for key in keys]
    floats = int(cells.expand(is_float).sum()) if is_float.any() else 0
    if floats and (cells.mark(_HAS_LETTER.search) & ~is_missing).any():
        _log.warning(
            "%s: column %r: %s written as numbers with decimals, beside keys with letters: if a database took keys "
            "such as 123E1 for numbers, several persons may have one key, so export the keys as text",
            cells.path,
            cells.column,
            f"{pluralize(floats, 'key')} {'is' if floats == 1 else 'are'}",
        )


def identify(
    profile: IdentityProfile, source: Source, column: str, values: Values, found: Distinct
) -> Persons:
    """Return which person each row belongs to, by an identity profile.

    Raises:
        SilodpError: it refuses a row.
    """
    where = f"{source.path}: column {column!r}"
    listed = list_identifiers(found.values, found.rows, source, column, find_type(values))
    parsed = profile.parse_column(listed)
    is_refused = np.array(
        [
            not isinstance(key, str) and not (key.stands_for_none and profile.missing == "drop")
            for key in parsed
        ]
    )
    if is_refused.any():
        row = int(np.argmax(is_refused[found.rows]))
        profile.normalize(listed[found.rows[row]], row + 1, where)  # raises
    keys = [key if isinstance(key, str) else "" for key in parsed]
    if short := sum(map(profile.lacks_digits, listed)):
        _log.warning(
            "%s: %s two digits or more, which count as leading zeros that a program has dropped: numbers without "
            "their century would become other persons, so agree on a profile that says how many zeros may be lost "
            "(lost_zeros)",
            where,
            f"{pluralize(short, 'identifier')} {'lacks' if short == 1 else 'lack'}",
        )
    persons = Persons(np.array(keys, dtype=object), found.rows)
    if dropped := int((persons.expand(keys, object) == "").sum()):
        _log.warning("%s: %d rows without an identifier dropped", where, dropped)
    return persons


def find_type(values: Values) -> pa.DataType | None:
    """Return the type of all cells of a column; None where they have several."""
    return None if isinstance(values, np.ndarray) else values.type


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


def list_identifiers(
    values: Sequence[Any], rows: NDArray[Any], source: Source, column: str, kind: pa.DataType | None = None
) -> list[object]:
    """Return distinct cells of a column of identifiers as text: "" where one is missing.

    A column of floating-point numbers is refused as a whole: large ones are rounded, and leading zeros are lost. So is
    a whole number of 16 digits in a workbook, where spreadsheet programs have rounded it.

    Args:
        values: the d distinct cells as they are in the file, None for missing ones.
        rows: (n,) the position of each row's cell.
        source: the table.
        column: the name of the column.
        kind: the type of the column, where all its cells have one.
    """
    where = f"{source.path}: column {column!r}"
    none = {_fold(text) for text in source.reader.narrow(column).missing}
    # Every type but text and whole numbers may have changed identifiers already.
    changed = (pa.types.is_floating, pa.types.is_boolean, pa.types.is_timestamp, pa.types.is_duration)
    if kind is not None and any(is_changed(kind) for is_changed in changed):
        raise _refuse_identifiers(f"{where}, every row", str(pa.array([], kind).to_pandas().dtype))
    faults = np.array([_find_identifier_fault(value, source) for value in values], dtype=object)
    if (faults != "").any():
        row = int(np.argmax((faults != "")[rows]))
        raise _refuse_identifiers(f"{where}, data row {row + 1}", faults[rows[row]])
    texts = [
        "" if value is None else value if isinstance(value, str) else str(int(value)) for value in values
    ]
    return ["" if none and _fold(text) in none else text for text in texts]


def _find_identifier_fault(value: Any, source: Source) -> str:
    """Return the type of a cell whose digits may be lost; "" for a text, a whole number and a missing cell."""
    if value is None or isinstance(value, str):
        return ""
    if not isinstance(value, Integral) or isinstance(value, bool):
        return type(value).__name__
    # The digits that a spreadsheet program has rounded away told persons apart.
    return "number with 16 digits or more" if source.rounds_numbers and abs(int(value)) >= MIN_ROUNDED else ""


def _fold(text: str) -> str:
    """Return the form in which identifiers are compared with texts that stand for none."""
    return text_of(clean_text(text) or text).lower()


def _refuse_identifiers(where: str, found: str) -> SilodpError:
    return SilodpError(
        f"{where}: type {found}, not text, so digits may be lost; export the identifiers as text",
        code="identity.column",
        field="data.schema.user",
    )
