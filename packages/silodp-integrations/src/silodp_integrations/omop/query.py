"""The query of a definition, in SQL that DuckDB and PostgreSQL read alike.

Numbers, days, checked names and quoted texts enter it, and nothing else. Where a value must not count (an undeclared
unit), a CAST of a text to a number ends the query, with that text.
"""

from __future__ import annotations

from collections.abc import Sequence

from silodp_integrations.omop.definition import OTHER, PERSON, Column, Definition, Link
from silodp_integrations.omop.tables import EXACT, FIRST_OPEN_DAY, OPERATORS, TRAITS, Events

_HEAD = "-- Written by 'silodp omop query': change the definition, not this text."
# Completed years. Without a month the birthday is 1 July, without a day the 15th.
_AGE = """CAST(EXTRACT(YEAR FROM i.start_date) - p.year_of_birth
    - CASE WHEN EXTRACT(MONTH FROM i.start_date) * 100 + EXTRACT(DAY FROM i.start_date)
        < COALESCE(p.month_of_birth * 100 + COALESCE(p.day_of_birth, 15), 701) THEN 1 ELSE 0 END AS INTEGER)"""


def write_query(definition: Definition, silo: str) -> str:
    """Return the query whose result is a silo's table: the person, and the columns in their order.

    Args:
        definition: A definition that `read_definition` has checked.
        silo: The name of the silo.

    Raises:
        SilodpError: The definition has no such silo.
    """
    schema, person = definition.find_silo(silo)
    tables = [_write_rows(definition, schema)]
    joins = [f"LEFT JOIN {schema}person AS p ON p.person_id = i.person_id"]
    cells = [f"{_write_person(person)} AS {quote_name(PERSON)}"]
    needed = []
    for number, (name, column) in enumerate(definition.columns.items(), 1):
        if column.events is None:
            cell = _write_plain(column)
        else:
            tables.append(_write_events(name, column, column.events, f"c{number}", schema))
            # A key that the hospital gave twice must not lead from one person's row to another's events.
            joins.append(
                f"LEFT JOIN c{number} ON c{number}.row_id = i.row_id AND c{number}.person_id = i.person_id"
            )
            cell = _write_cell(column, f"c{number}.value")
        cells.append(f"{cell} AS {quote_name(name)}")
        needed += [f"{cell} IS NOT NULL"] if column.needed else []
    where = [f"WHERE {_write_all(needed, 2)}"] if needed else []
    head = f"{_HEAD}\nWITH " + ",\n".join(tables)
    return "\n".join([head, "SELECT\n  " + ",\n  ".join(cells), "FROM indexed AS i", *joins, *where, ""])


