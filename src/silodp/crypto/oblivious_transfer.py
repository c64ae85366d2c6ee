"""Oblivious transfer: the sender holds two keys, the receiver learns the one it chose, the sender not which.

128 base transfers (Chou and Orlandi 2015, ristretto255) are stretched to any number by the extension of Ishai, Kilian,
Nissim and Petrank (2003). Its columns are checked as in SoftSpokenOT (Roy 2022, Fiat–Shamir), whose proof holds where
that of Keller, Orsini and Scholl (2015) has a gap: a receiver with inconsistent columns is caught, or has guessed k
bits of `delta` with probability 2⁻ᵏ. The first failed check ends these base transfers.

Not covered: a sender that offers wrong keys (the receiver then reads noise); base transfers are not universally
composable. Messages carry no authentication: the channel does. Source: docs/protocols.md, sections 3, 5.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import rbcl
from numpy.typing import NDArray

from silodp.crypto.streams import KEY_BYTES, Bytes, derive_key, keystream
from silodp.errors import SilodpError

SECURITY = 128  # base transfers, and bits of delta
_CHECK = 160  # bits; one of 2¹³ pairs of different columns passes as equal with probability 2⁻¹⁴⁷ a trial
_POINT = 32
_MOST_TRANSFERS = 1 << 23  # sums of bits stay exact in float32
_ENDED = (1 << 64) - 1  # counter of base transfers that no one may use again


class BaseTransfers:
    """The extension's receiver as sender of the base transfers: `offer` goes out, the reply makes a TransferReceiver.

    `session` is the session id (32 bytes); `purpose` tells the directions of one session apart.
    """

    def __init__(self, session: bytes, purpose: str) -> None:
        self._begin(_domain(session, purpose), rbcl.crypto_core_ristretto255_scalar_random())

    def _begin(self, domain: bytes, scalar: bytes) -> None:
        self._domain = domain
        self._scalar: bytes | None = scalar
        self.offer: bytes = rbcl.crypto_scalarmult_ristretto255_base(scalar)

    def pack(self) -> bytes:
        """Everything, the secret included, for this party's own durable store, until the reply is there."""
        if self._scalar is None:
            _refuse("crypto.reused", "a base transfer was answered before", "begin new base transfers")
        return self._domain + self._scalar

    @classmethod
    def unpack(cls, stored: bytes) -> BaseTransfers:
        """The base transfers that were stored; the caller sees to it that one reply alone is taken."""
        base = cls.__new__(cls)
        base._begin(stored[:32], stored[32:])
        return base

    def receiver(self, reply: bytes) -> TransferReceiver:
        """The receiver that these base transfers make, once: a second reply is refused."""
        if self._scalar is None:
            _refuse("crypto.reused", "a base transfer was answered twice", "begin new base transfers")
        scalar, self._scalar = self._scalar, None
        if len(reply) != SECURITY * _POINT:
            _refuse(
                "message.malformed",
                f"{len(reply)} bytes answer {SECURITY} base transfers",
                "begin new base transfers",
            )
        step = rbcl.crypto_scalarmult_ristretto255(scalar, self.offer)
        seeds = np.empty((2, SECURITY, KEY_BYTES), np.uint8)
        for i in range(SECURITY):
            point = _checked(reply[i * _POINT : (i + 1) * _POINT])
            zero = rbcl.crypto_scalarmult_ristretto255(scalar, point)
            one = rbcl.crypto_core_ristretto255_sub(zero, step)
            for choice, shared in enumerate((zero, one)):
                seeds[choice, i] = _matrix(_base_key(self._domain, i, self.offer, point, shared), -1)
        return TransferReceiver(self._domain, seeds)


