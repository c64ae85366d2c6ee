"""Additional series of a run: the server's side, and a silo's.

Who calls whom:

    run, after a round -> SeriesServer.release -> Server.run_round -> the aggregator: charges, asks, adds
    SiloWithSeries.answer -> Silo.answer -> Gate: checks, charges -> the method of the series -> noise, masks

Messages, gate, stored answers and charges are those of a round of training, under the run id of the series. So a
release that was interrupted is repeated with the same sums and the same noise, and charged once. If it cannot be
repeated, because its round was repeated without a silo and led to another model, its number is left as spent.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from silodp.accounting.events import Event
from silodp.accounting.ledger import Ledger
from silodp.accounting.series_ledger import SeriesLedger
from silodp.accounting.views import Adversary
from silodp.aggregators.base import state_of
from silodp.aggregators.run_spec import RunSpec
from silodp.aggregators.series import Observer, Series
from silodp.crypto.keys import Identity
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.methods.base import SeriesMethod
from silodp.runtime.local_work import Run
from silodp.runtime.run_files import MetricsRow
from silodp.runtime.server import Server
from silodp.runtime.silo import Silo
from silodp.training.task import Task
from silodp.wire.messages import Message
from silodp.wire.store import RoundStore, Store

_log = logging.getLogger(__name__)
_ANSWERING = threading.Lock()
_RESULT, _BEGUN = "result/", "begun/"


class SeriesServer:
    """The server's side of an additional series of a run.

    Args:
        series: The settings of the series.
        training: The server of the run, whose channel, store and random streams the series uses too.
        ledger: The ledger of the run. Its budget must hold with the last release of the series from now on.
    """

    def __init__(self, series: Series, training: Server, ledger: Ledger) -> None:
        name = series.name
        self._series, self._spec = series, training.spec.derived[name]
        self._charges = SeriesLedger(ledger, name)
        self._store = RoundStore(training.store.run, f"{name}/")
        randomness = training.randomness.child(name)
        self._server = Server(self._spec, training.transport, self._charges, self._store, randomness)
        if series.is_charged:
            # A round that would leave too little ε for the last release is not begun.
            ledger.reserved[name] = self._spec.round_events()

    def set_up(self) -> None:
        """Set up the silos, once, before the first round of training."""
        self._server.set_up()

    def _is_begun(self, rounds: int) -> bool:
        """Return whether the release after so many rounds was begun, and has no result.

        Silos may have answered, and do not answer under its number about another model. So it must be ended, even if
        the run was resumed with more rounds or ε and would release later.
        """
        store = self._store.run
        return store.get(f"{_BEGUN}{rounds}") is not None and store.get(f"{_RESULT}{rounds}") is None

    def _find_number(self, rounds: int, model: str) -> int:
        """Return the number of the release about a model: that of an interrupted one about it, or a new one.

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
        # "NUMBER DIGEST" of the release that was begun after these rounds.
        number, _, before = numbers.get(f"{_BEGUN}{rounds}", "").partition(" ")
        if number and (before == model or self._store.round(int(number)).get("clients") is None):
            return int(number)  # the same model, or nothing was asked
        return max((int(kept.split()[0]) + 1 for kept in numbers.values()), default=0)

    def release(self, rounds: int, params: Tensor, is_last: bool) -> MetricsRow:
        """Release if it is due; the same model after the same rounds is asked about and charged once.

        Args:
            rounds: Number of rounds that led to the model.
            params: The parameters (d,) of the model as it is released.
            is_last: Whether no further release follows, so that what the budget reserves may be spent.

        Returns:
            Entries for a row of metrics.jsonl; {} where nothing is due.
        """
        if not (self._series.is_due(rounds, is_last) or self._is_begun(rounds)):
            return {}
        stored = self._store.run.get(f"{_RESULT}{rounds}")
        if stored is None:
            begun = hashlib.sha256(params.cpu().numpy().tobytes()).hexdigest()
            number = self._find_number(rounds, begun)
            if number >= self._spec.rounds:
                return self._skip(rounds, f"the run's parameters were chosen for {number} in all")
            # The last release may spend what the ledger kept for it.
            self._charges.is_last = is_last
            total = None
            # Asked before the number is spent: silos expect every number, and this one would be left out.
            if self._server.affords_round(number):
                state = {SeriesMethod.ROUNDS: np.array([rounds], np.int64)}
                # Before any silo is asked: after a crash it is known which model the number is about.
                self._store.run.put(f"{_BEGUN}{rounds}", f"{number} {begun}".encode())
                total = self._server.run_round(number, params, state)
            if total is None:
                return self._skip(rounds, "the privacy budget does not allow it")
            sums = {"total": total.double().numpy()}
            stored = Message("released", self._spec.run, number, arrays=sums).encode()
            # On disk before anything else happens: a later release must have the next number.
            self._store.run.put(f"{_RESULT}{rounds}", stored)
        released = Message.decode(stored)
        # Charged before it was asked for, so it cannot be missing but in an old copy.
        if self._series.is_charged and not self._charges.charged(released.round):
            raise SilodpError(
                f"the server's store has the {self._series.name} after round {rounds}, and the ledger of the run no "
                "charge for it: the ledger is an old copy; restore the newest one, or begin a new run, which adds its "
                "own ε.",
                code="checkpoint.mismatch",
            )
        return self._series.describe_release(self._spec, released.arrays["total"])

    def _skip(self, rounds: int, why: str) -> MetricsRow:
        _log.warning("no %s after round %d: %s", self._series.name, rounds, why)
        return self._series.describe_release(self._spec, None)


