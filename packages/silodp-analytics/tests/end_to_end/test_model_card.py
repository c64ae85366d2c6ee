"""The model card of a run: metrics on private records only where they are declared, and what is unknown is said."""

from __future__ import annotations

import csv
import json
import os
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import silodp
from silodp.accounting.guarantee import HELD_OUT
from silodp.config.resolve import load_config
from silodp.data.tables.subgroups import find_groups
from silodp.errors import SilodpError
from silodp.report.held_out import measure_held_out, read_held_out
from silodp.report.model_card import write_card
from silodp.training import binary_cross_entropy
from silodp_analytics.decisions.decisions import calibrate_counts
from support.commands import Silodp, assert_sentence

CONFIG = """
rounds = 2
[data]
source = "tables"
files = { north_clinic = "north_clinic.csv", south_clinic = "south_clinic.csv" }
[data.schema]
user = "person_key"
label = "ill"
classes = ["no", "yes"]
split = "part"
numeric = { age = [0, 110] }
categorical = { ward = ["surgery", "medicine"] }
[method]
name = "uldp-avg"
noise_multiplier = 3.0
clip = 0.5
[method.local]
learning_rate = 0.1
"""
CARD = """
[card]
intended_use = "Plans beds | not for single patients."
license = "CC0"
"""
GROUPS = '[card.subgroups]\nward = ["medicine"]\nage = [18, 22, 60, 99]\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tables; 60 and 30 held-out records, of which 15 have the second class."""
    monkeypatch.chdir(tmp_path)
    coins = random.Random(1)
    for name, rows in (("north_clinic", 120), ("south_clinic", 60)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["person_key", "age", "ward", "ill", "part"])
            for row in range(rows):
                age, ward = coins.randint(18, 99), "medicine" if row % 4 < 2 else "surgery"
                part, ill = ("test", "train")[row % 2], "yes" if row % 6 == 0 else "no"
                table.writerow([f"p{row % 40}", age, ward, ill, part])
    (tmp_path / "hospitals_2020.toml").write_text(CONFIG + CARD)
    return tmp_path


def sections(card: str) -> dict[str, str]:
    parts = card.split("\n## ")
    return {title: text for title, _, text in (part.partition("\n") for part in parts[1:])}


def test_a_card_that_declares_no_metrics_can_be_shared(folder: Path, silodp: Silodp) -> None:
    done = silodp("run", "hospitals_2020.toml", "--out", "run")
    assert done.status == 0, done.err
    card = Path("run/MODEL_CARD.md").read_text()
    assert "is public, or is covered by the guarantee below" in card
    assert "`silodp predict DIR TABLE --out FILE`, or `silodp.load(DIR)` in Python." in card
    for private in ("north_clinic", "person_key", "hospitals_2020", str(folder), "seed", "accuracy |"):
        assert private not in card, private
    found = sections(card)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    for value in rows[-1]["metrics"].values():
        assert f"{value:.4g}" not in found["Metrics"]
    assert "Plans beds | not for single patients." in found["Intended use"]
    assert found["Intended use"].count("Unknown:") == 2  # limits and contact
    guarantees = json.loads(Path("run/guarantee.json").read_text())["guarantees"]
    assert all(one["text"] in card for g in guarantees for one in g["assumptions"])
    assert all(text in card for g in guarantees for text in g["not_covered"] if text != HELD_OUT)
    assert "- records held out for testing: they are not trained on\n" in card
    assert "published as they are" not in card  # this card has no metrics
    assert "| `age` | number, 0 to 110 | refused |" in found["Data"]
    assert " counted in the tables: no public list states it." in found["Data"]
    settings = "noise_multiplier = 3.0, clip = 0.5, local.learning_rate = 0.1"
    assert f"**Method**: `uldp-avg, {settings}`." in found["Training"]
    before = card.replace("Unknown", "")
    Path("run/MODEL_CARD.md").unlink()
    assert "MODEL_CARD.md" in silodp("report", "run").out
    assert Path("run/MODEL_CARD.md").read_text().replace("Unknown", "") == before


