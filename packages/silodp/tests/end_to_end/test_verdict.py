"""A model that is no better than knowing nothing is said to be so: output, report, card, comparison and `predict`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from silodp.data.tables.schema import find_test_persons
from silodp.report.held_out import read_held_out
from silodp.report.skill import FEWEST_PERSONS
from support.commands import Silodp
from support.verdicts import CONFIG, banner, predict, train, write_tables

PUBLISHED = "[card]\npublish_metrics = true"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_model_that_learned_nothing_is_said_to_be_no_good(silodp: Silodp) -> None:
    """The label has nothing to do with the columns; the loss is far from ten times that of the untrained model."""
    found = train(silodp)["skill"]
    assert found["code"] in ("unclear", "worse")
    values = {one["metric"]: one for one in found["comparisons"]}
    assert values["roc_auc"]["verdict"] != "better"
    assert values["roc_auc"]["constant"] == 0.5
    share = 1 - values["accuracy"]["constant"]
    assert values["log_loss"]["constant"] == pytest.approx(
        -share * np.log(share) - (1 - share) * np.log(1 - share)
    )
    frame = pd.concat([pd.read_csv("north.csv"), pd.read_csv("south.csv")])
    assert found["persons"] == sum(find_test_persons(frame.patient.unique(), 0.3))
    assert 'class="banner"' in banner(Path("run/report.html").read_text())
    assert predict(silodp) == found
    plain = silodp("run", "wards.toml", "--out", "again")
    head = read_held_out(Path("again")).skill.head  # type: ignore[union-attr]
    assert plain.out.splitlines()[1].startswith(head)


def test_good_order_with_probabilities_far_too_small_is_told(silodp: Silodp) -> None:
    """AUC .82 and a log loss above the frequency's went without a word; a mean of .057 where .22 happened, too."""
    found = train(silodp, slope=1.5, rounds=20, step=10.0)["skill"]
    assert found["code"] == "order_only"
    (offset,) = found["calibration"]
    assert offset["label"] == "yes"
    assert offset["verdict"] == "too_small"
    assert offset["predicted"] < offset["observed"] / 1.25
    assert predict(silodp)["calibration"] == [offset]
    page = banner(Path("run/report.html").read_text())
    assert f"{offset['predicted']:.2g}" in page
    # Private metrics are in no card unless the owner publishes them, and nothing that follows from them.
    assert found["comparisons"][0]["metric"] == "roc_auc"
    area = f"{found['comparisons'][0]['value']:.4g}"
    card = Path("run/MODEL_CARD.md").read_text()
    assert area not in card
    assert "orders records" not in card


def test_a_good_model_is_said_to_be_better_and_its_card_has_what_is_published(silodp: Silodp) -> None:
    found = train(silodp, slope=2.0, rounds=20, step=0.3, noise=2.0, more=PUBLISHED)["skill"]
    assert found["code"] == "better"
    assert all(one["verdict"] is None for one in found["calibration"])
    assert 'class="banner"' not in banner(Path("run/report.html").read_text())
    metrics = Path("run/MODEL_CARD.md").read_text().partition("## Metrics")[2].partition("## Training")[0]
    assert "predicts better than a constant" in metrics
    assert f"{found['comparisons'][0]['value']:.4g}" in metrics
    # Published are metrics: no number of persons, no frequency of a class, no mean of predictions.
    for private in (
        f"{found['persons']} persons",
        *(f"{one['constant']:.4g}" for one in found["comparisons"][1:]),
    ):
        assert private not in metrics
    # Without the private file neither report nor `predict` know.
    Path("run/plots/held_out.json").unlink()
    assert silodp("report", "run").status == 0
    assert "is not known" in banner(Path("run/report.html").read_text())
    assert predict(silodp) is None


def test_few_persons_are_too_few_to_tell(silodp: Silodp) -> None:
    """Two persons in the whole federation: a loss of .8 became 3.6 without a word."""
    found = train(silodp, persons=2 * FEWEST_PERSONS, slope=2.0)["skill"]
    assert found["persons"] < FEWEST_PERSONS
    assert found["code"] == "unclear"
    assert all(one["reach"] is None for one in found["comparisons"])


def test_a_run_without_held_out_records_says_that_nothing_is_known(silodp: Silodp) -> None:
    write_tables(Path(), 200, 1.0)
    text = CONFIG.format(rounds=1, noise=5.0, step=1.0, more="").replace("test_share = 0.3\n", "")
    Path("wards.toml").write_text(text)
    done = silodp("run", "wards.toml", "--out", "run", "--json")
    assert done.json["skill"] is None
    assert "is not known" in banner(Path("run/report.html").read_text())
