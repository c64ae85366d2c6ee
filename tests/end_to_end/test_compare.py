"""Comparing methods on the embedded data: what is computed, kept, shown and escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Gaussian
from silodp.accounting.guarantee import ISOLATED_ROUNDING, SHARED_ROUNDING
from silodp.config.resolve import ResolvedRun, resolve
from silodp.config.schema import parse_config
from silodp.errors import SilodpError
from silodp.report import plots
from silodp.report.divergence import get_measure
from silodp.report.figures import choose_log_ticks, render_svg
from silodp.report.held_out import CalibrationBin
from silodp.runtime.train import run, train
from silodp_audit.report.attack_plots import plot_noise
from silodp_audit.report.attacks import NoiseTest
from silodp_experiments import compare as module
from silodp_experiments.compare import compare_methods
from silodp_experiments.compare_page import format_spread, format_table, is_level
from silodp_experiments.method_specs import MethodSpec, parse_methods

ROUNDS = 3
TEXT = "uldp-avg,uldp-avg:weighting=records"


def config(**changes: Any) -> ResolvedRun:
    method = {"name": "uldp-avg", "noise_multiplier": 5.0, "clip": 0.5, "server_learning_rate": 10.0}
    values = {
        "name": "tiny",
        "rounds": ROUNDS,
        "data": {"source": "embedded", "users": 20, "silos": 3},
        "method": {**method, "local": {"learning_rate": 0.1}},
        "methods": {"default": {"server_learning_rate": 1.0}},
    }
    return resolve(parse_config({**values, **changes}))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    out = tmp_path_factory.mktemp("compare")
    said: list[str] = []
    return out, compare_methods(config(), parse_methods(config(), TEXT), 2, out, said.append), said


def of(result: dict[str, Any], label: str) -> dict[str, Any]:
    found: dict[str, Any] = next(method for method in result["methods"] if method["label"] == label)
    return found


def test_training_without_privacy_is_added(compared: tuple[Path, dict[str, Any], list[str]]) -> None:
    _, result, said = compared
    assert [method["label"] for method in result["methods"]] == [*TEXT.split(","), "default"]
    assert result["runs"] == 6
    assert len(said) == 6
    assert "6 runs on the same persons: each adds its ε" in result["note"]
    assert "2 runs each, 3 rounds" in (compared[0] / "compare.html").read_text()
    assert of(result, "default")["epsilon"] == {"released": None, "server": None, "silo": None}


def test_epsilon_is_of_one_run(compared: tuple[Path, dict[str, Any], list[str]]) -> None:
    _, result, _ = compared
    uniform, records = (of(result, label) for label in TEXT.split(","))
    expected = compute_epsilon([(Gaussian(5.0), ROUNDS)], 1e-5)
    assert uniform["epsilon"]["released"] == pytest.approx(expected)
    assert uniform["epsilon_by_round"]["released"][0] == 0
    assert uniform["epsilon_by_round"]["released"][-1] == uniform["epsilon"]["released"]
    assert records["epsilon"]["server"] is None
    assert "counts disclosed" in records["reasons"]["server"]


def test_means_and_deviations_are_those_of_the_runs(compared: tuple[Path, dict[str, Any], list[str]]) -> None:
    _, result, _ = compared
    settings = config()
    federation = settings.load_federation()
    task = settings.build_task(federation)
    runs = [train(federation, task, settings.method, rounds=ROUNDS, seed=seed) for seed in (0, 1)]
    method = of(result, "uldp-avg")
    assert method["rounds"] == [0, 1, 2, 3]
    for name in ("loss", "accuracy"):
        values = np.array([[get_measure(row, name) for row in run.metrics] for run in runs], dtype=float)
        assert method["curves"][name]["mean"] == pytest.approx(values.mean(axis=0))
        assert method["curves"][name]["sd"] == pytest.approx(values.std(axis=0, ddof=1))
        assert method["final"][name]["mean"] == pytest.approx(values[:, -1].mean())
        assert result["untrained"][name] == pytest.approx(values[:, 0].mean())


@pytest.mark.pictures
def test_what_is_written(compared: tuple[Path, dict[str, Any], list[str]]) -> None:
    out, result, _ = compared
    assert json.loads((out / "compare.json").read_text()) == result
    text = (out / "compare.md").read_text()
    assert text == format_table(result)
    assert text.splitlines()[0].startswith("| method | loss |")
    assert "| untrained |" in text
    page = (out / "compare.html").read_text()
    assert page.count("<svg") == 2 * len(result["quantities"]) + 1
    assert "http" not in page
    assert "<script" not in page
    assert page.index("runs on the same persons") < page.index("<svg")
    assert len(list((out / "plots").glob("*.svg"))) == page.count("<svg")


def test_finished_runs_are_not_repeated(
    compared: tuple[Path, dict[str, Any], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, result, _ = compared
    lost, *_ = sorted((out / "runs").iterdir())
    lost.write_text('{"half')  # damage counts as not finished
    seeds = []

    def counted(*args: Any, **settings: Any) -> Any:
        seeds.append(args[0].seed)
        return run(*args, **settings)

    monkeypatch.setattr(module, "run", counted)
    again = compare_methods(config(), parse_methods(config(), TEXT), 2, out)
    assert len(seeds) == 1
    drop = ("seconds",)
    assert [{k: v for k, v in m.items() if k not in drop} for m in again["methods"]] == [
        {k: v for k, v in m.items() if k not in drop} for m in result["methods"]
    ]
    (out / "plots/9-round.svg").write_text("of an earlier comparison, with more metrics")
    compare_methods(config(delta=1e-6), parse_methods(config(), "default"), 1, out)
    assert len(seeds) == 2  # another δ is another run
    drawn = {path.name for path in (out / "plots").iterdir()}
    assert drawn
    assert not drawn & {"9-round.svg", "epsilon.svg"}  # without privacy there is no ε to draw


def test_a_budget_stops_methods_but_not_the_reference(tmp_path: Path) -> None:
    one_round = compute_epsilon([(Gaussian(5.0), 1)], 1e-5)
    settings = config(budget={"epsilon": 1.01 * one_round})
    result = compare_methods(settings, parse_methods(settings, "uldp-avg,uldp-avg:sigma=0"), 1, tmp_path)
    assert of(result, "uldp-avg")["rounds"] == [0, 1]
    assert of(result, "uldp-avg")["stopped"] == "budget"
    assert of(result, "uldp-avg:sigma=0")["rounds"] == [0, 1, 2, 3]
    assert of(result, "default")["rounds"] == [0, 1, 2, 3]
    assert "stopped by the privacy budget after round 1" in (tmp_path / "compare.html").read_text()
    assert "1 run each" in (tmp_path / "compare.html").read_text()
    text = (tmp_path / "compare.md").read_text()
    assert "against whoever sees the models, stopped uldp-avg after round 1." in text
    assert "against whoever sees the models, did not limit uldp-avg:sigma=0:" in text


def test_a_budget_against_somebody_whom_a_method_gives_no_guarantee_is_named(tmp_path: Path) -> None:
    """Such a method trains all rounds, others are stopped: their values are of unequal rounds."""
    one_round = compute_epsilon([(Gaussian(5.0), 1)], 1e-5)
    settings = config(budget={"epsilon": 1.01 * one_round, "adversary": "server"})
    result = compare_methods(settings, parse_methods(settings, TEXT), 1, tmp_path)
    assert [of(result, label)["rounds"][-1] for label in TEXT.split(",")] == [1, ROUNDS]
    assert "against the server, stopped uldp-avg after round 1." in result["note"]
    assert "against the server, did not limit uldp-avg:weighting=records:" in result["note"]


def test_limits_of_silos_do_not_end_a_comparison(tmp_path: Path) -> None:
    """A run by records alone is refused under a limit against the server; beside others it is trained, and named."""
    settings = config(silo_limits={"server": 50.0})
    result = compare_methods(settings, parse_methods(settings, TEXT), 1, tmp_path)
    assert [of(result, label)["rounds"][-1] for label in (*TEXT.split(","), "default")] == [ROUNDS] * 3
    assert "against the server, would refuse uldp-avg:weighting=records," in result["note"]
    assert "refuse uldp-avg," not in result["note"]


def test_the_table_says_at_which_delta_and_for_whom(tmp_path: Path) -> None:
    """An ε without a δ and a unit says nothing."""
    settings = config(rounds=1, delta=1e-6)
    compare_methods(settings, parse_methods(settings, "uldp-avg"), 1, tmp_path)
    text = (tmp_path / "compare.md").read_text()
    assert "Each ε here is at δ = 1e-06, for all records of one person, and of one run" in text


def test_an_evaluation_that_is_left_out_is_named(tmp_path: Path) -> None:
    """The ε of a run with the same configuration is larger."""
    settings = config(rounds=1, evaluation={"across": "sums", "epsilon": 4.0})
    result = compare_methods(settings, parse_methods(settings, "uldp-avg"), 1, tmp_path)
    assert of(result, "uldp-avg")["epsilon"]["released"] == pytest.approx(
        compute_epsilon([(Gaussian(5.0), 1)], 1e-5)
    )
    assert "[evaluation] is not used here, and each ε is without it" in result["note"]


MODEL = """
from torch import nn

