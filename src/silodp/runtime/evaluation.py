"""The evaluation of a run on the held-out records of its silos: the server's side, and a silo's.

Who calls whom, by sums:

    run, after a round -> Evaluator.measure -> Server.run_round -> the aggregator: charges, asks, adds
    EvaluatedSilo.answer -> Silo.answer -> Gate: checks, charges -> EvaluationSums: counts, clips -> noise, masks

Messages, gate, stored answers and charges are those of a round of training, under the run id of the evaluation. So an
evaluation that was interrupted is repeated with the same counts and the same noise, and charged once. If it cannot be
repeated, because its round was repeated without a silo and led to another model, its number is left as spent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silodp.accounting.evaluation_ledger import EvaluationLedger
from silodp.accounting.events import Event
from silodp.accounting.ledger import Ledger
from silodp.accounting.views import Adversary
from silodp.aggregators.base import state_of
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.keys import Identity
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.methods.count_parts import CountParts
from silodp.methods.evaluation import EvaluationMethod, EvaluationSums
from silodp.parsing import UNSOUND, parse_json
from silodp.runtime.local_work import Run
from silodp.runtime.run_files import MetricsRow
from silodp.runtime.server import Server
from silodp.runtime.silo import Silo
from silodp.training.counts import MIN_CERTAINTY, CountTable
from silodp.training.task import Task
from silodp.wire.files import PRIVATE_FILE, append_durably
from silodp.wire.messages import Message
from silodp.wire.store import RoundStore, Store

_log = logging.getLogger(__name__)
_EVALUATING = threading.Lock()

PURPOSE = "evaluation"
"""Prefix of the evaluation's entries in the store of the server, and of its random streams."""
_RESULT, _BEGUN = "result/", "begun/"
NOTHING_MEASURED: MetricsRow = {"loss": None, "metrics": {}}


def measure_records(task: Task, params: Tensor, records: SiloData | None) -> MetricsRow:
    """Return {"loss", "metrics"} of a model on records, which no ε covers; nothing measured where there are none.

    Args:
        task: The model, its loss and its metrics.
        params: The parameters (d,) of the model, on the device of the task.
        records: Held-out records.
    """
    if records is None or len(records) == 0:
        return NOTHING_MEASURED
    values = task.evaluate(params, records.x, records.y)
    return {"loss": values.pop("loss", None), "metrics": values}


