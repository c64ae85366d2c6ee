"""The papers' data sets as federations of simulated users, and one table that needs no download.

A user index is simulated by `silodp.data.allocation`; the records are real. Where a loader estimates a
constant from private rows, as the papers do, it says so in `Federation.assumptions`; `normalize="public"`
uses published or declared constants instead and has nothing to say. File facts: data/README.md of the
benchmark data.
"""

from __future__ import annotations

from collections.abc import Callable

from silodp.data.benchmarks.files import data_root
from silodp.data.benchmarks.finance import acs_income, creditcard
from silodp.data.benchmarks.health import HEART_CENTERS, TCGA_REGIONS, embedded, heart_disease, tcga_brca
from silodp.data.benchmarks.images import PIXELS, fashion_mnist, mnist, read_idx
from silodp.data.federation import Federation

LOADERS: dict[str, Callable[..., Federation]] = {
    "heart_disease": heart_disease,
    "tcga_brca": tcga_brca,
    "creditcard": creditcard,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "acs_income": acs_income,
    "embedded": embedded,
}

__all__ = [
    "HEART_CENTERS",
    "LOADERS",
    "PIXELS",
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
