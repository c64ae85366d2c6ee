"""What a server can make a silo keep: bounds on the disk, the answers, the sessions and the days of runs."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from silodp.deploy.policy import Policy
from silodp.errors import SilodpError
from silodp.wire.messages import Message
from silodp.wire.store import RoundStore, Store

_BEGUN = "begun"


class SiloLimits:
    """Counts what a silo keeps, and refuses a request that would lead beyond its policy.

    Args:
        name: of the silo.
        policy: of the silo.
        store: durable memory of all runs.
        files: folders and files that count as the silo's disk: the store, which comes first, ledgers and audit log.
        audit: the audit log; lines that a crash cut off count as answers of no run.
        most_bytes: of the longest message of the run, not signed.

    Attributes:
        answers: number of answers that have left the silo, by run, repeated ones included.
    """

    def __init__(
        self, name: str, policy: Policy, store: Store, files: tuple[Path, ...], audit: Path, most_bytes: int
    ) -> None:
        self._name, self._policy, self._store, self._files = name, policy, store, files
        self._most_bytes = most_bytes
        self.answers: Counter[str] = Counter()
        for line in audit.read_bytes().splitlines() if audit.exists() else ():
            try:
                self.answers[str(json.loads(line)["run"])] += 1
            except (ValueError, KeyError, TypeError):
                self.answers[""] += 1

    def check(self, request: Message, now: datetime | None = None) -> None:
        """Refuse a request that would lead beyond the policy; nothing is kept of it.

        Args:
            request: verified.
            now: None: the time of this moment.

        Raises:
            SilodpError: it would (code policy.limit).
        """
        run, policy = request.run, self._policy
        if self.answers[run] >= policy.max_answers:
            self._refuse("max_answers", f"has given {policy.max_answers:,} answers in run {run}")
        mine = RoundStore(self._store, f"{run}/").run
        begun = mine.get(_BEGUN)
        if begun is not None:
            age = (now or datetime.now(UTC)) - datetime.fromisoformat(begun.decode())
            if age > timedelta(days=policy.max_run_days):
                self._refuse("max_run_days", f"has begun run {run} {age.days} days ago")
        if request.kind == "hello":
            asked = {key for key in mine.names() if key.startswith("answer/hello/")}
            if f"answer/hello/0/{request.attempt}" not in asked and len(asked) >= policy.max_sessions:
                self._refuse("max_sessions", f"has begun {len(asked):,} sessions in run {run}")
        for field, most, used in (
            ("max_run_bytes", policy.max_run_bytes, self._count_bytes(f"{quote(run, safe='')}%2F")),
            ("max_disk_bytes", policy.max_disk_bytes, self._count_bytes()),
        ):
            if used + self._most_bytes > most:
                self._refuse(field, f"keeps {used:,} bytes, and an answer may have {self._most_bytes:,}")

    def begin(self, run: str) -> None:
        """Note when a run began, unless it is noted."""
        mine = RoundStore(self._store, f"{run}/").run
        if mine.get(_BEGUN) is None:
            mine.put(_BEGUN, datetime.now(UTC).isoformat(timespec="seconds").encode())

    def _count_bytes(self, prefix: str | None = None) -> int:
        """Return the bytes of the files in the store that begin with a prefix; None: of all files of the silo."""
        if prefix is not None:
            return sum(path.stat().st_size for path in self._files[0].glob(f"{prefix}*"))
        found = (path for top in self._files for path in (top.iterdir() if top.is_dir() else (top,)))
        return sum(path.stat().st_size for path in found if path.exists())

    def _refuse(self, field: str, what: str) -> NoReturn:
        raise SilodpError(
            f"silo '{self._name}' {what}; its policy allows no more ({field} = {getattr(self._policy, field):,}): ask "
            "the operator of the server why it asks so much, or raise the limit in policy.toml and start the silo "
            "again; nothing was sent.",
            code="policy.limit",
            field=field,
        )
