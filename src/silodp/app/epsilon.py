"""What a number of rounds costs against an adversary, by the method, aggregator, view and event of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from silodp.app.builders import build_aggregator
from silodp.app.construct import check_whole, checked, choose, fields_of
from silodp.app.outline import USUAL_USERS
from silodp.errors import SilodpError
from silodp.federation.aggregation import Setting
from silodp.methods import METHODS, Method, Population
from silodp.privacy import accounting
from silodp.privacy.accounting import Accountant, usual_accountant
from silodp.privacy.events import Event, NoGuarantee
from silodp.privacy.guarantee import ADVERSARIES, Adversary, assumptions_of

IRRELEVANT = {"clip": 1.0, "expected_batch_size": 1.0, "local_learning_rate": 1.0}
"""Required fields of methods that do not enter ε; `epsilon` need not ask for them."""

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
    accountant: str | None = None,
    adversary: str = "released",
    silos: int | None = None,
    aggregator: str = "plain",
    aggregation: Mapping[str, Any] | None = None,
    users: int = USUAL_USERS,
    dimension: int = LARGE_MODEL,
    colluding: int = 1,
    knows_sample: bool = False,
) -> dict[str, Any]:
    """ε of a method against one adversary, by the same method, aggregator, view and event that a run would use.

    `fields` are the method's own, of which those in `IRRELEVANT` may be missing; `aggregation` the aggregator's.
    `users` U and `dimension` d matter with integer noise only. SPEC section 2.

    Raises:
        SilodpError: a value out of range, a missing field, an unknown name.
    """
    maker = choose(method, METHODS, "method")
    defaults = {name: value for name, value in IRRELEVANT.items() if name in fields_of(maker)}
    made: Method = maker(**checked(maker, {**defaults, **fields}, method))
    adder = build_aggregator(aggregator, aggregation or {})
    _check_question(made, adversary, silos, colluding)
    if accountant is not None:
        accounting.check_accountant(accountant)
    for name, value, least in (("rounds", rounds, 0), ("users", users, 1), ("dimension", dimension, 1)):
        check_whole(name, value, least)
    accounting.check_delta(delta)
    names = tuple(f"silo-{s + 1}" for s in range(silos or 2))
    population = Population(len(names), users, adder.shares_for(len(names)))
    setting = Setting("", names, made, population, dimension, delta=delta)
    adder.check(setting)
    view = adder.views(made, len(names))[cast(Adversary, adversary)]
    view = replace(view, colluding=colluding, knows_sample=view.knows_sample or knows_sample)
    event = adder.event(setting, view)
    chosen = cast(Accountant, accountant) if accountant else usual_accountant([event])
    return {
        "method": made.name,
        "unit": made.unit,
        **cost(event, rounds, delta * adder.delta_share, chosen).to_dict(),
        "delta": delta,
        "adversary": adversary,
        "accountant": chosen,
        "aggregator": adder.name,
        "rounds": rounds,
        "noise_multiplier": getattr(made, "noise_multiplier", 0.0),
        "assumptions": [
            *assumptions_of(view, adder.exact and setting.bounds is not None),
            *(adder.assumptions if adversary != "released" else ()),
            *made.assumptions,
        ],
    }


def _check_question(method: Method, adversary: str, silos: int | None, colluding: int) -> None:
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
