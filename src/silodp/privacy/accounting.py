"""Events to ε (SPEC sections 1 and 2).

Two accountants: `pld`, privacy loss distributions, tight up to the grid (see `losses`), and `rdp`, Rényi
orders (see `renyi`), looser. Both are upper bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, assert_never, get_args

from silodp.errors import SilodpError, check_real
from silodp.privacy import losses, renyi
from silodp.privacy.events import (
    Event,
    Gaussian,
    GroupSampled,
    KnownSample,
    Mechanism,
    NoGuarantee,
    PoissonSampled,
    Repeated,
    Skellam,
)

Accountant = Literal["pld", "rdp"]
Charge = tuple[Event, int]
Steps = tuple[tuple[Mechanism, int], ...]


def epsilon(charges: Iterable[Charge], delta: float, accountant: Accountant = "pld") -> float:
    """ε at δ of all (event, count) together; 0.0 for nothing, infinity where nothing is promised.

    By `pld` also infinity where δ is below the arithmetic's allowance, 1e-16 for every step.

    Raises:
        SilodpError: an event's parameter, δ or the accountant is out of range.
    """
    check_delta(delta)
    check_accountant(accountant)
    steps = _steps(charges, accountant)
    return math.inf if steps is None else _epsilon(steps, float(delta), accountant)


def usual_accountant(events: Iterable[Event]) -> Accountant:
    """The tightest accountant that knows all of these events."""
    return "rdp" if any(_is_integer(event) for event in events) else "pld"


def delta_of(charges: Iterable[Charge], epsilon: float, accountant: Accountant = "pld") -> float:
    """δ at ε of all (event, count) together; 0.0 for nothing, 1.0 where nothing is promised.

    Raises:
        SilodpError: an event's parameter, ε or the accountant is out of range.
    """
    if not epsilon >= 0:
        raise SilodpError(f"epsilon is {epsilon!r}: it must be 0 or more.")
    check_accountant(accountant)
    steps = _steps(charges, accountant)
    if steps is None:
        return 1.0
    if not steps:
        return 0.0
    if accountant == "rdp":
        return renyi.delta(steps, epsilon)
    return max(direction.delta(epsilon) for direction in losses.composed(steps, losses.grid_of(steps)))


def grid_for(event: Event, count: int = 1) -> float | None:
    """The interval between privacy losses that `pld` uses for `count` times this event alone.

    1e-4 times a power of two, see `losses.grid_of`; None where there is no distribution (nothing promised or
    nothing lost).
    """
    steps = _steps([(event, count)], "pld")
    return losses.grid_of(steps) if steps else None


class Spent:
    """What has been spent so far: a count for each event, and ε whenever it is asked for.

    ε is computed from the counts, in one transform however many rounds there were, so it never drifts from
    what `epsilon` says. It never falls: a new, smaller kind of event refines the grid, which may lower ε by a
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
            SilodpError: a parameter is out of range; nothing is charged then.
        """
        _steps([(event, count)], self.accountant)
        self._counts[event] += count

    def epsilon(self, delta: float) -> float:
        """ε at δ, as the function `epsilon`."""
        now = epsilon(self._counts.items(), delta, self.accountant)
        self._said[delta] = max(now, self._said.get(delta, 0.0))
        return self._said[delta]

    def after(self, event: Event, count: int = 1) -> Spent:
        """What would be spent after one more charge; this object is left alone."""
        then = Spent(self.accountant)
        then._counts, then._said = self._counts.copy(), dict(self._said)
        then.add(event, count)
        return then


def check_delta(delta: float) -> None:
    """Refuse a δ that is not strictly between 0 and 1."""
    check_real("delta", delta)
    if not 0 < delta < 1:
        raise SilodpError(f"delta is {delta!r}: it must lie strictly between 0 and 1, for example 1e-5.")


def check_accountant(accountant: str) -> None:
    """Refuse a name that is not an accountant's."""
    if accountant not in get_args(Accountant):
        raise SilodpError(f"accountant is {accountant!r}: it must be 'pld' or 'rdp'.")


_MOST_REACH = 100.0
"""In units of the noise. One step beyond it costs ε in the thousands, and its grid overflows: nothing is promised."""


