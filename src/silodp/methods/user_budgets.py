"""Per-user privacy budgets, met by each user's own sampling rate or clip (docs/privacy.md, section 9)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from silodp.accounting.accountant import Accountant, choose_accountant, find_accountant
from silodp.accounting.charges import compute_cost
from silodp.accounting.events import (
    Event,
    Gaussian,
    NonPrivate,
    PoissonSampled,
    RevealedSample,
    SampledReplacement,
    Skellam,
    find_costliest_event,
    list_nested,
)
from silodp.accounting.guarantee import TECHNICAL
from silodp.accounting.views import Adversary, View
from silodp.errors import SilodpError
from silodp.methods.roles import EventsBySurvivors, UnitBudgets
from silodp.settings import Count, Epsilon, Probability, Settings
from silodp.text import pluralize

if TYPE_CHECKING:
    from silodp.accounting.budget_curve import EpsilonCurve

By = Literal["sampling", "clip"]
_MIN_PARAMETER = 1e-4  # a rate or clip below is as good as none
_STEP = 0.01  # of ln(rate or clip), between points of the curve


@dataclass(frozen=True)
class UserBudgets(Settings, prefix="personal."):
    """How persons' budgets are met: public constants.

    Attributes:
        by: "sampling": person u is sampled with their own q_u; "clip": their rows are clipped to c_u·C, c_u ≤ 1.
        rounds: T that the budgets are for; a run has no more, and no second release of a round.
        largest_budget: the ε that the run is charged as; larger budgets are treated as this one.
        adversary: against which the budgets are met; ε against the others is reported.
        mean_sampling: q̄, a public guess of the mean of q_u, for the scale of a step; only, and always, by sampling.
        accountant: None: the tightest one for the noise that is drawn.

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
    def assumptions(self) -> tuple[str, ...]:
        """Who learns what, and what ε is about."""
        learns = {
            "sampling": "the rate they are sampled with: every round's sample is drawn with these rates",
            "clip": "their own clip: every silo clips their rows to it",
        }
        return (
            f"every person's budget is public and says nothing of their records; so is {learns[self.by]}",
            TECHNICAL
            + f"budgets are met against '{self.adversary}', over {pluralize(self.rounds, 'round')}; ε is that of a "
            f"person with the largest budget, {self.largest_budget:g}",
        )


@dataclass(frozen=True)
class FullParticipationCost:
    """What a round costs, against one adversary, a person who is always in it with the whole clip.

    Attributes:
        event: the event of a round, with the noise that is drawn.
        extra: by how much more than in real numbers they can move the sum of integers, in clips; rounding adds it, so
            it does not shrink with their clip.
        knows_sample: whether the adversary sees who was sampled.
    """

    event: Event
    extra: float
    knows_sample: bool

    @classmethod
    def of(cls, event: Event, exact: Event, view: View) -> FullParticipationCost:
        """Return the cost of `event`, which is `exact` with the noise of integers (see `Method.dp_event`)."""
        extra = 0.0 if isinstance(event, NonPrivate) else max(0.0, _noise(exact) / _noise(event) - 1)
        return cls(event, extra, view.knows_sample)

    def at(self, by: By, parameter: float) -> Event:
        """Return the event of a person with this q_u, or c_u, in [0, 1]."""
        if isinstance(self.event, NonPrivate):
            return self.event
        return (
            self._with_sampling(parameter)
            if by == "sampling"
            else _with_smaller_clip(self.event, self.extra, parameter)
        )

    def _with_sampling(self, q: float) -> Event:
        if isinstance(self.event, SampledReplacement) and self.event.sampling_probability == 1:
            return replace(self.event, sampling_probability=q)
        if not isinstance(self.event, Gaussian | Skellam):
            raise SilodpError(
                f"persons cannot be sampled twice, in {self.event!r}: set user_sampling = 1.",
                code="argument.conflict",
                field="user_sampling",
            )
        return (RevealedSample if self.knows_sample else PoissonSampled)(q, self.event)


def _noise(event: Event) -> float:
    """Return the noise multiplier of the one release that is in an event of this method."""
    noise = [inner.noise_multiplier for inner in list_nested(event) if isinstance(inner, Gaussian | Skellam)]
    return noise[-1]


def _with_smaller_clip(event: Event, extra: float, part: float) -> Event:
    """Return the same release for a person whose rows have `part` of the clip.

    A release of integers costs more where it moves by fewer steps at the same multiplier, so steps shrink as well.
    """
    match event:
        case PoissonSampled(_, inner) | SampledReplacement(_, inner) | RevealedSample(_, inner) if isinstance(
            inner, Gaussian | Skellam
        ):
            return replace(event, event=_release_with_smaller_clip(inner, extra, part))
        case Gaussian() | Skellam():
            return _release_with_smaller_clip(event, extra, part)
    raise SilodpError(
        f"the accountant knows no smaller clip for a single person in {event!r}.",
        code="accounting.unsupported",
    )


