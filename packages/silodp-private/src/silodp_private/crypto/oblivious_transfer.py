"""Oblivious transfer: the receiver learns one of two keys of the sender, and the sender does not learn which.

128 base transfers are stretched to any number. The extension's columns are checked: a receiver with inconsistent
columns is caught, or has guessed k bits of `delta` with probability 2⁻ᵏ. The first failed check ends these base
transfers.

Not covered: a sender that offers wrong keys (the receiver then reads noise); base transfers are not universally
composable. Messages carry no authentication: the channel does.

Sources: docs/protocols.md, sections 3 and 5. Base transfers: Chou and Orlandi, "The Simplest Protocol for Oblivious
Transfer", LATINCRYPT 2015, over ristretto255. Extension: Ishai, Kilian, Nissim and Petrank, "Extending Oblivious
Transfers Efficiently", CRYPTO 2003. Check: Roy, "SoftSpokenOT", CRYPTO 2022, by Fiat and Shamir's transform; its proof
holds where that of Keller, Orsini and Scholl (CRYPTO 2015) has a gap.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import rbcl
from numpy.typing import NDArray
from rbcl._sodium import lib_path

from silodp.crypto.streams import KEY_BYTES, Bytes, derive_key, keystream
from silodp.errors import SilodpError, require

# rbcl writes libsodium to a temporary file (2.6 MB) that it leaves behind; once loaded, the file is not needed.
if Path(lib_path).parent == Path(tempfile.gettempdir()):
    with contextlib.suppress(OSError):  # Windows keeps a loaded library
        Path(lib_path).unlink()

SECURITY = (
    128  # base transfers, and bits of delta: a receiver that guesses delta reads both keys of a transfer
)
_CHECK = 160  # bits; one of 2¹³ pairs of different columns passes as equal with probability 2⁻¹⁴⁷ a trial
_POINT = 32
OFFER_BYTES = _POINT
REPLY_BYTES = SECURITY * _POINT
MAX_TRANSFERS = 1 << 23  # sums of bits stay exact in float32
_ENDED = (1 << 64) - 1  # counter of base transfers that no one may use again


class BaseTransfers:
    """The extension's receiver as sender of the base transfers: `offer` goes out, the reply makes a TransferReceiver.

    Source: Chou and Orlandi, "The Simplest Protocol for Oblivious Transfer" (LATINCRYPT 2015), figure 1.

    Args:
        session: the session id, 32 bytes.
        purpose: a name for the direction, since one session may need transfers both ways.

    Attributes:
        offer: The point A = a·G for the other party, `OFFER_BYTES` (32) bytes.
    """

    def __init__(self, session: bytes, purpose: str) -> None:
        self._begin(_domain(session, purpose), rbcl.crypto_core_ristretto255_scalar_random())

    def _begin(self, domain: bytes, scalar: bytes) -> None:
        self._domain = domain
        self._scalar: bytes | None = scalar
        self.offer: bytes = rbcl.crypto_scalarmult_ristretto255_base(scalar)

    def pack(self) -> bytes:
        """Return everything, the secret included, for this party's durable store, until the reply is there."""
        return self._domain + self._secret()

    @classmethod
    def unpack(cls, stored: bytes) -> BaseTransfers:
        """Return the base transfers that were stored; the caller must take one reply alone."""
        base = cls.__new__(cls)
        base._begin(stored[:32], stored[32:])
        return base

    def receiver(self, reply: bytes) -> TransferReceiver:
        """Return the extension's receiver that the sender's reply makes.

        Args:
            reply: `REPLY_BYTES`, from `TransferSender.accept`.

        Raises:
            SilodpError: a reply was taken before (code crypto.reused), or this one is malformed.
        """
        # A reply that is taken twice would begin the counters anew under the same seeds.
        scalar, self._scalar = self._secret(), None
        require(
            len(reply) == REPLY_BYTES,
            f"Oblivious transfer: {len(reply)} bytes answer {SECURITY} base transfers; begin new base transfers.",
            code="message.malformed",
        )
        # The sender's point is B = b·G (+ A for choice 1), its key that of b·A: a·B for choice 0, a·(B − A) for 1.
        # a·A is the same in all transfers, so it is computed once.
        step = rbcl.crypto_scalarmult_ristretto255(scalar, self.offer)
        seeds = np.empty((2, SECURITY, KEY_BYTES), np.uint8)
        # Every point is validated before it is multiplied by the secret scalar.
        for i in range(SECURITY):
            point = _validate_point(reply[i * _POINT : (i + 1) * _POINT])
            zero = rbcl.crypto_scalarmult_ristretto255(scalar, point)
            one = rbcl.crypto_core_ristretto255_sub(zero, step)
            for choice, shared in enumerate((zero, one)):
                seeds[choice, i] = _matrix(_base_key(self._domain, i, self.offer, point, shared), -1)
        return TransferReceiver(self._domain, seeds)

    def _secret(self) -> bytes:
        if self._scalar is None:
            raise SilodpError(
                "Oblivious transfer: a base transfer was answered before; begin new base transfers.",
                code="crypto.reused",
            )
        return self._scalar


