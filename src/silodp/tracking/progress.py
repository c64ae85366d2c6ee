"""Progress of a run as lines of text."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from silodp.accounting.guarantee import format_epsilon
from silodp.text import format_duration

if TYPE_CHECKING:
    from silodp.runtime.train import RoundResult

_MAX_LINES = 25


def print_progress(result: RoundResult) -> None:
    """Print a line on standard error, at most 25 times in a run: round, loss, metrics, ε and the time left.

    Metrics on private records are private, and so are these lines; see `RoundResult`.

    Args:
        result: The result of the round; `silodp.train(..., on_round=silodp.tracking.print_progress)`.
    """
    every = max(1, math.ceil(result.rounds / _MAX_LINES))
    if result.round % every == 0 or result.round == result.rounds:
        line = f"round {result.round}/{result.rounds}  {describe_round(result)}"
        print(line, file=sys.stderr, flush=True)


def describe_round(result: RoundResult) -> str:
    """Return loss, metrics, the released ε and the time left as text."""
    values = {"loss": result.loss, **result.metrics}
    parts = [f"{name} {value:.4g}" for name, value in values.items() if value is not None]
    epsilon = result.epsilon.get("released")
    parts.append("no privacy" if epsilon is None else f"ε {format_epsilon(epsilon)}")
    if result.seconds_left:
        parts.append(f"about {format_duration(result.seconds_left)} left")
    return "  ".join(parts)
