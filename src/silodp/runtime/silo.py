"""A silo: a name, its records, a durable store, and one handler per kind of request."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from silodp.accounting.accountant import default_accountant
from silodp.accounting.guarantee import Adversary
from silodp.accounting.ledger import Ledger
from silodp.aggregators.base import SiloContext, state_of
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.keys import Identity
from silodp.crypto.streams import KEY_BYTES, derive_key
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import LocallyNoisedUpdate, Update
from silodp.mechanisms.noise import Randomness
from silodp.methods.base import LocalContext
from silodp.runtime.gate import Gate
from silodp.training.task import Task
from silodp.wire.messages import Message
from silodp.wire.store import RoundStore, Store

_ROUND_KEY = "round key"


class Silo:
    """One organization's side of a run. Records never leave it; what leaves is decided by its gate and charged there.

    `nonfinite_counts` keeps, per round, what concerns this silo alone (how many updates were not finite): it depends on
    private records, is not covered by any ε, and is never part of an answer.

    Args:
        data: the silo's name and records.
        task: model, loss and metrics.
        setting: the run's specification, as all parties know it.
        randomness: secret, or of a seed; see `_round_randomness`.
        store: the silo's durable memory.
        identity: its long-term key; None: a fresh one.
        pins: the long-term public keys of all silos.
        ledger: the silo's own; None: one in memory, for runs that keep nothing on disk.
        limits: the ε that this silo lets the run spend against each adversary; none where absent.
    """

    def __init__(
        self,
        data: SiloData,
        task: Task,
        setting: RunSpec,
        randomness: Randomness,
        store: Store,
        identity: Identity | None = None,
        pins: Mapping[str, bytes] | None = None,
        ledger: Ledger | None = None,
        limits: Mapping[Adversary, float] | None = None,
    ) -> None:
        self.name = data.name
        self.nonfinite_counts: dict[int, int] = {}
        self._task, self._method, self._population = task, setting.method, setting.population
        self._randomness = randomness.child("silo", data.name)
        self._store = RoundStore(store, f"{setting.run}/")
        self._run, self._names, self._sum_size = setting.run, setting.names, setting.sum_size
        self._user_index, self._budget = data.user, data.budget
        self._records = data.digest()  # of private rows: it stays in this silo's store
        self._x, self._y = task.tensors(data.x, data.y)
        self._user = torch.from_numpy(data.user)
        counts = np.bincount(data.user, minlength=self._population.users).astype(np.int64)
        self._counts_here = counts
        ledger = make_ledger(setting) if ledger is None else ledger
        self.gate = Gate(data.name, setting, self._store, counts, ledger, limits)
        own = SiloContext(
            identity or Identity.fresh(data.name),
            pins or {},
            self._store,
            counts,
            lambda: self.gate.state.update,
        )
        self._side = setting.aggregator.silo(setting, own)
        self._handlers: dict[str, Callable[[Message], Message]] = {
            "counts": self._counts,
            "setup": self._setup,
            "update": self._update,
            **self._side.handlers,
        }

    def __repr__(self) -> str:
        return f"Silo({self.name!r})"  # nothing of its records or keys

    @property
    def most_bytes(self) -> int:
        """Bytes that the longest request of the run may have."""
        return self.gate.most_bytes

    def answer(self, request: Message) -> Message:
        """Answer, having stored the answer first; a repeated request gets the stored bytes.

        Raises:
            SilodpError: the gate refuses the request, or it differs from the one that was answered under its key.
        """
        self.gate.check_message(request)
        digest = request.digest().encode()
        answers = self._store.run if self.gate.is_setup(request) else self._store.round(request.round)
        key = f"answer/{request.kind}/{request.round}/{request.attempt}"
        stored = answers.get(key)
        if stored is not None:
            if stored[: len(digest)] != digest:
                raise SilodpError(
                    f"silo '{self.name}' has answered another request under {request.key}: it answers each key once.",
                    code="gate.answered",
                )
            if not self.gate.may_repeat(request):  # its process died before it could be sent
                self.gate.commit(self.gate.next_state(request), request)
            return Message.decode(stored[len(digest) :])
        state = self.gate.next_state(request)
        self.gate.charge(request)
        answer = self._handlers[request.kind](request)
        answers.put(key, digest + answer.encode())
        self.gate.commit(state, request)
        if request.kind == "update":
            # The gate refuses earlier rounds from now on. With them go the seeds of their attempts, which cannot come
            # again: a seed is a hash of its round (`crypto.lattice.scheme.derive_seed`).
            self._forget_round_keys(request.round)
            self._store.drop_rounds_before(request.round)
        return answer

    def book(self) -> dict[str, np.ndarray]:
        """The records' accounts in the run, for this silo's people alone: who asked for how much and has spent what.

        Entries (n,) as the method names them ("asked", "spent", …), 0 for records that take no part; none where
        records have no accounts. What is spent may depend on records, and no ε covers that: never hand it on.
        """
        admitted, _ = self._admitted()
        uses = self._remembered()
        stored = self._store.run.get(_memory_key(*uses[-1])) if uses else None
        memory = None if stored is None else Message.decode(stored).arrays["memory"]
        own = None if self._budget is None else self._budget[admitted]
        accounts = {}
        for name, values in self._method.record_accounts(own, self.gate.state.round + 1, memory).items():
            accounts[name] = np.zeros(len(admitted), values.dtype)
            accounts[name][admitted] = values
        return accounts

    def _counts(self, request: Message) -> Message:
        """How many records each person has here, in clear: asked for only by methods that say so in their guarantee."""
        return request.answer(counts=self._counts_here)

    def _setup(self, request: Message) -> Message:
        """Keep the allotment, and draw once which records take part in the run."""
        allotment = request.arrays.get("allotment")
        admitted = self._method.select_records(
            self._user_index, allotment, self._run_randomness().stream("admit"), self._budget
        )
        kept = {"admitted": admitted, **request.arrays}
        fields = {"records": self._records}
        self._store.run.put("setup", Message("setup", request.run, fields=fields, arrays=kept).encode())
        return request.answer()

    def _admitted(self) -> tuple[np.ndarray, np.ndarray | None]:
        stored = self._store.run.get("setup")
        if stored is None:
            raise SilodpError(
                f"silo '{self.name}' knows nothing of run {self._run}: it was never set up, or its store is lost; "
                "begin a new run.",
                code="session.missing",
            )
        kept = Message.decode(stored)
        if kept.fields["records"] != self._records:
            raise SilodpError(
                f"silo '{self.name}' has other records than this run began with: restore them, or begin a new run.",
                code="data.changed",
            )
        return kept.arrays["admitted"], kept.arrays.get("allotment")

    def _update(self, request: Message) -> Message:
        """This silo's part of the round, as the aggregator has it sent."""
        answer, refused = self._side.update(request, lambda release: self._work(request, release))
        self.nonfinite_counts[request.round] = refused
        return answer

    def _work(self, request: Message, release: int) -> tuple[Update, Tensor, np.random.Generator]:
        """Train and clip for one release of a round: the update, weights, and the stream of the noise share."""
        weights, update, randomness = self._trained(request, release)
        if isinstance(update, LocallyNoisedUpdate) and update.memory is not None:
            self._remember(request, release, update.memory)
        return update, weights, randomness.stream("share noise")

    def _trained(self, request: Message, release: int) -> tuple[Tensor, Update, Randomness]:
        admitted, allotment = self._admitted()
        records = slice(None) if admitted.all() else torch.from_numpy(np.flatnonzero(admitted))
        weights = self._sampled(allotment, request.arrays.get("sample"))
        randomness = self._round_randomness(request, release)
        clients = request.arrays.get("clients")
        place = self._names.index(self.name)
        if clients is not None and not clients[place]:
            return weights, LocallyNoisedUpdate(torch.zeros(self._sum_size, dtype=torch.float64)), randomness
        update = self._method.local_update(
            LocalContext(
                task=self._task,
                params=torch.from_numpy(request.arrays["params"]).to(self._task.device),
                x=self._x[records],
                y=self._y[records],
                user=self._user[records],
                weights=weights,
                population=self._population,
                randomness=randomness,
                silo=place,
                budget=None if self._budget is None else torch.from_numpy(self._budget)[records],
                memory=self._memory(request, release),
                round=request.round,
                state=state_of(request),
            )
        )
        return weights, update, randomness

    def _round_randomness(self, request: Message, release: int) -> Randomness:
        """The streams of one release.

        Without a seed they follow from a key in the silo's store and from everything that was asked, so that a store
        that was set back repeats the noise of a repeated request, and draws other noise for another one.
        """
        if self._randomness.reproducible:
            return self._randomness.child("round", request.round, release)
        key = self._round_key(request.round)
        return Randomness(key, (*self._randomness.prefix, "round", request.round, release, request.digest()))

    def _run_randomness(self) -> Randomness:
        """The streams of what is drawn once in a run."""
        if self._randomness.reproducible:
            return self._randomness
        return Randomness(derive_key(self._round_key(0), "once in a run"), self._randomness.prefix)

    def _round_key(self, round_: int) -> bytes:
        """The secret key of a round's streams; every round's follows from the one before."""
        stored = self._store.run.get(_ROUND_KEY)
        if stored is None:
            stored = Message("round key", self._run, blobs={"key": secrets.token_bytes(KEY_BYTES)}).encode()
            self._store.run.put(_ROUND_KEY, stored)
        kept = Message.decode(stored)
        key = kept.blobs["key"]
        for _ in range(round_ - kept.round):
            key = derive_key(key, "next round")
        return key

    def _forget_round_keys(self, round_: int) -> None:
        """Keep this round's key alone, so that who reads the store later cannot compute the noise of earlier rounds."""
        stored = self._store.run.get(_ROUND_KEY)
        if stored is not None and Message.decode(stored).round < round_:
            kept = Message("round key", self._run, round_, blobs={"key": self._round_key(round_)})
            self._store.run.put(_ROUND_KEY, kept.encode())

    def _memory(self, request: Message, release: int) -> np.ndarray | None:
        """What was kept last before this release; the same however often the release is computed."""
        before = [use for use in self._remembered() if use < (request.round, release)]
        if not before:
            return None
        stored = self._store.run.get(_memory_key(*before[-1])) or b""
        return Message.decode(stored).arrays["memory"]

    def _remember(self, request: Message, release: int, memory: np.ndarray) -> None:
        """Keep it durably; of what came before only the last is needed again, to repeat this release."""
        before = [use for use in self._remembered() if use < (request.round, release)]
        kept = Message("memory", request.run, request.round, arrays={"memory": memory}).encode()
        self._store.run.put(_memory_key(request.round, release), kept)
        for use in before[:-1]:
            self._store.run.drop(_memory_key(*use))

    def _remembered(self) -> list[tuple[int, int]]:
        """(round, release) of all that is kept, in order."""
        keys = [key.split("/") for key in self._store.run.names() if key.startswith("memory/")]
        return sorted((int(round_), int(release)) for _, round_, release in keys)

    def _sampled(self, allotment: np.ndarray | None, sample: np.ndarray | None) -> Tensor:
        weights = np.ones(self._population.users) if allotment is None else allotment.astype(np.float64)
        return torch.from_numpy(weights if sample is None else weights * sample)


def _memory_key(round_: int, release: int) -> str:
    return f"memory/{round_}/{release}"


def make_ledger(spec: RunSpec, path: Path | None = None) -> Ledger:
    """A silo's own ledger of a run, at the part of δ that noise is accounted at; in memory without a path."""
    accountant = default_accountant(spec.round_events().values())
    return Ledger(path, spec.noise_delta, accountant, run=spec.run)
