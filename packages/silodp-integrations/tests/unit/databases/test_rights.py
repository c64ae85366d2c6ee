"""A query reads its own table and nothing else: it is written by others, and runs with the rights of the silo."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.database_servers import open_source
from support.refusals import refused

Database = tuple[Callable[..., None], Callable[[str | None], Any]]


@pytest.mark.slow
def test_a_query_to_postgresql_cannot_write(postgresql: Database) -> None:
    run, ask = postgresql
    run(
        "CREATE SEQUENCE numbers", "CREATE TABLE x (a TEXT)",
        "CREATE FUNCTION spoil() RETURNS TEXT AS 'INSERT INTO x VALUES (''k'') RETURNING a' LANGUAGE SQL VOLATILE",
    )  # fmt: skip
    for query in (
        "SELECT nextval('numbers') AS a", "SELECT spoil() AS a", "INSERT INTO x VALUES ('k') RETURNING a",
        "SELECT set_config('transaction_read_only', 'off', true) AS a, spoil() AS b",
    ):  # fmt: skip
        source = ask(query)
        with refused("data.query"):
            source.read_columns(source.list_columns())
    assert len(ask("SELECT * FROM x").read_columns(["a"])["a"]) == 0


@pytest.mark.slow
def test_a_query_to_mariadb_cannot_write(mariadb: Database) -> None:
    run, ask = mariadb
    run("CREATE TABLE x (a TEXT)", "CREATE SEQUENCE numbers")
    for query in (
        "SELECT NEXTVAL(numbers) AS a",
        "INSERT INTO x VALUES ('k') RETURNING a",
        "SELECT 1 INTO OUTFILE '/tmp/z'",
    ):
        with refused("data.query"):
            ask(query).read_columns(["a"])


def test_a_query_to_duckdb_reads_no_other_file(duckdb_file: Database, tmp_path: Path) -> None:
    run, ask = duckdb_file
    run("CREATE TABLE x (a VARCHAR)")
    (tmp_path / "secret.csv").write_text("a\nsecret\n")
    copied = tmp_path / "copy.csv"
    for query in (
        f"SELECT * FROM read_csv('{tmp_path}/secret.csv')", f"SELECT * FROM '{tmp_path}/secret.csv'",
        f"COPY (SELECT 1 AS a) TO '{copied}'", "SELECT 1 AS a; SELECT 2 AS a",
        "SELECT 1 AS a; SET enable_external_access = true", "INSERT INTO x VALUES ('k')",
    ):  # fmt: skip
        with refused("data.query"):
            ask(query).read_columns(ask(query).list_columns())
    assert not copied.exists()


def test_a_query_to_sqlite_reads_no_other_file(sqlite_file: Database, tmp_path: Path) -> None:
    run, ask = sqlite_file
    run("CREATE TABLE x (a TEXT)")
    for query in (
        "SELECT load_extension('nothing') AS a", "PRAGMA database_list", "SELECT * FROM pragma_database_list",
        f"ATTACH '{tmp_path}/other.db' AS y", "INSERT INTO x VALUES ('k') RETURNING a", "SELECT 1 AS a; DROP TABLE x",
    ):  # fmt: skip
        with refused("data.query"):
            ask(query).read_columns(["a"])
    assert ask("SELECT * FROM x").list_columns() == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["west.sqlite"]


def test_a_file_that_is_not_there_or_no_database_is_refused(tmp_path: Path) -> None:
    for name in ("none.sqlite", "none.duckdb"):
        if name.endswith("duckdb"):
            pytest.importorskip("duckdb")
        with refused("data.query"):
            open_source(tmp_path / name, "SELECT 1").list_columns()
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text("a,b\n1,2\n" * 1000)
        with refused("data.query"):
            open_source(tmp_path / name, "SELECT * FROM x").list_columns()


def test_an_sqlite_file_is_read_while_others_write_to_it(sqlite_file: Database, tmp_path: Path) -> None:
    run, ask = sqlite_file
    run("PRAGMA journal_mode = WAL", "CREATE TABLE x (a TEXT)", "INSERT INTO x VALUES ('k')")
    with closing(sqlite3.connect(tmp_path / "west.sqlite")) as writer:
        writer.execute("INSERT INTO x VALUES ('l')")
        assert ask("SELECT * FROM x").read_columns(["a"])["a"].to_pylist() == ["k"]
