"""What a run says when it is stopped, resumed, blind or diverging, and what help and plans say at their limits."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

from silodp.accounting.accountant import compute_epsilon as told_epsilon
from silodp.accounting.events import Gaussian
from silodp.accounting.guarantee import Guarantee, format_epsilon
from silodp.cli import main
from silodp.cli.run import run_config as run_configured
from silodp.report.guarantee_text import describe_guarantee
from support.commands import Silodp, assert_sentence
from support.configs import TABLES

STOPS_ONCE = """
from pathlib import Path
def stops_once(outputs, targets):
    seen = Path("seen")
    seen.write_text((seen.read_text() if seen.exists() else "") + "x")
    if seen.read_text() == "xxx":  # untrained, round 1, round 2
        raise KeyboardInterrupt
    return 0.5
"""
BREAKS = """
import itertools
calls = itertools.count()
def breaks(outputs, targets):
    return 1.0 if next(calls) == 0 else float("inf")
"""
STEEP = """
import torch
class Steep(torch.nn.Linear):
    def __init__(self, features):
        super().__init__(features, 1)
    def forward(self, x):
        return super().forward(x) * 1e20
"""


# --- Ctrl-C and --resume ------------------------------------------------------------------------------------


def test_an_interrupted_run_names_the_command_that_goes_on(silodp: Silodp, config: Path) -> None:
    Path("own.py").write_text(STOPS_ONCE)
    more = ("--set", "rounds=3", "--set", "task.metrics=['own.py:stops_once']")
    stopped = silodp("run", config, *more, "--out", "a dir", "--json")
    assert (stopped.status, stopped.json["error"]["code"]) == (130, "cli.interrupted")
    last = stopped.err.splitlines()[-1]
    assert last == "interrupted after round 1; continue with: silodp run 'a dir' --resume"
    assert stopped.json["error"]["message"] == last
    assert "Traceback" not in stopped.err
    command = shlex.split(last.partition("continue with: ")[2])
    resumed = silodp(*command[1:], "--json")  # without repeating any --set
    assert resumed.status == 0, resumed.err
    assert resumed.json["rounds"] == 3
    assert "note" not in resumed.err
    assert "checked against the ledger (3 rounds)" in Path("a dir/report.html").read_text()


def test_a_run_stopped_before_its_first_round_has_nothing_to_continue(
    silodp: Silodp, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("silodp.cli.run.run", stop)
    stopped = silodp("run", config, "--out", "a")
    assert (stopped.status, stopped.err.count("\n")) == (130, 1)
    assert stopped.err.startswith("interrupted before the first round")


def test_the_demo_answers_ctrl_c_without_a_traceback(
    silodp: Silodp, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("silodp.config.resolve.ResolvedRun.load_federation", stop)
    stopped = silodp("demo")
    assert (stopped.status, stopped.out) == (130, "")
    assert stopped.err.startswith("interrupted")
    assert stopped.err.count("\n") == 1


@pytest.mark.parametrize(
    ("where", "done"),
    [
        ("silodp.config.resolve.ResolvedRun.load_federation", None),
        ("silodp.cli.run.find_doubts", None),
        ("silodp.cli.run.write_report", 2),
        ("silodp.cli.run.read_run", 2),
        ("silodp.cli.run.write_card", 2),
    ],
)
def test_ctrl_c_says_how_to_go_on_wherever_it_comes(
    silodp: Silodp, config: Path, monkeypatch: pytest.MonkeyPatch, where: str, done: int | None
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(where, stop)
        stopped = silodp("run", config, "--out", "a")
        assert stopped.status == 130
        last = stopped.err.splitlines()[-1]
        if done is None:
            assert last.startswith("interrupted before the first round; start again")
            assert not Path("a").exists()
        else:
            assert last == f"interrupted after round {done}; continue with: silodp run a --resume"
    again = ["a", "--resume"] if done else [config, "--out", "a"]
    assert silodp("run", *again).status == 0
    assert silodp("report", "a").status == 0
    if done is None:  # the run that is there is another one
        with monkeypatch.context() as patch:
            patch.setattr(where, stop)
            assert "before the first round" in silodp("run", config, "--out", "a").err
            assert "after round 2; continue with" in silodp("run", "a", "--resume").err


def test_ctrl_c_in_another_command_says_to_give_it_again(
    silodp: Silodp, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("silodp.report.run_record.read_run", stop)
    stopped = silodp("report", "a")
    assert (stopped.status, stopped.err) == (130, "interrupted; give the same command again\n")


@pytest.mark.parametrize(("rounds", "is_long"), [(10**9, True), (4, False)])
def test_a_run_of_days_says_so_as_soon_as_its_speed_is_known(
    silodp: Silodp, config: Path, rounds: int, is_long: bool
) -> None:
    Path("own.py").write_text(STOPS_ONCE.replace('"xxx"', '"xxxx"'))
    stopped = silodp(
        "run", config, "--set", f"rounds={rounds}", "--set", "task.metrics=['own.py:stops_once']"
    )
    assert stopped.status == 130
    notes = [line for line in stopped.err.splitlines() if line.startswith("note: at this speed")]
    assert len(notes) == is_long
    assert all("days" in note for note in notes)


def test_resuming_says_what_is_different(silodp: Silodp, config: Path) -> None:
    assert silodp("run", config, "--out", "a").status == 0
    more = ("--set", "rounds=3", "--set", "evaluate_every=2", "--out", "a", "--resume")
    resumed = silodp("run", config, *more)
    assert resumed.status == 0
    assert resumed.err.splitlines()[0] == (
        "note: resumed with changes to a/config.toml: evaluate_every was 1, now 2; rounds was 2, now 3"
    )
    assert "unlike" not in silodp("run", "a/config.toml", "--out", "a", "--resume").err
    kept = Path("a/config.toml").read_text()
    assert "rounds = 3" in kept
    assert "\n# After round 2: evaluate_every was 1, now 2; rounds was 2, now 3.\n" in kept
    again = silodp("run", config, "--out", "a", "--resume")  # without --set: back to the file's
    assert_sentence(again, "evaluate_every was 2, now 1; rounds was 3, now 2", code="run.rounds_done")


def test_a_resume_never_makes_the_configuration_contradict_what_was_done(
    silodp: Silodp, config: Path
) -> None:
    assert silodp("run", config, "--set", "rounds=4", "--out", "a").status == 0
    names = ("config.toml", "guarantee.json", "metrics.jsonl", "checkpoint/ledger.jsonl", "model.safetensors")
    before = {name: Path("a", name).read_bytes() for name in names}
    fewer = silodp("run", "a", "--resume", "--set", "rounds=3", "--json")
    assert_sentence(fewer, code="run.rounds_done")
    assert fewer.json["error"]["field"] == "rounds"
    assert {name: Path("a", name).read_bytes() for name in names} == before
    # All rounds are done: nothing was evaluated any other way, whatever is asked for now.
    assert silodp("run", "a", "--resume", "--set", "evaluate_every=3").status == 0
    assert Path("a/config.toml").read_bytes() == before["config.toml"]
    assert Path("a/metrics.jsonl").read_bytes() == before["metrics.jsonl"]
    # More rounds are done, and said; so is every change before.
    assert silodp("run", "a", "--resume", "--set", "rounds=5").status == 0
    assert silodp("run", "a", "--resume", "--set", "rounds=6").status == 0
    lines = Path("a/config.toml").read_text().splitlines()
    assert [line for line in lines if line.startswith("# After")] == [
        "# After round 4: rounds was 4, now 5.",
        "# After round 5: rounds was 5, now 6.",
    ]
    assert silodp("report", "a", "--json").status == 0


def test_a_run_is_resumed_by_its_directory(silodp: Silodp, config: Path) -> None:
    assert silodp("run", config, "--out", "deep/a").status == 0
    for name in ("deep/a", "deep/a/config.toml"):  # the directory need not be said twice
        assert silodp("run", name, "--resume", "--json").json["out"] == "deep/a"
    more = silodp("run", "deep/a", "--resume", "--set", "rounds=3", "--json")
    assert (more.json["rounds"], more.json["out"]) == (3, "deep/a")
    assert_sentence(silodp("run", "deep/a"), code="config.path")
    Path("empty").mkdir()
    assert_sentence(silodp("run", "empty", "--resume"), code="config.path")
    assert_sentence(silodp("run", "empty"), code="config.path")
    assert_sentence(silodp("run", config, "--resume", "--out", "empty"), code="run.nothing_to_resume")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("method.clip=1", "other settings .* Different from a/config.toml: method.clip was 0.1, now 1."),
        ("seed=2", "other settings .* Different from a/config.toml: seed was 1, now 2."),
        (
            "budget.epsilon=9",
            "begun with budget = .* Different from a/config.toml: budget.epsilon was not set, now 9.",
        ),
    ],
)
def test_a_resume_that_cannot_be_says_which_settings_differ(
    silodp: Silodp, config: Path, override: str, says: str
) -> None:
    assert silodp("run", config, "--set", "rounds=1", "--out", "a").status == 0
    before = Path("a/config.toml").read_text()
    refused = silodp("run", "a/config.toml", "--set", override, "--out", "a", "--resume")
    assert_sentence(refused)
    assert re.search(says, refused.err), refused.err
    assert Path("a/config.toml").read_text() == before


# --- what a run says of itself ------------------------------------------------------------------------------


def test_a_run_that_diverged_warns(silodp: Silodp, config: Path) -> None:
    wild = ("--set", "method.server_learning_rate=1e5", "--out", "a")
    found = silodp("run", config, *wild, "--json")
    assert found.status == 0
    assert found.err.splitlines()[-1].startswith("warning: the loss is ")
    assert len(found.json["warnings"]) == 1
    assert "This is no result" in Path("a/report.html").read_text()
    tame = silodp("run", config, "--out", "b", "--json")
    assert "warning" not in tame.err
    assert tame.json["warnings"] == []


def test_a_loss_that_is_not_finite_is_null_in_json_and_warned_of(silodp: Silodp, config: Path) -> None:
    Path("own.py").write_text(STEEP)
    absurd = (
        "--set",
        "method.server_learning_rate=1e20",
        "--set",
        "task.model=own.py:Steep",
        "--set",
        "task.metrics=['accuracy']",
    )
    found = silodp("run", config, *absurd, "--out", "a", "--json")
    assert (found.status, found.json["loss"]) == (0, None)
    assert "warning: loss after round 2: not a finite number" in found.err
    assert "This is no result" in Path("a/report.html").read_text()


def test_a_metric_that_is_not_finite_is_null_in_json_and_warned_of(silodp: Silodp, config: Path) -> None:
    Path("own.py").write_text(BREAKS)
    found = silodp("run", config, "--set", "task.metrics=['own.py:breaks']", "--out", "a", "--json")
    assert found.json["metrics"] == {"breaks": None}
    assert "warning: breaks after round 2: not a finite number" in found.err


def test_a_run_without_held_out_records_says_that_nothing_is_measured(silodp: Silodp, config: Path) -> None:
    for silo in ("north", "south"):
        Path(f"{silo}.csv").write_text(
            "person,sick,age,part\nu1,no,30,train\nu2,yes,60,train\nu3,no,50,test\n"
        )
    Path("own.toml").write_text(TABLES)
    blind = silodp("run", "own.toml", "--out", "a")
    assert blind.status == 0, blind.err
    assert "note: there are no held-out records, so nothing is measured" in blind.err
    page = Path("a/report.html").read_text()
    assert "Nothing was measured" in page
    assert "records held out for testing" not in page
    assert "the list of ids was read from the tables" in page
    seeing = silodp("run", "own.toml", "--set", "data.schema.split=part", "--out", "b")
    assert "note" not in seeing.err


def test_a_mistake_is_told_without_remarks(silodp: Silodp, config: Path) -> None:
    for silo in ("north", "south"):
        Path(f"{silo}.csv").write_text("person,sick,age\nu1,no,30\nu2,yes,60\n")
    Path("own.toml").write_text(TABLES)
    assert_sentence(silodp("run", "own.toml", "--set", "budget.epsilon=0.01"), "budget.epsilon = 0.01")


def test_a_report_of_a_changed_guarantee_is_refused(silodp: Silodp, config: Path) -> None:
    assert silodp("run", config, "--out", "a").status == 0
    path = Path("a/guarantee.json")
    said = json.loads(path.read_text())
    said["guarantees"][0]["epsilon"] /= 2
    path.write_text(json.dumps(said))
    assert_sentence(silodp("report", "a", "--json"), "contradicted by the run's ledger")


# --- help and plans -----------------------------------------------------------------------------------------


def test_help_is_plain_text(silodp: Silodp) -> None:
    for command in (
        "run",
        "plan",
        "epsilon",
        "report",
        "demo",
        "data",
        "data check",
        "data fetch",
    ):
        text = silodp(*command.split(), "--help").out
        assert "\\" not in text
        assert "env var" not in text
    epsilon = " ".join(silodp("epsilon", "--help").out.split())
    assert "[required without --framework]" in epsilon
    assert "[required with --method]" in epsilon
    for command, missing in (
        ("epsilon", "--method"),
        ("epsilon --method uldp-avg", "--rounds"),
    ):
        told = silodp(*command.split(), "--json")
        assert_sentence(told, code="cli.usage")
        assert told.json["error"]["field"] == missing
        assert "env var" not in told.err


def test_colluding_is_explained_and_asked_of_silos_only(silodp: Silodp) -> None:
    text = " ".join(silodp("epsilon", "--help").out.split())
    assert "number of silos, the adversary included, that share" in text
    asked = ("epsilon", "--method", "uldp-avg", "--noise-multiplier", 5, "--rounds", 3, "--silos", 5)
    for adversary in ("released", "server"):
        assert_sentence(
            silodp(*asked, "--colluding", 2, "--adversary", adversary), "colluding = 2 is about silos"
        )


def test_a_target_that_limits_nothing_is_said_so(silodp: Silodp, config: Path) -> None:
    free = ("plan", config, "--target-epsilon", 1e6, "--set", "budget.epsilon=1e6")
    text = silodp(*free).out
    assert "noise_multiplier: any ≥ 0.01\n" in text
    assert "rounds: not limited by this ε up to 10,000,000\n" in text
    assert "enough for 10,000,000 rounds or more" in text
    assert "user_sampling = 1\n" in text
    assert silodp(*free, "--json").json["target"]["unlimited"] == ["noise_multiplier", "rounds"]
    limited = silodp("plan", config, "--target-epsilon", 2, "--json").json["target"]
    assert limited["unlimited"] == []


@pytest.mark.parametrize("weighting", ["uniform", "records"])
def test_a_plan_says_what_fewer_silos_cost_and_what_any_dropouts_do(
    silodp: Silodp, config: Path, weighting: str
) -> None:
    secure = ("--set", "aggregator=masked", "--set", "data.silos=5", "--set", f"method.weighting={weighting}")
    few = ("--set", "aggregation.min_silos=3")
    found = silodp("plan", config, *secure, *few, "--json").json
    assert found["fewest"]["silos"] == 3

    def expected(sigma: float) -> float:
        return pytest.approx(told_epsilon([(Gaussian(sigma), 2)], 1e-5, "rdp"), rel=0.01)

    # Shares of 5/√3: all five add to 5√(5/3) over a whole clip. Three add to 5, over 3/5 of the clip with uniform
    # weights; by records, one of the three may carry all of it.
    everyone, fewest = 5.0 * (5 / 3) ** 0.5, 5.0 * 5 / 3 if weighting == "uniform" else 5.0
    assert found["adversaries"]["released"]["epsilon"] == expected(everyone)
    assert found["fewest"]["epsilon"] == expected(fewest)
    assert found["any_dropouts"]["released"] == expected(min(everyone, fewest))
    assert found["any_dropouts"]["server"] == (
        found["any_dropouts"]["released"] if weighting == "uniform" else None
    )
    said = f"released ε = {format_epsilon(found['fewest']['epsilon'])} if only 3 ever do, at most "
    assert (
        said + format_epsilon(found["any_dropouts"]["released"]) in silodp("plan", config, *secure, *few).out
    )
    all_must = silodp("plan", config, *secure, "--json").json
    assert all_must["fewest"] is None
    assert all_must["any_dropouts"] is None


def test_epsilon_of_any_dropouts_is_that_of_the_costliest_number_of_silos(silodp: Silodp) -> None:
    masked = ("--aggregator", "masked", "--aggregation", "min_silos=5", "--silos", 10)
    asked = ("epsilon", "--method", "uldp-avg", "--noise-multiplier", 5, "--rounds", 100, *masked)
    uniform, records = (silodp(*asked, "--weighting", kind, "--json").json for kind in ("uniform", "records"))
    assert uniform["any_dropouts"] == pytest.approx(uniform["epsilon"], rel=1e-6), "all ten cost most"
    assert records["any_dropouts"] == pytest.approx(10.80, abs=0.01), "five cost most"
    assert records["epsilon"] == pytest.approx(uniform["epsilon"], rel=1e-6)
    silo = silodp(*asked, "--adversary", "silo", "--colluding", 2, "--json").json
    at_most = told_epsilon([(Gaussian(5 / 5**0.5 * 10 / 8**0.5), 100)], 1e-5, "rdp")
    assert silo["any_dropouts"] == pytest.approx(at_most, rel=0.01)


@pytest.mark.parametrize(
    ("unit", "spent", "share"),
    [("record", 1.0, "73.2 %"), ("user", 1.0, "73.2 %"), ("user", 40.0, "nearly 100 %")],
)
def test_a_promise_in_words(unit: Any, spent: float, share: str) -> None:
    made = Guarantee(
        adversary="released",
        unit=unit,
        epsilon=spent,
        delta=1e-5,
        rounds=1,
        accountant="pld",
        method="m",
        private=True,
        releasable=True,
    )
    assert share in describe_guarantee(made)


def test_a_run_whose_every_round_was_refused_warns(silodp: Silodp, config: Path) -> None:
    """The learning rate makes every step infinite: the model stays untrained, and ε is spent."""
    ended = silodp(
        "run",
        config,
        "--set",
        "method.server_learning_rate=1e38",
        "--set",
        "method.noise_multiplier=1e6",
        "--out",
        "a",
        "--json",
    )
    assert ended.status == 0
    (warning,) = ended.json["warnings"]
    assert warning.startswith("no round changed the model")
    assert f"warning: {warning}" in ended.err
    page = Path("a/report.html").read_text()
    assert page.index("This is no result:") < page.index("protected by")
    assert "no round changed the model" in page


def test_the_demo_says_what_its_noise_allows_an_attacker(silodp: Silodp, config: Path) -> None:
    """Half of 1 + δ(0) by the closed form, and not what ε and δ alone would allow; and a probability that is not δ."""
    summary = run_configured(main.load_demo(), Path("a"))
    mu = math.sqrt(20) / 5
    attack = summary["attacks"]["released"]
    assert attack["exact"]
    assert attack["accuracy"] == pytest.approx(NormalDist().cdf(mu / 2), rel=1e-9)
    assert attack["loss_above_epsilon"] == pytest.approx(1.400e-4, rel=1e-3)  # see test_attack.py
    assert attack["auc"] == pytest.approx(NormalDist().cdf(mu / math.sqrt(2)), abs=3e-5)
    closed = [NormalDist().cdf(NormalDist().inv_cdf(rate) + mu) for rate in (0.01, 0.001)]
    assert [attack["tpr_1"], attack["tpr_01"]] == pytest.approx(closed, rel=1e-3)
    assert "67.3 % of the time" in summary["in_words"][0]
    page = Path("a/report.html").read_text()
    assert page.count("67.3 %") == 3  # models, server, and in words
    assert "98.0 %" not in page
    for path in ("a/report.html", "a/MODEL_CARD.md"):
        text = Path(path).read_text()
        assert all(rate in text for rate in ("73.7 %", "7.61 %", "1.41 %"))
    said = json.loads(Path("a/guarantee.json").read_text())
    assert said["simulation"] is True
    assert page.index("This run was a simulation in one process.") < page.index("protected by")


def test_integer_noise_is_said_to_be_bounded(silodp: Silodp, config: Path) -> None:
    asked = ("--set", "aggregator=masked", "--set", "data.silos=3", "--out", "a", "--json")
    summary = silodp("run", config, *asked).json
    attack = summary["attacks"]["server"]
    assert not attack["exact"]
    assert attack["auc"] is attack["tpr_1"] is attack["tpr_01"] is None
    exact = NormalDist().cdf(math.sqrt(2) / 5 / 2)
    assert exact < attack["accuracy"] < exact + 0.05
    assert attack["loss_above_epsilon"] > 1e-5
    assert "a bound by Rényi divergences" in Path("a/report.html").read_text()
