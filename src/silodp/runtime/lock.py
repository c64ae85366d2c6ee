"""The lock on the directory of a run: one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from silodp.errors import SilodpError

_HELD: set[int] = set()
"""Descriptors of the files that this process has locked."""


@contextmanager
def hold_lock(path: Path, folder: Path | None = None) -> Iterator[None]:
    """Hold an exclusive lock on a file until the end of the block.

    The operating system releases it when the process ends, even if it is killed. The file is never deleted: a process
    that deletes it could delete the one that another process has just locked.

    Args:
        path: For example DIR/checkpoint/lock; made, with its folder, if it is not there.
        folder: What it protects; None: the folder above that of the lock.

    Raises:
        SilodpError: another process holds the lock (code run.in_use).
    """
    file = _open_locked(path, folder or path.parent.parent)
    _HELD.add(file)
    try:
        yield
    finally:
        if file in _HELD:
            _HELD.discard(file)
            os.close(file)


def _open_locked(path: Path, folder: Path) -> int:
    """Open and lock the file; return its descriptor."""
    while True:
        # Only the owner may enter the folder: it holds keys and stored answers.
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:
            pass  # deleted with its directory (`silodp demo` does so) after it was opened: lock the new one
        except OSError as error:
            os.close(file)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                error.filename = str(path)
                raise
            # The folder of a party has its own lock in it, and no other folder has the party's ledgers.
            advice = "or stop it" if path.parent == folder else "stop it, or choose another directory"
            raise SilodpError(
                f"a run is in progress in {folder}: wait for it, {advice}.",
                code="run.in_use",
                field="out",
            ) from None
        os.close(file)


def _close_after_fork() -> None:
    """Close a forked worker's copies of the files, with which it would keep the lock after a crash of its parent."""
    for file in list(_HELD):
        os.close(file)
    _HELD.clear()


os.register_at_fork(after_in_child=_close_after_fork)
