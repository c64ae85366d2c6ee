"""The preparation of a run: its settings are checked, and become its specification."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

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
from silodp.errors import SilodpError, lookup
from silodp.methods import METHODS
from silodp.methods.base import Method, supports
from silodp.methods.participation import SampledRun
from silodp.runtime.inspection import inspect_model
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
    isolate_units: bool = False,
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
        isolate_units: See `train`.

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
        task = inspect_model(data, task, method, series)
    _check_isolate_units(isolate_units, method)
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
        isolate_units=isolate_units,
    )
    if spec.has_plugins:
        _check_period(spec)
    if method.make_server_optimizer().needs_noise and method.server_move(spec.population, 0, 1).noise is None:
        raise SilodpError(
            f"the server optimizer needs the noise of the sum, which in '{method.name}' only the silos know: leave "
            "method.server_optimizer out.",
            code="argument.conflict",
            field="method.server_optimizer",
        )
    method.participation_rule.check_run(
        SampledRun(aggregator.name, aggregator.sampled_by, spec.rounds, len(spec.names), spec.min_silos)
    )
    return spec


def _check_period(spec: RunSpec) -> None:
    """Refuse events of plug-ins that charge the rounds of an allocation differently: only the first one is paid for."""
    rounds = spec.method.participation_rule.rounds_drawn_together

    def list_allocated(number: int) -> list[ExtensionEvent]:
        nested = (inner for event in spec.round_events(None, number).values() for inner in list_nested(event))
        return [inner for inner in nested if isinstance(inner, ExtensionEvent)]

    paid: list[ExtensionEvent] = []
    for number in range(spec.rounds):
        found, place = list_allocated(number), number % rounds
        paid = found if place == 0 else paid
        if (found and rounds == 1) or found != [event.move_to_round(place, rounds) for event in paid]:
            raise SilodpError(
                f"{name_class(type(spec.method))}: the event of round {number + 1} is none of its allocation: of the "
                "rounds of an ExtensionEvent the first one is paid for, so rounds_drawn_together of the participation "
                "must be theirs, and all else in them the same.",
                code="plugin.returned",
                field="method",
            )


def _check_object(name: str, given: object, kind: type, remedy: str) -> None:
    """Refuse what is no object of a class, and show it: often it is the class itself."""
    if not isinstance(given, kind):
        raise SilodpError(f"{name} is {given!r}: set {remedy}.", code="argument.type", field=name)


def _check_isolate_units(isolate_units: bool, method: Method) -> None:
    """Refuse to compute units alone under a method that cannot."""
    check_type("isolate_units", isolate_units, bool, "True")
    if isolate_units and not supports(type(method), "can_isolate_units"):
        able = ", ".join(name for name, known in METHODS.items() if supports(known, "can_isolate_units"))
        raise SilodpError(
            f"isolate_units = true, and method {method.name} does not compute the row of every person (or record) "
            f"alone: leave it out, or choose a method that does ({able}).",
            code="argument.conflict",
            field="isolate_units",
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
