"""Records dealt to silos and simulated users, as every data set's loader does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from silodp.data.allocation import allocate
from silodp.data.federation import SiloData
from silodp.errors import SilodpError

Normalize = Literal["private", "public"]
Floats = NDArray[Any]

SPLIT_SEED = 0  # of the splits that no source pins; separate from the seed of the allocation


def check_normalize(value: str, *allowed: str) -> None:
    """Refuse a normalization that the data set does not have."""
    if value not in allowed:
        raise SilodpError(
            f"normalize is {value!r}; choose {' or '.join(map(repr, allowed))}",
            code="argument.value",
            field="normalize",
        )


def fixed_silos(
    parts: list[tuple[str, Floats, Floats]], users: int, allocation: str, seed: int, pairs: bool = False
) -> tuple[SiloData, ...]:
    """Silos from (name, x, y), which keep their records; only the users are drawn."""
    sizes = [len(y) for _, _, y in parts]
    generator = np.random.default_rng(seed)
    user, silo = allocate(allocation, users=users, generator=generator, sizes=sizes, pairs=pairs)
    return tuple(SiloData(name, x, y, user[silo == s]) for s, (name, x, y) in enumerate(parts))


def free_silos(
    x: Floats,
    y: Floats,
    users: int,
    silos: int,
    allocation: str,
    seed: int,
    labels_per_user: int | None = None,
    labels_per_silo: int | None = None,
) -> tuple[SiloData, ...]:
    """Silos and users both drawn."""
    user, silo = allocate(
        allocation,
        users=users,
        generator=np.random.default_rng(seed),
        records=len(y),
        silos=silos,
        labels=y,
        labels_per_user=labels_per_user,
        labels_per_silo=labels_per_silo,
    )
    return tuple(SiloData(f"silo-{s + 1}", x[silo == s], y[silo == s], user[silo == s]) for s in range(silos))


def persons_of(allocation: str, users: int, records: int) -> int:
    """U: as asked for, or everybody that has a record."""
    return records if allocation == "own" else users


def pooled_test(x: Floats, y: Floats) -> SiloData:
    """Test records, which are no simulated user's."""
    return SiloData("test", x, y, np.full(len(y), -1, dtype=np.int64))


@dataclass(frozen=True)
class Shares:
    """Who holds what, where silos and users are both simulated: the arguments of `allocation.allocate`."""

    users: int
    silos: int
    allocation: str
    seed: int
    labels_per_user: int | None = None
    labels_per_silo: int | None = None
