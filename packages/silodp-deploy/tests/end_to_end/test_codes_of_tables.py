"""Categorical columns as codes, from CSV tables and a configuration to predictions: the model is the one that the same
records give as arrays, in one process and in a deployment."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import silodp
from silodp.config.resolve import load_config
from silodp.config.task import build_task
from silodp.data.tables.schema import find_test_persons
from support.commands import Silodp, assert_sentence
from support.consortium import Processes, agree_on_tables
from support.refusals import refused

CONFIG = """
rounds = 2
seed = 5
aggregator = "{aggregator}"
[data]
source = "tables"
files = {{ north = "north.csv", south = "south.csv" }}
[data.schema]
user = "person"
users = "persons.txt"
{label}
test_share = 0.3
[data.schema.numeric]
age = [0, 100]
[data.schema.categorical]
diagnosis = {{ categories = ["I21", "I50", "E11", "other"], missing = "other", codes = true }}
ward = ["surgery", "medicine"]
sex = {{ categories = ["f", "m"], codes = true }}
{task}
[method]
name = "uldp-avg"
noise_multiplier = 1.0
step = 0.5
weighting = "{weighting}"
[method.local]
learning_rate = 0.1
epochs = 2
"""
CLASSES = 'label = "ill"\nclasses = ["no", "yes"]'
OWN = '[task]\nmodel = "visits.py:visits"\noptions = { width = 5 }'
CODE = """
import torch
from torch import nn


class Visits(nn.Module):
    def __init__(self, features, categories, width):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(number, 3) for number in categories)
        self.layers = nn.Sequential(
            nn.Linear(features + 3 * len(categories), width), nn.Tanh(), nn.Linear(width, 2)
        )

    def forward(self, numeric, codes):
        columns = [embed(codes[:, place]) for place, embed in enumerate(self.embeddings)]
        return self.layers(torch.cat([numeric, *columns], 1))


def visits(features: int, categories: list[int], width: int) -> nn.Module:
    return Visits(features, categories, width)
