"""Federated averaging without privacy, the baseline for accuracy."""

from __future__ import annotations

from dataclasses import dataclass, field

from silodp.accounting.events import Event, NonPrivate
from silodp.accounting.views import Unit, View
from silodp.mechanisms.clipping import LocallyNoisedUpdate
from silodp.methods.base import LocalContext, Method
from silodp.methods.roles import FederationSize
from silodp.training.sgd import LocalTraining


@dataclass(frozen=True, repr=False)
class Default(Method):
    """FedAvg with a local and a server learning rate: each silo trains on all its records.

    Source: Kato et al., ULDP-FL, 2024, baseline DEFAULT.
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
        from silodp.training.sgd import silo_update

        delta = silo_update(
            context.task,
            context.params,
            context.x,
            context.y,
            self.local,
            context.randomness.torch("batches"),
        ).double()
        return LocallyNoisedUpdate(delta.cpu())

    def bounds(self, population: FederationSize) -> None:
        """Return None: no noise is added."""

    def dp_event(self, view: View) -> Event:
        """Return the event that promises nothing."""
        return NonPrivate("the method 'default' adds no noise")
