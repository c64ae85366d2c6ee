"""Accountants: from privacy events to ε and δ (docs/privacy.md, sections 3, 4 and 9).

An accountant is a plug-in: one class in one file, registered below or given as an object. All accountants bound the
same δ(ε) from above, so the smaller of two bounds holds as well.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any, Generic, TypeVar, cast

from silodp._lazy import Registry
from silodp.accounting.events import Event, explain_not_private
from silodp.errors import SilodpError
from silodp.settings import MAX_REAL, Delta, check_value
from silodp.text import join_names, name_class, shorten

MAX_EPSILON = 700.0  # e^ε is a float64
EventCount = tuple[Event, int]
"""An event, and how many times it took place."""

ACCOUNTANTS: Registry[type[Accountant]] = Registry(
    "accountants",
    {
        "pld": "silodp.accounting.pld:PldAccountant",
        "rdp": "silodp.accounting.rdp:RdpAccountant",
    },
)
"""By the name in a configuration, the tightest first; their libraries take a second to import."""


class Composition(ABC):
    """Upper bounds of the privacy loss of all charges together, composed adaptively; immutable.

    Only `epsilon` must be written; the other bounds follow from it and may be replaced by sharper ones.
    """

    @abstractmethod
    def epsilon(self, delta: float) -> float:
        """Return an upper bound of ε at δ in (0, 1): at least 0, infinity where nothing is promised."""

    def delta(self, epsilon: float) -> float:
        """Return an upper bound of δ at ε ≥ 0, at most 1; by default the smallest one that `epsilon` certifies."""
        # In ln δ, from the smallest float on, since δ is asked for over hundreds of powers of ten; δ = 1 always holds.
        # The upper end is returned: what was tried there is known to hold.
        low, high = -690.0, 0.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (low, middle) if self.epsilon(math.exp(middle)) <= epsilon else (middle, high)
        return math.exp(high)

    def deltas(self, epsilons: Sequence[float]) -> list[float]:
        """Return `delta` at each of several ε; replace it where one computation serves all of them."""
        return [self.delta(epsilon) for epsilon in epsilons]

    def total_variation(self) -> float:
        """Return an upper bound of δ(0), the total variation distance of the worlds with and without the unit."""
        return self.delta(0.0)

    def probability_above(self, epsilon: float) -> float:
        """Return an upper bound of the probability of all events that are more than e^ε times likelier in one world.

        It holds for whatever is computed from what is seen. That may be more than P(L > ε) for the privacy loss L of
        what is seen: an event may have the ratio e^ε as a whole, where some of its outcomes have a smaller one. By
        default see `bound_likelier`.
        """
        return bound_likelier(self.delta, epsilon)


def bound_likelier(compute_delta: Callable[[float], float], epsilon: float) -> float:
    """Return the smallest δ(ε − x)/(1 − e^(−x)) over some x in (0, ε].

    An event with P(E) ≥ e^ε·Q(E) has δ(ε − x) ≥ P(E) − e^(ε − x)·Q(E) ≥ (1 − e^(−x))·P(E).
    """
    # Any x gives a bound. The best one is near ε where δ falls slowly, and tiny where it falls fast: sixteenths of ε,
    # then powers of two.
    parts = [*(i / 16 for i in range(1, 17)), *(2.0**-i for i in range(5, 12))] if epsilon > 0 else []
    return min([1.0, *(compute_delta(epsilon * (1 - p)) / -math.expm1(-epsilon * p) for p in parts)])


class Accountant(ABC):
    """A rule that turns events into ε. A new one implements `name`, `supports` and `compose`.

    The contract, on which every printed guarantee rests:

    - Upper bound: `compose(charges).epsilon(delta)` is at least the true ε at δ of all (event, count) together, in any
      order, each chosen after the earlier outcomes are known, for a unit added or removed. Where events name several
      kinds of units (`WorstOf`) it is at least the largest ε of a kind; where a `NonPrivate` event is charged at least
      once it is infinity; of no charges it is 0. Numerical error counts: round up.
    - Monotone: more charges never cost less, and a larger δ never costs more, up to the last digits. (A ledger never
      reports less than it did, whatever the accountant says.)
    - Refusal: `compose` raises `SilodpError` with "accounting.unsupported" for an event that `supports` denies, and
      with "argument.value" for parameters out of range; it never ignores an event.
    - State: `compose` depends on its arguments alone, so that a report finds the same ε again. It may cache, and is
      called from several threads: `functools.lru_cache` is safe. A ledger asks after every round, a calibration some
      hundred times, so what takes seconds should be cached.

    `flatten_per_unit` turns charges into distinct checked steps, as most accountants need them.
    """

    name: str
    """What ledgers and guarantees store. Other rules need another name; those of `ACCOUNTANTS` are taken."""

    exact: bool = False
    """Whether bounds hold with equality, up to a grid, for a unit that moves every sum as far as was charged."""

    @abstractmethod
    def supports(self, event: Event) -> bool:
        """Return whether `compose` has a bound for the event and every event inside it."""

    @abstractmethod
    def compose(self, charges: Iterable[EventCount]) -> Composition:
        """Return the bounds of all charges together.

        Args:
            charges: (event, count), in no order; an event may stand more than once.

        Raises:
            SilodpError: an event is not supported, or one of its parameters is out of range.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


