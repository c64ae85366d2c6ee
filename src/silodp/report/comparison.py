"""The comparison of a stated guarantee with the one that follows from a run's ledger and specification."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from silodp.accounting.guarantee import Guarantee

_TOLERANCE = 1e-6
"""Relative difference of two ε that another machine may cause; a report shows three figures, rounded up."""


def find_contradiction(stated: Guarantee, derived: Guarantee, unknown: Collection[str] = ()) -> str | None:
    """Return the first part of a stated guarantee that promises more than the derived one, or differs from it.

    A stated ε may be larger, and more may be assumed or not be covered.

    Args:
        stated: The guarantee of guarantee.json.
        derived: What follows from the ledger and the specification; "persons" for every stated number of records.
        unknown: Entries of `Guarantee.groups` that could not be derived.

    Returns:
        The end of a sentence that begins with "it says"; None where nothing is wrong.
    """
    return (
        _compare_facts(stated, derived)
        or _compare_epsilons(stated, derived)
        or _compare_texts(stated, derived)
        or _compare_groups(stated, derived, unknown)
    )


def is_covered(stated: float, charged: float) -> bool:
    """Return whether a stated ε is at least the charged one, up to rounding."""
    return stated >= charged * (1 - _TOLERANCE)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two JSON-ready values are equal, numbers up to rounding."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, float) and isinstance(other, float | int) and not isinstance(other, bool):
        return math.isclose(one, other, rel_tol=_TOLERANCE)
    return bool(one == other)


def _compare_facts(stated: Guarantee, derived: Guarantee) -> str | None:
    for name in ("method", "unit", "delta", "accountant", "rounds"):
        if getattr(stated, name) != getattr(derived, name):
            by_ledger = getattr(derived, name)
            return f"{name} = {getattr(stated, name)}, and by its ledger and settings it is {by_ledger}"
    if stated.releasable and not derived.releasable:
        return "that the model may be released, and by the ledger its noise follows from a seed"
    if stated.releasable and stated.epsilon is None:
        return "that the model may be released, and gives no guarantee"
    return None


def _compare_epsilons(stated: Guarantee, derived: Guarantee) -> str | None:
    if stated.epsilon is None:
        if derived.reason is not None and stated.reason != derived.reason:
            return (
                f"that there is no guarantee because {stated.reason}, and the ledger says: {derived.reason}"
            )
    elif derived.epsilon is None:
        return f"ε = {stated.epsilon:.6g}, and by the ledger there is no guarantee ({derived.reason})"
    elif not is_covered(stated.epsilon, derived.epsilon):
        return f"ε = {stated.epsilon:.6g}, and the ledger's rounds cost {derived.epsilon:.6g}"
    elif (wrong := _compare_persons(stated, derived)) is not None:
        return wrong
    for name, holds in (
        ("any_dropouts", stated.any_dropouts is None or _covers(stated.any_dropouts, derived.any_dropouts)),
        ("sample_known", is_same(stated.sample_known, derived.sample_known)),
        ("linkage", _is_linkage_covered(stated.linkage, derived.linkage)),
        ("claims", is_same(stated.claims, derived.claims)),
    ):
        if not holds:
            return f"{name} = {getattr(stated, name)}, and it is {getattr(derived, name)}"
    return None


def _compare_persons(stated: Guarantee, derived: Guarantee) -> str | None:
    """Compare ε of persons with several records: without it, readers take the ε of one record for one of persons."""
    spent_by_records = dict(derived.persons)
    missing = spent_by_records.keys() - {records for records, _ in stated.persons}
    if missing:
        return f"no ε of a person with {min(missing)} records, which is larger than that of one record"
    for records, epsilon in stated.persons:
        spent = spent_by_records[records]
        if epsilon is not None and not _covers(epsilon, spent):
            cost = "give no guarantee" if spent is None else f"cost {spent:.6g}"
            return f"ε = {epsilon:.6g} for a person with {records} records, and for them the ledger's rounds {cost}"
    return None


def _covers(stated: float | None, derived: float | None) -> bool:
    """Return whether a stated ε is no smaller than the derived one, or neither exists."""
    return stated == derived or (stated is not None and derived is not None and is_covered(stated, derived))


def _is_linkage_covered(stated: Sequence[Mapping[str, Any]], derived: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether no stated ε is smaller; earlier versions had larger ones for a record under another id."""
    return len(stated) == len(derived) and all(
        is_same({**one, "epsilon": None}, {**other, "epsilon": None})
        and _covers(one["epsilon"], other["epsilon"])
        for one, other in zip(stated, derived, strict=True)
    )


def _compare_texts(stated: Guarantee, derived: Guarantee) -> str | None:
    if stated.epsilon is not None:
        for text in derived.assumptions:
            if text not in stated.assumptions:
                return f"nothing of what it assumes: {text}"
    for text in derived.not_covered:
        if text not in stated.not_covered:
            return f"nothing of what is not covered: {text}"
    return None


def _compare_groups(stated: Guarantee, derived: Guarantee, unknown: Collection[str]) -> str | None:
    if stated.epsilon is None and not stated.groups:
        return None
    if len(stated.groups) != len(derived.groups):
        return f"{len(stated.groups)} budgets, and there are {len(derived.groups)}"
    for one, other in zip(stated.groups, derived.groups, strict=True):
        for key in sorted((one.keys() | other.keys()) - set(unknown)):
            if not is_same(one.get(key), other.get(key)):
                return f"{key} = {one.get(key)} of the budget {one['budget']:.6g}, and it is {other.get(key)}"
    return None
