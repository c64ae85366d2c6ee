"""A plan's part about budgets of one's own: what each is given, which are out of reach, ε against q as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from silodp.accounting.accountant import Accountant
from silodp.accounting.budget_curve import EpsilonCurve
from silodp.accounting.events import Event, explain_not_private
from silodp.accounting.guarantee import View, format_rounded_up
from silodp.config.budgets import REPRESENTATIVE_RECORDS, BudgetDistribution
from silodp.config.construct import fields_of
from silodp.errors import SilodpError, counted
from silodp.methods import Method
from silodp.report.guarantee_text import format_requested

if TYPE_CHECKING:
    from silodp.report.budget_plots import SamplingCurve

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the configured noise multiplier, for the picture."""
_POINTS = 20
"""Of a curve for which every point is an accounting of its own."""
_LEAST = 1e-3
_MOST_LINES = 6


def budgets_plan(
    method: Method,
    own: BudgetDistribution | None,
    view: View,
    rounds: int,
    delta: float,
    accountant: Accountant,
    users: int,
) -> dict[str, Any] | None:
    """For every budget that is asked for the q (or clip) it gets and what that costs, and how many get none.

    None where the method reads nobody's budgets. Units are counted among `users` persons, or among a thousand records
    that stand for all of them; ε is towards the adversary of `view`.
    """
    if own is None:
        return None
    budgets = own.drawn(users if own.unit == "user" else REPRESENTATIVE_RECORDS)
    unreachable = method.count_infeasible(budgets)
    if unreachable is None:
        return None
    entries = method.budget_report(view, [budgets], np.array([rounds]), rounds, delta, accountant)
    return {
        "unit": own.unit,
        "distribution": own.distribution,
        "adversary": view.adversary,
        "units": len(budgets),
        "unreachable": unreachable,
        "levels": [_level(entry, len(budgets)) for entry in entries],
    }


def _level(entry: Mapping[str, Any], units: int) -> dict[str, Any]:
    kept = {key: value for key, value in entry.items() if key not in ("units", "planned", "realized")}
    planned = entry["planned"]
    # By pld nothing may hold at a very small δ: no number then, as everywhere in a plan.
    finite = None if planned is None or math.isinf(planned) else planned
    return {**kept, "share": entry["units"] / units, "epsilon": finite}


def format_text(found: Mapping[str, Any]) -> list[str]:
    """The same for reading."""
    lines = [f"budgets of {found['unit']}s ({found['distribution']}), ε towards {found['adversary']}:"]
    for level in found["levels"]:
        given = ", ".join(f"{key} = {level[key]:.4g}" for key in ("q", "clip") if key in level)
        note = f"  ({level['note']})" if level.get("note") else ""
        share = f"{100 * level['share']:.3g} %"
        spent = "0" if level["epsilon"] == 0 else format_rounded_up(level["epsilon"])
        over = "  MORE THAN ASKED" if (level["epsilon"] or 0) > level["budget"] else ""
        lines.append(
            f"  asked {format_requested(level)} by {share:>6}: {given}, costs ε = {spent}{over}{note}"
        )
    if found["unreachable"]:
        share = found["unreachable"] / found["units"]
        lines.append(
            f"  {found['unreachable']:,} of {found['units']:,} ({100 * share:.3g} %) are out of reach: too small for "
            "any sampling probability or clip, so that they take no part"
        )
    else:
        lines.append("  none is out of reach")
    return lines


def draw(
    path: Path,
    method: Method,
    event_of: Callable[[Method], Event],
    own: BudgetDistribution | None,
    rounds: int,
    delta: float,
    accountant: Accountant,
) -> None:
    """ε against the sampling probability for several noise multipliers, as a picture (rPDP-FL, Figure 6).

    `accountant` is the plan's, for every curve: the picture and the text tell the same ε.

    Raises:
        SilodpError: the method samples nothing, promises nothing, or the file's name says no format.
    """
    from silodp.report.budget_plots import against_sampling, check_picture, save

    check_picture(path)
    curves = [_curve(noisy, event_of, rounds, delta, accountant) for noisy in _noisier(method)]
    levels = [level.budget for level in own.levels()] if own is not None else []
    if len(levels) > _MOST_LINES:
        levels = [levels[0], levels[len(levels) // 2], levels[-1]]
    figure = against_sampling(
        curves,
        levels,
        f"{_sampled(method).replace('_', ' ')} probability q",
        f"ε after {counted(rounds, 'round')}, accountant {accountant.name}",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


def with_noise_multiplier(method: Method, noise_multiplier: float) -> Method:
    """The method with this noise; where clients differ, the noisiest has this, and the others theirs in proportion."""
    present = getattr(method, "noise_multiplier")  # noqa: B009  not every method has it
    value: Any = noise_multiplier
    if isinstance(present, tuple):
        value = tuple(noise_multiplier * one / max(present) for one in present)
    changed: Method = replace(cast(Any, method), noise_multiplier=value)
    return changed


def noise_of(method: Method) -> float:
    """σ, of the noisiest client where clients differ; 0 where there is none."""
    present = getattr(method, "noise_multiplier", 0.0)
    return max(present) if isinstance(present, tuple) else present


def _noisier(method: Method) -> Sequence[Method]:
    if noise_of(method) == 0:
        raise SilodpError(
            f"method {method.name} has no noise to draw ε for: choose another, or set its noise.",
            code="argument.value",
            field="method",
        )
    return [with_noise_multiplier(method, noise_of(method) * factor) for factor in _FACTORS]


def _sampled(method: Method) -> str:
    """The field, or the quantity, that is sampled with."""
    if method.samples_by_budget:
        return "record_sampling"
    for name in ("record_sampling", "user_sampling"):
        if name in fields_of(type(method)):
            return name
    raise SilodpError(
        f"method {method.name} samples nobody: there is no ε against a sampling probability to draw.",
        code="argument.value",
        field="method",
    )


def _curve(
    method: Method, event_of: Callable[[Method], Event], rounds: int, delta: float, accountant: Accountant
) -> SamplingCurve:
    label = f"σ = {noise_of(method):.4g}"
    if method.samples_by_budget:
        curve = method.sampling_curve(rounds, accountant, _POINTS, _LEAST)
    else:
        field = _sampled(method)
        plain: Any = method.without_budgets()

        def at(q: float) -> Event:
            event = event_of(replace(plain, **{field: q}))
            nothing = explain_not_private(event)
            if nothing is not None:
                raise SilodpError(
                    f"there is no ε to draw against this adversary, because {nothing}.",
                    code="accounting.no_guarantee",
                )
            return event

        curve = EpsilonCurve.of(at, rounds, delta, accountant, _POINTS, _LEAST)
    from silodp.report.budget_plots import SamplingCurve

    return SamplingCurve(label, curve.parameters.tolist(), curve.epsilons.tolist())
