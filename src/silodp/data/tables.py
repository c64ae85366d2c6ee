"""CSV and Parquet tables, one per silo, as a federation: a public schema says what every column is.

Everything that scales or encodes a column comes from the schema, never from the rows, so nothing about the
rows leaks through the features. Users are linked across silos by equal keys (see `normalize_key`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from silodp.data.public_ranges import scale_to_range
from silodp.data.silo import Federation, SiloData
from silodp.errors import SilodpError

_log = logging.getLogger(__name__)

Strings = NDArray[Any]  # (n,) object array of str
_WHOLE = re.compile(r"(-?\d+)\.0+")
_ROUNDED = re.compile(r"-?\d+(\.\d+)?[eE]\+\d+")
_MISSING = frozenset({"", "nan", "na", "n/a", "none", "null", "<na>"})


@dataclass(frozen=True)
class Schema:
    """What the columns of every silo's table mean. All of it is public.

    Attributes:
        user: column of the key that names a person, equal in all silos.
        label: column of the label (kinds "classes" and "real").
        kind: "classes", "real" (a number) or "survival" (`event` and `time` instead of `label`).
        classes: the label's values, in the order of the class numbers (kind "classes").
        event, time: columns of 0/1 and of a time ≥ 0 (kind "survival").
        numeric: column → public range (low, high), which is mapped to [-1, 1].
        categorical: column → public categories, one-hot in this order.
        split: optional column holding "train" or "test".
        users: the public list of user keys, or a text file with one key per line; U is its length. Without it
            U is counted in the tables, and the guarantee says so.
        out_of_range: "refuse" a number outside its range, or "clip" it to the range.

    Features are the numeric columns, then the categorical ones, in the order given here. Values are compared
    as text after whole floats have become integers ("1.0" is "1").
    """

    user: str
    label: str | None = None
    kind: Literal["classes", "real", "survival"] = "classes"
    classes: Sequence[Any] | None = None
    event: str | None = None
    time: str | None = None
    numeric: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    categorical: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    split: str | None = None
    users: Sequence[Any] | str | Path | None = None
    out_of_range: Literal["refuse", "clip"] = "refuse"

    def __post_init__(self) -> None:
        if self.kind not in ("classes", "real", "survival"):
            raise SilodpError(f"schema: kind is {self.kind!r}; choose 'classes', 'real' or 'survival'")
        if self.out_of_range not in ("refuse", "clip"):
            raise SilodpError(f"schema: out_of_range is {self.out_of_range!r}; choose 'refuse' or 'clip'")
        if self.kind == "survival":
            if self.event is None or self.time is None or self.label is not None or self.classes is not None:
                raise SilodpError(
                    "schema: kind 'survival' takes event and time, and neither label nor classes"
                )
        elif self.label is None or self.event is not None or self.time is not None:
            raise SilodpError(f"schema: kind {self.kind!r} takes label, and neither event nor time")
        if (self.classes is not None) != (self.kind == "classes"):
            raise SilodpError(
                f"schema: kind is {self.kind!r} and classes is {self.classes!r}; list the label's public "
                "values "
                "for kind 'classes' and only there"
            )
        if self.classes is not None:
            _check_values("classes", self.classes)
        if not self.numeric and not self.categorical:
            raise SilodpError("schema: no features; declare numeric ranges or categorical values")
        for column, bounds in self.numeric.items():
            if len(bounds) != 2 or not np.isfinite(bounds).all() or not bounds[0] < bounds[1]:
                raise SilodpError(
                    f"schema: numeric column {column!r} has range {tuple(bounds)}; give finite (low, high), "
                    "low < high"
                )
        for column, categories in self.categorical.items():
            _check_values(f"categorical column {column!r}", categories)
        columns = self.columns
        for column in columns:
            if columns.count(column) > 1:
                raise SilodpError(
                    f"schema: column {column!r} is declared twice; give every column one meaning"
                )

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column the tables must have."""
        named = (self.user, self.label, self.event, self.time, self.split)
        return (*(column for column in named if column is not None), *self.numeric, *self.categorical)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features: a numeric column's, or "column=category"."""
        one_hot = [f"{c}={value}" for c, values in self.categorical.items() for value in values]
        return (*self.numeric, *one_hot)


