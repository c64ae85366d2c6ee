"""The papers' data sets as federations of simulated users.

The users' index is simulated by `allocation`; the records are real. Where a loader estimates a constant
from private rows, as the papers do, it says so in `Federation.assumptions`; `normalize="public"` uses published or
declared constants instead. The public facts of every set stand in its `Dataset`, next to its loader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from silodp._lazy import export_lazily

if TYPE_CHECKING:
    from silodp_experiments.benchmarks._common import data_root
    from silodp_experiments.benchmarks.finance import acs_income, creditcard
    from silodp_experiments.benchmarks.health import heart_disease, tcga_brca
    from silodp_experiments.benchmarks.images import digit_masks, digit_volumes, fashion_mnist, mnist
    from silodp_experiments.benchmarks.text import docstrings

__all__ = [
    "acs_income",
    "creditcard",
    "data_root",
    "digit_masks",
    "digit_volumes",
    "docstrings",
    "fashion_mnist",
    "heart_disease",
    "mnist",
    "tcga_brca",
]

__getattr__ = export_lazily(
    __name__,
    {
        "_common": ("data_root",),
        "finance": ("acs_income", "creditcard"),
        "health": ("heart_disease", "tcga_brca"),
        "images": ("digit_masks", "digit_volumes", "fashion_mnist", "mnist"),
        "text": ("docstrings",),
    },
)
