"""What a schema declares about one column: public constants, never values computed from rows."""

from __future__ import annotations

import codecs
import datetime
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import pairwise
from numbers import Real
from reprlib import repr as short
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from silodp.data.silo_data import scale_to_range
from silodp.errors import SilodpError
from silodp.text import shorten, suggest_name

T = TypeVar("T")

MAX_SPREADS = 1e6
"""The widest range, as a multiple of the spread. Models cannot be trained on larger scaled values."""
INDICATOR = "indicator"
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

    Raises:
        SilodpError: a value that no file can have.
    """

    separator: str | None = None
    decimal: str = "."
    encoding: str = "utf-8"
    sheet: str | None = None
    missing: Sequence[str] = ()
    dates: Mapping[str, str] | None = None

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
        listed = isinstance(self.missing, Sequence) and not isinstance(self.missing, str)
        if not listed or not all(isinstance(text, str) for text in self.missing):
            return f"missing is {self.missing!r}; list texts"
        if not isinstance(dates, Mapping):
            return f"dates is {dates!r}; give a table from columns to layouts such as '%d.%m.%Y'"
        for column, layout in dates.items():
            if not _is_layout(layout):
                remedy = "give one with day, month and year such as '%d.%m.%Y'"
                return f"dates gives column {column!r} the layout {layout!r}; {remedy}"
        return None

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
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class NumericColumn:
    """The public constants by which a numeric column is scaled.

    Attributes:
        range: (low, high); values outside are refused or clipped, as the schema says.
        typical: (center, spread) of ordinary values, in the units of the column. Values become (value − center)/spread.
            Without it the range is mapped to [-1, 1].
        missing: what a missing cell counts as: a number in the range, or "indicator": the center, or the middle of the
            range, and a column of 0 and 1 beside it says so. None refuses missing cells.
        date, since: for dates: their layout ("%d.%m.%Y") and a public day ("2020-01-01"). Values are days since then,
            and so are the other constants.
    """

    range: tuple[float, float]
    typical: tuple[float, float] | None = None
    missing: float | str | None = None
    date: str | None = None
    since: str | None = None

    @property
    def has_indicator(self) -> bool:
        """Whether a column of 0 and 1 beside this one says where cells are missing."""
        return self.missing == INDICATOR

    def list_features(self, name: str) -> list[str]:
        """Return the names of the features of the column `name`."""
        return [name, f"{name} is missing"] if self.has_indicator else [name]

    @property
    def fill(self) -> float | None:
        """The public number that stands for a missing cell; None where such cells are refused."""
        if isinstance(self.missing, str):
            return self.range[0] / 2 + self.range[1] / 2 if self.typical is None else self.typical[0]
        return self.missing

    def scale(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Clip values to the range and scale them by the public constants; same shape, float32."""
        if self.typical is None:
            return scale_to_range(values, *self.range)
        # Clipped first: the range bounds what one record can contribute, however small the spread is.
        center, spread = self.typical
        return np.asarray((np.clip(values, *self.range) - center) / spread, dtype=np.float32)

    def find_group_fault(self, values: Sequence[Any]) -> str | None:
        """Return what to give in place of `values` as bounds of subgroups; None where they are such bounds."""
        low, high = self.range
        are_numbers = all(isinstance(value, int | float) and low <= value <= high for value in values)
        if are_numbers and len(values) > 1 and all(a < b for a, b in pairwise(values)):
            return None
        return (
            f"list at least two ascending numbers within the declared range {low:g} to {high:g}, between which the "
            "subgroups lie."
        )

    def name_groups(self, values: Sequence[Any]) -> list[str]:
        """Return the names of the ranges between ascending bounds."""
        # 15 digits, so that bounds that are close to each other have different names.
        ranges = [f"{low:.15g} to below {high:.15g}" for low, high in pairwise(values)]
        return [*ranges[:-1], f"{values[-2]:.15g} to {values[-1]:.15g}"]

    def split_rows(self, features: NDArray[Any], values: Sequence[Any]) -> list[NDArray[np.bool_]]:
        """Return for each range the rows (n,) in it, by the column's features (n, 1 or 2); missing cells are in none.

        A range has its lower bound, and the last one both.
        """
        known = features[:, 1] < 0.5 if self.has_indicator else np.ones(len(features), dtype=bool)
        # Scaled as the cells were, bounds have their rounding, too: a cell on a bound stays on it.
        edges, place = self.scale(np.asarray(values, dtype=float)), features[:, 0]
        is_below = [place < end for end in edges[1:-1]] + [place <= edges[-1]]
        return [known & (place >= start) & below for start, below in zip(edges, is_below, strict=False)]


