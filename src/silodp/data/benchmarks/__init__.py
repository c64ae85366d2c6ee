"""The papers' data sets as federations of simulated users, and one table that needs no download.

The users' index is simulated by `silodp.data.allocation`; the records are real. Where a loader estimates a constant
from private rows, as the papers do, it says so in `Federation.assumptions`; `normalize="public"` uses published or
declared constants instead. The public facts of every set stand in its `Dataset`, next to its loader.
"""

from silodp.data.benchmarks._common import data_root
from silodp.data.benchmarks.finance import ACS_INCOME, CREDITCARD, acs_income, creditcard
from silodp.data.benchmarks.health import (
    EMBEDDED,
    HEART_CENTERS,
    HEART_DISEASE,
    TCGA_BRCA,
    TCGA_REGIONS,
    embedded,
    heart_disease,
    tcga_brca,
)
from silodp.data.benchmarks.images import FASHION_MNIST, MNIST, PIXELS, fashion_mnist, mnist, read_idx

__all__ = [
    "ACS_INCOME",
    "CREDITCARD",
    "EMBEDDED",
    "FASHION_MNIST",
    "HEART_CENTERS",
    "HEART_DISEASE",
    "MNIST",
    "PIXELS",
    "TCGA_BRCA",
    "TCGA_REGIONS",
    "acs_income",
    "creditcard",
    "data_root",
    "embedded",
    "fashion_mnist",
    "heart_disease",
    "mnist",
    "read_idx",
    "tcga_brca",
]
