"""ε of a number of rounds against an adversary, by the method, aggregator, view and event of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from silodp.accounting import accountant as accounting
from silodp.accounting.accountant import Accountant, EventCount, choose_accountant, find_accountant
from silodp.accounting.events import (
    Event,
    Group,
    explain_not_private,
    find_costliest_event,
    list_nested,
    reveal_samples,
)
from silodp.accounting.group_privacy import PERSONS_RECORDS, scale_to_person
from silodp.accounting.guarantee import ADVERSARIES, Adversary, format_rounded_up, list_assumptions
from silodp.aggregators.base import check_attempts
from silodp.aggregators.run_spec import ModelSpec, RunSpec
from silodp.config.arguments import get_fields, validate_arguments
from silodp.config.build import build_aggregator, find_method_class
from silodp.config.toml_values import MOST_SILOS
from silodp.data.public import ASSUMED_USERS, PublicData
from silodp.errors import SilodpError
from silodp.methods import FederationSize, Method
from silodp.report.guarantee_text import is_only_claimed
from silodp.runtime.guarantees import compute_epsilon_beyond, compute_linkage, delta_warning
from silodp.settings import Delta, Whole, check_choice, check_value

ACCOUNTING_DEFAULTS = {
    "clip": 1.0,
    "expected_batch_size": 1.0,
    "local_learning_rate": 1.0,
}
"""Required fields of methods on which ε does not depend; `compute_epsilon` fills them in."""

BUDGET_DEFAULTS = {"largest_budget": 1.0, "budget": 1.0, "threshold": 1.0}
"""Required fields that only determine sampling probabilities; filled in where `record_sampling` is given."""

LARGE_DELTA = 0.01
"""δ from which there is a remark where U is not known: 1/U of a hundred persons."""

LARGE_MODEL = 10**6
"""d where it is not given: with integer noise ε grows with d, by less than two percent."""


@dataclass(frozen=True)
class Cost:
    """ε, or None and the reason why there is no guarantee."""

    epsilon: float | None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the entries of JSON output."""
        return {"epsilon": self.epsilon, "private": self.epsilon is not None, "reason": self.reason}


def compute_cost(spent: Sequence[EventCount], delta: float, accountant: Accountant) -> Cost:
    """Return ε of all charges together.

    Args:
        spent: (event, count).
        delta: δ.
        accountant: composes the events.

    Raises:
        SilodpError: δ out of range, or an event that the accountant does not know.
    """
    check_value("delta", delta, Delta)
    reason = next((why for event, _ in spent if (why := explain_not_private(event)) is not None), None)
    if reason is not None:
        return Cost(None, reason)
    value = accounting.compute_epsilon(spent, delta, accountant)
    return _cost_of(value, delta)


def _cost_of(epsilon: float, delta: float) -> Cost:
    return (
        Cost(epsilon) if math.isfinite(epsilon) else Cost(None, f"the loss is not bounded at delta = {delta}")
    )


def count_events(event_in: Callable[[int], Event], rounds: int) -> list[EventCount]:
    """Return the events of rounds 0 to `rounds` - 1 with their counts.

    Where units with budgets retire, rounds cost less from some round on and never more again; so equal rounds are
    neighbors, and each change is found by bisection.

    Args:
        event_in: returns the event of a round.
        rounds: T.
    """
    found: list[EventCount] = []
    begin = 0
    while begin < rounds:
        event = event_in(begin)
        last, beyond = begin, rounds
        while beyond - last > 1:
            middle = rounds - 1 if beyond == rounds else (last + beyond) // 2
            last, beyond = (middle, beyond) if event_in(middle) == event else (last, middle)
        found.append((event, last - begin + 1))
        begin = last + 1
    return found


