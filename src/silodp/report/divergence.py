"""Whether a run's numbers still mean something: a model that diverged should not pass for a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from silodp.errors import counted
from silodp.report import plots
from silodp.runtime.train import REFUSED_SUM

_DIVERGED = 10.0
"""A final loss this many times the untrained model's is no result."""


def divergence_warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why the rows of metrics.jsonl are no result, one sentence each; empty if they may be one."""
    charged, refused = _refused_sums(rows)
    if charged and refused == charged:
        return [f"no round changed the model: {_NOT_FINITE}. {_COST} {_REMEDY}"]
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


def left_out(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was left out of a result because it was not finite, one sentence each."""
    said = []
    charged, refused = _refused_sums(rows)
    if 0 < refused < charged:
        said.append(
            f"{refused:,} of {counted(charged, 'round')} did not change the model: {_NOT_FINITE}. {_COST}"
        )
    by_silo = refused_updates(rows)
    if by_silo:
        listed = ", ".join(f"{count:,} from {name}" for name, count in by_silo.items())
        said.append(
            f"updates that were not finite numbers counted as zero: {listed}; each is charged all the same."
        )
    return said


def refused_updates(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Updates left out because they were not finite, by silo, over the whole run."""
    total: dict[str, int] = {}
    for row in rows:
        for name, count in (row.get("refused") or {}).items():
            if name != REFUSED_SUM:
                total[name] = total.get(name, 0) + int(count or 0)
    return total


def _refused_sums(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """How many rounds there were, and in how many of them the sum was refused."""
    rounds = [row for row in rows if row["round"] > 0]
    return len(rounds), sum(bool((row.get("refused") or {}).get(REFUSED_SUM)) for row in rounds)


_NOT_FINITE = "its new parameters were not finite numbers and were refused"
_COST = "A round that is refused is charged all the same."
_REMEDY = "The training diverged: lower server_learning_rate or the local learning_rate."
