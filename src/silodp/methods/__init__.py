"""The methods, and the one registry of their names; the base class to write another."""

from silodp.errors import lookup
from silodp.methods.base import LocalContext, Method, Population
from silodp.methods.ddp.method import Ddp
from silodp.methods.fedavg import Default
from silodp.methods.group import UldpGroup
from silodp.methods.naive import UldpNaive
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


def find_method(name: str) -> type[Method]:
    """Return the class of a method, by its name in a configuration; "-" and "_" are one character.

    Raises:
        SilodpError: there is no method of this name.
    """
    return lookup(name, METHODS, "method")


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
    "ServerAdam",
    "ServerOptimizer",
    "ServerSgd",
    "TailAverage",
    "UldpAvg",
    "UldpGroup",
    "UldpNaive",
    "UldpSgd",
    "UserBudgets",
    "find_method",
]
