"""Canary runs: runs on canaries alone, in memory, of which everything is remembered that some party sees.

`runtime.train.run` takes any `Parties`. `Observed` gives it those of a simulation, with stores and a channel that
remember; the loop, the silos, their gates, the aggregator and the ledger are those of every run. A configuration cannot
reach this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import torch
from silodp.accounting.charges import ChargeCounts
from silodp.accounting.guarantee import Guarantee
from silodp.accounting.progress import TRAINING
from silodp.accounting.views import Adversary
from silodp.aggregators.base import SiloContext, state_of
from silodp.aggregators.run_spec import RunSpec
from silodp.aggregators.series import split_name
from silodp.crypto.keys import Identity
from silodp.crypto.sampling import PersonCoins
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.methods.server_optimizer import start_state, take_step
from silodp.runtime.callback import Result
from silodp.runtime.run_directory import RunDirectory
from silodp.runtime.run_files import MetricsRow
from silodp.runtime.simulation import Connection, Parties
from silodp.runtime.train import run
from silodp.training.task import Task
from silodp.wire.messages import Message
from silodp.wire.store import MemoryStore, RoundStore
from silodp.wire.transport import Channel, DeliveryFailure, Traffic

Array = NDArray[np.float64]
_ROUNDING = 1e-3  # of a move, by which a replayed model may miss the released one


# --- the run, remembered ---


class _RememberingStore(MemoryStore):
    """A store that also keeps what was dropped.

    Attributes:
        seen: Everything that was ever put, the last value of each key.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        """Keep the value, for good."""
        super().put(key, value)
        self.seen[key] = value

    def reopen(self) -> MemoryStore:
        """Return a store of everything that was seen."""
        store = MemoryStore()
        for key, value in self.seen.items():
            store.put(key, value)
        return store


@dataclass(frozen=True)
class _RememberingDirectory(RunDirectory):
    """A directory in memory whose stores remember.

    Attributes:
        stores: The store of every party, by its place.
    """

    stores: dict[tuple[str, ...], _RememberingStore] = field(default_factory=dict)

    def make_store(self, *place: str) -> _RememberingStore:
        """Return the store of one party."""
        return self.stores.setdefault(place, _RememberingStore())


@dataclass(frozen=True)
class Exchange:
    """A request of the server, and the answer of a silo; None where it gave none."""

    silo: str
    request: Message
    answer: Message | None


@dataclass(frozen=True)
class _RecordingChannel:
    """A channel that keeps what passes."""

    channel: Channel
    kept: list[Exchange]

    @property
    def traffic(self) -> Traffic:
        """As the channel counts it."""
        return self.channel.traffic

    def ask(
        self, requests: Mapping[str, Message], timeout: float | None = None
    ) -> tuple[dict[str, Message], dict[str, DeliveryFailure]]:
        """Ask each silo, and keep requests and answers."""
        answers, failures = self.channel.ask(requests, timeout)
        self.kept.extend(Exchange(silo, request, answers.get(silo)) for silo, request in requests.items())
        return answers, failures


@dataclass(frozen=True)
class Observed:
    """The parties of a canary run; nothing of them is on disk.

    Attributes:
        parties: The silos, in this process.
        kept: All messages so far.
        directory: The stores of all parties.
    """

    parties: Parties
    kept: list[Exchange] = field(default_factory=list)
    directory: _RememberingDirectory = field(default_factory=lambda: _RememberingDirectory(None))

    is_simulation: ClassVar[bool] = True
    schema: ClassVar[None] = None

    @property
    def task(self) -> Task:
        """The canaries' model."""
        return self.parties.task

    @contextmanager
    def open(self, spec: RunSpec, directory: RunDirectory) -> Iterator[Connection]:
        """Open the silos with stores that remember, and a channel that does."""
        with self.parties.open(spec, self.directory) as connection:
            yield replace(connection, channel=_RecordingChannel(connection.channel, self.kept))

    def evaluate(self, params: torch.Tensor) -> MetricsRow:
        """Measure nothing."""
        return {"loss": None, "metrics": {}}

    def describe(self) -> MetricsRow:
        """Describe nothing."""
        return {}


