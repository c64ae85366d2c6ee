"""The plan of a run of statistics: ε against every adversary, and the noise in a count. No data are read."""

from __future__ import annotations

from typing import Any

from silodp.config.resolve import ResolvedRun
from silodp.planning.plan import format_plan, plan_run, remark_on_users
from silodp.text import pluralize
from silodp_analytics.statistics.method import COUNTED, Statistics

_DROWNED = 3.0
"""Standard deviations of its noise that an average cell should exceed."""


def plan_statistics(resolved: ResolvedRun, users: int | None = None) -> dict[str, Any]:
    """Return what `plan_run` does, and for every block the standard deviation of the noise in a count.

    Args:
        resolved: From `config.statistics.derive_statistics`.
        users: U, where it is only in the data; None takes what is declared, else an assumed number.

    Returns:
        JSON-ready; "tables" has one entry per block. Where U is not assumed, means have their expected "mean_error",
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
    width = max(len(one["column"]) for one in plan["tables"])
    lines = [
        f"  {one['column']:<{width}}  {one['kind']:<10}  {pluralize(one['cells'], 'cell'):>9}  "
        f"± {one['noise_std']:.3g} in each"
        + (f"; ± {one['mean_error']:.2g} in the mean (95 %)" if "mean_error" in one else "")
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
