"""A label that is a number far from zero is learnt by its public scaling, and predicted in its unit again."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import silodp
from silodp.config.resolve import load_config
from silodp.data.tables.schema import UNSCALED_LABEL, Schema
from silodp.runtime.callback import Result
from silodp.runtime.train import train
from support.commands import Silodp, assert_sentence
from support.consortium import agree_on_tables
from support.deployed import assert_same_run, simulate
from support.refusals import refused

CONFIG = """
rounds = 10
seed = 1
[data]
source = "tables"
files = { north = "north.csv", south = "south.csv" }
[data.schema]
user = "person"
label = "age"
kind = "real"
test_share = 0.3
numeric = { bmi = { range = [5, 60], typical = [27, 5] }, pressure = { range = [40, 260], typical = [130, 18] } }
[method]
name = "uldp-sgd"
noise_multiplier = 1.0
step = 1.0
"""
SCALED = CONFIG.replace("[method]\n", "label_typical = [55, 15]\n[method]\n")
ON = "data.schema.label_typical=[55, 15]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tables in which age has mean 55 and standard deviation 12, half of it by bmi and pressure."""
    coins = np.random.default_rng(0)
    for name in ("north", "south"):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["person", "bmi", "pressure", "age"])
            for person in coins.integers(0, 150, 300):
                a, b, c = coins.standard_normal(3)
                table.writerow([f"p{person}", 27 + 5 * a, 130 + 18 * b, 55 + 9 * a + 6 * b + 6 * c])
    (tmp_path / "plain.toml").write_text(CONFIG)
    (tmp_path / "scaled.toml").write_text(SCALED)
    return tmp_path


def run_of(folder: Path, name: str) -> Result:
    settings = load_config(folder / f"{name}.toml", ())
    federation = settings.load_federation()
    return train(
        federation, settings.build_task(federation), settings.method, out=folder / name, **settings.settings()
    )


