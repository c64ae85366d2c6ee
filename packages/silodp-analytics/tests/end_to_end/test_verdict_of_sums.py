"""What noised sums say of a model: the same in the report, in the model card and at `silodp predict`."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import Silodp
from support.verdicts import banner, predict, train


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_noised_sums_tell_the_same_in_report_and_card(silodp: Silodp) -> None:
    more = '[evaluation]\nacross = "sums"\nnoise_multiplier = 3.0'
    summary = train(silodp, slope=1.5, rounds=20, step=10.0, more=more)
    found = summary["skill"]
    assert found["persons"] is None
    assert {one["metric"] for one in found["comparisons"]} == {"roc_auc", "accuracy", "brier_score"}
    assert found["calibration"][0]["verdict"] == "too_small"
    assert summary["verdict"][0] in Path("run/MODEL_CARD.md").read_text()
    assert "covered by ε" in banner(Path("run/report.html").read_text())
    assert predict(silodp) == found
