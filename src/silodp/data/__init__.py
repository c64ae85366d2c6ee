"""The data of the silos: tables, benchmarks and data sets as plug-ins; how they are read, allocated and fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from silodp._lazy import export_lazily
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


_SUBMODULES = ("allocation", "benchmarks", "catalog", "fetch", "tables")
__getattr__ = export_lazily(__name__, {name: f"{__name__}.{name}" for name in _SUBMODULES})
