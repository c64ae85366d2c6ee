"""The base of methods that release sums, and the server optimizer that leaves the model as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from silodp.accounting.views import Unit
from silodp.methods.participation import Participation
from silodp.methods.roles import PersonalBudgets
from silodp.methods.server_optimizer import Move, ServerOptimizer, State
from silodp.methods.uldp import UldpAvg, VerifiedIds
from silodp.training.sgd import LocalTraining

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KeepModel(ServerOptimizer):
    """Leaves the model as it is."""

    def step(
        self, params: Tensor, total: Tensor, state: State, move: Move
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the same parameters."""
        return params, {}


@dataclass(frozen=True, repr=False)
class SumsMethod(UldpAvg):
    """Base of methods that release Σ_s Σ_u w[s,u]·(row of u in s) + noise σC, and train no model.

    Weights, bounds and events are those of `uldp-avg`. A subclass sets `name`, and `clip` where it is not 1; it says
    again what its `local_update` can do (`can_isolate_units`, `can_split`).
    """

    # These have no meaning without training, or follow from the rows.
    clip: float = field(default=1.0, init=False)
    local: LocalTraining = field(
        default_factory=lambda: LocalTraining(learning_rate=1.0), init=False, repr=False, compare=False
    )
    user_sampling: float = field(default=1.0, init=False, repr=False, compare=False)
    server_learning_rate: float = field(default=1.0, init=False, repr=False, compare=False)
    server_momentum: float = field(default=0.0, init=False, repr=False, compare=False)
    personal: PersonalBudgets | None = field(default=None, init=False, repr=False, compare=False)
    step: float | None = field(default=None, init=False, repr=False, compare=False)
    gradient_clip: float | None = field(default=None, init=False, repr=False, compare=False)
    participation: Participation | None = field(default=None, init=False, repr=False, compare=False)
    verified: VerifiedIds | None = field(default=None, init=False, repr=False, compare=False)
    server_optimizer: ServerOptimizer | None = field(
        default=None, init=False, repr=False, compare=False, kw_only=True
    )

    releases_model: ClassVar[bool] = False
    budgets_of: ClassVar[Unit | None] = None

    def make_server_optimizer(self) -> ServerOptimizer:
        """Return what leaves the model as it is."""
        return KeepModel()
