"""Federated averaging without privacy: the upper line in every plot."""

from __future__ import annotations

from dataclasses import dataclass, field

from silodp.accounting.events import Event, NonPrivate
from silodp.accounting.guarantee import Unit, View
from silodp.mechanisms.clipping import LocallyNoisedUpdate
from silodp.methods.base import BaseMethod, LocalContext, Population, check_local, check_server
from silodp.training.sgd.local import LocalTraining, silo_update


@dataclass(frozen=True)
class Default(BaseMethod):
    """FedAvg with two-sided learning rates: each silo trains on all its records (ULDP-FL, DEFAULT)."""

    local: LocalTraining = field(default_factory=lambda: LocalTraining(learning_rate=0.01))
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0

    name: str = field(default="default", init=False)
    unit: Unit | None = field(default=None, init=False)
    needs_counts: bool = field(default=False, init=False)
    assumptions: tuple[str, ...] = field(default=(), init=False)
    clips_records: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_local(self.local)
        check_server(self.server_learning_rate, self.server_momentum)

    def silo_update(self, work: LocalContext) -> LocallyNoisedUpdate:
        """The silo's own SGD, as it is."""
        delta = silo_update(
            work.task, work.params, work.x, work.y, self.local, work.randomness.torch("batches")
        ).double()
        return LocallyNoisedUpdate(delta.cpu())

    def bounds(self, population: Population) -> None:
        """The update is finished in the silo."""

    def server_scale(self, population: Population) -> float:
        """1/S."""
        return 1.0 / population.silos

    def dp_event(self, view: View) -> Event:
        """No privacy."""
        return NonPrivate("the method 'default' adds no noise")
