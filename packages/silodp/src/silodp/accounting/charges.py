"""How often each event is charged, by the ledger of a run or by the plan of one, and what all charges cost together.

Where events are about single records, `scale_to_person` makes those about a person with several (group privacy).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from silodp.accounting.accountant import (
    Accountant,
    EventCount,
    compute_epsilon,
)
from silodp.accounting.events import (
    Composed,
    Event,
    ExtensionEvent,
    Group,
    NonPrivate,
    RevealedSample,
    SampledReplacement,
    SelfComposed,
    WorstOf,
    explain_not_private,
    find_costliest_event,
)
from silodp.accounting.trade_off import MembershipAttack, compute_membership_attack
from silodp.accounting.views import Adversary
from silodp.errors import SilodpError
from silodp.settings import Delta, check_value

E = TypeVar("E", bound=Hashable)


@dataclass(frozen=True)
class Cost:
    """ε, or None and the reason why there is no guarantee.

    Attributes:
        epsilon: An upper bound of ε; None where nothing is promised.
        reason: A clause that says why nothing is promised; None where something is.
    """

    epsilon: float | None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the entries of JSON output."""
        return {"epsilon": self.epsilon, "private": self.epsilon is not None, "reason": self.reason}


def compute_cost(
    charges: Iterable[EventCount], delta: float, accountant: Accountant, disclosure: float = 0.0
) -> Cost:
    """Return ε of all charges together.

    Args:
        charges: (event, count).
        delta: δ.
        accountant: the accountant that composes the events.
        disclosure: TV, as in `compute_epsilon`.

    Raises:
        SilodpError: δ out of range, or an event that the accountant does not know.
    """
    check_value("delta", delta, Delta)
    charges = list(charges)
    # Before any accountant is asked: one release without a guarantee leaves none, whatever the others cost.
    reason = next((why for event, _ in charges if (why := explain_not_private(event)) is not None), None)
    if reason is not None:
        return Cost(None, reason)
    # Infinity is no number in JSON, and readers ask why: so it becomes None with a reason.
    epsilon = compute_epsilon(charges, delta, accountant, disclosure)
    if math.isfinite(epsilon):
        return Cost(epsilon)
    return Cost(None, f"no epsilon holds at delta {delta:g}, because there is no noise or delta is too small")


