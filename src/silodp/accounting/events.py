"""What was run, as immutable events; `accounting` turns them into ε.

A noise multiplier is a standard deviation in units of the sensitivity of what it is added to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from silodp.errors import SilodpError


@dataclass(frozen=True)
class Gaussian:
    """One release of a sum with Gaussian noise; the unit is always in it."""

    noise_multiplier: float


@dataclass(frozen=True)
class Skellam:
    """One release of a sum of integer vectors with Skellam noise; the unit is always in (docs/privacy.md, section 3).

    `units` is how far the unit moves the sum in 2-norm, in grid steps, or a lower bound of it (which costs more);
    `dimension` is d. Only the Rényi accountant knows this noise.
    """

    noise_multiplier: float
    units: int
    dimension: int


@dataclass(frozen=True)
class CorrelatedReleases:
    """Two releases of the same sum of the same batch, with independent noise (docs/decoupled.md).

    Two Gaussian looks are the one of multiplier 1/√(1/a² + 1/b²).
    """

    first: Gaussian
    second: Gaussian | Skellam


Additive = Gaussian | Skellam | CorrelatedReleases


@dataclass(frozen=True)
class PoissonSampled:
    """A noisy release on a Poisson sample, towards one who does not know the sample."""

    sampling_probability: float
    event: Additive


@dataclass(frozen=True)
class SampledReplacement:
    """A noisy release on a Poisson sample, where what a unit adds is replaced and not removed; nobody sees the coin.

    With probability 1 - q the unit is not in the sample of either world. Else it moves the sum by one vector in one
    world and by another in the other, each at most as far as the noise multiplier of `event` is for; the two worlds lie
    up to twice as far apart (docs/privacy.md, section 4, W).
    """

    sampling_probability: float
    event: Additive


@dataclass(frozen=True)
class RevealedSample:
    """One coin for all of the inner event, towards one who knows how it fell (docs/privacy.md, sections 3, 9).

    With probability 1 - q the unit is not in the sample and nothing is said about it. The two stages of rPDP-FL are
    KnownSample(λ, Repeated(PoissonSampled(q, Gaussian(σ)), τ)).
    """

    sampling_probability: float
    event: Additive | PoissonSampled | SampledReplacement | Group | RevealedSample | SelfComposed | Composed


@dataclass(frozen=True)
class Group:
    """The same for a person with at most `size` records, each sampled on its own (docs/privacy.md, section 4, G).

    Of a release, or of a release on a Poisson sample, this is the worst of all ways in which her records may lie in the
    silos that run it. Of anything else only the Rényi accountant knows the cost: group privacy, whatever the event.
    """

    size: int
    event: Additive | PoissonSampled | RevealedSample | SelfComposed | Composed


@dataclass(frozen=True)
class SelfComposed:
    """The same event `count` times, adaptively."""

    event: Additive | PoissonSampled | SampledReplacement | RevealedSample | Group | SelfComposed | Composed
    count: int


@dataclass(frozen=True)
class Composed:
    """Several events, all of them, adaptively."""

    parts: tuple[Event, ...]


@dataclass(frozen=True)
class WorstOf:
    """What a charge costs each of several kinds of units, of which one unit is only one (clients with own settings).

    ε of a book is the largest over the alternatives, each composed over all charges: the i-th of this charge with the
    i-th of that one. A charge without alternatives counts for every kind.
    """

    alternatives: tuple[Event, ...]


@dataclass(frozen=True)
class NonPrivate:
    """Nothing is promised to the person against this adversary, and why."""

    reason: str


Mechanism = Additive | PoissonSampled | SampledReplacement | RevealedSample | Group
Event = Mechanism | SelfComposed | Composed | WorstOf | NonPrivate

STORED_KINDS: dict[str, Callable[..., Event]] = {
    "Gaussian": Gaussian,
    "Skellam": Skellam,
    "TwoLooks": CorrelatedReleases,
    "PoissonSampled": PoissonSampled,
    "SampledReplacement": SampledReplacement,
    "KnownSample": RevealedSample,
    "Group": Group,
    "Repeated": SelfComposed,
    "Composed": Composed,
    "Each": WorstOf,
    "NoGuarantee": NonPrivate,
}
"""Names of events in ledgers and guarantees. They never change, whatever the classes are called."""

_STORED_NAMES = {event: name for name, event in STORED_KINDS.items()}


def list_nested(event: Event) -> Iterator[Event]:
    """The event, and every event inside it."""
    yield event
    for inner in _inside(event):
        yield from list_nested(inner)


def reason_not_private(event: Event) -> str | None:
    """Why nothing is promised, if somewhere in the event nothing is."""
    return next((inner.reason for inner in list_nested(event) if isinstance(inner, NonPrivate)), None)


def alternatives(event: Event) -> int | None:
    """How many kinds of units the event tells apart; None: it costs every unit the same.

    Raises:
        SilodpError: two parts of it tell different numbers apart, or none at all.
    """
    sizes = {len(inner.alternatives) for inner in list_nested(event) if isinstance(inner, WorstOf)}
    if len(sizes) > 1 or 0 in sizes:
        raise SilodpError(
            f"an event names {' and '.join(map(str, sorted(sizes)))} alternatives: name each kind of unit everywhere.",
            code="accounting.event",
        )
    return sizes.pop() if sizes else None


def alternative(event: Event, index: int) -> Event:
    """What the event costs the units of one kind."""
    if isinstance(event, WorstOf):
        return alternative(event.alternatives[index], index)
    return _rebuilt(event, lambda inner: alternative(inner, index))


def to_discrete(event: Event, units: int, dimension: int, reach: float = 1.0) -> Event:
    """The same releases with Skellam noise of the same standard deviation in place of Gaussian noise.

    Of two looks only the second is released, so only its noise is drawn in integers.
    `reach`: how much further than in real numbers the unit can move the integers.
    """

    def integer(look: Gaussian | Skellam) -> Gaussian | Skellam:
        return (
            Skellam(look.noise_multiplier / reach, units, dimension) if isinstance(look, Gaussian) else look
        )

    match event:
        case Gaussian():
            return integer(event)
        case CorrelatedReleases(first, second):
            return CorrelatedReleases(first, integer(second))
    return _rebuilt(event, lambda inner: to_discrete(inner, units, dimension, reach))


def costliest_event(events: Sequence[Event]) -> Event:
    """Return one event that costs no less than any of the given ones, which differ in their noise alone.

    Of every release the smallest noise multiplier and the fewest grid steps: less of either never costs less. It also
    covers rounds in which an adversary chooses, after the earlier rounds, which of the events takes place.

    Args:
        events: one or more, alike but for noise multipliers and grid steps; of those without a guarantee the first.

    Returns:
        An event of the same structure.

    Raises:
        SilodpError: the events differ in more than that.
    """
    nothing = next((event for event in events if isinstance(event, NonPrivate)), None)
    if nothing is not None:
        return nothing
    if len({type(event) for event in events}) > 1:
        raise _unlike()
    names = vars(events[0])
    return type(events[0])(
        **{name: _costliest(name, [vars(event)[name] for event in events]) for name in names}
    )


def _costliest(name: str, values: Sequence[Any]) -> Any:
    """The costliest value of one field of events of the same kind."""
    if name in ("noise_multiplier", "units"):
        return min(values)
    if isinstance(values[0], tuple) and len({len(parts) for parts in values}) == 1:
        return tuple(costliest_event(alike) for alike in zip(*values, strict=True))
    if type(values[0]) in _STORED_NAMES:
        return costliest_event(values)
    if any(value != values[0] for value in values):
        raise _unlike()
    return values[0]


def _unlike() -> SilodpError:
    return SilodpError(
        "the events of a round differ in more than their noise, so no one event covers them all: let the method's "
        "dp_event depend on the number of survivors through its noise only.",
        code="accounting.events_differ",
    )


def double_shift(event: Additive) -> Additive:
    """Return the same release of a sum that a unit moves twice as far."""
    match event:
        case Gaussian(sigma):
            return Gaussian(sigma / 2)
        case Skellam(sigma, units, dimension):
            return Skellam(sigma / 2, 2 * units, dimension)
        case CorrelatedReleases(first, second):
            return CorrelatedReleases(double_shift(first), double_shift(second))  # type: ignore[arg-type]


def without_amplification(event: Event) -> Event:
    """The same release, with fresh noise, towards one who has seen a release of the same samples before.

    Two releases of one sample are no two independent ones, whether the sample is known or not; charged without
    amplification, the second is covered: given all that was seen, it is a release on the sample or nothing.
    """
    if isinstance(event, RevealedSample | PoissonSampled):
        return without_amplification(event.event)
    if isinstance(event, SampledReplacement):
        return double_shift(event.event)
    return _rebuilt(event, without_amplification)


def _inside(event: Event) -> tuple[Event, ...]:
    match event:
        case CorrelatedReleases(first, second):
            return first, second
        case PoissonSampled() | SampledReplacement() | RevealedSample() | Group() | SelfComposed():
            return (event.event,)
        case Composed(parts):
            return parts
        case WorstOf(parts):
            return parts
    return ()


def _rebuilt(event: Event, change: Callable[[Any], Any]) -> Event:
    """Rebuild the event around changed inner ones; the two parts of `CorrelatedReleases` stay as they are."""
    match event:
        case PoissonSampled() | SampledReplacement() | RevealedSample() | Group() | SelfComposed():
            return replace(event, event=change(event.event))
        case Composed(parts):
            return Composed(tuple(change(part) for part in parts))
        case WorstOf(parts):
            return WorstOf(tuple(change(part) for part in parts))
    return event


def event_to_dict(event: Event) -> dict[str, Any]:
    """JSON-ready, with the event's kind; infinite noise is "inf"."""
    fields: dict[str, Any] = {"kind": _STORED_NAMES[type(event)]}
    for name, value in vars(event).items():
        if type(value) in _STORED_NAMES:
            fields[name] = event_to_dict(value)
        elif name in ("parts", "alternatives"):
            fields[name] = [event_to_dict(part) for part in value]
        elif name in ("count", "size", "units", "dimension"):
            fields[name] = int(value)
        elif name == "reason":
            fields[name] = str(value)
        else:
            fields[name] = "inf" if value == math.inf else float(value)
    return fields


def event_from_dict(fields: Mapping[str, Any]) -> Event:
    """Inverse of `event_to_dict`.

    Raises:
        SilodpError: the fields are not an event's.
    """
    try:
        values = {name: _value(value) for name, value in fields.items()}
        if values.get("noise_multiplier") == "inf":
            values["noise_multiplier"] = math.inf
        kind = values.pop("kind")
        return STORED_KINDS[str(kind)](**values)
    except (KeyError, TypeError, AttributeError):
        raise SilodpError(
            f"{fields!r} is not an event: it was written by another version.", code="accounting.event"
        ) from None


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(event_from_dict(part) for part in value)
    return event_from_dict(value) if isinstance(value, dict) else value