class Evaluator:
    """The server's side of the evaluation of a run.

    Args:
        spec: The specification of the run; its `evaluation_spec` is not None.
        training: The server of the run, whose channel, store and random streams the evaluation uses too.
        ledger: The ledger of the run. Its budget must hold with the last evaluation from now on.
    """

    def __init__(self, spec: RunSpec, training: Server, ledger: Ledger) -> None:
        settings, derived = spec.evaluation, spec.evaluation_spec
        assert settings is not None
        assert derived is not None
        self._settings, self._spec, self._charges = settings, derived, EvaluationLedger(ledger)
        self._store = RoundStore(training.store.run, f"{PURPOSE}/")
        randomness = training.randomness.child(PURPOSE)
        self._server = Server(derived, training.transport, self._charges, self._store, randomness)
        if spec.charged_evaluation is not None:
            # A round that would leave too little ε for the last evaluation is not begun.
            ledger.reserved = derived.round_events()

    def set_up(self) -> None:
        """Set up the silos, once, before the first round of training."""
        self._server.set_up()

    def _is_begun(self, rounds: int) -> bool:
        """Return whether the evaluation of the model after so many rounds was begun, and has no result.

        Silos may have answered, and do not answer under its number about another model. So it must be ended, even if
        the run was resumed with more rounds or ε and would evaluate later.
        """
        store = self._store.run
        return store.get(f"{_BEGUN}{rounds}") is not None and store.get(f"{_RESULT}{rounds}") is None

    def _find_number(self, rounds: int, model: str) -> int:
        """Return the number under which a model is evaluated: that of an interrupted evaluation of it, or a new one.

        Silos may have answered, and charged, a number about another model after the same rounds: the round was
        repeated, and not by the same silos. They answer each number about one model, so that number stays spent.

        Args:
            rounds: Number of rounds that led to the model.
            model: SHA-256 (hex) of its parameters.
        """
        store = self._store.run
        numbers = {
            name: (store.get(name) or b"").decode() for name in store.names() if name.startswith(_BEGUN)
        }
        # "NUMBER DIGEST" of the evaluation that was begun after these rounds.
        number, _, before = numbers.get(f"{_BEGUN}{rounds}", "").partition(" ")
        if number and (before == model or self._store.round(int(number)).get("clients") is None):
            return int(number)  # the same model, or nothing was asked
        return max((int(kept.split()[0]) + 1 for kept in numbers.values()), default=0)

    def measure(self, rounds: int, params: Tensor, is_last: bool) -> MetricsRow:
        """Evaluate a model if it is due; the same model after the same rounds is evaluated and charged once.

        Args:
            rounds: Number of rounds that led to the model.
            params: The parameters (d,) of the model as it is released.
            is_last: Whether no further evaluation follows, so that what the budget reserves may be spent.

        Returns:
            The metrics, and how large their noise is, for a row of metrics.jsonl; nothing measured where silos send
            nothing, or where the budget forbids it; {} if the model is not due.
        """
        if not (self._settings.is_due(rounds, is_last) or self._is_begun(rounds)):
            return {}
        stored = self._store.run.get(f"{_RESULT}{rounds}")
        if stored is None:
            begun = hashlib.sha256(params.cpu().numpy().tobytes()).hexdigest()
            number = self._find_number(rounds, begun)
            if number >= self._spec.rounds:
                _log.warning(
                    "no evaluation after round %d: the run's parameters were chosen for %d in all",
                    rounds,
                    number,
                )
                return NOTHING_MEASURED
            # The last evaluation may spend what the ledger kept for it.
            self._charges.is_last = is_last
            total = None
            # Asked before the number is spent: silos expect every number, and this one would be left out.
            if self._server.affords_round(number):
                state = {EvaluationMethod.ROUNDS: np.array([rounds], np.int64)}
                # Before any silo is asked: after a crash it is known which model the number is about.
                self._store.run.put(f"{_BEGUN}{rounds}", f"{number} {begun}".encode())
                total = self._server.run_round(number, params, state)
            if total is None:
                _log.warning("no evaluation after round %d: the privacy budget does not allow it", rounds)
                return NOTHING_MEASURED
            sums = {"total": total.double().numpy()}
            stored = Message("evaluated", self._spec.run, number, arrays=sums).encode()
            # On disk before anything else happens: a later evaluation must have the next number.
            self._store.run.put(f"{_RESULT}{rounds}", stored)
        method = self._spec.method
        if not isinstance(method, EvaluationSums):
            return NOTHING_MEASURED
        # Charged before it was asked for, so it cannot be missing but in an old copy.
        if not self._charges.charged(Message.decode(stored).round):
            raise SilodpError(
                f"the server's store has the evaluation after round {rounds}, and the ledger of the run no charge for "
                "it: the ledger is an old copy; restore the newest one, or begin a new run, which adds its own ε.",
                code="checkpoint.mismatch",
            )
        released = Message.decode(stored).arrays["total"]
        return describe_counts(method, self._spec, released, self._settings.least_group)


