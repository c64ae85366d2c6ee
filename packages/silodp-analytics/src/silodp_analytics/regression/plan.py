"""The plan of a regression: ε against every adversary, and the expected errors. No data are read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from silodp.config.resolve import ResolvedRun
from silodp.planning.plan import format_plan, plan_run, remark_on_users
from silodp_analytics.regression.method import Regression
from silodp_analytics.regression.newton import MAX_NOISE_SHARE, WEAK

_PREDICTS_AS_WELL = 1.1
"""How many times longer noise may make the errors before a model of `silodp run` predicts better at the same ε
(benchmarks/linear_models.py)."""
_SPREAD = 1 / 3
"""The public guess of the mean square of a scaled column: that of a number spread evenly over its range."""


def plan_regression(resolved: ResolvedRun, users: int | None = None) -> dict[str, Any]:
    """Return what `plan_run` does, and for every coefficient the expected standard error, with noise and without.

    The guess is public: outcomes are as `typical` says, scaled columns are spread evenly over [−1, 1], all persons
    have one record, and nothing is correlated.

    Args:
        resolved: From `derive_regression`.
        users: U, where it is only in the data; None takes what is declared, else an assumed number.

    Returns:
        JSON-ready; "coefficients" and "error_ratio", how many times longer noise makes their errors, where U is not
        assumed, and "warnings" if they would be lost in the noise.
    """
    spec, is_assumed = resolved.build_public_spec(users)
    method = spec.method
    assert isinstance(method, Regression)
    plan = plan_run(spec, accountant=resolved.accountant)
    found: list[dict[str, Any]] = []
    warnings = []
    if not is_assumed:
        found = expect_errors(method, spec.population.users, method.noise_std(spec.population))
        lost = [one["term"] for one in found if one["lost"]]
        if lost:
            some = f"{', '.join(lost[:3])}{', …' if len(lost) > 3 else ''}"
            warnings.append(
                f"{len(lost)} of {len(found)} coefficients would be lost in the noise, with "
                f"{spec.population.users:,} persons ({some}): raise epsilon, or name fewer terms"
            )
    return {
        "name": resolved.config.name,
        **plan,
        "users_assumed": is_assumed,
        "coefficients": found,
        "error_ratio": float(np.median([one["standard_error"] / one["without_noise"] for one in found]))
        if found
        else None,
        "warnings": warnings,
    }


def expect_errors(method: Regression, persons: int, noise_std: float) -> list[dict[str, Any]]:
    """Return the expected errors of every coefficient, in the units of the table, by the public guess."""
    rounds, family = method.rounds, method.family
    # The variance of a residual is the curvature by the model; of a linear one, a public guess that its bound is 3
    # deviations.
    dispersion = 1.0 if family.label == "classes" or family.ratio else 1 / 9 / family.first_curvature
    of_baselines = np.array(family.expected_curvatures)
    height = np.full(rounds.size, persons * _SPREAD * of_baselines.sum())
    height[: len(of_baselines)] = persons * of_baselines
    by_g, by_h, _ = rounds.factors(rounds.iterations - 1)
    of_noise = (noise_std / by_g) ** 2
    error = np.diag(dispersion / height)
    noise = np.diag(of_noise / height**2)
    change = method.design.change * family.scale
    is_weak = height < WEAK * noise_std / by_h * math.sqrt(rounds.size)
    total, alone = (np.diag(change @ one @ change.T) for one in (error + noise, error))
    found = []
    for j, name in enumerate(method.design.names):
        lost = bool(is_weak[j] or (total[j] - alone[j]) > MAX_NOISE_SHARE * total[j])
        found.append(
            {
                "term": name,
                "standard_error": float(math.sqrt(total[j])),
                "without_noise": float(math.sqrt(alone[j])),
                "lost": lost,
            }
        )
    return found


def format_regression_plan(plan: dict[str, Any]) -> list[str]:
    """Return the plan as lines of text."""
    lines = [*format_plan(plan), *([remark_on_users(plan["users"])] if plan["users_assumed"] else [])]
    if plan["coefficients"]:
        width = max(len(one["term"]) for one in plan["coefficients"])
        lines.append("expected standard errors, if columns are spread evenly and not correlated:")
        lines += [
            f"  {one['term']:<{width}}  ± {one['standard_error']:.3g} (without noise {one['without_noise']:.3g})"
            + ("  lost in the noise" if one["lost"] else "")
            for one in plan["coefficients"]
        ]
        lines.append(_remark_on_predictions(plan["error_ratio"]))
    return [*lines, *(f"warning: {text}" for text in plan["warnings"])]


def _remark_on_predictions(ratio: float) -> str:
    """Return whether the regression predicts as well as a model that is trained under the same ε."""
    times = f"noise makes the errors {ratio:.3g} times as long"
    if ratio > _PREDICTS_AS_WELL:
        return f"for predictions alone, train a model at this ε (silodp run --target-epsilon): here {times}"
    return f"{times}: for predictions it is as good as a linear model of silodp run"
