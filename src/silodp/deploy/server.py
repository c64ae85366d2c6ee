"""The server of a consortium: it has no data, only the public folder and its own key."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.keys import Identity
from silodp.deploy.certificates import make_context
from silodp.deploy.consortium import AUTHORITY, CONFIG, Consortium
from silodp.deploy.https import HttpsServer
from silodp.deploy.silo import IDENTITY, TLS_KEY, load_identity
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.report.page import write_report
from silodp.runtime.run_directory import MetricsRow, RunDirectory
from silodp.runtime.simulation import Connection
from silodp.runtime.train import Result, run
from silodp.training.task import Task
from silodp.wire.store import RoundStore, write_durably
from silodp.wire.transport import SIGNED_BYTES, SignedChannel, Transport

STATUS = "status.json"
"""In the server's folder: who is connected, and how far the run is."""


@dataclass(frozen=True)
class RemoteParties:
    """Silos that a transport reaches; the parties of `silodp.runtime.train.run`.

    Attributes:
        consortium: the public folder.
        transport: reaches the silos.
        identity: the server's key.
        connect: waits until the silos can be asked; called when the run holds the lock of its directory.
    """

    consortium: Consortium
    transport: Transport
    identity: Identity
    connect: Callable[[], None]

    @property
    def task(self) -> Task:
        """The model, its loss and its metrics."""
        return self.consortium.task

    @property
    def is_simulation(self) -> bool:
        """False."""
        return False

    @contextmanager
    def open(self, spec: RunSpec, directory: RunDirectory) -> Iterator[Connection]:
        """Connect the server's store and key with the transport; silos connect by themselves."""
        randomness = Randomness.secret() if spec.seed is None else Randomness.from_seed(spec.seed)
        most_bytes = find_most_bytes(spec)
        pins = self.consortium.sealed.silos
        channel = SignedChannel(self.transport, self.identity, pins, most_bytes)
        self.connect()
        yield Connection(channel, RoundStore(directory.make_store("server")), randomness, lambda round_: {})

    def evaluate(self, params: Tensor) -> MetricsRow:
        """Measure nothing: the server has no records."""
        return {"loss": None, "metrics": {}}

    def describe(self) -> MetricsRow:
        """Return nothing: the number of persons in several silos is private."""
        return {}


def find_most_bytes(spec: RunSpec) -> int:
    """Return the bytes of the longest message that a silo of this run sends or receives, not signed."""
    return max(spec.aggregator.script(spec, name).most_bytes for name in spec.names)


def serve(
    folder: Path,
    consortium: Consortium,
    *,
    listen: tuple[str, int] | None = None,
    patience: float = 300.0,
    on_round: Callable[[MetricsRow], None] | None = None,
) -> Result:
    """Run the server from the first round, or from its checkpoint, to the end.

    Args:
        folder: of the server: its keys; `run/` and status.json are written there.
        consortium: the public folder.
        listen: (host, port); None: all addresses, and the port of the roster.
        patience: seconds that a silo has for an answer. A new run waits for its silos to connect without a limit, one
            that is resumed at most for this time.
        on_round: called with each row of metrics.

    Returns:
        The model, its metrics and its guarantees; they and the report are in `run/` too.

    Raises:
        SilodpError: a key or certificate cannot be used, the address is taken, or a silo refuses or does not answer.
    """
    spec, roster = consortium.spec, consortium.sealed
    identity = load_identity(folder, "server")
    if identity.public != roster.server:
        raise SilodpError(
            f"the key in {folder / IDENTITY} is not the server's in the roster: use the folder in which the request "
            "was made.",
            code="deploy.key",
        )
    tls = make_context(
        consortium.folder / AUTHORITY, consortium.certificate("server"), folder / TLS_KEY, is_server=True
    )
    directory = folder / "run"
    status: dict[str, Any] = {"round": 0, "rounds": spec.rounds, "epsilon": {}, "error": None}

    def write_status(**changes: Any) -> None:
        status.update(changes)
        seen = {name: None if s is None else round(s, 1) for name, s in https.seconds_since_seen().items()}
        content = {"written": time.time(), **status, "seconds_since_seen": seen}
        write_durably(folder / STATUS, (json.dumps(content, indent=1) + "\n").encode())

    def note_round(row: MetricsRow) -> None:
        if not (
            directory / CONFIG
        ).exists():  # the run holds the lock of its directory when it makes its first row
            write_durably(directory / CONFIG, (consortium.folder / CONFIG).read_bytes())
        write_status(round=row["round"], epsilon=row["epsilon"])
        if on_round is not None:
            on_round(row)

    with HttpsServer(
        listen or ("", roster.port),
        tls,
        roster.silos,
        consortium.digest,
        patience=patience,
        most_bytes=find_most_bytes(spec) + SIGNED_BYTES,
        on_change=write_status,
    ) as https:
        resume = (directory / "checkpoint" / "state.safetensors").exists()
        is_finished = (directory / "guarantee.json").exists()  # then no silo is asked
        connect = partial(https.wait_for_silos, 0.0 if is_finished else patience if resume else None)
        write_status()
        try:
            result = run(
                spec,
                RemoteParties(consortium, https, identity, connect),
                out=directory,
                resume=resume,
                evaluate_every=consortium.config.evaluate_every,
                on_round=note_round,
            )
        except SilodpError as error:
            write_status(error=f"{error} [{error.code}]")
            raise
        write_status(stopped=result.stopped)
    write_report(directory)
    return result
