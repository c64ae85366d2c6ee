"""SGD of many users at once, step by step, for one chunk of users after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from silodp.data.inputs import count_bytes, get_kind
from silodp.errors import SilodpError
from silodp.training.gradients import (
    Gradient,
    GradientBuilder,
    build_looped_gradient,
    build_single_user_gradient,
    build_traceable_gradient,
    is_looped,
    runs_faster_in_a_loop,
    select_user_gradient,
)
from silodp.training.sgd._planning import StepCost, measure_cost, round_up
from silodp.training.sgd._schedule import LocalTraining, UserBatches, draw_batch_order, select_step_records
from silodp.training.sgd._tracing import TracedGradient
from silodp.training.task import Task

# Records of a measured step; the cost of wider batches is extrapolated.
_MEASURED_WIDTH = 512
_BLOCK_STEPS = 256

BLOCK_BYTES = 8 << 20
"""Of records of coming steps that are gathered at once: more is no faster."""


class Trainer:
    """SGD of many users at once on one silo's records, from one start.

    Args:
        task: model and loss.
        start: (d,) where every user starts, on the task's device.
        x: (n, ...) records, a tensor or `NamedArrays`. y: (n, ...) targets, both on the task's device.
        local: SGD's hyperparameters.
        differentiate: builds the gradient of a single user, or of many; None: of many, at once where that is possible.

    """

    def __init__(
        self,
        task: Task,
        start: Tensor,
        x: Any,
        y: Tensor,
        local: LocalTraining,
        differentiate: GradientBuilder | None = None,
    ) -> None:
        self.task, self.start, self.x, self.y, self.local = task, start, x, y, local
        if differentiate is None:
            differentiate = select_user_gradient(task, x, y)
        self.gradient = differentiate(task)
        self.looped = build_looped_gradient(task)
        self.can_vectorize = not is_looped(differentiate)
        self.single_user = differentiate is build_single_user_gradient
        self.data = (differentiate, get_kind(x), get_kind(y))

    def cost(self, width: int) -> StepCost:
        """Return the cost of one user's step on `width` records, measured on copies of the silo's first record."""
        # A power of two, so that few widths are measured.
        measured = min(1 << (width - 1).bit_length(), _MEASURED_WIDTH)
        key = ("step", self.data, measured, self.local.momentum > 0, self.local.weight_decay > 0)
        # One after another, only one user's step is in memory.
        scale = max(1, width / measured) / (2 if self.can_vectorize else 1)

        def two_users() -> Any:
            rows = self._rows(2)
            velocity = [torch.zeros_like(p) for p in rows] if self.local.momentum else []
            x, y, mask = self._gather(torch.zeros(2, measured, dtype=torch.int64), torch.ones(2, measured))
            gradients = self._directions(rows, velocity, self.gradient(*rows, x, y, mask))
            return rows, gradients

        cost: StepCost = self.task.engine.get(key, lambda: measure_task_cost(self.task, two_users))
        return StepCost(int(cost.peak * scale), int(cost.produced * scale), cost.operations)

    def loops(self, users: UserBatches) -> bool:
        """Return whether these users train one after another, which cannot be traced."""
        if self.single_user or not self.can_vectorize:
            return not self.can_vectorize
        return runs_faster_in_a_loop(self.task, self.local.width(int(users.counts.max())))

    def shape(self, users: UserBatches) -> tuple[int, int]:
        """Return (users, records) of a traced step, rounded up so that few shapes occur."""
        longest = int(users.counts.max())
        size = self.local.batch_size
        return round_up(len(users)), round_up(longest) if size is None or longest < size else size

    def train(self, users: UserBatches, generator: torch.Generator, trace: bool, block_bytes: int) -> Tensor:
        """Train these users and return their deltas (r, d), local minus start.

        Args:
            users: r of them.
            generator: draws the order of batches.
            trace: whether to trace a step before running it.
            block_bytes: of records of coming steps that may be gathered at once.
        """
        local, people = self.local, len(users)
        order = draw_batch_order(users.counts, local, generator)
        count, width = self.shape(users) if trace else (people, local.width(order.shape[2]))
        if count > people:  # repeat the last user; the deltas of the copies are dropped
            repeated = torch.arange(count).clamp(max=people - 1)
            users = UserBatches(
                users.ids[repeated], users.counts[repeated], users.starts[repeated], users.order
            )
            order = order[repeated]
        rows = self._rows(count)
        velocity = [torch.zeros_like(p) for p in rows] if local.momentum else []
        traced = self._traced(rows, width) if trace else None
        gradient = self.looped if self.loops(users) else self.gradient
        batches = local.batches(users.counts)
        with torch.no_grad():
            if int(batches.max()) == 1:  # the same batch in every epoch
                records, real, _ = select_step_records(users, order, local, range(1), width)
                batch = self._gather(records[0], real[0])
                prepared = traced.prepare(batch) if traced else batch
                for _ in range(local.epochs):
                    self._update(rows, velocity, _step(traced or gradient, rows, prepared))
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
                        gradient,
                        width,
                    )
            deltas = torch.cat([p[:people].flatten(1) for p in rows], 1)
            return deltas.sub_(self.start)

    def _run_block(
        self,
        users: UserBatches,
        order: Tensor,
        steps: range,
        rows: tuple[Tensor, ...],
        velocity: list[Tensor],
        traced: TracedGradient | None,
        gradient: Gradient,
        width: int,
    ) -> None:
        records, real, training = select_step_records(users, order, self.local, steps, width)
        data = self._gather(records, real)
        one_by_one = (tuple(part[k] for part in data) for k in range(len(steps)))
        prepared = traced.prepare_many(data) if traced else list(one_by_one)
        moving = None
        if not training.all():
            trains = training.to(self.task.device)
            by_dim = {
                d: trains.reshape(*trains.shape, *[1] * (d - 1)).unbind() for d in {p.dim() for p in rows}
            }
            moving = [by_dim[p.dim()] for p in rows]
        for k, inputs in enumerate(prepared):
            gradients = _step(traced or gradient, rows, inputs)
            self._update(rows, velocity, gradients, None if moving is None else [m[k] for m in moving])

    def _update(
        self,
        rows: tuple[Tensor, ...],
        velocity: list[Tensor],
        gradients: tuple[Tensor, ...],
        moving: list[Tensor] | None = None,
    ) -> None:
        """One step of SGD in place; `moving` (booleans over the users' rows) says which users still train."""
        directions = self._directions(rows, velocity, gradients)
        for i, (p, direction) in enumerate(zip(rows, directions, strict=True)):
            if moving is None:
                p.add_(direction, alpha=-self.local.learning_rate)
            else:  # chosen, not multiplied by 0: a gradient that is not finite must not reach users who are done
                p.copy_(torch.where(moving[i], p.add(direction, alpha=-self.local.learning_rate), p))

    def _directions(
        self, rows: tuple[Tensor, ...], velocity: list[Tensor], gradients: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return v ← momentum · v + (g + weight_decay · p), as torch.optim.SGD with dampening 0 does."""
        local = self.local
        if local.weight_decay:
            gradients = [g.add(p, alpha=local.weight_decay) for g, p in zip(gradients, rows, strict=True)]
        if not local.momentum:
            return gradients
        return [v.mul_(local.momentum).add_(g) for v, g in zip(velocity, gradients, strict=True)]

    def _rows(self, count: int) -> tuple[Tensor, ...]:
        return tuple(p.expand(count, *p.shape).clone() for p in self.task.unflatten(self.start))

    def _gather(self, records: Tensor, real: Tensor) -> tuple[Any, Tensor, Tensor]:
        records = records.to(self.task.device)
        return self.x[records], self.y[records], real.to(self.task.device, self.task.dtype)

    def _steps_per_block(self, records: int, traced: TracedGradient | None, block_bytes: int) -> int:
        """Return how many steps' records to gather at once."""
        record = count_bytes(self.x[:1]) + self.y[:1].nbytes + 40  # indices and masks
        step = records * record + (traced.hoisted_bytes if traced else 0)
        most = block_bytes // max(1, traced.prelude_bytes) if traced else _BLOCK_STEPS
        return max(1, min(min(block_bytes, BLOCK_BYTES) // max(1, step), most, _BLOCK_STEPS))

    def _traced(self, rows: tuple[Tensor, ...], width: int) -> TracedGradient | None:
        """Return the traced step of this shape, or None where tracing fails: then the same step runs interpreted."""

        def trace() -> TracedGradient | None:
            example = self._gather(*(torch.zeros(len(rows[0]), width, dtype=torch.int64),) * 2)
            gradient = self.gradient if self.single_user else build_traceable_gradient(self.task)
            return TracedGradient.try_trace(gradient, (*rows, *example), len(rows), self.single_user)

        traced: TracedGradient | None = self.task.engine.get(("trace", self.data, len(rows[0]), width), trace)
        return traced


def _step(
    gradient: TracedGradient | Gradient, rows: tuple[Tensor, ...], prepared: Sequence[Any]
) -> tuple[Tensor, ...]:
    if isinstance(gradient, TracedGradient):
        return gradient.step(rows, prepared)
    return gradient(*rows, *prepared)


def validate_start(task: Task, params: Tensor) -> Tensor:
    """Return the start vector (d,) on the task's device; raise if it has another length."""
    if params.shape != (task.size,):
        raise SilodpError(
            f"the model has {task.size} parameters, the vector {tuple(params.shape)}",
            code="argument.shape",
            field="params",
        )
    return params.detach().to(task.device, task.dtype)


def measure_task_cost(task: Task, computation: Callable[[], Any]) -> StepCost:
    """Measure the cost of a computation, with random numbers of its own."""
    with seeded(task, 0):
        return measure_cost(computation)


def draw_seed(generator: torch.Generator) -> int:
    """Draw a seed for `seeded`."""
    return int(torch.randint(1 << 62, (), generator=generator))


@contextmanager
def seeded(task: Task, seed: int) -> Iterator[None]:
    """Seed torch's global generator for the time of the context, because dropout takes no generator."""
    if task.device.type == "cuda":
        with torch.random.fork_rng(devices=[task.device]):
            torch.manual_seed(seed)
            yield
        return
    # torch.manual_seed also records, with a stack trace, that GPUs used later are to be seeded, which takes longer than
    # a small step: seed the CPU's generator directly.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
