"""SQLite files by Python's own module: a cell has its own type, whatever its column is declared as."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from silodp.data.tables.sources.source import FaultyCell, Values
from silodp_integrations.databases._database import ROWS, Column, Database
from silodp_integrations.databases._values import Kind, PythonColumn

_READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)


class SQLite(Database):
    """The result of a query to an SQLite file."""

    driver, extra = "sqlite3", "integrations"

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        # As an address: a plain name would make a file that is not there.
        with closing(sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            connection.set_authorizer(
                lambda action, *_: sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY
            )
            yield connection

    def _describe(self, connection: sqlite3.Connection) -> list[Column]:
        # The query itself, of which no row is taken: within another one, a second column of one name would be renamed.
        with closing(connection.execute(str(self.query))) as cursor:
            names = [name for name, *_ in cursor.description or ()]
        return [Column(name, place, Kind.TEXT, "") for place, name in enumerate(names)]

    def _express(self, column: Column, is_key: bool) -> str:
        return column.alias

    def _order(self, columns: Sequence[Column]) -> list[str]:
        # A column may be declared to be compared without case.
        return [f"{column.alias} COLLATE BINARY" for column in columns]

    def _stream(self, connection: sqlite3.Connection, statement: str) -> Iterable[Sequence[Any]]:
        with closing(connection.execute(statement)) as cursor:
            while rows := cursor.fetchmany(ROWS):
                yield list(zip(*rows, strict=True))

    def _read(
        self, connection: Any, columns: Sequence[Column], asked: Sequence[Column], key: str | None
    ) -> Mapping[str, Values]:
        found = {column.name: PythonColumn() for column in asked}
        rows = 0
        for batch in self._stream(connection, self._write_statement(columns, asked, key)):
            for name, cells in zip(found, batch, strict=True):
                with self._locate(name, rows):
                    if name == key:
                        _check_keys(cells)
                    found[name].add(cells)
            rows += len(batch[0])
            self._check_rows(rows)
        return {name: column.take() for name, column in found.items()}


def _check_keys(cells: Sequence[Any]) -> None:
    """Refuse keys that are no texts: in a column that is not declared TEXT, 12e3 and 0012 have become other numbers."""
    if set(map(type, cells)) <= {str, type(None)}:
        return
    row = next(row for row, cell in enumerate(cells) if not isinstance(cell, str | None))
    raise FaultyCell(
        row,
        f"a key that is no text (typeof {type(cells[row]).__name__}), as in a column that is not declared TEXT, where "
        "SQLite makes 12000 of 12e3 and 12 of 0012; declare the column TEXT and import the table again, or where no "
        "key ever had a letter or a leading zero write CAST(... AS TEXT) in the query",
    )
