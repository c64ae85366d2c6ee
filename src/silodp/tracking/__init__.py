"""Progress and experiment trackers: what a run hands to `on_round` after every round, shown or logged elsewhere.

with silodp.tracking.TensorBoard("runs/first/tensorboard") as tracker:
    silodp.train(federation, task, method, rounds=50, on_round=tracker)

A new tracker derives from `Tracker`; add one line to `TRACKERS`.
"""

from pathlib import Path

from silodp.errors import lookup
from silodp.tracking.base import Tracker
from silodp.tracking.mlflow import MLflow
from silodp.tracking.progress import print_progress
from silodp.tracking.tensorboard import TensorBoard

TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}
"""By the name in the option --log."""


def make_tracker(text: str, directory: Path, *, private: bool | None = None) -> Tracker:
    """Return a tracker.

    Args:
        text: NAME, which logs into the folder NAME of the run's directory, or NAME=TARGET.
        directory: of the run.
        private: see `Tracker`.

    Raises:
        SilodpError: the name is not known, or its package is not installed.
    """
    name, _, target = text.partition("=")
    return lookup(name, TRACKERS, "log")(target or directory / name, private=private)


__all__ = ["TRACKERS", "MLflow", "TensorBoard", "Tracker", "make_tracker", "print_progress"]
