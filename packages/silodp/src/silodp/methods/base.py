"""The base class of methods: who is protected, what a silo computes in a round, and its event for each adversary.

A method is a frozen dataclass of public constants with pure functions of them. Noise and accounting read the same
fields of the same object, so they cannot drift apart. A new method is one file: a subclass of `Method` that defines the
five members that begin the class. Every other member has a default, and is overridden where the method needs it; most
of them belong to a role (`silodp.methods.roles`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from silodp.accounting.events import Event, NonPrivate
from silodp.accounting.views import Unit, View
from silodp.assumption import Assumption
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.methods import roles
from silodp.methods.server_optimizer import Move, ServerOptimizer, ServerSgd
from silodp.settings import Momentum, Positive, Settings, check_value
from silodp.training import sgd

if TYPE_CHECKING:
    from torch import Tensor

    from silodp.mechanisms.clipping import Bounds, Update
    from silodp.mechanisms.noise import Randomness
    from silodp.training.task import Task


OMIT_NONE: Mapping[str, bool] = {"omit_none": True}
"""Metadata of a field that a method's `repr` leaves out where its value is None."""


ALL_NOISE_KNOWN = NonPrivate("no silo is left whose noise the colluding silos do not know")
"""The event where `View.unknown_shares` is below 1."""
NO_NOISE = NonPrivate("noise_multiplier is 0")


def conflict_error(problem: str, field: str) -> SilodpError:
    """Return the error about a setting that excludes another one."""
    return SilodpError(problem, code="argument.conflict", field=field)


def count_honest_shares(view: View) -> int:
    """Return the most shares in a round's sum that come from silos which do not collude with the adversary."""
    # Colluding silos may have dropped out of the sum, and still see the models.
    honest = view.silos - view.colluding if view.adversary == "silo" else view.shares_in_sum
    return min(honest, view.shares_in_sum)


REFUSAL_LOG_CHANCE = math.log(1e19)
"""x: a bound on what honest silos send (`longest_sums`, `limits.bound_noise_norm`) fails with probability e^(-x).

A check refuses honest sums with probability below 1e-18: below 1e-9 in a run of S silos and T rounds, S·T ≤ 10⁹.
"""


@dataclass(frozen=True)
class LocalContext:
    """All that a silo's part of one round depends on.

    Attributes:
        task: The model and its loss.
        params: The global model (d,).
        x, y: The records (n, ...) that were selected.
        user: The user (n,) int64 of each record.
        weights: This silo's weight (U,) float64 of each user, 0 for those not sampled; 1 where a method has none.
        population: The public size of the federation.
        randomness: The silo's random streams for this round.
        silo: The silo's place in the public order, counted from 0.
        budget: The ε (n,) float64 of each record; None where records have none.
        memory: What this silo's last `LocallyNoisedUpdate` asked to be kept; None in the first round.
        round: The number of the round, counted from 0.
        state: The method's state in this round (see `PublicState.initial_state`).
        isolate_units: Whether every unit is computed alone (see `Method.can_isolate_units`).
    """

    task: Task
    params: Tensor
    x: Tensor
    y: Tensor
    user: Tensor
    weights: Tensor
    population: roles.FederationSize
    randomness: Randomness
    silo: int = 0
    budget: Tensor | None = None
    memory: np.ndarray | None = None
    round: int = 0
    state: roles.MethodState = field(default_factory=dict)
    isolate_units: bool = False

    def make_record_gradients(self, steps: int) -> sgd.RecordGradients:
        """Return the gradients of single records, for so many batches of this silo's records."""
        dropout = self.randomness.torch("dropout")
        return sgd.RecordGradients(
            self.task, self.x, self.y, steps, dropout, isolate_units=self.isolate_units
        )


@dataclass(frozen=True)
class LinkageCase:
    """One way in which the records of a person are not filed under one id of their own.

    Attributes:
        case: The case in words for users.
        event: The event that a round costs such a person.
        is_estimate: Whether the event is believed, and computed for many cases, but not proven to cover them all.
    """

    case: str
    event: Event
    is_estimate: bool = False


def supports(method: type[Method], ability: Literal["can_isolate_units", "can_split"]) -> bool:
    """Return whether `local_update` of a class of methods has an ability.

    An inherited one counts only if `local_update` is inherited with it: the statement is about that code.
    """
    for cls in method.__mro__:
        if ability in vars(cls):
            return bool(vars(cls)[ability])
        if "local_update" in vars(cls):
            break
    return False


