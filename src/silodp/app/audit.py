"""What a run says it promises, against the book it kept: ε recomputed from the ledger's events.

Claims are left out: what a paper promises without proof is nothing that a ledger could bear out. A guarantee that
states a claimed ε as its own is refused like any that says less than was charged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from silodp.errors import SilodpError
from silodp.privacy.accounting import epsilon
from silodp.privacy.guarantee import Guarantee
from silodp.privacy.ledger import Budget, Ledger
from silodp.privacy.persons import for_person

LEDGER = Path("checkpoint") / "ledger.jsonl"
"""Where a run directory holds its ledger."""

_LAST_DIGITS = 1e-6
"""Relative: as much as another machine's arithmetic may change in ε; a report shows three figures, rounded up."""


@dataclass(frozen=True)
class Audit:
    """A ledger that bears the guarantees out: rounds charged, and the budget it was kept under."""

    rounds: int
    budget: Budget | None


def audited(directory: Path, guarantees: Iterable[Guarantee], delta_share: float = 1.0) -> Audit | None:
    """The guarantees of a run directory, each compared with the ledger there; None when there is no ledger.

    `delta_share` is the part of δ that the run's aggregator has its noise accounted at (see `Aggregator`).

    Raises:
        SilodpError: a guarantee claims less than was charged, or speaks of another δ, accountant or number of
            rounds; or the ledger is damaged or in use.
    """
    path = directory / LEDGER
    if not path.exists():
        return None
    with _opened(path) as ledger:
        for said in guarantees:
            wrong = _contradiction(said, ledger, delta_share)
            if wrong is not None:
                raise SilodpError(
                    f"{directory / 'guarantee.json'} is contradicted by the run's ledger: against '{said.adversary}' "
                    f"it says {wrong}; restore it, or resume the run, which writes it anew."
                )
        return Audit(ledger.rounds, ledger.budget)


def _contradiction(said: Guarantee, ledger: Ledger, delta_share: float) -> str | None:
    if said.delta * delta_share != ledger.delta:
        part = "" if delta_share == 1 else f" for noise, a part of {delta_share:g}"
        return f"delta = {said.delta}, and the ledger says {ledger.delta}{part}"
    for name in ("accountant", "rounds"):
        claimed, kept = getattr(said, name), getattr(ledger, name)
        if claimed != kept:
            return f"{name} = {claimed}, and the ledger says {kept}"
    if said.epsilon is None:
        return None  # nothing is claimed
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
    """What it says a person with several records gets, against the same events charged for so many records."""
    for records, claimed in said.persons:
        if claimed is None:
            continue
        charges = [(for_person(charge.events[said.adversary], records), 1) for charge in ledger.history]
        spent = epsilon(charges, ledger.delta, ledger.accountant)
        if not claimed >= spent * (1 - _LAST_DIGITS):
            cost = f"cost {spent:.6g}" if math.isfinite(spent) else "promise nothing"
            return f"ε = {claimed:.6g} for a person with {records} records, and for her the ledger's rounds {cost}"
    return None


def _opened(path: Path) -> Ledger:
    """The ledger, by the settings in its first line; opening it checks every line's hash and event."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline())
        budget = None if header["budget"] is None else Budget(**header["budget"])
        delta, accountant, run = float(header["delta"]), header["accountant"], str(header["run"])
    except (ValueError, KeyError, TypeError):
        raise SilodpError(f"ledger {path} is damaged in line 1: restore it from a copy.") from None
    return Ledger(path, delta, accountant, budget, run=run)
