"""A small database of the Common Data Model for tests, and the table that a definition makes of it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from silodp_integrations.omop.definition import Definition, read_definition
from silodp_integrations.omop.query import write_query
from silodp_integrations.omop.tables import ANCESTOR_COLUMNS, EVENTS, PERIOD_COLUMNS, PERSON_COLUMNS

Rows = Sequence[Mapping[str, Any]]
Runner = tuple[Callable[..., None], Callable[[str | None], Any]]
TABLES = {
    "person": [*PERSON_COLUMNS, "person_source_value"],
    "observation_period": PERIOD_COLUMNS,
    "concept_ancestor": ANCESTOR_COLUMNS,
    **{events.name: events.list_columns() for events in EVENTS.values()},
}
PERSON = {"person_id": 1, "person_source_value": "007", "year_of_birth": 1950}
VISIT = {
    "visit_occurrence_id": 10,
    "person_id": 1,
    "visit_concept_id": 9201,
    "visit_start_date": "2015-06-10",
    "visit_end_date": "2015-06-20",
}
DEFINITION: dict[str, Any] = {
    "label": "death",
    "row": {"of": "visit", "concepts": [9201]},
    "columns": {"death": {"of": "death", "days": [0, 9999], "take": "any"}},
    "silos": {"north": {}},
}


def number_events(kind: str, *given: Mapping[str, Any], **common: Any) -> list[dict[str, Any]]:
    """Return rows of a table of events of person 1, with keys from 1 on; day, value and so on are short names."""
    events = EVENTS[kind]
    names = {
        "day": events.day, "time": events.time, "concept": events.concept, "end": events.end, "key": events.key,
        "value": "value_as_number", "answer": "value_as_concept_id", "unit": "unit_concept_id",
        "operator": "operator_concept_id", "person": "person_id",
    }  # fmt: skip
    return [
        {"person_id": 1, **{str(names[name]): value for name, value in {"key": key, **common, **row}.items()}}
        for key, row in enumerate(given, 1)
    ]


def make_cdm(run: Callable[..., None], **tables: Rows) -> None:
    """Make all tables, and fill those that are given."""
    statements = ["BEGIN"]  # so that the disk is waited for once
    for name, columns in TABLES.items():
        listed = ", ".join(f"{column} {_find_type(column)}" for column in columns)
        statements += [f"DROP TABLE IF EXISTS {name}", f"CREATE TABLE {name} ({listed})"]
        for row in tables.get(name, ()):
            cells = ", ".join("NULL" if v is None else f"'{v}'" for v in row.values())
            statements.append(f"INSERT INTO {name} ({', '.join(row)}) VALUES ({cells})")
    run(*statements, "COMMIT")


def _find_type(column: str) -> str:
    ends = {"_id": "BIGINT", "_date": "DATE", "_datetime": "TIMESTAMP", "_of_birth": "INTEGER"}
    ends["_as_number"] = "NUMERIC(30, 9)"
    return next((kind for end, kind in ends.items() if column.endswith(end)), "VARCHAR(50)")


def define(path: Path, **settings: Any) -> Definition:
    """Return a definition that differs from `DEFINITION` in some settings; columns are added, and a row is replaced."""
    import tomli_w

    table = {**DEFINITION, **settings}
    table["columns"] = {**DEFINITION["columns"], **settings.get("columns", {})}
    file = path / "omop.toml"
    file.write_text(tomli_w.dumps(table))
    assert tomllib.loads(file.read_text()) == table
    return read_definition(file)


def ask(database: Runner, definition: Definition) -> list[dict[str, Any]]:
    """Return the rows of the table of silo north, in the order of the source."""
    source = database[1](write_query(definition, "north"))
    names = source.list_columns()
    assert names == ["person", *definition.columns]
    found = source.read_columns(names, "person")
    cells = [
        values.tolist() if hasattr(values, "tolist") else values.to_pylist() for values in found.values()
    ]
    return [dict(zip(names, row, strict=True)) for row in zip(*cells, strict=True)]
