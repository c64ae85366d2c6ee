"""The audit of a finished run: its guarantees and metrics compared with its ledger.

ε is computed again from the events of the ledger. Also compared are δ, accountant, rounds, method, settings,
aggregator, unit, ε of persons with several records, whether the model may be released, the reason of a missing
guarantee, the list of what is not covered, and the ε of every row of metrics.jsonl. Assumptions, claims and the charges
of units with privacy budgets are derived again from config.toml (`rederive_guarantees`); a part for which this is
impossible is listed as not checked. The lines of the ledger are hashed, not signed: a person who rewrites all of them
is not found.

A guarantee that states a claimed ε is refused like every ε below the charged one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from silodp.accounting.accountant import ACCOUNTANTS, Accountant, Composition, EventCount
from silodp.accounting.charges import PERSONS_RECORDS, ChargeCounts, Cost
from silodp.accounting.events import Event
from silodp.accounting.guarantee import LOCAL_INDEX, PUBLIC_INDEX, Guarantee, list_not_covered
from silodp.accounting.ledger import Budget, Ledger, LedgerHeader, reopen_ledger
from silodp.accounting.steps import flatten_per_unit
from silodp.accounting.trade_off import MembershipAttack
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.aggregators.registry import AggregatorRecord
from silodp.aggregators.series import SERIES
from silodp.errors import SilodpError
from silodp.report.rederive import JOINED, find_contradiction, is_covered, rederive_guarantees
from silodp.runtime.run_files import CONFIG, GUARANTEE, LEDGER, METRICS, MetricsRow, find_changed_file
from silodp.text import pluralize

_MAX_EXACT = 200
"""Rows of metrics.jsonl whose ε is computed exactly; a thousand would take a minute."""


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit without contradictions.

    Attributes:
        rounds: Number of charged rounds.
        budget: Privacy budget of the run, if any.
        unchecked: Parts that could not be checked, as text.
        attacks: Bound on attacks on membership by the charged events, for each adversary with a guarantee.
    """

    rounds: int
    budget: Budget | None
    unchecked: tuple[str, ...] = ()
    attacks: Mapping[Adversary, MembershipAttack] = field(default_factory=dict)


def audit_run(
    directory: Path,
    guarantees: Iterable[Guarantee],
    summary: Mapping[str, Any],
    aggregator: AggregatorRecord,
    rows: Sequence[MetricsRow] | None = None,
) -> AuditResult | None:
    """Compare the guarantees and metrics of a run with its ledger.

    Args:
        directory: The directory of the run.
        guarantees: The guarantees of guarantee.json.
        summary: Everything in guarantee.json.
        aggregator: The one that guarantee.json names.
        rows: The rows of metrics.jsonl; None leaves them out.

    Returns:
        The result; None where there is no ledger.

    Raises:
        SilodpError: a guarantee has a smaller ε than was charged, another δ, accountant, number of rounds, method,
            aggregator, unit or kind of noise, lacks an assumption or an entry of what is not covered, or has other
            budgets or claims; a row of metrics.jsonl is missing or has a smaller ε than was charged; a file is of
            another run or is not the one that the run wrote; or the ledger is damaged, in use, or of another format.
    """
    path = directory / LEDGER
    if not path.exists():
        return None
    with _open_ledger(path) as ledger:
        header = ledger.subject
        if header is None:
            raise SilodpError(
                f"ledger {path} does not name the method and the unit, so it is not that of a server: restore the "
                "newest ledger of the run.",
                code="ledger.damaged",
            )
        guarantees = tuple(guarantees)
        wrong = _compare_run(summary, aggregator, header, ledger)
        promised = {guarantee.adversary: guarantee.private for guarantee in guarantees}
        if wrong is None and summary["private"] != promised["released"]:
            wrong = f"it says private = {summary['private']} of the run, and not of its released model"
        _refuse(wrong, directory / GUARANTEE, _BY_LEDGER)
        again, charges = rederive_guarantees(directory, aggregator, ledger, header), ledger.to_counts()
        measured = any(row.get("loss") is not None for row in rows or ())
        for guarantee in guarantees:
            known = again.guarantees.get(guarantee.adversary)
            derived = _take_from_ledger(guarantee, known, header, charges, aggregator.delta_share, measured)
            unknown = ("realized",) if JOINED in again.unchecked else ()
            wrong = find_contradiction(guarantee, derived, unknown)
            by = _BY_LEDGER if known is None else f"{_BY_LEDGER} and config.toml"
            _refuse(wrong and f"against '{guarantee.adversary}' it says {wrong}", directory / GUARANTEE, by)
        if rows is not None:
            wrong = _compare_series(rows, ledger)
            if wrong is None and not _is_unknown(ledger):
                wrong = _compare_rows(rows, ledger)
            _refuse(wrong, directory / METRICS, _BY_LEDGER)
        # Last, as an edited file is better named with what it states wrongly than with its digest.
        if ledger.files is None:
            raise SilodpError(
                f"{directory / GUARANTEE} was written at the end of a run, and the last line of the run's ledger says "
                "nothing of it: resume the run, which writes both again, or restore the newest ledger.",
                code="report.contradicted",
            )
        changed = find_changed_file(directory, ledger.files, rows)
        if changed is not None:
            _refuse("by the digest in its ledger", directory / changed, "not the file that the run wrote")
        unchecked = again.unchecked
        if _is_unknown(ledger):
            name = ledger.accountant.name
            unchecked = (f"every ε (the accountant '{name}' is not part of silodp)", *unchecked)
        attacks = {
            one.adversary: charges.bound_attack(one.adversary, one.epsilon, one.delta)
            for one in guarantees
            if one.epsilon is not None
        }
        return AuditResult(ledger.rounds, ledger.budget, unchecked, attacks)


