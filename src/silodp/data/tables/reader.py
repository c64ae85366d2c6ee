"""CSV and Parquet tables, one per silo, as a federation: a public schema says what every column is.

Everything that scales or encodes a column comes from the schema, never from the rows, so nothing about the
rows leaks through the features. Users are linked across silos by equal keys (see `normalize_key`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from silodp.data.federation import Federation, SiloData
from silodp.data.tables._table import MISSING, Table
from silodp.data.tables.schema import Schema, normalize_key
from silodp.errors import SilodpError, first_line

__all__ = ["Schema", "normalize_key", "read_tables"]


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
        says when the list of ids was taken from the tables and when a person is in both splits. Clipped values
        are counted in the log (`silodp.data.tables._table`), not in the federation: the count is private.

    Raises:
        SilodpError: the first bad input, by file, column and data row (the first after the header is row 1).
    """
    if not isinstance(schema, Schema):
        raise SilodpError(
            f"schema is of type {type(schema).__name__}; give a silodp.Schema",
            code="argument.type",
            field="schema",
        )
    paths = _silo_paths(files)
    by_file: dict[Path, str] = {}
    for silo, path in paths.items():
        first = by_file.setdefault(path.resolve(), silo)
        if first != silo:
            raise SilodpError(
                f"silos '{first}' and '{silo}' are the same file {path}: give each silo its own.",
                code="data.files",
                field="data.files",
            )
    tables = {silo: Table.read(path, schema) for silo, path in paths.items()}
    known, assumptions = _user_index(tables, schema)
    silos, held, in_train, in_test = [], [], set[int](), set[int]()
    for silo, table in tables.items():
        x, y, test = table.features(), table.labels(), table.test_rows()
        user = table.users(known, test)
        silos.append(SiloData(silo, x[~test], y[~test], user[~test], table.budgets(~test)))
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
    listed = list(files.values()) if isinstance(files, Mapping) else files
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise SilodpError(
            f"files is {str(files)!r}; give silo name → path, or a list of paths",
            code="data.files",
            field="data.files",
        )
    for path in listed:
        if not isinstance(path, str | Path) or "\0" in str(path):
            raise SilodpError(
                f"files names {path!r}; give every table's path as text",
                code="data.files",
                field="data.files",
            )
    if isinstance(files, Mapping):
        paths = {silo: Path(path) for silo, path in files.items()}
    else:
        paths = {}
        for path in map(Path, files):
            if path.stem in paths:
                raise SilodpError(
                    f"{paths[path.stem]} and {path} would both be silo {path.stem!r}; name the silos in a "
                    "mapping",
                    code="data.files",
                    field="data.files",
                )
            paths[path.stem] = path
    if not paths:
        raise SilodpError(
            "files is empty; give at least one silo's table", code="data.files", field="data.files"
        )
    return paths


def _user_index(tables: Mapping[str, Table], schema: Schema) -> tuple[dict[str, int], list[str]]:
    """Key → number, and what that assumed: the public list's order, or sorted order of the training keys."""
    if schema.users is None:
        found = set[str]()
        for table in tables.values():
            found.update(table.keys()[~table.test_rows()])
        if not found:
            raise SilodpError(
                "no table has a training row; check the split column",
                code="data.no_records",
                field=schema.split,
            )
        ordered = sorted(found, key=lambda key: (len(key), key) if key.isdigit() else (1 << 30, key))
        said = (
            "The list of ids was read from the tables, because schema.users declares none: anyone may learn that each "
            "person on it has records in at least one of them, and how many persons there are. To promise that too, "
            "declare a list that also names people without records."
        )
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
                f"{source}: the list of users is not readable ({first_line(error)}); check the path, and save "
                "it as UTF-8",
                code="data.users",
                field="data.schema.users",
            ) from error
    else:
        listed = schema.users
        if not isinstance(listed, Sequence | np.ndarray):
            raise SilodpError(
                f"users is a {type(listed).__name__}; give a list of keys, or the path of a text file with one "
                "per line",
                code="data.users",
                field="data.schema.users",
            )
    known: dict[str, int] = {}
    for value in listed:
        key = normalize_key(value)
        if key in known or key.lower() in MISSING:
            raise SilodpError(
                f"{source}: user key {key!r} is empty or listed twice; list every user once",
                code="data.users",
                field="data.schema.users",
            )
        known[key] = len(known)
    if not known:
        raise SilodpError(
            f"{source}: the list of users is empty; list every user's key, one per line",
            code="data.users",
            field="data.schema.users",
        )
    return known, []
