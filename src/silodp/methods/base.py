"""What a method is: public constants, and pure functions of them.

Noise and accounting read the same fields of the same frozen object, so they cannot drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
from torch import Tensor

from silodp.accounting.accountant import Accountant
from silodp.accounting.events import Event
from silodp.accounting.guarantee import Adversary, Unit, View
from silodp.data.federation import Federation
from silodp.errors import SilodpError, check_real
from silodp.mechanisms.clipping import Bounds, Update
from silodp.mechanisms.noise import Randomness
from silodp.training.sgd._schedule import LocalTraining
from silodp.training.task import Task


@dataclass(frozen=True)
class Population:
    """The public size of a federation: S silos, the list of ids 1..U, and how many silos noise shares are sized for.

    `budgets`: the persons' own ε (U,), public as the list of ids is; None where nobody has one.
    """

    silos: int
    users: int
    shares_for: int | None = None
    budgets: tuple[float, ...] | None = field(default=None, repr=False)

    @property
    def m(self) -> int:
        """The fewest silos whose answers may be added up."""
        return self.silos if self.shares_for is None else self.shares_for


@dataclass(frozen=True)
class LocalContext:
    """All that a silo's part of one round depends on.

    params (d,): the global model. x (n, ...), y (n, ...), user (n,): the records admitted to training.
    allotment (U,) float64: this silo's share of each person (see `Method.allotments`), 0 for those not sampled.
    randomness: this silo's streams for this round. silo: its place in the public order. budget (n,) float64: the ε of
    each admitted record, None where records have none. memory: what this silo's last `Finished` update asked to be
    kept, None in the first round. round: counted from 0.
    """

    task: Task
    params: Tensor
    x: Tensor
    y: Tensor
    user: Tensor
    allotment: Tensor
    population: Population
    randomness: Randomness
    silo: int = 0
    budget: Tensor | None = None
    memory: np.ndarray | None = None
    round: int = 0


EventsBySurvivors = Mapping[Adversary, Sequence[tuple[View, Event]]]
"""For every number of silos that may answer a round: its view, and what it costs with the noise that is drawn."""


class Method(Protocol):
    """How silos turn records into updates, and what that costs whom."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def unit(self) -> Unit | None:
        """Whom it protects; None for nobody."""

    @property
    def needs_counts(self) -> bool:
        """Whether n[s,u] must be known to the party that computes the allotments."""

    @property
    def clips_records(self) -> bool:
        """Whether it clips single records' gradients, so that the loss must be a mean over records."""

    @property
    def server_learning_rate(self) -> float:
        """η_g."""

    @property
    def server_momentum(self) -> float:
        """Heavy-ball momentum of the server step; post-processing, free of charge."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the guarantee rests on beyond what every method's does."""

    def allotments(
        self, counts: np.ndarray | None, population: Population, stream: np.random.Generator
    ) -> np.ndarray | None:
        """(S, U): the weight of each person in each silo, or how many of her records it may use; None: everything."""

    def select_records(
        self,
        user: np.ndarray,
        allotment: np.ndarray | None,
        stream: np.random.Generator,
        budget: np.ndarray | None = None,
    ) -> np.ndarray:
        """(n,) bool: which records of a silo take part in the run, drawn once; `budget` (n,): the records' own ε."""

    def clients(self, population: Population, stream: np.random.Generator) -> np.ndarray | None:
        """(S,) bool: which silos take part in a round; None: all of them."""

    def sample(self, population: Population, stream: np.random.Generator) -> np.ndarray | None:
        """(U,) bool: who takes part in a round, in all silos at once; None: everyone."""

    @property
    def draws_users(self) -> bool:
        """Whether `sample` draws persons."""

    @property
    def draws_clients(self) -> bool:
        """Whether `clients` draws silos."""

    @property
    def allotment_dtype(self) -> str | None:
        """numpy's name of the type of allotments; None where there are none."""

    def allotment_problem(
        self, allotment: np.ndarray, counts: np.ndarray, population: Population, silo: int
    ) -> str | None:
        """Check what the server allots to a silo, which takes the server for an adversary.

        Args:
            allotment: (U,), of type `allotment_dtype`.
            counts: (U,) int64, the silo's own record counts.
            population: the run's.
            silo: its place in the public order.

        Returns:
            what is wrong with it, as the end of a sentence ("is not …"); None if it is as this method defines it. One
            silo sees its own part only: that parts add to at most 1 over all silos it cannot check.
        """

    def silo_update(self, work: LocalContext) -> Update:
        """Train and clip; the aggregator weights with the allotments, sums, and adds this silo's share of noise."""

    def bounds(self, population: Population) -> Bounds | None:
        """What holds for the streams of `silo_update`; None where silos finish their updates themselves."""

    def server_scale(self, population: Population) -> float:
        """What multiplies η_g·Σ_s Δ_s; a public constant."""

    def dp_event(self, view: View) -> Event:
        """What one round costs against one adversary; where units have budgets of their own, any of them at most."""

    @property
    def max_rounds(self) -> int | None:
        """The rounds that units' own budgets are for, each released once; None: no limit."""

    def calibrated(self, costs: EventsBySurvivors, population: Population, delta: float) -> Self:
        """With what units' own budgets allow, found from what a round costs; the same method where they have none."""

    def event_for_largest_budget(self, event: Event, view: View) -> Event:
        """What a round that costs any unit `event` at most costs the unit with the largest budget."""

    def groups(
        self,
        view: View,
        budgets: Sequence[np.ndarray],
        joined: np.ndarray,
        rounds: int,
        delta: float,
        accountant: Accountant,
    ) -> tuple[dict[str, Any], ...]:
        """For units with budgets of their own: what was asked for and what was charged, one entry for each budget.

        budgets: of the records of each silo (n_s,), or of all persons ((U,), once); public. joined (S,): in how many of
        the `rounds` each silo took part. An entry: {"budget", "units", "planned", "realized", ...}, ε at `delta`.
        """

    def book(
        self, budget: np.ndarray | None, rounds: int, memory: np.ndarray | None
    ) -> Mapping[str, np.ndarray]:
        """What a silo's own people may read of its records' accounts, each entry (n,), and nobody else.

        Of the admitted records: their budgets, after so many rounds, with what was kept in memory.
        """

    def check(self, federation: Federation, rounds: int, delta: float) -> None:
        """Refuse, before anything runs, a federation that the method cannot train on, and rounds and δ not its own."""

    @property
    def paper_claim(self) -> Method | None:
        """The same method with the `dp_event` that its paper claims and nobody has proven; None: no such claim."""


