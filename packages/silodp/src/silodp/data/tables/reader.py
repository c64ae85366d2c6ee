"""Reading CSV and Parquet tables, one per silo, with a public schema that says what every column means.

Features are scaled and encoded with constants of the schema, never with values computed from rows, so the
encoding reveals nothing about the rows. Users are linked across silos by equal keys: an identity profile says how they
are read, or else `normalize_key`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from silodp.assumption import Assumption
from silodp.data.identity import IdentityProfile
from silodp.data.identity.spellings import names_no_person
from silodp.data.inputs import NamedArrays, concatenate
from silodp.data.public import ASSUMES_INDEX_FROM_TABLES
from silodp.data.silo_data import SiloData
from silodp.data.tables._table import Table, check_columns, list_columns, read_cells
from silodp.data.tables.cells import Cells
from silodp.data.tables.columns import TableMapping
from silodp.data.tables.features import Features
from silodp.data.tables.keys import Persons, find_key_fault
from silodp.data.tables.schema import UNSCALED_LABEL, Schema, normalize_key, refuse_users
from silodp.data.tables.sources.source import open_source
from silodp.errors import SilodpError
from silodp.settings import check_type

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedTables:
    """The tables of all silos, read: the parts of a `Federation`.

    Attributes:
        silos: training records, one table per silo.
        test: test records, pooled; None without a split column and a share of test persons.
        user_keys: the keys in the order of the users' index: (U,), and fewer where an identity profile declares U.
        assumptions: what the guarantee rests on, or does not cover, by the schema.
        profile: the identity profile by which the keys were read; None without one.
    """

    silos: tuple[SiloData, ...]
    test: SiloData | None
    user_keys: tuple[str, ...] = field(repr=False)
    assumptions: tuple[Assumption, ...]
    profile: IdentityProfile | None = None

    @property
    def users(self) -> int:
        """Number of persons U: declared by the profile, else the number of keys."""
        return len(self.user_keys) if self.profile is None else self.profile.population


def read_tables(
    files: Mapping[str, str | Path] | Sequence[str | Path],
    schema: Schema,
    index: Mapping[str, int] | None = None,
) -> LoadedTables:
    """Read one table per silo.

    Args:
        files: silo name → path, or a list of paths whose stems are the names.
        schema: what the columns mean.
        index: numbers of users by key, where a trust center gives them; None: as the schema says.

    Raises:
        SilodpError: as `Federation.from_tables`.
    """
    check_type("schema", schema, Schema, "silodp.Schema(user=..., label=...)")
    if schema.kind == "real" and schema.label_typical is None:
        _log.warning(UNSCALED_LABEL)
    paths = _silo_paths(files)
    profile = schema.read_identity()
    mappings = {silo: schema.silos.get(silo, TableMapping()) for silo in paths}
    sources = {
        silo: open_source(path, schema.readers.get(silo, schema.reader), mappings[silo].query)
        for silo, path in paths.items()
    }
    for silo, source in sources.items():  # a column that is missing is found before minutes of reading
        check_columns(source, list_columns(schema, mappings[silo]))
    tables = {}
    for silo in paths:
        tables[silo] = _Rows.read(Table.read(sources.pop(silo), schema, mappings[silo], profile))
        pa.default_memory_pool().release_unused()  # Arrow keeps what the file took for itself
    known, assumptions = _user_index(tables, schema, profile) if index is None else (dict(index), [])
    identifiers = None if profile is None else _list_by_number(known)
    # A test person may be in no training record, and so have no number in the users' index.
    tested = set[str]().union(*(rows.persons.list_keys(rows.is_test) for rows in tables.values()))
    numbers = {key: number for number, key in enumerate(sorted(tested))}
    has_test = schema.split is not None or schema.test_share is not None
    silos, held, in_train, in_test = [], [], set[int](), set[int]()
    for silo, rows in tables.items():
        user, train, test = rows.number(known), rows.is_training, rows.is_test
        held_out = None
        if has_test:
            x, y, of_test = rows.features.take(test), rows.labels[test], rows.persons.number(numbers)[test]
            held_out = SiloData(silo, x, y, of_test, labels=schema.kind)
            held.append((x, y, user[test]))
        x, y = rows.features.take(train), rows.labels[train]
        silos.append(SiloData(silo, x, y, user[train], rows.budgets, held_out, identifiers, schema.kind))
        if schema.split is not None:  # a share of test persons never parts the records of one
            in_train.update(user[train].tolist())
            in_test.update(user[test].tolist())
    if in_train & in_test:
        _log.warning(
            "the split column %r puts records of one person into training and test, so that the metrics are too "
            "good: hold out whole persons by data.schema.test_share",
            schema.split,
        )
    test_data = None
    if has_test:
        x, y, user = (concatenate(arrays) for arrays in zip(*held, strict=True))
        test_data = SiloData("test", x, y, user, labels=schema.kind)
    return LoadedTables(tuple(silos), test_data, tuple(known), (*assumptions, *schema.assumptions), profile)


@dataclass(frozen=True, eq=False)
class _Rows:
    """What the rules made of one silo's n rows.

    Attributes:
        features: the features of all rows.
        labels: (n, ...) their labels.
        budgets: the ε that each training record may be charged; None without such a column.
        persons: which person each row belongs to.
        is_training, is_test: (n,) bool, which rows are training or test records; the others are dropped.
        keys: the cells of the user keys.
    """

    features: Features = field(repr=False)
    labels: NDArray[Any] = field(repr=False)
    budgets: NDArray[np.float64] | None = field(repr=False)
    persons: Persons = field(repr=False)
    is_training: NDArray[np.bool_] = field(repr=False)
    is_test: NDArray[np.bool_] = field(repr=False)
    keys: Cells = field(repr=False)

    @classmethod
    def read(cls, table: Table) -> _Rows:
        """Read all columns; what is refused in them is one error. The other cells of the table are freed with it."""
        with table.refusals.collect():
            persons, features, labels = table.persons, table.features(), table.labels()
            is_test, is_kept = table.is_test, persons.expand(persons.keys != "", bool)
            budgets = table.budgets(is_kept & ~is_test)
        keys = table.cells[table.schema.user]
        return cls(features, labels, budgets, persons, is_kept & ~is_test, is_kept & is_test, keys)

    def number(self, known: Mapping[str, int]) -> NDArray[np.int64]:
        """Return (n,) number of every record's user; -1, in test or dropped rows only, for a key without a number."""
        number = self.persons.number(known)
        remedy = "add the key to the public list, or to the trust center's file, or drop the record"
        unknown = (number < 0) & self.is_training
        self.keys.refusals.refuse(self.keys, unknown, "has no number in the index of users", remedy)
        return number


