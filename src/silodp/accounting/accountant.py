"""Events to ε (docs/privacy.md, sections 3, 4 and 9).

Two accountants: `pld`, privacy loss distributions, exact for Gaussian releases alone (see `gaussian`) and else tight up
to the grid (see `losses`), and `rdp`, Rényi orders (see `renyi`), which also knows integer noise. Both are upper bounds
of the same δ(ε), and so is the smaller of them: `pld` returns Rényi orders' answer where that is smaller, for a δ near
the arithmetic's precision or a very large number of very small steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import get_args

from silodp.accounting import _gaussian, pld, rdp
from silodp.accounting._steps import Accountant, EventCount, Steps, flatten_event, flatten_per_unit
from silodp.accounting.events import Composed, Event, Gaussian, Skellam, alternatives, list_nested
from silodp.errors import SilodpError, check_real

__all__ = [
    "Accountant",
    "Composition",
    "EventCount",
    "check_accountant",
    "check_delta",
    "compute_delta",
    "compute_epsilon",
    "default_accountant",
    "grid_for",
]


def compute_epsilon(charges: Iterable[EventCount], delta: float, accountant: Accountant = "pld") -> float:
    """ε at δ of all (event, count) together; 0.0 for nothing, infinity where nothing is promised.

    Where charges tell kinds of units apart (`Each`), the largest ε of a kind.

    Raises:
        SilodpError: an event's parameter, δ or the accountant is out of range.
    """
    check_delta(delta)
    check_accountant(accountant)
    return max(
        min(_epsilon(steps, float(delta), by) for by, steps in known) for known in _known(charges, accountant)
    )


def default_accountant(events: Iterable[Event]) -> Accountant:
    """The tightest accountant that knows all of these events."""
    return (
        "rdp"
        if any(isinstance(inner, Skellam) for event in events for inner in list_nested(event))
        else "pld"
    )


def compute_delta(charges: Iterable[EventCount], epsilon: float, accountant: Accountant = "pld") -> float:
    """δ at ε of all (event, count) together; 0.0 for nothing, 1.0 where nothing is promised.

    Raises:
        SilodpError: an event's parameter, ε or the accountant is out of range.
    """
    if not epsilon >= 0:
        raise SilodpError(
            f"epsilon is {epsilon!r}: it must be 0 or more.", code="argument.value", field="epsilon"
        )
    check_accountant(accountant)
    return max(
        min(_delta(steps, epsilon, by) for by, steps in known) for known in _known(charges, accountant)
    )


def grid_for(event: Event, count: int = 1) -> float | None:
    """The interval between privacy losses that `pld` uses for `count` times this event alone.

    1e-4 times a power of two, see `pld.grid_of`; None where there is no distribution (nothing promised or
    nothing lost).
    """
    steps = flatten_event([(event, count)], "pld")
    return pld.grid_of(steps) if steps else None


class Composition:
    """What has been spent so far: a count for each event, and ε whenever it is asked for.

    ε is computed from the counts, in one transform however many rounds there were, so it never drifts from
    what `compute_epsilon` says. It never falls: a new, smaller kind of event refines the grid, which may lower ε by a
    part in 10⁵, and the larger value is kept.
    """

    def __init__(self, accountant: Accountant = "pld") -> None:
        check_accountant(accountant)
        self.accountant = accountant
        self._counts: Counter[Event] = Counter()
        self._said: dict[float, float] = {}

    def add(self, event: Event, count: int = 1) -> None:
        """Charge `event` `count` times.

        Raises:
            SilodpError: a parameter is out of range, or the event tells other kinds of units apart than those before;
                nothing is charged then.
        """
        flatten_per_unit([(event, count)], self.accountant)
        alternatives(Composed((event, *self._counts)))
        self._counts[event] += count

    def epsilon(self, delta: float) -> float:
        """ε at δ, as the function `compute_epsilon`."""
        now = compute_epsilon(self._counts.items(), delta, self.accountant)
        self._said[delta] = max(now, self._said.get(delta, 0.0))
        return self._said[delta]

    def after(self, event: Event, count: int = 1) -> Composition:
        """What would be spent after one more charge; this object is left alone."""
        then = Composition(self.accountant)
        then._counts, then._said = self._counts.copy(), dict(self._said)
        then.add(event, count)
        return then


def check_delta(delta: float) -> None:
    """Refuse a δ that is not strictly between 0 and 1."""
    check_real("delta", delta)
    if not 0 < delta < 1:
        raise SilodpError(
            f"delta is {delta!r}: it must lie strictly between 0 and 1, for example 1e-5.",
            code="argument.value",
            field="delta",
        )


def check_accountant(accountant: str) -> None:
    """Refuse a name that is not an accountant's."""
    if accountant not in get_args(Accountant):
        raise SilodpError(
            f"accountant is {accountant!r}: it must be 'pld' or 'rdp'.",
            code="argument.value",
            field="accountant",
        )


def _known(
    charges: Iterable[EventCount], accountant: Accountant
) -> Iterable[tuple[tuple[Accountant, Steps | None], ...]]:
    """For each kind of unit, the accountants whose bounds hold, each with the steps it knows."""
    charges = list(charges)
    by: tuple[Accountant, ...] = ("pld", "rdp") if accountant == "pld" else ("rdp",)
    kinds = zip(*(flatten_per_unit(charges, one) for one in by), strict=True)
    return dict.fromkeys(tuple(zip(by, steps, strict=True)) for steps in kinds)


@lru_cache(maxsize=4096)  # rounds × adversaries of a run, found again by the next seed's
def _epsilon(steps: Steps | None, delta: float, accountant: Accountant) -> float:
    if steps is None:
        return math.inf
    if not steps:
        return 0.0
    if accountant == "rdp":
        return rdp.epsilon(steps, delta)
    if (sigma := _only_gaussian(steps)) is not None:
        return _gaussian.epsilon(1 / sigma, delta)
    try:
        return max(direction.epsilon(delta) for direction in pld.composed(steps, pld.grid_of(steps)))
    except OverflowError:  # losses too large for any grid: Rényi orders still have a bound
        return math.inf
    except SilodpError:
        raise
    except (
        ArithmeticError,
        ValueError,
        MemoryError,
    ) as error:  # of dp_accounting or numpy, far from anything useful
        raise SilodpError(
            "no ε can be computed: noise_multiplier, a sampling probability or the number of steps is beyond what the "
            "accountant can represent; choose it closer to 1.",
            code="accounting.out_of_range",
        ) from error


def _delta(steps: Steps | None, epsilon: float, accountant: Accountant) -> float:
    if steps is None:
        return 1.0
    if not steps:
        return 0.0
    if accountant == "rdp":
        return rdp.delta(steps, epsilon)
    if (sigma := _only_gaussian(steps)) is not None:
        return float(_gaussian.delta(1 / sigma, epsilon))
    return max(direction.delta(epsilon) for direction in pld.composed(steps, pld.grid_of(steps)))


def _only_gaussian(steps: Steps) -> float | None:
    """Return σ where all steps together are one Gaussian release, whose δ(ε) is known exactly."""
    match steps:
        case ((Gaussian(sigma), 1),):
            return sigma
    return None
