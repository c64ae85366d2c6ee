"""An append-only file of JSON lines; each line is on disk before `append` returns.

A line carries a hash of itself and of the line before it, so that a line that was changed, moved or removed from the
middle is noticed. A line cut short by a crash was not on disk when `append` should have returned; opening the file
drops it. Any other damage is refused. No file can show by itself that whole lines are missing at its end.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silodp.errors import DISK_FULL, SilodpError
from silodp.parsing import UNSOUND, parse_json

Fields = dict[str, Any]


class AppendOnlyLog:
    """An append-only file of JSON lines, open and locked against other processes.

    Args:
        path: the file, made if it is not there.
        header: the fields of its first line.

    Attributes:
        path: The file.
        lines: The fields of every line after the header, in order, that the file had when it was opened.

    Raises:
        SilodpError: the file's header differs, or it is damaged, or in use, or cannot be opened.
    """

    def __init__(self, path: Path, header: Fields) -> None:
        self.path = path
        self.lines: list[Fields] = []
        self._last = ""  # hash of the last line
        self._unsure: str | None = None  # why the end of the file is not known
        self._file: int | None = _open_locked(path)
        _OPEN.add(self)
        try:
            self._read(header)
            # A killed process may have left lines that the disk has not got yet; they count from now on.
            os.fsync(self._file)
            _sync_directory(path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, fields: Fields) -> None:
        """Add one line and wait until it is on disk.

        Raises:
            SilodpError: the file is closed or cannot be written; the line must then be taken as not written.
        """
        if self._file is None:
            raise SilodpError(f"ledger {self.path} is closed: open it again.", code="ledger.closed")
        if self._unsure is not None:
            raise SilodpError(
                f"ledger {self.path} failed to be written ({self._unsure}): open it again.",
                code="ledger.write_failed",
            )
        line = _line(fields, self._last)
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
        self._last = json.loads(line)["hash"]

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    def _read(self, header: Fields) -> None:
        content = self.path.read_bytes()
        whole, torn = _split(content)
        if not whole and not _line(header, "").startswith(torn.rstrip(b"\0")):
            # Without one whole line, only the beginning of this very header is the trace of a crash. Anything else is
            # a file of somebody else, which must not be cut.
            raise SilodpError(f"{self.path} is not a ledger: give another path.", code="ledger.damaged")
        for number, line in enumerate(whole, start=1):
            fields = self._read_line(number, line)
            if number > 1:
                self.lines.append(fields)
                continue
            for name in header.keys() | fields.keys():
                if name not in header or name not in fields or header[name] != fields[name]:
                    raise SilodpError(
                        f"ledger {self.path} was begun with {name} = {fields.get(name)!r}, not "
                        f"{header.get(name)!r}: go on with its own settings, or start another run.",
                        code="ledger.setup",
                        field=name,
                    )
        if torn:
            # `append` did not return for this line, so nothing that it would charge was released.
            assert self._file is not None
            os.ftruncate(self._file, len(content) - len(torn))
        if not whole:
            self.append(header)

    def _read_line(self, number: int, line: bytes) -> Fields:
        """Return the fields of a line; raise if its hash or its predecessor's is wrong."""
        try:
            fields: Fields = parse_json(line)
            found, previous = fields.pop("hash"), fields.pop("previous")
            sound = line == _line(fields, previous) and previous == self._last
        except UNSOUND:
            sound = False
        if not sound:
            raise SilodpError(
                f"ledger {self.path} is damaged in line {number}: restore the file, since what this "
                f"run has spent is no longer known.",
                code="ledger.damaged",
            )
        self._last = found
        return fields


# A forked worker inherits the open file and with it the lock, and would keep it after a crash of its parent.
_OPEN: weakref.WeakSet[AppendOnlyLog] = weakref.WeakSet()


def _close_after_fork() -> None:
    for journal in list(_OPEN):
        journal.close()


os.register_at_fork(after_in_child=_close_after_fork)


def _open_locked(path: Path) -> int:
    """Open the file for appending, locked for as long as it is open."""
    try:
        # Readable by its owner only: events of per-user budgets tell something of persons.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise SilodpError(
            f"ledger {path} cannot be opened ({error.strerror}): check the path.", code="ledger.write_failed"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise SilodpError(
            f"ledger {path} is in use by another process: wait for that run, or stop it.", code="run.in_use"
        ) from None
    return file


def _sync_directory(path: Path) -> None:
    """Wait until the name of a new file is on disk: fsync of the file alone does not cover its directory."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _split(content: bytes) -> tuple[list[bytes], bytes]:
    """Return whole lines, and what a crash left of the last one.

    A killed process leaves a line without its end. A power cut may leave a line its length but not all its
    blocks, which then read as zeros.
    """
    *lines, torn = content.split(b"\n")
    # Splitting removes the line ends, and `_read_line` compares whole lines.
    whole = [line + b"\n" for line in lines]
    if whole and not torn and b"\0" in whole[-1]:
        torn = whole.pop()
    return whole, torn


def _line(fields: Mapping[str, Any], previous: str) -> bytes:
    """Return one line: the fields, the hash of the line before, and the hash of both."""
    # The hash covers the hash of the line before, so a line can neither be moved nor left out.
    body = {**fields, "previous": previous}
    body["hash"] = hashlib.sha256(_json(body)).hexdigest()
    return _json(body) + b"\n"


def _json(fields: Mapping[str, Any]) -> bytes:
    # One spelling for the same fields, since the hash is of the bytes; NaN is no JSON, and no event has one.
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
