"""How often each event is charged, by the ledger of a run or by the plan of one, and what all charges cost together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from silodp.accounting.accountant import (
    Accountant,
    EventCount,
    MembershipAttack,
    compute_epsilon,
    compute_membership_attack,
)
from silodp.accounting.events import Event, explain_not_private
from silodp.accounting.group_privacy import scale_to_person
from silodp.accounting.views import Adversary
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


def count_events(event_in: Callable[[int], E], numbers: Sequence[int]) -> list[tuple[E, int]]:
    """Return the events of rounds (or evaluations) with their counts.

    Where units with budgets retire, rounds cost less from some round on and never more again; so in a plan equal rounds
    are neighbors, and each change is found by bisection. What a ledger charged is counted one by one.

    Args:
        event_in: returns the event of a round.
        numbers: of the rounds; a range stands for those of a plan.
    """
    # What was charged may differ from round to round in any order, so that only counting finds it.
    if not isinstance(numbers, range):
        return [*Counter(map(event_in, numbers)).items()]
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
        rounds: The number of charged rounds.
        charged: How often each event was charged, by adversary, for rounds and evaluations.
        evaluations: The part of `charged` that was charged for evaluations, by adversary.
        releases: What was charged, in order, as (is_evaluation, release, numbers). `numbers` are the rounds, or the
            evaluations, counted from 0, whose release with this number was charged; of a plan they are a range
            (`count_events`).
        reported: The ε by adversary that was reported earlier; no later ε is smaller.
        is_beyond_plan: Whether events may be larger than those which constants of the aggregator were chosen for.
    """

    delta: float
    accountant: Accountant
    rounds: int
    charged: Mapping[Adversary, Mapping[Event, int]]
    evaluations: Mapping[Adversary, Mapping[Event, int]]
    releases: Sequence[tuple[bool, int, Sequence[int]]]
    reported: Mapping[Adversary, float] = field(default_factory=dict)
    is_beyond_plan: bool = False

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
