"""Durable key-value stores of the parties, with a namespace for each round that is dropped with the round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote

from silodp.wire.files import make_private_folder, read_sealed, write_sealed

_ROUNDS = "round/"


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
    """The entries of one run in a party's store: those of the run, and those of each round.

    All entries of a round are dropped together with it.

    Args:
        store: store of the party.
        prefix: of all keys of this run, where a store holds several runs.

    Attributes:
        run: The entries that last as long as the run.
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
        # Compared as numbers: round 10 is later than round 9.
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


def set_once(store: Store, key: str, value: bytes) -> bool:
    """Store a value durably unless the key has one.

    Args:
        store: where the key is.
        key: is never given another value.
        value: to be stored.

    Returns:
        Whether the key has this value now.
    """
    # One process writes a store (a deployed party holds a lock), so nothing comes between these two lines.
    known = store.get(key)
    if known is None:
        store.put(key, value)
    return known in (None, value)


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
        # Percent-encoded, slashes included: a key is one file name, and never a path.
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
