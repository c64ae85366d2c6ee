"""Common parts of the loaders: the folder of files, and the allocation of records to silos and simulated users."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError
from silodp.settings import Whole
from silodp_experiments.benchmarks.allocation import allocate

Normalize = Literal["private", "public"]
Floats = NDArray[Any]

SPLIT_SEED = 0
"""Of the train/test splits that no publisher pins; separate from the seed of the allocation."""


def data_root(root: str | Path | None = None) -> Path:
    """Find the folder of the data sets.

    Args:
        root: the folder; None takes $SILODP_DATA, else the nearest shared/data in this folder or one above it.

    Raises:
        SilodpError: none of them is a folder.
    """
    named = root if root is not None else os.environ.get("SILODP_DATA")
    if named:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            where = "root" if root is not None else "SILODP_DATA"
            raise SilodpError(
                f"{where} is {str(named)!r}, which is no folder; run `silodp data fetch NAME`, and name the folder "
                "that it prints",
                code="data.no_dataset",
                field=where,
            )
        return folder
    for above in (Path.cwd(), *Path.cwd().parents):
        if (above / "shared" / "data").is_dir():
            return above / "shared" / "data"
    raise SilodpError(
        "no folder of data sets found (no root, no SILODP_DATA, no shared/data above here); "
        "run `silodp data fetch NAME` and set SILODP_DATA to the folder that it prints",
        code="data.no_dataset",
    )


def find_file(root: str | Path | None, dataset: str, name: str) -> Path:
    """Return the path of a data set's file; raise where it is missing."""
    folder = data_root(root)
    path = folder / dataset / name
    if not path.is_file():
        above = folder.resolve().parent
        for found, remedy in (
            (above / dataset / name, f"name {above}"),
            (folder / name, f"move the file into a folder {dataset} there"),
        ):
            if found.is_file():
                setting = "SILODP_DATA" if root is None else "root"
                raise SilodpError(
                    f"{path} is missing, and {found} is there: {setting} is the folder that holds one folder for each "
                    f"data set; {remedy}",
                    code="data.no_dataset",
                    field=setting,
                )
        raise SilodpError(
            f"{path} is missing; get it with `silodp data fetch {dataset}`", code="data.no_dataset"
        )
    return path


def make_fixed_silos(
    parts: list[tuple[str, Floats, Floats]],
    users: int,
    allocation: str,
    seed: int,
    pairs: bool = False,
    tests: Sequence[tuple[Floats, Floats]] | None = None,
) -> tuple[SiloData, ...]:
    """Make silos of (name, x, y), which keep their records; only the users are drawn.

    Held-out records (x, y) of each silo are persons of their own.
    """
    sizes = [len(y) for _, _, y in parts]
    generator = np.random.default_rng(seed)
    user, silo = allocate(allocation, users=users, generator=generator, sizes=sizes, pairs=pairs)
    held_out = [None if tests is None else hold_out(name, *tests[s]) for s, (name, _, _) in enumerate(parts)]
    return tuple(
        SiloData(name, x, y, user[silo == s], test=held_out[s]) for s, (name, x, y) in enumerate(parts)
    )


def make_free_silos(
    x: Floats,
    y: Floats,
    users: int,
    silos: int,
    allocation: str,
    seed: int,
    labels_per_user: int | None = None,
    labels_per_silo: int | None = None,
    test: tuple[Floats, Floats] | None = None,
) -> tuple[SiloData, ...]:
    """Draw both the silo and the user of every record; held-out records (x, y) go to the silos in turn."""
    Whole(0).check("seed", seed)
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
    names = [f"silo-{s + 1}" for s in range(silos)]
    held_out = [
        None if test is None else hold_out(name, test[0][s::silos], test[1][s::silos])
        for s, name in enumerate(names)
    ]
    return tuple(
        SiloData(name, x[silo == s], y[silo == s], user[silo == s], test=held_out[s])
        for s, name in enumerate(names)
    )


def hold_out(name: str, x: Floats, y: Floats) -> SiloData:
    """Return held-out records of a silo; each is a person of its own, as no user is simulated for it."""
    return SiloData(name, x, y, np.arange(len(y), dtype=np.int64))


def count_users(allocation: str, users: int, records: int) -> int:
    """Return U: `users`, or the number of records where every record is a user."""
    return records if allocation == "own" else users


def make_test(x: Floats, y: Floats) -> SiloData:
    """Pool test records, which belong to no simulated user."""
    return SiloData("test", x, y, np.full(len(y), -1, dtype=np.int64))


@dataclass(frozen=True)
class Shares:
    """How records are dealt where silos and users are both simulated: arguments of `allocation.allocate`."""

    users: int
    silos: int
    allocation: str
    seed: int
    labels_per_user: int | None = None
    labels_per_silo: int | None = None
