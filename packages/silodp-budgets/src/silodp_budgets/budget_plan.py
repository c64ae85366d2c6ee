"""The part of a plan about privacy budgets of records or persons."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from silodp.accounting.accountant import Accountant
from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.views import View
from silodp.methods import Method
from silodp.report.guarantee_text import format_requested
from silodp_budgets.config import REPRESENTATIVE_RECORDS, BudgetDistribution


def plan_budgets(
    method: Method,
    distribution: BudgetDistribution,
    view: View,
    rounds: int,
    delta: float,
    accountant: Accountant,
    users: int,
) -> dict[str, Any] | None:
    """Return the sampling probability or clip of every budget and its ε, and how many budgets are infeasible.

    Args:
        method: calibrated.
        distribution: of the budgets.
        view: of the adversary that ε is against.
        rounds: T.
        delta: δ of the noise.
        accountant: composes the rounds.
        users: U; records are represented by `REPRESENTATIVE_RECORDS` of them.

    Returns:
        A JSON-ready entry of the plan; None where the method ignores budgets.
    """
    # Drawn from the public distribution, never read from tables: a plan reads no data.
    budgets = distribution.draw(users if distribution.unit == "user" else REPRESENTATIVE_RECORDS)
    unreachable = method.budgets.count_infeasible(budgets)
    if unreachable is None:
        return None
    entries = method.budgets.report(view, [budgets], np.array([rounds]), rounds, delta, accountant)
    return {
        "unit": distribution.unit,
        "distribution": distribution.distribution,
        "adversary": view.adversary,
        "units": len(budgets),
        "unreachable": unreachable,
        "levels": [_describe_level(entry, len(budgets)) for entry in entries],
    }


def _describe_level(entry: Mapping[str, Any], units: int) -> dict[str, Any]:
    kept = {key: value for key, value in entry.items() if key not in ("units", "planned", "realized")}
    planned = entry["planned"]
    # The accountant pld may give no finite ε at a very small δ: then there is no number, as everywhere in a plan.
    finite = None if planned is None or math.isinf(planned) else planned
    return {**kept, "share": entry["units"] / units, "epsilon": finite}


def format_budget_plan(found: Mapping[str, Any]) -> list[str]:
    """Return the entry of `plan_budgets` as lines of text."""
    lines = [f"budgets of {found['unit']}s ({found['distribution']}), ε against {found['adversary']}:"]
    for level in found["levels"]:
        given = ", ".join(f"{key} = {level[key]:.4g}" for key in ("q", "clip") if key in level)
        note = f"  ({level['note']})" if level.get("note") else ""
        share = f"{100 * level['share']:.3g} %"
        spent = format_epsilon(level["epsilon"])
        over = "  MORE THAN REQUESTED" if (level["epsilon"] or 0) > level["budget"] else ""
        lines.append(
            f"  requested {format_requested(level)} by {share:>6}: {given}, charged ε = {spent}{over}{note}"
        )
    if found["unreachable"]:
        share = found["unreachable"] / found["units"]
        lines.append(
            f"  {found['unreachable']:,} of {found['units']:,} ({100 * share:.3g} %) take no part: their budgets are "
            "too small for any sampling probability or clip"
        )
    else:
        lines.append("  every budget is feasible")
    return lines
