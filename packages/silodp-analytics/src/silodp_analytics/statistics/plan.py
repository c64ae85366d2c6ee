"""The plan of a run of statistics: ε against every adversary, and the noise in a count. No data are read."""

from __future__ import annotations

import math
from typing import Any

from silodp.config.resolve import ResolvedRun
from silodp.planning.plan import format_plan, plan_run, remark_on_users
from silodp.text import pluralize
from silodp_analytics.counted import Moments
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
        if (drowned := _find_drowned(table, spec.population.users)) is not None:
            warnings.append(drowned)
        elif isinstance(block, Moments):
            table["mean_error"], advice = _expect_mean_error(block, table["noise_std"], spec.population.users)
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


def _expect_mean_error(block: Moments, noise_std: float, users: int) -> tuple[float, list[str]]:
    """Return half the width of the 95 % interval of a mean over U persons with one value each, and advice on it."""
    from silodp_analytics.statistics.report.estimates import estimate_count, suggest_mean_range

    low, high = block.range
    center = min(max(block.typical[0], low), high) if block.typical else high
    place = (2 * center - low - high) / (high - low)
    # The mean is a ratio of two noisy sums: its error is that of the first less `place` times the second.
    reach = estimate_count(0.0, noise_std).high * math.hypot(1, place) / users
    error = reach * (high - low) / 2
    narrower = suggest_mean_range(block.range, center, error) if block.typical else None
    if narrower is None:
        return error, []
    return error, [
        f"the mean of '{block.column}' has an error of about ± {error:.2g}, in proportion to its declared range, "
        f'{low:g} to {high:g}: with out_of_range = "clip", a range of {narrower.low:g} to {narrower.high:g} would make '
        f"it ± {narrower.error:.2g}"
    ]


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
