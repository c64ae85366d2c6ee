"""Parts of messages about tables, and the days in texts; nothing here imports pandas, which takes a second."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from datetime import datetime
from functools import cache

from silodp.data.tables.columns import Reader
from silodp.text import quote

AS_TRAINED = "correct the cell or leave out the row, as the model was trained with this schema"
_MAX_LISTED = 10  # names or values that an error lists
_WIDTHS = {"%d": 2, "%m": 2, "%y": 2, "%Y": 4, "%j": 3, "%H": 2, "%I": 2, "%M": 2, "%S": 2}
"""Digits of the numbers of a layout."""
_WHOLE_COMMA = re.compile(r"-?\d+,0+")


def shorten_whole(text: str, reader: Reader) -> str:
    """Return a text in which "17,0" is "17" where the decimal mark is a comma, as "17.0" is everywhere."""
    return text.split(",")[0] if reader.decimal == "," and _WHOLE_COMMA.fullmatch(text) else text


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


def name_setting(name: str, value: str | list[str] = "", other: str = "") -> str:
    """Return where a setting of the reader is made, for messages; `other` is a setting that may go with it."""
    setting = f"{name} = {quote(value)}" if value else name
    given = value if isinstance(value, str) else value[0]
    option = f"--{name} {_quote_for_shell(given)}" if value else f"--{name}"
    return (
        f"{setting}{other} in [data.schema.reader] or, for one silo alone, [data.schema.readers] (in commands that "
        f"read one table: {option})"
    )


def name_date(column: str) -> str:
    """Return where the layout of a column of dates is set, for messages."""
    return f"date, or for one silo alone dates = {{ {quote(column)} = LAYOUT }} in [data.schema.readers]"


def name_date_option(column: str) -> str:
    """Return the option of predict that gives the layout of a column of dates, for messages."""
    return f"--date {_quote_for_shell(f'{column}=LAYOUT')}"


def name_missing(column: str, text: str) -> str:
    """Return where the setting is made that a text stands for no value, for messages."""
    if not _may_be_value(text):
        return name_setting("missing", [text])
    return (
        f"missing_in = {{ {quote(column)} = {quote([text])} }} in [data.schema.reader] or, for one silo alone, "
        f"[data.schema.readers] (in commands that read one table: {name_missing_option(column, text)})"
    )


def name_missing_option(column: str, text: str) -> str:
    """Return the option of a command that says which text stands for no value, for messages."""
    if not _may_be_value(text):
        return f"--missing {_quote_for_shell(text)}"
    return f"--missing-in {_quote_for_shell(f'{column}={text}')}"


def _may_be_value(text: str) -> bool:
    # 999 is no value in a column of ages, and one in a column of ferritin; -9 is one of base excess.
    return text.lstrip("+-")[:1].isdigit()


def _quote_for_shell(text: str) -> str:
    return shlex.quote(text.replace("\t", r"\t"))
