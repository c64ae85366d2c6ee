"""The baseline *filter* of rPDP-FL: full-batch gradient descent, which every record leaves when its budget is used up.

Why this is private (Feldman and Zrnic 2021; Koskela, Tobaben and Honkela 2023). What a record is charged in a step is
‖g‖²/(2σ²C²), where g is its own clipped gradient at the current state. That state is a function of noisy sums alone, so
two runs with and without the record, having seen the same noisy sums, are in the same state: every *other* record has
the same gradients, has spent the same, and is in or out alike. The two next sums differ by g, or by nothing once the
record is out, and are noisy by σC: given what was seen before, the step's privacy loss is that of a Gaussian release of
μ² = ‖g‖²/(σC)², which is known before the step. The record is left out of the first step that would bring
Σ‖g‖²/(2σ²C²) above its R, and of all steps after, so the whole run costs it no more than one Gaussian release of
μ² = 2R, however many steps are run (docs/privacy.md, section 9). `compute_filter_budget` solves
that release for R exactly.
This needs Gaussian noise, drawn here in the silo whatever the aggregator, and batches of all records: with sampled
batches, or with integer noise, a step's loss is not Gaussian.

The proof needs that nobody else learns what a record has spent or whether it is still in: these depend on its content.
Released are the models; not released, and never to be counted in public, are who is in, how many, and what was spent.
They stay in the silo's store, where `Silo.record_accounts` shows them to the silo's own people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import numpy as np

from silodp._lazy import torch
from silodp.accounting.accountant import Accountant, compute_epsilon
from silodp.accounting.events import Event, Gaussian
from silodp.accounting.views import Unit, View
from silodp.assumption import OFFICERS, SILO_OPERATORS, Assumption
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import ClippedRows, LocallyNoisedUpdate
from silodp.methods.base import LocalContext, Method
from silodp.methods.dp_sgd import RECORD_IN_ONE_SILO, DpSgd, LocalSteps, Optimizer
from silodp.methods.roles import FederationSize, UnitBudgets
from silodp.settings import Clip, Delta, Epsilon, Help, Positive
from silodp_budgets.budget_curve import compute_filter_budget
from silodp_budgets.rpdp import sampling_rates


@dataclass(frozen=True, kw_only=True, repr=False)
class RpdpFilter(Method):
    """Individual Gaussian filter on `local_steps` full-batch steps per round; see the module for why it is private.

    Attributes:
        noise_multiplier: The noise multiplier σ; every step's noise is N(0, (σC)²).
        clip: The 2-norm C that every record's gradient is clipped to.
        local_steps: The number of full-batch steps of a round.
        delta: The δ of the run.
        expected_batch_size: The public constant that divides every gradient sum.
        local_learning_rate: The learning rate of the noisy mean gradient.
        largest_budget: The largest ε of a record, a public constant; records that ask for more are protected at it, and
            the run's ε ends there, after however many rounds.
        optimizer: The optimizer of the noisy mean gradient; its state is fresh in every round.

    Source: Feldman and Zrnic 2021, Algorithm 3, the baseline Filter of rPDP-FL (Liu et al. 2024), section 7.1; limits
    are exact for Gaussian noise, not by Rényi orders (Koskela, Tobaben and Honkela 2023).
    """

    noise_multiplier: sampling_rates.BudgetNoise
    clip: Clip
    local_steps: LocalSteps
    delta: Delta
    expected_batch_size: Positive
    local_learning_rate: Positive
    largest_budget: Annotated[
        Epsilon, Help("Largest privacy budget ε of a record, for rpdp-filter; its ε does not exceed it.")
    ]
    optimizer: Optimizer = "sgd"
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0

    name: str = field(default="rpdp-filter", init=False)
    unit: Unit | None = field(default="record", init=False)
    needs_counts: bool = field(default=False, init=False)
    clips_records: bool = field(default=True, init=False, repr=False)
    assumptions: tuple[Assumption, ...] = field(
        default=(
            Assumption(
                "counts-and-budgets-public",
                "how many records each silo has and their privacy budgets are public, and say nothing of what is in a "
                "record",
                OFFICERS,
            ),
            RECORD_IN_ONE_SILO,
            Assumption(
                "spent-records-unseen",
                "no silo tells which records have used up their budgets, or how many",
                SILO_OPERATORS,
            ),
            Assumption(
                "rounding-at-limits",
                "rounding in a shared computation brings no other record across its limit: that would move a sum by a "
                "whole clip (about one chance in 10^7 for a record and step, under a model that nobody chose for it)",
                technical=True,
            ),
        ),
        init=False,
        repr=False,
    )

    def limits(self, budget: np.ndarray) -> np.ndarray:
        """Return R, (n,), of records with these budgets: the largest Σ‖g‖²/(2σ²C²)."""
        capped = np.minimum(np.asarray(budget, np.float64), self.largest_budget)
        return _compute_limits(capped.tobytes(), self.delta)

    def check(self, data: PublicData, rounds: int, delta: float) -> None:
        """Check that every record has a budget, every silo a batch, and that δ is the one limits are computed for."""
        sampling_rates.check_records(self.name, data, self.delta, delta, self.expected_batch_size)
        if self.limits(np.array([self.largest_budget]))[0] == 0:
            raise SilodpError(
                f"largest_budget = {self.largest_budget:g} is less than any step costs at delta = {self.delta:g}: "
                "raise it.",
                code="budget.out_of_reach",
                field="largest_budget",
            )

    def select_records(
        self,
        user: np.ndarray,
        place: int,
        population: FederationSize,
        stream: np.random.Generator,
        budget: np.ndarray | None = None,
    ) -> np.ndarray:
        """Select every record whose budget allows a step."""
        return self.limits(sampling_rates.require_record_budgets(self.name, budget)) > 0

    def local_update(self, context: LocalContext) -> LocallyNoisedUpdate:
        """Run gradient descent on the records that are still in, and keep what each has spent for the next round.

        Asked again for the same round, the silo hands out the same noisy update: nobody spends twice.
        """
        account = _Filter.of(
            context.memory, self.limits(sampling_rates.require_record_budgets(self.name, context.budget))
        )
        if context.memory is not None and account.round == context.round:
            return LocallyNoisedUpdate(torch.from_numpy(account.update), 0, context.memory)
        # Of a row of norm 1: ‖g‖²/(2(σC)²) is what a step costs a row of norm ‖g‖.
        cost = 1 / (2 * (self.noise_multiplier * self.clip) ** 2)
        # Probability 1 or 0: every record that is still in is in every batch, so that nothing is sampled.
        rates = account.active.astype(np.float64)
        finished = DpSgd.of(self).train(context, rates, lambda rows: account.charge_rows(rows, cost))
        return replace(finished, memory=account.to_array(context.round, finished.value.numpy()))

    def bounds(self, population: FederationSize) -> None:
        """Return None: silos add the noise themselves."""

    def dp_event(self, view: View) -> Event:
        """Return the most that a record of the largest budget can still be charged, if all its gradients have norm C.

        Added up over rounds it is that until R is reached, and nothing from then on.
        """
        most = float(self.limits(np.array([self.largest_budget]))[0])
        # Gaussian releases of μ₁ and μ₂ cost as much as one of √(μ₁² + μ₂²), so μ²/2 adds up from round to round.
        cost = min(self.largest_step, most - view.round * self.largest_step)
        return Gaussian(1 / math.sqrt(2 * cost)) if cost > 0 else sampling_rates.ZERO_COST

    @property
    def largest_step(self) -> float:
        """The most that a round can add to Σ‖g‖²/(2σ²C²) of a record."""
        return self.local_steps / (2 * self.noise_multiplier**2)

    budgets_of: ClassVar[Unit | None] = "record"
    can_isolate_units: ClassVar[bool] = True

    @property
    def budgets(self) -> UnitBudgets:
        """The records' budgets."""
        return _FilterBudgets(unit="record", method=self)


