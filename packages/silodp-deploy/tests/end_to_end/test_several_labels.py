"""Records with several yes/no labels, or several numbers: declared, trained, stored, predicted and evaluated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import mean_absolute_error as reference_error
from sklearn.metrics import r2_score, roc_auc_score
from torch import nn

import silodp
from silodp.config.resolve import load_config
from silodp.data.federation import Federation
from silodp.data.public import PublicData
from silodp.data.silo_data import SiloData
from silodp.data.tables.schema import Schema
from silodp.methods import UldpSgd
from silodp.runtime.prepare import prepare_run
from silodp.training.losses import (
    LOSSES,
    Loss,
    binary_cross_entropy,
    cox,
    cross_entropy,
    exponential_survival,
    squared_error,
)
from silodp.training.metrics import accuracy, average_precision, mean_absolute_error, r2, roc_auc
from silodp.training.task import Task
from silodp_deploy.consortium import Consortium
from silodp_deploy.records import load_records, save_records
from support.commands import Silodp
from support.consortium import agree_on_tables
from support.deployed import assert_same_run, simulate
from support.refusals import refused

METHOD = UldpSgd(noise_multiplier=0.3, step=1.0)
SCALING = [[50.0, 10.0], [170.0, 8.0]]
CONFIG = """
rounds = 15
seed = 1
[data]
source = "tables"
files = { north = "north.csv", south = "south.csv" }
[data.schema]
user = "person"
label = ["sick", "smokes"]
kind = "multilabel"
test_share = 0.3
numeric = { bmi = { range = [5, 60], typical = [27, 5] }, pressure = { range = [40, 260], typical = [130, 18] } }
[method]
name = "uldp-sgd"
noise_multiplier = 0.3
step = 1.0
"""
NUMBERS = CONFIG.replace('["sick", "smokes"]', '["age", "height"]').replace(
    '"multilabel"', f'"real"\nlabel_typical = {SCALING}'
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tables with two yes/no labels and two numbers, each of which follows one column."""
    coins = np.random.default_rng(0)
    for name in ("north", "south"):
        a, b = coins.standard_normal((2, 400))
        table = pd.DataFrame({"person": [f"p{n}" for n in coins.integers(0, 150, 400)]})
        table["bmi"], table["pressure"] = 27 + 5 * a, 130 + 18 * b
        table["sick"], table["smokes"] = np.where(a > 0, "yes", "no"), (b > 0.5).astype(int)
        table["age"], table["height"] = 50 + 10 * a, 170 - 8 * b
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    (tmp_path / "labels.toml").write_text(CONFIG)
    (tmp_path / "numbers.toml").write_text(NUMBERS)
    return tmp_path


def make_arrays(kind: str | None, count: int = 400) -> Federation:
    """Two labels, or numbers, that follow a column each; persons have about three records."""
    coins = np.random.default_rng(0)

    def silo(name: str, user: np.ndarray) -> SiloData:
        x = coins.standard_normal((len(user), 5)).astype(np.float32)
        y = x[:, :2] * [2, -3] + [0, 1] if kind == "real" else x[:, :2] > 0
        return SiloData(name, x, y.astype(np.float32), user, labels=kind)  # type: ignore[arg-type]

    test = silo("t", np.full(300, -1))
    return Federation(tuple(silo(name, coins.integers(0, 120, count)) for name in "ab"), 120, test)


@pytest.mark.parametrize(
    "loss", [nn.BCEWithLogitsLoss(), binary_cross_entropy(), binary_cross_entropy([1, 2])]
)
def test_yes_and_no_labels_are_trained_stored_predicted_and_evaluated(loss, tmp_path: Path) -> None:
    federation = make_arrays("multilabel")
    metrics = {"accuracy": accuracy, "roc_auc": roc_auc, "average_precision": average_precision}
    task = Task(nn.Linear(5, 2), loss, metrics)
    result = silodp.train(federation, task, METHOD, rounds=20, seed=0, out=tmp_path / "run")
    model = silodp.load(tmp_path / "run", model=nn.Linear(5, 2))
    assert model.columns == ("probability_0", "probability_1")
    assert federation.test is not None
    x, y = federation.test.x, federation.test.y
    found = model.predict(x)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-model.compute_outputs(x).astype(float))), rtol=1e-6)
    stated = result.metrics[-1]["metrics"]
    assert stated["accuracy"] == pytest.approx(((found > 0.5) == y).mean())
    assert stated["roc_auc"] == pytest.approx(roc_auc_score(y, found, average="macro"))
    assert stated["accuracy"] > 0.8