def test_a_card_without_a_ledger_begins_with_that(folder: Path, silodp: Silodp) -> None:
    """The ε of its guarantee.json may be anything."""
    assert silodp("run", "hospitals_2020.toml", "--out", "run").status == 0
    assert "Not checked" not in Path("run/MODEL_CARD.md").read_text()
    Path("run/checkpoint/ledger.jsonl").unlink()
    assert silodp("report", "run").status == 0
    assert Path("run/MODEL_CARD.md").read_text().startswith("# Model card\n\n**Not checked.**")


def test_a_card_says_what_dates_and_missing_cells_count_as(folder: Path, silodp: Silodp) -> None:
    day = (
        'range = [0, 366], typical = [90, 20], date = "%Y-%m-%d", since = "2020-01-01", missing = "indicator"'
    )
    numeric = f'{{ "day|in" = {{ {day} }}, age = {{ range = [0, 110], missing = 50 }} }}'
    ward = '{ ward = { categories = ["surgery", "medicine"], missing = "surgery" } }'
    config = CONFIG.replace("numeric = { age = [0, 110] }", f"numeric = {numeric}")
    Path("c.toml").write_text(config.replace('{ ward = ["surgery", "medicine"] }', ward))
    for name in ("north_clinic", "south_clinic"):
        pd.read_csv(f"{name}.csv").assign(**{"day|in": "2020-03-04"}).to_csv(f"{name}.csv", index=False)
    done = silodp("run", "c.toml", "--out", "run")
    assert done.status == 0, done.err
    found = sections(Path("run/MODEL_CARD.md").read_text())["Data"]
    day = r"| `day\|in` | date, in days since 2020-01-01, 0 to 366, typically 90 ± 20 | count as 90, with"
    for row in (day, "110 | count as 50 |", "| one of `surgery`, `medicine` | count as `surgery` |"):
        assert row in found


def test_a_card_names_the_code_without_which_the_model_cannot_be_used(folder: Path, silodp: Silodp) -> None:
    """The call on the card is one that works: code is run only where it is named."""
    Path("mine.py").write_text(
        "from torch import nn\ndef network(features): return nn.Sequential(nn.Linear(features, 1))\n"
    )
    assert (
        silodp("run", "hospitals_2020.toml", "--set", "task.model=mine.py:network", "--out", "run").status
        == 0
    )
    card = Path("run/MODEL_CARD.md").read_text()
    assert "`silodp predict DIR TABLE --out FILE --code model.py`" in card
    assert '`silodp.load(DIR, code="model.py")` in Python.' in card
    os.chdir("run")
    options = ("--out", "predictions.csv", "--code", "model.py")
    assert silodp("predict", ".", folder / "south_clinic.csv", *options).status == 0


def test_a_card_of_a_model_that_a_program_passed_asks_for_it_again(tmp_path: Path) -> None:
    federation = silodp.data.embedded(users=20, silos=2)
    task = silodp.Task(torch.nn.Linear(30, 1), binary_cross_entropy())
    method = silodp.methods.UldpSgd(noise_multiplier=5.0, step=1.0)
    silodp.train(federation, task, method, rounds=1, out=tmp_path / "run")
    card = write_card(tmp_path / "run")
    assert card is not None
    assert "**Use**: `silodp.load(DIR, model=MODULE)` in Python." in card.read_text()


def test_a_card_of_a_seeded_run_says_that_it_is_not_for_release(folder: Path, silodp: Silodp) -> None:
    assert silodp("run", "hospitals_2020.toml", "--out", "run", "--set", "seed=71234").status == 0
    card = Path("run/MODEL_CARD.md").read_text()
    assert card.splitlines()[2].startswith("**Not for release.**")
    assert "71234" not in card
    no_noise = ("--set", "method.noise_multiplier=0")
    assert silodp("run", "hospitals_2020.toml", "--out", "plain", *no_noise).status == 0
    assert "no privacy guarantee" in Path("plain/MODEL_CARD.md").read_text().splitlines()[2]


