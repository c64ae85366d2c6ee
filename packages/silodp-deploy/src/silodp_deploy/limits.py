"""What a server can make a silo keep: bounds on the disk, the answers, the sessions and the days of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from silodp.aggregators.series import split_name
from silodp.errors import SilodpError
from silodp.parsing import MALFORMED, parse_json
from silodp.runtime.answers import name_answer
from silodp.wire.messages import Message
from silodp.wire.schemas import HELLO
from silodp.wire.store import RoundStore, Store
from silodp_deploy import AUDIT, LEDGERS, STORE
from silodp_deploy.agreement import NO_RUN
from silodp_deploy.policy import Policy

BEGUN = "begun"
"""Key in the store of a run: when the silo has begun it."""


def read_audit(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the audit log of a silo.

    Args:
        path: Path of the log. Without the file, nothing has left the silo.

    Returns:
        The entries in order, each with the texts "run" and "head" and the number "charges"; and how many lines a crash
        cut off.
    """
    entries, cut_off = [], 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            entry = parse_json(line)
            texts = {name: str(entry[name]) for name in ("run", "head")}
            entries.append({**entry, **texts, "charges": int(entry["charges"])})
        except MALFORMED:
            # The line is on disk before the answer leaves (`SiloService.receive`), so nothing left the silo there.
            cut_off += 1
    return entries, cut_off


def find_last(entries: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the last entry of an audit log, by run."""
    return {entry["run"]: entry for entry in entries}


class SiloLimits:
    """Counts what a silo keeps, and refuses a request that would lead beyond its policy.

    Args:
        folder: Folder of the silo. Its store, ledgers and audit log count as its disk; lines of the audit log that a
            crash cut off count as answers of no run.
        name: Name of the silo.
        policy: Policy of the silo.
        store: Durable store of all runs.
        max_bytes: Bytes of the longest message of the run without its signature.

    Attributes:
        answers: Number of answers that have left the silo, by run. Repeated answers count.
        last: By run, the last entry that the audit log had when it was opened.
    """

    def __init__(self, folder: Path, name: str, policy: Policy, store: Store, max_bytes: int) -> None:
        self._folder, self._name, self._policy, self._store = folder, name, policy, store
        self._max_bytes = max_bytes
        # By the audit log and not by the store, whose entries of past rounds are dropped.
        entries, cut_off = read_audit(folder / AUDIT)
        self.answers: Counter[str] = Counter(entry["run"] for entry in entries)
        self.answers[""] += cut_off
        self.last = find_last(entries)

    def check_join(self, request: Message) -> None:
        """Refuse "join" beyond the answers of a run: a courier may repeat it without end.

        Raises:
            SilodpError: It was answered so often (code policy.limit), or names a run (code gate.run).
        """
        if request.run != NO_RUN:
            raise SilodpError(
                f"silo '{self._name}' was asked to join run {request.run}, and joins outside of any run; nothing was "
                "sent.",
                code="gate.run",
            )
        if self.answers[NO_RUN] >= self._policy.max_answers:
            self._refuse("max_answers", f"has joined {self._policy.max_answers:,} times")

    def check(self, request: Message, run: str, now: datetime | None = None) -> None:
        """Refuse a request that would lead beyond the policy; nothing is kept of it.

        Args:
            request: A request whose signature was verified.
            run: Id of the run that the request belongs to; a request about a series of it belongs to it too.
            now: The current time; None: the clock is read.

        Raises:
            SilodpError: The request would lead beyond a limit (code policy.limit).
        """
        policy = self._policy
        if self.answers[run] >= policy.max_answers:
            self._refuse("max_answers", f"has given {policy.max_answers:,} answers in run {run}")
        mine = RoundStore(self._store, f"{run}/").run
        begun = mine.get(BEGUN)
        # Days of the calendar, since the silo may be restarted meanwhile; its operator keeps its clock.
        if begun is not None:
            age = (now or datetime.now(UTC)) - datetime.fromisoformat(begun.decode())
            if age > timedelta(days=policy.max_run_days):
                self._refuse("max_run_days", f"has begun run {run} {age.days} days ago")
        if request.kind == HELLO:
            # Sessions of all series count together.
            begin = name_answer(HELLO, 0, "")
            asked = [key for key in self._list_keys(run) if key.partition("/")[2].startswith(begin)]
            # A repeated request gets the stored answer, and begins no session.
            known = f"{request.run}/{name_answer(HELLO, 0, request.attempt)}" in asked
            if not known and len(asked) >= policy.max_sessions:
                self._refuse("max_sessions", f"has begun {len(asked):,} sessions in run {run}")
        # As if the answer had the largest length: it is compared before anything is computed or charged.
        for field, most, used in (
            ("max_run_bytes", policy.max_run_bytes, self._count_bytes(run)),
            ("max_disk_bytes", policy.max_disk_bytes, self._count_bytes()),
        ):
            if used + self._max_bytes > most:
                self._refuse(field, f"keeps {used:,} bytes, and an answer may have {self._max_bytes:,}")

    def begin(self, run: str) -> None:
        """Note when a run began, unless it is noted."""
        mine = RoundStore(self._store, f"{run}/").run
        if mine.get(BEGUN) is None:
            mine.put(BEGUN, datetime.now(UTC).isoformat(timespec="seconds").encode())

    def find_begin(self, run: str) -> str:
        """Return when a run began, as text that sorts by time; "" where it is not noted."""
        return (RoundStore(self._store, f"{run}/").run.get(BEGUN) or b"").decode()

    def forget(self, run: str) -> None:
        """Drop everything that the store holds of a run and its series."""
        # A crash in the middle leaves when the run began, by which it is forgotten again.
        for key in sorted(self._list_keys(run), key=lambda key: key == f"{run}/{BEGUN}"):
            self._store.drop(key)

    def _list_keys(self, run: str) -> list[str]:
        """Return the keys in the store that belong to a run and its series."""
        return [key for key in self._store.names() if split_name(key.partition("/")[0])[0] == run]

    def _count_bytes(self, run: str | None = None) -> int:
        """Return the bytes of the files in the store that belong to a run; None: of all files of the silo.

        The entries of the set-up and of the method's memory have bytes for each record, and a refusal is seen: they are
        not counted. A run has one of the set-up and two of the memory.
        """
        if run is not None:
            # Keys of the store are names of files, percent-encoded (`wire/store.py:DirectoryStore`).
            begin = tuple(quote(f"{run}{end}", safe="") for end in "/-")
            found = [path for path in (self._folder / STORE).iterdir() if path.name.startswith(begin)]
        else:
            found = [path for name in (STORE, LEDGERS) for path in (self._folder / name).iterdir()]
            found.append(self._folder / AUDIT)
        return sum(
            path.stat().st_size
            for path in found
            if path.exists() and not path.name.endswith("%2Fsetup") and "%2Fmemory%2F" not in path.name
        )

    def _refuse(self, field: str, what: str) -> NoReturn:
        raise SilodpError(
            f"silo '{self._name}' {what}; its policy allows no more ({field} = {getattr(self._policy, field):,}): ask "
            "the operator of the server why it asks so much, or raise the limit in policy.toml and start the silo "
            "again; nothing was sent.",
            code="policy.limit",
            field=field,
        )
