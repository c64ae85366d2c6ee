"""How silos' shares become their sum; `Aggregator` is the base class of another way of it."""

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
from silodp.aggregators.plain import Plain
from silodp.aggregators.registry import AGGREGATORS, AggregatorRecord, find_aggregator
from silodp.aggregators.run_spec import ModelSpec, RunSpec

__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "AggregatorRecord",
    "Lattice",
    "Masked",
    "ModelSpec",
    "Paillier",
    "Plain",
    "RunSpec",
    "ServerAggregator",
    "ServerContext",
    "SiloAggregator",
    "SiloContext",
    "Visibility",
    "find_aggregator",
]
