"""The assumptions of a report that a person has to answer for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from silodp.assumption import digest_text
from silodp.report.facts import ListedAssumption
from silodp.report.guarantee_text import ADVERSARY_LABELS
from silodp.text import join_names


@dataclass(frozen=True)
class Statement:
    """An assumption that a person has to answer for.

    Attributes:
        id: Its stable id.
        text: The clause, as the report shows it.
        against: Against whom the guarantees rest on it, in words.
        known_by: Who can know whether it is true.
    """

    id: str
    text: str
    against: str
    known_by: str


def list_statements(assumptions: Iterable[ListedAssumption]) -> tuple[Statement, ...]:
    """Return the assumptions that are not technical, as statements with ids."""
    found = [one for one in assumptions if not one.technical]
    uses = Counter(one.id for one in found)
    return tuple(
        Statement(
            # Only a plug-in or an edited file states several conditions of one id: each gets an id by its content.
            id=one.id if uses[one.id] == 1 else f"{one.id}-{digest_text(one.text + one.known_by)}",
            text=one.text,
            against="every adversary"
            if one.is_shared
            else join_names(ADVERSARY_LABELS[a] for a in one.against),
            known_by=one.known_by,
        )
        for one in found
    )