class BaseMethod:
    """What holds for most methods."""

    def allotments(
        self, counts: np.ndarray | None, population: Population, stream: np.random.Generator
    ) -> np.ndarray | None:
        """Everything counts as it is."""
        return None

    def select_records(
        self,
        user: np.ndarray,
        allotment: np.ndarray | None,
        stream: np.random.Generator,
        budget: np.ndarray | None = None,
    ) -> np.ndarray:
        """Every record."""
        return np.ones(len(user), dtype=bool)

    def sample(self, population: Population, stream: np.random.Generator) -> np.ndarray | None:
        """Everyone, always; records may be drawn inside a silo."""
        return None

    @property
    def draws_users(self) -> bool:
        """Nobody is drawn."""
        return False

    @property
    def draws_clients(self) -> bool:
        """Every silo takes part."""
        return False

    @property
    def allotment_dtype(self) -> str | None:
        """There are no allotments."""
        return None

    def allotment_problem(
        self, allotment: np.ndarray, counts: np.ndarray, population: Population, silo: int
    ) -> str | None:
        """There are no allotments."""
        return "this method does not have"

    @property
    def max_rounds(self) -> int | None:
        """No limit."""
        return None

    def calibrated(self, costs: EventsBySurvivors, population: Population, delta: float) -> Self:
        """Nobody has a budget of her own."""
        return self

    def event_for_largest_budget(self, event: Event, view: View) -> Event:
        """The same for every unit."""
        return event

    def clients(self, population: Population, stream: np.random.Generator) -> np.ndarray | None:
        """Every silo."""
        return None

    def groups(
        self,
        view: View,
        budgets: Sequence[np.ndarray],
        joined: np.ndarray,
        rounds: int,
        delta: float,
        accountant: Accountant,
    ) -> tuple[dict[str, Any], ...]:
        """Budgets of one's own are not read."""
        return ()

    def book(
        self, budget: np.ndarray | None, rounds: int, memory: np.ndarray | None
    ) -> Mapping[str, np.ndarray]:
        """No accounts but the run's."""
        return {}

    def check(self, federation: Federation, rounds: int, delta: float) -> None:
        """Any will do."""

    @property
    def paper_claim(self) -> Method | None:
        """Nothing is claimed that is not proven."""
        return None


MOST_NOISE = 1e6
"""The largest noise multiplier that plans look for, too."""


def check_noise_multiplier(sigma: float) -> None:
    """Refuse a noise multiplier that is negative, not finite, or so large that accountants take forever."""
    check_real("noise_multiplier", sigma)
    if not (math.isfinite(sigma) and sigma >= 0):
        raise SilodpError(
            f"noise_multiplier = {sigma}: set a finite number ≥ 0 (0 means no privacy).",
            code="argument.value",
            field="noise_multiplier",
        )
    if sigma > MOST_NOISE:
        raise SilodpError(
            f"noise_multiplier = {sigma:g}: set a number of at most {MOST_NOISE:g}.",
            code="argument.out_of_range",
            field="noise_multiplier",
        )


def check_server(learning_rate: float, momentum: float) -> None:
    """Refuse server settings that cannot train."""
    check_real("server_learning_rate", learning_rate)
    check_real("server_momentum", momentum)
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise SilodpError(
            f"server_learning_rate = {learning_rate}: set a finite number > 0.",
            code="argument.value",
            field="server_learning_rate",
        )
    if not 0 <= momentum < 1:
        raise SilodpError(
            f"server_momentum = {momentum}: set a number in [0, 1).",
            code="argument.value",
            field="server_momentum",
        )


def check_local(local: LocalTraining) -> None:
    """Refuse, as local training, anything else (a learning rate alone, a table of settings)."""
    if not isinstance(local, LocalTraining):
        raise SilodpError(
            f"local is a {type(local).__name__}: set a LocalTraining, for example LocalTraining(learning_rate=0.01).",
            code="argument.type",
            field="local",
        )