def _check_values(what: str, values: Sequence[Any]) -> None:
    distinct = {_text(value) for value in values}
    if isinstance(values, str) or len(values) < 2 or len(distinct) < len(values):
        raise SilodpError(f"schema: {what} are {values!r}; list at least two values, all different")


def _text(value: object) -> str:
    """A cell as text: stripped, and a whole float written as an integer."""
    text = str(value).strip()
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


def normalize_key(value: object) -> str:
    """The form in which user keys are compared: stripped text, "17.0" (a float-parsed column) being "17".

    "007" and "7" stay two keys. Should two persons' keys fall together, they are protected as one.
    """
    return _text(value)


def read_tables(
    files: Mapping[str, str | Path] | Sequence[str | Path], schema: Schema, name: str = "federation"
) -> Federation:
    """The federation of one CSV (comma, UTF-8, header) or Parquet table per silo.

    Args:
        files: silo name → path, or a list of paths whose stems are the names.
        schema: what the columns mean; other columns are ignored.
        name: of the federation.

    Returns:
        Training records by silo, test records pooled (user -1 for persons without a number). `assumptions`
        says when U was taken from the tables and when a person is in both splits. Clipped values are counted
        in the log (`silodp.data.tables`), not in the federation: the count is private.

    Raises:
        SilodpError: the first bad input, by file, column and data row (the first after the header is row 1).
    """
    paths = _silo_paths(files)
    by_file: dict[Path, str] = {}
    for silo, path in paths.items():
        first = by_file.setdefault(path.resolve(), silo)
        if first != silo:
            raise SilodpError(
                f"silos '{first}' and '{silo}' are the same file {path}: give each silo its own."
            )
    tables = {silo: _Table.read(path, schema) for silo, path in paths.items()}
    known, assumptions = _user_index(tables, schema)
    silos, held, in_train, in_test = [], [], set[int](), set[int]()
    for silo, table in tables.items():
        x, y, test = table.features(), table.labels(), table.test_rows()
        user = table.users(known, test)
        silos.append(SiloData(silo, x[~test], y[~test], user[~test]))
        held.append((x[test], y[test], user[test]))
        in_train.update(user[~test].tolist())
        in_test.update(user[test].tolist())
    if in_train & in_test:
        assumptions.append(
            "Some persons have records in both the training and the test split; test records are not "
            "protected."
        )
    if schema.out_of_range == "clip" and schema.numeric:
        assumptions.append(
            "Numbers outside the declared public ranges are clipped to them, record by record."
        )
    test_data = None
    if schema.split is not None:
        test_data = SiloData("test", *(np.concatenate(arrays) for arrays in zip(*held, strict=True)))
    return Federation(
        silos=tuple(silos),
        users=len(known),
        test=test_data,
        assumptions=tuple(assumptions),
        name=name,
        classes=None if schema.classes is None else len(schema.classes),
        features=schema.features,
        user_keys=tuple(known),
    )


def _silo_paths(files: Mapping[str, str | Path] | Sequence[str | Path]) -> dict[str, Path]:
    if isinstance(files, str | Path):
        raise SilodpError(f"files is {str(files)!r}; give silo name → path, or a list of paths")
    if isinstance(files, Mapping):
        paths = {silo: Path(path) for silo, path in files.items()}
    else:
        paths = {}
        for path in map(Path, files):
            if path.stem in paths:
                raise SilodpError(
                    f"{paths[path.stem]} and {path} would both be silo {path.stem!r}; name the silos in a "
                    "mapping"
                )
            paths[path.stem] = path
    if not paths:
        raise SilodpError("files is empty; give at least one silo's table")
    return paths


