"""What a run is to be, as its caller said it: refused in a sentence, or made into what all its parties share."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silodp.accounting.accountant import Accountant, compute_epsilon, default_accountant
from silodp.accounting.events import Event
from silodp.accounting.guarantee import ADVERSARIES, Adversary
from silodp.accounting.ledger import ACCOUNTING, Budget, Ledger, LedgerHeader
from silodp.aggregators import find_aggregator
from silodp.aggregators.base import Aggregator, Setting, calibrate_setting, round_events
from silodp.data.federation import Federation
from silodp.errors import SilodpError, check_real, counted, shorten
from silodp.methods.base import Method, Population
from silodp.training.task import Task

_MADE_UP = 4  # records that models and losses are tried on


@dataclass(frozen=True)
class Terms:
    """What a run is about, accepted.

    setting: what all parties know, but for the run's id. budget: at the part of δ that noise is accounted at.
    silo_limits: the ε that every silo's own ledger lets the run spend against each adversary, at the same δ.
    """

    federation: Federation
    task: Task
    aggregator: Aggregator
    setting: Setting
    accountant: Accountant
    budget: Budget | None
    seed: int | None
    silo_limits: Mapping[Adversary, float] = field(default_factory=dict)

    @property
    def method(self) -> Method:
        """Calibrated, where persons have budgets of their own."""
        return self.setting.method

    @property
    def delta(self) -> float:
        """δ at which ε is reported."""
        return self.setting.delta

    @property
    def noise_delta(self) -> float:
        """The part of δ that noise is accounted at."""
        return self.delta * self.aggregator.delta_share

    @property
    def secret(self) -> bool:
        """Whether all randomness is the operating system's."""
        return self.seed is None

    @property
    def subject(self) -> LedgerHeader:
        """What the ledger's events are about."""
        method = self.method
        name, aggregator = method.name, self.aggregator.name
        return LedgerHeader(name, repr(method), method.unit, aggregator, self.secret, ACCOUNTING)

    @property
    def fingerprint(self) -> str:
        """Of everything public that a resumed run must share with the one it resumes; silos compare their records."""
        task, names = self.task, list(self.setting.names)
        model = f"{task.model!r} {task.dtype} {task.loss.name}"
        public = [self.federation.name, names, self.setting.index]
        run = [repr(self.method), repr(self.aggregator), self.seed, self.delta, self.accountant]
        return hashlib.sha256(json.dumps([public, model, *run]).encode()).hexdigest()


def agreed(
    federation: Federation,
    task: Task,
    method: Method,
    *,
    rounds: int,
    aggregator: str | Aggregator,
    budget: Budget | Mapping[str, Any] | None,
    seed: int | None,
    delta: float,
    accountant: Accountant | None,
    evaluate_every: int,
    on_round: object,
    silo_limits: Mapping[Adversary, float] | None = None,
) -> Terms:
    """The terms of a run; the arguments are those of `silodp.train`.

    Raises:
        SilodpError: for what cannot be run, before anything is written.
    """
    _check_kinds(federation, task, method, on_round)
    _check_whole(rounds=(rounds, 0), evaluate_every=(evaluate_every, 1))
    if seed is not None:
        _check_whole(seed=(seed, 0))
        seed = int(seed)  # a numpy integer is no JSON, which fingerprints are made of
    check_real("delta", delta)
    delta = float(delta)
    if not 0 < delta < 1:
        raise SilodpError(
            f"delta = {delta}: set a number above 0 and below 1.", code="argument.value", field="delta"
        )
    aggregator, budget = _aggregator(aggregator), _budget(budget, delta)
    _check_task(federation, task, method)
    names = tuple(silo.name for silo in federation.silos)
    own = None if federation.user_budgets is None else tuple(federation.user_budgets.tolist())
    population = Population(len(names), federation.users, aggregator.min_silos_for(len(names)), own)
    setting = Setting(
        "", names, method, population, task.size, index_of(federation), delta, dtype_of(task), int(rounds)
    )
    method.check(federation, rounds, delta)
    aggregator.check(setting)
    setting = calibrate_setting(aggregator, setting)
    cost = round_events(aggregator, setting)
    if aggregator.max_rounds is not None and rounds > aggregator.max_rounds:
        raise SilodpError(
            f"rounds = {rounds}: aggregator '{aggregator.name}' is set for "
            f"{counted(aggregator.max_rounds, 'attempt')}; raise attempts (in a config: "
            "aggregation.attempts), leaving room for rounds that must be repeated.",
            code="argument.conflict",
            field="rounds",
        )
    usual = default_accountant(cost.values())
    if accountant == "pld" and usual != "pld":
        raise SilodpError(
            f"accountant = 'pld' knows no integer noise, which '{aggregator.name}' adds: choose 'rdp', or leave "
            "it out.",
            code="accounting.unsupported",
            field="accountant",
        )
    accountant = usual if accountant is None else accountant
    limits = _limits(silo_limits)
    terms = Terms(federation, task, aggregator, setting, accountant, budget, seed, limits)
    if budget is not None:
        terms = replace(terms, budget=replace(budget, delta=terms.noise_delta))
        _check_affordable(terms, cost)
    return terms


def dtype_of(task: Task) -> str:
    """numpy's name of the type of the model's parameters."""
    return str(task.dtype).removeprefix("torch.")


def index_of(federation: Federation) -> str:
    """Of the public list of persons, in order, and of their budgets."""
    return federation.public().index_digest


