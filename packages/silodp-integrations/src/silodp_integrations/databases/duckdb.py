"""DuckDB files by DuckDB itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa

from silodp_integrations.databases._database import BATCH, Column, Database
from silodp_integrations.databases._values import Kind

_KINDS = {
    **dict.fromkeys(("VARCHAR", "UUID"), Kind.TEXT),
    **dict.fromkeys(
        ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT"),
        Kind.INTEGER,
    ),
    **dict.fromkeys(("HUGEINT", "UHUGEINT", "DECIMAL", "BIGNUM"), Kind.DECIMAL),
    **dict.fromkeys(("FLOAT", "DOUBLE"), Kind.FLOAT),
    "BOOLEAN": Kind.BOOLEAN,
    "DATE": Kind.DATE,
    **dict.fromkeys(("TIMESTAMP", "TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP_NS"), Kind.TIME),
    "TIMESTAMP WITH TIME ZONE": Kind.INSTANT,
    "ENUM": Kind.TEXT,
}
_AS_TEXT = ("HUGEINT", "UHUGEINT", "BIGNUM", "TIMESTAMP_NS")
"""Types of which Arrow holds too few digits, or has no infinity beyond the year 9999."""
_CONFIG: dict[str, Any] = {
    # A query reads this file alone, no other one and no network, and cannot change that.
    "enable_external_access": "false",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "lock_configuration": "true",
}


class DuckDB(Database):
    """The result of a query to a DuckDB file."""

    driver, extra = "duckdb", "duckdb"

    @contextmanager
    def _connect(self) -> Iterator[Any]:
        import duckdb

        with closing(duckdb.connect(str(self.path), read_only=True, config=_CONFIG)) as connection:
            yield connection

    def _describe(self, connection: Any) -> list[Column]:
        import duckdb

        found = connection.extract_statements(self.query)
        if len(found) != 1 or found[0].type != duckdb.StatementType.SELECT:
            raise self.refuse("the query is no single SELECT; write one", "data.query", "data.schema.silos")
        # Names as they are written: a second column of one name would be renamed within our statement.
        described = connection.execute(f"DESCRIBE {self.query}").fetchall()
        return [
            Column(name, place, _KINDS.get(type_.partition("(")[0], Kind.OTHER), type_)
            for place, (name, type_, *_) in enumerate(described)
        ]

    def _express(self, column: Column, is_key: bool) -> str:
        is_text = is_key or column.kind in (Kind.TEXT, Kind.OTHER) or column.type in _AS_TEXT
        return f"CAST({column.alias} AS VARCHAR)" if is_text else column.alias

    def _order(self, columns: Sequence[Column]) -> list[str]:
        # A column may be declared to be compared without case.
        texts = (Kind.TEXT, Kind.OTHER)
        bare = [
            f"encode(CAST({one.alias} AS VARCHAR))" if one.kind in texts else one.alias for one in columns
        ]
        return [f"{one} ASC NULLS FIRST" for one in bare]

    def _stream(self, connection: Any, statement: str) -> Iterable[Sequence[pa.Array]]:
        for batch in connection.sql(statement).to_arrow_reader(BATCH):
            yield batch.columns
