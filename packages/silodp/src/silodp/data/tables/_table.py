"""One silo's table as columns of distinct cells, each read by the schema or refused in one sentence."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from silodp.data.identity import IdentityProfile
from silodp.data.silo_data import check_budgets
from silodp.data.tables._text import describe_header, format_names, shorten_whole
from silodp.data.tables._values import Distinct, LazyTexts, read_floats
from silodp.data.tables.cells import Cells, Refusals, find_distinct_cells, join_faults, mark_missing
from silodp.data.tables.columns import Reader, TableMapping, header_text, text_of, to_cell
from silodp.data.tables.features import EncodedColumn, Features
from silodp.data.tables.keys import Persons, find_persons, find_type, identify, list_identifiers
from silodp.data.tables.kinds.categorical import read_answers, read_codes
from silodp.data.tables.kinds.column import Column
from silodp.data.tables.kinds.numeric import NumericColumn, read_numbers
from silodp.data.tables.schema import Schema, find_test_persons
from silodp.data.tables.sources.frame import Frame
from silodp.data.tables.sources.source import Source, Values, open_source
from silodp.errors import SilodpError
from silodp.text import is_own, name_class, suggest_name

_log = logging.getLogger(__name__)

_MIN_EVENTS = 10
"""From so many records on, it is a sign of a fault if all of them, or none, are events."""


@dataclass
class Table:
    """One table as columns of distinct cells, and the schema to read it by.

    Attributes:
        schema: what the columns mean.
        cells: name → the distinct cells of a column, by the names of the schema.
        refusals: what is refused in this table.
        typed_keys: the distinct user keys as they are in the file.
        key_digits: the binary digits of their mantissa, if they are floating-point numbers.
        identified: which person each row belongs to by the identity profile; None without one.
    """

    schema: Schema
    cells: Mapping[str, Cells] = field(repr=False)
    refusals: Refusals
    typed_keys: Sequence[Any] = field(default=(), repr=False)
    key_digits: int = 53
    identified: Persons | None = field(default=None, repr=False)

    @classmethod
    def read(
        cls,
        source: Source,
        schema: Schema,
        mapping: TableMapping,
        profile: IdentityProfile | None = None,
    ) -> Table:
        """Read the schema's columns of a table, user keys by the identity profile if there is one.

        Args:
            source: the table, which has all columns of the schema (`check_columns`).
            schema: what the columns mean.
            mapping: how the table differs from the schema.
            profile: how user keys are read.

        Raises:
            SilodpError: unreadable, or with a row whose user key the profile refuses.
        """
        names = {column: mapping.columns.get(column, column) for column in schema.columns}
        columns = read_columns(source, names.values(), key=names[schema.user])
        refusals = Refusals(source.path)
        cells = {
            column: _take_cells(refusals, column, columns.pop(name), schema, source, mapping)
            for column, name in names.items()
            if column != schema.user
        }
        values = columns[names[schema.user]]
        keys = find_distinct_cells(source, names[schema.user], values)
        cells[schema.user] = _take_keys(refusals, names[schema.user], keys, schema, source)
        identified = None if profile is None else identify(profile, source, schema.user, values, keys)
        # A float with p binary digits skips whole numbers above 2^p, so two keys may already have become one.
        digits = {pa.float16(): 11, pa.float32(): 24}.get(find_type(values), 53)
        return cls(schema, cells, refusals, keys.values, digits, identified)

    @classmethod
    def read_inputs(
        cls,
        table: Path | Any,
        schema: Schema,
        mapping: TableMapping | None = None,
        copied: Sequence[str] = (),
    ) -> tuple[Table, pd.DataFrame]:
        """Read the columns of features alone, which is all that a prediction needs.

        Args:
            table: a file, or a data frame.
            schema: says which columns they are, and how they are read.
            mapping: how the table differs from the schema; None: not at all.
            copied: further columns.

        Returns:
            The table, and the further columns as they are, in the order of the rows.

        Raises:
            SilodpError: no such file, unreadable, or without a column of a feature.
        """
        mapping = TableMapping() if mapping is None else mapping
        names = {column: mapping.columns.get(column, column) for column in schema.feature_columns}
        if isinstance(table, Path):
            source = open_source(table, schema.reader, mapping.query)
        else:
            source = Frame(table, schema.reader)
        needed = f"give the table the columns {format_names(list(names.values()))}"
        header = check_columns(source, dict.fromkeys(names.values(), "table"), needed)
        for column in copied:
            if header.count(header_text(column)) != 1:
                raise SilodpError(
                    f"{source.path}: column {column!r}, which is to be copied, is not there, or is there twice; name a "
                    "column of the table",
                    code="data.column",
                    field="copied",
                )
        columns = read_columns(source, [*names.values(), *copied])
        refusals = Refusals(source.path, is_fixed=True)
        cells = {
            column: _take_cells(refusals, column, columns[name], schema, source, mapping)
            for column, name in names.items()
        }
        kept = pd.DataFrame({column: _to_series(columns[column]) for column in copied})
        return cls(schema, cells, refusals), kept

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.refusals.path

    @property
    def size(self) -> int:
        """The number n of rows."""
        return next(iter(self.cells.values())).size

    @cached_property
    def persons(self) -> Persons:
        """Which person each row belongs to.

        Raises:
            SilodpError: a key names nobody, or may have been another one.
        """
        if self.identified is not None:  # the profile has refused what is missing
            return self.identified
        return find_persons(self.cells[self.schema.user], self.typed_keys, self.key_digits)

    @cached_property
    def is_test(self) -> NDArray[np.bool_]:
        """(n,) bool: which rows are test records."""
        share = self.schema.test_share
        if share is not None:
            # By the key, not by the row: a person in both splits would make the metrics too good.
            return self.persons.expand(find_test_persons(self.persons.keys, share), bool)
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

    def features(self) -> Features:
        """Return the features, scaled and one-hot by the schema."""
        codes = self.schema.code_columns()
        columns = []
        for column, kind in self.schema.kinds.items():
            cells = self.cells[column]
            encoded = _encode(kind, cells, len(kind.list_features(column)))
            columns.append(EncodedColumn(encoded, cells.rows, column in codes))
        return Features(columns)

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


def read_identifiers(
    path: Path,
    column: str,
    reader: Reader | None = None,
    setting: str | None = None,
    query: str | None = None,
) -> tuple[list[object], NDArray[Any]]:
    """Return the cells of one column as an identity profile reads them.

    Args:
        path: the path of the table.
        column: its name.
        reader: how the file is written.
        setting: setting or argument that names the column, for errors.
        query: the query whose result is the table, for a database.

    Returns:
        The d distinct cells, "" where one is missing; and (n,) the position of each row's cell.

    Raises:
        SilodpError: no such file or column, unreadable, or a column of numbers that may be rounded.
    """
    source = open_source(path, reader, query)
    check_columns(source, {column: setting})
    values = read_columns(source, [column], key=column)[column]
    found = find_distinct_cells(source, column, values, decimal=".")
    return list_identifiers(found.values, found.rows, source, column, find_type(values)), found.rows


def read_cells(
    path: Path, column: str, reader: Reader | None = None, setting: str | None = None
) -> list[object]:
    """Return `read_identifiers` row by row."""
    listed, rows = read_identifiers(path, column, reader, setting)
    return [listed[place] for place in rows.tolist()]


def list_columns(schema: Schema, mapping: TableMapping) -> dict[str, str | None]:
    """Return the columns of a silo's table by their names there → the settings that name them."""
    return {mapping.columns.get(name, name): schema.find_setting(name) for name in schema.columns}