def describe_counts(
    method: EvaluationSums, spec: RunSpec, total: np.ndarray, least_group: int = 30
) -> MetricsRow:
    """Return the entries of a row of metrics.jsonl that follow from noisy sums.

    Args:
        method: The method of the evaluation.
        spec: The specification of the evaluation.
        total: The sum over silos, or the blocks of all silos, (sum_size,) float64.
        least_group: The fewest records, by noisy counts, of a part whose metrics are shown.
    """
    parts, table = method.parts or CountParts(), method.table
    # Where the unit is a person and counts are added up, every silo has weighted them by 1/S.
    scaled = torch.from_numpy(np.asarray(total, np.float64)) * method.spread(spec.population)
    blocks = scaled.reshape(parts.silos, parts.tables, table.size)
    std = method.count_std(spec.population)
    over_silos, over_silos_std = blocks.sum(0), std * math.sqrt(parts.silos)
    counts, factor = parts.pool(over_silos)
    noise_std = over_silos_std * factor
    estimates, confusion = table.estimate(counts, noise_std), table.confusion(counts)
    found: list[tuple[str, str, Tensor, float]] = []
    if method.by_silo:
        found += [
            ("silo", name, parts.pool(block)[0], std * factor)
            for name, block in zip(spec.names, blocks, strict=True)
        ]
    found += [
        (column, name, over_silos[number], over_silos_std) for column, name, number in parts.list_tables()
    ]
    evaluation = {
        "noise_std": round(noise_std, 6),
        "estimates": {name: asdict(estimate) for name, estimate in estimates.items()},
        "confusion": None if confusion is None else confusion.round(decimals=3).tolist(),
        # Those of places are the confusion matrix, of which no curve of calibration can be drawn.
        "counts": [] if table.kind == "places" else counts.reshape(table.shape).round(decimals=3).tolist(),
    }
    if table.kind == "survival":
        evaluation["times"] = list(table.times)
    if found:
        evaluation["least_group"] = least_group
        evaluation["parts"] = [_describe_part(table, least_group, *part) for part in found]
    metrics = {name: estimate.value for name, estimate in estimates.items()}
    return {"loss": None, "metrics": metrics, "evaluation": evaluation}


def _describe_part(
    table: CountTable, least_group: int, of: str, name: str, counts: Tensor, noise_std: float
) -> dict[str, Any]:
    """Return the noisy metrics of a silo or a subgroup; without them where it has too few records, or seems to."""
    records = table.count_records(counts)
    # The rule looks at noisy counts and public numbers alone, so that what is not shown says nothing more.
    shown = records >= max(least_group, MIN_CERTAINTY * table.count_std(noise_std))
    estimates = table.estimate(counts, noise_std) if shown else {}
    by_step = {}
    if shown and of == "silo" and table.kind == "scores":  # a silo may correct its outputs by them
        by_step["counts"] = counts.reshape(table.shape).round(decimals=3).tolist()
    return {
        "of": of,
        "name": name,
        "shown": shown,
        "records": round(records, 1) if shown else None,
        "noise_std": round(noise_std, 6),
        "estimates": {metric: asdict(estimate) for metric, estimate in estimates.items()},
        **by_step,
    }


@dataclass(frozen=True)
class EvaluatedSilo:
    """A silo's side of a run and of its evaluation; a `Party`.

    Attributes:
        training: Its side of the run.
        evaluation: Its side of the evaluation, which has the held-out records alone.
        note_model: Called with each model that the silo evaluates by itself, and the number of rounds; None where it
            does not.
    """

    training: Silo
    evaluation: Silo
    note_model: Callable[[str, Tensor, int], None] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The silo's name."""
        return self.training.name

    @property
    def max_bytes(self) -> int:
        """Bytes of the longest request, when encoded."""
        return max(self.training.max_bytes, self.evaluation.max_bytes)

    @property
    def nonfinite_counts(self) -> dict[int, int]:
        """By round, how many rows of the training were not finite."""
        return self.training.nonfinite_counts

    def answer(self, request: Message) -> Message:
        """Answer a request about the run, or about its evaluation.

        Raises:
            SilodpError: The gate of that part refuses it.
        """
        if request.run != self.evaluation.run:
            return self.training.answer(request)
        # Several silos of a simulation share a model, which holds one vector of parameters at a time.
        with _EVALUATING:
            # The answer is made first, and is the same whatever the silo measures for itself.
            answer = self.evaluation.answer(request)
            if self.note_model is not None and request.kind == "update":
                rounds = int(state_of(request)[EvaluationMethod.ROUNDS][0])
                try:
                    self.note_model(request.run, torch.from_numpy(request.arrays["params"]), rounds)
                except Exception:
                    # Whether a model or a metric fails on these records must not leave the silo, as its answer would.
                    _log.exception("silo '%s' could not evaluate the model after round %d", self.name, rounds)
        return answer


