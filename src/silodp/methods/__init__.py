"""The methods, and the one registry of their names."""

from collections.abc import Callable
from typing import Any

from silodp.methods.base import LocalContext, Method, Population
from silodp.methods.ddp.method import Ddp
from silodp.methods.fedavg import Default
from silodp.methods.group import UldpGroup
from silodp.methods.naive import UldpNaive
from silodp.methods.rpdp.baselines import RpdpDropout, RpdpMinimum
from silodp.methods.rpdp.method import Rpdp
from silodp.methods.rpdp.renyi_filter import RpdpFilter
from silodp.methods.uldp import UldpAvg, UldpSgd
from silodp.methods.user_budgets import UserBudgets

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
    "LocalContext",
    "Method",
    "Population",
    "Rpdp",
    "RpdpDropout",
    "RpdpFilter",
    "RpdpMinimum",
    "UldpAvg",
    "UldpGroup",
    "UldpNaive",
    "UldpSgd",
    "UserBudgets",
]
