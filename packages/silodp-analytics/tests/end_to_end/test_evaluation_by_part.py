"""Evaluation by subgroup and silo, of numbers and of survival, from a configuration: rows, page, card and errors."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from silodp.report.estimates import Estimate, find_evaluation, find_limits
from support.commands import Silodp, assert_sentence
from support.refusals import refused

HEAD = """
rounds = 3
seed = 1
[method]
name = "uldp-avg"
noise_multiplier = 5.0
step = 1.0
[method.local]
learning_rate = 0.1
[data]
source = "tables"
files = { north = "north.csv", south = "south.csv" }
[data.schema]
user = "patient"
test_share = 0.5
categorical = { ward = ["S", "M"], sex = ["f", "m", "x"] }
numeric = { age = { range = [0, 110], typical = [60, 20] } }
"""
LABELS = {
    "classes": 'label = "readmitted"\nclasses = ["no", "yes"]\n',
    "real": 'label = "cost"\nkind = "real"\nlabel_typical = [2000, 1000]\n',
    "survival": 'kind = "survival"\nevent = "died"\ntime = "months"\n',
}
SUMS = '[evaluation]\nacross = "sums"\nnoise_multiplier = 1.0\n'
BY = 'by = ["age", "sex"]\nby_silo = true\n[card.subgroups]\nage = [20, 40, 65, 95]\n'


@pytest.fixture(autouse=True)
def tables(config: Path) -> None:
    """Two tables of 900 records of 1,200 persons; nobody's sex is x."""
    draw = random.Random(3)
    for silo in ("north", "south"):
        with Path(f"{silo}.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["patient", "age", "ward", "sex", "cost", "died", "months", "readmitted"])
            for _ in range(900):
                number = draw.randrange(1200)
                own = random.Random(number)
                age, sex, risk = round(own.uniform(20, 95)), own.choice("fm"), draw.gauss(0, 1)
                cost, months = round(2000 + 500 * risk + 10 * age), round(draw.expovariate(0.05), 2) + 0.1
                died, again = int(draw.random() < 0.6), "yes" if risk > 0.4 else "no"
                lines.writerow([f"p{number}", age, draw.choice("SM"), sex, cost, died, months, again])


def run(silodp: Silodp, config: Path, labels: str, more: str, *changes: str) -> dict[str, Any]:
    config.write_text(HEAD + LABELS[labels] + SUMS + more)
    done = silodp("run", config, "--out", "run", "--json", *changes)
    assert done.status == 0, done.err
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = rows[-1]["evaluation"]
    return found


def test_rows_page_and_card_show_the_same_parts(silodp: Silodp, config: Path) -> None:
    found = run(silodp, config, "classes", BY)
    parts = {f"{part['of']}: {part['name']}": part for part in found["parts"]}
    assert list(parts) == [
        *("silo: north", "silo: south", "sex: f", "sex: m", "sex: x"),
        *("age: 20 to below 40", "age: 40 to below 65", "age: 65 to 95", "age: others"),
    ]
    hidden = [name for name, part in parts.items() if not part["shown"]]
    assert hidden == ["sex: x", "age: others"]
    assert all(parts[name]["records"] is None and parts[name]["estimates"] == {} for name in hidden)
    assert silodp("report", "run").status == 0
    page, card = Path("run/report.html").read_text(), Path("run/MODEL_CARD.md").read_text()
    section = page[page.index('id="parts"') :]
    section = section[: section.index("</table>")]
    for name, part in parts.items():
        title = name.replace("silo: ", "silo ")
        assert (f'scope="row">{title}<' in section) == part["shown"]
        assert (f"| {title} |" in card) == part["shown"]
        for metric, one in part["estimates"].items():
            estimate = Estimate(**one)
            reach = 1.96 * math.hypot(estimate.standard_error, estimate.sampling_error)
            low, high = max(estimate.value - reach, 0), min(estimate.value + reach, 1)
            assert find_limits(metric, estimate) == pytest.approx((low, high), abs=1e-5)
            text = f"{estimate.value:.4g} ({low:.3g} to {high:.3g})"
            assert text in section
            assert text in card
    assert "Not shown: sex: x; age: others." in page
    assert re.search(r"Not shown, because .*sex: x.*age: others", card)
    assert "also sees noisy counts of the held-out records of each silo" in page
    stated = json.loads(Path("run/guarantee.json").read_text())["guarantees"]
    (server,) = [one for one in stated if one["adversary"] == "server"]
    assert "silos-compared" in {one["id"] for one in server["assumptions"]}
    assert (Path("run/plots/groups-accuracy.svg")).exists()
    assert (Path("run/plots/silos-accuracy.svg")).exists()


def test_without_parts_the_page_has_no_section_of_them(silodp: Silodp, config: Path) -> None:
    assert "parts" not in run(silodp, config, "classes", "")
    assert 'id="parts"' not in Path("run/report.html").read_text()
    card = Path("run/MODEL_CARD.md").read_text()
    assert "Per silo: unknown." in card
    assert "Per subgroup: unknown." in card


def test_the_directory_of_a_run_says_all_that_its_parts_depend_on(silodp: Silodp, config: Path) -> None:
    """A report is derived from config.toml alone, and a run goes on with the subgroups that it began with."""
    run(silodp, config, "classes", BY)
    written = Path("run/config.toml").read_text()
    assert "[[evaluation.ranges]]" in written
    assert silodp("run", config, "--out", "run", "--resume", "--set", "rounds=4").status == 0
    assert silodp("run", "run/config.toml", "--out", "again").status == 0
    again = Path("again/metrics.jsonl").read_text()
    assert json.loads(again.splitlines()[-1])["evaluation"]["parts"]
    other = silodp("plan", "run/config.toml", "--set", 'evaluation.by=["sex"]')
    assert_sentence(other, code="evaluation.by")
    # A bound moved: another table, so another evaluation.
    Path("run/config.toml").write_text(written.replace("65.0", "66.0"))
    assert "[report.contradicted]" in silodp("report", "run").err


def test_numbers_are_evaluated_in_the_unit_of_the_label(silodp: Silodp, config: Path) -> None:
    found = run(silodp, config, "real", "bins = 32\n")["estimates"]
    assert found.keys() == {"mean_absolute_error"} | found.keys()
    error = found["mean_absolute_error"]
    # Costs have a standard deviation of about 550, and the typical cost is known.
    assert 200 < error["value"] < 900
    assert error["low"] < error["value"] < error["high"]
    unscaled = HEAD + LABELS["real"].replace("label_typical = [2000, 1000]\n", "") + SUMS
    config.write_text(unscaled)
    assert_sentence(silodp("plan", config), code="evaluation.labels")


def test_survival_of_the_held_out_is_drawn(silodp: Silodp, config: Path) -> None:
    more = "times = [6.0, 12.0, 24.0, 48.0]\nbins = 4\nclip = 1000.0\n"
    found = run(silodp, config, "survival", more, "--set", "evaluation.noise_multiplier=0.0")
    rows = [{"round": 3, "evaluation": found}]
    curve = find_evaluation(rows).estimate_survival()  # type: ignore[arg-type, union-attr]
    assert curve is not None
    counts = np.array(found["counts"]).sum(axis=2)  # (times + 1, censored or event)
    survival, at_risk = [], counts.sum()
    for censored, events in counts[:-1]:
        survival.append((survival[-1] if survival else 1.0) * (1 - events / (at_risk - censored / 2)))
        at_risk -= censored + events
    assert curve.survival == pytest.approx(survival)
    page = Path("run/report.html").read_text()
    assert "Kaplan-Meier" in page
    assert Path("run/plots/survival.svg").exists()


@pytest.mark.parametrize("by", ['["sexx"]', '["readmitted"]', '["age"]', '["sex", "sex"]'])
def test_columns_without_public_subgroups_are_refused(by: str, silodp: Silodp, config: Path) -> None:
    config.write_text(HEAD + LABELS["classes"] + SUMS + f"by = {by}\n")
    assert_sentence(silodp("plan", config), code="evaluation.by")


def test_a_plan_states_the_counts_of_all_parts(silodp: Silodp, config: Path) -> None:
    config.write_text(HEAD + LABELS["classes"] + SUMS + BY)
    planned = silodp("plan", config, "--json").json["evaluation"]
    found = run(silodp, config, "classes", BY)
    assert planned["cells"] == 2 * (3 + 4) * 20  # silos, subgroups, cells
    silos = [part["noise_std"] for part in found["parts"] if part["of"] == "sex"]
    assert silos == pytest.approx(
        [planned["noise_std"] * np.sqrt(2)] * 3, rel=1e-4
    )  # added up over two silos


@pytest.mark.parametrize("content", [{"counts": "many"}, {}, [1], "x"])
def test_an_evaluation_that_cannot_be_read_is_refused_and_not_left_out(content: object) -> None:
    assert find_evaluation([{"round": 1, "evaluation": None}]) is None
    with refused("run.metrics_damaged"):
        find_evaluation([{"round": 1, "evaluation": content}])
