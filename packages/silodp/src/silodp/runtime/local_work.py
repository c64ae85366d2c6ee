"""A silo's part of a release: what it depends on, and the blocks of persons in which it is computed.

    Silo -> LocalWork -> run: of this process (`LocalRecords.run`), or of another executor (`runtime.executor`)
                     -> LocalRecords.update, block by block -> Method.local_update

Blocks follow from public settings alone, so the bits of a model do not depend on where they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from silodp.aggregators.run_spec import RunSpec
from silodp.data.silo_data import SiloData
from silodp.mechanisms.clipping import (
    ClippedRows,
    ClippedRowStream,
    LocallyNoisedUpdate,
    MultiStepUpdate,
    RowBlocks,
    Update,
)
from silodp.mechanisms.noise import Randomness
from silodp.methods.base import LocalContext, Method, supports
from silodp.methods.roles import FederationSize, MethodState
from silodp.training.made_up import make_up_records
from silodp.training.task import Task

T = TypeVar("T")

_PERSONS = 1 << 16
"""The persons of a block who are expected to take part, over all silos: enough to be trained side by side."""


@dataclass(frozen=True)
class Release:
    """All that a silo's part of one release depends on besides its records and the specification of the run.

    Attributes:
        params: The global model (d,).
        admitted: Which records (n,) bool take part in the run.
        weights: The weight (U,) float64 of every person, 0 for those not sampled.
        randomness: The random streams of the release.
        round: The number of the round, counted from 0.
        state: The method's state in the round.
        memory: What the method remembers of earlier releases; None where it kept nothing.
    """

    params: np.ndarray = field(repr=False)
    admitted: np.ndarray = field(repr=False)
    weights: np.ndarray = field(repr=False)
    randomness: Randomness
    round: int
    state: MethodState = field(repr=False)
    memory: np.ndarray | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Block:
    """Some of the persons.

    Attributes:
        place: The number of the block, counted from 0.
        first: The first person.
        end: The person after the last one.
    """

    place: int
    first: int
    end: int


def cut_blocks(method: Method, population: FederationSize) -> tuple[Block | None, ...]:
    """Cut the U persons of a run into blocks of consecutive numbers; (None,) where all are computed together.

    The number of blocks is that of the persons who are expected to take part, divided by 2^16.
    """
    if not supports(type(method), "can_split"):
        return (None,)
    users = population.users
    taking_part = float(np.sum(np.broadcast_to(method.sampling_rates(population), users)))
    blocks = math.ceil(taking_part / _PERSONS)
    if blocks <= 1:
        return (None,)
    ends = pairwise(users * place // blocks for place in range(blocks + 1))
    return tuple(Block(place, first, end) for place, (first, end) in enumerate(ends))


class LocalRecords:
    """The records of a silo, in a process that computes with them.

    Args:
        data: The records.
        task: Model, loss and metrics.
        spec: The specification of the run.
    """

    def __init__(self, data: SiloData, task: Task, spec: RunSpec) -> None:
        self._task, self._spec, self._place = task, spec, spec.names.index(data.name)
        task.use_examples(*make_up_records(spec.data))  # also in a process that did not prepare the run
        self._x, self._y = task.tensors(data.x, data.y)
        self._user = torch.from_numpy(data.user)
        self._budget = None if data.budget is None else torch.from_numpy(data.budget)

    def compute(self, release: Release, block: Block | None) -> Update:
        """Return the update of a block of persons; None: of all.

        Raises:
            SilodpError: the model, the loss or a metric has changed; also while rows are read (model.running_state).
        """
        chosen, randomness = torch.from_numpy(release.admitted), release.randomness
        if block is not None:
            chosen = chosen & (self._user >= block.first) & (self._user < block.end)
            randomness = randomness.child("block", block.place)
        # A slice where all records take part: indices would copy them in every round.
        records: Any = slice(None) if bool(chosen.all()) else chosen.nonzero().squeeze(1)
        update = self._spec.method.local_update(
            LocalContext(
                task=self._task,
                params=torch.from_numpy(release.params).to(self._task.device),
                x=self._x[records],
                y=self._y[records],
                user=self._user[records],
                weights=torch.from_numpy(release.weights),
                population=self._spec.population,
                randomness=randomness,
                silo=self._place,
                budget=None if self._budget is None else self._budget[records],
                memory=release.memory,
                round=release.round,
                state=release.state,
                isolate_units=self._spec.isolate_units,
            )
        )
        # Nothing of an update leaves a silo before one person's records are known to have changed nothing for others.
        self._task.refuse_changes()
        if isinstance(update, ClippedRowStream):
            return replace(update, chunks=self._watch(update.chunks))
        return (
            replace(update, steps=self._watch_steps(update.steps))
            if isinstance(update, MultiStepUpdate)
            else update
        )

    def _watch(self, chunks: Iterable[ClippedRows]) -> Iterator[ClippedRows]:
        for chunk in chunks:
            self._task.refuse_changes()
            yield chunk
            del chunk  # only the caller holds its rows now

    def _watch_steps(
        self, steps: Generator[ClippedRowStream, Tensor, None]
    ) -> Generator[ClippedRowStream, Tensor, None]:
        yield from steps
        # What the silo sends is the sum over all steps.
        self._task.refuse_changes()

    def run(
        self, release: Release, blocks: Sequence[Block | None], function: Callable[[Update], T]
    ) -> Iterator[T]:
        """Yield what a function returns for the update of every block, in order; see `Run`."""
        for block in blocks:
            yield function(self.compute(release, block))


class Run(Protocol):
    """Computes blocks of a silo's release, here or elsewhere."""

    def __call__(
        self, release: Release, blocks: Sequence[Block | None], function: Callable[[Update], T]
    ) -> Iterator[T]:
        """Yield what `function`, which can be pickled, returns for the update of every block, in order."""


