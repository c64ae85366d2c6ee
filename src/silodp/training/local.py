"""Local work of a silo, for all its users or records at once.

All functions take numpy arrays or tensors, and start vectors `params` (d,) on the task's device. They train
in train mode (dropout draws per user and step). Rows that are not finite are yielded as they are: clipping
deals with them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from silodp.errors import SilodpError
from silodp.training.cost import Cost, measure
from silodp.training.planning import WORTH_TRACING, bucket, plan, rows_at_once
from silodp.training.schedule import LocalTraining, UserRecords, batch_order, step_records
from silodp.training.task import Task
from silodp.training.tracing import Gradient, TracedGradient, gradient_of, gradient_of_one

__all__ = ["LocalTraining", "record_gradients", "silo_update", "user_updates"]

# The cost of wider batches is extrapolated; measuring is a step of two users.
_MEASURED_WIDTH = 512
_BLOCK_BYTES = 8 << 20  # records of coming steps gathered at once, at most: more is no faster
_BLOCK_STEPS = 256


def user_updates(
    task: Task,
    params: Tensor,
    x: Any,
    y: Any,
    user: Any,
    local: LocalTraining,
    generator: torch.Generator,
    memory_budget: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every user trains alone on their own records: the inner loop of ULDP-AVG (ULDP-FL, Alg. 3), for all at
    once.

    Args:
        task: model and loss.
        params: (d,) where everyone starts.
        x: (n, ...) records. y: (n, ...) targets. user: (n,) integer ids of whom they belong to.
        local: SGD's hyperparameters.
        generator: CPU generator of batch orders and dropout (never noise).
        memory_budget: bytes of tensors beyond the records themselves (torch's kernels keep some 10 MB more);
            None: 1 GiB, or a quarter of a GPU.

    Yields:
        Chunks (ids (r,) int64 on the CPU, deltas (r, d), local minus start). Every user with records appears
        exactly once; the result does not depend on the budget, except for rounding and for which dropout
        masks are drawn.

    Raises:
        SilodpError: a user does not fit the budget, or the model or loss cannot run for many users at once.
    """
    inputs, targets = task.tensors(x, y)
    # A copy, because torch warns of arrays that are read-only.
    owner = torch.as_tensor(user.copy() if isinstance(user, np.ndarray) else user).to("cpu", torch.int64)
    if not len(inputs) == len(targets) == len(owner):
        raise SilodpError(
            f"x, y and user have {len(inputs)}, {len(targets)} and {len(owner)} rows: they must agree"
        )
    start = _start(task, params)
    if len(owner) == 0:
        return
    users = UserRecords.of(owner, local)
    trainer = _Trainer(task, start, inputs, targets, local)
    row_bytes = task.size * start.element_size()
    chunks = plan(users, local, trainer.cost, row_bytes, memory_budget, task.device)
    steps: dict[tuple[int, int], int] = {}  # how often each shape of step will run
    for chunk in chunks.chunks:
        shape = trainer.shape(users.rows(chunk))
        steps[shape] = steps.get(shape, 0) + int(local.epochs * local.batches(users.counts[chunk]).max())
    seed = _seed(generator)
    for number, chunk in enumerate(chunks.chunks):
        rows = users.rows(chunk)
        worth = steps[trainer.shape(rows)] >= WORTH_TRACING
        with seeded(task, seed + number):
            deltas = trainer.train(rows, generator, worth, chunks.block_bytes)
        yield rows.ids, deltas
        del deltas  # the caller's alone now: no second chunk stays alive here


def silo_update(
    task: Task, params: Tensor, x: Any, y: Any, local: LocalTraining, generator: torch.Generator
) -> Tensor:
    """Plain SGD over all records of a silo, reshuffled every epoch: the delta (d,), local minus start.

    The silo is one user who owns every record. `generator` (CPU) draws batch orders and dropout.
    """
    inputs, targets = task.tensors(x, y)
    start = _start(task, params)
    if len(inputs) == 0:
        return torch.zeros_like(start)
    everyone = UserRecords.of(torch.zeros(len(inputs), dtype=torch.int64), local)
    trainer = _Trainer(task, start, inputs, targets, local, gradient_of_one)
    worth = int(local.epochs * local.batches(everyone.counts).max()) >= WORTH_TRACING
    with seeded(task, _seed(generator)):
        return trainer.train(everyone, generator, worth, _BLOCK_BYTES)[0]


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
    start = task.unflatten(_start(task, params))
    gradient = gradient_of_records(task)
    if len(inputs) == 0:
        return
    row_bytes = task.size * start[0].element_size()
    at_once = rows_at_once(cost_of_record(task, inputs, targets), row_bytes, memory_budget, task.device)
    for first in range(0, len(inputs), at_once):
        piece = slice(first, min(first + at_once, len(inputs)))
        with seeded(task, secrets.randbits(62) if generator is None else _seed(generator)):
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


