"""A silo of a consortium: the only process that opens the records, the keys, the store and the ledgers of the silo.

Its folder, which its operator alone may enter, holds:

    identity.key   seed of the long-term Ed25519 key; secret
    tls.key        private key of the TLS certificate; secret
    policy.toml    what the operator allows
    store/         durable memory of all runs; secret
    ledgers/       one ledger for each run; the policy's limits hold for all of them together
    audit.jsonl    everything that left this silo
    metrics.jsonl  what this silo measures for itself alone, where the run evaluates within silos
    lock           held by the process that serves
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import BadZipFile

import numpy as np

from silodp.accounting.accountant import choose_accountant, compute_epsilon, find_accountant
from silodp.accounting.events import Event, count_kinds, explain_not_private
from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.ledger import Ledger, find_exceeded_limit
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.aggregators.evaluation import find_run
from silodp.aggregators.run_spec import RunSpec
from silodp.config.resolve import ResolvedRun
from silodp.crypto.keys import Identity
from silodp.crypto.streams import KEY_BYTES
from silodp.data.identity.linkage import find_key_doubts
from silodp.data.identity.person_index import read_person_index
from silodp.data.inputs import find_fault, list_arrays
from silodp.data.public import PublicData
from silodp.data.silo_data import SiloData
from silodp.data.tables.reader import read_tables
from silodp.data.tables.schema import Schema
from silodp.deploy import AUDIT, IDENTITY, LOCK, POLICY
from silodp.deploy.agreement import JOIN, JOIN_BYTES, answer_join
from silodp.deploy.consortium import Consortium
from silodp.deploy.history import PERSONS, RUN_ID, PersonKey, check_persons, open_ledgers
from silodp.deploy.limits import SiloLimits, find_max_charges, read_audit
from silodp.deploy.policy import Policy
from silodp.errors import SilodpError, counted
from silodp.mechanisms.noise import Randomness
from silodp.runtime.evaluation import EvaluatedSilo, make_silo
from silodp.runtime.lock import hold_lock
from silodp.runtime.prepare import find_loss_doubts
from silodp.runtime.silo import Silo, make_ledger
from silodp.training.losses import DEFAULT_LOSSES
from silodp.wire.files import PRIVATE_FILE, append_durably, write_durably
from silodp.wire.messages import Message
from silodp.wire.store import DirectoryStore, MemoryStore, RoundStore, set_once
from silodp.wire.transport import SERVER, sign, verify

_log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
_MAX_DISCLOSURE: Mapping[Adversary, float] = {"server": 2.0**-40}
"""Disclosure (TV) that is assumed where a ledger with integer noise does not state it: the largest of `lattice`."""
_MAX_UNCHARGED = 100
"""Runs without a charge that are kept, each with a few files, one of them open; the oldest are deleted."""


@dataclass
class LifetimeLedger:
    """The ledgers of all runs of one silo, and the limits for all runs together.

    Attributes:
        delta: δ of the limits.
        limits: Largest ε by adversary; an adversary that is absent has no limit.
        runs: The ledgers by run.
        checked: By adversary with a limit, ε including the charge that `find_exceeded` checked last.
    """

    delta: float
    limits: Mapping[Adversary, float]
    runs: dict[str, Ledger] = field(default_factory=dict)
    checked: dict[Adversary, float | None] = field(default_factory=dict)

    @property
    def charged_runs(self) -> int:
        """The number of runs with a charge."""
        return sum(bool(ledger.history) for ledger in self.runs.values())

    def epsilon(self, adversary: Adversary, more: Event | None = None, run: str = "") -> float | None:
        """Return ε of all runs together; None where there is no guarantee.

        The disclosure by the ciphertexts of all runs is included (docs/privacy.md, section 3).

        Args:
            adversary: Against whom.
            more: An event that is added to the charges.
            run: The run of that event.
        """
        counts = Counter[Event](() if more is None else (more,))
        of_runs = [ledger.counts(adversary) for ledger in self.runs.values()]
        for found in of_runs:
            counts += found
        if not counts:
            return 0.0
        if any(explain_not_private(event) is not None for event in counts):
            return None
        if sum(any(map(count_kinds, found)) for found in of_runs) > 1:
            return None  # ledgers of an earlier version, which do not say which kind of unit is this silo's
        seen = [ledger for name, ledger in self.runs.items() if ledger.history or name == run]
        disclosure = sum(_find_disclosure(ledger, adversary) for ledger in seen)
        epsilon = compute_epsilon(counts.items(), self.delta, choose_accountant(counts), disclosure)
        return epsilon if np.isfinite(epsilon) else None

    def find_exceeded(self, events: Mapping[Adversary, Event], run: str = "") -> str | None:
        """Return a phrase about the first limit that these events of a run would exceed; None if they exceed none."""

        def find_spent(adversary: Adversary) -> float | None:
            self.checked[adversary] = self.epsilon(adversary, events[adversary], run)
            return self.checked[adversary]

        over = find_exceeded_limit(self.limits, find_spent)
        if over is None:
            return None
        adversary, told = over
        limit = self.limits[adversary]
        return f"{told} against '{adversary}' over all its runs, beyond the limit of {limit:g} in its policy"


def _find_disclosure(ledger: Ledger, adversary: Adversary) -> float:
    """Return the disclosure (total variation) by the ciphertexts of a run; 0 where there are none."""
    if ledger.disclosure is not None:
        return ledger.disclosure.get(adversary, 0.0)
    # A ledger of an earlier version: ciphertexts hold integers, whose noise "pld" does not account for.
    has_integers = not all(map(find_accountant("pld").supports, ledger.counts(adversary)))
    return _MAX_DISCLOSURE.get(adversary, 0.0) if has_integers else 0.0


def compute_lifetime_cost(
    spec: RunSpec, silo: str, delta: float, earlier: Mapping[str, Ledger] | None = None
) -> dict[Adversary, float]:
    """Return ε of all runs of a silo after all T rounds of a new run in which no round has a further release.

    Args:
        spec: Specification of the run; its evaluations are included.
        silo: Name of the silo.
        delta: δ of the limits for all runs.
        earlier: Ledgers of earlier runs by run; None: there are none.

    Returns:
        ε by adversary, without adversaries against whom there is no guarantee.
    """
    ledger = make_ledger(replace(spec, run="cost"), disclosure=spec.aggregator.disclosure(spec))
    for round_ in range(spec.rounds):
        ledger.charge(round_, 0, spec.silo_events(silo, round_))
    if (evaluation := spec.charged_evaluation) is not None:
        for number in range(spec.evaluations):
            ledger.charge_evaluation(number, 0, evaluation.silo_events(silo, number))
    lifetime = LifetimeLedger(delta, {}, {**(earlier or {}), "cost": ledger})
    found = {adversary: lifetime.epsilon(adversary) for adversary in ADVERSARIES}
    return {adversary: epsilon for adversary, epsilon in found.items() if epsilon is not None}


def read_spent(folder: Path, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Read ε of all runs of a silo from copies of its ledgers, so that a running silo is not disturbed.

    Args:
        folder: Folder of the silo.
        entries: Entries of the audit log; no ledger may have fewer charges than they list.

    Returns:
        JSON-ready: "runs" (that were charged), "unit" ("user" or "record"), "delta", "epsilon" and "limits" by
        adversary (None: no guarantee; no limit). None before the first run.

    Raises:
        SilodpError: a ledger is missing, damaged or an old copy, or there is no policy.
    """
    if not (folder / "ledgers").exists():
        return None
    policy = Policy.load(folder / POLICY)
    unit = DirectoryStore(folder / "store").get("unit")
    with _open_copies(folder, entries) as ledgers:
        lifetime = LifetimeLedger(policy.delta, policy.lifetime_epsilon, ledgers)
        return {
            "runs": lifetime.charged_runs,
            "unit": None if unit is None else unit.decode(),
            "delta": policy.delta,
            "epsilon": {adversary: lifetime.epsilon(adversary) for adversary in ADVERSARIES},
            "limits": {adversary: policy.lifetime_epsilon.get(adversary) for adversary in ADVERSARIES},
        }


