"""The data of the silos: tables, benchmarks and data sets as plug-ins; how they are read, allocated and fetched."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from silodp.data.dataset import Dataset, Origin
from silodp.data.federation import Federation
from silodp.data.public import PublicData
from silodp.data.silo_data import SiloData

if TYPE_CHECKING:
    from silodp.data import allocation, benchmarks, catalog, fetch, tables

__all__ = [
    "Dataset",
    "Federation",
    "Origin",
    "PublicData",
    "SiloData",
    "allocation",
    "benchmarks",
    "catalog",
    "fetch",
    "tables",
]


def __getattr__(name: str) -> Any:
    # `silodp.data.benchmarks` without importing scikit-learn and pandas where nobody asks for them.
    if name in __all__:
        return importlib.import_module(f"silodp.data.{name}")
    raise AttributeError(f"module 'silodp.data' has no attribute '{name}'")