def quote_name(name: str) -> str:
    """Return a checked name of a column as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """Return a checked text as SQL has it."""
    return "'" + text.replace("'", "''") + "'"


def _write_all(conditions: Sequence[str], indent: int) -> str:
    return f"\n{' ' * indent}AND ".join(conditions)


def _write_person(person: str | Link) -> str:
    if isinstance(person, str):
        return f"p.{person}"
    # As a value, and not by a join: two pseudonyms of one person end the query.
    return f"(SELECT DISTINCT l.{person.column} FROM {person.table} AS l WHERE l.{person.key} = i.person_id)"


def _write_concepts(concept: str, concepts: Sequence[int], descendants: bool, schema: str) -> str:
    listed = ", ".join(map(str, concepts))
    if not descendants:
        return f"{concept} IN ({listed})"
    asked = len(set(concepts))
    # Without its vocabulary, a hospital would have nothing below the concepts, in silence.
    table = f"{schema}concept_ancestor WHERE ancestor_concept_id IN ({listed})"
    return f"""{concept} IN (
        SELECT descendant_concept_id FROM {table}
        UNION ALL SELECT ancestor_concept_id FROM {table}
        UNION ALL SELECT CAST('concept_ancestor has ' || known || ' of {asked} concepts ({listed})' AS INTEGER)
        FROM (SELECT COUNT(DISTINCT ancestor_concept_id) AS known FROM {table}) AS found WHERE known < {asked}
      )"""


def _write_rows(definition: Definition, schema: str) -> str:
    row = definition.row
    events = row.events
    if events is None:
        inner = f"""    SELECT
      e.person_id AS row_id, e.person_id, CAST(NULL AS INTEGER) AS concept_id, DATE '{row.on}' AS start_date,
      CAST(NULL AS DATE) AS end_date
    FROM {schema}person AS e"""
    else:
        end = f"CASE WHEN e.{events.end} < DATE '{FIRST_OPEN_DAY}' THEN e.{events.end} END"
        asked = _write_concepts(f"e.{events.concept}", row.concepts, row.descendants, schema)
        inner = f"""    SELECT{" DISTINCT ON (e.person_id)" if row.first else ""}
      e.{events.key} AS row_id, e.person_id, e.{events.concept} AS concept_id, e.{events.day} AS start_date,
      {end if events.end else "CAST(NULL AS DATE)"} AS end_date
    FROM {schema}{events.name} AS e"""
        inner += f"\n    WHERE {asked}" if row.concepts else ""
        inner += (
            f"\n    ORDER BY e.person_id, {_write_order(events.day, events.time, events.key, take='first')}"
            if row.first
            else ""
        )
    conditions = [f"e.start_date >= DATE '{row.since}'"] if row.since else []
    conditions += [f"e.start_date <= DATE '{row.until}'"] if row.until else []
    if row.observed:
        before, after = row.observed
        conditions.append(f"""EXISTS (
      SELECT 1 FROM {schema}observation_period AS o WHERE o.person_id = e.person_id
      AND o.observation_period_start_date <= e.start_date - {before}
      AND o.observation_period_end_date >= e.start_date + {after}
    )""")
    where = f"\n  WHERE {_write_all(conditions, 4)}" if conditions else ""
    return f"indexed AS ( -- rows: {row.of}\n  SELECT * FROM (\n{inner}\n  ) AS e{where}\n)"


def _write_events(name: str, column: Column, events: Events, table: str, schema: str) -> str:
    first, last = (
        f"i.{column.anchor}_date {'-' if day < 0 else '+'} {abs(day)}" for day in column.days or ()
    )
    begins = f"e.{events.day} >= {first}"
    if column.ongoing:
        begins = f"(e.{events.end} >= {first} OR e.{events.end} IS NULL)"
    conditions = [begins, f"e.{events.day} <= {last}"]
    if events.concept and column.concepts:
        asked = _write_concepts(f"e.{events.concept}", column.concepts, column.descendants, schema)
        conditions.append(asked)
    if column.values and not column.answers:
        conditions.append(f"e.value_as_concept_id IN ({', '.join(map(str, column.values))})")
    cells = ["i.row_id", "i.person_id"]
    if column.take not in ("any", "count"):
        conditions.append(f"e.value_as_{'concept_id' if column.values else 'number'} IS NOT NULL")
        value = (
            _write_answer("e.value_as_concept_id", column) if column.values else _write_number(name, column)
        )
        cells += [
            f"e.{events.day} AS day",
            f"e.{events.time} AS time",
            f"e.{events.key} AS key",
            f"{value} AS value",
        ]
    return f"""{table} AS ( -- {name}
  SELECT e.row_id, e.person_id, {_write_aggregate(column)} AS value FROM (
    SELECT {", ".join(cells)}
    FROM indexed AS i JOIN {schema}{events.name} AS e ON e.person_id = i.person_id
    WHERE {_write_all(conditions, 6)}
  ) AS e GROUP BY e.row_id, e.person_id
)"""


def _write_aggregate(column: Column) -> str:
    match column.take:
        case "any":
            return "1"
        case "count":
            return "COUNT(*)"
        case "last" | "first":
            return f"(ARRAY_AGG(e.value ORDER BY {_write_order('day', 'time', 'key', take=column.take)}))[1]"
        case "mean":
            # A sum of floating-point numbers depends on their order.
            return "AVG(e.value ORDER BY e.value)"
        case _:
            return f"{str(column.take).upper()}(e.value)"


def _write_order(*columns: str, take: str) -> str:
    # The keys of a table are all different, so that no order is left to chance.
    return ", ".join(f"e.{column} {'DESC' if take == 'last' else 'ASC'} NULLS LAST" for column in columns)


def _write_number(name: str, column: Column) -> str:
    """Return the number in the unit of the column; an undeclared unit or operator ends the query."""
    cases, limit = [], ""
    if column.events and column.events.has_operators:
        factors = {OPERATORS[sign]: _write_float(factor) for sign, factor in column.operators.items()}
        known = ", ".join(map(str, [*EXACT, *factors]))
        stop = _write_stop(name, "operator_concept_id")
        cases.append(f"WHEN e.operator_concept_id NOT IN ({known}) THEN {stop}")
        limit = " ".join(f"WHEN {operator} THEN {factor}" for operator, factor in factors.items())
    for unit, given in column.units.items():
        factor, summand = given if isinstance(given, list) else (given, 0)
        value = "CAST(e.value_as_number AS DOUBLE PRECISION)"
        value += f" * {_write_float(factor)}" if factor != 1 else ""
        value += f" + {_write_float(summand)}" if summand else ""
        cases.append(f"WHEN COALESCE(e.unit_concept_id, 0) = {unit} THEN {value}")
    listed = "\n        ".join([*cases, f"ELSE {_write_stop(name, 'unit_concept_id')}"])
    found = f"CASE\n        {listed}\n      END"
    return f"{found} * CASE e.operator_concept_id {limit} ELSE 1 END" if limit else found


def _write_float(value: float) -> str:
    return f"({float(value)!r})"


def _write_stop(name: str, setting: str) -> str:
    told = quote_text(f"{name}: {setting} ")
    return f"CAST({told} || COALESCE(e.{setting}, 0) || ' is not declared' AS DOUBLE PRECISION)"


def _write_answer(concept: str, column: Column) -> str:
    cases = " ".join(f"WHEN {key} THEN {quote_text(text)}" for key, text in column.answers.items())
    return f"CASE {concept} {cases} ELSE {quote_text(OTHER)} END"


def _write_cell(column: Column, value: str) -> str:
    if column.take not in ("any", "count"):
        return value
    found = f"COALESCE({value}, 0)"
    # Whether something happened after an end that is open is not known.
    return found if column.anchor == "start" else f"CASE WHEN i.end_date IS NOT NULL THEN {found} END"


def _write_plain(column: Column) -> str:
    match column.of:
        case "age":
            return _AGE
        case "length":
            return "(i.end_date - i.start_date)"
        case "concept":
            return _write_answer("i.concept_id", column)
        case _:
            return _write_answer(f"p.{TRAITS[column.of]}", column)
