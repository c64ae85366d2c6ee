"""An append-only file of JSON lines; each line is on disk before `append` returns.

A line carries a hash of itself and of the line before it, so that a line that was changed, moved or removed from the
middle is noticed, and the hash of the last line (the *head*) stands for the whole file. A line cut short by a crash was
not on disk when `append` should have returned; whoever locks the file drops it. Any other damage is refused. No file
can show by itself that whole lines are missing at its end, nor, since the hashes have no key, that somebody has written
it anew.

Only who appends locks the file. Readers take whole lines as they are.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from silodp.errors import DISK_FULL, SilodpError
from silodp.parsing import MALFORMED, parse_json

Fields = dict[str, Any]
_PAUSE_SECONDS = 0.02


class AppendOnlyLog:
    """An append-only file of JSON lines. `read` or `lock` must be called before anything else.

    Args:
        path: the file; None keeps the hashes alone, in memory.
        header: the fields of its first line.
        take: called with the fields and the number of every further line that is read.

    Attributes:
        path: The file.
        head: Hash of the last line that was read or appended; "" before the first one.
    """

    def __init__(self, path: Path | None, header: Fields, take: Callable[[Fields, int], None]) -> None:
        self.path, self.head = path, ""
        self._header, self._take = header, take
        self._count, self._end = 0, 0  # lines and bytes that were read
        self._last = b""  # the last line
        self._unsure: str | None = None  # why the end of the file is not known
        self._file: int | None = None
        if path is None:
            self._add(_line(header, ""))

    def lock(self, seconds: float = 0.0) -> None:
        """Lock the file until `unlock`, and read what it has; it is made if it is not there.

        Args:
            seconds: how long another process that has locked it is waited for.

        Raises:
            SilodpError: the file's header differs, or it is damaged, or in use (code run.in_use), or cannot be opened.
        """
        if self.path is None:
            return
        self._file = _open_locked(self.path, seconds)
        self._unsure = None
        _OPEN.add(self)
        known = self._end
        try:
            torn = self._read()
            if torn:
                # `append` did not return for this line, so nothing that it would charge was released.
                os.ftruncate(self._file, self._end)
            if not self._count:
                self.append(self._header)
            if self._end > known:
                # A killed process may have left lines that the disk has not got yet; they count from now on.
                os.fsync(self._file)
                _sync_directory(self.path.parent)
        except BaseException:
            self.unlock()
            raise

    def unlock(self) -> None:
        """Close the file and release its lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def read(self) -> None:
        """Read the whole lines that were appended since the last call, by whomever; nothing is locked or changed.

        Raises:
            SilodpError: the file's header differs, or it is damaged.
        """
        if self.path is not None:
            self._read()

    def append(self, fields: Fields) -> None:
        """Add one line and wait until it is on disk.

        Raises:
            SilodpError: the file is not locked or cannot be written; the line must then be taken as not written.
        """
        line = _line(fields, self.head)
        if self.path is None:
            self._add(line)
            return
        if self._file is None:
            raise SilodpError(f"ledger {self.path} is closed: open it again.", code="ledger.closed")
        if self._unsure is not None:
            raise SilodpError(
                f"ledger {self.path} failed to be written ({self._unsure}): open it again.",
                code="ledger.write_failed",
            )
        try:
            rest = memoryview(line)  # the system may write a part only
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except BaseException as error:
            # What reached the disk is unknown, after a failed fsync too: only reading it again can tell.
            self._unsure = str(error) or type(error).__name__
            if isinstance(error, OSError):
                full = error.errno in DISK_FULL
                raise SilodpError(
                    f"ledger {self.path} could not be written ({error.strerror}): mend the disk, then resume.",
                    code="run.disk_full" if full else "ledger.write_failed",
                ) from error
            raise
        self._add(line)

    def contains(self, head: str) -> bool:
        """Return whether the file has a line with this hash, so that it is no older than when this was its head."""
        if self.path is None:
            return head == self.head
        return b'"hash":"%b"' % head.encode() in self.path.read_bytes()

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.unlock()

    def _add(self, line: bytes) -> None:
        self.head = json.loads(line)["hash"]
        self._last, self._end, self._count = line, self._end + len(line), self._count + 1

    def _read(self) -> bytes:
        """Read the lines that are new; return what a crash left of the last one."""
        assert self.path is not None
        with self.path.open("rb") as file:
            file.seek(self._end - len(self._last))
            content = file.read()
        if not content.startswith(self._last):
            raise SilodpError(
                f"{self.path} was replaced by another file, or by an older copy, while it was in use: restore the "
                "newest, since what was spent is not known.",
                code="ledger.damaged",
            )
        whole, torn = _split(content[len(self._last) :])
        if not self._count and not whole and not _line(self._header, "").startswith(torn.rstrip(b"\0")):
            # Without one whole line, only the beginning of this very header is the trace of a crash. Anything else is
            # a file of somebody else, which must not be cut.
            raise SilodpError(f"{self.path} is not a ledger: give another path.", code="ledger.damaged")
        for line in whole:
            fields = self._read_line(line)
            if self._count > 1:
                self._take(fields, self._count)
            else:
                self._check_header(fields)
        return torn

    def _check_header(self, fields: Fields) -> None:
        header = self._header
        for name in header.keys() | fields.keys():
            if name not in header or name not in fields or header[name] != fields[name]:
                raise SilodpError(
                    f"ledger {self.path} was begun with {name} = {fields.get(name)!r}, not {header.get(name)!r}: go "
                    "on with its own settings, or start another run.",
                    code="ledger.setup",
                    field=name,
                )

    def _read_line(self, line: bytes) -> Fields:
        """Return the fields of a line; raise if its hash or its predecessor's is wrong."""
        try:
            fields: Fields = parse_json(line)
            previous = fields.pop("previous")
            fields.pop("hash")
            sound = line == _line(fields, previous) and previous == self.head
        except MALFORMED:
            sound = False
        if not sound:
            raise SilodpError(
                f"ledger {self.path} is damaged in line {self._count + 1}: restore the file, since what this run has "
                "spent is no longer known.",
                code="ledger.damaged",
            )
        self._add(line)
        return fields


