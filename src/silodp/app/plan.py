"""What a run would cost, before it is run: no data is touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from silodp.app.construct import check_whole, checked, choose, fields_of
from silodp.app.progress import rounded_up
from silodp.errors import SilodpError
from silodp.federation.aggregators import AGGREGATORS
from silodp.methods import METHODS, Method
from silodp.privacy import accounting, calibration
from silodp.privacy.accounting import Accountant
from silodp.privacy.events import Event, NoGuarantee
from silodp.privacy.guarantee import ADVERSARIES, Adversary, View, assumptions_of

IRRELEVANT = {"clip": 1.0, "expected_batch_size": 1.0, "local_learning_rate": 1.0}
"""Required fields of methods that do not enter ε; `epsilon` need not ask for them."""


MOST_ROUNDS = 10**7
"""No search for rounds goes beyond this."""
LEAST_NOISE = 0.01
"""No search for a noise multiplier goes below this (see `calibration.noise_multiplier_for`)."""


@dataclass(frozen=True)
class Cost:
    """ε, or None and the reason why nothing is promised."""

    epsilon: float | None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"epsilon": self.epsilon, "private": self.epsilon is not None, "reason": self.reason}


def cost(event: Event, rounds: int, delta: float, accountant: Accountant) -> Cost:
    """What `rounds` rounds cost that each cost `event`."""
    accounting.check_delta(delta)
    if isinstance(event, NoGuarantee):
        return Cost(None, event.reason)
    value = accounting.epsilon([(event, rounds)], delta, accountant)
    if math.isinf(value):
        return Cost(None, f"the loss is not bounded at delta = {delta}")
    return Cost(value)


def epsilon(
    method: str,
    fields: Mapping[str, Any],
    *,
    rounds: int,
    delta: float = 1e-5,
    accountant: str = "pld",
    adversary: str = "released",
    silos: int | None = None,
    aggregator: str = "plain",
    colluding: int = 1,
    knows_sample: bool = False,
) -> dict[str, Any]:
    """ε of a method against one adversary, by the same method object and view that a run would use.

    `fields` are the method's own; those in `IRRELEVANT` may be missing. SPEC section 2.

    Raises:
        SilodpError: a value out of range, a missing field, an unknown name.
    """
    maker = choose(method, METHODS, "method")
    defaults = {name: value for name, value in IRRELEVANT.items() if name in fields_of(maker)}
    made: Method = maker(**checked(maker, {**defaults, **fields}, method))
    view = _view(made, adversary, silos, aggregator, colluding, knows_sample)
    accounting.check_accountant(accountant)
    check_whole("rounds", rounds, 0)
    return {
        "method": made.name,
        "unit": made.unit,
        **cost(made.dp_event(view), rounds, delta, cast(Accountant, accountant)).to_dict(),
        "delta": delta,
        "adversary": adversary,
        "accountant": accountant,
        "aggregator": aggregator,
        "rounds": rounds,
        "noise_multiplier": getattr(made, "noise_multiplier", 0.0),
        "assumptions": [*assumptions_of(view), *made.assumptions],
    }


def _view(
    method: Method, adversary: str, silos: int | None, aggregator: str, colluding: int, knows_sample: bool
) -> View:
    if adversary not in ADVERSARIES:
        raise SilodpError(f"adversary = '{adversary}' is not known: use one of {', '.join(ADVERSARIES)}.")
    if silos is None and adversary == "silo" and method.unit == "user":
        raise SilodpError("silos is missing: what another silo can learn depends on how many there are.")
    if silos is not None:
        check_whole("silos", silos, 1)
    check_whole("colluding", colluding, 1, "silos that pool what they know")
    if colluding > 1 and adversary != "silo":
        raise SilodpError(
            f"colluding = {colluding} is about silos: ask with adversary 'silo', or leave it out."
        )
    view: View = choose(aggregator, AGGREGATORS, "aggregator")().views(method, silos or 2)[adversary]
    return replace(view, colluding=colluding, knows_sample=view.knows_sample or knows_sample)


def plan(
    method: Method,
    *,
    silos: int,
    rounds: int,
    delta: float,
    accountant: Accountant,
    aggregator: str,
    budget: tuple[float, Adversary] | None = None,
    target: float | None = None,
) -> dict[str, Any]:
    """ε of every adversary after `rounds`, the most rounds within a budget, and what meets a target.

    The target is meant for the budget's adversary, or "released"; σ, T and q are each sought with the others
    as they are, and none overshoots (None where no value meets the target, with the reason).
    """
    views = choose(aggregator, AGGREGATORS, "aggregator")().views(method, silos)
    events = {adversary: method.dp_event(view) for adversary, view in views.items()}
    result: dict[str, Any] = {
        "method": method.name,
        "rounds": rounds,
        "delta": delta,
        "accountant": accountant,
        "aggregator": aggregator,
        "silos": silos,
        "noise_multiplier": getattr(method, "noise_multiplier", 0.0),
        "adversaries": {a: cost(events[a], rounds, delta, accountant).to_dict() for a in ADVERSARIES},
        "budget": None,
        "target": None,
    }
    adversary: Adversary = "released"
    if budget is not None:
        limit, adversary = budget
        event = events[adversary]
        most = (
            0 if isinstance(event, NoGuarantee) else calibration.rounds_for(event, limit, delta, accountant)
        )
        result["budget"] = {"epsilon": limit, "adversary": adversary, "rounds": most, "fits": most >= rounds}
    if target is not None:
        result["target"] = {"epsilon": target, "adversary": adversary} | _solutions(
            method, views[adversary], rounds, target, delta, accountant
        )
    return result


def _solutions(
    method: Method, view: View, rounds: int, target: float, delta: float, accountant: Accountant
) -> dict[str, Any]:
    """The σ, the T and the sampling probability that meet a target, each alone; "reasons" for what cannot.

    "unlimited" names those whose search ended at its limit: the target asks nothing of them.
    """

    def with_field(name: str) -> Callable[[float], Event]:
        return lambda value: replace(method, **{name: value}).dp_event(view)  # type: ignore[type-var]

    solvers: dict[str, Callable[[], float]] = {}
    fields = fields_of(type(method))
    if "noise_multiplier" in fields:
        solvers["noise_multiplier"] = partial(
            calibration.noise_multiplier_for,
            with_field("noise_multiplier"),
            rounds,
            target,
            delta,
            accountant,
        )
    solvers["rounds"] = partial(
        calibration.rounds_for, method.dp_event(view), target, delta, accountant, MOST_ROUNDS
    )
    for name in fields:
        if name.endswith("_sampling"):
            solvers[name] = partial(
                calibration.sampling_probability_for, with_field(name), rounds, target, delta, accountant
            )
    found: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, solve in solvers.items():
        try:
            found[name] = solve()
        except SilodpError as error:
            found[name], reasons[name] = None, str(error)
    if len(reasons) == len(solvers):
        raise SilodpError(next(iter(reasons.values())))
    limits = {"noise_multiplier": LEAST_NOISE, "rounds": MOST_ROUNDS}
    unlimited = [name for name, value in found.items() if value is not None and value == limits.get(name)]
    return {**found, "unlimited": unlimited, "reasons": reasons}


def in_lines(result: Mapping[str, Any]) -> list[str]:
    """A plan for reading; rounded so that no printed value overshoots."""
    head = f"{result['method']}, {result['rounds']} rounds, σ = {result['noise_multiplier']:g}"
    lines = [f"{head}, δ = {result['delta']:g}:"]
    for adversary, found in result["adversaries"].items():
        promise = (
            f"ε = {rounded_up(found['epsilon'])}" if found["private"] else f"no guarantee: {found['reason']}"
        )
        lines.append(f"  {adversary:9} {promise}")
    if (budget := result["budget"]) is not None:
        lines.append(
            f"budget ε = {budget['epsilon']:g} ({budget['adversary']}): enough for "
            + (f"{budget['rounds']:,} rounds" + (" or more" if budget["rounds"] == MOST_ROUNDS else ""))
        )
    if (target := result["target"]) is not None:
        lines.append(f"target ε = {target['epsilon']:g} ({target['adversary']}), changing one of:")
        asked = (name for name in target if name not in ("epsilon", "adversary", "unlimited", "reasons"))
        lines += [f"  {name}{_solution(name, target)}" for name in asked]
    return lines


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
