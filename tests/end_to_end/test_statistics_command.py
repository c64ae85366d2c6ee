"""`silodp statistics` from the command line, and by three silos that are processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from silodp.cli.run import run_config
from silodp.config.resolve import load_config
from silodp.config.statistics import derive_statistics
from support.commands import Silodp, assert_sentence
from support.consortium import start_consortium
from support.wards import HOSPITALS, TIMES, draw_wards, write_wards


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_wards(tmp_path, draw_wards(300))


def read_statistics(directory: Path) -> Any:
    return json.loads((directory / "statistics.json").read_text())


def test_a_run_writes_numbers_and_a_page_but_no_model(silodp: Silodp, config: Path) -> None:
    done = silodp("statistics", config, "--epsilon", 2, "--json")
    assert done.status == 0, done.err
    run = Path("runs/wards-statistics")
    files = {path.name for path in run.iterdir()}
    assert {"statistics.json", "statistics.html", "guarantee.json", "checkpoint"} <= files
    assert not files & {"model.safetensors", "model.json", "MODEL_CARD.md", "report.html"}
    assert done.json["releasable"] is True
    assert 1.9 < done.json["guarantees"]["released"]["epsilon"] <= 2
    # The page is made from the files of the run alone.
    before = {name: (run / name).read_bytes() for name in ("statistics.json", "statistics.html")}
    (run / "statistics.html").unlink()
    assert silodp("report", run).status == 0
    assert {name: (run / name).read_bytes() for name in before} == before


def test_numbers_are_near_those_of_all_tables_together(silodp: Silodp, config: Path) -> None:
    frame = draw_wards(300)
    assert silodp("statistics", config, "--epsilon", 50).status == 0
    found = read_statistics(Path("runs/wards-statistics"))
    text = json.dumps(found)
    assert "north" not in text
    by_kind = {(one["kind"], one["column"]): one for one in found["tables"]}
    mean = by_kind[("mean", "age")]["estimate"]["mean"]
    assert mean["low"] <= mean["value"] <= mean["high"]
    assert mean["value"] == pytest.approx(frame.age.mean(), abs=2)


def test_a_plan_reads_no_table_and_says_what_noise_drowns(silodp: Silodp, config: Path) -> None:
    for hospital in HOSPITALS:
        Path(f"{hospital}.csv").unlink()
    small = silodp("statistics", config, "--plan", "--epsilon", 0.3)
    large = silodp("statistics", config, "--plan", "--epsilon", 300)
    assert small.status == large.status == 0
    assert "warning" in small.out + small.err
    assert "warning" not in large.out + large.err


def test_a_plan_assumes_a_number_of_persons_that_nothing_states(silodp: Silodp, config: Path) -> None:
    config.write_text(config.read_text().replace('users = "patients.txt"\n', ""))
    for options, users, is_assumed in (((), 1000, True), (("--users", 150), 150, False)):
        found = silodp("statistics", config, "--plan", *options, "--json").json
        assert (found["users"], found["users_assumed"]) == (users, is_assumed)
        assert bool(found["warnings"]) is not is_assumed  # what drowns is known by the number of persons
        assert silodp("statistics", config, "--plan", *options).status == 0
    assert_sentence(silodp("statistics", config, "--users", 150), code="argument.conflict")


def test_the_configuration_of_the_run_says_all_of_it(silodp: Silodp, config: Path) -> None:
    assert silodp("statistics", config, "--write-config", "statistics.toml").status == 0
    assert silodp("run", "statistics.toml", "--out", "again").status == 0
    names = [(one["kind"], one["column"]) for one in read_statistics(Path("again"))["tables"]]
    assert ("survival", "days") in names
    assert ("persons", "persons") in names
    assert_sentence(silodp("statistics", config, "--write-config", "statistics.toml"), code="report.exists")


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("statistics.epsilon=0", "argument.value"),
        ("statistics.epsilon=-1", "argument.value"),
        ("statistics.histogram={ age = 0 }", "argument.value"),
        ("statistics.histogram={ height = 5 }", "statistics.column"),
        ("statistics.survival={ times = [] }", "statistics.column"),
        ("statistics.survival={ times = [2.0, 1.0] }", "statistics.column"),
        ("statistics.records=0", "argument.value"),
        ("statistics.weights={ age = 0.0 }", "argument.value"),
        ("statistics.persons=3", "config.value"),
        ("statistics.nothing=1", "config.unknown_field"),
    ],
)
def test_what_cannot_be_counted_is_refused(silodp: Silodp, config: Path, setting: str, code: str) -> None:
    assert_sentence(silodp("statistics", config, "--set", setting), code=code)
    assert not Path("runs").exists()


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_statistics_over_tls_are_those_of_the_simulation(tmp_path: Path) -> None:
    """With a seed the noise is the same, so a coverage that was measured in one process holds for three silos."""
    path = write_wards(
        tmp_path, draw_wards(300), head='seed = 3\naggregator = "masked"', noise="noise_multiplier = 0.5"
    )
    resolved = derive_statistics(load_config(path))
    run_config(resolved, tmp_path / "simulated")
    with start_consortium(tmp_path, resolved.config.to_toml()) as processes:
        processes.start_all()
        assert processes.wait_for_server() == 0, processes.log("server")
        ours, theirs = read_statistics(processes.run), read_statistics(tmp_path / "simulated")
    assert ours["tables"] == theirs["tables"]
    (survival,) = (one for one in ours["tables"] if one["kind"] == "survival")
    assert len(survival["curves"]) == 2
    assert max(len(curve["times"]) for curve in survival["curves"]) > len(TIMES) - 2
