"""A whole run: parties, ledger and checkpoint set up, rounds played, guarantees written."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from safetensors.torch import save
from torch import Tensor, nn

from silodp.crypto.keys import Identity
from silodp.data.silo import Federation
from silodp.errors import SilodpError
from silodp.federation.aggregation import Aggregator, Setting, calibrated, events
from silodp.federation.aggregators import AGGREGATORS
from silodp.federation.checkpoint import Checkpoint, empty_velocity, load_checkpoint, save_checkpoint
from silodp.federation.rounds import Server, is_finite
from silodp.federation.signatures import SignedParty, SignedTransport
from silodp.federation.silo import Silo
from silodp.federation.store import DirectoryStore, MemoryStore, Store, write_durably
from silodp.federation.transport import InProcess, Party
from silodp.mechanisms.noise import Randomness
from silodp.methods.method import Method, Population
from silodp.privacy.accounting import Accountant, epsilon, usual_accountant
from silodp.privacy.events import Event, NoGuarantee
from silodp.privacy.guarantee import (
    ADVERSARIES,
    HELD_OUT,
    NOT_COVERED,
    Adversary,
    Guarantee,
    View,
    assumptions_of,
)
from silodp.privacy.ledger import Budget, Ledger, Subject
from silodp.privacy.persons import PERSONS_RECORDS, epsilon_for_person
from silodp.training.task import Task

Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """What a run gives.

    params (d,): the final global model as one vector; `model` carries it. metrics: one row per round, the untrained
    model first. `stopped` says what ended the run.
    """

    params: Tensor
    model: nn.Module
    metrics: tuple[Row, ...]
    guarantees: dict[Adversary, Guarantee]
    stopped: Literal["rounds", "budget"]

    @property
    def epsilon(self) -> float | None:
        """ε towards whoever sees every global model; None where nothing is promised."""
        return self.guarantees["released"].epsilon


def train(
    federation: Federation,
    task: Task,
    method: Method,
    *,
    rounds: int,
    aggregator: str | Aggregator = "plain",
    budget: Budget | Mapping[str, Any] | None = None,
    seed: int | None = None,
    delta: float = 1e-5,
    accountant: Accountant | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    evaluate_every: int = 1,
    on_round: Callable[[Row], None] | None = None,
) -> Result:
    """Train one model over all silos.

    Args:
        federation: the silos' tables; `federation.test`, if any, is evaluated on (not covered by ε).
        task: model, loss and metrics.
        method: who is protected and how, e.g. `silodp.methods.UldpAvg(...)`.
        rounds: T, at most; a budget may stop the run earlier.
        aggregator: "plain": the server sees each silo's noisy share; "masked": only their sum (secure aggregation, with
            integer noise); "lattice" or "paillier": the same, weighted by record counts that nobody sees. An
            aggregator with other settings can be given as an object.
        budget: `Budget` or {"epsilon", "delta", "adversary"}; the run stops before it would be exceeded.
        seed: None draws all randomness from the operating system; an integer makes the run reproducible, and its
            guarantees say "not for release".
        delta: δ at which ε is reported.
        accountant: "pld" (tight, pessimistic grid) or "rdp", the only one that knows integer noise; None: the tightest
            that can be used.
        out: directory for checkpoint, ledger, metrics, guarantee and model; None keeps everything in memory.
        resume: go on from the checkpoint in `out`.
        evaluate_every: evaluate after every so many rounds, and after the last.
        on_round: called with each row of metrics as it is made.

    Raises:
        SilodpError: for any mistake its maker can mend.
    """
    _check_kinds(federation, task, method, on_round)
    for name, value, least in (
        ("rounds", rounds, 0),
        ("evaluate_every", evaluate_every, 1),
        ("seed", seed, 0),
    ):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least
        ):
            raise SilodpError(f"{name} = {value!r}: set a whole number ≥ {least}.")
    if isinstance(aggregator, str):
        if aggregator not in AGGREGATORS:
            raise SilodpError(
                f"aggregator = '{aggregator}' is not known: use one of {', '.join(AGGREGATORS)}."
            )
        aggregator = cast(Aggregator, AGGREGATORS[aggregator]())
    if isinstance(aggregator, type) or not hasattr(aggregator, "views"):
        raise SilodpError(
            f"aggregator is {aggregator!r}: give a name, or an object such as Masked(min_silos=3)."
        )
    if isinstance(budget, Mapping):
        unknown = set(budget) - {"epsilon", "delta", "adversary"}
        if unknown or not {"epsilon", "delta"} <= set(budget):
            raise SilodpError(
                f"budget has the fields {sorted(budget)}: give epsilon, delta and, if need be, adversary."
            )
        budget = Budget(**budget)
    if budget is not None and not isinstance(budget, Budget):
        raise SilodpError(f"budget is {budget!r}: give a Budget, or its fields epsilon and delta.")
    if budget is not None and budget.delta != delta:
        raise SilodpError(
            f"budget.delta = {budget.delta} differs from delta = {delta}: set both to the same value."
        )
    # Made-up records of the right shape: what breaks a model must not depend on anyone's record.
    task.check(
        np.random.default_rng(0).standard_normal((4, *federation.silos[0].x.shape[1:]), dtype=np.float32)
    )
    if method.clips_records and not task.loss.separable:
        raise SilodpError(
            f"{method.name} clips the gradient of every single record, and the loss '{task.loss.name}' is not a mean "
            "over records: use a loss made by Loss.per_record, or a method that clips per person (uldp-avg)."
        )
    names = tuple(silo.name for silo in federation.silos)
    own = None if federation.user_budgets is None else tuple(federation.user_budgets.tolist())
    population = Population(len(names), federation.users, aggregator.shares_for(len(names)), own)
    setting = Setting("", names, method, population, task.size, _index(federation), delta)
    method.check(federation, rounds, delta)
    aggregator.check(setting)
    setting = calibrated(aggregator, setting)
    method = setting.method
    cost = events(aggregator, setting)
    if aggregator.most_rounds is not None and rounds > aggregator.most_rounds:
        raise SilodpError(
            f"rounds = {rounds}: aggregator '{aggregator.name}' is set for {aggregator.most_rounds} attempts; "
            "raise attempts (in a config: aggregation.attempts), leaving room for rounds that must be repeated."
        )
    usual = usual_accountant(cost.values())
    if accountant == "pld" and usual != "pld":
        raise SilodpError(
            f"accountant = 'pld' knows no integer noise, which '{aggregator.name}' adds: choose 'rdp', or leave it out."
        )
    accountant = usual if accountant is None else accountant
    if budget is not None:
        budget = replace(budget, delta=delta * aggregator.delta_share)
        _check_budget(budget, cost, accountant)
    directory = None if out is None else Path(out)
    fingerprint = _fingerprint(federation, task, method, aggregator, seed, delta, accountant)
    randomness = Randomness.secret() if seed is None else Randomness.from_seed(seed)
    state = _state(directory, resume, fingerprint, task, seed)
    untrained = _evaluate(task, state.params, federation) if state.round == 0 else None
    if directory is not None and not resume:
        (directory / "checkpoint").mkdir(
            parents=True, exist_ok=True, mode=0o700
        )  # it holds what must not leave
        save_checkpoint(directory / "checkpoint" / "state.safetensors", state)
    subject = Subject(method.name, repr(method), method.unit, aggregator.name, secret=seed is None)
    with _opened(directory, state, delta * aggregator.delta_share, accountant, budget, subject) as ledger:
        silos, server = _parties(
            federation, task, aggregator, replace(setting, run=state.run), randomness, ledger, directory
        )
        journal = _Journal(directory, state.round if resume else None)
        if not journal.rows and untrained is not None:
            journal.add({"round": 0, **untrained, "epsilon": server.spent()}, on_round)
        if ledger.rounds == 0:  # afterwards a silo that has forgotten its set-up must not be set up anew
            server.set_up()
        stopped: Literal["rounds", "budget"] = "rounds"
        while state.round < rounds:
            started, sent = time.perf_counter(), server.transport.traffic
            total = server.play(state.round, state.params)
            if total is None:
                stopped = "budget"
                break
            state, refusal = _advance(server, state, total)
            row: Row = {"round": state.round}
            if state.round % evaluate_every == 0 or state.round == rounds:
                row |= _evaluate(task, state.params, federation)
            row["epsilon"] = server.spent()
            row["seconds"] = round(time.perf_counter() - started, 4)
            row["bytes"] = asdict(server.transport.traffic.since(sent))
            row["refused"] = {s.name: n for s in silos if (n := s.journal.get(state.round - 1, 0))} | refusal
            journal.add(row, on_round)
            if directory is not None:
                save_checkpoint(directory / "checkpoint" / "state.safetensors", state)
        guarantees = _guarantees(federation, method, server, ledger, delta, seed is None)
    result = Result(state.params, task.load(state.params), tuple(journal.rows), guarantees, stopped)
    if directory is not None:
        _write(directory, result, method, aggregator)
    return result


def _check_kinds(federation: object, task: object, method: object, on_round: object) -> None:
    """Refuse, in a sentence each, what is not what it stands for."""
    if not isinstance(federation, Federation):
        raise SilodpError(
            "federation is no Federation: use Federation.from_tables or silodp.data.benchmarks."
        )
    if not isinstance(task, Task):
        raise SilodpError("task is no Task: make one with Task(model, loss, metrics).")
    if isinstance(method, type) or not hasattr(method, "dp_event"):
        raise SilodpError(
            f"method is {method!r}: give an object such as UldpAvg(noise_multiplier=5.0, clip=0.1)."
        )
    if not (on_round is None or callable(on_round)):
        raise SilodpError(f"on_round is {on_round!r}: give a function of one row of metrics.")


def _check_budget(budget: Budget, events: dict[Adversary, Event], accountant: Accountant) -> None:
    """Refuse, before anything is written, a budget that not even one round can keep."""
    if not Ledger(None, budget.delta, accountant, budget, run="").affords(events):
        cost = epsilon([(events[budget.adversary], 1)], budget.delta, accountant)
        raise SilodpError(
            f"budget.epsilon = {budget.epsilon} is less than one round costs against '{budget.adversary}' "
            f"(ε = {cost:.4g}): raise it, or raise noise_multiplier ('silodp plan' finds one)."
        )


def _advance(server: Server, state: Checkpoint, total: Tensor) -> tuple[Checkpoint, dict[str, int]]:
    """The state after a round; a sum that is not finite is refused, and the round counts (it was charged)."""
    params, velocity = server.step(state.params, state.velocity, total)
    if not (is_finite(total) and is_finite(params)):
        return replace(state, round=state.round + 1), {"(sum)": 1}
    return replace(state, round=state.round + 1, params=params, velocity=velocity), {}


def _state(
    directory: Path | None, resume: bool, fingerprint: str, task: Task, seed: int | None
) -> Checkpoint:
    if resume:
        if directory is None:
            raise SilodpError("resume needs the output directory of the run to go on with: give out.")
        return load_checkpoint(directory / "checkpoint" / "state.safetensors", fingerprint)
    if directory is not None and any(
        path.is_file() and path.suffix != ".partial" for path in directory.rglob("*")
    ):
        raise SilodpError(
            f"output directory {directory} is not empty: choose another, or resume the run in it."
        )
    params = task.initial(seed)
    return Checkpoint(secrets.token_hex(16), fingerprint, 0, params, empty_velocity(params))


def _evaluate(task: Task, params: Tensor, federation: Federation) -> Row:
    if federation.test is None or len(federation.test.x) == 0:
        return {"loss": None, "metrics": {}}
    values = task.evaluate(params, federation.test.x, federation.test.y)
    return {"loss": values.pop("loss", None), "metrics": values}


@contextmanager
def _opened(
    directory: Path | None,
    state: Checkpoint,
    delta: float,
    accountant: Accountant,
    budget: Budget | None,
    subject: Subject,
) -> Iterator[Ledger]:
    path = None
    if directory is not None:
        path = directory / "checkpoint" / "ledger.jsonl"
        if state.round and not path.exists():
            raise SilodpError(
                f"ledger {path} is missing: without it nothing is known of the ε spent; restore it."
            )
    with Ledger(path, delta, accountant, budget, run=state.run, subject=subject) as ledger:
        if not state.round <= ledger.rounds <= state.round + 1:
            raise SilodpError(
                f"ledger {path} has {ledger.rounds} rounds and the checkpoint {state.round}: they are not of one "
                "moment, and what was released is no longer known: begin a new run, which adds its own ε."
            )
        yield ledger


def _parties(
    federation: Federation,
    task: Task,
    aggregator: Aggregator,
    setting: Setting,
    randomness: Randomness,
    ledger: Ledger,
    directory: Path | None,
) -> tuple[list[Silo], Server]:
    def store(*place: str) -> Store:
        return (
            MemoryStore() if directory is None else DirectoryStore(directory.joinpath("checkpoint", *place))
        )

    names = setting.names
    stores = {name: store("silos", f"{s:03}") for s, name in enumerate(names)}
    # In one process the keys are made here; between organizations each makes its own and pins the others'.
    identities = {name: _identity(name, stores[name]) for name in names}
    pins = {name: identity.public for name, identity in identities.items()}
    silos = [
        Silo(data, task, aggregator, setting, randomness, stores[data.name], identities[data.name], pins)
        for data in federation.silos
    ]
    coordinator = _identity("server", store("server"))
    parties: dict[str, Party] = {
        silo.name: SignedParty(silo, identities[silo.name], coordinator.public) for silo in silos
    }
    transport = SignedTransport(InProcess(parties, wire=True), coordinator, pins)
    return silos, Server(setting, transport, aggregator, ledger, store("server"), randomness)


def _identity(name: str, store: Store) -> Identity:
    """A party's long-term key, made when it is first needed."""
    seed = store.get("identity")
    if seed is None:
        identity = Identity.fresh(name)
        store.put("identity", identity.seed)
        return identity
    return Identity(name, seed)


