"""What a run promises whom, written from its ledger."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Event, NonPrivate
from silodp.accounting.group_privacy import PERSONS_RECORDS, epsilon_for_person
from silodp.accounting.guarantee import (
    ADVERSARIES,
    HELD_OUT,
    NOT_COVERED,
    Adversary,
    Guarantee,
    View,
    list_assumptions,
)
from silodp.accounting.ledger import Ledger
from silodp.aggregators.base import costliest_events, round_events
from silodp.data.federation import Federation
from silodp.methods.base import Method
from silodp.runtime.server import Server


def build_guarantees(
    federation: Federation, method: Method, server: Server, ledger: Ledger, delta: float, secret: bool
) -> dict[Adversary, Guarantee]:
    """Against every adversary, for the rounds that the ledger has; `secret`: all randomness was the system's."""
    views = server.aggregator.views(method, server.setting.population.silos)
    integers = server.aggregator.adds_integers and method.bounds(server.setting.population) is not None
    tested = federation.test is not None and len(federation.test.x) > 0
    at_most = _at_most(server, ledger)
    result: dict[Adversary, Guarantee] = {}
    for adversary in ADVERSARIES:
        spent = server.spent()[adversary]
        result[adversary] = Guarantee(
            adversary=adversary,
            unit=method.unit,
            epsilon=spent,
            delta=delta,
            rounds=ledger.rounds,
            accountant=ledger.accountant,
            method=method.name,
            private=spent is not None,
            releasable=secret and spent is not None,
            reason=server.reason(adversary),
            assumptions=()
            if spent is None
            else list_assumptions(views[adversary], integers)
            + (server.aggregator.assumptions if adversary != "released" else ())
            + method.assumptions
            + federation.assumptions
            + delta_warning(delta, federation.users),
            not_covered=tuple(what for what in NOT_COVERED if tested or what != HELD_OUT),
            persons=() if spent is None or method.unit != "record" else _persons(ledger, adversary),
            groups=() if spent is None else _groups(federation, server, ledger, views[adversary]),
            claims=_claims(server, adversary, ledger),
            any_dropouts=None if spent is None else _of_any_dropouts(at_most, adversary, ledger),
        )
    return result


def delta_warning(delta: float, users: int) -> tuple[str, ...]:
    """The remark on a δ that is not below 1/U; nothing on others."""
    if delta * users < 1:
        return ()
    return (
        f"δ = {delta:g} is accepted although it is not below 1/U = {1 / users:.2g}: a mechanism that publishes one "
        "person's records outright has such a δ; take one well below",
    )


def _at_most(server: Server, ledger: Ledger) -> list[Mapping[Adversary, Event]]:
    """Return, for every release charged, what it costs if the costliest number of silos answers; [] if all must."""
    setting, aggregator = server.setting, server.aggregator
    if setting.population.m == setting.population.silos:
        return []
    return [costliest_events(aggregator, setting, charge.round, charge.release) for charge in ledger.history]


def _of_any_dropouts(
    at_most: list[Mapping[Adversary, Event]], adversary: Adversary, ledger: Ledger
) -> float | None:
    """Return ε of all releases together; None where all silos must answer, or nothing was released."""
    if not at_most:
        return None
    spent = compute_epsilon(
        Counter(events[adversary] for events in at_most).items(), ledger.delta, ledger.accountant
    )
    return spent if math.isfinite(spent) else None


def _persons(ledger: Ledger, adversary: Adversary) -> tuple[tuple[int, float | None], ...]:
    """What a person with k records gets from a guarantee about single records (group privacy)."""
    events = [charge.events[adversary] for charge in ledger.history]
    return tuple(
        (records, epsilon_for_person(events, records, ledger.delta, ledger.accountant))
        for records in PERSONS_RECORDS
    )


def _groups(federation: Federation, server: Server, ledger: Ledger, view: View) -> tuple[dict[str, Any], ...]:
    """What units with budgets of their own asked for and were charged; budgets are public."""
    personal = [silo.budget for silo in federation.silos]
    if server.setting.method.unit == "user":
        personal = [federation.user_budgets]
    budgets = [budget for budget in personal if budget is not None]
    if not budgets:
        return ()
    joined = server.participation_counts(ledger.rounds)[: len(budgets)]
    return server.setting.method.budget_report(
        view, budgets, joined, ledger.rounds, ledger.delta, ledger.accountant
    )


def _claims(server: Server, adversary: Adversary, ledger: Ledger) -> tuple[dict[str, Any], ...]:
    """What a paper promises for this run without a proof that holds."""
    claimed = server.setting.method.paper_claim
    if claimed is None:
        return ()
    event = round_events(server.aggregator, replace(server.setting, method=claimed))[adversary]
    if isinstance(event, NonPrivate):
        return ()
    spent = compute_epsilon([(event, len(ledger.history))], ledger.delta, ledger.accountant)
    return ({"epsilon": spent, "why": claimed.assumptions[-1]},) if math.isfinite(spent) else ()
