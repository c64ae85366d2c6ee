"""The aggregators, and the one registry of their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from silodp.federation.aggregation import Aggregator, Plain
from silodp.federation.masked import Masked

AGGREGATORS: dict[str, Callable[..., Any]] = {"plain": Plain, "masked": Masked}

__all__ = ["AGGREGATORS", "Aggregator", "Masked", "Plain"]
