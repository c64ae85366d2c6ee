"""User-level differential privacy for federated learning across silos, with guarantees that hold.

result = silodp.train(federation, task, silodp.methods.UldpAvg(noise_multiplier=5.0, clip=0.1), rounds=50)
result.guarantees["released"].epsilon
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from silodp._lazy import export_lazily, find_version
from silodp.errors import SilodpError

if TYPE_CHECKING:
    from silodp import data, methods, tracking, training
    from silodp.accounting.accountant import Accountant
    from silodp.accounting.ledger import Budget
    from silodp.bundle import TrainedModel, load
    from silodp.data.federation import Federation
    from silodp.data.silo_data import SiloData
    from silodp.data.tables.schema import Schema
    from silodp.runtime.callback import Callback, Result, RoundResult, RunStart
    from silodp.runtime.train import train
    from silodp.training.losses import Loss
    from silodp.training.sgd import LocalTraining
    from silodp.training.task import Task

    __version__: str

__all__ = [
    "Accountant",
    "Budget",
    "Callback",
    "Federation",
    "LocalTraining",
    "Loss",
    "Result",
    "RoundResult",
    "RunStart",
    "Schema",
    "SiloData",
    "SilodpError",
    "Task",
    "TrainedModel",
    "data",
    "load",
    "methods",
    "tracking",
    "train",
    "training",
]

_exported = export_lazily(
    __name__,
    {
        "accounting.accountant": ("Accountant",),
        "accounting.ledger": ("Budget",),
        "bundle": ("TrainedModel", "load"),
        "data": (),
        "data.federation": ("Federation",),
        "data.silo_data": ("SiloData",),
        "data.tables.schema": ("Schema",),
        "methods": (),
        "runtime.callback": ("Callback", "Result", "RoundResult", "RunStart"),
        "runtime.train": ("train",),
        "tracking": (),
        "training": (),
        "training.losses": ("Loss",),
        "training.sgd": ("LocalTraining",),
        "training.task": ("Task",),
    },
)


def __getattr__(name: str) -> Any:
    return find_version() if name == "__version__" else _exported(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
