"""Local SGD of many users or records at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from silodp._lazy import export_lazily

if TYPE_CHECKING:
    from silodp.training.sgd._schedule import LocalTraining
    from silodp.training.sgd.local import silo_update, user_updates
    from silodp.training.sgd.records import RecordGradients, record_gradients

__all__ = ["LocalTraining", "RecordGradients", "record_gradients", "silo_update", "user_updates"]

__getattr__ = export_lazily(
    __name__,
    {
        "LocalTraining": f"{__name__}._schedule",
        "RecordGradients": f"{__name__}.records",
        "record_gradients": f"{__name__}.records",
        "silo_update": f"{__name__}.local",
        "user_updates": f"{__name__}.local",
    },
)
