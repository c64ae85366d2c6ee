"""The data of the silos: tables, benchmarks and data sets as plug-ins; how they are read, allocated and fetched.

A new data set is a `Dataset` in a file; see docs/extending.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from silodp._lazy import export_lazily

if TYPE_CHECKING:
    from silodp.data import benchmarks
    from silodp.data.dataset import Dataset, Origin
    from silodp.data.federation import Federation
    from silodp.data.identity import IdentityProfile, load_profile
    from silodp.data.public import PublicData
    from silodp.data.silo_data import SiloData

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

__getattr__ = export_lazily(
    __name__,
    {
        "benchmarks": (),
        "dataset": ("Dataset", "Origin"),
        "federation": ("Federation",),
        "identity": ("IdentityProfile", "load_profile"),
        "public": ("PublicData",),
        "silo_data": ("SiloData",),
    },
)
