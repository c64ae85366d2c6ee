"""A silo's head of a model: trained, kept, used for predictions, and refused where it does not belong."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import nn

import silodp as library
from silodp.data.silo_data import SiloData
from silodp.training import LocalTraining, binary_cross_entropy, cox, cross_entropy, squared_error
from silodp.training.losses import Loss
from silodp.training.models import unet
from silodp_analytics.silo_head.head import RECALIBRATED, STATEMENT, SiloHead, train_silo_head
from support.commands import Silodp, assert_sentence
from support.oracles import small_federation
from support.refusals import refused

CONFIG = """
rounds = 5
seed = 1
[data]
source = "tables"
files = { north = "north.csv", south = "south.csv" }
[data.schema]
user = "person"
label = "ill"
classes = ["no", "yes"]
test_share = 0.3
numeric = { age = { range = [0, 110], typical = [60, 20] }, dose = { range = [0, 20], typical = [8, 4] } }
[data.schema.readers.south]
separator = ";"
[method]
name = "uldp-sgd"
noise_multiplier = 1.0
step = 1.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tables of which one has three times as many ill persons as the same records would have in the other."""
    coins = np.random.default_rng(0)
    for name, shift, separator in (("north", -1.5, ","), ("south", 1.5, ";")):
        age, dose = coins.normal(60, 20, 400).clip(0, 110), coins.normal(8, 4, 400).clip(0, 20)
        ill = (age - 60) / 20 + (dose - 8) / 4 + shift + coins.logistic(size=400) > 0
        person = [f"P{number}" for number in coins.integers(0, 150, 400)]
        table = pd.DataFrame({"person": person, "age": age, "dose": dose, "ill": np.where(ill, "yes", "no")})
        table.to_csv(tmp_path / f"{name}.csv", index=False, sep=separator)
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def run(folder: Path, silodp: Silodp) -> Path:
    assert silodp("run", folder / "config.toml", "--out", folder / "run").status == 0
    return folder / "run"


def test_a_silo_shifts_the_outputs_to_what_its_records_say(run: Path, folder: Path, silodp: Silodp) -> None:
    out = folder / "north.safetensors"
    made = silodp("fine-tune", run, folder / "north.csv", "--out", out, "--silo", "north", "--json")
    assert made.status == 0, made.err
    assert "is not secret that each of them" not in made.err
    assert made.json["numbers"] == 2
    assert made.json["with_head"]["loss"] < made.json["shared"]["loss"]
    # One number for all records of a silo changes no order.
    assert made.json["with_head"]["roc_auc"] == pytest.approx(made.json["shared"]["roc_auc"])
    assert made.json["not_covered"] == STATEMENT
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    tensors = load_file(out)
    assert set(tensors) == {"outputs.scale", "outputs.shift"}
    assert float(tensors["outputs.shift"]) < 0  # few are ill here
    # A head of the other silo, from its own kind of file, shifts the other way.
    south = folder / "south.safetensors"
    made = silodp(
        "fine-tune", run, folder / "south.csv", "--out", south, "--silo", "south", "--parameters", "weight"
    )
    assert made.status == 0, made.err
    assert STATEMENT in made.out
    assert set(load_file(south)) == {"outputs.scale", "outputs.shift", "model.weight"}
    assert float(load_file(south)["outputs.shift"]) > 0


def test_each_silo_of_a_simulated_run_gets_a_head(run: Path, folder: Path, silodp: Silodp) -> None:
    made = silodp("fine-tune", run, "--out", folder / "heads", "--json")
    assert made.status == 0, made.err
    rows = made.json["silos"]
    assert [Path(row["out"]).name for row in rows] == ["north.safetensors", "south.safetensors"]
    assert all(row["with_head"]["loss"] < row["shared"]["loss"] for row in rows)
    north, south = (
        float(load_file(folder / "heads" / f"{name}.safetensors")["outputs.shift"])
        for name in ("north", "south")
    )
    assert north < 0 < south
    # The report shows what was measured, as private, for as long as the model is that one.
    assert silodp("report", run).status == 0
    page = (run / "report.html").read_text()
    assert "Heads of the silos" in page
    for row in rows:
        assert f"{row['with_head']['roc_auc']:.4g}" in page
    kept = run / "plots" / "silo_heads.json"
    kept.write_text(kept.read_text().replace('"weights": "', '"weights": "0'))
    assert silodp("report", run).status == 0
    assert "Heads of the silos" not in (run / "report.html").read_text()
    # Nothing is overwritten, and one silo alone can be named.
    assert_sentence(silodp("fine-tune", run, "--out", folder / "heads"), "name a new folder")
    other = silodp("fine-tune", run, "--out", folder / "other", "--silo", "noth")
    assert_sentence(other, code="argument.value")
    assert silodp("fine-tune", run, "--out", folder / "one", "--silo", "south").status == 0
    assert [path.name for path in (folder / "one").iterdir()] == ["south.safetensors"]


def test_predictions_use_the_head(run: Path, folder: Path, silodp: Silodp) -> None:
    head = folder / "head.safetensors"
    assert silodp("fine-tune", run, folder / "north.csv", "--out", head, "--silo", "north").status == 0
    arguments = ("predict", run, folder / "north.csv", "--silo", "north", "--out")
    shared, tuned = folder / "shared.csv", folder / "tuned.csv"
    assert silodp(*arguments, shared).status == 0
    made = silodp(*arguments, tuned, "--head", head)
    assert made.status == 0, made.err
    assert STATEMENT in made.out
    before, after = (pd.read_csv(path)["probability_yes"].to_numpy() for path in (shared, tuned))
    tensors = load_file(head)
    logit = np.log(before / (1 - before)) * float(tensors["outputs.scale"]) + float(tensors["outputs.shift"])
    np.testing.assert_allclose(after, 1 / (1 + np.exp(-logit)), rtol=1e-4)
    model = library.load(run, head=head)
    assert STATEMENT in repr(model)
    np.testing.assert_allclose(model.predict_table(folder / "north.csv")["probability_yes"], after, rtol=1e-6)


def test_heads_of_other_models_and_other_files_are_refused(run: Path, folder: Path, silodp: Silodp) -> None:
    head = folder / "head.safetensors"
    assert silodp("fine-tune", run, folder / "north.csv", "--out", head, "--silo", "north").status == 0
    assert silodp("run", folder / "config.toml", "--set", "seed=2", "--out", folder / "other").status == 0
    predict = ("predict", folder / "other", folder / "north.csv", "--out", folder / "p.csv", "--head")
    assert "[bundle.mixed]" in silodp(*predict, head).err
    (folder / "text.safetensors").write_text("no head")
    about = {"run": "r", "weights": "w", "epochs": "1", "about": "nothing"}
    (folder / "few.safetensors").write_bytes(save_tensors({"outputs.scale": torch.ones(())}, about))
    for path, code in (
        (folder / "text.safetensors", "bundle.damaged"),
        (folder / "few.safetensors", "bundle.damaged"),
        (run / "model.safetensors", "bundle.damaged"),
        (folder / "none.safetensors", "bundle.missing"),
        (folder, "bundle.damaged"),
    ):
        found = silodp(*predict, path)
        assert_sentence(found, code=code)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--out", "own.csv"), "argument.value"),
        (("--out", "config.toml"), "argument.value"),
        (("--out", "head.safetensors", "--parameters", "wieght"), "argument.value"),
        (("--out", "head.safetensors", "--silo", "noth"), "argument.value"),
        (("--out", "head.safetensors", "--epochs", "0"), "argument.value"),
        (("--out", "head.safetensors", "--learning-rate", "nan"), "argument.value"),
    ],
)
def test_wrong_options_are_refused(run: Path, folder: Path, silodp: Silodp, options, code: str) -> None:
    options = [folder / one if one.endswith((".csv", ".toml", ".safetensors")) else one for one in options]
    found = silodp("fine-tune", run, folder / "north.csv", *options)
    assert found.status == 2
    assert f"[{code}]" in found.err, found.err
    assert not (folder / "head.safetensors").exists()


CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


def test_no_code_that_a_configuration_names_is_run(run: Path, folder: Path, silodp: Silodp) -> None:
    (run / "own.py").write_text(CODE)
    config, out = run / "config.toml", folder / "head.safetensors"
    text = config.read_text()
    for changed, code in (
        (text + '\n[task]\nloss = "own.py:loss"\n', "bundle.code"),
        (text.replace('source = "tables"', 'source = "own.py:DATA"'), "bundle.no_schema"),
    ):
        config.write_text(changed)
        assert f"[{code}]" in silodp("fine-tune", run, folder / "north.csv", "--out", out).err
        assert "[bundle.code]" in silodp("fine-tune", run, "--out", folder / "heads").err
    config.write_text(
        text.replace('name = "uldp-sgd"', 'name = "own.py:Own"') + '\n[task]\nmetrics = ["own.py:m"]\n'
    )
    made = silodp("fine-tune", run, folder / "north.csv", "--out", out)
    assert made.status == 0, made.err
    assert not (run / "ran").exists()


def test_a_silo_whose_records_say_nothing_keeps_the_shared_model() -> None:
    """Labels are drawn by the model itself, so nothing is left to learn; too large steps would diverge."""
    coins = np.random.default_rng(0)
    model = nn.Linear(3, 1)
    x = coins.standard_normal((60, 3)).astype(np.float32)
    chance = torch.sigmoid(model(torch.from_numpy(x))).detach().numpy()[:, 0]
    y = (coins.random(60) < chance).astype(np.int64)
    tensors, epochs = train_silo_head(
        model, binary_cross_entropy(), (x, y, np.arange(60)), ["*"], LocalTraining(1e6, 3, 4), seed=0
    )
    assert epochs == 0
    assert float(tensors["outputs.scale"]) == 1
    assert torch.equal(tensors["model.weight"], model.weight)


def test_persons_are_never_in_two_folds() -> None:
    """Each person has one label of their own and a feature that names them: across persons nothing can be learned."""
    coins = np.random.default_rng(1)
    user = np.repeat(np.arange(40), 10)
    x = np.eye(40, dtype=np.float32)[user]
    y = coins.integers(0, 2, 40)[user]
    model = nn.Linear(40, 1)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, float(np.log(y.mean() / (1 - y.mean()))))
    _, epochs = train_silo_head(
        model, binary_cross_entropy(), (x, y, user), ["*"], LocalTraining(0.5, 20, 16), seed=0
    )
    assert epochs <= 1


class Mask(nn.Module):
    """One logit in every place, without a dimension of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(1, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x).squeeze(1)