def count_events(
    event_in: Callable[[int], E], numbers: Sequence[int], period: int = 1
) -> list[tuple[E, int]]:
    """Return the events of rounds with their counts.

    Where units with budgets retire, rounds cost less from some round on and never more again; so in a plan equal rounds
    are neighbors, and each change is found by bisection. What a ledger charged is counted one by one, and so are rounds
    of a plan that may cost different amounts in any order (`RunSpec.number_rounds`).

    Args:
        event_in: returns the event of a round.
        numbers: of the rounds; a range stands for rounds of a plan, equal ones neighbors.
        period: the number of rounds of a plan after which costs repeat, of which only the first one differs from the
            others (`RunSpec.cost_period`).
    """
    # What was charged may differ from round to round in any order, so that only counting finds it.
    if not isinstance(numbers, range):
        return [*Counter(map(event_in, numbers)).items()]
    if period > 1 and len(numbers) > 1:
        first = -(-len(numbers) // period)
        return [(event_in(0), first), (event_in(1), len(numbers) - first)]
    found: list[tuple[E, int]] = []
    begin = 0
    while begin < len(numbers):
        event = event_in(numbers[begin])
        last, beyond = begin, len(numbers)
        # Between `last`, which costs the same, and `beyond`, which does not. The very last round first: in most plans
        # all rounds are equal, and then one comparison is enough.
        while beyond - last > 1:
            middle = len(numbers) - 1 if beyond == len(numbers) else (last + beyond) // 2
            last, beyond = (middle, beyond) if event_in(numbers[middle]) == event else (last, middle)
        found.append((event, last - begin + 1))
        begin = last + 1
    return found


@dataclass(frozen=True)
class ChargeCounts:
    """How often each event was charged by a ledger (`Ledger.to_counts`), or would be by that of a planned run.

    Attributes:
        delta: The δ of the noise; what ciphertexts disclose has its own part of the δ of a guarantee.
        accountant: The accountant that composes the events.
        rounds: The number of charged rounds of training.
        charged: How often each event was charged, by adversary, for all series.
        further: The part of `charged` that was charged for additional series, by series and adversary.
        releases: What was charged, in order, as (series, release, numbers). `numbers` are the rounds of the series,
            counted from 0, whose release with this number was charged; of a plan they are a range (`count_events`).
        reported: The ε by adversary that was reported earlier; no later ε is smaller.
    """

    delta: float
    accountant: Accountant
    rounds: int
    charged: Mapping[Adversary, Mapping[Event, int]]
    further: Mapping[str, Mapping[Adversary, Mapping[Event, int]]]
    releases: Sequence[tuple[str, int, Sequence[int]]]
    reported: Mapping[Adversary, float] = field(default_factory=dict)

    def list_further(self, adversary: Adversary) -> Counter[Event]:
        """Return how often each event was charged against an adversary for all additional series."""
        return sum((Counter(of.get(adversary, {})) for of in self.further.values()), Counter())

    def compute_cost(self, adversary: Adversary) -> Cost:
        """Return ε of all charges against an adversary."""
        cost = compute_cost(self.charged[adversary].items(), self.delta, self.accountant)
        if cost.epsilon is None:
            return cost
        # A finer grid may lower ε by a part in 10⁵; what was once reported stays.
        return Cost(max(cost.epsilon, self.reported.get(adversary, 0.0)))

    def compute_person_cost(self, adversary: Adversary, records: int) -> Cost:
        """Return ε for a person with at most `records` records, of charges that are about one record."""
        theirs = [
            (scale_to_person(event, records), count) for event, count in self.charged[adversary].items()
        ]
        return compute_cost(theirs, self.delta, self.accountant)

    def bound_attack(self, adversary: Adversary, epsilon: float, delta: float) -> MembershipAttack:
        """Return a bound on attacks on membership by the charged events.

        Args:
            adversary: who attacks.
            epsilon: as it is stated, at `delta`.
            delta: δ of the guarantee; the part that is not for noise is added to the bounds (ciphertexts).
        """
        return compute_membership_attack(
            self.charged[adversary].items(), epsilon, max(0.0, delta - self.delta)
        )


PERSONS_RECORDS = (2, 4, 8, 16)
"""Numbers of records for which a record-level guarantee also states the ε of a person."""


def scale_to_person(event: Event, records: int) -> Event:
    """Return the event of a person with at most `records` records, in any silos, from that of one record.

    Every release becomes the release of a group, whose records are drawn independently. With more than one
    record the random choice whether a silo takes part (`RevealedSample`) is ignored: the records may lie in
    several silos, and that at least one of several silos takes part is more probable than that one given silo
    does. Where silos have their own settings (`WorstOf`), every release is charged with the least noise that it
    has in any silo, in units of what one record can move there. Then k records, in whichever silos they are,
    move it no further than k records of one silo.

    Source: group privacy of Rényi differential privacy, Mironov 2017, Proposition 2 (ULDP-FL, Lemma 6), and proofs in
    docs/privacy.md, sections 4, G, and 9.
    """
    if records == 1:
        return event
    match event:
        case NonPrivate():
            return event
        case RevealedSample(_, inner):
            return scale_to_person(inner, records)
        case SelfComposed(inner, count):
            return SelfComposed(cast(Group, scale_to_person(inner, records)), count)
        case Composed(parts):
            return Composed(tuple(scale_to_person(part, records) for part in parts))
        case WorstOf(parts):
            # The records may lie in silos of different kinds, so no single alternative covers the person.
            try:
                return scale_to_person(find_costliest_event(parts), records)
            except SilodpError:
                # One client's steps are released with shares of the noise that differ from another's.
                return NonPrivate(
                    "silos take different numbers of steps, and records may lie in several of them"
                )
        case ExtensionEvent() | SampledReplacement():
            return NonPrivate(
                "what several records cost that are sampled, or replaced, together, is not known"
            )
        case Group(size, inner):
            return Group(size * records, inner)
    return Group(records, event)
