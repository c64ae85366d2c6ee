"""A draft of a configuration from one table, written on the machine that holds it.

The draft is not for use as it is: whatever was read off the rows stands in comments only, and every range and list of
categories is empty, which a schema refuses. So nobody trains with constants of private rows by accident.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from silodp.data.tables._table import check_columns, read_columns
from silodp.data.tables._text import name_missing_option, parse_date
from silodp.data.tables._values import CellError, find_distinct, parse_numbers, read_floats
from silodp.data.tables.cells import list_missing_numbers, mark_missing
from silodp.data.tables.columns import Reader, header_text
from silodp.data.tables.kinds.numeric import OPEN_END, name_side, parse_limit
from silodp.data.tables.sources.source import Description, Source, Values, open_source
from silodp.text import join_names, quote

MAX_CATEGORIES = 20
"""The most values that the draft lists as the categories of a column; more are likely names or free text."""
_DAYS = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y")
_LAYOUTS = ("%Y-%m-%dT%H:%M:%S", *(day + hour for day in _DAYS for hour in ("", " %H:%M", " %H:%M:%S")))
_MAX_CODE = 8
_MIN_NUMBERED = 10
_MAX_CODES, _TIMES_USUAL = 5, 3
_FEW, _ROWS_OF_EACH = 6, 10
"""So few different whole numbers, with so many rows of each, are more likely codes than amounts."""
_CODE_NAME = re.compile(
    r"(.*[_\W])?(id|code|cd|mcc|sic|naics|icd\d*|atc|zip|plz|postcode)|.*[a-z](Id|ID|Code)|.*code",
    re.IGNORECASE,
)
_NEGATIVE_CODE, _LARGE_CODE = re.compile(r"-([1-6]|(?P<sure>([789])\3*))"), re.compile(r"([789])\1+")
_OTHER_MARKS = re.compile(r"[+-]?(\d+[.,]\d+|\d{1,3}([., ']\d{3})+([.,]\d+)?)")
"""Numbers with another decimal mark than the declared one, or with separators of thousands."""


def draft_config(
    path: Path, user: str, label: str, reader: Reader | None = None, query: str | None = None
) -> str:
    """Return a draft of a configuration for a table, as TOML with comments.

    Args:
        path: the path of the table.
        user: its column that names the person.
        label: its column to be predicted.
        reader: how the file is written.
        query: the query whose result is the table, for a database.

    Raises:
        SilodpError: the file cannot be read, or has no such column.
    """
    source = open_source(path, reader, query)
    header, seen, described = _look_at_columns(source, user, {user: "user", label: "label"})
    notes = {
        name: found.describe_missing() + _describe_file(described.get(name)) for name, found in seen.items()
    }
    labels = {
        name: found.labels
        for name, found in described.items()
        if name in seen and name != user and seen[name].are_named(found.labels)
    }
    numeric: list[str] = []
    categorical: list[str] = []
    left_out = [
        f"# ROWS: {quote(name)}: {_explain_unseen(name, header)}"
        for name in dict.fromkeys(header)
        if name not in seen
    ]
    lists = {"date": numeric, "numeric": numeric, "categorical": categorical, "left out": left_out}
    for name, found in seen.items():
        if name not in (user, label):
            sketch = _draft_feature(name, found, notes[name], name in labels)
            lists[sketch.kind].append(sketch.line)
    silo = quote(path.name.split(".")[0])
    return "\n".join(
        [
            *_HEAD.format(silo=silo, path=quote(str(path.resolve()))).splitlines(),
            f"user = {quote(user)}  # names the person, equally in all silos",
            *_draft_label(label, seen[label], notes[label]),
            "test_share = 0.2  # of the persons, by a public function of their keys; their records measure the model",
            '# out_of_range = "clip"  # numbers outside the ranges below become the nearest end, and are not refused',
            *_draft_reader(source.reader),
            *(["", f"[data.schema.silos.{silo}]", f"query = {quote(query)}"] if query else []),
            *_draft_values(silo, labels),
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


@dataclass(frozen=True)
class ColumnFacts:
    """What one column of a table holds; it was read off private rows.

    Attributes:
        name: its name.
        kind: what it looks like: "numeric", "categorical", "date", "left out" (identifiers, free texts, one value), or
            "unreadable".
        missing: the number of rows without a value; None for a column that cannot be read.
        different: the number of different values; None as above.
        told: what `draft_config` says of its values behind "ROWS".
    """

    name: str
    kind: str
    missing: int | None
    different: int | None
    told: str


def inspect_table(
    path: Path, reader: Reader | None = None, query: str | None = None, user: str | None = None
) -> tuple[int, list[ColumnFacts]]:
    """Return what a table holds, by the same rules as `draft_config`.

    Args:
        path: the path of the table.
        reader: how the file is written.
        query: the query whose result is the table, for a database.
        user: the column that names the person, where one is known.

    Returns:
        The number of rows, and the columns in their order.

    Raises:
        SilodpError: the file cannot be read, or has no such column.
    """
    source = open_source(path, reader, query)
    header, seen, described = _look_at_columns(source, user, {} if user is None else {user: "user"})
    facts = []
    for name in dict.fromkeys(header):
        if (found := seen.get(name)) is None:
            facts.append(ColumnFacts(name, "unreadable", None, None, _explain_unseen(name, header)))
            continue
        about = described.get(name)
        has_names = about is not None and found.are_named(about.labels)
        sketch = _draft_feature(name, found, _describe_file(about), has_names)
        facts.append(ColumnFacts(name, sketch.kind, found.missing, found.different, sketch.told))
    return max((found.size for found in seen.values()), default=0), facts


def _look_at_columns(
    source: Source, user: str | None, needed: Mapping[str, str]
) -> tuple[list[str], dict[str, _Seen], dict[str, Description]]:
    """Return the header of a table, what its readable columns hold, and what the file says of them.

    Args:
        source: the table.
        user: the column that names the person; None: it is not known.
        needed: column → argument that names it; an error says why one cannot be read.
    """
    named = dict.fromkeys(source.reader.missing_in or (), "missing_in")
    header = check_columns(source, {**named, **needed})
    single = [name for name in header if header.count(name) == 1]
    columns = read_columns(source, single, user and header_text(user), skip_unreadable=True)
    if not set(map(header_text, needed)) <= columns.keys():
        read_columns(source, tuple(needed), user)  # raises an error that says why they cannot be read
    seen = {}
    for name in single:
        try:
            if name in columns:
                seen[name] = _look_at(columns.pop(name), source.reader.narrow(name))
        except CellError as error:
            if name in needed:
                raise source.refuse(f"column {name!r} {error}", "data.value", name) from error
    with source.readable():
        described = {header_text(name): found for name, found in source.describe_columns().items()}
    return header, seen, described


def _explain_unseen(name: str, header: Sequence[str]) -> str:
    """Return why nothing is known of a column."""
    return "several columns" if header.count(name) > 1 else "cannot be read"


@dataclass(frozen=True)
class _Sketch:
    """A line of the draft about one column: its kind as in `ColumnFacts`, the line, and what it says of the rows."""

    kind: str
    line: str
    told: str


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a column holds.

    Attributes:
        size: the number of rows.
        missing: how many of them have no value.
        different: the number of different texts.
        texts: these texts; none where there are so many numbers that nobody reads them.
        numbers: the numbers of all rows that have a value, but for limits; None where one is no number.
        are_dates: whether all cells are dates already.
        decimal: the decimal mark of texts.
        limits: text of a limit of detection among numbers → "below" or "above".
    """

    size: int
    missing: int
    different: int
    texts: Collection[str] = field(repr=False)
    numbers: NDArray[np.float64] | None = field(repr=False)
    are_dates: bool
    decimal: str
    limits: Mapping[str, str] = field(default_factory=dict, repr=False)

    def are_named(self, labels: Mapping[str, str]) -> bool:
        """Return whether all values are codes to which a file gives names."""
        return bool(self.texts) and set(self.texts) <= labels.keys()

    def describe_missing(self) -> str:
        """Return how many rows have no value, as the end of a note."""
        return f", {self.missing} of {self.size} missing" if self.missing else ""

    def describe_numbers(self) -> str:
        """Return the range and the median of the numbers."""
        numbers = self.numbers
        return f"{np.min(numbers):g} to {np.max(numbers):g}, median {np.median(numbers):g}"  # type: ignore[arg-type]

    def describe_limits(self) -> str:
        """Return which limits of detection there are, as the end of a note."""
        if not self.limits:
            return ""
        shown = join_names([quote(text) for text in sorted(self.limits)])
        return (
            f'; limits of detection {shown}: declare what each counts as, as in below = {{ "<0.5" = 0.25 }}'
        )


