"""Survival of persons with one record each, of which the loss of Cox learns nothing."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import silodp.cli.run as cli_run
from silodp.config.resolve import load_config
from silodp.methods import Ddp
from silodp.runtime.callback import Callback, OnRound, Result, RoundResult
from silodp.runtime.train import train
from silodp.training.losses import cox
from silodp_deploy.consortium import Consortium
from silodp_deploy.records import load_records
from silodp_deploy.setup import draft_public
from support.commands import Silodp, assert_sentence

CONFIG = """
rounds = 10
seed = 1
[data]
source = "tables"
files = { lyon = "lyon.csv", porto = "porto.csv" }
[data.schema]
user = "person"
kind = "survival"
event = "observed"
time = "months"
out_of_range = "clip"
test_share = 0.3
users = "people.txt"
numeric = { age = { range = [18, 100], typical = [60, 15] }, size = { range = [0, 60], typical = [25, 15] } }
[task]
loss = "exponential_survival"
loss_options = { typical_time = 60 }
[method]
name = "uldp-sgd"
noise_multiplier = 1.0
step = 1.0
"""
COX = ("--set", "task.loss=cox", "--set", "task.loss_options={}")
FEW_RECORDS = "persons have no two records in one silo, and the loss of Cox learns nothing from them"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tables of 600 persons with one record each: the older and the larger, the earlier the event."""
    coins, people = np.random.default_rng(0), [f"p{number}" for number in range(600)]
    for name, here in (("lyon", people[:300]), ("porto", people[300:])):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["person", "age", "size", "observed", "months"])
            for person in here:
                a, b = coins.standard_normal(2)
                event, censored = coins.exponential(40 * np.exp(-a - b)), coins.uniform(5, 120)
                row = [60 + 12 * a, 25 + 12 * b, int(event < censored), min(event, censored)]
                table.writerow([person, *np.round(row, 2).tolist()])
    (tmp_path / "people.txt").write_text("\n".join(people))
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def test_persons_with_one_record_are_learned_from(folder: Path, silodp: Silodp) -> None:
    single = silodp("run", folder / "config.toml", "--out", folder / "run", "--json")
    assert single.json["metrics"]["concordance"] > 0.7
    assert not any(FEW_RECORDS in warning for warning in single.json["warnings"])
    by_cox = silodp("run", folder / "config.toml", "--out", folder / "cox", "--json", *COX)
    assert by_cox.json["metrics"]["concordance"] < 0.65
    assert any(FEW_RECORDS in warning for warning in by_cox.json["warnings"])


def test_a_method_that_clips_records_takes_the_loss(folder: Path) -> None:
    config = load_config(folder / "config.toml")
    federation = config.load_federation()
    method = Ddp(
        noise_multiplier=1.0,
        clip=1.0,
        local_steps=3,
        record_sampling=0.5,
        expected_batch_size=100.0,
        local_learning_rate=0.5,
    )
    result = train(federation, config.build_task(federation), method, rounds=5, seed=1, delta=1e-4)
    assert result.metrics[-1]["metrics"]["concordance"] > 0.7


def test_the_warning_is_for_most_persons_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of persons with several records in a silo the loss of Cox learns."""
    for name in ("lyon", "porto"):
        head, *rows = (folder / f"{name}.csv").read_text().splitlines()
        (folder / f"{name}.csv").write_text("\n".join([head, *rows, *rows[: len(rows) * 2 // 3]]))
    config = load_config(folder / "config.toml", ["task.loss=cox", "task.loss_options={}"])
    federation = config.load_federation()
    with caplog.at_level(logging.WARNING):
        train(federation, config.build_task(federation), config.method, rounds=1, delta=1e-5)
    assert FEW_RECORDS not in caplog.text


def test_the_warning_comes_before_the_first_round(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget is not spent yet, and Ctrl-C ends the run; afterwards it is in the report."""
    told = []
    train_all = cli_run.run

    def watch(*parts: Any, callbacks: list[Callback], **options: Any) -> Result:
        def listen(_: RoundResult) -> None:
            told.append(FEW_RECORDS in capsys.readouterr().err)

        return train_all(*parts, callbacks=[*callbacks, OnRound(listen)], **options)

    monkeypatch.setattr(cli_run, "run", watch)
    config = load_config(folder / "config.toml", ["task.loss=cox", "task.loss_options={}", "rounds=1"])
    summary = cli_run.run_config(config, folder / "run")
    assert told == [True, False]
    assert FEW_RECORDS not in capsys.readouterr().err
    assert FEW_RECORDS in (folder / "run" / "report.html").read_text()
    assert any(FEW_RECORDS in warning for warning in summary["warnings"])