def test_declared_metrics_are_marked_and_those_of_few_persons_left_out(folder: Path, silodp: Silodp) -> None:
    settings = Path("hospitals_2020.toml")
    settings.write_text(settings.read_text() + "publish_metrics = true\n" + GROUPS)
    assert silodp("run", settings, "--out", "run").status == 0
    metrics = sections(Path("run/MODEL_CARD.md").read_text())["Metrics"]
    assert metrics.count("on private records, not covered by ε") == 1
    held_out = read_held_out(Path("run"))
    assert held_out is not None
    assert {(part.of, part.name): part.records for part in held_out.parts if part.of != "age"} == {
        ("silo", "north_clinic"): 60,
        ("silo", "south_clinic"): 30,
        ("ward", "medicine"): 45,
    }
    assert any(0 < part.persons < 20 <= part.records for part in held_out.parts)
    for part in held_out.parts:
        shown = next(line for line in metrics.splitlines() if part.name in line and line.startswith("|"))
        if part.persons < 20:
            assert "fewer than 20 persons" in shown
        else:
            assert f"| {part.metrics['accuracy']:.4g} |" in shown
    page = Path("run/report.html").read_text()
    assert "silo south_clinic" in page
    assert "which no ε covers: they" in page
    kept = Path("run/plots/held_out.json")
    stored = json.loads(kept.read_text())
    del stored["persons"]
    kept.write_text(json.dumps(stored))
    assert_sentence(silodp("report", "run"), code="report.damaged")
    kept.unlink()
    assert silodp("report", "run").status == 0
    assert "silo south_clinic" not in Path("run/report.html").read_text()
    card = Path("run/MODEL_CARD.md").read_text()
    assert "Per silo: unknown." in card
    assert card.count("| fewer than 20 persons |") == 1


def test_metrics_of_few_persons_are_in_no_row(folder: Path, silodp: Silodp) -> None:
    settings = Path("hospitals_2020.toml")
    settings.write_text(settings.read_text() + "publish_metrics = true\n")
    for name in ("north_clinic", "south_clinic"):  # 30 and 15 held-out records of 10 persons
        table = Path(f"{name}.csv")
        lines = table.read_text().splitlines(keepends=True)
        table.write_text("".join(line for row, line in enumerate(lines) if row == 0 or row % 4 != 1))
    assert silodp("run", settings, "--out", "run").status == 0
    held_out = read_held_out(Path("run"))
    assert held_out is not None
    assert held_out.persons == 10
    metrics = sections(Path("run/MODEL_CARD.md").read_text())["Metrics"]
    assert metrics.count("| fewer than 20 persons |") == 3
    assert "0." not in metrics


def test_held_out_records_of_nobody_are_persons_of_their_own() -> None:
    """Data sets of the papers simulate no persons for them."""
    federation = silodp.data.embedded(users=20, silos=6)
    assert federation.test is not None
    task = silodp.Task(torch.nn.Linear(30, 1), binary_cross_entropy())
    found = measure_held_out(federation, task, task.initial(0), 0)
    assert found is not None
    assert found.persons == len(federation.test) == sum(part.persons for part in found.parts)


def test_where_silos_evaluate_nothing_is_measured_on_pooled_records(folder: Path, silodp: Silodp) -> None:
    """Otherwise the report of a run whose metrics ε covers would have metrics that it does not cover."""
    settings = Path("hospitals_2020.toml")
    settings.write_text(settings.read_text() + '[evaluation]\nacross = "sums"\nnoise_multiplier = 0.5\n')
    assert silodp("run", settings, "--out", "sums", "--set", "card.publish_metrics=true").status == 0
    assert read_held_out(Path("sums")) is None
    metrics = sections(Path("sums/MODEL_CARD.md").read_text())["Metrics"]
    assert "which ε covers" in metrics
    assert "95 % interval" in metrics
    assert "north_clinic" not in metrics
    assert silodp("run", settings, "--out", "local", "--set", 'evaluation={across="local"}').status == 0
    assert read_held_out(Path("local")) is None
    assert "Unknown here" in sections(Path("local/MODEL_CARD.md").read_text())["Metrics"]