@pytest.mark.parametrize("kind", ["classes", "two", "dense_labels", "mask", "real", "survival"])
def test_every_kind_of_label(kind: str) -> None:
    coins, user = np.random.default_rng(0), np.arange(30) // 2
    x = coins.standard_normal((30, 4)).astype(np.float32)
    model, y, loss, size = {
        "classes": (nn.Linear(4, 3), coins.integers(0, 3, 30), cross_entropy(), 4),
        "two": (
            nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)),
            coins.integers(0, 2, 30),
            binary_cross_entropy(),
            2,
        ),
        "dense_labels": (unet((1, 4, 4), 3), coins.integers(0, 3, (30, 4, 4)), cross_entropy(), 4),
        "mask": (Mask(), coins.integers(0, 2, (30, 2, 4)), binary_cross_entropy(), 2),
        "real": (nn.Linear(4, 2), coins.standard_normal((30, 2)).astype(np.float32), squared_error(), 3),
        "survival": (
            nn.Linear(4, 1),
            np.stack([coins.integers(0, 2, 30), coins.exponential(size=30)], 1).astype(np.float32),
            cox(),
            2,
        ),
    }[kind]
    if kind == "mask":  # two rows of places are no two logits
        x = coins.standard_normal((30, 1, 2, 4)).astype(np.float32)
    if kind == "dense_labels":
        x = coins.standard_normal((30, 1, 4, 4)).astype(np.float32)
    tensors, _ = train_silo_head(model, loss, (x, y, user), local=LocalTraining(0.01, 2, 8), seed=0)
    assert sum(one.numel() for one in tensors.values()) == size


