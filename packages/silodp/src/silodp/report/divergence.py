"""The rows of metrics.jsonl: which quantities were measured, and warnings where a run diverged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from silodp.report.formatting import as_number
from silodp.runtime.run_files import REFUSED_SUM
from silodp.text import join_names, pluralize

_DIVERGED = 10.0
"""A run has diverged where its last loss is so many times that of the untrained model."""
_NOT_FINITE = "its new parameters were not finite numbers and were refused"
_COST = "A refused round is charged like any other."
_REMEDY = "The training diverged: lower server_learning_rate or the local learning_rate."


def list_quantities(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the quantities with a finite value in any row, "loss" first."""
    names: dict[str, None] = {}
    for row in rows:
        values = {"loss": row.get("loss"), **(row.get("metrics") or {})}
        names |= dict.fromkeys(name for name, value in values.items() if as_number(value) is not None)
    return sorted(names, key=lambda name: name != "loss")


def get_measure(row: Mapping[str, Any], name: str) -> float | None:
    """Return the loss or a metric of one row; None where it is missing or not finite."""
    return as_number(row.get("loss") if name == "loss" else (row.get("metrics") or {}).get(name))


def find_divergence(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why the last row is no result of training, one sentence each.

    Args:
        rows: The rows of metrics.jsonl, the untrained model first.

    Returns:
        Sentences; empty where the training did not diverge.
    """
    charged, refused = _count_refused_sums(rows)
    if charged and refused == charged:
        return [f"no round changed the model: {_NOT_FINITE}. {_COST} {_REMEDY}"]
    measured = [row for row in rows if "loss" in row]
    if len(measured) < 2:
        return []
    untrained, last = measured[0], measured[-1]
    when = f"after round {last['round']}"
    expected = list_quantities([untrained])
    if last["loss"] is not None and "loss" not in expected:
        expected.insert(0, "loss")
    lost = [name for name in expected if get_measure(last, name) is None]
    if lost:
        what = "a finite number" if len(lost) == 1 else "finite numbers"
        return [f"{join_names(lost)} {when}: not {what}. {_REMEDY}"]
    # Ten times as large is what a step too long does. Whether a smaller loss is worth anything is said by `Skill`.
    before, after = get_measure(untrained, "loss"), get_measure(last, "loss")
    if before is not None and after is not None and after > _DIVERGED * before > 0:
        return [f"the loss is {after:.4g} {when}, and was {before:.4g} untrained. {_REMEDY}"]
    return []


def describe_refused(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what did not enter the model because it was not finite, one sentence each."""
    sentences = []
    charged, refused = _count_refused_sums(rows)
    # Where all rounds were refused, `find_divergence` says so.
    if 0 < refused < charged:
        sentences.append(
            f"{refused:,} of {pluralize(charged, 'round')} did not change the model: {_NOT_FINITE}. {_COST}"
        )
    by_silo: dict[str, int] = {}
    for row in rows:
        for name, count in (row.get("refused") or {}).items():
            if name != REFUSED_SUM:
                by_silo[name] = by_silo.get(name, 0) + int(count or 0)
    if by_silo:
        listed = ", ".join(f"{count:,} from {name}" for name, count in by_silo.items())
        sentences.append(
            f"updates that were not finite numbers counted as zero: {listed}; they are charged like all others."
        )
    return sentences


def _count_refused_sums(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the number of rounds, and in how many of them the sum was refused."""
    rounds = [row for row in rows if row["round"] > 0]
    return len(rounds), sum(bool((row.get("refused") or {}).get(REFUSED_SUM)) for row in rounds)
