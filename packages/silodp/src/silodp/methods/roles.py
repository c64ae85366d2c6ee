"""The roles of a method beside its core: who takes part, weights of users, state, the server's step, units' budgets.

`Method` derives from `ServerStep`, `Sampling`, `UserWeights` and `PublicState`. By their defaults all take part, with
equal weights and without state; a method overrides the members of the role that it needs. Few methods have budgets of
single units, so that role is an object of its own: `Method.budgets`. The functions at the end compute users' weights,
and check that nobody's add to more than 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np

from silodp.accounting.accountant import Accountant
from silodp.accounting.events import Event
from silodp.accounting.views import Adversary, Unit, View
from silodp.assumption import Assumption
from silodp.errors import SilodpError
from silodp.methods.participation import ALWAYS, Participation
from silodp.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

WeightRule = Literal["shares", "primary_silo"]
"""A rule by which weights follow from counts; see `UserWeights.weight_rule`."""


@dataclass(frozen=True)
class FederationSize:
    """The public size of a federation.

    Attributes:
        silos: The number S of silos.
        users: The number U of users, the length of the public list of ids.
        noise_sized_for: The number of silos that noise shares are sized for; None stands for all.
        budgets: The users' own ε (U,), as public as the list of ids; None where nobody has one.
    """

    silos: int
    users: int
    noise_sized_for: int | None = None
    budgets: tuple[float, ...] | None = field(default=None, repr=False)

    @property
    def min_survivors(self) -> int:
        """The fewest silos m whose answers may be added up."""
        return self.silos if self.noise_sized_for is None else self.noise_sized_for


MethodState = Mapping[str, np.ndarray]
"""A method's public arrays by name; the server keeps them, and sends them with each round's request."""


EventsBySurvivors = Mapping[Adversary, Sequence[tuple[View, Event]]]
"""For every number of silos that may answer a round: its view, and what it costs with the noise that is drawn."""


class ServerStep:
    """Role: how far the server moves the model along the noisy sum. It is post-processing, and costs no privacy."""

    @property
    def server_learning_rate(self) -> float:
        """The server's learning rate η_g, above 0."""
        return 1.0

    @property
    def server_momentum(self) -> float:
        """The heavy-ball momentum of the default server optimizer, in [0, 1)."""
        return 0.0

    def server_scale(self, population: FederationSize) -> float:
        """Return the public constant that makes the sum over silos a mean: by default 1/S."""
        return 1.0 / population.silos


