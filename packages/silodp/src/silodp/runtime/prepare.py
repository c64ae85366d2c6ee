"""The preparation of a run: its settings are checked, and become its specification.

A private record never decides whether a model fails, by which path its gradients are computed, or what a step costs:
all of that is found out on made-up records, whose labels are of every kind (`Task.use_examples`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from silodp.accounting.accountant import (
    Accountant,
    choose_accountant,
    compute_epsilon,
    find_accountant,
    supports_all,
)
from silodp.accounting.events import Event, ExtensionEvent, explain_not_private, list_nested
from silodp.accounting.ledger import Budget, Ledger
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.aggregators.base import Aggregator, check_attempts, check_statements
from silodp.aggregators.registry import AGGREGATORS
from silodp.aggregators.run_spec import ModelSpec, RunSpec
from silodp.aggregators.series import Series, find_series
from silodp.data.federation import Federation
from silodp.data.public import PublicData
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError, lookup
from silodp.methods import METHODS, FederationSize
from silodp.methods.base import Method, supports
from silodp.methods.participation import SampledRun
from silodp.settings import Delta, Epsilon, Whole, check_choice, check_type, check_value
from silodp.text import join_names, name_class

if TYPE_CHECKING:
    from silodp.training.task import Task

T = TypeVar("T")
_log = logging.getLogger(__name__)


def prepare_run(
    data: Federation | PublicData,
    task: Task | ModelSpec,
    method: Method,
    *,
    accountant: Accountant | str | None = None,
    **settings: Any,
) -> RunSpec:
    """Check a run by its public facts alone, and return its specification.

    Args:
        data: A federation, or its public facts.
        task: Model, loss and metrics; they are tried on made-up records. The public facts of a model are taken as they
            are: no code of a model is run.
        method: Unit of privacy, clipping and noise.
        accountant: See `train`.
        settings: Rounds and all others of `assemble_spec`; whether a federation has held-out records is known.

    Returns:
        The specification; its method is calibrated where units have privacy budgets.

    Raises:
        SilodpError: A setting that cannot be run.
    """
    _check_object("method", method, Method, "an object such as UldpAvg(noise_multiplier=5.0, clip=0.1)")
    if isinstance(data, Federation):
        settings["tested"] = data.test is not None and len(data.test) > 0
        series = _list_series(settings.pop("evaluation", None), settings.get("series", ()))
        settings["series"] = tuple(one.fit(data) for one in series)
        # The number of records is public where records are the unit, and private elsewhere.
        data = data.public(with_records=method.unit == "record")
    # First each setting alone, then what they mean together, then what they cost: the simplest fault is named first.
    spec = assemble_spec(data, task, method, **settings)
    method.check(data, spec.rounds, spec.delta)
    spec.aggregator.check(spec)
    spec = spec.calibrate()
    cost, every = spec.round_events(), spec.list_events()
    check_attempts(spec.aggregator, spec.rounds)
    # One accountant composes rounds and evaluations, against every adversary.
    default = choose_accountant(every)
    chosen = default if accountant is None else find_accountant(accountant)
    if not supports_all(chosen, every):
        why = " ('pld' has none for integer noise)" if chosen.name == "pld" else ""
        raise SilodpError(
            f"accountant = '{chosen.name}' has no rule for a release of '{method.name}' under "
            f"'{spec.aggregator.name}'{why}: choose '{default.name}', or leave it out.",
            code="accounting.unsupported",
            field="accountant",
        )
    # Before a silo is asked for anything: a run that cannot end its first round would only cost time.
    spec = replace(spec, accountant=chosen)
    _check_limits_affordable(spec)
    _check_affordable(spec, cost)
    return spec


def assemble_spec(
    data: PublicData,
    task: Task | ModelSpec,
    method: Method,
    *,
    rounds: int,
    aggregator: str | Aggregator = "plain",
    budget: Budget | Mapping[str, Any] | None = None,
    seed: int | None = None,
    delta: float | None = None,
    silo_limits: Mapping[Adversary, float] | None = None,
    tested: bool = False,
    evaluation: Series | Mapping[str, Any] | None = None,
    series: Sequence[Series] = (),
    separate: bool = False,
) -> RunSpec:
    """Check every setting of a run by itself, and put them together.

    Args:
        data: Public facts of the federation.
        task: Model, loss and metrics, which are tried on made-up records; or the public facts of a model.
        method: Unit of privacy, clipping and noise.
        rounds: See `train`.
        aggregator: See `train`.
        budget: See `train`.
        seed: See `train`.
        delta: See `train`.
        silo_limits: See `train`.
        tested: Whether held-out records, pooled, measure the model.
        evaluation: See `train`.
        series: See `train`.
        separate: See `train`.

    Returns:
        The specification, with the default accountant, and a method that is not calibrated. Whether a run can be made
        of it is not checked.

    Raises:
        SilodpError: A value out of range, or a model that cannot be trained.
    """
    check_type("federation", data, (Federation, PublicData), "Federation.from_tables(...)")
    Whole(0).check("rounds", rounds)
    if seed is not None:
        Whole(0).check("seed", seed)
        seed = int(seed)  # digests are made of JSON, which has no numpy integers
    if isinstance(aggregator, str):
        aggregator = lookup(aggregator, AGGREGATORS, "aggregator")()
    _check_object("aggregator", aggregator, Aggregator, "a name, or an object such as Masked(min_silos=3)")
    check_statements(aggregator)
    budget = _make(Budget, budget, "budget", "Budget(epsilon=4.0, delta=1e-5)")
    series = _list_series(evaluation, series)
    delta = choose_delta(delta, budget)
    if not isinstance(task, ModelSpec):
        check_task(data, task, method, series)
        task = describe_model(task)
    _check_separate(separate, method)
    spec = RunSpec(
        data,
        task,
        method,
        aggregator,
        aggregator.min_silos_for(len(data.silos)),
        rounds=int(rounds),
        delta=delta,
        # ε is compared with the budget at the part of δ that noise is accounted at.
        budget=None if budget is None else replace(budget, delta=delta * aggregator.delta_share),
        seed=seed,
        silo_limits=_check_limits(silo_limits),
        tested=tested and not any(one.measures_model for one in series),
        series=series,
        separate=separate,
    )
    if spec.has_plugins:
        _check_period(spec)
    method.participation_rule.check_run(
        SampledRun(aggregator.name, aggregator.sampled_by, spec.rounds, len(spec.names), spec.min_silos)
    )
    return spec


def _check_period(spec: RunSpec) -> None:
    """Refuse events of plug-ins that charge the rounds of an allocation differently: only the first one is paid for."""
    rounds = spec.method.participation_rule.period

    def list_allocated(number: int) -> list[ExtensionEvent]:
        nested = (inner for event in spec.round_events(None, number).values() for inner in list_nested(event))
        return [inner for inner in nested if isinstance(inner, ExtensionEvent)]

    paid: list[ExtensionEvent] = []
    for number in range(spec.rounds):
        found, place = list_allocated(number), number % rounds
        paid = found if place == 0 else paid
        if (found and rounds == 1) or found != [event.in_round(place, rounds) for event in paid]:
            raise SilodpError(
                f"{name_class(type(spec.method))}: the event of round {number + 1} is none of its allocation: of the "
                "rounds of a ExtensionEvent the first one is paid for, so the period of the participation must be "
                "theirs, and all else in them the same.",
                code="plugin.returned",
                field="method",
            )


def describe_model(task: Task) -> ModelSpec:
    """Return the public facts of a task's model and loss."""
    dtype = str(task.dtype).removeprefix("torch.")
    return ModelSpec(
        task.size,
        dtype,
        f"{task.model!r}",
        task.loss.name,
        task.constants_digest,
        task.start_digest,
        task.keeps_values,
        task.has_other_code,
    )


