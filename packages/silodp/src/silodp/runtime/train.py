"""Training: `train` in one call, and `run`, the server side of a prepared run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal

from torch import Tensor, nn

from silodp.accounting.accountant import Accountant
from silodp.accounting.charges import ChargeCounts
from silodp.accounting.guarantee import Guarantee
from silodp.accounting.ledger import Budget
from silodp.accounting.views import Adversary
from silodp.aggregators.base import Aggregator
from silodp.aggregators.run_spec import RunSpec
from silodp.aggregators.series import NOTHING_MEASURED, Series
from silodp.data.federation import Federation
from silodp.errors import SilodpError
from silodp.methods.base import Method
from silodp.methods.server_optimizer import compute_output
from silodp.runtime.checkpoint import Checkpoint
from silodp.runtime.cohort import CohortPlace, check_cohort, count_in_cohort
from silodp.runtime.data_warnings import list_data_warnings
from silodp.runtime.executor import Executor, make_executor
from silodp.runtime.guarantees import derive_guarantees
from silodp.runtime.prepare import prepare_run
from silodp.runtime.run_directory import RunDirectory
from silodp.runtime.run_files import METRICS, REFUSED_SUM, Metrics, MetricsRow
from silodp.runtime.series import SeriesServer
from silodp.runtime.server import Server, is_finite
from silodp.runtime.simulation import Parties, Simulation
from silodp.settings import Whole, check_path, check_type
from silodp.training.task import Task

_log = logging.getLogger(__name__)


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
    stopped: Literal["rounds", "budget"]
    charges: ChargeCounts

    @property
    def epsilon(self) -> float | None:
        """ε against whoever sees the models; None where there is no guarantee."""
        return self.guarantees["released"].epsilon


@dataclass(frozen=True)
class RoundResult:
    """What is known after a round; the argument of `on_round`.

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


OnRound = Callable[[RoundResult], None]


