"""Callbacks: what follows a run and is no part of it, such as progress, trackers and the report.

`silodp.train(..., callbacks=[...])` calls them at fixed places of the loop (`silodp.runtime.train`). They get values
that they cannot change, and no ledger, store or parameters of a round: budget, cohort, ledger and checkpoint are parts
of the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from silodp._lazy import Registry
from silodp.accounting.views import Adversary
from silodp.errors import SilodpError
from silodp.runtime.run_files import MetricsRow
from silodp.settings import check_type

if TYPE_CHECKING:
    from torch import Tensor, nn

    from silodp.accounting.charges import ChargeCounts
    from silodp.accounting.guarantee import Guarantee
    from silodp.aggregators.run_spec import RunSpec

CALLBACKS: Registry[type[Callback]] = Registry("callbacks", {})
"""The callbacks that [[callbacks]] of a configuration and the option --log can name."""

Stopped = Literal["rounds", "budget"]
"""What ended a run."""


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        params: The parameters (d,) of the final global model.
        model: The final global model as a `torch.nn.Module`.
        metrics: One row per round. The first row is that of the untrained model; it also has the number of persons
            who have records in 0, 1, 2… silos (private).
        guarantees: One guarantee for each adversary.
        stopped: What ended the run: "rounds" (T was reached) or "budget".
        charges: What the ledger of the run charged, from which the guarantees follow.
    """

    params: Tensor
    model: nn.Module
    metrics: tuple[MetricsRow, ...]
    guarantees: dict[Adversary, Guarantee]
    stopped: Stopped
    charges: ChargeCounts

    @property
    def epsilon(self) -> float | None:
        """ε against whoever sees the models; None where there is no guarantee."""
        return self.guarantees["released"].epsilon


@dataclass(frozen=True)
class RunStart:
    """What is known when a run starts; all of it is public.

    Attributes:
        run: Public random id of the run; a resumed run keeps it.
        round: Number of rounds that are done: 0, or more in a resumed run.
        rounds: T.
        directory: The directory of the run, whose lock is held; None for a run in memory.
    """

    run: str
    round: int
    rounds: int
    directory: Path | None


@dataclass(frozen=True)
class RoundResult:
    """What is known after a round.

    Attributes:
        run: Public random id of the run; a resumed run keeps it.
        round: Number of rounds done; 0 is the untrained model.
        rounds: T.
        epsilon: ε by adversary of everything released so far; None: no guarantee. Without releases it is 0.
        loss: The loss of the model where it was evaluated in this round, else None.
        metrics: The metrics, by name, of the model where it was evaluated in this round, else {}.
        is_covered: Whether ε covers loss and metrics, because they follow from noised sums whose noise is secret, and
            the run has an ε against whoever sees the models. If False, do not send them to anybody who may not see the
            private records that they are computed from.
        seconds: The seconds that the round took; private, because no ε covers it.
        seconds_left: Estimated time until round T; None after the first round of a start. A budget may stop a run
            earlier.
    """

    run: str
    round: int
    rounds: int
    epsilon: Mapping[Adversary, float | None]
    loss: float | None
    metrics: Mapping[str, float]
    is_covered: bool
    seconds: float | None
    seconds_left: float | None


class Callback:
    """Follows a run; a subclass defines the hooks that it needs, which return nothing.

    If `on_start`, `before_round` or `after_round` raises an exception, the run ends with it. The state after the last
    round is saved, so the run can be resumed, and no round is charged twice. If the process dies during `after_round`,
    that round is repeated when the run is resumed, at no cost, and so is the call.

    Seconds, and loss and metrics where `RoundResult.is_covered` is False, are private, and so are the rows of a
    `Result`: no ε covers them. Whatever a callback sends or shows of them, it shows of the records.

    A configuration names a callback by its entry point in the group "silodp.callbacks" or as "file.py:Name".
    """

    def on_start(self, run: RunStart) -> None:
        """Begin. The run holds the lock of its directory, and has accepted settings, files and ledger."""

    def before_round(self, round_: int) -> None:
        """Prepare for round 1, 2, …, of which nothing is charged yet; the budget may end the run in its place."""

    def after_round(self, result: RoundResult) -> None:
        """Note a round, which ledger and metrics.jsonl have by now; for a new run, first the untrained model."""

    def on_end(self, result: Result | None) -> None:
        """Close what `on_start` opened.

        All files of the run are written, and its lock is released. Callbacks are ended in the reverse of their order,
        each of them once, also where another one raises.

        Args:
            result: The result of the run; None if an exception ends it.
        """


