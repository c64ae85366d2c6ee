"""Private lookup in one table per user: the receiver learns one entry, and the sender does not learn which.

A table of M entries takes L = ⌈log₂ M⌉ transfers. Entry x is sent under the exclusive or of L pads, the i-th drawn from
key x_i of transfer i at the place that the other bits of x name; so every entry but one lies under a pad that the
receiver cannot know, and no two entries share one. Entries are byte strings of one length. The work is the same
whatever the index.

The answer carries a fingerprint, which finds accidents and mixed-up sessions, not forgery: the channel authenticates.

Sources: docs/protocols.md, section 3; Naor and Pinkas, "Oblivious Transfer and Polynomial Evaluation", STOC 1999.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from silodp.crypto.streams import KEY_BYTES, Bytes, Integers, Words, expand_keys
from silodp.errors import require
from silodp_private.crypto.oblivious_transfer import TransferReceiver, TransferSender, choice_bytes

_FINGERPRINT = 32
_DOMAIN = 32


@dataclass(frozen=True)
class Lookup:
    """The receiver's side of one lookup for U users: send `message`, open the answer.

    Source: Naor and Pinkas, "Oblivious Transfer and Polynomial Evaluation" (STOC 1999): 1-out-of-M transfer from
    ⌈log₂ M⌉ transfers of one out of two keys.

    Attributes:
        message: The request, of `request_bytes(U, M)` bytes.
        domain: The 32 bytes that name session and purpose.
        counter: The transfer counter that was used.
        size: M, the number of entries of a table.
        indices: The entries asked for, shape (U,) int64.
        keys: The chosen transfer keys of 32 bytes, shape (U, L, 32) uint8.
    """

    message: bytes
    domain: bytes
    counter: int
    size: int
    indices: Integers = field(repr=False)
    keys: Bytes = field(repr=False)

    @classmethod
    def ask(cls, receiver: TransferReceiver, counter: int, indices: NDArray[np.integer], size: int) -> Lookup:
        """Ask for one entry of each user's table.

        Args:
            receiver: the receiver of the transfers, which chooses.
            counter: the transfer counter that the request uses up.
            indices: entries to ask for, shape (U,).
            size: M ≥ 2, entries of a table.

        Raises:
            SilodpError: an index lies outside the tables, or the counter was used.
        """
        levels = _levels(size)
        require(
            indices.ndim == 1 and len(indices) and indices.min() >= 0 and indices.max() < size,
            f"Lookup: an index lies outside the table of {size} entries; point inside it.",
            code="argument.value",
        )
        # Bit i of the index is the choice in transfer i; low bits come first, as `_pads` and `answer` expect it.
        entries: Integers = indices.astype(np.int64)
        # One transfer for every bit of the index: the receiver gets the key of its bit, and not the other one.
        bits = (entries[:, None] >> np.arange(levels)) & 1
        message, keys = receiver.choose(counter, bits.ravel())
        return cls(message, receiver.domain, counter, size, entries, keys.reshape(len(entries), levels, -1))

    def open(self, answer: bytes) -> Words:
        """Return the entries asked for, of one 64-bit word each: shape (U,)."""
        return self.entries(answer, 8).view("<u8")[:, 0].astype(np.uint64)

    def entries(self, answer: bytes, width: int) -> Bytes:
        """Return the entries asked for, of `width` bytes each: shape (U, width).

        Raises:
            SilodpError: the answer is not to this request (code message.unexpected).
        """
        users, levels = self.keys.shape[:2]
        fingerprint, hidden = answer[:_FINGERPRINT], answer[_FINGERPRINT:]
        require(
            len(hidden) == users * self.size * width
            and fingerprint == _fingerprint(self.domain, self.message, hidden),
            "Lookup: the answer does not belong to this request, or was altered; ask for it again.",
            code="message.unexpected",
        )
        everyone = np.arange(users)
        table = np.frombuffer(hidden, np.uint8).reshape(users, self.size, width)
        entries: Bytes = table[everyone, self.indices]
        # The entry's pads are those at the place that the other bits of the index name, as `answer` has put them.
        for i in range(levels):
            pads = _expand_pads(self.keys[:, i], levels, width)
            entries ^= pads[everyone, _without_bit(self.indices, i)]
        return entries

    def pack(self) -> bytes:
        """Return everything, secrets included, for this party's durable store."""
        numbers = np.array([self.counter, self.size, *self.keys.shape[:2]], "<u8").tobytes()
        return (
            self.domain + numbers + self.indices.astype("<i8").tobytes() + self.keys.tobytes() + self.message
        )

    @classmethod
    def unpack(cls, stored: bytes) -> Lookup:
        """Return the lookup that was stored."""
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
    """Return the length of `Lookup.message` for tables of `size` entries."""
    return choice_bytes(users * _levels(size))


def answer_bytes(users: int, size: int, width: int = 8) -> int:
    """Return the length of an `answer` with entries of `width` bytes."""
    return _FINGERPRINT + users * size * width


def answer(
    sender: TransferSender, counter: int, message: bytes, tables: NDArray[np.unsignedinteger]
) -> bytes:
    """Return the sender's answer to a request.

    Args:
        sender: the sender of the transfers, which offers.
        counter: the transfer counter that the request must name, and that is used up.
        message: `Lookup.message`.
        tables: one for each user, shape (U, M), or (U, M, width) of entries of several numbers; M ≥ 2. Numbers are sent
            as little-endian bytes.

    Raises:
        SilodpError: as for `TransferSender.keys`.
    """
    users, size = tables.shape[:2]
    levels = _levels(size)
    sent = (
        np.ascontiguousarray(tables, tables.dtype.newbyteorder("<")).view(np.uint8).reshape(users, size, -1)
    )
    width = sent.shape[2]
    # Both keys of every transfer. Each pads one half of the table: the entries whose i-th bit is the key's choice.
    pairs = sender.keys(counter, users * levels, message).reshape(2, users, levels, -1)
    # Tables are filled to a power of two, so that every bit halves them; what is filled is not sent.
    hidden = np.zeros((users, 1 << levels, width), np.uint8)
    hidden[:, :size] = sent
    for i in range(levels):
        # The entries whose i-th bit is `choice`, in the order of their other bits.
        halves = hidden.reshape(users, -1, 2, 1 << i, width)
        for choice in (0, 1):
            pads = _expand_pads(pairs[choice, :, i], levels, width)
            halves[:, :, choice] ^= pads.reshape(users, -1, 1 << i, width)
    data = hidden[:, :size].tobytes()
    return _fingerprint(sender.domain, message, data) + data


def _expand_pads(keys: Bytes, levels: int, width: int) -> Bytes:
    """Return one pad of each key (U, 32) for every entry of half a table: shape (U, 2^(levels−1), width)."""
    half = 1 << (levels - 1)
    return expand_keys(keys, half * width).reshape(len(keys), half, width)


def _without_bit(index: Integers, i: int) -> Integers:
    """Return the numbers that are left when bit i is taken out."""
    return index >> (i + 1) << i | index & ((1 << i) - 1)


def _levels(size: int) -> int:
    require(size >= 2, f"Lookup: a table of {size} entries; give at least two.", code="argument.value")
    return (size - 1).bit_length()


def _fingerprint(domain: bytes, message: bytes, hidden: bytes) -> bytes:
    request = hashlib.sha256(message).digest()
    # Over request and session: an answer to another request, or of another session, does not fit.
    return hashlib.sha256(b"answer\0" + domain + request + hidden).digest()
