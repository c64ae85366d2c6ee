"""rPDP-FL: every record is sampled as often as its own privacy budget allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, get_args

import numpy as np

from silodp.accounting.accountant import Accountant, find_accountant
from silodp.accounting.budget_curve import ChargingMode, EpsilonCurve, compute_two_stage_curve
from silodp.accounting.events import Event
from silodp.accounting.guarantee import TECHNICAL, Unit, View
from silodp.data.public import PublicData
from silodp.errors import (
    SilodpError,
    check_choice,
    check_delta,
    check_epsilon,
    check_probability,
    check_whole,
)
from silodp.mechanisms.clipping import LocallyNoisedUpdate
from silodp.mechanisms.sampling import draw_poisson_sample
from silodp.methods.base import LocalContext, Method, Population
from silodp.methods.dp_sgd import DpSgd, Optimizer
from silodp.methods.rpdp.sampling_rates import (
    ZERO_COST,
    Calibration,
    SamplingRates,
    check_records,
    require_record_budgets,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class TwoStageSampling(Method):
    """What rPDP-FL and its baselines share: a silo joins a round with probability λ, then runs τ steps of DP-SGD.

    In every step each record is drawn with the probability q_j that its ε_j allows (rPDP-FL, Algorithm 3, corrected
    as in docs/privacy.md, section 9). Who joins a round, every budget, every q_j and the round in which a record
    retires are public; which records are drawn is not.

    Attributes:
        noise_multiplier: σ; every step's noise is N(0, (σC)²).
        clip: C, of every record's gradient.
        client_sampling: λ, a coin per silo and round; a round that nobody joins is a round.
        local_steps: τ.
        rounds: T, what q_j is chosen for; in further rounds records retire as their budgets are used up.
        delta: the run's δ.
        expected_batch_size: a public constant that divides every gradient sum, never the number of records drawn.
        local_learning_rate, optimizer: of the noisy mean gradient; the optimizer's state is fresh in every round.
        calibration: "exact" (never above the budget, met up to a grid), "binary-search" (the same, one record after
            the other), or "scf", the paper's fitted curve, which overspends: then no record retires early, and what
            its q_j really costs is reported.
        accountant: by which q_j is chosen.
        ledger: the records' one book. "planned" charges every round what it costs on average over λ; "realized" charges
            the rounds that the silo joined, in full, and lets records retire by those.
    """

    noise_multiplier: float
    clip: float
    local_steps: int
    rounds: int
    delta: float
    expected_batch_size: float
    local_learning_rate: float
    client_sampling: float = 1.0
    optimizer: Optimizer = "sgd"
    calibration: Calibration = "exact"
    accountant: Accountant | str = "rdp"
    ledger: ChargingMode = "planned"
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0

    name: str = field(default="", init=False)
    unit: Unit | None = field(default="record", init=False)
    needs_counts: bool = field(default=False, init=False)
    clips_records: bool = field(default=True, init=False, repr=False)

    can_separate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._dp_sgd  # noqa: B018  its constants are checked as it is made
        if self.noise_multiplier == 0:
            raise SilodpError(
                "noise_multiplier = 0: no budget can be kept without noise; set a number > 0.",
                code="argument.value",
                field="noise_multiplier",
            )
        check_probability("client_sampling", self.client_sampling)
        check_whole("rounds", self.rounds, what="rounds")
        check_delta("delta", self.delta)
        super().__post_init__()
        find_accountant(self.accountant)
        check_choice("calibration", self.calibration, get_args(Calibration))
        check_choice("ledger", self.ledger, get_args(ChargingMode))

    @property
    def largest_epsilon(self) -> float:
        """The largest ε that any record is protected at; a public constant."""
        raise NotImplementedError

    def cap_budgets(self, budget: np.ndarray) -> np.ndarray:
        """Return the ε, (n,), that records with these budgets are protected at; 0 for those that take no part."""
        raise NotImplementedError

    @property
    def accounts(self) -> SamplingRates:
        """How budgets become sampling probabilities and rounds."""
        return SamplingRates(
            self.noise_multiplier,
            self.local_steps,
            self.client_sampling,
            self.rounds,
            self.delta,
            self.largest_epsilon,
            self.calibration,
            find_accountant(self.accountant),
            self.ledger,
        )

    @property
    def _dp_sgd(self) -> DpSgd:
        return DpSgd.of(self)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What is public besides the method's constants."""
        public = (
            "how many records each silo has, their privacy budgets, and which silos join a round are public, and say "
            "nothing of what is in a record"
        )
        found = [public, "a record lies in one silo only, and copies of it are further records"]
        if self.client_sampling < 1 and self.ledger == "planned":
            found.append(
                "the server draws which silos join a round by chance alone; the ledgers and limits of silos count on "
                "this, too (ledger = 'realized' does not)"
            )
        if self.calibration == "scf":
            found.append(
                TECHNICAL
                + "sampling probabilities come from a fitted curve (scf) and may cost records more than they asked "
                "for; ε is what the largest of them costs"
            )
        return tuple(found)

    def check(self, data: PublicData, rounds: int, delta: float) -> None:
        """Check that every record has a budget, every silo a batch, and that δ is the one q_j is chosen for."""
        check_records(self.name, data, self.delta, delta, self.expected_batch_size)
        if self.accounts.most == 0:
            raise SilodpError(
                f"{self.name}: at noise_multiplier = {self.noise_multiplier:g} even the largest ε = "
                f"{self.largest_epsilon:g} is spent before {self.rounds} round{'s are' if self.rounds > 1 else ' is'} "
                "over, however seldom a record is drawn: raise the noise.",
                code="budget.out_of_reach",
                field="noise_multiplier",
            )

    def select_records(
        self,
        user: np.ndarray,
        place: int,
        population: Population,
        stream: np.random.Generator,
        budget: np.ndarray | None = None,
    ) -> np.ndarray:
        """Select every record that is protected at all."""
        return self.cap_budgets(require_record_budgets(self.name, budget)) > 0

    @property
    def samples_silos(self) -> bool:
        """Whether λ is below 1."""
        return self.client_sampling != 1

    def sample_silos(self, population: Population, stream: np.random.Generator) -> np.ndarray | None:
        """Toss one coin per silo."""
        if self.client_sampling == 1:
            return None
        return draw_poisson_sample(population.silos, self.client_sampling, stream)

    def local_update(self, context: LocalContext) -> LocallyNoisedUpdate:
        """Run DP-SGD, each record drawn with its own probability until it retires; the noise is inside.

        Asked again for the same round (under secure aggregation, when others failed to answer), the silo hands out the
        same noisy update: a second one would be a second charge.
        """
        import torch

        kept = None if context.memory is None else _Kept.of(context.memory)
        if kept is not None and kept.round == context.round:
            return LocallyNoisedUpdate(torch.from_numpy(kept.update), 0, context.memory)
        joined = 0 if kept is None else kept.joined
        q, last = self.accounts.rates_and_retirement(
            self.cap_budgets(require_record_budgets(self.name, context.budget))
        )
        used = context.round if self.ledger == "planned" else joined
        finished = self._dp_sgd.train(context, np.where(used < last, q, 0.0))
        return replace(finished, memory=_Kept(context.round, joined + 1, finished.value.numpy()).array())

    def bounds(self, population: Population) -> None:
        """Return None: silos add the noise themselves."""

    def server_scale(self, population: Population) -> float:
        """Return 1/(λ·S), by the expected, public number of silos, never by those that joined."""
        return 1.0 / (self.client_sampling * population.silos)

    def dp_event(self, view: View) -> Event:
        """Return the event of a record with the largest budget, which costs most; it is the same against everyone.

        Who joined a round everyone knows, so the coin λ is one whose fall is seen (docs/privacy.md, section 9).
        """
        accounts = self.accounts
        if view.round >= accounts.last:
            return ZERO_COST
        return accounts.event(accounts.most, realized=self.ledger == "realized")

    # --- Budgets of single records ---

    budgets_of: ClassVar[Unit | None] = "record"
    samples_by_budget: ClassVar[bool] = True

    @property
    def budgeted_rounds(self) -> int | None:
        """T."""
        return self.rounds

    @property
    def retires_after(self) -> int | None:
        """T; with "scf" all records retire together then."""
        return self.rounds

    def count_infeasible(self, budgets: np.ndarray) -> int | None:
        """Return how many of the budgets (n,) get no sampling probability, those left out on purpose aside."""
        asked = self.cap_budgets(budgets)
        return int((self.accounts.rates_and_retirement(asked[asked > 0])[0] == 0).sum())

    def event_at_sampling(self, sampling: float) -> Event:
        """Return what a round costs a record that is drawn with this probability, against everyone.

        With ledger = "realized" a round is charged as one that the silo has joined.
        """
        check_probability("record_sampling", sampling)
        return self.accounts.event(sampling, realized=self.ledger == "realized")

    def sampling_curve(self, rounds: int, accountant: Accountant, points: int, least: float) -> EpsilonCurve:
        """Return ε against q; by Rényi orders at more points than asked for, since they cost little."""
        run = (self.noise_multiplier, self.local_steps, self.client_sampling, rounds, self.delta)
        return compute_two_stage_curve(*run, accountant, points=points, least=least)

    def budget_report(
        self,
        view: View,
        budgets: Sequence[np.ndarray],
        joined: np.ndarray,
        rounds: int,
        delta: float,
        accountant: Accountant,
    ) -> tuple[dict[str, Any], ...]:
        """Return one entry for each budget, by both ways to charge; records retire by `ledger`."""
        return self.accounts.report(self.cap_budgets, budgets, joined, rounds, accountant)

    def record_accounts(
        self, budget: np.ndarray | None, rounds: int, memory: np.ndarray | None
    ) -> Mapping[str, np.ndarray]:
        """Return "asked", "protected" (the ε that holds for it), "spent" (so far), "sampling" (q; 0: too small)."""
        if budget is None:
            return {}
        joined = 0 if memory is None else _Kept.of(memory).joined
        protected = self.cap_budgets(budget)
        spent = self.accounts.spent(protected, rounds if self.ledger == "planned" else joined)
        sampling = self.accounts.rates_and_retirement(protected)[0]
        return {"asked": budget, "protected": protected, "spent": spent, "sampling": sampling}