def test_subgroups_are_those_that_the_schema_declares(folder: Path, silodp: Silodp) -> None:
    for wrong, code in (
        ("person_key = [1]", "config.value"),
        ('ward = ["radiology"]', "config.value"),
        ('ward = ["medicine", "medicine"]', "config.value"),
        ("age = [18]", "config.value"),
        ("age = [40, 18]", "config.value"),
        ("age = [0, 130]", "config.value"),
        ('age = ["young", "old"]', "config.value"),
        ("age = true", "config.value"),
    ):
        Path("wrong.toml").write_text(CONFIG + CARD + "[card.subgroups]\n" + wrong)
        assert_sentence(silodp("plan", "wrong.toml"), code=code)
    Path("wrong.toml").write_text(CONFIG + "[card]\nlicence = 'CC0'\n")
    assert_sentence(silodp("plan", "wrong.toml"), code="config.unknown_field")


def test_a_card_shows_no_subgroups_that_the_run_did_not_measure(folder: Path, silodp: Silodp) -> None:
    settings, late = Path("hospitals_2020.toml"), "so not measured"
    assert silodp("run", settings, "--out", "run").status == 0
    config = Path("run/config.toml")
    bare = config.read_text()

    def write_card_of(subgroups: str) -> list[str]:
        config.write_text(bare.replace("publish_metrics = false", "publish_metrics = true") + subgroups)
        assert silodp("report", "run").status == 0
        return sections(Path("run/MODEL_CARD.md").read_text())["Metrics"].splitlines()

    def has_row(metrics: list[str], name: str) -> bool:
        return any(line.startswith(f"| {name} |") for line in metrics)

    metrics = write_card_of(GROUPS)
    assert has_row(metrics, "silo north_clinic")
    assert not has_row(metrics, "ward: medicine")
    (told,) = [line for line in metrics if late in line]
    assert all(name in told for name in ("ward: medicine", "age: 18 to below 22", "age: 60 to 99"))

    # The run measures them when it is resumed, also without another round.
    assert silodp("run", "run", "--resume").status == 0
    metrics = sections(Path("run/MODEL_CARD.md").read_text())["Metrics"].splitlines()
    assert has_row(metrics, "ward: medicine")
    assert has_row(metrics, "age: 60 to 99")
    assert not any(late in line for line in metrics)

    metrics = write_card_of('[card.subgroups]\nward = ["surgery", "medicine"]\nage = [18, 60.0000001, 99]\n')
    assert has_row(metrics, "ward: medicine")
    assert not any(
        has_row(metrics, f"age: {old}") for old in ("18 to below 22", "60 to 99", "18 to below 60")
    )
    (told,) = [line for line in metrics if late in line]
    assert all(name in told for name in ("ward: surgery", "age: 60.0000001 to 99"))
    assert "ward: medicine" not in told
    metrics = write_card_of("")
    assert not has_row(metrics, "ward: medicine")


def test_a_card_says_that_its_table_cannot_be_read(folder: Path, silodp: Silodp) -> None:
    assert silodp("run", "hospitals_2020.toml", "--out", "run").status == 0
    config, card = Path("run/config.toml"), Path("run/MODEL_CARD.md")
    assert "is not TOML" not in card.read_text()
    config.write_text(config.read_text() + 'license = "MIT"\n')  # a second time
    assert "line" in silodp("report", "run").out
    assert "config.toml is not TOML" in card.read_text()


