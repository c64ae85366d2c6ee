"""What a person sees while a run goes on, on standard error, and its promise in plain words at the end."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from silodp.accounting.accountant import MembershipAttack
    from silodp.accounting.guarantee import Adversary, Guarantee

WHO: dict[Adversary, str] = {
    "released": "whoever sees every global model",
    "server": "the server",
    "silo": "another silo",
}
_MOST_LINES = 25


class Interrupted(Exception):
    """Someone pressed Ctrl-C; the text says how to go on."""


class OnRound(Protocol):
    """Called with every row of metrics."""

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Show it."""


@contextmanager
def progress_bar(rounds: int) -> Iterator[OnRound]:
    """A progress bar where there is a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        every = max(1, math.ceil(rounds / _MOST_LINES))

        def plain(row: Mapping[str, Any]) -> None:
            if row["round"] % every == 0 or row["round"] == rounds:
                print(f"round {row['round']}/{rounds}  {describe(row)}".rstrip(), file=sys.stderr, flush=True)

        yield plain
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=rounds)
        seen: dict[str, Any] = {}

        def drawn(row: Mapping[str, Any]) -> None:
            seen.update(row)  # loss and metrics stay in sight between evaluations
            progress.update(bar, completed=row["round"], description=describe(seen))

        yield drawn


def log(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def describe(row: Mapping[str, Any]) -> str:
    """Loss, metrics and the ε spent towards whoever sees the models."""
    from silodp.accounting.guarantee import format_rounded_up  # late: the program is to start quickly

    values = {"loss": row.get("loss"), **row.get("metrics", {})}
    parts = [f"{name} {value:.4g}" for name, value in values.items() if value is not None]
    epsilon = row.get("epsilon", {}).get("released")
    parts.append("no privacy" if epsilon is None else f"ε {format_rounded_up(epsilon)}")
    return "  ".join(parts)


def describe_guarantee(guarantee: Guarantee, attack: MembershipAttack | None = None) -> str:
    """One guarantee as a sentence; `attack`: by the charged events, else what ε and δ alone allow is said."""
    from silodp.accounting.guarantee import describe_any_dropouts, format_rounded_up
    from silodp.report.formatting import (  # with it comes what draws pictures
        compute_attack_accuracy,
        format_accuracy,
    )

    who = WHO[guarantee.adversary]
    if guarantee.epsilon is None:
        return f"Against {who}: nothing is promised, because {guarantee.reason}."
    unit, they = ("all records of a person", "they are")
    if guarantee.unit == "record":
        unit, they = ("one record", "it is")
    accuracy = (
        compute_attack_accuracy(guarantee.epsilon, guarantee.delta) if attack is None else attack.accuracy
    )
    cap = "" if guarantee.any_dropouts is None else f" ({describe_any_dropouts(guarantee.any_dropouts)})"
    return (
        f"Against {who}: ε = {format_rounded_up(guarantee.epsilon)} at δ = {guarantee.delta:g}{cap} for {unit}; "
        f"an attacker who gives it even odds that {they} in the data guesses right at most "
        f"{format_accuracy(accuracy)} of the time."
    )