@dataclass
class TransferReceiver:
    """The party that chooses.

    Source: Ishai, Kilian, Nissim and Petrank (CRYPTO 2003): the receiver R.

    Attributes:
        domain: The 32 bytes that name session and purpose.
        seeds: Both keys of every base transfer, shape (2, 128, 32) uint8.
        counter: The first transfer counter that is unused: store a greater one durably before using it.
    """

    domain: bytes
    seeds: Bytes = field(repr=False)
    counter: int = 0

    def choose(self, counter: int, choices: NDArray[np.integer]) -> tuple[bytes, Bytes]:
        """Choose one of two keys in each of some transfers.

        Args:
            counter: of these transfers. It is used once: two choices under one show where they differ.
            choices: 0 or 1, shape (count,).

        Returns:
            the message to the sender, `choice_bytes(count)`; and the chosen key of each transfer, shape (count, 32).

        Raises:
            SilodpError: the counter was used (code crypto.reused), or a choice is neither 0 nor 1.
        """
        # Used up before anything is computed: an error afterwards must not leave the counter free.
        self.counter = _advance(self.counter, counter)
        count = len(choices)
        require(
            np.isin(choices, (0, 1)).all(),
            "Oblivious transfer: a choice is neither 0 nor 1; choose one of two.",
            code="argument.value",
        )
        size = _stream_size(count)
        # Random choices fill the last byte and mask what the check reveals.
        filling = keystream(secrets.token_bytes(KEY_BYTES), 8 * size - count) & 1
        chosen = np.concatenate([choices.astype(np.uint8), filling])
        # Column i of the sender is one of the two streams, by bit i of delta; the difference corrects the other one,
        # so that the sender's row j is the receiver's row j, plus delta where the choice is 1.
        zeros, ones = (_columns(seeds, counter, size) for seeds in self.seeds)
        difference = (zeros ^ ones ^ np.packbits(chosen)).tobytes()
        # The receiver's rows are those of the stream for bit 0; the sender has the other stream where its bit of delta
        # is 1.
        columns = np.unpackbits(zeros, axis=1)
        challenge = _challenge(self.domain, counter, count, difference)
        proof = np.packbits(_fold(np.vstack([chosen, columns]), challenge), axis=1).tobytes()
        message = counter.to_bytes(8, "big") + difference + proof
        return message, _row_keys(self.domain, counter, _rows(columns, count))

    def pack(self) -> bytes:
        """Return everything, secrets included, for this party's durable store."""
        return self.domain + self.counter.to_bytes(8, "big") + self.seeds.tobytes()

    @classmethod
    def unpack(cls, stored: bytes, counter: int) -> TransferReceiver:
        """Return the stored receiver, going on at `counter`, which may not lie before the stored one."""
        domain, counter, rest = _unpack(stored, counter, 2 * SECURITY * KEY_BYTES)
        return cls(domain, _matrix(rest, 2, SECURITY, KEY_BYTES), counter)


