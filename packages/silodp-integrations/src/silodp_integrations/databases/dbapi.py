"""Any driver of the DB-API (PEP 249), for SQL Server, Oracle and others: rows as Python objects, ordered here."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from silodp.data.tables.sources.source import FaultyCell, Values
from silodp.text import first_line
from silodp_integrations.databases._database import ROWS, TABLE, Column
from silodp_integrations.databases._values import Kind, PythonColumn
from silodp_integrations.databases.connection import Server


class DBAPI(Server):
    """The result of a query by any driver of the DB-API.

    Types have no common names there, so that what a column is follows from the objects that come. Collations have
    none, either: all columns of the query are read, and their rows are ordered here.
    """

    driver, extra = "", "integrations"

    @contextmanager
    def _connect(self) -> Iterator[Any]:
        module = self.settings.module
        if not module:
            raise self.refuse(
                'the file has kind = "dbapi" and names no driver; set module, for example "oracledb"',
                "data.connection",
                "module",
            )
        try:
            driver: Any = importlib.import_module(module)
        except ImportError as error:
            reason = f"the driver {module} cannot be imported ({first_line(error)}); install it with pip"
            raise self.refuse(reason, "data.no_reader", "module") from None
        if module == "oracledb":  # else numbers with decimals come as floats
            driver.defaults.fetch_decimals = True
        if module == "pyodbc":  # else in capitals, where other databases write small letters
            driver.native_uuid = True
        secret = {} if self.password is None else {"password": self.password}
        with self._reach():
            connection = driver.connect(**self.settings.arguments, **secret)
        # Nothing is committed: whatever a function in the query has changed, closing takes back (PEP 249).
        with closing(connection):
            yield connection

    def _describe(self, connection: Any) -> list[Column]:
        with closing(connection.cursor()) as cursor:
            cursor.execute(f"{self._write_table()} SELECT * FROM {TABLE} WHERE 1 = 0")
            names = [name for name, *_ in cursor.description]
        return [Column(name, place, Kind.TEXT, "") for place, name in enumerate(names)]

    def _express(self, column: Column, is_key: bool) -> str:
        return column.alias

    def _order(self, columns: Sequence[Column]) -> list[str]:
        return []

    def _stream(self, connection: Any, statement: str) -> Iterable[Sequence[Any]]:
        with closing(connection.cursor()) as cursor:
            with suppress(
                AttributeError
            ):  # some drivers have no such setting; others would ask the server row by row
                cursor.arraysize = ROWS
            cursor.execute(statement)
            while rows := cursor.fetchmany(ROWS):
                yield list(zip(*rows, strict=True))

    def _read(
        self, connection: Any, columns: Sequence[Column], asked: Sequence[Column], key: str | None
    ) -> Mapping[str, Values]:
        found = [PythonColumn() for _ in columns]
        rows = 0
        for batch in self._stream(connection, self._write_statement(columns, columns, key)):
            for column, cells, values in zip(columns, batch, found, strict=True):
                is_key = column.name == key
                with self._locate(column.name, rows):
                    values.add(_take_keys(cells) if is_key else cells)
            rows += len(batch[0])
            self._check_rows(rows)
        taken = [values.take() for values in found]
        order = _sort(taken)
        return {column.name: _permute(taken[column.place], order) for column in asked}


def _take_keys(cells: Sequence[Any]) -> list[str | None]:
    """Return keys as text.

    Raises:
        FaultyCell: One is of a type by which two keys may already be one.
    """
    found = list[str | None]()
    for row, cell in enumerate(cells):
        is_whole = isinstance(cell, int | Decimal) and not isinstance(cell, bool) and "." not in str(cell)
        if not is_whole and not isinstance(cell, str | UUID | None):
            raise FaultyCell(
                row, f"a key of the type {type(cell).__name__}; store keys as text, or cast them in the query"
            )
        found.append(None if cell is None else str(cell))
    return found


def _sort(columns: Sequence[Values]) -> pa.Array:
    """Return the order of rows (n,) by all columns; only rows that are equal in all of them may change places."""
    keys = [
        column if isinstance(column, pa.ChunkedArray) else pa.array([repr(cell) for cell in column])
        for column in columns
    ]
    table = pa.Table.from_arrays(keys, names=[str(place) for place in range(len(keys))])
    return pc.sort_indices(table, sort_keys=[(name, "ascending", "at_start") for name in table.column_names])


def _permute(column: Values, order: pa.Array) -> Values:
    return column[order.to_numpy()] if isinstance(column, np.ndarray) else column.take(order)