def _look_at(values: Values, reader: Reader) -> _Seen:
    """Return what a column holds.

    Raises:
        CellError: a cell is no text, number, date or truth value.
    """
    stands_for_none = mark_missing(reader)
    floats = read_floats(values, reader, stands_for_none)
    if floats is not None and len(different := np.unique(floats[~np.isnan(floats)])) > MAX_CATEGORIES:
        if reader.missing:
            floats = np.where(np.isin(floats, list_missing_numbers(reader)), np.nan, floats)
        floats, size = floats[~np.isnan(floats)], len(floats)
        return _Seen(size, size - len(floats), len(different), (), floats, False, reader.decimal)
    found = find_distinct(values)
    texts = list(found.texts)
    if reader.decimal != ".":  # a number of a workbook, which has no decimal mark, with that of text
        are_floats = found.mark(float)
        texts = [x.replace(".", reader.decimal) if y else x for x, y in zip(texts, are_floats, strict=True)]
    is_known = np.array([not stands_for_none(text) for text in texts], dtype=bool)
    numbers = parse_numbers(np.array(texts, dtype=object), reader.decimal)
    known = {text for text, is_one in zip(texts, is_known, strict=True) if is_one}
    limits = {}
    if np.isfinite(numbers[is_known]).any():  # a column of limits alone has no numbers
        parsed = {text: parse_limit(text, reader.decimal) for text in known}
        limits = {text: name_side(limit) for text, limit in parsed.items() if limit}
    is_number = is_known & np.array([text not in limits for text in texts], dtype=bool)
    dates = [isinstance(value, date) for value, is_one in zip(found.values, is_known, strict=True) if is_one]
    return _Seen(
        len(found.rows),
        int((~is_known[found.rows]).sum()),
        len(known),
        known,
        None if np.isnan(numbers[is_number]).any() else numbers[found.rows[is_number[found.rows]]],
        bool(dates) and all(dates),
        reader.decimal,
        limits,
    )


