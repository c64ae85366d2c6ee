"""Durable key-value stores of the parties, with a namespace for each round that is dropped with the round."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote

from silodp.errors import SilodpError, name_file

_DIGEST = 32
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_ROUNDS = "round/"


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
    with _name_final(temporary, path), name_file(path):
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextmanager
def _name_final(temporary: Path, path: Path) -> Iterator[None]:
    """Give an OSError about the temporary file the name of the file that the caller knows."""
    try:
        yield
    except OSError as error:
        if error.filename == str(temporary):
            error.filename = str(path)
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
    _replace(path, (hashlib.sha256(data).digest(), data), PRIVATE_FILE)


def read_sealed(path: Path, where: str) -> bytes:
    """Return the data of `write_sealed`.

    Args:
        path: of the file.
        where: how an error calls the file.

    Raises:
        FileNotFoundError: there is none.
        SilodpError: its checksum does not fit (code checkpoint.damaged).
    """
    with path.open("rb", buffering=0) as file:  # a buffered file would read the rest in parts, and join them
        digest, data = file.read(_DIGEST), file.read()
    if hashlib.sha256(data).digest() != digest:
        raise SilodpError(
            f"{where} is damaged: its checksum does not fit; restore it from a copy or begin a new run; for a deployed "
            "silo, which stays closed, read 'Backup' in docs/deployment_admin.md.",
            code="checkpoint.damaged",
        )
    return data


class Store(Protocol):
    """Bytes under names, durable once `put` returns."""

    def put(self, key: str, value: bytes) -> None:
        """Store durably."""

    def get(self, key: str) -> bytes | None:
        """Return what was stored, or None."""

    def drop(self, key: str) -> None:
        """Delete; nothing happens for an unknown key."""

    def names(self) -> list[str]:
        """Return all keys."""


class RoundStore:
    """A party's durable memory of one run: what lasts, and what goes with its round.

    Whatever is put in a round's namespace is dropped with the round, whoever put it there.

    Args:
        store: the party's store.
        prefix: of all its keys of this run, for a store that outlives runs.

    Attributes:
        run: what lasts as long as the run.
    """

    def __init__(self, store: Store, prefix: str = "") -> None:
        self.run: Store = _Namespace(store, prefix)

    def round(self, round_: int) -> Store:
        """Return the namespace of one round, counted from 0; a key may name a release or an attempt in it."""
        return _Namespace(self.run, f"{_ROUNDS}{round_}/")

    def drop_rounds_before(self, round_: int) -> None:
        """Drop everything that was stored for earlier rounds.

        Not in one step: a process that dies in between leaves entries, which the next call drops.
        """
        for key in _Namespace(self.run, _ROUNDS).names():
            if int(key.partition("/")[0]) < round_:
                self.run.drop(_ROUNDS + key)


class _Namespace:
    """The part of a store whose keys begin with a prefix."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def put(self, key: str, value: bytes) -> None:
        self._store.put(self._prefix + key, value)

    def get(self, key: str) -> bytes | None:
        return self._store.get(self._prefix + key)

    def drop(self, key: str) -> None:
        self._store.drop(self._prefix + key)

    def names(self) -> list[str]:
        """Return the keys of this part, without the prefix."""
        return [key.removeprefix(self._prefix) for key in self._store.names() if key.startswith(self._prefix)]


def get_or_make(store: Store, key: str, make: Callable[[], bytes]) -> bytes:
    """Return what is stored under a key; if nothing is, make it, and store it before it is used.

    So a process that was restarted sends the same bytes again. Fresh random values in a repeated message would show
    more than was charged, or two openings of one secret.

    Args:
        store: of the round, or of the run.
        key: in the store.
        make: makes the value.
    """
    stored = store.get(key)
    if stored is None:
        stored = make()
        store.put(key, stored)
    return stored


def claim(store: Store, key: str, owner: bytes) -> bool:
    """Claim a key durably for one owner.

    Returns:
        whether `owner` is the first to claim it, or claims it again.
    """
    known = store.get(key)
    if known is None:
        store.put(key, owner)
    return known is None or known == owner


class MemoryStore:
    """For runs that keep nothing on disk: they cannot be resumed."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        """Keep until the process ends."""
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        """Return what was kept, or None."""
        return self._values.get(key)

    def drop(self, key: str) -> None:
        """Delete; nothing happens for an unknown key."""
        self._values.pop(key, None)

    def names(self) -> list[str]:
        """Return all keys."""
        return list(self._values)


def make_private_folder(path: Path) -> None:
    """Make a folder for secrets, if it is not there, that its owner alone may enter.

    Raises:
        SilodpError: it is there, and others may read or enter it (code store.permissions).
    """
    path.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
    mode = path.stat().st_mode & 0o777
    if mode & ~PRIVATE_FOLDER:
        raise SilodpError(
            f"folder {path} holds keys and stored answers, and others may read it (mode {mode:04o}): run "
            f"'chmod 700 {path}' if nobody else has, or choose another place.",
            code="store.permissions",
        )


class DirectoryStore:
    """One file per key, written durably and checked on reading.

    Args:
        directory: made if it is not there, for its owner alone.
        private: whether a folder that others may enter is refused; False to read a copy of a finished run.

    Raises:
        SilodpError: others may enter the folder (code store.permissions).
    """

    def __init__(self, directory: Path, private: bool = True) -> None:
        self._directory = directory
        if private:
            make_private_folder(directory)

    def _path(self, key: str) -> Path:
        return self._directory / quote(key, safe="")

    def put(self, key: str, value: bytes) -> None:
        """Write durably, behind a checksum."""
        write_sealed(self._path(key), value)

    def get(self, key: str) -> bytes | None:
        """Return what was stored, or None.

        Raises:
            SilodpError: the file was damaged (code checkpoint.damaged).
        """
        path = self._path(key)
        try:
            return read_sealed(path, f"stored file {path}")
        except FileNotFoundError:
            return None

    def drop(self, key: str) -> None:
        """Delete; nothing happens for an unknown key."""
        self._path(key).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return all keys; a write that was cut off has none."""
        return [unquote(path.name) for path in self._directory.iterdir() if path.suffix != ".partial"]
