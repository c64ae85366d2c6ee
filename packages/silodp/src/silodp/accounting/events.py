"""Privacy events: what a run released, as immutable values that accountants turn into ε.

A noise multiplier is a standard deviation in units of the sensitivity of what it is added to.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from silodp._lazy import Registry, make_missing_error
from silodp.errors import SilodpError
from silodp.text import EXTENSIONS, join_names, name_package, shorten

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from silodp.accounting.pld import Losses


@dataclass(frozen=True)
class Gaussian:
    """One release of a sum with Gaussian noise; the unit is always in it.

    Attributes:
        noise_multiplier: The standard deviation σ of the noise, in units of the sensitivity in 2-norm.

    Source: Dwork and Roth 2014, section 3.5.3; its costs are in `accounting._gaussian` and `accounting.rdp`.
    """

    noise_multiplier: float


@dataclass(frozen=True)
class Skellam:
    """One release of a sum of integer vectors with Skellam noise; the unit is always in (docs/privacy.md, section 3).

    Only the Rényi accountant knows this noise.

    Attributes:
        noise_multiplier: The standard deviation of the noise, in units of the sensitivity in 2-norm.
        units: The distance, in grid steps and in 2-norm, by which the unit moves the sum, or a lower bound of it (which
            costs more).
        dimension: The number d of coordinates of the sum.

    Source: Agarwal, Kairouz and Liu 2021 (The Skellam mechanism for differentially private federated learning).
    """

    noise_multiplier: float
    units: int
    dimension: int


@dataclass(frozen=True)
class CorrelatedReleases:
    """Two releases of the same sum of the same batch, with independent noise (docs/decoupled.md).

    Two Gaussian releases with multipliers a and b cost as much as one with 1/√(1/a² + 1/b²): the precision-weighted
    mean of both outcomes is a sufficient statistic. Under Poisson sampling it is charged as one release, since one coin
    is behind both.

    Attributes:
        first: The release that moves a local model.
        second: The release that leaves the silo.
    """

    first: Gaussian
    second: Gaussian | Skellam


Additive = Gaussian | Skellam | CorrelatedReleases


@dataclass(frozen=True)
class PoissonSampled:
    """A noisy release on a Poisson sample, against an adversary who does not know the sample.

    Attributes:
        sampling_probability: The probability q with which the unit is in the sample, by a coin of its own.
        event: The release, with the unit in it.

    Source: Mironov, Talwar and Zhang 2019; rPDP-FL, Definition 4.
    """

    sampling_probability: float
    event: Additive


class ExtensionEvent(ABC):
    """Base of the events of our extension packages: a noisy release, `event`, on a sample of units.

    A frozen dataclass. Accountants and ledgers take it only if the registry `EVENTS` has its class under its `kind`:
    of strangers' classes nothing is known, as of any value that is no event.
    """

    kind: ClassVar[str]
    """Its name in `EVENTS` and in ledgers, which never changes."""

    if TYPE_CHECKING:

        @property
        def event(self) -> Additive:
            """The release, with the unit in it."""

    @abstractmethod
    def check(self) -> None:
        """Refuse parameters out of range ("argument.value"), also where the event costs nothing."""

    @abstractmethod
    def simplify(self, release: Additive) -> Mechanism | None:
        """Return the step that is charged, around the simplified release; None where it costs nothing."""

    @abstractmethod
    def reveal_sample(self) -> Event:
        """Return the event against an adversary who learns the sample."""

    @abstractmethod
    def replace_unit(self) -> Event:
        """Return the event where what a unit adds is replaced, and not removed."""

    @abstractmethod
    def move_to_round(self, place: int, period: int) -> ExtensionEvent:
        """Return the event of the round at a place, from 0, among the `period` rounds that are drawn together."""

    @abstractmethod
    def isolate_round(self) -> Event:
        """Return what the round releases by itself, as an event of this module; attacks score each round so."""

    @abstractmethod
    def bound_moments(self, orders: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return upper bounds (n,) of (α−1)ρ(α) at integer orders α ≥ 2 (n,)."""

    @abstractmethod
    def compute_losses(self, grid: float) -> tuple[Losses, ...]:
        """Return dominating privacy losses in both directions; the release is Gaussian."""

    @abstractmethod
    def estimate_spread(self) -> float:
        """Estimate the standard deviation of the loss, for the choice of a grid; the release is Gaussian."""


