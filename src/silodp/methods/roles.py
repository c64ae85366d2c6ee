"""The roles of a method beside its core: who takes part, weights of users, state, the server's step, units' budgets.

`Method` derives from `ServerStep`, `Sampling`, `UserWeights` and `PublicState`. By their defaults all take part, with
equal weights and without state; a method overrides the members of the role that it needs. Few methods have budgets of
single units, so that role is an object of its own: `Method.budgets`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from silodp.accounting.accountant import Accountant
from silodp.accounting.events import Event
from silodp.accounting.views import Adversary, Unit, View

if TYPE_CHECKING:
    from torch import Tensor

    from silodp.accounting.budget_curve import EpsilonCurve


@dataclass(frozen=True)
class FederationSize:
    """The public size of a federation.

    Attributes:
        silos: S.
        users: U, the length of the public list of ids.
        noise_sized_for: the number of silos that noise shares are sized for; None: all.
        budgets: (U,) the users' own ε, as public as the list of ids; None where nobody has one.
    """

    silos: int
    users: int
    noise_sized_for: int | None = None
    budgets: tuple[float, ...] | None = field(default=None, repr=False)

    @property
    def min_survivors(self) -> int:
        """m, the fewest silos whose answers may be added up."""
        return self.silos if self.noise_sized_for is None else self.noise_sized_for


MethodState = Mapping[str, np.ndarray]
"""A method's public arrays by name; the server keeps them, and sends them with each round's request."""


EventsBySurvivors = Mapping[Adversary, Sequence[tuple[View, Event]]]
"""For every number of silos that may answer a round: its view, and what it costs with the noise that is drawn."""


class ServerStep:
    """Role: how far the server moves the model along the noisy sum. It is post-processing, and costs no privacy."""

    @property
    def server_learning_rate(self) -> float:
        """η_g, above 0."""
        return 1.0

    @property
    def server_momentum(self) -> float:
        """Heavy-ball momentum of the default server optimizer, in [0, 1)."""
        return 0.0

    def server_scale(self, population: FederationSize) -> float:
        """Return the public constant that makes the sum over silos a mean: by default 1/S."""
        return 1.0 / population.silos


class Sampling:
    """Role: which users, silos and records take part; by default all of them.

    `Method.dp_event` must be the event of the sample that these members draw.
    """

    @property
    def common_sampling_rate(self) -> float | None:
        """q, in (0, 1], with which every user takes part in a round; None where users have rates of their own.

        An aggregator that hides the sample needs it before the size of the federation is known.
        """
        return 1.0

    @property
    def samples_users(self) -> bool:
        """Whether some user's `sampling_rates` are below 1, so that a sample of users is drawn in every round."""
        return self.common_sampling_rate != 1

    def sampling_rates(self, population: FederationSize) -> float | np.ndarray:
        """Return the probability with which a user takes part in a round, by one coin for all silos.

        It is a function of public constants: one number for all users, or (U,) one each. By default it is
        `common_sampling_rate`; a method whose users have rates of their own defines both.
        """
        rate = self.common_sampling_rate
        if rate is None:
            raise NotImplementedError("users have rates of their own: define sampling_rates")
        return rate

    @property
    def samples_silos(self) -> bool:
        """Whether `sample_silos` draws silos in every round."""
        return False

    def sample_silos(self, population: FederationSize, stream: np.random.Generator) -> np.ndarray | None:
        """Draw which silos take part in a round: (S,) bool; None: all."""
        return None

    def select_records(
        self,
        user: np.ndarray,
        place: int,
        population: FederationSize,
        stream: np.random.Generator,
        budget: np.ndarray | None = None,
    ) -> np.ndarray:
        """Draw, once for the run, which records of a silo take part: (n,) bool; by default all.

        Args:
            user: (n,) int64, whose record each is.
            place: of the silo in the public order, counted from 0.
            population: the public size of the federation.
            stream: the silo's own.
            budget: (n,) the records' own ε; None where they have none.
        """
        return np.ones(len(user), dtype=bool)


class UserWeights:
    """Role: how a user's weight of 1 is divided among the silos (docs/privacy.md, section 2); by default evenly."""

    @property
    def needs_counts(self) -> bool:
        """Whether n[s,u], each user's number of records in each silo, is needed for weights."""
        return False

    @property
    def weights_are_shares(self) -> bool:
        """Whether w[s,u] = c[s,u]/Σ_s c[s,u], with c of `count_for_weights`: what private weighting computes."""
        return False

    def count_for_weights(self, counts: np.ndarray) -> np.ndarray:
        """Return what a silo says of its counts where `needs_counts`: by default all of them.

        Args:
            counts: (U,) int64, n[s,u] of one silo.

        Returns:
            c[s,u], (U,) int64, above 0 where n[s,u] is.
        """
        return counts

    def user_weights(self, counts: np.ndarray | None, population: FederationSize) -> np.ndarray:
        """Return w[s,u], (S, U) float64, with Σ_s w[s,u] ≤ 1 for every user; by default all are 1/S.

        Without counts the weights are a function of public constants, so that every silo finds those of its users by
        itself. Otherwise the server computes them, and sends each silo its own.

        Args:
            counts: (S, U) int64, `count_for_weights` of every silo; None unless `needs_counts`.
            population: the public size of the federation.
        """
        return np.broadcast_to(1.0 / population.silos, (population.silos, population.users))

    def check_weights(self, weights: np.ndarray, counts: np.ndarray) -> str | None:
        """Check the weights that the server sends to a silo; a silo does not trust the server.

        A silo sees its own weights only, so it cannot check that a user's weights add to at most 1 over all silos.

        Args:
            weights: (U,) float64, finite.
            counts: (U,) int64, `count_for_weights` of the silo.

        Returns:
            what is wrong, as the end of a sentence ("is not …"); None if they are as the method defines them.
        """
        within = (weights >= 0) & (weights <= 1)
        return None if within.all() else "is not between 0 and 1"


