"""A class for every pixel: configured, trained, evaluated by sums, reported, stored, predicted and deployed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import silodp as library
from silodp.config.resolve import load_config
from silodp.data.public import UNLABELED, PublicData
from silodp_deploy.consortium import Consortium
from silodp_deploy.records import load_records, save_records
from support.commands import Silodp
from support.consortium import start_consortium
from support.deployed import assert_same_run, simulate
from support.refusals import refused

CONFIG = """
rounds = 3
seed = 0
aggregator = "masked"
[data]
source = "digit_masks"
users = 100
silos = 3
[task]
options = { width = 4 }
metrics = ["accuracy", "dice", "iou"]
[method]
name = "uldp-avg"
noise_multiplier = 0.2
step = 1.0
[method.local]
learning_rate = 0.1
epochs = 3
batch_size = 8
"""
SUMS = '\n[evaluation]\nacross = "sums"\nnoise_multiplier = 0.5\nclip = 3.0\n'


def write(folder: Path, text: str) -> Path:
    (folder / "config.toml").write_text(text)
    return folder / "config.toml"


@pytest.mark.slow
def test_a_network_learns_masks_and_gives_probabilities_for_every_pixel(
    tmp_path: Path, silodp: Silodp
) -> None:
    text = CONFIG.replace("rounds = 3", "rounds = 12")
    run = silodp("run", write(tmp_path, text), "--out", tmp_path / "run", "--json")
    assert run.status == 0, run.err
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]
    assert last["dice"] > 0.5
    assert last["iou"] < last["dice"]
    model = library.load(tmp_path / "run")
    federation = load_config(tmp_path / "config.toml", ()).load_federation()
    assert federation.test is not None
    found = model.predict(federation.test.x)
    assert found.shape == (len(federation.test), 3, 16, 16)
    np.testing.assert_allclose(found.sum(1), 1)
    assert (found.argmax(1) == federation.test.y).mean() == pytest.approx(last["accuracy"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Dice" in page or "dice" in page
    stored = json.loads((tmp_path / "run" / "model.json").read_text())
    assert stored["label_shape"] == [16, 16]


def test_sums_measure_overlap_under_epsilon(tmp_path: Path, silodp: Silodp) -> None:
    run = silodp("run", write(tmp_path, CONFIG + SUMS), "--out", tmp_path / "run", "--json")
    assert run.status == 0, run.err
    assert "will not be measured" not in run.err
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    confusion = np.array(last["evaluation"]["confusion"])
    assert confusion.shape == (3, 3)
    # 359 held-out records, each one person, of whom all count in full.
    assert confusion.sum() == pytest.approx(359, abs=40)
    assert {"accuracy", "dice", "iou"} >= set(last["metrics"]) >= {"accuracy"}
    assert silodp("report", tmp_path / "run").status == 0
    assert "calibration" not in {path.stem for path in (tmp_path / "run" / "plots").glob("*.png")}


def test_a_plan_knows_the_places_and_counts_the_parameters(tmp_path: Path, silodp: Silodp) -> None:
    planned = silodp("plan", write(tmp_path, CONFIG), "--json")
    assert planned.status == 0, planned.err
    public = load_config(tmp_path / "config.toml", ()).build_public_spec()[0].data
    assert public.label_shape == (16, 16)
    assert PublicData.from_dict(json.loads(json.dumps(public.to_dict()))) == public


def test_records_of_a_silo_are_checked_against_the_agreed_places(tmp_path: Path, silodp: Silodp) -> None:
    made = silodp("deploy", "init", write(tmp_path, CONFIG), "--local", "--out", tmp_path / "c")
    assert made.status == 0, made.err
    consortium = Consortium.load(tmp_path / "c" / "public")
    (path,) = (tmp_path / "c" / "silos" / "silo-1").glob("*.npz")
    data = load_records(path, "silo-1", consortium)
    unlabeled = data.y.copy()
    unlabeled[0, 0] = UNLABELED
    save_records(path, replace(data, y=unlabeled))
    assert (load_records(path, "silo-1", consortium).y == unlabeled).all()
    for wrong in (data.y[:, :8], data.y[:, 0, 0], data.y + 1, np.where(data.y == 0, -1, data.y)):
        save_records(path, replace(data, y=wrong, test=None))
        with refused("deploy.data"):
            load_records(path, "silo-1", consortium)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_silos_on_separate_machines_train_the_same_model(tmp_path: Path) -> None:
    text = 'name = "masks"\n' + CONFIG + SUMS
    simulated = simulate(tmp_path, text)
    with start_consortium(tmp_path, text) as processes:
        processes.start_all()
        assert processes.wait_for_server() == 0, processes.log("server")
        assert_same_run(processes, simulated)


def test_labels_of_places_need_a_model(tmp_path: Path, silodp: Silodp) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\n"
        "import silodp\n"
        "from silodp.data.dataset import Dataset\n"
        "def load(silos: int = 2, users: int = 5):\n"
        "    x, y = np.zeros((9, 4, 2), np.float32), np.zeros((9, 2), np.int64)\n"
        "    user = np.arange(9) % users\n"
        "    tables = tuple(silodp.SiloData(f'silo-{s + 1}', x, y, user) for s in range(silos))\n"
        "    return silodp.Federation(tables, users, None, classes=2, name='own')\n"
        "OWN = Dataset(name='own', loader=load, record_shape=(4, 2), label_shape=(2,), classes=2)\n"
    )
    text = CONFIG.replace("digit_masks", "own.py:OWN").replace("options = { width = 4 }", "")
    found = silodp("plan", write(tmp_path, text))
    assert "task.model" in found.err
    assert "[config.missing_field]" in found.err