@dataclass
class TransferSender:
    """The party that offers.

    Source: Ishai, Kilian, Nissim and Petrank (CRYPTO 2003): the sender S; with the check of Roy (CRYPTO 2022).

    Attributes:
        domain: The 32 bytes that name session and purpose.
        delta: Its secret choices in the base transfers, shape (128,) uint8, each 0 or 1.
        seeds: The keys that these choices gave, shape (128, 32) uint8.
        counter: The first transfer counter that is unused: store a greater one durably before using it.
    """

    domain: bytes
    delta: Bytes = field(repr=False)
    seeds: Bytes = field(repr=False)
    counter: int = 0

    @classmethod
    def accept(cls, session: bytes, purpose: str, offer: bytes) -> tuple[TransferSender, bytes]:
        """Accept an offer of base transfers.

        Args:
            session, purpose: as in `BaseTransfers`.
            offer: what arrived.

        Returns:
            the sender, and the reply, `REPLY_BYTES`.

        Raises:
            SilodpError: the offer is no valid point (code message.malformed).
        """
        domain = _domain(session, purpose)
        # A point outside the group, or the identity, could make all keys of the sender predictable.
        _validate_point(offer)
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
    def has_ended(self) -> bool:
        """Whether a check failed, after which these base transfers are never used again."""
        return self.counter == _ENDED

    def keys(self, counter: int, count: int, message: bytes) -> Bytes:
        """Return both keys of each transfer, shape (2, count, 32), from the receiver's message for this counter.

        Raises:
            SilodpError: the counter was used before (code crypto.reused: a replay would show both keys); the message is
                of another length or counter (message.malformed); or its columns do not agree, which ends these base
                transfers (session.transfers_ended).
        """
        size, following = _stream_size(count), _advance(self.counter, counter)
        proof_size = (SECURITY + 1) * _CHECK // 8
        require(
            len(message) == choice_bytes(count) and message[:8] == counter.to_bytes(8, "big"),
            f"Oblivious transfer: a message is not {count} transfers under counter {counter}; repeat the exchange.",
            code="message.malformed",
        )
        # The counter counts as used before the check: a message that fails it must not be tried again.
        self.counter = following
        difference = message[8:-proof_size]
        # The sender corrects only the columns whose stream is the other one, which are those where delta is 1.
        corrections = _matrix(difference, SECURITY, size) * self.delta[:, None]
        bits = np.unpackbits(_columns(self.seeds, counter, size) ^ corrections, axis=1)
        proof = np.unpackbits(_matrix(message[-proof_size:], SECURITY + 1, -1), axis=1)
        folded = _fold(bits, _challenge(self.domain, counter, count, difference))
        # For honest columns q_i = t_i ⊕ delta_i·c, and folding is linear: so are the folds.
        if not np.array_equal(folded, proof[1:] ^ np.outer(self.delta, proof[0])):
            # Every further check would show one more bit of delta to a receiver that cheats.
            self.counter = _ENDED
            raise SilodpError(
                "Oblivious transfer: columns disagree, altered or of another session or a cheat; start a new session.",
                code="session.transfers_ended",
            )
        # Row j is t_j ⊕ c_j·delta for the receiver's row t_j and choice c_j: its hash, and that of row ⊕ delta, are the
        # two keys, of which the receiver knows that of t_j.
        rows = _rows(bits, count)
        return np.stack([_row_keys(self.domain, counter, r) for r in (rows, rows ^ np.packbits(self.delta))])

    def pack(self) -> bytes:
        """Return everything, secrets included, for this party's durable store."""
        return self.domain + self.counter.to_bytes(8, "big") + self.delta.tobytes() + self.seeds.tobytes()

    @classmethod
    def unpack(cls, stored: bytes, counter: int) -> TransferSender:
        """Return the stored sender, going on at `counter`, which may not lie before the stored one."""
        domain, counter, rest = _unpack(stored, counter, SECURITY + SECURITY * KEY_BYTES)
        seeds = _matrix(rest[SECURITY:], SECURITY, KEY_BYTES)
        return cls(domain, _matrix(rest[:SECURITY], -1), seeds, counter)


def choice_bytes(count: int) -> int:
    """Return the length of the message by which a receiver chooses in `count` transfers."""
    return 8 + SECURITY * _stream_size(count) + (SECURITY + 1) * _CHECK // 8


def _domain(session: bytes, purpose: str) -> bytes:
    """Return 32 bytes that name this session and purpose in every hash."""
    require(
        len(session) == 32,
        f"Oblivious transfer: a session id of {len(session)} bytes; give the 32 bytes of the session.",
        code="argument.value",
    )
    return hashlib.sha256(json.dumps(["silodp transfers", session.hex(), purpose]).encode()).digest()


