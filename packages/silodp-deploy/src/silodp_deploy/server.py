"""The server of a consortium: it has no data, only the public folder and its own key."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from silodp.accounting.guarantee import describe_unit
from silodp.accounting.ledger import reopen_ledger
from silodp.accounting.views import ADVERSARIES
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.keys import Identity
from silodp.data.tables.schema import Schema
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.report.callbacks import WriteReport
from silodp.runtime.callback import Callback, GivenCallbacks, Result, RoundResult
from silodp.runtime.run_directory import RunDirectory, hold_lock
from silodp.runtime.run_files import LEDGER, MetricsRow
from silodp.runtime.simulation import Connection
from silodp.runtime.train import run
from silodp.training.task import Task
from silodp.wire.files import write_durably
from silodp.wire.store import RoundStore
from silodp.wire.transport import SERVER, SIGNED_BYTES, SignedChannel, Transport
from silodp_deploy import IDENTITY, LOCK
from silodp_deploy.acceptance import plan_epsilon
from silodp_deploy.agreement import AgreedTransport
from silodp_deploy.certificates import ExpiryWatch, load_context, reload_context
from silodp_deploy.consortium import CONFIG, Consortium
from silodp_deploy.https import HttpsServer
from silodp_deploy.policy import check_accepted, find_max_bytes
from silodp_deploy.silo import load_identity
from silodp_deploy.sockets import ServerSocket, SocketOptions
from silodp_deploy.status import STATUS, StatusFile, list_transfers, read_status

RUN, RUNS = "run", "runs"
"""In the server's folder: leads to the newest run; has one folder for each public folder, named by its digest."""


@dataclass(frozen=True)
class RemoteParties:
    """Silos that a transport reaches; the parties of `silodp.runtime.train.run`.

    Attributes:
        consortium: The public folder.
        transport: The courier that reaches the silos.
        identity: The server's long-term key.
        connect: Waits until the silos can be asked. It is called when the run holds the lock of its directory.
        is_simulation: False: the records lie in other processes.
    """

    is_simulation: ClassVar[bool] = False
    consortium: Consortium
    transport: Transport
    identity: Identity
    connect: Callable[[], None]

    @property
    def task(self) -> Task:
        """The model, its loss and its metrics."""
        return self.consortium.task

    @property
    def schema(self) -> Schema | None:
        """The schema in the public folder; None where no public constants scale the data."""
        resolved = self.consortium.resolved
        return resolved.dataset.find_schema(resolved.arguments)

    @contextmanager
    def open(self, spec: RunSpec, directory: RunDirectory) -> Iterator[Connection]:
        """Connect the server's store and key with the transport; silos connect by themselves."""
        randomness = Randomness.of_run(spec.seed)
        pins = self.consortium.sealed.silos
        channel = SignedChannel(self.transport, self.identity, pins, find_max_bytes(spec))
        self.connect()
        yield Connection(channel, RoundStore(directory.make_store("server")), randomness, lambda round_: {})

    def evaluate(self, params: Tensor) -> MetricsRow:
        """Measure nothing: the server has no records (`Evaluator` measures by sums, where the run does)."""
        return {"loss": None, "metrics": {}}

    def describe(self) -> MetricsRow:
        """Return nothing: the number of persons in several silos is private."""
        return {}


def _make_mailbox(
    folder: Path,
    consortium: Consortium,
    way: tuple[str, int] | SocketOptions | None,
    answer_timeout: float,
    known: Mapping[str, int],
    monitor: tuple[str, int] | None = None,
    describe: Callable[[], Mapping[str, Any]] = dict,
) -> HttpsServer | ServerSocket:
    """Return the mailbox of the run, which listens for silos or couriers while it is entered."""
    roster = consortium.sealed
    max_bytes = find_max_bytes(consortium.spec) + SIGNED_BYTES
    if isinstance(way, SocketOptions):
        return ServerSocket(
            way, roster.silos, answer_timeout=answer_timeout, max_bytes=max_bytes, answers=known
        )
    return HttpsServer(
        way or ("", roster.port),
        load_context(consortium, SERVER, folder),
        roster.silos,
        consortium.digest,
        answer_timeout=answer_timeout,
        max_bytes=max_bytes,
        answers=known,
        monitor=monitor,
        describe=describe,
    )


