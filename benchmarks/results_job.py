"""What benchmarks/results.py runs and prints: `Job`, `Table`, and methods that several jobs share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One column of a table, or some rows of it: every method with every seed is one piece.

    Attributes:
        name: of the file of its lines.
        table: the table of RESULTS.md that shows it; "": none does.
        column: its column there.
        example: the configuration whose data, task and method are replaced.
        data: [data]; the data set is that of the example unless `source` names another.
        rounds: T.
        methods: label -> [method].
        seconds: estimated CPU seconds of a piece that has never been run, by label or for all.
        task: [task].
        seeds: number of seeds, from 0.
        delta: δ.
        budgets: [budgets].
        every: rounds from one evaluation to the next; no part of the settings.
    """

    name: str
    table: str
    column: str
    example: str
    data: Mapping[str, Any]
    rounds: int
    methods: Mapping[str, Fields]
    seconds: float | Mapping[str, float]
    task: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 5
    delta: float = 1e-5
    budgets: Mapping[str, Any] | None = None
    every: int = 1

    def estimate(self, label: str) -> float:
        """Return the estimated CPU seconds of a piece."""
        return self.seconds[label] if isinstance(self.seconds, Mapping) else self.seconds


@dataclass(frozen=True)
class Table:
    """How a table of RESULTS.md is printed.

    Attributes:
        after: cells begin with the first metric after this round; None: they do not.
        published: rows of others: label -> column (or "ε") -> text.
    """

    after: int | None = 5
    published: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def clipped(name: str, rate: float, clip: float = 0.1, sigma: float = 5.0, **more: Any) -> Fields:
    """Return a method of ULDP-FL as the paper sets it: clip and server learning rate."""
    fixed = {"noise_multiplier": sigma, "clip": clip, "server_learning_rate": float(rate)}
    return {"name": name, **fixed, **more}


def stepped(step: float, sigma: float, weighting: str = "records", **more: Any) -> Fields:
    """Return the method of our rows: one full-batch step a round, scaled to norm 1."""
    return {"name": "uldp-sgd", "noise_multiplier": sigma, "step": step, "weighting": weighting, **more}


def without_privacy(**local: Any) -> Fields:
    return {"name": "default", "server_learning_rate": 1.0, "local": local}
