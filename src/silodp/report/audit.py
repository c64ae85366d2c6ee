"""What a run says it promises, against the book it kept: ε recomputed from the ledger's events.

Compared are ε, δ, accountant and rounds, method, its settings, the aggregator, the unit, what persons with several
records get, whether the model may be released, why nothing is promised, and what is not covered; and the ε of every
row of metrics.jsonl with what the rounds before it cost. Assumptions, claims, and what units with budgets of their own
were charged are derived again from config.toml (`rederive_guarantees`); what cannot be is listed as not checked. The
ledger's lines are hashed, not signed: whoever rewrites all of it can write another.

A guarantee that states a claimed ε as its own is refused like any that says less than was charged.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from silodp.accounting.accountant import (
    ACCOUNTANTS,
    Accountant,
    Composition,
    EventCount,
    MembershipAttack,
    compute_membership_attack,
)
from silodp.accounting.events import Event
from silodp.accounting.group_privacy import PERSONS_RECORDS, compute_person_epsilon
from silodp.accounting.guarantee import ADVERSARIES, HELD_OUT, NOT_COVERED, Adversary, Guarantee
from silodp.accounting.ledger import Budget, Ledger, LedgerHeader
from silodp.accounting.steps import flatten_per_unit
from silodp.aggregators.registry import AggregatorRecord
from silodp.errors import SilodpError, counted
from silodp.report.rederive import rederive_guarantees
from silodp.runtime.train import MetricsRow

LEDGER = Path("checkpoint") / "ledger.jsonl"
"""Where a run directory holds its ledger."""

_LAST_DIGITS = 1e-6
"""Relative: as much as another machine's arithmetic may change in ε; a report shows three figures, rounded up."""


_MOST_EXACT = 200
"""Rows whose ε is computed exactly; a thousand would take a minute."""


@dataclass(frozen=True)
class AuditResult:
    """A ledger that bears the guarantees out.

    Attributes:
        rounds: how many were charged.
        budget: under which the run was.
        unchecked: what the ledger cannot show.
        attacks: the best attack on membership that the charged events allow, against whom something is promised.
    """

    rounds: int
    budget: Budget | None
    unchecked: tuple[str, ...] = ()
    attacks: Mapping[Adversary, MembershipAttack] = field(default_factory=dict)


def audit_run(
    directory: Path,
    guarantees: Iterable[Guarantee],
    summary: Mapping[str, Any],
    aggregator: AggregatorRecord | None,
    rows: Sequence[MetricsRow] | None = None,
) -> AuditResult | None:
    """The guarantees of a run directory, each compared with the ledger there; None when there is no ledger.

    `summary` is all that guarantee.json says; `aggregator` the one it names, None where it names none. `rows`: of
    metrics.jsonl; None: they are not compared.

    Raises:
        SilodpError: a guarantee claims less than was charged, speaks of another δ, accountant, number of rounds,
            method, aggregator, unit or kind of noise, leaves out an assumption or what is not covered, or has other
            budgets or claims; a row of metrics.jsonl is missing or says less than was charged; config.toml is another
            run's; or the ledger is damaged, in use, or of an earlier version.
    """
    path = directory / LEDGER
    if not path.exists():
        return None
    with _opened(path) as ledger:
        if ledger.subject is None:
            raise SilodpError(
                f"ledger {path} does not say whom its rounds were charged for: it is of an earlier version of silodp; "
                "report on it with that version, or run again.",
                code="ledger.version",
            )
        told = tuple(guarantees)
        measured = any(row.get("loss") is not None for row in rows or ())
        wrong = _about_run(summary, aggregator, ledger.subject, ledger.rounds)
        for said in told:
            if wrong is None:
                wrong = (
                    _about_whom(said, ledger.subject)
                    or _contradiction(said, ledger, aggregator.delta_share if aggregator else 1.0)
                    or _about_rest(said, ledger, measured)
                )
                wrong = wrong and f"against '{said.adversary}' it says {wrong}"
        if wrong is not None:
            raise _contradicted(directory, "ledger", wrong)
        wrong = None if rows is None or _is_unknown(ledger) else _about_rows(rows, ledger)
        if wrong is not None:
            raise SilodpError(
                f"{directory / 'metrics.jsonl'} is contradicted by the run's ledger: {wrong}; restore it from a copy, "
                "or delete it and resume the run, which then knows of the earlier rounds only what they cost.",
                code="report.contradicted",
            )
        again = rederive_guarantees(directory, aggregator, ledger)
        for said in told:
            wrong = again.contradiction(said)
            if wrong is not None:
                wrong = f"against '{said.adversary}' it says {wrong}"
                raise _contradicted(directory, "ledger and config.toml", wrong)
        own = (f"every ε (the accountant '{ledger.accountant.name}' is not part of silodp)",)
        unchecked = (*(own if _is_unknown(ledger) else ()), *again.unchecked)
        return AuditResult(ledger.rounds, ledger.budget, unchecked, _attacks(told, ledger))


