"""The guarantees of a run, a function of its specification and its ledger."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp.accounting.accountant import Accountant, compute_epsilon, find_accountant, supports_all
from silodp.accounting.events import Event, NonPrivate, reveal_samples
from silodp.accounting.group_privacy import PERSONS_RECORDS, compute_person_epsilon
from silodp.accounting.guarantee import (
    ADVERSARIES,
    HELD_OUT,
    NOT_COVERED,
    ON_THE_LIST,
    OTHER_CODE,
    PUBLIC_VALUES,
    Adversary,
    Guarantee,
    View,
    list_assumptions,
)
from silodp.data.public import ASSUMES_INDEX_BY_PROFILE

if TYPE_CHECKING:
    from silodp.accounting.ledger import Ledger
    from silodp.aggregators.run_spec import RunSpec

CountParticipation = Callable[[int], np.ndarray]
"""Function of a number of rounds: in how many of these first rounds each silo took part, (S,)."""


def build_guarantees(
    spec: RunSpec, ledger: Ledger, count_participation: CountParticipation
) -> dict[Adversary, Guarantee]:
    """Return the guarantee against every adversary, for the rounds in the ledger.

    Args:
        spec: of the run.
        ledger: of the run, open.
        count_participation: called only where units have privacy budgets.

    Returns:
        Guarantees by adversary.
    """
    views = spec.aggregator.views(spec.method, len(spec.names))
    integers = spec.aggregator.adds_integers and spec.bounds is not None
    at_most = _costliest_releases(spec, ledger)
    cost, evaluation = spec.round_events(), spec.charged_evaluation
    result: dict[Adversary, Guarantee] = {}
    for adversary in ADVERSARIES:
        event = cost[adversary]
        spent = None if isinstance(event, NonPrivate) else ledger.epsilon(adversary)
        result[adversary] = Guarantee(
            adversary=adversary,
            unit=spec.method.unit,
            epsilon=spent,
            delta=spec.delta,
            rounds=ledger.rounds,
            accountant=ledger.accountant.name,
            method=spec.method.name,
            private=spent is not None,
            releasable=spec.is_secret and spent is not None,
            reason=event.reason if isinstance(event, NonPrivate) else ledger.reason(adversary),
            assumptions=()
            if spent is None
            else list_assumptions(
                views[adversary],
                integers,
                public_index=spec.has_public_index,
                samples_users=spec.method.samples_users,
                separate=spec.separate,
            )
            + ((ASSUMES_INDEX_BY_PROFILE,) if spec.data.identity_digest and spec.needs_common_index else ())
            + (spec.aggregator.assumptions if adversary != "released" else ())
            + spec.method.assumptions
            + (() if evaluation is None else evaluation.method.assumptions)
            + spec.data.assumptions
            + ((PUBLIC_VALUES,) if spec.model.keeps_values else ())
            + ((OTHER_CODE,) if _has_other_code(spec, ledger.accountant) else ())
            + delta_warning(spec.delta, spec.population.users),
            not_covered=tuple(
                text
                for text in NOT_COVERED
                if (spec.tested or text != HELD_OUT) and (spec.has_public_index or text != ON_THE_LIST)
            ),
            persons=() if spent is None or spec.method.unit != "record" else _persons(ledger, adversary),
            groups=() if spent is None else _groups(spec, ledger, views[adversary], count_participation),
            claims=_claims(spec, adversary, ledger),
            any_dropouts=None if spent is None else _any_dropouts(at_most, adversary, ledger),
            sample_known=None if spent is None else _sample_known(spec, adversary, ledger),
            linkage=() if spent is None else _linkage(spec, adversary, ledger),
        )
    return result


def _has_other_code(spec: RunSpec, accountant: Accountant) -> bool:
    """Return whether the model, the loss, a metric or a plug-in came neither with silodp nor with torch."""
    plugins = (spec.method, spec.aggregator, accountant)
    return spec.model.other_code or any(not type(one).__module__.startswith("silodp.") for one in plugins)


def delta_warning(delta: float, users: int) -> tuple[str, ...]:
    """Return the remark on a δ that is not below 1/U; () for others."""
    if delta * users < 1:
        return ()
    return (
        f"δ = {delta:g} is accepted although it is not below 1/U = {1 / users:.2g}: a mechanism that publishes one "
        "person's records outright has such a δ; take one well below",
    )


def _costliest_releases(spec: RunSpec, ledger: Ledger) -> list[Mapping[Adversary, Event]]:
    """Return for every charged release its largest cost over all numbers of answers; [] if all silos must answer."""
    if spec.min_silos == len(spec.names):
        return []
    evaluation = spec.charged_evaluation
    return [
        spec.costliest_events(charge.round, charge.release)
        if charge.evaluation is None or evaluation is None
        else evaluation.costliest_events(charge.evaluation, charge.release)
        for charge in ledger.history
    ]


def _any_dropouts(
    at_most: list[Mapping[Adversary, Event]], adversary: Adversary, ledger: Ledger
) -> float | None:
    """Return ε of these releases together; None where there are none, or ε is infinite."""
    if not at_most:
        return None
    spent = compute_epsilon(
        Counter(events[adversary] for events in at_most).items(), ledger.delta, ledger.accountant
    )
    return spent if math.isfinite(spent) else None


def _sample_known(spec: RunSpec, adversary: Adversary, ledger: Ledger) -> float | None:
    """Return ε against a server that learns who was sampled; None where it knows it, or nobody is sampled."""
    if adversary != "server" or not spec.method.samples_users:
        return None
    charged = Counter(charge.events[adversary] for charge in ledger.history)
    revealed = Counter(reveal_samples(charge.events[adversary]) for charge in ledger.history)
    if revealed == charged:
        return None
    spent = compute_epsilon_beyond(spec, adversary, revealed.items(), ledger.accountant)
    return spent if math.isfinite(spent) else None


def compute_epsilon_beyond(
    spec: RunSpec, adversary: Adversary, charged: Iterable[tuple[Event, int]], accountant: Accountant
) -> float:
    """Return ε of charges that may be larger than those which constants of the aggregator were chosen for.

    The part of δ that is kept for what encryption discloses need not suffice at their ε (docs/privacy.md, section 3).
    """
    charged = list(charged)
    spent = compute_epsilon(charged, spec.noise_delta, accountant)
    disclosure = spec.aggregator.disclosure(spec).get(adversary, 0.0)
    if disclosure == 0:
        return spent
    return max(spent, compute_epsilon(charged, spec.delta, accountant, disclosure))


def _linkage(spec: RunSpec, adversary: Adversary, ledger: Ledger) -> tuple[dict[str, Any], ...]:
    # The fewer silos are in a sum, the more one id too many counts.
    view = spec.aggregator.views(spec.method, len(spec.names), spec.min_silos)[adversary]
    charged = Counter(charge.events[adversary] for charge in ledger.history)
    return compute_linkage(spec, view, charged.items(), ledger.accountant)


def compute_linkage(
    spec: RunSpec, view: View, charged: Iterable[tuple[Event, int]], accountant: Accountant
) -> tuple[dict[str, Any], ...]:
    """Return ε of persons whom silos do not recognize as one, or confuse with another (`Method.linkage_cases`).

    Args:
        spec: of the run.
        view: of the adversary, with the fewest silos that may be in a sum.
        charged: events of a person who is recognized, each with the number of times it was charged.
        accountant: of the run.

    Returns:
        JSON-ready {"case", "epsilon", "estimate"}; cases for which no accountant has a rule are left out.
    """
    by_charge = [(spec.method.linkage_cases(event, view), count) for event, count in charged]
    rows = []
    for alike in zip(*(cases for cases, _ in by_charge), strict=True):
        events = [(case.event, count) for case, (_, count) in zip(alike, by_charge, strict=True)]
        is_estimate = any(case.is_estimate for case in alike)
        # What is believed of several coins is believed of Rényi divergences.
        found = find_accountant("rdp") if is_estimate else accountant
        if supports_all(found, [event for event, _ in events]):
            spent = compute_epsilon_beyond(spec, view.adversary, events, found)
            known = spent if math.isfinite(spent) else None
            rows.append({"case": alike[0].case, "epsilon": known, "estimate": is_estimate})
    return tuple(rows)


def _persons(ledger: Ledger, adversary: Adversary) -> tuple[tuple[int, float | None], ...]:
    """Return (k, ε of a person with k records) from a guarantee about single records (group privacy)."""
    events = [charge.events[adversary] for charge in ledger.history]
    return tuple(
        (records, compute_person_epsilon(events, records, ledger.delta, ledger.accountant))
        for records in PERSONS_RECORDS
    )


def _groups(
    spec: RunSpec, ledger: Ledger, view: View, count_participation: CountParticipation
) -> tuple[dict[str, Any], ...]:
    """Return requested and charged ε of units with privacy budgets, which are public."""
    user_budgets = spec.population.budgets
    budgets: Sequence[np.ndarray] = spec.data.silo_budgets or ()
    if spec.method.unit == "user":
        budgets = () if user_budgets is None else (np.array(user_budgets),)
    if not budgets:
        return ()
    joined = count_participation(ledger.rounds)[: len(budgets)]
    return spec.method.budgets.report(view, budgets, joined, ledger.rounds, ledger.delta, ledger.accountant)


def _claims(spec: RunSpec, adversary: Adversary, ledger: Ledger) -> tuple[dict[str, Any], ...]:
    """Return ε that a paper claims for this run without a valid proof."""
    claimed = spec.method.paper_claim
    if claimed is None:
        return ()
    event = replace(spec, method=claimed).round_events()[adversary]
    if isinstance(event, NonPrivate):
        return ()
    # The claim is about the rounds; evaluations cost what they cost.
    spent = compute_epsilon(
        Counter(event if c.evaluation is None else c.events[adversary] for c in ledger.history).items(),
        ledger.delta,
        ledger.accountant,
    )
    return ({"epsilon": spent, "why": claimed.assumptions[-1]},) if math.isfinite(spent) else ()
