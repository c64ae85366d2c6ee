"""What parties say to each other: named plain fields and arrays, with one wire encoding and no pickle."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from silodp.errors import SilodpError, shorten

_BLOB = "blob:"
MOST_NAME = 400
"""Characters of a kind, a run id, or the name of an entry."""
_MOST_HEADER = 1 << 24  # bytes of JSON: names and offsets of all entries
_MOST_ENTRIES = 1 << 14  # a roster names each silo a few times
_MOST_DEPTH = 4
_TOO_MUCH = (
    RecursionError,
    OverflowError,
    MemoryError,
)  # JSON nested a thousand times; sizes that nothing backs
_MOST_NUMBER = 1 << 53  # whole numbers that every language reads alike


@dataclass(frozen=True)
class Message:
    """One request or answer.

    kind, run, round and attempt name it; `fields` holds JSON values, `arrays` numpy arrays, `blobs` byte strings.

    Raises:
        SilodpError: what names it is of another kind. False counts as 0 and is written otherwise: a silo that kept
            answers by the written name would draw twice for one round.
    """

    kind: str
    run: str
    round: int = 0
    attempt: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("kind", "run"):
            value = getattr(self, name)
            if type(value) is not str or "/" in value or not _is_text(value):
                raise SilodpError(
                    f"a message has {name} = {shorten(value)}: it must be a name without '/'.",
                    code="message.malformed",
                )
        for name in ("round", "attempt"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= _MOST_NUMBER:
                raise SilodpError(
                    f"a message has {name} = {shorten(value)}: it must be a whole number ≥ 0.",
                    code="message.malformed",
                )

    def __repr__(self) -> str:
        # Names only: parties also keep secrets and counts in messages.
        entries = ", ".join([*self.fields, *self.arrays, *self.blobs])
        return f"Message({self.key!r}, entries=[{entries}])"

    @property
    def key(self) -> str:
        """What an answer is stored under."""
        return f"{self.run}/{self.kind}/{self.round}/{self.attempt}"

    def answer(self, **arrays: np.ndarray) -> Message:
        """An answer to this request."""
        return Message(self.kind, self.run, self.round, self.attempt, arrays=arrays)

    def reply(self, **blobs: bytes) -> Message:
        """An answer of byte strings."""
        return Message(self.kind, self.run, self.round, self.attempt, blobs=blobs)

    def encode(self) -> bytes:
        """The bytes on the wire: safetensors, with the plain part as a JSON header."""
        header = {
            "kind": self.kind,
            "run": self.run,
            "round": self.round,
            "attempt": self.attempt,
            "fields": self.fields,
        }
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        blobs = {_BLOB + name: np.frombuffer(blob, dtype=np.uint8) for name, blob in self.blobs.items()}
        return bytes(save({**arrays, **blobs}, metadata={"message": json.dumps(header, sort_keys=True)}))

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """Inverse of `encode`; limits are checked before anything is parsed.

        Raises:
            SilodpError: when the bytes are not a message (code message.malformed).
        """
        try:
            length = int.from_bytes(data[:8], "little")
            if length > min(_MOST_HEADER, len(data)):
                raise ValueError("header")
            arrays = load(data)
            metadata = json.loads(data[8 : 8 + length])["__metadata__"]
            header = json.loads(metadata["message"])
            if len(arrays) > _MOST_ENTRIES or not all(_is_text(name) for name in arrays):
                raise ValueError("entries")
            if header.keys() != {"kind", "run", "round", "attempt", "fields"} or not _is_shallow(header):
                raise ValueError("fields")
            blobs = {
                name.removeprefix(_BLOB): arrays.pop(name).tobytes()
                for name in list(arrays)
                if name.startswith(_BLOB)
            }
            return cls(**header, arrays=arrays, blobs=blobs)
        except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, *_TOO_MUCH) as error:
            raise SilodpError(
                f"a message of {len(data)} bytes cannot be read: it was cut or altered on its way, or is not one of "
                "this version's; resume, so that it is asked for again.",
                code="message.malformed",
            ) from error

    def digest(self) -> str:
        """SHA-256 (hexadecimal) of everything in it; the same request has the same digest. Messages never change."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        state = hashlib.sha256(
            json.dumps([self.kind, self.run, self.round, self.attempt, self.fields], sort_keys=True).encode()
        )
        for name in sorted(self.arrays):
            array = np.ascontiguousarray(self.arrays[name])
            state.update(json.dumps([name, str(array.dtype), array.shape]).encode())
            state.update(array.tobytes())
        for name in sorted(self.blobs):
            state.update(json.dumps([name, len(self.blobs[name])]).encode())
            state.update(self.blobs[name])
        return state.hexdigest()


def _is_text(value: str) -> bool:
    """Whether a name is short and has a UTF-8 encoding (a lone surrogate from JSON has none)."""
    if len(value) > MOST_NAME:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_shallow(value: object, depth: int = 0) -> bool:
    """Whether JSON is nested at most so deep, in dictionaries with string keys and in lists."""
    if depth > _MOST_DEPTH:
        return False
    if isinstance(value, dict):
        value = list(value.values())
    return all(_is_shallow(inner, depth + 1) for inner in value) if isinstance(value, list) else True
