"""Methods: who is protected, what a silo computes in a round, and what the round costs against each adversary.

A new one derives from `Method`, a new server optimizer from `ServerOptimizer`; see docs/extending.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from silodp._lazy import Registry, export_lazily

if TYPE_CHECKING:
    from silodp.methods.base import LocalContext, Method
    from silodp.methods.ddp import Ddp
    from silodp.methods.participation import Always, Participation, Poisson
    from silodp.methods.roles import (
        FederationSize,
        PublicState,
        Sampling,
        ServerStep,
        UnitBudgets,
        UserWeights,
    )
    from silodp.methods.server_optimizer import (
        Move,
        NoiseAware,
        ServerAdam,
        ServerOptimizer,
        ServerSgd,
        TailAverage,
    )
    from silodp.methods.uldp import UldpAvg, UldpSgd, VerifiedIds

METHODS: Registry[type[Method]] = Registry(
    "methods",
    {
        "uldp-sgd": "silodp.methods.uldp:UldpSgd",
        "uldp-avg": "silodp.methods.uldp:UldpAvg",
        "ddp": "silodp.methods.ddp:Ddp",
    },
)
"""The methods by their names in a configuration; extension packages add theirs (see `Registry`)."""

__all__ = [
    "Always",
    "Ddp",
    "FederationSize",
    "LocalContext",
    "Method",
    "Move",
    "NoiseAware",
    "Participation",
    "Poisson",
    "PublicState",
    "Sampling",
    "ServerAdam",
    "ServerOptimizer",
    "ServerSgd",
    "ServerStep",
    "TailAverage",
    "UldpAvg",
    "UldpSgd",
    "UnitBudgets",
    "UserWeights",
    "VerifiedIds",
]

__getattr__ = export_lazily(
    __name__,
    {
        "base": ("LocalContext", "Method"),
        "ddp": ("Ddp",),
        "participation": ("Always", "Participation", "Poisson"),
        "roles": ("FederationSize", "PublicState", "Sampling", "ServerStep", "UnitBudgets", "UserWeights"),
        "server_optimizer": (
            "Move",
            "NoiseAware",
            "ServerAdam",
            "ServerOptimizer",
            "ServerSgd",
            "TailAverage",
        ),
        "uldp": ("UldpAvg", "UldpSgd", "VerifiedIds"),
    },
)