def train(
    federation: Federation,
    task: Task,
    method: Method,
    *,
    rounds: int,
    aggregator: str | Aggregator = "plain",
    budget: Budget | Mapping[str, Any] | None = None,
    seed: int | None = None,
    delta: float | None = None,
    accountant: Accountant | str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    evaluate_every: int = 1,
    silo_limits: Mapping[Adversary, float] | None = None,
    evaluation: Series | Mapping[str, Any] | None = None,
    series: Sequence[Series] = (),
    separate: bool = False,
    on_round: OnRound | None = None,
    cohort: str | Path | None = None,
    workers: int | Executor | None = None,
) -> Result:
    """Train one model over all silos, in one process that reads all tables.

    Args:
        federation: Tables of the silos; held-out records in `federation.test` measure the model (not covered by ε).
        task: Model, loss and metrics.
        method: Unit of privacy, clipping and noise, for example `silodp.methods.UldpAvg(...)`.
        rounds: T; a budget may stop the run earlier.
        aggregator: "plain": the server sees the noisy share of each silo; "masked": only their sum (secure
            aggregation, with integer noise); "select", "lattice" or "paillier": only the sum, weighted by record
            counts that stay private. For settings other than the defaults pass an object, for example
            `silodp.aggregators.Masked(...)`.
        budget: A `Budget`, or a dict with the keys "epsilon", "delta", "adversary"; the run stops before it
            would be exceeded.
        seed: None draws all randomness from the operating system; an integer makes the run reproducible, and its
            guarantees are not releasable.
        delta: δ at which ε is reported; None: that of the budget, else 1e-5.
        accountant: "pld" (tight; no integer noise), "rdp" (also for integer noise), or an object of a class
            derived from `silodp.Accountant`. None takes "pld" where it can be used, else "rdp".
        out: Directory for checkpoint, ledger, metrics, guarantee and model; None keeps everything in memory.
        resume: Continue from the checkpoint in `out`.
        evaluate_every: Number of rounds from one evaluation to the next; the last round is always evaluated.
        silo_limits: By adversary ("released", "server", "silo"), the largest ε at `delta` that every silo lets
            the run spend, whatever the server requests. A silo's own ledger charges the largest cost over all
            numbers of silos that may answer. If a round would exceed a limit, the silo refuses it, and the run
            ends with an error; it can be resumed with other limits.
        evaluation: How the silos' held-out records measure the model: an `Evaluation`, or a dict with its fields, for
            example {"across": "sums", "noise_multiplier": 5.0}: noisy sums of counts, which ε covers. None: on
            `federation.test`, which ε does not cover.
        series: Other additional series, each of which releases sums of its own, within ε.
        separate: Whether silos compute every person (or record, where records are clipped) alone. It is slower, and
            then even a model chosen for an attack cannot turn rounding into more than one clip per person. In a
            deployment it should be set; in one process nobody but you chooses models.
        on_round: Called with a `RoundResult` after every round, and once with that of the untrained model. If it
            raises an exception, the state after the round is saved, the run ends with that exception, and it can be
            resumed. If the process dies during the call, the round is repeated when the run is resumed, at no cost, and
            so is the call.
        cohort: The file in which all runs on these people are counted (`silodp cohort new`); a run that does not fit is
            refused.
        workers: The number of processes that compute for the silos, with Ray; or an `Executor`, for example that of
            a cluster. None: this process computes.

    Returns:
        The model, its metrics and its guarantees.

    Raises:
        SilodpError: A setting, table or model that cannot be used, or a file that cannot be continued.
    """
    check_type("out", out, (str, Path, NoneType), "'runs/first'")
    if out is not None:
        check_path("out", out)
    check_type("cohort", cohort, (str, Path, NoneType), "'people.cohort'")
    if cohort is not None:
        check_path("cohort", cohort)
    check_type("resume", resume, bool)
    check_type("workers", workers, (int, Executor, NoneType), "4")
    spec = prepare_run(
        federation,
        task,
        method,
        rounds=rounds,
        aggregator=aggregator,
        budget=budget,
        seed=seed,
        delta=delta,
        accountant=accountant,
        silo_limits=silo_limits,
        evaluation=evaluation,
        series=series,
        separate=separate,
    )
    # Doubts have private counts, and whoever calls this function has the tables.
    for doubt in list_data_warnings(federation, task, spec.method):
        _log.warning("%s", doubt)
    return run(
        spec,
        Simulation(federation, task, workers if isinstance(workers, Executor) else make_executor(workers)),
        out=out,
        resume=resume,
        evaluate_every=evaluate_every,
        on_round=on_round,
        cohort=None if cohort is None else CohortPlace(Path(cohort), federation.persons),
    )


