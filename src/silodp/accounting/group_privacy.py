"""What a guarantee about single records is worth to a person with several of them (docs/privacy.md, section 9)."""

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
    costliest_event,
)
from silodp.errors import SilodpError

PERSONS_RECORDS = (2, 4, 8, 16)
"""Numbers of records for which a record-level guarantee says what a person gets."""


def event_for_person(event: Event, records: int) -> Event:
    """What an event charged for one record costs a person with at most `records` of them, in whatever silos.

    Every release becomes that of a group, whose records are drawn each on its own. A coin that is tossed for a whole
    silo (`RevealedSample`) is left out for more than one record: whether all of a person's records share it depends on
    where they are, and of several coins one falls more often than a single one does. Where silos have settings of their
    own (`WorstOf`), every release is charged with the least noise that it has in any of them, in units of what
    one record can move there: then k records move it no further than k of one silo, wherever they lie.
    """
    if records == 1:
        return event
    match event:
        case NonPrivate():
            return event
        case RevealedSample(_, inner):
            return event_for_person(inner, records)
        case SelfComposed(inner, count):
            return SelfComposed(cast(Group, event_for_person(inner, records)), count)
        case Composed(parts):
            return Composed(tuple(event_for_person(part, records) for part in parts))
        case WorstOf(parts):
            try:
                return event_for_person(costliest_event(parts), records)
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


def epsilon_for_person(
    events: Iterable[Event], records: int, delta: float, accountant: Accountant | str
) -> float | None:
    """ε at δ, towards a person with at most `records` records, of events charged for one; None: nothing is promised."""
    spent = compute_epsilon([(event_for_person(event, records), 1) for event in events], delta, accountant)
    return spent if math.isfinite(spent) else None