def _renew_certificates(
    expiry: ExpiryWatch, mailbox: HttpsServer, consortium: Consortium, folder: Path
) -> None:
    """Take renewed certificates, warn of those that end, and use the server's own in new connections."""
    if expiry.refresh():
        mailbox.reload(partial(reload_context, consortium=consortium, party=SERVER, home=folder))


def _read_progress(directory: Path) -> dict[str, Any]:
    """Return the number of rounds that were charged in a run, and ε by adversary."""
    path = directory / LEDGER
    # Without a whole line the process died when it made the file, and nothing was charged.
    if not path.exists() or b"\n" not in path.read_bytes():
        return {"round": 0, "epsilon": {}}
    with reopen_ledger(path) as ledger:
        return {"round": ledger.rounds, "epsilon": {name: ledger.epsilon(name) for name in ADVERSARIES}}


def _lead_to_run(folder: Path, directory: Path) -> None:
    """Have `run` lead to the folder of a run."""
    link = folder / RUN
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    # A link cannot be changed in place: a new one is renamed over it, so `run` leads somewhere at every moment.
    new = folder / f"{RUN}.partial"
    new.unlink(missing_ok=True)
    new.symlink_to(directory.relative_to(folder))
    new.replace(link)


@dataclass(frozen=True)
class _StatusNotes(Callback):
    """Notes every round in status.json and for /metrics, and keeps config.toml with the run.

    Attributes:
        consortium: The public folder.
        directory: The directory of the run.
        status: The file.
        shown: What /health and /metrics show.
    """

    consortium: Consortium
    directory: Path
    status: StatusFile
    shown: dict[str, Any]

    def after_round(self, result: RoundResult) -> None:
        """Note a round."""
        spent = dict(result.epsilon)
        self.shown.update(round=result.round, epsilon=spent, seconds_left=result.seconds_left, error=None)
        # The run holds the lock of its directory when it makes its first row.
        if not (self.directory / CONFIG).exists():
            write_durably(self.directory / CONFIG, (self.consortium.folder / CONFIG).read_bytes())
        self.status.write(round=result.round, epsilon=spent, error=None)

    def on_end(self, result: Result | None) -> None:
        """Note what ended the run."""
        if result is not None:
            self.shown.update(stopped=result.stopped)
            self.status.write(stopped=result.stopped)


