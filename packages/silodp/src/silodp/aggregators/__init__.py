"""Aggregators: how the silos' noisy shares of a round become their sum, and therefore who sees what.

A new one derives from `Aggregator`, or from `Plain` where the server may see every share; see docs/extending.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from silodp._lazy import export_lazily

if TYPE_CHECKING:
    from silodp.aggregators.base import (
        Aggregator,
        ServerAggregator,
        ServerContext,
        SiloAggregator,
        SiloContext,
        Visibility,
    )
    from silodp.aggregators.masked import Masked
    from silodp.aggregators.plain import Plain, PlainServer
    from silodp.aggregators.run_spec import RunSpec

__all__ = [
    "Aggregator",
    "Masked",
    "Plain",
    "PlainServer",
    "RunSpec",
    "ServerAggregator",
    "ServerContext",
    "SiloAggregator",
    "SiloContext",
    "Visibility",
]

__getattr__ = export_lazily(
    __name__,
    {
        "base": (
            "Aggregator",
            "ServerAggregator",
            "ServerContext",
            "SiloAggregator",
            "SiloContext",
            "Visibility",
        ),
        "masked": ("Masked",),
        "plain": ("Plain", "PlainServer"),
        "run_spec": ("RunSpec",),
    },
)