@dataclass(frozen=True, kw_only=True)
class _FilterBudgets(UnitBudgets):
    """The budgets of records, which leave when they are used up.

    Attributes:
        method: The method whose records they are.
    """

    method: RpdpFilter

    def count_infeasible(self, budgets: np.ndarray) -> int | None:
        """Return how many of the budgets (n,) are too small for any step."""
        return int((self.method.limits(budgets) == 0).sum())

    def report(
        self,
        view: View,
        budgets: Sequence[np.ndarray],
        joined: np.ndarray,
        rounds: int,
        delta: float,
        accountant: Accountant,
    ) -> tuple[dict[str, Any], ...]:
        """Return one entry for each budget; what was really spent depends on the records, so "realized" is None.

        ε is exact, whatever the run's accountant: by Rényi orders the budgets would seem exceeded.
        """
        entries = []
        for entry, _ in sampling_rates.group_records(budgets):
            limit = float(self.method.limits(np.array([entry["budget"]]))[0])
            # A record is never charged beyond its limit, whatever its gradients were.
            most = min(limit, rounds * self.method.largest_step)
            planned = compute_epsilon([(Gaussian(1 / math.sqrt(2 * most)), 1)], delta) if most > 0 else 0.0
            entries.append(entry | {"planned": planned, "realized": None, "q": 1.0 if limit > 0 else 0.0})
        return tuple(entries)

    def record_accounts(
        self, budget: np.ndarray | None, rounds: int, memory: np.ndarray | None
    ) -> Mapping[str, np.ndarray]:
        """Return "asked", "limit" (its R), "spent" (Σ‖g‖²/(2σ²C²) so far), "active" (1 while the record is in)."""
        if budget is None:
            return {}
        account = _Filter.of(memory, self.method.limits(budget))
        return {
            "asked": budget,
            "limit": account.limits,
            "spent": account.spent,
            "active": account.active.astype(np.float64),
        }


