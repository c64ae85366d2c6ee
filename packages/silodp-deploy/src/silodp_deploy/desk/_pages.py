"""What the pages of the desk show, and what their one form does: the same functions as the commands call."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from silodp.accounting.guarantee import describe_unit, format_epsilon
from silodp.accounting.trade_off import TradeOff
from silodp.accounting.views import Adversary
from silodp.cli._console import describe_failure, format_command
from silodp.data.tables.columns import TableMapping, header_text
from silodp.data.tables.draft import inspect_table
from silodp.data.tables.sources.source import find_ending
from silodp.errors import SilodpError
from silodp.report.formatting import format_accuracy
from silodp.report.guarantee_text import ADVERSARY_LABELS
from silodp_deploy import AUDIT, POLICY
from silodp_deploy.acceptance import (
    Acceptance,
    accept_at_silo,
    describe_agreement,
    describe_roles,
    write_policy,
)
from silodp_deploy.certificates import ExpiryWatch, describe_early_end
from silodp_deploy.check import check_table
from silodp_deploy.cli.deploy import format_agreement
from silodp_deploy.cli.parties import FILTERED_RUNS, FIXED_RUNS, describe_kind
from silodp_deploy.consortium import Consortium, take_copy
from silodp_deploy.desk._limits import Limit, list_limits
from silodp_deploy.history import list_charged
from silodp_deploy.lifetime import (
    describe_shortfall,
    find_needed,
    read_ledgers,
    read_spent,
    select_exceeded,
)
from silodp_deploy.limits import read_audit
from silodp_deploy.monitoring import State, describe_epsilon, describe_party, find_problems, read_state
from silodp_deploy.policy import ACCEPTED, Policy
from silodp_deploy.silo import find_name, load_identity
from silodp_deploy.status import STATUS, load_status

PAGES = (
    ("", "What is asked"),
    ("decision", "Your decision"),
    ("table", "Table"),
    ("status", "Status"),
    ("ledger", "Ledger"),
)
"""The pages in the order of the navigation: path below the secret part, and name."""
_WORD = re.compile(r"[a-z]+ ")
"""How a sentence begins that gets a capital; a name keeps its letters."""
MAX_ROWS = 50
"""Answers on one page of the ledger."""
_KINDS = {
    "numeric": "numbers",
    "categorical": "categories",
    "date": "dates",
    "left out": "identifiers, text, or one value only",
    "unreadable": "cannot be read",
}
_FIELDS = ("code", "table", "epsilon", "persons", "counts", "read", "choice")
_SHOWN_GROUPS = 2
"""Groups of the code that the page shows: enough to name the folder, and the other six come by telephone alone."""


@dataclass(frozen=True)
class Page:
    """A page to be rendered.

    Attributes:
        template: Name of the file of the template.
        title: Its heading.
        values: Values of the template.
        status: Status of the response.
        name: Path in `PAGES` of a page inside the desk; None: the page shows nothing of the silo.
    """

    template: str
    title: str
    values: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    name: str | None = None


@dataclass(frozen=True)
class Problem:
    """An error as a page shows it.

    Attributes:
        code: Its stable code (docs/errors.md).
        told: A sentence.
        field: Name of the field of the form at fault; "": none.
    """

    code: str
    told: str
    field: str = ""

    @classmethod
    def of(cls, error: Exception) -> Problem:
        """Return the problem of an error, as a command prints it."""
        failure = describe_failure(error)
        named = {"lifetime_epsilon": "epsilon", "min_persons": "persons"}.get(
            failure.field or "", failure.field
        )
        # A fault of a table names one of its columns, which is no field of the form.
        told = failure.sentence
        told = told[:1].upper() + told[1:] if _WORD.match(told) else told
        place = "table" if failure.code.startswith("data.") else named
        return cls(failure.code, told, place if place in _FIELDS else "")


class Desk:
    """The pages of one silo.

    Args:
        folder: Folder of the silo.
        public: The consortium's public folder, of which a copy is read; None: nothing is asked yet.
        data: The silo's table; None: that of the policy, or those in `folder`.
        index: The file by which a trust center numbers the silo's persons; None: the run needs none.

    Raises:
        SilodpError: The folder has no key of a silo, or the public folder cannot be read, is not sealed, or does not
            list the key.
    """

    def __init__(
        self, folder: Path, public: Path | None = None, data: Path | None = None, index: Path | None = None
    ) -> None:
        self._done: dict[str, Any] | None = None
        self.folder, self._public, self._data, self._index = folder, public, data, index
        # As for `accept`: what is shown, accepted and later executed is this copy.
        self._consortium = None if public is None else take_copy(public, folder)
        if self._consortium is not None:
            self._name = find_name(folder, self._consortium)
        else:
            _check_folder(folder)

    def show(self, name: str, query: Mapping[str, str]) -> Page:
        """Return a page.

        Args:
            name: Its path in `PAGES`.
            query: Fields of its address.
        """
        pages = {
            "": self._show_asked,
            "decision": self._show_decision,
            "table": self._show_table,
            "status": self._show_status,
            "ledger": self._show_ledger,
        }
        try:
            return pages[name](query)
        except SilodpError as error:
            problem = Problem.of(error)
            return Page("problem.html", dict(PAGES)[name], {"problem": problem}, 422, name)

    # ---- what is asked ------------------------------------------------------------------------------------------

    def _show_asked(self, query: Mapping[str, str]) -> Page:
        consortium = self._consortium
        if consortium is None:
            return Page("asked.html", "What is asked", {"agreed": None}, name="")
        agreed = self._agreed
        values = {
            "agreed": agreed,
            "silo": self._name,
            "begin": self._code_begin,
            "is_accepted": self._is_accepted,
            "code": consortium.code if self._is_accepted else "",
            "bounds": list(self._describe_bounds(agreed)),
            "sees": [(row["party"], row["sees"], row["not_seen"]) for row in agreed["visibility"]],
            "references": [
                (name, code, "read it first" if ".py:" in code else "as it is installed here")
                for name, code in agreed["references"].items()
            ],
            "files": [(name, f"{one['bytes']:,}", one["digest"]) for name, one in agreed["files"].items()],
            "text": "\n".join(format_agreement(agreed)),
            **self._judge(consortium),
        }
        return Page("asked.html", "What is asked", values, name="")

    @cached_property
    def _agreed(self) -> dict[str, Any]:
        assert self._consortium is not None
        return describe_agreement(self._consortium, self._name)

    @property
    def _code_begin(self) -> str:
        assert self._consortium is not None
        return " ".join(self._consortium.code.split()[:_SHOWN_GROUPS])

    @property
    def _is_accepted(self) -> bool:
        path = self.folder / POLICY
        return (
            self._consortium is not None
            and path.exists()
            and self._consortium.digest in Policy.load(path).accepted
        )

    def _describe_bounds(self, agreed: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        """Yield each adversary, ε, and what it means in a sentence."""
        one = "a record" if agreed["unit"] == "record" else "a person"
        for adversary, epsilon in agreed["epsilon"].items():
            if epsilon is None:
                told = "Nothing is promised."
            else:
                share = format_accuracy(TradeOff.of_pair(epsilon, agreed["delta"]).accuracy)
                told = (
                    f"After the whole run an attacker who gives even odds that {one} is in the data guesses "
                    f"right at most {share} of the time."
                )
            yield (
                ADVERSARY_LABELS[adversary],
                describe_epsilon(epsilon),
                told,
            )

    def _judge(self, consortium: Consortium) -> dict[str, Any]:
        """Return the limits of the policy beside what the run asks, and why it would be refused.

        The policy is the one that accepting would write, by the function that writes it; nothing is written here.
        """
        problem, warnings, other_persons = None, [], ""
        is_new = not (self.folder / POLICY).exists()
        policy, limits = None, list[Limit]()
        try:
            policy = write_policy(
                self.folder, consortium, "", dry_run=True, allow_counts=consortium.stated_spec.shows_counts
            )
        except SilodpError as error:
            problem = Problem.of(error)
            # Other refusals stand in rows of their own.
            other_persons = str(error) if error.code == "policy.persons" else ""
            if not is_new and error.code.startswith("policy."):
                found = Policy.load(self.folder / POLICY)
                policy = found.model_copy(update={"accepted": [*found.accepted, consortium.digest]})
        if policy is not None:
            ledgers = read_ledgers(self.folder)
            needed = find_needed(self.folder, consortium.stated_spec, self._name, policy, ledgers)
            runs = len(list_charged(ledgers))
            limits = list_limits(consortium, self._name, policy, needed, runs, other_persons)
            if short := select_exceeded(needed, policy):
                warnings.append(describe_shortfall(short, policy.lifetime_epsilon))
            days = ExpiryWatch(consortium, self._name).count_days()
            if told := describe_early_end(days, policy.max_run_days):
                warnings.append(told)
        rows = [(f"{one.name} ({one.field})", one.allowed, one.asked, one.describe()) for one in limits]
        return {
            "limits": rows,
            "has_filter": policy is not None and bool(policy.filter_bounds and policy.lifetime_epsilon),
            "is_new": is_new,
            "needed": self._describe_needed(policy) if is_new and policy is not None else "",
            "blocked": problem,
            "warnings": warnings,
        }

    def _describe_needed(self, policy: Policy) -> str:
        """Return the largest ε that the run needs against anyone, as a drafted policy allows it; "" for none."""
        limits = policy.lifetime_epsilon.values()
        return format_epsilon(max(limits)) if limits and math.isfinite(max(limits)) else ""

    # ---- your decision ------------------------------------------------------------------------------------------

    def _show_decision(
        self,
        query: Mapping[str, str],
        problem: Problem | None = None,
        given: Mapping[str, str] | None = None,
    ) -> Page:
        consortium = self._consortium
        title, status = "Your decision", 200 if problem is None else 422
        values: dict[str, Any] = {
            "agreed": None,
            "problem": problem,
            "given": dict.fromkeys(_FIELDS, "") | dict(given or {}),
            "done": self._done,
        }
        if consortium is not None:
            is_accepted = self._is_accepted
            values |= {
                "agreed": self._agreed,
                "begin": self._code_begin,
                "code": consortium.code if is_accepted else "",
                "is_accepted": is_accepted,
                "is_refused": query.get("done") == "refused",
                "asks_counts": consortium.stated_spec.shows_counts,
                "tables": list(self.list_tables()),
                "start": format_command("silo", self._public, self.folder),
                "policy": self.folder / POLICY,
                "bounds": list(self._describe_bounds(self._agreed)),
                **(
                    {"blocked": None, "is_new": False, "needed": ""}
                    if is_accepted
                    else self._judge(consortium)
                ),
            }
        return Page("decision.html", title, values, status, name="decision")

    def decide(self, form: Mapping[str, str]) -> Page | str:
        """Accept or refuse, as the form of the page "decision" says.

        Returns:
            The path to go on with, or the page with what is wrong.
        """
        if self._consortium is None:
            return "decision"
        choice = form.get("choice", "")
        if choice == "refuse" and not self._is_accepted:
            return "decision?done=refused"
        # Sent twice, or by two tabs: the first one has decided.
        if self._is_accepted:
            return "decision"
        try:
            with collect_warnings() as warnings:
                done = self._accept(self._consortium, form)
        except SilodpError as error:
            return self._show_decision({}, Problem.of(error), form)
        if done.shortfall:
            warnings.append(describe_shortfall(done.shortfall, done.policy.lifetime_epsilon))
        self._done = {"records": done.records, "persons": done.persons, "warnings": warnings}
        return "decision"

    def _accept(self, consortium: Consortium, form: Mapping[str, str]) -> Acceptance:
        """Accept by the form.

        Raises:
            SilodpError: As `accept_at_silo`, or a field is missing or cannot be read.
        """
        if form.get("choice") != "accept":
            raise _refuse("choice", "nothing was chosen: choose to accept, or not to take part.")
        if form.get("read") != "yes":
            raise _refuse(
                "read", "it is not confirmed that you read what is asked: read it, and tick the box."
            )
        if not form.get("code", "").strip():
            raise _refuse(
                "code", "the code is missing: type the eight groups that the coordinator reads out."
            )
        tables = self.list_tables()
        if form.get("table", "") not in tables:
            raise _refuse("table", "no table of this silo was chosen: choose one of the list.")
        # The desk may have been open for days: what was read is what is accepted.
        assert self._public is not None
        if take_copy(self._public, self.folder).digest != consortium.digest:
            raise SilodpError(
                f"{self._public} is no longer the folder that is shown here: start 'silodp desk' again, and read it "
                "anew.",
                code="deploy.digest",
                field="code",
            )
        return accept_at_silo(
            self.folder,
            consortium,
            form["code"],
            str(tables[form["table"]]),
            _read_number(form, "epsilon", float),
            index=None if self._index is None else str(self._index),
            allow_counts=form.get("counts") == "yes",
            min_persons=_read_number(form, "persons", int),
        )

    # ---- table --------------------------------------------------------------------------------------------------

    def _show_table(self, query: Mapping[str, str]) -> Page:
        tables, file = self.list_tables(), query.get("file", "")
        values: dict[str, Any] = {"tables": list(tables), "file": file, "columns": None, "problem": None}
        values |= {"findings": [], "warnings": []}
        if file and file not in tables:
            values["problem"] = Problem(
                "argument.value", "This silo has no such table: choose one of the list.", "file"
            )
        elif file:
            try:
                with collect_warnings() as warnings:
                    values |= self._inspect(tables[file])
            except SilodpError as error:
                found = Problem.of(error)
                values["problem"] = Problem(found.code, found.told, "file")
            values["warnings"] = warnings
        return Page("table.html", "Table", values, 422 if values["problem"] else 200, "table")

    def _inspect(self, path: Path) -> dict[str, Any]:
        """Return what a table holds, and whether it fits what is asked."""
        consortium, values = self._consortium, dict[str, Any]()
        schema = None if consortium is None else consortium.resolved.table_schema
        if path.suffix != ".npz":  # arrays have no columns with names
            if schema is None:
                rows, facts, roles = *inspect_table(path), dict[str, str]()
            else:
                mapping = schema.silos.get(self._name, TableMapping())
                names = {
                    column: header_text(mapping.columns.get(column, column)) for column in schema.columns
                }
                reader = schema.readers.get(self._name, schema.reader)
                rows, facts = inspect_table(path, reader, mapping.query, names[schema.user])
                told = dict.fromkeys(schema.feature_columns, "input of the model") | describe_roles(schema)
                roles = {names[column]: role for column, role in told.items()}
            values = {
                "rows": rows,
                "asked": schema is not None,
                "columns": [
                    (
                        one.name,
                        _KINDS[one.kind],
                        "–" if one.missing is None else f"{one.missing:,}",
                        "–" if one.different is None else f"{one.different:,}",
                        one.told,
                        *((roles.get(one.name, "not read"),) if schema is not None else ()),
                    )
                    for one in facts
                ],
            }
        if consortium is not None:
            values["findings"] = list(check_table(self.folder, consortium, path, self._index))
        return values

    # ---- status -------------------------------------------------------------------------------------------------

    def _show_status(self, query: Mapping[str, str]) -> Page:
        if not (self.folder / STATUS).exists():
            return Page("status.html", "Status", {"found": None}, name="status")
        found = load_status(self.folder)
        state = read_state(found, time.time() - found["written"])
        values = {
            "found": found,
            "now": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            "process": _describe_process(state),
            "problems": list(find_problems(state).values()),
            "seen": [(name, describe_party(state, name)) for name in state.seconds_since_seen],
            "spent": [
                (ADVERSARY_LABELS.get(cast("Adversary", name), name), describe_epsilon(epsilon))
                for name, epsilon in found["epsilon"].items()
            ],
        }
        return Page("status.html", "Status", values, name="status")

    # ---- ledger -------------------------------------------------------------------------------------------------

    def _show_ledger(self, query: Mapping[str, str]) -> Page:
        entries, cut_off = read_audit(self.folder / AUDIT)
        spent = read_spent(self.folder, entries)
        pages = max(1, -(-len(entries) // MAX_ROWS))
        asked = query.get("page", "1")
        number = (
            min(pages, max(1, int(asked))) if asked.isascii() and asked.isdigit() and len(asked) < 9 else 1
        )
        newest = entries[::-1][(number - 1) * MAX_ROWS : number * MAX_ROWS]
        values = {
            "count": len(entries),
            "cut_off": cut_off,
            "number": number,
            "count_pages": pages,
            "answers": [
                (
                    str(entry["time"])[:19].replace("T", " "),
                    entry["run"][:8],
                    describe_kind(entry),
                    str(entry["round"] + 1),
                    f"{entry['bytes']:,}",
                    f"{entry['charges']:,}",
                    entry["sha256"][:16],
                )
                for entry in newest
            ],
            "spent": spent,
            "unit": describe_unit(spent["unit"]) if spent and spent["unit"] in ("user", "record") else "",
            "limits": [] if spent is None else list(_list_spent(spent)),
            "holds": (FILTERED_RUNS if spent and spent["filter_bounds"] else FIXED_RUNS)[1:-1],
        }
        return Page("ledger.html", "Ledger", values, name="ledger")

    # ---- tables -------------------------------------------------------------------------------------------------

    def list_tables(self) -> dict[str, Path]:
        """Return the tables that may be read, by the name that a form gives: no other path can be asked for."""
        found = dict[str, Path]()
        if self._data is not None:
            found[str(self._data)] = self._data.resolve()
        policy = self.folder / POLICY
        if policy.exists() and (name := Policy.load(policy).data):
            found.setdefault(name, self.folder / name)
        for path in sorted(self.folder.iterdir()):
            if path.is_file() and not path.is_symlink() and (find_ending(path) or path.suffix == ".npz"):
                found.setdefault(path.name, path)
        return found


def _check_folder(folder: Path) -> None:
    """Refuse a folder that is no silo's: of any other the pages would say that nothing has left it.

    Raises:
        SilodpError: It has no key, or is the server's (code deploy.key).
    """
    load_identity(folder, "")
    if (folder / ACCEPTED).exists():
        raise SilodpError(
            f"{folder} is the server's folder: give that of a silo.", code="deploy.key", field="folder"
        )


def _describe_process(state: State) -> str:
    if state.stopped is not None:
        return f"The run is over, stopped by the {state.stopped}."
    return (
        "The process of this silo is running."
        if state.is_running
        else "The process of this silo is not running."
    )


def _list_spent(spent: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield by adversary ε that was spent, the limit, and the part of it."""
    for adversary, epsilon in spent["epsilon"].items():
        limit = spent["limits"][adversary]
        yield (
            ADVERSARY_LABELS[adversary],
            describe_epsilon(epsilon),
            "none" if limit is None else f"at most {format_epsilon(limit)}",
            "–" if limit is None or epsilon is None else f"{math.ceil(100 * epsilon / limit)} %",
        )


def _refuse(field_: str, problem: str) -> SilodpError:
    return SilodpError(problem, code="argument.missing", field=field_)


def _read_number(form: Mapping[str, str], name: str, kind: type[Any]) -> Any:
    """Return a number of the form; None where the field is empty.

    Raises:
        SilodpError: It is no number, or is not above zero (code argument.value).
    """
    text = form.get(name, "").strip()
    if not text:
        return None
    try:
        number = kind(text.replace(",", "."))
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        what = "number above 0, for example 4.5" if kind is float else "whole number above 0"
        raise SilodpError(
            f"'{text[:40]}' is no {what}: write one, or leave the field empty.",
            code="argument.value",
            field=name,
        )
    return number


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect what silodp warns of until the end of the block, as a command prints it."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Collector(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("silodp", "silodp_deploy")]
    for one in loggers:
        one.addHandler(handler)
    try:
        yield found
    finally:
        for one in loggers:
            one.removeHandler(handler)
