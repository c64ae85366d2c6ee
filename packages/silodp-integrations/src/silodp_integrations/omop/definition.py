"""The definition of a table: what a row is, and what its columns are. It is public, and holds no record."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from silodp.config.toml_values import read_toml
from silodp.errors import SilodpError
from silodp.text import suggest_name
from silodp_integrations.omop.tables import EVENTS, GENDERS, TRAITS, Events

PERSON = "person"
"""The name of the column that names the person."""
OTHER, MISSING = "other", "missing"
"""The categories of a concept that is not wanted or does not match (0), and of no event in the window."""
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_NAME = 63
"""Bytes of a name, after which PostgreSQL cuts it without an error."""
_MAX_DAYS = 50_000
_WRITTEN = {"user", "label", "classes", "kind", "label_typical", "numeric", "categorical", "silos"}
_NUMBERS = ("last", "first", "min", "max", "mean")


def _read_concept(given: Any) -> Any:
    """Return a key of a TOML table, which is text, as a number."""
    is_digits = isinstance(given, str) and given.isascii() and given.isdigit()
    return int(given) if is_digits else given


Concept = Annotated[int, Field(ge=1, lt=2**31)]
"""A concept; 0, "no matching concept", is none that can be asked for."""
CodedConcept = Annotated[Concept, BeforeValidator(_read_concept)]
Unit = Annotated[int, BeforeValidator(_read_concept), Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Window = Annotated[
    list[Annotated[int, Field(ge=-_MAX_DAYS, le=_MAX_DAYS)]], Field(min_length=2, max_length=2)
]
Days = Annotated[list[Annotated[int, Field(ge=0, le=_MAX_DAYS)]], Field(min_length=2, max_length=2)]
Pair = Annotated[list[Number], Field(min_length=2, max_length=2)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Link(_Settings):
    """A table from person_id to a pseudonym that all silos share.

    Attributes:
        table: Its name, with its schema where that is another one than that of the search path.
        column: The column of the pseudonym.
        key: The column of person_id.
    """

    table: str
    column: str
    key: str = "person_id"


class Silo(_Settings):
    """A silo whose table the query gives.

    Attributes:
        cdm_schema: The schema of the database in which the tables lie; None: that of the definition.
        person: What names a person; None: that of the definition.
    """

    cdm_schema: str | None = None
    person: str | Link | None = None


class _Asked(_Settings):
    """What is asked for of one table.

    Attributes:
        of: The name of the table in `EVENTS`, or what a subclass says.
        concepts: The concepts of the events; [] takes all.
        descendants: Whether concepts below them in concept_ancestor count as well.
    """

    of: str
    concepts: list[Concept] = []
    descendants: bool = False

    @property
    def events(self) -> Events | None:
        """The table of the events; None where it is of another origin."""
        return EVENTS.get(self.of)


class Row(_Asked):
    """What a row is: an event, or with of = "person" a person on a day.

    Attributes:
        on: The day of a person's row.
        first: Only the first such event of each person, and only where it lies within the days below.
        since, until: The first and the last day on which an event may begin.
        observed: Days before and after the first day that one observation period of the person must cover.
    """

    on: date | None = None
    first: bool = False
    since: date | None = None
    until: date | None = None
    observed: Days | None = None

    def find_fault(self) -> tuple[str, str] | None:
        """Return the first setting that does not fit the others, and what to do."""
        known = ["person", *(name for name, events in EVENTS.items() if events.concept)]
        if self.of not in known:
            return "of", f"is {self.of!r}; {_advise(self.of, known)}"
        if self.of == "person":
            if self.on is None:
                return "on", "is missing: say on which day the rows of persons are"
            if self.concepts or self.first or self.since or self.until:
                return "of", "is 'person', which has no concepts, first, since or until; leave them out"
        elif self.on is not None:
            return "on", "is the day of rows of persons; for events give since and until"
        if self.since and self.until and self.since > self.until:
            return "until", "lies before since; exchange them"
        return _find_descendants_fault(self)


class Column(_Asked):
    """One column of the table; of may also be "age", "gender", "race" or "ethnicity" of the person, "length" in days or
    "concept" of the row's event.

    Attributes:
        days: The first and the last day of the window, counted from the row's first day; both belong to it.
        anchor: "end" counts from the row's last day instead; where that is open, the cell is missing.
        take: What becomes of the events of a window. Of one day, the latest time and then the highest key is the last.
        units: unit_concept_id → factor, or [factor, summand], to the unit of the column; 0 stands for no unit.
        operators: operator → factor by which a limit of detection counts; a limit that is not declared is refused.
        values: concept of the answer → category; 0 and all others are "other". With take = "any" or "count": the
            answers of the events that count.
        ongoing: Whether events count that have begun before the window and not ended before it.
        needed: Whether rows without this cell are left out.
        range, typical, missing: As in data.schema.numeric.
    """

    days: Window | None = None
    anchor: Literal["start", "end"] = "start"
    take: Literal["last", "first", "min", "max", "mean", "count", "any"] | None = None
    units: dict[Unit, Number | Pair] = {}
    operators: dict[Literal["<", "<=", ">", ">="], Number] = {}
    values: dict[CodedConcept, str] = {}
    ongoing: bool = False
    needed: bool = False
    range: Pair | None = None
    typical: Pair | None = None
    missing: Number | Literal["indicator"] | None = None

    @property
    def answers(self) -> dict[int, str]:
        """Its categories without "other", by their concepts; {} for numbers."""
        if self.of == "gender" and not self.values:
            return GENDERS
        return {} if self.take in ("any", "count") else self.values

    @property
    def limits(self) -> list[float] | None:
        """Its range, where it is declared or follows from what it is."""
        return self.range or ([0, 1] if self.take == "any" else [0, 120] if self.of == "age" else None)

    def find_fault(self, row: Row) -> tuple[str, str] | None:
        """Return the first setting that does not fit the others, and what to do."""
        known = [*EVENTS, "age", *TRAITS, "length", "concept"]
        if self.of not in known:
            return "of", f"is {self.of!r}; {_advise(self.of, known)}"
        fault = self._find_event_fault(row, self.events) if self.events else self._find_plain_fault(row)
        if fault or (fault := _find_descendants_fault(self)):
            return fault
        for text in self.values.values():
            if reason := _find_name_fault(text):
                return "values", f"has the category {text!r}, which {reason}"
        if self.answers:
            given = [name for name in ("range", "typical", "missing") if getattr(self, name) is not None]
            return (
                (given[0], "is for numbers, and the column has categories; leave it out") if given else None
            )
        if self.limits is None or not self.limits[0] < self.limits[1]:
            return "range", "must be declared as [low, high], low < high, from public knowledge"
        return None

    def _find_event_fault(self, row: Row, events: Events) -> tuple[str, str] | None:
        is_number = self.take in _NUMBERS and not self.values
        if not self.concepts and self.of not in ("death", "visit"):
            return "concepts", "lists no concept; name at least one"
        if self.concepts and events.concept is None:
            return "concepts", f"has no meaning for {self.of}; leave it out"
        if self.take is None or self.days is None:
            return (
                "take" if self.take is None else "days"
            ), "is missing; say which events of which days count"
        if self.days[0] > self.days[1]:
            return "days", "has its last day before its first; exchange them"
        if self.anchor == "end" and not (row.events and row.events.end):
            return "anchor", f"is 'end', which a row of {row.of} does not have; count from its start"
        if (self.take in _NUMBERS or self.values) and not events.has_values:
            return "take", f"needs values, which {self.of} does not have; take 'any' or 'count'"
        if self.values and self.take in ("min", "max", "mean"):
            return "take", "is for numbers, and values are categories; take 'last' or 'first'"
        if is_number and not self.units:
            return "units", "is missing: numbers of two units must not become one; list each, 0 for no unit"
        if not is_number and (self.units or self.operators):
            return ("units" if self.units else "operators"), "is for numbers, and none is taken; leave it out"
        if self.operators and not events.has_operators:
            return "operators", f"has no meaning for {self.of}; leave it out"
        if self.ongoing and events.end is None:
            return "ongoing", "is for visits, conditions and drugs, which have an end; leave it out"
        return None

    def _find_plain_fault(self, row: Row) -> tuple[str, str] | None:
        fixed = {"of", "range", "typical", "missing", "needed", "values"}
        for name in type(self).model_fields:
            if name not in fixed and name in self.model_fields_set:
                return name, f"has no meaning for {self.of}; leave it out"
        if self.of == "length" and not (row.events and row.events.end):
            return "of", f"is 'length', which a row of {row.of} does not have; leave the column out"
        if self.of == "concept" and not row.events:
            return "of", "is 'concept', which a row of persons does not have; leave the column out"
        if bool(self.values) != (self.of in ("race", "ethnicity", "concept")) and self.of != "gender":
            return "values", "is for concepts: give it for race, ethnicity and concept, and for nothing else"
        return None


class Definition(_Settings):
    """A table.

    Attributes:
        row: What a row is.
        columns: Its columns.
        label: The name of the column that is predicted.
        silos: The silos whose table is the result of a query.
        cdm_schema: The schema of the database in which the tables lie; None: that of the search path.
        person: What names a person: a column of the table `person`, or a table from person_id to a pseudonym.
        settings: Other settings of data.schema, for example test_share.
    """

    row: Row
    columns: dict[str, Column]
    label: str
    silos: Annotated[dict[str, Silo], Field(min_length=1)]
    cdm_schema: str | None = None
    person: str | Link = "person_source_value"
    settings: dict[str, str | int | float | bool] = {}

    def find_silo(self, name: str) -> tuple[str, str | Link]:
        """Return the prefix of a silo's tables, and what names its persons.

        Raises:
            SilodpError: There is no such silo.
        """
        if name not in self.silos:
            raise refuse("silos", f"has no silo {name!r}; {_advise(name, list(self.silos))}")
        silo = self.silos[name]
        schema = silo.cdm_schema or self.cdm_schema
        return (f"{schema}." if schema else ""), silo.person or self.person

    def check(self) -> None:
        """Raise where settings do not fit each other, or names cannot be written into a query."""
        seen = {PERSON}
        for name in self.columns:
            where = f"columns.{name}"
            if name.casefold() in seen:
                raise refuse(where, "is declared twice: databases do not tell upper from lower case, and "
                                    f"{PERSON!r} is the column of persons; rename it")  # fmt: skip
            seen.add(name.casefold())
            if fault := _find_name_fault(name):
                raise refuse(where, f"{fault}; rename it")
        for where, fault in self._list_faults():
            raise refuse(where, fault)
        if self.label not in self.columns:
            remedy = _advise(self.label, list(self.columns))
            raise refuse("label", f"is {self.label!r}, which is no column; {remedy}")
        if len(self.columns) < 2:
            raise refuse("columns", "has no column besides the label; add one")
        if twice := sorted(_WRITTEN & self.settings.keys()):
            raise refuse(f"settings.{twice[0]}", "is what the definition says; leave it out")
        _check_schema("cdm_schema", self.cdm_schema)
        _check_person("person", self.person)
        for name, silo in self.silos.items():
            _check_schema(f"silos.{name}.cdm_schema", silo.cdm_schema)
            _check_person(f"silos.{name}.person", silo.person)

    def _list_faults(self) -> Iterator[tuple[str, str]]:
        if fault := self.row.find_fault():
            yield f"row.{fault[0]}", fault[1]
        for name, column in self.columns.items():
            if fault := column.find_fault(self.row):
                yield f"columns.{name}.{fault[0]}", fault[1]


def read_definition(path: Path) -> Definition:
    """Read a definition.

    Raises:
        SilodpError: It is no TOML file, or a setting is unknown, wrong or does not fit the others.
    """
    table = read_toml(path)
    try:
        found = Definition.model_validate(table)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False)
        field = ".".join(map(str, first["loc"]))
        raise refuse(field, f"is wrong: {first['msg']}; correct it") from None
    found.check()
    return found


def refuse(field: str, reason: str, code: str = "data.omop_definition") -> SilodpError:
    """Return, for the caller to raise, the error about a setting of a definition."""
    return SilodpError(f"the definition's {field} {reason}.", code=code, field=field)


def _advise(name: str, known: list[str]) -> str:
    return suggest_name(name, known) or f"known are {', '.join(known)}"


def _find_descendants_fault(asked: _Asked) -> tuple[str, str] | None:
    if asked.descendants and not asked.concepts:
        return "descendants", "is true without concepts; name the concepts"
    return None


def _find_name_fault(text: str) -> str | None:
    """Return why a text cannot stand in a query, its comments and the header of a table; None where it can."""
    if not text.isprintable() or "\\" in text:
        return "has characters that no query should show"
    if not text or text != unicodedata.normalize("NFC", text.strip()):
        return "is empty, begins or ends with a space, or is not in Unicode's form NFC"
    return f"is longer than {_MAX_NAME} bytes" if len(text.encode()) > _MAX_NAME else None


def _check_identifiers(where: str, text: str, parts: int = 1) -> None:
    found = text.split(".")
    if len(found) > parts or not all(
        _IDENTIFIER.fullmatch(part) and len(part) <= _MAX_NAME for part in found
    ):
        raise refuse(where, f"is {text!r}; give a name of letters, digits and _")


def _check_schema(where: str, schema: str | None) -> None:
    if schema is not None:
        _check_identifiers(where, schema, 2)


def _check_person(where: str, person: str | Link | None) -> None:
    """Check what names persons; person_id is counted from 1 in every hospital, where it is another person."""
    if isinstance(person, Link):
        _check_identifiers(f"{where}.table", person.table, 3)
        _check_identifiers(f"{where}.key", person.key)
        _check_identifiers(f"{where}.column", person.column)
        is_local = person.column.casefold() in ("person_id", person.key.casefold())
    elif person is not None:
        _check_identifiers(where, person)
        is_local = person.casefold().endswith("_id")
    if person is not None and is_local:
        raise refuse(
            where,
            "names persons by a number that each hospital counts anew, so that strangers become one person; take "
            "person_source_value, or a table from person_id to a pseudonym that all silos share",
            "data.omop_person",
        )
