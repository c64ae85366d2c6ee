"""Tasks (model, loss, metrics), and the local training of a silo: per user, per record or over all records.

A new method calls `user_updates`, `record_gradients` or `silo_update`. Models, losses and metrics are
functions that a user may write (the guide "Your model").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from silodp._lazy import export_lazily

if TYPE_CHECKING:
    from silodp.training.losses import (
        Loss,
        binary_cross_entropy,
        cox,
        cross_entropy,
        exponential_survival,
        squared_error,
    )
    from silodp.training.metrics import (
        accuracy,
        average_precision,
        concordance,
        mean_absolute_error,
        r2,
        roc_auc,
    )
    from silodp.training.sgd import LocalTraining, record_gradients, silo_update, user_updates
    from silodp.training.task import Task

__all__ = [
    "LocalTraining",
    "Loss",
    "Task",
    "accuracy",
    "average_precision",
    "binary_cross_entropy",
    "concordance",
    "cox",
    "cross_entropy",
    "exponential_survival",
    "mean_absolute_error",
    "r2",
    "record_gradients",
    "roc_auc",
    "silo_update",
    "squared_error",
    "user_updates",
]

_EXPORTS = {
    "losses": (
        "Loss",
        "binary_cross_entropy",
        "cox",
        "cross_entropy",
        "exponential_survival",
        "squared_error",
    ),
    "metrics": ("accuracy", "average_precision", "concordance", "mean_absolute_error", "r2", "roc_auc"),
    "sgd": ("LocalTraining", "record_gradients", "silo_update", "user_updates"),
    "task": ("Task",),
}
__getattr__ = export_lazily(__name__, _EXPORTS)