def count_run(
    spec: RunSpec, adversary: Adversary, survivors: int | None = None, *, costliest: bool = False
) -> list[EventCount]:
    """Return the events of all rounds and evaluations of a run with their counts.

    Args:
        spec: of the run.
        adversary: against whom.
        survivors: number of silos that answer; None: all.
        costliest: whether each costs the most over all numbers of answers instead.
    """

    def event_in(about: RunSpec, round_: int) -> Event:
        events = about.costliest_events(round_) if costliest else about.round_events(survivors, round_)
        return events[adversary]

    found = count_events(lambda round_: event_in(spec, round_), spec.rounds)
    if spec.charged_evaluation is not None and spec.evaluations:
        found.append((event_in(spec.charged_evaluation, 0), spec.evaluations))
    return found


def compute_largest_cost(
    spec: RunSpec, delta: float, accountant: Accountant
) -> dict[Adversary, float | None]:
    """Return ε of all rounds and evaluations by adversary if each has its largest cost over all numbers of answers.

    Args:
        spec: of the run.
        delta: δ.
        accountant: composes the events.
    """
    at_most = {a: count_run(spec, a, costliest=True) for a in ADVERSARIES}
    return {a: compute_cost(spent, delta, accountant).epsilon for a, spent in at_most.items()}


