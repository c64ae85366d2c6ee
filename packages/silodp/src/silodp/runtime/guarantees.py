"""The guarantees of a run, derived from its specification and the charges of its ledger, real or planned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp.accounting.accountant import Accountant, EventCount, find_accountant, supports_all
from silodp.accounting.charges import PERSONS_RECORDS, ChargeCounts, Cost, compute_cost, count_events
from silodp.accounting.events import Event, NonPrivate, reveal_samples
from silodp.accounting.guarantee import (
    OTHER_CODE,
    PUBLIC_VALUES,
    SERVER_FOLLOWS,
    Guarantee,
    list_assumptions,
    list_not_covered,
)
from silodp.accounting.progress import TRAINING
from silodp.accounting.views import Adversary, View
from silodp.assumption import OFFICERS, Assumption, as_assumptions
from silodp.data.public import ASSUMES_INDEX_BY_PROFILE
from silodp.text import is_own

if TYPE_CHECKING:
    from silodp.aggregators.run_spec import RunSpec

CountParticipation = Callable[[int], np.ndarray]
"""Function of a number of rounds: in how many of these first rounds each silo took part, (S,)."""
_Counts = Mapping[Adversary, Mapping[Event, int]]
"""How often each event was charged, by adversary."""
Releases = Sequence[tuple[str, int, Sequence[int]]]
"""Releases of a run, as of `ChargeCounts`."""
EventsIn = Callable[["RunSpec", int, int], Mapping[Adversary, Event]]
"""Specification of a series, number of the round, release → events by adversary."""


def plan_charges(spec: RunSpec, accountant: Accountant, survivors: int | None = None) -> ChargeCounts:
    """Return what the ledger of a run would hold after all rounds of all series, each released once.

    Args:
        spec: The specification of the run.
        accountant: Composes the events.
        survivors: Number of silos that answer every time; None: all.
    """
    releases = plan_releases(spec)

    def events_in(about: RunSpec, number: int, release: int) -> Mapping[Adversary, Event]:
        return about.round_events(survivors, number)

    further = {one[0]: count_charges(spec, [one], events_in) for one in releases if one[0]}
    charged = count_charges(spec, releases, events_in)
    return ChargeCounts(spec.noise_delta, accountant, spec.rounds, charged, further, releases)


def plan_releases(spec: RunSpec) -> Releases:
    """Return the rounds of training, then those of the series that cost ε, each released once."""
    further = [(one.name, 0, range(times)) for one in spec.charged if (times := one.count(spec.rounds))]
    return [(TRAINING, 0, range(spec.rounds)), *further]


def derive_guarantees(spec: RunSpec, charges: ChargeCounts) -> dict[Adversary, DerivedGuarantee]:
    """Return what is guaranteed against every adversary for the charged rounds of all series.

    Args:
        spec: The specification of the run.
        charges: The charges of its ledger (`Ledger.to_counts`), or of a plan (`plan_charges`).
    """
    views = spec.views()
    # One pass counts for all adversaries, and only if one of them is asked for.
    count_costliest = cache(
        lambda: count_charges(
            spec,
            charges.releases,
            lambda about, number, release: about.costliest_events(number, release),
        )
    )
    return {a: DerivedGuarantee(spec, charges, view, count_costliest) for a, view in views.items()}


@dataclass(frozen=True)
class DerivedGuarantee:
    """The guarantee against one adversary; each part is computed when it is asked for.

    Attributes:
        spec: The specification of the run.
        charges: The charges of its ledger, or of a plan.
        view: The view of the adversary, where all silos answer.
        count_costliest: Returns the events of the charged releases by adversary, each at its largest cost over all
            numbers of answers.
    """

    spec: RunSpec
    charges: ChargeCounts
    view: View
    count_costliest: Callable[[], _Counts]

    @property
    def adversary(self) -> Adversary:
        """The adversary's name."""
        return self.view.adversary

    @cached_property
    def cost(self) -> Cost:
        """ε of all charges."""
        event = self.spec.round_events()[self.adversary]
        if isinstance(event, NonPrivate):
            return Cost(None, event.reason)
        return self._add_disclosure(self.charges.compute_cost(self.adversary), self._charged.items())

    @property
    def persons(self) -> tuple[tuple[int, Cost], ...]:
        """(k, cost of a person with k records), where the unit is a record (group privacy); () where it is a person."""
        numbers = PERSONS_RECORDS if self.spec.method.unit == "record" else ()
        return tuple((k, self.charges.compute_person_cost(self.adversary, k)) for k in numbers)

    @property
    def any_dropouts(self) -> float | None:
        """ε if every release has its largest cost over all numbers of answers; None where all silos must answer."""
        charges = self.charges
        if self.spec.min_silos == len(self.spec.names) or not charges.releases:
            return None
        events = self.count_costliest()[self.adversary]
        return compute_cost(events.items(), charges.delta, charges.accountant).epsilon

    @property
    def sample_known(self) -> float | None:
        """ε against a server that learns who was sampled; None where it knows it, or nobody is sampled."""
        if self.adversary != "server" or not self.spec.method.samples_users:
            return None
        revealed: Counter[Event] = Counter()
        for event, count in self._charged.items():
            revealed[reveal_samples(event)] += count
        if revealed == self._charged:  # no charge is amplified by a sample that the server does not know
            return None
        return self._compute_cost(revealed.items(), self.charges.accountant).epsilon

    @property
    def linkage(self) -> tuple[dict[str, Any], ...]:
        """ε of persons whom silos do not recognize as one, or confuse with another (`Method.linkage_cases`).

        JSON-ready {"case", "epsilon", "estimate"}; cases for which no accountant has a rule are left out.
        """
        # The largest cost: the fewer silos are in a sum, the more one id too many counts.
        view = self.spec.views(self.spec.min_silos)[self.adversary]
        find_cases = self.spec.method.linkage_cases
        # Sums of each silo are seen side by side, as shares are, also where the training shows their total alone.
        showing = [self.charges.further.get(one.name, {}) for one in self.spec.charged if one.shows_silos]
        side_by_side = {event for charged in showing for event in charged.get(self.adversary, {})}
        apart = replace(view, sees_shares=True)
        # Every charge has the same cases in the same order; ε of a case is that of all its events together.
        by_charge = [
            (find_cases(event, apart if event in side_by_side else view), count)
            for event, count in self._charged.items()
        ]
        rows = []
        for alike in zip(*(cases for cases, _ in by_charge), strict=True):
            events = [(case.event, count) for case, (_, count) in zip(alike, by_charge, strict=True)]
            is_estimate = any(case.is_estimate for case in alike)
            # An estimate is about Rényi divergences (`Method.linkage_cases`), so no other accountant has it.
            accountant = find_accountant("rdp") if is_estimate else self.charges.accountant
            if supports_all(accountant, [event for event, _ in events]):
                epsilon = self._compute_cost(events, accountant).epsilon
                rows.append({"case": alike[0].case, "epsilon": epsilon, "estimate": is_estimate})
        return tuple(rows)

    @property
    def claims(self) -> tuple[dict[str, Any], ...]:
        """ε that a paper claims for this run without a valid proof, JSON-ready {"epsilon", "why"}."""
        # The claim is a method too, with the event that the paper charges.
        claimed, charges = self.spec.method.paper_claim, self.charges
        if claimed is None:
            return ()
        # The claim is about training; other series cost what they cost.
        rounds = [part for part in charges.releases if not part[0]] or [(TRAINING, 0, ())]
        counts = count_charges(
            replace(self.spec, method=claimed),
            rounds,
            lambda about, number, release: about.round_events(None, number),
        )
        spent = [*counts[self.adversary].items(), *charges.list_further(self.adversary).items()]
        epsilon = compute_cost(spent, charges.delta, charges.accountant).epsilon
        why = as_assumptions(claimed.assumptions)[-1].text
        return () if epsilon is None else ({"epsilon": epsilon, "why": why},)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions on which the guarantee rests."""
        spec = self.spec
        common = list_assumptions(
            self.view,
            spec.aggregator.adds_integers and spec.bounds is not None,
            public_index=spec.has_public_index,
            several_ids=spec.method.allows_several_ids,
            samples_users=spec.method.samples_users,
            is_sampled=spec.is_sampled,
            isolate_units=spec.isolate_units,
        )
        by_profile = spec.data.identity_digest and spec.needs_common_index
        draws = spec.method.samples_silos or (
            spec.method.samples_users and spec.aggregator.sampled_by != "silos"
        )
        asks_server = draws or spec.method.needs_counts
        protocol = as_assumptions(spec.aggregator.assumptions)
        if not asks_server:
            protocol = tuple(one for one in protocol if one != SERVER_FOLLOWS)
        # Code from outside silodp is an assumption: silodp's tests do not cover it.
        has_plugin = spec.has_plugins or not is_own(type(self.charges.accountant))
        return (
            *common,
            *((ASSUMES_INDEX_BY_PROFILE,) if by_profile else ()),
            *(protocol if self.adversary != "released" else ()),
            *as_assumptions(spec.method.assumptions),
            *(
                assumption
                for one in spec.charged
                for assumption in as_assumptions(spec.derived[one.name].method.assumptions)
            ),
            *spec.data.assumptions,
            *((PUBLIC_VALUES,) if spec.model.keeps_values else ()),
            *((OTHER_CODE,) if spec.model.other_code or has_plugin else ()),
        )

    def to_guarantee(self, count_participation: CountParticipation) -> Guarantee:
        """Return all parts, as they are stored.

        Args:
            count_participation: Called only where units have privacy budgets.
        """
        spec, charges, epsilon = self.spec, self.charges, self.cost.epsilon
        stated = Guarantee(
            adversary=self.adversary,
            unit=spec.method.unit,
            epsilon=epsilon,
            delta=spec.delta,
            rounds=charges.rounds,
            accountant=charges.accountant.name,
            method=spec.method.name,
            private=epsilon is not None,
            releasable=spec.is_secret and epsilon is not None,
            reason=self.cost.reason,
            not_covered=list_not_covered(spec.tested, spec.has_public_index),
            claims=self.claims,
        )
        if epsilon is None:  # nothing is guaranteed that could rest on assumptions, or grow with dropouts
            return stated
        return replace(
            stated,
            assumptions=self.assumptions + delta_warning(spec.delta, spec.population.users),
            persons=tuple((records, cost.epsilon) for records, cost in self.persons),
            groups=self._report_budgets(count_participation),
            any_dropouts=self.any_dropouts,
            sample_known=self.sample_known,
            linkage=self.linkage,
        )

    @property
    def _charged(self) -> Mapping[Event, int]:
        return self.charges.charged[self.adversary]

    def _compute_cost(self, charged: Collection[EventCount], accountant: Accountant) -> Cost:
        """Return ε of charges that may be larger than those of the run."""
        return self._add_disclosure(
            compute_cost(charged, self.spec.noise_delta, accountant), charged, accountant
        )

    def _add_disclosure(
        self, cost: Cost, charged: Collection[EventCount], accountant: Accountant | None = None
    ) -> Cost:
        """Return the cost, or a larger one if what encryption discloses does not fit in the part of δ kept for it.

        Constants of the aggregator are chosen so that it fits at the ε of a run. Where it does not, ε is also computed
        with all of δ and the disclosure, and the larger of both counts (docs/privacy.md, section 3).
        """
        spec = self.spec
        if spec.noise_delta == spec.delta or cost.epsilon is None:
            return cost
        disclosure = spec.aggregator.disclosure(spec).get(self.adversary, 0.0)
        # (1 + e^ε)·TV is what the disclosure adds to δ; e^700 is about the largest float.
        if (1 + math.exp(min(cost.epsilon, 700.0))) * disclosure <= spec.delta - spec.noise_delta:
            return cost
        disclosed = compute_cost(charged, spec.delta, accountant or self.charges.accountant, disclosure)
        return max(cost, disclosed, key=lambda one: math.inf if one.epsilon is None else one.epsilon)

    def _report_budgets(self, count_participation: CountParticipation) -> tuple[dict[str, Any], ...]:
        """Return requested and charged ε of units with privacy budgets, which are public."""
        spec, charges = self.spec, self.charges
        budgets: Sequence[np.ndarray] = spec.data.silo_budgets or ()
        if spec.method.unit == "user":
            of_users = spec.population.budgets
            budgets = () if of_users is None else (np.array(of_users),)
        if not budgets:
            return ()
        joined = count_participation(charges.rounds)[: len(budgets)]
        return spec.method.budgets.report(
            self.view, budgets, joined, charges.rounds, charges.delta, charges.accountant
        )


def delta_warning(delta: float, users: int) -> tuple[Assumption, ...]:
    """Return the remark on a δ that is not below 1/U; () for others."""
    if delta * users < 1:
        return ()
    return (
        warn_of_delta(
            f"δ = {delta:g} is accepted although it is not below 1/U = {1 / users:.2g}: a mechanism that publishes one "
            "person's records outright has such a δ; take one well below"
        ),
    )


def warn_of_delta(text: str) -> Assumption:
    """Return the assumption that a large δ is wanted, with this text."""
    return Assumption("delta-large", text, f"a statistician, and {OFFICERS}")


def count_charges(spec: RunSpec, releases: Releases, events_in: EventsIn) -> dict[Adversary, Counter[Event]]:
    """Return how often each event is charged against each adversary.

    Args:
        spec: The specification of the run.
        releases: What is released; of a plan, the numbers are a range (`plan_releases`).
        events_in: Returns the events of a release.
    """
    found: dict[Adversary, Counter[Event]] = {}
    for series, release, numbers in releases:
        about = spec.about(series)

        def find(number: int, about: RunSpec = about, release: int = release) -> tuple[Any, ...]:
            return tuple(events_in(about, number, release).items())

        period = 1
        if isinstance(numbers, range):  # of a plan
            numbers, period = about.number_rounds(len(numbers)), about.cost_period
        # Without rounds an event is charged no times: it still says whether there would be a guarantee.
        for events, count in count_events(find, numbers, period) or [(find(0), 0)]:
            for adversary, event in events:
                found.setdefault(adversary, Counter())[event] += count
    return found
