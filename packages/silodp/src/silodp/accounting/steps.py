"""Convert events to the distinct steps that accountants compose, with counts and checked parameters.

A step is one of: a release (`Additive`; two Gaussian releases of the same sum become one); a `PoissonSampled`
release; an `ExtensionEvent`; a `SampledReplacement`; a `Group` of one of these or of a
`RevealedSample`; a `RevealedSample` over steps (`list_inner_steps`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from silodp.accounting.events import (
    Additive,
    Composed,
    CorrelatedReleases,
    Event,
    ExtensionEvent,
    Gaussian,
    Group,
    Mechanism,
    NonPrivate,
    PoissonSampled,
    RevealedSample,
    SampledReplacement,
    SelfComposed,
    Skellam,
    WorstOf,
    count_kinds,
    find_kind,
    multiply_shift,
    select_kind,
)
from silodp.errors import SilodpError

Steps = tuple[tuple[Mechanism, int], ...]

_MAX_REACH = 100.0
"""The largest shift of a release, in units of its noise, for which a bound is computed.

Beyond it, one step costs an ε in the thousands and the grid of the accountant overflows: nothing is promised.
"""
_MOST_NOISE = 1e75
"""More noise than this is counted as this much, whose fourth power is still a number."""


def flatten_per_unit(charges: Iterable[tuple[Event, int]], for_pld: bool = False) -> list[Steps | None]:
    """Return the steps of all charges for each kind of unit that they name (`WorstOf`); see `flatten_event`.

    Args:
        charges: (event, count), composed adaptively.
        for_pld: as in `flatten_event`.

    Raises:
        SilodpError: a parameter is out of range, or charges name different numbers of kinds.
    """
    charges = list(charges)
    kinds = count_kinds(Composed(tuple(event for event, _ in charges)))
    if kinds is None:
        return [flatten_event(charges, for_pld)]
    return [
        flatten_event([(select_kind(event, kind), count) for event, count in charges], for_pld)
        for kind in range(kinds)
    ]


def flatten_event(charges: Iterable[tuple[Event, int]], for_pld: bool = False) -> Steps | None:
    """Return distinct steps with counts, without what costs nothing; None if nothing is promised.

    Args:
        charges: (event, count), composed adaptively.
        for_pld: convert for privacy loss distributions, which have no rule for some events. Gaussian releases
            are merged into one; in a group, the sampling of silos is left out; Skellam noise is refused
            ("accounting.unsupported").

    Returns:
        ((step, count), ...) in a fixed order; () where no charge costs anything.

    Raises:
        SilodpError: a parameter is out of range.
    """
    counts: Counter[Mechanism] = Counter()
    promised = True
    for event, count in charges:
        _check_count(count)
        # In this order, so that parameters are checked in every event, also after the first without a guarantee.
        promised = _add(counts, event, int(count), for_pld) and promised
    if not promised:
        return None
    return _sort_steps(_merge_gaussians(counts) if for_pld else counts)


def list_inner_steps(event: Event) -> Steps:
    """Return the steps, with counts, of the inner event of a `RevealedSample` or a `Group`."""
    match event:
        case Composed(inner):
            return tuple(step for part in inner for step in list_inner_steps(part))
        case SelfComposed(inner, count):
            return ((inner, count),)  # type: ignore[return-value]
    return ((event, 1),)  # type: ignore[return-value]


def combine_noise(event: Additive) -> float:
    """Return the noise multiplier of one Gaussian release that costs as much."""
    match event:
        case CorrelatedReleases(first, second):
            both = first.noise_multiplier, second.noise_multiplier
            # Precisions of independent Gaussian outcomes add up.
            return 0.0 if 0 in both else sum(noise**-2 for noise in both) ** -0.5
    return event.noise_multiplier


def _add(counts: Counter[Mechanism], event: Event, times: int, for_pld: bool) -> bool:
    """Add the event's steps to the counts; return False if there is no guarantee.

    Parameters are also checked in events that cost nothing.
    """
    match event:
        case NonPrivate():
            return times == 0
        case SelfComposed(inner, count):
            _check_count(count)
            return _add(counts, inner, times * int(count), for_pld)
        case Composed(inner):
            # A list and no generator: `all` would stop at the first part without a guarantee, with others unchecked.
            return all([_add(counts, part, times, for_pld) for part in inner])
        case RevealedSample(q, inner):
            return _add_revealed(counts, q, inner, times, for_pld)
        case Group(size, inner):
            _check(size >= 0 and size == int(size), "size", size, "a whole number of records, 0 or more")
            return _add_group(counts, int(size), inner, times, for_pld)
    step = _simplify(event)
    if step is None or times == 0:
        return True
    counts[step] += times
    return _has_bound(step, 1, for_pld)


def _add_revealed(counts: Counter[Mechanism], q: float, event: Event, times: int, for_pld: bool) -> bool:
    _check_probability(q)
    # What is inside is added once, to counts of its own: one coin decides on all of it.
    tossed = times if q > 0 else 0
    inside: Counter[Mechanism] = Counter()
    if not _add(inside, event, min(tossed, 1), for_pld):
        return False
    if not inside:
        return True
    if q == 1:
        for step, count in inside.items():
            counts[step] += tossed * count
        return True
    # Merged for both accountants: below a seen coin, Gaussian releases are exactly one, by Rényi orders too.
    steps = _sort_steps(_merge_gaussians(inside))
    match steps:
        case ((RevealedSample(again, inner), 1),):  # nested samples are one, with the product
            counts[RevealedSample(q * again, inner)] += tossed
        case ((Gaussian() | Skellam() | CorrelatedReleases() | PoissonSampled() | Group() as step, 1),):
            counts[RevealedSample(q, step)] += tossed
        case ((step, count),):
            counts[RevealedSample(q, SelfComposed(step, count))] += tossed
        case _:
            counts[RevealedSample(q, Composed(tuple(SelfComposed(*step) for step in steps)))] += tossed
    return True


def _add_group(counts: Counter[Mechanism], size: int, event: Event, times: int, for_pld: bool) -> bool:
    """Add the event for a person with `size` records; return False if there is no guarantee.

    A group over several releases becomes several groups. The records may lie in silos that are sampled
    separately, so no single sampling probability covers them. With Rényi orders, group privacy holds for any
    event; with privacy loss distributions, the sampling of silos is left out.
    """
    match event:
        case SelfComposed(inner, count):
            return _add(counts, SelfComposed(Group(size, inner), count), times, for_pld)  # type: ignore[arg-type]
        case Composed(inner):
            return _add(counts, Composed(tuple(Group(size, part) for part in inner)), times, for_pld)  # type: ignore[arg-type]
        case RevealedSample(q, inner) if for_pld and size > 1:
            _check_probability(q)
            return _add(counts, Group(size, inner), times if q > 0 else 0, for_pld)  # type: ignore[arg-type]
        case NonPrivate() | WorstOf() | Group() | ExtensionEvent() | SampledReplacement():
            raise SilodpError(
                f"there is no rule for a Group of {size} records around {event!r}: put the Group inside this "
                "event.",
                code="accounting.unsupported",
            )
    single: Counter[Mechanism] = Counter()
    if not _add(single, event, min(times, size, 1), for_pld):
        return False
    for step, count in single.items():
        # All records are in an unsampled release, which they move `size` times as far.
        if isinstance(step, Gaussian | Skellam | CorrelatedReleases):
            counts[multiply_shift(step, size)] += times * count
        else:
            counts[step if size == 1 else Group(size, step)] += times * count  # type: ignore[arg-type]
    return all(_has_bound(step, size, for_pld) for step in single)


def _simplify(event: Event) -> Mechanism | None:
    """Return the same release, checked, without needless structure; None if it reveals nothing about a unit."""
    match event:
        case SampledReplacement(q, inner):
            _check_probability(q)
            release = _simplify_release(inner)
            if release is None or q == 0:
                return None
            return _simplify_release(multiply_shift(release, 2)) if q == 1 else SampledReplacement(q, release)
        case PoissonSampled(q, inner):
            _check_probability(q)
            release = _simplify_release(inner)
            return None if release is None or q == 0 else release if q == 1 else PoissonSampled(q, release)
        case ExtensionEvent() if find_kind(type(event)) is not None:
            event.check()
            release = _simplify_release(event.event)
            return None if release is None else event.simplify(release)
        case Gaussian() | Skellam() | CorrelatedReleases():
            return _simplify_release(event)
    raise _misplaced_error(event)


def _simplify_release(event: Additive) -> Additive | None:
    match event:
        case Gaussian(sigma) | Skellam(sigma):
            _check(sigma >= 0, "noise_multiplier", sigma, "a number, 0 or more")
            if isinstance(event, Skellam):
                _check(event.units >= 1, "units", event.units, "1 or more")
                _check(event.dimension >= 1, "dimension", event.dimension, "1 or more")
            if sigma == math.inf:
                return None
            # Less noise costs more, so the bound holds.
            return replace(event, noise_multiplier=_MOST_NOISE) if sigma > _MOST_NOISE else event
        case CorrelatedReleases(Gaussian() as one, Gaussian() | Skellam() as other):
            first, second = _simplify_release(one), _simplify_release(other)
            if first is None or second is None:
                return second if first is None else first
            return Gaussian(combine_noise(event)) if isinstance(second, Gaussian) else event
    raise _misplaced_error(event)


def _has_bound(step: Mechanism, reach: int, for_pld: bool) -> bool:
    """Return whether anything is promised of a step that one unit can move by `reach` sensitivities."""
    release = step.event if isinstance(step, PoissonSampled | ExtensionEvent | SampledReplacement) else step
    if isinstance(release, RevealedSample | Group):
        return True  # its parts were looked at when they were added
    if for_pld and not isinstance(release, Gaussian):
        raise SilodpError(
            "the accountant 'pld' has no rule for integer (Skellam) noise, which secure aggregation adds: "
            "choose 'rdp'.",
            code="accounting.unsupported",
            field="accountant",
        )
    return reach < _MAX_REACH * combine_noise(release)


def _merge_gaussians(counts: Counter[Mechanism]) -> Counter[Mechanism]:
    """Merge Gaussian releases into one with 1/σ² = Σ 1/σᵢ², exactly.

    Source: Dong, Roth and Su 2022 (Gaussian differential privacy), Corollary 3.3.
    """
    # Independent releases of mean shifts: the vector of outcomes has the shift √Σ 1/σᵢ² in units of its noise.
    precision = sum(
        n / event.noise_multiplier**2 for event, n in counts.items() if isinstance(event, Gaussian)
    )
    rest = {event: n for event, n in counts.items() if not isinstance(event, Gaussian)}
    merged: Counter[Mechanism] = Counter(rest)
    if precision:
        merged[Gaussian(precision**-0.5)] = 1
    return merged


def _sort_steps(counts: Counter[Mechanism]) -> Steps:
    # One order for the same steps, so that caches find them, and sums round alike in every run.
    return tuple(sorted(counts.items(), key=repr))


def _misplaced_error(event: object) -> SilodpError:
    return SilodpError(
        f"{event!r} stands where a release is expected: use Gaussian, Skellam or CorrelatedReleases there.",
        code="accounting.event",
    )


def _check_probability(q: float) -> None:
    _check(0 <= q <= 1, "sampling_probability", q, "between 0 and 1")


def _check_count(count: int) -> None:
    _check(count >= 0 and count == int(count), "count", count, "a whole number, 0 or more")


def _check(holds: bool, field: str, value: object, must_be: str) -> None:
    if not holds:
        raise SilodpError(f"{field} is {value!r}: it must be {must_be}.", code="argument.value", field=field)
