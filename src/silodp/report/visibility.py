"""What each party of a run got to see, by the aggregator that was used; a report prints it as a table."""

from __future__ import annotations

from dataclasses import dataclass

from silodp.aggregators.base import Aggregator


@dataclass(frozen=True)
class Visibility:
    """One party, what it saw beyond what is public, and what it did not see."""

    party: str
    sees: str
    not_seen: str


_COUNTS = 'where the method needs them (weighting = "records", uldp-group), each person\'s record counts'
_RECIPIENT = Visibility(
    "Whoever gets the models",
    "the global models, as many as were handed on",
    "any silo's part in them; who was sampled in a round; record counts",
)

SIGHTS: dict[str, tuple[Visibility, ...]] = {
    "plain": (
        Visibility(
            "The server",
            f"every silo's noisy sum, on its own; whom it sampled; {_COUNTS}, silo by silo",
            "records; a single person's update; sums without noise",
        ),
        Visibility(
            "Each silo",
            "the global models; who was sampled; where weights go by records, for its own persons also their totals "
            "over all silos",
            "other silos' sums, records and separate counts",
        ),
        _RECIPIENT,
    ),
    "masked": (
        Visibility(
            "The server",
            f"the noisy sum over the silos that answered, and which silos these were; whom it sampled; {_COUNTS}, silo "
            "by silo",
            "any single silo's sum, with noise or without; records; a single person's update",
        ),
        Visibility(
            "Each silo",
            "the global models; which silos answered; who was sampled; where weights go by records, for its own "
            "persons also their totals over all silos",
            "other silos' sums, records and separate counts",
        ),
        _RECIPIENT,
    ),
    "lattice": (
        Visibility(
            "The server",
            "only the noisy weighted sum, and whom it sampled",
            "record counts, not even whether a person has any; weights; any single silo's sum; records",
        ),
        Visibility(
            "Each silo",
            "the global models",
            "other silos' record counts, sums and records; the weights; who was sampled",
        ),
        Visibility(
            "Silo 0 (the first)",
            "the same; it also prepares the encrypted tables that weights are looked up in",
            "the same: it does not learn which entries were looked up",
        ),
        _RECIPIENT,
    ),
}
SIGHTS["paillier"] = tuple(sight for sight in SIGHTS["lattice"] if not sight.party.startswith("Silo 0"))
"""By the aggregator's name; each party is assumed to follow the protocol, and not to pool what it sees."""


HIDDEN_SAMPLE = (
    Visibility(
        "The server",
        "only the noisy weighted sum, and which silos answered",
        "who was sampled; record counts, not even whether a person has any; weights; any single silo's sum; records",
    ),
    Visibility(
        "Silo 0 (the first)",
        "the same; it also takes from the server, and passes to the other silos, what they multiply with",
        "the same: whether that counts a person in or out is encrypted, or shared with the server",
    ),
)
"""Instead of the rows for these parties, where nobody is to know the sample."""


def list_visibility(aggregator: Aggregator) -> tuple[Visibility, ...]:
    """The table's rows; none for an aggregator that is not described here."""
    rows = SIGHTS.get(aggregator.name, ())
    if not (rows and aggregator.samples_users_privately):
        return rows
    others = [row for row in rows if row.party not in {hidden.party for hidden in HIDDEN_SAMPLE}]
    server, zero = HIDDEN_SAMPLE
    return (server, others[0], zero, *others[1:])
