"""Whether a run's numbers still mean something: a model that diverged should not pass for a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from silodp.app import plots

_DIVERGED = 10.0
"""A final loss this many times the untrained model's is no result."""


def doubts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with the last measurement of metrics.jsonl, one sentence each; empty if nothing is."""
    measured = [row for row in rows if "loss" in row]
    if len(measured) < 2:
        return []
    untrained, last = measured[0], measured[-1]
    when = f"after round {last['round']}"
    expected = plots.quantities([untrained])
    if last["loss"] is not None and "loss" not in expected:
        expected.insert(0, "loss")
    lost = [name for name in expected if plots.measured(last, name) is None]
    if lost:
        what = "a finite number" if len(lost) == 1 else "finite numbers"
        return [f"{' and '.join(lost)} {when}: not {what}. {_REMEDY}"]
    before, after = plots.measured(untrained, "loss"), plots.measured(last, "loss")
    if before is not None and after is not None and after > _DIVERGED * before > 0:
        return [f"the loss is {after:.4g} {when}, and was {before:.4g} untrained. {_REMEDY}"]
    return []


_REMEDY = "The training diverged: lower server_learning_rate or the local learning_rate."
