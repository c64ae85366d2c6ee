"""Preparing a run: what its caller asks for is refused with a reason, or becomes its specification."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from silodp.accounting.accountant import (
    Accountant,
    choose_accountant,
    compute_epsilon,
    find_accountant,
    supports_all,
)
from silodp.accounting.events import Event
from silodp.accounting.guarantee import ADVERSARIES, Adversary
from silodp.accounting.ledger import Budget, Ledger
from silodp.aggregators.base import Aggregator
from silodp.aggregators.registry import find_aggregator
from silodp.aggregators.run_spec import ModelSpec, RunSpec
from silodp.data.federation import Federation
from silodp.data.public import PublicData
from silodp.errors import SilodpError, check_real, check_whole, counted, shorten
from silodp.methods.base import Method

if TYPE_CHECKING:
    from silodp.training.task import Task


def prepare_run(
    data: Federation | PublicData,
    task: Task,
    method: Method,
    *,
    rounds: int,
    aggregator: str | Aggregator = "plain",
    budget: Budget | Mapping[str, Any] | None = None,
    seed: int | None = None,
    delta: float = 1e-5,
    accountant: Accountant | str | None = None,
    silo_limits: Mapping[Adversary, float] | None = None,
    tested: bool = False,
) -> RunSpec:
    """Check a run on its public facts alone, and return its specification.

    Args:
        data: a federation, or its public facts alone.
        task: model, loss and metrics; they are tried on made-up records.
        method: who is protected and how.
        rounds, aggregator, budget, seed, delta, accountant, silo_limits: see `train`.
        tested: whether held-out records measure the model; a federation tells it itself.

    Returns:
        the specification; the method in it is calibrated where units have their own budgets.

    Raises:
        SilodpError: what cannot be run.
    """
    _check_method(method)
    if isinstance(data, Federation):
        tested = data.test is not None and len(data.test) > 0
        # The number of records is public where records are the unit, and private elsewhere.
        data = data.public(with_records=method.unit == "record")
    elif not isinstance(data, PublicData):
        raise SilodpError(
            "federation is no Federation: use Federation.from_tables or silodp.data.benchmarks.",
            code="argument.type",
            field="federation",
        )
    check_whole("rounds", rounds, 0)
    if seed is not None:
        check_whole("seed", seed, 0)
        seed = int(seed)  # a numpy integer is no JSON, which digests are made of
    check_real("delta", delta)
    delta = float(delta)
    if not 0 < delta < 1:
        raise SilodpError(
            f"delta = {delta}: set a number above 0 and below 1.", code="argument.value", field="delta"
        )
    aggregator, budget = _aggregator(aggregator), _budget(budget, delta)
    _check_task(data, task, method)
    method.check(data, rounds, delta)
    spec = RunSpec(
        data,
        describe_model(task),
        method,
        aggregator,
        aggregator.min_silos_for(len(data.silos)),
        rounds=int(rounds),
        delta=delta,
        seed=seed,
        silo_limits=_limits(silo_limits),
        tested=tested,
    )
    aggregator.check(spec)
    spec = spec.calibrate()
    cost = spec.round_events()
    if aggregator.max_rounds is not None and rounds > aggregator.max_rounds:
        raise SilodpError(
            f"rounds = {rounds}: aggregator '{aggregator.name}' is set for "
            f"{counted(aggregator.max_rounds, 'attempt')}; raise attempts (in a config: "
            "aggregation.attempts), leaving room for rounds that must be repeated.",
            code="argument.conflict",
            field="rounds",
        )
    by = choose_accountant(cost.values()) if accountant is None else find_accountant(accountant)
    if not supports_all(by, cost.values()):
        raise SilodpError(
            f"accountant = '{by.name}' has no rule for a release of '{method.name}' under '{aggregator.name}' (integer "
            f"noise, for 'pld'): choose '{choose_accountant(cost.values()).name}', or leave it out.",
            code="accounting.unsupported",
            field="accountant",
        )
    spec = replace(spec, accountant=by)
    if budget is None:
        return spec
    spec = replace(spec, budget=replace(budget, delta=spec.noise_delta))
    _check_affordable(spec, cost)
    return spec


def describe_model(task: Task) -> ModelSpec:
    """Return the public facts of a task's model and loss."""
    dtype = str(task.dtype).removeprefix("torch.")
    return ModelSpec(task.size, dtype, f"{task.model!r}", task.loss.name)


def _check_method(method: object) -> None:
    if isinstance(method, type) or not hasattr(method, "dp_event"):
        raise SilodpError(
            f"method is {method!r}: give an object such as UldpAvg(noise_multiplier=5.0, clip=0.1).",
            code="argument.type",
            field="method",
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


def _check_task(data: PublicData, task: Task, method: Method) -> None:
    """Refuse a model or loss that the method cannot train."""
    from silodp.training.task import Task

    if not isinstance(task, Task):
        raise SilodpError(
            "task is no Task: make one with Task(model, loss, metrics).", code="argument.type", field="task"
        )
    if task.loss.most_classes is not None and (data.classes or 0) > task.loss.most_classes:
        raise SilodpError(
            f"the loss '{task.loss.name}' is for {task.loss.most_classes} classes, and the labels have "
            f"{data.classes}: use cross_entropy, with one output of the model per class.",
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
    # What breaks a model or a loss must not depend on anyone's record, and it must show before anything is spent.
    task.check(*data.synthetic_batch())


def _check_affordable(spec: RunSpec, cost: dict[Adversary, Event]) -> None:
    """Refuse a budget that not even one round can keep."""
    budget, accountant = spec.budget, spec.accountant
    if budget is None or Ledger(None, budget.delta, accountant, budget, run="").affords(cost):
        return
    spent = compute_epsilon([(cost[budget.adversary], 1)], budget.delta, accountant)
    raise SilodpError(
        f"budget.epsilon = {budget.epsilon} is less than one round costs against '{budget.adversary}' "
        f"(ε = {spent:.4g}): raise it, or raise noise_multiplier ('silodp plan' finds one).",
        code="budget.out_of_reach",
        field="budget.epsilon",
    )
