"""An accountant outside the package, in one file: Rényi differential privacy of Gaussian noise at eight orders.

A release of multiplier σ costs α/(2σ²) at the order α, and costs at one order add up. That units are sampled is not
credited: a round that samples costs at most what the same round for everybody costs, so the bound holds.

Source: Mironov, Rényi Differential Privacy, 2017, Proposition 1 and Corollary 3; Canonne, Kamath and Steinke, The
Discrete Gaussian for Differential Privacy, 2020, Proposition 12 (from orders to ε).

In a configuration: accountant = "few_orders.py:FewOrders".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from silodp.accounting import Accountant, Composition, EventCount, WorstOfUnits, flatten_per_unit
from silodp.accounting.events import Composed, Event, Gaussian, PoissonSampled, RevealedSample, SelfComposed
from silodp.errors import SilodpError

ORDERS = (1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 256.0)


@dataclass(frozen=True)
class Spent(Composition):
    """The bounds of releases that cost `rate`·α together.

    Attributes:
        rate: Σ 1/(2σ²); infinite where a round promised nothing.
    """

    rate: float

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε over the orders."""
        if self.rate == 0:
            return 0.0
        bounds = [
            self.rate * order + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
            for order in ORDERS
        ]
        return max(0.0, min(bounds))


class FewOrders(Accountant):
    """Bounds Gaussian noise, sampled or not; integer noise and groups are refused."""

    name = "few-orders"

    def supports(self, event: Event) -> bool:
        """Return whether all noise in the event is Gaussian."""
        match event:
            case Gaussian():
                return True
            case PoissonSampled(_, inner) | RevealedSample(_, inner) | SelfComposed(inner, _):
                return self.supports(inner)
            case Composed(parts):
                return all(map(self.supports, parts))
        return False

    def compose(self, charges: Iterable[EventCount]) -> WorstOfUnits[Spent]:
        """Add up the steps of each kind of unit that the events name; None stands for a round that promised nothing."""
        kinds = flatten_per_unit(charges)
        return WorstOfUnits(
            tuple(
                Spent(math.inf if steps is None else sum(n * self._rate(step) for step, n in steps))
                for steps in kinds
            )
        )

    def _rate(self, step: Event) -> float:
        match step:
            case Gaussian(sigma):
                return 1 / (2 * sigma**2)
            case PoissonSampled(_, inner) | RevealedSample(_, inner):
                return self._rate(inner)
            case SelfComposed(inner, count):
                return count * self._rate(inner)
            case Composed(parts):
                return sum(map(self._rate, parts))
        raise SilodpError(f"accountant 'few-orders' has no rule for {step!r}.", code="accounting.unsupported")
