"""The aggregators, and the one registry of their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from silodp.aggregators.base import Aggregator, Plain
from silodp.aggregators.lattice import Lattice
from silodp.aggregators.masked import Masked
from silodp.aggregators.paillier import Paillier

AGGREGATORS: dict[str, Callable[..., Any]] = {
    "plain": Plain,
    "masked": Masked,
    "paillier": Paillier,
    "lattice": Lattice,
}

__all__ = ["AGGREGATORS", "Aggregator", "Lattice", "Masked", "Paillier", "Plain"]
