"""Progress and experiment trackers: callbacks that show or log what is known after every round.

silodp.train(federation, task, method, rounds=50, callbacks=[silodp.tracking.TensorBoard("runs/first/tensorboard")])

A new tracker derives from `Tracker`.
"""

from __future__ import annotations

import importlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from silodp.accounting.guarantee import format_epsilon
from silodp.errors import SilodpError
from silodp.runtime.callback import CALLBACKS, Callback, Result, RoundResult, RunStart
from silodp.settings import check_type
from silodp.text import describe_exception, format_duration, name_extra

if TYPE_CHECKING:
    MLflow: Any
    TensorBoard: Any

__all__ = ["MLflow", "Progress", "TensorBoard", "Tracker", "print_progress"]

_MAX_LINES = 25
"""The most lines of `print_progress` in a run."""
PRIVATE = "private/"
"""Prefix of the names of numbers that no ε covers."""


class Tracker(Callback, ABC):
    """A callback that logs the numbers of each round.

    ε is logged for each adversary. Loss and metrics keep their names where ε covers them. Elsewhere they are computed
    from private records, and their names begin with "private/", as does that of the duration, which no ε ever covers.
    Private numbers are sent to a server only if the argument `private` is True.

    Args:
        target: A folder or a URI; None: the folder `name` in the directory of the run.
        private: Whether private numbers are logged. None: if the target is on this machine.

    Raises:
        SilodpError: One of `packages` is not installed.
    """

    name: str
    """Name of the tracker in the option --log, and of its folder in the directory of the run."""
    packages: Sequence[str] = ()
    """Packages that `pip install 'silodp[NAME]'` installs, by the names under which they are imported."""

    def __init__(self, target: str | Path | None = None, *, private: bool | None = None) -> None:
        check_type("target", target, (str, Path, type(None)), "'runs/first/log'")
        self.target = "" if target is None else str(target)
        self.private = is_local(self.target) if private is None else private
        self.check_installed()

    @abstractmethod
    def log(self, run: str, round_: int, numbers: dict[str, float]) -> None:
        """Log the numbers of a round; a round that was repeated is logged twice.

        Args:
            run: Id of the run, which a resumed run keeps.
            round_: Number of rounds done.
            numbers: The numbers, by name.
        """

    def close(self) -> None:
        """Write what is not yet written; by default nothing."""

    def on_start(self, run: RunStart) -> None:
        """Choose the folder in the directory of the run, where no target was given."""
        if not self.target:
            if run.directory is None:
                raise SilodpError(
                    f"{self.name} has no target, and the run no directory to log into: set one of them.",
                    code="argument.missing",
                    field="target",
                )
            self.target = str(run.directory / self.name)

    def after_round(self, result: RoundResult) -> None:
        """Log a round."""
        self.log(result.run, result.round, list_numbers(result, self.private))

    def on_end(self, result: Result | None) -> None:
        """Close the log."""
        self.close()

    @classmethod
    def check_installed(cls) -> None:
        """Import what the tracker needs: a run must not find after its first round that it cannot log.

        Raises:
            SilodpError: It is not installed.
        """
        for package in cls.packages:
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise SilodpError(
                    f"--log {cls.name} cannot import '{package}' ({describe_exception(error)}): "
                    f"{name_extra(cls.name, cls.__module__)}.",
                    code="argument.missing",
                    field="log",
                ) from None


def list_numbers(result: RoundResult, private: bool) -> dict[str, float]:
    """Return the numbers of a round by the names under which they are logged.

    Args:
        result: The result of the round.
        private: Whether to include numbers that no ε covers.
    """
    # The prefix alone decides what is dropped below, so that no number can be private by name and be logged.
    prefix = "" if result.is_covered else PRIVATE
    measured = {"loss": result.loss, **{f"metrics/{name}": value for name, value in result.metrics.items()}}
    found = {
        **{f"epsilon/{name}": value for name, value in result.epsilon.items()},
        **{prefix + name: value for name, value in measured.items()},
        f"{PRIVATE}seconds": result.seconds,  # how long a round takes depends on private records
    }
    return {
        name: value
        for name, value in found.items()
        if value is not None and (private or not name.startswith(PRIVATE))
    }


def is_local(target: str) -> bool:
    """Return whether a folder or URI is on this machine."""
    parts = urlsplit(target)
    # A scheme alone does not say it: file://host/share is on another machine.
    return parts.scheme in ("", "file", "sqlite") and parts.netloc in ("", "localhost")


# --- progress ---


class Progress(Callback):
    """Shows every round on standard error: a progress bar on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._bar: Any = None

    def on_start(self, run: RunStart) -> None:
        """Show the bar."""
        if not sys.stderr.isatty():
            return
        from rich import progress
        from rich.console import Console

        columns = (
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.description}"),
        )
        self._bar = progress.Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("", total=run.rounds)
        self._seen: dict[str, Any] = {"loss": None, "metrics": {}}
        self._bar.start()

    def after_round(self, result: RoundResult) -> None:
        """Move the bar, or print a line."""
        if self._bar is None:
            print_progress(result)
            return
        # The last values stay visible between evaluations.
        if result.metrics or result.loss is not None:
            self._seen = {"loss": result.loss, "metrics": result.metrics}
        shown = describe_round(replace(result, **self._seen))
        self._bar.update(self._task, completed=result.round, description=shown)

    def on_end(self, result: Result | None) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()


def print_progress(result: RoundResult) -> None:
    """Print a line on standard error, at most 25 times in a run: round, loss, metrics, ε and the time left.

    Metrics on private records are private, and so are these lines; see `RoundResult`.

    Args:
        result: The result of the round; `silodp.train(..., callbacks=[silodp.tracking.print_progress])`.
    """
    # Rounded up, so that there are never more lines than that.
    every = max(1, math.ceil(result.rounds / _MAX_LINES))
    if result.round % every == 0 or result.round == result.rounds:
        line = f"round {result.round}/{result.rounds}  {describe_round(result)}"
        print(line, file=sys.stderr, flush=True)


def describe_round(result: RoundResult) -> str:
    """Return loss, metrics, the released ε and the time left as text."""
    values = {"loss": result.loss, **result.metrics}
    parts = [f"{name} {value:.4g}" for name, value in values.items() if value is not None]
    epsilon = result.epsilon.get("released")
    parts.append("no privacy" if epsilon is None else f"ε {format_epsilon(epsilon)}")
    if result.seconds_left:
        parts.append(f"about {format_duration(result.seconds_left)} left")
    return "  ".join(parts)


def __getattr__(name: str) -> Any:
    # By its name: the core imports no extension. Most names that are asked for here are no tracker's.
    if name in __all__:
        return CALLBACKS.load_required(name.lower(), "integrations")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
