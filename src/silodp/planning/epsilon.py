"""What a number of rounds costs against an adversary, by the method, aggregator, view and event of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from silodp.accounting import accountant as accounting
from silodp.accounting.accountant import Accountant, EventCount, choose_accountant, find_accountant
from silodp.accounting.events import Event, find_costliest_event
from silodp.accounting.events import explain_not_private as reason_of
from silodp.accounting.group_privacy import PERSONS_RECORDS, scale_to_person
from silodp.accounting.guarantee import ADVERSARIES, Adversary, format_rounded_up, list_assumptions
from silodp.aggregators.run_spec import ModelSpec, RunSpec
from silodp.config.builders import build_aggregator, find_method_class
from silodp.config.construct import fields_of, validate_arguments
from silodp.config.public_spec import ASSUMED_USERS
from silodp.config.toml_values import MOST_SILOS
from silodp.data.public import PublicData
from silodp.errors import SilodpError, check_delta, check_whole
from silodp.methods import Method, Population
from silodp.report.guarantee_text import is_only_claimed
from silodp.runtime.guarantees import delta_warning

ACCOUNTING_DEFAULTS = {
    "clip": 1.0,
    "expected_batch_size": 1.0,
    "local_learning_rate": 1.0,
}
"""Required fields of methods that do not enter ε; `compute_epsilon` need not ask for them."""

BUDGET_DEFAULTS = {"largest_budget": 1.0, "budget": 1.0, "threshold": 1.0}
"""Required fields that only say how often records are drawn: not asked for either where a question says just that."""

LARGE_DELTA = 0.01
"""What is remarked on where nobody says how many persons there are: 1/U of a hundred persons."""

LARGE_MODEL = 10**6
"""d where a question does not say it: with integer noise ε grows with d, by less than two percent."""


@dataclass(frozen=True)
class Cost:
    """ε, or None and the reason why nothing is promised."""

    epsilon: float | None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"epsilon": self.epsilon, "private": self.epsilon is not None, "reason": self.reason}


def compute_cost(spent: Sequence[EventCount], delta: float, accountant: Accountant) -> Cost:
    """What all charges (event, count) cost together."""
    check_delta("delta", delta)
    nothing = next((why for event, _ in spent if (why := reason_of(event)) is not None), None)
    if nothing is not None:
        return Cost(None, nothing)
    value = accounting.compute_epsilon(spent, delta, accountant)
    if math.isinf(value):
        return Cost(None, f"the loss is not bounded at delta = {delta}")
    return Cost(value)


def count_events(event_in: Callable[[int], Event], rounds: int) -> list[EventCount]:
    """What rounds 0 to `rounds` - 1 cost, equal rounds together.

    Where units with budgets of their own retire, rounds cost less from some round on, and never again what they did.
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
    """ε of a method against one adversary, by the same method, aggregator, view and event that a run would use.

    `fields` are the method's own, of which those in `ACCOUNTING_DEFAULTS` may be missing (and where `record_sampling`
    stands for a record's own probability, those in `BUDGET_DEFAULTS`); `aggregation` the aggregator's. `users` U (None:
    as many as usual) and `dimension` d enter ε with integer noise only; where U is given, or δ at least `LARGE_DELTA`,
    the assumptions say of a δ that it promises too little. All silos are taken to answer; where fewer may,
    "any_dropouts" is ε at most if silos drop out depending on the models. Source: docs/privacy.md, section 3.

    Raises:
        SilodpError: a value out of range, a missing field, an unknown name.
    """
    check_delta("delta", delta)
    for name, value, least in (("rounds", rounds, 0), ("dimension", dimension, 1)):
        check_whole(name, value, least)
    if users is not None:
        check_whole("users", users)
    made, sampling = _made(method, fields, rounds, delta)
    adder = build_aggregator(aggregator, aggregation or {})
    _check_question(made, adversary, silos, colluding)
    wanted = None if accountant is None else find_accountant(accountant)
    names = tuple(f"silo-{s + 1}" for s in range(silos or 2))
    data = PublicData("question", names, ASSUMED_USERS if users is None else users, (), "real")
    model = ModelSpec(dimension)
    spec = RunSpec(data, model, made, adder, adder.min_silos_for(len(names)), rounds=rounds, delta=delta)
    adder.check(spec)
    spec = spec.calibrate()
    view = adder.views(made, len(names))[cast(Adversary, adversary)]
    view = replace(view, colluding=colluding, knows_sample=view.knows_sample or knows_sample)

    def event_in(round_: int, method: Method = spec.method, survivors: int | None = None) -> Event:
        if sampling is not None:
            return method.event_at_sampling(sampling)
        seen = replace(view, round=round_, survivors=survivors)
        return method.event_for_largest_budget(adder.event(replace(spec, method=method), seen), seen)

    def costliest_in(round_: int) -> Event:
        answering = range(spec.min_silos, len(names) + 1)
        return find_costliest_event([event_in(round_, survivors=survivors) for survivors in answering])

    charged = count_events(event_in, rounds) or [(event_in(0), 0)]
    chosen = wanted or choose_accountant(event for event, _ in charged)
    delta_of_noise = spec.noise_delta
    found = compute_cost(charged, delta_of_noise, chosen)
    any_dropouts = None
    if spec.min_silos < len(names):
        any_dropouts = compute_cost(count_events(costliest_in, rounds), delta_of_noise, chosen).epsilon

    def for_(records: int) -> Cost:
        own = [(scale_to_person(event, records), count) for event, count in charged]
        return compute_cost(own, delta_of_noise, chosen)

    def claimed_by(method: Method) -> Cost:
        return compute_cost([(event_in(0, method), rounds)], delta_of_noise, chosen)

    return {
        "method": made.name,
        "unit": made.unit,
        **found.to_dict(),
        "any_dropouts": any_dropouts,
        "persons": [
            {"records": records, **for_(records).to_dict()}
            for records in (PERSONS_RECORDS if made.unit == "record" else ())
        ],
        "claims": [
            {"epsilon": claim.epsilon, "why": claimed.assumptions[-1]}
            for claimed in ([made.paper_claim] if made.paper_claim else [])
            if (claim := claimed_by(claimed)).epsilon is not None
            and is_only_claimed(claim.epsilon, found.epsilon)
        ],
        "delta": delta,
        "adversary": adversary,
        "accountant": chosen.name,
        "aggregator": adder.name,
        "rounds": rounds,
        "noise_multiplier": getattr(made, "noise_multiplier", 0.0),
        "assumptions": [
            *list_assumptions(view, adder.adds_integers and spec.bounds is not None),
            *(adder.assumptions if adversary != "released" else ()),
            *(_without_fillers(text, fields) for text in made.assumptions),
            *remarks_on_delta(delta, users),
        ],
    }