@pytest.mark.parametrize("loss", [nn.HuberLoss(), squared_error()])
def test_several_numbers_are_trained_stored_predicted_and_evaluated(loss, tmp_path: Path) -> None:
    federation = make_arrays("real")
    task = Task(nn.Linear(5, 2), loss, {"r2": r2, "error": mean_absolute_error})
    result = silodp.train(federation, task, METHOD, rounds=30, seed=0, out=tmp_path / "run")
    model = silodp.load(tmp_path / "run", model=nn.Linear(5, 2))
    assert model.columns == ("prediction_0", "prediction_1")
    assert federation.test is not None
    y, found = federation.test.y, model.predict(federation.test.x)
    assert result.metrics[-1]["metrics"]["r2"] == pytest.approx(r2_score(y, found), abs=1e-5)
    assert result.metrics[-1]["metrics"]["error"] == pytest.approx(reference_error(y, found), rel=1e-5)
    assert result.metrics[-1]["metrics"]["r2"] > 0.5


def test_the_mean_over_labels_is_that_of_torch() -> None:
    outputs, labels = torch.randn(6, 3), (torch.randn(6, 3) > 0).float()
    everyone = torch.ones(6)
    wanted = nn.functional.binary_cross_entropy_with_logits(outputs, labels)
    assert binary_cross_entropy().compute(outputs, labels, everyone) == pytest.approx(float(wanted))
    weighted = nn.functional.binary_cross_entropy_with_logits(outputs, labels, pos_weight=torch.tensor(4.0))
    assert binary_cross_entropy([1, 4]).compute(outputs, labels, everyone) == pytest.approx(float(weighted))


def test_tables_with_yes_and_no_labels(folder: Path, silodp: Silodp) -> None:
    run = silodp("run", folder / "labels.toml", "--out", folder / "run", "--json")
    assert run.status == 0, run.err
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["metrics"]["accuracy"] > 0.8
    assert last["metrics"]["roc_auc"] > 0.9
    out = folder / "found.csv"
    made = silodp("predict", folder / "run", folder / "north.csv", "--out", out, "--copy", "sick", "--json")
    assert made.json["columns"] == ["probability_sick", "probability_smokes"]
    found = pd.read_csv(out)
    assert ((found["probability_sick"] > 0.5) == (found["sick"] == "yes")).mean() > 0.8
    assert "2 answers of yes or no `sick`, `smokes`" in (folder / "run" / "MODEL_CARD.md").read_text()
    assert silodp("report", folder / "run").status == 0
    assert silodp("plan", folder / "labels.toml").status == 0


def test_tables_with_several_numbers_are_scaled_each_by_its_own(folder: Path, silodp: Silodp) -> None:
    run = silodp("run", folder / "numbers.toml", "--out", folder / "run", "--json")
    assert run.status == 0, run.err
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert silodp("predict", folder / "run", folder / "north.csv", "--out", folder / "found.csv").status == 0
    found, table = pd.read_csv(folder / "found.csv"), pd.read_csv(folder / "north.csv")
    assert list(found) == ["prediction_age", "prediction_height"]
    error = reference_error(table[["age", "height"]], found)
    assert error < 6
    # On held-out persons, in years and centimetres as well.
    assert last["metrics"]["mean_absolute_error"] == pytest.approx(error, rel=0.3)
    card = (folder / "run" / "MODEL_CARD.md").read_text()
    assert "typically 50 ± 10, 170 ± 8" in card
    public = load_config(folder / "numbers.toml", ()).build_public_spec()[0].data
    assert (public.labels, public.targets) == ("real", 2)
    assert PublicData.from_dict(json.loads(json.dumps(public.to_dict()))) == public


def test_records_that_are_stored_for_a_silo_are_of_their_kind(folder: Path, silodp: Silodp) -> None:
    people = (f"p{n}" for n in range(150))
    (folder / "people.txt").write_text("\n".join(people))
    (folder / "own.toml").write_text(CONFIG.replace("test_share", 'users = "people.txt"\ntest_share'))
    made = silodp("deploy", "init", folder / "own.toml", "--local", "--out", folder / "c")
    assert made.status == 0, made.err
    consortium = Consortium.load(folder / "c" / "public")
    (path,) = (folder / "c" / "silos" / "north").glob("*.npz")
    data = load_records(path, "north", consortium)
    assert data.labels == data.held_out.labels == "multilabel"
    for y, code in ((data.y + 1, "data.array"), (data.y[:, [0, 1, 1]], "deploy.data")):
        save_records(path, replace(data, y=y, labels="real", test=None))
        with refused(code):
            load_records(path, "north", consortium)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", [CONFIG, NUMBERS], ids=["labels", "numbers"])