def _index(federation: Federation) -> str:
    """Of the public list of persons, in order, and of their budgets."""
    own = None if federation.user_budgets is None else federation.user_budgets.tolist()
    return hashlib.sha256(json.dumps([federation.users, federation.user_keys, own]).encode()).hexdigest()


class _Journal:
    """metrics.jsonl: a line per round. Lines beyond the checkpoint are of a round that will be repeated."""

    def __init__(self, directory: Path | None, resumed_round: int | None) -> None:
        self._path = None if directory is None else directory / "metrics.jsonl"
        self.rows: list[Row] = []
        if self._path is not None and resumed_round is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    break  # the line being written when the process died; its round is repeated
                if row["round"] <= resumed_round:
                    self.rows.append(row)
            write_durably(self._path, "".join(json.dumps(row) + "\n" for row in self.rows).encode())

    def add(self, row: Row, on_round: Callable[[Row], None] | None) -> None:
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if on_round is not None:
            on_round(row)


def _guarantees(
    federation: Federation, method: Method, server: Server, ledger: Ledger, delta: float, secret: bool
) -> dict[Adversary, Guarantee]:
    views = server.aggregator.views(method, server.setting.population.silos)
    integers = server.aggregator.exact and method.bounds(server.setting.population) is not None
    tested = federation.test is not None and len(federation.test.x) > 0
    result: dict[Adversary, Guarantee] = {}
    for adversary in ADVERSARIES:
        spent = server.spent()[adversary]
        result[adversary] = Guarantee(
            adversary=adversary,
            unit=method.unit,
            epsilon=spent,
            delta=delta,
            rounds=ledger.rounds,
            accountant=ledger.accountant,
            method=method.name,
            private=spent is not None,
            releasable=secret and spent is not None,
            reason=server.reason(adversary),
            assumptions=()
            if spent is None
            else assumptions_of(views[adversary], integers)
            + (server.aggregator.assumptions if adversary != "released" else ())
            + method.assumptions
            + federation.assumptions
            + about_delta(delta, federation.users),
            not_covered=tuple(what for what in NOT_COVERED if tested or what != HELD_OUT),
            persons=() if spent is None or method.unit != "record" else _persons(ledger, adversary),
            groups=() if spent is None else _groups(federation, server, ledger, views[adversary]),
            claims=_claims(server, adversary, ledger),
        )
    return result


