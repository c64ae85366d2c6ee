"""Additive shares of ⌊2ᵏ/N[u]⌋ between server and silos (docs/protocols.md, section 3).

N[u] counts user u's records over all silos. The server comes to hold a_u, the silos c_u, uniform modulo 2ᵀ each, with
a_u + c_u = v_u = ⌊2ᵏ/N[u]⌋, and 0 where N[u] is 0 or beyond the cap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from silodp.crypto.streams import Words
from silodp.errors import require
from silodp_private.crypto.shares import FirstSilo, PendingLookup, ShareParameters, ShareServer, SiloShares

_SET_UP = 0  # the transfer counter of the set-up


def compute_reciprocals(weight_bits: int, modulus: int, cap: int) -> Words:
    """Return ⌊2ᵏ/N⌋ for 1 ≤ N ≤ cap and 0 for every other N < M.

    Args:
        weight_bits: k < 64.
        modulus: M.
        cap: the largest count, below M.

    Returns:
        shape (M,).
    """
    require(
        1 <= cap < modulus and 0 <= weight_bits < 64,
        f"Shares of reciprocals: {weight_bits} bits of weight, counts to {cap} modulo {modulus}; set k < 64 and "
        "1 ≤ cap < M.",
        code="argument.value",
    )
    # A count beyond the cap cannot be honest; its weight 0 leaves the user out.
    table = np.zeros(modulus, np.uint64)
    table[1 : cap + 1] = np.uint64(1 << weight_bits) // np.arange(1, cap + 1, dtype=np.uint64)
    return table


@dataclass(frozen=True)
class ReciprocalParameters(ShareParameters):
    """Public constants of a session.

    Attributes:
        session: The session's id, 32 bytes.
        users: U, the number of users.
        cap: The largest count N[u], silos · n_max; below 2²⁴.
        weight_bits: k; weights are multiples of 2⁻ᵏ.
        word_bits: T > k, the number of bits of a share; at most 64.
    """

    cap: int
    weight_bits: int
    word_bits: int

    label: ClassVar[str] = "reciprocals"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            1 <= self.cap < 1 << 24,
            f"Shares of reciprocals: a cap of {self.cap}; set a cap from 1 and below 2²⁴.",
            code="argument.value",
        )
        require(
            0 <= self.weight_bits < self.word_bits <= 64,
            f"Shares of reciprocals: {self.weight_bits} bits of weight in words of {self.word_bits}; set k < T ≤ 64.",
            code="argument.value",
        )

    @property
    def modulus(self) -> int:
        """M, the smallest power of two above the cap: the modulus of the masked counts, and the size of the tables."""
        return 1 << self.cap.bit_length()

    def reduce(self, values: Words) -> Words:
        """Return the values modulo 2ᵀ."""
        # Words wrap modulo 2⁶⁴, which 2ᵀ divides: sums and products may be reduced at the end alone.
        return values & np.uint64((1 << self.word_bits) - 1)

    def add(self, values: Words, others: Words) -> Words:
        """Return the sums modulo 2ᵀ."""
        return self.reduce(values + others)

    def subtract(self, values: Words, others: Words) -> Words:
        """Return the differences modulo 2ᵀ."""
        return self.reduce(values - others)

    def count_masks(self, silo: SiloShares) -> Words:
        """Return ρ_u (U,), which one silo adds to its counts: exactly uniform modulo M, which is a power of two."""
        # M divides 2⁶⁴, so no residue is more likely than another one.
        return silo.words("count masks") % np.uint64(self.modulus)

    def ask(self, server: ShareServer, masked_counts: NDArray[np.integer]) -> PendingLookup:
        """Ask, as the server, at m_u = N[u] + ρ_u mod M, (U,); what is awaited is a_u."""
        counts = self.validate(masked_counts, self.modulus, "masked counts")
        return server.ask(_SET_UP, counts, self.modulus, np.zeros(self.users, np.uint64))

    def offer(self, zero: FirstSilo, request: bytes) -> bytes:
        """Offer, as silo 0, x ↦ ⌊2ᵏ/(x − ρ_u)⌋ − c_u.

        Once in a session: a second entry of one user would give away N[u].

        Args:
            zero: silo 0.
            request: the server's, `Lookup.message`.

        Returns:
            the answer to it.
        """
        # The server asks at N[u] + ρ_u modulo M, so the entry x of the table belongs to the count x − ρ_u.
        masks = self.count_masks(zero.silo).astype(np.int64)
        counts = (np.arange(self.modulus) - masks[:, None]) % self.modulus
        table = compute_reciprocals(self.weight_bits, self.modulus, self.cap)
        # c_u is taken off every entry, so that whichever the server opens is uniform to it.
        return zero.offer(_SET_UP, request, self.subtract(table[counts], zero.silo.shares()[:, None]))
