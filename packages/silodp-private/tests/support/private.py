"""Private weighting for tests: settings small enough to be quick, and parties driven by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from silodp.accounting.ledger import Ledger
from silodp.aggregators._key_agreement import current_session
from silodp.aggregators.base import Aggregator
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto import sampling
from silodp.crypto.keys import Identity
from silodp.crypto.sampling import SamplingRatio
from silodp.data.federation import Federation, SiloData
from silodp.mechanisms.noise import Randomness
from silodp.methods import FederationSize
from silodp.runtime.callback import Result
from silodp.runtime.server import Server
from silodp.runtime.silo import Silo, make_ledger
from silodp.runtime.train import train
from silodp.wire.messages import Message
from silodp.wire.store import MemoryStore, RoundStore
from silodp.wire.transport import DeliveryFailure
from silodp_private.lattice import Lattice
from silodp_private.paillier.aggregator import Paillier
from silodp_private.select import Select
from support.clear import LatticeInClear, PaillierInClear, SelectInClear
from support.masked import AVG
from support.oracles import logistic_task, small_federation
from support.specs import make_spec
from support.stores import Backup, set_back
from support.wires import Direct

RECORDS = replace(AVG, weighting="records")
SAMPLED = replace(RECORDS, user_sampling=0.5)
PRIMARY = replace(AVG, weighting="primary_silo")
LATTICE = Lattice(count_cap=3, attempts=20)
SELECT = Select()
PAILLIER = Paillier(count_cap=3, key_bits=512, insecure_for_tests=True)


def run(
    aggregator, method=RECORDS, rounds=2, seed: int | None = 1, federation: Federation | None = None, **more
) -> Result:
    federation = federation or small_federation()
    task = logistic_task(federation.silos[0].x.shape[1])
    return train(federation, task, method, rounds=rounds, seed=seed, aggregator=aggregator, **more)


def in_clear(
    aggregator: Lattice | Paillier | Select, drawn: dict[int, np.ndarray] | None = None
) -> LatticeInClear | PaillierInClear | SelectInClear:
    """The twin with the same settings; `drawn`: what was sampled, by round, where nobody knew it."""
    twins = {"lattice": LatticeInClear, "paillier": PaillierInClear, "select": SelectInClear}
    made = twins[aggregator.name](
        **{field.name: getattr(aggregator, field.name) for field in fields(aggregator) if field.init}
    )
    object.__setattr__(made, "drawn", drawn)
    return made


@dataclass
class Hidden:
    """Both secrets behind every round's sample: i from the server, κ from the silos; as they were drawn."""

    law: SamplingRatio
    cells: dict[int, np.ndarray]
    shifts: dict[int, np.ndarray]

    @property
    def drawn(self) -> dict[int, np.ndarray]:
        """β (U,) by round, worked out in Python's integers."""
        return {
            round_: np.array(
                [
                    int((i - shift) % self.law.denominator < self.law.numerator)
                    for i, shift in zip(*both, strict=True)
                ]
            )
            for round_, both in ((r, (self.cells[r].tolist(), self.shifts[r].tolist())) for r in self.cells)
        }


@contextmanager
def hidden_samples(law: SamplingRatio) -> Iterator[Hidden]:
    """Looks over both parties' shoulders, one round after the other."""
    seen, places, shifts = (
        Hidden(law, {}, {}),
        sampling.draw_server_cells,
        sampling.derive_silo_cells,
    )

    def cells(users, law):
        seen.cells[len(seen.cells)] = places(users, law)
        return seen.cells[len(seen.cells) - 1]

    def shifted(secret, session, users, law, round):
        seen.shifts[round] = shifts(secret, session, users, law, round)
        return seen.shifts[round]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "draw_server_cells", cells)
        patch.setattr(sampling, "derive_silo_cells", shifted)
        yield seen


def spec(method=RECORDS, silos=3, noise_sized_for=None, size=5) -> RunSpec:
    """As every party of a small run knows it."""
    names = tuple(f"silo{s}" for s in range(silos))
    return make_spec("", names, method, FederationSize(silos, 12, noise_sized_for), size)


def counts_of(federation: Federation, cap: int | None = None) -> np.ndarray:
    """min(n[s,u], cap), (S, U)."""
    counts = np.stack([np.bincount(silo.user, minlength=federation.users) for silo in federation.silos])
    return counts if cap is None else np.minimum(counts, cap)


class Recording(Direct):
    """Keeps every message; `lost(name, request)` says who does not hear it."""

    def __init__(self, silos) -> None:
        super().__init__(silos)
        self.asked: list[tuple[str, Message]] = []
        self.answered: list[tuple[str, Message]] = []
        self.lost = lambda name, request: False

    def ask(self, requests, timeout=None):
        self.asked += requests.items()
        heard = {name: request for name, request in requests.items() if not self.lost(name, request)}
        answers, failures = super().ask(heard, timeout)
        self.answered += answers.items()
        return answers, failures | {
            name: DeliveryFailure("offline", "pulled out") for name in set(requests) - set(heard)
        }


