"""Per-record privacy budgets: the sampling probability for each ε, retirement, and the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from silodp.accounting.accountant import Accountant, compute_epsilon
from silodp.accounting.budget_curve import (
    MAX_GROUPS,
    ChargingMode,
    EpsilonCurve,
    TwoStage,
    compute_two_stage_curve,
    count_affordable_rounds,
)
from silodp.accounting.curve_fitting import fit_scf, search_probabilities
from silodp.accounting.events import Event, Gaussian, PoissonSampled, RevealedSample, SelfComposed
from silodp.accounting.views import View
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.methods.dp_sgd import check_batch
from silodp.methods.roles import UnitBudgets
from silodp.settings import NoiseMultiplier, Probability, Range, check_value

if TYPE_CHECKING:
    from torch import Tensor

Calibration = Literal["exact", "scf", "binary-search"]
BudgetNoise = Annotated[
    NoiseMultiplier,
    Range(above=0, what="noise multiplier", tip="no budget can be kept without noise"),
]

ZERO_COST = Gaussian(math.inf)
"""What a round costs when every record has retired."""

_FEW = 64  # distinct budgets that are met one by one, by accountants that compute one point at a time
_BINS = 10
_MOST_ROUNDS = 1_000_000  # of a record whose budget hardly anything uses up
_AT_ONCE = 4096  # budgets


@dataclass(frozen=True, kw_only=True)
class RecordBudgets(UnitBudgets):
    """How a budget decides how often a record is drawn, and when it retires (docs/privacy.md, section 9).

    Budgets and all constants are public, so sampling probabilities and retirements are public too.

    Attributes:
        noise_multiplier, local_steps, client_sampling, delta: of the run.
        rounds: T, for which sampling probabilities are chosen.
        largest: the largest budget that any record is protected at.
        calibration, accountant: how sampling probabilities are found.
        book: by which rounds records retire.
        cap_budgets: from budgets (n,) to the ε that records with them are protected at, 0 where they take no part.
    """

    noise_multiplier: float
    local_steps: int
    client_sampling: float
    rounds: int
    delta: float
    largest: float
    calibration: Calibration
    accountant: Accountant
    book: ChargingMode
    cap_budgets: Callable[[np.ndarray], np.ndarray] = field(compare=False)

    @property
    def most(self) -> float:
        """The largest sampling probability: that of the largest budget."""
        return float(self.rates_and_retirement(np.array([self.largest]))[0][0])

    @property
    def last(self) -> int:
        """The number of rounds after which every record has retired: when those of the largest budget have."""
        return int(self.rates_and_retirement(np.array([self.largest]))[1][0])

    def rates_and_retirement(self, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return sampling probabilities (n,) and rounds until retirement (n,) of records protected at ε (n,)."""
        # In double precision whatever was given: what follows is found by its bytes.
        capped = np.minimum(np.asarray(asked, np.float64), self.largest)
        distinct, which = np.unique(capped, return_inverse=True)
        if not len(distinct):
            return np.empty(0), np.empty(0, np.int64)
        q, rounds = _compute_terms(self, distinct.tobytes())
        if len(distinct) > 1 or distinct[0] != self.largest:
            # Found one by one, probabilities need not be in the order of budgets to the last digit.
            q, rounds = np.minimum(q, self.most), np.minimum(rounds, self.last)
        return q[which], rounds[which]

    def event(self, q: float, realized: bool) -> Event:
        """Return what a round costs a record: one that its silo joined, or any, with the coin λ that everyone sees."""
        steps = SelfComposed(PoissonSampled(q, Gaussian(self.noise_multiplier)), self.local_steps)
        return steps if realized else RevealedSample(self.client_sampling, steps)

    def compute_spent(self, asked: np.ndarray, used: int) -> np.ndarray:
        """Return ε, (n,), of records protected at `asked` (n,) after so many rounds of the book, by Rényi orders.

        Where the budget is less, it is returned: exact calibration has made sure of it.
        """
        run = TwoStage(self.noise_multiplier, self.local_steps, self.client_sampling, self.delta)
        rho_of = run.planned if self.book == "planned" else run.joined
        found_of_all = np.zeros(len(asked))
        protected = np.asarray(asked) > 0
        distinct, which = np.unique(asked[protected], return_inverse=True)
        q, rounds = self.rates_and_retirement(distinct)
        found = np.zeros(len(distinct))
        for first in range(0, len(distinct), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            count = np.minimum(rounds[part], used)
            found[part] = np.where((count > 0) & (q[part] > 0), run.epsilon(count * rho_of(q[part])), 0.0)
        if self.calibration != "scf":
            found = np.minimum(found, distinct)
        found_of_all[protected] = found[which]
        return found_of_all

    def count_infeasible(self, budgets: np.ndarray) -> int | None:
        """Return how many of the budgets (n,) get no sampling probability, those left out on purpose aside."""
        asked = self.cap_budgets(budgets)
        return int((self.rates_and_retirement(asked[asked > 0])[0] == 0).sum())

    def event_at_sampling(self, sampling: float) -> Event:
        """Return what a round costs a record that is drawn with this probability, against everyone.

        With book = "realized" a round is charged as one that the silo has joined.
        """
        check_value("record_sampling", sampling, Probability)
        return self.event(sampling, realized=self.book == "realized")

    def sampling_curve(self, rounds: int, accountant: Accountant, points: int, least: float) -> EpsilonCurve:
        """Return ε against q; by Rényi orders at more points than asked for, since they cost little."""
        run = (self.noise_multiplier, self.local_steps, self.client_sampling, rounds, self.delta)
        return compute_two_stage_curve(*run, accountant, points=points, least=least)

    def report(
        self,
        view: View,
        budgets: Sequence[np.ndarray],
        joined: np.ndarray,
        rounds: int,
        delta: float,
        accountant: Accountant,
    ) -> tuple[dict[str, Any], ...]:
        """Return one entry for every distinct budget, or for bins of them, by the largest budget in each.

        It is charged in both ways; records retire by `book`. ε is by the run's accountant or by the method's,
        whichever gives less: both are upper bounds. With "scf", "overspent" counts the records that spend more than
        they asked for.
        """
        known = {accountant, self.accountant}
        entries = []
        for least, budget in group_into_bins(budgets):
            asked = float(self.cap_budgets(np.array([budget]))[0])
            inside = [own[(own >= least) & (own <= budget)] for own in budgets]
            units = [len(own) for own in inside]
            q, last = (
                self.rates_and_retirement(np.array([asked]))
                if asked > 0
                else (np.zeros(1), np.zeros(1, np.int64))
            )
            most_joined = max((int(n) for n, here in zip(joined, units, strict=True) if here), default=0)
            planned, realized = 0.0, 0.0
            if q[0] > 0:

                def cost(joined: bool, count: int, rate: float = float(q[0])) -> float:
                    charge = (self.event(rate, joined), count)
                    return min(compute_epsilon([charge], self.delta, by) for by in known)

                realized = cost(True, min(most_joined, int(last[0])))
                planned = cost(False, min(rounds, int(last[0])))
                if self.book == "realized":
                    # Whoever retires by rounds joined may be in for all rounds; of those joined in at most `last`.
                    planned = min(cost(False, rounds), cost(True, min(rounds, int(last[0]))))
            entries.append(
                {
                    "budget": budget,
                    **({"from": least} if least < budget else {}),
                    "units": sum(units),
                    "planned": planned,
                    "realized": realized,
                    "q": float(q[0]),
                    "book": self.book,
                }
            )
            if self.calibration == "scf":
                own = np.concatenate(inside)
                entries[-1]["overspent"] = int(
                    (self.compute_spent(self.cap_budgets(own), rounds) > own).sum()
                )
        return tuple(entries)

    def record_accounts(
        self, budget: np.ndarray | None, rounds: int, memory: np.ndarray | None
    ) -> Mapping[str, np.ndarray]:
        """Return "asked", "protected" (the ε that holds for it), "spent" (so far), "sampling" (q; 0: too small)."""
        if budget is None:
            return {}
        joined = 0 if memory is None else RoundMemory.of(memory).joined
        protected = self.cap_budgets(budget)
        spent = self.compute_spent(protected, rounds if self.book == "planned" else joined)
        sampling = self.rates_and_retirement(protected)[0]
        return {"asked": budget, "protected": protected, "spent": spent, "sampling": sampling}


@dataclass(frozen=True)
class RoundMemory:
    """What a silo keeps from round to round: the last round it joined, how many it has joined, and its last update."""

    round: int
    joined: int
    update: np.ndarray

    @classmethod
    def of(cls, memory: np.ndarray) -> RoundMemory:
        """Return what `array` made a vector of."""
        return cls(int(memory[0]), int(memory[1]), memory[2:].copy())

    def array(self) -> np.ndarray:
        """Return all of it as one vector, for `LocallyNoisedUpdate.memory`."""
        counters = np.array([self.round, self.joined], np.float64)
        return np.concatenate([counters, self.update])


def group_into_bins(budgets: Sequence[np.ndarray]) -> list[tuple[float, float]]:
    """Return (least, largest) of the distinct budgets: one by one where they are few, else in bins of equally many."""
    distinct = np.unique(np.concatenate(list(budgets)))
    parts = np.array_split(distinct, len(distinct) if len(distinct) <= MAX_GROUPS else _BINS)
    return [(float(part[0]), float(part[-1])) for part in parts if len(part)]


def require_record_budgets(name: str, budget: np.ndarray | Tensor | None) -> np.ndarray:
    """Return the budgets of a silo's records, (n,) float64.

    Raises:
        SilodpError: there are none.
    """
    if budget is None:
        raise SilodpError(
            f"{name} needs a privacy budget for every record: none were given.", code="data.budgets"
        )
    return np.asarray(budget)


def check_records(name: str, data: PublicData, own_delta: float, delta: float, batch: float) -> None:
    """Check that every record has a budget, every silo at least a batch, and that there is one δ.

    Raises:
        SilodpError: one of them does not hold.
    """
    if not data.record_budgets:
        raise SilodpError(
            f"{name} needs a privacy budget for every record, and not every silo has them: name the column "
            "(schema: budget = ...), or draw them with Federation.with_budgets.",
            code="data.budgets",
        )
    check_batch(data, batch)
    if own_delta != delta:
        raise SilodpError(
            f"the run's delta = {delta:g} differs from {name}'s delta = {own_delta:g}: set both to the same value.",
            code="argument.conflict",
            field="delta",
        )


@lru_cache(maxsize=256)
def _compute_terms(accounts: RecordBudgets, distinct: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return rates and retirements of distinct budgets, given as bytes; the same in every round, hence cached."""
    a, budgets = accounts, np.frombuffer(distinct)
    q = _compute_probabilities(a, budgets)
    if (
        a.calibration == "scf"
    ):  # as published: no record retires before the last of T rounds, whatever it has cost
        return q, np.full(len(q), a.rounds)
    rounds = count_affordable_rounds(
        q,
        budgets,
        a.noise_multiplier,
        a.local_steps,
        a.client_sampling,
        a.delta,
        max(_MOST_ROUNDS, a.rounds),
        a.book,
    )
    if a.book == "planned" or a.client_sampling == 1:
        rounds = np.maximum(rounds, a.rounds)  # that T rounds are within the budget is what q was chosen for
    return q, np.where(q > 0, rounds, 0)


def _compute_probabilities(a: RecordBudgets, budgets: np.ndarray) -> np.ndarray:
    """Return q, (n,), for distinct budgets (n,)."""
    run = (a.noise_multiplier, a.local_steps, a.client_sampling, a.rounds, a.delta)
    if a.calibration == "scf":
        return fit_scf(budgets, *run).sampling_probabilities
    if a.calibration == "binary-search":
        return search_probabilities(budgets, *run, a.accountant)
    few = budgets if len(budgets) <= _FEW else None
    return compute_two_stage_curve(*run, a.accountant, budgets=few).parameter_for(budgets)
