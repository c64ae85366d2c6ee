"""One silo's file as text columns, each read by the schema or refused in one sentence."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from functools import cached_property
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from silodp.data.identity import IdentityProfile
from silodp.data.identity.spellings import MISSING, names_no_person
from silodp.data.inputs import CODES, NUMERIC, NamedArrays
from silodp.data.silo_data import check_budgets
from silodp.data.tables import _cells, _files
from silodp.data.tables.columns import NumericColumn, Reader, TableMapping, header_text, text_of
from silodp.data.tables.schema import Schema, is_test_person, to_cell
from silodp.errors import SilodpError
from silodp.text import pluralize, suggest_name

_log = logging.getLogger(__name__)

_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
TRUE, FALSE = frozenset({"true", "yes", "1"}), frozenset({"false", "no", "0"})
"""Texts, in lower case, that a declared true or false stands for."""
_POINT = re.compile(r"[+-]?[\d.,]*\.[\d.,]*([eE][+-]?\d+)?")
"""A number with a decimal point, or with points between thousands. `k.A.`, which stands for no value, is neither."""
_BEGINS_WITH_NUMBER = re.compile(r"(?![+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$)[<>≤≥≈~=+-]*\s*[.,]?\d")
"""A number with a unit or a comparison, such as `150 bpm` or `< 5`: such a cell has a value, so it is never missing."""
_AS_TRAINED = "correct the cell or leave out the row, as the model was trained with this schema"
_MISSING_CODE = re.compile(r"-\d{1,4}|-?9{2,4}([.,]9+)?")
"""A number, such as -9 or 999, that programs write where there is no value."""
_TRUTH = re.compile("true|false", re.IGNORECASE)
_DATE = re.compile(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}([ T]\d.*)?")
_MIN_EVENTS = 10
"""From so many records on, it is a sign of a fault if all of them, or none, are events."""
_MAX_FAULTS = 20
"""The most faults that a message lists."""
_FIRST_OF_WORKBOOKS, _FIRST_SURE_DAY = datetime(1900, 1, 1), datetime(1900, 3, 1)
_WHOLE_COMMA = re.compile(r"-?\d+,0+")
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


@dataclass
class Table:
    """One file as text columns, and the schema to read it by.

    Attributes:
        path: the path of the file.
        schema: what the columns mean.
        cells: name → (n,) cells as they are in the file, by the names of the schema.
        columns: name → (n,) texts; the user column as the identity profile reads it where there is one.
        dropped: (n,) bool, the rows without an identifier that an identity profile lets drop; None without a profile.
        reader: how the file is written.
        mapping: how the table differs from the schema.
        is_fixed: whether the schema is that of a trained model, so that only the table can be corrected.

    `_faults` and, by column, (n,) bool `_faulty_rows` are what `collect_faults` has found so far; `_faults` is None
    while a fault is raised at once.
    """

    path: Path
    schema: Schema
    cells: Mapping[str, pd.Series[Any]] = field(repr=False)
    columns: dict[str, _cells.Strings] = field(repr=False)
    dropped: NDArray[np.bool_] | None = field(default=None, repr=False)
    reader: Reader = field(default_factory=Reader)
    mapping: TableMapping = field(default_factory=TableMapping)
    is_fixed: bool = False
    _missing_cells: dict[str, NDArray[np.bool_]] = field(default_factory=dict, init=False, repr=False)
    _faults: list[SilodpError] | None = field(default=None, init=False, repr=False)
    _faulty_rows: dict[str, NDArray[np.bool_]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def read(
        cls,
        path: Path,
        schema: Schema,
        profile: IdentityProfile | None = None,
        reader: Reader | None = None,
        mapping: TableMapping | None = None,
    ) -> Table:
        """Read the schema's columns of a file, user keys by the identity profile if there is one.

        Args:
            path: the path of the file.
            schema: what the columns mean.
            profile: how user keys are read.
            reader: how the file is written; None takes `schema.reader`.
            mapping: how the table differs from the schema; None: not at all.

        Raises:
            SilodpError: no such file, unreadable, without a column of the schema, or with a row whose user key the
                profile refuses.
        """
        reader = schema.reader if reader is None else reader
        mapping = TableMapping() if mapping is None else mapping
        names = {column: mapping.columns.get(column, column) for column in schema.columns}
        frame, header = _files.read_frame(path, reader, names.values())
        check_columns(path, header, {name: schema.find_setting(column) for column, name in names.items()})
        table = cls(
            path, schema, *_take_columns(path, frame, names, reader, mapping), reader=reader, mapping=mapping
        )
        if profile is None:
            table.columns[schema.user] = _map_texts(
                lambda key: _shorten_whole(key, reader), table.columns[schema.user], object
            )
            return table
        where = f"{path}: column {schema.user!r}"
        keys = _cells.list_identifiers(table.cells[schema.user], path, reader.missing)
        found = profile.normalize_column(keys, where)
        if short := sum(map(profile.lacks_digits, set(keys))):
            _log.warning(
                "%s: %s two digits or more, which count as leading zeros that a program has dropped: numbers without "
                "their century would become other persons, so agree on a profile that says how many zeros may be lost "
                "(lost_zeros)",
                where,
                f"{pluralize(short, 'identifier')} {'lacks' if short == 1 else 'lack'}",
            )
        table.dropped = np.array([key is None for key in found], dtype=bool)
        if table.dropped.any():
            _log.warning("%s: %d rows without an identifier dropped", where, table.dropped.sum())
        table.columns[schema.user] = np.array([key or "" for key in found], dtype=object)
        return table

    @classmethod
    def read_inputs(
        cls,
        source: Path | pd.DataFrame,
        schema: Schema,
        mapping: TableMapping | None = None,
        copied: Sequence[str] = (),
    ) -> tuple[Table, pd.DataFrame]:
        """Read the columns of features alone, which is all that a prediction needs.

        Args:
            source: a file, or the table itself.
            schema: says which columns they are, and how they are read.
            mapping: how the table differs from the schema; None: not at all.
            copied: further columns that are used, where the source has them.

        Returns:
            The table, and the cells of all columns that are used, in the order of the rows.

        Raises:
            SilodpError: no such file, unreadable, or without a column of a feature.
        """
        path = Path("the data frame") if isinstance(source, pd.DataFrame) else source
        mapping = TableMapping() if mapping is None else mapping
        names = {column: mapping.columns.get(column, column) for column in schema.feature_columns}
        if isinstance(source, pd.DataFrame):
            header = [header_text(column) for column in source.columns]
            frame = source.set_axis(header, axis=1).reset_index(drop=True)
        else:
            frame, header = _files.read_frame(source, schema.reader, [*names.values(), *copied])
        needed = f"give the table the columns {_cells.format_names(list(names.values()))}"
        check_columns(path, header, dict.fromkeys(names.values(), "table"), needed)
        cells, texts = _take_columns(path, frame, names, schema.reader, mapping)
        return cls(path, schema, cells, texts, None, schema.reader, mapping, is_fixed=True), frame

    @contextmanager
    def collect_faults(self) -> Iterator[None]:
        """Raise what is refused inside as one error at the end; what is computed from refused cells has no meaning.

        Raises:
            SilodpError: a cell was refused; code and field are those of the first fault.
        """
        self._faults, self._faulty_rows = [], {}
        try:
            # Refused cells go on through the arithmetic, so that the faults of later columns are found as well.
            with np.errstate(over="ignore", invalid="ignore"):
                yield
        except Exception as error:
            if not self._faults:
                raise
            if isinstance(error, SilodpError):  # others may follow from cells that are refused
                self._faults.append(error)
        finally:
            found, self._faults = self._faults, None
        if found:
            raise _join_faults(self.path, found)

    def _refuse(self, column: str, bad: NDArray[np.bool_], why: str, remedy: str) -> None:
        """Raise for the bad rows, or note them while faults are collected; a row is reported once for each column."""
        known = self._faulty_rows.get(column, np.zeros_like(bad))
        rows = bad if self._faults is None else bad & ~known
        if not rows.any():
            return
        row, others = int(np.argmax(rows)), int(rows.sum()) - 1
        name = self.mapping.columns.get(column, column)
        more = f" (wrong in {pluralize(others, 'other row')}, too)" if others else ""
        fault = SilodpError(
            f"{self.path}: column {name!r} is {short(self.columns[column][row])} in data row {row + 1}{more}, "
            f"which {why}; {remedy}",
            code="data.value",
            field=column,
        )
        if self._faults is None:
            raise fault
        self._faults.append(fault)
        self._faulty_rows[column] = bad | known

    def _advise(self, remedy: str, fixed: str = _AS_TRAINED) -> str:
        """Return a remedy that changes the schema, or `fixed` where a trained model fixes the schema."""
        return fixed if self.is_fixed else remedy

    def _refuse_typed_keys(self, keys: pd.Series[Any]) -> None:
        """Raise for keys that are no text or whole numbers, or rounded ones: persons could fall together, or apart."""
        column, texts = self.schema.user, self.columns[self.schema.user]
        # Bits of the mantissa by the number of bytes: a float with p of them skips whole numbers above 2^p, so two keys
        # may already have become one.
        digits = {2: 11, 4: 24}.get(getattr(keys.dtype, "itemsize", 8), 53)
        in_workbook = _files.is_workbook(self.path)
        found = [_cells.find_key_fault(key, digits, in_workbook) for key in keys]
        faults = np.array(found, dtype=object)
        faults[_mark(texts, _ROUNDED.fullmatch)] = _cells.ROUNDED
        for fault in sorted(set(faults) - {""}):
            self._refuse(column, faults == fault, fault, "export the user key as text or as an integer")
        written = np.array([key if isinstance(key, str) else "" for key in keys], dtype=object)
        floats = _mark(written, lambda key: _WHOLE_FLOAT.fullmatch(key.strip())).sum()
        if floats and (_mark(texts, _HAS_LETTER.search) & ~self._mark_missing(column)).any():
            _log.warning(
                "%s: column %r: %s written as numbers with decimals, beside keys with letters: if a database took keys "
                "such as 123E1 for numbers, several persons may have one key, so export the keys as text",
                self.path,
                column,
                f"{pluralize(int(floats), 'key')} {'is' if floats == 1 else 'are'}",
            )

    def _mark_missing(self, column: str) -> NDArray[np.bool_]:
        """Return (n,) bool, True where a cell stands for no value: by its text, in columns of numbers by its number."""
        if column in self._missing_cells:
            return self._missing_cells[column]
        texts = MISSING | {_shorten_whole(text_of(text), self.reader).lower() for text in self.reader.missing}
        found = _mark(self.columns[column], lambda text: _shorten_whole(text, self.reader).lower() in texts)
        schema = self.schema
        numeric = {*schema.numeric, schema.time, schema.budget}
        numeric |= set(schema.label_columns if schema.kind == "real" else ())
        if self.reader.missing and column in numeric:
            listed = np.array([text.strip() for text in self.reader.missing], dtype=object)
            # As numbers, too: a listed -9 may be written -9.0 or, with a decimal comma, -9,00.
            found |= np.isin(self._parse_cells(column), _cells.parse_numbers(listed, self.reader.decimal))
        if found.all() and column in schema.feature_columns:
            _log.warning(
                "%s: column %r has no value in any row: a model cannot learn from it", self.path, column
            )
        self._missing_cells[column] = found
        return found

    @cached_property
    def keys(self) -> _cells.Strings:
        """(n,) user keys as text, none missing; "" in dropped rows only."""
        if self.dropped is not None:  # the profile has refused what is missing
            return self.columns[self.schema.user]
        column, texts = self.schema.user, self.columns[self.schema.user]
        self._refuse_typed_keys(self.cells[column])
        names_none = _mark(texts, names_no_person) | self._mark_missing(column)
        self._refuse(column, names_none, "names no user", "give every record a user key")
        for pattern, fault, remedy in _FAULTY_KEYS:
            remedy = f"{remedy}, since only equal keys are one person"
            self._refuse(column, _mark(texts, pattern.search), fault, remedy)
        return texts

    def kept_rows(self) -> NDArray[np.bool_]:
        """Return (n,) bool: which rows are records of the federation, all without an identity profile."""
        rows = len(self.columns[self.schema.user])
        return np.ones(rows, dtype=bool) if self.dropped is None else ~self.dropped

    def users(self, known: Mapping[str, int], test: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return (n,) number of every record's user; -1, in test or dropped rows only, for a key without a number."""
        number = np.array([known.get(key, -1) for key in self.keys], dtype=np.int64)
        remedy = "add the key to the public list, or to the trust center's file, or drop the record"
        unknown = (number < 0) & ~test & self.kept_rows()
        self._refuse(self.schema.user, unknown, "has no number in the index of users", remedy)
        return number

    @cached_property
    def is_test(self) -> NDArray[np.bool_]:
        """(n,) bool: which rows are test records."""
        share = self.schema.test_share
        if share is not None:
            # By the key, not by the row: a person in both splits would make the metrics too good.
            return _mark(self.keys, lambda key: is_test_person(key, share))
        if self.schema.split is None:
            return np.zeros(len(self.columns[self.schema.user]), dtype=bool)
        split = np.array([text.lower() for text in self.columns[self.schema.split]])
        wrong = ~np.isin(split, ("train", "test"))
        self._refuse(self.schema.split, wrong, "is no split", "write 'train' or 'test' there")
        return np.asarray(split == "test")

    def budgets(self, train: NDArray[np.bool_]) -> NDArray[np.float64] | None:
        """Return the ε that each training record may be charged, (training records,); None without such a column."""
        column = self.schema.budget
        if column is None:
            return None
        # Test records are charged nothing, so their cells may be empty.
        values = self._parse(column)[train]
        check_budgets(values, len(values), f"{self.path}: column {column!r}", "training record")
        return values

    def _read_numbers(self, column: str, fill: float | None = None) -> NDArray[np.float64]:
        """Return (n,) numbers; `fill` where a cell is missing, which is refused without it."""
        values = self._parse(column)
        if fill is not None:
            values[self._mark_missing(column)] = fill
        wrong = ~np.isfinite(values)
        if wrong.any():
            self._refuse(column, wrong, *self._explain_no_number(column, wrong))
        return values

    def _explain_no_number(self, column: str, wrong: NDArray[np.bool_]) -> tuple[str, str]:
        """Return what is wrong with the first of the marked cells, which are no numbers, and the remedy."""
        row = int(np.argmax(wrong))
        first, is_feature = self.columns[column][row], column in self.schema.numeric
        if is_feature and _DATE.fullmatch(first):
            remedy = (
                'declare its layout and a public day, for example date = "%d.%m.%Y", since = "2020-01-01"'
            )
            return "is a date, and the column is declared as numbers", remedy
        if _TRUTH.fullmatch(first):
            remedy = "declare the column as categorical, with the categories [false, true]"
            remedy = remedy if is_feature else "write a number there"
            return "is true or false, and no number", self._advise(remedy)
        remedy = "export the table without separators of thousands"
        if self.reader.decimal == "," and _POINT.fullmatch(first):
            return (
                "has a point, and the decimal mark is declared as ','",
                f"{remedy}, and with decimal commas",
            )
        comma = f"set {_files.name_setting('decimal', ',')}"
        if self.reader.decimal == "." and _THOUSANDS.fullmatch(first):
            return (
                "has a comma that may stand for thousands",
                f"{remedy}, or, if it is a decimal comma, {comma}",
            )
        if self.reader.decimal == "." and _DECIMAL_COMMA.fullmatch(first):
            return "has a decimal comma", f"{comma}, or export the table with decimal points"
        remedy = "fill in or drop missing and infinite values"
        if column in self.schema.label_columns:
            remedy += ", or, for a label that is text, leave out kind and list its classes"
        if is_feature:
            remedy += ', or declare missing = "indicator" or a public number for the column'
        if not 0 < len(first) <= 20 or self._mark_missing(column)[row]:
            return "is no finite number", self._advise(remedy)
        if _BEGINS_WITH_NUMBER.match(first):
            return (
                "is a number with other characters",
                "clean the column, so that its cells are numbers without units or other characters, or, if the "
                f"decimal mark is another one, set {_files.name_setting('decimal')}",
            )
        if is_feature and wrong.all() and len(set(self.columns[column][~self._mark_missing(column)])) > 1:
            remedy = "declare the column as categorical, with its public categories"
            return "is no number, as all others of the column", self._advise(remedy)
        # A value for missing cells does not help here: this text is not known to stand for none.
        none = f"or, if this stands for no value, set {_files.name_setting('missing', [first])}"
        remedy = f"correct the cell, {none}; {remedy}" if is_feature else remedy
        return "is no finite number", self._advise(remedy, f"{_AS_TRAINED}, {none}")

    def _parse(self, column: str) -> NDArray[np.float64]:
        """Return (n,) numbers, NaN where the text is missing or not a number."""
        values = self._parse_cells(column)
        # Also where a number such as -9 is declared to stand for no value.
        values[self._mark_missing(column)] = np.nan
        return values

    def _parse_cells(self, column: str) -> NDArray[np.float64]:
        """Return (n,) numbers, those of text by the decimal mark of the file, NaN where the text is not a number."""
        texts = self.columns[column]
        values = _cells.parse_numbers(texts, ".")
        if self.reader.decimal != ".":  # in a workbook some cells may be numbers, and some text
            is_text = np.array([isinstance(cell, str) for cell in self.cells[column]], dtype=bool)
            values[is_text] = _cells.parse_numbers(texts[is_text], self.reader.decimal)
        return values

    def _read_days(self, column: str, constants: NumericColumn) -> NDArray[np.float64]:
        """Return (n,) days since the public date; NaN where a cell is missing and a policy is declared."""
        since = datetime.fromisoformat(str(constants.since))
        layout = (self.reader.dates or {}).get(column, constants.date)
        # Cells that are dates have no layout: one with the day before the month would exchange the two.
        is_date = [isinstance(cell, date) for cell in self.cells[column]]
        cells = list(zip(self.columns[column], is_date, strict=True))
        found = {
            cell: _cells.parse_date(cell[0], None if cell[1] else layout) for cell in dict.fromkeys(cells)
        }
        of_layout = {cell: day for cell, day in found.items() if day is not None and not cell[1]}
        if any(is_date):
            # A spreadsheet program has no dates before 1900.
            converted = {
                cell
                for cell, day in of_layout.items()
                if day >= _FIRST_OF_WORKBOOKS and _cells.parse_date(cell[0]) is None
            }
            self._refuse(
                column,
                np.array([cell in converted for cell in cells]) & ~self._mark_missing(column),
                "is text, and other cells of the column are dates",
                "write all of them as text or all as dates: a spreadsheet program that takes days for months makes "
                "dates of those that it can",
            )
            early = {
                cell
                for cell, day in found.items()
                if cell[1] and day and _FIRST_OF_WORKBOOKS <= day < _FIRST_SURE_DAY
            }
            unsure = np.array([cell in early for cell in cells]) & ~self._mark_missing(column)
            self._refuse(
                column,
                unsure & _files.is_workbook(self.path),
                "is a day of a workbook before March 1900, which is another day in other programs: Excel has a 29 "
                "February 1900",
                "write all days as text, or declare this one as missing if it stands for none",
            )
        # Cells of a Parquet file may be dates of ISO 8601 as text; in text files the declared layout decides alone.
        if not of_layout and not _files.is_text_file(self.path):
            found = {cell: day or _cells.parse_date(cell[0]) for cell, day in found.items()}
        days = {
            cell: np.nan if day is None else (day - since) / timedelta(days=1) for cell, day in found.items()
        }
        values = np.array([days[cell] for cell in cells], dtype=np.float64)
        missing = self._mark_missing(column)
        values[missing] = np.nan
        wrong = np.isnan(values)
        why = f"is no date of the layout {layout!r}"
        if _cells.needs_all_digits(layout):
            why += (
                ", where each number has all its digits (a first zero may be lost: export the column as text)"
            )
        if constants.missing is not None:
            wrong &= ~missing
        remedy = f"correct the layout ({_files.name_date(column)}), "
        remedy += "or declare missing for the column where cells are empty"
        fixed = f"give the layout of this table ({_files.name_date_option(column)}), or correct the cell"
        self._refuse(column, wrong, why, self._advise(remedy, fixed))
        return values

    def _read_codes(
        self, column: str, values: Sequence[Any], remedy: str, if_empty: str, missing: Any = None
    ) -> NDArray[np.int64]:
        """Return (n,) positions in `values`; that of `missing` where a cell is missing, which is refused without it."""
        numbers = {text_of(v): number for number, v in enumerate(values) if not isinstance(v, bool)}
        words = {
            word: number
            for number, value in enumerate(values)
            if isinstance(value, bool)
            for word in sorted(TRUE if value else FALSE)
        }
        has_commas = self.reader.decimal == ","

        def find(text: str) -> int:
            place = numbers.get(text, words.get(text.lower(), -1))
            if place < 0 and has_commas and _DECIMAL_COMMA.fullmatch(text):
                place = numbers.get(text_of(text.replace(",", ".")), -1)  # "0,0" is the category 0
            return place

        # The order matters: spellings and missing cells are told apart only among texts that are no declared value.
        texts = self.columns[column]
        codes = _map_texts(find, texts, int)
        # Where 'none' is a category, 'None' is a spelling of it rather than no value, unless the reader declares it.
        spellings, declared = {text.lower() for text in numbers}, set(self.reader.missing)
        misspelt = codes < 0
        misspelt[misspelt] = [text.lower() in spellings and text not in declared for text in texts[misspelt]]
        why = "differs from a declared one in upper and lower case only"
        # A spelling is not folded in silence: "m" and "M" may be two codes.
        self._refuse(column, misspelt, why, self._advise(remedy))
        missing_cells = self._mark_missing(column)
        if missing is not None:
            place = [text_of(value) for value in values].index(text_of(missing))
            codes[(codes < 0) & missing_cells] = place
        self._refuse(column, (codes < 0) & missing_cells, "stands for no value", self._advise(if_empty))
        why = f"is none of {_cells.format_names([*numbers, *words])}"
        self._refuse(column, codes < 0, why, self._advise(remedy))
        return codes

    def features(self) -> NDArray[np.float32] | NamedArrays:
        """Return (n, features) float32, scaled and one-hot by the schema; with codes the arrays of `list_inputs`."""
        columns, codes_of = [], []
        for column, constants in self.schema.numeric_columns().items():
            columns += [values[:, None] for values in self._scale(column, constants)]
        for column, categories in self.schema.categorical_columns().items():
            remedy = "add it to the public categories, or change the cells before the run"
            if_empty = "declare which category stands for missing cells (missing), or fill the cells in"
            codes = self._read_codes(column, categories.categories, remedy, if_empty, categories.missing)
            if categories.codes:
                codes_of.append(codes)
                continue
            # While faults are collected, a refused cell has the code -1: its 1 stands in the last column, and nobody
            # gets the array.
            one_hot = np.zeros((len(codes), len(categories.categories)), dtype=np.float32)
            one_hot[np.arange(len(codes)), codes] = 1
            columns.append(one_hot)
        numeric = {NUMERIC: np.concatenate(columns, axis=1)} if columns else {}
        return NamedArrays({**numeric, CODES: np.stack(codes_of, axis=1)}) if codes_of else numeric[NUMERIC]

    def _scale(self, column: str, constants: NumericColumn) -> list[NDArray[np.float32]]:
        """Return the scaled values (n,) of a numeric column, and its indicator (n,) of missing cells if it has one."""
        low, high = constants.range
        missing = self._mark_missing(column)
        if constants.date is None:
            values = self._read_numbers(column, constants.fill)
        else:
            values = self._read_days(column, constants)
            if constants.fill is not None:
                values[missing] = constants.fill
        # NaN is neither below nor above: a missing cell is refused or filled in by the code above, not here.
        outside = (values < low) | (values > high)
        if self.schema.out_of_range == "refuse":
            unit = "" if constants.date is None else f" days since {constants.since}"
            first = self.columns[column][np.argmax(outside)]
            remedy = "widen the public range or set data.schema.out_of_range = 'clip'"
            fixed = (
                "correct the cell, leave out the row, or take the nearest end of the model's range "
                "(--out-of-range clip)"
            )
            # Programs write -9 or 999 for no value: to widen the range for it would spoil the scale.
            if _MISSING_CODE.fullmatch(first):
                remedy += (
                    f", or, if {first} stands for no value, set {_files.name_setting('missing', [first])}"
                )
            if constants.fill is not None:
                fixed = f"if it stands for no value, give {_files.name_missing_option(first)}; else {fixed}"
            why = f"is outside the declared range {low:g}..{high:g}{unit}"
            self._refuse(column, outside, why, self._advise(remedy, fixed))
        elif outside.any():
            values_outside = pluralize(int(outside.sum()), "value")
            _log.warning("%s: column %r: %s clipped to %g..%g", self.path, column, values_outside, low, high)
        scaled = constants.scale(values)
        return [scaled, missing.astype(np.float32)] if constants.has_indicator else [scaled]

    def labels(self) -> NDArray[Any]:
        """Return (n,) int64, (n,) float32, (n, 2) or (n, k) float32, by the schema's kind."""
        schema, columns = self.schema, self.schema.label_columns
        if schema.kind == "classes":
            remedy = (
                "correct the label or declare the class; where the label is a number, set kind = 'real' and leave "
                "classes out, and where it is the time until an event, kind = 'survival'"
            )
            if any(text.lower() in ("true", "false") for text in self.columns[columns[0]]):
                remedy = "set classes = [false, true]"
            return self._read_codes(
                columns[0], schema.classes or (), remedy, "leave out rows without a label"
            )
        if schema.kind == "multilabel":
            why, remedy = "is no yes or no", "write 1 for yes, 0 for no"
            answers = [self._read_answers(name, why, remedy) for name in columns]
            return np.stack(answers, axis=1).astype(np.float32)
        if schema.event is None or schema.time is None:
            pairs: Any = schema.label_typical or [(0.0, 1.0)] * len(columns)
            if schema.targets is None and schema.label_typical is not None:
                pairs = [schema.label_typical]
            numbers = [
                # In float64 until here: a center far from 0 would cost float32 most of its digits.
                self._to_float32(column, (self._read_numbers(column) - center) / spread)
                for column, (center, spread) in zip(columns, pairs, strict=True)
            ]
            return numbers[0] if schema.targets is None else np.stack(numbers, axis=1)
        event = self._read_answers(schema.event, "is no event", "write 1 for an event, 0 for censored")
        if len(event) >= _MIN_EVENTS and len(set(event.tolist())) == 1:
            _log.warning(
                "%s: column %r says %s in every row: check that it tells events (1) from records that were censored "
                "(0), and that no kind of them was left out",
                self.path,
                schema.event,
                "event" if event[0] else "no event",
            )
        duration = self._read_numbers(schema.time)
        self._refuse(schema.time, duration < 0, "is a negative time", "give a time of 0 or more")
        return np.stack([event, self._to_float32(schema.time, duration)], axis=1).astype(np.float32)

    def _read_answers(self, column: str, why: str, remedy: str) -> NDArray[np.float64]:
        """Return (n,) 1 and 0 for cells that say yes and no."""
        words = {**dict.fromkeys(TRUE, 1.0), **dict.fromkeys(FALSE, 0.0)}
        found = _map_texts(lambda text: words.get(text.lower(), np.nan), self.columns[column], float)
        self._refuse(column, ~np.isin(found, (0, 1)), why, remedy)
        return found

    def _to_float32(self, column: str, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return values as float32, which models compute in."""
        limit = np.finfo(np.float32).max
        # An infinite label would make the loss, and the gradient of every record beside it, NaN.
        self._refuse(column, np.abs(values) > limit, "is too large for float32", "give it in larger units")
        return values.astype(np.float32)


def read_cells(
    path: Path, column: str, reader: Reader | None = None, setting: str | None = None
) -> list[object]:
    """Return the cells of one column as an identity profile reads them, "" where they are missing.

    Args:
        path: the path of the table.
        column: its name.
        reader: how the file is written.
        setting: setting or argument that names the column, for errors.

    Raises:
        SilodpError: no such file or column, unreadable, or a column of numbers that may be rounded.
    """
    frame, header = _files.read_frame(path, reader, [column])
    check_columns(path, header, {column: setting})
    _check_rows(path, frame)
    return _cells.list_identifiers(frame[header_text(column)], path, () if reader is None else reader.missing)


def check_columns(
    path: Path, header: Sequence[str], columns: Mapping[str, str | None], remedy: str = ""
) -> None:
    """Raise for a column that the header does not have, or has twice.

    Args:
        path: the path of the table.
        header: names of its columns.
        columns: needed column -> setting or argument that names it, if any.
        remedy: what to do, in place of a name that is similar.
    """
    names = [header_text(column) for column in columns]
    # Without a header the first person's row stands in its place, where some cell may be a name by chance.
    is_header = 2 * sum(name in header for name in names) >= len(names)
    faults = []
    for column, name in zip(columns, names, strict=True):
        if header.count(name) == 1:
            continue
        wrong = "appears twice" if name in header else "is missing"
        hint = suggest_name(name, header) if is_header and name not in header and not remedy else None
        listed = (
            f"; it has {_cells.describe_header(header)}"
            if is_header
            else ", whose first row must be the header, with nothing above the header"
        )
        faults.append(
            SilodpError(
                f"{path}: column {column!r} {wrong}; {hint or (remedy or 'correct the name or the table') + listed}",
                code="data.column",
                field=columns[column],
            )
        )
    if faults:
        raise _join_faults(path, faults)


def _join_faults(path: Path, faults: Sequence[SilodpError]) -> SilodpError:
    """Return one error about the first faults of a table."""
    if len(faults) == 1:
        return faults[0]
    # The path stands once, before the list.
    shown = [str(fault).removeprefix(f"{path}: ") for fault in faults[:_MAX_FAULTS]]
    listed = "; ".join(f"({number}) {text}" for number, text in enumerate(shown, start=1))
    more = f"; and {len(faults) - len(shown):,} more" if len(faults) > len(shown) else ""
    return SilodpError(
        f"{path}: {len(faults):,} faults: {listed}{more}", code=faults[0].code, field=faults[0].field
    )


def _map_texts(function: Callable[[str], Any], texts: _cells.Strings, kind: type) -> NDArray[Any]:
    """Return (n,) results of a function of each text; a text that stands in many rows is computed once."""
    # Most columns have few different texts; one Python call for each row would take most of the time of reading.
    results = {text: function(text) for text in set(texts)}
    return np.array([results[text] for text in texts], dtype=kind)


def _mark(texts: _cells.Strings, test: Callable[[str], object]) -> NDArray[np.bool_]:
    """Return (n,) bool, True where a test holds for the text."""
    return _map_texts(lambda text: bool(test(text)), texts, bool)


def _shorten_whole(text: str, reader: Reader) -> str:
    """Return a text in which "17,0" is "17" where the decimal mark is a comma, as "17.0" is everywhere."""
    return text.split(",")[0] if reader.decimal == "," and _WHOLE_COMMA.fullmatch(text) else text


def _take_columns(
    path: Path, frame: pd.DataFrame, names: Mapping[str, str], reader: Reader, mapping: TableMapping
) -> tuple[dict[str, pd.Series[Any]], dict[str, _cells.Strings]]:
    """Return cells and texts of the columns `names` (in the schema → in the file), mapped values replaced."""
    _check_rows(path, frame)
    cells = {column: frame[header_text(name)] for column, name in names.items()}
    texts = {column: _cells.list_texts(cells[column], path, reader.decimal) for column in names}
    # A mapping also names columns that a prediction does not read, such as the label.
    for column in mapping.values.keys() & texts.keys():
        found = {text_of(text): to_cell(value) for text, value in mapping.values[column].items()}
        texts[column] = np.array([found.get(text, text) for text in texts[column]], dtype=object)
    return cells, texts


def _check_rows(path: Path, frame: pd.DataFrame) -> None:
    """Raise for a table without rows."""
    if frame.empty:
        raise SilodpError(
            f"{path}: the table has no rows; give at least one record or leave the silo out",
            code="data.no_records",
            field="data.files",
        )
