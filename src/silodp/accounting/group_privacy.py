"""Group privacy: what a guarantee about single records gives a person with several (docs/privacy.md, section 9)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

from silodp.accounting.accountant import Accountant, compute_epsilon
from silodp.accounting.events import (
    Composed,
    Event,
    Group,
    NonPrivate,
    RevealedSample,
    SampledReplacement,
    SelfComposed,
    WorstOf,
    find_costliest_event,
)
from silodp.errors import SilodpError

PERSONS_RECORDS = (2, 4, 8, 16)
"""Numbers of records for which a record-level guarantee also states the ε of a person."""


def scale_to_person(event: Event, records: int) -> Event:
    """Return the event charged for one record as the event of a person with at most `records` records, in any silos.

    Every release becomes that of a group, whose records are drawn independently. A coin for a whole silo
    (`RevealedSample`) is left out for more than one record: whether all of a person's records share it depends on where
    they are, and one of several coins falls more often than a single one. Where silos have their own settings
    (`WorstOf`), every release is charged with the least noise that it has in any of them, in units of what one record
    can move there: then k records move it no further than k records of one silo, wherever they lie.
    """
    if records == 1:
        return event
    match event:
        case NonPrivate():
            return event
        case RevealedSample(_, inner):
            return scale_to_person(inner, records)
        case SelfComposed(inner, count):
            return SelfComposed(cast(Group, scale_to_person(inner, records)), count)
        case Composed(parts):
            return Composed(tuple(scale_to_person(part, records) for part in parts))
        case WorstOf(parts):
            try:
                return scale_to_person(find_costliest_event(parts), records)
            except (
                SilodpError
            ):  # one client's steps are released with shares of the noise that differ from another's
                return NonPrivate(
                    "silos take different numbers of steps, and records may lie in several of them"
                )
        case SampledReplacement():
            return NonPrivate("what several records that are replaced together cost is not known")
        case Group(size, inner):
            return Group(size * records, inner)
    return Group(records, event)


def compute_person_epsilon(
    events: Iterable[Event], records: int, delta: float, accountant: Accountant | str
) -> float | None:
    """Return ε at δ for a person with at most `records` records, of events charged for one; None without guarantee."""
    spent = compute_epsilon([(scale_to_person(event, records), 1) for event in events], delta, accountant)
    return spent if math.isfinite(spent) else None