@contextmanager
def _open_copies(folder: Path, entries: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Ledger]]:
    """Open copies of a silo's ledgers, by run: a running silo holds the locks of the ledgers themselves."""
    with TemporaryDirectory() as name:
        copies = Path(name) / "ledgers"
        copytree(folder / "ledgers", copies)
        ledgers = open_ledgers(copies, MemoryStore(), find_max_charges(entries))
        try:
            yield ledgers
        finally:
            for ledger in ledgers.values():
                ledger.close()


def find_shortfall(folder: Path, spec: RunSpec, silo: str, policy: Policy) -> dict[Adversary, float]:
    """Return the ε that all runs together need where it exceeds a limit of the silo's policy.

    Args:
        folder: Folder of the silo, with the ledgers of earlier runs.
        spec: Specification of the new run.
        silo: Name of the silo.
        policy: Policy of the silo.

    Returns:
        ε after all T rounds by adversary whose limit it exceeds, infinite where there is no guarantee.

    Raises:
        SilodpError: a ledger is missing, damaged or an old copy.
    """
    if (folder / "ledgers").exists():
        entries, _ = read_audit(folder / AUDIT)
        with _open_copies(folder, entries) as earlier:
            needed = compute_lifetime_cost(spec, silo, policy.delta, earlier)
    else:
        needed = compute_lifetime_cost(spec, silo, policy.delta)
    return {
        adversary: needed.get(adversary, float("inf"))
        for adversary, limit in policy.lifetime_epsilon.items()
        if needed.get(adversary, float("inf")) > limit
    }