def run(
    spec: RunSpec,
    parties: Parties,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    evaluate_every: int = 1,
    on_round: OnRound | None = None,
    cohort: CohortPlace | None = None,
) -> Result:
    """Run the server of a prepared run, from the first round or from a checkpoint to the end.

    Args:
        spec: The specification, from `prepare_run`.
        parties: The silos and the evaluation, for example `Simulation(federation, task)`.
        out: See `train`.
        resume: See `train`.
        evaluate_every: See `train`.
        on_round: See `train`.
        cohort: Where the run is counted, if anywhere.

    Returns:
        The model, its metrics and its guarantees.

    Raises:
        SilodpError: The directory has another run, a silo refuses or does not answer, or ledger and checkpoint are
            from different rounds.
    """
    Whole().check("evaluate_every", evaluate_every)
    if not (on_round is None or callable(on_round)):
        raise SilodpError(
            f"on_round is {on_round!r}: set a function of one argument, the result of a round.",
            code="argument.type",
            field="on_round",
        )
    task, optimizer = parties.task, spec.method.make_server_optimizer()

    # An optimizer may release other parameters than those that it goes on from, for example an average.
    def find_output(state: Checkpoint) -> Tensor:
        return compute_output(optimizer, state.params, state.optimizer)

    directory = RunDirectory(None if out is None else Path(out))
    state = directory.load_state(spec, task, resume)  # refuses before anything is written
    check_cohort(cohort, directory.path, replace(spec, run=state.run), resume)
    untrained = None
    # Before anything is written: a metric that fails must not leave a run behind.
    if state.round == 0:
        untrained = NOTHING_MEASURED if spec.is_measured else parties.evaluate(state.params)
    with directory.open(spec, task, state, resume) as (state, ledger):
        # A resumed run keeps its id, to which stores, signatures and ledgers are bound.
        spec = replace(spec, run=state.run)
        with (
            count_in_cohort(cohort, directory.path, spec, ledger, resume),
            parties.open(spec, directory) as connection,
        ):
            server = Server(spec, connection.channel, ledger, connection.store, connection.randomness)
            # Checkpoint, store and ledger must be of one moment: older ones would draw or spend again.
            server.check_store_version(state.round)
            server.check_draws(ledger.progress)
            further = [SeriesServer(one, server, ledger) for one in spec.series if one.asks_silos]
            rows_file = None if directory.path is None else directory.path / METRICS
            recorded = (ledger.files or {}).get(METRICS)
            metrics = Metrics(
                rows_file, state.round if resume else None, server.compute_spent_by_round, recorded
            )
            clock = _Clock(spec, state.round)

            def notify(row: MetricsRow) -> None:
                if on_round is not None:
                    on_round(clock.read(row))

            if not metrics.rows and untrained is not None:
                row = {"round": 0, **untrained, "epsilon": server.compute_spent(), **parties.describe()}
                metrics.add(row)
                notify(row)
            if ledger.rounds == 0:  # later a silo that lost its set-up must not be set up again
                server.set_up()
                for one in further:
                    one.set_up()
            stopped: Literal["rounds", "budget"] = "rounds"
            while state.round < spec.rounds:
                started, sent = time.perf_counter(), server.transport.traffic
                total = server.run_round(state.round, state.params, state.method)
                if total is None:
                    stopped = "budget"
                    break
                state, refusal = _advance(server, state, total)
                row = {"round": state.round, **spec.method.describe_sum(total, spec.population)}
                is_last = state.round == spec.rounds or not server.affords_round(state.round)
                if not spec.is_measured and (is_last or state.round % evaluate_every == 0):
                    row |= parties.evaluate(find_output(state))
                for one in further:
                    row |= one.release(state.round, find_output(state), is_last)
                row["epsilon"] = server.compute_spent()
                row["seconds"] = round(time.perf_counter() - started, 4)
                row["bytes"] = asdict(server.transport.traffic.since(sent))
                row["refused"] = {**connection.nonfinite_counts(state.round - 1), **refusal}
                # The line of the ledger comes before all that can be seen of the round. The row comes before the
                # checkpoint: after a crash the file may be ahead of it, never behind.
                drawn = server.participation.digest(state.round - 1)
                checkpoint = directory.complete(state, ledger, drawn)
                metrics.add(row)
                try:
                    notify(row)
                finally:  # the round is done, whatever becomes of the call
                    directory.save_state(checkpoint)
            # From the specification and the ledger alone, so that a report can derive the same from the files.
            charges = ledger.to_counts()
            derived = derive_guarantees(spec, charges)
            guarantees = {a: one.to_guarantee(server.participation.count) for a, one in derived.items()}
            params = find_output(state)
            model = task.load(params)
            directory.write(spec, ledger, metrics.rows, model, guarantees, stopped, parties)
    return Result(params, model, tuple(metrics.rows), guarantees, stopped, charges)


class _Clock:
    """Estimates how long the rest of a run takes, from the rounds since its start.

    Args:
        spec: The specification of the run.
        done: Number of rounds done at the start.
    """

    def __init__(self, spec: RunSpec, done: int) -> None:
        self._spec, self._first = spec, done + 1
        self._ended_first: float | None = None

    def read(self, row: MetricsRow) -> RoundResult:
        """Return the result of a round that has just ended."""
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


def _advance(server: Server, state: Checkpoint, total: Tensor) -> tuple[Checkpoint, dict[str, int]]:
    """Return the state after a round; a sum that is not finite is refused, and the round counts (it was charged)."""
    after = server.step(state, total)
    # NaN in a model would stay in it for all later rounds.
    if not (is_finite(total) and is_finite(after.params)):
        return replace(state, round=state.round + 1), {REFUSED_SUM: 1}
    return after, {}


__all__ = ["MetricsRow", "OnRound", "Result", "RoundResult", "run", "train"]
