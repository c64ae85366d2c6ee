"""Distributions of per-record and per-user privacy budgets, for experiments.

Every distribution is a function (count, generator) -> (count,) budgets ε within `BOUNDS`, in random order: a budget
must be independent of its record, and tables are often sorted by label.

Source: rPDP-FL, section 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from silodp.errors import SilodpError
from silodp.settings import Epsilon, Positive, check_value

Budgets = NDArray[np.float64]
Preference = Callable[[int, np.random.Generator], Budgets]

BOUNDS = (0.1, 10.0)
"""Every draw outside is repeated."""

SHARES = (0.7, 0.2, 0.1)
"""Shares of units that ask for much privacy, for some, and for little."""

_TRIES = 1000


def three_levels(
    count: int,
    generator: np.random.Generator,
    levels: Sequence[float] = (0.1, 1.0, 5.0),
    shares: Sequence[float] = SHARES,
) -> Budgets:
    """Draw a few distinct budgets, each for its share of the units, as near to the shares as whole numbers allow.

    Raises:
        SilodpError: a level is not finite and above 0, or the shares do not add up to 1.

    Source: rPDP-FL, section 7 ("ThreeLevels").
    """
    _check_shares(shares, len(levels))
    for level in levels:
        check_value("levels", level, Epsilon)
    # Ends are rounded, not sizes: sizes that are rounded may not add up to the count.
    ends = np.rint(np.cumsum(shares) * count).astype(int)
    ends[-1] = count
    budgets = np.repeat(np.asarray(levels, np.float64), np.diff(ends, prepend=0))
    return generator.permutation(budgets)


def pareto(
    count: int, generator: np.random.Generator, shape: float = 1.0, scale: float = BOUNDS[0]
) -> Budgets:
    """Draw BOUNDS[0] + scale·Lomax(shape), again until within the bounds; independent draws, so in random order.

    With the default scale this is the Pareto distribution with density ∝ ε^-(shape+1) from BOUNDS[0] on, most budgets
    being small; the code of the paper draws with scale 1, whose median is ten times as large.

    Raises:
        SilodpError: shape or scale is not finite and above 0.

    Source: rPDP-FL, section 7 ("BoundedPareto").
    """
    check_value("shape", shape, Positive)
    check_value("scale", scale, Positive)
    return _draw_within_bounds(
        count, lambda missing: BOUNDS[0] + scale * generator.pareto(shape, len(missing))
    )


def mixture(
    count: int,
    generator: np.random.Generator,
    means: Sequence[float] = (0.1, 1.0, 5.0),
    deviations: Sequence[float] = (0.01, 0.05, 0.5),
    shares: Sequence[float] = SHARES,
) -> Budgets:
    """Draw from a mixture of Gaussians, again from the same component until within the bounds.

    Repeated from the whole mixture, a component at the edge of the bounds would lose half its share.

    Raises:
        SilodpError: the three sequences do not fit together, or hardly a draw lies within the bounds.

    Source: rPDP-FL, section 7 ("BoundedMixGauss").
    """
    _check_shares(shares, len(means))
    if len(deviations) != len(means) or not (
        np.isfinite(means).all() and np.isfinite(deviations).all() and (np.asarray(deviations) >= 0).all()
    ):
        raise SilodpError(
            f"deviations = {tuple(deviations)}: set one number ≥ 0 for each of the {len(means)} finite means.",
            code="argument.value",
            field="deviations",
        )
    # Normalized, as shares may add up to 1 only up to rounding, which numpy refuses.
    component = generator.choice(len(means), count, p=np.asarray(shares) / np.sum(shares))
    mean, deviation = np.asarray(means, float)[component], np.asarray(deviations, float)[component]
    return _draw_within_bounds(count, lambda missing: generator.normal(mean[missing], deviation[missing]))


PREFERENCES: dict[str, Preference] = {"three-levels": three_levels, "pareto": pareto, "mixture": mixture}
"""The distributions by name."""


def _draw_within_bounds(count: int, draw: Callable[[NDArray[np.int64]], Budgets]) -> Budgets:
    """Return draw(positions) for all positions, repeated for those whose draw lies outside the bounds."""
    budgets = np.empty(count)
    missing = np.arange(count)
    for _ in range(_TRIES):
        # Only what lies outside is drawn again, which leaves the distribution conditioned on the bounds.
        budgets[missing] = draw(missing)
        missing = missing[(budgets[missing] < BOUNDS[0]) | (budgets[missing] > BOUNDS[1])]
        if not len(missing):
            return budgets
    raise SilodpError(
        f"after {_TRIES} draws {len(missing)} of {count} budgets are still outside {BOUNDS[0]:g}..{BOUNDS[1]:g}: "
        "choose a distribution that has some weight there.",
        code="argument.value",
    )


def _check_shares(shares: Sequence[float], parts: int) -> None:
    whole = np.asarray(shares, float)
    if (
        len(whole) != parts
        or not parts
        or not ((whole >= 0) & np.isfinite(whole)).all()
        or abs(whole.sum() - 1) > 1e-9
    ):
        raise SilodpError(
            f"shares = {tuple(shares)}: set one share ≥ 0 for each of {parts} levels, together 1.",
            code="argument.value",
            field="shares",
        )