_BY_LEDGER = "contradicted by the run's ledger"
_REMEDIES = {
    CONFIG: "give changes with --set when the run is resumed",
    METRICS: "delete it and resume the run: of the earlier rounds then only ε is known",
}


def _refuse(wrong: str | None, path: Path, how: str) -> None:
    """Refuse a file of a run for what is wrong with it; None: nothing is."""
    if wrong is not None:
        remedy = _REMEDIES.get(path.name, "resume the run, which writes it again")
        message = f"{path} is {how}: {wrong}; restore it from a copy, or {remedy}."
        raise SilodpError(message, code="report.contradicted")


def _take_from_ledger(
    stated: Guarantee,
    known: Guarantee | None,
    header: LedgerHeader,
    charges: ChargeCounts,
    delta_share: float,
    measured: bool,
) -> Guarantee:
    """Return the guarantee to compare a stated one with: all that the ledger knows of it is taken from there.

    Args:
        stated: The guarantee of guarantee.json.
        known: What follows from the specification; where it is None, the rest is as it is stated.
        header: The header of the ledger.
        charges: The charges of the ledger.
        delta_share: Part of δ that the noise is accounted at.
        measured: Whether pooled held-out records measured the model.
    """
    # Whether the list of persons is public follows from the assumptions alone, and with it what is not covered.
    has_list = LOCAL_INDEX not in stated.assumptions or PUBLIC_INDEX in stated.assumptions
    # Exactly the stated δ where it fits: (δ·share)/share may differ from δ in the last bit, which is no contradiction.
    is_same_delta = stated.delta * delta_share == charges.delta
    derived = replace(
        stated if known is None else known,
        method=header.method,
        unit=header.unit,
        delta=stated.delta if is_same_delta else charges.delta / delta_share,
        accountant=charges.accountant.name,
        rounds=charges.rounds,
        releasable=header.secret,
        not_covered=list_not_covered(measured, has_list),
    )
    if isinstance(charges.accountant, _UnknownAccountant):
        return replace(derived, epsilon=stated.epsilon, reason=stated.reason, persons=stated.persons)
    adversary = stated.adversary
    # Whatever number of records is stated is checked, and those that every report shows must be stated.
    numbers = {records for records, _ in stated.persons}
    numbers |= set(PERSONS_RECORDS) if header.unit == "record" else set()
    if charges.rounds and not charges.charged[adversary]:
        why = stated.reason if stated.epsilon is None else "the ledger has no charge against that adversary"
        numbers, cost = set(), Cost(None, why)
    else:
        cost = charges.compute_cost(adversary)
    return replace(
        derived,
        epsilon=cost.epsilon,
        reason=cost.reason,
        persons=tuple((k, charges.compute_person_cost(adversary, k).epsilon) for k in sorted(numbers)),
    )


