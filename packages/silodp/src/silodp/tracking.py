"""Progress and experiment trackers: what a run hands to `on_round` after every round, shown or logged elsewhere.

with silodp.tracking.TensorBoard("runs/first/tensorboard") as tracker:
    silodp.train(federation, task, method, rounds=50, on_round=tracker)

A new tracker derives from `Tracker`, and is an entry point in the group "silodp.trackers".
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from silodp._lazy import Registry, make_missing_error
from silodp.accounting.guarantee import format_epsilon
from silodp.errors import SilodpError, lookup
from silodp.settings import check_type
from silodp.text import describe_exception, format_duration, name_extra

if TYPE_CHECKING:
    from silodp.runtime.train import RoundResult

    MLflow: Any
    TensorBoard: Any

__all__ = ["TRACKERS", "MLflow", "TensorBoard", "Tracker", "make_tracker", "open_trackers", "print_progress"]

_log = logging.getLogger(__name__)
_MAX_LINES = 25
"""The most lines of `print_progress` in a run."""
PRIVATE = "private/"
"""Prefix of the names of numbers that no ε covers."""

TRACKERS: Registry[type[Tracker]] = Registry(
    "trackers",
    {},
)
"""The trackers, by the name in the option --log."""


class Tracker(ABC):
    """A function for `on_round` that logs the numbers of each round, and a context manager that closes the log.

    ε is logged for each adversary. Loss and metrics keep their names where ε covers them. Elsewhere they are computed
    from private records, and their names begin with "private/", as does that of the duration, which no ε ever covers.
    Private numbers are sent to a server only if the argument `private` is True.

    Args:
        target: A folder or a URI.
        private: Whether private numbers are logged. None: if the target is on this machine.

    Raises:
        SilodpError: One of `packages` is not installed.
    """

    name: str
    """Name of the tracker in the option --log."""
    packages: Sequence[str] = ()
    """Packages that `pip install 'silodp[NAME]'` installs, by the names under which they are imported."""

    def __init__(self, target: str | Path, *, private: bool | None = None) -> None:
        self.target = str(target)
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

    def close(self) -> None:  # noqa: B027
        """Write what is not yet written; by default nothing."""

    def __call__(self, result: RoundResult) -> None:
        """Log a round; for `on_round`."""
        self.log(result.run, result.round, list_numbers(result, self.private))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
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
                    f"{name_extra(cls.name)}.",
                    code="argument.missing",
                    field="log",
                ) from None


class SafeTracker:
    """A tracker that never stops a run: its first failure is a warning, and nothing is logged after it.

    Args:
        tracker: The tracker to be called.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker: Tracker | None = tracker

    def __call__(self, result: RoundResult) -> None:
        """Log a round."""
        self._try(lambda tracker: tracker(result), f"from round {result.round} on")

    def close(self) -> None:
        """Close the tracker."""
        self._try(lambda tracker: tracker.close(), "at the end of the run")

    def _try(self, act: Callable[[Tracker], None], since: str) -> None:
        """Call the tracker unless it has failed before; `since` says in a warning what is missing after a failure."""
        if self._tracker is None:
            return
        # Once it has failed it is not asked again: a server that is gone would hold up every round.
        try:
            act(self._tracker)
        except Exception as error:
            # Whatever another program raises: hours of training must not end with it.
            name, self._tracker = self._tracker.name, None
            text = " ".join(str(error).split())[:200]
            _log.warning(
                "%s logs nothing %s (%s: %s); the run goes on", name, since, type(error).__name__, text
            )


def make_tracker(text: str, directory: Path, *, private: bool | None = None) -> Tracker:
    """Return a tracker.

    Args:
        text: NAME, which logs into the folder NAME of the run's directory, or NAME=TARGET.
        directory: The directory of the run.
        private: See `Tracker`.

    Raises:
        SilodpError: The name is not known, or its package is not installed.
    """
    check_type("log", text, str, "'tensorboard'")
    name, _, target = text.partition("=")
    if not TRACKERS:
        raise make_missing_error("integrations")
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
        SilodpError: As `make_tracker`.
    """
    # All are made before the run begins, so that a missing package is refused and does not cost a run.
    trackers = [SafeTracker(make_tracker(text, directory, private=private)) for text in texts]

    def log(result: RoundResult) -> None:
        for tracker in trackers:
            tracker(result)

    with ExitStack() as opened:
        for tracker in trackers:
            opened.callback(tracker.close)
        yield log


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


# --- progress as lines of text ---


def print_progress(result: RoundResult) -> None:
    """Print a line on standard error, at most 25 times in a run: round, loss, metrics, ε and the time left.

    Metrics on private records are private, and so are these lines; see `RoundResult`.

    Args:
        result: The result of the round; `silodp.train(..., on_round=silodp.tracking.print_progress)`.
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
        return TRACKERS.require(name.lower(), "integrations")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
