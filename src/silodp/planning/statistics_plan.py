"""The plan of a run of statistics: ε against every adversary, and the noise in a count. No data are read."""

from __future__ import annotations

from typing import Any

from silodp.config.resolve import ResolvedRun
from silodp.methods.statistics import Statistics
from silodp.planning.plan import format_plan, plan_run, remark_on_users
from silodp.text import pluralize

_DROWNED = 3.0
"""Standard deviations of its noise that an average cell should exceed."""


def plan_statistics(resolved: ResolvedRun, users: int | None = None) -> dict[str, Any]:
    """Return what `plan_run` does, and for every block the standard deviation of the noise in a count.

    Args:
        resolved: From `config.statistics.derive_statistics`.
        users: U, where it is only in the data; None takes what is declared, else an assumed number.

    Returns:
        JSON-ready; "tables" has one entry per block, "warnings" those whose counts the noise drowns, as far as U is
        not assumed.
    """
    spec, is_assumed = resolved.build_public_spec(users)
    method = spec.method
    assert isinstance(method, Statistics)
    tables = [
        {
            "kind": block.kind,
            "column": block.column,
            "cells": block.size,
            "noise_std": method.count_std(block, spec.population),
        }
        for block in method.blocks
    ]
    plan = plan_run(spec, accountant=resolved.accountant)
    known = [] if is_assumed else tables
    warnings = [text for one in known if (text := _find_drowned(one, spec.population.users))]
    return {
        "name": resolved.config.name,
        **plan,
        "users_assumed": is_assumed,
        "counted": method.counted,
        "tables": tables,
        "warnings": warnings,
    }


def _find_drowned(table: dict[str, Any], users: int) -> str | None:
    """Return a sentence on a block whose average count is lost in the noise if each of U persons has one record."""
    # Of a mean all records are in one sum; of other blocks an even spread over the cells is the public guess.
    expected = users / (1 if table["kind"] == "mean" else table["cells"])
    if expected >= _DROWNED * table["noise_std"]:
        return None
    return (
        f"counts of '{table['column']}' have a standard deviation of {table['noise_std']:.3g}, and with "
        f"{pluralize(users, 'person')} a cell has about {expected:.3g}: raise epsilon, or name fewer columns or bins"
    )


def format_statistics_plan(plan: dict[str, Any]) -> list[str]:
    """Return the plan as lines of text."""
    width = max(len(one["column"]) for one in plan["tables"])
    lines = [
        f"  {one['column']:<{width}}  {one['kind']:<10}  {pluralize(one['cells'], 'cell'):>9}  "
        f"± {one['noise_std']:.3g} in each"
        for one in plan["tables"]
    ]
    return [
        *format_plan(plan),
        *([remark_on_users(plan["users"])] if plan["users_assumed"] else []),
        f"standard deviation of the noise in a count, in {plan['counted']}:",
        *lines,
        *(f"warning: {text}" for text in plan["warnings"]),
    ]
