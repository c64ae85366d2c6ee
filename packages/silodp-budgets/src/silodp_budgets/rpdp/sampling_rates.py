"""Per-record privacy budgets: the sampling probability for each ε, retirement, and the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from silodp.accounting.accountant import Accountant, compute_epsilon
from silodp.accounting.events import Event, Gaussian
from silodp.accounting.views import View
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.methods.dp_sgd import check_batch
from silodp.methods.roles import UnitBudgets
from silodp.settings import NoiseMultiplier, Probability, Range, check_value
from silodp_budgets import two_stage
from silodp_budgets.budget_curve import MAX_GROUPS

if TYPE_CHECKING:
    from torch import Tensor

Calibration = Literal["exact", "scf", "binary-search"]
BudgetNoise = Annotated[
    NoiseMultiplier, Range(above=0, what="noise multiplier", tip="no budget can be kept without noise")
]

ZERO_COST = Gaussian(math.inf)
"""What a round costs when every record has retired."""

_BINS = 10
_MAX_ROUNDS = 1_000_000  # of a record whose budget hardly anything uses up


@dataclass(frozen=True, kw_only=True)
class RecordBudgets(UnitBudgets):
    """How a budget decides how often a record is drawn, and when it retires (docs/privacy.md, section 9).

    Budgets and all constants are public, so sampling probabilities and retirements are public too.

    Attributes:
        run: The public constants on which the cost of a round depends.
        rounds: The number T of rounds for which sampling probabilities are chosen.
        largest: The largest budget that any record is protected at.
        calibration: How sampling probabilities are found.
        accountant: The accountant by which they are found.
        book: The rounds by which records retire: the planned ones, or those that the silo joined.
        cap_budgets: Returns the ε (n,) that records with budgets (n,) are protected at, 0 where they take no part.
    """

    run: two_stage.TwoStage
    rounds: int
    largest: float
    calibration: Calibration
    accountant: Accountant
    book: two_stage.ChargingMode
    cap_budgets: Callable[[np.ndarray], np.ndarray] = field(compare=False, repr=False)

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
        # In double precision, whatever was given: the cache below is keyed by the bytes.
        capped = np.minimum(np.asarray(asked, np.float64), self.largest)
        distinct, which = np.unique(capped, return_inverse=True)
        if not len(distinct):
            return np.empty(0), np.empty(0, np.int64)
        q, rounds = _compute_terms(self, distinct.tobytes())
        if len(distinct) > 1 or distinct[0] != self.largest:
            # Found one by one, probabilities need not be in the order of budgets to the last digit.
            # So that the record with the largest budget, which ε is stated for, is the most expensive one.
            q, rounds = np.minimum(q, self.most), np.minimum(rounds, self.last)
        return q[which], rounds[which]

    def compute_spent(self, asked: np.ndarray, used: int) -> np.ndarray:
        """Return ε, (n,), of records protected at `asked` (n,) after so many rounds of the book, by Rényi orders.

        Where the budget is less, it is returned: exact calibration has made sure of it.
        """
        spent, protected = np.zeros(len(asked)), asked > 0
        distinct, which = np.unique(asked[protected], return_inverse=True)
        q, rounds = self.rates_and_retirement(distinct)
        # After it has retired, a record costs nothing more.
        count = np.minimum(rounds, used)
        found = np.where((count > 0) & (q > 0), self.run.bound_epsilon(q, count, self.book), 0.0)
        spent[protected] = (found if self.calibration == "scf" else np.minimum(found, distinct))[which]
        return spent

    def count_infeasible(self, budgets: np.ndarray) -> int | None:
        """Return how many of the budgets (n,) get no sampling probability, those left out on purpose aside."""
        asked = self.cap_budgets(budgets)
        return int((self.rates_and_retirement(asked[asked > 0])[0] == 0).sum())

    def event_at_sampling(self, sampling: float) -> Event:
        """Return what a round costs a record that is drawn with this probability, against everyone.

        With book = "realized" a round is charged as one that the silo has joined.
        """
        check_value("record_sampling", sampling, Probability)
        return self.run.event(sampling, self.book)

    def sampling_curve(
        self, rounds: int, accountant: Accountant, points: int, least: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return q and ε; by Rényi orders at more points than asked for, since they cost little."""
        curve = two_stage.compute_two_stage_curve(self.run, rounds, accountant, points=points, least=least)
        return curve.parameters, curve.epsilons

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
        # Both give upper bounds of the same cost, so the smaller one holds.
        accountants = {accountant, self.accountant}
        entries = []
        for entry, inside in group_records(budgets):
            asked = self.cap_budgets(np.array([entry["budget"]]))
            q, last = 0.0, 0
            if asked[0] > 0:
                rates, retirements = self.rates_and_retirement(asked)
                q, last = float(rates[0]), int(retirements[0])
            most_joined = max((int(n) for n, own in zip(joined, inside, strict=True) if len(own)), default=0)
            planned, realized = self._compute_costs(q, last, rounds, most_joined, accountants)
            entry |= {"planned": planned, "realized": realized, "q": q, "book": self.book}
            if self.calibration == "scf":
                own = np.concatenate(inside)
                entry["overspent"] = int((self.compute_spent(self.cap_budgets(own), rounds) > own).sum())
            entries.append(entry)
        return tuple(entries)

    def _compute_costs(
        self, q: float, last: int, rounds: int, joined: int, accountants: set[Accountant]
    ) -> tuple[float, float]:
        """Return ε by "planned" and by "realized" charges of a record with q that retires after `last` rounds."""
        if q == 0:
            return 0.0, 0.0

        def cost(charging: two_stage.ChargingMode, count: int) -> float:
            charge = (self.run.event(q, charging), count)
            return min(compute_epsilon([charge], self.run.delta, by) for by in accountants)

        planned = cost("planned", min(rounds, last))
        if self.book == "realized":
            # A record that retires by rounds joined may be in for all rounds; of those joined in at most `last`.
            planned = min(cost("planned", rounds), cost("realized", min(rounds, last)))
        return planned, cost("realized", min(joined, last))

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
    """What a silo keeps from round to round.

    Attributes:
        round: The last round that it joined.
        joined: The number of rounds that it has joined.
        update: The noisy update (d,) of the last one.
    """

    round: int
    joined: int
    update: np.ndarray = field(repr=False)

    @classmethod
    def of(cls, memory: np.ndarray) -> RoundMemory:
        """Return what `to_array` made a vector of."""
        # float64 holds whole numbers up to 2^53, far beyond any number of rounds.
        return cls(int(memory[0]), int(memory[1]), memory[2:].copy())

    def to_array(self) -> np.ndarray:
        """Return all of it as one vector, for `LocallyNoisedUpdate.memory`."""
        counters = np.array([self.round, self.joined], np.float64)
        return np.concatenate([counters, self.update])


