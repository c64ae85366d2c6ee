"""What was run, as immutable events; `accounting` turns them into ε.

A noise multiplier is a standard deviation in units of the sensitivity of what it is added to.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gaussian:
    """One release of a sum with Gaussian noise; the unit is always in it."""

    noise_multiplier: float


@dataclass(frozen=True)
class PoissonSampled:
    """A Gaussian release on a Poisson sample, towards one who does not know the sample."""

    sampling_probability: float
    event: Gaussian


@dataclass(frozen=True)
class KnownSample:
    """The same release towards one who knows who was sampled (SPEC section 2).

    With probability 1 - q the unit is not in the sample and the release says nothing about it.
    """

    sampling_probability: float
    event: Gaussian


@dataclass(frozen=True)
class GroupSampled:
    """One step of Poisson-sampled DP-SGD, for a person with at most `group_size` records (SPEC section 1, G)."""

    group_size: int
    sampling_probability: float
    noise_multiplier: float


@dataclass(frozen=True)
class Repeated:
    """The same event `count` times, adaptively."""

    event: Gaussian | PoissonSampled | KnownSample | GroupSampled
    count: int


@dataclass(frozen=True)
class NoGuarantee:
    """Nothing is promised to the person against this adversary, and why."""

    reason: str


Mechanism = Gaussian | PoissonSampled | KnownSample | GroupSampled
Event = Mechanism | Repeated | NoGuarantee
