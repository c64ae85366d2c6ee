"""A simulation: all parties of a run in one process, which reads all tables; they exchange signed messages only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.keys import Identity
from silodp.data.federation import Federation, count_persons_by_silos
from silodp.mechanisms.noise import Randomness
from silodp.runtime.run_directory import MetricsRow, RunDirectory
from silodp.runtime.silo import Silo
from silodp.training.task import Task
from silodp.wire.store import RoundStore, Store
from silodp.wire.transport import Channel, InProcess, SignedChannel, SignedParty


@dataclass(frozen=True)
class Connection:
    """What the server of a run works with.

    Attributes:
        channel: carries messages to the silos and back, signed.
        store: the server's durable memory.
        randomness: the server's streams.
        nonfinite_counts: of a round (from 0), the updates that each silo left out as not finite; {} where silos keep
            that to themselves, as they do between organizations.
    """

    channel: Channel
    store: RoundStore
    randomness: Randomness
    nonfinite_counts: Callable[[int], Mapping[str, int]]


class Parties(Protocol):
    """The silos of a run as its server reaches them, and what measures the model."""

    @property
    def task(self) -> Task:
        """The model, its loss and its metrics."""

    def open(self, spec: RunSpec, directory: RunDirectory) -> AbstractContextManager[Connection]:
        """Connect to the silos for one execution of the run, `spec.run`."""

    def evaluate(self, params: Tensor) -> MetricsRow:
        """Return {"loss", "metrics"} of the model (d,) on held-out records; None and {} where there are none."""

    def describe(self) -> MetricsRow:
        """Return what the row of round 0 says of the data; private."""


@dataclass(frozen=True)
class Simulation:
    """All silos in this process; the parties of `silodp.train`.

    Attributes:
        federation: every silo's table, and the held-out records.
        task: the model, its loss and its metrics.
    """

    federation: Federation
    task: Task

    @contextmanager
    def open(self, spec: RunSpec, directory: RunDirectory) -> Iterator[Connection]:
        """Make silos, keys and stores as they are when the run begins, or goes on from what its stores hold."""
        randomness = Randomness.secret() if spec.seed is None else Randomness.from_seed(spec.seed)
        stores = {name: directory.store("silos", f"{s:03}") for s, name in enumerate(spec.names)}
        # In one process the keys are made here; between organizations each makes its own and pins the others'.
        identities = {name: _identity(name, store) for name, store in stores.items()}
        pins = {name: identity.public for name, identity in identities.items()}
        silos = [
            Silo(
                data,
                self.task,
                spec,
                randomness,
                stores[data.name],
                identities[data.name],
                pins,
                directory.silo_ledger(spec, place),
                spec.silo_limits,
            )
            for place, data in enumerate(self.federation.silos)
        ]
        store = directory.store("server")
        coordinator = _identity("server", store)
        parties = {silo.name: SignedParty(silo, identities[silo.name], coordinator.public) for silo in silos}
        most_bytes = max(silo.most_bytes for silo in silos)
        channel = SignedChannel(InProcess(parties), coordinator, pins, most_bytes)

        def count_nonfinite(round_: int) -> Mapping[str, int]:
            return {silo.name: count for silo in silos if (count := silo.nonfinite_counts.get(round_, 0))}

        with ExitStack() as ledgers:
            for silo in silos:
                ledgers.enter_context(silo.gate.ledger)
            yield Connection(channel, RoundStore(store), randomness, count_nonfinite)

    def evaluate(self, params: Tensor) -> MetricsRow:
        """Measure the model on the held-out records."""
        test = self.federation.test
        if test is None or len(test.x) == 0:
            return {"loss": None, "metrics": {}}
        values = self.task.evaluate(params, test.x, test.y)
        return {"loss": values.pop("loss", None), "metrics": values}

    def describe(self) -> MetricsRow:
        """Return how many persons were found in 0, 1, 2… silos."""
        counts = count_persons_by_silos(self.federation)
        return {"persons_by_silos": {str(silos): count for silos, count in counts.items()}}


def _identity(name: str, store: Store) -> Identity:
    """A party's long-term key, made when it is first needed."""
    seed = store.get("identity")
    if seed is None:
        identity = Identity.fresh(name)
        store.put("identity", identity.seed)
        return identity
    return Identity(name, seed)
