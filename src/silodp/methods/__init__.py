"""Methods: who is protected, what a silo computes in a round, and what the round costs against each adversary.

A new one derives from `Method`, a new server optimizer from `ServerOptimizer`; see docs/extending.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from silodp._lazy import Registry, export_lazily

if TYPE_CHECKING:
    from silodp.methods.base import LocalContext, Method
    from silodp.methods.ddp.method import Ddp
    from silodp.methods.fedavg import Default
    from silodp.methods.group import UldpGroup
    from silodp.methods.naive import UldpNaive
    from silodp.methods.roles import (
        FederationSize,
        PublicState,
        Sampling,
        ServerStep,
        UnitBudgets,
        UserWeights,
    )
    from silodp.methods.rpdp.baselines import RpdpDropout, RpdpMinimum
    from silodp.methods.rpdp.method import Rpdp
    from silodp.methods.rpdp.renyi_filter import RpdpFilter
    from silodp.methods.server_optimizer import ServerAdam, ServerOptimizer, ServerSgd, TailAverage
    from silodp.methods.uldp import UldpAvg, UldpSgd
    from silodp.methods.user_budgets import UserBudgets

METHODS: Registry[type[Method]] = Registry(
    "methods",
    {
        "default": "silodp.methods.fedavg:Default",
        "uldp-naive": "silodp.methods.naive:UldpNaive",
        "uldp-group": "silodp.methods.group:UldpGroup",
        "uldp-sgd": "silodp.methods.uldp:UldpSgd",
        "uldp-avg": "silodp.methods.uldp:UldpAvg",
        "rpdp": "silodp.methods.rpdp.method:Rpdp",
        "rpdp-minimum": "silodp.methods.rpdp.baselines:RpdpMinimum",
        "rpdp-dropout": "silodp.methods.rpdp.baselines:RpdpDropout",
        "rpdp-filter": "silodp.methods.rpdp.renyi_filter:RpdpFilter",
        "ddp": "silodp.methods.ddp.method:Ddp",
    },
)
"""The methods by their names in a configuration."""

__all__ = [
    "Ddp",
    "Default",
    "FederationSize",
    "LocalContext",
    "Method",
    "PublicState",
    "Rpdp",
    "RpdpDropout",
    "RpdpFilter",
    "RpdpMinimum",
    "Sampling",
    "ServerAdam",
    "ServerOptimizer",
    "ServerSgd",
    "ServerStep",
    "TailAverage",
    "UldpAvg",
    "UldpGroup",
    "UldpNaive",
    "UldpSgd",
    "UnitBudgets",
    "UserBudgets",
    "UserWeights",
]

__getattr__ = export_lazily(
    __name__,
    {
        "base": ("LocalContext", "Method"),
        "ddp.method": ("Ddp",),
        "fedavg": ("Default",),
        "group": ("UldpGroup",),
        "naive": ("UldpNaive",),
        "roles": ("FederationSize", "PublicState", "Sampling", "ServerStep", "UnitBudgets", "UserWeights"),
        "rpdp.baselines": ("RpdpDropout", "RpdpMinimum"),
        "rpdp.method": ("Rpdp",),
        "rpdp.renyi_filter": ("RpdpFilter",),
        "server_optimizer": ("ServerAdam", "ServerOptimizer", "ServerSgd", "TailAverage"),
        "uldp": ("UldpAvg", "UldpSgd"),
        "user_budgets": ("UserBudgets",),
    },
)
