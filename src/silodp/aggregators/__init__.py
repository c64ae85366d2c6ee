"""The aggregators, and the one registry of their names; `Aggregator` is the base class of another one."""

from __future__ import annotations

from silodp.aggregators.base import (
    Aggregator,
    ServerAggregator,
    ServerContext,
    Setting,
    SiloAggregator,
    SiloContext,
    Visibility,
)
from silodp.aggregators.lattice import Lattice
from silodp.aggregators.masked import Masked
from silodp.aggregators.paillier import Paillier
from silodp.aggregators.plain import Plain
from silodp.errors import SilodpError

AGGREGATORS: dict[str, type[Aggregator]] = {
    "plain": Plain,
    "masked": Masked,
    "paillier": Paillier,
    "lattice": Lattice,
}


def find_aggregator(name: str) -> type[Aggregator]:
    """Return the class that is registered under a name.

    Raises:
        SilodpError: there is none.
    """
    if name not in AGGREGATORS:
        raise SilodpError(
            f"aggregator = '{name}' is not known: use one of {', '.join(AGGREGATORS)}.",
            code="argument.value",
            field="aggregator",
        )
    return AGGREGATORS[name]


__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "Lattice",
    "Masked",
    "Paillier",
    "Plain",
    "ServerAggregator",
    "ServerContext",
    "Setting",
    "SiloAggregator",
    "SiloContext",
    "Visibility",
    "find_aggregator",
]