def test_records_of_another_kind_are_refused(tmp_path: Path) -> None:
    federation, network = small_federation(), nn.Linear(4, 1)
    task = library.Task(network, binary_cross_entropy())
    method = library.methods.UldpSgd(noise_multiplier=1.0, step=1.0)
    library.train(federation, task, method, rounds=1, out=tmp_path / "run", seed=0)
    model, silo = library.load(tmp_path / "run", model=network), federation.silos[0]
    once, twice = model.fine_tune(silo, seed=3), model.fine_tune(silo, seed=3).fine_tune(silo, seed=3)
    assert once.head is not None
    assert twice.head is not None
    assert all(torch.equal(one, twice.head.tensors[name]) for name, one in once.head.tensors.items())
    for wrong, code in (
        (replace(silo, x=silo.x[:, :3]), "argument.shape"),
        (SiloData("a", silo.x, silo.y.astype(np.float32), silo.user), "data.kind"),
        (replace(silo, user=np.zeros_like(silo.user)), "data.no_records"),
        ("north.csv", "argument.type"),
    ):
        with refused(code):
            model.fine_tune(wrong)  # type: ignore[arg-type]
    described = replace(model.description, predicts_labels=False)
    with refused("argument.missing"):
        replace(model, description=described).fine_tune(silo)
    loss = Loss.per_record("own", lambda o, t: (o[:, 0] - t).square())
    assert replace(model, description=described).fine_tune(silo, loss=loss, seed=0).head is not None


SUMS = """
[evaluation]
across = "sums"
noise_multiplier = 0.5
clip = 2.0
by = ["dose"]
[card]
subgroups = { dose = [4, 8, 12] }
"""