class Sampling:
    """Role: which users, silos and records take part; by default all of them.

    `Method.dp_event` must be the event of the sample that these members draw.
    """

    @property
    def participation_rule(self) -> Participation:
        """The rule by which persons take part in rounds; by default all of them always do."""
        return ALWAYS

    @property
    def common_sampling_rate(self) -> float | None:
        """The probability q in (0, 1] with which a user takes part in a round; None where users have their own rates.

        An aggregator that hides the sample needs it before the size of the federation is known.
        """
        return self.participation_rule.rate

    @property
    def mean_sampling(self) -> float:
        """The public mean of users' rates, for scales; by default that of all, and 1 where users have their own."""
        return self.common_sampling_rate or 1.0

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
            user: The user (n,) int64 of each record.
            place: The silo's place in the public order, counted from 0.
            population: The public size of the federation.
            stream: The silo's random stream.
            budget: The records' own ε (n,); None where they have none.
        """
        return np.ones(len(user), dtype=bool)


class UserWeights:
    """Role: how a user's weight of 1 is divided among the silos (docs/privacy.md, section 2); by default evenly."""

    @property
    def needs_counts(self) -> bool:
        """Whether n[s,u], each user's number of records in each silo, is needed for weights."""
        return False

    @property
    def weight_rule(self) -> WeightRule | None:
        """The rule by which private weighting finds the weights; None where they follow another one.

        "shares": w[s,u] = c[s,u]/Σ_s c[s,u], with c of `count_for_weights`. "primary_silo": 1 in a silo with most of
        u's records, and 0 elsewhere.
        """
        return None

    @property
    def allows_several_ids(self) -> bool:
        """Whether weights bound what several ids of one person add up to, so that a user is not always a person."""
        return False

    def count_for_weights(self, counts: np.ndarray) -> np.ndarray:
        """Return what a silo says of its counts where `needs_counts`: by default all of them.

        Args:
            counts: The numbers n[s,u] of one silo, (U,) int64.

        Returns:
            The numbers c[s,u], (U,) int64, above 0 where n[s,u] is.
        """
        return counts

    def user_weights(self, counts: np.ndarray | None, population: FederationSize) -> np.ndarray:
        """Return w[s,u], (S, U) float64, with Σ_s w[s,u] ≤ 1 for every user; by default all are 1/S.

        Without counts the weights are a function of public constants, so that every silo finds those of its users by
        itself. Otherwise the server computes them, and sends each silo its own.

        Args:
            counts: The `count_for_weights` of every silo, (S, U) int64; None unless `needs_counts`.
            population: The public size of the federation.
        """
        # Broadcast: S·U equal numbers take the memory of one.
        return np.broadcast_to(1.0 / population.silos, (population.silos, population.users))

    def check_weights(
        self, weights: np.ndarray, counts: np.ndarray, population: FederationSize
    ) -> str | None:
        """Check the weights that the server sends to a silo; a silo does not trust the server.

        A silo sees its own weights only, so it cannot check that a user's weights add to at most 1 over all silos.

        Args:
            weights: The silo's finite weights (U,) float64.
            counts: The `count_for_weights` of the silo, (U,) int64.
            population: The public size of the federation.

        Returns:
            What is wrong, as the end of a sentence ("is not …"); None if they are as the method defines them.
        """
        # NaN compares as False, so it is refused as well.
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
            What is wrong, as the end of a sentence ("is not …"); None if they are values that the state can take.
        """
        return None

    def split_sum(
        self, total: Tensor, state: MethodState, population: FederationSize
    ) -> tuple[Tensor, dict[str, np.ndarray]]:
        """Split a round's noisy sum into the update of the model and the next state.

        Args:
            total: The noisy sum (d + `extra_coordinates`,) float64.
            state: The state of this round.
            population: The public size of the federation.

        Returns:
            The sum of the updates (d,) float64, and the state of the next round.
        """
        return total, dict(state)


@dataclass(frozen=True, kw_only=True)
class UnitBudgets:
    """Role: privacy budgets of single units, each an ε of one user or one record (docs/privacy.md, section 9).

    A method that keeps such budgets returns an object of this class or of a subclass as `Method.budgets`. The defaults
    are those of a method whose units have none.

    Attributes:
        unit: The unit whose budgets the method needs, with its settings; None stands for nobody.
        adversary: The adversary against which budgets are met; None stands for each one that the run's budget is met
            against.
        max_rounds: The number of rounds that the budgets are met over, each released once; None sets no limit.
        planned_rounds: The number of rounds that the budgets are spread over; None where there are no budgets.
        retires_after: The number of rounds after which units leave one by one, as their budgets are used up; None: they
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
            event: The event that a round costs any unit at most, with the noise that is drawn.
            view: The adversary's view.
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
            view: The adversary's view.
            budgets: The budgets of the records of each silo (n_s,), or of all users ((U,), once); public.
            joined: The number of rounds that each silo took part in, (S,).
            rounds: The number of rounds that were run.
            delta: The δ of the accounting.
            accountant: The run's accountant.

        Returns:
            Entries {"budget", "units", "planned", "realized", ...}, the last two being ε at δ.
        """
        return ()

    def record_accounts(
        self, budget: np.ndarray | None, rounds: int, memory: np.ndarray | None
    ) -> Mapping[str, np.ndarray]:
        """Return the accounts of a silo's own records; they stay in the silo.

        Args:
            budget: The ε (n,) of the selected records; None where they have none.
            rounds: The number of rounds so far.
            memory: What the silo keeps (see `LocalContext.memory`).

        Returns:
            Arrays (n,) by name.
        """
        return {}

    def count_infeasible(self, budgets: np.ndarray) -> int | None:
        """Return how many of these budgets (n,) are too small for taking part; None where that is not known."""
        return None

    def event_at_sampling(self, sampling: float) -> Event:
        """Return what a round costs a record that is sampled with this probability (`Method.samples_by_budget`)."""
        raise NotImplementedError

    def sampling_curve(
        self, rounds: int, accountant: Accountant, points: int, least: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return sampling probabilities (points,) of a record, from `least` to 1, and ε (points,) after the rounds.

        Only methods with `Method.samples_by_budget` have such a curve.
        """
        raise NotImplementedError

    def parameters(self, budgets: np.ndarray) -> np.ndarray:
        """Return the sampling rate or part of the clip (U,), in [0, 1], of users with these budgets (U,)."""
        raise NotImplementedError


NO_BUDGETS = UnitBudgets()
"""No unit has a budget of its own."""