def cost_of_record(task: Task, x: Tensor, y: Tensor) -> Cost:
    """What the gradient of one of these records costs, measured on the first; there must be one.

    Raises:
        SilodpError: the model or loss cannot run for many at once.
    """
    start = task.unflatten(torch.zeros(task.size, dtype=task.dtype, device=task.device))
    gradient = gradient_of_records(task)

    def cost() -> Cost:
        cost = _measured(task, lambda: gradient(*start, _twice(x), _twice(y)))
        return Cost(cost.peak // 2, cost.produced // 2, cost.operations)

    one_record: Cost = task.engine.get(("record", x.shape[1:], y.shape[1:]), cost)
    return one_record


class _Trainer:
    """SGD of many users at once on one silo's records, from one start."""

    def __init__(
        self,
        task: Task,
        start: Tensor,
        x: Tensor,
        y: Tensor,
        local: LocalTraining,
        differentiate: Callable[..., Gradient] = gradient_of,
    ) -> None:
        self.task, self.start, self.x, self.y, self.local = task, start, x, y, local
        self.gradient = differentiate(task.objective, len(task.names))
        self.alone = differentiate is gradient_of_one
        self.data = (differentiate, x.shape[1:], x.dtype, y.shape[1:], y.dtype)

    def cost(self, width: int) -> Cost:
        """What one user's step on `width` records costs, measured on copies of the silo's first record."""
        measured = min(
            1 << (width - 1).bit_length(), _MEASURED_WIDTH
        )  # a power of two, at least `width` if it can be
        key = ("step", self.data, measured, self.local.momentum > 0, self.local.weight_decay > 0)
        scale = max(1, width / measured) / 2

        def two_users() -> Any:
            rows = self._rows(2)
            velocity = [torch.zeros_like(p) for p in rows] if self.local.momentum else []
            x, y, mask = self._gather(torch.zeros(2, measured, dtype=torch.int64), torch.ones(2, measured))
            gradients = self._directions(rows, velocity, self.gradient(*rows, x, y, mask))
            return rows, gradients

        cost: Cost = self.task.engine.get(key, lambda: _measured(self.task, two_users))
        return Cost(int(cost.peak * scale), int(cost.produced * scale), cost.operations)

    def shape(self, users: UserRecords) -> tuple[int, int]:
        """(users, records) of a traced step, rounded up so that few shapes occur."""
        longest = int(users.counts.max())
        size = self.local.batch_size
        return bucket(len(users)), bucket(longest) if size is None or longest < size else size

    def train(self, users: UserRecords, generator: torch.Generator, trace: bool, block_bytes: int) -> Tensor:
        """Deltas (r, d) of these users."""
        local, people = self.local, len(users)
        order = batch_order(users.counts, local, generator)
        count, width = (
            self.shape(users) if trace else (people, min(order.shape[2], local.batch_size or order.shape[2]))
        )
        if count > people:  # repeat the last user; what becomes of the copies is dropped
            repeated = torch.arange(count).clamp(max=people - 1)
            users = UserRecords(
                users.ids[repeated], users.counts[repeated], users.starts[repeated], users.order
            )
            order = order[repeated]
        rows = self._rows(count)
        velocity = [torch.zeros_like(p) for p in rows] if local.momentum else []
        traced = self._traced(rows, width) if trace else None
        batches = local.batches(users.counts)
        with torch.no_grad():
            if int(batches.max()) == 1:  # the same batch in every epoch
                records, real, _ = step_records(users, order, local, range(1), width)
                batch = self._gather(records[0], real[0])
                prepared = traced.prepare(batch) if traced else batch
                for _ in range(local.epochs):
                    self._update(rows, velocity, self._step(traced, rows, prepared))
            else:
                total = int(batches.max()) * local.epochs
                per_block = self._steps_per_block(count * width, traced, block_bytes)
                for first in range(0, total, per_block):
                    self._run_block(
                        users,
                        order,
                        range(first, min(first + per_block, total)),
                        rows,
                        velocity,
                        traced,
                        width,
                    )
            deltas = torch.cat([p[:people].flatten(1) for p in rows], 1)
            return deltas.sub_(self.start)

    def _run_block(
        self,
        users: UserRecords,
        order: Tensor,
        steps: range,
        rows: tuple[Tensor, ...],
        velocity: list[Tensor],
        traced: TracedGradient | None,
        width: int,
    ) -> None:
        records, real, training = step_records(users, order, self.local, steps, width)
        data = self._gather(records, real)
        prepared = traced.prepare_many(data) if traced else list(zip(*data, strict=True))
        moving = None
        if not training.all():
            trains = training.to(self.task.device)
            by_dim = {
                d: trains.reshape(*trains.shape, *[1] * (d - 1)).unbind() for d in {p.dim() for p in rows}
            }
            moving = [by_dim[p.dim()] for p in rows]
        for k, inputs in enumerate(prepared):
            gradients = self._step(traced, rows, inputs)
            self._update(rows, velocity, gradients, None if moving is None else [m[k] for m in moving])

    def _step(
        self, traced: TracedGradient | None, rows: tuple[Tensor, ...], prepared: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        return traced.step(rows, prepared) if traced else self.gradient(*rows, *prepared)

    def _update(
        self,
        rows: tuple[Tensor, ...],
        velocity: list[Tensor],
        gradients: tuple[Tensor, ...],
        moving: list[Tensor] | None = None,
    ) -> None:
        """One step of SGD in place; `moving` (booleans over the users' rows) says who still trains."""
        directions = self._directions(rows, velocity, gradients)
        for i, (p, direction) in enumerate(zip(rows, directions, strict=True)):
            if moving is None:
                p.add_(direction, alpha=-self.local.learning_rate)
            else:  # chosen, not multiplied by 0: a gradient that is not finite must not reach who is done
                p.copy_(torch.where(moving[i], p.add(direction, alpha=-self.local.learning_rate), p))

    def _directions(
        self, rows: tuple[Tensor, ...], velocity: list[Tensor], gradients: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """v ← momentum · v + (g + weight_decay · p), as torch.optim.SGD with dampening 0."""
        local = self.local
        if local.weight_decay:
            gradients = [g.add(p, alpha=local.weight_decay) for g, p in zip(gradients, rows, strict=True)]
        if not local.momentum:
            return gradients
        return [v.mul_(local.momentum).add_(g) for v, g in zip(velocity, gradients, strict=True)]

    def _rows(self, count: int) -> tuple[Tensor, ...]:
        return tuple(p.expand(count, *p.shape).clone() for p in self.task.unflatten(self.start))

    def _gather(self, records: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        records = records.to(self.task.device)
        return self.x[records], self.y[records], real.to(self.task.device, self.task.dtype)

    def _steps_per_block(self, records: int, traced: TracedGradient | None, block_bytes: int) -> int:
        """How many steps' records to gather at once."""
        record = self.x[:1].nbytes + self.y[:1].nbytes + 40  # indices and masks
        step = records * record + (traced.hoisted_bytes if traced else 0)
        return max(1, min(min(block_bytes, _BLOCK_BYTES) // max(1, step), _BLOCK_STEPS))

    def _traced(self, rows: tuple[Tensor, ...], width: int) -> TracedGradient | None:
        """The traced step of this shape, or None where tracing fails: then the same step runs interpreted."""

        def trace() -> TracedGradient | None:
            example = self._gather(*(torch.zeros(len(rows[0]), width, dtype=torch.int64),) * 2)
            try:
                return TracedGradient(self.gradient, (*rows, *example), len(rows), self.alone)
            except Exception:
                return None

        traced: TracedGradient | None = self.task.engine.get(("trace", self.data, len(rows[0]), width), trace)
        return traced


def _start(task: Task, params: Tensor) -> Tensor:
    if params.shape != (task.size,):
        raise SilodpError(f"the model has {task.size} parameters, the vector {tuple(params.shape)}")
    return params.detach().to(task.device, task.dtype)


def _measured(task: Task, computation: Callable[[], Any]) -> Cost:
    with seeded(task, 0):
        try:
            return measure(computation)
        except RuntimeError as problem:
            reason = str(problem).strip().split("\n")[0]
            raise SilodpError(
                f"{type(task.model).__name__} with loss '{task.loss.name}' cannot run for many users "
                f"at once: {reason}"
            ) from problem


def _twice(values: Tensor) -> Tensor:
    return values[:1].expand(2, *values.shape[1:])


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(1 << 62, (), generator=generator))


@contextmanager
def seeded(task: Task, seed: int) -> Iterator[None]:
    """Dropout takes no generator: seed torch's global one for a while, and put it back."""
    if task.device.type == "cuda":
        with torch.random.fork_rng(devices=[task.device]):
            torch.manual_seed(seed)
            yield
        return
    # torch.manual_seed also notes down, with a stack trace, to seed GPUs that may be used later: most of a small step.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
