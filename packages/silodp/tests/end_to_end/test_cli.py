"""The command line: one JSON object or one sentence, and nothing left behind by a mistake."""

from __future__ import annotations

import html
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from silodp.cli import main
from silodp.config.resolve import load_config
from silodp.methods import UldpAvg
from silodp.runtime.guarantees import delta_warning
from silodp.runtime.train import train
from support.commands import Silodp, assert_sentence
from support.oracles import logistic_task, small_federation
from support.places import PLUGINS, SOURCES

# --- epsilon ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--user-sampling 0.1", 0.758),
        ("--user-sampling 0.1 --accountant rdp", 0.835),
        ("--user-sampling 0.1 --knows-sample", 2.982),
        ("--user-sampling 0.1 --knows-sample --accountant rdp", 3.340),
        ("", 9.997),
        ("--accountant rdp", 10.726),
        ("--weighting records", 9.997),
        ("--user-sampling 0.1 --adversary server", 0.758),  # the silos draw the sample
        ("--user-sampling 0.1 --adversary server --knows-sample", 2.982),
    ],
)
def test_epsilon_of_uldp_avg_by_the_table_of_the_specification(
    silodp: Silodp, arguments: str, expected: float
) -> None:
    for method in ("uldp-avg", "uldp-sgd"):
        asked = f"epsilon --method {method} --noise-multiplier 5 --rounds 100 --json {arguments}"
        found = silodp(*asked.split())
        assert found.status == 0
        assert found.json["epsilon"] == pytest.approx(expected, abs=1e-3)
        assert found.json["private"] is True
        assert (found.json["method"], found.json["rounds"], found.json["delta"]) == (method, 100, 1e-5)


def test_epsilon_takes_every_field_of_a_method_also_of_a_plug_in(silodp: Silodp) -> None:
    plugin = f"{PLUGINS / 'adaptive_clipping.py'}:AdaptiveClipping"
    rounds = ("--rounds", 100, "--silos", 3, "--json")
    options = ("--noise-multiplier", 5, "--user-sampling", 0.1, *rounds)
    expected = silodp("epsilon", "--method", "uldp-avg", *options).json
    fields = ("--set", "noise_multiplier=5", "--set", "user_sampling=0.1")
    assert silodp("epsilon", "--method", "uldp-avg", *fields, *rounds).json == expected
    found = silodp("epsilon", "--method", plugin, "--set", "quantile=0.3", *options)
    assert found.json["epsilon"] == expected["epsilon"]
    wrong = silodp("epsilon", "--method", plugin, "--set", "quantil=0.3", *options)
    assert_sentence(wrong, code="config.unknown_field")


def test_epsilon_of_another_silo_depends_on_how_many_collude(silodp: Silodp) -> None:
    avg = "epsilon --method uldp-avg --noise-multiplier 5 --rounds 100 --adversary silo --json"
    alone = silodp(*avg.split(), "--silos", 5).json["epsilon"]
    three = silodp(*avg.split(), "--silos", 5, "--colluding", 3).json["epsilon"]
    same = silodp(*avg.replace("silo ", "released ").split()).json["epsilon"]
    assert three < alone < same  # uniform weights: the others hold less of a person, too
    assert silodp(*avg.split(), "--silos", 5, "--colluding", 5).json["private"] is False


@pytest.mark.parametrize(
    "arguments",
    [
        "--method uldp-avg --noise-multiplier 0",
        "--method uldp-avg --noise-multiplier 5 --weighting records --adversary server",
    ],
)
def test_no_privacy_is_said_so(silodp: Silodp, arguments: str) -> None:
    found = silodp("epsilon", "--rounds", 10, *arguments.split(), "--json").json
    assert (found["epsilon"], found["private"]) == (None, False)
    assert found["reason"]


def test_the_program_itself_starts_quickly_and_says_what_it_can() -> None:
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    command = "import sys, silodp.cli.main as c\ntry: c.main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("run", "demo", "plan", "epsilon", "report", "data"):
        assert f"  {name} " in done.stdout


# --- plan ---------------------------------------------------------------------------------------------------


def test_plan_says_what_cannot_be_met(silodp: Silodp, config: Path) -> None:
    assert_sentence(silodp("plan", config, "--target-epsilon", 0), code="argument.value")
    disclosed = ("--set", "method.weighting=records", "--set", "budget={epsilon=1, adversary='server'}")
    assert silodp("plan", config, *disclosed, "--json").json["budget"]["rounds"] == 0


