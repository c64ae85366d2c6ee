"""Hospitals with files of SPSS, Stata and SAS train the model of three CSV files."""

from __future__ import annotations

import random
from pathlib import Path

import pandas as pd
import pytest

from silodp_deploy.check import check_party
from silodp_deploy.consortium import Consortium
from support.consortium import agree_on_tables
from support.deployed import assert_same_run, simulate
from support.statistics_files import write_file

pytest.importorskip("pyreadstat", reason="pip install 'silodp[statistics-files]'")

CONFIG = """
name = "three"
rounds = 3
seed = 7
[data]
source = "tables"
files = {{ north = "north.{north}", south = "south.{south}", east = "east.{east}" }}
[data.schema]
user = "person"
users = "persons.txt"
label = "ill"
classes = [0, 1]
numeric = {{ age = [0.0, 100.0] }}
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.01
"""
KINDS = {"north": ("sav", "N4"), "south": ("dta", "%04.0f"), "east": ("sas7bdat", "Z4")}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_silos_and_a_server_train_from_such_files(tmp_path: Path) -> None:
    coins, study = random.Random(1), tmp_path / "study"
    study.mkdir()
    (study / "simulated.toml").write_text("")
    (study / "persons.txt").write_text("\n".join(f"{number:04}" for number in range(24)))
    tables = {}
    for name, (ending, form) in KINDS.items():
        numbers = {
            "person": [float(coins.randint(0, 23)) for _ in range(60)],
            "age": [float(coins.randint(18, 99)) for _ in range(60)],
            "ill": [float(coins.randint(0, 1)) for _ in range(60)],
        }
        tables[name] = write_file(study / f"{name}.{ending}", numbers, {"person": form})
        frame = pd.DataFrame(numbers).astype(int)
        frame.assign(person=frame["person"].map("{:04}".format)).to_csv(study / f"{name}.csv", index=False)
    expected = simulate(study, CONFIG.format(**dict.fromkeys(KINDS, "csv")))
    config = study / "study.toml"
    config.write_text(CONFIG.format(**{name: ending for name, (ending, _) in KINDS.items()}))
    processes = agree_on_tables(config, tmp_path, tables)
    consortium = Consortium.load(processes.public)
    for name, table in tables.items():
        found = {one.name: one for one in check_party(processes.home(name), consortium, table=table)}
        assert found["table"].is_good
    try:
        processes.start_all()
        assert processes.wait_for_server(500) == 0, processes.log("server")
        assert_same_run(processes, expected)
    finally:
        processes.kill_all()
