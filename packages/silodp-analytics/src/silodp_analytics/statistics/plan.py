"""The plan of a run of statistics: ε against every adversary, and the noise in a count. No data are read."""

from __future__ import annotations

from typing import Any

from silodp.config.resolve import ResolvedRun
from silodp.planning.plan import format_plan, plan_run, remark_on_users
from silodp.text import pluralize
from silodp_analytics.statistics.method import COUNTED, Statistics

_DROWNED = 3.0
"""Standard deviations of its noise that an average cell should exceed."""
_ERRORS = {
    "count_error": "± {:.2g} in the number of persons of a group (95 %)",
    "mean_error": "± {:.2g} in the mean (95 %)",
    "share_error": "± {:.2g} in a share (95 %)",
    "difference_error": "± {:.2g} in a standardized difference (95 %)",
}
"""What blocks say of expected intervals (`Statistic.expect`), and how it is shown."""


def plan_statistics(resolved: ResolvedRun, users: int | None = None) -> dict[str, Any]:
    """Return what `plan_run` does, and for every block the standard deviation of the noise in a count.

    Args:
        resolved: From `config.statistics.derive_statistics`.
        users: U, where it is only in the data; None takes what is declared, else an assumed number.

    Returns:
        JSON-ready; "tables" has one entry per block. Where U is not assumed, blocks have what `_ERRORS` names,
        and "warnings" name blocks whose counts the noise drowns, and ranges that are too wide for a mean.
    """
    spec, is_assumed = resolved.build_public_spec(users)
    method = spec.method
    assert isinstance(method, Statistics)
    tables, warnings = [], []
    for block in method.blocks:
        table: dict[str, Any] = {
            "kind": block.kind,
            "column": block.column,
            "cells": block.size,
            "noise_std": method.count_std(block, spec.population),
        }
        tables.append(table)
        if is_assumed:
            continue
        # The public guess: records are spread evenly over the cells.
        if (expected := spec.population.users / block.spread) < _DROWNED * table["noise_std"]:
            warnings.append(
                f"counts of '{block.column}' have a standard deviation of {table['noise_std']:.3g}, and with "
                f"{pluralize(spec.population.users, 'person')} a cell has about {expected:.3g}: raise epsilon, or "
                "name fewer columns or bins"
            )
        else:
            found, advice = block.expect(table["noise_std"], spec.population.users)
            table |= found
            warnings += advice
    plan = plan_run(spec, accountant=resolved.accountant)
    return {
        "name": resolved.config.name,
        **plan,
        "users_assumed": is_assumed,
        "counted": method.counted,
        "records_in_full": method.records,
        "tables": tables,
        "warnings": warnings,
    }


def format_statistics_plan(plan: dict[str, Any]) -> list[str]:
    """Return the plan as lines of text."""
    width, wide = (max(len(one[name]) for one in plan["tables"]) for name in ("column", "kind"))
    lines = [
        f"  {one['column']:<{width}}  {one['kind']:<{wide}}  {pluralize(one['cells'], 'cell'):>9}  "
        f"± {one['noise_std']:.3g} in each"
        + "".join(f"; {text.format(one[name])}" for name, text in _ERRORS.items() if name in one)
        for one in plan["tables"]
    ]
    return [
        *format_plan(plan),
        *([remark_on_users(plan["users"])] if plan["users_assumed"] else []),
        f"counts are of {COUNTED[plan['counted']].format(records=plan['records_in_full'])}",
        "standard deviation of the noise in a count:",
        *lines,
        *(f"warning: {text}" for text in plan["warnings"]),
    ]