def _persons(ledger: Ledger, adversary: Adversary) -> tuple[tuple[int, float | None], ...]:
    """What a person with k records gets from a guarantee about single records (group privacy)."""
    events = [charge.events[adversary] for charge in ledger.history]
    return tuple(
        (records, epsilon_for_person(events, records, ledger.delta, ledger.accountant))
        for records in PERSONS_RECORDS
    )


def _groups(federation: Federation, server: Server, ledger: Ledger, view: View) -> tuple[dict[str, Any], ...]:
    """What units with budgets of their own asked for and were charged; budgets are public."""
    personal = [silo.budget for silo in federation.silos]
    if server.setting.method.unit == "user":
        personal = [federation.user_budgets]
    budgets = [budget for budget in personal if budget is not None]
    if not budgets:
        return ()
    joined = server.joined(ledger.rounds)[: len(budgets)]
    return server.setting.method.groups(view, budgets, joined, ledger.rounds, ledger.delta, ledger.accountant)


def _claims(server: Server, adversary: Adversary, ledger: Ledger) -> tuple[dict[str, Any], ...]:
    """What a paper promises for this run without a proof that holds."""
    claimed = server.setting.method.claimed
    if claimed is None:
        return ()
    event = events(server.aggregator, replace(server.setting, method=claimed))[adversary]
    if isinstance(event, NoGuarantee):
        return ()
    spent = epsilon([(event, len(ledger.history))], ledger.delta, ledger.accountant)
    return ({"epsilon": spent, "why": claimed.assumptions[-1]},) if math.isfinite(spent) else ()


