"""Per-record and per-user budgets: the sampling rate or clip that meets each one (docs/privacy.md, section 9).

ε increases in the parameter, so it is evaluated on a grid, and every budget gets the largest grid point that costs no
more: never overspent, and met up to the grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from silodp.accounting import _gaussian
from silodp.accounting.accountant import Accountant, compute_epsilon, find_accountant
from silodp.accounting.events import Event
from silodp.errors import SilodpError
from silodp.settings import Delta, check_value

Array = NDArray[np.float64]

MAX_GROUPS = 20
"""More distinct budgets than these are reported in groups."""
ROUNDING_MARGIN = 1 + 1e-9
"""Two ways to add up the same series differ by less; what is charged is larger by this factor."""

_MAX_DISTINCT = (
    64  # distinct budgets that are worth points of their own: each takes the accountant about ten calls
)
_MET = 1e-3  # to which part of itself such a budget is met; noise and grids of accountants are about as exact


@dataclass(frozen=True, eq=False)
class EpsilonCurve:
    """ε as a step function of a parameter x: `epsilons[i]` is at least what any x ≤ `parameters[i]` costs.

    Attributes:
        parameters: The grid (points,), ascending and above 0: sampling probabilities, or clips in units of the public
            one.
        epsilons: The ε (points,) of the grid, which never falls; infinity where nothing is promised.

    Raises:
        SilodpError: the points are not in order.
    """

    parameters: Array
    epsilons: Array

    def __post_init__(self) -> None:
        x, eps = self.parameters, self.epsilons
        # What is infinite has no difference, and NaN is in no order.
        rises = x.shape == eps.shape and x.ndim == 1 and len(x) > 0 and x[0] > 0 and eps[0] >= 0
        if not (rises and (x[1:] > x[:-1]).all() and (eps[1:] >= eps[:-1]).all()):
            raise SilodpError(
                "a curve needs parameters that rise from above 0, and epsilons that never fall.",
                code="argument.value",
            )

    @classmethod
    def of(
        cls,
        make_event: Callable[[float], Event],
        rounds: int,
        delta: float,
        accountant: Accountant | str = "pld",
        points: int = 128,
        least: float = 1e-4,
        budgets: Array | None = None,
    ) -> Self:
        """Compute the curve of a cost that rises with x, for x from `least` to 1 in equal ratios.

        For users x = q in PoissonSampled(q, Gaussian(σ)) or RevealedSample(q, Gaussian(σ)), or x = c in Gaussian(σ/c),
        where c is the clip in units of the public one.

        Args:
            make_event: x -> the event of a round.
            rounds: T.
            delta: δ.
            accountant: a name or an object.
            points: of the grid.
            least: the smallest x.
            budgets: (n,) where at most 64 are distinct, points are placed so that each of them is met to a part in a
                thousand, or by x = 1.

        Raises:
            SilodpError: the grid or δ is out of range.
        """
        accountant = find_accountant(accountant)
        check_value("delta", delta, Delta)

        def cost(x: float) -> float:
            return compute_epsilon([(make_event(x), rounds)], delta, accountant)

        grid = make_geometric_grid(points, least)
        wanted = list_few_budgets(budgets)
        if wanted is None:
            return cls.from_costs(grid, np.array([cost(x) for x in grid]))
        return cls._refine(wanted, cost, grid)

    def parameter_for(self, budgets: Array) -> Array:
        """Return (n,) for each budget the largest grid parameter that costs no more; 0.0 where the least costs more.

        Raises:
            SilodpError: a budget is not a number above 0.
        """
        budgets = check_budgets(budgets)
        # "right": the number of points that cost at most the budget, so that equality is still affordable.
        index = np.searchsorted(self.epsilons, budgets, side="right")
        met: Array = np.concatenate([[0.0], self.parameters])[index]
        return met

    def spent(self, parameters: Array) -> Array:
        """Return (n,) an upper bound of ε at any parameter: that of the next grid point up; infinity above the grid."""
        parameters = np.asarray(parameters, float)
        if not (parameters >= 0).all():
            raise SilodpError(
                "a sampling probability or clip of the curve must be 0 or more.", code="argument.value"
            )
        # "left": the first point that is no smaller, which costs at least as much as the parameter itself.
        index = np.searchsorted(self.parameters, parameters, side="left")
        bounds = np.concatenate([self.epsilons, [np.inf]])[index]
        return np.where(parameters == 0, 0.0, bounds)

    @classmethod
    def from_costs(cls, parameters: Array, epsilons: Array) -> Self:
        """Return the curve of computed costs (points,), made to rise.

        Rounding of an accountant may make a larger x cost a little less; then it is charged as the smaller one.
        """
        return cls(parameters, np.maximum.accumulate(epsilons))

    @classmethod
    def _refine(cls, budgets: Array, cost: Callable[[float], float], grid: Array) -> Self:
        """Narrow a bracket for each of few budgets until its lower end costs the budget up to a thousandth."""
        known = {x: cost(x) for x in (float(grid[0]), float(grid[-1]))}
        for budget in budgets:
            while True:
                # What was computed for other budgets narrows the bracket of this one, too.
                below = max((x for x, eps in known.items() if eps <= budget), default=None)
                above = min((x for x, eps in known.items() if eps > budget), default=None)
                if below is None or above is None or known[below] >= budget * (1 - _MET):
                    break
                if (
                    above / below < 1 + 1e-9
                ):  # ε may jump (to infinity, for example), and then no x meets the budget
                    break
                x = _between(below, above, known[below], known[above], float(budget))
                known[x] = cost(x)
        points = sorted(known)
        return cls.from_costs(np.array(points), np.array([known[x] for x in points]))


def compute_filter_budget(budgets: Array, delta: float) -> Array:
    """Compute what a record may spend in `rpdp-filter`: R = μ²/2 with δ(ε) of one Gaussian release of μ equal to δ.

    R bounds Σ‖g‖²/(2σ²C²) over all steps, g being the record's clipped gradients and σC the standard deviation of every
    step's Gaussian noise. This holds only where every step is an unsampled Gaussian release, and where ‖g‖ is known
    before the step, from the record and the earlier releases, so that a step which would exceed R is not taken. Then
    the whole run costs the record no more than one Gaussian release of μ = √(2R), however the steps were chosen. It
    does not hold for integer noise or sampled batches.

    Args:
        budgets: (n,) ε of every record, above 0.
        delta: δ.

    Returns:
        (n,) the largest R for each budget.

    Raises:
        SilodpError: a budget or δ is out of range.

    Source: for the filter Feldman and Zrnic 2021 (Individual privacy accounting via a Rényi filter), for its Gaussian
    limit Koskela, Tobaben and Honkela 2023 (Individual privacy accounting with Gaussian differential privacy), for δ(ε)
    Balle and Wang 2018, Theorem 8. The proof is in docs/privacy.md, section 9.
    """
    check_value("delta", delta, Delta)
    # Many records share a budget, and each distinct one is solved once.
    distinct, which = np.unique(check_budgets(budgets), return_inverse=True)
    limits: Array = _gaussian.solve_mu(distinct, delta) ** 2 / 2 / ROUNDING_MARGIN
    return limits[which]


def group_budgets(budgets: Array) -> Array:
    """Return the distinct budgets, ascending; of more than 20, the largest of each twentieth of the units."""
    distinct = np.unique(budgets)
    if len(distinct) <= MAX_GROUPS:
        return distinct
    # "higher": a budget that somebody has, and no smaller than that of anybody in the group.
    shares = np.arange(1, MAX_GROUPS + 1) / MAX_GROUPS
    return np.unique(np.quantile(budgets, shares, method="higher"))


def make_geometric_grid(points: int, least: float) -> Array:
    """Return (points,) from `least` to 1 in equal ratios.

    Raises:
        SilodpError: there are fewer than 2 points, or `least` is not between 0 and 1.
    """
    if not (points == int(points) and points >= 2 and 0 < least < 1):
        raise SilodpError(
            f"a curve of {points!r} points from {least!r} to 1: set 2 points or more, and a least parameter "
            "between 0 and 1.",
            code="argument.value",
        )
    grid = np.geomspace(least, 1.0, int(points))
    grid[-1] = 1.0  # exactly, since the curve says infinity above its last point
    return grid


def _between(below: float, above: float, low: float, high: float, budget: float) -> float:
    """Interpolate ln ε linearly in ln x, away from the ends; half way where an end is infinite."""
    # Costs are nearly powers of the parameter, so this guess is close; away from the ends, since a guess at an end
    # would not narrow the bracket.
    share = 0.5
    if low > 0 and high < np.inf:
        share = float(np.log(budget * (1 - _MET / 2) / low) / np.log(high / low))
    return float(below * (above / below) ** min(max(share, 0.02), 0.98))


def list_few_budgets(budgets: Array | None) -> Array | None:
    """Return the distinct budgets, ascending, where they are at most 64; None for more, and for None."""
    if budgets is None:
        return None
    distinct = np.unique(check_budgets(budgets))
    return distinct if len(distinct) <= _MAX_DISTINCT else None


def check_budgets(budgets: Array) -> Array:
    """Return budgets (n,) in double precision; raise where one is not a number above 0."""
    budgets = np.asarray(budgets, float)
    if not (budgets > 0).all():
        raise SilodpError(
            "a privacy budget must be a number above 0: look for zeros, negative and missing ones.",
            code="data.budgets",
        )
    return budgets