def read_inputs(
    source: str | Path | pd.DataFrame,
    schema: Schema,
    copied: Sequence[str] = (),
    mapping: TableMapping | None = None,
) -> tuple[NDArray[np.float32] | NamedArrays, pd.DataFrame]:
    """Read the features of a table without labels and persons, by the code that reads tables for training.

    Args:
        source: a file, or the table itself.
        schema: what the columns of features mean.
        copied: further columns that are returned as they are.
        mapping: how the table differs from the schema; None: not at all.

    Returns:
        x, (n, features) or with codes n rows of the arrays of `schema.list_inputs`, and the copied columns; both in the
        order of the rows.

    Raises:
        SilodpError: the table cannot be read, lacks a column, or has a value that the schema refuses.
    """
    place = Path(source) if isinstance(source, str) else source
    table, kept = Table.read_inputs(place, schema, mapping, copied)
    with table.refusals.collect():
        features = table.features()
    return features.take(np.ones(table.size, dtype=bool)), kept


def _list_by_number(known: Mapping[str, int]) -> tuple[str, ...]:
    """Return the keys by their numbers; "" where a number is free."""
    keys = [""] * (max(known.values(), default=-1) + 1)
    for key, number in known.items():
        keys[number] = key
    return tuple(keys)


def _describe_file(given: object) -> str:
    """Return what was given as a file; of a data frame only that it is one: an error must not print its rows."""
    shown = str(given) if isinstance(given, Path) else given
    return (
        repr(shown) if shown is None or isinstance(shown, str | int | float) else f"a {type(shown).__name__}"
    )


def _silo_paths(files: Mapping[str, str | Path] | Sequence[str | Path]) -> dict[str, Path]:
    """Silo name → path of its table."""
    listed = list(files.values()) if isinstance(files, Mapping) else files
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise _refuse_files(f"files is {_describe_file(files)}; give silo name → path, or a list of paths")
    for path in listed:
        if not isinstance(path, str | Path) or "\0" in str(path):
            raise _refuse_files(f"files names {_describe_file(path)}; give every table's path as text")
    if isinstance(files, Mapping):
        paths = {silo: Path(path) for silo, path in files.items()}
    else:
        paths = {}
        for path in map(Path, files):
            if path.stem in paths:
                raise _refuse_files(
                    f"{paths[path.stem]} and {path} would both be silo {path.stem!r}; name the silos in a mapping"
                )
            paths[path.stem] = path
    if not paths:
        raise _refuse_files("files is empty; give at least one silo's table")
    by_file: dict[Path, str] = {}
    for silo, path in paths.items():
        # Two names of one file would count every record twice, and clip each person twice.
        first = by_file.setdefault(path.resolve(), silo)
        if first != silo:
            raise _refuse_files(
                f"silos '{first}' and '{silo}' are the same file {path}: give each silo its own."
            )
    return paths