def _validate_point(point: bytes) -> bytes:
    """Return the point if it is the canonical encoding of a group element other than the identity.

    Source: ristretto255, RFC 9496, section 4.3.1. The group has prime order, so no other check is needed.
    """
    require(
        len(point) == _POINT and any(point) and rbcl.crypto_core_ristretto255_is_valid_point(point),
        "Oblivious transfer: a base transfer's point is not valid; begin new base transfers.",
        code="message.malformed",
    )
    return point


def _base_key(domain: bytes, index: int, offer: bytes, point: bytes, shared: bytes) -> bytes:
    # Offer and point are part of the hash, as Chou and Orlandi require; with the index no two transfers share a key.
    return hashlib.sha256(b"base\0" + domain + index.to_bytes(8, "big") + offer + point + shared).digest()


def _columns(keys: Bytes, counter: int, size: int) -> Bytes:
    """Return `size` bytes of each key's stream for this counter: shape (128, size)."""
    return np.stack([keystream(derive_key(key.tobytes(), "transfer column", counter), size) for key in keys])


def _challenge(domain: bytes, counter: int, count: int, difference: bytes) -> Bytes:
    """Return random bits that no one knew before the columns were fixed: shape (bits of a column − _CHECK, _CHECK)."""
    # Fiat and Shamir: hashed from all columns, so that they cannot be chosen after the challenge.
    numbers = counter.to_bytes(8, "big") + count.to_bytes(8, "big")
    seed = hashlib.sha256(b"check\0" + domain + numbers + difference).digest()
    # The last _CHECK bits of a column are not folded: they are random, and hide what the fold would show of choices.
    rows = 8 * _stream_size(count) - _CHECK
    return np.unpackbits(keystream(seed, rows * _CHECK // 8)).reshape(rows, _CHECK)


def _fold(bits: Bytes, challenge: Bytes) -> Bytes:
    """Return each row times the challenge over GF(2), masked by the row's last _CHECK bits: shape (rows, _CHECK)."""
    # A float product is the fastest one numpy has, and exact: sums stay below 2^24 (see MAX_TRANSFERS).
    product = bits[:, :-_CHECK].astype(np.float32) @ challenge.astype(np.float32)
    return (product.astype(np.int32) & 1).astype(np.uint8) ^ bits[:, -_CHECK:]


def _rows(columns: Bytes, count: int) -> Bytes:
    """Return the first `count` bits of 128 columns as rows of 16 bytes."""
    return np.packbits(columns[:, :count].T, axis=1)


def _row_keys(domain: bytes, counter: int, rows: Bytes) -> Bytes:
    """Return the rows hashed with session, counter and index: shape (count, 32).

    The hash breaks the correlation of the rows by delta, which is the same in all transfers.
    """
    prefix = hashlib.sha256(b"row\0" + domain + counter.to_bytes(8, "big"))
    keys = []
    for index, row in enumerate(rows):
        digest = prefix.copy()
        digest.update(index.to_bytes(8, "big") + row.tobytes())
        keys.append(digest.digest())
    return _matrix(b"".join(keys), -1, KEY_BYTES)


def _stream_size(count: int) -> int:
    """Return the bytes of a column: one bit per transfer, filled to a byte, and the mask."""
    require(
        0 < count <= MAX_TRANSFERS,
        f"Oblivious transfer: {count} transfers at once; ask for 1 to {MAX_TRANSFERS}.",
        code="argument.value",
    )
    return (count + 7) // 8 + _CHECK // 8


def _matrix(data: bytes, *shape: int) -> Bytes:
    return np.frombuffer(data, np.uint8).reshape(shape)


def _advance(first_unused: int, counter: int) -> int:
    require(
        first_unused <= counter < _ENDED,
        f"Oblivious transfer: counter {counter} was used or has ended; use a later one, or new base transfers.",
        code="crypto.reused",
    )
    return counter + 1


def _unpack(stored: bytes, counter: int, secret_size: int) -> tuple[bytes, int, bytes]:
    require(
        len(stored) == 40 + secret_size and int.from_bytes(stored[32:40], "big") <= counter <= _ENDED,
        f"Oblivious transfer: stored transfers are damaged or were used past {counter}; make new base transfers.",
        code="crypto.reused",
    )
    return stored[:32], counter, stored[40:]
