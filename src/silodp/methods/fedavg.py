"""Federated averaging without privacy, the baseline for accuracy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from silodp.accounting.events import Event, NonPrivate
from silodp.accounting.views import Unit, View
from silodp.mechanisms.clipping import LocallyNoisedUpdate
from silodp.methods.base import LocalContext, Method
from silodp.methods.roles import FederationSize
from silodp.training.sgd import LocalTraining

if TYPE_CHECKING:
    from torch import Tensor


def train_on_all_records(context: LocalContext, local: LocalTraining) -> Tensor:
    """Run SGD on all records of a silo.

    Returns:
        (d,), the local model minus the global one.
    """
    from silodp.training.sgd import silo_update

    batches = context.randomness.torch("batches")
    return silo_update(context.task, context.params, context.x, context.y, local, batches)


@dataclass(frozen=True, repr=False)
class Default(Method):
    """FedAvg with a local and a server learning rate: each silo trains on all its records.

    Source: McMahan et al. 2017 (FedAvg); ULDP-FL (Kato et al. 2024), baseline DEFAULT.
    """

    local: LocalTraining = field(default_factory=lambda: LocalTraining(learning_rate=0.01))
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0

    name: str = field(default="default", init=False)
    unit: Unit | None = field(default=None, init=False)
    needs_counts: bool = field(default=False, init=False)
    assumptions: tuple[str, ...] = field(default=(), init=False)

    def local_update(self, context: LocalContext) -> LocallyNoisedUpdate:
        """Run the silo's own SGD; nothing is clipped, and no noise added."""
        return LocallyNoisedUpdate(train_on_all_records(context, self.local).double().cpu())

    def bounds(self, population: FederationSize) -> None:
        """Return None: no noise is added."""

    def dp_event(self, view: View) -> Event:
        """Return the event that promises nothing."""
        return NonPrivate("the method 'default' adds no noise")
