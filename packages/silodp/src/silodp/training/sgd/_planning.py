"""The cost of a step in memory and time, and how a silo's users are cut into chunks that stay within a memory budget.

A step costs a fixed overhead (its operations) and work for each user and padded record.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from silodp.errors import SilodpError
from silodp.text import pluralize
from silodp.training.sgd._packing import StepTime, find_widest, should_trace
from silodp.training.sgd._schedule import LocalTraining, UserBatches

# Working set of a step, bytes. Measured on a 32 MB L3: the 5,012-parameter MLP is fastest at 500-1,000 users × 5
# records (33-66 MB), the 21,840-parameter CNN at 50-200 × 4 images (29-116 MB); a tenth or ten times as much costs 2-4×
# the time.
_WORKING_SET = {"cpu": 48 << 20, "cuda": 1 << 30}
# A factor for kernels' own scratch space, which `measure_cost` does not see.
_SCRATCH = 1.4
# Seconds per operation, traced and interpreted, and bytes produced per second; only their rough ratio matters.
_TRACED, _INTERPRETED, _THROUGHPUT = 2e-6, 1e-5, 4e9
_KEY_BYTES = 40  # per record and epoch while a chunk's batch order is drawn and sorted
_BLOCK_SHARE = 8  # the records of coming steps take up to 1/8 of the budget


@dataclass(frozen=True)
class StepCost:
    """The memory and time that a computation took.

    Attributes:
        peak: The largest number of bytes of tensors that were alive at once.
        produced: The number of bytes of all new tensors together.
        operations: The number of tensor operations.
    """

    peak: int
    produced: int
    operations: int


def measure_cost(computation: Callable[[], Any]) -> StepCost:
    """Run a computation and meter its new tensors; scratch space inside kernels is not seen."""
    meter = _Meter()
    with meter:
        computation()
    return StepCost(meter.peak, meter.produced, meter.operations)


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and the bytes of new storages; several tensors may be views of one storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = self.produced = self.operations = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_iter((args, kwargs)):
            if _has_storage(tensor):
                self._known.add(tensor.untyped_storage().data_ptr())  # inputs from outside are not counted
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in tree_iter(result):
            if _has_storage(tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address in self._known:
            return
        self._known.add(address)
        weakref.finalize(storage, self._release, address, size)
        self.alive += size
        self.produced += size
        self.peak = max(self.peak, self.alive)

    def _release(self, address: int, size: int) -> None:
        # The allocator may give the same address to another tensor.
        self._known.discard(address)
        self.alive -= size


def _has_storage(value: object) -> bool:
    """Return whether a value is a dense tensor; sparse ones are not counted."""
    return isinstance(value, Tensor) and value.layout == torch.strided


# torch wraps a mode's method so that its compiler leaves it alone, and imports the compiler for that when the method is
# first called, which takes seconds. Nothing here is compiled: the method itself stands for the wrapped one.
_measured = getattr(_Meter.__torch_dispatch__, "__wrapped__", None)
if _measured is not None:
    setattr(_measured, "__dynamo_disable", _measured)


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a silo's users.

    Attributes:
        chunks: Consecutive slices of the users.
        step_bytes: The bytes that the steps of each chunk may take.
        block_bytes: The bytes that the records of coming steps may take.
    """

    chunks: tuple[slice, ...]
    step_bytes: tuple[int, ...]
    block_bytes: int


