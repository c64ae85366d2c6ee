"""How files of tables are written, and how the table of one silo differs from the schema."""

from __future__ import annotations

import codecs
import datetime
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from numbers import Real
from reprlib import repr as short
from typing import Any, TypeVar

import numpy as np

from silodp.errors import SilodpError
from silodp.text import is_own, join_names, shorten, suggest_name

T = TypeVar("T")

_WHOLE = re.compile(r"(-?\d+)\.0+")


@dataclass(frozen=True)
class Reader:
    """How the cells of a file are written. It says nothing of the records.

    Attributes:
        separator: the character between the cells of a text file; None takes "," in .csv and a tab in .tsv.
        decimal: the decimal mark of numbers that are text, "." or ",": all in a text file, some in a workbook.
        encoding: the encoding of a text file, as Python names it, for example "utf-8", "utf-16" or "cp1252".
        sheet: the name of the sheet to read, where a workbook has several.
        missing: texts that stand for no value, besides an empty cell, NA, NaN, N/A, none and null.
        dates: column → layout of its dates in this file, where it differs from the column's `date`.
        missing_in: column → further texts that stand for no value there, and are values elsewhere.

    Raises:
        SilodpError: a value that no file can have.
    """

    separator: str | None = None
    decimal: str = "."
    encoding: str = "utf-8"
    sheet: str | None = None
    missing: Sequence[str] = ()
    dates: Mapping[str, str] | None = None
    missing_in: Mapping[str, Sequence[str]] | None = None

    def __post_init__(self) -> None:
        fault = self._find_fault()
        if fault is not None:
            raise refuse_schema("reader", f"reader.{fault}")

    def _find_fault(self) -> str | None:
        """Return the first setting that no file can have, and what to give instead; None where all can be."""
        mark, dates = self.separator, {} if self.dates is None else self.dates
        if mark is not None and (not isinstance(mark, str) or len(mark) != 1 or mark in '"\r\n'):
            return f"separator is {mark!r}; give one character"
        if self.decimal not in (".", ","):
            return f"decimal is {self.decimal!r}; choose '.' or ','"
        if mark == self.decimal:
            return f"separator and reader.decimal are both {mark!r}; set another separator or decimal"
        try:
            # Python also has codecs that are no encodings of text, such as base64: these raise here.
            "a".encode(self.encoding).decode(self.encoding)
        except (LookupError, TypeError, UnicodeError):
            return f"encoding is {self.encoding!r}; give a name such as 'utf-8', 'utf-16' or 'cp1252'"
        if not _are_texts(self.missing):
            return f"missing is {self.missing!r}; list texts"
        texts = {} if self.missing_in is None else self.missing_in
        if not isinstance(texts, Mapping) or not all(map(_are_texts, texts.values())):
            return f'missing_in is {texts!r}; give a table from columns to lists of texts such as ["999"]'
        if not isinstance(dates, Mapping):
            return f"dates is {dates!r}; give a table from columns to layouts such as '%d.%m.%Y'"
        for column, layout in dates.items():
            if not is_layout(layout):
                remedy = "give one with day, month and year such as '%d.%m.%Y'"
                return f"dates gives column {column!r} the layout {layout!r}; {remedy}"
        return None

    def narrow(self, column: str) -> Reader:
        """Return the reader of one column, whose `missing` has all texts that stand for no value there."""
        texts = (self.missing_in or {}).get(column)
        return replace(self, missing=(*self.missing, *texts), missing_in=None) if texts else self

    def extend(self, other: Reader) -> Reader:
        """Return this reader with what another one says of columns, and with its texts that stand for no value."""
        dates = {**(other.dates or {}), **(self.dates or {})}
        ours, theirs = self.missing_in or {}, other.missing_in or {}
        # A code of one table does not make values of the others.
        texts = {
            column: tuple(dict.fromkeys([*theirs.get(column, ()), *ours.get(column, ())]))
            for column in {**theirs, **ours}
        }
        missing = tuple(dict.fromkeys([*other.missing, *self.missing]))
        return replace(self, missing=missing, dates=dates or None, missing_in=texts or None)

    @property
    def codec(self) -> str:
        """The encoding as Python opens files in it, without the mark at the beginning of UTF-8 files."""
        # Spreadsheet programs begin UTF-8 files with a mark, which would become part of the first column's name.
        name = codecs.lookup(self.encoding).name
        return "utf-8-sig" if name == "utf-8" else name


SETTINGS = tuple(field.name for field in fields(Reader))
"""Names of a reader's settings."""


@dataclass(frozen=True)
class TableMapping:
    """How the table of one silo differs from the schema. It says nothing of the records.

    Attributes:
        columns: column of the schema → its name in the table.
        values: column of the schema → text of a cell → the declared value that it stands for.
        query: the query whose result is the table, where the silo has a database; public.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    query: str | None = None


def header_text(column: object) -> str:
    """Return the name of a column as headers and schemas are compared: stripped, in Unicode's form NFC."""
    return unicodedata.normalize("NFC", str(column).strip())


def text_of(value: object) -> str:
    """Return a cell as text: stripped, in Unicode's form NFC, and a whole float written as an integer."""
    text = header_text(value)
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


def to_cell(value: object) -> str:
    """Return the text of a cell that has a declared value."""
    return str(value).lower() if isinstance(value, bool) else text_of(value)