@pytest.mark.parametrize(
    ("wrong", "code", "field"),
    [
        ("[card.subgroups]\nAltr = [18, 99]\n", "config.value", "card.subgroups.Altr"),
        ('[card.subgroups]\nward = ["radiology"]\n', "config.value", "card.subgroups.ward"),
        ("Altr = 3\n", "config.unknown_field", "card.Altr"),
        ("publish_metrics = 1\n", "config.value", "card.publish_metrics"),
        ("contact = 2020-01-01\n", "config.type", "card.contact"),
    ],
)
def test_a_report_names_the_setting_of_the_card_that_is_wrong(
    folder: Path, silodp: Silodp, wrong: str, code: str, field: str
) -> None:
    assert silodp("run", "hospitals_2020.toml", "--out", "run").status == 0
    config = Path("run/config.toml")
    config.write_text(config.read_text().replace("publish_metrics = false\n", "") + wrong)
    card = Path("run/MODEL_CARD.md").read_bytes()
    done = silodp("report", "run", "--json")
    assert_sentence(done, code=code)
    assert done.json["error"]["field"] == field
    assert Path("run/MODEL_CARD.md").read_bytes() == card


def test_subgroups_and_details_follow_from_the_rows(folder: Path) -> None:
    settings = load_config("hospitals_2020.toml")
    federation = settings.load_federation()
    assert federation.test is not None
    assert federation.schema is not None
    rows = [
        row
        for name in ("north_clinic", "south_clinic")
        for row in csv.DictReader(Path(f"{name}.csv").read_text().splitlines())
        if row["part"] == "test"
    ]
    groups = {"ward": ["surgery"], "age": [18, 40, 99]}
    found = {
        (column, name): chosen
        for column, name, chosen in find_groups(federation.test.x, federation.schema, groups)
    }
    assert np.array_equal(found["ward", "surgery"], [row["ward"] == "surgery" for row in rows])
    assert np.array_equal(found["age", "18 to below 40"], [18 <= int(row["age"]) < 40 for row in rows])
    assert np.array_equal(found["age", "40 to 99"], [40 <= int(row["age"]) <= 99 for row in rows])
    assert all(0 < chosen.sum() < len(rows) for chosen in found.values())
    task = settings.build_task(federation)
    params = task.initial(3)
    measured = measure_held_out(federation, task, params, 0, groups)
    assert measured is not None
    inputs, _ = task.tensors(federation.test.x, federation.test.y)
    scores = task.predict(params, inputs).double().numpy().ravel()
    labels = federation.test.y
    expected = [
        [((labels == true) & ((scores > 0) == bool(said))).sum() for said in (0, 1)] for true in (0, 1)
    ]
    assert np.array_equal(measured.confusion, expected)
    assert sum(one.records for one in measured.calibration) == len(rows)
    probability = 1 / (1 + np.exp(-scores))
    first = measured.calibration[0]
    step = (probability * 10).astype(int)
    assert first.predicted == pytest.approx(probability[step == step.min()].mean())
    assert first.observed == pytest.approx(labels[step == step.min()].mean())


def test_calibration_by_noisy_counts_leaves_out_what_is_lost_in_the_noise() -> None:
    counts = [[90.0, 3.0, 10.0, 0.2], [10.0, -2.5, 30.0, 0.1]]
    first, second = calibrate_counts(counts, noise_std=2.0)
    assert (first.predicted, first.observed) == (0.125, 0.1)
    assert (second.predicted, second.observed) == (0.625, 0.75)
    assert second.error > first.error > np.sqrt((11 / 102) * (91 / 102) / 102)


def test_a_damaged_file_of_details_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    for damaged in ('{"round": 1, "parts": [{}]}', "[]", '{"round": NaN'):
        (tmp_path / "plots" / "held_out.json").write_text(damaged)
        with pytest.raises(SilodpError) as refused:
            read_held_out(tmp_path)
        assert refused.value.code == "report.damaged"
