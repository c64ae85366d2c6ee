"""A model that diverged does not pass for a result."""

from __future__ import annotations

import math
from typing import Any

import pytest

from silodp.app.sanity import doubts


def rows(*losses: float | None, metric: float = 0.5) -> list[dict[str, Any]]:
    """As in metrics.jsonl, evaluated every second round."""
    made: list[dict[str, Any]] = []
    for number, loss in enumerate(losses):
        made.append({"round": 2 * number, "loss": loss, "metrics": {"accuracy": 0.5}})
        made.append({"round": 2 * number + 1})
    made[-2]["metrics"] = {"accuracy": metric}
    return made


@pytest.mark.parametrize("losses", [(0.7, 0.4), (0.7, 7.0), (0.7, 80.0, 0.5), (None, None), (0.7,), ()])
def test_what_is_well_or_was_never_measured_raises_no_doubt(losses: tuple[float | None, ...]) -> None:
    assert doubts(rows(*losses) if losses else []) == []


@pytest.mark.parametrize(
    ("losses", "metric", "says"),
    [
        ((0.7, 7.1), 0.5, "the loss is 7.1 after round 2, and was 0.7 untrained"),
        ((0.7, 0.5, math.nan), 0.5, "loss after round 4: not a finite number"),
        ((0.7, math.inf), 0.5, "loss after round 2: not a finite number"),
        ((math.nan, math.nan), 0.5, "loss after round 2: not a finite number"),
        ((0.7, 0.5), math.inf, "accuracy after round 2: not a finite number"),
        ((0.7, math.nan), math.nan, "loss and accuracy after round 2: not finite numbers"),
    ],
)
def test_what_diverged_is_said(losses: tuple[float, ...], metric: float, says: str) -> None:
    (doubt,) = doubts(rows(*losses, metric=metric))
    assert doubt.startswith(says)
    assert "lower server_learning_rate" in doubt


def test_a_metric_that_can_no_longer_be_computed_is_missed() -> None:
    made = rows(0.7, 0.6)
    made[2]["metrics"] = {}
    assert doubts(made)[0].startswith("accuracy after round 2: not a finite number")
