"""The checklist of a report: the assumptions that no program can check, each with the answer of a person.

It is a TOML file that people fill. What they wrote is untrusted text like every other file: it is parsed with bounds,
compared with the guarantees of the run, and refused where a statement was changed, left out or not answered.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, Field, TypeAdapter

from silodp.accounting import guarantee
from silodp.data import public
from silodp.errors import SilodpError, require
from silodp.parsing import is_format, parse_toml, refuse_unsound
from silodp.report.facts import Assumption
from silodp.report.guarantee_text import WHO
from silodp.text import join_names, pluralize
from silodp.wire.files import write_durably

FORMAT = 1
"""Of a checklist, stored as "format"."""
MAX_BYTES = 1 << 20
"""Of a checklist, and of a signature."""

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


def _check_line(text: str) -> str:
    # Others read it in a terminal, which control characters would steer.
    if not text.isprintable() or not text.strip():
        raise ValueError("no line of text")
    return text


def _check_date(text: str) -> str:
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text) is None:
        raise ValueError("no date")
    return date.fromisoformat(text).isoformat()


Line = Annotated[str, Field(max_length=2000), AfterValidator(_check_line)]
"""A text of a person: one line that can be printed."""


@dataclass(frozen=True)
class Answer:
    """What a person answers to a statement.

    Attributes:
        confirmed: "yes", or "no": what rests on the statement then does not hold.
        by: Name of the person.
        role: Their role.
        date: The day of the answer, as 2026-11-26.
        evidence: What shows it; "" where nothing is named.
    """

    confirmed: Literal["yes", "no"]
    by: Line
    role: Line
    date: Annotated[str, AfterValidator(_check_date)]
    evidence: Literal[""] | Line = ""


_ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)
_EMPTY = dict.fromkeys(("confirmed", "by", "role", "date", "evidence"), "")
_SHOWN = ("text", "against", "known_by")
"""Entries of a statement in the file that people read and do not fill."""
_HEAD = """\
# Checklist of a report: what no program can check, and a person has to answer for.
# Fill five entries of each statement:
#   confirmed  "yes" or "no". "no" is an answer too: then the ε of the report do not hold against those who are named.
#   by, role   who answers, and as what. "known_by" says who can know it.
#   date       the day, as "2026-11-26"
#   evidence   what shows it, for example a contract or a log; may stay empty
# Change nothing else. Then sign the report:
#   silodp report DIR --sign KEY --name "NAME" --role "ROLE" --checklist THIS_FILE

"""


def write_checklist(path: Path, statements: Sequence[Statement], run: str) -> None:
    """Write a checklist that is to be filled; a file that is there is never replaced.

    Args:
        path: The file to write.
        statements: Of the report.
        run: The id of the run.

    Raises:
        SilodpError: there is such a file (report.exists), or no statement (report.checklist).
    """
    require(
        statements,
        "the run has no guarantee, so there is nothing to confirm: sign the report without --checklist.",
        code="report.checklist",
        field="checklist",
    )
    refuse_existing(path)
    tables = {one.id: {name: getattr(one, name) for name in _SHOWN} | _EMPTY for one in statements}
    content = {"format": FORMAT, "run": run, "statements": tables}
    write_durably(path, f"{_HEAD}{tomli_w.dumps(content).rstrip()}\n".encode())


def refuse_existing(path: Path) -> None:
    """Refuse to write a file that is there (code report.exists): people have written in it, or depend on it."""
    require(
        not path.exists(),
        f"{path} exists, and is not replaced: name another file, or move that one away.",
        code="report.exists",
    )


def read_checklist(
    content: bytes, where: str, statements: Sequence[Statement], run: str
) -> dict[str, Answer]:
    """Return the answers of a filled checklist, by the ids of the statements.

    Args:
        content: The content of the file.
        where: Name of the file in an error.
        statements: Of the report.
        run: The id of the run.

    Raises:
        SilodpError: it is no checklist (report.checklist), of another run or other statements (report.contradicted), or
            a statement is not answered (report.unsigned).
    """
    stated = _read_tables(content, where, run)
    answers, open_ = {}, []
    for one in statements:
        table = stated.pop(one.id, None)
        if table is None or any(table.pop(name, None) != getattr(one, name) for name in _SHOWN):
            raise SilodpError(
                f"{where}: statement '{one.id}' is missing or is not worded as in the report of this run: write the "
                "checklist anew (silodp report DIR --checklist FILE), and fill that one.",
                code="report.contradicted",
                field=one.id,
            )
        if not all(table.get(name) for name in ("confirmed", "by", "role", "date")):
            open_.append(one.id)
            continue
        answers[one.id] = _read_answer(table, f"{where}: statement '{one.id}'")
    require(
        not stated,
        f"{where} has a statement that the report does not have ({', '.join(sorted(stated)[:3])}): write the checklist "
        "anew (silodp report DIR --checklist FILE), and fill that one.",
        code="report.contradicted",
    )
    require(
        not open_,
        f"{where}: {pluralize(len(open_), 'statement')} without an answer ({', '.join(open_)}): fill confirmed, by, "
        "role and date of each; 'no' is an answer too.",
        code="report.unsigned",
        field=open_[0] if open_ else None,
    )
    return answers


def _read_tables(content: bytes, where: str, run: str) -> dict[str, dict[str, Any]]:
    """Return the tables of the statements in a checklist of this run."""
    with refuse_unsound(
        f"{where} is no checklist of a report: write one with 'silodp report DIR --checklist FILE', and change only "
        "what it asks for.",
        code="report.checklist",
    ):
        require_value(len(content) <= MAX_BYTES)
        fields = parse_toml(content.decode())
        require_value(is_format(fields["format"], FORMAT) and set(fields) == {"format", "run", "statements"})
        tables: Mapping[str, Mapping[str, Any]] = fields["statements"]
        stated = {name: dict(table.items()) for name, table in tables.items()}
    require(
        fields["run"] == run,
        f"{where} is the checklist of another run: write one of this run (silodp report DIR --checklist FILE).",
        code="report.contradicted",
    )
    return stated


def _read_answer(table: dict[str, Any], where: str) -> Answer:
    # TOML has dates without quotes, and people write them.
    if isinstance(table["date"], date):
        table["date"] = str(table["date"])
    with refuse_unsound(
        f'{where} has an entry that cannot be read: confirmed is "yes" or "no", date as in "2026-11-26", the '
        "others one line of text, all in quotes.",
        code="report.checklist",
    ):
        require_value(table.keys() <= _EMPTY.keys())
        return _ANSWER.validate_python(table)


def require_value(holds: object) -> None:
    """Raise ValueError unless a condition holds: for code inside `refuse_unsound`."""
    if not holds:
        raise ValueError
