"""The account of a cohort: the limit on ε over all runs on the same people, kept in an append-only file.

A run *reserves* its whole plan before it starts, and *settles* what its ledger has when it ends. A crash between the
two leaves the reservation, so that the file never has less than what was spent.

The file knows the last line of every run's ledger, once a round, before the round is visible. A directory whose ledger
lacks this line is an older copy, or was continued beside the run: its continuation is counted as another run, with its
whole plan. So two continuations of one moment are two runs, whatever files were copied.

Whether a run may start is decided by the filter of the file (`accounting/filters.py:Filter`), so the limit holds even
where each run is chosen after seeing the models of earlier ones (docs/privacy.md, section 12).
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from silodp.accounting._append_log import AppendOnlyLog
from silodp.accounting.accountant import choose_accountant, compute_epsilon
from silodp.accounting.events import Event, count_kinds, event_from_dict, event_to_dict, explain_not_private
from silodp.accounting.filters import DEFAULT_BOUNDS, Filter
from silodp.accounting.views import ADVERSARIES, Adversary, Unit
from silodp.errors import SilodpError
from silodp.parsing import is_format, parse_json, refuse_malformed
from silodp.settings import Delta, Epsilon, check_choice, check_value
from silodp.text import pluralize

FORMAT = 1
_WAIT_SECONDS = 60.0
"""How long a line waits for another process that writes one."""

Counts = Mapping[Adversary, Mapping[Event, int]]
"""How often each event is charged, by adversary."""


@dataclass(frozen=True)
class CohortRun:
    """What a run on the people of a cohort is charged.

    Attributes:
        run: Its id, which copies of its directory share.
        continuation: The id under which it is counted; another one for every continuation of an old copy.
        purpose: What it is for, for example "run".
        unit: Who is protected.
        charges: How often each event is charged, by adversary.
        disclosure: What its ciphertexts disclose (a total variation), by adversary; 0 where an adversary is absent.
        persons: Public facts by which runs on other persons are told apart; None where the unit is a record.
        is_settled: Whether the charges are those of its ledger; if not, they are reserved.
        is_added: Whether it was done before the cohort was asked.
        head: The hash of the last line of its ledger that is known here.
    """

    run: str
    continuation: str
    purpose: str
    unit: Unit
    charges: Counts
    disclosure: Mapping[Adversary, float] = field(default_factory=dict)
    persons: Mapping[str, str] | None = None
    is_settled: bool = False
    is_added: bool = False
    head: str = ""


class Cohort:
    """The file of a cohort. It is locked only while a line is written, for which another process waits.

    Args:
        path: A file that `create_cohort` has made.

    Attributes:
        path: The file.
        delta: δ of the limits.
        limits: The largest ε by adversary; an adversary that is absent has no limit.
        filter_bounds: Those of the filter.
        digest: SHA-256 (hex) of the first line; no two cohorts have the same.
        runs: The runs by continuation, in the order in which they first reserved.
        plan: The charges of the filter's plan; None before the first reservation.
        unknown: (note, ε) of runs elsewhere of which no ledger is known.

    Raises:
        SilodpError: There is no such file (code cohort.path), or it is damaged (code ledger.damaged).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise SilodpError(
                f"there is no cohort {path}: make it with 'silodp cohort new', before the first run on these people.",
                code="cohort.path",
                field="cohort",
            )
        header = _read_header(path)
        self.delta: float = header["delta"]
        self.limits: Mapping[Adversary, float] = header["limits"]
        self.filter_bounds: tuple[str, ...] = tuple(header["filter_bounds"])
        self.digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
        self.runs: dict[str, CohortRun] = {}
        self.plan: Counts | None = None
        self.unknown: list[tuple[str, float]] = []
        self._depth = 0
        self._log = AppendOnlyLog(path, header, self._take)
        self._log.read()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing in the block, which sees all that they have written before.

        Raises:
            SilodpError: Another process has locked the file for a minute (code run.in_use), or the file was replaced or
                damaged (code ledger.damaged).
        """
        if not self._depth:
            self._log.lock(_WAIT_SECONDS)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._log.unlock()

    @property
    def head(self) -> str:
        """The hash of the last line."""
        return self._log.head

    def contains(self, head: str) -> bool:
        """Return whether the file has a line with this hash: then it is no older than when that line was its last."""
        return self._log.contains(head)

    # --- what may be spent ---

    def check(self, run: CohortRun) -> None:
        """Check that a run fits beside all others, whose reservations count as spent.

        Args:
            run: The run with its whole plan; it takes the place of what it has reserved before.

        Raises:
            SilodpError: It does not fit (code cohort.budget), protects another unit (cohort.unit), or the limit cannot
                be kept: nothing is promised of it, no bound covers it (cohort.rule, accounting.unsupported), or
                an earlier run is not known (cohort.unknown).
        """
        self._check_kind(run)
        if self.unknown:
            raise SilodpError(
                f"{self.path} notes {pluralize(len(self.unknown), 'run')} whose ledger is not known, so its limits "
                "cannot be kept: no further run is admitted; see docs/guides/cohort.md.",
                code="cohort.unknown",
                field="cohort",
            )
        for adversary in self.limits:
            self._check_limit(adversary, run)

    def _check_kind(self, run: CohortRun) -> None:
        """Check that the charges of a run can be added to those of the others."""
        others = [one for name, one in self.runs.items() if name != run.continuation]
        if any(one.unit != run.unit for one in others):
            raise SilodpError(
                f"the runs in {self.path} protect {_UNITS[others[0].unit]}, and this one {_UNITS[run.unit]}: their ε "
                "cannot be added up; choose a method that protects the same, or keep a cohort for each unit.",
                code="cohort.unit",
                field="method",
            )
        for one in others:
            if one.persons is not None and run.persons is not None and dict(one.persons) != dict(run.persons):
                raise SilodpError(
                    f"run {one.run} in {self.path} names persons in another way than this one (column, identity "
                    "profile, list of persons, data set or U), so a person may be somebody else, and no ε of one "
                    "person in both is known; keep a cohort for each.",
                    code="cohort.persons",
                    field="cohort",
                )
        # The i-th kind of unit of one run is not the i-th of another, so the costliest of both is not known.
        if sum(any(map(_names_kinds, one.charges.values())) for one in (*others, run)) > 1:
            raise SilodpError(
                f"two runs in {self.path} charge their units differently (budgets of persons or records, settings of "
                "clients): what one unit spends in both is not known; run this one without, or keep no cohort of it.",
                code="accounting.unsupported",
                field="cohort",
            )

    def _check_limit(self, adversary: Adversary, run: CohortRun) -> None:
        limit, charges = self.limits[adversary], self._sum_charges(adversary, run)
        if (reason := _find_reason(charges)) is not None:
            raise SilodpError(
                f"{self.path} limits ε against '{adversary}', and nothing is promised there ({reason}): change that, "
                "or run without the cohort only if nobody ever sees anything of the run.",
                code="accounting.no_guarantee",
                field="cohort",
            )
        plan = run.charges if self.plan is None and not self.runs else self.plan or {}
        rule = Filter(self.delta, self.filter_bounds, _select_promised(plan.get(adversary, {})))
        disclosure = self._sum_disclosure(adversary, run)
        needed = rule.epsilon(charges, disclosure, limit)
        if needed <= limit:
            return
        if math.isinf(needed) and rule.leaves_room(limit, disclosure):
            raise self._explain_uncovered(charges)
        before = pluralize(len(self.runs.keys() - {run.continuation}), "other run")
        told = f"a limit of ε = {needed:.4g} against '{adversary}', and the limit is {limit:g}"
        if not rule.leaves_room(limit, disclosure):
            told = rule.describe_room(limit, disclosure, adversary)
        raise SilodpError(
            f"the run would not stay within {self.path}: with the {before} there it needs {told}.",
            code="cohort.budget",
            field="cohort",
        )

    def _explain_uncovered(self, charges: Mapping[Event, int]) -> SilodpError:
        """Return the error about charges that no bound covers."""
        if math.isfinite(Filter(self.delta, ("order-2",)).epsilon(charges)):
            return SilodpError(
                f"the rule of {self.path} ({', '.join(self.filter_bounds)}) does not cover these releases: make a "
                "cohort with --rule order-8, or with the default rule.",
                code="cohort.rule",
                field="cohort",
            )
        return SilodpError(
            f"no Rényi bound is known for these releases, so {self.path} cannot keep its limit: choose another method, "
            "or more noise.",
            code="accounting.unsupported",
            field="cohort",
        )

    def epsilon(self, adversary: Adversary) -> float | None:
        """Return ε of all runs as of a list that was fixed beforehand; None where nothing is promised of them.

        Reservations count as spent, runs in `unknown` do not.
        """
        charges = self._sum_charges(adversary)
        if _find_reason(charges) is not None:
            return None
        if not charges:
            return 0.0
        accountant = choose_accountant(charges)
        found = compute_epsilon(charges.items(), self.delta, accountant, self._sum_disclosure(adversary))
        return found if math.isfinite(found) else None

    @property
    def exceeded(self) -> Adversary | None:
        """An adversary against whom runs that were added exceed the limit; None where there is none."""
        for adversary in self.limits:
            if not any(run.is_added for run in self.runs.values()):
                break
            rule = Filter(
                self.delta, self.filter_bounds, _select_promised((self.plan or {}).get(adversary, {}))
            )
            limit, charges = self.limits[adversary], self._sum_charges(adversary)
            if _find_reason(charges) or not rule.admits(charges, limit, self._sum_disclosure(adversary)):
                return adversary
        return None

    def _sum_charges(self, adversary: Adversary, run: CohortRun | None = None) -> Counter[Event]:
        total: Counter[Event] = Counter()
        for one in self._list_runs(run):
            total.update(one.charges.get(adversary, {}))
        return +total

    def _sum_disclosure(self, adversary: Adversary, run: CohortRun | None = None) -> float:
        return sum(one.disclosure.get(adversary, 0.0) for one in self._list_runs(run))

    def _list_runs(self, run: CohortRun | None) -> list[CohortRun]:
        """Return all runs, one of them in the place of what the file has of it."""
        return list((self.runs if run is None else {**self.runs, run.continuation: run}).values())

    # --- lines ---

    def reserve(self, run: CohortRun) -> None:
        """Reserve the whole plan of a run; on disk when this returns, so before the run releases anything.

        The plan of the first run becomes that of the filter.

        Raises:
            SilodpError: As `check`; nothing is written.
        """
        with self.lock():
            self.check(run)
            is_plan = self.plan is None and not self.runs
            self._append({"kind": "reserve", **_encode_run(run), **({"plan": True} if is_plan else {})})

    def note_head(self, continuation: str, before: str, head: str) -> None:
        """Note the last line of a run's ledger, once a round; on disk when this returns.

        Args:
            continuation: The id under which the run is counted.
            before: The line that this process has noted before.
            head: The hash of the last line.

        Raises:
            SilodpError: Another line was noted meanwhile: a copy of the run is continued elsewhere (code
                cohort.settle).
        """
        with self.lock():
            self.check_head(continuation, before)
            self._append({"kind": "head", "continuation": continuation, "head": head})

    def settle(self, continuation: str, before: str, charges: Counts) -> None:
        """Replace what a run has reserved by what its ledger has; on disk when this returns.

        Args:
            continuation: The id under which the run is counted.
            before: The line of its ledger that this process has noted before.
            charges: What its ledger has.

        Raises:
            SilodpError: The run has reserved less, or a copy of it is continued elsewhere (code cohort.settle).
        """
        with self.lock():
            known = self.check_head(continuation, before)
            if not is_within(charges, known.charges):
                raise SilodpError(
                    f"the ledger of run {known.run} has more than it has reserved in {self.path}: one of both is an "
                    "old copy; restore the newest, since what was spent is not known.",
                    code="cohort.settle",
                    field="cohort",
                )
            self._append({"kind": "settle", "continuation": continuation, "events": encode_charges(charges)})

    def check_head(self, continuation: str, head: str) -> CohortRun:
        """Return a run, of whose ledger nobody may have noted another line than this process has.

        Raises:
            SilodpError: A copy of the run is continued elsewhere (code cohort.settle).
        """
        known = self.runs.get(continuation)
        if known is None or known.head != head:
            raise SilodpError(
                f"a copy of this run was continued meanwhile under {self.path}, and is counted there in its place: "
                "what this process did since then is not released; resume the run, which counts it as another one.",
                code="cohort.settle",
                field="cohort",
            )
        return known

    def add(self, run: CohortRun, is_known: Callable[[str], bool], over_limit: bool = False) -> None:
        """Add a run that was done before the cohort was asked, with what its ledger has.

        Args:
            run: The run.
            is_known: Whether its ledger has a line with a hash.
            over_limit: Whether it is written down even if it does not fit: then no further run is admitted.

        Raises:
            SilodpError: As `check`, or the run is there already (code cohort.settle).
        """
        with self.lock():
            # Its copies have the same id, and count as other runs, unless their ledger goes on from what is known here.
            for one in self.runs.values():
                if one.run != run.run or not is_known(one.head):
                    continue
                if is_within(run.charges, one.charges):
                    raise SilodpError(
                        f"run {run.run} is in {self.path} already: what it has spent is counted there.",
                        code="cohort.settle",
                        field="run",
                    )
                run = replace(run, continuation=one.continuation)
            self._check_kind(run)
            if not over_limit:
                self.check(run)
            self._append({"kind": "add", **_encode_run(replace(run, is_settled=True, is_added=True))})

    def note_unknown(self, note: str, epsilon: float) -> None:
        """Note a run whose ledger is not known, of this ε; afterwards no run is admitted, and totals are lower bounds.

        Raises:
            SilodpError: ε is out of range.
        """
        check_value("epsilon", epsilon, Epsilon)
        self._append({"kind": "unknown", "note": note, "epsilon": epsilon})

    def _append(self, fields: dict[str, Any]) -> None:
        fields["time"] = datetime.now(UTC).isoformat(timespec="seconds")
        with self.lock():
            self._log.append(fields)
            self._take(fields, 0)

    def _take(self, fields: Mapping[str, Any], number: int) -> None:
        """Take over a line of the file."""
        with refuse_malformed(
            lambda error: f"cohort {self.path} cannot be read in line {number}: {error}",
            code="ledger.damaged",
        ):
            match fields["kind"]:
                case "reserve" | "add":
                    run = _decode_run(fields)
                    self.runs[run.continuation] = run
                    if fields.get("plan"):
                        self.plan = run.charges
                case "head":
                    run = self.runs[fields["continuation"]]
                    self.runs[run.continuation] = replace(run, head=str(fields["head"]))
                case "settle":
                    run = self.runs[fields["continuation"]]
                    charges = decode_charges(fields["events"])
                    self.runs[run.continuation] = replace(run, charges=charges, is_settled=True)
                case "unknown":
                    self.unknown.append((str(fields["note"]), float(fields["epsilon"])))
                case kind:
                    raise ValueError(f"a line of kind {kind!r}, which this version does not know")


def create_cohort(
    path: Path,
    limits: Mapping[Adversary, float],
    delta: float,
    filter_bounds: Sequence[str] = DEFAULT_BOUNDS,
) -> None:
    """Make the file of a cohort, before the first run on its people.

    Args:
        path: The file, which is not there yet.
        limits: The largest ε of all runs together, by adversary; at least one.
        delta: δ of the limits.
        filter_bounds: Those of the filter (`Filter`).

    Raises:
        SilodpError: The file exists (code cohort.path), or a setting is out of range.
    """
    check_value("delta", delta, Delta)
    if not limits:
        raise SilodpError(
            "limits is empty: name at least one adversary.", code="argument.value", field="limits"
        )
    for adversary, limit in limits.items():
        check_choice("adversary", adversary, get_args(Adversary))
        check_value("epsilon", limit, Epsilon)
    Filter(delta, tuple(filter_bounds))  # checks the names
    if path.exists():
        raise SilodpError(
            f"{path} exists: a cohort keeps the limit that it was made with; choose another path only for people of "
            "whom no run is in it.",
            code="cohort.path",
            field="path",
        )
    header = {
        "format": FORMAT,
        "cohort": secrets.token_hex(16),
        "delta": delta,
        "limits": dict(limits),
        "filter_bounds": list(filter_bounds),
    }
    log = AppendOnlyLog(path, header, lambda fields, number: None)
    log.lock()
    log.unlock()


def is_within(charges: Counts, reserved: Counts) -> bool:
    """Return whether no event is charged more often than it is reserved, against anyone."""
    return all(
        n <= reserved.get(adversary, {}).get(event, 0)
        for adversary, counts in charges.items()
        for event, n in counts.items()
        if n
    )


_UNITS: Mapping[Unit, str] = {"user": "persons", "record": "single records"}


def _names_kinds(counts: Mapping[Event, int]) -> bool:
    return any(count_kinds(event) is not None for event, n in counts.items() if n)


def _find_reason(counts: Mapping[Event, int]) -> str | None:
    """Return why nothing is promised of these charges; None where something is."""
    return next((why for event, n in counts.items() if n and (why := explain_not_private(event))), None)


def _select_promised(counts: Mapping[Event, int]) -> Mapping[Event, int] | None:
    """Return the charges of a plan; None where nothing is promised of them, so that they are no plan."""
    return None if not counts or _find_reason(counts) is not None else counts


def encode_charges(charges: Counts) -> dict[str, list[Any]]:
    """Return charges, JSON-ready and in one order."""
    return {
        adversary: sorted(
            ([event_to_dict(event), int(n)] for event, n in counts.items() if n),
            key=lambda pair: json.dumps(pair, sort_keys=True),
        )
        for adversary, counts in charges.items()
    }


def decode_charges(stored: Mapping[str, Any]) -> dict[Adversary, Counter[Event]]:
    """Return the inverse of `encode_charges`.

    Raises:
        ValueError, KeyError, TypeError: They are no charges that this version knows.
    """
    if set(stored) - set(ADVERSARIES):
        raise ValueError("a line names an adversary that this version does not know")
    return {
        adversary: Counter({event_from_dict(event): int(n) for event, n in stored[adversary]})
        for adversary in ADVERSARIES
        if adversary in stored
    }


def _encode_run(run: CohortRun) -> dict[str, Any]:
    fields = {name: value for name, value in vars(run).items() if name != "charges"}
    fields["disclosure"] = {adversary: tv for adversary, tv in run.disclosure.items() if tv}
    fields["persons"] = None if run.persons is None else dict(run.persons)
    return {**fields, "events": encode_charges(run.charges)}


def _decode_run(fields: Mapping[str, Any]) -> CohortRun:
    known = {name: fields[name] for name in CohortRun.__dataclass_fields__ if name != "charges"}
    run = CohortRun(**known, charges=decode_charges(fields["events"]))
    if run.unit not in _UNITS or not all(0 <= tv <= 1 for tv in run.disclosure.values()):
        raise ValueError("a unit or a disclosure that this version does not know")
    return run


def _read_header(path: Path) -> dict[str, Any]:
    """Read the first line without its hashes, which the log compares afterwards."""
    with (
        refuse_malformed(f"{path} is no cohort, or is damaged in line 1: restore it.", code="ledger.damaged"),
        path.open("rb") as file,
    ):
        header = parse_json(file.readline())
        fields = {name: header[name] for name in ("format", "cohort", "delta", "limits", "filter_bounds")}
        if (
            not is_format(fields["format"], FORMAT)
            or not set(fields["limits"]) <= set(ADVERSARIES)
            or not fields["limits"]
        ):
            raise ValueError("format")
        Filter(float(fields["delta"]), tuple(fields["filter_bounds"]))
        fields["limits"] = {str(adversary): float(limit) for adversary, limit in fields["limits"].items()}
        return fields
