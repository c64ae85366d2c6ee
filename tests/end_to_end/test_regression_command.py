"""`silodp regression` from the command line, and by three silos that are processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from silodp.cli.run import run_config
from silodp.config.resolve import load_config
from silodp_analytics.regression.config import derive_regression
from support.clinics import HOSPITALS, draw_clinics, write_clinics
from support.commands import Silodp, assert_sentence
from support.consortium import start_consortium


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_clinics(tmp_path, draw_clinics(900), asked="epsilon = 4.0")


def read_regression(directory: Path) -> Any:
    return json.loads((directory / "regression.json").read_text())


def test_a_run_writes_coefficients_and_a_page_but_no_model(silodp: Silodp, config: Path) -> None:
    # A run that may be released has no seed: of 900 persons, one age in thirty is lost in the noise.
    write_clinics(config.parent, draw_clinics(3000), asked="epsilon = 4.0")
    done = silodp("regression", config, "--json")
    assert done.status == 0, done.err
    run = Path("runs/clinics-regression")
    files = {path.name for path in run.iterdir()}
    assert {"regression.json", "regression.html", "guarantee.json", "checkpoint"} <= files
    assert not files & {"model.safetensors", "model.json", "MODEL_CARD.md", "report.html"}
    assert done.json["releasable"] is True
    assert 3.9 < done.json["guarantees"]["released"]["epsilon"] <= 4
    found = read_regression(run)
    assert [one["term"] for one in found["coefficients"]][:3] == ["(intercept)", "age", "sex=m"]
    age = found["coefficients"][1]
    assert age["interval"][0] < age["estimate"] < age["interval"][1]
    assert abs(age["estimate"] - 0.02) < 5 * age["standard_error"]
    page = (run / "regression.html").read_text()
    assert "north" not in page
    assert "The reference of sex is f, of stage is I." in page
    assert "(age 18 to 98, dose 0 to 10)" in page
    assert "do not share it" in page
    assert "<svg" in page
    # The page is made from the files of the run alone.
    before = {name: (run / name).read_bytes() for name in ("regression.json", "regression.html")}
    (run / "regression.html").unlink()
    assert silodp("report", run).status == 0
    assert {name: (run / name).read_bytes() for name in before} == before


def test_a_survival_run_shows_hazard_ratios_and_baseline_rates_apart(
    silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_clinics(tmp_path, draw_clinics(4000), asked="epsilon = 20.0", family="survival")
    assert silodp("regression", config, "--plan", "--users", 1500).status == 0
    done = silodp("regression", config, "--json")
    assert done.status == 0, done.err
    assert done.json["guarantees"]["released"]["epsilon"] <= 20
    found = read_regression(Path("runs/clinics-regression"))
    assert found["ratio"] == "hazard ratio"
    assert len(found["baseline"]) == 3
    stage = next(one for one in found["coefficients"] if one["term"] == "stage=III")
    assert stage["ratio"] > 1
    assert abs(stage["estimate"] - 1.0) < 4 * stage["standard_error"]
    page = Path("runs/clinics-regression/regression.html").read_text()
    table, _, rates = page.partition('id="baseline"')
    assert "rate 0 to 6" not in table
    assert rates.count("rate 0 to 6") == 1
    assert silodp("regression", config, "--out", "again").out.count("hazard ratio") >= 4


def test_a_plan_reads_no_table_and_says_what_would_be_lost(silodp: Silodp, config: Path) -> None:
    for hospital in HOSPITALS:
        Path(f"{hospital}.csv").unlink()
    small = silodp("regression", config, "--plan", "--epsilon", 0.1, "--json")
    large = silodp("regression", config, "--plan", "--epsilon", 60, "--json")
    assert small.json["warnings"]
    assert large.status == 0, large.err
    assert not large.json["warnings"]
    errors = [one["standard_error"] for one in large.json["coefficients"]]
    assert all(a < one["standard_error"] for a, one in zip(errors, small.json["coefficients"], strict=True))
    assert silodp("regression", config, "--plan").status == 0
    assert_sentence(silodp("regression", config, "--users", 150), code="argument.conflict")


def test_the_configuration_of_the_run_says_all_of_it(silodp: Silodp, config: Path) -> None:
    config.write_text("seed = 3\n" + config.read_text())
    assert silodp("regression", config, "--write-config", "regression.toml").status == 0
    assert silodp("run", "regression.toml", "--out", "again").status == 0
    assert silodp("regression", config, "--out", "first").status == 0
    again, first = read_regression(Path("again")), read_regression(Path("first"))
    assert again["coefficients"] == first["coefficients"]
    assert_sentence(silodp("regression", config, "--write-config", "regression.toml"), code="report.exists")


def test_without_a_table_or_an_epsilon_it_is_refused(silodp: Silodp, config: Path) -> None:
    text = config.read_text()
    config.write_text(text.replace("epsilon = 4.0", ""))
    assert_sentence(silodp("regression", config, "--plan"), code="argument.missing")
    config.write_text(text.partition("[regression]")[0])
    assert_sentence(silodp("regression", config, "--plan"), code="argument.missing")
    # Every command checks the table.
    config.write_text(text.replace("epsilon = 4.0", "epsilom = 4.0"))
    assert_sentence(silodp("plan", config), code="config.unknown_field")


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["logistic", "survival"])
def test_silos_on_their_own_machines_find_the_same(family: str, tmp_path: Path) -> None:
    path = write_clinics(tmp_path, draw_clinics(600), asked="epsilon = 4.0", head="seed = 4", family=family)
    resolved = derive_regression(load_config(path))
    run_config(resolved, tmp_path / "simulated")
    with start_consortium(tmp_path, resolved.config.to_toml()) as processes:
        processes.start_all()
        assert processes.wait_for_server() == 0, processes.log("server")
        ours, theirs = read_regression(processes.run), read_regression(tmp_path / "simulated")
    assert ours["coefficients"] == theirs["coefficients"]


@pytest.mark.parametrize(
    "kept", ["", '[method]\nname = "uldp-avg"\nclip = 0.1\n[method.local]\nlearning_rate = 0.05\n']
)
def test_a_release_of_sums_needs_no_noise_to_train_with(silodp: Silodp, config: Path, kept: str) -> None:
    text = config.read_text()
    start, end = text.index("[method]"), text.index("[regression]")
    config.write_text(text[:start] + kept + text[end:] + '[statistics]\nepsilon = 1.0\nmean = ["age"]\n')
    assert silodp("run", config).status == 2
    for command in ("regression", "statistics"):
        assert silodp(command, config, "--plan").status == 0
        done = silodp(command, config, "--epsilon", 1, "--out", command, "--json")
        assert done.status == 0, done.err
        assert 0.9 < done.json["guarantees"]["released"]["epsilon"] <= 1
        # The run's own configuration is whole.
        assert "noise_multiplier" in (Path(command) / "config.toml").read_text()
