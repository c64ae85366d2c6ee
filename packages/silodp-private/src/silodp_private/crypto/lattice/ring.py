"""The ring Z[X]/(X^N+1) modulo 2^(w·K): coefficients in K limbs of w bits, products by a float64 transform.

A coefficient is Σ_k limb_k·2^(w·k); an array of elements has shape (..., K, N), least limb first. *Balanced* limbs lie
in [−2^(w−1), 2^(w−1)), which halves the rounding error of a product. A product here may round wrong: the caller proves
that it does not, or checks it (docs/protocols.md, section 3).

Silos send coefficients as vectors of integers modulo a power of two (`LimbGroup`), which secure aggregation masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import LazyModule
from silodp.crypto.streams import Bytes, Integers, Words, draw_words, keystream
from silodp.errors import require

if TYPE_CHECKING:
    from scipy import fft
else:
    fft = LazyModule("scipy.fft")

_ROWS_AT_A_TIME = 32  # polynomials transformed together, at most: two megabytes, which stay in the cache
_ROOTS_AT_A_TIME = 256  # of a spectrum that is turned into rows


@dataclass(frozen=True)
class FourierTransform:
    """Matrices of polynomials to their values at half of the roots of X^N+1 (the other half are the conjugates).

    One complex FFT of length N/2: x_j + i·x_(j+N/2), twisted by e^(iπj/N). One product `A @ B` of spectra is the
    product of matrices of polynomials; the adjoint of a polynomial has the conjugate spectrum.

    Source: the weighted transform of Crandall and Fagin, "Discrete Weighted Transforms and Large-Integer Arithmetic",
    Mathematics of Computation 62, 1994.

    Attributes:
        size: N, the number of coefficients, a power of two.
    """

    size: int

    @cached_property
    def _twist(self) -> NDArray[np.complex128]:
        twist: NDArray[np.complex128] = np.exp(1j * np.pi * np.arange(self.size // 2) / self.size)
        return twist

    @cached_property
    def _untwist(self) -> NDArray[np.complex128]:
        # The inverse FFT's 1/(N/2) is a power of two, so it costs no rounding here either.
        untwist: NDArray[np.complex128] = self._twist.conj() / (self.size // 2)
        return untwist

    @cached_property
    def _folded(self) -> NDArray[np.complex128]:
        # Memory that is used again: new pages would cost the system more than the transforms.
        return np.empty(_ROWS_AT_A_TIME * self.size // 2, np.complex128)

    def _rows(self, rows: int, columns: int) -> NDArray[np.complex128]:
        """Return memory for the folded polynomials (rows, columns, N/2)."""
        count = rows * columns * self.size // 2
        memory = self._folded[:count] if count <= self._folded.size else np.empty(count, np.complex128)
        return memory.reshape(rows, columns, -1)

    def forward(
        self, polynomials: NDArray[Any], into: NDArray[np.complex128] | None = None
    ) -> NDArray[np.complex128]:
        """Return the spectrum (N/2, r, c) of integer polynomials (r, c, N), written to `into` where it is given."""
        rows, columns, size = polynomials.shape
        half = size // 2
        # The root comes first, so that `@` multiplies the matrices at all roots in one call.
        spectrum = np.empty((half, rows, columns), np.complex128) if into is None else into
        step = max(1, _ROWS_AT_A_TIME // max(1, columns))
        for first in range(0, rows, step):
            some = polynomials[first : first + step]
            folded = self._rows(len(some), columns)
            # Real coefficients: half of the roots suffice, and one complex FFT of half the length finds them.
            folded.real, folded.imag = some[..., :half], some[..., half:]
            folded *= self._twist
            values = fft.fft(folded, axis=-1, overwrite_x=True)
            spectrum[:, first : first + step] = values.transpose(2, 0, 1)
        return spectrum

    def inverse(self, spectrum: NDArray[np.complex128]) -> Integers:
        """Return the integer polynomials (r, c, N) of a spectrum (N/2, r, c), rounded to the nearest."""
        half, rows, columns = spectrum.shape
        polynomials = np.empty((rows, columns, 2 * half), np.int64)
        step = max(1, _ROWS_AT_A_TIME // max(1, columns))
        for first in range(0, rows, step):
            some = polynomials[first : first + step]
            values = self._rows(len(some), columns)
            for root in range(0, half, _ROOTS_AT_A_TIME):
                part = slice(root, root + _ROOTS_AT_A_TIME)
                values[..., part] = spectrum[part, first : first + step].transpose(1, 2, 0)
            folded = fft.ifft(values, axis=-1, norm="forward", overwrite_x=True)
            folded *= self._untwist
            parts = folded.view(np.float64)
            np.rint(parts, out=parts)
            with np.errstate(invalid="ignore"):  # beyond 2^63 is garbage, which the check of products finds
                some[..., :half], some[..., half:] = folded.real, folded.imag
        return polynomials


@dataclass(frozen=True)
class Ring:
    """Elements of (Z/2^(w·K))[X]/(X^N+1) as limbs (..., K, N).

    Attributes:
        size: N, the number of coefficients.
        limb_bits: w, the number of bits of a limb.
        limbs: K, the number of limbs of a coefficient.
    """

    size: int
    limb_bits: int
    limbs: int

    @property
    def half(self) -> int:
        """Half of a limb's range, 2^(w−1)."""
        return 1 << (self.limb_bits - 1)

    @property
    def mask(self) -> int:
        """2^w − 1."""
        return (1 << self.limb_bits) - 1

    def balance(self, element: Integers) -> Integers:
        """Carry in place, so that limbs are balanced.

        What leaves the last limb is a multiple of the modulus.
        """
        return self._carry(element, self.half)

    def canonical(self, element: Integers) -> Integers:
        """Carry in place, so that limbs lie in [0, 2^w): the coefficient in [0, 2^(w·K))."""
        return self._carry(element, 0)

    def _carry(self, element: Integers, offset: int) -> Integers:
        # `>>` rounds down for negative numbers too, so the rest lies in [−offset, 2^w − offset).
        carry: Integers | int = 0
        # A carry that leaves the last limb is dropped: it is a multiple of 2^(w·K).
        for k in range(element.shape[-2]):
            limb = element[..., k, :]
            limb += carry
            carry = (limb + offset) >> self.limb_bits
            limb -= carry << self.limb_bits
        return element

    def add_shifted(self, element: Integers, integers: Integers, shift: int) -> Integers:
        """Add integers·2^shift in place, carries left.

        Args:
            element: limbs (..., K, N).
            integers: signed, (..., N).
            shift: in bits, less than w·K.
        """
        first, offset = divmod(shift, self.limb_bits)
        room = self.limb_bits - offset
        # `&` and `>>` read negative integers as if they had sign bits without end, so what is added is exact modulo
        # 2^(w·K).
        element[..., first, :] += (integers & ((1 << room) - 1)) << offset
        rest = integers >> room
        for k in range(first + 1, element.shape[-2]):
            element[..., k, :] += rest & self.mask
            rest = rest >> self.limb_bits
        return element

    def uniform(self, key: bytes, *shape: int) -> NDArray[np.int32]:
        """Return uniform elements (*shape, K, N) in balanced limbs: the stream of `key`."""
        count = int(np.prod(shape, dtype=np.int64)) * self.limbs * self.size
        # The low w bits of a uniform word are uniform, and so is a limb less half of its range.
        digits = (draw_words(key, count, np.uint32) & np.uint32(self.mask)).astype(np.int32)
        return (digits - np.int32(self.half)).reshape(*shape, self.limbs, self.size)

    def to_bytes(self, element: NDArray[Any]) -> Bytes:
        """Return balanced limbs (..., K, N) as w bits each, shifted into [0, 2^w): (..., w·K·N/8) bytes."""
        values = (element + self.half).astype(np.uint64)
        return pack(values.reshape(*element.shape[:-2], -1), self.limb_bits)

    def from_bytes(self, packed: Bytes) -> NDArray[np.int32]:
        """Return the element of `to_bytes`; any bytes of the right length are elements."""
        digits = unpack(packed, self.limb_bits).astype(np.int32)
        digits -= np.int32(self.half)
        return digits.reshape(*packed.shape[:-1], self.limbs, self.size)


