"""The data sets that a configuration can name: tables of the silos, the demo's, and those that other packages add."""

from __future__ import annotations

from typing import TYPE_CHECKING

from silodp._lazy import Registry
from silodp.errors import lookup

if TYPE_CHECKING:
    from silodp.data.dataset import Dataset

DATASETS: Registry[Dataset] = Registry(
    "datasets",
    {"embedded": "silodp.data._embedded:EMBEDDED", "tables": "silodp.data.tables.dataset:TABLES"},
)
"""By name. A data set outside the package needs no entry: a configuration names its file."""


def find_dataset(name: str, field: str = "data.source") -> Dataset:
    """Return a registered data set.

    Args:
        name: the name of the data set; "-" and "_" are one character here.
        field: the setting that names it, for the message.

    Raises:
        SilodpError: `argument.value`, with the closest name, where there is none of this name.
    """
    return lookup(name, DATASETS, field, "FILE.py:NAME")
