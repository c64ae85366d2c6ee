"""How the users of a silo are cut into chunks that train side by side: within memory, and where it is
fastest.

Per step, a chunk costs a fixed overhead (its operations) and work per user and padded record. Small models
are nearly all overhead, so users of very different sizes share a chunk; large ones are cut where the padding
would cost more than another chunk, and kept near the size of the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from silodp.errors import SilodpError, counted
from silodp.training.sgd._cost import StepCost
from silodp.training.sgd._schedule import LocalTraining, UserBatches

# Working set of a chunk, bytes. Measured on a 32 MB L3: the 5,012-parameter MLP is fastest at 500-1,000 users
# × 5 records (33-66 MB), the 21,840-parameter CNN at 50-200 × 4 images (29-116 MB); a tenth or ten times cost
# 2-4×.
_WORKING_SET = {"cpu": 48 << 20, "cuda": 1 << 30}
# Kernels' own scratch space, which `cost.measure` does not see.
_SCRATCH = 1.4
# Seconds per operation, traced and interpreted, and bytes produced per second: only their ratio matters,
# roughly.
_TRACED, _INTERPRETED, _THROUGHPUT = 3e-6, 1e-5, 4e9
# From this many steps on, tracing a step pays for itself.
WORTH_TRACING = 25
_KEY_BYTES = 40  # per record and epoch while a chunk's batch order is drawn and sorted
_BLOCK_SHARE = 8  # the records of coming steps take up to 1/8 of the budget


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a silo's users, as slices, and the bytes the records of coming steps may take in each."""

    chunks: tuple[slice, ...]
    block_bytes: int


def default_budget(device: torch.device) -> int:
    """Bytes: 1 GiB, or a quarter of a GPU. Constant for a machine, so that a resumed run repeats its
    floats."""
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
    """Cut users (sorted by work) into chunks.

    `cost_of(width)` is one user's cost of a step with `width` records. `memory_budget` bytes bound the
    memory of a chunk beyond the silo's own records, with the chunk before it still held by the caller.
    Raises `SilodpError` if a given budget cannot hold a single user; the default one stretches to hold one.
    """
    budget = default_budget(device) if memory_budget is None else memory_budget
    working_set = _WORKING_SET.get(device.type, _WORKING_SET["cpu"])
    steps, counts = local.epochs * local.batches(users.counts), users.counts

    def rows_within(first: int) -> int:
        """How many users fit a chunk that starts with this one, the largest in it."""
        longest = int(counts[first])
        step_bytes = cost_of(_width(longest, local)).peak
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
        width = _width(int(counts[first]), local)
        cost = cost_of(width)
        per_record = cost.produced / width / _THROUGHPUT
        overhead = cost.operations * (_TRACED if int(steps[first]) >= WORTH_TRACING else _INTERPRETED)
        at = first
        while at < first + length:
            left = first + length - at
            if at == start:  # a new chunk
                limit, waste = rows_within(at), 0.0
            else:
                padding = int(steps[start]) * _width(int(counts[start]), local) - int(steps[at]) * width
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


def rows_at_once(cost: StepCost, row_bytes: int, memory_budget: int | None, device: torch.device) -> int:
    """How many records' gradients (rows of `row_bytes`) to compute at once, one costing `cost`."""
    budget = default_budget(device) if memory_budget is None else memory_budget
    # The rows once more as one matrix, and the matrix before it that the caller still holds.
    per_row = int(_SCRATCH * cost.peak) + 2 * row_bytes
    if budget < per_row and memory_budget is not None:
        raise SilodpError(
            f"memory_budget {memory_budget} bytes cannot hold one record's gradient: it takes {per_row}",
            code="argument.value",
            field="memory_budget",
        )
    return int(max(1, min(budget // per_row, _WORKING_SET.get(device.type, 48 << 20) // max(1, cost.peak))))


def overhead_until(cost: StepCost) -> int:
    """Up to how many records, one costing `cost`, interpreting an operation takes longer than carrying it out."""
    return int(cost.operations * _INTERPRETED * _THROUGHPUT / max(1, cost.produced))


def bucket(size: int) -> int:
    """A size rounded up by at most an eighth, so that traced shapes recur from round to round."""
    grain = 1 << max(0, size.bit_length() - 4)
    return -(-size // grain) * grain


def _width(count: int, local: LocalTraining) -> int:
    return count if local.batch_size is None else min(count, local.batch_size)


def _runs(steps: torch.Tensor, counts: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(start, length) of neighbors with the same steps and counts."""
    work = torch.stack([steps, counts], 1)
    _, lengths = work.unique_consecutive(dim=0, return_counts=True)  # type: ignore[no-untyped-call]
    at = 0
    for length in lengths.tolist():
        yield at, length
        at += length