def remarks_on_delta(delta: float, users: int | None) -> tuple[str, ...]:
    """What a run says of a δ not below 1/U; where U is not known, only of one too large for a hundred persons."""
    if users is not None:
        return delta_warning(delta, users)
    if delta < LARGE_DELTA:
        return ()
    return (
        f"δ = {delta:g} is accepted although it is not below 1/U where there are {math.ceil(1 / delta)} persons or "
        "more: take one well below, or say how many there are (users)",
    )


def _without_fillers(text: str, given: Mapping[str, Any]) -> str:
    """An assumption about a constant that nobody has named has no value to tell."""
    for name, value in {**ACCOUNTING_DEFAULTS, **BUDGET_DEFAULTS}.items():
        if name not in given:
            text = text.replace(f"{name} = {value:g} ", f"{name} ")
    return text


def format_records(result: Mapping[str, Any]) -> list[str]:
    """Whom an ε is about, where the unit is a record, and what persons with several records get; for reading."""
    if not result["persons"]:
        return []
    numbers = "/".join(str(person["records"]) for person in result["persons"])
    epsilons = "/".join(format_rounded_up(person["epsilon"]) for person in result["persons"])
    return ["  for one record", f"  for a person with {numbers} records: ε = {epsilons}"]


def _made(name: str, fields: Mapping[str, Any], rounds: int, delta: float) -> tuple[Method, float | None]:
    """The method, and the sampling probability that a question about one of its records names."""
    maker = find_method_class(name, "method")
    given = {key: value for key, value in fields.items() if key != "record_sampling"}
    personal = maker.samples_by_budget
    if not personal:
        given = dict(fields)
    elif "record_sampling" not in fields:
        raise SilodpError(
            f"record_sampling is missing: {name} draws every record with a probability of its own, so say which one.",
            code="argument.missing",
            field="record_sampling",
        )
    of_budgets = BUDGET_DEFAULTS if personal else {}
    run = {**ACCOUNTING_DEFAULTS, **of_budgets, "rounds": max(rounds, 1), "delta": delta}
    defaults = {key: value for key, value in run.items() if key in fields_of(maker)}
    made: Method = maker(**validate_arguments(maker, {**defaults, **given}, name))
    return made, fields["record_sampling"] if personal else None


def _check_question(method: Method, adversary: str, silos: int | None, colluding: int) -> None:
    if adversary not in ADVERSARIES:
        raise SilodpError(
            f"adversary = '{adversary}' is not known: use one of {', '.join(ADVERSARIES)}.",
            code="argument.value",
            field="adversary",
        )
    if silos is None and adversary == "silo" and method.unit == "user":
        raise SilodpError(
            "silos is missing: what another silo can learn depends on how many there are.",
            code="argument.missing",
            field="silos",
        )
    if silos is None and method.unit == "record" and method.bounds(Population(1, 1)) is not None:
        raise SilodpError(
            f"clients is missing: in {method.name} all clients' noise adds up, so ε depends on how many there are.",
            code="argument.missing",
            field="clients",
        )
    if silos is not None:
        check_whole("silos", silos, most=MOST_SILOS)
    check_whole("colluding", colluding, what="silos that pool what they know")
    if colluding > 1 and adversary != "silo":
        raise SilodpError(
            f"colluding = {colluding} is about silos: ask with adversary 'silo', or leave it out.",
            code="argument.conflict",
            field="colluding",
        )