def _check_kinds(federation: object, task: object, method: object, on_round: object) -> None:
    """Refuse, in a sentence each, what is not what it stands for."""
    if not isinstance(federation, Federation):
        raise SilodpError(
            "federation is no Federation: use Federation.from_tables or silodp.data.benchmarks.",
            code="argument.type",
            field="federation",
        )
    if not isinstance(task, Task):
        raise SilodpError(
            "task is no Task: make one with Task(model, loss, metrics).", code="argument.type", field="task"
        )
    if isinstance(method, type) or not hasattr(method, "dp_event"):
        raise SilodpError(
            f"method is {method!r}: give an object such as UldpAvg(noise_multiplier=5.0, clip=0.1).",
            code="argument.type",
            field="method",
        )
    if not (on_round is None or callable(on_round)):
        raise SilodpError(
            f"on_round is {on_round!r}: give a function of one row of metrics.",
            code="argument.type",
            field="on_round",
        )


def _check_whole(**given: tuple[object, int]) -> None:
    """By name: the number given, and the least it may be."""
    for name, (value, least) in given.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
            raise SilodpError(
                f"{name} = {value!r}: set a whole number ≥ {least}.", code="argument.value", field=name
            )


def _aggregator(given: str | Aggregator) -> Aggregator:
    """By name, or as it is."""
    if isinstance(given, str):
        return find_aggregator(given)()
    if isinstance(given, type) or not hasattr(given, "views"):
        raise SilodpError(
            f"aggregator is {given!r}: give a name, or an object such as Masked(min_silos=3).",
            code="argument.type",
            field="aggregator",
        )
    return given


def _budget(given: Budget | Mapping[str, Any] | None, delta: float) -> Budget | None:
    """By its fields, or as it is; at the δ that ε is reported at."""
    if isinstance(given, Mapping):
        unknown = set(given) - {"epsilon", "delta", "adversary"}
        if unknown or not {"epsilon", "delta"} <= set(given):
            raise SilodpError(
                f"budget has the fields {sorted(given)}: give epsilon, delta and, if need be, adversary.",
                code="argument.value",
                field="budget",
            )
        given = Budget(**given)
    if given is not None and not isinstance(given, Budget):
        raise SilodpError(
            f"budget is {given!r}: give a Budget, or its fields epsilon and delta.",
            code="argument.type",
            field="budget",
        )
    if given is not None and given.delta != delta:
        raise SilodpError(
            f"budget.delta = {given.delta} differs from delta = {delta}: set both to the same value.",
            code="argument.conflict",
            field="budget.delta",
        )
    return given


def _limits(given: Mapping[Adversary, float] | None) -> dict[Adversary, float]:
    """The silos' own limits, checked."""
    if given is not None and not isinstance(given, Mapping):
        raise SilodpError(
            f"silo_limits is {shorten(given)}: give ε by adversary, for example {{'server': 3.0}}.",
            code="argument.type",
            field="silo_limits",
        )
    for adversary, limit in (given or {}).items():
        if adversary not in ADVERSARIES:
            raise SilodpError(
                f"silo_limits names {shorten(adversary)}: use {', '.join(ADVERSARIES)}.",
                code="argument.value",
                field="silo_limits",
            )
        check_real(f"silo_limits.{adversary}", limit)
        if not 0 < limit < math.inf:
            raise SilodpError(
                f"silo_limits.{adversary} = {limit}: set a finite ε above 0.",
                code="argument.value",
                field=f"silo_limits.{adversary}",
            )
    return dict(given or {})


def _check_task(federation: Federation, task: Task, method: Method) -> None:
    """Refuse a model or loss that the method cannot train."""
    if task.loss.most_classes is not None and (federation.classes or 0) > task.loss.most_classes:
        raise SilodpError(
            f"the loss '{task.loss.name}' is for {task.loss.most_classes} classes, and the labels have "
            f"{federation.classes}: use cross_entropy, with one output of the model per class.",
            code="loss.wrong_labels",
            field="task.loss",
        )
    if method.clips_records and not task.loss.separable:
        raise SilodpError(
            f"{method.name} clips the gradient of every single record, and the loss '{task.loss.name}' is not a mean "
            "over records: use a loss made by Loss.per_record, or a method that clips per person (uldp-avg).",
            code="loss.not_separable",
            field="task.loss",
        )
    # Made-up records of the right shape: what breaks a model or a loss must not depend on anyone's record, and it must
    # show before anything is spent.
    shape = federation.silos[0].x.shape[1:]
    records = np.random.default_rng(0).standard_normal((_MADE_UP, *shape), dtype=np.float32)
    task.check(records, _made_up_labels(federation))


def _made_up_labels(federation: Federation) -> NDArray[Any]:
    """Labels (`_MADE_UP`, ...) of the federation's kind; the first and the last class are among them."""
    like = federation.silos[0].y
    if like.ndim == 2:
        return np.stack([np.arange(_MADE_UP) != 1, np.arange(_MADE_UP) + 1], axis=1).astype(np.float32)
    if like.dtype == np.int64:
        return np.linspace(0, (federation.classes or 2) - 1, _MADE_UP).round().astype(np.int64)
    return np.linspace(0, 1, _MADE_UP, dtype=np.float32)


def _check_affordable(terms: Terms, cost: dict[Adversary, Event]) -> None:
    """Refuse a budget that not even one round can keep."""
    budget, accountant = terms.budget, terms.accountant
    if budget is None or Ledger(None, budget.delta, accountant, budget, run="").affords(cost):
        return
    spent = compute_epsilon([(cost[budget.adversary], 1)], budget.delta, accountant)
    raise SilodpError(
        f"budget.epsilon = {budget.epsilon} is less than one round costs against '{budget.adversary}' "
        f"(ε = {spent:.4g}): raise it, or raise noise_multiplier ('silodp plan' finds one).",
        code="budget.out_of_reach",
        field="budget.epsilon",
    )
