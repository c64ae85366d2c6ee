"""Gradients of single records for many small batches of one table: the inner loop of DP-SGD."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from silodp.training.local import cost_of_record, gradient_of_records, record_gradients, seeded
from silodp.training.planning import WORTH_TRACING, overhead_until
from silodp.training.task import Task
from silodp.training.tracing import TracedGradient

_LEAST = 16  # records in a traced batch: smaller ones cost as much


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
        with seeded(self._task, int(torch.randint(1 << 62, (), generator=self._generator))):
            parts = traced.step(start, traced.prepare((self._x[records], self._y[records])))
        yield batch, torch.cat([part[: len(batch)].flatten(1) for part in parts], 1)

    def _traced(self, count: int) -> TracedGradient | None:
        """The traced gradients of so many records, or None where tracing fails."""

        def trace() -> TracedGradient | None:
            start = self._task.unflatten(self._x.new_zeros(self._task.size, dtype=self._task.dtype))
            example = [part[:1].expand(count, *part.shape[1:]).clone() for part in (self._x, self._y)]
            try:
                return TracedGradient(gradient_of_records(self._task), (*start, *example), len(start))
            except Exception:
                return None

        key = ("records", self._x.shape[1:], self._x.dtype, self._y.shape[1:], self._y.dtype, count)
        traced: TracedGradient | None = self._task.engine.get(key, trace)
        return traced