def _check_object(name: str, given: object, kind: type, remedy: str) -> None:
    """Refuse what is no object of a class, and show it: often it is the class itself."""
    if not isinstance(given, kind):
        raise SilodpError(f"{name} is {given!r}: set {remedy}.", code="argument.type", field=name)


def _check_separate(separate: bool, method: Method) -> None:
    """Refuse to compute units alone under a method that cannot."""
    check_type("separate", separate, bool, "True")
    if separate and not supports(type(method), "can_separate"):
        able = ", ".join(name for name, known in METHODS.items() if supports(known, "can_separate"))
        raise SilodpError(
            f"separate = true, and method {method.name} does not compute the row of every person (or record) alone: "
            f"leave it out, or choose a method that does ({able}).",
            code="argument.conflict",
            field="separate",
        )


def _make(maker: type[T], given: T | Mapping[str, Any] | None, name: str, example: str) -> T | None:
    """Return a setting that is a dataclass, made from its fields if need be."""
    if isinstance(given, Mapping):
        known: dict[str, Any] = {field.name: field.default for field in fields(maker)}  # type: ignore[arg-type]
        required = [field for field, default in known.items() if default is MISSING]
        if set(given) - set(known) or set(required) - set(given):
            others = ", ".join(sorted(set(known) - set(required)))
            raise SilodpError(
                f"{name} has the fields {sorted(given)}: set {join_names(required)}, and if need be any of {others}.",
                code="argument.value",
                field=name,
            )
        return maker(**given)
    if given is not None:
        check_type(name, given, maker, example)
    return given


