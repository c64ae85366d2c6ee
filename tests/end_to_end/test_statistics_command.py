"""`silodp statistics` from the command line, and by three silos that are processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from silodp.cli.run import run_config
from silodp.config.resolve import load_config
from silodp_analytics.statistics.config import derive_statistics
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


def count_persons(silodp: Silodp, config: Path, *options: object) -> float:
    """The number of persons, once in every silo, almost without noise."""
    done = silodp(
        "statistics", config, "--epsilon", 500, *options, "--out", f"run-{len(list(Path().iterdir()))}"
    )
    assert done.status == 0, done.err
    tables = json.loads(Path(done.out.splitlines()[-2].partition(": ")[2]).read_text())["tables"]
    return next(one["estimate"]["value"] for one in tables if one["kind"] == "persons")


@pytest.mark.parametrize("rule", ["test_share = 0.3", 'split = "part"'])
def test_persons_held_out_for_testing_are_counted_unless_told_otherwise(
    silodp: Silodp, config: Path, rule: str
) -> None:
    """2,579 of 3,168 were counted once, and one sentence near the end of the page said so."""
    frame = draw_wards(300)
    everybody = len(frame.drop_duplicates(["hospital", "patient"]))
    for number, hospital in enumerate(HOSPITALS):
        part = frame[frame.hospital == hospital].drop(columns="hospital")
        name = "Teil" if hospital == "south" else "part"  # a mapping may name the column of the split
        part.assign(
            **{name: ["test" if int(p[1:]) % 3 == number % 2 else "train" for p in part.patient]}
        ).to_csv(f"{hospital}.csv", index=False)
    mapped = "[data.schema.silos.south]\ncolumns = { part = 'Teil' }\n" if "split" in rule else ""
    text = config.read_text().replace('kind = "survival"', f'kind = "survival"\n{rule}', 1)
    config.write_text(text.replace("[method]", f"{mapped}[method]", 1))
    assert count_persons(silodp, config) == pytest.approx(everybody, abs=2)
    assert count_persons(silodp, config, "--set", "statistics.held_out=false") < 0.85 * everybody


def test_counts_name_their_unit(silodp: Silodp, config: Path) -> None:
    """With one record in full, a person with nine stays counts about once in a silo: these are no counts of stays."""
    for records, counted in ((1, "persons_by_silo"), (3, "records_by_silo")):
        setting = ("--set", f"statistics.records={records}")
        assert silodp("statistics", config, "--plan", *setting, "--json").json["counted"] == counted
    assert silodp("statistics", config).status == 0
    found = read_statistics(Path("runs/wards-statistics"))
    assert (found["counted"], found["records_in_full"]) == ("persons_by_silo", 1)


def test_a_plan_says_how_well_a_mean_will_be_known(silodp: Silodp, config: Path) -> None:
    """Before any ε is spent; a wide range is named with the narrower one that helps."""
    setting = "data.schema.numeric={ dose = { range = [0, 365], typical = [6, 4] } }"
    options = ("--set", setting, "--set", 'statistics={ epsilon = 1.0, mean = ["dose"] }', "--json")
    found = silodp("statistics", config, "--plan", *options).json
    (mean,) = (one for one in found["tables"] if one["kind"] == "mean")
    # 600 persons; the mean is near the lower end, so that both noisy sums count
    assert mean["mean_error"] == pytest.approx(1.96 * mean["noise_std"] * 182.5 / 600 * 1.39, rel=0.01)
    assert len(found["warnings"]) == 1


TABLE = '{ by = "ward", columns = ["age", "dose", "kind"], quartiles = { age = 14 } }'


def test_a_table_one_is_a_page_a_file_and_lines_and_as_exact_as_its_plan_says(
    silodp: Silodp, config: Path
) -> None:
    options = ("--set", f"statistics={{ epsilon = 8.0, table_one = {TABLE} }}", "--json")
    plan = silodp("statistics", config, "--plan", *options).json
    done = silodp("statistics", config, *options)
    assert done.status == 0, done.err
    run = Path("runs/wards-statistics")
    rows = {(one["column"], one["label"]): one["cells"] for one in read_statistics(run)["table_one"]["rows"]}
    assert list(rows) == [
        ("", "persons"), ("age", "mean (sd)"), ("age", "missing"), ("age", "median [quartiles]"),
        ("dose", "mean (sd)"), ("kind", "x"), ("kind", "y"), ("kind", "z"),
    ]  # fmt: skip
    parts = {(one["kind"], one["column"]): one for one in plan["tables"]}
    assert set(parts) == {
        ("table-one-persons", "persons"), ("table-one-mean", "age"), ("table-one-mean", "dose"),
        ("table-one-shares", "kind"), ("table-one-quartiles", "age"),
    }  # fmt: skip
    frame = draw_wards(300)
    # 600 persons are public; 300 have records, so the plan is as much too good.
    for part, row, group, name, error in (
        (("table-one-persons", "persons"), ("", "persons"), "A", "count", "count_error"),
        (("table-one-mean", "dose"), ("dose", "mean (sd)"), "A", "mean", "mean_error"),
        (("table-one-mean", "dose"), ("dose", "mean (sd)"), "B − A", "difference", "difference_error"),
        (("table-one-shares", "kind"), ("kind", "y"), "A", "share", "share_error"),
        (("table-one-shares", "kind"), ("kind", "y"), "B − A", "difference", "difference_error"),
    ):
        found, persons = rows[row][group][name], (frame.ward == "A").sum()
        planned = parts[part][error] * (1 if name == "count" else 300 / persons)
        assert (found["high"] - found["low"]) / 2 == pytest.approx(planned, rel=0.4)
    lines = (run / "table_one.csv").read_text().splitlines()
    assert len(lines) > 30
    assert "table_one.csv" in (run / "statistics.html").read_text()
    # The file is made from those of the run alone, as the page is.
    (run / "table_one.csv").unlink()
    assert silodp("report", run).status == 0
    assert (run / "table_one.csv").read_text().splitlines() == lines


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
    path.write_text(f"{path.read_text()}table_one = {TABLE}\n")
    resolved = derive_statistics(load_config(path))
    run_config(resolved, tmp_path / "simulated")
    with start_consortium(tmp_path, resolved.config.to_toml()) as processes:
        processes.start_all()
        assert processes.wait_for_server() == 0, processes.log("server")
        ours, theirs = read_statistics(processes.run), read_statistics(tmp_path / "simulated")
    assert ours["tables"] == theirs["tables"]
    assert ours["table_one"] == theirs["table_one"]
    (survival,) = (one for one in ours["tables"] if one["kind"] == "survival")
    assert len(survival["curves"]) == 2
    assert max(len(curve["times"]) for curve in survival["curves"]) > len(TIMES) - 2
