"""What a method is: public constants, and pure functions of them.

Noise and accounting read the same fields of the same frozen object, so they cannot drift apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from silodp.errors import SilodpError, check_real
from silodp.mechanisms.clipping import Bounds, Update
from silodp.mechanisms.noise import Randomness
from silodp.privacy.events import Event
from silodp.privacy.guarantee import Unit, View
from silodp.training.schedule import LocalTraining
from silodp.training.task import Task


@dataclass(frozen=True)
class Population:
    """The public size of a federation: S silos, the list of ids 1..U, and how many silos noise shares are sized for."""

    silos: int
    users: int
    shares_for: int | None = None

    @property
    def m(self) -> int:
        """The fewest silos whose answers may be added up."""
        return self.silos if self.shares_for is None else self.shares_for


@dataclass(frozen=True)
class SiloWork:
    """All that a silo's part of one round depends on.

    params (d,): the global model. x (n, ...), y (n, ...), user (n,): the records admitted to training.
    allotment (U,) float64: this silo's share of each person (see `Method.allotments`), 0 for those not sampled.
    randomness: this silo's streams for this round.
    """

    task: Task
    params: Tensor
    x: Tensor
    y: Tensor
    user: Tensor
    allotment: Tensor
    population: Population
    randomness: Randomness


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

    def admit(
        self, user: np.ndarray, allotment: np.ndarray | None, stream: np.random.Generator
    ) -> np.ndarray:
        """(n,) bool: which records of a silo take part in the run, drawn once."""

    def sample(self, population: Population, stream: np.random.Generator) -> np.ndarray | None:
        """(U,) bool: who takes part in a round, in all silos at once; None: everyone."""

    def silo_update(self, work: SiloWork) -> Update:
        """Train and clip; the aggregator weights with the allotments, sums, and adds this silo's share of noise."""

    def bounds(self, population: Population) -> Bounds | None:
        """What holds for the streams of `silo_update`; None where silos finish their updates themselves."""

    def server_scale(self, population: Population) -> float:
        """What multiplies η_g·Σ_s Δ_s; a public constant."""

    def dp_event(self, view: View) -> Event:
        """What one round costs against one adversary."""


def check_noise_multiplier(sigma: float) -> None:
    """Refuse a noise multiplier that is negative or not finite."""
    check_real("noise_multiplier", sigma)
    if not (math.isfinite(sigma) and sigma >= 0):
        raise SilodpError(f"noise_multiplier = {sigma}: set a finite number ≥ 0 (0 means no privacy).")


def check_server(learning_rate: float, momentum: float) -> None:
    """Refuse server settings that cannot train."""
    check_real("server_learning_rate", learning_rate)
    check_real("server_momentum", momentum)
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise SilodpError(f"server_learning_rate = {learning_rate}: set a finite number > 0.")
    if not 0 <= momentum < 1:
        raise SilodpError(f"server_momentum = {momentum}: set a number in [0, 1).")


def check_local(local: LocalTraining) -> None:
    """Refuse, as local training, anything else (a learning rate alone, a table of settings)."""
    if not isinstance(local, LocalTraining):
        raise SilodpError(
            f"local is a {type(local).__name__}: set a LocalTraining, for example LocalTraining(learning_rate=0.01)."
        )
