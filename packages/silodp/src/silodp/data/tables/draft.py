"""A draft of a configuration from one table, written on the machine that holds it.

The draft is not for use as it is: whatever was read off the rows stands in comments only, and every range and list of
categories is empty, which a schema refuses. So nobody trains with constants of private rows by accident.
"""

from __future__ import annotations

import re
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from silodp.data.identity.spellings import MISSING
from silodp.data.tables._cells import format_cell, parse_numbers
from silodp.data.tables._files import read_frame
from silodp.data.tables._table import check_columns, check_rows
from silodp.data.tables._text import parse_date, quote
from silodp.data.tables.columns import Reader

MAX_CATEGORIES = 20
"""The most values that the draft lists as the categories of a column; more are likely names or free text."""
_DAYS = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y")
_LAYOUTS = ("%Y-%m-%dT%H:%M:%S", *(day + hour for day in _DAYS for hour in ("", " %H:%M", " %H:%M:%S")))
_MAX_CODE = 8
_MIN_NUMBERED = 10
_OTHER_MARKS = re.compile(r"[+-]?(\d+[.,]\d+|\d{1,3}([., ']\d{3})+([.,]\d+)?)")
"""Numbers with another decimal mark than the declared one, or with separators of thousands."""


def draft_config(path: Path, user: str, label: str, reader: Reader | None = None) -> str:
    """Return a draft of a configuration for a table, as TOML with comments.

    Args:
        path: the path of the table.
        user: its column that names the person.
        label: its column to be predicted.
        reader: how the file is written.

    Raises:
        SilodpError: the file cannot be read, or has no such column.
    """
    reader = Reader() if reader is None else reader
    frame, header = read_frame(path, reader)
    check_columns(path, header, {user: "user", label: "label"})
    if not {user, label} <= set(frame.columns):
        read_frame(path, reader, (user, label))  # raises an error that says why they cannot be read
    check_rows(path, frame)
    marks = MISSING | {text.lower() for text in reader.missing}
    cells = {}
    for name in header:
        if header.count(name) == 1 and name in frame:
            text = frame[name].map(partial(_format_marked, decimal=reader.decimal))
            cells[name] = text.mask(frame[name].isna() | text.str.lower().isin(marks))
    numeric, categorical = [], []
    left_out = [
        f"# ROWS: {quote(name)}: {'several columns' if name in frame else 'cannot be read'}"
        for name in dict.fromkeys(header)
        if name not in cells
    ]
    for name, text in cells.items():
        if name in (user, label):
            continue
        key, note = quote(name), _describe_missing(text)
        found = text.dropna()
        if (layout := _find_layout(found, frame[name])) is not None:
            days = [
                day.date() for text in set(found) if (day := parse_date(text, layout) or parse_date(text))
            ]
            seen = f"{min(days)} to {max(days)}{note}"
            numeric.append(
                f'{key} = {{ range = [], date = "{layout}", since = "" }}  # FILL IN, in days. ROWS: {seen}'
            )
        elif found.nunique() > 2 and not np.isnan(numbers := _parse(found, reader.decimal)).any():
            seen = f"{numbers.min():g} to {numbers.max():g}, median {np.median(numbers):g}{note}"
            seen += _describe_odd(numbers)
            numeric.append(f"{key} = {{ range = [], typical = [] }}  # FILL IN. ROWS: {seen}")
        else:
            doubt = _describe_doubt(found, reader.decimal)
            if 2 <= found.nunique() <= MAX_CATEGORIES:
                categorical.append(f"{key} = []  # FILL IN. ROWS: {_list_values(found)}{note}{doubt}")
            else:
                left_out.append(f"# ROWS: {key}: {_count_values(found)}{note}{doubt}")
    return "\n".join(
        [
            *_HEAD.format(silo=quote(path.name.split(".")[0]), path=quote(str(path.resolve()))).splitlines(),
            f"user = {quote(user)}  # names the person, equally in all silos",
            *_draft_label(label, cells[label], reader.decimal),
            "test_share = 0.2  # of the persons, by a public function of their keys; their records measure the model",
            '# out_of_range = "clip"  # numbers outside the ranges below become the nearest end, and are not refused',
            *_draft_reader(reader),
            "",
            "[data.schema.numeric]",
            "# range: what can occur. typical: center and spread of ordinary values by textbooks or definitions; leave",
            "# it out if you know none.",
            '# For missing cells add: missing = "indicator", or a public number.',
            *numeric,
            "",
            "[data.schema.categorical]",
            '# For missing cells write: { categories = ["a", "b", "unknown"], missing = "unknown" }.',
            "# For many categories add codes = true to such a table: a model then embeds them.",
            *categorical,
            *(
                ["# Left out, as they are no categories or have the same name:", *left_out]
                if left_out
                else []
            ),
            *_METHOD.splitlines(),
            "",
        ]
    )


