"""One silo's file as text columns, each read by the schema or refused in one sentence."""

from __future__ import annotations

import csv
import logging
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from silodp.data._identifiers import MISSING
from silodp.data.identity import IdentityProfile
from silodp.data.silo_data import check_budgets
from silodp.data.tables.schema import Schema, is_test_person, text_of
from silodp.errors import SilodpError, first_line

_log = logging.getLogger(__name__)

Strings = NDArray[Any]  # (n,) object array of str
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_MOST_LISTED = 10  # names or values that an error lists
_ROUNDED = re.compile(r"-?\d+(\.\d+)?[eE]\+\d+")


@dataclass(frozen=True)
class Table:
    """One file as text columns, and the schema to read it by.

    Attributes:
        path: of the file.
        schema: what the columns mean.
        columns: name → (n,) texts; the user column as the identity profile reads it where there is one.
        dropped: (n,) bool, the rows without an identifier that an identity profile lets drop; None without a profile.
    """

    path: Path
    schema: Schema
    columns: Mapping[str, Strings] = field(repr=False)
    dropped: NDArray[np.bool_] | None = field(default=None, repr=False)

    @classmethod
    def read(cls, path: Path, schema: Schema, profile: IdentityProfile | None = None) -> Table:
        """Read the schema's columns of a file, user keys by the identity profile if there is one.

        Raises:
            SilodpError: no such file, unreadable, without a column of the schema, or with a row whose user key the
                profile refuses.
        """
        frame, header = _read_frame(path)
        for column in schema.columns:
            _check_column(path, header, column)
        _check_rows(path, frame)
        keys = frame[_header_text(schema.user)]
        columns = {column: _as_text(frame[_header_text(column)], path) for column in schema.columns}
        if profile is None:
            table = cls(path, schema, columns)
            table._refuse_rounded_keys(keys)
            return table
        where = f"{path}: column {schema.user!r}"
        found = profile.normalize_column(_list_cells(keys, where), where)
        dropped = np.array([key is None for key in found], dtype=bool)
        if dropped.any():
            _log.warning("%s: %d rows without an identifier dropped", where, dropped.sum())
        columns[schema.user] = np.array([key or "" for key in found], dtype=object)
        return cls(path, schema, columns, dropped)

    @classmethod
    def read_inputs(cls, source: Path | pd.DataFrame, schema: Schema) -> tuple[Table, pd.DataFrame]:
        """Read the columns of features alone, which is all that a prediction needs.

        Args:
            source: a file, or the table itself.
            schema: says which columns they are, and how they are read.

        Returns:
            The table, and all cells of the source in its order of rows.

        Raises:
            SilodpError: no such file, unreadable, or without a column of a feature.
        """
        path = Path("the data frame") if isinstance(source, pd.DataFrame) else source
        if isinstance(source, pd.DataFrame):
            header = [_header_text(column) for column in source.columns]
            frame = source.set_axis(header, axis=1).reset_index(drop=True)
        else:
            frame, header = _read_frame(source)
        for column in schema.feature_columns:
            _check_column(path, header, column)
        _check_rows(path, frame)
        texts = {column: _as_text(frame[_header_text(column)], path) for column in schema.feature_columns}
        return cls(path, schema, texts), frame

    def _refuse(self, column: str, bad: NDArray[np.bool_], why: str, remedy: str) -> None:
        """Raise for the first bad row, if any."""
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise SilodpError(
                f"{self.path}: column {column!r} is {short(self.columns[column][row])} in data row {row + 1}, "
                f"which {why}; {remedy}",
                code="data.value",
                field=column,
            )

    def _refuse_rounded_keys(self, keys: pd.Series[Any]) -> None:
        """Raise for keys rounded by a float column or a spreadsheet: they would split one person into two users."""
        text = self.columns[self.schema.user]
        rounded = np.array([_ROUNDED.fullmatch(key) is not None for key in text], dtype=bool)
        if isinstance(keys.dtype, np.dtype) and keys.dtype.kind == "f":
            digits = 24 if keys.dtype == np.float32 else 53  # of the mantissa
            rounded |= keys.abs().to_numpy() >= 2.0**digits
        self._refuse(
            self.schema.user, rounded, "is a rounded number", "export the user key as text or as an integer"
        )

    def _missing(self, column: str) -> NDArray[np.bool_]:
        return np.array([text.lower() in MISSING for text in self.columns[column]], dtype=bool)

    def keys(self) -> Strings:
        """Return (n,) user keys as text, none missing; "" in dropped rows only."""
        if self.dropped is not None:  # the profile has refused what is missing
            return self.columns[self.schema.user]
        self._refuse(
            self.schema.user, self._missing(self.schema.user), "names no user", "give every record a user key"
        )
        return self.columns[self.schema.user]

    def kept_rows(self) -> NDArray[np.bool_]:
        """Return (n,) bool: which rows are records of the federation, all without an identity profile."""
        return (
            np.ones(len(self.columns[self.schema.user]), dtype=bool)
            if self.dropped is None
            else ~self.dropped
        )

    def users(self, known: Mapping[str, int], test: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return (n,) number of every record's user; -1, in test or dropped rows only, for a key without a number."""
        number = np.array([known.get(key, -1) for key in self.keys()], dtype=np.int64)
        self._refuse(
            self.schema.user,
            (number < 0) & ~test & self.kept_rows(),
            "has no number in the index of users",
            "add the key to the public list, or to the trust center's file, or drop the record",
        )
        return number

    def test_rows(self) -> NDArray[np.bool_]:
        """Return (n,) bool: which rows are test records."""
        share = self.schema.test_share
        if share is not None:
            return np.array([is_test_person(key, share) for key in self.keys()], dtype=bool)
        if self.schema.split is None:
            return np.zeros(len(self.columns[self.schema.user]), dtype=bool)
        split = np.array([text.lower() for text in self.columns[self.schema.split]])
        self._refuse(
            self.schema.split,
            ~np.isin(split, ("train", "test")),
            "is no split",
            "write 'train' or 'test' there",
        )
        return np.asarray(split == "test")

    def budgets(self, train: NDArray[np.bool_]) -> NDArray[np.float64] | None:
        """Return the ε that each training record may be charged, (training records,); None without such a column."""
        column = self.schema.budget
        if column is None:
            return None
        values = _parse_numbers(self.columns[column])[train]
        check_budgets(values, len(values), f"{self.path}: column {column!r}", "training record")
        return values

    def _numbers(self, column: str) -> NDArray[np.float64]:
        values = _parse_numbers(self.columns[column])
        wrong = ~np.isfinite(values)
        if wrong.any() and _DECIMAL_COMMA.fullmatch(self.columns[column][np.flatnonzero(wrong)[0]]):
            self._refuse(column, wrong, "has a decimal comma", "export the table with decimal points")
        self._refuse(column, wrong, "is no finite number", "fill in or drop missing and infinite values")
        return values

    def _codes(self, column: str, values: Sequence[Any], remedy: str) -> NDArray[np.int64]:
        code = {text_of(value): number for number, value in enumerate(values)}
        codes = np.array([code.get(text, -1) for text in self.columns[column]], dtype=np.int64)
        self._refuse(column, codes < 0, f"is none of {_format_names(list(code))}", remedy)
        return codes

    def features(self) -> NDArray[np.float32]:
        """Return (n, features) float32, scaled and one-hot by the schema."""
        columns = []
        for column, constants in self.schema.numeric_columns().items():
            values, (low, high) = self._numbers(column), constants.range
            outside = (values < low) | (values > high)
            if self.schema.out_of_range == "refuse":
                why = f"is outside the declared range {low:g}..{high:g}"
                self._refuse(column, outside, why, "widen the public range or set out_of_range = 'clip'")
            elif outside.any():
                _log.warning(
                    "%s: column %r: %d values clipped to %g..%g", self.path, column, outside.sum(), low, high
                )
            columns.append(constants.scale(values)[:, None])
        for column, categories in self.schema.categorical.items():
            codes = self._codes(
                column, categories, "add it to the public categories or map it to one of them"
            )
            one_hot = np.zeros((len(codes), len(categories)), dtype=np.float32)
            one_hot[np.arange(len(codes)), codes] = 1
            columns.append(one_hot)
        return np.concatenate(columns, axis=1)

    def labels(self) -> NDArray[Any]:
        """Return (n,) int64, (n,) float32 or (n, 2) float32, by the schema's kind."""
        schema = self.schema
        if schema.classes is not None and schema.label is not None:
            remedy = "correct the label, declare the class, or set kind = 'real' where the label is a number"
            return self._codes(schema.label, schema.classes, remedy)
        if schema.event is None or schema.time is None:
            column = schema.label or ""  # Schema has checked that label is there
            return self._single(column, self._numbers(column))
        event, time = self._numbers(schema.event), self._numbers(schema.time)
        self._refuse(
            schema.event, ~np.isin(event, (0, 1)), "is no event", "write 1 for an event, 0 for censored"
        )
        self._refuse(schema.time, time < 0, "is a negative time", "give a time of 0 or more")
        return np.stack([event, self._single(schema.time, time)], axis=1).astype(np.float32)

    def _single(self, column: str, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return values as float32, which models compute in."""
        limit = np.finfo(np.float32).max
        self._refuse(column, np.abs(values) > limit, "is too large for float32", "give it in larger units")
        return values.astype(np.float32)


def read_cells(path: Path, column: str) -> list[object]:
    """Return the cells of one column as an identity profile reads them, "" where they are missing.

    Raises:
        SilodpError: no such file or column, unreadable, or a column of numbers that may be rounded.
    """
    frame, header = _read_frame(path)
    _check_column(path, header, column, shows_header=False)
    _check_rows(path, frame)
    return _list_cells(frame[_header_text(column)], f"{path}: column {column!r}")


def _list_cells(cells: pd.Series[Any], where: str) -> list[object]:
    """Return text cells as they are, whole numbers as text, and "" where a cell is missing.

    A column of floating-point numbers is refused as a whole: large ones are rounded, and leading zeros are lost.
    """
    if not isinstance(cells.dtype, np.dtype) or cells.dtype.kind not in "OSUiu":
        # Text, whole numbers and categories of pandas' own types pass, cell by cell.
        is_plain = pd.api.types.is_string_dtype(cells) or pd.api.types.is_integer_dtype(cells)
        if not is_plain and not isinstance(cells.dtype, pd.CategoricalDtype):
            raise _refuse_identifiers(f"{where}, every row", str(cells.dtype))
    listed: list[object] = []
    for row, (cell, is_missing) in enumerate(
        zip(cells.tolist(), cells.isna().tolist(), strict=True), start=1
    ):
        if is_missing:
            listed.append("")
        elif isinstance(cell, str):
            listed.append(cell)
        elif isinstance(cell, Integral) and not isinstance(cell, bool):
            listed.append(str(int(cell)))
        else:
            raise _refuse_identifiers(f"{where}, data row {row}", type(cell).__name__)
    return listed


def _refuse_identifiers(where: str, found: str) -> SilodpError:
    return SilodpError(
        f"{where}: type {found}, not text, so digits may be lost; export the identifiers as text",
        code="identity.column",
        field="data.schema.user",
    )


def _read_frame(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Return all cells of a file and its header.

    Raises:
        SilodpError: no such file, or unreadable.
    """
    if path.is_dir():
        raise SilodpError(
            f"{path}: a folder, not a table; give the silo's .csv or .parquet file",
            code="data.no_file",
            field="data.files",
        )
    if not path.is_file():
        raise SilodpError(
            f"{path}: no such file; check the path of the silo's table",
            code="data.no_file",
            field="data.files",
        )
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise SilodpError(
            f"{path}: unknown extension {path.suffix!r}; give a .csv or .parquet file",
            code="data.unreadable",
            field="data.files",
        )
    try:
        frame = _read_csv(path) if suffix == ".csv" else pd.read_parquet(path)
    except SilodpError:
        raise
    except (OSError, ValueError, csv.Error) as error:  # pandas' and pyarrow's own are ValueErrors
        raise SilodpError(
            f"{path}: not readable as {suffix[1:]} ({first_line(error)}); export it again",
            code="data.unreadable",
            field="data.files",
        ) from error
    header = [_header_text(column) for column in frame.columns]
    frame.columns = pd.Index(header)
    return frame, header


def _check_column(path: Path, header: Sequence[str], column: str, shows_header: bool = True) -> None:
    """Raise for a column that the header does not have, or has twice.

    Without a header the first person's row stands in its place: `shows_header` says whether the message may quote it.
    """
    if header.count(_header_text(column)) != 1:
        wrong = "is missing" if _header_text(column) not in header else "appears twice"
        which = (
            f"the table, which has {_format_names(header)}" if shows_header else "the first line of the table"
        )
        raise SilodpError(
            f"{path}: column {column!r} {wrong}; correct the schema or {which}",
            code="data.column",
            field=column,
        )


def _check_rows(path: Path, frame: pd.DataFrame) -> None:
    """Raise for a table without rows."""
    if frame.empty:
        raise SilodpError(
            f"{path}: the table has no rows; give at least one record or leave the silo out",
            code="data.no_records",
            field="data.files",
        )


def _read_csv(path: Path) -> pd.DataFrame:
    """Read all cells as text, the first line as header.

    header=None keeps pandas from renaming repeated columns and from taking the first column for an index when
    rows are longer than the header; dtype=str keeps a missing key from turning 17 into 17.0.
    """
    _check_shape(path)
    cells = pd.read_csv(path, header=None, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    frame = cells.iloc[1:].reset_index(drop=True)
    frame.columns = pd.Index(cells.iloc[0].astype(str))
    return frame


def _check_shape(path: Path) -> None:
    """Raise for a file that is not UTF-8, has no header, another separator, or a row that is too short or too long.

    pandas would fill a short row up with empty cells, each a column away from where its value belongs.
    """
    _check_encoding(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = (row for row in csv.reader(file) if any(cell.strip() for cell in row) or len(row) > 1)
        header = next(rows, None)
        if header is None:
            raise SilodpError(
                f"{path}: the file is empty; export the silo's table again",
                code="data.no_records",
                field="data.files",
            )
        for separator in (";", "\t", "|"):
            if len(header) == 1 and separator in header[0]:
                raise SilodpError(
                    f"{path}: the columns are separated by {separator!r}; export the table with commas between them, "
                    "and with decimal points",
                    code="data.unreadable",
                    field="data.files",
                )
        for number, row in enumerate(rows, start=1):
            if len(row) != len(header):
                raise SilodpError(
                    f"{path}: the header has {len(header)} cells and data row {number} has {len(row)}; correct the "
                    "row, and put text that holds a comma in quotes (numbers take a decimal point)",
                    code="data.unreadable",
                    field="data.files",
                )


def _check_encoding(path: Path) -> None:
    """Raise for a file that is not UTF-8; the sentence names what spreadsheets write instead."""
    remedy = "export it as UTF-8 (in spreadsheet programs 'CSV UTF-8')"
    with path.open("rb") as file:
        start = file.read(4096)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start:
        found = "it is UTF-16 text, or no text"
    else:
        try:
            with path.open(encoding="utf-8-sig") as text:
                while text.read(1 << 20):
                    pass
            return
        except UnicodeDecodeError as error:
            found = f"it has the byte 0x{error.object[error.start]:02x}, which is no UTF-8"
    raise SilodpError(
        f"{path}: not readable as csv, {found}; {remedy}", code="data.encoding", field="data.files"
    )


def _as_text(column: pd.Series[Any], path: Path) -> Strings:
    """Return (n,) object array of text; missing cells become ""."""
    for row, value in enumerate(column):
        if isinstance(value, bytes | bytearray | list | dict | np.ndarray):
            raise SilodpError(
                f"{path}: column '{column.name}' holds a {type(value).__name__} in data row {row + 1}; give text or a "
                "number in every cell",
                code="data.value",
                field=str(column.name),
            )
    missing = column.isna().to_numpy()
    text = np.array([text_of(value) for value in column], dtype=object)
    text[missing] = ""
    return text


def _parse_numbers(text: Strings) -> NDArray[np.float64]:
    """Return (n,) numbers, NaN where the text is not a number."""
    return np.asarray(pd.to_numeric(pd.Series(text), errors="coerce").to_numpy(dtype=np.float64))


def _header_text(column: object) -> str:
    return unicodedata.normalize("NFC", str(column).strip())


def _format_names(names: Sequence[str]) -> str:
    """Return the first names and the number of the others, for messages."""
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more:,} more" if more > 0 else "")
