"""Which users or records may be computed side by side, and how the others are computed alone.

A sum that overflows in one order of its terms and not in another makes a row finite or not by what is computed beside
it, and then one unit moves the rows of others by a clip each. So one rule decides, in every method and on every path: a
unit with large inputs is computed alone, and so is one whose row comes out large or not finite. Whether its row counts
as zero is then a function of its own records and of the model.

The first bound is compared with the records themselves, so nobody else has a part in the decision. At the second, a row
that rounding puts on the other side is computed in the other way, and differs by rounding alone.

Where a unit is computed alone, no shape, code path or random number of it depends on who else is in the silo, and its
model and loss are copies that nobody's record has run through, so that nothing they keep reaches another unit. Rounding
then depends on the unit's own records and on the model alone, so that even a model chosen for it cannot turn one unit's
presence into a change of another's row (docs/privacy.md, section 7). Gradients are those of ordinary autograd, on one
thread, of newly allocated tensors without padding; nothing is measured, planned or traced.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from silodp.data.inputs import get_kind, list_arrays
from silodp.errors import SilodpError
from silodp.mechanisms.rows import FactoredRows, compute_norms
from silodp.training.gradients import (
    build_looped_record_gradient,
    build_plain_gradient,
    call_each_record,
    put_channels_last,
)
from silodp.training.model_state import seed_torch
from silodp.training.per_record import is_model_per_record, is_per_record
from silodp.training.sgd._schedule import LocalTraining
from silodp.training.task import Task, compute_outputs, compute_outputs_at_once, flatten_rows

MAX_INPUT, MAX_TARGET = 2.0**10, 2.0**20
"""Largest real number in the inputs and the targets of a record that is computed beside others. Products of inputs and
weights are rounded relative to their largest terms, so that inputs of 1,000 cost ten bits of a float32's 24."""
MAX_ENTRY = 2.0**40
"""Largest entry of a row that is taken from a shared computation: the square of its norm is far below 2^128."""

_LARGE_INPUTS = (
    "some records hold numbers beyond ±%g, or targets beyond ±%g: they are computed one after another, so that they "
    "cannot change what others contribute, and training is slower: scale inputs to about ±1"
)
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
        task.engine.get("large inputs", lambda: _log.warning(_LARGE_INPUTS, MAX_INPUT, MAX_TARGET))
    return found


def find_large_rows(rows: Tensor | FactoredRows) -> Tensor:
    """Return which rows (r, d) have an entry beyond `MAX_ENTRY` or one that is not finite, (r,) bool on the CPU.

    Of `FactoredRows`, those of a larger norm.
    """
    # No product is multiplied out: no entry is larger than the norm, which clipping needs, too.
    is_factored = isinstance(rows, FactoredRows)
    largest = compute_norms(rows) if is_factored else torch.linalg.vector_norm(rows, torch.inf, dim=1)
    # "Not at most" instead of "more than": a NaN compares as False, and must be found.
    return ~(largest <= MAX_ENTRY).cpu()


def compute_large_alone(
    together: Iterator[tuple[Tensor, Any]],
    large: Tensor,
    separately: Callable[[Tensor], Iterator[tuple[Tensor, Tensor]]],
) -> Iterator[tuple[Tensor, Any]]:
    """Yield the rows of units that are computed side by side, and then those of the others.

    Args:
        together: The chunks (units (r,) int64, rows (r, d)) of a shared computation, which has no unit of `large`; rows
            are a tensor or `FactoredRows`.
        large: The units that are computed alone in any case, such as those with large inputs; repeats are allowed.
        separately: Computes units (n,) one after another.
    """
    alone = [large]
    for units, rows in together:
        if bool((found := find_large_rows(rows)).any()):
            alone.append(units[found])
            units, rows = units[~found], rows[~found]
        yield units, rows
        del rows  # only the caller holds them now: no second chunk stays alive here
    if len(rest := torch.cat(alone)):
        yield from separately(rest)


def _exceeds(values: Tensor, most: float) -> Tensor:
    """Return which of n rows hold a real number beyond ±most; ids and class numbers have public bounds of their own."""
    if not values.is_floating_point() or values.numel() == 0:
        return torch.zeros(len(values), dtype=torch.bool)
    low, high = torch.aminmax(values.reshape(len(values), -1), dim=1)
    return ~((low >= -most) & (high <= most)).cpu()


