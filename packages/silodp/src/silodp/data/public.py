"""The public facts of a federation, from which a run is planned, set up and checked."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from silodp.assumption import OFFICERS, Assumption, as_assumptions
from silodp.data.inputs import CODES, NUMERIC, Input
from silodp.errors import SilodpError

ASSUMED_USERS = 1000
"""U where neither configuration nor caller states it: ε does not depend on it, the size of masked sums does."""
ASSUMES_INDEX_FROM_TABLES = Assumption(
    "list-from-tables",
    "The list of ids was read from the tables, because schema.users declares none: anyone may learn that each "
    "person on it has records in at least one of them, and how many persons there are. To promise that too, "
    "declare a list that also names people without records.",
    OFFICERS,
)
ASSUMES_INDEX_BY_PROFILE = Assumption(
    "numbering",
    "Persons are numbered over all silos, by a trust center or, in a simulation, by the process that reads all tables: "
    "it knows who has records where. The numbers say nothing of a person.",
    f"the trust center that numbers persons, and {OFFICERS}",
)

UNLABELED = -100
"""The class number of a place without a label, such as the padding of a text; torch's losses leave it out, too."""

_LATER_FACTS = ("identity_digest", "inputs", "label_shape", "label_typical", "targets")
"""Facts that `PublicData.to_dict` leaves out where they are empty."""

_MAX_RECORDS = 10**8
"""With a budget each, in facts that are read."""
LabelKind = Literal["classes", "real", "survival", "multilabel"]
"""One class of several, one or several numbers, [event, time], or several yes/no labels."""


