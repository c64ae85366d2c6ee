"""The part of a configuration that a definition stands for, and the commands."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from silodp.data.tables.schema import Schema
from silodp_integrations.omop.config import write_config
from silodp_integrations.omop.query import write_query
from support.commands import Silodp, assert_sentence
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
COLUMNS: dict[str, Any] = {
    "age": {"of": "age"},
    "sex": {"of": "gender"},
    "a lab": {**LAB, "typical": [3, 1]},
    "needed": {**LAB, "needed": True},
    "filled": {**LAB, "missing": 2},
    "count": {"of": "visit", "days": [0, 1], "take": "count", "range": [0, 9]},
    "coded": {
        **{"of": "observation", "concepts": [5], "days": [0, 1], "take": "last"},
        "values": {"45": "yes", "46": "it's '''", "47": "yes"},
    },
    "stay": {"of": "length", "range": [0, 9]},
}


def test_the_part_is_a_schema(tmp_path: Path) -> None:
    silos: dict[str, Any] = {"north": {}, "a.b": {"cdm_schema": "x"}}
    definition = define(tmp_path, columns=COLUMNS, silos=silos, settings={"test_share": 0.2})
    schema = tomllib.loads(write_config(definition))["data"]["schema"]
    assert schema == {
        "user": "person",
        "label": "death",
        "classes": [0, 1],
        "test_share": 0.2,
        "numeric": {
            "age": {"range": [0, 120]},
            "a lab": {"range": [0, 9], "typical": [3, 1], "missing": "indicator"},
            "needed": {"range": [0, 9]},
            "filled": {"range": [0, 9], "missing": 2},
            "count": {"range": [0, 9]},
            "stay": {"range": [0, 9], "missing": "indicator"},
        },
        "categorical": {
            "sex": {"categories": ["male", "female", "other"]},
            "coded": {"categories": ["yes", "it's '''", "other", "missing"], "missing": "missing"},
        },
        "silos": {name: {"query": write_query(definition, name)} for name in silos},
    }
    Schema(**schema)


def test_labels_of_each_kind(tmp_path: Path) -> None:
    for label, expected in (
        ("death", {"classes": [0, 1]}),
        ("sex", {"classes": ["male", "female", "other"]}),
        ("coded", {"classes": ["yes", "it's '''", "other"]}),
        ("a lab", {"kind": "real", "label_typical": [3, 1]}),
        ("needed", {"kind": "real"}),
    ):
        text = write_config(define(tmp_path, columns=COLUMNS, label=label))
        schema = tomllib.loads(text)["data"]["schema"]
        found = {name: schema.get(name) for name in ("classes", "kind", "label_typical") if name in schema}
        assert (schema["label"], found) == (label, expected)
        assert label not in {**schema["numeric"], **schema["categorical"]}
        Schema(**schema)


def test_the_rest_of_a_configuration_stays_as_it_is(tmp_path: Path) -> None:
    definition = define(tmp_path, columns=COLUMNS)
    base = 'rounds = 5  # few\n[data]\nsource = "tables"\n'
    text = write_config(definition, base)
    assert text.startswith(base)
    assert tomllib.loads(text)["data"]["source"] == "tables"
    for wrong in (
        '[data.schema]\nuser = "x"',
        'data = { source = "tables" }',
        "[data.schema.numeric]\nage = [0, 1]",
    ):
        with refused("argument.conflict") as caught:
            write_config(definition, wrong)
        assert caught.value.field == "data.schema"


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silodp: Silodp) -> None:
    monkeypatch.chdir(tmp_path)
    definition = define(tmp_path, columns=COLUMNS)
    expected = write_config(definition)
    done = silodp("omop", "query", "omop.toml")
    assert (done.status, done.out) == (0, expected)
    assert silodp("omop", "query", "omop.toml", "--json").json == {"config": expected}
    Path("rest.toml").write_text("rounds = 5\n")
    done = silodp("omop", "query", "omop.toml", "--config", "rest.toml", "--out", "whole.toml", "--json")
    assert done.json == {"path": "whole.toml"}
    assert Path("whole.toml").read_text() == write_config(definition, "rounds = 5\n")
    again = silodp("omop", "query", "omop.toml", "--out", "whole.toml", "--json")
    assert_sentence(again, code="run.exists")
    Path("omop.toml").write_text(Path("omop.toml").read_text().replace('"measurement"', '"lab"'))
    assert_sentence(silodp("omop", "query", "omop.toml", "--json"), code="data.omop_definition")