def _contradicted(directory: Path, by: str, wrong: str) -> SilodpError:
    return SilodpError(
        f"{directory / 'guarantee.json'} is contradicted by the run's {by}: {wrong}; "
        "restore it, or resume the run, which writes it anew.",
        code="report.contradicted",
    )


def _attacks(told: Iterable[Guarantee], ledger: Ledger) -> dict[Adversary, MembershipAttack]:
    """By the ledger's own events; what of δ is not for noise is added, as what ciphertexts disclose."""
    return {
        said.adversary: compute_membership_attack(
            [(charge.events[said.adversary], 1) for charge in ledger.history],
            said.epsilon,
            max(0.0, said.delta - ledger.delta),
        )
        for said in told
        if said.epsilon is not None
    }


def _about_rows(rows: Sequence[MetricsRow], ledger: Ledger) -> str | None:
    """A round without its row, a row without its round, or one with less ε than the rounds up to it cost.

    Of very many rounds so many are computed exactly; ε never falls, so each other row has at least that of the last
    one computed before it.
    """
    steps = min(ledger.rounds, _MOST_EXACT)
    checked = sorted({round(ledger.rounds * step / max(steps, 1)) for step in range(steps + 1)})
    if len(rows) != ledger.rounds + 1:
        return f"it has {counted(len(rows) - 1, 'round')} after the untrained model, and the ledger {ledger.rounds:,}"
    for adversary in ADVERSARIES:
        claimed = [(row.get("epsilon") or {}).get(adversary) for row in rows]
        if all(value is None for value in claimed):
            continue  # nothing is claimed
        if any(adversary not in charge.events for charge in ledger.history):
            return f"it has an ε against '{adversary}', and the ledger no charge"
        cost = ledger.epsilon_by_round(adversary, checked)
        for round_, value in enumerate(claimed):
            known = checked[bisect_right(checked, round_) - 1]
            spent = cost[known]
            if value is None:
                continue
            if spent is None:
                return (
                    f"round {round_} has ε = {value:.6g} against '{adversary}', and nothing is promised there"
                )
            if value < spent * (1 - _LAST_DIGITS):
                return (
                    f"round {round_} has ε = {value:.6g} against '{adversary}', and {counted(known, 'round')} cost "
                    f"{spent:.6g}"
                )
    return None


def _about_run(
    summary: Mapping[str, Any], aggregator: AggregatorRecord | None, kept: LedgerHeader, rounds: int
) -> str | None:
    named = None if aggregator is None else aggregator.name
    for name, claimed, known in (
        ("method", summary.get("method"), kept.method),
        ("settings", summary.get("settings"), kept.settings),
        ("aggregator", named, kept.aggregator),
        ("rounds", summary.get("rounds", rounds), rounds),
    ):
        if claimed != known:
            return f"it says {name} = {claimed}, and the ledger says {known}"
    return None


def _about_whom(said: Guarantee, kept: LedgerHeader) -> str | None:
    for name in ("method", "unit"):
        if getattr(said, name) != getattr(kept, name):
            return f"{name} = {getattr(said, name)}, and the ledger says {getattr(kept, name)}"
    if said.releasable and not kept.secret:
        return "that the model may be released, and by the ledger its noise follows from a seed"
    if said.releasable and said.epsilon is None:
        return "that the model may be released, and promises nothing"
    return None