def find_label_shape(labels: LabelKind, targets: int | None, label_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a record's y, by the facts of `PublicData` with these names."""
    if labels == "survival":
        return (2,)
    return label_shape if targets is None else (targets,)


@dataclass(frozen=True)
class PublicData:
    """The public facts of a federation. No value depends on a private record.

    `Federation.public` gives them for loaded data, `Dataset.public` for data that nobody has read yet.

    Attributes:
        name: the name of the data set.
        silos: (S,) names in order; "silo-1", "silo-2" and so on where they are not known before loading.
        users: U ≥ 1; None where only the tables tell how many users there are.
        record_shape: shape of one record's features, such as (30,) or (1, 28, 28); () for several named arrays.
        labels: "classes" (int64), "real" (float32), "survival" (float32 [event, time]) or "multilabel" (float32 0/1).
        classes: number of classes; None for the other kinds of label.
        targets: k ≥ 2 where a record has k yes/no labels or k numbers; None where it has one label, or survival.
        features: names of the features, or () where they have none.
        assumptions: what the guarantee rests on or does not cover.
        user_budgets: (U,) the ε that each user may be charged; None where users have none.
        record_budgets: whether every training record has such a budget.
        record_counts: (S,) training records of each silo. Given only where records are the unit of privacy: elsewhere
            it is private.
        silo_budgets: for each silo (n_s,) float64, the ε of each of its records, in any order; None where records have
            none, or nobody has read them yet.
        index_digest: SHA-256 (hex) of the list of users and of their budgets, which all parties compare; "" as long
            as the list is not known. With an identity profile it covers U and budgets only.
        identity_digest: SHA-256 (hex) of the identity profile by which silos read the keys of persons; "" without one.
        inputs: the arrays of a record, where they are not one array of real numbers; ids have a public number of
            categories.
        label_typical: (center, spread) by which labels of kind "real" were scaled, one pair for each of several; None
            where they are as they came.
        label_shape: the places of a record that have a class each, such as (28, 28) pixels or (64,) tokens; () where
            the record has one.

    Raises:
        SilodpError: there are no silos.
    """

    name: str
    silos: tuple[str, ...]
    users: int | None
    record_shape: tuple[int, ...]
    labels: LabelKind
    classes: int | None = None
    features: tuple[str, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    user_budgets: tuple[float, ...] | None = field(default=None, repr=False)
    record_budgets: bool = False
    record_counts: tuple[int, ...] | None = None
    silo_budgets: tuple[NDArray[np.float64], ...] | None = field(default=None, repr=False, compare=False)
    index_digest: str = ""
    identity_digest: str = ""
    inputs: tuple[Input, ...] = ()
    label_typical: Sequence[Any] | None = None
    targets: int | None = None
    label_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.silos:
            raise SilodpError(
                f"federation {self.name!r}: there are no silos; give at least one", code="data.federation"
            )
        # A data set of somebody's own may state plain sentences.
        object.__setattr__(self, "assumptions", as_assumptions(self.assumptions))

    def to_dict(self) -> dict[str, Any]:
        """Return all facts, JSON-ready; budgets of records as [ε, number of records], ascending."""
        absent = {name for name in _LATER_FACTS if not getattr(self, name)}
        facts = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if name not in absent | {"silo_budgets"}
        }
        facts["assumptions"] = list(map(asdict, self.assumptions))
        if self.inputs:
            facts["inputs"] = [one.to_dict() for one in self.inputs]
        if self.silo_budgets is None:
            return facts
        levels = [np.unique(budgets, return_counts=True) for budgets in self.silo_budgets]
        pairs = [[[float(b), int(n)] for b, n in zip(*level, strict=True)] for level in levels]
        return {**facts, "silo_budgets": pairs}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> PublicData:
        """Return the facts that `to_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: they are not such facts.
        """
        from silodp.data._stored_facts import StoredFacts  # pydantic, which a silo does without

        StoredFacts.model_validate(facts)
        made: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()
        }
        made["assumptions"] = tuple(map(Assumption.from_dict, facts.get("assumptions", ())))
        if "inputs" in facts:
            made["inputs"] = tuple(Input.from_dict(one) for one in facts["inputs"])
        if facts.get("targets") is not None and facts.get("label_typical") is not None:
            made["label_typical"] = tuple(map(tuple, facts["label_typical"]))
        if "silo_budgets" in facts:
            if sum(n for level in facts["silo_budgets"] for _, n in level) > _MAX_RECORDS:
                raise ValueError("more records than fit into memory")
            # Charges depend on how many records have which budget, and not on their order.
            made["silo_budgets"] = tuple(
                np.repeat(np.array([b for b, _ in level], np.float64), [n for _, n in level])
                for level in facts["silo_budgets"]
            )
        return cls(**made)

    @property
    def has_codes(self) -> bool:
        """Whether the records are those of tables with columns that are given as codes."""
        if [one.name for one in self.inputs] not in ([NUMERIC, CODES], [CODES]):
            return False
        *numeric, codes = self.inputs
        return isinstance(codes.categories, tuple) and all(
            one.categories is None and len(one.shape) == 1 for one in numeric
        )

    @property
    def feature_count(self) -> int:
        """Numbers in a record: real ones where arrays have names, else those of the only array."""
        if not any(one.name for one in self.inputs):
            return math.prod(self.record_shape)
        return sum(math.prod(one.shape) for one in self.inputs if one.categories is None)

    @property
    def categories(self) -> int | list[int] | dict[str, int | list[int]] | None:
        """The number of categories of the only array of ids; by name where there are several; None without ids."""
        found = {
            one.name: list(one.categories) if isinstance(one.categories, tuple) else one.categories
            for one in self.inputs
            if one.categories is not None
        }
        return found if len(found) > 1 else next(iter(found.values()), None)


def digest_user_index(
    users: int, user_keys: Sequence[str] | None, user_budgets: Sequence[float] | None
) -> str:
    """Return the SHA-256 (hex) of the public list of users, in order, and of their budgets.

    Args:
        users: U.
        user_keys: (U,) keys, or None where users are only numbered.
        user_budgets: (U,) ε of each user, or None.
    """
    # JSON keeps the parts apart: no two lists have one text.
    return hashlib.sha256(json.dumps([users, user_keys, user_budgets]).encode()).hexdigest()