"""
PERSONS = [f"p{number:02}" for number in range(24)]
SILOS = ("north", "south")


def write_study(folder: Path, *, label=CLASSES, task=OWN, aggregator="plain", weighting="uniform") -> Path:
    """The tables, the list of persons, the code of a model and the configuration."""
    folder.mkdir(exist_ok=True)
    coins = random.Random(2)
    for name in SILOS:
        with (folder / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["sex", "diagnosis", "person", "age", "ward", "ill", "dead", "days", "stage"])
            for _ in range(60):
                diagnosis = coins.choice(["I21", "I50", "E11", "other", "NA", ""])
                values = [coins.choice("fm"), diagnosis, coins.choice(PERSONS), coins.randint(18, 99)]
                ill = "yes" if (diagnosis == "I50") == (coins.random() < 0.9) else "no"
                more = [coins.choice(["surgery", "medicine"]), ill, coins.randint(0, 1)]
                table.writerow([*values, *more, coins.randint(1, 900), coins.choice("abc")])
    (folder / "persons.txt").write_text("\n".join(PERSONS))
    (folder / "visits.py").write_text(CODE)
    path = folder / "study.toml"
    path.write_text(CONFIG.format(label=label, task=task, aggregator=aggregator, weighting=weighting))
    return path


def read_by_hand(folder: Path) -> silodp.Federation:
    """The federation as a program makes it from its own arrays: no code that reads tables, and no schema."""
    diagnoses = ["I21", "I50", "E11", "other"]
    silos, held = [], []
    for name in SILOS:
        rows = pd.read_csv(folder / f"{name}.csv", keep_default_na=False)
        wards = [rows["ward"] == ward for ward in ("surgery", "medicine")]
        numeric = np.stack([2 * rows["age"] / 100 - 1, *wards], 1).astype(np.float32)
        known = [diagnoses.index(text if text in diagnoses else "other") for text in rows["diagnosis"]]
        x = {"numeric": numeric, "codes": np.stack([known, rows["sex"] == "m"], 1).astype(np.int64)}
        y = (rows["ill"] == "yes").to_numpy(np.int64)
        user = rows["person"].map(PERSONS.index).to_numpy()
        test = np.array(find_test_persons(rows["person"], 0.3))
        parts = [
            ({key: array[which] for key, array in x.items()}, y[which], user[which])
            for which in (~test, test)
        ]
        silos.append(silodp.SiloData(name, *parts[0]))
        held.append(parts[1])
    pooled = [np.concatenate([part[k] for part in held]) for k in (1, 2)]
    inputs = {key: np.concatenate([part[0][key] for part in held]) for key in ("numeric", "codes")}
    test_data = silodp.SiloData("test", inputs, *pooled)
    return silodp.Federation(tuple(silos), len(PERSONS), test_data, classes=2, categories=[4, 2])


def test_a_run_from_tables_is_the_run_from_arrays_bit_for_bit(silodp: Silodp, tmp_path: Path) -> None:
    import silodp as library

    path = write_study(tmp_path)
    done = silodp("run", path, "--out", tmp_path / "run")
    assert done.status == 0, done.err
    federation = read_by_hand(tmp_path)
    config = load_config(path)
    task = config.build_task(federation)
    result = library.train(federation, task, config.method, rounds=2, seed=5)
    loaded = library.load(tmp_path / "run", code=tmp_path / "run" / "model.py")
    trained, direct = loaded.model.state_dict(), result.model.state_dict()
    assert trained.keys() == direct.keys()
    assert {"embeddings.0.weight", "embeddings.1.weight"} <= trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(tensor, direct[name]), name
    start = library.train(federation, task, config.method, rounds=0, seed=5)
    assert not torch.equal(result.params, start.params)

    # The run directory alone predicts: from a table with other columns and their order, and from arrays.
    rows = pd.concat(
        pd.read_csv(tmp_path / f"{name}.csv", dtype=str, keep_default_na=False) for name in SILOS
    )
    held = rows[find_test_persons(rows["person"], 0.3)]
    held[["ward", "sex", "age", "diagnosis"]].to_csv(tmp_path / "new.csv", index=False)
    command = ("predict", tmp_path / "run", tmp_path / "new.csv", "--out", tmp_path / "out.csv")
    assert_sentence(silodp(*command, "--json"), code="bundle.code")
    done = silodp(*command, "--code", tmp_path / "run" / "model.py")
    assert done.status == 0, done.err
    assert federation.test is not None
    arrays = {name: federation.test.x[name] for name in ("numeric", "codes")}
    np.testing.assert_array_equal(loaded.predict(arrays), loaded.predict(held))
    written = pd.read_csv(tmp_path / "out.csv", float_precision="round_trip").to_numpy()
    np.testing.assert_array_equal(written, loaded.predict(arrays))
    with refused("data.value"):
        loaded.predict(held.assign(diagnosis="Z99"))
    with refused("argument.shape"):
        loaded.predict(arrays["numeric"])


def test_report_card_and_plan_know_codes(silodp: Silodp, tmp_path: Path) -> None:
    subgroups = '\n[card]\npublish_metrics = true\n[card.subgroups]\ndiagnosis = ["other", "I50"]\n'
    path = write_study(tmp_path, task="", aggregator="masked")
    path.write_text(path.read_text() + subgroups)
    planned = silodp("plan", path, "--json")
    assert planned.status == 0, planned.err
    done = silodp("run", path, "--out", tmp_path / "run", "--json")
    assert done.status == 0, done.err
    epsilon = planned.json["adversaries"]["released"]["epsilon"]
    guarantee = json.loads((tmp_path / "run" / "guarantee.json").read_text())
    assert guarantee["guarantees"][0]["epsilon"] == pytest.approx(epsilon)
    card = (tmp_path / "run" / "MODEL_CARD.md").read_text()
    assert "| `diagnosis` | one of `I21`, `I50`, `E11`, `other` |" in card
    assert "| diagnosis: other |" in card
    assert "`embedding(features=3, classes=2, categories=[4, 2])` of silodp" in card
    assert silodp("report", tmp_path / "run").status == 0


def test_a_run_with_another_order_of_categories_is_no_continuation(silodp: Silodp, tmp_path: Path) -> None:
    path = write_study(tmp_path)
    assert silodp("run", path, "--out", tmp_path / "run").status == 0
    again = ("run", path, "--out", tmp_path / "run", "--resume", "--set", "rounds=3")
    text, turned = path.read_text(), path.read_text().replace('"I21", "I50"', '"I50", "I21"')
    path.write_text(turned)
    assert_sentence(silodp(*again, "--json"), code="checkpoint.setup")
    path.write_text(text)
    done = silodp(*again)
    assert done.status == 0, done.err


@pytest.mark.parametrize(
    ("label", "outputs"),
    [
        (CLASSES, 1),
        ('label = "stage"\nclasses = ["a", "b", "c"]', 3),
        ('kind = "real"\nlabel = "days"', 1),
        ('kind = "survival"\nevent = "dead"\ntime = "days"', 1),
    ],
)
def test_without_a_model_categories_are_embedded(label: str, outputs: int, tmp_path: Path) -> None:
    config = load_config(write_study(tmp_path, label=label, task=""))
    federation = config.load_federation()
    task = config.build_task(federation)
    assert [tuple(parameter.shape) for parameter in task.model.parameters()] == [
        (4, 2), (2, 2), (outputs, 3 + 4), (outputs,)
    ]  # fmt: skip
    result = silodp.train(
        federation, task, config.method, out=tmp_path / "run", **(config.settings() | {"rounds": 1})
    )
    assert np.isfinite(result.metrics[-1]["loss"])
    assert np.isfinite(silodp.load(tmp_path / "run").predict(tmp_path / "north.csv")).all()


@pytest.mark.parametrize("name", ["logistic", "cox_linear", "mlp", "cnn_mnist"])
def test_networks_of_one_array_are_refused(name: str, silodp: Silodp, tmp_path: Path) -> None:
    path = write_study(tmp_path, task=f'[task]\nmodel = "{name}"')
    assert_sentence(silodp("plan", path, "--json"), code="model.inputs")
    one_hot = path.read_text().replace(", codes = true", "")
    path.write_text(one_hot.replace(name, "embedding"))
    assert_sentence(silodp("plan", path, "--json"), code="model.inputs")


def test_a_model_of_categories_says_what_gives_them(silodp: Silodp, tmp_path: Path) -> None:
    path = write_study(tmp_path, task=OWN)
    path.write_text(path.read_text().replace(", codes = true", ""))
    told = silodp("plan", path, "--json")
    assert_sentence(told, code="config.missing_field")


def test_one_number_of_categories_for_several_columns_needs_a_model_of_its_owner(tmp_path: Path) -> None:
    """Such arrays come from programs, never from a schema, which declares each column."""
    write_study(tmp_path)
    public = replace(read_by_hand(tmp_path), categories=4).public()
    assert not public.has_codes
    with refused("model.inputs"):
        build_task(public)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("aggregator", "weighting"), [("masked", "uniform"), ("lattice", "records")])
def test_a_deployment_gives_the_model_of_the_simulation(
    aggregator: str, weighting: str, silodp: Silodp, tmp_path: Path
) -> None:
    """Each silo opens its table alone; the server has none, and knows the codes from the public folder."""
    study = write_study(tmp_path / "study", aggregator=aggregator, weighting=weighting)
    done = silodp("run", study, "--set", "isolate_units=true", "--out", tmp_path / "simulated")
    assert done.status == 0, done.err
    tables = {name: study.parent / f"{name}.csv" for name in SILOS}
    agree_on_tables(study, tmp_path / "parties", tables)
    processes = Processes(tmp_path / "parties", forked=True)
    policy = (processes.home("north") / "policy.toml").read_text()
    assert '"diagnosis=I21"' in policy
    try:
        processes.start_all()
        assert processes.wait_for_server() == 0, processes.log("server")
    finally:
        processes.kill_all()
    ours = (processes.run / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "simulated" / "model.safetensors").read_bytes()
    for number, run in enumerate((processes.run, tmp_path / "simulated")):
        out = tmp_path / f"{number}.csv"
        done = silodp("predict", run, tables["south"], "--out", out, "--code", run / "model.py")
        assert done.status == 0, done.err
    assert (tmp_path / "0.csv").read_text() == (tmp_path / "1.csv").read_text()
