"""Gradients of single records, for one batch or for many small ones of a table: the inner loop of DP-SGD."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from silodp.data.inputs import get_kind
from silodp.mechanisms.rows import FactoredRows, add_rows, compute_norms
from silodp.training.gradients import is_looped, select_gradient
from silodp.training.model_state import draw_seed, seed_torch
from silodp.training.sgd._packing import should_trace
from silodp.training.sgd._planning import (
    ClippedCost,
    StepCost,
    default_memory_budget,
    find_break_even,
    plan_rows,
)
from silodp.training.sgd._tracing import TracedGradient
from silodp.training.sgd._trainer import measure_task_cost
from silodp.training.sgd.isolation import compute_large_alone, differentiate_isolated, find_large_records
from silodp.training.sgd.layered import LayeredGradient, TracedLayers
from silodp.training.sgd.sequential import SequentialGradient
from silodp.training.task import Task, flatten_rows

# The fewest records of a traced batch: smaller ones take as long.
_MIN_BATCH = 16


def record_gradients(
    task: Task,
    params: Tensor,
    x: Any,
    y: Any,
    memory_budget: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """Compute the gradient of every single record's loss, as DP-SGD clips them.

    Args:
        task: The model and the loss.
        params: The parameters (d,) where the gradients are taken.
        x: The records (n, ...).
        y: The targets (n, ...).
        memory_budget: The bytes of tensors beyond the records; None takes 1 GiB, or a quarter of a GPU.
        generator: The CPU generator of dropout; None draws a fresh seed.

    Yields:
        Chunks (slice of records, gradients (r, d)).

    Raises:
        SilodpError: a single gradient does not fit the budget, or the model or loss cannot be trained.

    Source: Abadi et al. 2016, "Deep Learning with Differential Privacy", Algorithm 1, "Compute gradient".
    """
    inputs, targets = task.tensors(x, y)
    start = task.unflatten(task.validate_params(params))
    if len(inputs) == 0:
        return
    gradient = select_gradient("record", task, inputs, targets)(task)
    row_bytes = task.size * start[0].element_size()
    at_once = plan_rows(_measure_record_cost(task, inputs, targets), row_bytes, memory_budget, task.device)
    for first in range(0, len(inputs), at_once):
        piece = slice(first, min(first + at_once, len(inputs)))
        with seed_torch(task.device, secrets.randbits(62) if generator is None else draw_seed(generator)):
            rows = flatten_rows(gradient(start, inputs[piece], targets[piece]))
        yield piece, rows
        del rows


def _measure_record_cost(task: Task, x: Any, y: Tensor) -> StepCost:
    """Return the cost of one record's gradient, measured on made-up records.

    Raises:
        SilodpError: the model or loss cannot be trained.
    """
    gradient = select_gradient("record", task, x, y)(task)
    return task.engine.get(
        ("record", get_kind(x), get_kind(y)), lambda: _measure_copies(2, task, x, y, gradient)
    )


def _measure_copies(
    count: int, task: Task, x: Any, y: Tensor, gradient: Callable[[tuple[Tensor, ...], Any, Tensor], Any]
) -> StepCost:
    """Return the cost of one record's gradient, measured on `count` made-up records."""
    start = task.unflatten(torch.zeros(task.size, dtype=task.dtype, device=task.device))
    made_up = task.repeat_examples(x, y, count)
    cost = measure_task_cost(task, lambda: gradient(start, *made_up))
    return StepCost(cost.peak // count, cost.produced // count, cost.operations)


class RecordGradients:
    """The gradients of `record_gradients`, for many batches of the same records.

    For small models nearly all of the time goes into interpreting the model and its backward pass. So where `batches`
    are many, the computation is traced for small batches, once for each size, filled up to a power of two because a
    trace takes as long as a hundred batches. Either whole gradients are traced, or what those of `LayeredGradient`
    follow from; or nothing is, where a count of operations and of bytes says that this takes less time. The values are
    those of `record_gradients` up to rounding, and with dropout up to which masks are drawn.

    Args:
        task: The model and the loss.
        x: The records (n, ...).
        y: The targets (n, ...).
        batches: The number of batches that are to come.
        generator: The CPU generator of dropout.
        isolate_units: Whether every record is computed alone, so that its row depends, bit for bit, on nothing else.
        Records
            with large numbers in record or gradient always are, see `sgd.isolation`.

    Raises:
        SilodpError: the model or loss cannot be trained.
    """

    def __init__(
        self,
        task: Task,
        x: Any,
        y: Tensor,
        batches: int,
        generator: torch.Generator,
        *,
        isolate_units: bool = False,
    ) -> None:
        self._task, self._generator = task, generator
        self._x, self._y = task.tensors(x, y)
        self._kind = (get_kind(self._x), get_kind(self._y))
        self._alone = torch.ones(len(self._x), dtype=torch.bool)
        if not isolate_units:
            self._alone = find_large_records(task, self._x, self._y)
        self._can_trace = False
        self._by_layers: SequentialGradient | LayeredGradient | None = None
        if isolate_units or not len(self._x):
            return
        self._by_layers = task.engine.get(
            ("by layers", self._kind),
            lambda: (
                SequentialGradient.try_build(task, self._x, self._y)
                or LayeredGradient.try_build(task, self._x, self._y)
            ),
        )
        if should_trace(batches):
            self._build = select_gradient("record", task, self._x, self._y)
            if is_looped(self._build):
                return
            self._can_trace = True

    def of(self, params: Tensor, batch: Tensor) -> Iterator[tuple[Tensor, Tensor | FactoredRows]]:
        """Compute the gradients of one batch.

        Args:
            params: The parameters (d,) where the gradients are taken.
            batch: The record numbers (b,) int64.

        Yields:
            Chunks (record numbers (r,) int64, gradients (r, d)) that make up the batch. Do not change `FactoredRows`:
            two pieces may be one matrix.
        """
        large = self._alone[batch]

        def differentiate_alone(records: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
            start = self._task.unflatten(self._task.validate_params(params))
            seed = draw_seed(self._generator)
            return differentiate_isolated(self._task, start, self._x, self._y, records, seed)

        together = self._differentiate_together(params, batch[~large])
        return compute_large_alone(together, batch[large], differentiate_alone)

    def _differentiate_together(
        self, params: Tensor, batch: Tensor
    ) -> Iterator[tuple[Tensor, Tensor | FactoredRows]]:
        """Compute the gradients of one batch side by side; Args and Yields as `of`."""
        # A power of two: a silo's batches then have few shapes, each of which is traced once.
        padded = max(_MIN_BATCH, 1 << (len(batch) - 1).bit_length())
        traced = self._trace(padded) if len(batch) > 0 and self._can_trace else None
        if traced is None and self._by_layers is not None:
            yield from self._differentiate_chunks(self._by_layers, params, batch)
            return
        if traced is None:
            x, y = self._x[batch], self._y[batch]
            for rows, gradients in record_gradients(self._task, params, x, y, generator=self._generator):
                yield batch[rows], gradients
            return
        # Padding repeats a record of the batch, so that it cannot bring in a number that overflows.
        records = torch.cat([batch, batch[:1].expand(padded - len(batch))])
        start = self._task.unflatten(params.detach().to(self._task.device, self._task.dtype))
        with seed_torch(self._task.device, draw_seed(self._generator)):
            if isinstance(traced, TracedLayers):
                begin = 0
                for block in traced(start, self._x[records], self._y[records], len(batch)):
                    yield batch[begin : begin + len(block)], block
                    begin += len(block)
                return
            parts = traced.step(start, traced.prepare((self._x[records], self._y[records])))
        yield batch, flatten_rows([part[: len(batch)] for part in parts])

    def _differentiate_chunks(
        self, gradient: SequentialGradient | LayeredGradient, params: Tensor, batch: Tensor
    ) -> Iterator[tuple[Tensor, FactoredRows]]:
        start = self._task.unflatten(self._task.validate_params(params))
        at_once = self._plan_rows(gradient)
        for first in range(0, len(batch), at_once):
            records = batch[first : first + at_once]
            with seed_torch(self._task.device, draw_seed(self._generator)):
                blocks = gradient(start, self._x[records], self._y[records])
                block = next(blocks, None)  # no random number is drawn after the first one
            begin = 0
            while block is not None:
                yield records[begin : begin + len(block)], block
                begin += len(block)
                block = next(blocks, None)

    def _measure(self, name: str, compute: Callable[..., Iterator[Any]]) -> StepCost:
        """Return the cost of one record in a computation that yields blocks, found out once for each name."""

        def measure() -> StepCost:
            def run(*inputs: Any) -> None:
                deque(compute(*inputs), maxlen=1)  # the caller holds one block while the next is computed

            data = (self._task, self._x, self._y, run)
            # Of many records, each takes little of what a step takes once; but many large images would not fit.
            few = _measure_copies(2, *data)
            fits = _MIN_BATCH * few.peak <= default_memory_budget(self._task.device)
            return _measure_copies(_MIN_BATCH, *data) if fits else few

        return self._task.engine.get((name, self._kind), measure)

    def _measure_clipped(self, name: str, compute: Callable[..., Iterator[Any]]) -> ClippedCost:
        """Return the cost of one record's gradient, and of that together with its clipping."""
        # Is there already when rows are added up.
        total = torch.zeros(self._task.size, dtype=torch.float64, device=self._task.device)

        def clip(*inputs: Any) -> Iterator[None]:
            for rows in compute(*inputs):
                add_rows(rows, compute_norms(rows), total)
            yield None

        return ClippedCost(self._measure(name, compute), self._measure(f"{name}, clipped", clip))

    def _trace(self, count: int) -> TracedGradient | TracedLayers | None:
        """Return the traced gradients of so many records, or None where tracing fails or takes longer."""

        chosen = self._task.engine.get(("way", self._kind, count), lambda: self._choose_traced(count))
        if chosen is None:
            return None

        def trace() -> TracedGradient | TracedLayers | None:
            start = self._task.unflatten(torch.zeros_like(self._task.flatten(self._task.model)))
            example = self._task.repeat_examples(self._x, self._y, count)
            if isinstance(chosen, LayeredGradient):
                return chosen.trace(start, *example)
            return TracedGradient.try_trace(self._build(self._task), start, example)

        return self._task.engine.get(("records", self._kind, count), trace)

    def _choose_traced(self, count: int) -> LayeredGradient | Literal[False] | None:
        """Return the layers to trace for batches filled up to `count`, False for whole gradients, or None for nothing.

        The one is chosen that is expected to take the least time.
        """
        layers, whole = self._by_layers, self._build(self._task)
        if layers is None:
            limit = find_break_even(_measure_record_cost(self._task, self._x, self._y))
            return False if count <= limit else None

        def compute_rows(*inputs: Any) -> Iterator[Tensor]:
            yield flatten_rows(whole(*inputs))

        by_layers = self._measure_clipped("cost by layers", layers)
        by_rows = self._measure_clipped("rows", compute_rows)
        # Batches of more than half of `count` records are filled up to it: of three quarters on average.
        ways: list[tuple[float, LayeredGradient | Literal[False] | None]] = [
            (by_layers.estimate_seconds(3 * count // 4, traced=False), None),
            (by_rows.estimate_seconds(count, traced=True), False),
        ]
        if isinstance(layers, LayeredGradient) and count <= self._plan_rows(layers):
            ways.append((by_layers.estimate_seconds(count, traced=True), layers))
        return min(ways, key=lambda way: way[0])[1]

    def _plan_rows(self, gradient: SequentialGradient | LayeredGradient) -> int:
        """Return how many records to compute at once."""
        cost = self._measure("cost by layers", gradient)
        # The caller still holds the chunk before, which is about half of what a step takes.
        return plan_rows(cost, cost.peak // 2, None, self._task.device, gradient.working_sets)