def compute_epsilon(
    method: str,
    fields: Mapping[str, Any],
    *,
    rounds: int,
    delta: float = 1e-5,
    accountant: Accountant | str | None = None,
    adversary: str = "released",
    silos: int | None = None,
    aggregator: str = "plain",
    aggregation: Mapping[str, Any] | None = None,
    users: int | None = None,
    dimension: int = LARGE_MODEL,
    colluding: int = 1,
    knows_sample: bool = False,
) -> dict[str, Any]:
    """Compute ε of a method against one adversary, by the same method, aggregator, view and event as in a run.

    Args:
        method: name or reference.
        fields: of the method; those in `ACCOUNTING_DEFAULTS` may be missing, and where `record_sampling` is the
            sampling probability of one record with a budget, those in `BUDGET_DEFAULTS`.
        rounds: T.
        delta: δ.
        accountant: name or object; None takes the tightest that knows the noise.
        adversary: "released", "server" or "silo".
        silos: S; needed where ε depends on it.
        aggregator: name or reference.
        aggregation: settings of the aggregator.
        users: U, None takes `ASSUMED_USERS`; ε depends on it with integer noise only.
        dimension: d; ε depends on it with integer noise only.
        colluding: number of silos that pool what they know, the adversary included.
        knows_sample: whether the adversary knows who was sampled, and where records are sampled, which ones.

    Returns:
        JSON-ready: "epsilon" (None: no guarantee, with the "reason"), where all silos answer; "any_dropouts", the
        largest ε if silos drop out depending on the models; "persons", "claims" and "assumptions"; "linkage", ε of a
        person who is not recognized as one, where the number of silos is given.

    Raises:
        SilodpError: a value out of range, a missing field, an unknown name.

    Source: docs/privacy.md, section 3.
    """
    check_value("delta", delta, Delta)
    for name, value, least in (("rounds", rounds, 0), ("dimension", dimension, 1)):
        Whole(least).check(name, value)
    if users is not None:
        Whole().check("users", users)
    made, sampling = _build_method(method, fields, rounds, delta)
    chosen_aggregator = build_aggregator(aggregator, aggregation or {})
    _check_question(made, adversary, silos, colluding)
    wanted = None if accountant is None else find_accountant(accountant)
    names = tuple(f"silo-{s + 1}" for s in range(silos or 2))
    data = PublicData("question", names, ASSUMED_USERS if users is None else users, (), "real")
    model = ModelSpec(dimension)
    spec = RunSpec(
        data,
        model,
        made,
        chosen_aggregator,
        chosen_aggregator.min_silos_for(len(names)),
        rounds=rounds,
        delta=delta,
    )
    chosen_aggregator.check(spec)
    spec = spec.calibrate()
    view = chosen_aggregator.views(made, len(names))[cast(Adversary, adversary)]
    view = replace(view, colluding=colluding, knows_sample=view.knows_sample or knows_sample)

    def event_in(round_: int, method: Method = spec.method, survivors: int | None = None) -> Event:
        if sampling is not None:
            event = method.budgets.event_at_sampling(sampling)
        else:
            seen = replace(view, round=round_, survivors=survivors)
            event = method.budgets.event_for_largest_budget(
                chosen_aggregator.event(replace(spec, method=method), seen), seen
            )
        return _reveal_samples(event, method) if knows_sample else event

    def costliest_in(round_: int) -> Event:
        answering = range(spec.min_silos, len(names) + 1)
        return find_costliest_event([event_in(round_, survivors=survivors) for survivors in answering])

    check_attempts(chosen_aggregator, rounds)
    charged = count_events(event_in, rounds) or [(event_in(0), 0)]
    chosen = wanted or choose_accountant(event for event, _ in charged)
    delta_of_noise = spec.noise_delta
    found = compute_cost(charged, delta_of_noise, chosen)
    if knows_sample and found.epsilon is not None:
        found = _cost_of(compute_epsilon_beyond(spec, view.adversary, charged, chosen), delta)
    any_dropouts = None
    if spec.min_silos < len(names):
        any_dropouts = compute_cost(count_events(costliest_in, rounds), delta_of_noise, chosen).epsilon

    def cost_of_person(records: int) -> Cost:
        theirs = [(scale_to_person(event, records), count) for event, count in charged]
        return compute_cost(theirs, delta_of_noise, chosen)

    def claimed_by(method: Method) -> Cost:
        return compute_cost([(event_in(0, method), rounds)], delta_of_noise, chosen)

    # It depends on the number of silos, which a question need not name.
    fewest = replace(view, survivors=spec.min_silos)
    linkage = () if silos is None else compute_linkage(spec, fewest, charged, chosen)
    return {
        "method": made.name,
        "unit": made.unit,
        **found.to_dict(),
        "any_dropouts": any_dropouts,
        "persons": [
            {"records": records, **cost_of_person(records).to_dict()}
            for records in (PERSONS_RECORDS if made.unit == "record" else ())
        ],
        "claims": [
            {"epsilon": claim.epsilon, "why": claimed.assumptions[-1]}
            for claimed in ([made.paper_claim] if made.paper_claim else [])
            if (claim := claimed_by(claimed)).epsilon is not None
            and is_only_claimed(claim.epsilon, found.epsilon)
        ],
        "linkage": list(linkage),
        "delta": delta,
        "adversary": adversary,
        "accountant": chosen.name,
        "aggregator": chosen_aggregator.name,
        "rounds": rounds,
        "noise_multiplier": made.noise_setting,
        "assumptions": [
            *list_assumptions(
                view,
                chosen_aggregator.adds_integers and spec.bounds is not None,
                samples_users=made.samples_users,
            ),
            *(chosen_aggregator.assumptions if adversary != "released" else ()),
            *(_without_fillers(text, fields) for text in made.assumptions),
            *list_delta_remarks(delta, users),
        ],
    }


def list_delta_remarks(delta: float, users: int | None) -> tuple[str, ...]:
    """Return the remark on a δ that is not below 1/U; where U is None, on one too large for a hundred persons."""
    if users is not None:
        return delta_warning(delta, users)
    if delta < LARGE_DELTA:
        return ()
    return (
        f"δ = {delta:g} is accepted although it is not below 1/U where there are {math.ceil(1 / delta)} persons or "
        "more: take one well below, or give the number of persons (users)",
    )


def _without_fillers(text: str, given: Mapping[str, Any]) -> str:
    """Return an assumption without the values of constants that were filled in."""
    for name, value in {**ACCOUNTING_DEFAULTS, **BUDGET_DEFAULTS}.items():
        if name not in given:
            text = text.replace(f"{name} = {value:g} ", f"{name} ")
    return text