def _contradiction(said: Guarantee, ledger: Ledger, delta_share: float) -> str | None:
    if said.delta * delta_share != ledger.delta:
        part = "" if delta_share == 1 else f" for noise, a part of {delta_share:g}"
        return f"delta = {said.delta}, and the ledger says {ledger.delta}{part}"
    for name, claimed, kept in (
        ("accountant", said.accountant, ledger.accountant.name),
        ("rounds", said.rounds, ledger.rounds),
    ):
        if claimed != kept:
            return f"{name} = {claimed}, and the ledger says {kept}"
    if said.epsilon is None or _is_unknown(ledger):
        return None  # nothing is claimed, or nothing can be compared
    if any(said.adversary not in charge.events for charge in ledger.history):
        return f"ε = {said.epsilon:.6g}, and the ledger has no charge against that adversary"
    spent = ledger.epsilon(said.adversary)
    if spent is None:
        return (
            f"ε = {said.epsilon:.6g}, and by the ledger nothing is promised ({ledger.reason(said.adversary)})"
        )
    if not said.epsilon >= spent * (1 - _LAST_DIGITS):
        return f"ε = {said.epsilon:.6g}, and the ledger's rounds cost {spent:.6g}"
    return _about_persons(said, ledger)


def _about_persons(said: Guarantee, ledger: Ledger) -> str | None:
    """What it says a person with several records gets, against the same events charged for so many records.

    A guarantee about single records must say it, or it reads like one about persons.
    """
    unsaid = set(PERSONS_RECORDS) - {records for records, _ in said.persons}
    if said.unit == "record" and unsaid:
        return f"nothing of a person with {min(unsaid)} records, for whom the ledger's rounds cost more than for one"
    for records, claimed in said.persons:
        if claimed is None:
            continue
        events = [charge.events[said.adversary] for charge in ledger.history]
        spent = compute_person_epsilon(events, records, ledger.delta, ledger.accountant)
        if spent is None or not claimed >= spent * (1 - _LAST_DIGITS):
            cost = "promise nothing" if spent is None else f"cost {spent:.6g}"
            return f"ε = {claimed:.6g} for a person with {records} records, and for her the ledger's rounds {cost}"
    return None


def _about_rest(said: Guarantee, ledger: Ledger, measured: bool) -> str | None:
    """Why nothing is promised where nothing is, and what no ε covers."""
    reason = None if _is_unknown(ledger) else ledger.reason(said.adversary)
    if said.epsilon is None and reason is not None and said.reason != reason:
        return f"that nothing is promised because {said.reason}, and the ledger says: {reason}"
    for text in NOT_COVERED:
        if text not in said.not_covered and (measured or text != HELD_OUT):
            return f"nothing of what is not covered: {text}"
    return None


class _UnknownAccountant(Accountant):
    """Stands for an accountant of a user's own, whose code a report does not run: it gives no ε."""

    def __init__(self, name: str) -> None:
        self.name = name

    def supports(self, event: Event) -> bool:
        return False

    def compose(self, charges: Iterable[EventCount]) -> Composition:
        flatten_per_unit(charges)  # raises where a parameter is out of range
        return _NoEpsilon()


class _NoEpsilon(Composition):
    def epsilon(self, delta: float) -> float:
        raise SilodpError("the accountant is not part of silodp", code="accounting.unknown")


def _is_unknown(ledger: Ledger) -> bool:
    return isinstance(ledger.accountant, _UnknownAccountant)


def _opened(path: Path) -> Ledger:
    """The ledger, by the settings in its first line; opening it checks every line's hash and event."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline())
        budget = None if header["budget"] is None else Budget(**header["budget"])
        delta, name, run = float(header["delta"]), str(header["accountant"]), str(header["run"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise SilodpError(
            f"ledger {path} is damaged in line 1: restore it from a copy.", code="ledger.damaged"
        ) from None
    accountant = name if name in ACCOUNTANTS else _UnknownAccountant(name)
    return Ledger(path, delta, accountant, budget, run=run)
