"""Messages between parties: named plain fields, arrays and byte strings, with one wire encoding and no pickle."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from silodp.errors import SilodpError
from silodp.parsing import MALFORMED, parse_json
from silodp.text import shorten

_BLOB = "blob:"  # before the names of byte strings on the wire
_MAX_NAME = 400  # characters of a kind, a run id, or the name of an entry
_MAX_HEADER = 1 << 24  # bytes of JSON: names and offsets of all entries
_MAX_ENTRIES = 1 << 14  # a roster names each silo a few times
_MAX_DEPTH = 4
_HEADER = {"kind", "run", "round", "attempt", "fields"}  # the plain part of a message
_MAX_NUMBER = 1 << 53  # whole numbers that every language reads alike
_UNREADABLE = (SafetensorError, MemoryError, *MALFORMED)  # MemoryError: sizes that nothing backs


@dataclass(frozen=True)
class Message:
    """One request or answer.

    Attributes:
        kind, run, round, attempt: The name of the request; rounds and attempts are counted from 0.
        fields: JSON values by name.
        arrays: Numpy arrays by name.
        blobs: Byte strings by name.

    Raises:
        SilodpError: kind and run are not names, round and attempt not whole numbers, or the fields no dictionary. False
            counts as 0 and is written otherwise: a silo that kept answers by the written name would draw twice for one
            round.
    """

    kind: str
    run: str
    round: int = 0
    attempt: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("kind", self.kind), ("run", self.run)):
            # An error names them, and a log shows it: no characters that steer a terminal or begin a line.
            if type(value) is not str or "/" in value or not value.isprintable() or not _is_text(value):
                self._refuse_name(name, value, "a printable name without '/'")
        for name, number in (("round", self.round), ("attempt", self.attempt)):
            if type(number) is not int or not 0 <= number <= _MAX_NUMBER:
                self._refuse_name(name, number, "a whole number ≥ 0")
        if type(self.fields) is not dict:  # JSON of any type can be signed
            self._refuse_name("fields", self.fields, "an object")

    def _refuse_name(self, name: str, value: object, due: str) -> None:
        raise SilodpError(
            f"a message has {name} = {shorten(value)}: it must be {due}.", code="message.malformed"
        )

    def __repr__(self) -> str:
        # Names only: parties also keep secrets and counts in messages.
        entries = ", ".join([*self.fields, *self.arrays, *self.blobs])
        return f"Message({self.key!r}, entries=[{entries}])"

    @property
    def key(self) -> str:
        """The name of the request; its answer has the same."""
        return f"{self.run}/{self.kind}/{self.round}/{self.attempt}"

    def answer(self, **arrays: np.ndarray) -> Message:
        """Return an answer of arrays to this request."""
        return Message(self.kind, self.run, self.round, self.attempt, arrays=arrays)

    def reply(self, **blobs: bytes) -> Message:
        """Return an answer of byte strings to this request."""
        return Message(self.kind, self.run, self.round, self.attempt, blobs=blobs)

    def encode(self) -> bytes:
        """Return the bytes on the wire: safetensors, with the plain part as a JSON header."""
        return self._encoded

    @cached_property  # an answer is stored, and then signed
    def _encoded(self) -> bytes:
        header = {name: getattr(self, name) for name in _HEADER}
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        blobs = {_BLOB + name: np.frombuffer(blob, dtype=np.uint8) for name, blob in self.blobs.items()}
        return bytes(save({**arrays, **blobs}, metadata={"message": json.dumps(header, sort_keys=True)}))

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """Return the message of `encode`d bytes; limits are checked before anything is parsed.

        Raises:
            SilodpError: the bytes are not a message (code message.malformed).
        """
        try:
            # safetensors: 8 bytes with the length of the header, the header in JSON, then the tensors.
            length = int.from_bytes(data[:8], "little")
            if length > min(_MAX_HEADER, len(data)):
                raise ValueError("header")
            # safetensors checks that offsets lie in the data, follow each other and fit shapes and types.
            arrays = load(data)
            metadata = parse_json(data[8 : 8 + length])["__metadata__"]
            header = parse_json(metadata["message"], _MAX_DEPTH)
            if len(arrays) > _MAX_ENTRIES or not all(_is_text(name) for name in arrays):
                raise ValueError("entries")
            # Exact names: an unknown one may be of a later version, whose meaning is not known here.
            if header.keys() != _HEADER:
                raise ValueError("fields")
            blobs = {
                name.removeprefix(_BLOB): arrays.pop(name).tobytes()
                for name in list(arrays)
                if name.startswith(_BLOB)
            }
            return cls(**header, arrays=arrays, blobs=blobs)
        except _UNREADABLE as error:
            raise SilodpError(
                f"a message of {len(data)} bytes cannot be read: it was cut or altered on its way, or is not one of "
                "this version's; resume, so that it is asked for again.",
                code="message.malformed",
            ) from error

    def digest(self) -> str:
        """Return the SHA-256 (hexadecimal) of everything in it; the same request has the same digest."""
        return self._digest

    @cached_property  # messages never change
    def _digest(self) -> str:
        # Every part is preceded by its name, type and length, so that no two messages have one input of the hash.
        state = hashlib.sha256(
            json.dumps([self.kind, self.run, self.round, self.attempt, self.fields], sort_keys=True).encode()
        )
        for name in sorted(self.arrays):
            array = np.ascontiguousarray(self.arrays[name])
            state.update(json.dumps([name, str(array.dtype), array.shape]).encode())
            state.update(array.reshape(-1).view(np.uint8).data)  # not copied
        for name in sorted(self.blobs):
            state.update(json.dumps([name, len(self.blobs[name])]).encode())
            state.update(self.blobs[name])
        return state.hexdigest()


def _is_text(value: str) -> bool:
    """Return whether a name is short and has a UTF-8 encoding (a lone surrogate from JSON has none)."""
    if len(value) > _MAX_NAME:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