@dataclass
class TransferReceiver:
    """The party that chooses. `counter` is the first one unused: store a greater one durably before using it.

    `seeds` has shape (2, 128, 32): both keys of every base transfer.
    """

    domain: bytes
    seeds: Bytes = field(repr=False)
    counter: int = 0

    def choose(self, counter: int, choices: NDArray[np.integer]) -> tuple[bytes, Bytes]:
        """The message to the sender, and this party's key of each transfer: shape (count, 32).

        `choices` are 0 or 1, shape (count,). A counter is used once: two choices under one show where they differ.
        """
        self.counter = _advanced(self.counter, counter)
        count = len(choices)
        if not np.isin(choices, (0, 1)).all():
            _refuse("argument.value", "a choice is neither 0 nor 1", "choose one of two")
        size = _stream_size(count)
        # Random choices fill the last byte and mask what the check reveals.
        filling = keystream(secrets.token_bytes(KEY_BYTES), 8 * size - count) & 1
        chosen = np.concatenate([choices.astype(np.uint8), filling])
        zeros, ones = (_columns(seeds, counter, size) for seeds in self.seeds)
        difference = (zeros ^ ones ^ np.packbits(chosen)).tobytes()
        columns = np.unpackbits(zeros, axis=1)
        challenge = _challenge(self.domain, counter, count, difference)
        proof = np.packbits(_fold(np.vstack([chosen, columns]), challenge), axis=1).tobytes()
        message = counter.to_bytes(8, "big") + difference + proof
        return message, _row_keys(self.domain, counter, _rows(columns, count))

    def pack(self) -> bytes:
        """Everything, secrets included, for this party's own durable store."""
        return self.domain + self.counter.to_bytes(8, "big") + self.seeds.tobytes()

    @classmethod
    def unpack(cls, stored: bytes, counter: int) -> TransferReceiver:
        """The receiver as stored, going on at `counter`, which may not lie before the stored one."""
        domain, counter, rest = _unpacked(stored, counter, 2 * SECURITY * KEY_BYTES)
        return cls(domain, _matrix(rest, 2, SECURITY, KEY_BYTES), counter)