def pack(values: Words, bits: int) -> Bytes:
    """Return values (..., count) below 2^bits as (..., count·bits/8) bytes; bits ≤ 64, count a multiple of 64.

    Value j·G+i (G = count/64) lies in bits [j·bits, (j+1)·bits) of column i of `bits` rows of G little-endian words:
    consecutive values lie in consecutive words, so that packing is a few passes over whole rows.
    """
    rows = values.reshape(*values.shape[:-1], 64, -1)
    packed = np.zeros((*values.shape[:-1], bits, rows.shape[-1]), "<u8")
    for j in range(64):
        word, offset = divmod(j * bits, 64)
        packed[..., word, :] |= rows[..., j, :] << np.uint64(offset)
        if offset + bits > 64:
            packed[..., word + 1, :] |= rows[..., j, :] >> np.uint64(64 - offset)
    return packed.reshape(*values.shape[:-1], -1).view(np.uint8)


def unpack(packed: Bytes, bits: int) -> Words:
    """Return the values (..., count) of `pack`.

    Raises:
        ValueError: these are no whole rows of words.
    """
    columns = np.ascontiguousarray(packed).view("<u8").reshape(*packed.shape[:-1], bits, -1)
    rows = np.empty((*packed.shape[:-1], 64, columns.shape[-1]), np.uint64)
    for j in range(64):
        word, offset = divmod(j * bits, 64)
        row = columns[..., word, :] >> np.uint64(offset)
        if offset + bits > 64:
            row |= columns[..., word + 1, :] << np.uint64(64 - offset)
        rows[..., j, :] = row
    if bits < 64:
        rows &= np.uint64((1 << bits) - 1)
    return rows.reshape(*packed.shape[:-1], -1)


@dataclass(frozen=True)
class LimbGroup:
    """The group of vectors of integers modulo 2^bits, for any number of bits, as planes of 64-bit words.

    A number below 2^bits is Σ_i word_i·2^(64·i); a vector has shape (words, count), least word first.

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
            # A limb may lie across two words; its upper part goes to the next one.
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
        # Whole words are sent as they are: only the last word of a number has bits to spare.
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
            # Bits above the modulus stand in the last word alone.
            vector[-1] &= np.uint64((1 << self.bits % 64) - 1)
        return vector
