"""Plans of a run with an evaluation by sums: its ε is part of the target, and its metrics are limited."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from silodp.data.public import PublicData
from silodp.methods import UldpSgd
from silodp.runtime.prepare import prepare_run
from silodp.training.losses import binary_cross_entropy
from silodp.training.metrics import accuracy
from silodp.training.task import Task
from support.commands import Silodp
from support.refusals import refused

CODE = """
import numpy as np

from silodp.data import Dataset, Federation, SiloData


def load(users: int = 20, silos: int = 2) -> Federation:
    x, y, user = np.zeros((6, 3), np.float32), np.arange(6) % 2, np.arange(6)
    test = SiloData("test", x, y, user)
    parts = tuple(SiloData(f"clinic {s}", x, y, user, test=test) for s in range(silos))
    return Federation(parts, users, test, name="six", classes=2)


SIX = Dataset(name="six", loader=load, record_shape=(3,), classes=2)


def recall(outputs, targets):
    return 0.5
"""


@pytest.fixture
def code(config: Path) -> Path:
    path = config.parent / "own.py"
    path.write_text(CODE)
    return path


def test_metrics_that_sums_do_not_estimate_are_named_before_the_run(
    silodp: Silodp, config: Path, code: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (
        *("--set", f"data={{source='{code}:SIX'}}"),
        *("--set", f'task.metrics=["accuracy", "{code}:recall"]'),
        *("--set", "rounds=1"),
    )
    sums = "evaluation={across='sums', noise_multiplier=5.0}"
    for command in (("plan",), ("run", "--out", "sums")):
        ran = silodp(*command, config, *settings, "--set", sums)
        assert ran.status == 0, ran
        lines = [*ran.err.splitlines(), *caplog.messages]
        (told,) = [line for line in lines if "recall will not be measured" in line]
        assert "accuracy and roc_auc alone" in told
    ran = silodp("run", config, *settings, "--set", "evaluation={across='local'}", "--out", "local")
    assert ran.status == 0, ran
    assert "local/checkpoint/silo_metrics" in ran.err
    assert "recall" in (Path("local") / "checkpoint" / "silo_metrics" / "000.jsonl").read_text()


def test_evaluation_by_sums_of_counts_is_refused_and_within_silos_measures() -> None:
    public = PublicData("toy", ("a", "b"), 120, (5,), "multilabel", targets=2)
    method = UldpSgd(noise_multiplier=0.3, step=1.0)
    task = Task(nn.Linear(5, 2), binary_cross_entropy(), {"accuracy": accuracy})
    with refused("evaluation.labels"):
        sums = {"across": "sums", "noise_multiplier": 5.0}
        prepare_run(public, task, method, rounds=1, evaluation=sums)
    local = prepare_run(public, task, method, rounds=1, evaluation={"across": "local"})
    assert [one.stated for one in local.series] == ["local"]
