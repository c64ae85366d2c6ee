"""The plaintexts M_u = n[s,u]·Δ_u that a silo multiplies with, in batches and within their public bounds.

The flooding margin and the sensitivity rest on these bounds, so they are checked here, whoever else checked them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silodp.crypto.lattice.parameters import LatticeParameters
from silodp.crypto.streams import Integers, Words
from silodp.errors import require
from silodp.settings import check_shape

Chunk = tuple[Integers, NDArray[Any]]
"""Owners (r,), and their rows (r, d) of grid units."""


@dataclass(frozen=True)
class Plaintexts:
    """The plaintexts of one silo in one round.

    Attributes:
        parameters: The public constants.
        counts: The silo's numbers of records n[s,u], shape (U,), each in 0..n_max.

    Raises:
        SilodpError: counts of another shape, or out of range.
    """

    parameters: LatticeParameters
    counts: Integers = field(repr=False)

    def __post_init__(self) -> None:
        counts, cap = self.counts, self.parameters.count_cap
        check_shape("counts", counts, self.parameters.users, kind="iu")
        require(
            counts.min(initial=0) >= 0 and counts.max(initial=0) <= cap,
            f"counts must lie between 0 and the public cap of {cap}; cap them before the first round",
            code="argument.value",
            field="counts",
        )

    def batches(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Integers, NDArray[np.int32]]]:
        """Yield owners (b,) and their M (b, B, N), padded with zeros; each is valid until the next one is asked for.

        Raises:
            SilodpError: an owner is no user or comes twice; a row is not integer, not (d,), or longer than C/g.
        """
        parameters = self.parameters
        held = np.zeros((parameters.batch_users, parameters.blocks * parameters.ring_size), np.int32)
        owners: list[int] = []
        seen = np.zeros(parameters.users, bool)

        def batch() -> tuple[Integers, NDArray[np.int32]]:
            shape = (len(owners), parameters.blocks, parameters.ring_size)
            return np.array(owners, np.int64), held[: len(owners)].reshape(shape)

        for some, rows in chunks:
            require(
                rows.shape == (len(some), parameters.dimension) and rows.dtype.kind in "iu",
                f"rows must be integers of shape ({len(some)}, {parameters.dimension})",
                code="method.rows",
            )
            for owner, row in zip(some.tolist(), rows, strict=True):
                require(
                    0 <= owner < parameters.users and not seen[owner],
                    "every owner must be a user of the common index, with one row; check the rows",
                    code="method.rows",
                )
                seen[owner] = True
                norm2 = float(np.einsum("d,d->", row, row, dtype=np.float64))  # exact as far as the bound
                require(
                    norm2 <= float(parameters.clip_units) ** 2,
                    f"a row is longer than C/g = {parameters.clip_units}; clip, then round toward zero",
                    code="method.rows",
                )
                into = held[len(owners), : parameters.dimension]
                np.multiply(row, self.counts[owner], out=into, dtype=np.int32, casting="unsafe")
                owners.append(owner)
                if len(owners) == len(held):
                    yield batch()
                    owners.clear()
        if owners:
            yield batch()


def add_own_part(own: Words, shares: Words, multipliers: NDArray[np.int32]) -> None:
    """Add Σ_u share_u·M_u modulo 2^64 to `own` (B, N) in place; shares (u,), multipliers (u, B, N)."""
    for block, part in enumerate(own):
        part += np.einsum("u,un->n", shares, multipliers[:, block].astype(np.int64).view(np.uint64))