@dataclass(frozen=True)
class SiloWithSeries:
    """A silo's side of a run and of its additional series; a `Party`.

    Attributes:
        training: Its side of the run.
        series: Its side of each series, by name, which has the records of the series alone.
        observers: By series, what the silo does with each model for itself.
    """

    training: Silo
    series: Mapping[str, Silo]
    observers: Mapping[str, Observer] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The silo's name."""
        return self.training.name

    @property
    def max_bytes(self) -> int:
        """Bytes of the longest request, when encoded."""
        return max(one.max_bytes for one in (self.training, *self.series.values()))

    @property
    def nonfinite_counts(self) -> dict[int, int]:
        """By round, how many rows of the training were not finite."""
        return self.training.nonfinite_counts

    def answer(self, request: Message) -> Message:
        """Answer a request about the run, or about a series.

        Raises:
            SilodpError: The gate of that part refuses it.
        """
        for name, silo in self.series.items():
            if request.run == silo.run:
                return self._answer_about(name, silo, request)
        return self.training.answer(request)

    def _answer_about(self, name: str, silo: Silo, request: Message) -> Message:
        # Several silos of a simulation share a model, which holds one vector of parameters at a time.
        with _ANSWERING:
            # The answer is made first, and is the same whatever the silo measures for itself.
            answer = silo.answer(request)
            if name in self.observers and request.kind == "update":
                rounds = int(state_of(request)[SeriesMethod.ROUNDS][0])
                try:
                    self.observers[name](request.run, torch.from_numpy(request.arrays["params"]), rounds)
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
    releases: Mapping[str, int] | None = None,
    run: Run | None = None,
) -> Silo | SiloWithSeries:
    """Return a silo's side of a run, and of its additional series where there are any.

    Args:
        data: The silo's records; each series selects its own.
        task: See `Silo`.
        spec: The specification of the run; its limits are those of the silo.
        randomness: See `Silo`.
        store: See `Silo`.
        identity: See `Silo`.
        pins: See `Silo`.
        ledger: See `Silo`; the series are charged there too.
        find_exceeded: See `Silo`.
        metrics: File of what the silo measures for itself alone; None keeps nothing.
        releases: The most of each series, by name, that the silo answers; None: the most that the run can have.
        run: Computes with the training records; see `Silo`.
    """
    make = partial(Silo, task=task, store=store, identity=identity, pins=pins, find_exceeded=find_exceeded)
    silo = make(data, spec=spec, randomness=randomness, ledger=ledger, run=run)
    if not spec.derived:
        return silo
    parts, observers = dict[str, Silo](), dict[str, Observer]()
    for series in spec.series:
        derived = spec.derived.get(series.name)
        if derived is None:
            continue
        if releases is not None:
            derived = replace(derived, rounds=min(releases[series.name], derived.rounds))
        records = series.select_records(data)
        # Its own random streams: equal ones would repeat the noise of the training.
        own, charges = randomness.child(series.name), SeriesLedger(ledger, series.name)
        parts[series.name] = make(records, spec=derived, randomness=own, ledger=charges)
        observer = series.make_observer(records, task, metrics)
        if observer is not None:
            observers[series.name] = observer
    return SiloWithSeries(silo, parts, observers)
