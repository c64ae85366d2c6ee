"""Gradients of single records, for one batch or for many small ones of the same table: the inner loop of DP-SGD."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from silodp.training.sgd._cost import StepCost
from silodp.training.sgd._planning import WORTH_TRACING, overhead_until, rows_at_once
from silodp.training.sgd._tracing import Gradient, TracedGradient
from silodp.training.sgd._trainer import cost_of, seed_from, seeded, start_of
from silodp.training.task import Task

_LEAST = 16  # records in a traced batch: smaller ones cost as much


def record_gradients(
    task: Task,
    params: Tensor,
    x: Any,
    y: Any,
    memory_budget: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """The gradient of every record's own loss at `params` (d,), as DP-SGD clips them.

    Yields chunks (slice of records, gradients (r, d)). `generator` (CPU) draws dropout; None: a fresh seed.

    Raises:
        SilodpError: a single gradient does not fit the budget (bytes), or the model cannot run for many at
        once.
    """
    inputs, targets = task.tensors(x, y)
    start = task.unflatten(start_of(task, params))
    gradient = gradient_of_records(task)
    if len(inputs) == 0:
        return
    row_bytes = task.size * start[0].element_size()
    at_once = rows_at_once(cost_of_record(task, inputs, targets), row_bytes, memory_budget, task.device)
    for first in range(0, len(inputs), at_once):
        piece = slice(first, min(first + at_once, len(inputs)))
        with seeded(task, secrets.randbits(62) if generator is None else seed_from(generator)):
            rows = torch.cat([g.flatten(1) for g in gradient(*start, inputs[piece], targets[piece])], 1)
        yield piece, rows
        del rows


def gradient_of_records(task: Task) -> Gradient:
    """(parameters…, x (r, ...), y (r, ...)) -> gradients (r, shape of each) of the records' own losses."""
    one = torch.ones(1, dtype=task.dtype, device=task.device)
    count = len(task.names)

    def own_loss(p: tuple[Tensor, ...], record: Tensor, target: Tensor) -> Tensor:
        return task.objective(p, record.unsqueeze(0), target.unsqueeze(0), one)

    per_record = vmap(grad(own_loss), in_dims=(None, 0, 0), randomness="different")

    def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
        # Layers follow the memory layout of their weights, and torch pools eight times faster with channels last.
        weights = [p.clone(memory_format=torch.channels_last) if p.ndim == 4 else p for p in tensors[:count]]
        result: tuple[Tensor, ...] = per_record(tuple(weights), *tensors[count:])
        return result

    return gradient


def cost_of_record(task: Task, x: Tensor, y: Tensor) -> StepCost:
    """What the gradient of one of these records costs, measured on the first; there must be one.

    Raises:
        SilodpError: the model or loss cannot run for many at once.
    """
    start = task.unflatten(torch.zeros(task.size, dtype=task.dtype, device=task.device))
    gradient = gradient_of_records(task)

    def cost() -> StepCost:
        cost = cost_of(task, lambda: gradient(*start, _twice(x), _twice(y)))
        return StepCost(cost.peak // 2, cost.produced // 2, cost.operations)

    one_record: StepCost = task.engine.get(("record", x.shape[1:], y.shape[1:]), cost)
    return one_record


def _twice(values: Tensor) -> Tensor:
    return values[:1].expand(2, *values.shape[1:])


class RecordGradients:
    """What `record_gradients` computes, for batches of the same records x (n, ...), y (n, ...), again and again.

    For small models nearly all of the time goes into interpreting `vmap(grad(loss))`. So where `batches` are many, the
    computation is traced for small batches, once for each size, filled up to a power of two because a trace costs as
    much as a hundred batches. The values are those of `record_gradients` up to rounding, and with dropout up to which
    masks are drawn.
    """

    def __init__(self, task: Task, x: Tensor, y: Tensor, batches: int, generator: torch.Generator) -> None:
        """`batches`: how many are to come; `generator` (CPU) draws dropout."""
        self._task, self._generator = task, generator
        self._x, self._y = task.tensors(x, y)
        self._most = 0
        if batches >= WORTH_TRACING and len(self._x):
            self._most = overhead_until(cost_of_record(task, self._x, self._y))

    def of(self, params: Tensor, batch: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks (record numbers (r,) int64, gradients (r, d)) that make up the batch (b,) of record numbers."""
        padded = max(_LEAST, 1 << (len(batch) - 1).bit_length())
        traced = self._traced(padded) if len(batch) > 0 and padded <= self._most else None
        if traced is None:
            x, y = self._x[batch], self._y[batch]
            for rows, gradients in record_gradients(self._task, params, x, y, generator=self._generator):
                yield batch[rows], gradients
            return
        records = torch.cat([batch, batch[:1].expand(padded - len(batch))])
        start = self._task.unflatten(params.detach().to(self._task.device, self._task.dtype))
        with seeded(self._task, seed_from(self._generator)):
            parts = traced.step(start, traced.prepare((self._x[records], self._y[records])))
        yield batch, torch.cat([part[: len(batch)].flatten(1) for part in parts], 1)

    def _traced(self, count: int) -> TracedGradient | None:
        """The traced gradients of so many records, or None where tracing fails."""

        def trace() -> TracedGradient | None:
            start = self._task.unflatten(self._x.new_zeros(self._task.size, dtype=self._task.dtype))
            example = [part[:1].expand(count, *part.shape[1:]).clone() for part in (self._x, self._y)]
            return TracedGradient.if_possible(gradient_of_records(self._task), (*start, *example), len(start))

        key = ("records", self._x.shape[1:], self._x.dtype, self._y.shape[1:], self._y.dtype, count)
        traced: TracedGradient | None = self._task.engine.get(key, trace)
        return traced
