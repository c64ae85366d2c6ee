"""Canaries: made-up units whose records move a sum as far as a method allows, each in a direction of its own.

The model is linear and so is the loss: the gradient of a record (v, t) is −t·v at every model, so that its clipped
update is the clip times v. A person u stands for direction u, and all directions are orthonormal. Persons who have
records are *members*; the others have none, and are what an attacker has to tell members from.

Where records of a canary lie follows from what a method and its events state of themselves (`choose_placement`), so
that a plug-in is attacked without being named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import nn
from silodp.accounting.events import Event, Group, list_nested
from silodp.accounting.views import Adversary
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError
from silodp.methods.base import Method
from silodp.methods.roles import FederationSize
from silodp.training.losses import Loss
from silodp.training.task import Task

Array = NDArray[np.float64]
Kind = Literal["everywhere", "one silo", "whole update"]
"""Where the records of a canary lie: in every silo; in the first one alone; or one person turns the whole update of
every silo, and rounds take the place of canaries."""

STEEPNESS = 2.0**19
"""Factor t of a canary's gradient, far above any clip; records with larger targets are trained alone, which is slow."""
LARGEST_BUDGET = 1e6
"""ε that every canary asks for, where units have budgets: methods treat it as the largest one that they know."""
_MAX_NUMBERS = 1 << 24
"""Numbers in the records of one silo: 64 MiB."""
_LEAST_SPARE = 300


@dataclass(frozen=True)
class Placement:
    """Where the records of canaries lie.

    Attributes:
        kind: See `Kind`.
        records: The number of records of a canary in each silo that has any.
        budgets_of: The unit that has privacy budgets, if any.
    """

    kind: Kind
    records: int = 1
    budgets_of: Literal["user", "record"] | None = None

    def count_silos(self, silos: int) -> int:
        """Return in how many silos a canary has records."""
        return 1 if self.kind == "one silo" else silos


def choose_placement(method: Method, events: Mapping[Adversary, Event], silos: int) -> Placement:
    """Return the placement under which a canary moves what is seen as far as was charged.

    Args:
        method: The method; only what it states of itself is asked.
        events: What a round costs, by adversary.
        silos: The number of silos.
    """
    bounds = method.bounds(FederationSize(silos, 2, silos))
    # A silo may use at most k records of a group; more of them show one that uses more.
    sizes = [
        inner.size for event in events.values() for inner in list_nested(event) if isinstance(inner, Group)
    ]
    records, budgets = (2 * max(sizes) if sizes else 1), method.budgets.unit
    if method.unit == "record":
        return Placement("one silo", 1, budgets)
    if bounds is None:
        return Placement("everywhere", records, budgets)
    if bounds.silos_sharing_weight > 1 or silos == 1:
        return Placement("everywhere", 1, budgets)
    # Weights that go by counts let one silo carry all of a person's weight. Where there are no such weights, what a
    # silo clips belongs to no single person.
    return Placement("one silo" if method.needs_counts else "whole update", 1, budgets)


