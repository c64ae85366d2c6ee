"""A picture of ε against the sampling probability, for several noise multipliers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from silodp.accounting.accountant import Accountant, EventCount, compute_epsilon
from silodp.accounting.events import explain_not_private
from silodp.config.build import get_fields
from silodp.data.budgets import BudgetDistribution
from silodp.errors import SilodpError
from silodp.methods import Method
from silodp.text import pluralize

if TYPE_CHECKING:  # matplotlib is imported only where a picture is drawn
    from silodp.report.plots import SamplingCurve

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Noise multipliers of the picture, relative to the configured one."""
_POINTS = 20
"""Points of a curve; each of them is accounted separately."""
_MIN_SAMPLING = 1e-3
_MAX_LEVELS = 6


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
        sampling, epsilons = method.budgets.sampling_curve(rounds, accountant, _POINTS, _MIN_SAMPLING)
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

        sampling = np.geomspace(_MIN_SAMPLING, 1.0, _POINTS)
        sampling[-1] = 1.0  # exactly, as a probability is at most 1
        # Rounding of an accountant may make a larger q cost a little less.
        epsilons = np.maximum.accumulate([cost(q) for q in sampling])
    return SamplingCurve(label, sampling.tolist(), epsilons.tolist())
