"""A silo: a name, its records, a durable store, and one handler per kind of request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from silodp.crypto.keys import Identity
from silodp.data.silo import SiloData
from silodp.errors import SilodpError
from silodp.federation.aggregation import Aggregator, Own, Setting
from silodp.federation.messages import Message
from silodp.federation.store import Store
from silodp.mechanisms.clipping import Finished, Update
from silodp.mechanisms.noise import Randomness
from silodp.methods.method import SiloWork
from silodp.training.task import Task

_OF_A_ROUND = ("sample", "chosen", "update", "open")
_KEPT_FOR_A_ROUND = (*_OF_A_ROUND, "noisy", "masked", "opened", "choice", "drawn", "seeds")
_FORGOTTEN = re.compile(rf"(?:once/[^/]+/)?(?:{'|'.join(_KEPT_FOR_A_ROUND)})/(\d+)(?:/[^/]+)?")


class Silo:
    """One organization's side of a run. Records never leave it; what leaves is counted in `answer`.

    `journal` keeps, per round, what concerns this silo alone (how many updates were not finite): it depends on private
    records, is not covered by any ε, and is never part of an answer.
    """

    def __init__(
        self,
        data: SiloData,
        task: Task,
        aggregator: Aggregator,
        setting: Setting,
        randomness: Randomness,
        store: Store,
        identity: Identity | None = None,
        pins: Mapping[str, bytes] | None = None,
    ) -> None:
        """Its records; what everyone knows; its randomness and store; its long-term key; all silos' pinned ones."""
        self.name = data.name
        self.journal: dict[int, int] = {}
        self._task, self._method, self._population = task, setting.method, setting.population
        self._randomness = randomness.child("silo", data.name)
        self._store = store
        self._names = setting.names
        self._user_index, self._budget = data.user, data.budget
        self._records = data.digest()  # of private rows: it stays in this silo's store
        self._x, self._y = task.tensors(data.x, data.y)
        self._user = torch.from_numpy(data.user)
        own = Own(identity or Identity.fresh(data.name), pins or {}, store, self._own_counts())
        self._side = aggregator.silo(setting, own)
        self._handlers: dict[str, Callable[[Message], Message]] = {
            "counts": self._counts,
            "setup": self._setup,
            "update": self._update,
            **self._side.handlers,
        }

    def answer(self, request: Message) -> Message:
        """Answer, having stored the answer first; a repeated request gets the stored bytes.

        Raises:
            SilodpError: for an unknown kind, a different request under an answered key, or a round long past.
        """
        handler = self._handlers.get(request.kind)
        if handler is None:
            raise SilodpError(f"silo '{self.name}' knows no request of kind '{request.kind}'.")
        digest = request.digest().encode()
        stored = self._store.get(request.key)
        if stored is not None:
            if stored[: len(digest)] != digest:
                raise SilodpError(
                    f"silo '{self.name}' has answered another request under {request.key}: it answers each key once."
                )
            return Message.decode(stored[len(digest) :])
        self._refuse_the_past(request)
        answer = handler(request)
        self._store.put(request.key, digest + answer.encode())
        self._forget_before(request)
        return answer

    def _refuse_the_past(self, request: Message) -> None:
        # Old answers are dropped, so a request for an old round would draw fresh noise: a second, uncharged release.
        if request.kind in _OF_A_ROUND and request.round < self._last_round(request.run):
            raise SilodpError(
                f"silo '{self.name}' has answered round {self._last_round(request.run) + 1} and will not repeat round "
                f"{request.round + 1}: the server's checkpoint is older than its silos."
            )

    def _last_round(self, run: str) -> int:
        prefix = f"{run}/update/"
        return max(
            (int(key[len(prefix) :].split("/")[0]) for key in self._store.names() if key.startswith(prefix)),
            default=-1,
        )

    def _forget_before(self, request: Message) -> None:
        """Drop what was kept for the rounds before an update, whose stored answer is the mark that refuses them.

        With it go marks of what was answered once in a round, and the seeds of its attempts, which cannot come again:
        a seed is a hash of its round (`silodp.crypto.lattice.seed_of`). Whatever holds for a session, or for the run,
        stays: that transfers have ended, what was answered once in all, what records have spent.
        """
        if request.kind != "update":
            return
        prefix = f"{request.run}/"
        for key in self._store.names():
            kept = _FORGOTTEN.fullmatch(key[len(prefix) :]) if key.startswith(prefix) else None
            if kept is not None and int(kept[1]) < request.round:
                self._store.drop(key)

    def book(self, run: str) -> dict[str, np.ndarray]:
        """The records' own accounts in a run, for this silo's people alone: who asked for how much and has spent what.

        Entries (n,) as the method names them ("asked", "spent", …), 0 for records that take no part; none where
        records have no accounts. What is spent may depend on records, and no ε covers that: never hand it on.
        """
        admitted, _ = self._admitted(run)
        uses = self._remembered(run)
        stored = self._store.get(_memory_key(run, *uses[-1])) if uses else None
        memory = None if stored is None else Message.decode(stored).arrays["memory"]
        own = None if self._budget is None else self._budget[admitted]
        accounts = {}
        for name, values in self._method.book(own, self._last_round(run) + 1, memory).items():
            accounts[name] = np.zeros(len(admitted), values.dtype)
            accounts[name][admitted] = values
        return accounts

    def _counts(self, request: Message) -> Message:
        """How many records each person has here, in clear: asked for only by methods that say so in their guarantee."""
        return request.answer(counts=self._own_counts())

    def _own_counts(self) -> np.ndarray:
        return np.bincount(self._user_index, minlength=self._population.users).astype(np.int64)

    def _setup(self, request: Message) -> Message:
        """Keep the allotment, and draw once which records take part in the run."""
        if request.round or request.attempt:
            raise SilodpError(f"silo '{self.name}' is set up once in a run; begin a new run.")
        allotment = request.arrays.get("allotment")
        admitted = self._method.admit(
            self._user_index, allotment, self._randomness.stream("admit"), self._budget
        )
        kept = {"admitted": admitted, **request.arrays}
        fields = {"records": self._records}
        self._store.put(
            f"{request.run}/setup", Message("setup", request.run, fields=fields, arrays=kept).encode()
        )
        return request.answer()

    def _admitted(self, run: str) -> tuple[np.ndarray, np.ndarray | None]:
        stored = self._store.get(f"{run}/setup")
        if stored is None:
            raise SilodpError(
                f"silo '{self.name}' knows nothing of run {run}: it was never set up, or its store is lost; "
                "begin a new run."
            )
        kept = Message.decode(stored)
        if kept.fields["records"] != self._records:
            raise SilodpError(
                f"silo '{self.name}' has other records than this run began with: restore them, or begin a new run."
            )
        return kept.arrays["admitted"], kept.arrays.get("allotment")

    def _update(self, request: Message) -> Message:
        """This silo's part of the round, as the aggregator has it sent."""
        answer, refused = self._side.update(request, lambda release: self._work(request, release))
        self.journal[request.round] = refused
        return answer

    def _work(self, request: Message, release: int) -> tuple[Update, Tensor, np.random.Generator]:
        """Train and clip for one release of a round: the update, weights, and the stream of the noise share."""
        weights, update, randomness = self._trained(request, release)
        if isinstance(update, Finished) and update.memory is not None:
            self._remember(request, release, update.memory)
        return update, weights, randomness.stream("share noise")

    def _trained(self, request: Message, release: int) -> tuple[Tensor, Update, Randomness]:
        admitted, allotment = self._admitted(request.run)
        records = slice(None) if admitted.all() else torch.from_numpy(np.flatnonzero(admitted))
        weights = self._sampled(allotment, request.arrays.get("sample"))
        randomness = self._randomness.child("round", request.round, release)
        clients = request.arrays.get("clients")
        place = self._names.index(self.name)
        if clients is not None and not clients[place]:
            return weights, Finished(torch.zeros(self._task.size, dtype=torch.float64)), randomness
        update = self._method.silo_update(
            SiloWork(
                task=self._task,
                params=torch.from_numpy(request.arrays["params"]).to(self._task.device),
                x=self._x[records],
                y=self._y[records],
                user=self._user[records],
                allotment=weights,
                population=self._population,
                randomness=randomness,
                silo=place,
                budget=None if self._budget is None else torch.from_numpy(self._budget)[records],
                memory=self._memory(request, release),
                round=request.round,
            )
        )
        return weights, update, randomness

    def _memory(self, request: Message, release: int) -> np.ndarray | None:
        """What was kept last before this release; the same however often the release is computed."""
        before = [use for use in self._remembered(request.run) if use < (request.round, release)]
        if not before:
            return None
        stored = self._store.get(_memory_key(request.run, *before[-1])) or b""
        return Message.decode(stored).arrays["memory"]

    def _remember(self, request: Message, release: int, memory: np.ndarray) -> None:
        """Keep it durably; of what came before only the last is needed again, to repeat this release."""
        before = [use for use in self._remembered(request.run) if use < (request.round, release)]
        kept = Message("memory", request.run, request.round, arrays={"memory": memory}).encode()
        self._store.put(_memory_key(request.run, request.round, release), kept)
        for use in before[:-1]:
            self._store.drop(_memory_key(request.run, *use))

    def _remembered(self, run: str) -> list[tuple[int, int]]:
        """(round, release) of all that is kept, in order."""
        prefix = f"{run}/memory/"
        uses = [key[len(prefix) :].split("/") for key in self._store.names() if key.startswith(prefix)]
        return sorted((int(round_), int(release)) for round_, release in uses)

    def _sampled(self, allotment: np.ndarray | None, sample: np.ndarray | None) -> Tensor:
        weights = np.ones(self._population.users) if allotment is None else allotment.astype(np.float64)
        return torch.from_numpy(weights if sample is None else weights * sample)


def _memory_key(run: str, round_: int, release: int) -> str:
    return f"{run}/memory/{round_}/{release}"
