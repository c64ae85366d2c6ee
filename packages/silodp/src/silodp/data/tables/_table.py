"""One silo's file as text columns, each read by the schema or refused in one sentence."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from silodp.data.identity import IdentityProfile
from silodp.data.identity.spellings import names_no_person
from silodp.data.inputs import CODES, NUMERIC, NamedArrays
from silodp.data.silo_data import check_budgets
from silodp.data.tables import _cells, _files
from silodp.data.tables._text import describe_header, format_names, shorten_whole
from silodp.data.tables.cells import Cells, Refusals, join_faults, read_column
from silodp.data.tables.columns import Reader, TableMapping, header_text, text_of, to_cell
from silodp.data.tables.kinds.categorical import read_answers, read_codes
from silodp.data.tables.kinds.column import Column
from silodp.data.tables.kinds.numeric import read_numbers
from silodp.data.tables.schema import Schema, is_test_person
from silodp.errors import SilodpError
from silodp.text import is_own, name_class, pluralize, suggest_name

_log = logging.getLogger(__name__)

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
_MIN_EVENTS = 10
"""From so many records on, it is a sign of a fault if all of them, or none, are events."""


@dataclass
class Table:
    """One file as columns of distinct cells, and the schema to read it by.

    Attributes:
        schema: what the columns mean.
        cells: name → the distinct cells of a column, by the names of the schema.
        refusals: what is refused in this table.
        typed_keys: (n,) the user keys as they are in the file; None where an identity profile has read them.
        identifiers: (n,) the user keys as the identity profile reads them, None where it lets a row be dropped; None
            without a profile.
    """

    schema: Schema
    cells: Mapping[str, Cells] = field(repr=False)
    refusals: Refusals
    typed_keys: pd.Series[Any] | None = field(default=None, repr=False)
    identifiers: Sequence[str | None] | None = field(default=None, repr=False)

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
        refusals = Refusals(path)
        cells = _take_columns(refusals, frame, names, schema, reader, mapping)
        keys = frame[header_text(names[schema.user])]
        if profile is None:
            return cls(schema, cells, refusals, keys)
        where = f"{path}: column {schema.user!r}"
        listed = _cells.list_identifiers(keys, path, reader.missing)
        found = profile.normalize_column(listed, where)
        if short := sum(map(profile.lacks_digits, set(listed))):
            _log.warning(
                "%s: %s two digits or more, which count as leading zeros that a program has dropped: numbers without "
                "their century would become other persons, so agree on a profile that says how many zeros may be lost "
                "(lost_zeros)",
                where,
                f"{pluralize(short, 'identifier')} {'lacks' if short == 1 else 'lack'}",
            )
        if dropped := found.count(None):
            _log.warning("%s: %d rows without an identifier dropped", where, dropped)
        texts = np.array([key or "" for key in found], dtype=object)
        is_text = np.ones(len(found), dtype=bool)
        cells[schema.user] = replace(
            cells[schema.user], texts=texts, is_text=is_text, is_date=~is_text, rows=np.arange(len(found))
        )
        return cls(schema, cells, refusals, None, found)

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
        needed = f"give the table the columns {format_names(list(names.values()))}"
        check_columns(path, header, dict.fromkeys(names.values(), "table"), needed)
        refusals = Refusals(path, is_fixed=True)
        return cls(
            schema, _take_columns(refusals, frame, names, schema, schema.reader, mapping), refusals
        ), frame

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.refusals.path

    @property
    def size(self) -> int:
        """The number n of rows."""
        return len(next(iter(self.cells.values())).rows)

    @cached_property
    def keys(self) -> _cells.Strings:
        """(n,) user keys as text, none missing; "" in dropped rows only."""
        cells = self.cells[self.schema.user]
        if self.identifiers is not None:  # the profile has refused what is missing
            return cells.texts
        self._refuse_typed_keys(cells)
        names_none = cells.mark(names_no_person) | cells.is_missing
        cells.refuse(names_none, "names no user", "give every record a user key")
        for pattern, fault, remedy in _FAULTY_KEYS:
            remedy = f"{remedy}, since only equal keys are one person"
            cells.refuse(cells.mark(pattern.search), fault, remedy)
        return cells.expand(cells.texts)

    def _refuse_typed_keys(self, cells: Cells) -> None:
        """Raise for keys that are no text or whole numbers, or rounded ones: persons could fall together, or apart."""
        keys = self.typed_keys
        assert keys is not None
        # Bits of the mantissa by the number of bytes: a float with p of them skips whole numbers above 2^p, so two keys
        # may already have become one.
        digits = {2: 11, 4: 24}.get(getattr(keys.dtype, "itemsize", 8), 53)
        in_workbook = _files.is_workbook(self.path)
        faults = np.array([_cells.find_key_fault(key, digits, in_workbook) for key in keys], dtype=object)
        faults[cells.expand(cells.mark(_ROUNDED.fullmatch))] = _cells.ROUNDED
        for fault in sorted(set(faults) - {""}):
            remedy = "export the user key as text or as an integer"
            self.refusals.refuse(cells, faults == fault, fault, remedy)
        floats = sum(isinstance(key, str) and bool(_WHOLE_FLOAT.fullmatch(key.strip())) for key in keys)
        if floats and (cells.mark(_HAS_LETTER.search) & ~cells.is_missing).any():
            _log.warning(
                "%s: column %r: %s written as numbers with decimals, beside keys with letters: if a database took keys "
                "such as 123E1 for numbers, several persons may have one key, so export the keys as text",
                self.path,
                cells.column,
                f"{pluralize(floats, 'key')} {'is' if floats == 1 else 'are'}",
            )

    def kept_rows(self) -> NDArray[np.bool_]:
        """Return (n,) bool: which rows are records of the federation, all without an identity profile."""
        if self.identifiers is None:
            return np.ones(self.size, dtype=bool)
        return np.array([key is not None for key in self.identifiers], dtype=bool)

    def users(self, known: Mapping[str, int], test: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return (n,) number of every record's user; -1, in test or dropped rows only, for a key without a number."""
        number = np.array([known.get(key, -1) for key in self.keys], dtype=np.int64)
        remedy = "add the key to the public list, or to the trust center's file, or drop the record"
        unknown = (number < 0) & ~test & self.kept_rows()
        self.refusals.refuse(
            self.cells[self.schema.user], unknown, "has no number in the index of users", remedy
        )
        return number

    @cached_property
    def is_test(self) -> NDArray[np.bool_]:
        """(n,) bool: which rows are test records."""
        share = self.schema.test_share
        if share is not None:
            # By the key, not by the row: a person in both splits would make the metrics too good.
            # By a dict: texts of numpy end before their last zero characters.
            known = {key: is_test_person(key, share) for key in set(self.keys)}
            return np.array([known[key] for key in self.keys], dtype=bool)
        if self.schema.split is None:
            return np.zeros(self.size, dtype=bool)
        cells = self.cells[self.schema.split]
        split = cells.map(str.lower, object)
        cells.refuse(~np.isin(split, ("train", "test")), "is no split", "write 'train' or 'test' there")
        return cells.expand(split == "test")

    def budgets(self, train: NDArray[np.bool_]) -> NDArray[np.float64] | None:
        """Return the ε that each training record may be charged, (training records,); None without such a column."""
        column = self.schema.budget
        if column is None:
            return None
        # Test records are charged nothing, so their cells may be empty.
        cells = self.cells[column]
        values = cells.expand(cells.parse_numbers())[train]
        check_budgets(values, len(values), f"{self.path}: column {column!r}", "training record")
        return values

    def features(self) -> NDArray[np.float32] | NamedArrays:
        """Return (n, features) float32, scaled and one-hot by the schema; with codes the arrays of `list_inputs`."""
        codes = self.schema.code_columns()
        width = sum(
            len(kind.list_features(name)) for name, kind in self.schema.kinds.items() if name not in codes
        )
        numbers = np.empty((self.size, width), dtype=np.float32)
        codes_of, place = [], 0
        for column, kind in self.schema.kinds.items():
            cells = self.cells[column]
            features = len(kind.list_features(column))
            encoded = cells.expand(_encode(kind, cells, features))
            if column in codes:
                codes_of.append(encoded[:, 0])
            else:
                numbers[:, place : place + features] = encoded
                place += features
        numeric = {NUMERIC: numbers} if width else {}
        return NamedArrays({**numeric, CODES: np.stack(codes_of, axis=1)}) if codes_of else numbers

    def labels(self) -> NDArray[Any]:
        """Return (n,) int64, (n,) float32, (n, 2) or (n, k) float32, by the schema's kind."""
        schema, columns = self.schema, self.schema.label_columns
        if schema.kind == "classes":
            remedy = (
                "correct the label or declare the class; where the label is a number, set kind = 'real' and leave "
                "classes out, and where it is the time until an event, kind = 'survival'"
            )
            cells = self.cells[columns[0]]
            if cells.mark(lambda text: text.lower() in ("true", "false")).any():
                remedy = "set classes = [false, true]"
            return cells.expand(
                read_codes(cells, schema.classes or (), remedy, "leave out rows without a label")
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
                self._read_float32(column, center, spread)
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
        duration = self._read_float32(schema.time, is_time=True)
        return np.stack([event, duration], axis=1).astype(np.float32)

    def _read_answers(self, column: str, why: str, remedy: str) -> NDArray[np.float64]:
        """Return (n,) 1 and 0 for cells that say yes and no."""
        cells = self.cells[column]
        return cells.expand(read_answers(cells, why, remedy))

    def _read_float32(
        self, column: str, center: float = 0.0, spread: float = 1.0, is_time: bool = False
    ) -> NDArray[np.float32]:
        """Return (n,) scaled numbers as float32, which models compute in."""
        cells = self.cells[column]
        values = (read_numbers(cells) - center) / spread
        if is_time:
            cells.refuse(values < 0, "is a negative time", "give a time of 0 or more")
        # An infinite label would make the loss, and the gradient of every record beside it, NaN.
        is_large = np.abs(values) > np.finfo(np.float32).max
        cells.refuse(is_large, "is too large for float32", "give it in larger units")
        return cells.expand(values.astype(np.float32))


def _encode(kind: Column, cells: Cells, features: int) -> NDArray[Any]:
    """Return the features (d, k) of distinct cells; of a plug-in, whose array is no such one, refuse it."""
    encoded = kind.encode(cells)
    if is_own(type(kind)):
        return encoded
    numbers = np.asarray(encoded)
    is_right = numbers.shape == (len(cells.texts), features) and numbers.dtype.kind in "biuf"
    if not is_right or not (cells.is_refused or np.isfinite(numbers.astype(np.float32)).all()):
        raise SilodpError(
            f"data.schema.other.{cells.column}: {name_class(type(kind))}.encode must return finite numbers of the "
            f"shape ({len(cells.texts)}, {features}), one row for each distinct cell: correct it.",
            code="plugin.returned",
            field=cells.column,
        )
    return numbers


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
    check_rows(path, frame)
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
            f"; it has {describe_header(header)}"
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
        raise join_faults(path, faults)


def _take_columns(
    refusals: Refusals,
    frame: pd.DataFrame,
    names: Mapping[str, str],
    schema: Schema,
    reader: Reader,
    mapping: TableMapping,
) -> dict[str, Cells]:
    """Return the cells of the columns `names` (in the schema → in the file), mapped values replaced."""
    check_rows(refusals.path, frame)
    found = {}
    for column, name in names.items():
        texts, is_text, is_date, rows = read_column(frame[header_text(name)], refusals.path, reader.decimal)
        # A mapping also names columns that a prediction does not read, such as the label.
        mapped = mapping.values.get(column, {})
        values = {text_of(text): to_cell(value) for text, value in mapped.items()}
        if column == schema.user:
            values = {text: shorten_whole(text, reader) for text in texts}
        texts = np.array([values.get(text, text) for text in texts], dtype=object)
        given = mapping.columns.get(column, column)
        kind = schema.kinds.get(column)
        is_label = column in schema.label_columns
        is_amount = column in (schema.time, schema.budget)
        role: Any = "feature" if kind else "label" if is_label else "number" if is_amount else "other"
        is_number = is_amount or (is_label and schema.kind == "real") or (kind is not None and kind.is_number)
        found[column] = Cells(
            column,
            given,
            texts,
            is_text,
            is_date,
            rows,
            reader,
            refusals,
            role,
            is_number,
            schema.out_of_range,
        )
    return found


def check_rows(path: Path, frame: pd.DataFrame) -> None:
    """Raise for a table without rows."""
    if frame.empty:
        raise SilodpError(
            f"{path}: the table has no rows; give at least one record or leave the silo out",
            code="data.no_records",
            field="data.files",
        )