def test_a_model_that_the_noise_hides_is_named(silodp: Silodp, config: Path) -> None:
    """√d/(μU) with μ = √T/σ: at σ = 500 the noise is longer than what all persons say together."""
    spec = load_config(config).build_public_spec()[0]
    ratio = spec.size**0.5 * 500 / (spec.population.users * spec.rounds**0.5)
    assert ratio > 1
    found = silodp("plan", config, "--set", "method.noise_multiplier=500", "--json")
    assert found.json["noise_ratio"] == pytest.approx(ratio)
    assert f"{ratio:.2g} times" in found.err
    most = int(spec.size / ratio**2)
    assert f"at most {most:,} of the {spec.size:,} parameters" in found.err
    assert "times as long" not in silodp("plan", config, "--set", "method.noise_multiplier=5").err
    done = silodp("run", config, "--set", "method.noise_multiplier=500", "--out", "noisy")
    assert f"{ratio:.2g} times" in done.err


LOOPED = """
import torch

class Branches(torch.nn.Linear):
    def forward(self, x):
        return torch.stack([super(Branches, self).forward(r * (2 if r[0].item() > 0 else 1)) for r in x])

def build():
    return Branches(INPUTS, OUTPUTS)
"""


def test_a_model_that_trains_one_person_after_another_is_named_with_its_price(
    silodp: Silodp, config: Path
) -> None:
    spec = load_config(config).build_public_spec()[0]
    code = LOOPED.replace("INPUTS", str(*spec.data.record_shape))
    Path("slow.py").write_text(code.replace("OUTPUTS", str(1 if "binary" in spec.model.loss else 2)))
    found = silodp("plan", config, "--set", "task.model=slow.py:build", "--json")
    assert found.status == 0, found.err
    (remark,) = [one for one in found.json["remarks"] if "one person after another" in one]
    assert float(remark.partition("takes about ")[2].split()[0]) > 0.5
    assert not [one for one in silodp("plan", config, "--json").json["remarks"] if "after another" in one]


# --- run ----------------------------------------------------------------------------------------------------


def test_run_writes_what_is_promised_and_resumes_to_the_same_model(silodp: Silodp, config: Path) -> None:
    first = silodp("run", config, "--out", "a", "--json")
    assert first.status == 0, first.err
    assert "round 2/2" in first.err
    assert first.json["rounds"] == 2
    assert first.json["private"] is True
    assert first.json["releasable"] is False  # the seed
    left = {path.name for path in Path("a").iterdir()}
    expected = {
        "config.toml",
        "metrics.jsonl",
        "guarantee.json",
        "model.safetensors",
        "model.json",
        "MODEL_CARD.md",
        "report.html",
    }
    assert left == expected | {"run_spec.json", "plots", "checkpoint"}

    assert_sentence(silodp("run", config, "--out", "a"), "not empty")
    more = ("--set", "rounds=4")
    resumed = silodp("run", config, *more, "--out", "a", "--resume", "--json")
    straight = silodp("run", "a/config.toml", *more, "--out", "b", "--json")
    assert resumed.json["epsilon"] == straight.json["epsilon"] > first.json["epsilon"]
    models = [load_file(Path(place) / "model.safetensors") for place in ("a", "b")]
    assert all((models[0][name] == models[1][name]).all() for name in models[1])

    assert_sentence(
        silodp("run", config, "--set", "method.clip=1", "--out", "a", "--resume"), code="checkpoint.setup"
    )
    Path("a/report.html").unlink()
    assert silodp("report", "a").status == 0
    assert Path("a/report.html").is_file()


def test_a_run_takes_the_noise_that_meets_a_target(silodp: Silodp, config: Path) -> None:
    text = "\n".join(line for line in config.read_text().splitlines() if "noise_multiplier" not in line)
    config.write_text(text.replace("[budget]", "[budgets_of_nobody]").partition("[budgets_of_nobody]")[0])
    assert_sentence(silodp("run", config), code="config.missing_field")
    done = silodp("run", config, "--target-epsilon", 2, "--out", "target", "--json")
    assert done.status == 0, done.err
    assert 1.99 < done.json["guarantees"]["released"]["epsilon"] <= 2
    # The run's own configuration says the noise, so the run can be resumed without the target.
    planned = silodp("plan", "target/config.toml", "--json").json
    assert planned["adversaries"]["released"]["epsilon"] == done.json["guarantees"]["released"]["epsilon"]
    assert_sentence(silodp("run", config, "--target-epsilon", 0), code="argument.value")