# A forked worker inherits the open file and with it the lock, and would keep it after a crash of its parent.
_OPEN: weakref.WeakSet[AppendOnlyLog] = weakref.WeakSet()


def _close_after_fork() -> None:
    for log in list(_OPEN):
        log.unlock()


os.register_at_fork(after_in_child=_close_after_fork)


def _open_locked(path: Path, seconds: float) -> int:
    """Open the file for appending, locked for as long as it is open."""
    until = time.monotonic() + seconds
    while True:
        try:
            # Readable by its owner only: events of per-user budgets tell something of persons.
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise SilodpError(
                f"ledger {path} cannot be opened ({error.strerror}): check the path.",
                code="ledger.write_failed",
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            if time.monotonic() >= until:
                waited = f", which was waited for {seconds:g} seconds" if seconds else ""
                raise SilodpError(
                    f"ledger {path} is in use by another process{waited}: wait for that run, or stop it.",
                    code="run.in_use",
                ) from None
            time.sleep(_PAUSE_SECONDS)
            continue
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            return file
        os.close(file)  # the name leads to another file by now: lock that one


def _sync_directory(path: Path) -> None:
    """Wait until the name of a new file is on disk: fsync of the file alone does not cover its directory."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _split(content: bytes) -> tuple[list[bytes], bytes]:
    """Return whole lines, and what a crash left of the last one.

    A killed process leaves a line without its end, and a power cut may leave zeros in its place. A line with its end
    may be a charge that was on disk: zeros in it are damage, and `_read_line` refuses them.
    """
    *lines, torn = content.split(b"\n")
    # Splitting removes the line ends, and `_read_line` compares whole lines.
    return [line + b"\n" for line in lines], torn


def _line(fields: Mapping[str, Any], previous: str) -> bytes:
    """Return one line: the fields, the hash of the line before, and the hash of both."""
    # The hash covers the hash of the line before, so a line can neither be moved nor left out.
    body = {**fields, "previous": previous}
    body["hash"] = hashlib.sha256(_json(body)).hexdigest()
    return _json(body) + b"\n"


def _json(fields: Mapping[str, Any]) -> bytes:
    # One spelling for the same fields, since the hash is of the bytes; NaN is no JSON, and no event has one.
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