def _release_with_smaller_clip(event: Gaussian | Skellam, extra: float, part: float) -> Gaussian | Skellam:
    if part == 0:
        return Gaussian(math.inf)
    moved = (part + extra) / (1 + extra)
    if isinstance(event, Gaussian):
        return Gaussian(event.noise_multiplier / moved)
    return Skellam(event.noise_multiplier / moved, max(1, math.floor(event.units * moved)), event.dimension)


@dataclass(frozen=True, eq=False, kw_only=True)
class BudgetCalibration(UnitBudgets):
    """Turns budgets into rates or clips: never more than the budget, met up to the curve's grid.

    It is a function of public constants alone, so that every party finds the same.

    Attributes:
        personal: the public constants that say how budgets are met.
        curve: the curve of ε against the rate or clip.
        largest: the rate or clip of the largest budget.
        wholes: by adversary, what a round costs a person who is always in it with the whole clip.
        exact_event: returns what a round costs them against a view, with noise in real numbers (`Method.dp_event`).
    """

    personal: UserBudgets
    curve: EpsilonCurve
    largest: float
    wholes: Mapping[Adversary, FullParticipationCost]
    exact_event: Callable[[View], Event]

    @classmethod
    def of(
        cls,
        personal: UserBudgets,
        costs: EventsBySurvivors,
        exact_event: Callable[[View], Event],
        budgets: np.ndarray | None,
        delta: float,
    ) -> BudgetCalibration:
        """Find the curve.

        Args:
            personal: how budgets are met.
            costs: by adversary, with the noise that is drawn.
            exact_event: see the attribute.
            budgets: (U,), where they are known already: they say where the curve needs points.
            delta: δ of the accounting.

        Raises:
            SilodpError: nothing is promised against the adversary that the budgets are met against, or no rate or clip
                meets the largest budget.
        """
        wholes = {adversary: _costliest(known, exact_event) for adversary, known in costs.items()}
        whole = wholes[personal.adversary]
        if isinstance(whole.event, NonPrivate):
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
        curve = _curve(partial(whole.at, personal.by), personal.rounds, delta, accountant, wanted)
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
        return np.minimum(self.curve.parameter_for(budgets), self.largest)

    def count_infeasible(self, budgets: np.ndarray) -> int:
        """Return how many of the budgets (n,) get no rate or clip."""
        return int((self.parameters(budgets) == 0).sum())

    def event_for_largest_budget(self, event: Event, view: View) -> Event:
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
        from silodp.accounting.budget_curve import group_budgets

        everyone, adversary = np.concatenate(budgets), view.adversary
        distinct = group_budgets(everyone)
        place = np.searchsorted(distinct, everyone)
        entries = []
        for i, budget in enumerate(distinct.tolist()):
            own = float(self.parameters(np.array([budget]))[0])
            event = self.wholes[adversary].at(self.personal.by, own)
            planned, realized = (
                compute_cost([(event, count)], delta, accountant).epsilon
                for count in (self.personal.rounds, rounds)
            )
            entry = {
                "budget": budget,
                "units": int((place == i).sum()),
                "planned": planned,
                "realized": realized,
                _SHOWN[self.personal.by]: own,
            }
            least = float(everyone[place == i].min())
            if least < budget:
                entry["least"] = least
            note = self._note(adversary, budget, own, planned)
            entries.append(entry | ({"note": note} if note else {}))
        return tuple(entries)

    def _note(self, adversary: Adversary, budget: float, own: float, planned: float | None) -> str | None:
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


_WHAT = {"sampling": "sampling rate", "clip": "clip"}
_SHOWN = {"sampling": "q", "clip": "clip"}
_ALL = {"sampling": "being in every round", "clip": "the whole clip"}


def _curve(
    cost: Callable[[float], Event], rounds: int, delta: float, accountant: Accountant, budgets: np.ndarray
) -> EpsilonCurve:
    """Return ε from the smallest of the budgets (ascending) on: few are met up to 1e-3, many on steps of 1 %."""
    from silodp.accounting.budget_curve import EpsilonCurve

    # The first curve only finds where the second one has to begin: points below the smallest budget serve nobody.
    first = EpsilonCurve.of(cost, rounds, delta, accountant, least=_MIN_PARAMETER, budgets=budgets[:1])
    start = max(_MIN_PARAMETER, float(first.parameter_for(budgets[:1])[0]))
    points = 2 + math.ceil(math.log(1 / start) / _STEP)
    return EpsilonCurve.of(cost, rounds, delta, accountant, points, min(start, 0.5), budgets)


def _costliest(
    known: Sequence[tuple[View, Event]], exact_event: Callable[[View], Event]
) -> FullParticipationCost:
    """Return what covers a round however many silos answer it."""
    wholes = [FullParticipationCost.of(event, exact_event(view), view) for view, event in known]
    event = find_costliest_event([whole.event for whole in wholes])
    return FullParticipationCost(event, max(whole.extra for whole in wholes), wholes[0].knows_sample)
