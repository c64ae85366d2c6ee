"""rPDP-FL, which samples every record as often as its own privacy budget allows, and the baselines minimum, dropout."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import numpy as np

from silodp._lazy import torch
from silodp.accounting.accountant import Accountant, find_accountant
from silodp.accounting.events import Event
from silodp.accounting.views import Unit, View
from silodp.assumption import OFFICERS, SERVER_OPERATOR, Assumption
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import LocallyNoisedUpdate
from silodp.mechanisms.noise import draw_poisson_sample
from silodp.methods.base import LocalContext, Method
from silodp.methods.dp_sgd import RECORD_IN_ONE_SILO, DpSgd, LocalSteps, Optimizer
from silodp.methods.roles import FederationSize
from silodp.settings import Clip, Count, Delta, Epsilon, Help, Positive, Probability
from silodp_budgets.rpdp import sampling_rates
from silodp_budgets.two_stage import ChargingMode, TwoStage


@dataclass(frozen=True, kw_only=True, repr=False)
class TwoStageSampling(Method):
    """What rPDP-FL and its baselines share: a silo joins a round with probability λ, then runs τ steps of DP-SGD.

    In every step each record is drawn with the probability q_j that its ε_j allows (rPDP-FL, Algorithm 3, corrected
    as in docs/privacy.md, section 9). Who joins a round, every budget, every q_j and the round in which a record
    retires are public; which records are drawn is not.

    Attributes:
        noise_multiplier: The noise multiplier σ; every step's noise is N(0, (σC)²).
        clip: The 2-norm C that every record's gradient is clipped to.
        client_sampling: The probability λ of the coin that each silo tosses in each round; a round that nobody joins
            counts as a round.
        local_steps: The number τ of steps of a round.
        rounds: The number T of rounds that q_j is chosen for; in further rounds records retire as their budgets are
            used up.
        delta: The δ of the run.
        expected_batch_size: The public constant that divides every gradient sum, never the number of records drawn.
        local_learning_rate: The learning rate of the noisy mean gradient.
        optimizer: The optimizer of the noisy mean gradient; its state is fresh in every round.
        calibration: How q_j is found: "exact" (never above the budget, met up to a grid), "binary-search" (the same,
            one record after the other), or "scf", the paper's fitted curve, which overspends: then no record retires
            early, and what its q_j really costs is reported.
        accountant: The accountant by which q_j is chosen.
        ledger: The rounds by which a record's budget is used up. "planned" charges every round what it costs with the
            coin λ; "realized" charges the rounds that the silo joined, in full, and lets records retire by those.

    Source: rPDP-FL (Liu et al. 2024), Algorithm 3; its cost is Lemma 6 and Theorem 1, case 1.
    """

    noise_multiplier: sampling_rates.BudgetNoise
    clip: Clip
    local_steps: LocalSteps
    rounds: Count
    delta: Delta
    expected_batch_size: Positive
    local_learning_rate: Positive
    client_sampling: Annotated[
        Probability, Help("Sampling probability λ of a silo in a round, for rpdp. Default: 1.")
    ] = 1.0
    optimizer: Optimizer = "sgd"
    calibration: sampling_rates.Calibration = "exact"
    accountant: Accountant | str = "rdp"
    ledger: ChargingMode = "planned"
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0

    name: str = field(default="", init=False)
    unit: Unit | None = field(default="record", init=False)
    needs_counts: bool = field(default=False, init=False)
    clips_records: bool = field(default=True, init=False, repr=False)

    can_isolate_units: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        find_accountant(self.accountant)

    @property
    def largest_epsilon(self) -> float:
        """The largest ε that any record is protected at, a public constant: that of an unlimited budget."""
        return float(self.cap_budgets(np.array([math.inf]))[0])

    def cap_budgets(self, budget: np.ndarray) -> np.ndarray:
        """Return the ε, (n,), that records with these budgets are protected at; 0 for those that take no part."""
        raise NotImplementedError

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions about what is public besides the method's constants."""
        public = Assumption(
            "counts-and-budgets-public",
            "how many records each silo has, their privacy budgets, and which silos join a round are public, and say "
            "nothing of what is in a record",
            OFFICERS,
        )
        found = [public, RECORD_IN_ONE_SILO]
        if self.client_sampling < 1 and self.ledger == "planned":
            found.append(
                Assumption(
                    "silos-by-chance",
                    "the server draws which silos join a round by chance alone; the ledgers and limits of silos count "
                    "on this, too (ledger = 'realized' does not)",
                    SERVER_OPERATOR,
                )
            )
        if self.calibration == "scf":
            found.append(
                Assumption(
                    "fitted-curve",
                    "sampling probabilities come from a fitted curve (scf) and may cost records more than they asked "
                    "for; ε is what the largest of them costs",
                    technical=True,
                )
            )
        return tuple(found)

    def check(self, data: PublicData, rounds: int, delta: float) -> None:
        """Check that every record has a budget, every silo a batch, and that δ is the one q_j is chosen for."""
        sampling_rates.check_records(self.name, data, self.delta, delta, self.expected_batch_size)
        if self.budgets.most == 0:
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
        population: FederationSize,
        stream: np.random.Generator,
        budget: np.ndarray | None = None,
    ) -> np.ndarray:
        """Select every record that is protected at all."""
        return self.cap_budgets(sampling_rates.require_record_budgets(self.name, budget)) > 0

    @property
    def samples_silos(self) -> bool:
        """Whether λ is below 1."""
        return self.client_sampling != 1

    def sample_silos(self, population: FederationSize, stream: np.random.Generator) -> np.ndarray | None:
        """Toss one coin per silo."""
        if self.client_sampling == 1:
            return None
        return draw_poisson_sample(population.silos, self.client_sampling, stream)

    def local_update(self, context: LocalContext) -> LocallyNoisedUpdate:
        """Run DP-SGD, each record drawn with its own probability until it retires; the noise is inside.

        Asked again for the same round (under secure aggregation, when others failed to answer), the silo hands out the
        same noisy update: a second one would be a second charge.
        """
        # A second noisy update of the same round would be a second release, which no record's budget has room for.
        kept = None if context.memory is None else sampling_rates.RoundMemory.of(context.memory)
        if kept is not None and kept.round == context.round:
            return LocallyNoisedUpdate(torch.from_numpy(kept.update), 0, context.memory)
        joined = 0 if kept is None else kept.joined
        q, last = self.budgets.rates_and_retirement(
            self.cap_budgets(sampling_rates.require_record_budgets(self.name, context.budget))
        )
        # By "realized" only rounds that this silo joined count: the others cost its records nothing.
        used = context.round if self.ledger == "planned" else joined
        # A retired record has probability 0: it stays in no batch, whatever the server asks for.
        finished = DpSgd.of(self).train(context, np.where(used < last, q, 0.0))
        return replace(
            finished,
            memory=sampling_rates.RoundMemory(context.round, joined + 1, finished.value.numpy()).to_array(),
        )

    def bounds(self, population: FederationSize) -> None:
        """Return None: silos add the noise themselves."""

    def server_scale(self, population: FederationSize) -> float:
        """Return 1/(λ·S), by the expected, public number of silos, never by those that joined."""
        return 1.0 / (self.client_sampling * population.silos)

    def dp_event(self, view: View) -> Event:
        """Return the event of a record with the largest budget, which costs most; it is the same against everyone.

        Who joined a round everyone knows, so the coin λ is one whose fall is seen (docs/privacy.md, section 9).
        """
        budgets = self.budgets
        # From then on no record is in any batch: what the silo sends is noise alone.
        if view.round >= budgets.last:
            return sampling_rates.ZERO_COST
        return budgets.run.event(budgets.most, self.ledger)

    # --- Budgets of single records ---

    budgets_of: ClassVar[Unit | None] = "record"
    samples_by_budget: ClassVar[bool] = True

    @property
    def budgets(self) -> sampling_rates.RecordBudgets:
        """The records' budgets."""
        return sampling_rates.RecordBudgets(
            unit="record",
            planned_rounds=self.rounds,
            retires_after=self.rounds,  # with "scf" all together
            run=TwoStage(self.noise_multiplier, self.local_steps, self.client_sampling, self.delta),
            rounds=self.rounds,
            largest=self.largest_epsilon,
            calibration=self.calibration,
            accountant=find_accountant(self.accountant),
            book=self.ledger,
            cap_budgets=self.cap_budgets,
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Rpdp(TwoStageSampling):
    """rPDP-FL: every record has its own budget.

    Attributes:
        largest_budget: The largest ε of a record, a public constant. Records that ask for more are protected at it, so
            that the run's ε holds for everyone.

    Source: rPDP-FL (Liu et al. 2024), Algorithm 3.
    """

    largest_budget: Epsilon

    name: str = field(default="rpdp", init=False)

    epsilon_ignores: ClassVar = {**Method.epsilon_ignores, "largest_budget": 1.0}

    def cap_budgets(self, budget: np.ndarray) -> np.ndarray:
        """Return the record's own budget, up to the largest."""
        capped: np.ndarray = np.minimum(budget, self.largest_budget)
        return capped


@dataclass(frozen=True, kw_only=True, repr=False)
class RpdpMinimum(TwoStageSampling):
    """The baseline *minimum*: all records are protected at one budget.

    Attributes:
        budget: The ε of all records, a public constant; no record may ask for less.

    Source: rPDP-FL (Liu et al. 2024), section 7.2, baseline Minimum.
    """

    budget: Epsilon

    name: str = field(default="rpdp-minimum", init=False)

    epsilon_ignores: ClassVar = {**TwoStageSampling.epsilon_ignores, "budget": 1.0}

    def cap_budgets(self, budget: np.ndarray) -> np.ndarray:
        """Return the same ε for all."""
        return np.full(len(budget), self.budget)

    def check(self, data: PublicData, rounds: int, delta: float) -> None:
        """Check, too, that no record asks for less."""
        super().check(data, rounds, delta)
        own = np.concatenate(data.silo_budgets or (np.empty(0),))
        if (own < self.budget).any():
            raise SilodpError(
                f"rpdp-minimum: {int((own < self.budget).sum())} of {len(own)} records ask for less than budget = "
                f"{self.budget:g}: set budget = {own.min():g}, or leave them out (rpdp-dropout).",
                code="data.budgets",
                field="budget",
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class RpdpDropout(TwoStageSampling):
    """The baseline *dropout*: records that ask for a threshold or more take part, all protected at the threshold.

    Attributes:
        threshold: The ε of all records that take part, a public constant.

    Source: rPDP-FL (Liu et al. 2024), section 7.2, baseline Dropout.
    """

    threshold: Epsilon

    name: str = field(default="rpdp-dropout", init=False)

    epsilon_ignores: ClassVar = {**TwoStageSampling.epsilon_ignores, "threshold": 1.0}

    def cap_budgets(self, budget: np.ndarray) -> np.ndarray:
        """Return the threshold, or 0 below it."""
        return np.where(budget >= self.threshold, self.threshold, 0.0)
