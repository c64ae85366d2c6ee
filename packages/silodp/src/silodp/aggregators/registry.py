"""The registry of the aggregators' names, and what a run directory keeps of the aggregator that was used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from silodp._lazy import Registry
from silodp.aggregators.base import Visibility

if TYPE_CHECKING:
    from silodp.aggregators.base import Aggregator

AGGREGATORS: Registry[type[Aggregator]] = Registry(
    "aggregators",
    {"plain": "silodp.aggregators.plain:Plain", "masked": "silodp.aggregators.masked:Masked"},
)
"""By the name in a configuration."""


@dataclass(frozen=True)
class AggregatorRecord:
    """What a report needs to know of the aggregator of a finished run, even if its code is not available.

    Attributes:
        name: The name in the run's ledger.
        settings: The public settings, by name.
        delta_share: The part of δ that noise is accounted at, in (0, 1] (`Aggregator.delta_share`).
        visibility: Who sees what (`Aggregator.visibility`).
        registered: Whether the aggregator is in `AGGREGATORS`; if not, `delta_share` and `visibility` are statements of
            the plug-in's author.
    """

    name: str
    settings: Mapping[str, Any]
    delta_share: float
    visibility: tuple[Visibility, ...]
    registered: bool

    @classmethod
    def from_aggregator(cls, aggregator: Aggregator) -> AggregatorRecord:
        """Return the record of an aggregator, its settings as JSON has them."""
        return cls(
            aggregator.name,
            json.loads(json.dumps(aggregator.settings, default=repr)),
            aggregator.delta_share,
            aggregator.visibility,
            AGGREGATORS.get(aggregator.name) is type(aggregator),
        )

    def list_visibility(self, weighted: bool, sampled: bool) -> tuple[Visibility, ...]:
        """Return who saw what, without the clauses on weights and samples where the run has none.

        Args:
            weighted: Whether weights follow from record counts.
            sampled: Whether persons, records or silos are sampled.
        """
        if not self.registered:
            return self.visibility
        absent = [word for word, has in (("weights", weighted), ("sampled", sampled)) if not has]

        def shorten(text: str) -> str:
            return "; ".join(one for one in text.split("; ") if not any(word in one for word in absent))

        return tuple(
            Visibility(row.party, shorten(row.sees), shorten(row.not_seen)) for row in self.visibility
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of guarantee.json.

        It has the name and the settings, from which a registered aggregator can be built again. For a plug-in,
        what follows from its code is added under "class", a Python keyword, which no setting can have as name.
        """
        entry = {"name": self.name, **self.settings}
        if self.registered:
            return entry
        stated = {"delta_share": self.delta_share, "visibility": [asdict(row) for row in self.visibility]}
        return {**entry, "class": stated}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> AggregatorRecord:
        """Return the record of a plug-in from an entry that `to_dict` made.

        Raises:
            ValueError, TypeError, KeyError: the entry is damaged.
        """
        settings = dict(entry)
        name, stated = settings.pop("name"), settings.pop("class")
        share = float(stated["delta_share"])
        rows = tuple(Visibility(**row) for row in stated["visibility"])
        texts = [name, *(text for row in rows for text in asdict(row).values())]
        if not (0 < share <= 1 and all(isinstance(text, str) for text in texts)):
            raise ValueError("not what an aggregator states")
        return cls(name, settings, share, rows, registered=False)