def _list_series(
    evaluation: Series | Mapping[str, Any] | None, series: Sequence[Series]
) -> tuple[Series, ...]:
    """Return the additional series of a run; their names are those of ledgers, stores and random streams."""
    kind = find_series("evaluation") if isinstance(evaluation, Mapping) else Series
    made = _make(kind, evaluation, "evaluation", "Evaluation(across='sums', noise_multiplier=5.0)")
    check_type("series", series, Sequence, "[MySeries()]")
    found = (*([] if made is None else [made]), *series)
    for one in found:
        check_type("series", one, Series, "an object of a class derived from Series")
    names = [one.name for one in found]
    if len({*names}) < len(names) or not all(map(str.isidentifier, names)):
        raise SilodpError(
            f"series have the names {join_names(names)}: give each a name of its own, of letters, digits and '_'.",
            code="argument.value",
            field="series",
        )
    return found


def choose_delta(given: float | None, budget: Budget | None) -> float:
    """Return the δ of the run: the given one, else that of the budget, else 1e-5.

    Raises:
        SilodpError: The given δ is out of range, or the budget has another one.
    """
    if given is None:
        return 1e-5 if budget is None else float(budget.delta)
    check_value("delta", given, Delta)
    if budget is not None and budget.delta != given:
        raise SilodpError(
            f"budget.delta = {budget.delta} differs from delta = {given}: set both to the same value.",
            code="argument.conflict",
            field="budget.delta",
        )
    return float(given)


def _check_limits(given: Mapping[Adversary, float] | None) -> dict[Adversary, float]:
    if given is None:
        return {}
    check_type("silo_limits", given, Mapping, "{'server': 3.0}")
    for adversary, limit in given.items():
        check_choice("silo_limits", adversary, ADVERSARIES)
        check_value(f"silo_limits.{adversary}", limit, Epsilon)
    return dict(given)


def _check_limits_affordable(spec: RunSpec) -> None:
    """Refuse limits of silos under which they would refuse the first round."""
    # At the costliest number of survivors, as the gate of a silo charges.
    events = spec.costliest_events() if spec.silo_limits else {}
    for adversary, limit in spec.silo_limits.items():
        if reason := explain_not_private(events[adversary]):
            cause = (
                f"with these settings there is no ε against '{adversary}' ({reason}): change them, or leave the limit "
                "out"
            )
        else:
            spent = compute_epsilon([(events[adversary], 1)], spec.noise_delta, spec.accountant)
            if spent <= limit:
                continue
            cause = (
                f"one round costs ε = {spent:.4g} against '{adversary}': raise the limit, or raise noise_multiplier "
                "('silodp plan' finds one)"
            )
        raise SilodpError(
            f"silo_limits.{adversary} = {limit:g}, and {cause}.",
            code="budget.out_of_reach",
            field=f"silo_limits.{adversary}",
        )


