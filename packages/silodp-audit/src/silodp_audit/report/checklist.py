"""The checklist of a report: the assumptions that no program can check, each with the answer of a person.

It is a TOML file that people fill. What they wrote is untrusted text like every other file: it is parsed with bounds,
compared with the guarantees of the run, and refused where a statement was changed, left out or not answered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, Field, TypeAdapter

from silodp.errors import SilodpError, require
from silodp.parsing import is_format, parse_toml, refuse_malformed
from silodp.report.statements import Statement
from silodp.text import pluralize
from silodp.wire.files import write_durably

FORMAT = 1
"""Of a checklist, stored as "format"."""
MAX_BYTES = 1 << 20
"""Of a checklist, and of a signature."""


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
    with refuse_malformed(
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
    with refuse_malformed(
        f'{where} has an entry that cannot be read: confirmed is "yes" or "no", date as in "2026-11-26", the '
        "others one line of text, all in quotes.",
        code="report.checklist",
    ):
        require_value(table.keys() <= _EMPTY.keys())
        return _ANSWER.validate_python(table)


def require_value(holds: object) -> None:
    """Raise ValueError unless a condition holds: for code inside `refuse_malformed`."""
    if not holds:
        raise ValueError
