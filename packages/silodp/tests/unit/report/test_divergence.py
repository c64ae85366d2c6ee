"""A model that diverged does not pass for a result."""

from __future__ import annotations

import math
from typing import Any

import pytest

from silodp.report.divergence import describe_refused, find_divergence
from silodp.runtime.run_files import REFUSED_SUM


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
    assert find_divergence(rows(*losses) if losses else []) == []


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
    (warning,) = find_divergence(rows(*losses, metric=metric))
    assert warning.startswith(says)
    assert "lower server_learning_rate" in warning


def test_a_metric_that_can_no_longer_be_computed_is_missed() -> None:
    made = rows(0.7, 0.6)
    made[2]["metrics"] = {}
    assert find_divergence(made)[0].startswith("accuracy after round 2: not a finite number")


def charged(*refused: dict[str, int]) -> list[dict[str, Any]]:
    """The untrained model, then a round for each."""
    first = {"round": 0, "loss": 0.7, "metrics": {}}
    return [first] + [{"round": i, "loss": 0.7, "refused": one} for i, one in enumerate(refused, start=1)]


def test_a_run_whose_every_round_was_refused_is_no_result() -> None:
    every, some, none = ({REFUSED_SUM: 1},) * 3, ({REFUSED_SUM: 1}, {}, {}), ({}, {}, {})
    (warning,) = find_divergence(charged(*every))
    assert warning.startswith("no round changed the model")
    assert "lower server_learning_rate" in warning
    assert describe_refused(charged(*every)) == []  # once is enough
    assert (
        find_divergence(charged(*some)) == find_divergence(charged(*none)) == find_divergence(charged()) == []
    )
    (left,) = describe_refused(charged(*some))
    assert left.startswith("1 of 3 rounds did not change the model")
    assert describe_refused(charged(*none)) == []


def test_a_refused_round_counts_although_nothing_was_measured() -> None:
    rows = [{"round": 0}, {"round": 1, "refused": {REFUSED_SUM: 1}}]
    assert len(find_divergence(rows)) == 1


def test_updates_left_out_are_counted_by_silo() -> None:
    (left,) = describe_refused(charged({"north": 2}, {"north": 1, "south": 4}))
    assert "3 from north, 4 from south" in left