@dataclass(frozen=True)
class CanaryRun:
    """A run on canaries, or a series of it, and what every party saw of it.

    Attributes:
        spec: The specification of the run, with its id.
        result: The result of the run.
        observed: What was remembered.
        series: The name of the additional series that is run; "" for training.
    """

    spec: RunSpec
    result: Result = field(repr=False)
    observed: Observed = field(repr=False)
    series: str = TRAINING

    def of_series(self, name: str) -> CanaryRun:
        """Return an additional series of the run, as a canary run of its own."""
        return replace(self, spec=self.spec.derived[name], series=name)

    @property
    def charges(self) -> ChargeCounts:
        """What the ledger charged: for the whole run, or for the series alone."""
        charges = self.result.charges
        if not self.series:
            return charges
        return replace(charges, charged=charges.further[self.series], further={}, reported={})

    @property
    def guarantees(self) -> Mapping[Adversary, Guarantee]:
        """What the run printed."""
        return self.result.guarantees

    @cached_property
    def updates(self) -> tuple[dict[str, Exchange], ...]:
        """The updates of each round that counted, in order: the last attempt's, by silo."""
        rounds: dict[int, dict[str, Exchange]] = {}
        for exchange in self.observed.kept:
            request = exchange.request
            if request.kind == "update" and request.run == self.spec.run:
                rounds.setdefault(request.round, {})[exchange.silo] = exchange
        return tuple(rounds[number] for number in sorted(rounds))

    # --- what each adversary sees ---

    @cached_property
    def models(self) -> Array:
        """The global models (T + 1, d) that were sent out, the last one that of the result."""
        sent = [next(iter(asked.values())).request.arrays["params"] for asked in self.updates]
        return np.array([*sent, self.result.params.cpu().numpy()], np.float64)

    @cached_property
    def released(self) -> Array | None:
        """The noisy sums (T, d) as whoever sees the models computes them; None where that is not known how.

        The server optimizer inverts its steps, and the method's reading of a sum is inverted as a scaling of every
        coordinate. Both are then checked on what was seen, whatever classes the two are of.
        """
        method, population = self.spec.method, self.spec.population
        if not method.releases_model:  # the sums themselves are released
            return self.sums
        optimizer = method.make_server_optimizer()
        state = start_state(optimizer, torch.from_numpy(self.models[0]).float())
        sums = []
        for number, (asked, moved) in enumerate(zip(self.updates, np.diff(self.models, axis=0), strict=True)):
            move = method.server_move(population, number, self.spec.rounds)
            update = optimizer.invert(torch.from_numpy(moved), state, move)
            scale = self._find_scale(state_of(next(iter(asked.values())).request))
            if update is None or scale is None:
                return None
            _, state = take_step(
                optimizer, torch.from_numpy(self.models[number]).float(), update, state, move
            )
            sums.append(update.numpy() / scale)
        found = np.array(sums)
        # Coordinates that a method adds to the model's do not reach the models.
        whole = np.pad(found, ((0, 0), (0, self.spec.sum_size - found.shape[1])))
        return found if self.count_steps(whole) == len(found) else None

    def _find_scale(self, state: Mapping[str, NDArray[np.generic]]) -> Array | None:
        """Return the factors (d,) by which the method turns a sum into an update; None where it is no scaling."""
        size, population = self.spec.sum_size, self.spec.population
        trial = np.random.default_rng(0).normal(size=size)

        def split(total: Array) -> Array:
            update, _ = self.spec.method.split_sum(torch.from_numpy(total), state, population)
            return np.asarray(update, np.float64)

        scale = split(np.ones(size))
        is_scaling = np.allclose(split(trial), scale * trial[: len(scale)]) and bool((scale != 0).all())
        return scale if is_scaling else None

    def count_steps(self, sums: Array) -> int:
        """Return in how many rounds the server's own optimizer makes the model that was seen of these sums (T, k)."""
        method, population = self.spec.method, self.spec.population
        optimizer = method.make_server_optimizer()
        state = start_state(optimizer, torch.from_numpy(self.models[0]).float())
        slack, found = _ROUNDING * np.abs(np.diff(self.models, axis=0)).max(), 0
        for number, (asked, total) in enumerate(zip(self.updates, sums, strict=True), start=1):
            public = state_of(next(iter(asked.values())).request)
            update, _ = method.split_sum(torch.from_numpy(total), public, population)
            params = torch.from_numpy(self.models[number - 1]).float()
            move = method.server_move(population, number - 1, self.spec.rounds)
            made, state = take_step(optimizer, params, update, state, move)
            released = optimizer.output_params(made, state) if number == len(sums) else made
            found += bool(np.abs(released.numpy() - self.models[number]).max() <= slack)
        return found

    @cached_property
    def sums(self) -> Array | None:
        """The noisy sums (T, k) as the server computes them from what it was sent; None where that cannot be repeated.

        The server's side of the aggregator runs once more, on the answers and the store that were remembered.
        """
        side = self.spec.aggregator.server(self.spec)
        context = _Replay(self._server_store(), self.observed.kept)
        found = []
        try:
            for number, asked in enumerate(self.updates):
                total = side.total(context, number, self._request_arrays(number, asked))
                found.append(np.asarray(total, np.float64))
        except (SilodpError, KeyError):
            return None
        return np.array(found)

    def _request_arrays(self, number: int, asked: Mapping[str, Exchange]) -> dict[str, NDArray[np.generic]]:
        arrays = dict(next(iter(asked.values())).request.arrays)
        sample = self.server_sample(number)
        return arrays if sample is None else {**arrays, "sample": sample}

    @cached_property
    def shares(self) -> dict[str, Array] | None:
        """The noisy shares (T, k) of every silo in clear, as the server sees them; None where it sees none.

        That is so where every answer has one array of real numbers as long as a sum.
        """
        found: dict[str, list[Array]] = {name: [] for name in self.spec.names}
        for asked in self.updates:
            for name, exchange in asked.items():
                answers = {} if exchange.answer is None else exchange.answer.arrays
                alike = [
                    a for a in answers.values() if a.shape == (self.spec.sum_size,) and a.dtype.kind == "f"
                ]
                if len(alike) != 1:
                    return None
                found[name].append(np.asarray(alike[0], np.float64))
        return {name: np.array(rounds) for name, rounds in found.items()}

    def find_own_vectors(self, silo: str) -> tuple[list[Array], ...]:
        """Return, for each round, all vectors as long as a sum that a silo has about it: its answer, what it stored.

        Args:
            silo: The name of the silo.
        """
        store = self._silo_store(silo)
        found = []
        for number, asked in enumerate(self.updates):
            answer = asked[silo].answer if silo in asked else None
            messages = [] if answer is None else [answer]
            for key, value in store.seen.items():
                if f"/round/{number}/" in f"/{key}" and "answer" not in key:
                    messages += _decode(value)
            arrays = [array for message in messages for array in message.arrays.values()]
            alike = [a for a in arrays if a.shape == (self.spec.sum_size,) and a.dtype.kind in "fi"]
            found.append([np.asarray(array, np.float64) for array in alike])
        return tuple(found)

    def server_sample(self, number: int) -> NDArray[np.bool_] | None:
        """Return who is in the sample of a round, (U,), as the server stored it; None where it draws none."""
        stored = self._server_store().round(number).get("sample")
        if stored is None:
            return None
        return next(iter(Message.decode(stored).arrays.values())).astype(bool)

    def silo_sample(self, silo: str, rate: float) -> NDArray[np.bool_]:
        """Return who is in the samples, (T, U), as a silo computes it that knows the secret of its session.

        Args:
            silo: The name of the silo.
            rate: The sampling probability q that was charged.
        """
        spec = self.spec
        if spec.seed is not None:
            secret, of_run = Randomness.of_run(spec.seed).derive_key("who is sampled"), ""
        else:
            stores = {name: self._silo_store(name) for name in spec.names}
            identities = {name: Identity(name, store.seen["identity"]) for name, store in stores.items()}
            pins = {name: identity.public for name, identity in identities.items()}
            own = RoundStore(stores[silo].reopen(), f"{spec.run}/")
            counts = np.zeros(spec.population.users, np.int64)
            context = SiloContext(identities[silo], pins, own, counts, lambda: "")
            secret, of_run = spec.aggregator.silo(spec, context).group_secret(spec.run), spec.run
        persons = map(str, range(spec.population.users))
        coins = PersonCoins(secret, of_run, spec.data.identity_digest, persons)
        rule = spec.method.participation_rule
        return np.array([rule.draw(coins, number, rate) for number in range(len(self.updates))])

    @cached_property
    def joined(self) -> NDArray[np.bool_]:
        """Which silos took part in which rounds, (T, S), as everyone sees it."""
        everyone = np.ones(len(self.spec.names), bool)
        requests = (next(iter(asked.values())).request for asked in self.updates)
        return np.array([request.arrays.get("clients", everyone) for request in requests])

    def _server_store(self) -> RoundStore:
        store = self.observed.directory.make_store("server").reopen()
        return RoundStore(store, f"{self.series}/" if self.series else "")

    def _silo_store(self, silo: str) -> _RememberingStore:
        return self.observed.directory.make_store("silos", f"{self.spec.names.index(silo):03}")


