"""What a silo multiplies with: M_u = n[s,u]·Δ_u, gathered into batches and held to its public bounds.

The flooding margin and the sensitivity rest on these bounds, so they are checked here, whoever else checked them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silodp.crypto.lattice.parameters import LatticeParameters
from silodp.errors import SilodpError

Chunk = tuple[NDArray[np.int64], NDArray[Any]]
"""Owners (r,), and their rows (r, d) of grid units."""


@dataclass(frozen=True)
class Plaintexts:
    """Of one silo, in one round.

    Raises:
        SilodpError: counts (U,) are not integers in 0..n_max.
    """

    parameters: LatticeParameters
    counts: NDArray[np.int64] = field(repr=False)

    def __post_init__(self) -> None:
        counts, cap = self.counts, self.parameters.count_cap
        if counts.shape != (self.parameters.users,) or counts.dtype.kind not in "iu":
            raise SilodpError(
                f"counts must be {self.parameters.users} integers, one for every user",
                code="argument.shape",
                field="counts",
            )
        if counts.min(initial=0) < 0 or counts.max(initial=0) > cap:
            raise SilodpError(
                f"counts must lie between 0 and the public cap of {cap}; cap them before the first round",
                code="argument.value",
                field="counts",
            )

    def batches(self, chunks: Iterable[Chunk]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
        """Owners (b,) and their M (b, B, N), padded with zeros; valid until the next batch is asked for.

        Raises:
            SilodpError: an owner is no user or comes twice; a row is not integer, not (d,), or longer than C/g.
        """
        parameters = self.parameters
        held = np.zeros((parameters.batch_users, parameters.blocks * parameters.ring_size), np.int32)
        owners: list[int] = []
        seen = np.zeros(parameters.users, bool)

        def batch() -> tuple[NDArray[np.int64], NDArray[np.int32]]:
            shape = (len(owners), parameters.blocks, parameters.ring_size)
            return np.array(owners, np.int64), held[: len(owners)].reshape(shape)

        for some, rows in chunks:
            if rows.shape != (len(some), parameters.dimension) or rows.dtype.kind not in "iu":
                raise SilodpError(
                    f"rows must be integers of shape ({len(some)}, {parameters.dimension})",
                    code="method.rows",
                )
            for owner, row in zip(some.tolist(), rows, strict=True):
                if not 0 <= owner < parameters.users or seen[owner]:
                    raise SilodpError(
                        "every owner must be a user of the common index, with one row; check the rows",
                        code="method.rows",
                    )
                seen[owner] = True
                norm2 = float(np.einsum("d,d->", row, row, dtype=np.float64))  # exact as far as the bound
                if not norm2 <= float(parameters.clip_units) ** 2:
                    raise SilodpError(
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


def add_own_part(own: NDArray[np.uint64], shares: NDArray[np.uint64], multipliers: NDArray[np.int32]) -> None:
    """Adds Σ_u share_u·M_u modulo 2^64 to `own` (B, N) in place; shares (u,), multipliers (u, B, N)."""
    for block, part in enumerate(own):
        part += np.einsum("u,un->n", shares, multipliers[:, block].astype(np.int64).view(np.uint64))
