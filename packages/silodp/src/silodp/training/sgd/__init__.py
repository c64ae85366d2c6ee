"""Local SGD of many users or records at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from silodp._lazy import export_lazily

if TYPE_CHECKING:
    from silodp.training.sgd._schedule import LocalTraining
    from silodp.training.sgd.local import compute_updates, silo_update, user_updates
    from silodp.training.sgd.records import RecordGradients, record_gradients

__all__ = [
    "LocalTraining",
    "RecordGradients",
    "compute_updates",
    "record_gradients",
    "silo_update",
    "user_updates",
]

__getattr__ = export_lazily(
    __name__,
    {
        "_schedule": ("LocalTraining",),
        "local": ("compute_updates", "silo_update", "user_updates"),
        "records": ("RecordGradients", "record_gradients"),
    },
)