C = TypeVar("C", bound=Composition)


@dataclass(frozen=True)
class WorstOfUnits(Composition, Generic[C]):
    """The largest bound over several kinds of units.

    Attributes:
        kinds: The bounds of each kind, one for each that differs from the others.
    """

    kinds: tuple[C, ...]

    def epsilon(self, delta: float) -> float:
        """As `Composition`."""
        # A person is of one kind, whichever it is, so kinds are not added up.
        return max(kind.epsilon(delta) for kind in self.kinds)

    def delta(self, epsilon: float) -> float:
        """As `Composition`."""
        return max(kind.delta(epsilon) for kind in self.kinds)

    def deltas(self, epsilons: Sequence[float]) -> list[float]:
        """As `Composition`."""
        return list(map(max, zip(*(kind.deltas(epsilons) for kind in self.kinds), strict=True)))

    def total_variation(self) -> float:
        """As `Composition`."""
        return max(kind.total_variation() for kind in self.kinds)

    def probability_above(self, epsilon: float) -> float:
        """As `Composition`."""
        return max(kind.probability_above(epsilon) for kind in self.kinds)


def find_accountant(given: Accountant | str) -> Accountant:
    """Return the accountant of a name in `ACCOUNTANTS`, or the given object, checked.

    Raises:
        SilodpError: the name is not known, the object is no accountant, or it bears the name of another one.
    """
    # A text that is a name of silodp's own never leads to an import of somebody else's code.
    if isinstance(given, str) and given in ACCOUNTANTS:
        return _registered(given)
    names = join_names(map(repr, ACCOUNTANTS), "or")
    if not isinstance(given, Accountant):
        raise SilodpError(
            f"accountant = {shorten(given)}: set {names}, or an object of a class derived from silodp.Accountant.",
            code="argument.value",
            field="accountant",
        )
    # A name of silodp's own under other rules would be stored, and a report would then compute with the wrong ones.
    name: object = getattr(given, "name", None)
    if not isinstance(name, str) or not name or (name in ACCOUNTANTS and given != _registered(name)):
        raise SilodpError(
            f"{type(given).__name__}.name = {shorten(name)}: set a name of its own, other than {names}.",
            code="argument.value",
            field="accountant",
        )
    return given


def choose_accountant(events: Iterable[Event]) -> Accountant:
    """Return the tightest registered accountant that supports all of these events."""
    events = tuple(events)
    # The last one knows every event; where it does not, it refuses in `compose`, with a code.
    known = map(_registered, ACCOUNTANTS)
    return next((a for a in known if all(map(a.supports, events))), _registered([*ACCOUNTANTS][-1]))


def supports_all(accountant: Accountant, events: Iterable[Event]) -> bool:
    """Return whether the accountant has a bound for every event that promises something."""
    return all(explain_not_private(event) is not None or accountant.supports(event) for event in events)


def compose_charges(accountant: Accountant, charges: Iterable[EventCount]) -> Composition:
    """Return the bounds of all charges together by an accountant, which may be a plug-in.

    Raises:
        SilodpError: the accountant refuses a charge, or returned something else than bounds (code plugin.returned).
    """
    found: object = accountant.compose(charges)
    if isinstance(found, Composition):
        return found
    raise SilodpError(
        f"the accountant {name_class(type(accountant))}: compose returned a {type(found).__name__}: return an object "
        "of a class derived from silodp.accounting.Composition.",
        code="plugin.returned",
        field="accountant",
    )


