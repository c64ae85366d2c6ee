"""A silo of a consortium: the only process that opens the records, the keys, the store and the ledgers of the silo.

Its folder, which its operator alone may enter, holds:

    identity.key   seed of the long-term Ed25519 key; secret
    tls.key        private key of the TLS certificate; secret
    policy.toml    what the operator allows
    silo.toml      how this machine reaches the server, where it needs a proxy
    store/         durable memory of all runs; secret
    ledgers/       one ledger for each run; the policy's limits hold for all of them together
    audit.jsonl    everything that left this silo
    metrics.jsonl  what this silo measures for itself alone, where the run evaluates within silos
    lock           held by the process that serves
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Lock

from silodp.accounting.events import Event
from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.ledger import SiloHeader
from silodp.accounting.views import Adversary
from silodp.aggregators.series import split_name
from silodp.crypto.keys import Identity
from silodp.crypto.streams import KEY_BYTES
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError, require
from silodp.mechanisms.noise import Randomness
from silodp.runtime.run_directory import hold_lock
from silodp.runtime.series import SiloWithSeries, make_silo
from silodp.runtime.silo import Silo, make_ledger
from silodp.text import pluralize
from silodp.wire.files import PRIVATE_FILE, append_durably, write_durably
from silodp.wire.messages import Message
from silodp.wire.store import DirectoryStore, RoundStore, set_once
from silodp.wire.transport import SERVER, sign, verify
from silodp_deploy import AUDIT, IDENTITY, LEDGERS, LOCK, POLICY, STORE
from silodp_deploy.agreement import JOIN, answer_join
from silodp_deploy.consortium import Consortium
from silodp_deploy.history import RUN_ID, check_persons, find_plan, open_ledgers
from silodp_deploy.lifetime import LifetimeLedger, count_plan, encode_plan, read_ledgers
from silodp_deploy.limits import SiloLimits
from silodp_deploy.policy import Policy, find_max_bytes
from silodp_deploy.records import load_records

_log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
_MAX_UNCHARGED = 100
"""Runs without a charge that are kept, each with a few files, one of them open; the oldest are deleted."""


class SiloService:
    """The endpoint of a silo: it verifies requests, answers them, and signs the answers.

    Args:
        folder: Folder of the silo.
        consortium: The public folder.
        name: Name of the silo.
        data: Records of the silo.
        policy: Policy of the silo.

    Attributes:
        name: Name of the silo.
        identity: Long-term key of the silo.
        max_bytes: Bytes of the longest request without its signature.
        lifetime: The ledgers of all runs.
        on_round: Called after the answer of a charged round was signed, with the number of the round, from 1, and ε of
            all runs by adversary with a limit.

    Raises:
        SilodpError: The policy does not allow the run, or a key, store or ledger cannot be read.
    """

    def __init__(
        self, folder: Path, consortium: Consortium, name: str, data: SiloData, policy: Policy
    ) -> None:
        # Tracing a step imports torch's compiler, in seconds: not while a round waits for the answer.
        import torch._dynamo  # noqa: F401

        check_policy(policy, consortium, name)
        self.name, self._folder, self._one_at_a_time = name, folder, Lock()
        self._spec, self._task, self._data = consortium.spec, consortium.task, data
        self._pins, self._server = consortium.sealed.silos, consortium.sealed.server
        self.identity = load_identity(folder, name)
        self._randomness = Randomness.of_run(self._spec.seed)
        self._store = DirectoryStore(folder / STORE)
        self._script = self._spec.aggregator.script(self._spec, name)
        self.max_bytes = find_max_bytes(self._spec, name)
        self._digest = consortium.digest
        self._limits = SiloLimits(folder, name, policy, self._store, self.max_bytes)
        self._silos: dict[str, Silo | SiloWithSeries] = {}
        self._max_runs = policy.most_runs
        ledgers = open_ledgers(folder / LEDGERS, self._limits.last, self._store, name)
        # The run of the first charge is the filter's plan: its charges, and no others, were fixed before any release.
        own, plan = count_plan(self._spec, name), find_plan(ledgers)
        plan = own if plan is None else plan
        rule = tuple(policy.filter_bounds)
        self.lifetime = LifetimeLedger(policy.delta, policy.lifetime_epsilon, ledgers, rule, plan)
        self.on_round: Callable[[int, Mapping[Adversary, float | None]], None] = lambda round_, epsilon: None
        self._told = Counter({run: len(ledger.history) for run, ledger in ledgers.items()})
        unit, persons = self._spec.method.unit, consortium.identify_persons(name)
        self._header = SiloHeader(unit, asdict(persons) if unit == "user" else None, encode_plan(own))
        try:
            check_persons(ledgers, folder, unit, persons, policy.persons)
            for run, ledger in list(ledgers.items()):
                if ledger.progress.is_ended and not ledger.history:
                    self._forget(run)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the ledgers."""
        for ledger in self.lifetime.runs.values():
            ledger.close()

    @property
    def answers(self) -> int:
        """Number of answers that have left this silo, by its audit log."""
        return self._limits.answers.total()

    def receive(self, data: bytes) -> bytes:
        """Verify a request, answer it, write a line of the audit log, and return the signed answer.

        Raises:
            SilodpError: The server did not sign the request, or the silo refuses it.
        """
        request = verify(data, self._server, "the server", self.name, max_bytes=self.max_bytes)
        # One request at a time, whatever threads a courier has: the gate checks, charges and commits in steps, and two
        # requests between them would be two releases for one charge.
        with self._one_at_a_time:
            # Limits, gate, answer, signature, audit log: an answer leaves last, when its line is on disk.
            if request.kind == JOIN.name:
                self._limits.check_join(request)
                answer = answer_join(request, self.name, self._digest)
            else:
                answer = self._silo_of(request).answer(request)
            # Bound to the request: a courier cannot pass the answer of one round off as that of another.
            signed = sign(answer, self.identity, SERVER, request.digest())
            self._log_answer(request, signed)
            self._tell_round(request)
        return signed

    def _tell_round(self, request: Message) -> None:
        """Log progress and ε for the silo's operator if the request led to a charge."""
        ledger = self.lifetime.runs.get(request.run)
        if ledger is None or len(ledger.history) <= self._told[request.run]:
            return
        self._told[request.run] = len(ledger.history)
        spent = dict(self.lifetime.checked)
        told = ", ".join(
            f"{'no guarantee' if e is None else format_epsilon(e)} of {self.lifetime.limits[name]:g} against {name}"
            for name, e in spent.items()
        )
        done = request.round + 1
        _log.info(
            "round %d of %d is answered; ε of all runs so far: %s",
            done,
            self._spec.rounds,
            told or "not limited by the policy",
            extra={"fields": {"round": done, "epsilon": spent}},
        )
        self.on_round(done, spent)

    def _silo_of(self, request: Message) -> Silo | SiloWithSeries:
        """Return the silo of the run that a request names; it is set up at the first request of the run."""
        run, _ = split_name(request.run)
        if RUN_ID.fullmatch(run) is None:
            raise self._refuse("was asked in a run whose id is not 32 hexadecimal digits")
        self._limits.check(request, run)
        if run not in self._silos:
            # The server chooses the id of a run. Whatever it chooses, the run is counted in the limits for all runs.
            spec = replace(self._spec, run=run)
            if run not in self.lifetime.runs:
                self._check_new_run(request)
                self._forget_uncharged_runs()
                path = self._folder / LEDGERS / f"{run}.jsonl"
                disclosure = spec.aggregator.disclosure(spec)
                self.lifetime.runs[run] = make_ledger(spec, path, disclosure, self._header)
            if self.lifetime.runs[run].progress.is_ended:
                raise self._refuse(f"has ended run {run}, in which it answers nothing more")
            # Of the same persons, too: the header says whose ε the ledger charges.
            is_same = self.lifetime.runs[run].silo == self._header
            kept = RoundStore(self._store, f"{run}/").run
            if not (is_same and set_once(kept, "spec", spec.digest.encode())):
                raise self._refuse(f"took part in run {run} with other settings")
            self._limits.begin(run)
            self._silos[run] = make_silo(
                self._data,
                self._task,
                spec,
                self._randomness,
                self._store,
                self.identity,
                self._pins,
                self.lifetime.runs[run],
                partial(self._check_charge, run),
                self._folder / METRICS,
                {one.name: one.count(spec.rounds) for one in spec.series},
            )
        return self._silos[run]

    def _check_new_run(self, request: Message) -> None:
        """Check that a request may begin a new run, before anything is stored for it."""
        first = self._script.setup[0]
        if request.kind != first.name or split_name(request.run)[1]:
            raise self._refuse(
                f"was asked '{request.kind}' in a run that it does not know: it expects '{first.name}'",
                "gate.order",
            )
        first.request.check(request, f"the server of silo '{self.name}'")
        # Its keys and random streams are gone: begun anew, it would give other answers to the same requests.
        if self._limits.answers[request.run]:
            raise self._refuse(
                f"has forgotten run {request.run}, in which nothing was charged, for later ones: begin a new run"
            )
        self._check_run_count()

    def _forget_uncharged_runs(self) -> None:
        """Delete the oldest runs without a charge: a set-up is not charged, so the server can begin any number of runs.

        A deleted run has released nothing. It cannot begin again, since the audit log lists its answers.
        """
        uncharged = [run for run, ledger in self.lifetime.runs.items() if not ledger.history]
        # The oldest first: the newest may be the one that the server is setting up now.
        uncharged.sort(key=self._limits.find_begin)
        for run in uncharged[: max(0, len(uncharged) - _MAX_UNCHARGED + 1)]:
            # Listed first: else, after a crash, the store would look like an old copy.
            self.lifetime.runs[run].note({"kind": "end"})
            self._forget(run)
            _log.info("forgot run %s, which was begun and never charged", run)

    def _forget(self, run: str) -> None:
        """Delete a run that was ended before anything was charged."""
        self._silos.pop(run, None)
        self._limits.forget(run)
        self.lifetime.runs.pop(run).close()
        # The ledger is deleted last: entries in the store without a ledger are refused as ledger.missing.
        (self._folder / LEDGERS / f"{run}.jsonl").unlink()

    def _check_charge(self, run: str, events: Mapping[Adversary, Event]) -> str | None:
        """Return a phrase about a limit for all runs that a charge would exceed; None if it exceeds none.

        Raises:
            SilodpError: It would be the first charge of a run, and as many runs as the policy allows were charged
                (code gate.run). To check when a run begins is not enough: many can begin before one is charged.
        """
        ledger = self.lifetime.runs[run]
        if not ledger.history:
            self._check_run_count()
            # The run that is charged first decides who the persons are, and what the filter's plan is.
            ledger.is_first = not self.lifetime.charged_runs
        return self.lifetime.find_exceeded(events, run)

    def _check_run_count(self) -> None:
        """Check that fewer runs were charged than the policy allows.

        Raises:
            SilodpError: The policy allows no further run (code gate.run).
        """
        if self.lifetime.charged_runs >= self._max_runs:
            runs = pluralize(self.lifetime.charged_runs, "run")
            raise self._refuse(
                f"was charged in {runs}; its policy allows {self._max_runs} (most_runs)", field="most_runs"
            )

    def _refuse(self, problem: str, code: str = "gate.run", field: str | None = None) -> SilodpError:
        return SilodpError(f"silo '{self.name}' {problem}; nothing was sent.", code=code, field=field)

    def _log_answer(self, request: Message, signed: bytes) -> None:
        """Append a line about an answer to the audit log; it is on disk before the answer leaves."""
        run, series = split_name(request.run)
        ledger = self.lifetime.runs.get(run)  # None: "join" belongs to no run
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "run": run,
            "about": series or "training",
            "kind": request.kind,
            "round": request.round,
            "attempt": request.attempt,
            "bytes": len(signed),
            "sha256": hashlib.sha256(signed).hexdigest(),
            "charges": 0 if ledger is None else len(ledger.history),
            "head": "" if ledger is None else ledger.head,
        }
        append_durably(self._folder / AUDIT, json.dumps(line).encode(), PRIVATE_FILE)
        self._limits.answers[run] += 1


