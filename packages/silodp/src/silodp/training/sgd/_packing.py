"""Which users train side by side in which step, so that few steps hold much work and little padding.

Users differ in their number of steps, and the last batch of an epoch is shorter than the others. A user's steps have an
order; those of different users have none. So users are taken anew again and again: the one with most steps left, and
others whose next batch is about as long; or exactly as long, where a model may notice padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from silodp.training.sgd._schedule import LocalTraining

MIN_STEPS_TO_TRACE = 8
"""From this many steps a round on, tracing a step pays for itself: a trace takes as long as 100 steps that it saves."""

# The work in the largest step, as a multiple of a step's overhead: then 1/16 of the time is overhead.
_FULL = 16
# Users who are planned together: at least so many, and as many as so many of the largest steps hold.
_MIN_GROUP, _STEPS_OF_GROUP = 1024, 64
# Each size of a step is this many times the next smaller one: padding is cheaper than tracing more shapes.
_RATIO = 4

Shape = tuple[int, int]
"""The number of users of a padded step, and the number of records of each."""


@dataclass(frozen=True)
class Segment:
    """Some users who train side by side for some steps.

    Attributes:
        users: The positions of the users in their chunk, (r,).
        done: The steps that each of them took before, (r,).
        steps: The number of steps that each of them takes.
        width: The number of records of a padded batch.
        padded_users: The number of users of a padded step, at least r.
    """

    users: Tensor
    done: Tensor
    steps: int
    width: int
    padded_users: int

    @property
    def shape(self) -> Shape:
        """The shape (padded_users, width) of its steps if they are traced."""
        return self.padded_users, self.width


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of a step.

    Attributes:
        overhead: The seconds that a step takes whatever it computes.
        untraced: The overhead of a step that is interpreted.
        work: The seconds for each user, as a function of the records of a batch.
    """

    overhead: float
    untraced: float
    work: Callable[[int], float]

    def of(self, shape: Shape) -> float:
        """Return the seconds of a traced step with these (padded_users, width)."""
        padded_users, width = shape
        return self.overhead + padded_users * self.work(width)


def choose_shapes(
    steps: Mapping[Shape, int], time: StepTime, fits: Callable[[Shape, Shape], bool], *, pads: bool = True
) -> dict[Shape, Shape]:
    """Choose the traced steps in which steps run; those that are not in the result are interpreted.

    A shape that is too rare to be traced runs as a larger one if its padding takes less time than interpreting.

    Args:
        steps: How often each shape runs.
        time: The estimated time of a step.
        fits: Says of a shape and a larger one whether the larger one fits in memory wherever the first one runs.
        pads: Whether batches may be padded; the number of users of a step always may.
    """
    chosen = {shape: shape for shape, number in steps.items() if should_trace(number)}
    for padded_users, width in steps.keys() - chosen.keys():
        larger = [
            shape
            for shape in set(chosen.values())
            if shape[0] >= padded_users
            and (shape[1] == width or (pads and shape[1] > width))
            and fits((padded_users, width), shape)
        ]
        best = min(larger, key=time.of, default=None)
        if best and time.of(best) < time.untraced + padded_users * time.work(width):
            chosen[padded_users, width] = best
    return chosen


def plan_segments(
    counts: Tensor, local: LocalTraining, time: StepTime, most: Callable[[int], int], *, pads: bool = True
) -> Iterator[Segment]:
    """Plan all steps of a chunk of users.

    Every segment is chosen among all users of a group that have steps left, so groups are bounded: planning takes time
    in proportion to the users, and only the plan of one group is in memory.

    Args:
        counts: The number of records of every user, (u,), at least 1, sorted as `UserBatches.of` does.
        local: SGD's hyperparameters.
        time: The estimated time of a step.
        most: How many users' steps fit in memory at once, at least 1, as a function of the records of a batch.
        pads: Whether batches may be padded. If not, users whose batches are equally long share a step: what a model
            computes for a user then follows from their own records also where it depends on the length of the batch.

    Yields:
        Segments in the order in which they run; every user takes their steps exactly once and in order.
    """
    records = counts.numpy()
    widths = (
        _list_widths(local, int(records.max()), len(records), time) if pads else _list_lengths(local, records)
    )
    first = 0
    while first < len(records):
        width = widths[_find_kinds(widths, local, records[first : first + 1])[0]]
        group = max(_MIN_GROUP, _STEPS_OF_GROUP * _find_most_users(time, width, most(width)))
        # The rest, if it would make a small group.
        end = first + group if first + group * 3 // 2 < len(records) else len(records)
        yield from _plan_group(first, counts[first:end], widths, local, time, most, pads)
        first = end


