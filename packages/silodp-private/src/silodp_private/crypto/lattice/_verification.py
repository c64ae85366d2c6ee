"""Verified sums of ring products: an inexact sum is detected and never returned (docs/protocols.md, section 3).

A float64 transform rounds. Whether it rounded right depends on data, and a wrong digit would add to the data what no
noise was sized for. So every block is checked against random polynomials modulo 2^64, by another way of computing.
"""

from __future__ import annotations

import math
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
        self.repeated = self._added = 0
        self._memory: dict[str, NDArray[Any]] = {}
        self._ring = parameters.ring
        self._pieces = parameters.pieces
        self._row_bits = parameters.log2_limb_row
        self._transform = FourierTransform(parameters.ring_size)
        shape = (2 * parameters.limbs, _CHECK_PIECES, parameters.ring_size)
        # Secret and drawn for this answer alone: known tests could be met by a wrong block.
        drawn = keystream(key, 2 * int(np.prod(shape))).view("<i2").reshape(shape)
        # 16-bit pieces keep the products with ciphertexts exact; together they are uniform modulo 2^64.
        self._tests = _join(drawn.astype(np.int64), CHECK_PIECE_BITS)
        self._tests_adjoint = self._transform.forward(drawn).conj()

    def add_to(self, total: Integers, multipliers: NDArray[np.int32], elements: Elements) -> None:
        """Add Σ_u M_u·b_u to `total` in place; carries are left.

        Args:
            total: (B, 2, K, N), always the same one.
            multipliers: M (u, B, N).
            elements: returns, for a slice of the users, both halves of b: limb rows (·, 2K, N).

        Raises:
            SilodpError: a block is not exact even in pieces; nothing of `total` may be sent (code crypto.parameters).
        """
        groups = [*_groups(len(multipliers))]
        spectra = [self._transform.forward(elements(users)) for users in groups]
        digests = [self._digests(spectrum) for spectrum in spectra]
        blocks = multipliers.shape[1]
        # Tiles of blocks: the sums of a tile are kept as spectra, so one inverse transform a block serves all users.
        self._carry(total)
        for first in range(0, blocks, _BLOCKS_AT_A_TIME):
            tile = slice(first, min(first + _BLOCKS_AT_A_TIME, blocks))
            sums: Any = None
            expected = np.zeros(tile.stop - first, np.uint64)
            for users, spectrum, digest in zip(groups, spectra, digests, strict=True):
                some = multipliers[users, tile]
                self._add_expected(expected, digest, some)
                if sums is None:
                    sums = self._product(some, spectrum, "sums")
                else:
                    sums += self._product(some, spectrum, "product")
            rows = self._transform.inverse(sums)
            wrong = np.flatnonzero(self._digest(rows) != expected)
            if wrong.size:
                # Smaller pieces have smaller products, and rounding errors shrink with them; then every block is
                # checked again.
                self.repeated += wrong.size
                rows[wrong] = self._in_pieces(multipliers[:, tile][:, wrong], elements)
                require(
                    not (self._digest(rows) != expected).any(),
                    "a block of the weighted sum cannot be computed exactly, even in pieces; nothing was sent: take a "
                    "coarser grid (smaller C/g) or a smaller count cap",
                    code="crypto.parameters",
                )
            total[tile] += rows.reshape(total[tile].shape)

    def _carry(self, total: Integers) -> None:
        """Carry where one batch more could leave 62 bits, which is hardly ever: a batch has about 50."""
        self._added += 1
        if self._added > 1 and math.log2(self._added) + self._row_bits > 62:
            self._ring.balance(total)
            self._added = 1

    def _add_expected(self, expected: Words, digests: Words, multipliers: NDArray[np.int32]) -> None:
        """Add Σ_u ⟨y_u, M_u⟩ of every block in place; two's complement is right modulo 2^64."""
        wide = self._scratch("wide", np.uint64, *multipliers.shape[1:])
        for digest, blocks in zip(digests, multipliers, strict=True):
            np.copyto(wide.view(np.int64), blocks)
            expected += np.einsum("n,bn->b", digest, wide)

    def _product(self, multipliers: NDArray[np.int32], spectrum: Any, into: str) -> Any:
        """Return the spectrum of Σ_u M_u·b_u, in the memory of that name."""
        users, blocks, size = multipliers.shape
        left = self._scratch("multipliers", np.complex128, size // 2, users, blocks)
        self._transform.forward(multipliers, left)
        product = self._scratch(into, np.complex128, size // 2, blocks, spectrum.shape[-1])
        return np.matmul(left.swapaxes(1, 2), spectrum, out=product)

    def _scratch(self, name: str, kind: Any, *shape: int) -> Any:
        """Return memory that is used again: new pages cost the system as much as the transforms."""
        size = math.prod(shape)
        if name not in self._memory or self._memory[name].size < size:
            self._memory[name] = np.empty(size, kind)
        return self._memory[name][:size].reshape(shape)

    def _in_pieces(self, multipliers: NDArray[np.int32], elements: Elements) -> Integers:
        """Return Σ_u M_u·b_u (·, 2K, N), with rounding errors smaller by 2^14 for every piece but the last."""
        pieces = _split(multipliers, self._pieces)
        sums: list[Any] = [0] * len(pieces)
        for users in _groups(len(multipliers)):
            spectrum = self._transform.forward(elements(users))
            sums = [
                total + self._product(piece[users], spectrum, "piece")
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