def make_silo(
    data: SiloData,
    task: Task,
    spec: RunSpec,
    randomness: Randomness,
    store: Store,
    identity: Identity,
    pins: Mapping[str, bytes],
    ledger: Ledger,
    find_exceeded: Callable[[Mapping[Adversary, Event]], str | None] | None = None,
    metrics: Path | None = None,
    evaluations: int | None = None,
    run: Run | None = None,
) -> Silo | EvaluatedSilo:
    """Return a silo's side of a run, and of its evaluation where there is one.

    Args:
        data: The silo's records; `data.test` are those of the evaluation.
        task: See `Silo`.
        spec: The specification of the run; its limits are those of the silo.
        randomness: See `Silo`.
        store: See `Silo`.
        identity: See `Silo`.
        pins: See `Silo`.
        ledger: See `Silo`; an evaluation is charged there too.
        find_exceeded: See `Silo`.
        metrics: File of what the silo measures for itself alone; None keeps nothing.
        evaluations: The most that the silo answers; None: the most that the run can have.
        run: Computes with the training records; see `Silo`.
    """
    make = partial(Silo, task=task, store=store, identity=identity, pins=pins, find_exceeded=find_exceeded)
    silo = make(data, spec=spec, randomness=randomness, ledger=ledger, run=run)
    derived = spec.evaluation_spec
    if derived is None:
        return silo
    if evaluations is not None:
        derived = replace(derived, rounds=min(evaluations, derived.rounds))
    # Its own random streams: equal ones would repeat the noise of the training.
    test = replace(data.held_out, name=data.name)  # a data set may call these records as it likes
    evaluation = make(
        test, spec=derived, randomness=randomness.child(PURPOSE), ledger=EvaluationLedger(ledger)
    )
    note_model = None if spec.charged_evaluation is not None else LocalMetrics(test, task, metrics).note
    return EvaluatedSilo(silo, evaluation, note_model)


@dataclass(frozen=True)
class LocalMetrics:
    """What a silo measures for itself alone: none of it leaves the silo, and no ε covers it.

    Attributes:
        data: Held-out records.
        task: The model, its loss and its metrics.
        path: A file, one line for each model; None keeps nothing.
    """

    data: SiloData
    task: Task
    path: Path | None

    def note(self, run: str, params: Tensor, rounds: int) -> None:
        """Evaluate a model and append a line to the file, once for each model.

        Args:
            run: Id of the evaluation.
            params: The parameters (d,) of the model.
            rounds: Number of rounds that led to it.
        """
        place = {"run": run, "round": rounds}
        if place in self._list_places():
            return
        measured = measure_records(self.task, params.to(self.task.device), self.data)
        line = {**place, "records": len(self.data), **measured}
        if self.path is not None:
            append_durably(self.path, json.dumps(line).encode(), PRIVATE_FILE)
        _log.info(
            "silo '%s' evaluated the model after round %d on its %d held-out records: the metrics are in %s, and none "
            "of them was sent",
            self.data.name, rounds, len(self.data), self.path,
        )  # fmt: skip

    def _list_places(self) -> list[dict[str, object]]:
        if self.path is None or not self.path.exists():
            return []
        found = []
        for line in self.path.read_bytes().splitlines():
            with suppress(*UNSOUND):  # a line that a crash cut off: that model is evaluated again
                row = parse_json(line)
                found.append({"run": row["run"], "round": row["round"]})
        return found
