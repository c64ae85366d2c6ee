"""From a data dictionary of REDCap to a model: a draft is refused until it is filled in, and then reads raw exports."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from silodp.config.toml_values import read_toml
from silodp.data.federation import Federation
from silodp.data.tables.schema import Schema
from support.commands import Silodp, assert_sentence
from support.redcap_dictionaries import write_dictionary

CHOICES, VALIDATION = "select_choices_or_calculations", "text_validation_type_or_show_slider_number"
ROWS = [
    {"field_name": "name", "identifier": "y"},
    {"field_name": "sex", "field_type": "radio", CHOICES: "1, Female | 2, Male", "required_field": "y"},
    {"field_name": "pain", "field_type": "checkbox", CHOICES: "1, Head | -9, Not known"},
    {
        "field_name": "age",
        VALIDATION: "integer",
        "text_validation_min": "0",
        "text_validation_max": "110",
        "required_field": "y",
    },
    {"field_name": "bmi", "field_type": "calc", CHOICES: "[weight] / [height]^2"},
    {"field_name": "seen", VALIDATION: "datetime_dmy"},
]
COLUMNS = "record_id,pseudonym,name,sex,pain___1,pain____9,age,bmi,seen,f_complete,ill"
OPTIONS = ("--user", "pseudonym", "--label", "ill", "--missing-codes", "-99, not asked | NK, not known")


@pytest.fixture
def dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_dictionary(tmp_path / "dictionary.csv", *ROWS)


def write_export(path: Path, seed: int) -> None:
    coins = random.Random(seed)
    lines = [COLUMNS]
    for record in range(1, 41):
        sex, age = coins.choice(["1", "2", "NK"]), coins.choice(["-99", "-99.0", "30", "71"])
        ticks = coins.choice(["1,0", "0,1", ","])
        bmi, seen = coins.choice(["", "24.5"]), coins.choice(["", "2021-02-03 04:30", "NK"])
        lines.append(
            f"{record},P{record % 30:03},Ann,{sex},{ticks},{age},{bmi},{seen},2,{coins.choice('01')}"
        )
    path.write_text("\n".join(lines))


def test_a_draft_is_refused_until_it_is_filled_in_and_then_reads_exports(
    dictionary: Path, silodp: Silodp
) -> None:
    draft = Path("draft.toml")
    assert silodp("redcap", dictionary, *OPTIONS, "--out", draft).status == 0
    text = draft.read_text()
    for place, filled in (
        ("files = {}", 'files = { north = "north.csv", south = "south.csv" }'),
        ('"bmi" = { range = []', '"bmi" = { range = [10, 60]'),
        ('"seen" = { range = []', '"seen" = { range = [0, 5000]'),
        ('since = ""', 'since = "2020-01-01"'),
    ):
        draft.write_text(text)
        assert_sentence(silodp("plan", draft))
        assert place in text
        text = text.replace(place, filled)
    draft.write_text(text)
    planned = silodp("plan", draft)
    assert planned.status == 0, planned.err

    for seed, silo in enumerate(("north", "south")):
        write_export(Path(f"{silo}.csv"), seed)
    schema = Schema(**{**read_toml(draft)["data"]["schema"], "test_share": None})
    federation = Federation.from_tables({"north": "north.csv", "south": "south.csv"}, schema)
    assert schema.features == (
        *("age", "age is missing", "bmi", "bmi is missing", "seen", "seen is missing"),
        *("sex=1", "sex=2", "sex=missing", "pain___1=0", "pain___1=1", "pain___1=missing"),
        *("pain____9=0", "pain____9=1", "pain____9=missing"),
    )
    with Path("north.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = {
        "age is missing": [row["age"] in ("-99", "-99.0") for row in rows],
        "bmi is missing": [row["bmi"] == "" for row in rows],
        "seen is missing": [row["seen"] in ("", "NK") for row in rows],
        "sex=missing": [row["sex"] == "NK" for row in rows],
        "pain____9=1": [row["pain____9"] == "1" for row in rows],
        "pain___1=missing": [row["pain___1"] == "" for row in rows],
    }
    x = federation.silos[0].x
    assert len(x) == len(rows) == 40
    for name, flags in expected.items():
        assert x[:, schema.features.index(name)].sum() == sum(flags) > 0, name
    ran = silodp("run", draft, "--set", "rounds=2", "--out", "model")
    assert ran.status == 0, ran.err


def test_prints_the_same_draft_and_refuses_a_second_file(dictionary: Path, silodp: Silodp) -> None:
    printed, as_json = (
        silodp("redcap", dictionary, *OPTIONS),
        silodp("redcap", dictionary, *OPTIONS, "--json"),
    )
    assert printed.out == as_json.json["draft"]
    out = Path("draft.toml")
    assert silodp("redcap", dictionary, *OPTIONS, "--out", out, "--json").json == {"path": "draft.toml"}
    assert out.read_text() == printed.out
    assert_sentence(silodp("redcap", dictionary, *OPTIONS, "--out", out, "--json"), code="run.exists")


def test_refuses_what_is_no_dictionary_and_codes_without_labels(dictionary: Path, silodp: Silodp) -> None:
    write_export(Path("north.csv"), 1)
    assert_sentence(silodp("redcap", "north.csv", *OPTIONS, "--json"), code="data.unreadable")
    wrong = (*OPTIONS[:4], "--missing-codes", "-99")
    assert_sentence(silodp("redcap", dictionary, *wrong, "--json"), code="argument.value")
