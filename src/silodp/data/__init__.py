"""The data of the silos: tables, persons' identifiers, and data sets as plug-ins.

A new data set is a `Dataset` in a file; see docs/extending.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from silodp._lazy import export_lazily

if TYPE_CHECKING:
    from types import ModuleType

    from silodp.data.dataset import Dataset, Origin
    from silodp.data.federation import Federation
    from silodp.data.identity import IdentityProfile, load_profile
    from silodp.data.public import PublicData
    from silodp.data.silo_data import SiloData

    benchmarks: ModuleType

__all__ = [
    "Dataset",
    "Federation",
    "IdentityProfile",
    "Origin",
    "PublicData",
    "SiloData",
    "benchmarks",
    "load_profile",
]

_exported = export_lazily(
    __name__,
    {
        "dataset": ("Dataset", "Origin"),
        "federation": ("Federation",),
        "identity": ("IdentityProfile", "load_profile"),
        "public": ("PublicData",),
        "silo_data": ("SiloData",),
    },
)


def __getattr__(name: str) -> Any:
    if name == "benchmarks":  # by its name: the core does not import what stands beside it
        return importlib.import_module("silodp_experiments.benchmarks")
    return _exported(name)