@contextmanager
def open_silo(folder: Path, consortium: Consortium) -> Iterator[SiloService]:
    """Lock a silo's folder, read its records and ledgers, and yield its service.

    Args:
        folder: Folder of the silo; the roster has the silo's name, found by its key.
        consortium: The public folder.

    Raises:
        SilodpError: Another process serves the folder, a file is missing, or the policy does not allow the run.
    """
    if not (folder / POLICY).exists():
        raise SilodpError(
            f"{folder} has no {POLICY}: run this first: "
            f"silodp deploy accept PUBLIC {shlex.quote(str(folder))} --data FILE",
            code="policy.missing",
        )
    policy = Policy.load(folder / POLICY)
    name = find_name(folder, consortium)
    check_policy(policy, consortium, name)  # before a record is read
    # Two processes with the same folder would each charge a ledger that the other does not see.
    with hold_lock(folder / LOCK, folder):
        index = folder / policy.index if policy.index else None
        data = load_records(folder / policy.data, name, consortium, index)
        policy.check_persons(data)
        service = SiloService(folder, consortium, name, data, policy)
        try:
            yield service
        finally:
            service.close()


def check_policy(policy: Policy, consortium: Consortium, name: str) -> None:
    """Check that a silo's operator has accepted a public folder, and that the policy allows its run on this table.

    No code of the folder is executed: the run is read from its specification, which `Consortium.spec` compares later.

    Raises:
        SilodpError: As `Policy.check`, or the folder states another run than follows from it (code deploy.spec).
    """
    policy.check(consortium.digest, consortium.stated_spec, consortium.list_columns(name))


