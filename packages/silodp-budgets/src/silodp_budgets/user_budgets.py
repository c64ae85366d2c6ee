"""Per-user privacy budgets, met by each user's own sampling rate or clip (docs/privacy.md, section 9)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from silodp.accounting import events
from silodp.accounting.accountant import Accountant, choose_accountant, find_accountant
from silodp.accounting.charges import compute_cost
from silodp.accounting.views import Adversary, View
from silodp.assumption import OFFICERS, Assumption
from silodp.errors import SilodpError
from silodp.methods.roles import EventsBySurvivors, PersonalBudgets, UnitBudgets
from silodp.settings import Count, Epsilon, Probability
from silodp.text import pluralize

if TYPE_CHECKING:
    from silodp_budgets.budget_curve import EpsilonCurve

By = Literal["sampling", "clip"]
_Release = events.Gaussian | events.Skellam
_WHAT = {"sampling": "sampling rate", "clip": "clip"}
_ALL = {"sampling": "being in every round", "clip": "the whole clip"}
_MIN_PARAMETER = 1e-4  # a rate or clip below is as good as none
_STEP = 0.01  # of ln(rate or clip), between points of the curve


@dataclass(frozen=True)
class UserBudgets(PersonalBudgets):
    """How persons' budgets are met; all of it is public.

    Attributes:
        by: "sampling": person u is sampled with their own q_u; "clip": their rows are clipped to c_u·C, c_u ≤ 1.
        rounds: The number T of rounds that the budgets are for; a run has no more, and no second release of a round.
        largest_budget: The ε that the run is charged as; larger budgets are treated as this one.
        adversary: The adversary against which the budgets are met; ε against the others is reported.
        mean_sampling: A public guess of the mean of q_u, for the scale of a step; set it always by sampling, and only
            there.
        accountant: The accountant of the budgets; None takes the tightest one for the noise that is drawn.

    Source: Boenisch et al. 2023 (Have it your way), "Sample" and "Scale", here for persons in place of records.

    Raises:
        SilodpError: a constant is out of range.
    """

    by: By
    rounds: Count
    largest_budget: Epsilon
    adversary: Adversary = "server"
    mean_sampling: Probability | None = None
    accountant: Accountant | str | None = None

    def __repr__(self) -> str:
        # Ledgers and guarantees store this text: it never changes, whatever the class is called.
        given = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"Personal({given})"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.by == "sampling") != (self.mean_sampling is not None):
            raise SilodpError(
                f"personal.mean_sampling = {self.mean_sampling} with by = '{self.by}': set it where persons are "
                "sampled with rates of their own, as a public number that no budget goes into, and only there.",
                code="argument.conflict",
                field="personal.mean_sampling",
            )
        if self.accountant is not None:
            find_accountant(self.accountant)

    @property
    def role(self) -> dict[str, Any]:
        """The attributes of `UnitBudgets`."""
        return {
            "unit": "user", "adversary": self.adversary, "max_rounds": self.rounds, "planned_rounds": self.rounds
        }  # fmt: skip

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions: what others learn of a person's budget, and which person ε is about."""
        learns = {
            "sampling": "the rate they are sampled with: every round's sample is drawn with these rates",
            "clip": "their own clip: every silo clips their rows to it",
        }
        return (
            Assumption(
                "budgets-public",
                f"every person's budget is public and says nothing of their records; so is {learns[self.by]}",
                OFFICERS,
            ),
            Assumption(
                "budgets-met",
                f"budgets are met against '{self.adversary}', over {pluralize(self.rounds, 'round')}; ε is that of a "
                f"person with the largest budget, {self.largest_budget:g}",
                technical=True,
            ),
        )

    def calibrate(
        self,
        costs: EventsBySurvivors,
        exact_event: Callable[[View], events.Event],
        budgets: np.ndarray | None,
        delta: float,
    ) -> BudgetCalibration:
        """Return the rates or clips that meet the budgets."""
        return BudgetCalibration.of(self, costs, exact_event, budgets, delta)


