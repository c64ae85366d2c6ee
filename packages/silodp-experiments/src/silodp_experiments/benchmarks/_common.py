"""Common parts of the loaders: the folder of files, and the allocation of records to silos and simulated users."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from silodp.data.dataset import Dataset
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.data.tables.schema import Schema
from silodp.errors import SilodpError
from silodp.settings import Whole
from silodp_experiments.benchmarks.allocation import allocate

Normalize = Literal["private", "public"]
Floats = NDArray[Any]
Part = tuple[str, Floats, Floats]
"""Name of a silo, its x and its y."""

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
        # The two usual mistakes: the folder of one data set is named, or the files lie one level too high.
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


@dataclass(frozen=True)
class Shares:
    """How records are dealt to simulated users, and to simulated silos: arguments of `allocation.allocate`."""

    users: int
    silos: int | None
    allocation: str
    seed: int
    labels_per_user: int | None = None
    labels_per_silo: int | None = None


def federate_fixed(
    dataset: Dataset, parts: Sequence[Part], tests: Sequence[Part], shares: Shares, **facts: Any
) -> Federation:
    """Make a federation of silos that keep their records; only the users are drawn.

    Args:
        dataset: the data set, which states the public facts.
        parts: (name, x, y) of every silo.
        tests: its held-out records, which are persons of their own.
        shares: how records are dealt; `silos` is not used.
        facts: arguments of `_make_federation`, and whether users get records in `pairs`.
    """
    sizes = [len(y) for _, _, y in parts]
    generator = np.random.default_rng(shares.seed)
    pairs = facts.pop("pairs", False)
    user, silo = allocate(
        shares.allocation, users=shares.users, generator=generator, sizes=sizes, pairs=pairs
    )
    silos = [
        SiloData(name, x, y, user[silo == s], test=hold_out(*test))
        for s, ((name, x, y), test) in enumerate(zip(parts, tests, strict=True))
    ]
    return _make_federation(dataset, silos, pool("test", tests)[1:], shares, **facts)


def federate_free(
    dataset: Dataset, train: tuple[Floats, Floats], test: tuple[Floats, Floats], shares: Shares, **facts: Any
) -> Federation:
    """Make a federation where silo and user of every record are drawn; held-out records go to the silos in turn.

    Args:
        dataset: the data set, which states the public facts.
        train: (x, y) of all records for training.
        test: (x, y) of all held-out records.
        shares: how records are dealt.
        facts: arguments of `_make_federation`.
    """
    (x, y), given = train, asdict(shares)
    Whole(0).check("seed", given["seed"])
    generator = np.random.default_rng(given.pop("seed"))
    user, silo = allocate(given.pop("allocation"), generator=generator, records=len(y), labels=y, **given)
    silos = []
    for s in range(shares.silos or 0):
        name, mine = f"silo-{s + 1}", silo == s
        # In turn, not drawn: the draws for training records stay the same with and without held-out ones.
        held_out = hold_out(name, test[0][s :: shares.silos], test[1][s :: shares.silos])
        silos.append(SiloData(name, x[mine], y[mine], user[mine], test=held_out))
    return _make_federation(dataset, silos, test, shares, **facts)


def _make_federation(
    dataset: Dataset,
    silos: Sequence[SiloData],
    test: tuple[Floats, Floats],
    shares: Shares,
    normalize: str,
    features: tuple[str, ...] = (),
    schema: Schema | None = None,
) -> Federation:
    """Return the federation; it states that rows were scaled by private constants where `normalize` is "private"."""
    records = sum(map(len, silos))
    return Federation(
        silos=tuple(silos),
        users=records if shares.allocation == "own" else shares.users,
        test=make_test(*test),
        assumptions=dataset.scaling_assumptions if normalize == "private" else (),
        name=dataset.name,
        classes=dataset.classes,
        features=features,
        schema=schema,
    )


def pool(name: str, parts: Sequence[Part]) -> Part:
    """Return the records of several silos as those of one."""
    return name, np.concatenate([x for _, x, _ in parts]), np.concatenate([y for _, _, y in parts])


def hold_out(name: str, x: Floats, y: Floats) -> SiloData:
    """Return held-out records of a silo; each is a person of its own, as no user is simulated for it."""
    return SiloData(name, x, y, np.arange(len(y), dtype=np.int64))


def make_test(x: Floats, y: Floats) -> SiloData:
    """Pool test records, which belong to no simulated user."""
    return SiloData("test", x, y, np.full(len(y), -1, dtype=np.int64))