def serve(
    folder: Path,
    consortium: Consortium,
    *,
    listen: tuple[str, int] | SocketOptions | None = None,
    answer_timeout: float = 300.0,
    monitor: tuple[str, int] | None = None,
    callbacks: GivenCallbacks = (),
) -> Result:
    """Run the server from the first round, or from its checkpoint, to the end.

    Args:
        folder: Folder of the server, with its keys. The run is written to `runs/DIGEST/` there, to which `run` leads,
            so that the runs of several public folders do not meet. It has status.json, too.
        consortium: The public folder.
        listen: Host and port for silos that connect over HTTPS; None: all addresses, and the port of the roster. Or a
            socket for other couriers.
        answer_timeout: Seconds that a silo has for an answer. A new run waits for its silos to connect without a
            limit, one that is resumed at most for this time.
        monitor: Host and port for a status page, /health and /metrics without TLS; None: /health and /metrics are
            shown to parties with a certificate alone.
        callbacks: See `silodp.train`; a round has metrics only where an evaluation by sums releases them.

    Returns:
        The model, its metrics and its guarantees; they and the report are in `run/` too.

    Raises:
        SilodpError: The public folder is not accepted (code policy.digest), a key or certificate cannot be used, the
            address is taken, or a silo refuses or does not answer.
    """
    roster = consortium.sealed
    identity = load_identity(folder, SERVER)
    if identity.public != roster.server:
        raise SilodpError(
            f"the key in {folder / IDENTITY} is not the server's in the roster: use the folder in which the request "
            "was made.",
            code="deploy.key",
        )
    check_accepted(folder, consortium.digest)  # before a model file is executed
    # By the digest of the public folder: an accepted change of the folder is another run, with its own ledger.
    directory = folder / RUNS / consortium.digest[:32]
    expiry = ExpiryWatch(consortium, SERVER)
    if not isinstance(listen, SocketOptions):
        expiry.check()
    with ExitStack() as held:
        held.enter_context(hold_lock(folder / LOCK, folder))  # before status.json is read or written
        earlier = read_status(folder / STATUS)
        # What an earlier process has counted: a silo that knows of fewer answers has been set back.
        known: dict[str, int] = earlier.get("answers", {})
        # A server that waits in vain ends and is started again: neither its error nor its wait is forgotten by that.
        error = earlier.get("error") if earlier.get("digest") == consortium.digest else None
        status = StatusFile(
            folder / STATUS,
            lambda: dict.fromkeys(roster.silos),
            consortium.stated_spec.rounds,
            lambda: known,
        )
        held.enter_context(status.record_end())
        # At once: while the server starts, nobody shall read of an earlier run, or that nothing was released.
        found = _read_progress(directory)
        status.write(run=str(directory), digest=consortium.digest, error=error, **found)
        if error is not None:
            now = time.time()
            status.add_wait(
                earlier.get("seconds_since_round", 0.0) + max(0.0, now - earlier.get("written", now))
            )
            status.write()
        spec = consortium.spec
        shown: dict[str, Any] = {
            "name": consortium.resolved.config.name,
            "code": consortium.code,
            "rounds": spec.rounds,
            "about": f"At δ = {spec.delta:g}, for {describe_unit(spec.method.unit)}.",
            "error": error,
            **found,
        }

        def describe() -> dict[str, Any]:
            passed = status.seconds_since_round()
            return {**shown, "certificate_days": expiry.count_days(), "seconds_since_round": passed}

        mailbox = held.enter_context(
            _make_mailbox(folder, consortium, listen, answer_timeout, known, monitor, describe)
        )
        status.seconds_since_seen, status.answers = mailbox.seconds_since_seen, mailbox.answers
        _lead_to_run(folder, directory)
        # A courier at a socket says nothing about the public folder that a silo has.
        transport = (
            mailbox
            if isinstance(mailbox, HttpsServer)
            else AgreedTransport(mailbox, identity, roster.silos, consortium.digest, answer_timeout)
        )
        transport.on_change = status.try_write
        if isinstance(mailbox, HttpsServer):
            transfers = mailbox.transfers
            status.describe = lambda: {
                "certificate_days": expiry.count_days(),
                "transfers": list_transfers(transfers()),
            }
            status.on_refresh = partial(_renew_certificates, expiry, mailbox, consortium, folder)
        resume = (directory / "checkpoint" / "state.safetensors").exists()
        # Then no silo is asked: the run only writes its report again.
        is_finished = (directory / "guarantee.json").exists()
        connect = partial(
            transport.wait_for_silos, 0.0 if is_finished else answer_timeout if resume else None
        )
        # While silos connect: it may take seconds.
        shown["epsilon_limit"] = plan_epsilon(spec)
        status.write(epsilon_limit=shown["epsilon_limit"])
        # What is there now stays to the end, so the collector need not look at it whenever connections have ended.
        gc.collect()
        gc.freeze()
        with status.keep_fresh():
            result = run(
                spec,
                RemoteParties(consortium, transport, identity, connect),
                out=directory,
                resume=resume,
                evaluate_every=consortium.resolved.config.evaluate_every,
                # They end in the reverse order: the report is written after the status.
                callbacks=[
                    WriteReport(directory),
                    _StatusNotes(consortium, directory, status, shown),
                    *callbacks,
                ],
            )
        mailbox.end_run()
    return result
