"""A whole run: terms agreed, parties set up, rounds played, guarantees written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from silodp.accounting.accountant import Accountant
from silodp.accounting.guarantee import Adversary, Guarantee
from silodp.accounting.ledger import Budget
from silodp.aggregators.base import Aggregator
from silodp.data.federation import Federation
from silodp.data.linkage import count_persons_by_silos, find_linkage_doubts
from silodp.errors import SilodpError
from silodp.methods.base import Method
from silodp.runtime.checkpoint import Checkpoint
from silodp.runtime.guarantees import build_guarantees
from silodp.runtime.run_directory import MetricsRow, RunDirectory
from silodp.runtime.run_spec import agreed
from silodp.runtime.server import Server, is_finite
from silodp.runtime.simulation import build_parties
from silodp.training.task import Task

_log = logging.getLogger(__name__)
REFUSED_SUM = "(sum)"
"""Under "refused" in a row, beside the silos' names: the sum itself was not finite, and the model stayed as it was."""


@dataclass(frozen=True)
class Result:
    """What a run gives.

    params (d,): the final global model as one vector; `model` carries it. metrics: one row per round, the untrained
    model first, with the number of persons by how many silos they were found in (private). `stopped` says what ended
    the run.
    """

    params: Tensor
    model: nn.Module
    metrics: tuple[MetricsRow, ...]
    guarantees: dict[Adversary, Guarantee]
    stopped: Literal["rounds", "budget"]

    @property
    def epsilon(self) -> float | None:
        """ε towards whoever sees every global model; None where nothing is promised."""
        return self.guarantees["released"].epsilon


def train(
    federation: Federation,
    task: Task,
    method: Method,
    *,
    rounds: int,
    aggregator: str | Aggregator = "plain",
    budget: Budget | Mapping[str, Any] | None = None,
    seed: int | None = None,
    delta: float = 1e-5,
    accountant: Accountant | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    evaluate_every: int = 1,
    silo_limits: Mapping[Adversary, float] | None = None,
    on_round: Callable[[MetricsRow], None] | None = None,
) -> Result:
    """Train one model over all silos.

    Args:
        federation: the silos' tables; `federation.test`, if any, is evaluated on (not covered by ε).
        task: model, loss and metrics.
        method: who is protected and how, e.g. `silodp.methods.UldpAvg(...)`.
        rounds: T, at most; a budget may stop the run earlier.
        aggregator: "plain": the server sees each silo's noisy share; "masked": only their sum (secure aggregation, with
            integer noise); "lattice" or "paillier": the same, weighted by record counts that nobody sees. An
            aggregator with other settings can be given as an object.
        budget: `Budget` or {"epsilon", "delta", "adversary"}; the run stops before it would be exceeded.
        seed: None draws all randomness from the operating system; an integer makes the run reproducible, and its
            guarantees say "not for release".
        delta: δ at which ε is reported.
        accountant: "pld" (tight, pessimistic grid) or "rdp", the only one that knows integer noise; None: the tightest
            that can be used.
        out: directory for checkpoint, ledger, metrics, guarantee and model; None keeps everything in memory.
        resume: go on from the checkpoint in `out`.
        evaluate_every: evaluate after every so many rounds, and after the last.
        silo_limits: the ε at `delta` that every silo lets the run spend, by adversary ("released", "server", "silo"),
            whatever the server asks; silos charge the costliest number of silos that may answer. A silo that would
            exceed it refuses the round, and the run ends with an error; it can be resumed with other limits.
        on_round: called with each row of metrics as it is made.

    Raises:
        SilodpError: for any mistake its maker can mend.
    """
    if not (out is None or isinstance(out, str | Path)):
        raise SilodpError(
            f"out = {out!r}: give the path of a directory, or None.", code="argument.type", field="out"
        )
    terms = agreed(
        federation,
        task,
        method,
        rounds=rounds,
        aggregator=aggregator,
        budget=budget,
        seed=seed,
        delta=delta,
        accountant=accountant,
        evaluate_every=evaluate_every,
        on_round=on_round,
        silo_limits=silo_limits,
    )
    delta = terms.delta
    optimizer = terms.method.make_server_optimizer()

    def released(state: Checkpoint) -> Tensor:
        return optimizer.released(state.params, state.optimizer)

    if method.unit == "user":
        for doubt in find_linkage_doubts(federation):
            _log.warning("warning: %s", doubt)
    directory = RunDirectory(None if out is None else Path(out))
    state = directory.state(terms, resume, rounds)  # refuses before anything is written
    untrained = _evaluate(task, state.params, federation) if state.round == 0 else None
    with directory.opened(terms, state, resume, rounds) as (state, ledger), ExitStack() as silo_ledgers:
        silos, server = build_parties(terms, state.run, ledger, directory)
        for silo in silos:
            silo_ledgers.enter_context(silo.gate.ledger)
        server.check_store_version(state.round)
        metrics = directory.metrics(state.round if resume else None, server.spent_by_round)
        if not metrics.rows and untrained is not None:
            # Private, as all metrics are: how many persons were found in 0, 1, 2… silos.
            persons = {str(silos): count for silos, count in count_persons_by_silos(federation).items()}
            row = {"round": 0, **untrained, "epsilon": server.spent(), "persons_by_silos": persons}
            metrics.add(row, on_round)
        if ledger.rounds == 0:  # afterwards a silo that has forgotten its set-up must not be set up anew
            server.set_up()
        stopped: Literal["rounds", "budget"] = "rounds"
        while state.round < rounds:
            started, sent = time.perf_counter(), server.transport.traffic
            total = server.run_round(state.round, state.params, state.method)
            if total is None:
                stopped = "budget"
                break
            state, refusal = _advance(server, state, total)
            row = {"round": state.round}
            if state.round % evaluate_every == 0 or state.round == rounds:
                row |= _evaluate(task, released(state), federation)
            row["epsilon"] = server.spent()
            row["seconds"] = round(time.perf_counter() - started, 4)
            row["bytes"] = asdict(server.transport.traffic.since(sent))
            row["refused"] = {
                s.name: n for s in silos if (n := s.nonfinite_counts.get(state.round - 1, 0))
            } | refusal
            metrics.add(row, on_round)
            directory.keep(state)
        guarantees = build_guarantees(federation, terms.method, server, ledger, delta, seed is None)
        params = released(state)
        model = task.load(params)
        directory.write(terms, state.run, model, guarantees, stopped)
    return Result(params, model, tuple(metrics.rows), guarantees, stopped)


def _advance(server: Server, state: Checkpoint, total: Tensor) -> tuple[Checkpoint, dict[str, int]]:
    """The state after a round; a sum that is not finite is refused, and the round counts (it was charged)."""
    after = server.step(state, total)
    if not (is_finite(total) and is_finite(after.params)):
        return replace(state, round=state.round + 1), {REFUSED_SUM: 1}
    return after, {}


def _evaluate(task: Task, params: Tensor, federation: Federation) -> MetricsRow:
    if federation.test is None or len(federation.test.x) == 0:
        return {"loss": None, "metrics": {}}
    values = task.evaluate(params, federation.test.x, federation.test.y)
    return {"loss": values.pop("loss", None), "metrics": values}


__all__ = ["MetricsRow", "Result", "train"]