def _user_index(tables: Mapping[str, _Table], schema: Schema) -> tuple[dict[str, int], list[str]]:
    """Key → number, and what that assumed: the public list's order, or sorted order of the training keys."""
    if schema.users is None:
        found = set[str]()
        for table in tables.values():
            found.update(table.keys()[~table.test_rows()])
        if not found:
            raise SilodpError("no table has a training row; check the split column")
        ordered = sorted(found, key=lambda key: (len(key), key) if key.isdigit() else (1 << 30, key))
        said = "The number of users was taken from the tables, not from a public list of users."
        return {key: number for number, key in enumerate(ordered)}, [said]
    source = "users"
    listed: Sequence[Any]
    if isinstance(schema.users, str | Path):
        source = str(schema.users)
        try:
            listed = [
                line for line in Path(source).read_text(encoding="utf-8-sig").splitlines() if line.strip()
            ]
        except (OSError, UnicodeDecodeError) as error:
            raise SilodpError(
                f"{source}: the list of users is not readable ({error}); check the path"
            ) from error
    else:
        listed = schema.users
    known: dict[str, int] = {}
    for value in listed:
        key = normalize_key(value)
        if key in known or key.lower() in _MISSING:
            raise SilodpError(f"{source}: user key {key!r} is empty or listed twice; list every user once")
        known[key] = len(known)
    if not known:
        raise SilodpError(f"{source}: the list of users is empty; list every user's key, one per line")
    return known, []


