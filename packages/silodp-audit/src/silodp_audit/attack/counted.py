"""Canaries of counts: each falls into a cell of its own, so that one sum of counts attacks all of them.

They are for methods whose sums are tables (`Method.count_classes`), and for the evaluation of a run. The cells of
the attack are made up; clip, weights, noise, aggregator and charges are those of the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import nn, torch
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.settings import MAX_CELLS
from silodp.training.losses import Loss
from silodp.training.task import Task
from silodp_audit.attack.canaries import Canaries, Directions, Placement

BINS = 1000
"""The most bins of an evaluation's scores: with two classes, 2,000 cells of canaries, as many others, and spares."""
LEAST_CANARIES, SPARE = 100, 300
"""The fewest canaries that are worth an attack; cells of persons without records, by which scores are calibrated."""


def replace_groups(evaluation: Any, silos: int) -> Any:
    """Return the evaluation with cells for canaries, and without subgroups; after the last round alone."""
    bins = _count_bins(evaluation, silos)
    return replace(evaluation, bins=bins, every=None, times=(), by=(), categories=(), ranges=())


def count_canaries(evaluation: Any, silos: int) -> int:
    """Return how many canaries there are cells for in an evaluation of so many silos; may be below 0."""
    return (2 * _count_bins(evaluation, silos) - SPARE) // 2


def _count_bins(evaluation: Any, silos: int) -> int:
    """Return the most bins, an even number, that all tables together have room for."""
    most = MAX_CELLS // (4 * count_blocks(evaluation, silos)) * 2
    return max(2, min(BINS, most))


def count_blocks(evaluation: Any, silos: int) -> int:
    """Return the number of tables, one for each silo or one in all."""
    return silos if evaluation.by_silo else 1


def choose_cells(canaries: int) -> Directions:
    """Return the cells of an evaluation for so many canaries."""
    return Directions(canaries, SPARE, 0)


def make_counted(directions: Directions, placement: Placement, names: Sequence[str]) -> Canaries:
    """Return a federation whose persons' records have the class that is the number of the person.

    Args:
        directions: What the persons stand for: their cells.
        placement: Where their records lie.
        names: The names of the silos.
    """
    owners = np.repeat(directions.members, placement.records)
    carrying = placement.count_silos(len(names))
    silos = tuple(
        _make_silo(name, owners if place < carrying else owners[:0], np.zeros(len(owners)))
        for place, name in enumerate(names)
    )
    federation = Federation(silos, directions.size, None, name="canaries", classes=directions.size)
    return Canaries(federation, _make_task(), directions, placement)


def make_held_out(
    directions: Directions,
    placement: Placement,
    names: Sequence[str],
    least_records: int,
    evaluation: Any,
) -> Canaries:
    """Return a federation whose persons have held-out records of a class and a score that no one else has.

    Args:
        directions: What the persons stand for: their cells.
        placement: Where their records lie.
        names: The names of the silos.
        least_records: The number of records that the training of a silo needs; they have no features and no gradient.
        evaluation: That of `replace_groups`.
    """
    owners = np.repeat(directions.members, placement.records)
    label, step = np.divmod(owners, evaluation.bins)
    probability = (step + 0.5) / evaluation.bins
    scores = np.log(probability / (1 - probability))
    carrying, spare = placement.count_silos(len(names)), np.full(least_records, directions.spares[0])
    silos = []
    for place, name in enumerate(names):
        mine = slice(None) if place < carrying else slice(0)
        held_out = SiloData(name, _as_features(scores[mine]), label[mine], owners[mine])
        silos.append(replace(_make_silo(name, spare, spare * 0.0, label=0), test=held_out))
    federation = Federation(tuple(silos), directions.size, silos[0].test, name="canaries", classes=2)
    blocks = count_blocks(evaluation, len(names))
    return Canaries(federation, _make_task(), directions, placement, blocks)


def count_records(clip: float, unit: str | None) -> int:
    """Return how many records a canary has in a silo: twice as many as count in full, so that clipping is attacked."""
    return 2 * math.ceil(clip) if unit == "user" else 1


def _make_silo(
    name: str, owners: NDArray[np.int64], features: NDArray[np.float64], label: int | None = None
) -> SiloData:
    labels = owners if label is None else np.full(len(owners), label)
    return SiloData(
        name, _as_features(features[: len(owners)]), labels.astype(np.int64), owners.astype(np.int64)
    )


def _as_features(values: NDArray[np.float64]) -> NDArray[np.float32]:
    return values.astype(np.float32)[:, None]


def _make_task() -> Task:
    """Return a task whose model returns its input, whatever it learns."""

    class ReadScore(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :1] + 0 * self.weight

    loss = Loss.per_record("canary", lambda outputs, targets: 0 * outputs.flatten())
    return Task(ReadScore(), loss)
