"""The base class of methods: who is protected, what a silo computes in a round, and its event for each adversary.

A method is a frozen dataclass of public constants with pure functions of them. Noise and accounting read the same
fields of the same object, so they cannot drift apart. A new method is one file: a subclass of `Method` that defines the
five members that begin the class. Every other member has a default, and is overridden where the method needs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from silodp.accounting.accountant import Accountant
from silodp.accounting.budget_curve import EpsilonCurve
from silodp.accounting.events import Event, NonPrivate
from silodp.accounting.guarantee import Adversary, Unit, View
from silodp.data.public import PublicData
from silodp.errors import SilodpError, check_fields, check_momentum, check_positive, check_type
from silodp.mechanisms.clipping import Bounds, Update
from silodp.mechanisms.noise import Randomness
from silodp.methods.server_optimizer import ServerOptimizer, ServerSgd

if TYPE_CHECKING:
    from torch import Tensor

    from silodp.training.task import Task


OMIT_NONE: Mapping[str, bool] = {"omit_none": True}
"""Metadata of a method's field that its text leaves out where it is None."""


@dataclass(frozen=True)
class Population:
    """The public size of a federation.

    Attributes:
        silos: S.
        users: U, the length of the public list of ids.
        shares_for: the number of silos that noise shares are sized for; None: all.
        budgets: (U,) the users' own ε, as public as the list of ids; None where nobody has one.
    """

    silos: int
    users: int
    shares_for: int | None = None
    budgets: tuple[float, ...] | None = field(default=None, repr=False)

    @property
    def m(self) -> int:
        """The smallest number of silos whose answers may be added up."""
        return self.silos if self.shares_for is None else self.shares_for


ALL_NOISE_KNOWN = NonPrivate("no silo is left whose noise the colluding silos do not know")
"""The event where `View.unknown_shares` is below 1."""

MethodState = Mapping[str, np.ndarray]
"""A method's public arrays by name; the server keeps them, and sends them with each round's request."""


@dataclass(frozen=True)
class LocalContext:
    """All that a silo's part of one round depends on.

    Attributes:
        task: the model and its loss.
        params: (d,), the global model.
        x, y: (n, ...), the records that were selected.
        user: (n,) int64, whose record each is.
        weights: (U,) float64, this silo's weight of each user, 0 for those not sampled; 1 where a method has none.
        population: the public size of the federation.
        randomness: this silo's streams for this round.
        silo: its place in the public order.
        budget: (n,) float64, the ε of each record; None where records have none.
        memory: what this silo's last `LocallyNoisedUpdate` asked to be kept; None in the first round.
        round: counted from 0.
        state: the method's state in this round (see `Method.initial_state`).
        separate: whether every unit is computed alone (see `Method.can_separate`).
    """

    task: Task
    params: Tensor
    x: Tensor
    y: Tensor
    user: Tensor
    weights: Tensor
    population: Population
    randomness: Randomness
    silo: int = 0
    budget: Tensor | None = None
    memory: np.ndarray | None = None
    round: int = 0
    state: MethodState = field(default_factory=dict)
    separate: bool = False


EventsBySurvivors = Mapping[Adversary, Sequence[tuple[View, Event]]]
"""For every number of silos that may answer a round: its view, and what it costs with the noise that is drawn."""


@dataclass(frozen=True)
class LinkageCase:
    """One way in which the records of a person are not filed under one id of their own.

    Attributes:
        case: for people.
        event: what a round costs such a person.
        is_estimate: whether the event is believed, and computed for many cases, but not proven to cover them all.
    """

    case: str
    event: Event
    is_estimate: bool = False


def supports_separate(method: type[Method]) -> bool:
    """Return whether a class of methods can compute every unit alone.

    A class that overrides `local_update` has to state it anew: what it inherits is about another computation.
    """
    for cls in method.__mro__:
        if "can_separate" in vars(cls):
            return bool(vars(cls)["can_separate"])
        if "local_update" in vars(cls):
            break
    return False