class OnRound(Callback):
    """A function of a `RoundResult` as a callback.

    Args:
        function: Called after every round, and once with the untrained model.
    """

    def __init__(self, function: Callable[[RoundResult], object]) -> None:
        self._function = function

    def after_round(self, result: RoundResult) -> None:
        """Call the function."""
        self._function(result)


GivenCallbacks = Sequence[Callback | Callable[[RoundResult], object]]
"""Callbacks, and functions that are called after every round."""


class Followers:
    """The callbacks of one run, as the loop calls them.

    Args:
        callbacks: Callbacks, and functions of a `RoundResult`.

    Raises:
        SilodpError: One of them is neither.
    """

    def __init__(self, callbacks: GivenCallbacks) -> None:
        check_type("callbacks", callbacks, (list, tuple), "[silodp.tracking.print_progress]")
        for one in callbacks:
            if isinstance(one, type) or not (isinstance(one, Callback) or callable(one)):
                raise SilodpError(
                    f"callbacks has {one!r}: list objects of classes derived from silodp.Callback, or functions of one "
                    "argument, the result of a round.",
                    code="argument.type",
                    field="callbacks",
                )
        self._callbacks = [one if isinstance(one, Callback) else OnRound(one) for one in callbacks]
        self._started: list[Callback] = []

    def start(self, spec: RunSpec, done: int, directory: Path | None) -> None:
        """Start the callbacks, before anything of this start is charged.

        Args:
            spec: The specification of the run, with its id.
            done: Number of rounds done.
            directory: The directory of the run.
        """
        self._spec, self._first = spec, done + 1
        self._ended_first: float | None = None
        for one in self._callbacks:
            self._started.append(one)
            one.on_start(RunStart(spec.run, done, spec.rounds, directory))

    def before_round(self, round_: int) -> None:
        """Tell of a round, from 1, before it is charged."""
        for one in self._callbacks:
            one.before_round(round_)

    def after_round(self, row: MetricsRow) -> None:
        """Tell of a row that has just been written."""
        result = self._read(row)
        for one in self._callbacks:
            one.after_round(result)

    def end(self, result: Result | None) -> None:
        """End all callbacks that were started."""
        with ExitStack() as ends:
            for one in self._started:
                ends.callback(one.on_end, result)

    def _read(self, row: MetricsRow) -> RoundResult:
        done, now, rounds = row["round"], time.perf_counter(), self._spec.rounds
        left = 0.0 if done == rounds else None
        if self._ended_first is None and done == self._first:
            self._ended_first = now
        elif self._ended_first is not None and left is None:
            # The first round takes longer than the others, so it does not count.
            left = (now - self._ended_first) / (done - self._first) * (rounds - done)
        return RoundResult(
            run=self._spec.run,
            round=done,
            rounds=rounds,
            epsilon=MappingProxyType(dict(row["epsilon"])),
            loss=row.get("loss"),
            metrics=MappingProxyType(dict(row.get("metrics") or {})),
            is_covered=self._spec.is_secret
            and any(one.measures_model and one.name in row for one in self._spec.charged)
            and row["epsilon"]["released"] is not None,
            seconds=row.get("seconds"),
            seconds_left=left,
        )


__all__ = ["CALLBACKS", "Callback", "OnRound", "Result", "RoundResult", "RunStart"]