@dataclass(frozen=True, repr=False)
class Method(Settings, roles.ServerStep, roles.Sampling, roles.UserWeights, roles.PublicState, ABC):
    """Base class of methods: the core, and the roles of `silodp.methods.roles` with their defaults.

    Attributes:
        server_optimizer: The optimizer of the server's steps; None stands for `ServerSgd` with `server_momentum`.
    """

    server_optimizer: ServerOptimizer | None = field(default=None, kw_only=True, metadata=OMIT_NONE)

    can_isolate_units: ClassVar[bool] = False
    """Whether `local_update` computes the row of every unit alone where `LocalContext.isolate_units`.

    Then shapes and code paths of a row depend on that unit's records alone, and so do its bits for given random
    numbers, which follow from a secret seed and the unit's number.
    """

    can_split: ClassVar[bool] = False
    """Whether `local_update` returns weighted rows of persons (`ClippedRowStream`), and given the records of some
    persons alone, the rows of these."""

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
        """The unit that the method protects: "user", "record", or None for nobody."""

    @abstractmethod
    def local_update(self, context: LocalContext) -> Update:
        """Train on a silo's records, and clip.

        Returns:
            Clipped rows of d + `extra_coordinates` numbers each (`ClippedRowStream`), which the aggregator weights,
            sums and adds this silo's share of noise to; the same in several steps (`MultiStepUpdate`); or an update
            whose noise is in it already (`LocallyNoisedUpdate`).
        """

    @abstractmethod
    def bounds(self, population: roles.FederationSize) -> Bounds | None:
        """Return what holds for the rows of `local_update` in every round.

        Clip, sensitivity and noise are constants of a run. A method whose clip changes scales its rows to a unit clip.

        Args:
            population: The public numbers of silos and users.

        Returns:
            Clip C, sensitivity, noise multiplier σ and the largest sum; None where silos add the noise themselves.
        """

    @abstractmethod
    def dp_event(self, view: View) -> Event:
        """Return the privacy event of one round against one adversary, all coordinates together.

        Where units have their own budgets, it is what the round costs any of them at most. It follows from the view
        and the settings alone; where `View.round` is not read, the event is taken for that of every round.

        Args:
            view: The adversary's view: how many noise shares are in the sum, how many of them the adversary knows, and
                whether the adversary knows the sample.

        Returns:
            The event, with noise in units of how far emptying one unit moves what the adversary sees; or
            `NonPrivate(reason)` where nothing holds.
        """

    def make_server_optimizer(self) -> ServerOptimizer:
        """Return what takes the server's steps: `server_optimizer`, or the default one."""
        return self.server_optimizer or ServerSgd(self.server_momentum)

    def server_move(self, population: roles.FederationSize, round_: int, rounds: int) -> Move:
        """Return what is public of a round and its noisy sum, if all silos answer."""
        bounds = self.bounds(population)
        noise = (
            None
            if bounds is None
            else bounds.sensitivity * bounds.noise_multiplier * math.sqrt(population.silos)
        )
        return Move(self.server_learning_rate, self.server_scale(population), noise, round_, rounds)

    def longest_sums(
        self, population: roles.FederationSize, record_counts: Sequence[int] | None
    ) -> tuple[float, float] | None:
        """Return the 2-norms that honest silos' rows, added up, cannot exceed: the server refuses longer sums.

        Args:
            population: The public numbers of silos and users.
            record_counts: (S,) training records of each silo; None where they are private.

        Returns:
            Those of one silo and of all silos, by default as `bounds` says; infinity where the number of rows is not
            public. None where silos add the noise themselves.
        """
        bounds = self.bounds(population)
        return None if bounds is None else (bounds.total / bounds.silos_sharing_weight, bounds.total)

    # --- What a run must fulfil, and what its guarantee says ---

    releases_model: ClassVar[bool] = True
    """Whether rounds lead to a model; else what a run releases is in `describe_sum`."""

    @property
    def plugin_parts(self) -> tuple[object, ...]:
        """Objects whose code computes what is released, besides the method: the guarantee names strangers' code."""
        return ()

    def describe_sum(self, total: Tensor, population: roles.FederationSize) -> dict[str, Any]:
        """Return what a row of metrics.jsonl keeps of a round's noisy sum, JSON-ready; by default nothing.

        It is post-processing, and costs no privacy.

        Args:
            total: The noisy sum of the round, (`sum_size`,) float64.
            population: The public size of the federation.
        """
        return {}

    def count_classes(self, classes: int) -> tuple[Method, float] | None:
        """Return the method with a table of labels, and how many records of a person in a silo count in full.

        An attack gives each made-up person a class of their own. Clip per record, weights and noise stay as they are.

        Args:
            classes: The number of classes.

        Returns:
            None where the sums of the method are no counts.
        """
        return None

    @property
    def noise_setting(self) -> float | tuple[float, ...] | None:
        """The value of the field `noise_multiplier`, one for each client where they differ.

        Without such a field it is 0 where nobody is protected, and else None: the noise has another name, or none.
        """
        without = 0.0 if self.unit is None else None
        setting: float | tuple[float, ...] | None = vars(self).get("noise_multiplier", without)
        return setting

    @property
    def clips_records(self) -> bool:
        """Whether single records' gradients are clipped, so that the loss must be a mean over records."""
        return False

    @property
    def assumptions(self) -> tuple[Assumption | str, ...]:
        """The assumptions of the guarantee beyond those of every method; of a plain clause people answer for it."""
        return ()

    @property
    def paper_claim(self) -> Method | None:
        """The same method with a `dp_event` that its paper claims without a proof that holds; None: no such claim.

        The last of its `assumptions` says what is wrong.
        """
        return None

    def check(self, data: PublicData, rounds: int, delta: float) -> None:
        """Refuse, before anything runs, a federation that the method cannot train on, or rounds and δ not its own.

        Raises:
            SilodpError: it cannot.
        """

    def linkage_cases(self, event: Event, view: View) -> tuple[LinkageCase, ...]:
        """Return what a round costs a person whom silos do not recognize as one, or confuse with another.

        Args:
            event: The event of a person who is recognized.
            view: The adversary's view.
        """
        return ()

    # --- Privacy budgets of single units ---

    budgets_of: ClassVar[Unit | None] = None
    """Whose own budgets a method of this class can keep; None: nobody's."""

    samples_by_budget: ClassVar[bool] = False
    """Whether every record is sampled with a probability that follows from its own budget."""

    @property
    def budgets(self) -> roles.UnitBudgets:
        """The budgets of single units that the method keeps, with these settings; by default none."""
        return roles.NO_BUDGETS

    def calibrate(
        self, costs: roles.EventsBySurvivors, population: roles.FederationSize, delta: float
    ) -> Self:
        """Return the method with what the units' own budgets allow, found from what a round costs.

        It is called where `budgets.max_rounds` is a number.

        Args:
            costs: What a round costs, with the noise that is drawn, by adversary.
            population: The public size of the federation, with the budgets.
            delta: The δ of the accounting.
        """
        return self

    def without_budgets(self) -> Self:
        """Return the method that treats all units alike."""
        return self

    # --- Not to be overridden ---

    def __post_init__(self) -> None:
        """Check all settings, and those of the server's step also where they are no fields."""
        super().__post_init__()
        check_value("server_learning_rate", self.server_learning_rate, Positive)
        check_value("server_momentum", self.server_momentum, Momentum)
        if self.server_optimizer is not None and self.server_momentum != 0:
            raise conflict_error(
                f"server_momentum = {self.server_momentum} and server_optimizer: set the momentum in one of them.",
                "server_momentum",
            )

    def __repr__(self) -> str:
        # Ledgers, guarantees and fingerprints hold this text: settings of later versions are left out where unused.
        # Stable: fields keep their order, and those that are left out where unused come last.
        named = sorted((f for f in fields(self) if f.repr), key=lambda f: bool(f.metadata))
        shown = [f.name for f in named if not f.metadata or getattr(self, f.name) is not None]
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


@dataclass(frozen=True, repr=False)
class SeriesMethod(Method):
    """Base of the methods of additional series: a request carries the model, and how many rounds led to it.

    Attributes:
        unit: The unit that the run protects.
    """

    unit: Unit | None = "user"

    ROUNDS: ClassVar[str] = "rounds"
    releases_model: ClassVar[bool] = False

    def initial_state(self, population: roles.FederationSize) -> dict[str, np.ndarray]:
        """Return what a request carries beside the model: the number of rounds that led to it."""
        return {self.ROUNDS: np.zeros(1, np.int64)}