def read_columns(
    source: Source, columns: Iterable[str], key: str | None = None, *, skip_unreadable: bool = False
) -> dict[str, Values]:
    """Return columns of a table, (n,) with n ≥ 1.

    Args:
        source: the table.
        columns: names of columns that it has (`check_columns`).
        key: the column that names the person.
        skip_unreadable: whether columns that cannot be read are left out (`Source.read_readable`).

    Raises:
        SilodpError: it cannot be read, or has no rows.
    """
    with source.readable():
        written = {header_text(name): name for name in source.list_columns()}
        places = {name: written[header_text(name)] for name in columns}
        read = source.read_readable if skip_unreadable else source.read_columns
        found = read(list(dict.fromkeys(places.values())), key and places[key])
    if any(not len(values) for values in found.values()):
        raise SilodpError(
            f"{source.path}: the table has no rows; give at least one record or leave the silo out",
            code="data.no_records",
            field="data.files",
        )
    return {name: found[place] for name, place in places.items() if place in found}


def check_columns(source: Source, columns: Mapping[str, str | None], remedy: str = "") -> list[str]:
    """Return the names of all columns, as they are compared; raise where one that is needed is not there, or twice.

    Args:
        source: the table.
        columns: needed column → setting or argument that names it, if any.
        remedy: what to do, in place of a name that is similar.
    """
    with source.readable():
        header = list(map(header_text, source.list_columns()))
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
                f"{source.path}: column {column!r} {wrong}; "
                f"{hint or (remedy or 'correct the name or the table') + listed}",
                code="data.column",
                field=columns[column],
            )
        )
    if faults:
        with source.readable():
            source.check_names([name for name in source.list_columns() if header_text(name) in names])
        raise join_faults(source.path, faults)
    return header


