"""Rows of counts: what the records of one unit add to the cells of a public table, before it is clipped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from silodp._lazy import torch
from silodp.mechanisms.clipping import Bounds
from silodp.methods.roles import FederationSize

if TYPE_CHECKING:
    from torch import Tensor

_ROOM = 1 << 20
"""The fewest units that the largest sum is computed for: the ring of secure aggregation, and with it ε, then follows
from public constants before it is known how many units there are."""
_UNITS_AT_ONCE, _COUNTS_AT_ONCE = 1 << 12, 1 << 24  # rows, and numbers in them, that are in memory together


def iterate_count_rows(
    unit: Tensor, cells: Tensor, size: int, values: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of all units, a few thousand at a time; none where there are no records.

    Args:
        unit: The unit of each record, (n,) int64, numbered from 0 without gaps.
        cells: The cells that a record adds to, (n,) or (n, e) int64.
        size: The number of cells k.
        values: What a record adds to these cells, float64 like `cells`; None: 1.

    Yields:
        Units (r,) int64, and their rows (r, k) float64: the sums over their records.
    """
    if len(unit) == 0:
        return
    # A cell beyond the table would be one of another unit's row, which then moves by records that are not its own.
    cells = cells.reshape(len(unit), -1).clamp(0, size - 1)
    values = torch.ones(1, 1).double().expand_as(cells) if values is None else values.reshape(cells.shape)
    # Sorted by unit, so that a chunk of units is a slice, and rows are made for few units at a time.
    order = torch.argsort(unit, stable=True)
    unit, cells, values = unit[order], cells[order], values[order]
    at_once = max(1, min(_UNITS_AT_ONCE, _COUNTS_AT_ONCE // size))
    for first in range(0, int(unit[-1]) + 1, at_once):
        here = (unit >= first) & (unit < first + at_once)
        units = torch.arange(first, min(first + at_once, int(unit[-1]) + 1))
        place = (unit[here] - first)[:, None] * size + cells[here]
        # One after another in the order of a unit's records: its row has the same bits whoever else is there.
        flat = np.bincount(
            place.flatten().numpy(), values[here].double().flatten().numpy(), len(units) * size
        )
        rows = torch.from_numpy(flat).reshape(len(units), size)
        yield units, rows


def give_room(bounds: Bounds, population: FederationSize) -> Bounds:
    """Return bounds whose largest sum has room for a million units, if there are fewer."""
    return replace(bounds, total=max(population.users, _ROOM) * bounds.clip)
