"""Vectors of integers modulo 2^bits for any number of bits, as planes of 64-bit words.

A silo sends such vectors, and secure aggregation masks them: `LimbGroup` is one of its groups. A number below 2^bits
is Σ_i word_i·2^(64·i), a vector has shape (words, count), least word first, and takes count·bits/8 bytes on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from silodp.crypto.lattice.ring import pack, unpack
from silodp.crypto.streams import Bytes, Integers, Words, keystream
from silodp.errors import require


@dataclass(frozen=True)
class LimbGroup:
    """The group of vectors of integers modulo a power of two.

    Attributes:
        bits: The modulus is 2^bits.
        count: The number of integers of a vector, a multiple of 64.
    """

    bits: int
    count: int

    @property
    def words(self) -> int:
        """64-bit words a number."""
        return -(-self.bits // 64)

    @property
    def size(self) -> int:
        """Bytes of a vector on the wire, and of the keystream that masks it."""
        return self.count * self.bits // 8

    def add(self, a: Words, b: Words) -> Words:
        """Return a + b mod 2^bits."""
        total = np.empty((self.words, self.count), np.uint64)
        carry: NDArray[np.bool_] | None = None
        for i in range(self.words):
            np.add(a[i], b[i], out=total[i])
            # A sum of words that is smaller than a summand has left 64 bits: the carry into the next word.
            overflow = total[i] < b[i]
            if carry is not None:
                total[i] += carry
                overflow |= carry & (total[i] == 0)
            carry = overflow
        return self._reduce(total)

    def subtract(self, a: Words, b: Words) -> Words:
        """Return a − b mod 2^bits."""
        rest = np.empty((self.words, self.count), np.uint64)
        borrow: NDArray[np.bool_] | None = None
        for i in range(self.words):
            np.subtract(a[i], b[i], out=rest[i])
            underflow = a[i] < b[i]
            if borrow is not None:
                underflow |= borrow & (rest[i] == 0)
                rest[i] -= borrow
            borrow = underflow
        return self._reduce(rest)

    def zero(self) -> Words:
        """Return the vector of zeros."""
        return np.zeros((self.words, self.count), np.uint64)

    def uniform(self, key: bytes) -> Words:
        """Return a uniform vector: the stream of `key`."""
        return self._unpack(keystream(key, self.size))

    def mask(self, value: Words, key: bytes, sign: int) -> Words:
        """Return value ± the uniform vector of `key`."""
        return (self.add if sign > 0 else self.subtract)(value, self.uniform(key))

    def bits_from(self, vector: Words, first: int, width: int) -> Words:
        """Return bits [first, first+width) of every number, width ≤ 64."""
        word, offset = divmod(first, 64)
        found: Words = vector[word] >> np.uint64(offset)
        if offset + width > 64:
            found |= vector[word + 1] << np.uint64(64 - offset)
        found &= np.uint64((1 << width) - 1)
        return found

    def from_limbs(self, limbs: Integers, limb_bits: int) -> Words:
        """Return the vector of all coefficients in order.

        Args:
            limbs: in [0, 2^w), shape (..., L, N) with L·w = bits.
            limb_bits: w.
        """
        vector = self.zero()
        for k in range(limbs.shape[-2]):
            limb = limbs[..., k, :].reshape(-1).view(np.uint64)
            word, offset = divmod(k * limb_bits, 64)
            vector[word] |= limb << np.uint64(offset)
            if offset + limb_bits > 64:
                vector[word + 1] |= limb >> np.uint64(64 - offset)
        return vector

    def to_limbs(self, vector: Words, limb_bits: int, *shape: int) -> Integers:
        """Return the limbs (..., L, N) of a vector of `from_limbs`; `shape` is (..., N)."""
        starts = range(0, self.bits, limb_bits)
        limbs = [self.bits_from(vector, first, limb_bits).view(np.int64).reshape(shape) for first in starts]
        return np.stack(limbs, axis=-2)

    def to_bytes(self, vector: Words) -> bytes:
        """Return whole words plane by plane, then the last word's bits packed: `size` bytes."""
        rest = self.bits % 64
        planes = [np.ascontiguousarray(plane, "<u8").tobytes() for plane in vector[: self.bits // 64]]
        return b"".join([*planes, pack(vector[-1], rest).tobytes()] if rest else planes)

    def from_bytes(self, packed: bytes) -> Words:
        """The inverse of `to_bytes`; any bytes of the right length are a vector."""
        require(
            len(packed) == self.size,
            f"a vector of {self.count} numbers modulo 2^{self.bits} takes {self.size} bytes, not {len(packed)}; "
            "server and silos must use the same parameters",
            code="message.malformed",
        )
        return self._unpack(np.frombuffer(packed, np.uint8))

    def _unpack(self, packed: Bytes) -> Words:
        vector = np.empty((self.words, self.count), np.uint64)
        whole = self.bits // 64
        split = whole * 8 * self.count
        vector[:whole] = packed[:split].view("<u8").reshape(whole, self.count)
        if self.bits % 64:
            vector[whole] = unpack(packed[split:], self.bits % 64)
        return vector

    def _reduce(self, vector: Words) -> Words:
        if self.bits % 64:
            vector[-1] &= np.uint64((1 << self.bits % 64) - 1)
        return vector