def describe_shortfall(short: Mapping[Adversary, float], limits: Mapping[Adversary, float]) -> str:
    """Return a sentence about the limits that a run would exceed, and what to do.

    Args:
        short: Result of `find_shortfall`.
        limits: Limits of the policy, ε by adversary.
    """
    told = "; ".join(
        f"{format_epsilon(e) if np.isfinite(e) else 'no guarantee'} against {name}, of at most {limits[name]:g}"
        for name, e in short.items()
    )
    return (
        f"all runs of this silo together, with all rounds of this one, come to ε = {told}: the silo will end this run "
        "early (gate.budget); raise lifetime_epsilon in policy.toml only if that is what you owe these persons, or ask "
        "the coordinator for a smaller run"
    )


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

        check_policy(policy, consortium)
        self.name, self._folder = name, folder
        self._spec, self._task, self._data = consortium.spec, consortium.task, data
        self._pins, self._server = consortium.sealed.silos, consortium.sealed.server
        self.identity = load_identity(folder, name)
        self._randomness = Randomness.of_run(self._spec.seed)
        self._store = DirectoryStore(folder / "store")
        if not set_once(self._store, "unit", str(self._spec.method.unit).encode()):
            raise SilodpError(
                f"earlier runs in {folder} protect another unit than '{self._spec.method.name}': their ε cannot be "
                "added up, and in another folder these persons would be counted from zero; ask the coordinator for a "
                "method that protects the same unit.",
                code="policy.not_allowed",
                field="methods",
            )
        self._script = self._spec.aggregator.script(self._spec, name)
        evaluation = self._spec.evaluation_spec
        scripts = [self._script, *([evaluation.aggregator.script(evaluation, name)] if evaluation else [])]
        self.max_bytes = max(JOIN_BYTES, *(script.max_bytes for script in scripts))
        self._digest = consortium.digest
        audit = folder / AUDIT
        files = (folder / "store", folder / "ledgers", audit)
        self._limits = SiloLimits(name, policy, self._store, files, audit, self.max_bytes)
        self._silos: dict[str, Silo | EvaluatedSilo] = {}
        self._max_runs = policy.most_runs
        ledgers = open_ledgers(folder / "ledgers", self._store, self._limits.charges)
        self.lifetime = LifetimeLedger(policy.delta, policy.lifetime_epsilon, ledgers)
        self.on_round: Callable[[int, Mapping[Adversary, float | None]], None] = lambda round_, epsilon: None
        self._told = Counter({run: len(ledger.history) for run, ledger in ledgers.items()})
        self._persons = PersonKey.of(consortium) if self._spec.method.unit == "user" else None
        if self._persons is not None:
            check_persons(self._store, folder, self._persons, policy.persons)

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
        if request.kind == JOIN.name:
            self._limits.check_join(request)
            answer = answer_join(request, self.name, self._digest)
        else:
            answer = self._silo_of(request).answer(request)
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

    def _silo_of(self, request: Message) -> Silo | EvaluatedSilo:
        """Return the silo of the run that a request names; it is set up at the first request of the run."""
        run = find_run(request.run)
        if RUN_ID.fullmatch(run) is None:
            raise SilodpError(
                f"silo '{self.name}' was asked in a run whose id is not 32 hexadecimal digits; nothing was sent.",
                code="gate.run",
            )
        self._limits.check(request, run)
        if run not in self._silos:
            spec = replace(self._spec, run=run)
            if run not in self.lifetime.runs:
                self._check_new_run(request)
                self._forget_uncharged_runs()
                path = self._folder / "ledgers" / f"{run}.jsonl"
                self.lifetime.runs[run] = make_ledger(spec, path, spec.aggregator.disclosure(spec))
            if not set_once(RoundStore(self._store, f"{run}/").run, "spec", spec.digest.encode()):
                raise SilodpError(
                    f"silo '{self.name}' took part in run {run} with other settings; nothing was sent.",
                    code="gate.run",
                )
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
                spec.evaluations,
            )
        return self._silos[run]

    def _check_new_run(self, request: Message) -> None:
        """Check that a request may begin a new run, before anything is stored for it."""
        first = self._script.setup[0]
        if request.kind != first.name or request.run != find_run(request.run):
            raise SilodpError(
                f"silo '{self.name}' was asked '{request.kind}' in a run that it does not know: it expects "
                f"'{first.name}'; nothing was sent.",
                code="gate.order",
            )
        first.request.check(request, f"the server of silo '{self.name}'")
        if self._limits.answers[request.run]:
            raise SilodpError(
                f"silo '{self.name}' has forgotten run {request.run}, in which nothing was charged, for later ones: "
                "begin a new run; nothing was sent.",
                code="gate.run",
            )
        self._check_run_count()

    def _forget_uncharged_runs(self) -> None:
        """Delete the oldest runs without a charge: a set-up is not charged, so the server can begin any number of runs.

        A deleted run has released nothing. It cannot begin again, since the audit log lists its answers.
        """
        uncharged = [run for run, ledger in self.lifetime.runs.items() if not ledger.history]
        uncharged.sort(key=self._limits.find_begin)
        for run in uncharged[: max(0, len(uncharged) - _MAX_UNCHARGED + 1)]:
            self._silos.pop(run, None)
            self._limits.forget(run)
            self.lifetime.runs.pop(run).close()
            # The ledger is deleted last: entries in the store without a ledger are refused as ledger.missing.
            (self._folder / "ledgers" / f"{run}.jsonl").unlink()
            _log.info("forgot run %s, which was begun and never charged", run)

    def _check_charge(self, run: str, events: Mapping[Adversary, Event]) -> str | None:
        """Return a phrase about a limit for all runs that a charge would exceed; None if it exceeds none.

        At the first charge of the folder the person key is stored (`PERSONS`).

        Raises:
            SilodpError: It would be the first charge of a run, and as many runs as the policy allows were charged
                (code gate.run). To check when a run begins is not enough: many can begin before one is charged.
        """
        if not self.lifetime.runs[run].history:
            self._check_run_count()
        exceeded = self.lifetime.find_exceeded(events, run)
        if exceeded is None and self._persons is not None:
            set_once(self._store, PERSONS, self._persons.encode())
        return exceeded

    def _check_run_count(self) -> None:
        """Check that fewer runs were charged than the policy allows.

        Raises:
            SilodpError: The policy allows no further run (code gate.run).
        """
        if self.lifetime.charged_runs >= self._max_runs:
            raise SilodpError(
                f"silo '{self.name}' was charged in {counted(self.lifetime.charged_runs, 'run')}; its policy allows "
                f"{self._max_runs} (most_runs); nothing was sent.",
                code="gate.run",
                field="most_runs",
            )

    def _log_answer(self, request: Message, signed: bytes) -> None:
        """Append a line about an answer to the audit log; it is on disk before the answer leaves."""
        run = find_run(request.run)
        ledger = self.lifetime.runs.get(run)  # None: "join" belongs to no run
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "run": run,
            "about": "training" if request.run == run else "evaluation",
            "kind": request.kind,
            "round": request.round,
            "attempt": request.attempt,
            "bytes": len(signed),
            "sha256": hashlib.sha256(signed).hexdigest(),
            "charges": 0 if ledger is None else len(ledger.history),
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
        SilodpError: another process serves it, a file is missing, or the policy does not allow the run.
    """
    if not (folder / POLICY).exists():
        raise SilodpError(
            f"{folder} has no {POLICY}: run this first: "
            f"silodp deploy accept PUBLIC {shlex.quote(str(folder))} --data FILE",
            code="policy.missing",
        )
    policy = Policy.load(folder / POLICY)
    name = find_name(folder, consortium)
    check_policy(policy, consortium)  # before a record is read
    with hold_lock(folder / LOCK, folder):
        index = folder / policy.index if policy.index else None
        data = load_records(folder / policy.data, name, consortium, index)
        service = SiloService(folder, consortium, name, data, policy)
        try:
            yield service
        finally:
            for ledger in service.lifetime.runs.values():
                ledger.close()


def check_policy(policy: Policy, consortium: Consortium) -> None:
    """Check that the operator has accepted a public folder, and that the policy allows its run.

    No code of the folder is executed: the run is read from its specification, which `Consortium.spec` compares later.

    Raises:
        SilodpError: as `Policy.check`, or the folder states another run than follows from it (code deploy.spec).
    """
    policy.check(consortium.digest, consortium.stated_spec, consortium.labels)


def check_participation(folder: Path, consortium: Consortium, policy: Policy) -> None:
    """Check a run against the policy of a silo, and its person key against the earlier runs of the folder.

    Raises:
        SilodpError: as `check_policy` and `check_persons`.
    """
    check_policy(policy, consortium)
    if consortium.stated_spec.method.unit == "user" and (folder / "store").exists():
        check_persons(DirectoryStore(folder / "store"), folder, PersonKey.of(consortium), policy.persons)


def find_name(folder: Path, consortium: Consortium) -> str:
    """Return the name under which the roster lists the key in a folder.

    Raises:
        SilodpError: it lists none (code deploy.key).
    """
    public = load_identity(folder, "").public
    for name, key in consortium.sealed.silos.items():
        if key == public:
            return name
    raise SilodpError(
        f"the roster does not list the key in {folder / IDENTITY}: use the silo's one folder, which has its ledgers, "
        "and send the request in it to the coordinator.",
        code="deploy.key",
    )


def load_records(path: Path, name: str, consortium: Consortium, index: Path | None = None) -> SiloData:
    """Read the records of one silo.

    Args:
        path: a table, read by the schema of the configuration, or a .npz file with the arrays x, y, user, budget and
            identifiers of a `SiloData`, and test_x, test_y and test_user of its held-out records; several named inputs
            are the arrays x.NAME and test_x.NAME.
        name: of the silo.
        consortium: the public folder.
        index: file by which a trust center numbers the persons; needed where the run has an identity profile and
            weights by records.

    Raises:
        SilodpError: the file cannot be read, does not fit the public description of the data, or the method refuses the
            number or the budgets of the records.
    """
    public = consortium.data
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as arrays:
                test = None
                kind = (
                    None if public.targets is None else public.labels
                )  # one label is of the kind that it looks like
                if "test_y" in arrays:
                    x = _load_x(arrays, "test_x")
                    test = SiloData(name, x, arrays["test_y"], arrays["test_user"], labels=kind)
                names = arrays.get("identifiers")
                known = None if names is None else tuple(names.tolist())
                budget = arrays.get("budget")
                x = _load_x(arrays, "x")
                data = SiloData(name, x, arrays["y"], arrays["user"], budget, test, known, kind)
        except SilodpError as error:
            raise SilodpError(f"{path}: {error}", code=error.code, field=error.field) from None
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise SilodpError(
                f"{path} cannot be read ({type(error).__name__}): give a .npz file with the arrays x, y and user.",
                code="data.files",
            ) from None
    else:
        schema = check_index(consortium.resolved, consortium.stated_spec)
        tables = read_tables({name: path}, schema, _read_index(index, schema, consortium.stated_spec))
        (data,) = tables.silos
        keys = data.identifiers or tables.user_keys  # by number, with a trust center too
        users, counts = np.unique(data.user, return_counts=True)
        rows = {keys[user]: int(number) for user, number in zip(users, counts, strict=True)}
        for doubt in find_key_doubts({str(path): rows}):
            _log.warning("%s", doubt)
    if len(data) == 0:
        _log.warning("%s has no training record: this silo spends ε and adds nothing but noise", path)
    # By its name: a task is built by code that the silo may not have agreed to yet.
    loss = consortium.resolved.config.task.loss or DEFAULT_LOSSES.get(public.labels)
    for doubt in find_loss_doubts([data], loss):
        _log.warning("%s", doubt)
    for one in (data, data.held_out):
        fault = find_fault(one.x, public.record_shape, public.inputs)
        if fault is not None:
            raise SilodpError(
                f"the records in {path} are not what the consortium agreed on, {fault}: prepare them as the "
                "description of the data says.",
                code="deploy.data",
            )
    if not all(_has_label(one, public) for one in (data, data.held_out)):
        raise SilodpError(
            f"the labels in {path} are not of the kind '{public.labels}' with {public.classes or 'no'} classes, which "
            "the consortium agreed on: prepare them as the description of the data says.",
            code="deploy.data",
        )
    if len(data) and not 0 <= data.user.min() <= data.user.max() < (public.users or 0):
        raise SilodpError(
            f"{path} has a user number outside 0 to {(public.users or 0) - 1}: use the index that the consortium "
            "agreed on.",
            code="deploy.data",
        )
    _check_method(data, public, consortium.stated_spec)
    return data


def _check_method(data: SiloData, public: PublicData, spec: RunSpec) -> None:
    """Let a method that protects records check how many the silo has, and the privacy budgets of these records.

    In one process the method sees the records of all silos before the first round. Here the public facts lack them, and
    each silo sees its own: the others are taken as empty.

    Raises:
        SilodpError: the method refuses them.
    """
    if spec.method.unit != "record":
        return
    none = np.empty(0)
    budgets = None
    if data.budget is not None:
        budgets = tuple(data.budget if name == data.name else none for name in public.silos)
    counts = tuple(len(data) if name == data.name else 0 for name in public.silos)
    own = replace(public, record_budgets=budgets is not None, record_counts=counts, silo_budgets=budgets)
    spec.method.check(own, spec.rounds, spec.delta)


def _has_label(data: SiloData, public: PublicData) -> bool:
    """Return whether labels are of the kind that the consortium agreed on."""
    if public.targets is not None:
        return (data.labels, data.y.shape[1:]) == (public.labels, (public.targets,))
    if public.labels == "survival":
        return data.y.shape[1:] == (2,)
    if data.y.shape[1:] != ():
        return False
    is_class = data.y.dtype == np.int64 and np.isin(data.y, np.arange(public.classes or 0)).all()
    return public.labels != "classes" or bool(is_class)


def check_index(resolved: ResolvedRun, spec: RunSpec) -> Schema:
    """Refuse a run of tables in which silos would not agree on who is the same person.

    Returns:
        The schema of the tables.

    Raises:
        SilodpError: the schema says nothing of it, or the run needs a public list of users (code deploy.no_index).
    """
    schema = resolved.table_schema
    if schema is None or (schema.users is None and schema.identity is None):
        raise SilodpError(
            "the configuration has no schema that says who is the same person: set data.schema.users to a public list "
            "of users, or data.schema.identity to an identity profile.",
            code="deploy.no_index",
            field="data.schema.users",
        )
    if schema.users is None and spec.data.user_budgets is not None:
        raise SilodpError(
            "with an identity profile there is no public list of persons, and personal budgets are public by such a "
            "list: set data.schema.users to a public list of users, or use one budget.",
            code="deploy.no_index",
            field="data.schema.users",
        )
    return schema


def _read_index(path: Path | None, schema: Schema, spec: RunSpec) -> dict[str, int] | None:
    """Return the trust center's numbers of persons where the run needs them; None where it does not."""
    profile = schema.read_identity()
    if profile is None or not spec.needs_common_index:
        return None
    if path is None:
        raise SilodpError(
            "weights that depend on records need one numbering of persons for all silos, and the run has an identity "
            "profile, so there is no public list: get a file with the columns id and position from a trust center, and "
            "name it: silodp deploy accept --index FILE.",
            code="deploy.no_index",
            field="index",
        )
    return read_person_index(path, profile)