def _find_layout(found: _Seen) -> str | None:
    """Return the layout of dates in which all texts can be read; None where there is none, or several.

    Cells that are dates already are read without their layout, so any stands for them.
    """
    if found.are_dates:
        return _LAYOUTS[1]
    # Days up to 12 fit both %d/%m and %m/%d: then nobody but the owner knows which it is.
    fits = [x for x in _LAYOUTS if found.texts and all(parse_date(text, x) for text in found.texts)]
    return fits[0] if len(fits) == 1 else None


def _count_values(found: _Seen) -> str:
    return (
        ("no value", "one value only")[found.different]
        if found.different < 2
        else f"{found.different} different texts"
    )


def _draft_feature(name: str, found: _Seen, note: str, has_names: bool) -> _Sketch:
    """Return the line of a column that is no label.

    Args:
        name: its name.
        found: what it holds.
        note: what is to be said of it in any case.
        has_names: whether the file gives names to all its values.
    """
    key = quote(name)

    def leave_out(told: str) -> _Sketch:
        return _Sketch("left out", f"# ROWS: {key}: {told}", told)

    def list_categories(told: str) -> _Sketch:
        return _Sketch("categorical", f"{key} = []  # FILL IN. ROWS: {told}", told)

    if (layout := _find_layout(found)) is not None:
        days = [day.date() for text in found.texts if (day := parse_date(text, layout) or parse_date(text))]
        shown = f"{min(days)} to {max(days)}{note}{_describe_open_end(name, found)}"
        line = f'{key} = {{ range = [], date = "{layout}", since = "" }}  # FILL IN, in days. ROWS: {shown}'
        return _Sketch("date", line, shown)
    if found.different > 2 and found.numbers is not None and not has_names:
        codes, odd = _describe_codes(name, found), _describe_odd(name, found.numbers)
        if not codes:
            shown = f"{found.describe_numbers()}{note}{odd}{found.describe_limits()}"
            limits = "".join(f", {side} = {{}}" for side in sorted(set(found.limits.values())))
            line = f"{key} = {{ range = [], typical = []{limits} }}  # FILL IN. ROWS: {shown}"
            return _Sketch("numeric", line, shown)
        if found.different > MAX_CATEGORIES:
            return leave_out(f"{found.different} different whole numbers{note}{codes}{odd}")
        listed = quote(sorted(found.texts, key=lambda text: (len(text), text)))  # 01 is not 1
        return list_categories(f"{listed}{note}{codes}{odd}")
    doubt = _describe_doubt(found)
    if 2 <= found.different <= MAX_CATEGORIES:
        return list_categories(f"{quote(sorted(found.texts))}{note}{doubt}")
    return leave_out(f"{_count_values(found)}{note}{doubt}")


