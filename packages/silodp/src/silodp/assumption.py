"""An assumption of a guarantee, as a value: its stable id, its clause, and who can know whether it holds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from silodp.errors import require

OFFICERS = "the data-protection officers of the silos"
ID_GIVERS = f"whoever gives persons their ids, and {OFFICERS}"
OPERATORS = "the operators of the server and of every silo"
SERVER_OPERATOR = "the operator of the server"
SILO_OPERATORS = "the operators of the silos"
RECORD_OWNERS = "the owners of the records"
SETTING_CHOOSERS = "whoever has chosen the settings"
SERVER_CHOOSERS = "whoever has chosen the operator of the server"
DECLARERS = "whoever wrote the configuration, the data set or the plug-in that states it"


@dataclass(frozen=True)
class Assumption:
    """A condition on which a guarantee rests, and that no program can check.

    Attributes:
        id: Its stable id, for example "no-collusion", by which people answer for it.
        text: The condition as a clause; it may have numbers of the run.
        known_by: Who can know whether it holds; "" where it is technical.
        technical: Whether it is about arithmetic or cryptography, which no person can answer for.

    Raises:
        SilodpError: A field has another type or form (argument.value).
    """

    id: str
    text: str
    known_by: str = ""
    technical: bool = False

    def __post_init__(self) -> None:
        texts = (self.id, self.text, self.known_by)
        require(
            all(isinstance(text, str) for text in texts)
            and isinstance(self.technical, bool)
            and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.id) is not None
            # Both are printed in terminals, which control characters would steer.
            and self.known_by.isprintable()
            and self.technical != bool(self.known_by),
            f"assumption {self.id!r}: give an id of small letters, digits and single hyphens, a text, and known_by, or "
            "technical = True instead of it.",
            code="argument.value",
            field="assumptions",
        )

    @classmethod
    def from_text(cls, text: str) -> Assumption:
        """Return the assumption of a sentence without an id, which is then made of its digest."""
        return cls(f"declared-{digest_text(text)}", text, DECLARERS)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Assumption:
        """Return the assumption of fields as `dataclasses.asdict` gives them.

        Raises:
            ValueError: They are no such fields.
        """
        if stored.keys() != {one.name for one in fields(Assumption)}:
            raise ValueError("not the fields of an assumption")
        return cls(**stored)


def as_assumptions(stated: Iterable[Assumption | str]) -> tuple[Assumption, ...]:
    """Return assumptions of which plug-ins and data sets may state some as plain sentences.

    Raises:
        SilodpError: They are something else (argument.type).
    """
    found = () if isinstance(stated, str) else tuple(stated)
    require(
        not isinstance(stated, str) and all(isinstance(one, Assumption | str) for one in found),
        "assumptions: give a tuple, each item an Assumption or a sentence.",
        code="argument.type",
        field="assumptions",
    )
    return tuple(one if isinstance(one, Assumption) else Assumption.from_text(one) for one in found)


def digest_text(text: str) -> str:
    """Return eight characters for a text, to tell ids of different texts apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
