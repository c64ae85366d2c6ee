"""What a definition may not say, each refused before there is a query."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from silodp_integrations.omop.query import write_query
from support.omop_tables import define
from support.refusals import refused

LAB = {
    "of": "measurement",
    "concepts": [5],
    "days": [-30, 0],
    "take": "last",
    "range": [0, 9],
    "units": {"0": 1},
}
COUNT = {"of": "condition", "concepts": [5], "days": [-30, 0], "take": "count", "range": [0, 9]}
CODED = {"of": "observation", "concepts": [5], "days": [-30, 0], "take": "last", "values": {"45": "yes"}}


def test_columns_that_are_right(tmp_path: Path) -> None:
    columns = {"lab": LAB, "count": COUNT, "coded": CODED, "age": {"of": "age"}}
    assert list(define(tmp_path, columns=columns).columns) == ["death", *columns]


@pytest.mark.parametrize(
    ("column", "field"),
    [
        ({**LAB, "of": "measurment"}, "of"),
        ({**LAB, "concepts": [0]}, "concepts.0"),
        ({**LAB, "concepts": [2**31]}, "concepts.0"),
        ({**LAB, "concepts": [True]}, "concepts.0"),
        ({**LAB, "concepts": ["5); DROP TABLE person; --"]}, "concepts.0"),
        ({**LAB, "concepts": [5.5]}, "concepts.0"),
        ({**LAB, "concepts": []}, "concepts"),
        ({**LAB, "days": [1, 0]}, "days"),
        ({**LAB, "days": [0]}, "days"),
        ({**LAB, "days": [0, 50_001]}, "days.1"),
        ({**LAB, "days": [0, "0 OR 1 = 1"]}, "days.1"),
        ({**LAB, "take": "median"}, "take"),
        ({**LAB, "anchor": "middle"}, "anchor"),
        ({**LAB, "units": {}}, "units"),
        ({**LAB, "units": {"-1": 1}}, "units.-1.[key]"),
        ({**LAB, "units": {"8 OR 1": 1}}, "units.8 OR 1.[key]"),
        ({**LAB, "units": {"8": float("inf")}}, "units.8."),
        ({**LAB, "operators": {"=": 1}}, "operators.=.[key]"),
        ({**LAB, "range": [9, 0]}, "range"),
        ({**LAB, "unit": 8}, "unit"),
        ({**LAB, "ongoing": True}, "ongoing"),
        ({**COUNT, "take": "last"}, "take"),
        ({**COUNT, "units": {"0": 1}}, "units"),
        ({**COUNT, "values": {"45": "yes"}}, "take"),
        ({**COUNT, "of": "observation", "operators": {"<": 1}}, "operators"),
        ({**LAB, "of": "observation", "operators": {"<": 1}}, "operators"),
        ({**CODED, "values": {"0": "none"}}, "values.0.[key]"),
        ({**CODED, "values": {"45": "a\nb"}}, "values"),
        ({**CODED, "values": {"45": ""}}, "values"),
        ({**CODED, "take": "mean"}, "take"),
        ({**CODED, "range": [0, 1]}, "range"),
        ({**CODED, "missing": 5}, "missing"),
        ({"of": "death", "concepts": [5], "days": [0, 1], "take": "any"}, "concepts"),
        ({"of": "death", "days": [0, 1]}, "take"),
        ({"of": "death", "take": "any"}, "days"),
        ({"of": "visit", "descendants": True, "days": [0, 1], "take": "any"}, "descendants"),
        ({"of": "age", "days": [0, 1]}, "days"),
        ({"of": "gender", "take": "any"}, "take"),
        ({"of": "race"}, "values"),
        ({"of": "length", "values": {"45": "yes"}, "range": [0, 9]}, "values"),
        ({"of": "length"}, "range"),
    ],
)
def test_columns_that_are_wrong(column: dict[str, Any], field: str, tmp_path: Path) -> None:
    with refused("data.omop_definition") as caught:
        define(tmp_path, columns={"x": column})
    assert str(caught.value.field).startswith(f"columns.x.{field}")


DAY, LATER = datetime.date(2015, 1, 1), datetime.date(2016, 1, 1)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"of": "visits"}, "of"),
        ({"of": "death"}, "of"),
        ({"of": "person"}, "on"),
        ({"of": "person", "on": DAY, "first": True}, "of"),
        ({"of": "visit", "on": DAY}, "on"),
        ({"of": "visit", "since": LATER, "until": DAY}, "until"),
        ({"of": "visit", "since": "2015-01-01' OR '1"}, "since"),
        ({"of": "visit", "since": datetime.datetime(2015, 1, 1, 12)}, "since"),
        ({"of": "visit", "concepts": [0]}, "concepts.0"),
        ({"of": "visit", "descendants": True}, "descendants"),
        ({"of": "visit", "observed": [-1, 0]}, "observed.0"),
    ],
)
def test_rows_that_are_wrong(row: dict[str, Any], field: str, tmp_path: Path) -> None:
    with refused("data.omop_definition") as caught:
        define(tmp_path, row=row, columns={"age": {"of": "age"}})
    assert caught.value.field == f"row.{field}"


def test_rows_without_an_end_or_a_concept_have_none_in_columns(tmp_path: Path) -> None:
    columns: dict[str, dict[str, Any]] = {
        "anchor": {**COUNT, "anchor": "end"},
        "of": {"of": "length", "range": [0, 9]},
    }
    person = {"of": "person", "on": DAY}
    for field, column in columns.items():
        for row in (person, {"of": "measurement", "concepts": [5]}):
            with refused("data.omop_definition") as caught:
                define(tmp_path, columns={"x": column}, row=row)
            assert caught.value.field == f"columns.x.{field}"
    with refused("data.omop_definition"):
        define(tmp_path, columns={"x": {"of": "concept", "values": {"5": "a"}}}, row=person)


@pytest.mark.parametrize(
    "person",
    [
        "person_id",
        "PERSON_ID",
        "provider_id",
        {"table": "links", "column": "person_id"},
        {"table": "links", "column": "Person_Id", "key": "patient"},
        {"table": "links", "column": "Patient", "key": "patient"},
    ],
)
def test_persons_are_never_named_by_numbers_of_a_hospital(person: Any, tmp_path: Path) -> None:
    for settings in ({"person": person}, {"silos": {"north": {"person": person}}}):
        with refused("data.omop_person"):
            define(tmp_path, columns={"age": {"of": "age"}}, **settings)


@pytest.mark.parametrize("text", ["a b", "a;b", 'a"', "a--", "", "1a", "a.b.c.d", "ä", "a" * 64, "a\n"])
def test_identifiers_are_checked(text: str, tmp_path: Path) -> None:
    for settings in (
        {"cdm_schema": text},
        {"person": text},
        {"person": {"table": text, "column": "a"}},
        {"person": {"table": "a", "column": text}},
        {"person": {"table": "a", "column": "b", "key": text}},
        {"silos": {"north": {"cdm_schema": text}}},
    ):
        with refused("data.omop_definition"):
            define(tmp_path, columns={"age": {"of": "age"}}, **settings)


@pytest.mark.parametrize(
    "name", ["", " x", "x\n-- y", "a\\b", "x" * 64, "ö" * 32, "Person", "AGE", "\u202ex", "o\u0308"]
)
def test_names_of_columns_are_checked(name: str, tmp_path: Path) -> None:
    with refused("data.omop_definition") as caught:
        define(tmp_path, columns={"age": {"of": "age"}, name: {"of": "gender"}})
    assert caught.value.field == f"columns.{name}"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"label": "deth"}, "label"),
        ({"columns": {}}, "columns"),
        ({"silos": {}}, "silos"),
        ({"settings": {"user": "x"}}, "settings.user"),
        ({"settings": {"silos": 1}}, "settings.silos"),
        ({"settings": {"readers": {}}}, "settings.readers"),
        ({"cdm": "x"}, "cdm"),
    ],
)
def test_definitions_that_are_wrong(settings: dict[str, Any], field: str, tmp_path: Path) -> None:
    with refused("data.omop_definition") as caught:
        define(tmp_path, **{"columns": {"age": {"of": "age"}}, **settings})
    assert str(caught.value.field).startswith(field)


def test_a_query_is_for_a_silo_of_the_definition(tmp_path: Path) -> None:
    silos = {"north": {"cdm_schema": "n"}, "south": {"person": {"table": "l.links", "column": "key"}}}
    definition = define(tmp_path, columns={"age": {"of": "age"}}, silos=silos, cdm_schema="cdm")
    north, south = (write_query(definition, name) for name in silos)
    assert "n.person" in north
    assert "cdm.person" in south
    assert "l.links" in south
    assert "l.links" not in north
    with refused("data.omop_definition"):
        write_query(definition, "east")