def _format_marked(cell: object, decimal: str) -> str:
    """Return a cell as text; a number of a workbook, which has no decimal mark, with that of text."""
    text = format_cell(cell)
    return text.replace(".", decimal) if isinstance(cell, float) else text


def _parse(text: pd.Series[str], decimal: str) -> NDArray[np.float64]:
    return parse_numbers(text.to_numpy(dtype=object), decimal)


def _find_layout(text: pd.Series[str], cells: pd.Series[Any]) -> str | None:
    """Return the layout of dates in which all texts can be read; None where there is none, or several.

    Cells that are dates already are read without their layout, so any stands for them.
    """
    different = set(text)
    if different and all(isinstance(cell, date) for cell in cells[text.index]):
        return _LAYOUTS[1]
    # Days up to 12 fit both %d/%m and %m/%d: then nobody but the owner knows which it is.
    fits = [x for x in _LAYOUTS if different and all(parse_date(cell, x) for cell in different)]
    return fits[0] if len(fits) == 1 else None


def _count_values(text: pd.Series[str]) -> str:
    number = text.nunique()
    return ("no value", "one value only")[number] if number < 2 else f"{number} different texts"


def _describe_doubt(text: pd.Series[str], decimal: str) -> str:
    """Return what a column of texts may be besides categories; "" where nothing says so."""
    different = text.drop_duplicates()
    others = different[np.isnan(_parse(different, decimal))]
    # One text among numbers is more likely a mark for no value than a category.
    if len(others) == 1 and len(different) > 3:
        other = quote(others.iloc[0])
        return f"; numbers except {other}: if that stands for no value, add --missing {other}"
    if len(others) > 1 and all(_OTHER_MARKS.fullmatch(cell) for cell in others):
        return "; numbers with another decimal mark (--decimal), or with separators of thousands (export without them)"
    if len(different) > MAX_CATEGORIES and all(
        len(cell) <= _MAX_CODE and " " not in cell for cell in different
    ):
        return "; if they are codes of a public list, such as ICD-10, declare all codes of that list, with codes = true"
    return ""


def _describe_odd(numbers: NDArray[np.float64]) -> str:
    """Return what a column of numbers may be besides a quantity; "" where nothing says so."""
    different = np.unique(numbers)
    # A number of a row or case says nothing of a label, and a model could learn persons by it.
    if _MIN_NUMBERED <= len(different) == len(numbers) and (numbers == np.round(numbers)).all():
        return "; every row has another whole number: delete this line if it numbers rows or cases"
    negative = [f"{number:g}" for number in different[different < 0]]
    if len(negative) == 1 and re.fullmatch(r"-(1|9+)", negative[0]):
        return f"; if {negative[0]} stands for no value, add --missing {negative[0]}"
    return ""


def _describe_missing(text: pd.Series[str]) -> str:
    count = int(text.isna().sum())
    return f", {count} of {len(text)} missing" if count else ""


def _list_values(text: pd.Series[str]) -> str:
    return quote(sorted(text.unique()))


def _draft_label(label: str, text: pd.Series[str], decimal: str) -> list[str]:
    """Return the lines of the label: its kind, and its classes where it has few values."""
    found = text.dropna()
    name = f"label = {quote(label)}"
    # A label of few numbers is more likely one of classes.
    if found.nunique() > MAX_CATEGORIES and not np.isnan(numbers := _parse(found, decimal)).any():
        seen = f"{numbers.min():g} to {numbers.max():g}, median {np.median(numbers):g}"
        return [
            name,
            'kind = "real"  # a number. For the time until an event: kind = "survival", with event and time for label',
            f"label_typical = []  # FILL IN center and spread. ROWS: {seen}",
        ]
    listed = f"ROWS: {_list_values(found)}" if found.nunique() <= MAX_CATEGORIES else "ROWS: too many to list"
    return [name, f"classes = []  # FILL IN. {listed}{_describe_missing(text)}"]


def _draft_reader(reader: Reader) -> list[str]:
    """Return the lines of the settings that differ from the defaults."""
    default = Reader()
    # Only what differs: the draft is read by people.
    changed = {
        field: value for field, value in vars(reader).items() if value != getattr(default, field) and value
    }
    if not changed:
        return []
    lines = [
        f"{field} = {quote(value if isinstance(value, str) else list(value))}"
        for field, value in changed.items()
    ]
    return ["", "[data.schema.reader]  # of all files; of one: [data.schema.readers.NAME]", *lines]


_HEAD = """\
# A DRAFT. PRIVATE: keep this file on this machine.
# What stands behind ROWS was read off the rows of persons. A range or a category that only they show would reveal
# something of them, and no ε covers it. Fill in every [] from public knowledge (code books, textbooks, definitions),
# and delete the comments behind it. Until then silodp refuses this file.
rounds = 10
delta = 1e-5

[data]
source = "tables"
files = {{ {silo} = {path} }}  # add the other silos

[data.schema]"""

_METHOD = """
[method]
name = "uldp-sgd"
noise_multiplier = 5.0
step = 1.0  # the longest move of the model in a round"""
