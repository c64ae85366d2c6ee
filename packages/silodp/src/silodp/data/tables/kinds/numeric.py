"""Columns of numbers and of dates, scaled by public constants."""

from __future__ import annotations

import datetime
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from silodp.data.silo_data import scale_to_range
from silodp.data.tables._text import (
    AS_TRAINED,
    name_date,
    name_date_option,
    name_missing,
    name_missing_option,
    name_setting,
    needs_all_digits,
    parse_date,
)
from silodp.data.tables.columns import find_typical_fault, is_layout, is_pair, refuse_schema
from silodp.data.tables.kinds.column import Column
from silodp.text import pluralize

if TYPE_CHECKING:
    from silodp.data.tables.cells import Cells

_log = logging.getLogger(__name__)

MAX_SPREADS = 1e6
"""The widest range, as a multiple of the spread. Models cannot be trained on larger scaled values."""
INDICATOR = "indicator"
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
_POINT = re.compile(r"[+-]?[\d.,]*\.[\d.,]*([eE][+-]?\d+)?")
"""A number with a decimal point, or with points between thousands. `k.A.`, which stands for no value, is neither."""
_BEGINS_WITH_NUMBER = re.compile(r"(?![+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$)[<>≤≥≈~=+-]*\s*[.,]?\d")
"""A number with a unit or a comparison, such as `150 bpm` or `< 5`: such a cell has a value, so it is never missing."""
_LIMIT = re.compile(r"(?P<side><=|>=|[<≤>≥])\s*(?P<number>[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?)")
"""A limit of detection, such as `<0.5`: the value is known to lie on one side of a number."""
_MISSING_CODE = re.compile(r"-\d{1,4}|-?9{2,4}([.,]9+)?")
"""A number, such as -9 or 999, that programs write where there is no value."""
OPEN_END = re.compile(r".*(2099|2999|9999).*")
"""A day that registers write where something still goes on."""
_TRUTH = re.compile("true|false", re.IGNORECASE)
_DATE = re.compile(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}([ T]\d.*)?")
_FIRST_OF_WORKBOOKS, _FIRST_SURE_DAY = datetime.datetime(1900, 1, 1), datetime.datetime(1900, 3, 1)


