"""What was run, as immutable events; `accounting` turns them into ε.

A noise multiplier is a standard deviation in units of the sensitivity of what it is added to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from silodp.errors import SilodpError


@dataclass(frozen=True)
class Gaussian:
    """One release of a sum with Gaussian noise; the unit is always in it."""

    noise_multiplier: float


@dataclass(frozen=True)
class Skellam:
    """One release of a sum of integer vectors with Skellam noise; the unit is always in it (SPEC section 3).

    `units` is how far the unit moves the sum in 2-norm, in grid steps, or a lower bound of it (which costs more);
    `dimension` is d. Only the Rényi accountant knows this noise.
    """

    noise_multiplier: float
    units: int
    dimension: int


Additive = Gaussian | Skellam


@dataclass(frozen=True)
class PoissonSampled:
    """A noisy release on a Poisson sample, towards one who does not know the sample."""

    sampling_probability: float
    event: Additive


@dataclass(frozen=True)
class KnownSample:
    """The same release towards one who knows who was sampled (SPEC section 2).

    With probability 1 - q the unit is not in the sample and the release says nothing about it.
    """

    sampling_probability: float
    event: Additive


@dataclass(frozen=True)
class GroupSampled:
    """One step of Poisson-sampled DP-SGD, a person having at most `group_size` records (SPEC 1, G)."""

    group_size: int
    sampling_probability: float
    noise_multiplier: float


@dataclass(frozen=True)
class Repeated:
    """The same event `count` times, adaptively."""

    event: Gaussian | Skellam | PoissonSampled | KnownSample | GroupSampled
    count: int


@dataclass(frozen=True)
class NoGuarantee:
    """Nothing is promised to the person against this adversary, and why."""

    reason: str


Mechanism = Gaussian | Skellam | PoissonSampled | KnownSample | GroupSampled
Event = Mechanism | Repeated | NoGuarantee

_KINDS: dict[str, Callable[..., Event]] = {
    kind.__name__: kind
    for kind in (Gaussian, Skellam, PoissonSampled, KnownSample, GroupSampled, Repeated, NoGuarantee)
}


def discrete(event: Event, units: int, dimension: int, reach: float = 1.0) -> Event:
    """The same release with Skellam noise of the same standard deviation in place of Gaussian noise.

    `reach`: how much further than in real numbers the unit can move the integers.
    """
    match event:
        case Gaussian(sigma):
            return Skellam(sigma / reach, units, dimension)
        case PoissonSampled(q, Gaussian(sigma)):
            return PoissonSampled(q, Skellam(sigma / reach, units, dimension))
        case KnownSample(q, Gaussian(sigma)):
            return KnownSample(q, Skellam(sigma / reach, units, dimension))
    return event


def unsampled(event: Event) -> Event:
    """The same release towards one who knows the sample and has seen a release of it before.

    Two releases of one sample are no two independent ones; charged without amplification, the second is covered.
    """
    return event.event if isinstance(event, KnownSample) else event


def event_to_dict(event: Event) -> dict[str, Any]:
    """JSON-ready, with the event's kind; infinite noise is "inf"."""
    fields: dict[str, Any] = {"kind": type(event).__name__}
    for name, value in vars(event).items():
        if type(value).__name__ in _KINDS:
            fields[name] = event_to_dict(value)
        elif name in ("count", "group_size", "units", "dimension"):
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
        values = {name: event_from_dict(v) if isinstance(v, dict) else v for name, v in fields.items()}
        if values.get("noise_multiplier") == "inf":
            values["noise_multiplier"] = math.inf
        kind = values.pop("kind")
        return _KINDS[str(kind)](**values)
    except (KeyError, TypeError, AttributeError):
        raise SilodpError(f"{fields!r} is not an event: it was written by another version.") from None