@dataclass(frozen=True)
class LocalWork:
    """What a silo has to compute for one release; nothing is computed before it is asked for.

    Attributes:
        release: What the work depends on.
        spec: The specification of the run.
        noise: The secret stream of this silo's share of the noise.
        keep: Called with what the method wants to remember, before the share is returned.
        run: Computes the blocks.
    """

    release: Release
    spec: RunSpec
    noise: np.random.Generator = field(repr=False)
    keep: Callable[[np.ndarray], None] = field(repr=False)
    run: Run = field(repr=False)

    def compute_update(self) -> Update:
        """Return the silo's update; its rows come to this process."""
        blocks = self._blocks
        if len(blocks) > 1:
            return self._stream(blocks)
        return self._compute_whole(_return_update)

    def make_share(self, add_noise: Callable[[Update, Tensor, np.random.Generator], T]) -> T:
        """Return the noisy share that a function makes of the update, the weights (U,) and the stream of the noise.

        The function can be pickled: it is called where the update is computed, unless that is in several places.
        """
        blocks = self._blocks
        if len(blocks) > 1:
            return add_noise(self._stream(blocks), torch.from_numpy(self.release.weights), self.noise)
        return self._compute_whole(partial(_add_noise, add_noise, self.release.weights, self.noise))

    @property
    def _blocks(self) -> tuple[Block | None, ...]:
        return cut_blocks(self.spec.method, self.spec.population)

    def _compute_whole(self, function: Callable[[Update], T]) -> T:
        ((result, memory),) = self.run(self.release, [None], partial(_keep_memory, function))
        if memory is not None:
            self.keep(memory)
        return result

    def _stream(self, blocks: Sequence[Block | None]) -> ClippedRowStream:
        assert self.spec.bounds is not None  # methods that can be cut into blocks have clipped rows

        def apply(function: Callable[[Iterable[ClippedRows]], T]) -> Iterator[T]:
            return self.run(self.release, blocks, partial(_apply_to_chunks, function))

        return ClippedRowStream(RowBlocks(apply), self.spec.sum_size, self.spec.bounds, weighted=True)


# On the level of the module, so that they can be pickled.


def _return_update(update: Update) -> Update:
    return update


def _keep_memory(function: Callable[[Update], T], update: Update) -> tuple[T, np.ndarray | None]:
    """Return the result for an update, and what its method wants to remember."""
    return function(update), update.memory if isinstance(update, LocallyNoisedUpdate) else None


def _add_noise(
    add_noise: Callable[[Update, Tensor, np.random.Generator], T],
    weights: np.ndarray,
    noise: np.random.Generator,
    update: Update,
) -> T:
    return add_noise(update, torch.from_numpy(weights), noise)


def _apply_to_chunks(function: Callable[[Iterable[ClippedRows]], T], update: Update) -> T:
    assert isinstance(update, ClippedRowStream)
    return function(update.chunks)