def _take_cells(
    refusals: Refusals, column: str, values: Values, schema: Schema, source: Source, mapping: TableMapping
) -> Cells:
    """Return the cells of a column, mapped values replaced; numbers as they are where all cells are such."""
    name, kind = mapping.columns.get(column, column), schema.kinds.get(column)
    is_label, is_amount = column in schema.label_columns, column in (schema.time, schema.budget)
    role: Any = "feature" if kind else "label" if is_label else "number" if is_amount else "other"
    is_number = is_amount or (is_label and schema.kind == "real") or (kind is not None and kind.is_number)
    make = partial(
        Cells, column, name, source=source, refusals=refusals, role=role, is_number=is_number,
        out_of_range=schema.out_of_range,
    )  # fmt: skip
    # A plug-in gets the distinct cells that its base class promises, and days are texts.
    is_plain = kind is None or (isinstance(kind, NumericColumn) and kind.date is None)
    if is_number and is_plain and column not in mapping.values:
        numbers = read_floats(values, source.reader, mark_missing(source.reader.narrow(column)))
        if numbers is not None:
            assert not isinstance(values, np.ndarray)
            all_text = np.full(len(numbers), source.is_text)
            none = np.zeros(len(numbers), dtype=bool)
            return make(texts=LazyTexts(values), is_text=all_text, is_date=none, rows=None, numbers=numbers)
    found = find_distinct_cells(source, name, values)
    texts = found.texts
    if mapped := {text_of(text): to_cell(value) for text, value in mapping.values.get(column, {}).items()}:
        # TOML writes true, and Python True.
        words = [str(value).lower() if isinstance(value, bool) else "" for value in found.values]
        pairs = zip(texts, words, strict=True)
        texts = np.array([mapped.get(text, mapped.get(word, text)) for text, word in pairs], dtype=object)
    return make(texts=texts, is_text=found.mark(str), is_date=found.mark(date), rows=found.rows)


def _take_keys(refusals: Refusals, name: str, found: Distinct, schema: Schema, source: Source) -> Cells:
    """Return the cells of the user keys."""
    texts = found.texts
    if source.reader.decimal == ",":
        texts = np.array([shorten_whole(text, source.reader) for text in texts], dtype=object)
    return Cells(schema.user, name, texts, found.mark(str), found.mark(date), found.rows, source, refusals)


def _to_series(values: Values) -> pd.Series[Any]:
    if isinstance(values, np.ndarray):
        return pd.Series(values)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    # Without it whole numbers with a gap among them would become floats, and lose digits.
    series: pd.Series[Any] = values.to_pandas(integer_object_nulls=True)
    return series