@dataclass(frozen=True)
class NumericColumn(Column):
    """The public constants by which a numeric column is scaled.

    Attributes:
        range: (low, high); values outside are refused or clipped, as the schema says.
        typical: (center, spread) of ordinary values, in the units of the column. Values become (value − center)/spread.
            Without it the range is mapped to [-1, 1].
        missing: what a missing cell counts as: a number in the range, or "indicator": the center, or the middle of the
            range, and a column of 0 and 1 beside it says so. None refuses missing cells.
        below, above: text of a cell with a limit of detection, such as "<0.5" → the public number that it counts as.
            `< 0.50` is "<0.5", too, and so is `<0,5` in a file with decimal commas.
        date, since: for dates: their layout ("%d.%m.%Y") and a public day ("2020-01-01"). Values are days since then,
            and so are the other constants.
    """

    range: tuple[float, float]
    typical: tuple[float, float] | None = None
    missing: float | str | None = None
    date: str | None = None
    since: str | None = None
    below: Mapping[str, float] | None = None
    above: Mapping[str, float] | None = None

    section: ClassVar[str] = "numeric"
    is_number: ClassVar[bool] = True

    @classmethod
    def _read_short(cls, declared: Any) -> NumericColumn:
        return cls(declared)

    def check(self, where: str) -> None:
        """Refuse a range, a typical value, a number for missing cells or limits, or a layout that cannot be."""
        if fault := _find_fault(self):
            raise refuse_schema("numeric", f"{where} has {fault}")

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

    def encode(self, cells: Cells) -> NDArray[np.float32]:
        """Return the scaled values (d, 1), and beside them the indicator of missing cells if there is one."""
        low, high = self.range
        if self.date is None:
            values = read_numbers(cells, self.fill, {**(self.below or {}), **(self.above or {})})
        else:
            values = _read_days(cells, self)
            if self.fill is not None:
                values[cells.is_missing] = self.fill
        # NaN is neither below nor above: a missing cell is refused or filled in by the code above, not here.
        outside = (values < low) | (values > high)
        if cells.out_of_range == "refuse":
            self._refuse_outside(cells, outside)
        elif outside.any():
            clipped = pluralize(int(cells.expand(outside).sum()), "value")
            _log.warning("%s: column %r: %s clipped to %g..%g", cells.path, cells.column, clipped, low, high)
        scaled = self.scale(values)
        columns = [scaled, cells.is_missing.astype(np.float32)] if self.has_indicator else [scaled]
        return np.stack(columns, axis=1)

    def _refuse_outside(self, cells: Cells, outside: NDArray[np.bool_]) -> None:
        if not outside.any():
            return
        low, high = self.range
        unit = "" if self.date is None else f" days since {self.since}"
        first = cells.texts[cells.find_first(outside)]
        remedy = "widen the public range or set data.schema.out_of_range = 'clip'"
        fixed = (
            "correct the cell, leave out the row, or take the nearest end of the model's range "
            "(--out-of-range clip)"
        )
        # Programs write -9 or 999 for no value: to widen the range for it would spoil the scale.
        if _MISSING_CODE.fullmatch(first) or (self.date is not None and OPEN_END.fullmatch(first)):
            remedy += f", or, if {first} stands for no value, set {name_missing(cells.column, first)}"
        if self.fill is not None:
            fixed = (
                f"if it stands for no value, give {name_missing_option(cells.column, first)}; else {fixed}"
            )
        why = f"is outside the declared range {low:g}..{high:g}{unit}"
        cells.refuse(outside, why, cells.advise(remedy, fixed))

    def describe(self, quote: Callable[[Sequence[Any]], str]) -> tuple[str, str]:
        """Return the range and what is typical, and what a missing cell counts as."""
        kind = "number" if self.since is None else f"date, in days since {self.since}"
        values = "{}, {:g} to {:g}".format(kind, *self.range)
        if self.typical is not None:
            values += ", typically {:g} ± {:g}".format(*self.typical)
        for text, number in {**(self.below or {}), **(self.above or {})}.items():
            values += f", {text} counts as {number:g}"
        policy = "refused" if self.fill is None else f"count as {self.fill:g}"
        return values, policy + (", with an input of 1 beside it" if self.has_indicator else "")

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


def read_numbers(
    cells: Cells, fill: float | None = None, limits: Mapping[str, float] | None = None
) -> NDArray[np.float64]:
    """Return (d,) numbers; `fill` where a cell is missing, which is refused without it.

    Args:
        cells: The distinct cells.
        fill: What a missing cell counts as.
        limits: Text of a limit of detection → what such a cell counts as.
    """
    values = cells.parse_numbers()
    if limits and cells.numbers is None:
        _fill_limits(cells, values, limits)
    if fill is not None:
        values[cells.is_missing] = fill
    wrong = ~np.isfinite(values)
    if wrong.any():
        cells.refuse(wrong, *_explain_no_number(cells, wrong))
    return values


def _fill_limits(cells: Cells, values: NDArray[np.float64], limits: Mapping[str, float]) -> None:
    """Put into `values` (d,) what cells with a declared limit count as."""
    known = {parse_limit(text): number for text, number in limits.items()}
    for place in np.flatnonzero(cells.mark(_LIMIT.fullmatch) & ~cells.is_missing):
        limit = parse_limit(cells.texts[place], cells.reader.decimal if cells.is_text[place] else ".")
        values[place] = known.get(limit, np.nan)


def parse_limit(text: object, decimal: str = ".") -> tuple[str, float] | None:
    """Return the side of a limit of detection, one of < ≤ > ≥, and its number; None where a text is none."""
    found = _LIMIT.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None or ("," if decimal == "." else ".") in found["number"]:
        return None
    side = found["side"].replace("<=", "≤").replace(">=", "≥")
    return side, float(found["number"].replace(",", "."))