def test_a_budget_stops_a_run(silodp: Silodp, config: Path) -> None:
    found = silodp(
        "run", config, "--set", "rounds=9", "--set", "budget.epsilon=1.1", "--out", "a", "--json"
    ).json
    assert found["stopped"] == "budget"
    assert 0 < found["rounds"] < 9
    assert found["epsilon"] <= 1.1


def test_a_model_that_prints_does_not_spoil_the_json(silodp: Silodp, config: Path) -> None:
    Path("loud.py").write_text(
        "from torch import nn\ndef build(features):\n    print('hello')\n    return nn.Linear(features, 1)\n"
    )
    found = silodp(
        "run", config, "--set", "task.model=loud.py:build", "--set", "rounds=1", "--out", "a", "--json"
    )
    assert found.json["rounds"] == 1
    assert "hello" in found.err


NAN = """
import torch
class Broken(torch.nn.Linear):
    def __init__(self, features):
        super().__init__(features, 1)
    def forward(self, x):
        return super().forward(x) * float("nan")
"""


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("rouns=1", "config.unknown_field"),
        ("method.clip=0", "argument.value"),
        ("task.model=nan.py:Broken", "model.not_finite"),
    ],
)
def test_a_mistake_leaves_nothing_behind(silodp: Silodp, config: Path, override: str, code: str) -> None:
    Path("nan.py").write_text(NAN)
    before = {path.name for path in Path().iterdir()}
    assert_sentence(silodp("run", config, "--set", override, "--out", "out", "--json"), code=code)
    assert {path.name for path in Path().iterdir()} - {"__pycache__"} == before


@pytest.mark.parametrize(("delta", "is_large"), [("0.1", True), ("0.049", False)])
def test_a_run_remarks_once_on_a_delta_that_promises_nothing(
    silodp: Silodp, config: Path, delta: str, is_large: bool
) -> None:
    (remark,) = (one.text for one in delta_warning(0.1, 20))
    planned = silodp("plan", config, "--set", f"delta={delta}", "--users", 20)
    done = silodp("run", config, "--set", f"delta={delta}", "--out", "out", "--json")
    assert [remark in planned.out, remark in done.json["warnings"]] == [is_large, is_large]
    assert done.err.count(remark) == is_large
    assert (remark in html.unescape(Path("out/report.html").read_text())) is is_large


def test_a_plan_refuses_another_delta_as_a_run_does(silodp: Silodp, config: Path) -> None:
    other = ("--set", "budget={epsilon=9.0, delta=1e-6}", "--set", "delta=1e-5")
    planned = silodp("plan", config, *other)
    assert_sentence(planned, "budget.delta = 1e-06 differs from delta = 1e-05")
    assert silodp("run", config, *other, "--out", "out").err == planned.err
    assert silodp("plan", config, *other, "--set", "delta=1e-6").status == 0


def test_the_delta_of_a_budget_is_that_of_the_run(silodp: Silodp, config: Path) -> None:
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("delta")))
    planned = silodp("plan", config, "--set", "budget={epsilon=9.0, delta=1e-6}", "--json").json
    assert planned["delta"] == 1e-6
    assert_sentence(silodp("plan", config, "--set", "budget={epsilon=9.0, delta=2.0}"), "delta = 2.0")
    budget = {"epsilon": 9.0, "delta": 1e-6}
    result = train(small_federation(), logistic_task(), UldpAvg(5.0, 0.5), rounds=1, budget=budget)
    assert result.guarantees["released"].delta == 1e-6


# --- demo ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_demo_learns_and_replaces_only_its_own_runs(silodp: Silodp, config: Path) -> None:
    found = silodp("demo", "--out", "d", "--json").json
    assert found["metrics"]["roc_auc"] > 0.75
    assert found["epsilon"] < 5
    assert found["releasable"] is True
    assert all(guarantee["private"] for guarantee in found["guarantees"].values())
    assert main._is_run_of(main.load_demo().config, Path("d"))
    Path("d/thesis.docx").touch()
    assert_sentence(silodp("demo", "--out", "d"), "not empty")
    assert Path("d/thesis.docx").exists()
