"""What a run would cost, before it is run: no data is touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from silodp.accounting import calibration
from silodp.accounting.accountant import Accountant, EventCount, choose_accountant, find_accountant
from silodp.accounting.events import Event, NonPrivate
from silodp.accounting.guarantee import ADVERSARIES, Adversary, describe_any_dropouts, format_rounded_up
from silodp.aggregators.run_spec import RunSpec
from silodp.config.budgets import BudgetDistribution
from silodp.config.construct import fields_of
from silodp.errors import SilodpError, counted
from silodp.methods import Method
from silodp.planning import budget_plan
from silodp.planning.budget_plan import noise_of, with_noise_multiplier
from silodp.planning.epsilon import compute_cost, count_events
from silodp.report.guarantee_text import CLAIMED, is_only_claimed

MOST_ROUNDS = 10**7
"""No search for rounds goes beyond this."""
LEAST_NOISE = 0.01
"""No search for a noise multiplier goes below this (see `calibration.noise_multiplier_for`)."""


_ABOUT_TARGETS = ("epsilon", "adversary", "of", "unlimited", "reasons")


def plan_run(
    spec: RunSpec,
    *,
    accountant: Accountant | str | None = None,
    target: float | None = None,
    own: BudgetDistribution | None = None,
    picture: Path | None = None,
) -> dict[str, Any]:
    """Return ε of every adversary after T rounds, the most rounds within a budget, what meets a target, and traffic.

    All silos are taken to answer; where fewer may, "fewest" says what models cost if only those ever do, and
    "any_dropouts" what each adversary's ε is at most if silos drop out depending on the models.
    The target is meant for the budget's adversary, or "released"; σ, T and q are each sought with the others
    as they are, and none overshoots (None where no value meets the target, with the reason). `own`: personal budgets;
    the plan says what each is given. `picture`: a file to draw ε against q in.

    Raises:
        SilodpError: what a run would refuse, no value of anything meets the target, or persons' own budgets say what
            the run costs.
    """
    if target is not None and spec.method.max_rounds is not None:
        raise SilodpError(
            f"target epsilon = {target:g}: everybody's rate or clip follows from her own budget, and with it the run's "
            "ε; set method.personal.largest_budget to the target, and method.personal.adversary to whom it is meant "
            "for.",
            code="argument.conflict",
        )
    aggregator, rounds, budget = spec.aggregator, spec.rounds, spec.budget
    aggregator.check(spec)
    events = spec.round_events()
    spent = {
        a: count_events(lambda r, a=a: spec.round_events(round_=r)[a], rounds)  # type: ignore[misc]
        for a in ADVERSARIES
    }
    accountant = choose_accountant(events.values()) if accountant is None else find_accountant(accountant)
    delta = spec.noise_delta
    result: dict[str, Any] = {
        "method": spec.method.name,
        "unit": spec.method.unit,
        "rounds": rounds,
        "delta": spec.delta,
        "accountant": accountant.name,
        "aggregator": aggregator.name,
        "silos": spec.population.silos,
        "users": spec.population.users,
        "dimension": spec.size,
        "noise_multiplier": noise_of(spec.method),
        "adversaries": {a: _cost(events[a], spent[a], delta, accountant) for a in ADVERSARIES},
        "fewest": _of_fewest(spec, delta, accountant),
        "any_dropouts": _of_any_dropouts(spec, delta, accountant),
        "claims": [],
        "budget": None,
        "target": None,
        "aggregation": aggregator.describe(spec),
    }
    result["claims"] = [
        claim
        for claim in _claims(spec, delta, accountant)
        if is_only_claimed(claim["epsilon"], result["adversaries"][claim["adversary"]]["epsilon"])
    ]
    adversary: Adversary = "released"
    if budget is not None:
        limit, adversary = budget.epsilon, budget.adversary
        event = events[adversary]
        most = (
            0
            if isinstance(event, NonPrivate)
            else calibration.calibrate_rounds(event, limit, delta, accountant)
        )
        whole = result["adversaries"][adversary][
            "epsilon"
        ]  # less than every round's cost where records retire
        most = max(most, rounds if whole is not None and whole <= limit else 0)
        result["budget"] = {"epsilon": limit, "adversary": adversary, "rounds": most, "fits": most >= rounds}
    view = aggregator.views(spec.method, spec.population.silos)[_met_against(spec.method, adversary)]
    result["budgets"] = budget_plan.budgets_plan(
        spec.method, own, view, rounds, delta, accountant, spec.population.users
    )

    def event_of(method: Method) -> Event:
        return replace(spec, method=method).round_events()[adversary]

    if picture is not None:
        budget_plan.draw(picture, spec.method, event_of, own, rounds, delta, accountant)
    if target is not None:
        result["target"] = {"epsilon": target, "adversary": adversary} | _solutions(
            spec.method, event_of, rounds, target, delta, accountant
        )
    return result


def _solutions(
    method: Method,
    event_of: Callable[[Method], Event],
    rounds: int,
    target: float,
    delta: float,
    accountant: Accountant,
) -> dict[str, Any]:
    """The σ, the T and the sampling probability that meet a target, each alone; "reasons" for what cannot.

    Where every record has a q of its own, what a record of q = 1 costs meets the target, or else the q sought.

    "unlimited" names those whose search ended at its limit: the target asks nothing of them.
    """

    def with_field(name: str) -> Callable[[float], Event]:
        def made(value: float) -> Event:
            if name == "noise_multiplier":
                changed = with_noise_multiplier(method, value)
            elif name == "record_sampling" and method.samples_by_budget:
                return method.event_at_sampling(value)
            else:
                changed = replace(cast(Any, method), **{name: value})
            return changed.event_at_sampling(1.0) if changed.samples_by_budget else event_of(changed)

        return made

    solvers: dict[str, Callable[[], float]] = {}
    fields = fields_of(type(method))
    if "noise_multiplier" in fields:
        solvers["noise_multiplier"] = partial(
            calibration.calibrate_noise_multiplier,
            with_field("noise_multiplier"),
            rounds,
            target,
            delta,
            accountant,
        )
    own_rates = method.samples_by_budget
    event = method.event_at_sampling(1.0) if own_rates else event_of(method)
    solvers["rounds"] = partial(calibration.calibrate_rounds, event, target, delta, accountant, MOST_ROUNDS)
    for name in [*fields, *(["record_sampling"] if own_rates else [])]:
        if name.endswith("_sampling"):
            solvers[name] = partial(
                calibration.calibrate_sampling_probability,
                with_field(name),
                rounds,
                target,
                delta,
                accountant,
            )
    found: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    refused: list[SilodpError] = []
    for name, solve in solvers.items():
        try:
            found[name] = solve()
        except SilodpError as error:
            found[name], reasons[name] = None, str(error)
            refused.append(error)
    if len(refused) == len(solvers):
        raise SilodpError(str(refused[0]), code=refused[0].code, field=refused[0].field)
    limits = {"noise_multiplier": LEAST_NOISE, "rounds": MOST_ROUNDS}
    unlimited = [name for name, value in found.items() if value is not None and value == limits.get(name)]
    return {
        **found,
        "of": "a record of q = 1" if own_rates else None,
        "unlimited": unlimited,
        "reasons": reasons,
    }


def _cost(event: Event, spent: list[EventCount], delta: float, accountant: Accountant) -> dict[str, Any]:
    """Of all rounds; where there are none, still whether anything is promised."""
    return compute_cost(spent or [(event, 0)], delta, accountant).to_dict()


def _of_fewest(spec: RunSpec, delta: float, accountant: Accountant) -> dict[str, Any] | None:
    """Return ε of the released models if never more silos answer than must; None where all must."""
    fewest = spec.min_silos
    if fewest == spec.population.silos:
        return None
    spent = count_events(lambda r: spec.round_events(fewest, r)["released"], spec.rounds)
    return {"silos": fewest, "epsilon": compute_cost(spent, delta, accountant).epsilon if spent else None}


def _of_any_dropouts(
    spec: RunSpec, delta: float, accountant: Accountant
) -> dict[Adversary, float | None] | None:
    """Return each adversary's ε if every round costs what it costs at most, whoever answers; None where all must."""
    if spec.min_silos == spec.population.silos:
        return None
    at_most = {
        a: count_events(lambda r, a=a: spec.costliest_events(r)[a], spec.rounds)  # type: ignore[misc]
        for a in ADVERSARIES
    }
    return {a: compute_cost(spent, delta, accountant).epsilon for a, spent in at_most.items()}