def network(features):
    return nn.Sequential(nn.Linear(features, 4), nn.Tanh(), nn.Linear(4, 1))

def loss(outputs, targets):
    return {factor} * nn.functional.softplus(-outputs.squeeze(-1) * (2.0 * targets - 1))
"""


def test_a_run_of_other_code_is_not_taken_for_one_of_this_code(tmp_path: Path) -> None:
    """The loss in the file changes, its name does not."""
    code, out = tmp_path / "my_model.py", tmp_path / "out"
    untrained = []
    for factor in (1, 8):
        code.write_text(MODEL.format(factor=factor))
        settings = config(rounds=1, task={"model": f"{code}:network", "loss": f"{code}:loss"})
        result = compare_methods(settings, parse_methods(settings, "uldp-avg"), 1, out)
        untrained.append(result["untrained"]["loss"])
    assert untrained[1] == pytest.approx(8 * untrained[0])


OPTIMIZER = """
from dataclasses import dataclass

from silodp.methods import ServerOptimizer

@dataclass(frozen=True)
class Steps(ServerOptimizer):
    def step(self, params, total, state, move):
        return params + {factor} * (move.learning_rate * move.scale * total).to(params), {{}}
"""


@pytest.mark.slow
def test_a_run_by_another_server_optimizer_is_not_taken_for_one_of_this_code(tmp_path: Path) -> None:
    """Its file changes; also where it is the optimizer of another one."""
    code, out = tmp_path / "steps.py", tmp_path / "out"
    method = {"name": "uldp-avg", "noise_multiplier": 5.0, "clip": 0.5, "server_learning_rate": 10.0}
    for nested in (False, True):
        own = {"name": f"{code}:Steps"}
        optimizer = {"name": "tail-average", "last": 1, "optimizer": own} if nested else own
        ends = []
        for factor in (0, 1):
            code.write_text(OPTIMIZER.format(factor=factor))
            settings = config(rounds=1, method=method | {"server_optimizer": optimizer})
            result = compare_methods(settings, parse_methods(settings, "uldp-avg"), 1, out)
            ends.append((result["untrained"]["loss"], of(result, "uldp-avg")["final"]["loss"]["mean"]))
        assert ends[0][1] == pytest.approx(ends[0][0])  # no step
        assert ends[1][1] != pytest.approx(ends[1][0])


class Empty:
    """A result of one run whose every value is NaN."""

    def __init__(self, method: Any) -> None:
        settings = config()
        federation = settings.load_federation()
        real = train(federation, settings.build_task(federation), method, rounds=1, seed=0)
        self.stopped, self.guarantees = real.stopped, real.guarantees
        self.params = torch.full_like(real.params, math.nan)
        self.metrics = tuple({**row, "loss": float("nan"), "metrics": {}} for row in real.metrics)


def test_a_method_without_any_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "run", lambda spec, *_, **__: Empty(spec.method))
    result = compare_methods(config(), parse_methods(config(), "uldp-avg"), 2, tmp_path)
    assert result["quantities"] == []
    assert "Nothing was measured" in (tmp_path / "compare.html").read_text()
    json.loads((tmp_path / "compare.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("changes", "methods", "says"),
    [
        (
            {"budget": {"epsilon": 2.0}},
            "uldp-avg,uldp-avg:sigma=0.5",
            "'uldp-avg:sigma=0.5': budget.epsilon = 2.0",
        ),
        (
            {"budgets": {"distribution": "three-levels", "levels": [0.5, 1.0, 5.0]}},
            "rpdp,rpdp-minimum:budget=0.7",
            "'rpdp-minimum:budget=0.7'.* ask for less than budget = 0.7",
        ),
    ],
)
def test_every_method_is_checked_before_the_first_one_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], methods: str, says: str
) -> None:
    if "budgets" in changes:
        own = {"name": "rpdp", "noise_multiplier": 5.0, "clip": 1.0, "largest_budget": 1.0}
        own |= {"local_steps": 2, "expected_batch_size": 4.0, "local_learning_rate": 0.1}
        changes = {**changes, "method": own}
    settings = config(**changes)
    monkeypatch.setattr(module, "run", pytest.fail)
    with pytest.raises(SilodpError, match=f"^method {says}"):
        compare_methods(settings, parse_methods(settings, methods), 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_persons_are_computed_alone_by_every_method_that_can(tmp_path: Path) -> None:
    """Methods that cannot are compared, too: `default` is added to every comparison."""
    settings = config(isolate_units=True)
    result = compare_methods(settings, parse_methods(settings, "uldp-avg,uldp-naive"), 1, tmp_path)
    assert [method["label"] for method in result["methods"]] == ["uldp-avg", "uldp-naive", "default"]
    assert "Without isolate_units = true, as they cannot have it: uldp-naive." in result["note"]
    assumed = {
        found["method"].partition("(")[0]: {
            one["id"] for one in found["guarantees"]["released"]["assumptions"]
        }
        for found in (json.loads(path.read_text()) for path in (tmp_path / "runs").iterdir())
    }
    assert ISOLATED_ROUNDING.id in assumed["UldpAvg"]
    assert SHARED_ROUNDING.id in assumed["UldpNaive"]


def test_a_curve_that_does_not_fit_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"name": "rpdp", "noise_multiplier": 2.0, "clip": 1.0, "largest_budget": 5.0, "rounds": 1}
    own |= {"local_steps": 4, "expected_batch_size": 16.0, "local_learning_rate": 0.5}
    settings = config(
        method=own, delta=1e-4, budgets={"distribution": "three-levels", "levels": [0.5, 1.0, 5.0]}
    )
    monkeypatch.setattr(module, "run", pytest.fail)
    with pytest.raises(SilodpError, match=r"^method 'rpdp:calibration=scf': SCF finds no curve"):
        compare_methods(settings, parse_methods(settings, "default,rpdp,rpdp:calibration=scf"), 1, tmp_path)


def test_a_specification_that_cannot_be_built_is_named() -> None:
    with pytest.raises(SilodpError, match=r"^methods, at 'uldp-avg:clip=-1': clip = -1"):
        parse_methods(config(), "default,uldp-avg:clip=-1")


def test_labels_are_escaped(tmp_path: Path) -> None:
    settings = config(rounds=1)
    spec = MethodSpec("<script>|$x", settings.method)
    result = compare_methods(settings, [spec], 1, tmp_path)
    assert "<script" not in (tmp_path / "compare.html").read_text()
    assert r"<script>\|$x" in format_table(result)


def curve(label: str, mean: Sequence[float], **changes: Any) -> plots.Curve:
    n = len(mean)
    fields = {"label": label, "rounds": range(n), "mean": mean, "sd": [0.1] * n, "epsilon": range(n)}
    return plots.Curve(**{**fields, **changes})


@pytest.mark.pictures
@pytest.mark.parametrize("against", ["round", "epsilon"])
def test_pictures_bear_what_is_missing(against: str) -> None:
    nan = float("nan")
    curves = [
        curve("gaps", [0.5, nan, 0.7, 0.8]),
        curve("nothing", [nan] * 4),
        curve("diverged", [0.5, 10, 1e4, 1e9]),
        curve("one run", [0.5, 0.6, 0.6, 0.6], sd=[nan] * 4),
        curve("default", [0.5, 0.7, 0.8, 0.9], epsilon=[0, nan, nan, nan], private=False, reference=True),
        *(curve(f"method {i}", [0.5, 0.5 + i / 100, 0.6, 0.7]) for i in range(20)),
    ]
    figure = plots.plot_comparison(curves, "loss", 0.5, against)
    assert figure is not None
    text = render_svg(figure, "all")
    for label in ("gaps", "diverged", "one run", "default", "method 19", "untrained"):
        assert label in text
    assert ">nothing<" not in text
    assert "mathdefault" not in text
    assert plots.plot_comparison([curve("nothing", [nan] * 4)], "loss", None, against) is None


def test_equal_epsilons_share_a_line() -> None:
    figure = plots.plot_epsilon_comparison(
        [curve("a", [1, 2]), curve("b", [1, 2], epsilon=[0, 1 + 1e-12]), curve("c", [1, 2], epsilon=[0, 99])]
    )
    assert figure is not None
    assert [line.get_label() for line in figure.axes[0].lines] == ["a\n= b", "c"]
    assert figure.axes[0].get_yscale() == "log"
    assert plots.plot_epsilon_comparison([curve("none", [1, 2], epsilon=[0, float("nan")])]) is None


def test_format_spread() -> None:
    assert format_spread({"mean": 0.81234, "sd": 0.0123, "n": 3, "of": 3}) == "0.8123 ± 0.012"
    assert format_spread({"mean": 0.8, "sd": None, "n": 1, "of": 2}) == "0.8 (1 of 2)"
    assert format_spread({"mean": None, "sd": None, "n": 0, "of": 2}) == "–"
    assert format_spread(None) == "–"


def test_methods_that_lack_the_same_guarantee_share_a_line(tmp_path: Path) -> None:
    """A long comparison repeated one reason for every method and adversary."""
    settings = config(rounds=1)
    records = "uldp-avg:weighting=records"
    compare_methods(settings, parse_methods(settings, f"uldp-avg,{records},{records}:sigma=3"), 1, tmp_path)
    page = (tmp_path / "compare.html").read_text()
    assert (
        f"<li>{records}, {records}:sigma=3: no guarantee against the server and another silo: counts" in page
    )
    assert page.count("counts disclosed") == 1


def test_the_directory_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run_spec.json").write_text("{}")
    with pytest.raises(SilodpError) as caught:
        compare_methods(config(), parse_methods(config(), "uldp-avg"), 1, tmp_path)
    assert caught.value.code == "run.exists"


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(SilodpError, match="seeds = 0"):
        compare_methods(config(), parse_methods(config(), "uldp-avg"), 0, tmp_path)
    spec = MethodSpec("twice", config().method)
    with pytest.raises(SilodpError, match="'twice' twice"):
        compare_methods(config(), [spec, spec], 1, tmp_path)


# --- training without privacy is no upper level by itself ---------------------------------------------------


def end(label: str, loss: float | None, **changes: Any) -> dict[str, Any]:
    made = {"label": label, "unit": "user", "private": True, "untuned": False, "warning": None}
    return {**made, "final": {"loss": {"mean": loss}}, **changes}


PLAIN = {"unit": None, "private": False}


@pytest.mark.parametrize(
    ("method", "warns"),
    [
        (end("default", 0.9, **PLAIN), True),
        (end("default", None, **PLAIN), True),  # it diverged
        (end("default", 0.3, **PLAIN), False),
        (end("uldp-avg:sigma=0", 0.9, private=False), False),  # asked for as it is
        (end("uldp-sgd", 0.9), False),
    ],
)
def test_what_lies_below_a_private_method_shows_nothing(method: dict[str, Any], warns: bool) -> None:
    others = [end("uldp-avg", 0.5), end("uldp-group", 0.4), end("uldp-naive", None)]
    said = module.explain_no_upper_level(method, [*others, method])
    assert (said is not None) == warns
    if said is not None:
        assert method["label"] in said
        assert "[methods.default]" in said
    assert module.explain_no_upper_level(method, [method]) is None  # nothing private to compare with


@pytest.mark.parametrize(("loss", "warns"), [(0.9, True), (None, True), (0.7, False), (0.3, False)])
def test_a_method_that_ends_above_the_untrained_model_is_named(loss: float | None, warns: bool) -> None:
    said = module.explain_no_gain(end("uldp-naive:clip=1.0", loss), 0.7)
    assert (said is not None) == warns
    assert said is None or said.startswith("uldp-naive:clip=1.0 ")


def test_a_private_method_that_learns_nothing_is_warned_of(tmp_path: Path) -> None:
    """So much noise that the model ends further from the labels than it began."""
    result = compare_methods(
        config(), parse_methods(config(), "uldp-naive:noise_multiplier=1000"), 1, tmp_path
    )
    assert any(text.startswith("uldp-naive:noise_multiplier=1000 ends at") for text in result["warnings"])
    assert of(result, "uldp-naive:noise_multiplier=1000")["warning"] in result["warnings"]


def test_what_nobody_tuned_is_named_so_and_drawn_as_no_level(tmp_path: Path) -> None:
    """Without [methods.default] its rates are those of a private method on another scale."""
    inherited = config(methods={})
    assert [spec.has_own_settings for spec in parse_methods(inherited, "uldp-avg,default")] == [True, False]
    assert parse_methods(config(), "default")[0].has_own_settings
    assert parse_methods(inherited, "default:server_learning_rate=2")[0].has_own_settings
    result = compare_methods(inherited, parse_methods(inherited, "uldp-avg"), 1, tmp_path)
    default = of(result, "default")
    assert default["untuned"]
    assert not is_level(default)
    assert is_level(default | {"untuned": False, "warning": None})
    assert not is_level(default | {"untuned": False, "warning": "below"})
    assert "| default (no noise, untuned) |" in (tmp_path / "compare.md").read_text()
    assert "Untuned: default." in result["note"]
    page = (tmp_path / "compare.html").read_text()
    assert "Not drawn, because it does not show the level without noise: default (no noise, untuned)." in page


def test_private_methods_that_nobody_tuned_are_named_so_too(tmp_path: Path) -> None:
    """A method that wins against rates that were chosen for another one has won against nothing."""
    names = "uldp-avg,uldp-avg:weighting=records,uldp-naive,uldp-naive:noise_multiplier=2,uldp-naive:clip=2"
    inherited = config(methods={})
    assert [spec.has_own_settings for spec in parse_methods(inherited, names)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    own = config(methods={"uldp-naive": {"server_learning_rate": 1.0}})
    assert all(spec.has_own_settings for spec in parse_methods(own, names))
    result = compare_methods(
        inherited, parse_methods(inherited, "uldp-avg,uldp-naive,default:server_learning_rate=1"), 1, tmp_path
    )
    assert [method["untuned"] for method in result["methods"]] == [False, True, False]
    assert "| uldp-naive (untuned) |" in (tmp_path / "compare.md").read_text()
    assert "uldp-naive (untuned)" in (tmp_path / "compare.html").read_text()


def test_the_chart_says_what_was_not_tuned_however_long_the_name_is() -> None:
    name = "uldp-naive:noise_multiplier=2:user_sampling=0.5"
    curve = plots.Curve(name, [0, 1, 2], [0.7, 0.6, 0.5], [0.0] * 3, [0.0, 1.0, 2.0], note=" (untuned)")
    for figure in (plots.plot_comparison([curve], "loss"), plots.plot_epsilon_comparison([curve])):
        assert figure is not None
        (legend,) = figure.legends
        # The end of a name, in which variants differ, is kept.
        assert legend.get_texts()[0].get_text() == "uldp-naive:noise_…sampling=0.5 (untuned)"


def test_of_curves_that_lie_on_one_another_the_lower_ones_are_wider() -> None:
    """One curve was drawn over another, so that nobody saw it."""

    def curve(*mean: float) -> plots.Curve:
        return plots.Curve("a", [0, 1, 2], list(mean), [0.0] * 3, [0.0, 1.0, 2.0])

    curves = [curve(0.7, 0.6, 0.5), curve(0.7, 0.601, 0.5), curve(0.7, 0.4, 0.2), curve(0.7, 0.6, 0.501)]
    assert plots.count_covering(curves) == [2, 1, 0, 0]
    figure = plots.plot_comparison(curves, "loss", constant=0.69)
    assert figure is not None
    drawn = figure.axes[0].lines
    widths = [line.get_linewidth() for line in drawn[:4]]
    assert widths[0] > widths[1] > widths[2] == widths[3]
    assert drawn[4].get_ydata()[0] == 0.69  # what a constant prediction has
    nothing = [curve(math.nan, math.nan, math.nan), curve(0.5, 0.5, 0.5)]
    assert plots.count_covering(nothing) == [0, 0]


@pytest.mark.parametrize("high", [1.5, 2.0, 3.9, 8.0, 30.0, 1e3, 1e7])
@pytest.mark.parametrize("low", [0.013, 0.6, 1.0, 7.3])
def test_an_axis_of_epsilon_has_several_numbers(low: float, high: float) -> None:
    """One label, 1 or 2, between 0.6 and 3.9 says nothing of the curve."""
    ticks = choose_log_ticks(low, low * high)
    assert 4 <= len(ticks) <= 8
    assert all(low <= tick <= low * high for tick in ticks)
    assert ticks == sorted(ticks)
    figure = plots.plot_comparison(
        [plots.Curve("a", [1, 2, 3], [0.7, 0.6, 0.5], [0.0] * 3, [low, low * high**0.5, low * high])],
        "loss",
        against="epsilon",
    )
    assert figure is not None
    (axes,) = figure.axes
    shown = [text for text in axes.xaxis.get_major_formatter().format_ticks(axes.get_xticks()) if text]
    assert len(set(shown)) == len(axes.get_xticks()) >= 4


def test_a_level_is_drawn_only_where_it_is_one() -> None:
    private = plots.Curve("a", [0, 1, 2], [0.7, 0.6, 0.5], [0.0] * 3, [0.0, 1.0, 2.0])
    for drawn in (True, False):
        plain = plots.Curve("b", [0, 1, 2], [0.7, 0.8, 0.9], [0.0] * 3, [np.nan] * 3, False, drawn, drawn)
        figure = plots.plot_comparison([private, plain], "loss", None, "epsilon")
        assert figure is not None
        (axes,) = figure.axes
        assert [line.get_label().strip() for line in axes.lines] == (["a", "b"] if drawn else ["a"])


def test_a_warning_stands_in_every_result(tmp_path: Path) -> None:
    """Its rate so small that it learns nothing."""
    slow = config(methods={"default": {"server_learning_rate": 1e-9}})
    result = compare_methods(slow, parse_methods(slow, "uldp-avg"), 1, tmp_path)
    (warning,) = (text for text in result["warnings"] if text.startswith("default, without noise"))
    assert warning.startswith("default, without noise, ends at a larger loss")
    assert f"Warning: {warning}" in (tmp_path / "compare.md").read_text()
    assert warning in (tmp_path / "compare.html").read_text()


def test_a_single_mark_is_no_picture() -> None:
    one = plots.Curve("one", [1], [0.7], [0.0], [1.0])
    assert plots.plot_comparison([one], "loss") is None
    assert plots.plot_epsilon_comparison([one]) is None
    assert plots.plot_comparison([one, plots.Curve("two", [1], [0.6], [0.0], [1.0])], "loss") is not None
    step = CalibrationBin(0.5, 0.4, 10.0, 0.1)
    assert plots.plot_calibration([step], "yes") is None
    assert plots.plot_calibration([step, step], "yes") is not None
    test = NoiseTest("noise", True, 1.0, 0.9, 1.1, 1.0)
    assert plot_noise([test]) is None
    assert plot_noise([test, test]) is not None
