"""Progress and experiment trackers: what a run hands to `on_round` after every round, shown or logged elsewhere.

with silodp.tracking.TensorBoard("runs/first/tensorboard") as tracker:
    silodp.train(federation, task, method, rounds=50, on_round=tracker)

A new tracker derives from `Tracker`; add one line to `TRACKERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from silodp._lazy import Registry, export_lazily
from silodp.errors import lookup
from silodp.settings import check_type

if TYPE_CHECKING:
    from silodp.runtime.train import RoundResult
    from silodp.tracking.base import Tracker
    from silodp.tracking.mlflow import MLflow
    from silodp.tracking.progress import print_progress
    from silodp.tracking.tensorboard import TensorBoard

TRACKERS: Registry[type[Tracker]] = Registry(
    "trackers",
    {"tensorboard": "silodp.tracking.tensorboard:TensorBoard", "mlflow": "silodp.tracking.mlflow:MLflow"},
)
"""By the name in the option --log."""


def make_tracker(text: str, directory: Path, *, private: bool | None = None) -> Tracker:
    """Return a tracker.

    Args:
        text: NAME, which logs into the folder NAME of the run's directory, or NAME=TARGET.
        directory: The directory of the run.
        private: See `Tracker`.

    Raises:
        SilodpError: the name is not known, or its package is not installed.
    """
    check_type("log", text, str, "'tensorboard'")
    name, _, target = text.partition("=")
    return lookup(name, TRACKERS, "log")(target or directory / name, private=private)


@contextmanager
def open_trackers(
    texts: Sequence[str], directory: Path, *, private: bool | None = None
) -> Iterator[Callable[[RoundResult], None]]:
    """Yield a function that logs a round with trackers that never stop a run; they are closed at the end.

    Args:
        texts: See `make_tracker`.
        directory: The directory of the run.
        private: See `Tracker`.

    Raises:
        SilodpError: as `make_tracker`.
    """
    from silodp.tracking.base import SafeTracker

    trackers = [SafeTracker(make_tracker(text, directory, private=private)) for text in texts]

    def log(result: RoundResult) -> None:
        for tracker in trackers:
            tracker(result)

    with ExitStack() as opened:
        for tracker in trackers:
            opened.callback(tracker.close)
        yield log


__all__ = ["TRACKERS", "MLflow", "TensorBoard", "Tracker", "make_tracker", "open_trackers", "print_progress"]

__getattr__ = export_lazily(
    __name__,
    {
        "base": ("Tracker",),
        "mlflow": ("MLflow",),
        "progress": ("print_progress",),
        "tensorboard": ("TensorBoard",),
    },
)
