"""Training: `train` in one call, and `run`, the server side of a prepared run.

The loop is `_train_rounds`. The order of its steps, and of those before it in `_run`, is what ε, resumed runs and
cohorts rest on, so none of them is a callback: callbacks (`silodp.runtime.callback`) are told, and change nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from torch import Tensor

from silodp.accounting.accountant import Accountant
from silodp.accounting.ledger import Budget, Ledger
from silodp.accounting.views import Adversary
from silodp.aggregators.base import Aggregator
from silodp.aggregators.run_spec import RunSpec
from silodp.aggregators.series import NOTHING_MEASURED, Series
from silodp.data.federation import Federation
from silodp.methods.base import Method
from silodp.runtime.callback import Followers, GivenCallbacks, Result, Stopped
from silodp.runtime.checkpoint import Checkpoint
from silodp.runtime.cohort import CohortPlace, check_cohort, count_in_cohort
from silodp.runtime.data_warnings import list_data_warnings
from silodp.runtime.executor import Executor, make_executor
from silodp.runtime.guarantees import derive_guarantees
from silodp.runtime.prepare import prepare_run
from silodp.runtime.run_directory import RunDirectory
from silodp.runtime.run_files import REFUSED_SUM, Metrics, MetricsRow
from silodp.runtime.series import SeriesServer
from silodp.runtime.server import Server
from silodp.runtime.simulation import Connection, Parties, Simulation
from silodp.settings import Whole, check_path, check_type
from silodp.training.task import Task

_log = logging.getLogger(__name__)

Measure = Callable[[int, Tensor, bool], MetricsRow]
"""Number of rounds done, model (d,), whether the run ends with it -> entries of the row of the round."""


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
    isolate_units: bool = False,
    callbacks: GivenCallbacks = (),
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
        isolate_units: Whether silos compute every person (or record, where records are clipped) alone. It is slower,
        and
            then even a model chosen for an attack cannot turn rounding into more than one clip per person. In a
            deployment it should be set; in one process nobody but you chooses models.
        callbacks: What follows the run: objects of classes derived from `silodp.Callback`, and functions, which are
            called with a `RoundResult` after every round, and once with that of the untrained model. If one raises an
            exception, the state after the round is saved, the run ends with that exception, and it can be resumed.
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
        isolate_units=isolate_units,
    )
    # Warnings have private counts, and whoever calls this function has the tables.
    for warning in list_data_warnings(federation, task, spec.method):
        _log.warning("%s", warning)
    return run(
        spec,
        Simulation(federation, task, workers if isinstance(workers, Executor) else make_executor(workers)),
        out=out,
        resume=resume,
        evaluate_every=evaluate_every,
        callbacks=callbacks,
        cohort=None if cohort is None else CohortPlace(Path(cohort), federation.persons),
    )


def run(
    spec: RunSpec,
    parties: Parties,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    evaluate_every: int = 1,
    callbacks: GivenCallbacks = (),
    cohort: CohortPlace | None = None,
) -> Result:
    """Run the server of a prepared run, from the first round or from a checkpoint to the end.

    Args:
        spec: The specification, from `prepare_run`.
        parties: The silos and the evaluation, for example `Simulation(federation, task)`.
        out: See `train`.
        resume: See `train`.
        evaluate_every: See `train`.
        callbacks: See `train`.
        cohort: Where the run is counted, if anywhere.

    Returns:
        The model, its metrics and its guarantees.

    Raises:
        SilodpError: The directory has another run, a silo refuses or does not answer, or ledger and checkpoint are
            from different rounds.
    """
    Whole().check("evaluate_every", evaluate_every)
    followers, result = Followers(callbacks), None
    try:
        directory = RunDirectory(None if out is None else Path(out))
        result = _run(spec, parties, directory, resume, evaluate_every, cohort, followers)
    finally:
        followers.end(result)
    return result


def _run(
    spec: RunSpec,
    parties: Parties,
    directory: RunDirectory,
    resume: bool,
    evaluate_every: int,
    cohort: CohortPlace | None,
    followers: Followers,
) -> Result:
    task = parties.task
    state = directory.load_state(spec, task, resume)  # refuses before anything is written
    check_cohort(cohort, directory.path, replace(spec, run=state.run), resume)
    untrained = None
    # Before anything is written: a metric that fails must not leave a run behind.
    if state.round == 0:
        untrained = NOTHING_MEASURED if spec.is_measured else parties.evaluate(state.params)
    with ExitStack() as opened:
        state, ledger = opened.enter_context(directory.open(spec, task, state, resume))
        # A resumed run keeps its id, to which stores, signatures and ledgers are bound.
        spec = replace(spec, run=state.run)
        # The cohort counts the whole plan before the first charge, and from here on hears of every charge and every
        # completed round from the ledger itself: no callback can be forgotten, or come too late.
        opened.enter_context(count_in_cohort(cohort, directory.path, spec, ledger, resume))
        connection = opened.enter_context(parties.open(spec, directory))
        server = Server(spec, connection.channel, ledger, connection.store, connection.randomness)
        # Checkpoint, store and ledger must be of one moment: older ones would draw or spend again.
        server.check_store_version(state.round)
        server.check_draws(ledger.progress)
        further = [SeriesServer(one, server, ledger) for one in spec.series if one.asks_silos]
        metrics = directory.open_metrics(
            ledger, state.round if resume else None, server.compute_spent_by_round
        )
        followers.start(spec, state.round, directory.path)
        if not metrics.rows and untrained is not None:
            row = {"round": 0, **untrained, "epsilon": server.compute_spent(), **parties.describe()}
            metrics.add(row)
            followers.after_round(row)
        if ledger.rounds == 0:  # later a silo that lost its set-up must not be set up again
            server.set_up()
            for one in further:
                one.set_up()
        measures: list[Measure] = [one.release for one in further]
        if not spec.is_measured:
            measures.insert(0, partial(_evaluate, parties, evaluate_every))
        state, stopped = _train_rounds(
            state, server, connection, ledger, directory, metrics, measures, followers
        )
        # From the specification and the ledger alone, so that a report can derive the same from the files.
        charges = ledger.to_counts()
        derived = derive_guarantees(spec, charges)
        guarantees = {a: one.to_guarantee(server.participation.count) for a, one in derived.items()}
        params = server.find_output(state)
        model = task.load(params)
        directory.write(spec, ledger, metrics.rows, model, guarantees, stopped, parties)
    return Result(params, model, tuple(metrics.rows), guarantees, stopped, charges)


def _train_rounds(
    state: Checkpoint,
    server: Server,
    connection: Connection,
    ledger: Ledger,
    directory: RunDirectory,
    metrics: Metrics,
    measures: Sequence[Measure],
    followers: Followers,
) -> tuple[Checkpoint, Stopped]:
    """Train from a state to the last round, or to the last that the budget allows; return the state there."""
    spec = server.spec
    while state.round < spec.rounds:
        followers.before_round(state.round + 1)
        started, sent = time.perf_counter(), server.transport.traffic
        # 1. Charge, then ask: the ledger has the charge on disk before any silo computes.
        total = server.run_round(state.round, state.params, state.method)
        if total is None:
            return state, "budget"
        # 2. Step: everything from here on follows from the noisy sum.
        state, is_finite = server.step(state, total)
        # 3. Row: what is measured of the new model; additional series charge before they ask, too.
        row = {"round": state.round, **spec.method.describe_sum(total, spec.population)}
        is_last = state.round == spec.rounds or not server.affords_round(state.round)
        params = server.find_output(state)
        for measure in measures:
            row |= measure(state.round, params, is_last)
        row["epsilon"] = server.compute_spent()
        row["seconds"] = round(time.perf_counter() - started, 4)
        row["bytes"] = asdict(server.transport.traffic.since(sent))
        refused = {} if is_finite else {REFUSED_SUM: 1}
        row["refused"] = {**connection.nonfinite_counts(state.round - 1), **refused}
        # The line of the ledger, and with it the cohort's, comes before all that can be seen of the round. The row
        # comes before the checkpoint: after a crash the file may be ahead of it, never behind.
        checkpoint = directory.complete(state, ledger, server.participation.digest(state.round - 1))
        metrics.add(row)
        # 4. Callbacks, 5. checkpoint: the round is done, whatever becomes of the calls.
        try:
            followers.after_round(row)
        finally:
            directory.save_state(checkpoint)
    return state, "rounds"


def _evaluate(parties: Parties, every: int, round_: int, params: Tensor, is_last: bool) -> MetricsRow:
    """Return what held-out records say of a model, where it is due; no ε covers it."""
    return parties.evaluate(params) if is_last or round_ % every == 0 else {}


__all__ = ["run", "train"]