def default_memory_budget(device: torch.device) -> int:
    """Return 1 GiB, or a quarter of a GPU, in bytes.

    It is constant for a machine, so that a resumed run cuts the same chunks and repeats its floats.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // 4
    return 1 << 30


def plan_chunks(
    users: UserBatches,
    local: LocalTraining,
    cost_of: Callable[[int], StepCost],
    parameter_bytes: int,
    memory_budget: int | None,
    device: torch.device,
) -> ChunkPlan:
    """Cut users into chunks whose parameters are in memory at once.

    Args:
        users: The users of a silo, sorted by work as `UserBatches.of` does.
        local: SGD's hyperparameters.
        cost_of: The cost of one user's step, as a function of its records.
        parameter_bytes: The bytes of one user's copy of the parameters.
        memory_budget: The bytes of a chunk beyond the silo's records, with the chunk before it still held by the
            caller; None takes the default one, which stretches to hold a single user.
        device: The device that the users train on.

    Returns:
        Chunks that cover all users. Up to half of the budget is left to the steps.

    Raises:
        SilodpError: a given budget cannot hold a single user.
    """
    budget = default_memory_budget(device) if memory_budget is None else memory_budget
    block = budget // _BLOCK_SHARE
    # A user's parameters and velocity, and the delta of a user in the chunk before.
    states = parameter_bytes * (2 + (local.momentum > 0))
    keys = users.counts * local.epochs * _KEY_BYTES
    shuffles = (local.batches(users.counts) > 1).tolist()
    chunks, step_bytes = list[slice](), list[int]()
    first = 0
    while first < len(users):
        longest = int(users.counts[first])
        step = count_step_bytes(cost_of(find_widest(local, longest)))
        # Whoever reads a chunk may hold several arrays as large, so it is not made as large as it could be.
        last = max(first + 1, min(len(users), first + _working_set(device) // parameter_bytes))
        # The bytes of so many users; where the first one of a chunk has several batches, all are sorted.
        held = (states + keys[first:last] * shuffles[first]).cumsum(0)
        taken = int(held[0])
        if budget - block < taken + step and memory_budget is not None:
            raise SilodpError(
                f"memory_budget {memory_budget} bytes cannot hold one user with {pluralize(longest, 'record')}, "
                f"which takes about {(taken + step) * _BLOCK_SHARE // (_BLOCK_SHARE - 1) + _BLOCK_SHARE}: "
                "raise it, or set a smaller batch_size",
                code="argument.value",
                field="memory_budget",
            )
        # At least one user, and as many more as half of the budget holds: the steps need the other half.
        fitting = max(1, int((held <= budget - block - max(step, budget // 2)).sum()))
        taken, end = int(held[fitting - 1]), first + fitting
        chunks.append(slice(first, end))
        step_bytes.append(max(step, budget - block - taken))
        first = end
    return ChunkPlan(tuple(chunks), tuple(step_bytes), max(1, block))


def count_step_bytes(cost: StepCost) -> int:
    """Return how many bytes a step takes for each of its users."""
    return int(_SCRATCH * cost.peak)


def count_most_users(cost: StepCost, step_bytes: int, device: torch.device) -> int:
    """Return how many users may train in one step, at least 1.

    Args:
        cost: The cost of one user's step.
        step_bytes: The bytes that the step may take.
        device: The device that the users train on.
    """
    return max(
        1, min(step_bytes // max(1, count_step_bytes(cost)), _working_set(device) // max(1, cost.peak))
    )


def estimate_seconds(cost: StepCost, steps: int, units: float) -> float:
    """Return the time of steps that are interpreted.

    Args:
        cost: The cost of a step, of one unit.
        steps: The number of steps.
        units: The number of units in all steps.
    """
    return steps * cost.operations * _INTERPRETED + units * cost.produced / _THROUGHPUT


def estimate_time(cost_of: Callable[[int], StepCost], steps: int) -> StepTime:
    """Estimate the time of a step from its cost, for users who take at most so many steps.

    Args:
        cost_of: The cost of one user's step, as a function of its records.
        steps: The largest number of steps of a user.
    """
    operations = cost_of(1).operations
    untraced = operations * _INTERPRETED
    overhead = operations * _TRACED if should_trace(steps) else untraced
    return StepTime(overhead, untraced, lambda width: cost_of(width).produced / _THROUGHPUT)


def plan_rows(
    cost: StepCost,
    row_bytes: int,
    memory_budget: int | None,
    device: torch.device,
    working_sets: int = 1,
) -> int:
    """Return how many records' gradients to compute at once.

    Args:
        cost: The cost of one record's gradient.
        row_bytes: The bytes of one gradient.
        memory_budget: The bytes of all of them; None takes the default one, which stretches to hold a single gradient.
        device: The device that they are computed on.
        working_sets: How many times the memory in which a step is fastest may be taken.

    Raises:
        SilodpError: a given budget cannot hold a single gradient.
    """
    budget = default_memory_budget(device) if memory_budget is None else memory_budget
    # The rows once more as one matrix, and the matrix before it that the caller still holds.
    per_row = int(_SCRATCH * cost.peak) + 2 * row_bytes
    if budget < per_row and memory_budget is not None:
        raise SilodpError(
            f"memory_budget {memory_budget} bytes cannot hold one record's gradient: it takes {per_row}",
            code="argument.value",
            field="memory_budget",
        )
    return int(max(1, min(budget // per_row, working_sets * _working_set(device) // max(1, cost.peak))))


def find_break_even(traced: StepCost) -> int:
    """Return up to how many records tracing saves more than a computation's work takes.

    Args:
        traced: The cost of one record.
    """
    return int(traced.operations * _INTERPRETED * _THROUGHPUT / max(1, traced.produced))


@dataclass(frozen=True)
class ClippedCost:
    """The cost of one record in a clipped sum of gradients.

    Attributes:
        gradient: That of the gradient alone, which may be traced.
        whole: That with the norms and the sum, which never are. Rows that are multiplied out cost more there.
    """

    gradient: StepCost
    whole: StepCost

    def estimate_seconds(self, records: int, *, traced: bool) -> float:
        """Estimate the time of so many records together."""
        clipping = self.whole.operations - self.gradient.operations
        overhead = self.gradient.operations * (_TRACED if traced else _INTERPRETED) + clipping * _INTERPRETED
        return overhead + records * self.whole.produced / _THROUGHPUT


def _working_set(device: torch.device) -> int:
    return _WORKING_SET.get(device.type, _WORKING_SET["cpu"])
