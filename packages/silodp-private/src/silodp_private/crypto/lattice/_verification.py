"""Verified sums of ring products: an inexact sum is detected and never returned (docs/protocols.md, section 3).

A float64 transform rounds. Whether it rounded right depends on data, and a wrong digit would add to the data what no
noise was sized for. So every block is checked against random polynomials modulo 2^64, by another way of computing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silodp.crypto.streams import Integers, Words, keystream
from silodp.errors import require
from silodp_private.crypto.lattice.parameters import CHECK_PIECE_BITS, PIECE_BITS, LatticeParameters
from silodp_private.crypto.lattice.ring import FourierTransform

Elements = Callable[[slice], NDArray[np.int32]]
_USERS_AT_A_TIME = 32  # added up by one matrix product; the error bound counts on it
_BLOCKS_AT_A_TIME = 8
_CHECK_PIECES = 64 // CHECK_PIECE_BITS


class VerifiedProducts:
    """Σ_u M_u·b_u over the integers, limb row by limb row.

    With T_k uniform modulo 2^64 for every limb row k, drawn once, and y_u = Σ_k adj(b_{u,k})·T_k, a block r is right
    only if Σ_k ⟨T_k, r_k⟩ = Σ_u ⟨y_u, M_u⟩ modulo 2^64; a wrong one passes with probability ≤ 2^−44. A block that fails
    is computed again from M in balanced 14-bit pieces, and checked again. This is Freivalds' check ("Probabilistic
    Machines Can Use Less Running Time", IFIP Congress 1977) for polynomials.

    Args:
        parameters: public constants.
        key: secret, from which T follows; whoever knew it could make wrong blocks pass.

    Attributes:
        repeated: blocks that had to be computed in pieces.
    """

    def __init__(self, parameters: LatticeParameters, key: bytes):
        self.repeated = 0
        self._ring = parameters.ring
        self._pieces = parameters.pieces
        self._transform = FourierTransform(parameters.ring_size)
        shape = (2 * parameters.limbs, _CHECK_PIECES, parameters.ring_size)
        # Secret and drawn for this answer alone: known tests could be met by a wrong block.
        drawn = keystream(key, 2 * int(np.prod(shape))).view("<i2").reshape(shape)
        # 16-bit pieces keep the products with ciphertexts exact; together they are uniform modulo 2^64.
        self._tests = _join(drawn.astype(np.int64), CHECK_PIECE_BITS)
        self._tests_adjoint = self._transform.forward(drawn).conj()

    def add_to(self, total: Integers, multipliers: NDArray[np.int32], elements: Elements) -> None:
        """Add Σ_u M_u·b_u to `total` in place, and carry.

        Args:
            total: (B, 2, K, N), balanced before and after.
            multipliers: M (u, B, N).
            elements: returns, for a slice of the users, both halves of b: limb rows (·, 2K, N).

        Raises:
            SilodpError: a block is not exact even in pieces; nothing of `total` may be sent (code crypto.parameters).
        """
        blocks = multipliers.shape[1]
        # Tiles of blocks, so that the spectra of a product stay small whatever the size of the vector.
        tiles = [slice(b, min(b + _BLOCKS_AT_A_TIME, blocks)) for b in range(0, blocks, _BLOCKS_AT_A_TIME)]
        # Sums are kept as spectra: one inverse transform for each block, whatever the number of users.
        sums: list[Any] = [0] * len(tiles)
        expected = np.zeros(blocks, np.uint64)
        for users in _groups(len(multipliers)):
            spectrum = self._transform.forward(elements(users))
            digests = self._digests(spectrum)
            for i, tile in enumerate(tiles):
                some = multipliers[users, tile]
                # Σ_u ⟨y_u, M_u⟩ for every block: two's complement is right modulo 2^64.
                expected[tile] += np.einsum("un,ubn->b", digests, some.astype(np.int64).view(np.uint64))
                sums[i] += self._product(some, spectrum)
        for i, tile in enumerate(tiles):
            rows, sums[i] = self._transform.inverse(sums[i]), None  # each spectrum is freed when it was read
            wrong = np.flatnonzero(self._digest(rows) != expected[tile])
            if wrong.size:
                # Smaller pieces have smaller products, and rounding errors shrink with them; then every block is
                # checked again.
                self.repeated += wrong.size
                rows[wrong] = self._in_pieces(multipliers[:, tile][:, wrong], elements)
                require(
                    not (self._digest(rows) != expected[tile]).any(),
                    "a block of the weighted sum cannot be computed exactly, even in pieces; nothing was sent: take a "
                    "coarser grid (smaller C/g) or a smaller count cap",
                    code="crypto.parameters",
                )
            total[tile] += rows.reshape(total[tile].shape)
            self._ring.balance(total[tile])

    def _product(self, multipliers: NDArray[np.int32], spectrum: Any) -> Any:
        """Return the spectrum of Σ_u M_u·b_u."""
        return self._transform.forward(multipliers).swapaxes(1, 2) @ spectrum

    def _in_pieces(self, multipliers: NDArray[np.int32], elements: Elements) -> Integers:
        """Return Σ_u M_u·b_u (·, 2K, N), with rounding errors smaller by 2^14 for every piece but the last."""
        pieces = _split(multipliers, self._pieces)
        sums: list[Any] = [0] * len(pieces)
        for users in _groups(len(multipliers)):
            spectrum = self._transform.forward(elements(users))
            sums = [
                total + self._product(piece[users], spectrum)
                for total, piece in zip(sums, pieces, strict=True)
            ]
        rows: Integers = np.sum(
            [self._transform.inverse(total) << (PIECE_BITS * i) for i, total in enumerate(sums)], axis=0
        )
        return rows

    def _digests(self, spectrum: Any) -> Words:
        """Return y_u modulo 2^64 (u, N); adj(b) has the conjugate spectrum of b."""
        return _join(self._transform.inverse((spectrum @ self._tests_adjoint).conj()), CHECK_PIECE_BITS)

    def _digest(self, rows: Integers) -> Words:
        """Return Σ_k ⟨T_k, r_k⟩ modulo 2^64 for every block."""
        digest: Words = np.einsum("kn,bkn->b", self._tests, rows.view(np.uint64))
        return digest


def _groups(users: int) -> Iterator[slice]:
    return (slice(u, min(u + _USERS_AT_A_TIME, users)) for u in range(0, users, _USERS_AT_A_TIME))


def _split(integers: NDArray[np.int32], count: int) -> list[NDArray[np.int32]]:
    """Return `count` balanced pieces of 14 bits whose weighted sum, 2^(14·i) for the i-th, is `integers`."""
    pieces, half = [], 1 << (PIECE_BITS - 1)
    rest = integers.astype(np.int64)
    for _ in range(count - 1):
        # What is left is the nearest multiple of 2^14, so that pieces are balanced.
        low = ((rest + half) & ((1 << PIECE_BITS) - 1)) - half
        pieces.append(low.astype(np.int32))
        rest = (rest - low) >> PIECE_BITS
    return [*pieces, rest.astype(np.int32)]


def _join(pieces: Integers, bits: int) -> Words:
    """Return Σ_i piece_i·2^(bits·i) modulo 2^64, over the axis before the last."""
    # Two's complement: signed pieces add up right modulo 2^64.
    words = pieces.view(np.uint64)
    total = np.zeros((*words.shape[:-2], words.shape[-1]), np.uint64)
    for i in range(words.shape[-2]):
        total += words[..., i, :] << np.uint64(bits * i)
    return total