def _refuse_files(message: str) -> SilodpError:
    """Return, for the caller to raise, the error about the setting `data.files`."""
    return SilodpError(message, code="data.files", field="data.files")


def _user_index(
    tables: Mapping[str, _Rows], schema: Schema, profile: IdentityProfile | None = None
) -> tuple[dict[str, int], list[Assumption]]:
    """Return user key → number, and the assumptions behind it.

    The numbers follow the order of the public list if there is one, else that of the sorted training keys.
    """
    listed = schema.read_users()
    if listed is not None:
        source = str(schema.users) if isinstance(schema.users, str | Path) else "users"
        return _index_listed(listed, source), []
    found = set[str]().union(*(rows.persons.list_keys(rows.is_training) for rows in tables.values()))
    if not found:
        raise SilodpError(
            "no table has a training row; check the split column", code="data.no_records", field=schema.split
        )
    if profile is not None and len(found) > profile.population:
        raise SilodpError(
            f"the tables have training records of {len(found):,} persons, and the identity profile declares population "
            f"= {profile.population:,}; agree with all silos on a profile with a larger population",
            code="identity.population",
            field="data.schema.identity",
        )
    # Whole numbers by size, then texts: the order must not depend on the order of rows.
    texts = sorted(found)
    ordered = sorted(filter(str.isdigit, texts), key=len)
    ordered += [key for key in texts if not key.isdigit()]
    assumptions = [ASSUMES_INDEX_FROM_TABLES] if profile is None else []
    return {key: number for number, key in enumerate(ordered)}, assumptions


def _index_listed(listed: Sequence[object], source: str) -> dict[str, int]:
    """Key → number in the order of a public list."""
    known: dict[str, int] = {}
    for value in listed:
        # The same form as in the tables: else nobody would be found in the list.
        key = normalize_key(value)
        if fault := find_key_fault(value):
            raise refuse_users(f"{source}: user key {key!r} {fault}; list all keys as text")
        if key in known or names_no_person(key):
            raise refuse_users(
                f"{source}: user key {key!r} is empty, stands for no user, or is listed twice; list every user once"
            )
        known[key] = len(known)
    if not known:
        raise refuse_users(f"{source}: the list of users is empty; list every user's key, one per line")
    return known


def read_person_index(path: Path, profile: IdentityProfile) -> dict[str, int]:
    """Read the positions of a silo's persons.

    A trust center that knows the identifiers of all silos gives everyone who has several records, in whatever silos,
    one position. Positions should be drawn at random below U, so that they say nothing of the persons.

    Args:
        path: a CSV or Parquet file with the columns `id`, read by the profile, and `position`, from 0 to U − 1.
        profile: the identity profile of the run.

    Returns:
        Positions by identifier, as the profile writes it.

    Raises:
        SilodpError: the file cannot be read, the profile refuses an identifier, or an identifier or a position is there
            twice, missing or out of range (code identity.index).
    """
    identifiers = profile.normalize_column(read_cells(path, "id"), f"{path}: column 'id'")
    index: dict[str, int] = {}
    taken = set[int]()
    for row, (identifier, cell) in enumerate(
        zip(identifiers, read_cells(path, "position"), strict=True), start=1
    ):
        text = str(cell)
        # isdecimal() alone accepts digits of every script, and a long text would take int() much time.
        position = int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else -1
        if not 0 <= position < profile.population:
            raise _refuse_index(
                path, row, f"the position is not a whole number from 0 to {profile.population - 1}"
            )
        if identifier is None:
            raise _refuse_index(path, row, "the identifier is missing")
        # Two persons with one position would be protected as one; one person with two positions, as two.
        if identifier in index or position in taken:
            raise _refuse_index(path, row, "the identifier or the position was there before")
        index[identifier] = position
        taken.add(position)
    return index


def _refuse_index(path: Path, row: int, what: str) -> SilodpError:
    return SilodpError(
        f"{path}: in data row {row} {what}; ask the trust center for a new file.",
        code="identity.index",
        field="index",
    )
