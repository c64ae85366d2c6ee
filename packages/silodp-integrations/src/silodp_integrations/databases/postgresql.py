"""PostgreSQL by ADBC, which gives Arrow columns in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa

from silodp_integrations.databases._database import Column
from silodp_integrations.databases._values import Kind
from silodp_integrations.databases.connection import Server

_KINDS = {
    **dict.fromkeys(("text", "varchar", "bpchar", "name", "citext", "uuid", "char"), Kind.TEXT),
    **dict.fromkeys(("int2", "int4", "int8"), Kind.INTEGER),
    **dict.fromkeys(("float4", "float8"), Kind.FLOAT),
    "numeric": Kind.DECIMAL,
    "bool": Kind.BOOLEAN,
    "date": Kind.DATE,
    "timestamp": Kind.TIME,
    "timestamptz": Kind.INSTANT,
}
# The driver adds the years from 1970 to 2000 to 'infinity', which then is a year that cannot be: what is outside of the
# years 1 to 9999 becomes the day beside them.
_WITHIN = (
    "CASE WHEN {name} > '9999-12-31 23:59:59.999999+00' THEN '10000-01-01 00:00:00+00'::{type} "
    "WHEN {name} < '0001-01-01 00:00:00+00' THEN '0001-12-31 00:00:00+00 BC'::{type} ELSE {name} END"
)
_OPTIONS = "-c default_transaction_read_only=on -c TimeZone=UTC -c client_encoding=UTF8"


class PostgreSQL(Server):
    """The result of a query to a PostgreSQL server."""

    driver, extra = "adbc_driver_postgresql", "postgresql"
    port = 5432

    @contextmanager
    def _connect(self) -> Iterator[Any]:
        from adbc_driver_postgresql import dbapi

        settings = self.settings
        parts = {
            "host": settings.host,
            "port": settings.port or self.port,
            "dbname": settings.database,
            "user": settings.user,
            "password": self.password,
            "sslmode": {"verify": "verify-full", "require": "require", "off": "disable"}[settings.find_tls()],
            # Without a file libpq would look in the home of the user, not among the authorities of the system.
            "sslrootcert": self.find_authority() or ("system" if settings.find_tls() == "verify" else None),
            "options": _OPTIONS,
            "application_name": "silodp",
            "connect_timeout": 30,
        }
        given = {name: str(value) for name, value in parts.items() if value is not None}
        info = " ".join(f"{name}={_quote(value)}" for name, value in given.items())
        with self._reach():
            connection = dbapi.connect(info)
        with closing(connection):
            yield connection

    def _describe(self, connection: Any) -> list[Column]:
        with connection.cursor() as cursor:
            cursor.execute(self._write_description())
            schema = cursor.fetch_record_batch().schema
        types = [(field.metadata or {}).get(b"POSTGRESQL:type", b"").decode() for field in schema]
        return [
            Column(name, place, _KINDS.get(kind, Kind.OTHER), kind)
            for place, (name, kind) in enumerate(zip(schema.names, types, strict=True))
        ]

    def _express(self, column: Column, is_key: bool) -> str:
        if is_key or column.kind in (Kind.TEXT, Kind.OTHER, Kind.DECIMAL):
            return f"{column.alias}::text"
        if column.kind in (Kind.DATE, Kind.TIME, Kind.INSTANT):
            return _WITHIN.format(name=column.alias, type=column.type)
        return column.alias

    def _order(self, columns: Sequence[Column]) -> list[str]:
        # A collation of the database may take two texts for equal, and json has no order.
        texts = (Kind.TEXT, Kind.OTHER)
        return [
            f'{one.alias}::text COLLATE "C" NULLS FIRST' if one.kind in texts else f"{one.alias} NULLS FIRST"
            for one in columns
        ]

    def _stream(self, connection: Any, statement: str) -> Iterable[Sequence[pa.Array]]:
        with connection.cursor() as cursor:
            cursor.execute(statement)
            for batch in cursor.fetch_record_batch():
                yield batch.columns


def _quote(value: str) -> str:
    """Return a value of a connection string of libpq (section 34.1.1.1 of its manual)."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
