"""Which units may be computed side by side: those whose numbers are far from where floating point ends.

A sum that overflows in one order of its terms and not in another makes a row finite or not by what is computed beside
it, and then one unit moves the rows of others by a clip each. So one rule decides, in every method and on every path:
a unit with large inputs is computed alone (`separate`), and so is one whose row comes out large or not finite. Whether
its row counts as zero is then a function of its own records and of the model.

The first bound is compared with the records themselves, so nobody else has a part in the decision. At the second, a row
that rounding puts on the other side is computed in the other way, and differs by rounding alone.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from silodp.data.inputs import list_arrays
from silodp.mechanisms.rows import FactoredRows
from silodp.training.task import Task

MAX_INPUT, MAX_TARGET = 2.0**10, 2.0**20
"""Largest real number in the inputs and the targets of a record that is computed beside others. Products of inputs and
weights are rounded relative to their largest terms, so that inputs of 1,000 cost ten bits of a float32's 24."""
MAX_ENTRY = 2.0**40
"""Largest entry of a row that is taken from a shared computation: the square of its norm is far below 2^128."""

_log = logging.getLogger(__name__)


def find_large_records(task: Task, x: Any, y: Tensor | None = None) -> Tensor:
    """Return which records hold a number beyond the bounds above or one that is not finite, (n,) bool on the CPU.

    Args:
        task: The model and the loss; a warning is logged once for the task if there is such a record.
        x: The records (n, ...), a tensor or `NamedArrays`.
        y: The targets (n, ...), if the computation uses them.
    """
    found = torch.zeros(len(x), dtype=torch.bool)
    for array in list_arrays(x).values():
        found |= _exceeds(array, MAX_INPUT)
    if y is not None:
        found |= _exceeds(y, MAX_TARGET)
    if bool(found.any()):
        task.engine.get("large inputs", _announce)
    return found


def find_large_rows(rows: Tensor | FactoredRows) -> Tensor:
    """Return which rows (r, d) have an entry beyond `MAX_ENTRY` or one that is not finite, (r,) bool on the CPU."""
    found = torch.zeros(len(rows), dtype=torch.bool)
    for piece in rows.pieces if isinstance(rows, FactoredRows) else (rows,):
        factors = piece if isinstance(piece, tuple) else (piece,)
        # The largest entry of an outer product is the product of the largest entries; no product is multiplied out.
        largest = [torch.linalg.vector_norm(factor, torch.inf, dim=1).cpu() for factor in factors]
        # "Not at most" instead of "more than": a NaN compares as False, and must be found.
        found |= ~(torch.stack(largest).prod(0) <= MAX_ENTRY)
    return found


def _exceeds(values: Tensor, most: float) -> Tensor:
    """Return which of n rows hold a real number beyond ±most; ids and class numbers have public bounds of their own."""
    if not values.is_floating_point() or values.numel() == 0:
        return torch.zeros(len(values), dtype=torch.bool)
    low, high = torch.aminmax(values.reshape(len(values), -1), dim=1)
    return ~((low >= -most) & (high <= most)).cpu()


def _announce() -> bool:
    _log.warning(
        "some records hold numbers beyond ±%g, or targets beyond ±%g: they are computed one after another, so that "
        "they cannot change what others contribute, and training is slower: scale inputs to about ±1",
        MAX_INPUT,
        MAX_TARGET,
    )
    return True