def test_outputs_are_recalibrated_by_noisy_counts(folder: Path, silodp: Silodp) -> None:
    (folder / "config.toml").write_text(CONFIG + SUMS)
    assert silodp("run", folder / "config.toml", "--out", folder / "run").status == 0
    page = (folder / "run" / "report.html").read_text()
    assert "If a threshold decides" in page
    assert "silodp recalibrate" in page
    assert "The largest differences between subgroups" in page
    assert "Decision curve" in page
    out = folder / "fixed.safetensors"
    made = silodp("recalibrate", folder / "run", "--out", out, "--json")
    assert made.status == 0, made.err
    assert made.json["after"] < made.json["before"]
    assert made.json["about"] == RECALIBRATED
    arguments = ("predict", folder / "run", folder / "north.csv", "--silo", "north", "--out")
    assert silodp(*arguments, folder / "shared.csv").status == 0
    fixed = silodp(*arguments, folder / "fixed.csv", "--head", out)
    assert fixed.status == 0, fixed.err
    assert RECALIBRATED in fixed.out
    assert STATEMENT not in fixed.out
    before, after = (
        pd.read_csv(folder / f"{name}.csv")["probability_yes"].to_numpy() for name in ("shared", "fixed")
    )
    logit = np.log(before / (1 - before)) * made.json["scale"] + made.json["shift"]
    np.testing.assert_allclose(after, 1 / (1 + np.exp(-logit)), rtol=1e-4)


def test_a_silo_gets_the_shift_of_its_own_noisy_counts(folder: Path, silodp: Silodp) -> None:
    """North has few positive records and south many; the shared model has one prevalence for both."""
    (folder / "config.toml").write_text((CONFIG + SUMS).replace('by = ["dose"]', "by_silo = true"))
    assert silodp("run", folder / "config.toml", "--out", folder / "run").status == 0
    page = (folder / "run" / "report.html").read_text()
    assert "silodp recalibrate --silo" in page
    shifts = {}
    for silo in ("north", "south"):
        out = folder / f"{silo}.safetensors"
        made = silodp("recalibrate", folder / "run", "--out", out, "--silo", silo, "--json")
        assert made.status == 0, made.err
        assert made.json["after"] < made.json["before"]
        shifts[silo] = made.json["shift"]
        assert float(load_file(out)["outputs.shift"]) == pytest.approx(shifts[silo])
    everyone = silodp("recalibrate", folder / "run", "--out", folder / "all.safetensors", "--json").json
    assert shifts["north"] < everyone["shift"] < shifts["south"]
    wrong = silodp("recalibrate", folder / "run", "--out", folder / "no.safetensors", "--silo", "noth")
    assert_sentence(wrong, code="argument.value")
    arguments = (
        "predict",
        folder / "run",
        folder / "north.csv",
        "--silo",
        "north",
        "--out",
        folder / "p.csv",
    )
    assert silodp(*arguments, "--head", folder / "north.safetensors").status == 0


def test_counts_that_no_epsilon_covers_are_not_written(folder: Path, silodp: Silodp) -> None:
    text = (CONFIG + SUMS).replace("noise_multiplier = 1.0", "noise_multiplier = 0.0")
    (folder / "config.toml").write_text(text)
    assert silodp("run", folder / "config.toml", "--out", folder / "run").status == 0
    found = silodp("recalibrate", folder / "run", "--out", folder / "fixed.safetensors")
    assert_sentence(found, code="evaluation.noise")
    assert not (folder / "fixed.safetensors").exists()


def test_without_noisy_counts_nothing_is_recalibrated(run: Path, folder: Path, silodp: Silodp) -> None:
    found = silodp("recalibrate", run, "--out", folder / "fixed.safetensors")
    assert_sentence(found, code="evaluation.labels")
    page = (run / "report.html").read_text()
    assert "Computed from private held-out records" in page
    assert "silodp recalibrate" not in page


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_shift_of_two_logits_is_that_of_the_second_class(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(dtype)
    fixed = SiloHead.of_recalibration("r", "w", 0.5, -1.0).apply(model)
    x = torch.randn(5, 3, dtype=dtype)
    logit = model(x)[:, 1] - model(x)[:, 0]
    torch.testing.assert_close(fixed(x)[:, 1] - fixed(x)[:, 0], 0.5 * logit - 1)
    ends = torch.tensor([[-torch.inf], [torch.inf]], dtype=dtype)
    for limits, wanted in ((None, ends), ((2.0, 0.5), torch.tensor([[-2.25], [0.25]], dtype=dtype))):
        fixed = SiloHead.of_recalibration("r", "w", 0.5, -1.0, limits).apply(nn.Linear(1, 1).to(dtype))
        torch.testing.assert_close(fixed.outputs(ends), wanted)
