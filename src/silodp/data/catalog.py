"""The data sets that a configuration can name: the papers' benchmarks, and tables of the silos."""

from __future__ import annotations

from typing import TYPE_CHECKING

from silodp._lazy import Registry
from silodp.errors import lookup

if TYPE_CHECKING:
    from silodp.data.dataset import Dataset

DATASETS: Registry[Dataset] = Registry(
    "datasets",
    {
        "heart_disease": "silodp_experiments.benchmarks.health:HEART_DISEASE",
        "tcga_brca": "silodp_experiments.benchmarks.health:TCGA_BRCA",
        "creditcard": "silodp_experiments.benchmarks.finance:CREDITCARD",
        "mnist": "silodp_experiments.benchmarks.images:MNIST",
        "fashion_mnist": "silodp_experiments.benchmarks.images:FASHION_MNIST",
        "digit_masks": "silodp_experiments.benchmarks.images:DIGIT_MASKS",
        "digit_volumes": "silodp_experiments.benchmarks.images:DIGIT_VOLUMES",
        "docstrings": "silodp_experiments.benchmarks.text:DOCSTRINGS",
        "acs_income": "silodp_experiments.benchmarks.finance:ACS_INCOME",
        "embedded": "silodp_experiments.benchmarks.health:EMBEDDED",
        "tables": "silodp.data.tables.dataset:TABLES",
    },
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