def name_side(limit: tuple[str, float]) -> str:
    """Return the setting that declares a limit of detection: "below" or "above"."""
    return "below" if limit[0] in "<≤" else "above"


def _explain_no_number(cells: Cells, wrong: NDArray[np.bool_]) -> tuple[str, str]:
    """Return what is wrong with the first of the marked cells, which are no numbers, and the remedy."""
    place = cells.find_first(wrong)
    first, is_feature = cells.texts[place], cells.role == "feature"
    if is_feature and _DATE.fullmatch(first):
        remedy = 'declare its layout and a public day, for example date = "%d.%m.%Y", since = "2020-01-01"'
        return "is a date, and the column is declared as numbers", remedy
    if _TRUTH.fullmatch(first):
        remedy = "declare the column as categorical, with the categories [false, true]"
        remedy = remedy if is_feature else "write a number there"
        return "is true or false, and no number", cells.advise(remedy)
    remedy = "export the table without separators of thousands"
    if cells.reader.decimal == "," and _POINT.fullmatch(first):
        return (
            "has a point, and the decimal mark is declared as ','",
            f"{remedy}, and with decimal commas",
        )
    comma = f"set {name_setting('decimal', ',')}"
    if cells.reader.decimal == "." and _THOUSANDS.fullmatch(first):
        return (
            "has a comma that may stand for thousands",
            f"{remedy}, or, if it is a decimal comma, {comma}",
        )
    if cells.reader.decimal == "." and _DECIMAL_COMMA.fullmatch(first):
        return "has a decimal comma", f"{comma}, or export the table with decimal points"
    remedy = "fill in or drop missing and infinite values"
    if cells.role == "label":
        remedy += ", or, for a label that is text, leave out kind and list its classes"
    if is_feature:
        remedy += ', or declare missing = "indicator" or a public number for the column'
    if not 0 < len(first) <= 20 or cells.is_missing[place]:
        return "is no finite number", cells.advise(remedy)
    if is_feature and (limit := parse_limit(first, cells.reader.decimal)):
        setting = f'{name_side(limit)} = {{ "{limit[0]}{limit[1]:.15g}" = NUMBER }}'
        return "is a limit of detection", cells.advise(f"declare for the column what it counts as: {setting}")
    if _BEGINS_WITH_NUMBER.match(first):
        return (
            "is a number with other characters",
            "clean the column, so that its cells are numbers without units or other characters, or, if the "
            f"decimal mark is another one, set {name_setting('decimal')}",
        )
    if is_feature and wrong.all() and len(set(cells.texts[~cells.is_missing])) > 1:
        remedy = "declare the column as categorical, with its public categories"
        return "is no number, as all others of the column", cells.advise(remedy)
    # A value for missing cells does not help here: this text is not known to stand for none.
    none = f"or, if this stands for no value, set {name_missing(cells.column, first)}"
    remedy = f"correct the cell, {none}; {remedy}" if is_feature else remedy
    return "is no finite number", cells.advise(remedy, f"{AS_TRAINED}, {none}")


