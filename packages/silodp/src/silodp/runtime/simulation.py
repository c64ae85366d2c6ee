"""A simulation: all parties of a run in one process that reads all tables; they exchange only signed messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from silodp.aggregators.run_spec import RunSpec
from silodp.aggregators.series import NOTHING_MEASURED
from silodp.crypto.keys import Identity
from silodp.data.federation import Federation, count_persons_by_silos
from silodp.data.silo_data import SiloData
from silodp.data.tables.schema import Schema
from silodp.mechanisms.noise import Randomness
from silodp.runtime.executor import THIS_PROCESS, Executor
from silodp.runtime.run_directory import RunDirectory
from silodp.runtime.run_files import MetricsRow
from silodp.runtime.series import make_silo
from silodp.runtime.silo import make_ledger
from silodp.training.task import Task
from silodp.wire.store import RoundStore, Store, get_or_make
from silodp.wire.transport import Channel, InProcess, SignedChannel, SignedParty


@dataclass(frozen=True)
class Connection:
    """The connection of the server of a run.

    Attributes:
        channel: Carries signed messages to the silos and back.
        store: Durable memory of the server.
        randomness: Random streams of the server.
        nonfinite_counts: Returns the number of updates that each silo left out of a round (from 0) as not finite; {}
            where silos do not report it, as between organizations.
    """

    channel: Channel
    store: RoundStore
    randomness: Randomness
    nonfinite_counts: Callable[[int], Mapping[str, int]]


class Parties(Protocol):
    """The silos of a run as the server reaches them, and the evaluation of the model."""

    @property
    def task(self) -> Task:
        """The model, its loss and its metrics."""

    @property
    def is_simulation(self) -> bool:
        """Whether this process reads the records of all silos and acts as all parties."""

    @property
    def schema(self) -> Schema | None:
        """How the silos' tables are read, kept with the model; None where no schema says it."""

    def open(self, spec: RunSpec, directory: RunDirectory) -> AbstractContextManager[Connection]:
        """Connect to the silos for one execution of the run, `spec.run`."""

    def evaluate(self, params: Tensor) -> MetricsRow:
        """Return {"loss", "metrics"} of the model (d,) on held-out records; None and {} where there are none."""

    def describe(self) -> MetricsRow:
        """Return entries of round 0 about the data; private."""


@dataclass(frozen=True)
class Simulation:
    """All silos in this process; the parties of `silodp.train`.

    Attributes:
        federation: The tables of the silos, and the held-out records.
        task: The model, its loss and its metrics.
        executor: Where the silos' parts are computed.
    """

    federation: Federation
    task: Task
    executor: Executor = THIS_PROCESS
    is_simulation: ClassVar[bool] = True

    @property
    def schema(self) -> Schema | None:
        """The schema of the federation."""
        return self.federation.schema

    @contextmanager
    def open(self, spec: RunSpec, directory: RunDirectory) -> Iterator[Connection]:
        """Make silos, keys and stores; those of a resumed run continue from their stores."""
        randomness = Randomness.of_run(spec.seed)
        stores = {name: directory.make_store("silos", f"{s:03}") for s, name in enumerate(spec.names)}
        # Between organizations, each party makes its own key and pins the public keys of the others. In one process
        # nobody is kept out by keys, but silos and server run the same code as in a deployment.
        identities = {name: _load_identity(name, store) for name, store in stores.items()}
        pins = {name: identity.public for name, identity in identities.items()}
        # An error from here on closes every ledger that is open by then, and ends the workers.
        with ExitStack() as opened:
            executor = opened.enter_context(self.executor.open(self.federation, self.task, spec))
            silos = [
                make_silo(
                    data,
                    self.task,
                    spec,
                    randomness,
                    stores[data.name],
                    identities[data.name],
                    pins,
                    opened.enter_context(make_ledger(spec, directory.make_silo_file("silo_ledgers", place))),
                    metrics=directory.make_silo_file("silo_metrics", place),
                    run=executor.make_run(data.name),
                )
                for place, data in enumerate(self.federation.silos)
            ]
            # Only bytes pass between the parties, as over a network: a silo's records cannot be reached by reference.
            store = directory.make_store("server")
            coordinator = _load_identity("server", store)
            parties = {
                silo.name: SignedParty(silo, identities[silo.name], coordinator.public) for silo in silos
            }
            max_bytes = max(silo.max_bytes for silo in silos)
            channel = SignedChannel(InProcess(parties, executor.at_once), coordinator, pins, max_bytes)

            def count_nonfinite(round_: int) -> Mapping[str, int]:
                return {silo.name: count for silo in silos if (count := silo.nonfinite_counts.get(round_, 0))}

            yield Connection(channel, RoundStore(store), randomness, count_nonfinite)

    def evaluate(self, params: Tensor) -> MetricsRow:
        """Measure the model on the held-out records."""
        return measure_records(self.task, params, self.federation.test)

    def describe(self) -> MetricsRow:
        """Return the number of persons in 0, 1, 2… silos."""
        counts = count_persons_by_silos(self.federation)
        return {"persons_by_silos": {str(silos): count for silos, count in counts.items()}}


def _load_identity(name: str, store: Store) -> Identity:
    """Return the long-term key of a party; it is made at the first call."""
    return Identity(name, get_or_make(store, "identity", lambda: Identity.fresh(name).seed))


def measure_records(task: Task, params: Tensor, records: SiloData | None) -> MetricsRow:
    """Return {"loss", "metrics"} of a model on records, which no ε covers; nothing measured where there are none.

    Args:
        task: The model, its loss and its metrics.
        params: The parameters (d,) of the model, on the device of the task.
        records: Held-out records.
    """
    if records is None or len(records) == 0:
        return dict(NOTHING_MEASURED)
    values = task.evaluate(params, records.x, records.y)
    return {"loss": values.pop("loss", None), "metrics": values}