def test_a_scaled_label_is_learnt_and_predicted_in_its_unit(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plain = run_of(folder, "plain").metrics
    assert UNSCALED_LABEL in caplog.messages
    assert plain[-1]["loss"] > 0.5 * plain[0]["loss"], (
        "ten rounds of step 1 move a prediction of 55 by about 10"
    )
    assert plain[-1]["metrics"]["r2"] < -5

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        found = run_of(folder, "scaled").metrics[-1]
    assert UNSCALED_LABEL not in caplog.messages
    assert found["metrics"]["r2"] > 0.3
    assert 3 < found["metrics"]["mean_absolute_error"] < 10, "in years; scaled it would be below 1"
    assert found["loss"] < 1, "of scaled labels"

    table = pd.read_csv(folder / "north.csv")
    model = silodp.load(folder / "scaled")
    predicted = model.predict(table.drop(columns=["person", "age"]))[:, 0]
    assert np.abs(predicted - table["age"]).mean() < 10
    outputs = model.compute_outputs(folder / "north.csv")[:, 0]
    np.testing.assert_allclose(predicted, 55 + 15 * outputs.astype(np.float64), rtol=1e-6)


def test_the_scaling_is_public_and_part_of_the_run(folder: Path, silodp: Silodp) -> None:
    """The specification that every party signs has it, and so has model.json; a run without is written as before."""
    assert silodp("run", folder / "scaled.toml", "--out", folder / "scaled").status == 0
    assert json.loads((folder / "scaled" / "model.json").read_text())["label_typical"] == [55, 15]
    assert "`age`, typically 55 ± 15" in (folder / "scaled" / "MODEL_CARD.md").read_text()
    plain, scaled = (
        load_config(folder / "plain.toml", changes).build_public_spec()[0] for changes in ((), [ON])
    )
    assert plain.digest != scaled.digest
    assert "label_typical" not in plain.to_dict()["data"]
    assert scaled.data.label_typical == (55.0, 15.0)
    assert type(scaled.data).from_dict(scaled.data.to_dict()) == scaled.data
    resumed = silodp(
        "run", folder / "scaled.toml", "--out", folder / "scaled", "--resume", "--set", ON.replace("55", "50")
    )
    assert resumed.status == 2
    assert "[checkpoint.setup]" in resumed.err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_silos_on_separate_machines_scale_labels_and_read_their_dates(folder: Path) -> None:
    """Each silo reads its own table alone: label, layout of dates and numbers as in the simulation, bit for bit."""
    for name, layout in (("north", "%Y-%m-%d"), ("south", "%d.%m.%Y")):
        table = pd.read_csv(folder / f"{name}.csv")
        visits = pd.Timestamp("2020-01-01") + pd.to_timedelta(table["pressure"].round(), unit="D")
        table.assign(visit=visits.dt.strftime(layout)).to_csv(folder / f"{name}.csv", index=False)
    people = sorted(
        {key for name in ("north", "south") for key in pd.read_csv(folder / f"{name}.csv")["person"]}
    )
    (folder / "people.txt").write_text("\n".join(people))
    visit = 'visit = { range = [0, 366], typical = [130, 18], date = "%Y-%m-%d", since = "2020-01-01" }'
    dates = 'users = "people.txt"\nreaders = { south = { dates = { visit = "%d.%m.%Y" } } }\n'
    text = SCALED.replace("numeric = { ", f"{dates}numeric = {{ {visit}, ")
    simulated = simulate(folder, text)
    tables = {name: folder / f"{name}.csv" for name in ("north", "south")}
    processes = agree_on_tables(folder / "simulated.toml", folder / "deployed", tables)
    processes.forked = True
    try:
        processes.start_all()
        assert processes.wait_for_server() == 0, processes.log("server")
        assert_same_run(processes, simulated)
    finally:
        processes.kill_all()
    model, table = silodp.load(processes.run), pd.read_csv(folder / "north.csv")
    assert model.description.label_typical == (55, 15)
    assert np.abs(model.predict(table)[:, 0] - table["age"]).mean() < 10


def test_a_damaged_scaling_is_refused(folder: Path) -> None:
    run_of(folder, "scaled")
    path = folder / "scaled" / "model.json"
    kept = json.loads(path.read_text())
    for wrong in ([55, 0], [55], [float("nan"), 15], [55, float("inf")], "55"):
        path.write_text(json.dumps(kept | {"label_typical": wrong}))
        with refused("bundle.damaged"):
            silodp.load(folder / "scaled")
    path.write_text(json.dumps(kept | {"labels": "survival"}))
    with refused("bundle.damaged"):
        silodp.load(folder / "scaled")


@pytest.mark.parametrize("wrong", ["[]", "[55]", "[55, 0]", "[55, -1]", "[inf, 1]", "[55, 15, 3]", '"a"'])
def test_a_scaling_is_two_numbers(folder: Path, silodp: Silodp, wrong: str) -> None:
    done = silodp("plan", folder / "plain.toml", "--set", f"data.schema.label_typical={wrong}")
    assert_sentence(done, "data.schema.label_typical" if wrong == '"a"' else "spread > 0")


def test_truth_values_are_no_numbers(folder: Path, silodp: Silodp) -> None:
    """True is 1 in Python: `[true, 1]` would scale by 1."""
    done = silodp("plan", folder / "plain.toml", "--set", "data.schema.label_typical=[true, 1]")
    assert_sentence(done, code="config.value")
    for given in (
        {"label_typical": (True, 1)},
        {"numeric": {"pressure": (False, True)}},
        {"numeric": {"pressure": {"range": (0, 9), "typical": (True, 1)}}},
    ):
        with refused("data.schema"):
            Schema(
                **{"user": "person", "label": "age", "kind": "real", "numeric": {"pressure": (0, 1)}, **given}
            )


@pytest.mark.parametrize(
    "kind", [{"label": "age", "classes": [1, 2]}, {"kind": "survival", "event": "age", "time": "bmi"}]
)
def test_other_kinds_of_label_are_not_scaled(kind: dict[str, Any]) -> None:
    with refused("data.kind"):
        Schema(user="person", numeric={"pressure": (0, 1)}, label_typical=(55, 15), **kind)


def test_only_the_squared_error_has_metrics_by_default(folder: Path) -> None:
    """What the outputs mean under another loss is not known."""
    (folder / "own.py").write_text("def log_rate(outputs, targets):\n    return outputs[:, 0].exp()\n")
    task = [
        load_config(folder / "scaled.toml", given).build_task(
            load_config(folder / "scaled.toml", ()).build_public_spec()[0].data
        )
        for given in ((), ["task.loss=own.py:log_rate"], ["task.loss=own.py:log_rate", 'task.metrics=["r2"]'])
    ]
    assert [list(one.metrics) for one in task] == [["mean_absolute_error", "r2"], [], ["r2"]]