def test_a_silo_is_told_by_itself(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the configuration alone: the silo may not have agreed yet to the code that builds a task."""
    tables = {name: folder / f"{name}.csv" for name in ("lyon", "porto")}
    begin, end = CONFIG.index("[task]"), CONFIG.index("[method]")
    cases = {
        "exponential": (CONFIG, False),
        "cox": (f'{CONFIG[:begin]}[task]\nmodel = "net.py:network"\nloss = "cox"\n{CONFIG[end:]}', True),
        "default": (CONFIG[:begin] + CONFIG[end:], True),
    }
    executed = folder / "executed"
    code = "import torch\ndef network(features):\n    return torch.nn.Linear(features, 1)\n"
    (folder / "net.py").write_text(f"import pathlib\npathlib.Path({str(executed)!r}).touch()\n{code}")
    for name, (text, told) in cases.items():
        (folder / f"{name}.toml").write_text(text.replace("net.py", str(folder / "net.py")))
        draft = load_config(folder / f"{name}.toml")
        draft_public(draft, folder / name, draft.read_public_data())
        executed.unlink(missing_ok=True)  # the coordinator runs it
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load_records(tables["lyon"], "lyon", Consortium.load(folder / name))
        assert (FEW_RECORDS in caplog.text) is told
        assert not executed.exists()


def test_a_silo_without_training_records_is_told_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    none = np.zeros((0, 2), np.float32)
    np.savez(folder / "lyon.npz", x=none, y=none, user=np.zeros(0, np.int64))
    draft = load_config(folder / "config.toml", ["task.loss=cox", "task.loss_options={}"])
    draft_public(draft, folder / "public", draft.read_public_data())
    with caplog.at_level(logging.WARNING):
        load_records(folder / "lyon.npz", "lyon", Consortium.load(folder / "public"))
    assert FEW_RECORDS not in caplog.text


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        ("{}", "config.missing_field", "task.loss_options.typical_time"),
        ("{typical_time=0}", "argument.value", "typical_time"),
        ("{typical_time=nan}", "argument.value", "typical_time"),
        ("{typical=60}", "config.unknown_field", "typical_time"),
        ('{typical_time="60"}', "config.value", "typical_time"),
    ],
)
def test_a_typical_time_is_a_number_above_0(
    folder: Path, silodp: Silodp, options: str, code: str, word: str
) -> None:
    for command in ("plan", "run"):
        done = silodp(command, folder / "config.toml", "--set", f"task.loss_options={options}")
        assert_sentence(done, word, code=code)


def test_options_are_those_of_a_named_loss(folder: Path, silodp: Silodp) -> None:
    (folder / "own.py").write_text("def loss(outputs, targets):\n    return outputs[:, 0] ** 2\n")
    own = f"task.loss={folder / 'own.py'}:loss"
    assert_sentence(silodp("run", folder / "config.toml", "--set", own), code="argument.conflict")
    weighted = ["task.loss=cross_entropy", "task.loss_options={class_weights=[1, 2, 3]}"]
    config = load_config(folder / "config.toml", weighted).config
    assert config.task.loss_options == {"class_weights": [1, 2, 3]}


def test_a_run_is_not_resumed_with_another_typical_time(folder: Path, silodp: Silodp) -> None:
    assert silodp("run", folder / "config.toml", "--out", folder / "run", "--set", "rounds=1").status == 0
    changed = ("--set", "task.loss_options.typical_time=5", "--set", "rounds=2")
    done = silodp("run", folder / "config.toml", "--out", folder / "run", "--resume", *changed)
    assert_sentence(done, code="checkpoint.setup")
    renamed = silodp("run", folder / "run", "--resume", "--set", "rounds=2", *COX)
    assert_sentence(renamed, code="checkpoint.setup")
    assert silodp("run", folder / "run", "--resume", "--set", "rounds=2").status == 0


def test_options_without_a_value_are_none_when_a_run_goes_on(folder: Path, silodp: Silodp) -> None:
    """config.toml of the run has no empty tables."""
    for rounds, resume in ((1, ()), (2, ("--resume",))):
        changes = ("--set", f"rounds={rounds}", *COX)
        done = silodp("run", folder / "config.toml", "--out", folder / "run", *resume, *changes)
        assert done.status == 0, done.err


def test_a_run_is_not_resumed_with_a_loss_of_code_in_place_of_one_of_silodp(
    folder: Path, silodp: Silodp
) -> None:
    """It has the same name, by which the checkpoint knows it."""
    assert (
        silodp("run", folder / "config.toml", "--out", folder / "run", "--set", "rounds=1", *COX).status == 0
    )
    code = "from silodp.training import Loss\n\ncox = Loss('cox', lambda outputs, targets, mask: outputs.sum())\n"
    (folder / "own.py").write_text(code)
    own = ("--set", f"task.loss={folder / 'own.py'}:cox", "--set", "rounds=2")
    done = silodp("run", folder / "run", "--resume", *own)
    assert_sentence(done, code="checkpoint.setup")


def test_cox_has_no_options(folder: Path, silodp: Silodp) -> None:
    done = silodp("plan", folder / "config.toml", "--set", "task.loss=cox")
    assert_sentence(done, code="config.unknown_field")
    assert cox().name == "cox"


def test_a_network_of_silodp_gives_one_log_hazard(folder: Path, silodp: Silodp) -> None:
    """Its default is a logit for each of two classes."""
    config = load_config(folder / "config.toml", ["task.model=mlp"])
    spec, _ = config.build_public_spec()
    assert config.build_task(spec.data).size == spec.size
    changes = ("--set", "task.model=mlp", "--set", "rounds=1")
    done = silodp("run", folder / "config.toml", "--out", folder / "run", *changes)
    assert done.status == 0, done.err