@dataclass(frozen=True)
class Directions:
    """The orthonormal directions of a federation of canaries, by the numbers of the persons who stand for them.

    The first ones are coordinates: members, as many outsiders, and spare outsiders on whom scores are calibrated. The
    last ones are dense: rows of a Hadamard matrix over coordinates of their own, the first half members. A clip that
    takes another norm than the 2-norm moves dense ones farther.

    Attributes:
        canaries: The number m of members that are coordinates.
        spare: The number of spare outsiders.
        dense: The number of dense directions, a power of four; 0 for none.
    """

    canaries: int
    spare: int
    dense: int

    @property
    def size(self) -> int:
        """The number d of directions, and of parameters of the model."""
        return 2 * self.canaries + self.spare + self.dense

    @cached_property
    def members(self) -> NDArray[np.int64]:
        """The persons with records."""
        dense = np.arange(self._dense_start, self._dense_start + self.dense // 2)
        return np.concatenate([np.arange(self.canaries), dense])

    @cached_property
    def outsiders(self) -> NDArray[np.int64]:
        """The persons without records who are scored, one for every member."""
        dense = np.arange(self._dense_start + self.dense // 2, self.size)
        return np.concatenate([np.arange(self.canaries, 2 * self.canaries), dense])

    @cached_property
    def spares(self) -> NDArray[np.int64]:
        """The persons without records who are not scored."""
        return np.arange(2 * self.canaries, self._dense_start)

    @property
    def _dense_start(self) -> int:
        return 2 * self.canaries + self.spare

    @cached_property
    def _hadamard(self) -> Array:
        found: Array = np.ones((1, 1))
        while len(found) < self.dense:
            found = np.block([[found, found], [found, -found]])
        return np.asarray(found[: self.dense, : self.dense] / np.sqrt(max(self.dense, 1)), np.float64)

    def make_record(self, person: int) -> NDArray[np.float32]:
        """Return the features (d,) of a record of this person."""
        found = np.zeros(self.size, np.float32)
        if person < self._dense_start:
            found[person] = 1
        else:
            found[self._dense_start :] = self._hadamard[person - self._dense_start]
        return found

    def project(self, vectors: Array) -> Array:
        """Return vectors (..., d) in the basis of the directions: entry u is the part along person u's."""
        if not self.dense:
            return vectors
        start = self._dense_start
        return np.concatenate([vectors[..., :start], vectors[..., start:] @ self._hadamard.T], axis=-1)


def choose_directions(canaries: int, features: int, placement: Placement) -> Directions:
    """Return the directions for so many canaries, or for fewer where their records would take too much memory.

    Args:
        canaries: The number m of members that is wanted.
        features: The number of vectors that an adversary sees of a run; scores that use all of them are calibrated on
            ten times as many spare directions.
        placement: Where records lie.
    """
    spare = max(_LEAST_SPARE, 10 * features)
    # Dense canaries need d of their own, and catch what they are for with a few: a tenth of the others, about.
    dense = 4 ** max(2, int(np.log(max(canaries / 6, 1)) / np.log(4)))
    while canaries > 1 and _count_numbers(canaries, spare, dense, placement) > _MAX_NUMBERS:
        canaries = int(canaries * 0.95)
    return Directions(canaries, spare, dense)


def _count_numbers(canaries: int, spare: int, dense: int, placement: Placement) -> int:
    return placement.records * (canaries + dense // 2) * (2 * canaries + spare + dense)


@dataclass(frozen=True)
class Canaries:
    """A federation in which every person is made up, and the task that goes with it.

    Attributes:
        federation: The silos.
        task: The linear model and loss.
        directions: What the persons stand for.
        placement: Where the records lie.
        blocks: The number of equal blocks of a sum, one for each silo, of which each silo fills its own; 1 for a sum
            without blocks.

    Canaries that lie in one silo lie in the first, and the last silo is the curious one.
    """

    federation: Federation
    task: Task = field(repr=False)
    directions: Directions
    placement: Placement
    blocks: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the silos, in order."""
        return tuple(silo.name for silo in self.federation.silos)

    @property
    def carrying_blocks(self) -> int:
        """The number of blocks that a canary moves."""
        return min(self.blocks, self.placement.count_silos(len(self.names)))

    def project(self, vectors: Array) -> Array:
        """Return sums (..., k) along the directions, added up over the blocks that canaries move."""
        blocks = vectors.reshape(*vectors.shape[:-1], self.blocks, -1)
        # Without what a method adds to a model's coordinates, or cells that nobody has.
        whole = blocks[..., : self.carrying_blocks, : self.directions.size].sum(axis=-2)
        return self.directions.project(whole)


def make_task(size: int) -> Task:
    """Return the linear task of d = `size` parameters: the gradient of a record (v, t) is −t·v at every model."""
    loss = Loss.per_record("canary", lambda outputs, targets: -(targets * outputs.flatten()))
    return Task(nn.Linear(size, 1, bias=False), loss)


def make_canaries(
    directions: Directions, placement: Placement, names: Sequence[str], least_records: int = 0
) -> Canaries:
    """Return a federation of canaries.

    Args:
        directions: What the persons stand for.
        placement: Where their records lie.
        names: The names of the silos.
        least_records: The number of records that a silo with records needs at least; more are filled up with records
            whose gradient is zero.
    """
    members = directions.members
    rows = [
        (person, directions.make_record(int(person)), STEEPNESS)
        for person in members
        for _ in range(placement.records)
    ]
    filler = [(int(directions.spares[0]), np.zeros(directions.size, np.float32), 0.0)]
    rows += filler * max(0, least_records - len(rows))
    carrying = placement.count_silos(len(names))
    silos = tuple(
        _make_silo(name, rows if place < carrying else [], directions.size, placement)
        for place, name in enumerate(names)
    )
    budgets = np.full(directions.size, LARGEST_BUDGET) if placement.budgets_of == "user" else None
    federation = Federation(silos, directions.size, None, name="canaries", user_budgets=budgets)
    return Canaries(federation, make_task(directions.size), directions, placement)


def make_targets(names: Sequence[str], inside: bool, placement: Placement) -> Federation:
    """Return a federation for methods that clip a silo's whole update: one person turns it round in every silo.

    Person 0 pulls along −v in every silo. Person 1, where they have records, pulls a thousand times as far along +v,
    so that every clipped update moves by two clips. The second coordinate shows the noise alone.

    Args:
        names: The names of the silos.
        inside: Whether person 1 has records.
        placement: Says who has budgets.
    """
    against, along = np.array([-1, 0], np.float32), np.array([1, 0], np.float32)
    rows = [(0, against, STEEPNESS / 1e3)] + ([(1, along, STEEPNESS)] if inside else [])
    silos = tuple(_make_silo(name, rows, 2, placement) for name in names)
    budgets = np.full(2, LARGEST_BUDGET) if placement.budgets_of == "user" else None
    return Federation(silos, 2, None, name="canaries", user_budgets=budgets)


def _make_silo(
    name: str, rows: Sequence[tuple[int, NDArray[np.float32], float]], size: int, placement: Placement
) -> SiloData:
    x = np.stack([features for _, features, _ in rows]) if rows else np.zeros((0, size), np.float32)
    owners = np.array([person for person, _, _ in rows], np.int64)
    steepness = np.array([factor for _, _, factor in rows], np.float32)
    budgets = np.full(len(rows), LARGEST_BUDGET) if placement.budgets_of == "record" else None
    return SiloData(name, x, steepness, owners, budgets)


def refuse_canaries(method: Method, error: SilodpError) -> SilodpError:
    """Return the error of a method that cannot be run on canaries."""
    return SilodpError(
        f"method '{method.name}' cannot be attacked with canaries of a linear model: it refused them ({error}).",
        code="attack.canaries",
        field="method",
    )
