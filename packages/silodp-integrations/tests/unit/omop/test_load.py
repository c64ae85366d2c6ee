"""A folder of CSV files becomes a DuckDB file that holds what the files hold, or is refused."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from silodp_integrations.omop.definition import Definition
from silodp_integrations.omop.load import list_tables, load_folder
from support.commands import Silodp, assert_sentence
from support.omop_tables import ask, define
from support.refusals import refused

duckdb = pytest.importorskip("duckdb", reason="pip install 'silodp[duckdb]'")

COLUMNS: dict[str, Any] = {
    "age": {"of": "age"},
    "lab": {
        **{"of": "measurement", "concepts": [5], "days": [-30, 0], "take": "last", "range": [0, 9]},
        "units": {"0": 1},
    },
}
FILES = {
    "PERSON.csv": "person_id\tgender_concept_id\tyear_of_birth\tmonth_of_birth\tday_of_birth\trace_concept_id"
    "\tethnicity_concept_id\tperson_source_value\n1\t8507\t1950\t\t\t0\t0\t007\n",
    "visit_occurrence.csv": "visit_occurrence_id,person_id,visit_concept_id,visit_start_date,visit_start_datetime,"
    "visit_end_date,visit_source_value\r\n9007199254740993,1,9201,2015-06-10,2015-06-10 08:30:00,2015-06-20,"
    '"a,\nb"\r\n',
    "Measurement.CSV": "\ufeffMEASUREMENT_ID,Person_id,measurement_concept_id,measurement_date,measurement_datetime,"
    "operator_concept_id,value_as_number,value_as_concept_id,unit_concept_id\n"
    "1,1,5,2015-06-09,2015-06-09,,0.12345678,,\n",
    "death.csv": "person_id,death_date,death_datetime\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "csv"
    made.mkdir()
    for name, text in FILES.items():
        (made / name).write_bytes(text.encode())
    return made


@pytest.fixture
def definition(tmp_path: Path) -> Definition:
    return define(tmp_path, columns=COLUMNS, cdm_schema="cdm")


def load(folder: Path, definition: Definition) -> Any:
    out = folder.parent / "north.duckdb"
    out.unlink(missing_ok=True)
    return load_folder(folder, list_tables(definition, "north"), out)


def test_what_is_loaded_is_what_the_query_reads(folder: Path, definition: Definition) -> None:
    from support.database_servers import open_source

    rows = load(folder, definition)
    assert rows == {"cdm.person": 1, "cdm.visit_occurrence": 1, "cdm.measurement": 1, "cdm.death": 0}
    out = folder.parent / "north.duckdb"
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert sorted(folder.parent.iterdir()) == [folder, out, folder.parent / "omop.toml"]
    found = ask((lambda *_: None, lambda query: open_source(out, query)), definition)
    assert found == [{"person": "007", "death": 0, "age": 64, "lab": 0.12345678}]
    with duckdb.connect(str(out), read_only=True) as connection:
        (key,) = connection.execute("SELECT visit_occurrence_id FROM cdm.visit_occurrence").fetchall()
    assert key == (9007199254740993,)


def test_text_of_several_lines_stays_one_cell_in_long_files(folder: Path, definition: Definition) -> None:
    header, row = FILES["visit_occurrence.csv"].split("\r\n", 1)
    (folder / "visit_occurrence.csv").write_text(f"{header}\n{row * 60_000}")
    assert load(folder, definition)["cdm.visit_occurrence"] == 60_000


def test_a_table_of_pseudonyms_is_loaded(folder: Path, tmp_path: Path) -> None:
    person = {"table": "links.keys", "column": "number", "key": "patient_id"}
    definition = define(tmp_path, columns={"age": {"of": "age"}}, silos={"north": {"person": person}})
    (folder / "keys.csv").write_text("patient_id,number\n1,0012\n")
    assert load(folder, definition)["links.keys"] == 1
    with duckdb.connect(str(tmp_path / "north.duckdb"), read_only=True) as connection:
        assert connection.execute("SELECT * FROM links.keys").fetchall() == [(1, "0012")]


def test_tables_and_columns_that_are_missing(folder: Path, tmp_path: Path, definition: Definition) -> None:
    for name, code, field in (
        ("death.csv", "data.no_file", "death"),
        ("PERSON.csv", "data.no_file", "person"),
    ):
        text = (folder / name).read_text()
        (folder / name).unlink()
        with refused(code) as caught:
            load(folder, definition)
        assert caught.value.field == field
        (folder / name).write_text(text)
    ancestors = {"of": "condition", "concepts": [5], "descendants": True, "days": [0, 1], "take": "any"}
    row = {"of": "visit", "observed": [1, 1]}
    asked = define(tmp_path, columns={"x": ancestors}, row=row)
    assert {"concept_ancestor", "observation_period", "condition_occurrence"} < list_tables(
        asked, "north"
    ).keys()
    (folder / "death.csv").write_text("person_id,death_date\n")
    with refused("data.column") as caught:
        load(folder, definition)
    assert caught.value.field == "death_datetime"
    with refused("data.no_file"):
        load(tmp_path / "nowhere", definition)


@pytest.mark.parametrize(
    ("name", "cell", "other"),
    [
        ("PERSON.csv", "1950", "1950.5"),
        ("PERSON.csv", "8507", "NULL"),
        ("Measurement.CSV", "1,1,5", "1,1.0,5"),
        ("Measurement.CSV", "1,1,5", "1,1e0,5"),
        ("Measurement.CSV", "2015-06-09,2015-06-09", "09/06/2015,2015-06-09"),
        ("Measurement.CSV", "0.12345678", "<0.1"),
        ("Measurement.CSV", ",,\n", ",\n"),
        ("Measurement.CSV", ",,\n", ",,\n2\n"),
        ("visit_occurrence.csv", "2015-06-20", "20150620"),
        ("visit_occurrence.csv", "a,", "\udcff"),
        ("death.csv", FILES["death.csv"], ""),
    ],
)
def test_cells_of_another_type_are_refused(
    name: str, cell: str, other: str, folder: Path, definition: Definition
) -> None:
    text = FILES[name].replace(cell, other)
    assert text != FILES[name]
    (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    with refused("data.unreadable" if other else "data.column"):
        load(folder, definition)
    assert not (folder.parent / "north.duckdb").exists()


def test_the_command_loads(folder: Path, tmp_path: Path, definition: Definition, silodp: Silodp) -> None:
    out = tmp_path / "north.duckdb"
    command = ("omop", "load", tmp_path / "omop.toml", folder, "--silo", "north", "--json", "--out")
    done = silodp(*command, out)
    assert done.json["rows"]["cdm.visit_occurrence"] == 1
    assert_sentence(silodp(*command, out), code="run.exists")
    # DuckDB names the database by its file, and a schema by its name.
    assert_sentence(silodp(*command, tmp_path / "CDM.duckdb"), code="argument.value")