@lru_cache(maxsize=4096)  # rounds × adversaries of a run, found again by the next seed's
def _epsilon(steps: Steps, delta: float, accountant: Accountant) -> float:
    if not steps:
        return 0.0
    if accountant == "rdp":
        return renyi.epsilon(steps, delta)
    return max(direction.epsilon(delta) for direction in losses.composed(steps, losses.grid_of(steps)))


def _steps(charges: Iterable[Charge], accountant: Accountant) -> Steps | None:
    """Distinct mechanisms with counts, what costs nothing left out; None if nothing is promised."""
    counts: Counter[Mechanism] = Counter()
    promised = True
    for event, count in charges:
        _check(count >= 0 and count == int(count), "count", count, "a whole number, 0 or more")
        if isinstance(event, Repeated):
            _check(event.count >= 0 and event.count == int(event.count), "count", event.count, "0 or more")
            count *= event.count
            event = event.event
        if isinstance(event, NoGuarantee):
            promised = promised and count == 0
            continue
        mechanism = _simplest(event)
        if mechanism is None or count == 0:
            continue
        if accountant == "pld" and _is_integer(mechanism):
            raise SilodpError(
                "the accountant 'pld' knows no integer (Skellam) noise, which secure aggregation adds: choose 'rdp'."
            )
        if _reach(mechanism) >= _MOST_REACH * _noise(mechanism):
            promised = False
        counts[mechanism] += int(count)
    if not promised:
        return None
    if accountant == "pld":
        counts = _gaussians_merged(counts)
    return tuple(sorted(counts.items(), key=repr))


def _gaussians_merged(counts: Counter[Mechanism]) -> Counter[Mechanism]:
    """n Gaussian releases are one with 1/σ² = Σ 1/σᵢ², exactly."""
    gaussians = [(event, n) for event, n in counts.items() if isinstance(event, Gaussian)]
    if not gaussians:
        return counts
    merged: Counter[Mechanism] = Counter(
        {event: n for event, n in counts.items() if not isinstance(event, Gaussian)}
    )
    merged[Gaussian(sum(n / event.noise_multiplier**2 for event, n in gaussians) ** -0.5)] = 1
    return merged


def _simplest(event: Mechanism) -> Mechanism | None:
    """The same mechanism, checked, without needless sampling; None if it says nothing of a person."""
    _check(_noise(event) >= 0, "noise_multiplier", _noise(event), "a number, 0 or more")
    if _noise(event) == math.inf:
        return None
    match event:
        case Gaussian():
            return event
        case Skellam(_, units, dimension):
            _check(units >= 1, "units", units, "1 or more")
            _check(dimension >= 1, "dimension", dimension, "1 or more")
            return event
        case PoissonSampled(q, inner) | KnownSample(q, inner):
            _check(0 <= q <= 1, "sampling_probability", q, "between 0 and 1")
            return None if q == 0 else inner if q == 1 else event
        case GroupSampled(k, gamma, sigma):
            _check(k >= 0 and k == int(k), "group_size", k, "a whole number, 0 or more")
            _check(0 <= gamma <= 1, "sampling_probability", gamma, "between 0 and 1")
            if k == 0 or gamma == 0:
                return None
            if gamma == 1:
                return Gaussian(sigma / k)
            return PoissonSampled(gamma, Gaussian(sigma)) if k == 1 else event
    assert_never(event)


def _is_integer(event: Event) -> bool:
    inner = event.event if isinstance(event, Repeated | PoissonSampled | KnownSample) else event
    inner = inner.event if isinstance(inner, PoissonSampled | KnownSample) else inner
    return isinstance(inner, Skellam)


def _reach(event: Mechanism) -> int:
    """How many sensitivities one unit can move a step by."""
    return event.group_size if isinstance(event, GroupSampled) else 1


def _noise(event: Mechanism) -> float:
    inner = event.event if isinstance(event, PoissonSampled | KnownSample) else event
    return inner.noise_multiplier


def _check(holds: bool, field: str, value: object, must_be: str) -> None:
    if not holds:
        raise SilodpError(f"{field} is {value!r}: it must be {must_be}.")