class PersonalBudgets(Settings, prefix="personal."):
    """Base of the settings that say how persons' budgets are met, a table [method.personal]; all of it is public.

    Attributes:
        by: "sampling": person u is sampled with their own q_u; "clip": their rows are clipped to c_u·C, c_u ≤ 1.
        rounds: The number T of rounds that the budgets are for.
        mean_sampling: A public guess of the mean of q_u, for the scale of a step; None by clip.
    """

    by: Literal["sampling", "clip"]
    rounds: int
    mean_sampling: float | None

    @classmethod
    def implementation(cls) -> type[PersonalBudgets]:
        """Return the class of a table [method.personal].

        Raises:
            SilodpError: `extension.missing`: the package of budgets is not installed.
        """
        from silodp.data.budgets import (
            load_budgets,  # a command about methods without budgets need not import it
        )

        return cast("type[PersonalBudgets]", load_budgets("personal"))

    @property
    def role(self) -> dict[str, Any]:
        """The attributes of `UnitBudgets`."""
        raise NotImplementedError

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions that the budgets rest on."""
        raise NotImplementedError

    def calibrate(
        self,
        costs: EventsBySurvivors,
        exact_event: Callable[[View], Event],
        budgets: np.ndarray | None,
        delta: float,
    ) -> UnitBudgets:
        """Return the budgets with `parameters`, a function of public constants alone: every party finds the same.

        Args:
            costs: What a round costs, with the noise that is drawn, by adversary.
            exact_event: Returns what a round costs a person who is always in it with the whole clip, against a view,
                with noise in real numbers (`Method.dp_event`).
            budgets: The budgets (U,), where they are known already.
            delta: The δ of the accounting.
        """
        raise NotImplementedError


# --- Users' weights -----------------------------------------------------------------------------------------------


def compute_user_weights(
    method: UserWeights, counts: np.ndarray | None, population: FederationSize
) -> np.ndarray:
    """Return a method's weights, checked: whoever wrote it, noise is sized for users whose weights add to at most 1.

    Args:
        method: The method, see `UserWeights.user_weights`.
        counts: The numbers of records (S, U) int64, or None.
        population: The public size of the federation.

    Returns:
        The weights w[s,u], (S, U) float64.

    Raises:
        SilodpError: the weights have another shape, one is negative or not finite, or a user's total is above 1.
    """
    weights = np.asarray(method.user_weights(counts, population), dtype=np.float64)
    if np.shape(weights) != (population.silos, population.users):
        raise SilodpError(
            f"{type(method).__name__}.user_weights returns shape {np.shape(weights)}: return one weight for each of "
            f"{population.silos} silos and {population.users} users.",
            code="argument.shape",
            field="weights",
        )
    if weights.strides[1] == 0:
        # The same for all users (`np.broadcast_to`): one column says all, and S·U numbers need not be made.
        return np.broadcast_to(validate_weights(weights[:, :1]), weights.shape)
    return validate_weights(weights)


def uniform_weight(silos: int) -> float:
    """Return w[s,u] = 1/S, which needs to know nothing about anyone.

    Source: ULDP-FL (Kato et al. 2024), Algorithm 3, line 16.
    """
    return float(validate_weights(np.full((silos, 2), 1.0 / silos))[0, 0])


def weigh_by_records(counts: np.ndarray) -> np.ndarray:
    """Return w[s,u] = n[s,u]/N[u], (S, U), 0 for a person without records.

    Args:
        counts: The numbers of records n[s,u], (S, U) int64.

    Source: ULDP-FL (Kato et al. 2024), Eq. 3, "ULDP-AVG-w".
    """
    # A person without records has the total 0 and only weights of 0: divide by 1 in place of 0.
    totals = counts.sum(axis=0)
    return validate_weights(counts / np.maximum(totals, 1))


def weigh_primary_silo(counts: np.ndarray) -> np.ndarray:
    """Return w[s,u] = 1 in the silo with most of u's records, the first of equals, else 0: (S, U) float64.

    Args:
        counts: The numbers of records n[s,u], (S, U) int64.
    """
    primary = np.zeros(counts.shape)
    # argmax takes the first of equals, so that every party finds the same primary silo.
    primary[counts.argmax(axis=0), np.arange(counts.shape[1])] = 1.0
    return validate_weights(np.where(counts > 0, primary, 0.0))


def validate_weights(weights: np.ndarray) -> np.ndarray:
    """Return the weights (S, U), scaled down where rounding pushed a person's total above 1.

    Soundness needs Σ_s w[s,u] ≤ 1 for every person u (docs/privacy.md, section 2), since noise is sized for that.

    Raises:
        SilodpError: a weight is negative or not finite, or a person's total is really above 1.
    """
    totals = weights.sum(axis=0)
    # 1e-9 is far above what summing S numbers rounds by, and is scaled away below: noise is sized for exactly 1.
    if (weights < 0).any() or (totals > 1 + 1e-9).any() or not np.isfinite(weights).all():
        # The message names the user with the largest total; a total that is no number counts as the largest.
        user = int(np.argmax(np.where(np.isfinite(totals), totals, np.inf)))
        raise SilodpError(
            f"weights of user {user} add to {totals[user]} over the silos: scale them to add to at most 1, "
            "since noise is sized for that.",
            code="argument.value",
            field="weights",
        )
    scaled: np.ndarray = weights / np.maximum(totals, 1.0)
    return scaled
