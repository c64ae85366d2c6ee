"""The data of the silos: tables, persons' identifiers, and data sets as plug-ins.

A new data set is a `Dataset` in a file; see docs/extending.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from silodp._lazy import export_lazily

if TYPE_CHECKING:
    from silodp.data._embedded import embedded
    from silodp.data.dataset import Dataset, Origin
    from silodp.data.federation import Federation
    from silodp.data.identity import IdentityProfile, load_profile
    from silodp.data.public import PublicData
    from silodp.data.silo_data import SiloData
    from silodp.data.tables.kinds.column import Column
    from silodp.data.tables.sources.source import Description, Source

__all__ = [
    "Column",
    "Dataset",
    "Description",
    "Federation",
    "IdentityProfile",
    "Origin",
    "PublicData",
    "SiloData",
    "Source",
    "embedded",
    "load_profile",
]

__getattr__ = export_lazily(
    __name__,
    {
        "_embedded": ("embedded",),
        "dataset": ("Dataset", "Origin"),
        "federation": ("Federation",),
        "identity": ("IdentityProfile", "load_profile"),
        "public": ("PublicData",),
        "silo_data": ("SiloData",),
        "tables.kinds.column": ("Column",),
        "tables.sources.source": ("Description", "Source"),
    },
)
