"""Servers for the tests of databases, and a source for a query."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.database_servers import open_source, serve_mariadb, serve_postgresql, write_connection


@pytest.fixture(scope="session")
def postgresql_socket() -> Iterator[Path]:
    pytest.importorskip("adbc_driver_postgresql", reason="pip install 'silodp[postgresql]'")
    with serve_postgresql() as folder:
        yield folder


@pytest.fixture(scope="session")
def mariadb_socket() -> Iterator[Path]:
    pytest.importorskip("pymysql", reason="pip install 'silodp[mariadb]'")
    with serve_mariadb() as socket:
        yield socket


@pytest.fixture
def postgresql(postgresql_socket: Path, tmp_path: Path) -> Any:
    """Return a function that runs statements, and one that returns the source of a query."""
    from adbc_driver_postgresql import dbapi

    path = write_connection(
        tmp_path / "north.connection.toml",
        f'kind = "postgresql"\nhost = "{postgresql_socket}"\nuser = "silodp"\ndatabase = "postgres"\n',
    )

    def run(*statements: str) -> None:
        info = f"host={postgresql_socket} user=silodp dbname=postgres"
        with dbapi.connect(info, autocommit=True) as connection, connection.cursor() as cursor:
            for statement in ("DROP SCHEMA public CASCADE", "CREATE SCHEMA public", *statements):
                cursor.execute(statement)

    return run, lambda query: open_source(path, query)


@pytest.fixture
def mariadb(mariadb_socket: Path, tmp_path: Path) -> Any:
    """Return a function that runs statements, and one that returns the source of a query."""
    import pymysql

    path = write_connection(
        tmp_path / "south.connection.toml",
        f'kind = "mariadb"\nhost = "{mariadb_socket}"\nuser = "root"\ndatabase = "t"\n',
    )

    def run(*statements: str) -> None:
        with (
            pymysql.connect(unix_socket=str(mariadb_socket), user="root", charset="utf8mb4") as connection,
            connection.cursor() as cursor,
        ):
            for statement in (
                "DROP DATABASE IF EXISTS t",
                "CREATE DATABASE t",
                "USE t",
                *statements,
                "COMMIT",
            ):
                cursor.execute(statement)

    return run, lambda query: open_source(path, query)


@pytest.fixture
def duckdb_file(tmp_path: Path) -> Any:
    """Return a function that runs statements, and one that returns the source of a query."""
    duckdb = pytest.importorskip("duckdb", reason="pip install 'silodp[duckdb]'")
    path = tmp_path / "east.duckdb"

    def run(*statements: str) -> None:
        with duckdb.connect(str(path)) as connection:
            for statement in statements:
                connection.execute(statement)

    return run, lambda query: open_source(path, query)


@pytest.fixture
def sqlite_file(tmp_path: Path) -> Any:
    """Return a function that runs statements, and one that returns the source of a query."""
    path = tmp_path / "west.sqlite"

    def run(*statements: str) -> None:
        with closing(sqlite3.connect(path)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    return run, lambda query: open_source(path, query)