@dataclass(frozen=True)
class FullParticipationCost:
    """What a round costs, against one adversary, a person who is always in it with the whole clip.

    Attributes:
        event: The event of a round, with the noise that is drawn.
        extra: How much farther than in real numbers a person can move the sum of integers, in clips. Rounding adds it,
            so it does not shrink with their clip.
        knows_sample: Whether the adversary sees who was sampled.
    """

    event: events.Event
    extra: float
    knows_sample: bool

    @classmethod
    def of(cls, event: events.Event, exact: events.Event, view: View) -> Self:
        """Return the cost of `event`, which is `exact` with the noise of integers (see `Method.dp_event`)."""
        # The noise of integers is smaller in units of what a person moves: rounding lets them move the sum farther.
        extra = (
            0.0
            if isinstance(event, events.NonPrivate)
            else max(0.0, _find_noise(exact) / _find_noise(event) - 1)
        )
        return cls(event, extra, view.knows_sample)

    @classmethod
    def of_all(
        cls, known: Sequence[tuple[View, events.Event]], exact_event: Callable[[View], events.Event]
    ) -> Self:
        """Return what covers a round, however many silos answer it."""
        wholes = [cls.of(event, exact_event(view), view) for view, event in known]
        event = events.find_costliest_event([whole.event for whole in wholes])
        return cls(event, max(whole.extra for whole in wholes), wholes[0].knows_sample)

    def at(self, by: By, parameter: float) -> events.Event:
        """Return the event of a person with this q_u, or c_u, in [0, 1].

        Raises:
            SilodpError: the event is of a kind that cannot be sampled again, or has no smaller clip.
        """
        match self.event:
            case events.NonPrivate():
                return self.event
            case events.Gaussian() | events.Skellam() if by == "sampling":
                return (events.RevealedSample if self.knows_sample else events.PoissonSampled)(
                    parameter, self.event
                )
            case events.SampledReplacement(1, _) if by == "sampling":
                return replace(self.event, sampling_probability=parameter)
            case _ if by == "sampling":
                raise SilodpError(
                    f"persons cannot be sampled twice, in {self.event!r}: set user_sampling = 1.",
                    code="argument.conflict",
                    field="user_sampling",
                )
            case events.Gaussian() | events.Skellam():
                return self._shrink_clip(self.event, parameter)
            case events.PoissonSampled() | events.SampledReplacement() | events.RevealedSample() if (
                isinstance(self.event.event, _Release)
            ):
                return replace(self.event, event=self._shrink_clip(self.event.event, parameter))
        raise SilodpError(
            f"the accountant knows no smaller clip for a single person in {self.event!r}.",
            code="accounting.unsupported",
        )

    def _shrink_clip(self, release: _Release, part: float) -> _Release:
        """Return the same release for a person whose rows have `part` of the clip."""
        # A person whose rows are clipped to 0 moves nothing, not even by rounding: they are left out.
        if part == 0:
            return events.Gaussian(math.inf)
        moved = (part + self.extra) / (1 + self.extra)
        noise = release.noise_multiplier / moved
        if isinstance(release, events.Gaussian):
            return events.Gaussian(noise)
        # Integers cost more where they move by fewer steps at the same multiplier, so the steps shrink with the clip.
        return events.Skellam(noise, max(1, math.floor(release.units * moved)), release.dimension)


def _find_noise(event: events.Event) -> float:
    """Return the noise multiplier of the one release that is in an event of this method."""
    # `list_nested` gives outer events first, so the release is the last one.
    noise = [inner.noise_multiplier for inner in events.list_nested(event) if isinstance(inner, _Release)]
    return noise[-1]