def _compare_series(rows: Sequence[MetricsRow], ledger: Ledger) -> str | None:
    """Return a row with noisy sums of a series for which the ledger has no charge."""
    charged = {(charge.series, charge.after + 1) for charge in ledger.history}
    for row in rows:
        for name in SERIES:
            if row.get(name) is not None and (name, row["round"]) not in charged:
                return f"round {row['round']} has an {name} by sums, and the ledger has no charge for one"
    return None


def _compare_rows(rows: Sequence[MetricsRow], ledger: Ledger) -> str | None:
    """Return a missing or additional row, or one with a smaller ε than the rounds up to it cost.

    Of many rounds only some are computed exactly. ε never falls, so every other row must have at least the ε of the
    last computed round before it.
    """
    # Evenly spread, the last round included, which has the largest ε.
    steps = min(ledger.rounds, _MAX_EXACT)
    checked = sorted({round(ledger.rounds * step / max(steps, 1)) for step in range(steps + 1)})
    if len(rows) != ledger.rounds + 1:
        return f"it has {pluralize(len(rows) - 1, 'round')} after the untrained model, and the ledger {ledger.rounds:,}"
    for adversary in ADVERSARIES:
        claimed = [(row.get("epsilon") or {}).get(adversary) for row in rows]
        if all(value is None for value in claimed):
            continue  # there is no ε to compare
        # Without a charge there is no cost to compare with, and any ε would be borne out.
        if any(adversary not in charge.events for charge in ledger.history):
            return f"it has an ε against '{adversary}', and the ledger has no charge"
        cost = ledger.epsilon_by_round(adversary, checked)
        for round_, value in enumerate(claimed):
            if value is None:
                continue
            # The cost of the last round up to this one that was computed exactly.
            known = checked[bisect_right(checked, round_) - 1]
            spent = cost[known]
            stated = f"round {round_} has ε = {value:.6g} against '{adversary}'"
            if spent is None:
                return f"{stated}, and there is no guarantee"
            if not is_covered(value, spent):
                return f"{stated}, and {pluralize(known, 'round')} cost {spent:.6g}"
    return None


def _compare_run(
    summary: Mapping[str, Any], aggregator: AggregatorRecord, header: LedgerHeader, ledger: Ledger
) -> str | None:
    for name, claimed, known in (
        ("method", summary["method"], header.method),
        ("settings", summary["settings"], header.settings),
        ("aggregator", aggregator.name, header.aggregator),
        ("rounds", summary["rounds"], ledger.rounds),
        ("run", summary["run"], ledger.run),
    ):
        if claimed != known:
            return f"it says {name} = {claimed}, and the ledger says {known}"
    return None


class _UnknownAccountant(Accountant):
    """An accountant outside silodp: a report does not run its code, so it computes no ε."""

    def __init__(self, name: str) -> None:
        self.name = name

    def supports(self, event: Event) -> bool:
        return False

    def compose(self, charges: Iterable[EventCount]) -> Composition:
        # It raises where a parameter is out of range, so damage is found without any ε.
        flatten_per_unit(charges)
        return _NoEpsilon()


class _NoEpsilon(Composition):
    def epsilon(self, delta: float) -> float:
        raise SilodpError("the accountant is not part of silodp", code="accounting.unknown")


def _is_unknown(ledger: Ledger) -> bool:
    return isinstance(ledger.accountant, _UnknownAccountant)


def _open_ledger(path: Path) -> Ledger:
    """Open a ledger; that of an accountant outside the package is read without it."""
    return reopen_ledger(path, lambda name: name if name in ACCOUNTANTS else _UnknownAccountant(name))
