"""What the charged events let the best attacker find out about one unit's membership, by their worst case.

δ is not the probability that the factor e^ε fails: it is the mean excess, E[(1 − e^(ε−L))₊] for the privacy loss L.
Two other numbers answer what readers take δ and ε for. δ(0), the total variation distance between the world with the
unit and the one without, gives the accuracy of the best attacker who gives membership even odds: ½(1 + δ(0)), by
Neyman and Pearson. P(L > ε) is the probability that what is seen speaks for membership by more than the factor e^ε.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from silodp.accounting import pld, rdp
from silodp.accounting._steps import EventCount, Steps, flatten_per_unit
from silodp.accounting.accountant import Accountant, compute_delta, default_accountant


@dataclass(frozen=True)
class MembershipAttack:
    """How well the best attacker can do; bounds, not measurements: nobody was attacked to get them.

    Attributes:
        accuracy: of guessing membership from even odds, at most; between ½ and 1.
        loss_above_epsilon: the probability that the privacy loss exceeds ε.
        exact: whether both hold with equality for a unit that moves every sum as far as was charged (by privacy loss
            distributions, up to their grid); False: they are upper bounds by Rényi orders.
    """

    accuracy: float
    loss_above_epsilon: float
    exact: bool


def compute_membership_attack(
    charges: Iterable[EventCount], epsilon: float, excess: float = 0.0
) -> MembershipAttack:
    """Bound the best attack on membership against all (event, count) together.

    By privacy loss distributions wherever they know the events, whatever accountant computed ε.

    Args:
        charges: what was released.
        epsilon: the ε that was stated, 0 or more.
        excess: probability, between 0 and 1, with which more than the events tell is disclosed (of ciphertexts).

    Raises:
        SilodpError: an event's parameter is out of range.
    """
    charges = list(charges)
    accountant = default_accountant(event for event, _ in charges)
    distance = total_variation(charges, accountant)
    return MembershipAttack(
        accuracy=(1 + min(1.0, distance + excess)) / 2,
        loss_above_epsilon=probability_of_loss_above(charges, epsilon, accountant),
        exact=accountant == "pld",
    )


def total_variation(charges: Iterable[EventCount], accountant: Accountant = "pld") -> float:
    """δ(0) of all (event, count) together, or, by `rdp`, an upper bound of it; 1 where nothing is promised.

    Raises:
        SilodpError: an event's parameter or the accountant is out of range.
    """
    if accountant == "pld":
        return compute_delta(charges, 0.0, accountant)
    return max(_of(steps, rdp.total_variation) for steps in flatten_per_unit(charges, accountant))


def probability_of_loss_above(
    charges: Iterable[EventCount], epsilon: float, accountant: Accountant = "pld"
) -> float:
    """P(L > ε) of all (event, count) together, in the worse direction, or, by `rdp`, an upper bound of it.

    Raises:
        SilodpError: an event's parameter or the accountant is out of range.
    """

    def above(steps: Steps) -> float:
        if accountant == "rdp":
            return rdp.probability_above(steps, epsilon)
        both = pld.composed(steps, pld.grid_of(steps))
        return max(pld.probability_above(direction, epsilon) for direction in both)

    return max(_of(steps, above) for steps in flatten_per_unit(charges, accountant))


def _of(steps: Steps | None, bound: Callable[[Steps], float]) -> float:
    """The bound; 1 where nothing is promised, 0 where nothing is told."""
    if steps is None:
        return 1.0
    return bound(steps) if steps else 0.0