def _describe_doubt(found: _Seen) -> str:
    """Return what a column of texts may be besides categories; "" where nothing says so."""
    different = np.array([text for text in found.texts if text not in found.limits], dtype=object)
    others = different[np.isnan(parse_numbers(different, found.decimal))]
    # One text among numbers is more likely a mark for no value than a category.
    if len(others) == 1 and len(different) > 3:
        other = quote(others[0])
        return f"; numbers except {other}: if that stands for no value, add --missing {other}"
    # One of them may be a mark for no value, such as k.A. among 1,5 and 2,5.
    if len(others) > 1 and sum(not _OTHER_MARKS.fullmatch(cell) for cell in others) <= (len(others) > 3):
        return "; numbers with another decimal mark (--decimal), or with separators of thousands (export without them)"
    if len(different) > MAX_CATEGORIES and all(
        len(cell) <= _MAX_CODE and " " not in cell for cell in different
    ):
        return "; if they are codes of a public list, such as ICD-10, declare all codes of that list, with codes = true"
    return ""


def _describe_codes(name: str, found: _Seen) -> str:
    """Return why a column of numbers has codes rather than amounts; "" where nothing says so."""
    numbers = found.numbers
    if numbers is None or found.limits or (numbers != np.round(numbers)).any():
        return ""
    if _CODE_NAME.fullmatch(name):
        if found.different > MAX_CATEGORIES:
            return "; by its name codes of a public list: declare all codes of that list, with codes = true"
        return "; codes by its name: if they are amounts, declare range and typical in numeric instead"
    if found.different <= _FEW and len(numbers) >= _ROWS_OF_EACH * found.different:
        return (
            "; few numbers, as codes are: if they are amounts, declare range and typical in numeric instead"
        )
    return ""


def _describe_odd(name: str, numbers: NDArray[np.float64]) -> str:
    """Return what a column of numbers may be besides a quantity; "" where nothing says so."""
    different = np.unique(numbers)
    # A number of a row or case says nothing of a label, and a model could learn persons by it.
    if _MIN_NUMBERED <= len(different) == len(numbers) and (numbers == np.round(numbers)).all():
        return "; every row has another whole number: delete this line if it numbers rows or cases"
    codes = [f"{number:g}" for number in _find_codes(different)]
    if not codes:
        return ""
    verb = "stands" if len(codes) == 1 else "stand"
    options = " ".join(name_missing_option(name, code) for code in codes)
    return f"; if {join_names(codes)} {verb} for no value, add {options}"


def _describe_open_end(name: str, found: _Seen) -> str:
    """Return that the last day may stand for none, as registers write 31.12.9999; "" where nothing says so."""
    open_ends = sorted(text for text in found.texts if OPEN_END.fullmatch(text))
    if not open_ends:
        return ""
    options = " ".join(name_missing_option(name, text) for text in open_ends)
    return f"; if {join_names(open_ends)} stands for an open end, add {options}"


