"""User-level differential privacy for federated learning across silos, with guarantees that hold.

result = silodp.train(federation, task, silodp.methods.UldpAvg(noise_multiplier=5.0, clip=0.1), rounds=50)
result.guarantees["released"].epsilon
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from silodp.errors import SilodpError

if TYPE_CHECKING:
    from silodp import data, methods
    from silodp.accounting.accountant import Accountant
    from silodp.accounting.ledger import Budget
    from silodp.data.federation import Federation
    from silodp.data.silo_data import SiloData
    from silodp.data.tables.schema import Schema
    from silodp.methods.model_averaging import average_models
    from silodp.runtime.train import Result, train
    from silodp.training.losses import Loss
    from silodp.training.sgd.local import LocalTraining
    from silodp.training.task import Task

try:
    __version__ = version("silodp")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0.0.0"

__all__ = [
    "Accountant",
    "Budget",
    "Federation",
    "LocalTraining",
    "Loss",
    "Result",
    "Schema",
    "SiloData",
    "SilodpError",
    "Task",
    "average_models",
    "data",
    "methods",
    "train",
]

_HOMES = {
    "Accountant": "silodp.accounting.accountant",
    "Budget": "silodp.accounting.ledger",
    "Federation": "silodp.data.federation",
    "LocalTraining": "silodp.training.sgd.local",
    "Loss": "silodp.training.losses",
    "Result": "silodp.runtime.train",
    "Schema": "silodp.data.tables.schema",
    "SiloData": "silodp.data.silo_data",
    "Task": "silodp.training.task",
    "average_models": "silodp.methods.model_averaging",
    "train": "silodp.runtime.train",
}


def __getattr__(name: str) -> Any:
    # torch and pandas take seconds to import: `silodp --help` should not wait for them.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("data", "methods"):
        return importlib.import_module(f"silodp.{name}")
    raise AttributeError(f"module 'silodp' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
