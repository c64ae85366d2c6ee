"""Privacy filters: limits on ε that hold when the next release is chosen after the earlier ones were seen.

ε of a list of charges that was fixed beforehand is what an accountant says. Where somebody picks the next run by the
last model, refusing what would bring that ε beyond a limit is no guarantee: two mechanisms whose trade-off curves
cross, and the choice between them by the first outcome, have more δ at the limit than either list (Tran et al. 2026).
A filter is a rule, fixed before the first release, that is (ε, δ)-DP whatever is chosen (docs/privacy.md, section 12).

Source: Rogers et al. 2016 (Privacy odometers and filters); Feldman and Zrnic 2021 (Individual privacy accounting via a
Rényi filter); Tran, Koskela, Räisä and Honkela 2026 (arXiv 2602.06756).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from silodp.accounting._gaussian import solve_epsilon
from silodp.accounting.accountant import choose_accountant, compute_epsilon
from silodp.accounting.events import Event, Gaussian
from silodp.accounting.rdp import sum_steps
from silodp.accounting.steps import Steps, flatten_per_unit
from silodp.accounting.views import Adversary
from silodp.errors import SilodpError
from silodp.settings import Delta, check_value
from silodp.text import shorten

PLAN, GAUSSIAN, ORDER = "plan", "gaussian", "order-"
DEFAULT_BOUNDS = (PLAN, GAUSSIAN, "order-4", "order-8", "order-20")

_DISCLOSURE_SHARE = 0.01
"""Of δ: kept for what ciphertexts disclose (a total variation distance), so that the rest is known beforehand."""


@dataclass(frozen=True)
class Filter:
    """A limit on ε at δ, for all releases together, that holds however each is chosen after the earlier ones.

    It has several bounds, each a valid filter at its own part of δ, and admits a release while at least one still
    holds after it (docs/privacy.md, section 12: the excess over ε, summed over the bound that holds at the end,
    is at most the sum of their parts of δ). A bound is:

    - "plan": the releases are among copies of a list that was fixed beforehand, charged by its accountant: with n
      releases of an event in the list, t copies have ⌈t·n⌉. Order and early stopping are free. Where no list was fixed,
      it is the first release, so that equal releases are covered, in any number.
    - "gaussian": all are unsampled Gaussian releases, with Σ 1/σ² at most μ².
    - "order-A" (a whole number A of at least 2): the sum of the Rényi divergences of this one order is bounded.

    The plan's bound has half of δ, and the others share the rest equally.

    Attributes:
        delta: The δ of the limit, in (0, 1).
        filter_bounds: The names of the bounds, at least one, each once.
        plan: The releases of the list with counts; None where none was fixed; of an empty one nothing is a copy.
    """

    delta: float
    filter_bounds: tuple[str, ...] = DEFAULT_BOUNDS
    plan: Mapping[Event, int] | None = None

    def __post_init__(self) -> None:
        check_value("delta", self.delta, Delta)
        if not self.filter_bounds or len(set(self.filter_bounds)) < len(self.filter_bounds):
            raise _bound_error(self.filter_bounds, "name one or more, each once")
        for name in self.filter_bounds:
            _parse_order(name)

    def epsilon(self, charges: Mapping[Event, int], disclosure: float = 0.0, limit: float = 0.0) -> float:
        """Return the smallest limit at which the filter admits these releases; infinity where there is none.

        It is no guarantee by itself: ε must have been fixed before the first release.

        Args:
            charges: All releases with counts.
            disclosure: The total variation distance of what ciphertexts disclose beside them, summed over the runs.
            limit: The limit that is kept. A larger one leaves less room for the disclosure.
        """
        certified = self._certified(charges)
        return certified if self.leaves_room(max(certified, limit), disclosure) else math.inf

    def admits(self, charges: Mapping[Event, int], limit: float, disclosure: float = 0.0) -> bool:
        """Return whether all these releases together stay within the limit ε.

        Args:
            charges: All releases with counts, the next one included.
            limit: ε, fixed before the first release.
            disclosure: As in `epsilon`.
        """
        return self.epsilon(charges, disclosure, limit) <= limit

    def largest_limit(self, disclosure: float) -> float:
        """Return the largest limit with room for this disclosure; infinity for none of it, negative if it fits none."""
        odds = _DISCLOSURE_SHARE * self.delta / disclosure - 1 if disclosure else math.inf
        return math.log(odds) if odds > 0 else -1.0

    def leaves_room(self, limit: float, disclosure: float) -> bool:
        """Return whether the part of δ that is kept for ciphertexts is enough at a limit: more at a larger one."""
        # A distance of TV adds (1 + e^ε)·TV to δ, whatever is chosen (docs/privacy.md, section 3).
        return (
            disclosure == 0
            or (1 + math.exp(min(limit, 700.0))) * disclosure <= _DISCLOSURE_SHARE * self.delta
        )

    def describe_room(self, limit: float, disclosure: float, adversary: Adversary) -> str:
        """Return a phrase about a limit that has no room for this disclosure (`leaves_room`)."""
        return (
            f"more than the δ that is kept for ciphertexts at the limit of {limit:g} against '{adversary}': lower "
            f"it to {max(0.0, self.largest_limit(disclosure)):.4g} or less, which is always safe"
        )

    def _certified(self, charges: Mapping[Event, int]) -> float:
        # What costs nothing fits every plan: an evaluation within silos is charged as an empty composition.
        spent = {
            e: n for e, n in charges.items() if n and any(steps != () for steps in flatten_per_unit([(e, 1)]))
        }
        if not spent:
            return 0.0
        units = flatten_per_unit(spent.items())
        needed = [math.inf if steps is None else self._certify(steps) for steps in units]
        return min(self._price_copies(spent), max(needed))

    def _price_copies(self, spent: Mapping[Event, int]) -> float:
        """Return ε of the fewest copies of the plan, whole or not, with all these releases; infinity where none has."""
        plan = self.plan
        if plan is None:
            # Which event comes first was decided before anything was seen.
            plan = dict.fromkeys(spent, 1) if len(spent) == 1 else {}
        if PLAN not in self.filter_bounds or not all(plan.get(event) for event in spent):
            return math.inf
        # Exact: after rounding, of the lists for two numbers of copies none might be a part of the other.
        copies = max(Fraction(count, plan[event]) for event, count in spent.items())
        charges = {event: math.ceil(copies * count) for event, count in plan.items()}
        return compute_epsilon(charges.items(), self._part(PLAN), choose_accountant(charges))

    def _certify(self, steps: Steps) -> float:
        """Return the smallest ε that a bound other than the plan's gives for the steps of one kind of unit."""
        found = math.inf
        for name in self.filter_bounds:
            if name == GAUSSIAN:
                gaussians = [(step.noise_multiplier, n) for step, n in steps if isinstance(step, Gaussian)]
                if len(gaussians) == len(steps):
                    mu = math.sqrt(sum(count / sigma**2 for sigma, count in gaussians))
                    found = min(found, solve_epsilon(mu, self._part(name)) if mu else 0.0)
            elif (order := _parse_order(name)) is not None:
                rho = float(sum_steps(steps, (float(order),))[0])
                found = min(found, convert_rdp(order, rho, self._part(name)))
        return found

    def _part(self, bound: str) -> float:
        """Return the part of δ of one bound."""
        available = (1 - _DISCLOSURE_SHARE) * self.delta
        others = len(self.filter_bounds) - (PLAN in self.filter_bounds)
        if PLAN in self.filter_bounds and others:
            available /= 2
        return available if bound == PLAN else available / others


def convert_rdp(order: float, rho: float, delta: float) -> float:
    """Return ε at δ of Rényi differential privacy ρ at one order α > 1.

    ε = ρ + ln((α − 1)/α) − (ln δ + ln α)/(α − 1), and at least 0.

    Source: Canonne, Kamath and Steinke 2020 (The discrete Gaussian for differential privacy), Proposition 12.
    """
    return max(0.0, rho + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1))


def _parse_order(name: str) -> int | None:
    """Return the order of a Rényi bound, None for the other kinds."""
    if name in (PLAN, GAUSSIAN):
        return None
    number = name.removeprefix(ORDER) if isinstance(name, str) and name.startswith(ORDER) else ""
    # Python reads no number of thousands of digits.
    if not (number.isascii() and number.isdigit() and len(number) <= 4 and 2 <= int(number) <= 1024):
        raise _bound_error(name, f"set '{PLAN}', '{GAUSSIAN}' or '{ORDER}A' with a whole A from 2 to 1024")
    return int(number)


def _bound_error(found: object, wanted: str) -> SilodpError:
    return SilodpError(
        f"filter_bounds holds {shorten(found)}: {wanted}.", code="argument.value", field="filter_bounds"
    )
