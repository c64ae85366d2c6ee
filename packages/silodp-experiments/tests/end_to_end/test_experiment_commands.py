"""Commands of the core with the methods and data sets of this package, and `compare`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tomli_w

from silodp.data.catalog import DATASETS, find_dataset
from silodp.runtime.guarantees import delta_warning
from support.commands import Silodp, assert_sentence
from support.places import PLUGINS
from support.refusals import refused
from support.verdicts import CONFIG, write_tables

OWN = "adaptive_clipping.py:AdaptiveClipping"


def test_epsilon_of_groups_counts_rounds_times_steps(silodp: Silodp) -> None:
    group = "epsilon --method uldp-group --noise-multiplier 5 --group-size 8 --record-sampling 0.01 --json"
    for rounds, steps in ((1000, 100), (100, 1000)):
        for silos, expected in (
            (4, 13.586),
            (1, 34.2),
        ):  # two records in each of four silos, or all eight in one
            found = silodp(*group.split(), "--rounds", rounds, "--steps", steps, "--silos", silos)
            assert found.json["epsilon"] == pytest.approx(expected, abs=0.1)
    long = (*group.split(), "--rounds", 1000, "--steps", 100)
    loose = silodp(*long, "--accountant", "rdp", "--silos", 1)
    assert loose.json["epsilon"] == pytest.approx(98.8, abs=0.1)
    # The three silos that a curious one does not know.
    silo = silodp(*long, "--adversary", "silo", "--silos", 4)
    assert silo.json["epsilon"] == pytest.approx(11.341, abs=1e-3)
    assert_sentence(silodp(*long), code="argument.missing")


@pytest.mark.parametrize("arguments", ["--method default", "--method uldp-naive --noise-multiplier 0"])
def test_no_privacy_of_a_baseline_is_said_so(silodp: Silodp, arguments: str) -> None:
    found = silodp("epsilon", "--rounds", 10, *arguments.split(), "--json").json
    assert (found["epsilon"], found["private"]) == (None, False)
    assert found["reason"]


def test_plan_needs_no_data_and_finds_what_meets_a_target(silodp: Silodp, config: Path) -> None:
    absent = ("--set", "data={source='heart_disease', root='/nowhere'}", "--set", "rounds=100")
    found = silodp("plan", config, *absent, "--set", "budget.epsilon=3", "--target-epsilon", 2, "--json").json
    assert found["silos"] == 4
    assert found["adversaries"]["released"]["epsilon"] == pytest.approx(9.997, abs=1e-3)
    assert found["budget"]["fits"] is False

    def spent(*arguments: object) -> float:
        asked = {
            "--noise-multiplier": 5,
            "--rounds": 100,
            **dict(zip(arguments[::2], arguments[1::2], strict=True)),
        }
        flat = [part for pair in asked.items() for part in pair]
        return float(silodp("epsilon", "--method", "uldp-avg", *flat, "--json").json["epsilon"])

    target = found["target"]
    assert 1.99 < spent("--noise-multiplier", target["noise_multiplier"]) <= 2
    assert 1.99 < spent("--user-sampling", target["user_sampling"]) <= 2
    assert spent("--rounds", target["rounds"]) <= 2 < spent("--rounds", target["rounds"] + 1)
    assert (
        spent("--rounds", found["budget"]["rounds"]) <= 3 < spent("--rounds", found["budget"]["rounds"] + 1)
    )
    assert "noise_multiplier" in silodp("plan", config, "--target-epsilon", 2).out


def test_a_run_without_its_data_set_leaves_nothing_behind(silodp: Silodp, config: Path) -> None:
    before = {path.name for path in Path().iterdir()}
    absent = "data={source='heart_disease', root='/nowhere'}"
    failed = silodp("run", config, "--set", absent, "--out", "out", "--json")
    assert_sentence(failed, code="data.no_dataset")
    assert {path.name for path in Path().iterdir()} == before


@pytest.mark.parametrize("delta", ["0.1", "0.049"])
def test_without_privacy_no_delta_is_remarked_on(silodp: Silodp, config: Path, delta: str) -> None:
    (remark,) = (one.text for one in delta_warning(0.1, 20))
    bare = "method={name='default', local={learning_rate=0.01}}"
    silent = silodp("run", config, "--set", bare, "--set", f"delta={delta}", "--out", "bare", "--json")
    assert remark not in silent.json["warnings"]  # there is no ε


def test_compare_runs_every_specification(silodp: Silodp, config: Path) -> None:
    methods = "uldp-avg,uldp-avg:weighting=records"
    few = ("--set", "rounds=1", "--seeds", 1, "--out", "c")
    found = silodp("compare", config, "--methods", methods, *few, "--json")
    assert found.status == 0, found.err
    assert {method["label"] for method in found.json["methods"]} >= set(methods.split(","))
    assert_sentence(
        silodp("compare", config, "--methods", "uldp-group:k=8", *few), "record_sampling is missing"
    )
    assert_sentence(silodp("compare", config, "--methods", "uldp-avg", "--seeds", 0), "seeds = 0")


def test_find_dataset_takes_other_spellings_and_lists_the_names() -> None:
    assert find_dataset("heart-disease") is DATASETS["heart_disease"]
    with refused("argument.value") as caught:
        find_dataset("heart")
    assert "heart_disease" in str(caught.value)


def test_a_comparison_answers_ctrl_c_without_a_traceback(
    silodp: Silodp, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("silodp.config.resolve.ResolvedRun.load_federation", stop)
    stopped = silodp("compare", "small.toml", "--methods", "uldp-avg", "--out", "c")
    assert (stopped.status, stopped.out) == (130, "")
    assert stopped.err.startswith("interrupted")
    assert stopped.err.count("\n") == 1


def test_help_of_compare_is_plain_text(silodp: Silodp) -> None:
    assert "  compare " in silodp("--help").out
    text = silodp("compare", "--help").out
    assert "\\" not in text
    assert "env var" not in text
    told = silodp("compare", "x.toml", "--json")
    assert_sentence(told, code="cli.usage")
    assert told.json["error"]["field"] == "--methods"
    assert "env var" not in told.err


def test_methods_from_files_are_compared(
    silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for source in PLUGINS.glob("*.py"):
        shutil.copy(source, tmp_path)
    yogi = {"name": "yogi.py:Yogi", "beta1": 0.5}
    method = {"quantile": 0.6, "server_optimizer": yogi, "server_learning_rate": 0.1}
    values = {
        "rounds": 3,
        "seed": 1,
        "aggregator": "trimmed.py:Trimmed",
        "aggregation": {"trim": 1},
        "accountant": "few_orders.py:FewOrders",
        "data": {"source": "dosage.py:DOSAGE", "users": 15},
        "method": {
            "name": OWN,
            "noise_multiplier": 5.0,
            "clip": 0.1,
            "local": {"learning_rate": 0.1},
            **method,
        },
        "methods": {OWN: {"quantile": 0.9}},
    }
    config = tmp_path / "own.toml"
    config.write_text(tomli_w.dumps(values))
    methods = f"{OWN},{OWN}:quantile=0.2,uldp-avg"
    compared = silodp("compare", config, "--methods", methods, "--seeds", "1", "--out", "c", "--json")
    assert compared.status == 0, compared.err
    found = {one["label"]: one for one in compared.json["methods"]}
    assert list(found) == [OWN, f"{OWN}:quantile=0.2", "uldp-avg", "default"]
    assert "quantile=0.9" in found[OWN]["settings"]
    assert "quantile=0.2" in found[f"{OWN}:quantile=0.2"]["settings"]
    assert "Yogi(beta1=0.5" in found["uldp-avg"]["settings"]
    assert found["uldp-avg"]["epsilon"] == found[OWN]["epsilon"]
    assert Path("c/compare.html").exists()


def test_a_comparison_says_that_no_method_beats_chance(
    silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tables(Path(), 600, 0.0)
    Path("wards.toml").write_text(CONFIG.format(rounds=2, noise=5.0, step=1.0, more=""))
    done = silodp(
        "compare", "wards.toml", "--methods", "uldp-sgd", "--seeds", 2, "--out", "compared", "--json"
    )
    assert done.status == 0, done.err
    private = next(method for method in done.json["methods"] if method["private"])
    assert private["skill"]["code"] in ("unclear", "worse")
    assert len(private["skill"]["comparisons"]) == 3
    assert done.json["warnings"][0].startswith("No private method")
    page = Path("compared/compare.html").read_text()
    assert page.index("No private method") < page.index("After the last round")


def test_data_lists_and_checks(silodp: Silodp, config: Path) -> None:
    listed = silodp("data", "list", "--json").json["datasets"]
    assert {"name": "embedded", "present": True}.items() <= next(
        d for d in listed if d["name"] == "embedded"
    ).items()
    checked = silodp("data", "check", "embedded", "--json")
    assert (checked.status, checked.json["ok"], checked.json["rows"]) == (0, True, 569)
    Path("root").mkdir()
    assert silodp("data", "check", "heart_disease", "--root", "root").status == 1
    assert_sentence(silodp("data", "fetch", "creditcard", "--root", "root"), "kaggle")
    assert_sentence(silodp("data", "check", "mnist2"), "mnist2")
