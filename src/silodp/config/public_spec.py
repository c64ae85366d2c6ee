"""What everyone knows of a configured run before its data are read: silos, persons, the size of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from silodp.aggregators.base import Aggregator, Setting, calibrate_setting
from silodp.config.construct import fields_of
from silodp.config.schema import RunConfig
from silodp.data.federation import Federation, SiloData
from silodp.data.tables.schema import Schema
from silodp.errors import SilodpError
from silodp.methods.base import Method, Population

SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "heart_disease": ((13,), 2),
    "tcga_brca": ((39,), None),
    "creditcard": ((30,), 2),
    "mnist": ((1, 28, 28), 10),
    "fashion_mnist": ((1, 28, 28), 10),
    "acs_income": ((47,), 2),
    "embedded": ((30,), 2),
}
"""Of the papers' data sets: shape of a record, number of classes (None: survival)."""

ASSUMED_USERS = 1000
"""U where neither the configuration nor the question says it: ε does not depend on it, room for sums does."""


def outline(config: RunConfig, users: int | None = None) -> tuple[Federation, bool]:
    """The federation without a single record, and whether its U had to be assumed.

    U is `users`, else what the configuration or its public list of persons says, else `ASSUMED_USERS`.

    Raises:
        SilodpError: the public list of persons cannot be read.
    """
    known = declared_users(config) if users is None else users
    _, arguments = config.loader()
    if config.source == "tables":
        schema: Schema = arguments["schema"]
        shape: tuple[int, ...] = (len(schema.features),)
        classes = None if schema.classes is None else len(schema.classes)
        survival = schema.kind == "survival"
    else:
        shape, classes = SHAPES[config.source]
        survival = classes is None
    x = np.empty((0, *shape), np.float32)
    y = np.empty(0, np.int64) if classes else np.empty((0, 2) if survival else 0, np.float32)
    nobody = np.empty(0, np.int64)
    silos = tuple(SiloData(f"silo-{s + 1}", x, y, nobody) for s in range(config.silos))
    number = ASSUMED_USERS if known is None else known
    federation = Federation(silos, number, None, name=config.name, classes=classes)
    own = config.preferences()
    return federation if own is None else own.on(federation), known is None


def declared_users(config: RunConfig) -> int | None:
    """U, where the configuration or a public list says it; None where it is counted in the data."""
    loader, arguments = config.loader()
    if config.source != "tables":
        if arguments.get("allocation") == "own":
            return None  # as many as there are records
        default = fields_of(loader).get("users")
        return int(arguments.get("users", default.default)) if default is not None else None
    listed = arguments["schema"].users
    if isinstance(listed, str | Path):
        try:
            lines = Path(listed).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SilodpError(
                f"{listed}: the list of users is not readable ({error}): check data.schema.users.",
                code="data.users",
                field="data.schema.users",
            ) from None
        return sum(1 for line in lines if line.strip())
    return None if listed is None else len(listed)


def setting_of(
    federation: Federation, size: int, method: Method, aggregator: Aggregator, delta: float
) -> Setting:
    """What the parties of a run would know, d being `size`; it has no id yet.

    Raises:
        SilodpError: persons' own budgets cannot be met against the adversary they are for.
    """
    names = tuple(silo.name for silo in federation.silos)
    own = None if federation.user_budgets is None else tuple(federation.user_budgets.tolist())
    population = Population(len(names), federation.users, aggregator.min_silos_for(len(names)), own)
    return calibrate_setting(aggregator, Setting("", names, method, population, size, delta=delta))
