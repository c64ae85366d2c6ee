"""One process at a time in a run's directory."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from silodp.errors import SilodpError

_HELD: set[int] = set()


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a lock on the file `path`, made if it is not there, until the end of the block.

    The system lets go of it when the process ends, however it ends. The file stays: whoever deleted it could delete
    one that another process has just locked.

    Raises:
        SilodpError: another process holds it.
    """
    file = _open_locked(path)
    _HELD.add(file)
    try:
        yield
    finally:
        if file in _HELD:
            _HELD.discard(file)
            os.close(file)


def _open_locked(path: Path) -> int:
    while True:
        # Nobody else may look into the folder: it holds what must not leave.
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:
            pass  # it was deleted with its directory (`silodp demo` does so) after it was opened: lock the new one
        except OSError as error:
            os.close(file)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                error.filename = str(path)
                raise
            raise SilodpError(
                f"a run is in progress in {path.parent.parent}: wait for it, stop it, or choose another directory.",
                code="run.in_use",
                field="out",
            ) from None
        os.close(file)


def _let_go_after_fork() -> None:
    # A forked worker inherits the open file and with it the lock, and would keep it after a crash of its parent.
    for file in list(_HELD):
        os.close(file)
    _HELD.clear()


os.register_at_fork(after_in_child=_let_go_after_fork)
