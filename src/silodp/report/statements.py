"""The assumptions of a report that a person has to answer for: their ids, and who can know whether they are true."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from silodp.accounting import guarantee
from silodp.data import public
from silodp.report.facts import Assumption
from silodp.report.guarantee_text import WHO
from silodp.text import join_names

_OPERATORS = "the operators of the server and of every silo"
_SILOS = "the operators of the silos"
_OWNERS = "the owners of the records"
_OFFICERS = "the data-protection officers of the silos"
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (guarantee.PUBLIC_INDEX, "same-id-and-list", f"whoever gives persons their ids, and {_OFFICERS}"),
    (
        guarantee.INDEX_VERIFIED_IN_PART,
        "verified-id-and-list",
        f"whoever gives persons their ids, and {_OFFICERS}",
    ),
    (guarantee.LOCAL_INDEX, "same-id", f"whoever gives persons their ids, and {_OFFICERS}"),
    ("silos and server follow the protocol", "protocol-followed", _OPERATORS),
    ("the run's directory was never copied", "continued-once", "whoever administers the machines of the run"),
    ("whoever sees the models sees", "updates-unseen", f"{_OPERATORS}, and whoever hands on the models"),
    ("the server does not collude", "no-collusion", "the organizations behind the server and the silos"),
    (guarantee.SECRET_SAMPLE, "sample-secret", _SILOS),
    ("at most ", "few-silos-pool", "the organizations behind the silos"),
    (guarantee.PUBLIC_VALUES, "start-public", "whoever made the model that the run began with"),
    (guarantee.OTHER_CODE, "other-code", "whoever wrote or has read that code"),
    (public.ASSUMES_INDEX_FROM_TABLES, "list-from-tables", _OFFICERS),
    (public.ASSUMES_INDEX_BY_PROFILE, "numbering", f"the trust center that numbers persons, and {_OFFICERS}"),
    ("Numbers outside the declared public ranges", "ranges-clip", _OWNERS),
    ("Persons may have records in both", "split-persons", _OWNERS),
    ("δ = ", "delta-large", f"a statistician, and {_OFFICERS}"),
    ("each silo has checked the other silos' long-term keys", "keys-compared", _SILOS),
    ("the server follows the protocol: it draws", "server-follows", "the operator of the server"),
    ("no silo tells the server the silos' common secret", "common-secret", _SILOS),
    ("silo 0 offers the tables", "common-secret-and-tables", _SILOS),
    ("the server is not malicious", "server-not-malicious", "whoever has chosen the operator of the server"),
    ("nobody measures how long a silo takes", "silo-timing", _SILOS),
    ("oblivious transfer over ristretto255 hides choices", "hidden-sample", _SILOS),
    ("FOR TESTS:", "key-for-tests", "whoever has chosen the settings"),
    ("every person's budget is public", "budgets-public", _OFFICERS),
    ("group_size = ", "group-size-public", "whoever has chosen the settings"),
    ("expected_batch_size = ", "batch-public", "whoever has chosen the settings"),
    ("how many records each silo has", "counts-public", _OFFICERS),
    ("a record lies in one silo only", "record-in-one-silo", _OWNERS),
    ("no silo shows its local model", "local-models-unseen", _SILOS),
    ("no silo tells which records", "spent-records-unseen", _SILOS),
    ("the server draws which silos join", "silos-by-chance", "the operator of the server"),
    ("a silo knows all held-out records", "held-out-same-id", "whoever gives persons their ids"),
    ("how many held-out records each silo has", "held-out-counts-public", _OFFICERS),
    ("whoever gets the metrics sees noisy counts", "silos-compared", _SILOS),
)
"""How an assumption begins, its id, and who can know whether it is true.

By their beginnings, since guarantee.json has the texts alone, some of them with numbers of the run. Texts of data sets
and of code outside silodp are not here: see `_DECLARED`.
"""
_DECLARED = "declared", "whoever wrote the configuration, the data set or the plug-in that states it"


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


def list_statements(assumptions: Iterable[Assumption]) -> tuple[Statement, ...]:
    """Return the assumptions that are not technical, as statements with ids."""
    found = [one for one in assumptions if not one.is_technical]
    known = [_look_up(one.text) for one in found]
    names = Counter(name for name, _ in known)
    return tuple(
        Statement(
            # Two texts of one kind, and texts that silodp does not know, get ids of their own by their content.
            id=f"{name}-{_digest(one.text)}" if name == _DECLARED[0] or names[name] > 1 else name,
            text=one.text,
            against="every adversary" if one.is_shared else join_names(WHO[a] for a in one.against),
            known_by=known_by,
        )
        for one, (name, known_by) in zip(found, known, strict=True)
    )


def _look_up(text: str) -> tuple[str, str]:
    """Return the id of an assumption and who can know it."""
    return next((known[1:] for known in _KNOWN if text.startswith(known[0])), _DECLARED)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
