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
    from silodp.bundle.trained_model import TrainedModel, load
    from silodp.data.federation import Federation
    from silodp.data.silo_data import SiloData
    from silodp.data.tables.schema import Schema
    from silodp.methods.model_averaging import average_models
    from silodp.runtime.train import Result, RoundResult, train
    from silodp.training.losses import Loss
    from silodp.training.sgd.local import LocalTraining
    from silodp.training.task import Task

    __version__: str

__all__ = [
    "Accountant",
    "Budget",
    "Federation",
    "LocalTraining",
    "Loss",
    "Result",
    "RoundResult",
    "Schema",
    "SiloData",
    "SilodpError",
    "Task",
    "TrainedModel",
    "average_models",
    "data",
    "load",
    "methods",
    "tracking",
    "train",
    "training",
]

_HOMES = {
    "Accountant": "silodp.accounting.accountant",
    "Budget": "silodp.accounting.ledger",
    "Federation": "silodp.data.federation",
    "LocalTraining": "silodp.training.sgd",
    "Loss": "silodp.training.losses",
    "Result": "silodp.runtime.train",
    "RoundResult": "silodp.runtime.train",
    "Schema": "silodp.data.tables.schema",
    "SiloData": "silodp.data.silo_data",
    "Task": "silodp.training.task",
    "TrainedModel": "silodp.bundle.trained_model",
    "average_models": "silodp.methods.model_averaging",
    "data": "silodp.data",
    "load": "silodp.bundle.trained_model",
    "methods": "silodp.methods",
    "tracking": "silodp.tracking",
    "train": "silodp.runtime.train",
    "training": "silodp.training",
}


_exported = export_lazily(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    return find_version() if name == "__version__" else _exported(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