def check_participation(folder: Path, consortium: Consortium, policy: Policy) -> None:
    """Check a run against the policy of a silo, and its unit and persons against the earlier runs of the folder.

    Raises:
        SilodpError: As `check_policy` and `check_persons`.
    """
    name = find_name(folder, consortium)
    check_policy(policy, consortium, name)
    unit, persons = consortium.stated_spec.method.unit, consortium.identify_persons(name)
    check_persons(read_ledgers(folder), folder, unit, persons, policy.persons)


def find_name(folder: Path, consortium: Consortium) -> str:
    """Return the name under which the roster lists the key in a folder.

    Raises:
        SilodpError: The roster does not list the key (code deploy.key).
    """
    # By the key and not by a name that somebody typed: the key decides whose messages these are.
    public = load_identity(folder, "").public
    names = {key: name for name, key in consortium.sealed.silos.items()}
    require(
        public in names,
        f"the roster does not list the key in {folder / IDENTITY}: use the silo's one folder, which has its ledgers, "
        "and send the request in it to the coordinator.",
        code="deploy.key",
    )
    return names[public]


def load_identity(folder: Path, name: str) -> Identity:
    """Read the long-term key of a party.

    Raises:
        SilodpError: There is no key in the folder (code deploy.key).
    """
    try:
        # The 32 bytes from which the key pair follows (RFC 8032, section 5.1.5).
        seed = bytes.fromhex((folder / IDENTITY).read_text())
    except (OSError, ValueError):
        seed = b""
    if len(seed) != KEY_BYTES:
        raise SilodpError(
            f"{folder / IDENTITY} is no key: run 'silodp deploy keys' in this folder, or restore the file.",
            code="deploy.key",
        )
    return Identity(name, seed)


def save_identity(folder: Path, identity: Identity) -> None:
    """Write the long-term key of a party."""
    write_durably(folder / IDENTITY, identity.seed.hex().encode(), PRIVATE_FILE)