@dataclass(frozen=True, repr=False)
class Method(ABC):
    """Base class of methods.

    Attributes:
        server_optimizer: takes the server's steps; None: `ServerSgd` with `server_momentum`.
    """

    server_optimizer: ServerOptimizer | None = field(default=None, kw_only=True, metadata=OMIT_NONE)

    can_separate: ClassVar[bool] = False
    """Whether `local_update` computes the row of every unit alone where `LocalContext.separate`.

    Then shapes, code paths and random numbers of a row depend on that unit's records alone, and so do its bits.
    """

    epsilon_ignores: ClassVar[Mapping[str, Any]] = dict(
        clip=1.0, expected_batch_size=1.0, local_learning_rate=1.0
    )
    """Fields on which ε does not depend, each with a value for a question about ε that leaves it out.

    Where `samples_by_budget`, also those that only determine sampling probabilities: a question names one. Names that
    a class has no field of mean nothing.
    """

    # --- What every method defines ---

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in a configuration, a ledger and a guarantee."""

    @property
    @abstractmethod
    def unit(self) -> Unit | None:
        """Whom it protects: "user", "record", or None for nobody."""

    @abstractmethod
    def local_update(self, context: LocalContext) -> Update:
        """Train on a silo's records, and clip.

        Returns:
            clipped rows of d + `extra_coordinates` numbers each (`ClippedRowStream`), which the aggregator weights,
            sums and adds this silo's share of noise to; the same in several steps (`MultiStepUpdate`); or an update
            whose noise is in it already (`LocallyNoisedUpdate`).
        """

    @abstractmethod
    def bounds(self, population: Population) -> Bounds | None:
        """Return what holds for the rows of `local_update` in every round.

        Clip, sensitivity and noise are constants of a run. A method whose clip changes scales its rows to a unit clip.

        Args:
            population: the public numbers of silos and users.

        Returns:
            Clip C, sensitivity, noise multiplier σ and the largest sum; None where silos add the noise themselves.
        """

    @abstractmethod
    def dp_event(self, view: View) -> Event:
        """Return the privacy event of one round against one adversary, all coordinates together.

        Where units have their own budgets, it is what the round costs any of them at most.

        Args:
            view: how many noise shares are in the sum, how many of them the adversary knows, and whether the adversary
                knows the sample.

        Returns:
            The event, with noise in units of how far emptying one unit moves what the adversary sees; or
            `NonPrivate(reason)` where nothing holds.
        """

    # --- The server's step ---

    @property
    def server_learning_rate(self) -> float:
        """η_g, above 0."""
        return 1.0

    @property
    def server_momentum(self) -> float:
        """Heavy-ball momentum of the default server optimizer, in [0, 1)."""
        return 0.0

    def server_scale(self, population: Population) -> float:
        """Return the public constant that makes the sum over silos a mean: by default 1/S."""
        return 1.0 / population.silos

    def make_server_optimizer(self) -> ServerOptimizer:
        """Return what takes the server's steps: `server_optimizer`, or the default one."""
        return self.server_optimizer or ServerSgd(self.server_momentum)

    # --- What a run must fulfil, and what its guarantee says ---

    @property
    def needs_counts(self) -> bool:
        """Whether n[s,u], each user's number of records in each silo, is needed for weights."""
        return False

    @property
    def weights_are_shares(self) -> bool:
        """Whether w[s,u] = c[s,u]/Σ_s c[s,u], with c of `count_for_weights`: what private weighting computes."""
        return False

    @property
    def clips_records(self) -> bool:
        """Whether single records' gradients are clipped, so that the loss must be a mean over records."""
        return False

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the guarantee rests on beyond what every method's does, one clause each."""
        return ()

    @property
    def paper_claim(self) -> Method | None:
        """The same method with a `dp_event` that its paper claims without a proof that holds; None: no such claim.

        The last of its `assumptions` says what is wrong.
        """
        return None

    def check(self, data: PublicData, rounds: int, delta: float) -> None:  # noqa: B027  by default nothing
        """Refuse, before anything runs, a federation that the method cannot train on, or rounds and δ not its own.

        Raises:
            SilodpError: it cannot.
        """

    # --- Who and what takes part ---

    @property
    def samples_users(self) -> bool:
        """Whether some user's `sampling_rates` are below 1, so that a sample of users is drawn in every round."""
        return False

    def sampling_rates(self, population: Population) -> float | np.ndarray:
        """Return the probability with which a user takes part in a round, by one coin for all silos.

        It is a function of public constants: one number for all users, or (U,) one each.
        """
        return 1.0

    @property
    def samples_silos(self) -> bool:
        """Whether `sample_silos` draws silos in every round."""
        return False

    def sample_silos(self, population: Population, stream: np.random.Generator) -> np.ndarray | None:
        """Draw which silos take part in a round: (S,) bool; None: all."""
        return None

    def select_records(
        self,
        user: np.ndarray,
        place: int,
        population: Population,
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

    # --- Weights of users ---

    def count_for_weights(self, counts: np.ndarray) -> np.ndarray:
        """Return what a silo says of its counts where `needs_counts`: by default all of them.

        Args:
            counts: (U,) int64, n[s,u] of one silo.

        Returns:
            c[s,u], (U,) int64, above 0 where n[s,u] is.
        """
        return counts

    def user_weights(self, counts: np.ndarray | None, population: Population) -> np.ndarray:
        """Return w[s,u], (S, U) float64, with Σ_s w[s,u] ≤ 1 for every user; by default all are 1/S.

        Without counts the weights are a function of public constants, so that every silo finds those of its users by
        itself. Otherwise the server computes them, and sends each silo its own.

        Args:
            counts: (S, U) int64, `count_for_weights` of every silo; None unless `needs_counts`.
            population: the public size of the federation.
        """
        return np.broadcast_to(1.0 / population.silos, (population.silos, population.users))

    def weights_problem(self, weights: np.ndarray, counts: np.ndarray) -> str | None:
        """Check the weights that the server gives to a silo, which takes the server for an adversary.

        A silo sees its own weights only; that they add to at most 1 over all silos it cannot check.

        Args:
            weights: (U,) float64, finite.
            counts: (U,) int64, `count_for_weights` of the silo.

        Returns:
            what is wrong, as the end of a sentence ("is not …"); None if they are as the method defines them.
        """
        within = (weights >= 0) & (weights <= 1)
        return None if within.all() else "is not between 0 and 1"

    # --- State that changes from round to round ---

    extra_coordinates: ClassVar[int] = 0
    """How many numbers each row carries behind the d of the model, under the same clip, noise and event."""

    def sum_size(self, size: int) -> int:
        """Return how many numbers silos add up, for a model of d = `size` parameters."""
        return size + self.extra_coordinates

    def initial_state(self, population: Population) -> dict[str, np.ndarray]:
        """Return the state before the first round: public arrays by name, none by default.

        Names, types and shapes stay the same in all rounds, and silos check them. The state is a function of public
        constants and of noisy sums, so that it costs no ε beyond `dp_event`.
        """
        return {}

    def state_problem(self, state: MethodState, population: Population) -> str | None:
        """Check the values that the server sends, of the right types and shapes and finite, on the silo's side.

        Returns:
            what is wrong, as the end of a sentence ("is not …"); None if they are values that the state can take.
        """
        return None

    def read_sum(
        self, total: Tensor, state: MethodState, population: Population
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

    # --- Privacy budgets of single units ---

    budgets_of: ClassVar[Unit | None] = None
    """Whose own budgets a method of this class can keep; None: nobody's."""

    samples_by_budget: ClassVar[bool] = False
    """Whether every record is sampled with a probability that follows from its own budget."""

    @property
    def budget_unit(self) -> Unit | None:
        """Whose own budgets this method needs, with these settings."""
        return self.budgets_of

    @property
    def budget_adversary(self) -> Adversary | None:
        """Whom the units' own budgets are met against; None: each adversary that the run's budget is met against."""
        return None

    @property
    def max_rounds(self) -> int | None:
        """The number of rounds that the units' own budgets are met over, each released once; None: no limit."""
        return None

    @property
    def budgeted_rounds(self) -> int | None:
        """The number of rounds that units' own budgets are spread over; None where there are no such budgets."""
        return self.max_rounds

    @property
    def retires_after(self) -> int | None:
        """The number of rounds after which units leave one by one, as their budgets are used up; None: they do not."""
        return None

    def calibrate(self, costs: EventsBySurvivors, population: Population, delta: float) -> Self:
        """Return the method with what the units' own budgets allow, found from what a round costs.

        Args:
            costs: by adversary, with the noise that is drawn.
            population: with the budgets.
            delta: δ of the accounting.
        """
        return self

    def event_for_largest_budget(self, event: Event, view: View) -> Event:
        """Return what a round costs the unit with the largest budget, if it costs any unit `event` at most."""
        return event

    def budget_report(
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
        """Return a silo's own records' accounts, for its own people alone.

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
        """Return what a round costs a record that is sampled with this probability, where `samples_by_budget`."""
        raise NotImplementedError

    def sampling_curve(self, rounds: int, accountant: Accountant, points: int, least: float) -> EpsilonCurve:
        """Return ε after `rounds` rounds against a record's sampling probability, where `samples_by_budget`."""
        raise NotImplementedError

    def without_budgets(self) -> Self:
        """Return the method that treats all units alike."""
        return self

    def linkage_cases(self, event: Event, view: View) -> tuple[LinkageCase, ...]:
        """Return what a round costs a person whom silos do not recognize as one, or confuse with another.

        Args:
            event: what the round costs a person who is recognized.
            view: of the adversary.
        """
        return ()

    # --- Not to be overridden ---

    def __post_init__(self) -> None:
        """Check the settings of the server's step; subclasses call it from theirs."""
        check_fields(self, server_learning_rate=check_positive, server_momentum=check_momentum)
        if self.server_optimizer is None:
            return
        check_type("server_optimizer", self.server_optimizer, ServerOptimizer, "ServerAdam()")
        if self.server_momentum != 0:
            raise SilodpError(
                f"server_momentum = {self.server_momentum} and server_optimizer: set the momentum in one of them.",
                code="argument.conflict",
                field="server_momentum",
            )

    def __repr__(self) -> str:
        # Ledgers, guarantees and fingerprints hold this text: settings of later versions are left out where unused.
        named = sorted((f for f in fields(self) if f.repr), key=lambda f: bool(f.metadata))
        shown = [f.name for f in named if not f.metadata or getattr(self, f.name) is not None]
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"