def test_silos_on_separate_machines_train_the_same_model(folder: Path, text: str) -> None:
    names = ("north", "south")
    people = sorted({key for name in names for key in pd.read_csv(folder / f"{name}.csv")["person"]})
    (folder / "people.txt").write_text("\n".join(people))
    text = text.replace("test_share", 'users = "people.txt"\ntest_share').replace("rounds = 15", "rounds = 2")
    simulated = simulate(folder, text)
    tables = {name: folder / f"{name}.csv" for name in names}
    processes = agree_on_tables(folder / "simulated.toml", folder / "deployed", tables)
    processes.forked = True
    try:
        processes.start_all()
        assert processes.wait_for_server() == 0, processes.log("server")
        assert_same_run(processes, simulated)
    finally:
        processes.kill_all()


SURVIVAL = PublicData("toy", ("a", "b"), 9, (3,), "survival")
OF_TORCH = (
    nn.BCEWithLogitsLoss(),
    nn.MSELoss(),
    nn.L1Loss(),
    nn.SmoothL1Loss(),
    nn.HuberLoss(),
    nn.CrossEntropyLoss(),
    nn.NLLLoss(),
)


@pytest.mark.parametrize("loss", [*OF_TORCH, squared_error(), binary_cross_entropy(), cross_entropy()])
def test_other_losses_do_not_learn_pairs_of_event_and_time(loss) -> None:
    """Two undeclared columns of 0 and 1 are event and time; a loss of two labels would train to the end."""
    with refused("loss.wrong_labels") as caught:
        prepare_run(SURVIVAL, Task(nn.Linear(3, 2), loss), METHOD, rounds=1)
    assert caught.value.field == "task.loss"


@pytest.mark.parametrize(
    "loss", [cox(), exponential_survival(1.0), Loss.per_record("own", lambda o, t: o[:, 0])]
)
def test_losses_of_survival_and_of_users_do(loss) -> None:
    prepare_run(SURVIVAL, Task(nn.Linear(3, 1), loss), METHOD, rounds=1)


@pytest.mark.parametrize("name", ["cox", "squared_error", "cross_entropy"])
def test_losses_of_other_kinds_do_not_learn_yes_and_no(name: str) -> None:
    public = PublicData("toy", ("a", "b"), 9, (3,), "multilabel", targets=2)
    with refused("loss.wrong_labels"):
        prepare_run(public, Task(nn.Linear(3, 2), LOSSES[name]()), METHOD, rounds=1)


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_model_needs_an_output_for_each_label(outputs: int) -> None:
    public = PublicData("toy", ("a", "b"), 9, (3,), "multilabel", targets=2)
    with refused("loss.wrong_labels", "loss.output_shape"):
        prepare_run(public, Task(nn.Linear(3, outputs), binary_cross_entropy()), METHOD, rounds=1)


@pytest.mark.parametrize(
    ("y", "labels"),
    [
        (np.ones((3, 3), np.float32), None),  # three columns are no event and time
        (np.full((3, 2), 0.5, np.float32), "multilabel"),
        (np.ones((3, 2), np.int64), "multilabel"),
        (np.ones(3, np.float32), "multilabel"),
        (np.ones((3, 1), np.float32), "real"),
        (np.ones((3, 2), np.float32), "classes"),
        (np.ones(3, np.float32), "survival"),
        (np.ones(3, np.float32), "yes or no"),
    ],
)
def test_labels_that_are_not_as_declared_are_refused(y: np.ndarray, labels) -> None:
    with refused("data.array", "argument.value"):
        SiloData("a", np.ones((3, 2), np.float32), y, np.zeros(3, np.int64), labels=labels)


def test_silos_with_different_kinds_do_not_fit_together() -> None:
    x, y, user = np.ones((3, 2), np.float32), np.ones((3, 2), np.float32), np.zeros(3, np.int64)
    silos = SiloData("a", x, y, user), SiloData("b", x, y, user, labels="multilabel")
    assert [silo.labels for silo in silos] == ["survival", "multilabel"]
    assert silos[0].digest() != SiloData("a", x, y, user, labels="multilabel").digest()
    with refused("data.federation"):
        Federation(silos, 1, None)


@pytest.mark.parametrize(
    "given",
    [
        {"label": ["a"], "kind": "multilabel"},
        {"label": "a", "kind": "multilabel"},
        {"label": ["a", "b"], "kind": "classes", "classes": [0, 1]},
        {"label": ["a", "b"], "kind": "multilabel", "classes": [0, 1]},
        {"label": ["a", "b"], "kind": "multilabel", "label_typical": [0, 1]},
        {"label": ["a", "b"], "kind": "real", "label_typical": [0, 1]},
        {"label": ["a", "b"], "kind": "real", "label_typical": [[0, 1]]},
        {"label": ["a", 5], "kind": "real"},
        {"label": 5, "kind": "real"},
    ],
)
def test_a_schema_whose_labels_do_not_fit_is_refused(given) -> None:
    with refused("data.kind", "data.schema"):
        Schema(user="u", numeric={"x": (0, 1)}, **given)