@dataclass(frozen=True)
class CategoricalColumn:
    """The public categories of a column.

    Attributes:
        categories: at least two, all different.
        missing: the category that a missing cell counts as; None refuses missing cells.
        codes: False: one column of 0 and 1 for each category. True: the number of the category, from 0 in the order
            of `categories`, in the array "codes" of the model's inputs; its model embeds it.
    """

    categories: Sequence[Any]
    missing: Any = None
    codes: bool = False

    @property
    def texts(self) -> list[str]:
        """The categories as cells are compared with them."""
        return [text_of(value) for value in self.categories]

    def list_features(self, name: str) -> list[str]:
        """Return the names of the features of the column `name`; the one of codes says which category has which."""
        if not self.codes:
            return [f"{name}={value}" for value in self.categories]
        # Escaped, so that parties who compare the name agree on every category: "a|b" is not "a" and "b".
        escaped = [text.replace("\\", r"\\").replace("|", r"\|") for text in self.texts]
        return [f"{name}={'|'.join(escaped)}"]

    def find_group_fault(self, values: Sequence[Any]) -> str | None:
        """Return what to give in place of `values` as subgroups; None where all are categories, each once."""
        given, declared = set(map(text_of, values)), set(self.texts)
        if values and len(given) == len(values) and given <= declared:
            return None
        return f"list categories that the schema declares ({', '.join(sorted(declared))}), each once."

    def name_groups(self, values: Sequence[Any]) -> list[str]:
        """Return the names of the subgroups of some categories."""
        return list(map(text_of, values))

    def split_rows(self, features: NDArray[Any], values: Sequence[Any]) -> list[NDArray[np.bool_]]:
        """Return for each category given the rows (n,) in it, by codes (n, 1) or one-hot features (n, categories)."""
        places = [self.texts.index(text_of(value)) for value in values]
        return [features[:, 0] == x if self.codes else features[:, x] > 0.5 for x in places]


def header_text(column: object) -> str:
    """Return the name of a column as headers and schemas are compared: stripped, in Unicode's form NFC."""
    return unicodedata.normalize("NFC", str(column).strip())


def text_of(value: object) -> str:
    """Return a cell as text: stripped, in Unicode's form NFC, and a whole float written as an integer."""
    text = header_text(value)
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


def _read_settings(
    kind: type[T], declared: Any, section: str, where: str, common: T | None = None
) -> T | None:
    """Return an object of a dataclass of settings that was declared as a table of its fields.

    Args:
        kind: the dataclass.
        declared: the table, or the object itself.
        section: the part of the schema, for `SilodpError.field`.
        where: what is declared, for messages.
        common: an object whose fields stand where the table leaves one out; None: a first field without a default is
            then None, which the caller refuses, and the others have their defaults.

    Returns:
        None where something else than a table was declared.

    Raises:
        SilodpError: the table has a field that the dataclass does not have.
    """
    if isinstance(declared, kind) or not isinstance(declared, Mapping):
        return declared if isinstance(declared, kind) else None
    known = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    for name in declared:
        if name not in known:
            remedy = suggest_name(str(name), known) or f"use {', '.join(known)}."
            raise refuse_schema(section, f"{where} has no setting {shorten(name)}: {remedy}")
    if common is not None:
        # The checks of the dataclass run again, for the combination of both.
        return replace(common, **declared)  # type: ignore[type-var]
    first = fields(kind)[0]  # type: ignore[arg-type]
    is_required = first.default is MISSING and first.default_factory is MISSING
    return kind(**{**({first.name: None} if is_required else {}), **declared})


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
        found = _read_settings(Reader, declared, section, where, common)
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
    found = _read_settings(TableMapping, declared, "silos", where)
    of_columns = found.values.values() if found and isinstance(found.values, Mapping) else ()
    if not found or not all(isinstance(x, Mapping) for x in (found.columns, found.values, *of_columns)):
        raise refuse_schema(
            "silos",
            f"{where} is {shorten(declared)}; give tables such as columns = {{ age = 'Alter' }} and values = "
            "{ sex = { w = 'f' } }",
        )
    return found


def read_numeric(column: str, declared: Any) -> NumericColumn:
    """Return the column of a pair (low, high) or of a table {range, typical}.

    Args:
        column: its name, for messages.
        declared: the pair or table, or the column itself.

    Raises:
        SilodpError: a wrong type, or constants that do not fit each other.
    """
    where = f"numeric column {column!r}"
    found = _read_settings(NumericColumn, declared, "numeric", where) or NumericColumn(declared)
    fault = _find_numeric_fault(found)
    if fault is not None:
        raise refuse_schema("numeric", f"{where} has {fault}")
    return found