def check_task(data: PublicData, task: Task, method: Method, series: Iterable[Series] = ()) -> None:
    """Refuse a model or loss that the method cannot train, or with whose outputs a series can do nothing.

    Args:
        data: Public facts of the federation.
        task: Model, loss and metrics; they are tried on made-up records.
        method: The method that trains the model.
        series: The additional series of the run.

    Raises:
        SilodpError: The loss does not fit the labels or the method, or the model cannot be trained (codes loss.*,
            model.*).
    """
    from silodp.training.losses import suggest_class_loss, suggest_loss
    from silodp.training.made_up import make_up_records
    from silodp.training.task import Task

    check_type("task", task, Task, "Task(model, loss, metrics)")
    if task.loss.most_classes is not None and (data.classes or 0) > task.loss.most_classes:
        learns = f"{task.loss.most_classes} classes" if task.loss.most_classes else "labels that are numbers"
        raise SilodpError(
            f"the loss '{task.loss.name}' is for {learns}, and the labels have {data.classes} classes: use "
            f"{suggest_class_loss(data.classes)}.",
            code="loss.wrong_labels",
            field="task.loss",
        )
    # Where labels are classes, the loss itself refuses: which one fits them depends on the outputs of the model.
    known = task.loss.labels or (data.labels,)
    if data.labels not in ("classes", *known):
        raise SilodpError(
            f"the loss '{task.loss.name}' is for labels of the kind {join_names(known, 'or')}, and these are "
            f"'{data.labels}': use {suggest_loss(data.labels)}.",
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
    # A failure of a model or loss must not depend on private records, and must appear before any ε is spent.
    x, y = task.tensors(*make_up_records(data))
    task.use_examples(x, y)
    local = getattr(method, "local", None)
    task.check(x, y, data.classes, longest=None if local is None else local.batch_size)
    for one in series:
        one.check_task(data, task, x, y)


def find_doubts(federation: Federation, task: Task, method: Method) -> list[str]:
    """Return sentences on keys of persons that may differ, few persons, weights, and a loss that learns from few.

    They have private counts: they are for the owner of the records alone.
    """
    from silodp.data.identity.linkage import find_few_persons, find_linkage_doubts

    of_keys, doubts = list[str](), list[str]()
    if method.unit == "user":
        of_keys = find_linkage_doubts(federation)
        doubts = of_keys + find_few_persons(federation.silos)
    if not method.releases_model:  # the others are about a model that learns
        return doubts
    silos, keys_differ = len(federation.silos), len(of_keys) > 1
    bounds = method.bounds(FederationSize(silos, federation.users))
    # With uniform weights a silo gives everyone 1/S, also a person who has all their records there.
    is_shared = bounds is not None and bounds.silos_sharing_weight > 1
    if is_shared and not keys_differ and (federation.counts() > 0).sum(0).max() <= 1:
        doubts.append(
            f"every person has records in one silo alone, and weights 'uniform' let it count for 1/{silos}: a model "
            'learns better with method.weighting = "present", which tells the server where persons have records '
            "unless the aggregator hides it"
        )
    return doubts + find_loss_doubts(federation.silos, task.loss.name)


def find_loss_doubts(silos: Sequence[SiloData], loss: str | None) -> list[str]:
    """Return a sentence where the loss is that of Cox (1972), and most persons have too few records in a silo for it.

    The sentence has private counts: it is for the owner of the records alone.
    """
    if loss != "cox":
        return []
    # (2, n): a user, and their number of records in one silo. The partial likelihood of Cox compares a record with
    # others of its batch, and with one record of a person there is nothing to compare.
    users = np.concatenate([np.unique(silo.user, return_counts=True) for silo in silos], axis=1)
    persons, several = len(np.unique(users[0])), len(np.unique(users[0][users[1] > 1]))
    if persons == 0 or 2 * several > persons:
        return []
    return [
        f"{persons - several:,} of {persons:,} persons have no two records in one silo, and the loss of Cox learns "
        "nothing from them: use exponential_survival, which learns from single records (task.loss)"
    ]


def _check_affordable(spec: RunSpec, cost: dict[Adversary, Event]) -> None:
    """Refuse a budget that is smaller than the ε of one round."""
    budget, accountant = spec.budget, spec.accountant
    if budget is None:
        return
    # The ledger of the run will decide in the same way, with the last release of every series reserved.
    ledger = Ledger(None, budget.delta, accountant, budget, run="")
    ledger.reserved = {one.name: spec.derived[one.name].round_events() for one in spec.charged}
    if ledger.affords(cost):
        return
    charges = Counter(events[budget.adversary] for events in (cost, *ledger.reserved.values()))
    spent = compute_epsilon(charges.items(), budget.delta, accountant)
    what = join_names(["one round", *ledger.reserved])
    raise SilodpError(
        f"budget.epsilon = {budget.epsilon} is less than {what} costs against '{budget.adversary}' "
        f"(ε = {spent:.4g}): raise it, or raise noise_multiplier ('silodp plan' finds one).",
        code="budget.out_of_reach",
        field="budget.epsilon",
    )
