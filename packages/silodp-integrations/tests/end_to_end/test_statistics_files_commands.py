"""Commands on silos with files of SPSS, SAS and Stata: a draft, a check of identifiers, a run, a prediction."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from silodp.data.federation import Federation
from silodp.data.tables.schema import Schema
from support.commands import Silodp, assert_sentence
from support.refusals import refused
from support.statistics_files import write_file

pyreadstat = pytest.importorskip("pyreadstat", reason="pip install 'silodp[statistics-files]'")
CONFIG = """
rounds = 2
seed = 1
[data]
source = "tables"
files = { north = "north.ENDING", south = "south.csv" }
[data.schema]
user = "person"
label = "ill"
classes = ["no", "yes"]
numeric = { age = [0, 100] }
categorical = { ward = ["a", "b"] }
[data.schema.silos.north.values]
ill = { 0 = "no", 1 = "yes" }
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.01
"""
FORMATS = {"sav": "N4", "dta": "%04.0f", "sas7bdat": "Z4", "xpt": "Z4."}
SETTINGS: dict[str, Any] = {
    "user": "person",
    "label": "ill",
    "classes": ["no", "yes"],
    "numeric": {"age": (0, 100)},
}


@pytest.fixture(params=FORMATS)
def ending(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the rows of rows.csv to north, with numbers for keys and codes for labels, and return its ending."""
    monkeypatch.chdir(tmp_path)
    ending: str = request.param
    coins = random.Random(3)
    persons, ages = [coins.randint(1, 20) for _ in range(80)], [coins.randint(18, 89) for _ in range(80)]
    wards, ill = [coins.choice("ab") for _ in range(80)], [coins.randint(0, 1) for _ in range(80)]
    columns = {
        "person": list(map(float, persons)),
        "age": list(map(float, ages)),
        "ward": wards,
        "ill": list(map(float, ill)),
    }
    labels = {} if ending in ("sas7bdat", "xpt") else {"variable_value_labels": {"ill": {0: "no", 1: "yes"}}}
    write_file(tmp_path / f"north.{ending}", columns, {"person": FORMATS[ending]}, **labels)
    rows = {
        "person": [f"{person:04}" for person in persons],
        "age": ages,
        "ward": wards,
        "ill": [("no", "yes")[one] for one in ill],
    }
    for name in ("rows.csv", "south.csv"):
        pd.DataFrame(rows).to_csv(name, index=False)
    Path("config.toml").write_text(CONFIG.replace("ENDING", ending))
    return ending


def test_a_federation_of_such_a_file_is_that_of_its_rows(ending: str) -> None:
    values = {"north": {"values": {"ill": {"0": "no", "1": "yes"}}}}
    schema = Schema(**SETTINGS, categorical={"ward": ["a", "b"]}, silos=values)
    ours = Federation.from_tables({"north": f"north.{ending}", "south": "south.csv"}, schema)
    theirs = Federation.from_tables(
        {"north": "rows.csv", "south": "south.csv"}, Schema(**SETTINGS, categorical={"ward": ["a", "b"]})
    )
    for one, other in zip(ours.silos, theirs.silos, strict=True):
        assert (one.x == other.x).all()
        assert (one.y == other.y).all()
        assert (one.user == other.user).all()
    assert ours.user_keys == theirs.user_keys


def test_names_of_codes_are_not_applied_and_queries_are_refused(ending: str) -> None:
    with refused("data.value"):  # cells stay 0 and 1
        Federation.from_tables({"north": f"north.{ending}"}, Schema(**SETTINGS))
    with refused("data.query"):
        Federation.from_tables(
            {"north": f"north.{ending}"}, Schema(**SETTINGS, silos={"north": {"query": "SELECT 1"}})
        )


def test_a_draft_shows_names_of_codes(ending: str, silodp: Silodp) -> None:
    done = silodp("data", "inspect", f"north.{ending}", "--user", "person", "--label", "ill", "--json")
    assert done.status == 0, done.err
    drafted = tomllib.loads(done.json["draft"])["data"]["schema"]
    assert (list(drafted["numeric"]), list(drafted["categorical"])) == (["age"], ["ward"])
    shows = '# "ill" = { "0" = "no", "1" = "yes" }' in done.json["draft"]
    assert shows == (ending in ("sav", "dta"))


def test_identifiers_of_such_a_file_are_checked(ending: str, silodp: Silodp) -> None:
    new = ("identity", "new", "--study", "s", "--population", "99", "--width", "4", "--out", "identity.toml")
    assert silodp(*new).status == 0
    done = silodp("identity", "check", "identity.toml", f"north.{ending}", "--column", "person", "--json")
    assert done.status == 0, done.err
    assert done.json["rows"] == 80


def test_a_silo_with_such_a_file_trains_and_predicts(ending: str, silodp: Silodp) -> None:
    done = silodp("run", "config.toml", "--out", "run")
    assert done.status == 0, done.err
    done = silodp(
        "predict", "run", f"north.{ending}", "--silo", "north", "--copy", "person", "--out", "out.csv"
    )
    assert done.status == 0, done.err
    expected = pd.read_csv("rows.csv", dtype=str)["person"].tolist()
    assert pd.read_csv("out.csv", dtype=str)["person"].tolist() == expected


def test_without_pyreadstat_a_sentence_says_how_to_install_it(
    ending: str, silodp: Silodp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyreadstat", None)
    done = silodp("data", "inspect", f"north.{ending}", "--user", "person", "--label", "ill", "--json")
    assert_sentence(done, code="data.no_reader")
    assert "silodp[statistics-files]" in done.err