class Parties:
    """A server and silos that are set up; what a dishonest server would send can be sent to `silos` by hand."""

    def __init__(
        self,
        aggregator: Aggregator,
        method=SAMPLED,
        silos: int = 3,
        federation: Federation | None = None,
        rounds: int = 1000,
        limits: dict[str, float] | None = None,
        wire: type[Recording] = Recording,
    ) -> None:
        federation = federation or small_federation(silos=silos)
        task = logistic_task(federation.silos[0].x.shape[1])
        self.names = tuple(silo.name for silo in federation.silos)
        population = FederationSize(
            len(self.names), federation.users, aggregator.min_silos_for(len(self.names))
        )
        spec = make_spec(
            "run", self.names, method, population, task.size, rounds=rounds, aggregator=aggregator
        )
        self.spec = replace(spec, silo_limits=limits or {})
        identities = {name: Identity.fresh(name) for name in self.names}
        pins = {name: identity.public for name, identity in identities.items()}
        self.stores = {name: MemoryStore() for name in self.names}
        self._started = lambda data, ledger: Silo(
            data, task, self.spec, Randomness.secret(), self.stores[data.name],
            identities[data.name], pins, ledger,
        )  # fmt: skip
        self._data = {data.name: data for data in federation.silos}
        self.silos = {name: self.started(name) for name in self.names}
        self.transport = wire(self.silos)
        ledger = Ledger(None, 1e-5, "rdp", run="run")
        self.server = Server(
            self.spec, self.transport, ledger, RoundStore(MemoryStore()), Randomness.secret()
        )
        self.server.set_up()
        self.params = task.initial(1)

    @staticmethod
    @contextmanager
    def watch(name: str, sent: list[Message], copies: list[Backup]) -> Iterator[None]:
        """Keeps, inside, what a silo of this name is sent, and a copy of it as it was before."""
        answer = Silo.answer

        def watched(self: Silo, request: Message) -> Message:
            if self.name == name:
                sent.append(request)
                copies.append(Backup.of(self._store.run._store, self.gate.ledger))
            return answer(self, request)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Silo, "answer", watched)
            yield

    def started(self, name: str, ledger: Ledger | None = None) -> Silo:
        """A silo in a new process, with the store and the ledger that it has."""
        known = getattr(self, "silos", {}).get(name)
        return self._started(self._data[name], ledger or (known and known.gate.ledger))

    def backup(self, name: str) -> Backup:
        """A copy of all that a silo keeps."""
        return Backup.of(self.stores[name], self.silos[name].gate.ledger)

    def restored(self, name: str, copy: Backup | None = None) -> Silo:
        """A silo in a new process, on old copies of its store and its ledger; without one, as it was at first."""
        self.stores[name] = MemoryStore()
        set_back(self.stores[name], {} if copy is None else copy.entries)
        return self.started(name, make_ledger(self.spec) if copy is None else deepcopy(copy.ledger))

    def store_of(self, name: str) -> RoundStore:
        """What a silo keeps of this run, as the silo itself names it."""
        return RoundStore(self.stores[name], f"{self.spec.run}/")

    def run_round(self, round_: int) -> torch.Tensor:
        total = self.server.run_round(round_, self.params)
        assert total is not None
        return total

    @property
    def session(self) -> str:
        return current_session(self.server.store.run).session

    def last(self, kind: str, name: str = "silo0", round_: int | None = None) -> Message:
        """The request of this kind that this silo was asked last (in this round)."""
        asked = (m for n, m in reversed(self.transport.asked) if (n, m.kind) == (name, kind))
        return next(m for m in asked if round_ in (None, m.round))

    def kept(self, what: str) -> Message:
        """From the server's store."""
        return Message.decode(self.server.store.run.get(what) or b"")


def with_empty_silo(federation: Federation) -> Federation:
    *others, last = federation.silos
    none = SiloData(last.name, last.x[:0], last.y[:0], last.user[:0])
    return replace(federation, silos=(*others, none))


HALF = replace(RECORDS, user_sampling=0.5)
HIDDEN = {
    "lattice": replace(LATTICE, hidden_sample=10),
    "paillier": replace(PAILLIER, hidden_sample=10),
}
BOTH = pytest.mark.parametrize("aggregator", HIDDEN.values(), ids=HIDDEN)
LAW = SamplingRatio(5, 10)


def holds(message: Message, vector: np.ndarray) -> bool:
    """Whether the vector is in any part of a message, as numbers of any width, as bits, or as text."""
    wanted = [vector.astype(kind).tobytes() for kind in ("<u1", "<u2", "<u4", "<u8", "<f4", "<f8")]
    wanted.append(np.packbits(vector > 0).tobytes())
    wanted.append(json.dumps(vector.astype(np.int64).tolist())[1:-1].encode())
    parts = [*(np.ascontiguousarray(a).tobytes() for a in message.arrays.values()), *message.blobs.values()]
    parts.append(json.dumps(message.fields).encode())
    return any(one in part for one in wanted for part in parts)
