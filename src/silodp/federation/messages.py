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

from silodp.errors import SilodpError

_BLOB = "blob:"


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
            if type(value) is not str or "/" in value:
                raise SilodpError(f"a message has {name} = {value!r}: it must be a name without '/'.")
        for name in ("round", "attempt"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise SilodpError(f"a message has {name} = {value!r}: it must be a whole number ≥ 0.")

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
        """Inverse of `encode`.

        Raises:
            SilodpError: when the bytes are not a message.
        """
        try:
            arrays = load(data)
            length = int.from_bytes(data[:8], "little")
            header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["message"])
            blobs = {
                name.removeprefix(_BLOB): arrays.pop(name).tobytes()
                for name in list(arrays)
                if name.startswith(_BLOB)
            }
            return cls(**header, arrays=arrays, blobs=blobs)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise SilodpError(
                f"a message of {len(data)} bytes cannot be read: it was cut or altered on its way, or is not one of "
                "this version's; resume, so that it is asked for again."
            ) from error

    def digest(self) -> str:
        """SHA-256 of everything in it; the same request has the same digest. Nothing in a message changes."""
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
