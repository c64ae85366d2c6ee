"""Aggregators: how the silos' noisy shares of a round become their sum, and therefore who sees what.

A new one derives from `Aggregator`, or from `Plain` where the server may see every share; see docs/extending.md.
"""

from __future__ import annotations

from silodp.aggregators.base import (
    Aggregator,
    ServerAggregator,
    ServerContext,
    SiloAggregator,
    SiloContext,
    Visibility,
)
from silodp.aggregators.lattice import Lattice
from silodp.aggregators.masked import Masked
from silodp.aggregators.paillier import Paillier
from silodp.aggregators.plain import Plain, PlainServer
from silodp.aggregators.run_spec import RunSpec

__all__ = [
    "Aggregator",
    "Lattice",
    "Masked",
    "Paillier",
    "Plain",
    "PlainServer",
    "RunSpec",
    "ServerAggregator",
    "ServerContext",
    "SiloAggregator",
    "SiloContext",
    "Visibility",
]