def _find_numeric_fault(column: NumericColumn) -> str | None:
    """Return the first constants that do not fit, and what to give instead; None where all do."""
    if not _is_pair(column.range) or not column.range[0] < column.range[1]:
        remedy = f"give finite numbers (low, high), low < high{_explain_dates(column)}"
        return f"range {column.range!r}; {remedy}"
    low, high = column.range
    bounds = f"its range {low:g}..{high:g}"
    if column.typical is not None:
        if fault := _find_typical_fault(column.typical):
            return fault
        center, spread = column.typical
        if not low <= center <= high:
            return f"the typical center {center:g}, outside {bounds}; correct one of them"
        if (high - low) / spread > MAX_SPREADS:
            small = f"the typical spread {spread:g}, less than a millionth of {bounds}"
            return f"{small}; give both in the same units"
    is_number = isinstance(column.missing, Real) and not isinstance(column.missing, bool)
    if column.missing not in (None, INDICATOR) and not (is_number and low <= float(column.missing) <= high):
        return f"missing {column.missing!r}; give 'indicator' or a number in {bounds}"
    is_date = isinstance(column.since, str) and _read_day(column.since) and _is_layout(column.date)
    if (column.date, column.since) != (None, None) and not is_date:
        return (
            f"date {column.date!r} and since {column.since!r}; give both, a layout with day, month and year such as "
            "'%d.%m.%Y' (with %p where it has %I) and a public day such as '2020-01-01'"
        )
    return None


def _explain_dates(column: NumericColumn) -> str:
    """Return how the range of a column of dates is written; "" for a column of numbers."""
    given: Any = column.range
    is_pair = isinstance(given, Sequence) and len(given) == 2
    low, high = map(_read_day, given) if is_pair else (None, None)
    since = _read_day(column.since)
    if since is None:
        is_dates = column.date is not None or (low is not None and high is not None)
        return (
            ", in days since a public day, which since declares beside the layout, date" if is_dates else ""
        )
    numbers = "" if low is None or high is None else f": [{(low - since).days}, {(high - since).days}]"
    return f", in days since {since}{numbers}"


def _read_day(day: Any) -> datetime.date | None:
    """Return a day that is written as in "2020-01-01", or as TOML has it without quotes; None for anything else."""
    if isinstance(day, datetime.date):
        return day.date() if isinstance(day, datetime.datetime) else day
    try:
        return datetime.date.fromisoformat(day)
    except (TypeError, ValueError):
        return None


def _is_layout(layout: Any) -> bool:
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


def read_categorical(column: str, declared: Any) -> CategoricalColumn:
    """Return the column of a list of categories or of a table {categories, missing, codes}.

    Args:
        column: its name, for messages.
        declared: the list or table, or the column itself.

    Raises:
        SilodpError: an unknown setting, fewer than two categories, or a setting of another kind.
    """
    where = f"categorical column {column!r}"
    found = _read_settings(CategoricalColumn, declared, "categorical", where) or CategoricalColumn(declared)
    if not isinstance(found.codes, bool):
        raise refuse_schema("categorical", f"{where} has codes {shorten(found.codes)}; give true or false")
    check_values(where, found.categories)
    if found.missing is not None and text_of(found.missing) not in found.texts:
        reason = (
            f"{where} has missing {short(found.missing)}, which is none of its categories; add it to them"
        )
        raise refuse_schema("categorical", reason)
    return found


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
    if fault := _find_typical_fault(typical):
        raise refuse_schema(section, f"{where} has {fault}")


def _find_typical_fault(typical: Any) -> str:
    is_typical = _is_pair(typical) and typical[1] > 0
    return "" if is_typical else f"typical {typical!r}; give finite (center, spread), spread > 0"


def refuse_schema(section: str, reason: str, code: str = "data.schema") -> SilodpError:
    """Return, for the caller to raise, the error about a part of the schema; "" is the schema as a whole."""
    return SilodpError(f"schema: {reason}", code=code, field=f"data.schema{section and '.' + section}")


def _is_pair(values: Any) -> bool:
    is_pair = isinstance(values, Sequence | np.ndarray) and len(values) == 2
    is_pair = is_pair and all(isinstance(value, Real) and not isinstance(value, bool) for value in values)
    return is_pair and bool(np.isfinite(values).all())
