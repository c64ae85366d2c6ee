"""SGD of many users at once, step by step, for one chunk of users after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from silodp.data.inputs import count_bytes, get_kind
from silodp.training import gradients
from silodp.training.model_state import seed_torch
from silodp.training.sgd import _planning
from silodp.training.sgd._packing import Segment, Shape, choose_shapes, plan_segments, should_trace
from silodp.training.sgd._schedule import LocalTraining, UserBatches, draw_batch_order, select_step_records
from silodp.training.sgd._tracing import TracedGradient
from silodp.training.task import Task

# Records of a measured step, at most; the cost of wider batches is extrapolated.
_MEASURED_WIDTH = 512
# Steps whose records are gathered at once, at most: more save no time, and small records would fill the block.
_BLOCK_STEPS = 256
# Up to so many users whose batches are not padded train one after another: vmap takes some five times the operations.
_FEW = 4
# Segments that are kept from planning, of all chunks together. The others are planned again when they run, so that
# memory does not grow with the users.
_KEPT_SEGMENTS = 1024

BLOCK_BYTES = 8 << 20
"""Bytes of the records of coming steps that are gathered at once: more is no faster."""

Plan = Callable[[], Iterator[Segment]]
"""Returns the segments of a chunk in the order in which they run, in every call the same."""


@dataclass(frozen=True)
class _Chunk:
    """The users whose parameters are in memory at once.

    Attributes:
        counts: The number of records of each user, (r,).
        first: Where each user's records begin in a row of `order`, (r,).
        order: The record indices in the order of training (epochs, n), user after user.
        states: The users' parameters, and with momentum their velocities: one tensor (r, ...) for each parameter, views
            of rows (r, d), which training changes in place.
    """

    counts: Tensor
    first: Tensor
    order: Tensor
    states: list[tuple[Tensor, ...]]


class Trainer:
    """SGD of many users at once on one silo's records, from one start.

    Args:
        task: The model and the loss.
        start: The parameters (d,) where every user starts, on the task's device.
        x: The records (n, ...), a tensor or `NamedArrays`, on the task's device.
        y: The targets (n, ...), on the task's device.
        local: SGD's hyperparameters.
        differentiate: Builds the gradient of a single user, or of many. None chooses one of many users, computed at
            once where that is possible.
    """

    def __init__(
        self,
        task: Task,
        start: Tensor,
        x: Any,
        y: Tensor,
        local: LocalTraining,
        differentiate: gradients.GradientBuilder | None = None,
    ) -> None:
        if differentiate is None:
            differentiate = gradients.select_gradient("user", task, x, y)
        padded = task.find_padded(differentiate, x, y)
        self.pads = padded is not None
        self.task, self.start, self.x, self.y, self.local = padded or task, start, x, y, local
        self.gradient = differentiate(self.task)
        self.plain = gradients.build_plain_gradient(self.task)
        self.can_vectorize = not gradients.is_looped(differentiate)
        self.single_user = differentiate is gradients.build_single_user_gradient
        self.min_to_loop = gradients.find_min_to_loop(task)
        self.data = (differentiate, get_kind(x), get_kind(y))

    def cost(self, width: int) -> _planning.StepCost:
        """Return the cost of one user's step on `width` records, measured on made-up ones."""
        # A power of two, so that few widths are measured.
        measured = min(1 << (width - 1).bit_length(), _MEASURED_WIDTH)
        key = ("step", self.data, measured, self.local.momentum > 0, self.local.weight_decay > 0)
        people = 1 if self.single_user else 2
        # One after another, only one user's step is in memory.
        scale = max(1, width / measured) / (people if self.can_vectorize else 1)

        def train_one_step() -> Any:
            rows = self.start.repeat(people, 1)
            velocity = torch.zeros_like(rows)
            batch = self._make_up(people, measured)
            params = self.task.unflatten(rows)
            self.local.step(params, self.task.unflatten(velocity), self.gradient(params, *batch))
            return rows, velocity

        cost = self.task.engine.get(key, lambda: measure_task_cost(self.task, train_one_step))
        return _planning.StepCost(int(cost.peak * scale), int(cost.produced * scale), cost.operations)

    def loops(self, width: int) -> bool:
        """Return whether users with steps of so many records train one after another."""
        if not self.can_vectorize:
            return True
        return self.min_to_loop is not None and (self.single_user or width >= self.min_to_loop)

    def _runs_in_turn(self, users: int, width: int) -> bool:
        """Return whether the users of a step train one after another."""
        return self.loops(width) or (not self.pads and users <= _FEW)

    def plan(self, chunks: Sequence[tuple[Tensor, int]]) -> tuple[list[Plan], dict[Shape, Shape]]:
        """Plan the steps of all users.

        Args:
            chunks: For each chunk, its users' numbers of records (r,), and the bytes that one of its steps may take.

        Returns:
            The plan of each chunk, and the shapes of traced steps, see `choose_shapes`.
        """
        most_steps = max(int((self.local.epochs * self.local.batches(counts)).max()) for counts, _ in chunks)
        time = _planning.estimate_time(self.cost, most_steps)

        def plan(counts: Tensor, step_bytes: int) -> Iterator[Segment]:
            def count_most(width: int) -> int:
                return _planning.count_most_users(self.cost(width), step_bytes, self.task.device)

            return plan_segments(counts, self.local, time, count_most, pads=self.pads)

        plans, room = list[Plan](), _KEPT_SEGMENTS
        steps, least = Counter[Shape](), dict[Shape, int]()
        for counts, step_bytes in chunks:
            segments = plan(counts, step_bytes)
            kept = list(islice(segments, room))
            for segment in chain(kept, segments):
                if not self._runs_in_turn(len(segment.users), segment.width):
                    steps[segment.shape] += segment.steps
                    least[segment.shape] = min(step_bytes, least.get(segment.shape, step_bytes))
            is_whole = len(kept) < room
            # A plan that does not fit is made again when it runs, with the same segments.
            plans.append(partial(iter, kept) if is_whole else partial(plan, counts, step_bytes))
            room -= len(kept) if is_whole else 0

        def fits(shape: Shape, larger: Shape) -> bool:
            return larger[0] * _planning.count_step_bytes(self.cost(larger[1])) <= least[shape]

        return plans, choose_shapes(steps, time, fits, pads=self.pads)

    def train(
        self,
        users: UserBatches,
        segments: Iterable[Segment],
        generator: torch.Generator,
        shapes: Mapping[Shape, Shape],
        block_bytes: int,
    ) -> Tensor:
        """Train these users and return their deltas (r, d), local minus start.

        Args:
            users: The r users of a chunk.
            segments: All steps of these users.
            generator: Draws the order of batches.
            shapes: The shapes of traced steps, see `choose_shapes`.
            block_bytes: How many bytes of records of coming steps may be gathered at once.
        """
        rows = self.start.repeat(len(users), 1)
        states = [rows, torch.zeros_like(rows)] if self.local.momentum else [rows]
        chunk = _Chunk(
            counts=users.counts,
            first=users.counts.cumsum(0) - users.counts,
            order=draw_batch_order(users, self.local, generator),
            states=[self.task.unflatten(state) for state in states],
        )
        with torch.no_grad():
            for segment in segments:
                self._run(segment, shapes.get(segment.shape), chunk, block_bytes)
            return rows.sub_(self.start)

    def _run(self, segment: Segment, shape: Shape | None, chunk: _Chunk, block_bytes: int) -> None:
        """Take the steps of a segment side by side, traced if `shape` is given, and write the users' states back."""
        counts = chunk.counts
        # The first so many rows of a step are users, the others copies of the last one.
        real = len(segment.users)
        traced = self._trace(*shape) if shape else None
        if shape and traced:
            # A trace has a fixed number of users: repeat the last one, and drop what the copies learn.
            places, width = torch.arange(shape[0]).clamp(max=real - 1), shape[1]
        else:
            places, width = torch.arange(real), self._find_longest(counts, segment)
            if self._runs_in_turn(real, width):
                self._run_in_turn(segment, chunk)
                return
        users, done = segment.users[places], segment.done[places]

        def select(begin: int, steps: int) -> tuple[Any, Tensor, Tensor]:
            return self._gather(
                *select_step_records(
                    counts[users], chunk.first[users], chunk.order, self.local, done + begin, steps, width
                )
            )

        at = users.to(self.task.device)
        # Each parameter apart: products of matrices that lie far apart in memory take up to a third longer.
        parts = [[state.index_select(0, at) for state in shaped] for shaped in chunk.states]
        params, speeds = parts[0], parts[1] if len(parts) > 1 else ()
        # Users with one batch train on the same one in every epoch, so it is gathered and prepared once.
        repeats = 1 if (self.local.batches(counts[users]) > 1).any() else segment.steps
        at_once = self._steps_per_block(len(users) * width, traced, block_bytes)
        for begin in range(0, segment.steps // repeats, at_once):
            block = select(begin, min(at_once, segment.steps // repeats - begin))
            if traced:
                prepared = traced.prepare_many(block)
            else:
                prepared = [tuple(part[k] for part in block) for k in range(len(block[1]))]
            for inputs in prepared * repeats:
                found = traced.step(params, inputs) if traced else self.gradient(params, *inputs)
                self.local.step(params, speeds, found)
        for state, part in zip(chain(*chunk.states), chain(*parts), strict=True):
            state.index_copy_(0, at[:real], part[:real])

    def _run_in_turn(self, segment: Segment, chunk: _Chunk) -> None:
        """Take the steps of a segment one user after another, on batches without padding."""
        # Most steps are on whole batches, which have one shape for all users.
        can_trace = self.can_vectorize and should_trace(segment.steps * len(segment.users))
        for user, done in zip(segment.users.tolist(), segment.done.tolist(), strict=True):
            views = [[state[user] for state in shaped] for shaped in chunk.states]
            parts = [gradients.put_channels_last(self.task, shaped, self.x) for shaped in views]
            params, speeds = parts[0], parts[1] if len(parts) > 1 else ()
            records = chunk.order[:, chunk.first[user] : chunk.first[user] + chunk.counts[user]]
            whole = self.local.batch_size or (records.shape[1] if self.single_user else 0)
            batches = [epoch.split(self.local.batch_size or len(epoch)) for epoch in records]
            for step in range(done, done + segment.steps):
                batch = batches[step // len(batches[0])][step % len(batches[0])]
                inputs = self._gather(batch, torch.ones(len(batch)))
                traced = self._trace_plain(whole) if can_trace and len(batch) == whole else None
                found = traced.step(params, traced.prepare(inputs)) if traced else self.plain(params, *inputs)
                self.local.step(params, speeds, found)
            for view, part in zip(chain(*views), chain(*parts), strict=True):
                if part is not view:
                    view.copy_(part)

    def _find_longest(self, counts: Tensor, segment: Segment) -> int:
        """Return the records of the longest batch of a segment."""
        own, size = counts[segment.users], self.local.batch_size
        if size is None:
            return int(own.max())
        left = own - segment.done % self.local.batches(own) * size  # in the epoch
        return int((left if segment.steps == 1 else own).clamp(max=size).max())

    def _gather(self, records: Tensor, real: Tensor) -> tuple[Any, Tensor, Tensor]:
        records = records.to(self.task.device)
        return self.x[records], self.y[records], real.to(self.task.device, self.task.dtype)

    def _make_up(self, *shape: int) -> tuple[Any, Tensor, Tensor]:
        """Return made-up records (*shape, ...) and a mask of ones: no private record chooses a path or a trace."""
        records = self.task.repeat_examples(self.x, self.y, *shape)
        return *records, torch.ones(shape, dtype=self.task.dtype, device=self.task.device)

    def _steps_per_block(self, records: int, traced: TracedGradient | None, block_bytes: int) -> int:
        """Return how many steps' records to gather at once."""
        record = count_bytes(self.x[:1]) + self.y[:1].nbytes + 40  # indices and masks
        step = records * record + (traced.prepared_bytes if traced else 0)
        most = block_bytes // max(1, traced.prepare_peak_bytes) if traced else _BLOCK_STEPS
        return max(1, min(min(block_bytes, BLOCK_BYTES) // max(1, step), most, _BLOCK_STEPS))

    def _trace(self, padded_users: int, width: int) -> TracedGradient | None:
        """Return the traced step of this shape, or None where tracing fails: then the same step runs interpreted."""

        def trace() -> TracedGradient | None:
            example = self._make_up(padded_users, width)
            gradient = self.gradient if self.single_user else gradients.build_traceable_gradient(self.task)
            params = [p.contiguous() for p in self.task.unflatten(self.start.repeat(padded_users, 1))]
            return TracedGradient.try_trace(gradient, params, example, self.single_user)

        return self.task.engine.get(("trace", self.data, padded_users, width), trace)

    def _trace_plain(self, width: int) -> TracedGradient | None:
        """Return the traced step of one user on so many records, or None where tracing fails."""

        def trace() -> TracedGradient | None:
            params = gradients.put_channels_last(self.task, self.task.unflatten(self.start), self.x)
            return TracedGradient.try_trace(self.plain, params, self._make_up(width), single_user=True)

        return self.task.engine.get(("plain", self.data, width), trace)


def measure_task_cost(task: Task, computation: Callable[[], Any]) -> _planning.StepCost:
    """Measure the cost of a computation; its random numbers do not move torch's generators."""
    with seed_torch(task.device, 0):
        return _planning.measure_cost(computation)
