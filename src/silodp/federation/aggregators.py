"""The aggregators, and the one registry of their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from silodp.federation.aggregation import Aggregator, Plain
from silodp.federation.lattice import Lattice
from silodp.federation.masked import Masked
from silodp.federation.paillier import Paillier

AGGREGATORS: dict[str, Callable[..., Any]] = {
    "plain": Plain,
    "masked": Masked,
    "paillier": Paillier,
    "lattice": Lattice,
}

__all__ = ["AGGREGATORS", "Aggregator", "Lattice", "Masked", "Paillier", "Plain"]
