"""The cost of a step, and how a silo's users are cut into chunks that train side by side.

Per step, a chunk costs a fixed overhead (its operations) and work per user and padded record. Small models are nearly
all overhead, so users of very different sizes share a chunk; large ones are cut where the padding would cost more than
another chunk, and kept near the size of the caches. All chunks stay within the memory budget.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from silodp.errors import SilodpError, counted
from silodp.training.sgd._schedule import LocalTraining, UserBatches

# Working set of a chunk, bytes. Measured on a 32 MB L3: the 5,012-parameter MLP is fastest at 500-1,000 users × 5
# records (33-66 MB), the 21,840-parameter CNN at 50-200 × 4 images (29-116 MB); a tenth or ten times as much costs 2-4×
# the time.
_WORKING_SET = {"cpu": 48 << 20, "cuda": 1 << 30}
# Kernels' own scratch space, which `measure_cost` does not see.
_SCRATCH = 1.4
# Seconds per operation, traced and interpreted, and bytes produced per second; only their rough ratio matters.
_TRACED, _INTERPRETED, _THROUGHPUT = 3e-6, 1e-5, 4e9
_KEY_BYTES = 40  # per record and epoch while a chunk's batch order is drawn and sorted
_BLOCK_SHARE = 8  # the records of coming steps take up to 1/8 of the budget

MIN_STEPS_TO_TRACE = 25
"""From this many steps on, tracing a step pays for itself."""


def should_trace(steps: int) -> bool:
    """Return whether a step that runs so many times is worth tracing."""
    return steps >= MIN_STEPS_TO_TRACE


@dataclass(frozen=True)
class StepCost:
    """The memory and time that a computation took.

    Attributes:
        peak: bytes of tensors alive at once, at most.
        produced: bytes of all new tensors together.
        operations: number of tensor operations.
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
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = self.produced = self.operations = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._known.add(tensor.untyped_storage().data_ptr())  # inputs from outside are not counted
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
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
        self._known.discard(address)
        self.alive -= size


# torch wraps a mode's method so that its compiler leaves it alone, and imports the compiler for that when the method is
# first called, which takes seconds. Nothing here is compiled: the method itself stands for the wrapped one.
_measured = getattr(_Meter.__torch_dispatch__, "__wrapped__", None)
if _measured is not None:
    setattr(_measured, "__dynamo_disable", _measured)


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a silo's users, as slices, and the bytes the records of coming steps may take in each."""

    chunks: tuple[slice, ...]
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
    """Cut users into chunks.

    Args:
        users: sorted by work, as `UserBatches.of` does.
        local: SGD's hyperparameters.
        cost_of: records of a step → cost of one user's step.
        parameter_bytes: of one user's copy of the parameters.
        memory_budget: bytes of a chunk beyond the silo's records, with the chunk before it still held by the caller;
            None takes the default one, which stretches to hold a single user.
        device: where the users train.

    Returns:
        Consecutive slices that cover all users.

    Raises:
        SilodpError: a given budget cannot hold a single user.
    """
    budget = default_memory_budget(device) if memory_budget is None else memory_budget
    working_set = _working_set(device)
    steps, counts = local.epochs * local.batches(users.counts), users.counts

    def rows_within(first: int) -> int:
        """Count the users that fit a chunk that starts with this one, the largest in it."""
        longest = int(counts[first])
        step_bytes = cost_of(local.width(longest)).peak
        per_user = int(_SCRATCH * step_bytes) + parameter_bytes
        if int(steps[first]) > local.epochs:
            per_user += _KEY_BYTES * longest * local.epochs
        affordable = (budget - budget // _BLOCK_SHARE) // per_user
        if affordable < 1 and memory_budget is not None:
            raise SilodpError(
                f"memory_budget {memory_budget} bytes cannot hold one user with {counted(longest, 'record')}, "
                f"which takes about {per_user * _BLOCK_SHARE // (_BLOCK_SHARE - 1) + _BLOCK_SHARE}: raise it, "
                "or set a smaller batch_size",
                code="argument.value",
                field="memory_budget",
            )
        return int(max(1, min(affordable, working_set // max(1, step_bytes))))

    chunks: list[slice] = []
    start, limit, waste = 0, 0, 0.0
    for first, length in _runs(steps, counts):
        width = local.width(int(counts[first]))
        cost = cost_of(width)
        per_record = cost.produced / width / _THROUGHPUT
        overhead = cost.operations * (_TRACED if should_trace(int(steps[first])) else _INTERPRETED)
        at = first
        while at < first + length:
            left = first + length - at
            if at == start:  # a new chunk
                limit, waste = rows_within(at), 0.0
            else:
                padding = int(steps[start]) * local.width(int(counts[start])) - int(steps[at]) * width
                waste += padding * per_record * min(left, start + limit - at)
                # Cut where the padding has cost as much as the steps of another chunk would.
                if waste > int(steps[at]) * overhead:
                    chunks.append(slice(start, at))
                    start = at
                    continue
            room = start + limit - at
            if left >= room:  # spread a long run evenly, no small chunk at its end
                take = min(room, -(-left // -(-left // limit))) if at == start else room
                chunks.append(slice(start, at + take))
                at = start = at + take
            else:
                at += left
    if start < len(users):
        chunks.append(slice(start, len(users)))
    return ChunkPlan(tuple(chunks), max(1, budget // _BLOCK_SHARE))


def plan_rows(cost: StepCost, row_bytes: int, memory_budget: int | None, device: torch.device) -> int:
    """Return how many records' gradients to compute at once.

    Args:
        cost: of one record's gradient.
        row_bytes: of one gradient.
        memory_budget: bytes; None takes the default one, which stretches to hold a single gradient.
        device: where they are computed.

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
    return int(max(1, min(budget // per_row, _working_set(device) // max(1, cost.peak))))


def find_break_even(cost: StepCost) -> int:
    """Return up to how many records, one costing `cost`, interpreting an operation takes longer than computing it."""
    return int(cost.operations * _INTERPRETED * _THROUGHPUT / max(1, cost.produced))


def round_up(size: int) -> int:
    """Return a size rounded up by at most an eighth, so that traced shapes recur from round to round."""
    grain = 1 << max(0, size.bit_length() - 4)
    return -(-size // grain) * grain


def _working_set(device: torch.device) -> int:
    return _WORKING_SET.get(device.type, _WORKING_SET["cpu"])


def _runs(steps: torch.Tensor, counts: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of neighbors with the same steps and counts."""
    work = torch.stack([steps, counts], 1)
    _, lengths = work.unique_consecutive(dim=0, return_counts=True)  # type: ignore[no-untyped-call]
    at = 0
    for length in lengths.tolist():
        yield at, length
        at += length