def read_settings(
    kind: type[T], declared: Any, section: str, where: str, common: T | None = None
) -> T | None:
    """Return an object of a dataclass of settings that was declared as a table of its fields.

    Args:
        kind: the dataclass.
        declared: the table, or the object itself.
        section: the part of the schema, for `SilodpError.field`.
        where: what is declared, for messages.
        common: an object whose fields stand where the table leaves one out; None: fields then have their defaults, or
            without one, in a class of silodp's, None, which the caller refuses.

    Returns:
        None where something else than a table was declared.

    Raises:
        SilodpError: the table has a field that the dataclass does not have, or lacks one that a plug-in needs.
    """
    if isinstance(declared, kind) or not isinstance(declared, Mapping):
        return declared if isinstance(declared, kind) else None
    given = [one for one in fields(kind) if one.init]  # type: ignore[arg-type]
    known = [one.name for one in given]
    for name in declared:
        if name not in known:
            remedy = suggest_name(str(name), known) or f"use {', '.join(known)}."
            raise refuse_schema(section, f"{where} has no setting {shorten(name)}: {remedy}")
    if common is not None:
        # The checks of the dataclass run again, for the combination of both.
        return replace(common, **declared)  # type: ignore[type-var]
    required = [one.name for one in given if one.default is MISSING and one.default_factory is MISSING]
    missing = [name for name in required if name not in declared]
    if missing and not is_own(kind):
        raise refuse_schema(section, f"{where} lacks {join_names(missing)}; set what has no default")
    return kind(**{**dict.fromkeys(missing), **declared})


def read_reader(silo: str | None, declared: Any, common: Reader) -> Reader:
    """Return a reader from a table of its fields; fields that it leaves out are those of `common`.

    Args:
        silo: whose reader it is, for messages; None: that of all silos.
        declared: the table, or the reader itself.
        common: the reader whose fields stand where the table leaves one out.

    Raises:
        SilodpError: a wrong type, an unknown setting, or settings that do not fit those of `common`.
    """
    where, section = ("reader", "reader") if silo is None else (f"the reader of silo {silo!r}", "readers")
    try:
        found = read_settings(Reader, declared, section, where, common)
    except SilodpError as error:
        if silo is None or error.field == "data.schema.readers":
            raise
        reason = str(error).removeprefix("schema: ")
        reason = f"readers.{silo}, with the settings of reader that it leaves out: {reason}"
        raise refuse_schema("readers", reason) from None
    if found is None:
        reason = f"{where} is a {type(declared).__name__}; give a table such as {{ separator = ';' }}"
        raise refuse_schema(section, reason)
    return found


def read_mapping(silo: str, declared: Any) -> TableMapping:
    """Return a mapping from a table of its fields; whether it fits a schema is checked by the schema.

    Args:
        silo: whose table it is, for messages.
        declared: the table, or the mapping itself.

    Raises:
        SilodpError: a wrong type, or an unknown setting.
    """
    where = f"the mapping of silo {silo!r}"
    found = read_settings(TableMapping, declared, "silos", where)
    of_columns = found.values.values() if found and isinstance(found.values, Mapping) else ()
    if not found or not all(isinstance(x, Mapping) for x in (found.columns, found.values, *of_columns)):
        raise refuse_schema(
            "silos",
            f"{where} is {shorten(declared)}; give tables such as columns = {{ age = 'Alter' }} and values = "
            "{ sex = { w = 'f' } }",
        )
    if found.query is None:
        return found
    # One statement stands in another one, where its end has no sign.
    query = found.query.strip().removesuffix(";").rstrip() if isinstance(found.query, str) else ""
    if not query or "\0" in query:
        raise refuse_schema(
            f"silos.{silo}.query",
            f"{where} has the query {shorten(found.query)}; give the text of one SELECT",
        )
    return replace(found, query=query)


def _are_texts(listed: Any) -> bool:
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str)
    return is_list and all(isinstance(text, str) for text in listed)


def is_layout(layout: Any) -> bool:
    """Return whether a layout writes day, month and year, so that dates can be read back."""
    day = datetime.datetime(2001, 2, 13)
    try:
        # %I is the hour of twelve: without %p, an afternoon would be a morning.
        plain = layout.replace("%%", "")
        is_whole = "%I" not in plain or "%p" in plain
        # Written and read back: a layout without the month, or with the day twice, loses the 13th of February.
        return is_whole and datetime.datetime.strptime(day.strftime(layout), layout) == day
    except (AttributeError, TypeError, ValueError):
        return False


def check_values(what: str, values: Any) -> None:
    """Check that declared values are at least two, all different; `what` names them in the message."""
    listed = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str) and np.ndim(values)
    if not listed or len(values) < 2 or len(set(map(text_of, values))) < len(values):
        reason = f"{what} are {short(values)}; list at least two values, all different"
        raise refuse_schema("", reason, "data.values")


def check_typical(where: str, typical: Any, section: str) -> None:
    """Check the typical center and spread of a column.

    Args:
        where: name of the column, for messages.
        typical: (center, spread).
        section: the name of the part of the schema, for `SilodpError.field`.

    Raises:
        SilodpError: they are no two finite numbers, or the spread is not above 0.
    """
    if fault := find_typical_fault(typical):
        raise refuse_schema(section, f"{where} has {fault}")


def find_typical_fault(typical: Any) -> str:
    """Return what is wrong with a typical (center, spread), and what to give; "" where nothing is."""
    is_typical = is_pair(typical) and typical[1] > 0
    return "" if is_typical else f"typical {typical!r}; give finite (center, spread), spread > 0"


def refuse_schema(section: str, reason: str, code: str = "data.schema") -> SilodpError:
    """Return, for the caller to raise, the error about a part of the schema; "" is the schema as a whole."""
    return SilodpError(f"schema: {reason}", code=code, field=f"data.schema{section and '.' + section}")


def is_pair(values: Any) -> bool:
    """Return whether values are two finite numbers."""
    are_two = isinstance(values, Sequence | np.ndarray) and len(values) == 2
    are_numbers = are_two and all(isinstance(value, Real) and not isinstance(value, bool) for value in values)
    return are_numbers and bool(np.isfinite(values).all())
