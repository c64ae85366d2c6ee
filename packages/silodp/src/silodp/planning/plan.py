"""The plan of a run: ε against every adversary, rounds within a budget, settings for a target, traffic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from silodp.accounting import calibration
from silodp.accounting.accountant import Accountant, EventCount, choose_accountant, find_accountant
from silodp.accounting.charges import ChargeCounts, compute_cost, count_events
from silodp.accounting.events import Event, explain_not_private
from silodp.accounting.guarantee import describe_any_dropouts, describe_unit, format_epsilon
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.aggregators.run_spec import RunSpec
from silodp.aggregators.series import Series
from silodp.config.build import get_fields
from silodp.config.resolve import ResolvedRun, resolve
from silodp.data.budgets import BudgetDistribution, load_budgets
from silodp.errors import SilodpError
from silodp.methods import Method
from silodp.planning.epsilon_by_sampling import (
    draw_epsilon_by_sampling,
    get_noise_multiplier,
    with_noise_multiplier,
)
from silodp.report.guarantee_text import format_claim, is_only_claimed
from silodp.runtime.guarantees import derive_guarantees, plan_charges
from silodp.text import join_names, pluralize

MAX_ROUNDS = 10**7
"""The upper end of a search for rounds."""
MAX_VARYING_ROUNDS = 10**4
"""The same where rounds may cost different amounts in any order: then every round is asked for its event."""
MAX_NOISE_RATIO = 1.0
"""Above it a model is said to learn next to nothing (see `measure_noise`)."""
MIN_NOISE = 0.01
"""The lower end of a search for a noise multiplier (see `calibration.calibrate_noise_multiplier`)."""

_ABOUT_TARGETS = ("epsilon", "adversary", "of", "unlimited", "reasons")


def plan_run(
    spec: RunSpec,
    *,
    accountant: Accountant | str | None = None,
    target: float | None = None,
    distribution: BudgetDistribution | None = None,
    picture: Path | None = None,
) -> dict[str, Any]:
    """Return ε against every adversary after T rounds, the rounds within a budget, settings for a target, and traffic.

    Args:
        spec: from `ResolvedRun.build_public_spec`.
        accountant: None takes the tightest that knows the noise.
        target: ε against the adversary of the budget, or "released". σ, T and q are each computed with the others as
            configured; none exceeds the target (None where no value meets it, with the reason).
        distribution: of privacy budgets; the plan contains what each of them implies.
        picture: file for a picture of ε against q; None draws none.

    Returns:
        JSON-ready. "adversaries": ε where all silos answer; where fewer may, "fewest": ε if only the required number
        ever answers, and "any_dropouts": the largest ε if silos drop out depending on the models.

    Raises:
        SilodpError: a setting that a run refuses, no value of any setting meets the target, or a target where
            privacy budgets determine ε.
    """
    if target is not None and spec.method.budgets.max_rounds is not None:
        raise SilodpError(
            f"target epsilon = {target:g}: the sampling probability or clip of each person follows from their budget, "
            "and so does ε of the run; set method.personal.largest_budget to the target, and "
            "method.personal.adversary to its adversary.",
            code="argument.conflict",
        )
    aggregator, rounds, budget = spec.aggregator, spec.rounds, spec.budget
    aggregator.check(spec)
    accountant = choose_accountant(spec.list_events()) if accountant is None else find_accountant(accountant)
    delta = spec.noise_delta
    charges = plan_charges(spec, accountant)
    derived = derive_guarantees(spec, charges)
    fewest = None  # None where all silos must answer
    if spec.min_silos < spec.population.silos:
        # With fewer survivors less noise is in the sum, as every silo adds a share for the required number only.
        least = plan_charges(spec, accountant, spec.min_silos).compute_cost("released")
        fewest = {"silos": spec.min_silos, "epsilon": least.epsilon if rounds else None}
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
        "noise_multiplier": get_noise_multiplier(spec.method),
        "adversaries": {a: one.cost.to_dict() for a, one in derived.items()},
        "fewest": fewest,
        "any_dropouts": None if fewest is None else {a: one.any_dropouts for a, one in derived.items()},
        "claims": [
            {"adversary": adversary, **claim}
            for adversary, one in derived.items()
            for claim in one.claims
            if is_only_claimed(claim["epsilon"], one.cost.epsilon)
        ],
        "budget": None,
        "target": None,
        "aggregation": aggregator.describe(spec),
        "noise_ratio": measure_noise(spec),
    }
    result |= _plan_series(spec, charges, accountant)
    if spec.isolate_units:
        result["isolate_units"] = True
    adversary: Adversary = "released"

    if budget is not None:
        adversary = budget.adversary
        result["budget"] = _describe_limit(spec, budget.epsilon, adversary, accountant)
    # A silo cannot know which others answer, so its own ledger charges for the fewest.
    if spec.silo_limits:
        result["silo_limits"] = [
            _describe_limit(spec, limit, against, accountant, spec.min_silos)
            for against, limit in spec.silo_limits.items()
        ]
    result["budgets"] = None
    if distribution is not None:
        kept_against = spec.method.budgets.adversary or adversary
        view = aggregator.views(spec.method, spec.population.silos)[kept_against]
        result["budgets"] = load_budgets("plan")(
            spec.method, distribution, view, rounds, delta, accountant, spec.population.users
        )

    training = replace(spec, series=())

    def charges_of(method: Method) -> Iterable[EventCount]:
        charged = Counter(plan_charges(replace(training, method=method), accountant).charged[adversary])
        # The series cost the same whatever the settings of the method that a target asks for.
        return (charged + charges.list_further(adversary)).items()

    if picture is not None:
        draw_epsilon_by_sampling(picture, spec.method, charges_of, distribution, rounds, delta, accountant)
    if target is not None:
        check_target(spec, target, adversary, accountant)
        result["target"] = {"epsilon": target, "adversary": adversary} | _solve(
            spec, adversary, charges_of, target, accountant
        )
    return result


def meet_target(resolved: ResolvedRun, target: float) -> ResolvedRun:
    """Return the run with the noise multiplier with which it meets a target ε.

    Args:
        resolved: The run; its own noise multiplier is replaced.
        target: ε against the adversary of the budget, or "released".

    Raises:
        SilodpError: no noise meets it, or ε does not follow from the noise alone (code argument.conflict).
    """
    plan = plan_run(resolved.build_public_spec()[0], accountant=resolved.accountant, target=target)
    found = plan["target"]["noise_multiplier"]
    if found is None:
        why = plan["target"]["reasons"]["noise_multiplier"]
        raise SilodpError(
            f"target epsilon = {target:g}: no noise multiplier meets it: {why}",
            code="argument.conflict",
            field="target_epsilon",
        )
    table = {**resolved.config.method, "noise_multiplier": round_safely(found, up=True)}
    return resolve(resolved.config.model_copy(update={"method": table}))


def measure_noise(spec: RunSpec) -> float | None:
    """Return √d·ν/(q·t·√T): the noise of all T rounds beside the longest that all persons' updates together can be.

    ν is the noise in each of the d numbers of a sum, t the largest norm of a sum, and q the share of the persons who
    take part. For `uldp-avg` it is √d/(μU) with μ = q√T/σ. None where there is no noise, or who adds it is not known.
    """
    method, rounds, bounds = spec.method, spec.rounds, spec.bounds
    noise = method.server_move(spec.population, 0, max(rounds, 1)).noise
    if not (method.releases_model and bounds and noise and rounds):
        return None
    return noise * math.sqrt(spec.size / rounds) / (method.mean_sampling * bounds.total)


def warn_of_noise(spec: RunSpec) -> str | None:
    """Return the warning about a model that the noise hides; None where there is none."""
    ratio = measure_noise(spec)
    if ratio is None or ratio <= MAX_NOISE_RATIO:
        return None
    most = math.floor(spec.size / ratio**2)
    return (
        f"the noise is {ratio:.2g} times as long as the updates of all {spec.population.users:,} persons together can "
        f"be, so the model can learn next to nothing: take more persons, a larger epsilon, or at most {most:,} of the "
        f"{spec.size:,} parameters"
    )


def check_target(spec: RunSpec, target: float, adversary: Adversary, accountant: Accountant) -> None:
    """Refuse a target ε that leaves nothing for the training, because other series alone cost as much.

    Raises:
        SilodpError: they do (code evaluation.target).
    """
    charged = plan_charges(spec, accountant).list_further(adversary)
    if not charged:
        return
    alone = compute_cost(charged.items(), spec.noise_delta, accountant).epsilon
    if alone is not None and alone >= target:
        names = [one.name for one in spec.charged]
        raise SilodpError(
            f"target epsilon = {target:g}: {pluralize(charged.total(), 'sum')} of {join_names(names)} alone cost ε = "
            f"{format_epsilon(alone)} against '{adversary}': lower {names[0]}.epsilon, ask less often, or raise the "
            "target.",
            code="evaluation.target",
            field=f"{names[0]}.epsilon",
        )


def _solve(
    spec: RunSpec,
    adversary: Adversary,
    charges_of: Callable[[Method], Iterable[EventCount]],
    target: float,
    accountant: Accountant,
) -> dict[str, Any]:
    """Return σ, T and sampling probability that each meet a target; "reasons" for those that cannot.

    Where every record has a different q, σ and T are for a record with q = 1. "unlimited" names those whose search
    ended at its limit: the target does not restrict them.
    """
    method, rounds, most = spec.method, spec.rounds, _limit_search(spec)
    by_budget = method.samples_by_budget

    # Each setting is solved with the others as configured, so the results are alternatives, not one set of settings.
    def with_field(name: str) -> Callable[[float], Iterable[EventCount]]:
        def make_charges(value: float) -> Iterable[EventCount]:
            if name == "noise_multiplier":
                changed = with_noise_multiplier(method, value)
            elif name == "record_sampling" and by_budget:
                return [(method.budgets.event_at_sampling(value), rounds)]
            else:
                changed = replace(cast(Any, method), **{name: value})
            if changed.samples_by_budget:
                return [(changed.budgets.event_at_sampling(1.0), rounds)]
            return charges_of(changed)

        return make_charges

    always = method.budgets.event_at_sampling(1.0) if by_budget else None
    count_first = _count_first_rounds(spec, adversary)

    def in_first(rounds: int) -> Iterable[EventCount]:
        return count_first(rounds) if always is None else [(always, rounds)]

    limits = (target, spec.noise_delta, accountant)
    solvers: dict[str, Callable[[], float]] = {}
    fields = [*get_fields(type(method)), *(["record_sampling"] if by_budget else [])]
    if "noise_multiplier" in fields:
        find_noise = calibration.calibrate_noise_multiplier
        solvers["noise_multiplier"] = partial(find_noise, with_field("noise_multiplier"), *limits)
    solvers["rounds"] = partial(calibration.calibrate_rounds, in_first, *limits, most)
    sampling = [field for field in fields if field.endswith("_sampling")]
    if not method.participation_rule.drawn_by_coins:  # there is no probability to choose
        sampling.remove("user_sampling")
    for name in sampling:
        solvers[name] = partial(calibration.calibrate_sampling_probability, with_field(name), *limits)
    found: dict[str, float | None] = {}
    refused: dict[str, SilodpError] = {}
    for name, solve in solvers.items():
        try:
            found[name] = solve()
        except SilodpError as error:
            found[name], refused[name] = None, error
    # One that works is enough for a plan; the others are listed with their reasons.
    if len(refused) == len(solvers):
        raise next(iter(refused.values()))
    ends = {"noise_multiplier": MIN_NOISE, "rounds": most}  # of the searches
    unlimited = [name for name, value in found.items() if value is not None and value == ends.get(name)]
    reasons = {name: str(error) for name, error in refused.items()}
    if "noise_multiplier" not in fields:
        found = {"noise_multiplier": None, **found}
        reasons["noise_multiplier"] = (
            f"{method.name} has no field of this name, so its noise is not solved for"
        )
    return {
        **found,
        "of": "a record of q = 1" if by_budget else None,
        "unlimited": unlimited,
        "reasons": reasons,
    }


def _plan_series(spec: RunSpec, charges: ChargeCounts, accountant: Accountant) -> dict[str, dict[str, Any]]:
    """Return, by its name, how often each additional series releases, and what that costs by itself."""
    found = {}
    for one in spec.series:
        if not one.asks_silos:
            continue
        # Without rounds there are no releases, and an event that is charged no times says whether ε is one at all.
        charged = charges.further.get(one.name) or {
            adversary: {event: 0} for adversary, event in spec.derived[one.name].round_events().items()
        }
        found[one.name] = {
            "times": one.count(spec.rounds),
            "epsilon": {
                a: compute_cost(charged[a].items(), spec.noise_delta, accountant).epsilon for a in ADVERSARIES
            },
            **one.describe_plan(spec),
        }
    return found


def _describe_limit(
    spec: RunSpec, limit: float, adversary: Adversary, accountant: Accountant, survivors: int | None = None
) -> dict[str, Any]:
    """Return a limit on ε, and how many rounds it is enough for if so many silos answer (None: all).

    "unlimited" is there, and True, where the search for rounds ended at its limit.
    """
    fitting, most = 0, _limit_search(spec)
    # Without a guarantee no number of rounds fits, not even 1.
    if explain_not_private(spec.round_events(survivors)[adversary]) is None:
        fitting = calibration.calibrate_rounds(
            _count_first_rounds(spec, adversary, survivors), limit, spec.noise_delta, accountant, most
        )
    return {
        "epsilon": limit,
        "adversary": adversary,
        "rounds": fitting,
        "fits": fitting >= spec.rounds,
        **({"unlimited": True} if fitting == most else {}),
    }


def _limit_search(spec: RunSpec) -> int:
    """Return the most rounds that a search for rounds tries."""
    return max(spec.rounds, MAX_VARYING_ROUNDS if spec.varies_by_round else MAX_ROUNDS)


def _count_first_rounds(
    spec: RunSpec, adversary: Adversary, survivors: int | None = None
) -> Callable[[int], list[EventCount]]:
    """Return a function of T: how often the first T rounds, with other series, charge each event."""

    # A search asks for the same rounds again and again.
    @cache
    def event_in(round_: int) -> Event:
        return spec.round_events(survivors, round_)[adversary]

    def count(rounds: int) -> list[EventCount]:
        charges = count_events(event_in, spec.number_rounds(rounds), spec.cost_period)
        if spec.charged:
            # How many there are, and their noise, may depend on the number of rounds.
            planned = plan_charges(replace(spec, rounds=rounds), spec.accountant, survivors)
            charges += planned.list_further(adversary).items()
        return charges

    return count


def format_plan(result: Mapping[str, Any], series: Iterable[Series] = ()) -> list[str]:
    """Return a plan as lines of text, with its additional series; no rounded value exceeds a target or budget."""
    head = f"{result['method']}, {pluralize(result['rounds'], 'round')}"
    noise = "" if result["noise_multiplier"] is None else f", σ = {result['noise_multiplier']:g}"
    whom = describe_unit(result["unit"])
    lines = [f"{head}{noise}, δ = {result['delta']:g}, accountant {result['accountant']}, for {whom}:"]
    for adversary, found in result["adversaries"].items():
        epsilon = f"ε = {format_epsilon(found['epsilon'])}"
        lines.append(f"  {adversary:9} {epsilon if found['private'] else 'no guarantee: ' + found['reason']}")
    if (fewest := result["fewest"]) is not None and fewest["epsilon"] is not None:
        lines.append(
            f"  if all {result['silos']} silos answer; released ε = {format_epsilon(fewest['epsilon'])} if only "
            f"{fewest['silos']} ever do, {describe_any_dropouts(result['any_dropouts']['released'])}"
        )
    for one in series:
        if (planned := result.get(one.name)) is not None:
            spent = ", ".join(f"{name} ε = {format_epsilon(e)}" for name, e in planned["epsilon"].items())
            lines += one.format_plan(spent, planned)
    if result.get("isolate_units"):
        lines.append("the row of every person (or record) is computed alone: isolate_units = true")
    limits = [("budget", result["budget"])] if result["budget"] is not None else []
    limits += [("limit of every silo,", limit) for limit in result.get("silo_limits", ())]
    for name, limit in limits:
        enough = f"enough for {pluralize(limit['rounds'], 'round')}"
        more = " or more" if limit.get("unlimited") else ""
        lines.append(f"{name} ε = {limit['epsilon']:g} ({limit['adversary']}): {enough}{more}")
    if result["budgets"] is not None:
        lines += load_budgets("plan-lines")(result["budgets"])
    if (target := result["target"]) is not None:
        whose = f" for {target['of']}" if target["of"] else ""
        lines.append(f"target ε = {target['epsilon']:g} ({target['adversary']}){whose}, changing one of:")
        asked = (name for name in target if name not in _ABOUT_TARGETS)
        lines += [f"  {name}{_format_solution(name, target)}" for name in asked]
    users = "" if result["unit"] == "record" else f", U = {result['users']:,}"
    size = f"{pluralize(result['silos'], 'silo')}{users}, d = {result['dimension']:,}"
    lines.append(f"aggregator {result['aggregator']}, {size}:")
    lines += _format_facts(result["aggregation"], "  ")
    return lines + [
        format_claim(claim["epsilon"], claim["why"], f" ({claim['adversary']})") for claim in result["claims"]
    ]


def remark_on_users(users: int) -> str:
    """Return the line on a number of persons that is assumed."""
    return f"  (U is in the data, which were not read: {users:,} is assumed; see --users)"


def _format_facts(facts: Mapping[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", *_format_facts(value, f"{indent}  ")]
        else:
            lines.append(f"{indent}{name}: {_format_fact(value)}")
    return lines


def _format_fact(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _format_solution(name: str, target: Mapping[str, Any]) -> str:
    value = target[name]
    if value is None:
        return f": {target['reasons'][name]}"
    if name in target["unlimited"]:
        return (
            f": any ≥ {value:g}" if name == "noise_multiplier" else f": not limited by this ε up to {value:,}"
        )
    if name == "rounds":
        return f" = {int(value)}" if value else " = 0, since one round costs more"
    return f" = {round_safely(value, up=name == 'noise_multiplier'):g}"


def round_safely(value: float, up: bool) -> float:
    """Return five figures, rounded to the side with the smaller ε."""
    if isinstance(value, int) or value == 0:
        return value
    # Up for noise, down for rounds and sampling: what is printed, typed in again, still meets the target.
    unit = 10.0 ** (math.floor(math.log10(value)) - 4)
    return (math.ceil(value / unit) if up else math.floor(value / unit)) * unit
