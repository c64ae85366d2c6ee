"""Progress and experiment trackers: what a run hands to `on_round` after every round, shown or logged elsewhere.

with silodp.tracking.TensorBoard("runs/first/tensorboard") as tracker:
    silodp.train(federation, task, method, rounds=50, on_round=tracker)

A new tracker derives from `Tracker`; add one line to `TRACKERS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from silodp.tracking.base import TRACKERS, Tracker, make_tracker, open_trackers
from silodp.tracking.progress import print_progress

if TYPE_CHECKING:
    MLflow: Any
    TensorBoard: Any

__all__ = ["TRACKERS", "MLflow", "TensorBoard", "Tracker", "make_tracker", "open_trackers", "print_progress"]


def __getattr__(name: str) -> Any:
    if name in ("MLflow", "TensorBoard"):  # by its name: the core does not import what stands beside it
        return TRACKERS[name.lower()]
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
