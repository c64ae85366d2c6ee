"""Many products of powers of the same bases: a silo's work on each parameter (docs/protocols.md, section 4)."""

from __future__ import annotations

import numpy as np
from gmpy2 import invert, mpz, powmod
from numpy.typing import NDArray


class MultiExponentiation:
    """∏_u base_u^(x[u,j]) mod m for d columns j, `slots` of them to a residue: ∏_k (column k)^(2^(slot_bits·k)).

    Users come one after the other. |x| ≤ bound and 2·bound < 2^slot_bits. A user's columns share one table of powers
    (Straus 1964). Rows are offset by the bound, so every digit costs one multiplication by an entry of the table,
    whatever its sign or size, and the offset is taken out once for all users. Tables start at `blank`, an encryption of
    zero, so that no entry is 1: a zero is multiplied like any other number.

    Slots are shifted in whichever there is less of: the residues at the end, or every user's base, which then needs a
    table for each slot. Memory: a residue for each digit of each column (of each residue, if bases are shifted).
    """

    def __init__(
        self, modulus: mpz, blank: mpz, shape: tuple[int, int], bound: int, slots: int, slot_bits: int
    ):
        users, size = shape
        self._modulus, self._blank, self._bound, self._slot_bits = modulus, blank, bound, slot_bits
        residues = -(-size // slots)
        self._slots_of_base, self._slots_of_end = (slots, 1) if residues > users else (1, slots)
        columns = residues * self._slots_of_end
        bits = (2 * bound).bit_length()
        self._window = min(
            range(1, 17), key=lambda w: (1 << w) + columns * -(-bits // w)
        )  # multiplications a table
        self._columns = [
            [mpz(1)] * columns for _ in range(-(-bits // self._window))
        ]  # a list per digit, lowest first
        self._bases = mpz(1)
        self._padding = residues * slots - size

    def multiply(self, base: mpz, row: NDArray[np.int64]) -> None:
        """One user's part: row (d,) of exponents for its base."""
        for k, exponents in enumerate(np.pad(row, (0, self._padding)).reshape(-1, self._slots_of_base).T):
            base = self._shifted(base, self._slot_bits) if k else base
            self._multiply(base, exponents + self._bound)

    def _multiply(self, base: mpz, exponents: NDArray[np.int64]) -> None:
        table, digit = [self._blank], (1 << self._window) - 1
        for _ in range(digit):
            table.append(table[-1] * base % self._modulus)
        for i, column in enumerate(self._columns):
            digits = (exponents >> (i * self._window) & digit).tolist()
            pairs = zip(column, digits, strict=True)
            self._columns[i] = [value * table[k] % self._modulus for value, k in pairs]
        self._bases = self._bases * base % self._modulus

    def residues(self) -> list[mpz]:
        """The products, packed: ⌈d/slots⌉ residues."""
        offset = powmod(invert(self._bases, self._modulus), self._bound, self._modulus)
        *lower, highest = self._columns
        gap = self._slot_bits - self._window * len(lower)
        out = []
        for first in range(0, len(highest), self._slots_of_end):
            product = mpz(1)
            for j in reversed(range(first, first + self._slots_of_end)):  # Horner over slots, then digits
                product = self._shifted(product, gap) * highest[j] % self._modulus
                for column in reversed(lower):
                    product = self._shifted(product, self._window) * column[j] % self._modulus
                product = product * offset % self._modulus
            out.append(product)
        return out

    def _shifted(self, x: mpz, bits: int) -> mpz:
        """x^(2^bits)."""
        for _ in range(0 if x == 1 else bits):
            x = x * x % self._modulus
        return x