class PublicState:
    """Role: public arrays that change from round to round, such as a clip that adapts; by default there are none."""

    extra_coordinates: ClassVar[int] = 0
    """How many numbers each row carries behind the d of the model, under the same clip, noise and event."""

    def sum_size(self, size: int) -> int:
        """Return how many numbers silos add up, for a model of d = `size` parameters."""
        return size + self.extra_coordinates

    def initial_state(self, population: FederationSize) -> dict[str, np.ndarray]:
        """Return the state before the first round: public arrays by name, none by default.

        Names, types and shapes stay the same in all rounds, and silos check them. The state is a function of public
        constants and of noisy sums, so that it costs no ε beyond `dp_event`.
        """
        return {}

    def check_state(self, state: MethodState, population: FederationSize) -> str | None:
        """Check the values that the server sends, of the right types and shapes and finite, on the silo's side.

        Returns:
            what is wrong, as the end of a sentence ("is not …"); None if they are values that the state can take.
        """
        return None

    def split_sum(
        self, total: Tensor, state: MethodState, population: FederationSize
    ) -> tuple[Tensor, dict[str, np.ndarray]]:
        """Split a round's noisy sum into the update of the model and the next state.

        Args:
            total: (d + `extra_coordinates`,) float64.
            state: of this round.
            population: the public size of the federation.

        Returns:
            the sum of the updates (d,) float64, and the state of the next round.
        """
        return total, dict(state)


@dataclass(frozen=True, kw_only=True)
class UnitBudgets:
    """Role: privacy budgets of single units, each an ε of one user or one record (docs/privacy.md, section 9).

    A method that keeps such budgets returns an object of this class or of a subclass as `Method.budgets`. The defaults
    are those of a method whose units have none.

    Attributes:
        unit: whose budgets the method needs, with its settings; None: nobody's.
        adversary: the adversary against which budgets are met; None: each one that the run's budget is met against.
        max_rounds: the number of rounds that the budgets are met over, each released once; None: no limit.
        planned_rounds: the number of rounds that the budgets are spread over; None where there are no budgets.
        retires_after: the number of rounds after which units leave one by one, as their budgets are used up; None: they
            do not.
    """

    unit: Unit | None = None
    adversary: Adversary | None = None
    max_rounds: int | None = None
    planned_rounds: int | None = None
    retires_after: int | None = None

    def event_for_largest_budget(self, event: Event, view: View) -> Event:
        """Return what a round costs the unit with the largest budget.

        Args:
            event: what the round costs any unit at most, with the noise that is drawn.
            view: of the adversary.
        """
        return event

    def report(
        self,
        view: View,
        budgets: Sequence[np.ndarray],
        joined: np.ndarray,
        rounds: int,
        delta: float,
        accountant: Accountant,
    ) -> tuple[dict[str, Any], ...]:
        """Return one entry for each budget: what was asked for, and what was charged.

        Args:
            view: the adversary.
            budgets: of the records of each silo (n_s,), or of all users ((U,), once); public.
            joined: (S,), the number of rounds each silo took part in.
            rounds: the number of rounds that were run.
            delta: δ.
            accountant: the run's.

        Returns:
            entries {"budget", "units", "planned", "realized", ...}, the last two being ε at δ.
        """
        return ()

    def record_accounts(
        self, budget: np.ndarray | None, rounds: int, memory: np.ndarray | None
    ) -> Mapping[str, np.ndarray]:
        """Return the accounts of a silo's own records; they stay in the silo.

        Args:
            budget: (n,) the ε of the selected records; None where they have none.
            rounds: the number of rounds so far.
            memory: what the silo keeps (see `LocalContext.memory`).

        Returns:
            arrays (n,) by name.
        """
        return {}

    def count_infeasible(self, budgets: np.ndarray) -> int | None:
        """Return how many of these budgets (n,) are too small for taking part; None where that is not known."""
        return None

    def event_at_sampling(self, sampling: float) -> Event:
        """Return what a round costs a record that is sampled with this probability (`Method.samples_by_budget`)."""
        raise NotImplementedError

    def sampling_curve(self, rounds: int, accountant: Accountant, points: int, least: float) -> EpsilonCurve:
        """Return ε after `rounds` rounds against a record's sampling probability (`Method.samples_by_budget`)."""
        raise NotImplementedError


NO_BUDGETS = UnitBudgets()
"""No unit has a budget of its own."""
