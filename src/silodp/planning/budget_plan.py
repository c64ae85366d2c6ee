"""The part of a plan about privacy budgets of records or persons, and the picture of ε against q."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from silodp.accounting.accountant import Accountant, EventCount, compute_epsilon
from silodp.accounting.budget_curve import EpsilonCurve, make_geometric_grid
from silodp.accounting.events import explain_not_private
from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.views import View
from silodp.config.budgets import REPRESENTATIVE_RECORDS, BudgetDistribution
from silodp.config.build import get_fields
from silodp.errors import SilodpError
from silodp.methods import Method
from silodp.report.guarantee_text import format_requested
from silodp.text import pluralize

if TYPE_CHECKING:  # matplotlib is imported only where a picture is drawn
    from silodp.report.plots import SamplingCurve

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Noise multipliers of the picture, relative to the configured one."""
_POINTS = 20
"""Points of a curve; each of them is accounted separately."""
_MIN_SAMPLING = 1e-3
_MAX_LEVELS = 6


def plan_budgets(
    method: Method,
    distribution: BudgetDistribution | None,
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
        A JSON-ready entry of the plan; None where there are no budgets, or the method ignores them.
    """
    if distribution is None:
        return None
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


def draw_epsilon_by_sampling(
    path: Path,
    method: Method,
    charges_of: Callable[[Method], Iterable[EventCount]],
    distribution: BudgetDistribution | None,
    rounds: int,
    delta: float,
    accountant: Accountant,
) -> None:
    """Draw ε against the sampling probability for several noise multipliers.

    Args:
        path: of the picture; it ends in svg, pdf or png.
        method: with the configured noise.
        charges_of: returns (event, count) of all rounds of a method.
        distribution: of budgets, drawn as levels; None draws none.
        rounds: T.
        delta: δ of the noise.
        accountant: that of the plan, so that picture and text agree.

    Raises:
        SilodpError: the method samples nothing, gives no guarantee or has no field `noise_multiplier`, or the name of
            the file has another ending.

    Source: rPDP-FL, Figure 6.
    """
    from silodp.report.figures import save_figure
    from silodp.report.formatting import check_picture_path
    from silodp.report.plots import plot_epsilon_by_sampling

    check_picture_path(path)
    noise = get_noise_multiplier(method)
    if noise is None:
        raise SilodpError(
            f"method {method.name} has no field noise_multiplier, and ε is drawn for several values of it: call the "
            "field of its noise so, or leave the picture out.",
            code="argument.value",
            field="method",
        )
    if noise == 0:  # and so is every multiple of it
        raise SilodpError(
            f"method {method.name} has no noise, so there is no ε to draw: choose another, or set its noise.",
            code="argument.value",
            field="method",
        )
    varied = [with_noise_multiplier(method, noise * factor) for factor in _FACTORS]
    curves = [_compute_curve(noisy, charges_of, rounds, delta, accountant) for noisy in varied]
    levels = distribution.list_levels() if distribution is not None else []
    # More lines than this cannot be told apart in a picture: the smallest, a middle and the largest stand for all.
    if len(levels) > _MAX_LEVELS:
        levels = [levels[0], levels[len(levels) // 2], levels[-1]]
    figure = plot_epsilon_by_sampling(
        curves,
        levels,
        f"{_get_sampling_field(method).replace('_', ' ')} probability q",
        f"ε after {pluralize(rounds, 'round')} ({accountant.name})",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)


def with_noise_multiplier(method: Method, noise_multiplier: float) -> Method:
    """Return the method with this noise; where clients differ, it is that of the noisiest, and others in proportion."""
    present = method.noise_setting
    value: Any = noise_multiplier
    if isinstance(present, tuple):
        value = tuple(noise_multiplier * one / max(present) for one in present)
    changed: Method = replace(cast(Any, method), noise_multiplier=value)
    return changed


def get_noise_multiplier(method: Method) -> float | None:
    """Return σ, of the noisiest client where clients differ; 0 without noise, None where the noise has another name."""
    present = method.noise_setting
    return max(present) if isinstance(present, tuple) else present


def _get_sampling_field(method: Method) -> str:
    """Return the name of the sampling probability."""
    if method.samples_by_budget:
        return "record_sampling"
    for name in ("record_sampling", "user_sampling"):
        if name in get_fields(type(method)):
            return name
    raise SilodpError(
        f"method {method.name} has no sampling: there is no ε against a sampling probability to draw.",
        code="argument.value",
        field="method",
    )


def _compute_curve(
    method: Method,
    charges_of: Callable[[Method], Iterable[EventCount]],
    rounds: int,
    delta: float,
    accountant: Accountant,
) -> SamplingCurve:
    from silodp.report.plots import SamplingCurve

    label = f"σ = {get_noise_multiplier(method):.4g}"
    if method.samples_by_budget:
        curve = method.budgets.sampling_curve(rounds, accountant, _POINTS, _MIN_SAMPLING)
    else:
        field = _get_sampling_field(method)
        # With budgets ε follows from these, and not from the sampling probability that is varied here.
        plain: Any = method.without_budgets()

        def cost(q: float) -> float:
            charges = list(charges_of(replace(plain, **{field: q})))
            for nothing in filter(None, (explain_not_private(event) for event, _ in charges)):
                raise SilodpError(
                    f"there is no ε to draw against this adversary, because {nothing}.",
                    code="accounting.no_guarantee",
                )
            return compute_epsilon(charges, delta, accountant)

        grid = make_geometric_grid(_POINTS, _MIN_SAMPLING)
        curve = EpsilonCurve.from_costs(grid, np.array([cost(q) for q in grid]))
    return SamplingCurve(label, curve.parameters.tolist(), curve.epsilons.tolist())