def _find_codes(different: NDArray[np.float64]) -> list[float]:
    """Return the numbers that programs write for no value: negative ones beside none but these, and 999 far above."""
    negative, numbers = different[different < 0], different[different >= 0]
    found = [_NEGATIVE_CODE.fullmatch(f"{number:g}") for number in negative]
    # Several are codes if one of them is -7, -8 or -9: changes of -1 and -2 are numbers.
    are_codes = all(found) and (len(found) == 1 or any(match and match["sure"] for match in found))
    codes = negative.tolist() if are_codes and len(negative) <= _MAX_CODES else []
    above = np.array([_LARGE_CODE.fullmatch(f"{number:g}") is not None for number in numbers], dtype=bool)
    usual = numbers[~above]
    # Far above all others: 999 is a code in a column of ages, and none in one of weights in grams.
    if len(usual) >= _MIN_NUMBERED:
        codes += numbers[above & (numbers > _TIMES_USUAL * usual.max())].tolist()
    return codes


def _describe_file(found: Description | None) -> str:
    """Return what the file says of a column, as the end of a note; of many names of values the first ones."""
    if found is None:
        return ""
    named = [f"{quote(text)} is {quote(label)}" for text, label in found.labels.items()]
    more = [f"{len(named) - MAX_CATEGORIES} more"] if len(named) > MAX_CATEGORIES else []
    missing = [f"no value: {quote(list(found.missing))}"] if found.missing else []
    shown = [quote(found.title)] * bool(found.title) + named[:MAX_CATEGORIES] + more + missing
    return f". THE FILE: {', '.join(shown)}" if shown else ""


def _draft_values(silo: str, labels: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the lines that would write a file's names for its codes, as comments: only people can agree on them."""
    if not labels:
        return []
    return [
        "",
        "# To write the file's names for its codes, list the names as categories below, and use these lines:",
        f"# [data.schema.silos.{silo}.values]",
        *(f"# {quote(name)} = {quote(named)}" for name, named in labels.items()),
    ]


def _draft_label(label: str, found: _Seen, note: str) -> list[str]:
    """Return the lines of the label: its kind, and its classes where it has few values."""
    name = f"label = {quote(label)}"
    # A label of few numbers is more likely one of classes.
    if found.different > MAX_CATEGORIES and found.numbers is not None:
        return [
            name,
            'kind = "real"  # a number. For the time until an event: kind = "survival", with event and time for label',
            f"label_typical = []  # FILL IN center and spread. ROWS: {found.describe_numbers()}{note}",
        ]
    few = found.different <= MAX_CATEGORIES
    listed = f"ROWS: {quote(sorted(found.texts))}" if few else "ROWS: too many to list"
    return [name, f"classes = []  # FILL IN. {listed}{note}"]


def _draft_reader(reader: Reader) -> list[str]:
    """Return the lines of the settings that differ from the defaults."""
    default = Reader()
    # Only what differs: the draft is read by people.
    changed = {
        field: value for field, value in vars(reader).items() if value != getattr(default, field) and value
    }
    if not changed:
        return []
    lines = [f"{field} = {quote(value)}" for field, value in changed.items()]
    return ["", "[data.schema.reader]  # of all files; of one: [data.schema.readers.NAME]", *lines]


_HEAD = """\
# A DRAFT. PRIVATE: keep this file on this machine.
# What stands behind ROWS was read off the rows of persons. A range or a category that only they show would reveal
# something of them, and no ε covers it. Fill in every [] from public knowledge (code books, textbooks, definitions),
# and delete the comments behind it. Until then silodp refuses this file.
rounds = 40
delta = 1e-5

[data]
source = "tables"
files = {{ {silo} = {path} }}  # add the other silos

[data.schema]"""

_METHOD = """
[method]
name = "uldp-sgd"
noise_multiplier = 10.0  # or: silodp run --target-epsilon 3"""