@dataclass(frozen=True, eq=False, kw_only=True)
class BudgetCalibration(UnitBudgets):
    """Turns budgets into rates or clips: never more than the budget, met up to the curve's grid.

    It is a function of public constants alone, so that every party finds the same.

    Attributes:
        personal: The public constants that say how budgets are met.
        curve: The curve of ε against the rate or clip.
        largest: The rate or clip of the largest budget.
        wholes: For each adversary, what a round costs a person who is always in it with the whole clip.
        exact_event: Returns what a round costs such a person against a view, with noise in real numbers
            (`Method.dp_event`).
    """

    personal: UserBudgets
    curve: EpsilonCurve
    largest: float
    wholes: Mapping[Adversary, FullParticipationCost]
    exact_event: Callable[[View], events.Event]

    @classmethod
    def of(
        cls,
        personal: UserBudgets,
        costs: EventsBySurvivors,
        exact_event: Callable[[View], events.Event],
        budgets: np.ndarray | None,
        delta: float,
    ) -> BudgetCalibration:
        """Find the curve.

        Args:
            personal: How budgets are met.
            costs: What a round costs, with the noise that is drawn, by adversary.
            exact_event: See the attribute.
            budgets: The budgets (U,), where they are known already: they say where the curve needs points.
            delta: The δ of the accounting.

        Raises:
            SilodpError: nothing is promised against the adversary that the budgets are met against, or no rate or clip
                meets the largest budget.
        """
        wholes = {
            adversary: FullParticipationCost.of_all(known, exact_event) for adversary, known in costs.items()
        }
        whole = wholes[personal.adversary]
        if isinstance(whole.event, events.NonPrivate):
            raise SilodpError(
                f"personal.adversary = '{personal.adversary}': no budget can be met against it "
                f"({whole.event.reason}); name another adversary, or change that.",
                code="accounting.no_guarantee",
                field="personal.adversary",
            )
        given = personal.accountant
        accountant = choose_accountant([whole.event]) if given is None else find_accountant(given)
        wanted = np.array([personal.largest_budget])
        if budgets is not None:
            wanted = np.unique(np.append(np.minimum(budgets, personal.largest_budget), wanted))
        # Budgets that are known already say where the curve needs points; the largest one is always among them.
        curve = _compute_curve(partial(whole.at, personal.by), personal.rounds, delta, accountant, wanted)
        largest = float(curve.parameter_for(wanted[-1:])[0])
        if largest == 0:
            raise SilodpError(
                f"personal.largest_budget = {personal.largest_budget:g} is met by no {_WHAT[personal.by]} in "
                f"{pluralize(personal.rounds, 'round')}: raise it, or noise_multiplier.",
                code="budget.out_of_reach",
                field="personal.largest_budget",
            )
        return cls(
            **personal.role,
            personal=personal,
            curve=curve,
            largest=largest,
            wholes=wholes,
            exact_event=exact_event,
        )

    def parameters(self, budgets: np.ndarray) -> np.ndarray:
        """Return q_u, or c_u, (U,) float64 in [0, 1] for budgets (U,); 0 where even the smallest costs more."""
        # The run is charged as the largest budget, so nobody may have a larger rate or clip than that one gives.
        return np.minimum(self.curve.parameter_for(budgets), self.largest)

    def count_infeasible(self, budgets: np.ndarray) -> int:
        """Return how many of the budgets (n,) get no rate or clip."""
        return int((self.parameters(budgets) == 0).sum())

    def event_for_largest_budget(self, event: events.Event, view: View) -> events.Event:
        """Return the event of a person with the largest budget, by their q_u or C_u."""
        cost = FullParticipationCost.of(event, self.exact_event(view), view)
        return cost.at(self.personal.by, self.largest)

    def report(
        self,
        view: View,
        budgets: Sequence[np.ndarray],
        joined: np.ndarray,
        rounds: int,
        delta: float,
        accountant: Accountant,
    ) -> tuple[dict[str, Any], ...]:
        """Return one entry for each distinct budget, or for each twentieth of the persons, by its largest budget.

        "planned" is ε after all rounds that the budgets are met over, "realized" after those that were run.
        """
        from silodp_budgets.budget_curve import group_budgets

        everyone, by = np.concatenate(budgets), self.personal.by
        distinct = group_budgets(everyone)
        place = np.searchsorted(distinct, everyone)
        entries = []
        for i, budget in enumerate(distinct.tolist()):
            own = float(self.parameters(np.array([budget]))[0])
            event = self.wholes[view.adversary].at(by, own)
            planned, realized = (
                compute_cost([(event, count)], delta, accountant).epsilon
                for count in (self.personal.rounds, rounds)
            )
            inside = everyone[place == i]
            entry = {"budget": budget, "units": len(inside), "planned": planned, "realized": realized}
            entry["q" if by == "sampling" else "clip"] = own
            if (least := float(inside.min())) < budget:
                entry["least"] = least
            if note := self._find_note(view.adversary, budget, own, planned):
                entry["note"] = note
            entries.append(entry)
        return tuple(entries)

    def _find_note(
        self, adversary: Adversary, budget: float, own: float, planned: float | None
    ) -> str | None:
        # Against adversaries for whom the budgets were not found, more than the budget may be charged: say why.
        if planned is None or planned > budget:
            return f"budgets are met against '{self.personal.adversary}'"
        if own == 0:
            return (
                f"underspends: no {_WHAT[self.personal.by]} is small enough, so these persons never take part"
            )
        if planned >= 0.99 * budget:
            return None
        if own == 1:
            return f"underspends: even {_ALL[self.personal.by]} costs no more"
        if budget > self.personal.largest_budget:
            return "underspends: above personal.largest_budget, and treated as it"
        if adversary != self.personal.adversary:
            return f"underspends: the budget is met against '{self.personal.adversary}'"
        return None


def _compute_curve(
    cost: Callable[[float], events.Event],
    rounds: int,
    delta: float,
    accountant: Accountant,
    budgets: np.ndarray,
) -> EpsilonCurve:
    """Return ε from the smallest of the budgets (ascending) on: few are met up to 1e-3, many on steps of 1 %."""
    from silodp_budgets.budget_curve import EpsilonCurve

    # The first curve only finds where the second one has to begin: points below the smallest budget serve nobody.
    first = EpsilonCurve.of(cost, rounds, delta, accountant, least=_MIN_PARAMETER, budgets=budgets[:1])
    start = max(_MIN_PARAMETER, float(first.parameter_for(budgets[:1])[0]))
    # Steps of 1 % in the parameter: a budget between two points is met by the smaller of their parameters.
    points = 2 + math.ceil(math.log(1 / start) / _STEP)
    return EpsilonCurve.of(cost, rounds, delta, accountant, points, min(start, 0.5), budgets)