def _read_days(cells: Cells, constants: NumericColumn) -> NDArray[np.float64]:
    """Return (d,) days since the public date; NaN where a cell is missing and a policy is declared."""
    since = datetime.datetime.fromisoformat(str(constants.since))
    layout = (cells.reader.dates or {}).get(cells.column, constants.date)
    missing = cells.is_missing
    # Cells that are dates have no layout: one with the day before the month would exchange the two.
    found = [
        parse_date(text, None if is_date else layout)
        for text, is_date in zip(cells.texts, cells.is_date, strict=True)
    ]
    is_found = np.array([day is not None for day in found], dtype=bool)
    of_layout = is_found & ~cells.is_date
    if cells.is_date.any():
        # A spreadsheet program has no dates before 1900.
        converted = [
            fits and day is not None and day >= _FIRST_OF_WORKBOOKS and parse_date(text) is None
            for text, day, fits in zip(cells.texts, found, of_layout, strict=True)
        ]
        cells.refuse(
            np.array(converted, dtype=bool) & ~missing,
            "is text, and other cells of the column are dates",
            "write all of them as text or all as dates: a spreadsheet program that takes days for months makes "
            "dates of those that it can",
        )
        early = [
            is_date and day is not None and _FIRST_OF_WORKBOOKS <= day < _FIRST_SURE_DAY
            for day, is_date in zip(found, cells.is_date, strict=True)
        ]
        cells.refuse(
            np.array(early, dtype=bool) & ~missing & cells.in_workbook,
            "is a day of a workbook before March 1900, which is another day in other programs: Excel has a 29 "
            "February 1900",
            "write all days as text, or declare this one as missing if it stands for none",
        )
    # Cells of a Parquet file may be dates of ISO 8601 as text; in text files the declared layout decides alone.
    if not of_layout.any() and not cells.in_text_file:
        found = [day or parse_date(text) for day, text in zip(found, cells.texts, strict=True)]
    days = [np.nan if day is None else (day - since) / datetime.timedelta(days=1) for day in found]
    values = np.array(days, dtype=np.float64)
    values[missing] = np.nan
    wrong = np.isnan(values)
    why = f"is no date of the layout {layout!r}"
    if needs_all_digits(layout):
        why += ", where each number has all its digits (a first zero may be lost: export the column as text)"
    if constants.missing is not None:
        wrong &= ~missing
    remedy = f"correct the layout ({name_date(cells.column)}), "
    remedy += "or declare missing for the column where cells are empty"
    fixed = f"give the layout of this table ({name_date_option(cells.column)}), or correct the cell"
    cells.refuse(wrong, why, cells.advise(remedy, fixed))
    return values


def _find_fault(column: NumericColumn) -> str | None:
    """Return the first constants that do not fit, and what to give instead; None where all do."""
    if not is_pair(column.range) or not column.range[0] < column.range[1]:
        remedy = f"give finite numbers (low, high), low < high{_explain_dates(column)}"
        return f"range {column.range!r}; {remedy}"
    low, high = column.range
    bounds = f"its range {low:g}..{high:g}"
    if column.typical is not None:
        if fault := find_typical_fault(column.typical):
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
    for name in ("below", "above"):
        if fault := _find_limit_fault(column, name, bounds):
            return fault
    is_date = isinstance(column.since, str) and _read_day(column.since) and is_layout(column.date)
    if (column.date, column.since) != (None, None) and not is_date:
        return (
            f"date {column.date!r} and since {column.since!r}; give both, a layout with day, month and year such as "
            "'%d.%m.%Y' (with %p where it has %I) and a public day such as '2020-01-01'"
        )
    return None


def _find_limit_fault(column: NumericColumn, name: str, bounds: str) -> str:
    """Return what is wrong with the limits of one side, "below" or "above", and what to give; "" where nothing is."""
    limits = getattr(column, name)
    if limits is None:
        return ""
    low, high = column.range
    example = '{ "<0.5" = 0.25 }' if name == "below" else '{ ">300" = 300 }'
    if not isinstance(limits, Mapping) or not limits:
        return f"{name} {limits!r}; give a table such as {example}, with public numbers"
    if column.date is not None:
        return f"{name}, and its cells are days; take it out"
    parsed = [parse_limit(text) for text in limits]
    for (text, number), limit in zip(limits.items(), parsed, strict=True):
        if limit is None or name_side(limit) != name or parsed.count(limit) > 1:
            return f"{name} {text!r}; write each limit once, as in {example}"
        is_number = isinstance(number, Real) and not isinstance(number, bool)
        # A number on the other side of its limit is a slip: what is below 0.5 does not count as 5.
        is_beyond = is_number and (number > limit[1] if name == "below" else number < limit[1])
        if not is_number or not low <= number <= high or is_beyond:
            other = "above" if name == "below" else "below"
            return f"{name} {text!r} = {number!r}; give a public number in {bounds}, not {other} the limit"
    return ""


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