@dataclass(frozen=True)
class _Filter:
    """The accounts of a silo's records; `charge_rows` changes them in place.

    Attributes:
        limits: The limit R of every record, (n,).
        spent: What every record has spent of it so far, (n,).
        active: Whether every record is still in, (n,) bool.
        round: The last round that the silo was asked for; −1 before the first.
        update: The noisy update (d,) of that round.
    """

    limits: np.ndarray = field(repr=False)
    spent: np.ndarray = field(repr=False)
    active: np.ndarray = field(repr=False)
    round: int
    update: np.ndarray = field(repr=False)

    @classmethod
    def of(cls, memory: np.ndarray | None, limits: np.ndarray) -> _Filter:
        if memory is None:
            return cls(limits, np.zeros(len(limits)), np.ones(len(limits), dtype=bool), -1, np.empty(0))
        spent, active, update = np.split(memory[1:], [len(limits), 2 * len(limits)])
        return cls(limits, spent.copy(), active > 0, int(memory[0]), update.copy())

    def to_array(self, round_: int, update: np.ndarray) -> np.ndarray:
        """Return all of it but the limits, as one vector."""
        return np.concatenate([[round_], self.spent, self.active, update])

    def charge_rows(self, rows: ClippedRows, cost: float) -> ClippedRows:
        """Return the rows whose owners can pay for them, and charge them; the other owners are out from now on.

        `cost` is that of a row of norm 1.
        """
        # The price is that of the row that is added, in the float arithmetic of the sum; 1e-9 more covers its rounding.
        # A gradient that is not finite has factor 0 and counts as zero, which is free.
        norms = torch.nan_to_num(rows.compute_clipped_norms(), nan=0.0, posinf=0.0)
        price = norms.square().cpu().numpy() * (cost * (1 + 1e-9))
        owners = rows.owners.cpu().numpy()
        # Out once, out for good, as the proof above has it.
        pays = self.active[owners] & (self.spent[owners] + price <= self.limits[owners])
        self.active[owners[~pays]] = False
        self.spent[owners[pays]] += price[pays]
        kept = torch.from_numpy(np.flatnonzero(pays)).to(rows.factors.device)
        return rows.select(kept)


@lru_cache(maxsize=256)
def _compute_limits(budgets: bytes, delta: float) -> np.ndarray:
    return compute_filter_budget(np.frombuffer(budgets), delta)
