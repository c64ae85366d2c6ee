"""MariaDB and MySQL by PyMySQL, which is asked for text: what becomes of it is decided here."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa

from silodp_integrations.databases._database import ROWS, Column
from silodp_integrations.databases._values import Kind
from silodp_integrations.databases.connection import Server

# The numbers of the types in the protocol (enum_field_types of MariaDB).
_NAMES = {
    0: "decimal", 1: "tinyint", 2: "smallint", 3: "int", 4: "float", 5: "double", 7: "timestamp", 8: "bigint",
    9: "mediumint", 10: "date", 11: "time", 12: "datetime", 13: "year", 16: "bit", 246: "decimal", 247: "enum",
    248: "set", 255: "geometry",
}  # fmt: skip
_KINDS = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint", "mediumint", "year", "bit"), Kind.INTEGER),
    **dict.fromkeys(("float", "double"), Kind.FLOAT),
    "decimal": Kind.DECIMAL,
    "date": Kind.DATE,
    "datetime": Kind.TIME,
    "timestamp": Kind.INSTANT,
    **dict.fromkeys(("time", "geometry"), Kind.OTHER),
}
_SORT_BYTES = 64
"""Bytes of a text that the server compares: with more, a query of several long texts is out of sort memory."""


class MariaDB(Server):
    """The result of a query to a MariaDB or MySQL server."""

    driver, extra = "pymysql", "mariadb"
    port = 3306

    @contextmanager
    def _connect(self) -> Iterator[Any]:
        import pymysql
        from pymysql.converters import encoders

        settings = self.settings
        is_socket = settings.is_socket
        context = None
        if settings.find_tls() != "off":
            context = ssl.create_default_context(cafile=self.find_authority())
            if settings.find_tls() == "require":
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with self._reach():
            connection = pymysql.connect(
                host=None if is_socket else settings.host,
                unix_socket=settings.host if is_socket else None,
                port=settings.port or self.port,
                user=settings.user,
                password=self.password or "",
                database=settings.database,
                charset="utf8mb4",
                # No converter: the driver makes None of a day that is none, and floats of decimals.
                conv=encoders,
                ssl=context,
                ssl_disabled=context is None,
                connect_timeout=30,
            )
        with closing(connection):
            with connection.cursor() as cursor:
                cursor.execute("SET time_zone = '+00:00'")
                cursor.execute(f"SET max_sort_length = {_SORT_BYTES}")
                cursor.execute("START TRANSACTION READ ONLY")
            yield connection

    def _describe(self, connection: Any) -> list[Column]:
        with connection.cursor() as cursor:
            cursor.execute(self._write_description())
            found = [(name, _NAMES.get(number, "text")) for name, number, *_ in cursor.description]
        return [
            Column(name, place, _KINDS.get(kind, Kind.TEXT), kind) for place, (name, kind) in enumerate(found)
        ]

    def _express(self, column: Column, is_key: bool) -> str:
        if column.type == "bit":
            return f"CAST({column.alias} AS UNSIGNED)"
        # All columns come as text, a FLOAT with six digits, and two numbers become one.
        return f"CAST({column.alias} AS DOUBLE)" if column.type == "float" else column.alias

    def _order(self, columns: Sequence[Column]) -> list[str]:
        texts = [f"CAST({column.alias} AS BINARY)" for column in columns if _is_text(column)]
        # Compared as texts, A, a, á and "a " are equal.
        order = [f"CAST({one.alias} AS BINARY)" if _is_text(one) else one.alias for one in columns]
        if texts:  # of which the server has compared the beginning
            whole = ", ".join(f"IFNULL(CONCAT(LENGTH({text}), ':', {text}), '-')" for text in texts)
            order.append(f"SHA2(CONCAT({whole}), 256)")
        return order

    def _stream(self, connection: Any, statement: str) -> Iterable[Sequence[pa.Array]]:
        from pymysql.cursors import SSCursor

        with connection.cursor(SSCursor) as cursor:
            cursor.execute(statement)
            while rows := cursor.fetchmany(ROWS):
                yield [_to_arrow(cells) for cells in zip(*rows, strict=True)]


def _to_arrow(cells: Sequence[Any]) -> pa.Array:
    """Return an Arrow array of texts, or of bytes where the column is binary."""
    is_binary = any(isinstance(cell, bytes) for cell in cells)
    return pa.array(cells, pa.binary() if is_binary else pa.string())


def _is_text(column: Column) -> bool:
    return column.kind in (Kind.TEXT, Kind.OTHER)