@dataclass
class TransferSender:
    """The party that offers. `counter` is the first one unused: store a greater one durably before using it.

    `delta` has shape (128,), its choices in the base transfers; `seeds` has shape (128, 32), the keys they gave.
    """

    domain: bytes
    delta: Bytes = field(repr=False)
    seeds: Bytes = field(repr=False)
    counter: int = 0

    @classmethod
    def accept(cls, session: bytes, purpose: str, offer: bytes) -> tuple[TransferSender, bytes]:
        """The sender that an offer of base transfers makes, and the reply."""
        domain = _domain(session, purpose)
        _checked(offer)
        delta = np.unpackbits(_matrix(secrets.token_bytes(SECURITY // 8), -1))
        reply, keys = [], []
        for i, choice in enumerate(delta):
            scalar = rbcl.crypto_core_ristretto255_scalar_random()
            point = rbcl.crypto_scalarmult_ristretto255_base(scalar)
            # Both are computed, so that both choices cost the same.
            reply.append((point, rbcl.crypto_core_ristretto255_add(point, offer))[choice])
            shared = rbcl.crypto_scalarmult_ristretto255(scalar, offer)
            keys.append(_base_key(domain, i, offer, reply[-1], shared))
        return cls(domain, delta, _matrix(b"".join(keys), SECURITY, KEY_BYTES)), b"".join(reply)

    @property
    def ended(self) -> bool:
        """Whether a check failed, after which these base transfers are never used again."""
        return self.counter == _ENDED

    def keys(self, counter: int, count: int, message: bytes) -> Bytes:
        """Both keys of each transfer, shape (2, count, 32), from the receiver's message for this counter.

        Refuses a counter used before (a replay would show both keys), and ends itself when the columns do not agree.
        """
        size, following = _stream_size(count), _advanced(self.counter, counter)
        proof_size = (SECURITY + 1) * _CHECK // 8
        if len(message) != 8 + SECURITY * size + proof_size or message[:8] != counter.to_bytes(8, "big"):
            _refuse(
                "message.malformed",
                f"a message is not {count} transfers under counter {counter}",
                "repeat the exchange",
            )
        self.counter = following
        difference = message[8:-proof_size]
        corrections = _matrix(difference, SECURITY, size) * self.delta[:, None]
        bits = np.unpackbits(_columns(self.seeds, counter, size) ^ corrections, axis=1)
        proof = np.unpackbits(_matrix(message[-proof_size:], SECURITY + 1, -1), axis=1)
        folded = _fold(bits, _challenge(self.domain, counter, count, difference))
        if not np.array_equal(folded, proof[1:] ^ np.outer(self.delta, proof[0])):
            self.counter = _ENDED
            _refuse(
                "session.transfers_ended",
                "columns disagree, altered or of another session or a cheat",
                "start a new session",
            )
        rows = _rows(bits, count)
        return np.stack([_row_keys(self.domain, counter, r) for r in (rows, rows ^ np.packbits(self.delta))])

    def pack(self) -> bytes:
        """Everything, secrets included, for this party's own durable store."""
        return self.domain + self.counter.to_bytes(8, "big") + self.delta.tobytes() + self.seeds.tobytes()

    @classmethod
    def unpack(cls, stored: bytes, counter: int) -> TransferSender:
        """The sender as stored, going on at `counter`, which may not lie before the stored one."""
        domain, counter, rest = _unpacked(stored, counter, SECURITY + SECURITY * KEY_BYTES)
        seeds = _matrix(rest[SECURITY:], SECURITY, KEY_BYTES)
        return cls(domain, _matrix(rest[:SECURITY], -1), seeds, counter)


OFFER_BYTES = _POINT
REPLY_BYTES = SECURITY * _POINT


def choice_bytes(count: int) -> int:
    """Length of the message by which a receiver chooses in `count` transfers."""
    return 8 + SECURITY * _stream_size(count) + (SECURITY + 1) * _CHECK // 8


def _domain(session: bytes, purpose: str) -> bytes:
    """32 bytes that name this session and purpose in every hash."""
    if len(session) != 32:
        _refuse("argument.value", f"a session id of {len(session)} bytes", "give the 32 bytes of the session")
    return hashlib.sha256(json.dumps(["silodp transfers", session.hex(), purpose]).encode()).digest()


def _checked(point: bytes) -> bytes:
    """The point, if it is the canonical encoding of a group element other than the identity."""
    if len(point) != _POINT or not any(point) or not rbcl.crypto_core_ristretto255_is_valid_point(point):
        _refuse("message.malformed", "a base transfer's point is not valid", "begin new base transfers")
    return point


def _base_key(domain: bytes, index: int, offer: bytes, point: bytes, shared: bytes) -> bytes:
    return hashlib.sha256(b"base\0" + domain + index.to_bytes(8, "big") + offer + point + shared).digest()


def _columns(keys: Bytes, counter: int, size: int) -> Bytes:
    """`size` bytes of each key's stream for this counter: shape (128, size)."""
    return np.stack([keystream(derive_key(key.tobytes(), "transfer column", counter), size) for key in keys])


def _challenge(domain: bytes, counter: int, count: int, difference: bytes) -> Bytes:
    """Random bits that no one knew before the columns were fixed: shape (columns' bits less the mask, _CHECK)."""
    numbers = counter.to_bytes(8, "big") + count.to_bytes(8, "big")
    seed = hashlib.sha256(b"check\0" + domain + numbers + difference).digest()
    rows = 8 * _stream_size(count) - _CHECK
    return np.unpackbits(keystream(seed, rows * _CHECK // 8)).reshape(rows, _CHECK)


def _fold(bits: Bytes, challenge: Bytes) -> Bytes:
    """Each row times the challenge over GF(2), masked by the row's last _CHECK bits: shape (rows, _CHECK)."""
    product = bits[:, :-_CHECK].astype(np.float32) @ challenge.astype(np.float32)
    return (product.astype(np.int32) & 1).astype(np.uint8) ^ bits[:, -_CHECK:]


def _rows(columns: Bytes, count: int) -> Bytes:
    """The first `count` bits of 128 columns as rows of 16 bytes."""
    return np.packbits(columns[:, :count].T, axis=1)


def _row_keys(domain: bytes, counter: int, rows: Bytes) -> Bytes:
    """The rows hashed with session, counter and index: shape (count, 32)."""
    prefix = hashlib.sha256(b"row\0" + domain + counter.to_bytes(8, "big"))
    keys = []
    for index, row in enumerate(rows):
        digest = prefix.copy()
        digest.update(index.to_bytes(8, "big") + row.tobytes())
        keys.append(digest.digest())
    return _matrix(b"".join(keys), -1, KEY_BYTES)


def _stream_size(count: int) -> int:
    """Bytes of a column: one bit per transfer, filled to a byte, and the mask."""
    if not 0 < count <= _MOST_TRANSFERS:
        _refuse("argument.value", f"{count} transfers at once", f"ask for 1 to {_MOST_TRANSFERS}")
    return (count + 7) // 8 + _CHECK // 8


def _matrix(data: bytes, *shape: int) -> Bytes:
    return np.frombuffer(data, np.uint8).reshape(shape)


def _advanced(first_unused: int, counter: int) -> int:
    if not first_unused <= counter < _ENDED:
        _refuse(
            "crypto.reused",
            f"transfer counter {counter} was used or has ended",
            "use a later one, or new base transfers",
        )
    return counter + 1


def _unpacked(stored: bytes, counter: int, secret_size: int) -> tuple[bytes, int, bytes]:
    if len(stored) != 40 + secret_size or not int.from_bytes(stored[32:40], "big") <= counter <= _ENDED:
        _refuse(
            "crypto.reused",
            f"stored transfers are damaged or were used past {counter}",
            "make new base transfers",
        )
    return stored[:32], counter, stored[40:]


def _refuse(code: str, what: str, remedy: str) -> NoReturn:
    raise SilodpError(f"Oblivious transfer: {what}; {remedy}.", code=code)