def run_canaries(spec: RunSpec, parties: Parties) -> CanaryRun:
    """Run a prepared run in memory, and remember it.

    Args:
        spec: The specification, from `prepare_run`, of a federation of canaries.
        parties: Its silos, for example a `Simulation`.
    """
    observed = Observed(parties)
    # Nothing is measured, so evaluations are put off beyond the end.
    result = run(spec, observed, evaluate_every=spec.rounds + 1)
    last = next((kept.request.run for kept in observed.kept), "")
    return CanaryRun(replace(spec, run=split_name(last)[0]), result, observed)


@dataclass(frozen=True)
class _Replay:
    """The server of a run that is over, as its aggregator sees it: every question gets the answer that it got."""

    store: RoundStore
    kept: list[Exchange]

    @cached_property
    def _answers(self) -> dict[tuple[str, str], Message]:
        return {(kept.silo, kept.request.key): kept.answer for kept in self.kept if kept.answer is not None}

    def ask(self, requests: dict[str, Message]) -> tuple[dict[str, Message], dict[str, DeliveryFailure]]:
        return self.ask_all(requests), {}

    def ask_all(self, requests: dict[str, Message]) -> dict[str, Message]:
        return {name: self._answers[name, request.key] for name, request in requests.items()}

    def charged(self, round_: int, release: int) -> bool:
        return True

    def affords(self, round_: int, release: int, survivors: int) -> bool:
        return True

    def charge(self, round_: int, release: int, survivors: int) -> bool:
        return True


def _decode(value: bytes) -> list[Message]:
    """Return the message that a stored value holds; nothing where it holds none."""
    try:
        return [Message.decode(value)]
    except SilodpError:
        return []


MakeParties = Callable[..., Parties]
"""From a federation and a task to the silos of a canary run; `Simulation` by default."""
