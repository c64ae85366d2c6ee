"""Commands on a silo with a database: a draft of its configuration, a check of its identifiers, a run, a prediction."""

from __future__ import annotations

import random
import sqlite3
import tomllib
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest

from silodp.data.federation import Federation
from silodp.data.tables.schema import Schema
from support.commands import Silodp, assert_sentence
from support.refusals import refused

QUERY = "SELECT nr AS person, age, ward,\n ill FROM stays WHERE age < 90"
CONFIG = """
rounds = 2
seed = 1
[data]
source = "tables"
files = { north = "north.db", south = "south.csv" }
[data.schema]
user = "person"
label = "ill"
classes = ["no", "yes"]
numeric = { age = [0, 100] }
categorical = { ward = ["a", "b"] }
[data.schema.silos.north]
query = "SELECT nr AS person, age, ward, ill FROM stays WHERE age < 90"
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.01
"""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    """Return the rows of the query, in its order; they lie in north.db, and the same with others in south.csv."""
    monkeypatch.chdir(tmp_path)
    coins = random.Random(3)
    listed = [
        (f"{coins.randint(1, 20):04}", coins.randint(18, 99), coins.choice("ab"), coins.choice(["no", "yes"]))
        for _ in range(80)
    ]
    with closing(sqlite3.connect("north.db")) as connection:
        connection.execute("CREATE TABLE stays (nr TEXT, age INTEGER, ward TEXT, ill TEXT)")
        connection.executemany("INSERT INTO stays VALUES (?, ?, ?, ?)", listed)
        connection.commit()
    frame = pd.DataFrame(listed, columns=["person", "age", "ward", "ill"])
    frame.to_csv("south.csv", index=False)
    (tmp_path / "config.toml").write_text(CONFIG)
    kept = frame[frame["age"] < 90]
    return kept.sort_values(list(kept.columns), ignore_index=True)


def test_a_federation_of_a_database_is_that_of_its_rows(rows: pd.DataFrame) -> None:
    rows.to_csv("sorted.csv", index=False)
    settings = {"user": "person", "label": "ill", "classes": ["no", "yes"], "numeric": {"age": (0, 100)}}
    schema = Schema(**settings, categorical={"ward": ["a", "b"]}, silos={"north": {"query": QUERY}})
    ours = Federation.from_tables({"north": "north.db", "south": "south.csv"}, schema)
    theirs = Federation.from_tables(
        {"north": "sorted.csv", "south": "south.csv"}, Schema(**settings, categorical={"ward": ["a", "b"]})
    )
    for one, other in zip(ours.silos, theirs.silos, strict=True):
        assert (one.x == other.x).all()
        assert (one.y == other.y).all()
        assert (one.user == other.user).all()
    assert ours.user_keys == theirs.user_keys


def test_a_query_is_for_databases_alone_and_a_database_needs_one(rows: pd.DataFrame) -> None:
    settings = {"user": "person", "label": "ill", "classes": ["no", "yes"], "numeric": {"age": (0, 100)}}
    for file, silos in (
        ("south.csv", {"north": {"query": QUERY}}),
        ("north.db", {}),
        ("north.db", {"north": {}}),
    ):
        with refused("data.query") as caught:
            Federation.from_tables({"north": file}, Schema(**settings, silos=silos))
        assert caught.value.field == "data.schema.silos"


def test_a_draft_of_a_database_holds_its_query(rows: pd.DataFrame, silodp: Silodp) -> None:
    command = ("data", "inspect", "north.db", "--user", "person", "--label", "ill")
    assert_sentence(silodp(*command, "--json"), code="data.query")
    done = silodp(*command, "--query", QUERY, "--json")
    assert done.status == 0, done.err
    drafted = tomllib.loads(done.json["draft"])["data"]["schema"]
    assert drafted["silos"]["north"]["query"] == QUERY
    assert list(drafted["numeric"]) == ["age"]
    assert list(drafted["categorical"]) == ["ward"]


def test_identifiers_of_a_database_are_checked(rows: pd.DataFrame, silodp: Silodp) -> None:
    new = ("identity", "new", "--study", "s", "--population", "99", "--width", "4", "--out", "identity.toml")
    assert silodp(*new).status == 0
    done = silodp(
        "identity", "check", "identity.toml", "north.db", "--column", "person", "--query", QUERY, "--json"
    )
    assert done.status == 0, done.err
    assert done.json["rows"] == len(rows)


def test_a_silo_with_a_database_trains_and_predicts(rows: pd.DataFrame, silodp: Silodp) -> None:
    done = silodp("run", "config.toml", "--out", "run")
    assert done.status == 0, done.err
    options = ("--silo", "north", "--copy", "person", "--out", "out.csv")
    done = silodp("predict", "run", "north.db", *options)
    assert done.status == 0, done.err
    assert pd.read_csv("out.csv", dtype={"person": str})["person"].tolist() == rows["person"].tolist()