def _plan_group(
    first: int,
    counts: Tensor,
    widths: list[int],
    local: LocalTraining,
    time: StepTime,
    most: Callable[[int], int],
    pads: bool,
) -> Iterator[Segment]:
    """Plan all steps of users from position `first` of a chunk on."""
    import torch

    records, batches = counts.numpy(), local.batches(counts).numpy()
    total = local.epochs * batches
    size = widths[-1] if local.batch_size is None else local.batch_size
    full = _find_kinds(widths, local, records)
    last = np.searchsorted(widths, records - (batches - 1) * size)
    done = np.zeros_like(total)
    while True:
        waiting = np.flatnonzero(done < total)
        if not len(waiting):
            return
        order = waiting[np.argsort((done - total)[waiting], kind="stable")]  # most steps left first
        ends = done[order] % batches[order] == batches[order] - 1  # an epoch; always true with one batch
        kinds = np.where(ends, last[order], full[order])
        lowest, highest = _join_kinds(kinds, widths, time) if pads else (kinds[0], kinds[0])
        width = widths[highest]
        stays = (batches == 1) | ((lowest <= last) & (full <= highest))
        fitting = order[(lowest <= kinds) & (kinds <= highest)]
        padded_users = _choose_padded_users(len(fitting), len(records), time, width, most(width))
        # Users with shorter batches fill what would be padding.
        users = np.concatenate([fitting, order[kinds < lowest]] if pads else [fitting])[:padded_users]
        steps = _count_steps(batches[users], total[users], done[users], stays[users])
        yield Segment(
            torch.from_numpy(first + users), torch.from_numpy(done[users]), steps, width, padded_users
        )
        done[users] += steps


def _find_kinds(widths: list[int], local: LocalTraining, records: NDArray[Any]) -> NDArray[Any]:
    """Return the kinds of full batches of users with these numbers of records: places in `widths`."""
    return np.asarray(np.searchsorted(widths, np.minimum(records, local.batch_size or widths[-1])))


def _count_steps(
    batches: NDArray[Any], total: NDArray[Any], done: NDArray[Any], stays: NDArray[np.bool_]
) -> int:
    """Return how many steps users take together before one of them is done, or had better train with others."""
    alike = np.maximum(batches - 1 - done % batches, 1)  # the last batch of an epoch is shorter
    return int(np.where(stays, total - done, alike).min())


def _list_widths(local: LocalTraining, longest: int, people: int, time: StepTime) -> list[int]:
    """Return the lengths that batches are padded to, rising: few where a step is mostly overhead, else many."""
    width = find_widest(local, longest)
    widths = [width]
    # Where all padding together costs less than a step, one length is enough.
    while width > 1 and people * (time.work(width) - time.work(1)) > time.overhead:
        width = -(-width // _RATIO) if time.work(width) < time.overhead else width - max(1, width // 8)
        widths.append(width)
    return widths[::-1]


def _list_lengths(local: LocalTraining, records: NDArray[Any]) -> list[int]:
    """Return all lengths of batches of users with these numbers of records, rising."""
    size = local.batch_size or int(records.max())
    rest = records % size
    return [int(length) for length in np.unique(np.concatenate([np.minimum(records, size), rest[rest > 0]]))]


def find_widest(local: LocalTraining, longest: int) -> int:
    """Return the length that the longest batches of users with at most `longest` records are padded to."""
    size = local.batch_size
    return size if size is not None and size <= longest else round_up(longest)


def _join_kinds(kinds: NDArray[Any], widths: list[int], time: StepTime) -> tuple[int, int]:
    """Return the shortest and the longest kind of batch in the step of the first user, as places in `widths`.

    Kinds share a step where padding the shorter ones costs less time than another step.
    """
    present, users = np.unique(kinds, return_counts=True)
    lowest = highest = int(present[-1])
    for kind, number in zip(present[-2::-1].tolist(), users[-2::-1].tolist(), strict=True):
        if number * (time.work(widths[highest]) - time.work(widths[kind])) < time.overhead:
            lowest = kind
        elif lowest <= kinds[0]:
            break
        else:
            lowest = highest = kind
    return lowest, highest


def _choose_padded_users(waiting: int, people: int, time: StepTime, width: int, most: int) -> int:
    """Return the size of a step, of few possible ones, that costs the least time for each user in it."""
    work = time.work(width)
    # Powers of two, a factor of 4 apart: few shapes to trace, and padding of a factor of 4 at most.
    sizes = [min(_ceil_power(people), _find_most_users(time, width, most))]
    while sizes[-1] >= _RATIO and sizes[-1] * work > time.overhead:
        sizes.append(sizes[-1] // _RATIO)
    # By time per user who waits, not per row: padding is no one's progress.
    return min(sizes, key=lambda padded_users: time.of((padded_users, width)) / min(padded_users, waiting))


def _find_most_users(time: StepTime, width: int, most: int) -> int:
    """Return the size of a step that holds as much work as steps should, and fits in memory."""
    return min(_floor_power(most), _ceil_power(int(_FULL * time.overhead / time.work(width))))


def should_trace(steps: int) -> bool:
    """Return whether a step that runs so many times in a round is worth tracing."""
    return steps >= MIN_STEPS_TO_TRACE


def round_up(size: int) -> int:
    """Return a size rounded up by at most an eighth, so that traced shapes recur from round to round."""
    grain = 1 << max(0, size.bit_length() - 4)
    return -(-size // grain) * grain


def _floor_power(size: int) -> int:
    return 1 << (max(1, size).bit_length() - 1)


def _ceil_power(size: int) -> int:
    return 1 << (max(1, size) - 1).bit_length()
