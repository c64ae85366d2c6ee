"""What everyone knows of a configured run before its data are read: silos, persons, the size of the model."""

from __future__ import annotations

import numpy as np

from silodp.aggregators.base import Aggregator, Setting, calibrate_setting
from silodp.config.schema import RunConfig
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.methods.base import Method, Population

ASSUMED_USERS = 1000
"""U where neither the configuration nor the question says it: ε does not depend on it, room for sums does."""


def outline(config: RunConfig, users: int | None = None) -> tuple[Federation, bool]:
    """The federation without a single record, and whether its U had to be assumed.

    U is `users`, else what the configuration or its public list of persons says, else `ASSUMED_USERS`.

    Raises:
        SilodpError: the public list of persons cannot be read.
    """
    public = config.public_data(users)
    x = np.empty((0, *public.record_shape), np.float32)
    y = public.synthetic_batch(2)[1][:0]
    nobody = np.empty(0, np.int64)
    silos = tuple(SiloData(name, x, y, nobody) for name in public.silos)
    number = ASSUMED_USERS if public.users is None else public.users
    federation = Federation(silos, number, None, name=config.name, classes=public.classes)
    own = config.preferences()
    return federation if own is None else own.on(federation), public.users is None


def declared_users(config: RunConfig) -> int | None:
    """Return U where the configuration or a public list states it; None where it is counted in the data."""
    dataset, arguments = config.load_plan()
    return dataset.declared_users(arguments)


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