@dataclass(frozen=True, kw_only=True, repr=False)
class Rpdp(TwoStageSampling):
    """rPDP-FL: every record has its own budget.

    Attributes:
        largest_budget: a public constant; records that ask for more are protected at it, so that the run's ε holds for
            everyone.
    """

    largest_budget: float

    name: str = field(default="rpdp", init=False)

    epsilon_ignores: ClassVar = {**Method.epsilon_ignores, "largest_budget": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epsilon("largest_budget", self.largest_budget)

    @property
    def largest_epsilon(self) -> float:
        """The constant."""
        return self.largest_budget

    def cap_budgets(self, budget: np.ndarray) -> np.ndarray:
        """Return the record's own budget, up to the largest."""
        capped: np.ndarray = np.minimum(budget, self.largest_budget)
        return capped


@dataclass(frozen=True)
class _Kept:
    """What a silo keeps from round to round: the last round it joined, how many it has joined, and its last update."""

    round: int
    joined: int
    update: np.ndarray

    @classmethod
    def of(cls, memory: np.ndarray) -> _Kept:
        return cls(int(memory[0]), int(memory[1]), memory[2:].copy())

    def array(self) -> np.ndarray:
        counters = np.array([self.round, self.joined], np.float64)
        return np.concatenate([counters, self.update])
