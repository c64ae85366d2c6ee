"""The methods, and the one registry of their names."""

from collections.abc import Callable
from typing import Any

from silodp.methods.default import Default
from silodp.methods.distributed import Ddp
from silodp.methods.group import UldpGroup
from silodp.methods.method import Method, Population, SiloWork
from silodp.methods.naive import UldpNaive
from silodp.methods.personal_budgets import Personal
from silodp.methods.personalized import Rpdp
from silodp.methods.record_baselines import RpdpDropout, RpdpMinimum
from silodp.methods.record_filter import RpdpFilter
from silodp.methods.uldp import UldpAvg, UldpSgd

METHODS: dict[str, Callable[..., Any]] = {
    "default": Default,
    "uldp-naive": UldpNaive,
    "uldp-group": UldpGroup,
    "uldp-sgd": UldpSgd,
    "uldp-avg": UldpAvg,
    "rpdp": Rpdp,
    "rpdp-minimum": RpdpMinimum,
    "rpdp-dropout": RpdpDropout,
    "rpdp-filter": RpdpFilter,
    "ddp": Ddp,
}

__all__ = [
    "METHODS",
    "Ddp",
    "Default",
    "Method",
    "Personal",
    "Population",
    "Rpdp",
    "RpdpDropout",
    "RpdpFilter",
    "RpdpMinimum",
    "SiloWork",
    "UldpAvg",
    "UldpGroup",
    "UldpNaive",
    "UldpSgd",
]