def group_records(budgets: Sequence[np.ndarray]) -> Iterator[tuple[dict[str, Any], list[np.ndarray]]]:
    """Yield for every distinct budget, or for bins of equally many, how its entry begins, and the budgets in it.

    Args:
        budgets: The budgets of the records of each silo, (n_s,) each.

    Yields:
        {"budget", "from" where it is less, "units"}, and the budgets of the group in each silo.
    """
    # Budgets are public, so which of them are in one bin may be shown.
    distinct = np.unique(np.concatenate(list(budgets)))
    for part in np.array_split(distinct, len(distinct) if len(distinct) <= MAX_GROUPS else _BINS):
        if not len(part):
            continue
        least, budget = float(part[0]), float(part[-1])
        inside = [own[(own >= least) & (own <= budget)] for own in budgets]
        start = {"from": least} if least < budget else {}
        yield {"budget": budget, **start, "units": sum(map(len, inside))}, inside


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
    if a.calibration == "scf":
        # As published: no record retires before the last of T rounds, whatever it has cost.
        return q, np.full(len(q), a.rounds)
    rounds = two_stage.count_affordable_rounds(a.run, q, budgets, max(_MAX_ROUNDS, a.rounds), a.book)
    if a.book == "planned" or a.run.client_sampling == 1:
        rounds = np.maximum(rounds, a.rounds)  # that T rounds are within the budget is what q was chosen for
    return q, np.where(q > 0, rounds, 0)


def _compute_probabilities(a: RecordBudgets, budgets: np.ndarray) -> np.ndarray:
    """Return q, (n,), for distinct budgets (n,).

    Source: rPDP-FL (Liu et al. 2024), Algorithm 2 for "scf"; "binary-search" is its baseline BinarySearch, section 7.1.
    """
    if a.calibration == "scf":
        return two_stage.fit_scf(a.run, a.rounds, budgets)
    if a.calibration == "binary-search":
        return two_stage.search_probabilities(a.run, a.rounds, budgets, a.accountant)
    return two_stage.compute_two_stage_curve(a.run, a.rounds, a.accountant, budgets=budgets).parameter_for(
        budgets
    )