def train_isolated(
    task: Task, start: Tensor, x: Any, y: Tensor, owner: Tensor, local: LocalTraining, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Train users one after another.

    Args:
        task: The model and the loss.
        start: The parameters (d,) where every user starts.
        x: The records (n, ...), on the task's device.
        y: The targets (n, ...), on the task's device.
        owner: The ids (n,) int64 of the users that the records belong to, on the CPU.
        local: SGD's hyperparameters.
        seed: The seed of batch orders and dropout; what a user draws follows from it and the user's id.

    Yields:
        (ids (1,) int64, deltas (1, d)) of every user, by id.
    """
    make_task = _choose_maker(task, x)
    ids, counts = owner.unique(return_counts=True)  # type: ignore[no-untyped-call]
    order = owner.argsort(stable=True)
    for user, records in zip(ids, order.split(counts.tolist()), strict=True):  # type: ignore[no-untyped-call]
        here = records.to(task.device)
        with isolate(task, seed, int(user)) as generator:
            delta = _train(make_task(), start, x[here], y[here], local, generator)
        yield user.reshape(1), delta.unsqueeze(0)


def _train(
    task: Task, start: Tensor, x: Any, y: Tensor, local: LocalTraining, generator: torch.Generator
) -> Tensor:
    """Return the delta (d,) of one user with records x (n, ...), y (n, ...)."""
    gradient = build_plain_gradient(task)
    params = put_channels_last(task, [part.clone() for part in task.unflatten(start)], x)
    velocity = [torch.zeros_like(part) for part in params] if local.momentum else ()
    count = len(y)
    size = count if local.batch_size is None else local.batch_size
    real = torch.ones(min(size, count), dtype=task.dtype, device=task.device)
    with torch.no_grad():
        for _ in range(local.epochs):
            if size >= count:
                local.step(params, velocity, gradient(params, x, y, real))
                continue
            shuffled = torch.randperm(count, generator=generator).to(task.device)
            for batch in shuffled.split(size):  # type: ignore[no-untyped-call]
                inputs = x[batch], y[batch], real[: len(batch)]
                local.step(params, velocity, gradient(params, *inputs))
    return torch.cat([part.reshape(-1) for part in params]).sub_(start)


def differentiate_isolated(
    task: Task, start: tuple[Tensor, ...], x: Any, y: Tensor, records: Tensor, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute the gradients of single records, one after another.

    Args:
        task: The model and the loss.
        start: The parameters, one tensor per name.
        x: The records (n, ...), on the task's device.
        y: The targets (n, ...), on the task's device.
        records: The record numbers (b,) int64, on the CPU.
        seed: The seed of dropout; what a record draws follows from it and the record's number.

    Yields:
        (record numbers (1,), gradients (1, d)) of every record.
    """
    make_task = _choose_maker(task, x)
    if not len(records):  # split gives one empty part
        return
    for record in records.split(1):  # type: ignore[no-untyped-call]
        here = record.to(task.device)
        with isolate(task, seed, int(record)):
            row = flatten_rows(build_looped_record_gradient(make_task())(start, x[here], y[here]))
        yield record, row


def _choose_maker(task: Task, x: Any) -> Callable[[], Task]:
    """Return what makes the task of a unit: a copy that no record has run through.

    One that is proven per record keeps nothing of a record, and needs no copy.
    """
    return (lambda: task) if is_per_record(task, task.list_example_inputs(x)) else task.copy_untouched


def predict_rows(task: Task, params: Tensor, x: Any, *, isolate_units: bool) -> Tensor:
    """Return the model's outputs (n, ...) at parameters (d,) for n ≥ 1 records x (n, ...).

    Args:
        task: The model.
        params: The parameters, on the task's device.
        x: The records, on the task's device.
        isolate_units: Whether every record is computed alone. Records with large numbers in record or outputs always
        are,
            see the module. Of a model that is not proven to compute each record by itself, each is a batch of its own.

    Raises:
        SilodpError: the model raised.
    """
    examples = task.list_example_inputs(x)
    is_proven = is_model_per_record(task, examples)
    if isolate_units or not (is_proven or _can_call_each(task, examples)):
        return predict_isolated(task, params, x)
    if is_proven:
        outputs = task.predict(params, x)
    else:
        # A copy for each batch: within it, vmap keeps what a model holds of records apart.
        outputs = compute_outputs(
            task.load(params), x, examples, lambda _, batch: call_each_record(task.load(params), batch)
        )
    large = find_large_records(task, x) | find_large_rows(outputs.reshape(len(outputs), -1))
    if bool(large.any()):
        places = large.nonzero().squeeze(1).to(task.device)
        outputs[places] = predict_isolated(task, params, x[places])
    return outputs


def predict_isolated(task: Task, params: Tensor, x: Any) -> Tensor:
    """Return the model's outputs (n, ...) at parameters (d,) for n ≥ 1 records x (n, ...), computed one after another.

    Raises:
        SilodpError: the model raised.
    """
    outputs = []
    # A constant seed: equal records have equal outputs, also from a model that draws in eval mode.
    records = torch.arange(len(x), device=task.device).split(1)  # type: ignore[no-untyped-call]
    if not is_model_per_record(task, task.list_example_inputs(x)):
        for record in records:
            with isolate(task, 0, 0):
                outputs.append(compute_outputs_at_once(task.load(params), x[record]))
        return torch.cat(outputs)
    with task.run_loaded(params) as model:
        for record in records:
            with isolate(task, 0, 0):
                outputs.append(compute_outputs_at_once(model, x[record]))
    return torch.cat(outputs)


def _can_call_each(task: Task, examples: Any) -> bool:
    """Return whether `call_each_record` can run the model, found out on made-up records, once per kind."""

    def try_once() -> bool:
        try:
            compute_outputs_at_once(task.load(task.flatten(task.model)), examples, call_each_record)
        except SilodpError:
            return False
        return True

    return task.engine.get(("each", get_kind(examples)), try_once)


@contextmanager
def isolate(task: Task, seed: int, unit: int) -> Iterator[torch.Generator]:
    """Compute on one thread, with random numbers that follow from a seed and the unit's number alone."""
    # Hashed, so that units with neighboring numbers have unrelated streams.
    digest = hashlib.sha256(f"{seed} {unit}".encode()).digest()
    # 62 bits, as `draw_seed` draws.
    drawn = int.from_bytes(digest[:8], "big") >> 2
    threads = torch.get_num_threads()
    with seed_torch(task.device, drawn):
        # With several threads, how a sum is split may depend on sizes, and thereby on what is computed beside it.
        if threads != 1:
            torch.set_num_threads(1)
        try:
            yield torch.Generator().manual_seed(drawn)
        finally:
            if threads != 1:
                torch.set_num_threads(threads)