def compute_epsilon(
    charges: Iterable[EventCount],
    delta: float,
    accountant: Accountant | str = "pld",
    disclosure: float = 0.0,
) -> float:
    """Return ε at δ of all charges together.

    Args:
        charges: (event, count), composed adaptively.
        delta: δ in (0, 1).
        accountant: a name in `ACCOUNTANTS`, or an object.
        disclosure: TV, the total variation distance between what is seen and what the charges describe. ε is then the
            one with δ(ε) + (1 + e^ε)·TV ≤ δ, above the smallest by less than a thousandth of it.

    Returns:
        An upper bound; 0.0 for no charges, infinity where nothing is promised. Where events name several kinds of
        units (`WorstOf`), the largest ε of a kind.

    Raises:
        SilodpError: an event's parameter, δ or the accountant is out of range.

    Source: for `disclosure` docs/protocols.md, section 3; for composition that of the accountant.
    """
    check_value("delta", delta, Delta)
    _check_not_negative("disclosure", disclosure)
    # Once for all δ: composing takes most of the time, and `disclosure` asks several times.
    found = find_accountant(accountant)
    composition = compose_charges(found, _check_charges(charges))

    def epsilon_at(part: float) -> float:
        epsilon = composition.epsilon(part)
        if not isinstance(epsilon, Real):
            raise SilodpError(
                f"the accountant {name_class(type(found))}: epsilon of its composition returned a "
                f"{type(epsilon).__name__}: return a number.",
                code="plugin.returned",
                field="accountant",
            )
        # NaN, which a plug-in may return, is not ≥ 0 either, and would pass every comparison with a budget.
        if not epsilon >= 0:
            raise SilodpError(
                f"accountant '{found.name}' gives ε = {epsilon}: it must be 0 or more; correct the accountant.",
                code="accounting.out_of_range",
                field="accountant",
            )
        return epsilon

    if disclosure == 0:
        return epsilon_at(float(delta))
    # δ(ε) + (1 + e^ε)·TV ≤ δ has ε on both sides. So go up from below, where e^ε is too small, to the first ε that
    # holds; the steps double so that the search ends.
    epsilon, step = 0.0, 1e-6
    while epsilon < MAX_EPSILON:
        left = delta - (1 + math.exp(epsilon)) * disclosure
        if left <= 0:
            break
        needed = epsilon_at(left)
        if needed <= epsilon:
            return epsilon
        epsilon, step = needed + step, 2 * step
    return math.inf


def compute_delta(
    charges: Iterable[EventCount], epsilon: float, accountant: Accountant | str = "pld"
) -> float:
    """Return δ at ε of all charges together: 0.0 for no charges, 1.0 where nothing is promised.

    Args:
        charges: (event, count), composed adaptively.
        epsilon: ε, 0 or more.
        accountant: a name in `ACCOUNTANTS`, or an object.

    Raises:
        SilodpError: an event's parameter, ε or the accountant is out of range.
    """
    _check_not_negative("epsilon", epsilon)
    composition = compose_charges(find_accountant(accountant), _check_charges(charges))
    return composition.delta(float(epsilon))


def _check_not_negative(name: str, value: Any) -> None:
    """Check for a number of at least 0, however small: a total variation distance may be 1e-100."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and 0 <= value <= MAX_REAL):
        raise SilodpError(
            f"{name} = {shorten(value)}: set a number of at least 0.", code="argument.value", field=name
        )


def _check_charges(charges: object) -> list[EventCount]:
    """Return charges as a list of pairs; what events and counts may be is checked where they are flattened."""
    # An array without dimensions can be iterated by its type alone.
    is_list = isinstance(charges, Iterable) and bool(getattr(charges, "ndim", True))
    listed: list[Any] = list(cast("Iterable[Any]", charges)) if is_list else [charges]
    for charge in listed:
        if not (isinstance(charge, tuple) and len(charge) == 2 and isinstance(charge[0], Event)):
            raise SilodpError(
                f"charges holds {shorten(charge)}: give pairs (event, count), events of silodp.accounting.events.",
                code="argument.type",
                field="charges",
            )
    return listed


@cache
def _registered(name: str) -> Accountant:
    return ACCOUNTANTS[name]()