def about_delta(delta: float, users: int) -> tuple[str, ...]:
    """The remark on a δ that is not below 1/U; nothing on others."""
    if delta * users < 1:
        return ()
    return (
        f"δ = {delta:g} is accepted although it is not below 1/U = {1 / users:.2g}: a mechanism that publishes one "
        "person's records outright has such a δ; take one well below",
    )


def _fingerprint(
    federation: Federation,
    task: Task,
    method: Method,
    aggregator: Aggregator,
    seed: int | None,
    delta: float,
    accountant: str,
) -> str:
    """Of everything public that a resumed run must share with the one it resumes; silos compare their own records."""
    model = f"{task.model!r} {task.dtype} {task.loss.name}"
    public = [federation.name, [silo.name for silo in federation.silos], _index(federation)]
    parts = [public, model, repr(method), repr(aggregator), seed, delta, accountant]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _write(directory: Path, result: Result, method: Method, aggregator: Aggregator) -> None:
    public = {
        f.name: getattr(aggregator, f.name) for f in fields(cast(Any, aggregator)) if f.init and f.compare
    }
    guarantee = {
        "method": method.name,
        "aggregator": {"name": aggregator.name, **{n: v for n, v in public.items() if v is not None}},
        "settings": repr(method),
        "rounds": result.guarantees["released"].rounds,
        "stopped": result.stopped,
        "private": result.guarantees["released"].private,
        "guarantees": [guarantee.to_dict() for guarantee in result.guarantees.values()],
    }
    write_durably(
        directory / "guarantee.json", (json.dumps(guarantee, indent=2, ensure_ascii=False) + "\n").encode()
    )
    tensors = {name: value.detach().contiguous().cpu() for name, value in result.model.state_dict().items()}
    write_durably(directory / "model.safetensors", save(tensors, metadata={"method": method.name}))


__all__ = ["Result", "Row", "train"]
