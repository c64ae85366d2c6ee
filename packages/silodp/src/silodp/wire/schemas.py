"""The contents of messages by kind: one schema for requests and one for answers, exact in names, types and sizes.

An aggregator lists the types of its messages as a `MessageSchedule`; the silo's gate and the server check every message
against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from silodp.errors import SilodpError
from silodp.text import shorten
from silodp.wire.messages import Message

# Generous: these bound what is read before a signature is checked, not what a message may say.
_HEADER_BYTES = 1 << 16  # names, offsets and fields of any message, beside the entries' names
_BYTES_PER_NAME = 1 << 11
_HEX = frozenset("0123456789abcdef")
HELLO = "hello"
"""Name of the request that begins a session of the set-up, and begins it anew."""


@dataclass(frozen=True)
class Array:
    """The type of an array in a message; bytes of a boolean array other than 0 and 1 are refused.

    Attributes:
        dtype: Name of the numpy type.
        shape: Shape of the array.
        finite: Whether infinity and NaN are refused.
    """

    dtype: str
    shape: tuple[int, ...]
    finite: bool = False

    @property
    def bytes(self) -> int:
        """Size on the wire, in bytes."""
        # In Python's integers (`object`): a product of shapes that a peer declares may leave 64 bits.
        return int(np.prod(self.shape, dtype=object)) * np.dtype(self.dtype).itemsize

    def find_problem(self, value: np.ndarray) -> str | None:
        """Return what is wrong with an array; None where it fits."""
        if value.dtype != np.dtype(self.dtype) or value.shape != self.shape:
            return f"is {value.dtype} of shape {value.shape}, due is {self.dtype} of shape {self.shape}"
        # A byte of 2 is true in numpy, and has another digest than 1: one value must have one form.
        if value.dtype == bool and (value.view(np.uint8) > 1).any():
            return "has truth values other than 0 and 1"
        if self.finite and not np.isfinite(value).all():
            return "is not finite"
        return None


@dataclass(frozen=True)
class Blob:
    """The type of a byte string in a message.

    Attributes:
        min_bytes, max_bytes: Bounds of its length, both included.
    """

    min_bytes: int
    max_bytes: int

    @classmethod
    def of(cls, size: int) -> Blob:
        """Return the type of byte strings of exactly this size."""
        return cls(size, size)

    def find_problem(self, value: bytes) -> str | None:
        """Return what is wrong with a byte string; None where it fits."""
        if self.min_bytes <= len(value) <= self.max_bytes:
            return None
        least, most = self.min_bytes, self.max_bytes
        due = f"{least}" if least == most else f"{least} to {most}"
        return f"has {len(value)} bytes, due are {due}"


Check = Callable[[Any], bool]
"""Whether a field's value fits."""


@dataclass(frozen=True)
class MessageSchema:
    """The entries of a message: all of them must be there, and no others.

    Attributes:
        fields: Checks of plain values by name.
        arrays, blobs: Types of arrays and byte strings by name.
    """

    fields: Mapping[str, Check] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    blobs: Mapping[str, Blob] = field(default_factory=dict)

    def check(self, message: Message, sender: str) -> None:
        """Check a message.

        Args:
            message: what was received.
            sender: how the sender is called in an error.

        Raises:
            SilodpError: naming the sender, the kind and the first entry that does not fit (code message.malformed).
        """
        problem = self._find_problem(message)
        if problem is not None:
            raise SilodpError(
                f"{sender} sent a malformed message of kind '{message.kind}' for round {message.round + 1}: {problem}; "
                "nothing was used.",
                code="message.malformed",
            )

    @property
    def max_bytes(self) -> int:
        """A length that no encoded message of this kind exceeds."""
        names = len(self.fields) + len(self.arrays) + len(self.blobs)
        contents = sum(a.bytes for a in self.arrays.values()) + sum(b.max_bytes for b in self.blobs.values())
        return _HEADER_BYTES + _BYTES_PER_NAME * names + contents

    def _find_problem(self, message: Message) -> str | None:
        due: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
            ("field", self.fields, message.fields),
            ("array", self.arrays, message.arrays),
            ("blob", self.blobs, message.blobs),
        )
        for what, known, given in due:
            # Entries that nobody asked for are refused, not ignored: what is signed is what is used.
            if known.keys() != given.keys():
                odd = sorted(known.keys() ^ given.keys())[0]
                return f"the {what} {shorten(odd)} is {'missing' if odd in known else 'unknown'}"
        for name, is_valid in self.fields.items():
            if not is_valid(message.fields[name]):
                return f"the field '{name}' is {shorten(message.fields[name])}"
        for what, known, given in due[1:]:
            for name, entry in known.items():
                if (problem := entry.find_problem(given[name])) is not None:
                    return f"the {what} '{name}' {problem}"
        return None


@dataclass(frozen=True)
class MessageType:
    """A request of one kind, and its answer.

    Attributes:
        name: The `Message.kind` of both.
        request, answer: The entries of the two messages.
    """

    name: str
    request: MessageSchema = field(default_factory=MessageSchema)
    answer: MessageSchema = field(default_factory=MessageSchema)


def session_type(
    name: str, request: Mapping[str, Blob] | None = None, answer: Mapping[str, Blob] | None = None
) -> MessageType:
    """Return the type of a request that names its session, from the blobs of the request and of its answer."""
    return MessageType(
        name, MessageSchema({"session": is_digest}, blobs=request or {}), MessageSchema(blobs=answer or {})
    )


@dataclass(frozen=True)
class MessageSchedule:
    """The messages of a run, in the order in which one silo answers them.

    Attributes:
        setup: Requests that are sent once, in this order; `HELLO` begins a session, or a new one.
        prepare: Requests that are sent once in a round, in this order, before its first update.
        update: The request of every attempt at a round.
        open: The request that is sent once for a release, after an update; None where values are not sealed.
    """

    setup: tuple[MessageType, ...]
    update: MessageType
    prepare: tuple[MessageType, ...] = ()
    open: MessageType | None = None

    @cached_property
    def kinds(self) -> Mapping[str, MessageType]:
        """All kinds by name."""
        # A kind that is not listed is refused by the gate, whatever it holds.
        every = (*self.setup, *self.prepare, self.update, *(() if self.open is None else (self.open,)))
        return {kind.name: kind for kind in every}

    @property
    def max_bytes(self) -> int:
        """A length that no encoded message of the run exceeds."""
        return max(schema.max_bytes for kind in self.kinds.values() for schema in (kind.request, kind.answer))


def is_digest(value: Any) -> bool:
    """Return whether a field is a SHA-256 in hexadecimal."""
    return type(value) is str and len(value) == 64 and set(value) <= _HEX


def is_whole(value: Any) -> bool:
    """Return whether a field is a whole number from 0 on.

    False is not 0: it would be another name for the same release.
    """
    return type(value) is int and 0 <= value < 1 << 53


def is_roster(names: tuple[str, ...]) -> Check:
    """Return a check that a field lists some of these names, each once, in this order."""

    def check(value: Any) -> bool:
        return (
            isinstance(value, list)
            and all(type(name) is str for name in value)
            and [name for name in names if name in value] == value
        )

    return check
