"""Published calibrations to compare with: Simulation-CurveFitting, and a binary search for every record.

Both find a record's sampling probability q for its budget under two-stage sampling (docs/privacy.md, section 9). The
exact calibration is `two_stage.compute_two_stage_curve`.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import LazyModule
from silodp.accounting.accountant import Accountant, compute_epsilon
from silodp.accounting.budget_curve import check_budgets
from silodp.accounting.two_stage import ORDERS, TwoStage
from silodp.errors import SilodpError

if TYPE_CHECKING:
    from scipy import optimize
else:
    optimize = LazyModule("scipy.optimize")

Array = NDArray[np.float64]

Conversion = Literal["paper", "tight"]

_SIMULATED = np.linspace(0.01, 1.0, 100)


@dataclass(frozen=True, eq=False)
class Fitted:
    """The result of SCF, and what it costs by the exact accountant (Rényi orders), which may exceed the budgets.

    Attributes:
        sampling_probabilities: (n,) q.
        costs: (n,) ε at q.
        budgets: (n,) requested ε.
        coefficients: (a, b, c) of e^(aq+b) + c.
        r_squared: of the fit.
    """

    sampling_probabilities: Array
    costs: Array
    budgets: Array
    coefficients: tuple[float, float, float]
    r_squared: float

    @property
    def violations(self) -> int:
        """Number of records that spend more than their budget."""
        return int((self.costs > self.budgets).sum())

    @property
    def worst(self) -> float:
        """The largest cost, in units of the budget of its record."""
        return float((self.costs / self.budgets).max(initial=0.0))


def fit_scf(run: TwoStage, rounds: int, budgets: Array, conversion: Conversion = "paper") -> Fitted:
    """Fit sampling probabilities by Simulation-CurveFitting: inexact, may exceed budgets.

    ε is simulated for q = .01, .02, …, 1, e^(aq+b) + c is fitted to it by least squares, and inverted at each budget:
    q = 1 above ε(1), and 0 below c.

    Args:
        run: the public constants.
        rounds: T.
        budgets: (n,) ε of every record.
        conversion: "paper": ρ + ln(1/δ)/(α−1), whose slack hides some of what the fit overspends; "tight": the one that
            everything else here uses.

    Raises:
        SilodpError: the fit fails, or a parameter is out of range.

    Source: rPDP-FL (Liu et al.), Algorithm 2; the conversion is its Lemma 1.
    """
    budgets = check_budgets(budgets)
    rho = rounds * run.compute_rdp(_SIMULATED)
    loose = (rho + math.log(1 / run.delta) / (ORDERS[:, None] - 1)).min(axis=0)
    simulated = loose if conversion == "paper" else run.bound_epsilon(_SIMULATED, rounds)
    a, b, c = _fit(simulated)
    residual = simulated - _exponential(_SIMULATED, a, b, c)
    r_squared = 1 - float((residual**2).sum() / ((simulated - simulated.mean()) ** 2).sum())
    inverted = np.full(len(budgets), 0.0)
    above = budgets > c
    inverted[above] = np.clip((np.log(budgets[above] - c) - b) / a, 0.0, 1.0)
    q = np.where(budgets >= simulated[-1], 1.0, inverted)
    return Fitted(q, run.bound_epsilon(q, rounds), budgets, (a, b, c), r_squared)


def search_probabilities(
    run: TwoStage, rounds: int, budgets: Array, accountant: Accountant | str = "rdp", tolerance: float = 1e-2
) -> Array:
    """Search q (n,) by bisection in [0, 1] for every record separately.

    A search ends within `tolerance` of the budget, a part of it, on the side that costs less; below q = 1e-6 it is 0.0.
    The papers state no tolerance; theirs ends on either side. Slow: some tenths of a second for each record.

    Args:
        run: the public constants.
        rounds: T.
        budgets: (n,) ε of every record.
        accountant: a name, or an object.
        tolerance: which part of its budget a record may leave unspent.

    Raises:
        SilodpError: a parameter is out of range.

    Source: Boenisch et al. 2023 (Have it your way), Algorithm 1.
    """

    def cost(q: float) -> float:
        return compute_epsilon([(run.event(q), rounds)], run.delta, accountant)

    def search(budget: float) -> float:
        if cost(1.0) <= budget:
            return 1.0
        fits, fails = 0.0, 1.0
        while fails - fits > 1e-6:
            middle = (fits + fails) / 2
            spent = cost(middle)
            if spent > budget:
                fails = middle
                continue
            fits = middle
            if spent >= budget * (1 - tolerance):
                break
        return fits

    return np.array([search(float(budget)) for budget in check_budgets(budgets)])


def _exponential(q: Array, a: float, b: float, c: float) -> Array:
    found: Array = np.exp(a * q + b) + c
    return found


def _fit(simulated: Array) -> tuple[float, float, float]:
    try:
        with warnings.catch_warnings(), np.errstate(over="ignore", invalid="ignore"):
            warnings.simplefilter("ignore", optimize.OptimizeWarning)
            (a, b, c), covariance = optimize.curve_fit(_exponential, _SIMULATED, simulated)
    except (RuntimeError, ValueError):
        covariance = np.array([math.inf])
    if not np.isfinite(covariance).all() or a <= 0:
        raise SilodpError(
            "SCF finds no curve e^(aq+b)+c through the simulated epsilons of these settings: use calibration 'exact'.",
            code="accounting.no_fit",
            field="calibration",
        )
    return float(a), float(b), float(c)
