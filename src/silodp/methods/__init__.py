"""Methods: who is protected, what a silo computes in a round, and what the round costs against each adversary.

A new one derives from `Method`, a new server optimizer from `ServerOptimizer`; see docs/extending.md.
"""

from silodp.methods.base import LocalContext, Method
from silodp.methods.ddp.method import Ddp
from silodp.methods.fedavg import Default
from silodp.methods.group import UldpGroup
from silodp.methods.naive import UldpNaive
from silodp.methods.roles import FederationSize, PublicState, Sampling, ServerStep, UnitBudgets, UserWeights
from silodp.methods.rpdp.baselines import RpdpDropout, RpdpMinimum
from silodp.methods.rpdp.method import Rpdp
from silodp.methods.rpdp.renyi_filter import RpdpFilter
from silodp.methods.server_optimizer import ServerAdam, ServerOptimizer, ServerSgd, TailAverage
from silodp.methods.uldp import UldpAvg, UldpSgd
from silodp.methods.user_budgets import UserBudgets

METHODS: dict[str, type[Method]] = {
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
