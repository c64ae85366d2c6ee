"""The result of one query as a table: what all databases have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from silodp.data.tables.columns import Reader
from silodp.data.tables.sources.source import FaultyCell, Source, Values
from silodp.errors import SilodpError
from silodp.text import describe_exception, first_line, name_extra
from silodp_integrations.databases._values import KEYS, Kind, check_keys, convert, join

MAX_ROWS = 50_000_000
"""The most rows that a query may give, where the connection file says nothing else."""
BATCH = 65_536
"""Rows that are converted at once."""
ROWS = 2_048
"""Rows of Python objects that are converted at once: more of them do not stay in the processor's cache."""
TABLE = "silodp_table"
"""The name of the query's result in our statement; it hides tables of this name."""


@dataclass(frozen=True)
class Column:
    """One column of a query's result.

    Attributes:
        name: Its name.
        place: Its position, from 0.
        kind: What it is asked for as.
        type: The name of its type in the database.
    """

    name: str
    place: int
    kind: Kind
    type: str

    @property
    def alias(self) -> str:
        """Its name in our statement, in which no name of the query has to be quoted."""
        return f"c{self.place}"


class Database(Source):
    """The result of one query.

    A subclass says how to connect, which kind a type is, how a column is asked for, and how rows are ordered.
    """

    driver: ClassVar[str]
    """The module of the driver."""
    extra: ClassVar[str]
    """The extra of silodp-integrations that installs the driver."""
    takes_query = True
    column_faults = ("data.value",)
    max_rows: int = MAX_ROWS

    def __init__(self, path: Path, reader: Reader, query: str | None = None) -> None:
        super().__init__(path, reader, query)
        self._columns: list[Column] | None = None
        if query is None:
            raise self.refuse(
                "a database has many tables, so a query says which rows and columns are read; give it by --query, or "
                "write query = 'SELECT ...' into [data.schema.silos.NAME] of the configuration, NAME being this silo",
                "data.query",
                "data.schema.silos",
            )

    @abstractmethod
    def _connect(self) -> AbstractContextManager[Any]:
        """Open a connection that can only read, and close it at the end of the block."""

    @abstractmethod
    def _describe(self, connection: Any) -> list[Column]:
        """Return the columns of the query's result; of its rows none is asked for."""

    @abstractmethod
    def _express(self, column: Column, is_key: bool) -> str:
        """Return the SQL that asks for a column in one declared type; keys as text."""

    @abstractmethod
    def _order(self, columns: Sequence[Column]) -> list[str]:
        """Return the SQL by which rows are ordered, by which only equal rows are equal; [] leaves them."""

    @abstractmethod
    def _stream(self, connection: Any, statement: str) -> Iterable[Sequence[pa.Array]]:
        """Yield the rows of a statement in parts: of each part its columns."""

    def list_columns(self) -> list[str]:
        """Return the names of the query's columns; it runs, and gives no row (LIMIT 0)."""
        if self._columns is None:
            with self._explain(), self._connect() as connection:
                self._columns = self._describe(connection)
        return [column.name for column in self._columns]

    def read_columns(self, names: Sequence[str], key: str | None = None) -> Mapping[str, Values]:
        """Return columns of the query, rows ordered by all of its columns: a run must not depend on chance.

        Raises:
            SilodpError: The query fails or gives too many rows, the key is of a type that changes keys, or a cell
                cannot be given as it is.
        """
        with self._explain(), self._connect() as connection:
            columns = self._columns = self._columns or self._describe(connection)
            named = {column.name: column for column in columns}
            asked = [named[name] for name in names]
            for column in asked:
                if column.name == key:
                    self._check_key(column)
            return self._read(connection, columns, asked, key)

    def _check_key(self, column: Column) -> None:
        if column.kind not in KEYS:
            raise self.refuse(
                f"column {column.name!r} names persons and is {column.kind.value} ({column.type}), so that two keys "
                "may already be one; store keys as text or whole numbers",
                "data.value",
                column.name,
            )

    def _read(
        self, connection: Any, columns: Sequence[Column], asked: Sequence[Column], key: str | None
    ) -> Mapping[str, Values]:
        parts: list[list[pa.Array]] = [[] for _ in asked]
        rows = 0
        for batch in self._stream(connection, self._write_statement(columns, asked, key)):
            for column, cells, found in zip(asked, batch, parts, strict=True):
                is_key = column.name == key
                with self._locate(column.name, rows):
                    converted = convert(cells, Kind.TEXT if is_key else column.kind)
                    if is_key and column.kind is Kind.DECIMAL:
                        check_keys(converted)
                found.append(converted)
            rows += len(batch[0]) if batch else 0
            self._check_rows(rows)
        return {column.name: join(found) for column, found in zip(asked, parts, strict=True)}

    def _write_statement(self, columns: Sequence[Column], asked: Sequence[Column], key: str | None) -> str:
        expressions = ", ".join(self._express(column, column.name == key) for column in asked)
        order = ", ".join(self._order(columns))
        aliases = ", ".join(column.alias for column in columns)
        select = f"{self._write_table(f'({aliases})')} SELECT {expressions} FROM {TABLE}"
        return f"{select} ORDER BY {order}" if order else select

    def _write_table(self, aliases: str = "") -> str:
        # A comment at the end of the query must not hide the bracket: it ends with its line, or where ours does.
        return f"WITH {TABLE}{aliases} AS (\n{self.query}\n/**/)"

    def _write_description(self) -> str:
        return f"{self._write_table()} SELECT * FROM {TABLE} LIMIT 0"

    def _check_rows(self, rows: int) -> None:
        if rows > self.max_rows:
            raise self.refuse(
                f"the query gives more than {self.max_rows:,} rows; narrow it, or raise max_rows in the "
                "connection file",
                "data.query",
                "max_rows",
            )

    @contextmanager
    def _locate(self, name: str, rows: int) -> Iterator[None]:
        """Raise an error about a cell with its data row; the part begins after this number of rows."""
        try:
            yield
        except FaultyCell as error:
            remedy = "correct it there or in the query"
            raise self.refuse_cell(name, rows + error.row, error.what, remedy) from None

    @contextmanager
    def _explain(self) -> Iterator[None]:
        """Turn errors of the driver into one sentence each, without secrets."""
        try:
            yield
        except SilodpError:
            raise
        except ImportError as error:
            raise self.refuse(
                f"reading it needs {error.name}, which is not installed; {name_extra(self.extra, __name__)}",
                "data.no_reader",
            ) from None
        except Exception as error:  # every driver has exceptions of its own
            told = self._hide_secrets(first_line(error) or describe_exception(error))
            raise self.refuse(
                f"the query cannot be run ({told})", "data.query", "data.schema.silos"
            ) from None

    def _hide_secrets(self, text: str) -> str:
        """Return the text of an error without what nobody may see."""
        return text