def save_records(path: Path, data: SiloData) -> None:
    """Write the records of a silo as a .npz file that its owner alone may read."""
    arrays: dict[str, Any] = {**_store_x(data.x, "x"), "y": data.y, "user": data.user}
    if data.budget is not None:
        arrays["budget"] = data.budget
    if data.test is not None:
        arrays |= {**_store_x(data.test.x, "test_x"), "test_y": data.test.y, "test_user": data.test.user}
    if data.identifiers is not None:
        arrays["identifiers"] = np.array(data.identifiers)
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_durably(path, content.getvalue(), PRIVATE_FILE)


def _store_x(x: Any, prefix: str) -> dict[str, Any]:
    """Return the arrays of a .npz file that hold the inputs of records."""
    return {f"{prefix}.{name}" if name else prefix: array for name, array in list_arrays(x).items()}


def _load_x(arrays: Mapping[str, Any], prefix: str) -> Any:
    """Return the inputs that `_store_x` stored."""
    named = {
        name.removeprefix(f"{prefix}."): arrays[name] for name in arrays if name.startswith(f"{prefix}.")
    }
    return named or arrays[prefix]


def load_identity(folder: Path, name: str) -> Identity:
    """Read the long-term key of a party.

    Raises:
        SilodpError: there is none (code deploy.key).
    """
    try:
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