@dataclass(frozen=True)
class SampledReplacement:
    """A noisy release on a Poisson sample, where what a unit adds is replaced and not removed; nobody sees the coin.

    With probability 1 - q the unit is not in the sample of either world. Else it moves the sum by one vector in one
    world and by another in the other, each at most as far as the noise multiplier of `event` is for; the two worlds lie
    up to twice as far apart (docs/privacy.md, section 4, W).

    Attributes:
        sampling_probability: The probability q with which the unit is in the sample.
        event: The release, with the unit in it and nothing replaced.
    """

    sampling_probability: float
    event: Additive


@dataclass(frozen=True)
class RevealedSample:
    """One coin for all of the inner event, against an adversary who sees it (docs/privacy.md, sections 3 and 9).

    With probability 1 - q the unit is not in the sample and nothing about it is released. The two stages of rPDP-FL are
    RevealedSample(λ, SelfComposed(PoissonSampled(q, Gaussian(σ)), τ)).

    Attributes:
        sampling_probability: The probability q with which the coin lets the unit in.
        event: What is released if it does.

    Source: rPDP-FL, Lemma 6 (λ is the probability of the coin there).
    """

    sampling_probability: float
    event: Additive | PoissonSampled | SampledReplacement | Group | RevealedSample | SelfComposed | Composed


@dataclass(frozen=True)
class Group:
    """The event for a person with at most `size` records, each sampled independently (docs/privacy.md, section 4, G).

    For a release, or a release on a Poisson sample, this is the worst of all ways in which the person's records may lie
    in the silos that run it. For other events only the Rényi accountant has a bound: group privacy.

    Attributes:
        size: The largest number k of records of the person.
        event: What is released, as one record is charged for it.

    Source: Mironov 2017, Proposition 2, for the Rényi accountant; ULDP-FL (Kato et al.), Lemma 6.
    """

    size: int
    event: Additive | PoissonSampled | RevealedSample | SelfComposed | Composed


@dataclass(frozen=True)
class SelfComposed:
    """The same event `count` times, composed adaptively.

    Attributes:
        event: What is repeated.
        count: The number of repetitions, 0 or more.
    """

    event: (
        Additive
        | PoissonSampled
        | ExtensionEvent
        | SampledReplacement
        | RevealedSample
        | Group
        | SelfComposed
        | Composed
    )
    count: int


@dataclass(frozen=True)
class Composed:
    """Several events, all of them, composed adaptively.

    Attributes:
        parts: The events, in any order; none at all cost nothing.
    """

    parts: tuple[Event, ...]


@dataclass(frozen=True)
class WorstOf:
    """Alternative events, one per kind of unit (for example records of clients with their own settings).

    ε is the maximum over the kinds, each composed over all charges: the i-th alternative of one charge with the i-th of
    the others. A charge without alternatives counts for every kind.

    Attributes:
        alternatives: The events, one for each kind, in an order that is the same in all charges.
    """

    alternatives: tuple[Event, ...]


@dataclass(frozen=True)
class NonPrivate:
    """A release without a privacy guarantee against this adversary.

    Attributes:
        reason: A clause that says why, for example "counts are disclosed".
    """

    reason: str


Mechanism = Additive | PoissonSampled | ExtensionEvent | SampledReplacement | RevealedSample | Group
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

EVENTS: Registry[Callable[..., Event]] = Registry("events", {})
"""Events of our extension packages, by their names in ledgers; those of strangers are no items."""

_STORED_NAMES = {event: name for name, event in STORED_KINDS.items()}


def find_kind(event: type) -> str | None:
    """Return the name in ledgers of a class of events; None: it is none of this module's or of `EVENTS`."""
    kind = getattr(event, "kind", None) if issubclass(event, ExtensionEvent) else None
    # The very class: a stranger's that derives from it, or has its name, is another one.
    return str(kind) if kind is not None and EVENTS.get(kind) is event else _STORED_NAMES.get(event)


def list_nested(event: Event) -> Iterator[Event]:
    """Yield the event and every event inside it."""
    yield event
    for inner in _list_inside(event):
        yield from list_nested(inner)


def explain_not_private(event: Event) -> str | None:
    """Return the reason of the first `NonPrivate` event inside; None where there is none."""
    return next((inner.reason for inner in list_nested(event) if isinstance(inner, NonPrivate)), None)


def count_kinds(event: Event) -> int | None:
    """Return the number of kinds of units that the event names (`WorstOf`); None where it costs every unit the same.

    Raises:
        SilodpError: two parts of it name different numbers of kinds, or none at all.
    """
    # All charges must name the same kinds: the i-th alternative of one goes with the i-th of every other.
    sizes = {len(inner.alternatives) for inner in list_nested(event) if isinstance(inner, WorstOf)}
    if len(sizes) > 1 or 0 in sizes:
        raise SilodpError(
            f"an event names {join_names(map(str, sorted(sizes)))} alternatives: name each kind of unit everywhere.",
            code="accounting.event",
        )
    return sizes.pop() if sizes else None


