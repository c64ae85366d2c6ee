"""Trade-off curves: how often an attacker on membership is right at most, from δ(ε) of what was charged.

An attacker who guesses "was in the data" is wrong in two ways. At a false positive rate α, f(α) is the smallest false
negative rate that any attacker can have. Accuracy, area under the ROC curve and true positive rates follow from f. All
of them are upper bounds for the attacker, and none is a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from silodp.accounting.accountant import (
    MAX_EPSILON,
    Accountant,
    Composition,
    EventCount,
    bound_likelier,
    choose_accountant,
    compose_charges,
)
from silodp.accounting.events import scale_shift

Array = NDArray[np.float64]

POINTS = 160
"""Values of ε from which a curve is made; twice as many change the area by less than 1e-5."""

FEW_POINTS = 40
"""The same for an accountant that takes seconds for each δ; the area is larger by less than 1e-3."""

# Cells of false positive rates: geometric at the left end, where f falls fastest.
_EDGES = np.concatenate([[0.0], np.geomspace(1e-12, 1e-2, 400), np.linspace(1e-2, 1.0, 1600)[1:]])


@dataclass(frozen=True, eq=False)
class TradeOff:
    """The smallest error rates of an attacker on membership, under some pairs (ε, δ) that hold together.

    f(α) = max over the pairs of max{0, 1 − δ − e^ε·α, e^(−ε)·(1 − δ − α)}. Fewer pairs, or a larger δ, make f smaller:
    every number below then only grows.

    Attributes:
        epsilons: The ε (n,), 0 or more.
        deltas: The δ (n,) that belong to them, each between 0 and 1.

    Source: Dong, Roth and Su 2022 (Gaussian differential privacy), Proposition 2.12; for a single pair Wasserman and
    Zhou 2010, Kairouz, Oh and Viswanath 2015.
    """

    epsilons: Array
    deltas: Array

    @classmethod
    def of(cls, composition: Composition, points: int = POINTS, disclosure: float = 0.0) -> TradeOff:
        """Return the curve of all charges together.

        Args:
            composition: The bounds of the charges, of any accountant.
            points: The number of values of ε above 0 at which δ is asked for.
            disclosure: TV, as in `compute_epsilon`: what is seen is that far from what the charges describe.
        """
        # Beyond the ε of δ = 1e-9 the curve is flat for every purpose; an accountant may have no ε at so small a δ.
        tops = (composition.epsilon(delta) for delta in (1e-9, 1e-6, 1e-3, 0.1))
        top = next((found for found in tops if found <= MAX_EPSILON), MAX_EPSILON)
        # Denser near 0, where δ falls fastest.
        epsilons = max(top, 2.0) * np.linspace(0.0, 1.0, points + 1) ** 2
        deltas = np.array(composition.deltas(epsilons.tolist()))
        return cls(epsilons, np.minimum(deltas + (1 + np.exp(epsilons)) * disclosure, 1.0))

    @classmethod
    def of_pair(cls, epsilon: float, delta: float) -> TradeOff:
        """Return the curve where only (ε, δ) is known."""
        return cls(
            np.array([min(epsilon, MAX_EPSILON)]), np.array([delta if epsilon <= MAX_EPSILON else 1.0])
        )

    def compute_fnr(self, fpr: ArrayLike) -> Array:
        """Return f(α): the smallest false negative rate at each false positive rate."""
        alpha = np.asarray(fpr, float)[..., None]
        steep = 1 - self.deltas - np.exp(self.epsilons) * alpha
        flat = np.exp(-self.epsilons) * (1 - self.deltas - alpha)
        found: Array = np.maximum(0.0, np.maximum(steep, flat).max(-1))
        return found

    def compute_tpr(self, fpr: ArrayLike) -> Array:
        """Return the largest true positive rate at each false positive rate, 1 − f."""
        return 1 - self.compute_fnr(fpr)

    @cached_property
    def accuracy(self) -> float:
        """The largest share of right guesses from even odds, between ½ and 1; ½(1 + δ(0)) where δ(0) is known."""
        # Under one pair, the sum of both error rates is smallest where the two lines meet: (e^ε + δ)/(1 + e^ε).
        return float(np.min(1 - (1 - self.deltas) / (1 + np.exp(self.epsilons))))

    @cached_property
    def auc(self) -> float:
        """The largest area under an attacker's ROC curve: the probability to rank a member above a non-member."""
        # f is a maximum of lines, so it is convex, and its value in the middle of a cell is at most its mean there.
        # So this sum is not above the integral of f, and the area is not too small.
        middles = (_EDGES[1:] + _EDGES[:-1]) / 2
        return float(1 - np.diff(_EDGES) @ self.compute_fnr(middles))


