"""A silo in a run: its records, its durable store, and one handler for each kind of request."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from silodp.accounting.accountant import choose_accountant
from silodp.accounting.events import Event
from silodp.accounting.ledger import Ledger, SiloHeader
from silodp.accounting.series_ledger import LedgerView
from silodp.accounting.views import Adversary
from silodp.aggregators.base import SiloContext, state_of
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.keys import Identity
from silodp.crypto.sampling import PersonCoins
from silodp.crypto.streams import KEY_BYTES, derive_key
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import LocallyNoisedUpdate, Update
from silodp.mechanisms.noise import Randomness
from silodp.methods.roles import compute_user_weights
from silodp.runtime.gate import Gate
from silodp.runtime.local_work import Block, LocalRecords, LocalWork, Release, Run
from silodp.text import name_class
from silodp.training.task import Task
from silodp.wire.messages import Message
from silodp.wire.store import RoundStore, Store, get_or_make

T = TypeVar("T")

_ROUND_KEY = "round key"


class Silo:
    """One organization in a run. Its records never leave it; its gate checks every request and charges every release.

    Args:
        data: Name and records of the silo.
        task: Model, loss and metrics.
        spec: Specification of the run, which is the same for all parties.
        randomness: Source of the noise, secret or from a seed; see `_derive_round_randomness`.
        store: Durable store of the silo.
        identity: Long-term key of the silo; None: a new one.
        pins: Long-term public keys of all silos by name, 32 bytes each.
        ledger: Ledger of the silo; None: one in memory, for runs that keep nothing on disk.
        find_exceeded: See `Gate`.
        run: Computes with the records; None: this process does.

    Attributes:
        name: Name of the silo.
        nonfinite_counts: By round, the number of rows that were not finite. It depends on private records, no ε
            covers it, and no answer has it.
        gate: Checks and charges requests.
    """

    def __init__(
        self,
        data: SiloData,
        task: Task,
        spec: RunSpec,
        randomness: Randomness,
        store: Store,
        identity: Identity | None = None,
        pins: Mapping[str, bytes] | None = None,
        ledger: LedgerView | None = None,
        find_exceeded: Callable[[Mapping[Adversary, Event]], str | None] | None = None,
        run: Run | None = None,
    ) -> None:
        self.name = data.name
        self.nonfinite_counts: dict[int, int] = {}
        self._method, self._population = spec.method, spec.population
        self._randomness = randomness.child("silo", data.name)
        self._common_randomness, self._identifiers = randomness, data.identifiers
        # A deployed silo has one store for all its runs.
        self._store = RoundStore(store, f"{spec.run}/")
        self._spec, self._place = spec, spec.names.index(data.name)
        self._budget = data.budget
        self._records = data.digest()  # depends on private rows: never leaves this silo's store
        self._user = data.user
        self._run = LocalRecords(data, task, spec).run if run is None else run
        self._persons = np.unique(data.user)
        self._tossed: tuple[bytes, PersonCoins] | None = None  # the secret of a session, and its coins
        counts = np.bincount(data.user, minlength=self._population.users).astype(np.int64)
        self._counts_here = counts = self._method.count_for_weights(counts)
        ledger = make_ledger(spec) if ledger is None else ledger
        self.gate = Gate(data.name, spec, self._store, counts, ledger, find_exceeded)
        context = SiloContext(
            identity or Identity.fresh(data.name),
            pins or {},
            self._store,
            counts,
            lambda: self.gate.state.update,
        )
        self._side = spec.aggregator.silo(spec, context)
        self._handlers: dict[str, Callable[[Message], Message]] = {
            "counts": self._counts,
            "setup": self._setup,
            "update": self._update,
            **self._side.handlers,
        }

    def __repr__(self) -> str:
        return f"Silo({self.name!r})"  # nothing of its records or keys

    @property
    def run(self) -> str:
        """Id of the run."""
        return self._spec.run

    @property
    def max_bytes(self) -> int:
        """Bytes of the longest request of the run, when encoded."""
        return self.gate.script.max_bytes

    def answer(self, request: Message) -> Message:
        """Answer a request; the answer is stored and listed before it is returned, and sent again if asked again.

        Raises:
            SilodpError: The gate refuses the request, or another request with the same kind, round and attempt was
                answered before (code gate.answered).
        """
        self.gate.check_message(request)
        answer = self.gate.find_answer(request)
        if answer is not None:
            return answer
        # In this order a crash can leave a charge without an answer, and never an answer without a charge.
        state = self.gate.next_state(request)
        self.gate.charge(request)
        answer = self._handlers[request.kind](request)
        self.gate.commit(state, request, answer)
        if request.kind == "update":
            # The gate refuses earlier rounds from now on. The seeds of their attempts, dropped with them, cannot come
            # again: a seed is a hash of its round (`crypto.lattice.scheme.derive_seed`).
            self._forget_round_keys(request.round)
            self._store.drop_rounds_before(request.round)
        return answer

    def record_accounts(self) -> dict[str, np.ndarray]:
        """Return the budget of each record and what it has spent in the run; only for the people of this silo.

        What a record has spent may depend on private data, and no ε covers that: it must not leave the silo.

        Returns:
            Arrays (n,) by the names that the method gives them ("asked", "spent", and others), with 0 for records that
            take no part; {} if the method has no accounts of records.
        """
        admitted, _ = self._load_selection()
        own = None if self._budget is None else self._budget[admitted]
        found = self._method.budgets.record_accounts(own, self.gate.state.round + 1, self._load_memory())
        accounts = {}
        for name, values in found.items():
            accounts[name] = np.zeros(len(admitted), values.dtype)
            accounts[name][admitted] = values
        return accounts

    def _counts(self, request: Message) -> Message:
        """Answer "counts" with the counts (U,) that weights are computed from, in clear; the guarantee says so."""
        return request.answer(counts=self._counts_here)

    def _setup(self, request: Message) -> Message:
        """Answer "setup": store this silo's weights, and draw once which records take part in the run."""
        # Stored: after another draw more records of a person would have taken part in the run than ε covers.
        stream = self._derive_run_randomness().stream("admit")
        admitted = self._method.select_records(
            self._user, self._place, self._population, stream, self._budget
        )
        kept = {"admitted": admitted, **request.arrays}
        fields = {"records": self._records}
        self._store.run.put("setup", Message("setup", request.run, fields=fields, arrays=kept).encode())
        return request.answer()

    def _load_selection(self) -> tuple[np.ndarray, np.ndarray]:
        """Return which records take part (n,) bool, as the set-up stored it, and the weights (U,)."""
        stored = self._store.run.get("setup")
        if stored is None:
            raise SilodpError(
                f"silo '{self.name}' knows nothing of run {self.run}: it was never set up, or its store is lost; "
                "begin a new run.",
                code="session.missing",
            )
        kept = Message.decode(stored)
        if kept.fields["records"] != self._records:
            raise SilodpError(
                f"silo '{self.name}' has other records than this run began with: restore them, or begin a new run.",
                code="data.changed",
            )
        weights = kept.arrays.get("weights")
        if weights is None and self._spec.aggregator.weights_privately:
            weights = np.ones(self._population.users)  # the weights are multiplied under encryption
        elif weights is None:
            weights = compute_user_weights(self._method, None, self._population)[self._place]
        return kept.arrays["admitted"], weights

    def _update(self, request: Message) -> Message:
        """Answer "update" with this silo's share, as its side of the aggregator hides it."""
        answer, refused = self._side.update(request, partial(self._prepare_release, request))
        self.nonfinite_counts[request.round] = refused
        return answer

    def _prepare_release(self, request: Message, release: int) -> LocalWork:
        """Return what is to be computed for one release."""
        admitted, all_weights = self._load_selection()
        randomness = self._derive_round_randomness(request, release)
        clients, run = request.arrays.get("clients"), self._run
        if clients is not None and not clients[self._place]:  # this silo was not sampled (`sample_silos`)
            run = partial(_send_zeros, self._spec.sum_size)
        work = Release(
            params=request.arrays["params"],
            admitted=admitted,
            weights=np.where(self._draw_sample(request.round), all_weights, 0.0),
            randomness=randomness,
            round=request.round,
            state=state_of(request),
            memory=self._load_memory((request.round, release)),
        )
        noise = randomness.stream("share noise")
        return LocalWork(work, self._spec, noise, partial(self._store_memory, request, release), run)

    def _derive_round_randomness(self, request: Message, release: int) -> Randomness:
        """Return the random streams of one release.

        Without a seed they are derived from a key in the silo's store and from the whole request. So a silo
        whose store was restored from an old copy draws the same noise for the same request, and other noise for
        another.
        """
        if self._randomness.reproducible:
            return self._randomness.child("round", request.round, release)
        # The same noise on two different sums would cancel in their difference, and show records without noise.
        key = self._derive_round_key(request.round)
        return Randomness(key, (*self._randomness.prefix, "round", request.round, release, request.digest()))

    def _derive_run_randomness(self) -> Randomness:
        """Return the streams of what is drawn once in a run."""
        if self._randomness.reproducible:
            return self._randomness
        return Randomness(derive_key(self._derive_round_key(0), "once in a run"), self._randomness.prefix)

    def _derive_round_key(self, round_: int) -> bytes:
        """Return the secret key of a round's streams; every key follows from that of the round before.

        Source: Bellare and Yee 2003, Forward-security in private-key cryptography (a generator whose earlier outputs
        stay secret if its state becomes known).
        """
        stored = get_or_make(
            self._store.run,
            _ROUND_KEY,
            lambda: Message("round key", self.run, blobs={"key": secrets.token_bytes(KEY_BYTES)}).encode(),
        )
        kept = Message.decode(stored)
        # The stored key is that of the last round answered: there is no way back to the keys before it.
        key = kept.blobs["key"]
        for _ in range(round_ - kept.round):
            key = derive_key(key, "next round")
        return key

    def _forget_round_keys(self, round_: int) -> None:
        """Replace the key by this round's, so that whoever reads the store later cannot compute earlier noise."""
        stored = self._store.run.get(_ROUND_KEY)
        if stored is not None and Message.decode(stored).round < round_:
            kept = Message("round key", self.run, round_, blobs={"key": self._derive_round_key(round_)})
            self._store.run.put(_ROUND_KEY, kept.encode())

    def _load_memory(self, before: tuple[float, int] = (math.inf, 0)) -> np.ndarray | None:
        """Return what the method remembers of the releases before a (round, release); None where it kept nothing.

        A release that is computed again starts from the same memory.
        """
        keys = self._list_memories(before)
        return Message.decode(self._store.run.get(keys[-1]) or b"").arrays["memory"] if keys else None

    def _store_memory(self, request: Message, release: int, memory: np.ndarray) -> None:
        """Store what the method remembers durably, and delete earlier memories but the last.

        The last is kept because this release may have to be computed again.
        """
        earlier = self._list_memories((request.round, release))
        kept = Message("memory", request.run, request.round, arrays={"memory": memory}).encode()
        self._store.run.put(f"memory/{request.round}/{release}", kept)
        for key in earlier[:-1]:
            self._store.run.drop(key)

    def _list_memories(self, before: tuple[float, int]) -> list[str]:
        """Return the keys of the memories that were stored before a (round, release), in order."""
        keys = [key for key in self._store.run.names() if key.startswith("memory/")]
        places = {key: (int(key.split("/")[1]), int(key.split("/")[2])) for key in keys}
        return sorted((key for key in keys if places[key] < before), key=places.__getitem__)

    def _draw_sample(self, round_: int) -> np.ndarray:
        """Return which users take part in a round, (U,) bool; only users with records in this silo are drawn."""
        # Weights of users without records here do not matter: they have no rows.
        drawn = np.ones(self._population.users, dtype=bool)
        if self._method.samples_users and self._spec.aggregator.sampled_by == "silos":
            rates = self._method.sampling_rates(self._population)
            here = self._persons
            drawn[:] = False
            own = rates if isinstance(rates, float) else rates[here]
            rule = self._method.participation_rule
            sample = rule.draw(self._get_coins(), round_, own)
            if getattr(sample, "shape", None) != here.shape or sample.dtype != bool:
                # Without what it is: others may read why a silo refused, and not how many persons it has.
                raise SilodpError(
                    f"{name_class(type(rule))}.draw: return an array of one boolean for each person of `coins`.",
                    code="plugin.returned",
                    field="participation",
                )
            drawn[here] = sample
        return drawn

    def _get_coins(self) -> PersonCoins:
        """Return the coins of the persons with records in this silo; all silos toss the same for a person."""
        if self._common_randomness.reproducible:
            secret, run = self._common_randomness.derive_key("who is sampled"), ""
        else:
            secret, run = self._side.group_secret(self.run), self.run
        if self._tossed is None or self._tossed[0] != secret:  # a later session has another secret
            known = self._identifiers
            # By identifier where there is one: silos need not number their persons alike.
            texts = (str(person) if known is None else known[person] for person in self._persons.tolist())
            self._tossed = (secret, PersonCoins(secret, run, self._spec.data.identity_digest, texts))
        return self._tossed[1]


def _send_zeros(
    size: int, release: Release, blocks: Sequence[Block | None], function: Callable[[Update], T]
) -> Iterator[T]:
    """Yield what a function returns for an update (d,) of zeros; see `Run`."""
    yield function(LocallyNoisedUpdate(torch.zeros(size, dtype=torch.float64)))


def make_ledger(
    spec: RunSpec,
    path: Path | None = None,
    disclosure: Mapping[Adversary, float] | None = None,
    header: SiloHeader | None = None,
) -> Ledger:
    """Return a silo's ledger of a run, at the part of δ that noise is accounted at.

    Args:
        spec: The specification of the run.
        path: The file of the ledger; None: in memory.
        disclosure: Bound by adversary of what encryption discloses (`Aggregator.disclosure`), kept in a ledger that is
            composed with those of other runs.
        header: What the charges are about; None: the unit alone, in a simulation.
    """
    accountant, header = choose_accountant(spec.list_events()), header or SiloHeader(spec.method.unit)
    return Ledger(path, spec.noise_delta, accountant, run=spec.run, silo=header, disclosure=disclosure)
