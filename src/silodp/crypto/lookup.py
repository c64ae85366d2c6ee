"""One entry of a table for each user: the receiver learns the entry it points at, the sender not which.

A table of M entries takes L = ⌈log₂ M⌉ transfers (Naor and Pinkas 1999). Entry x is sent under the exclusive or of L
pads, the i-th drawn from key x_i of transfer i at the place that the other bits of x name; so every entry but one
lies under a pad that the receiver cannot know, and no two entries share one. Entries are 64-bit words, or several of
them. The work is the same whatever the index. Source: docs/protocols.md, section 3.

The answer carries a fingerprint, which finds accidents and mixed-up sessions, not forgery: the channel authenticates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from silodp.crypto.oblivious_transfer import TransferReceiver, TransferSender, choice_bytes
from silodp.crypto.streams import KEY_BYTES, Bytes, Words, draw_words
from silodp.errors import SilodpError

_FINGERPRINT = 32
_DOMAIN = 32


@dataclass(frozen=True)
class Lookup:
    """The receiver's side of one lookup for U users: send `message`, open the answer.

    `counter` is the transfer counter used; `size` is M; `indices` has shape (U,); `keys` has shape (U, L, 32).
    """

    message: bytes
    domain: bytes
    counter: int
    size: int
    indices: NDArray[np.int64] = field(repr=False)
    keys: Bytes = field(repr=False)

    @classmethod
    def ask(cls, receiver: TransferReceiver, counter: int, indices: NDArray[np.integer], size: int) -> Lookup:
        """Ask for entry `indices[u]` of user u's table of `size` entries, using up this transfer counter."""
        levels = _levels(size)
        if indices.ndim != 1 or not len(indices) or indices.min() < 0 or indices.max() >= size:
            _refuse("argument.value", f"an index lies outside the table of {size} entries", "point inside it")
        places: NDArray[np.int64] = indices.astype(np.int64)
        bits = (places[:, None] >> np.arange(levels)) & 1
        message, keys = receiver.choose(counter, bits.ravel())
        return cls(message, receiver.domain, counter, size, places, keys.reshape(len(places), levels, -1))

    def open(self, answer: bytes) -> Words:
        """The entries asked for, of one word each: shape (U,)."""
        return self.entries(answer, 1)[:, 0]

    def entries(self, answer: bytes, width: int) -> Words:
        """The entries asked for, of `width` words each: shape (U, width)."""
        users = len(self.indices)
        fingerprint, hidden = answer[:_FINGERPRINT], answer[_FINGERPRINT:]
        expected = _fingerprint(self.domain, self.message, hidden)
        if len(hidden) != users * self.size * width * 8 or fingerprint != expected:
            _refuse(
                "message.unexpected",
                "the answer does not belong to this request, or was altered",
                "ask for it again",
            )
        table = np.frombuffer(hidden, "<u8").reshape(users, self.size, width)
        entries = table[np.arange(users), self.indices]
        for u, index in enumerate(self.indices):
            for i, pad in enumerate(_pads(self.keys[u], width)):
                entries[u] ^= pad[_without_bit(int(index), i)]
        return entries.astype(np.uint64)

    def pack(self) -> bytes:
        """Everything, secrets included, for this party's own durable store."""
        numbers = np.array([self.counter, self.size, *self.keys.shape[:2]], "<u8")
        parts = (self.domain, numbers, self.indices.astype("<i8"), self.keys)
        return b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts) + self.message

    @classmethod
    def unpack(cls, stored: bytes) -> Lookup:
        """The lookup that was stored."""
        counter, size, users, levels = (int(x) for x in np.frombuffer(stored, "<u8", 4, _DOMAIN))
        rest = stored[_DOMAIN + 32 :]
        indices, keys = rest[: 8 * users], rest[8 * users :][: users * levels * KEY_BYTES]
        return cls(
            rest[len(indices) + len(keys) :],
            stored[:_DOMAIN],
            counter,
            size,
            np.frombuffer(indices, "<i8").astype(np.int64),
            np.frombuffer(keys, np.uint8).reshape(users, levels, KEY_BYTES),
        )


def request_bytes(users: int, size: int) -> int:
    """Length of `Lookup.message` for tables of `size` entries."""
    return choice_bytes(users * _levels(size))


def answer_bytes(users: int, size: int, width: int = 1) -> int:
    """Length of an `answer` with entries of `width` words."""
    return _FINGERPRINT + 8 * users * size * width


def answer(sender: TransferSender, counter: int, message: bytes, tables: Words) -> bytes:
    """The sender's answer to `message`: `tables` has shape (U, M), or (U, M, width): one for each user, M ≥ 2."""
    users, size, *wide = tables.shape
    levels, width = _levels(size), wide[0] if wide else 1
    pairs = sender.keys(counter, users * levels, message).reshape(2, users, levels, -1)
    hidden = np.zeros((users, 1 << levels, width), "<u8")
    hidden[:, :size] = tables.reshape(users, size, width)
    for u in range(users):
        for choice in (0, 1):
            for i, pad in enumerate(_pads(pairs[choice, u], width)):
                # The entries whose i-th bit is `choice`, in the order of their other bits.
                hidden[u].reshape(-1, 2, 1 << i, width)[:, choice] ^= pad.reshape(-1, 1 << i, width)
    data = hidden[:, :size].tobytes()
    return _fingerprint(sender.domain, message, data) + data


def _pads(keys: Bytes, width: int) -> Iterator[Words]:
    """The stream of each of one user's L keys, as wide as entries, for half as many as the table may have."""
    for key in keys:
        yield draw_words(key.tobytes(), width << (len(keys) - 1), np.uint64).reshape(-1, width)


def _without_bit(index: int, i: int) -> int:
    """The number that is left when bit i is taken out."""
    return index >> (i + 1) << i | index & ((1 << i) - 1)


def _levels(size: int) -> int:
    if size < 2:
        _refuse("argument.value", f"a table of {size} entries", "give at least two")
    return (size - 1).bit_length()


def _fingerprint(domain: bytes, message: bytes, hidden: bytes) -> bytes:
    request = hashlib.sha256(message).digest()
    return hashlib.sha256(b"answer\0" + domain + request + hidden).digest()


def _refuse(code: str, what: str, remedy: str) -> NoReturn:
    raise SilodpError(f"Lookup: {what}; {remedy}.", code=code)