def format_records(result: Mapping[str, Any]) -> list[str]:
    """Return lines on ε of one record and of persons with several records; none where the unit is a person."""
    if not result["persons"]:
        return []
    numbers = "/".join(str(person["records"]) for person in result["persons"])
    epsilons = "/".join(format_rounded_up(person["epsilon"]) for person in result["persons"])
    return ["  for one record", f"  for a person with {numbers} records: ε = {epsilons}"]


def format_linkage(result: Mapping[str, Any]) -> list[str]:
    """Return lines on ε of a person who is not recognized as one."""
    return [
        f"  for a person with {row['case']}: ε = {format_rounded_up(row['epsilon'])}"
        + (" (an estimate, not a guarantee)" if row["estimate"] else "")
        for row in result["linkage"]
    ]


def _build_method(
    name: str, fields: Mapping[str, Any], rounds: int, delta: float
) -> tuple[Method, float | None]:
    """Return the method, and the sampling probability where the question is about one record with a budget."""
    maker = find_method_class(name, "method")
    given = {key: value for key, value in fields.items() if key != "record_sampling"}
    personal = maker.samples_by_budget
    if not personal:
        given = dict(fields)
    elif "record_sampling" not in fields:
        raise SilodpError(
            f"record_sampling is missing: {name} draws every record with a different probability, so name one.",
            code="argument.missing",
            field="record_sampling",
        )
    elif "largest_budget" in fields:
        raise SilodpError(
            f"largest_budget = {fields['largest_budget']} beside record_sampling: ε is that of a record which is drawn "
            "with record_sampling, whatever its budget; leave largest_budget out.",
            code="argument.conflict",
            field="largest_budget",
        )
    of_budgets = BUDGET_DEFAULTS if personal else {}
    run = {**ACCOUNTING_DEFAULTS, **of_budgets, "rounds": max(rounds, 1), "delta": delta}
    defaults = {key: value for key, value in run.items() if key in get_fields(maker)}
    made: Method = maker(**validate_arguments(maker, {**defaults, **given}, name))
    return made, fields["record_sampling"] if personal else None


def _reveal_samples(event: Event, method: Method) -> Event:
    """Return the event against an adversary who learns all samples; refuse where no close bound of it is known."""
    # By the accountants' rules for a group around a revealed sample, records that are drawn now and then would cost as
    # much as records that are always in.
    if any(isinstance(inner, Group) and inner.size > 1 for inner in list_nested(event)):
        raise SilodpError(
            f"knows_sample with {method.name}: each record of a person is drawn by a coin of its own, and no bound is "
            "computed against an adversary who sees these coins; leave knows_sample out.",
            code="argument.conflict",
            field="knows_sample",
        )
    return reveal_samples(event)


def _check_question(method: Method, adversary: str, silos: int | None, colluding: int) -> None:
    check_choice("adversary", adversary, ADVERSARIES)
    if silos is None and adversary == "silo" and method.unit == "user":
        raise SilodpError(
            "silos is missing: ε against another silo depends on their number.",
            code="argument.missing",
            field="silos",
        )
    if silos is None and method.unit == "user" and method.bounds(FederationSize(1, 1)) is None:
        raise SilodpError(
            f"silos is missing: {method.name} splits a person's records over the silos, so ε depends on their number.",
            code="argument.missing",
            field="silos",
        )
    if silos is None and method.unit == "record" and method.bounds(FederationSize(1, 1)) is not None:
        raise SilodpError(
            f"clients is missing: in {method.name} the noise of all clients adds up, so ε depends on their number.",
            code="argument.missing",
            field="clients",
        )
    if silos is not None:
        Whole(limit=MOST_SILOS).check("silos", silos)
    Whole(what="silos that pool what they know").check("colluding", colluding)
    if colluding > 1 and adversary != "silo":
        raise SilodpError(
            f"colluding = {colluding} is about silos: set adversary = 'silo', or leave it out.",
            code="argument.conflict",
            field="colluding",
        )
