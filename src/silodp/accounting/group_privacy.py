"""Group privacy: what a guarantee about single records gives a person with several (docs/privacy.md, section 9)."""

from __future__ import annotations

from typing import cast

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
    """Return the event of a person with at most `records` records, in any silos, from that of one record.

    Every release becomes the release of a group, whose records are drawn independently. With more than one
    record the random choice whether a silo takes part (`RevealedSample`) is ignored: the records may lie in
    several silos, and that at least one of several silos takes part is more probable than that one given silo
    does. Where silos have their own settings (`WorstOf`), every release is charged with the least noise that it
    has in any silo, in units of what one record can move there. Then k records, in whichever silos they are,
    move it no further than k records of one silo.

    Source: group privacy of Rényi differential privacy, Mironov 2017, Proposition 2 (ULDP-FL, Lemma 6), and proofs in
    docs/privacy.md, sections 4, G, and 9.
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
            # The records may lie in silos of different kinds, so no single alternative covers the person.
            try:
                return scale_to_person(find_costliest_event(parts), records)
            except SilodpError:
                # One client's steps are released with shares of the noise that differ from another's.
                return NonPrivate(
                    "silos take different numbers of steps, and records may lie in several of them"
                )
        case SampledReplacement():
            return NonPrivate("what several records that are replaced together cost is not known")
        case Group(size, inner):
            return Group(size * records, inner)
    return Group(records, event)
