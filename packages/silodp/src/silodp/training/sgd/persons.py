"""One step of gradient descent of every person at the same parameters, without a row for each of them.

Where a model computes each record by itself and the loss is a mean over records, a person's gradient is the mean of
those of their records. It follows from what `LayeredGradient` keeps of layers: to a layer, the records of a person are
further places at which it was applied, so that their sum is one of outer products, too. Norms come from products of
factors, and a weighted sum over persons is one product of matrices for each layer.

Source: `layered`; the sum over the records of a person: "ghost clipping" of a sequence, Li et al. 2022, section 4, with
records in the place of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor

from silodp.data.inputs import get_kind
from silodp.mechanisms.rows import FactoredRows, add_rows, compute_norms
from silodp.training.gradients import build_expanded_record_gradient, build_user_gradient, select_gradient
from silodp.training.model_state import draw_seed, seed_torch
from silodp.training.sgd._packing import round_up
from silodp.training.sgd._planning import (
    StepCost,
    count_most_users,
    default_memory_budget,
    estimate_seconds,
    plan_rows,
)
from silodp.training.sgd._schedule import LocalTraining, UserBatches
from silodp.training.sgd._trainer import Trainer, measure_task_cost
from silodp.training.sgd.layered import LayeredGradient, count_rows_at_once
from silodp.training.task import Task

# Records of a measured step, of persons with a few records each.
_MEASURED, _EACH = 16, 4


class PersonGradients:
    """The gradients of persons at the same parameters, each the mean over their records.

    Args:
        task: The model and the loss.
        gradient: The gradients of its records.
        x: Records (n, ...) of the kind to come.
        y: Their targets (n, ...).
    """

    def __init__(self, task: Task, gradient: LayeredGradient, x: Any, y: Tensor) -> None:
        self._task, self._gradient, self._x, self._y = task, gradient, x, y
        cost = self._measure_cost(1)
        # What one more block takes: norms and sums of other lengths are computed apart.
        self._block = StepCost(0, 0, self._measure_cost(2).operations - cost.operations)
        self._at_once = plan_rows(cost, cost.peak // 2, None, task.device, gradient.working_sets)

    @classmethod
    def try_build(cls, task: Task, x: Any, y: Tensor) -> Self | None:
        """Return the gradients, or None where a person's is not known to be the mean of those of their records.

        Args:
            task: The model and the loss.
            x: The records (n, ...), on the task's device; which model takes this path follows from their kind alone.
            y: Their targets (n, ...).
        """

        def build() -> LayeredGradient | None:
            if not task.loss.separable:
                return None
            builder = select_gradient("user", task, x, y)
            # Padded are the batches of a model that is proven to keep records apart, or computes the same where each
            # record is a batch of its own.
            if builder is not build_user_gradient or task.find_padded(builder, x, y) is None:
                return None
            # Made of `builder`, which does not import torch's compiler.
            return LayeredGradient.try_build(task, x, y, build_expanded_record_gradient)

        gradient = task.engine.get(("persons", get_kind(x), get_kind(y)), build)
        return None if gradient is None else cls(task, gradient, x, y)

    def is_faster(self, start: Tensor, owner: Tensor, local: LocalTraining) -> bool:
        """Return whether a step takes less time than with parameters for each person, by costs on made-up records.

        Args:
            start: The parameters (d,).
            owner: The ids (n,) int64 of the persons that the records belong to, on the CPU.
            local: SGD's hyperparameters.
        """
        task, persons, records = self._task, len(owner.unique()), len(owner)  # type: ignore[no-untyped-call]
        trainer = Trainer(task, start, self._x, self._y, local)
        other = trainer.cost(-(-records // persons))
        most = count_most_users(other, default_memory_budget(task.device), task.device)
        rows = start.expand(2, -1)
        added = task.engine.get("rows", lambda: measure_task_cost(task, lambda: _read(rows)))
        seconds = estimate_seconds(other, -(-persons // most), persons)
        seconds += estimate_seconds(added, -(-persons // most), persons / 2)
        counts = UserBatches.of(owner, local).counts.tolist()
        return self._estimate(self._choose_lengths(counts)) < seconds

    def _choose_lengths(self, counts: list[int]) -> list[int]:
        """Return padded numbers of records: few lengths take few blocks, and many lengths little padding."""
        ways = (
            [round_up(count) for count in counts],
            [1 << (count - 1).bit_length() for count in counts],
            [counts[0]] * len(counts),
        )
        return min(ways, key=self._estimate)

    def _estimate(self, lengths: list[int]) -> float:
        """Return the seconds that a step of persons with so many records, falling, takes."""
        passes = list(self._cut(lengths))
        blocks = sum(len(self._list_groups(lengths[first:last])) for first, last in passes)
        seconds = estimate_seconds(self._measure_cost(1), len(passes), sum(lengths))
        return seconds + estimate_seconds(self._block, blocks - len(passes), 0)

    def descend(
        self, start: Tensor, owner: Tensor, local: LocalTraining, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, FactoredRows]]:
        """Take one step for every person.

        Args:
            start: The parameters (d,) where every person starts.
            owner: The ids (n,) int64 of the persons that the records belong to, on the CPU.
            local: SGD's hyperparameters, of a single step (`takes_one_step`).
            generator: The CPU generator of dropout.

        Yields:
            Chunks (ids (r,) int64 on the CPU, deltas (r, d), local minus start). Do not change them: two pieces may be
            one matrix.
        """
        users, params, device = UserBatches.of(owner, local), self._task.unflatten(start), self._task.device
        lengths = self._choose_lengths(users.counts.tolist())
        for first, last in self._cut(lengths):
            some, sizes = users.rows(slice(first, last)), torch.tensor(lengths[first:last])
            person = torch.arange(len(some)).repeat_interleave(sizes)
            place = torch.arange(len(person)) - (sizes.cumsum(0) - sizes)[person]
            count = some.counts[person]
            real = place < count
            # Padding repeats a record of the same person, whose weight is then 0.
            records = some.order[some.starts[person] + torch.where(real, place, 0)].to(device)
            weights = torch.where(real, -local.learning_rate / count, 0.0).to(device, self._task.dtype)
            with seed_torch(device, draw_seed(generator)):
                groups = self._list_groups(lengths[first:last])
                blocks = self._gradient.sum_groups(
                    params, self._x[records], self._y[records], weights, groups
                )
                block = next(blocks, None)  # no random number is drawn after the first one
            while block is not None:
                yield users.ids[first : first + len(block)], block
                first += len(block)
                block = next(blocks, None)

    def _cut(self, lengths: list[int]) -> Iterator[tuple[int, int]]:
        """Yield from which to which person a pass computes, of persons with padded numbers of records."""
        first = records = 0
        for place, length in enumerate(lengths):
            if place > first and records + length > self._at_once:
                yield first, place
                first, records = place, 0
            records += length
        yield first, len(lengths)

    def _list_groups(self, lengths: list[int]) -> list[tuple[int, int]]:
        """Return the persons of each block, and the records of each, of persons with padded numbers of records."""
        most = count_rows_at_once(self._task.device, 4 * self._task.size)
        found = list[tuple[int, int]]()
        for length, alike in groupby(lengths):
            count = sum(1 for _ in alike)
            found += [(min(most, count - done), length) for done in range(0, count, most)]
        return found

    def _measure_cost(self, blocks: int) -> StepCost:
        """Return the cost of a record, with norms and sums of so many blocks, measured on made-up ones."""
        task = self._task

        def measure() -> StepCost:
            params = task.unflatten(task.flatten(task.model))
            data = task.repeat_examples(self._x, self._y, _MEASURED)
            weights = torch.ones(_MEASURED, dtype=task.dtype, device=task.device)

            groups = [(_MEASURED // _EACH // blocks, _EACH)] * blocks

            def compute() -> None:
                for rows in self._gradient.sum_groups(params, *data, weights, groups):
                    _read(rows)

            cost = measure_task_cost(task, compute)
            return StepCost(cost.peak // _MEASURED, cost.produced // _MEASURED, cost.operations)

        return task.engine.get(("persons' cost", blocks, get_kind(self._x), get_kind(self._y)), measure)


def takes_one_step(local: LocalTraining, owner: Tensor) -> bool:
    """Return whether every person's update is one gradient at the start, times the learning rate.

    Args:
        local: SGD's hyperparameters.
        owner: The ids (n,) int64 of the persons that the records belong to, n ≥ 1.
    """
    if local.epochs > 1 or local.weight_decay:
        return False
    _, counts = owner.unique(return_counts=True)  # type: ignore[no-untyped-call]
    return local.batch_size is None or int(counts.max()) <= local.batch_size


def _read(rows: Tensor | FactoredRows) -> None:
    """Compute what becomes of rows: their norms and a weighted sum."""
    add_rows(rows, compute_norms(rows))