def compose_trade_off(
    charges: Iterable[EventCount], accountant: Accountant | None = None, points: int = POINTS
) -> TradeOff:
    """Return the curve of all (event, count) together.

    Args:
        charges: What was released.
        accountant: Who composes them; None for the tightest registered one that knows all events.
        points: As in `TradeOff.of`.

    Raises:
        SilodpError: an event is not supported, or one of its parameters is out of range.
    """
    charges = list(charges)
    found = accountant or choose_accountant(event for event, _ in charges)
    return TradeOff.of(compose_charges(found, charges), points)


def divide_noise(charges: Iterable[EventCount], factor: float) -> list[EventCount]:
    """Return the charges of the same releases with all noise divided by a factor above 0."""
    return [(scale_shift(event, factor), count) for event, count in charges]


@dataclass(frozen=True)
class MembershipAttack:
    """What the charged events let the best attacker learn about one unit's membership; bounds, not measurements.

    δ is not the probability that the factor e^ε fails: it is the mean excess, E[(1 − e^(ε−L))₊] for the privacy loss L.
    Two other numbers answer what readers take δ and ε for. δ(0), the total variation distance between the world with
    the unit and the one without, gives the accuracy of the best attacker who gives membership even odds: ½(1 + δ(0)),
    by Neyman and Pearson. The other is the largest probability of events that are more than e^ε times likelier in one
    world than in the other.

    Attributes:
        accuracy: An upper bound of the accuracy of guessing membership from even odds, between ½ and 1.
        loss_above_epsilon: An upper bound of the probability of conclusions that are more than e^ε times likelier with
            the unit than without it, or without it than with it, whatever they are drawn from.
        exact: Whether all hold with equality for a unit that moves every sum as far as was charged (by privacy loss
            distributions, up to their grid); False: they are upper bounds by Rényi orders.
        auc: An upper bound of the area under the ROC curve; None where `exact` is False, as it would be far too large.
        tpr_1: An upper bound of the true positive rate at a false positive rate of 1 %; None as `auc`.
        tpr_01: The same at 0.1 %.

    Source: Kairouz, Oh and Viswanath 2015 (The composition theorem for differential privacy) for the view of an
    attacker as a hypothesis test; the lemma of Neyman and Pearson (1933) for the best test.
    """

    accuracy: float
    loss_above_epsilon: float
    exact: bool
    auc: float | None = None
    tpr_1: float | None = None
    tpr_01: float | None = None


def compute_membership_attack(
    charges: Iterable[EventCount], epsilon: float, excess: float = 0.0
) -> MembershipAttack:
    """Bound the best attack on membership against all (event, count) together.

    By privacy loss distributions wherever they know the events, whatever accountant computed ε.

    Args:
        charges: what was released.
        epsilon: the ε that was stated, 0 or more.
        excess: the part of δ, between 0 and 1, that is kept for what ciphertexts disclose: at least (1 + e^ε)·TV.

    Raises:
        SilodpError: an event's parameter is out of range.
    """
    charges = list(charges)
    # Not the accountant of the run: these bounds stand beside its ε, and the tightest ones say most.
    accountant = choose_accountant(event for event, _ in charges)
    composition = accountant.compose(charges)
    rates: dict[str, float] = {}
    if accountant.exact:
        disclosure = excess / (1 + math.exp(min(epsilon, MAX_EPSILON)))
        curve = TradeOff.of(composition, disclosure=disclosure)
        tpr_1, tpr_01 = curve.compute_tpr([0.01, 0.001]).tolist()
        rates = {"auc": curve.auc, "tpr_1": tpr_1, "tpr_01": tpr_01}
    return MembershipAttack(
        accuracy=(1 + min(1.0, composition.total_variation() + excess)) / 2,
        loss_above_epsilon=composition.probability_above(epsilon)
        if excess == 0
        else bound_likelier(lambda smaller: composition.delta(smaller) + excess, epsilon),
        exact=accountant.exact,
        **rates,
    )