def select_kind(event: Event, index: int) -> Event:
    """Return the event for the units of one kind."""
    if isinstance(event, WorstOf):
        return select_kind(event.alternatives[index], index)
    return _rebuild(event, lambda inner: select_kind(inner, index))


def to_discrete(event: Event, units: int, dimension: int, reach: float = 1.0) -> Event:
    """Return the same releases with Skellam noise of the same standard deviation in place of Gaussian noise.

    Of `CorrelatedReleases` only the second leaves the silo, so only its noise is drawn in integers.

    Args:
        event: with Gaussian noise.
        units: grid steps that a unit moves the sum by, in 2-norm.
        dimension: d.
        reach: how much further than in real numbers the unit can move the integers.
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
    return _rebuild(event, lambda inner: to_discrete(inner, units, dimension, reach))


def to_continuous(event: Event, least_spread: float = 0.0) -> Event:
    """Return the same releases with Gaussian noise of the same multiplier in place of Skellam noise.

    It is no event to charge: nobody has proven that it covers the integers.

    Args:
        event: With noise of either kind.
        least_spread: The standard deviation in grid steps below which integer noise stays as it is.
    """
    match event:
        case Skellam(sigma, units):
            return Gaussian(sigma) if sigma * units >= least_spread else event
        case CorrelatedReleases(first, second):
            return CorrelatedReleases(first, to_continuous(second, least_spread))  # type: ignore[arg-type]
    return _rebuild(event, lambda inner: to_continuous(inner, least_spread))


def find_costliest_event(events: Sequence[Event]) -> Event:
    """Return one event that costs no less than any of the given ones, which differ only in their noise.

    Of every release the smallest noise multiplier and the fewest grid steps: less of either never costs less. It also
    covers rounds in which an adversary chooses, after the earlier rounds, which of the events takes place.

    Args:
        events: one or more, alike but for noise multipliers and grid steps; of those without a guarantee the first.

    Returns:
        An event of the same structure.

    Raises:
        SilodpError: the events differ in more than that.
    """
    # No guarantee in one case is no guarantee at all.
    nothing = next((event for event in events if isinstance(event, NonPrivate)), None)
    if nothing is not None:
        return nothing
    if len({type(event) for event in events}) > 1:
        raise _differ_error()
    names = vars(events[0])
    return type(events[0])(
        **{name: _choose_costliest(name, [vars(event)[name] for event in events]) for name in names}
    )


def _choose_costliest(name: str, values: Sequence[Any]) -> Any:
    """Return the costliest value of one field of events of the same kind."""
    # Less noise and, with the same multiplier, fewer grid steps cost more; all other fields must agree.
    if name in ("noise_multiplier", "units"):
        return min(values)
    if isinstance(values[0], tuple) and len({len(parts) for parts in values}) == 1:
        return tuple(find_costliest_event(alike) for alike in zip(*values, strict=True))
    if find_kind(type(values[0])) is not None:
        return find_costliest_event(values)
    if any(value != values[0] for value in values):
        raise _differ_error()
    return values[0]


def _differ_error() -> SilodpError:
    return SilodpError(
        "the events of a round differ in more than their noise, so no one event covers them all: let the method's "
        "dp_event depend on the number of survivors through its noise only.",
        code="accounting.events_differ",
    )


def multiply_shift(event: Additive, times: int) -> Additive:
    """Return the same release of a sum that a unit moves exactly `times` as far: integers by so many more steps."""
    match event:
        case Gaussian(sigma):
            return Gaussian(sigma / times)  # the noise is the same, the sensitivity is `times` as large
        case Skellam(sigma, units, dimension):
            return Skellam(sigma / times, times * units, dimension)
        case CorrelatedReleases(first, second):
            return CorrelatedReleases(multiply_shift(first, times), multiply_shift(second, times))  # type: ignore[arg-type]


def scale_shift(event: Event, factor: float) -> Event:
    """Return the same releases of sums that a unit moves at most `factor` ≥ 1 times as far.

    The number of grid steps of integer noise stays as it is: with the same multiplier, fewer steps cost more. So the
    event also covers a shift that is not a multiple of the first one (compare `multiply_shift`).
    """
    match event:
        case Gaussian() | Skellam():
            return replace(event, noise_multiplier=event.noise_multiplier / factor)
        case CorrelatedReleases(first, second):
            return CorrelatedReleases(scale_shift(first, factor), scale_shift(second, factor))  # type: ignore[arg-type]
    return _rebuild(event, lambda inner: scale_shift(inner, factor))


def replace_unit(event: Event) -> Event:
    """Return the same releases where what a unit adds is replaced by something else, and not removed."""
    match event:
        case Gaussian() | Skellam() | CorrelatedReleases():
            # Replacing is removing and adding: the sum moves by at most twice the sensitivity.
            return multiply_shift(event, 2)
        case PoissonSampled(q, inner):
            return SampledReplacement(q, inner)
        case ExtensionEvent():
            return event.replace_unit()
        case SampledReplacement():
            return scale_shift(event, 2)
    return _rebuild(event, replace_unit)


def remove_amplification(event: Event) -> Event:
    """Return the event without amplification by sampling, for a further release of samples that were released before.

    Two releases of one sample are not independent, whether the sample is known or not; without amplification the second
    is covered: given everything seen, it is a release on the sample or nothing.
    """
    # The coin was tossed once for both releases, so the second one cannot count on it again.
    if isinstance(event, RevealedSample | PoissonSampled | ExtensionEvent):
        return remove_amplification(event.event)
    if isinstance(event, SampledReplacement):
        return multiply_shift(event.event, 2)
    return _rebuild(event, remove_amplification)


def reveal_samples(event: Event) -> Event:
    """Return the event against an adversary who learns the samples that it takes as unknown."""
    if isinstance(event, PoissonSampled):
        return RevealedSample(event.sampling_probability, event.event)
    if isinstance(event, ExtensionEvent):
        return event.reveal_sample()
    if isinstance(event, SampledReplacement):
        # Whoever sees the coin sees a replacement inside, and that moves the sum twice as far.
        return RevealedSample(event.sampling_probability, multiply_shift(event.event, 2))
    return _rebuild(event, reveal_samples)


def _list_inside(event: Event) -> tuple[Event, ...]:
    """Return the events in the fields of an event."""
    fields = _get_fields(event)
    inner = (fields[name] for name in ("first", "second", "event") if name in fields)
    return (*inner, *fields.get("parts", ()), *fields.get("alternatives", ()))


def _get_fields(event: Event) -> dict[str, Any]:
    # A value that is no event at all has none here; `steps` refuses it, with a code.
    return getattr(event, "__dict__", {})


def _rebuild(event: Event, change: Callable[[Any], Any]) -> Event:
    """Rebuild the event around changed inner ones; the two parts of `CorrelatedReleases` stay as they are."""
    changed: dict[str, Any] = {
        name: change(value) if name == "event" else tuple(map(change, value))
        for name, value in _get_fields(event).items()
        if name in ("event", "parts", "alternatives")
    }
    return replace(cast(Any, event), **changed) if changed else event


def event_to_dict(event: Event) -> dict[str, Any]:
    """Return the event as JSON-ready fields with its stored kind; infinite noise is "inf"."""
    fields: dict[str, Any] = {"kind": find_kind(type(event)) or _STORED_NAMES[type(event)]}
    if isinstance(event, ExtensionEvent):
        # Whoever reads it without the package learns which one it needs.
        fields["package"] = name_package(type(event)).removeprefix("silodp_")
    for name, value in vars(event).items():
        if find_kind(type(value)) is not None:
            fields[name] = event_to_dict(value)
        elif name in ("parts", "alternatives"):
            fields[name] = [event_to_dict(part) for part in value]
        elif isinstance(value, bool):
            fields[name] = value
        elif name in ("count", "size", "units", "dimension", "rounds"):
            fields[name] = int(value)
        elif name == "reason":
            fields[name] = str(value)
        else:
            fields[name] = "inf" if value == math.inf else float(value)  # JSON has no infinity
    return fields


def event_from_dict(fields: Mapping[str, Any]) -> Event:
    """Return the event of fields that `event_to_dict` made.

    Raises:
        SilodpError: the fields are not an event's.
    """
    # The fields may come from a file that somebody has changed: what the class does not take is refused with a code.
    try:
        values = {name: _read_value(value) for name, value in fields.items()}
        if values.get("noise_multiplier") == "inf":
            values["noise_multiplier"] = math.inf
        kind, package = str(values.pop("kind")), values.pop("package", None)
        if package in EXTENSIONS and kind not in EVENTS:
            raise make_missing_error(package, f"the event {shorten(kind)}")
        return (STORED_KINDS if package is None else EVENTS)[kind](**values)
    except (KeyError, TypeError, AttributeError):
        raise SilodpError(
            f"{fields!r} is not an event: it was written by another version.", code="accounting.event"
        ) from None


def _read_value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(event_from_dict(part) for part in value)
    return event_from_dict(value) if isinstance(value, dict) else value