def _claims(spec: RunSpec, delta: float, accountant: Accountant) -> list[dict[str, Any]]:
    """What is promised by a paper and proven by nobody; never a part of the plan's ε."""
    claimed = spec.method.paper_claim
    if claimed is None:
        return []
    promised = replace(spec, method=claimed).round_events()
    found = {a: compute_cost([(promised[a], spec.rounds)], delta, accountant).epsilon for a in ADVERSARIES}
    return [
        {"adversary": adversary, "epsilon": value, "why": claimed.assumptions[-1]}
        for adversary, value in found.items()
        if value is not None
    ]


def _met_against(method: Method, adversary: Adversary) -> Adversary:
    """Whom persons' own budgets are met against."""
    return method.budget_adversary or adversary


def format_text(result: Mapping[str, Any]) -> list[str]:
    """A plan for reading; rounded so that no printed value overshoots."""
    head = f"{result['method']}, {counted(result['rounds'], 'round')}, σ = {result['noise_multiplier']:g}"
    whom = "one record" if result["unit"] == "record" else "all records of one person"
    lines = [f"{head}, δ = {result['delta']:g}, accountant {result['accountant']}, for {whom}:"]
    for adversary, found in result["adversaries"].items():
        promise = (
            f"ε = {format_rounded_up(found['epsilon'])}"
            if found["private"]
            else f"no guarantee: {found['reason']}"
        )
        lines.append(f"  {adversary:9} {promise}")
    if (fewest := result["fewest"]) is not None and fewest["epsilon"] is not None:
        lines.append(
            f"  if all {result['silos']} silos answer; released ε = {format_rounded_up(fewest['epsilon'])} if only "
            f"{fewest['silos']} ever do, {describe_any_dropouts(result['any_dropouts']['released'])}"
        )
    if (budget := result["budget"]) is not None:
        lines.append(
            f"budget ε = {budget['epsilon']:g} ({budget['adversary']}): enough for "
            + (counted(budget["rounds"], "round") + (" or more" if budget["rounds"] == MOST_ROUNDS else ""))
        )
    if (budgets := result["budgets"]) is not None:
        lines += budget_plan.format_text(budgets)
    if (target := result["target"]) is not None:
        whose = f" for {target['of']}" if target["of"] else ""
        lines.append(f"target ε = {target['epsilon']:g} ({target['adversary']}){whose}, changing one of:")
        asked = (name for name in target if name not in _ABOUT_TARGETS)
        lines += [f"  {name}{_solution(name, target)}" for name in asked]
    users = "" if result["unit"] == "record" else f", U = {result['users']:,}"
    size = f"{counted(result['silos'], 'silo')}{users}, d = {result['dimension']:,}"
    lines.append(f"aggregator {result['aggregator']}, {size}:")
    lines += _described(result["aggregation"], "  ")
    for claim in result["claims"]:
        lines.append(
            f"[{CLAIMED}: no guarantee] {claim['adversary']} ε = {format_rounded_up(claim['epsilon'])}: {claim['why']}"
        )
    return lines


def _described(facts: Mapping[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", *_described(value, f"{indent}  ")]
        else:
            lines.append(f"{indent}{name}: {_fact(value)}")
    return lines


def _fact(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _solution(name: str, target: Mapping[str, Any]) -> str:
    value = target[name]
    if value is None:
        return f": {target['reasons'][name]}"
    if name in target["unlimited"]:
        return (
            f": any ≥ {value:g}" if name == "noise_multiplier" else f": not limited by this ε up to {value:,}"
        )
    if name == "rounds":
        return f" = {int(value)}" if value else " = 0, since one round costs more"
    return f" = {_safe(value, up=name == 'noise_multiplier'):g}"


def _safe(value: float, up: bool) -> float:
    """Five figures, rounded to the private side."""
    if isinstance(value, int) or value == 0:
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 4)
    return (math.ceil(value / unit) if up else math.floor(value / unit)) * unit