@dataclass(frozen=True)
class _Table:
    """One file as text columns, and the schema to read it by."""

    path: Path
    schema: Schema
    columns: Mapping[str, Strings]

    @classmethod
    def read(cls, path: Path, schema: Schema) -> _Table:
        if not path.is_file():
            raise SilodpError(f"{path}: no such file; check the path of the silo's table")
        suffix = path.suffix.lower()
        if suffix not in (".csv", ".parquet"):
            raise SilodpError(f"{path}: unknown extension {path.suffix!r}; give a .csv or .parquet file")
        try:
            frame = _read_csv(path) if suffix == ".csv" else pd.read_parquet(path)
        except (OSError, ValueError) as error:  # pandas' and pyarrow's own errors are ValueErrors
            reason = str(error).strip().split("\n")[0]
            raise SilodpError(f"{path}: not readable as {suffix[1:]} ({reason}); export it again") from error
        header = [str(column).strip() for column in frame.columns]
        for column in schema.columns:
            if header.count(column) != 1:
                wrong = "is missing" if column not in header else "appears twice"
                raise SilodpError(
                    f"{path}: column {column!r} {wrong}; correct the schema or the table, which has "
                    f"{', '.join(header)}"
                )
        if frame.empty:
            raise SilodpError(
                f"{path}: the table has no rows; give at least one record or leave the silo out"
            )
        frame.columns = pd.Index(header)
        columns = {column: _as_text(frame[column]) for column in schema.columns}
        table = cls(path, schema, columns)
        table._refuse_rounded_keys(frame[schema.user])
        return table

    def _refuse(self, column: str, bad: NDArray[np.bool_], why: str, remedy: str) -> None:
        """Raise for the first bad row, if any."""
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise SilodpError(
                f"{self.path}: column {column!r} is {self.columns[column][row]!r} in data row {row + 1}, "
                f"which {why}; {remedy}"
            )

    def _refuse_rounded_keys(self, keys: pd.Series[Any]) -> None:
        """A key rounded by a float column or a spreadsheet would split one person into two users."""
        text = self.columns[self.schema.user]
        rounded = np.array([_ROUNDED.fullmatch(key) is not None for key in text], dtype=bool)
        if isinstance(keys.dtype, np.dtype) and keys.dtype.kind == "f":
            digits = 24 if keys.dtype == np.float32 else 53  # of the mantissa
            rounded |= keys.abs().to_numpy() >= 2.0**digits
        self._refuse(
            self.schema.user, rounded, "is a rounded number", "export the user key as text or as an integer"
        )

    def _missing(self, column: str) -> NDArray[np.bool_]:
        return np.array([text.lower() in _MISSING for text in self.columns[column]], dtype=bool)

    def keys(self) -> Strings:
        self._refuse(
            self.schema.user, self._missing(self.schema.user), "names no user", "give every record a user key"
        )
        return self.columns[self.schema.user]

    def users(self, known: Mapping[str, int], test: NDArray[np.bool_]) -> NDArray[np.int64]:
        number = np.array([known.get(key, -1) for key in self.keys()], dtype=np.int64)
        self._refuse(
            self.schema.user,
            (number < 0) & ~test,
            "is not in the public list of users",
            "add the key to the list or drop the record",
        )
        return number

    def test_rows(self) -> NDArray[np.bool_]:
        """(n,) bool."""
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

    def _numbers(self, column: str) -> NDArray[np.float64]:
        values = pd.to_numeric(pd.Series(self.columns[column]), errors="coerce").to_numpy(dtype=float)
        self._refuse(
            column, ~np.isfinite(values), "is no finite number", "fill in or drop missing and infinite values"
        )
        return np.asarray(values, dtype=np.float64)

    def _codes(self, column: str, values: Sequence[Any], remedy: str) -> NDArray[np.int64]:
        code = {_text(value): number for number, value in enumerate(values)}
        codes = np.array([code.get(text, -1) for text in self.columns[column]], dtype=np.int64)
        self._refuse(column, codes < 0, f"is none of {', '.join(code)}", remedy)
        return codes

    def features(self) -> NDArray[np.float32]:
        """(n, features) float32."""
        columns = []
        for column, (low, high) in self.schema.numeric.items():
            values = self._numbers(column)
            outside = (values < low) | (values > high)
            if self.schema.out_of_range == "refuse":
                why = f"is outside the declared range {low:g}..{high:g}"
                self._refuse(column, outside, why, "widen the public range or set out_of_range = 'clip'")
            elif outside.any():
                _log.warning(
                    "%s: column %r: %d values clipped to %g..%g", self.path, column, outside.sum(), low, high
                )
            columns.append(scale_to_range(values, low, high)[:, None])
        for column, categories in self.schema.categorical.items():
            codes = self._codes(
                column, categories, "add it to the public categories or map it to one of them"
            )
            columns.append(np.eye(len(categories), dtype=np.float32)[codes])
        return np.concatenate(columns, axis=1)

    def labels(self) -> NDArray[Any]:
        """(n,) int64, (n,) float32 or (n, 2) float32, by the schema's kind."""
        schema = self.schema
        if schema.classes is not None and schema.label is not None:
            return self._codes(schema.label, schema.classes, "correct the label or declare the class")
        if schema.event is None or schema.time is None:
            return self._numbers(schema.label or "").astype(
                np.float32
            )  # Schema saw to it that label is there
        event, time = self._numbers(schema.event), self._numbers(schema.time)
        self._refuse(
            schema.event, ~np.isin(event, (0, 1)), "is no event", "write 1 for an event, 0 for censored"
        )
        self._refuse(schema.time, time < 0, "is a negative time", "give a time of 0 or more")
        return np.stack([event, time], axis=1).astype(np.float32)


def _read_csv(path: Path) -> pd.DataFrame:
    """All cells as text, the first line as header.

    header=None keeps pandas from renaming repeated columns and from taking the first column for an index when
    rows are longer than the header; dtype=str keeps a missing key from turning 17 into 17.0.
    """
    try:
        cells = pd.read_csv(path, header=None, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except pd.errors.EmptyDataError:
        return pd.DataFrame()
    frame = cells.iloc[1:].reset_index(drop=True)
    frame.columns = pd.Index(cells.iloc[0].astype(str))
    return frame


def _as_text(column: pd.Series[Any]) -> Strings:
    """(n,) object array of text; missing cells become ""."""
    missing = column.isna().to_numpy()
    text = np.array([_text(value) for value in column], dtype=object)
    text[missing] = ""
    return text
