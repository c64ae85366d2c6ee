"""Files that survive a crash: replaced in one step, appended to line by line, or behind a checksum."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from silodp.errors import SilodpError, name_file

_DIGEST_BYTES = 32
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Permissions of what the owner alone may read."""


def write_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace a file's content in one step that survives a crash: either the old content or the new, never a part.

    Args:
        path: of the file; a file beside it with the ending ".partial" is written first.
        data: the new content.
        mode: permissions of a new file, less the process's umask.
    """
    _replace(path, (data,), mode)


def _replace(path: Path, parts: Sequence[bytes], mode: int) -> None:
    temporary = path.with_name(path.name + ".partial")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        # Contents are on disk before the name points to them: a crash leaves the old file or the whole new one.
        temporary.replace(path)
        # The rename itself is on disk only when the directory is.
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)  # the file that the caller knows
        raise


def append_durably(path: Path, line: bytes, mode: int = 0o666) -> None:
    """Append a line to a file; it is on disk when this returns.

    Args:
        path: of the file, made if it is not there. A last line that a crash cut off stays a line of its own.
        line: without its end.
        mode: permissions of a new file, less the process's umask.
    """
    if not path.exists():
        write_durably(path, b"", mode)  # syncs the entry in the directory too
    with path.open("rb") as file:
        is_cut_off = file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
    with name_file(path), path.open("ab") as file:
        file.write((b"\n" if is_cut_off else b"") + line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def write_sealed(path: Path, data: bytes) -> None:
    """Replace a file's content, as `write_durably` does, behind its SHA-256; its owner alone may read it."""
    # Against accidents only: whoever can write the file can write its checksum.
    _replace(path, (hashlib.sha256(data).digest(), data), PRIVATE_FILE)


def read_sealed(path: Path, where: str) -> bytes:
    """Return the data of `write_sealed`.

    Args:
        path: the path of the file.
        where: name of the file in an error.

    Raises:
        FileNotFoundError: there is none.
        SilodpError: its checksum does not fit (code checkpoint.damaged).
    """
    with path.open("rb", buffering=0) as file:  # a buffered file would read the rest in parts, and join them
        digest, data = file.read(_DIGEST_BYTES), file.read()
    if hashlib.sha256(data).digest() != digest:
        raise SilodpError(
            f"{where} is damaged: its checksum does not fit; restore it from a copy or begin a new run; for a deployed "
            "silo, which stays closed, read 'Backup' in docs/deployment_admin.md.",
            code="checkpoint.damaged",
        )
    return data


def is_private(status: os.stat_result) -> bool:
    """Return whether a file belongs to this user, and nobody else may read or change it."""
    return not stat.S_IMODE(status.st_mode) & 0o077 and status.st_uid == os.geteuid()


def make_private_folder(path: Path) -> None:
    """Make a folder for secrets, if it is not there, that its owner alone may enter.

    Raises:
        SilodpError: it is there, and others may read or enter it (code store.permissions).
    """
    path.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
    # A folder that is there already keeps its permissions: they are checked, never widened or narrowed.
    mode = path.stat().st_mode & 0o777
    if mode & ~PRIVATE_FOLDER:
        raise SilodpError(
            f"folder {path} holds keys and stored answers, and others may read it (mode {mode:04o}): run "
            f"'chmod 700 {path}' if nobody else has, or choose another place.",
            code="store.permissions",
        )
