"""Per-record and per-user budgets: the sampling rate or clip that meets each one (docs/privacy.md, section 9).

ε increases in the parameter, so it is evaluated on a grid, and every budget gets the largest grid point that costs no
more: never overspent, and met up to the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from silodp.accounting import _gaussian
from silodp.accounting.accountant import Accountant, compute_epsilon, find_accountant
from silodp.accounting.events import Event, Gaussian, PoissonSampled, RevealedSample, SelfComposed
from silodp.accounting.rdp import RdpAccountant, compute_mixture_rdp, compute_sampled_moments
from silodp.errors import SilodpError
from silodp.settings import Count, Delta, Positive, Probability, Settings, Whole, check_choice, check_value

Array = NDArray[np.float64]
ChargingMode = Literal["planned", "realized"]

MAX_GROUPS = 20
"""More distinct budgets than these are reported in groups."""
_FEW = 64  # distinct budgets that are worth points of their own
_MET = 1e-3  # to which part of itself such a budget is met
_MARGIN = 1 + 1e-9  # two ways to add up the same series differ by less
_AT_ONCE = 1 << 21  # numbers in a chunk


@dataclass(frozen=True, eq=False)
class EpsilonCurve:
    """ε as a step function of a parameter x: `epsilons[i]` is at least what any x ≤ `parameters[i]` costs.

    Attributes:
        parameters: (points,) ascending and above 0: sampling probabilities, or clips in units of the public one.
        epsilons: (points,) never falling, infinity where nothing is promised.

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

        grid = _geometric(points, least)
        wanted = _distinct(budgets)
        if wanted is None:
            return cls._rising(grid, np.array([cost(x) for x in grid]))
        return cls._around(wanted, cost, grid)

    def parameter_for(self, budgets: Array) -> Array:
        """Return (n,) for each budget the largest grid parameter that costs no more; 0.0 where the least costs more.

        Raises:
            SilodpError: a budget is not a number above 0.
        """
        budgets = check_budgets(budgets)
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
        index = np.searchsorted(self.parameters, parameters, side="left")
        bounds = np.concatenate([self.epsilons, [np.inf]])[index]
        return np.where(parameters == 0, 0.0, bounds)

    @classmethod
    def _rising(cls, parameters: Array, epsilons: Array) -> Self:
        """Make ε rise: rounding may make a larger x cost less; then the larger is charged as the smaller."""
        return cls(parameters, np.maximum.accumulate(epsilons))

    @classmethod
    def _around(cls, budgets: Array, cost: Callable[[float], float], grid: Array) -> Self:
        """Narrow a bracket for each of few budgets until its lower end costs the budget up to a thousandth."""
        known = {x: cost(x) for x in (float(grid[0]), float(grid[-1]))}
        for budget in budgets:
            while True:
                below = max((x for x, eps in known.items() if eps <= budget), default=None)
                above = min((x for x, eps in known.items() if eps > budget), default=None)
                if below is None or above is None or known[below] >= budget * (1 - _MET):
                    break
                if above / below < 1 + 1e-9:
                    break
                x = _between(below, above, known[below], known[above], float(budget))
                known[x] = cost(x)
        points = sorted(known)
        return cls._rising(np.array(points), np.array([known[x] for x in points]))


def _list_orders() -> Array:
    """2–64, then 6 % apart; the best order lies beyond 1,024 only where ε is some thousandths."""
    orders = [*range(2, 65)]
    while orders[-1] < 256:
        orders.append(min(math.ceil(orders[-1] * 1.06), 256))
    return np.array([*orders, 512, 1024, 2048, 4096], float)


ORDERS = _list_orders()
"""Integers, some of `rdp.ORDERS`, so that ε by those is never larger.

Between integers dp_accounting's series is no more than a bound, a loose one for large q: whoever checks a calibration
with it must not find more than was promised, so no sharper value is used here.
"""


@dataclass(frozen=True)
class TwoStage(Settings):
    """The public constants of a run of rPDP-FL (its Lemma 6 and Theorem 1), for many sampling probabilities at once.

    A client takes part in a round with probability λ and then runs τ steps of DP-SGD in which a record is drawn with a
    separate probability q.

    Attributes:
        noise_multiplier: σ.
        local_steps: τ.
        client_sampling: λ.
        delta: δ.
    """

    noise_multiplier: Positive
    local_steps: Count
    client_sampling: Probability
    delta: Delta

    def joined(self, q: Array) -> Array:
        """Return ρ(α) of one round in which the client takes part, (orders, n): τ·ρ_PoiSG(α, q)."""
        return self.local_steps * compute_sampled_gaussian(q, self.noise_multiplier)

    def planned(self, q: Array) -> Array:
        """Return ρ(α) of one round, whether the client joins or not, (orders, n): ln(1 − λ + λe^((α−1)τρ))/(α−1)."""
        joined, rest = self.joined(q), ORDERS[:, None] - 1
        if self.client_sampling == 1:
            return joined
        planned: Array = compute_mixture_rdp(self.client_sampling, rest * joined) / rest
        return planned

    def epsilon(self, rho: Array) -> Array:
        """Return (n,) the smallest ε over the orders of ρ (orders, n), never below 0."""
        found: Array = np.maximum((rho + compute_conversion(ORDERS, self.delta)[:, None]).min(axis=0), 0.0)
        return found


def compute_conversion(orders: Array, delta: float) -> Array:
    """Return ε − ρ(α) at δ, ln(1 − 1/α) − ln(δα)/(α − 1) (Canonne, Kamath and Steinke 2020, Proposition 12)."""
    found: Array = np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return found


def compute_sampled_gaussian(q: Array, sigma: float) -> Array:
    """Return ρ_PoiSG(α, q) at ORDERS, (orders, n), for q (n,) in [0, 1] (rPDP-FL, Lemma 6)."""
    rho = np.zeros((len(ORDERS), len(q)))
    rho[:, q == 1] = ORDERS[:, None] / (2 * sigma**2)
    inner = (q > 0) & (q < 1)
    if inner.any():
        rho[:, inner] = compute_sampled_moments(q[inner], Gaussian(sigma), ORDERS) / (ORDERS[:, None] - 1)
    return rho


def compute_two_stage_curve(
    noise_multiplier: float,
    local_steps: int,
    client_sampling: float,
    rounds: int,
    delta: float,
    accountant: Accountant | str = "rdp",
    points: int | None = None,
    least: float = 1e-6,
    budgets: Array | None = None,
) -> EpsilonCurve:
    """Return ε of a record against its sampling probability q after `rounds` rounds of rPDP-FL.

    By Rényi orders 2,048 points, less than 1 % apart, are computed at once. Any other accountant takes some hundredths
    of a second for a point: 96 points, 5 % apart from 1 % on. Between points the next one up is charged.

    Args:
        noise_multiplier: σ.
        local_steps: τ.
        client_sampling: λ.
        rounds: T.
        delta: δ.
        accountant: a name, or an object.
        points: how many points an accountant computes one by one; None for 96.
        least: the smallest q.
        budgets: (n,) where at most 64 are distinct, such points that meet them to a part in a thousand.

    Raises:
        SilodpError: a parameter is out of range.

    Source: rPDP-FL, Theorem 1.
    """
    accountant = find_accountant(accountant)
    run = TwoStage(noise_multiplier, local_steps, client_sampling, delta)
    Whole().check("rounds", rounds)
    Whole(least=2).check("points", 96 if points is None else points)
    if accountant == RdpAccountant():
        grid = _geometric(2048, least)
        return EpsilonCurve._rising(grid, run.epsilon(rounds * run.planned(grid)) * _MARGIN)

    def event(q: float) -> Event:
        steps = SelfComposed(PoissonSampled(q, Gaussian(noise_multiplier)), local_steps)
        return RevealedSample(client_sampling, steps)

    start = max(least, 1e-2) if points is None and budgets is None else least
    if budgets is not None and accountant.exact:
        # ε is below that by Rényi orders, so the q of the smallest budget by those is a place to begin.
        rdp = compute_two_stage_curve(
            noise_multiplier, local_steps, client_sampling, rounds, delta, least=least
        )
        start = max(least, float(rdp.parameter_for(np.atleast_1d(np.min(check_budgets(budgets))))[0]))
    return EpsilonCurve.of(
        event, rounds, delta, accountant, 96 if points is None else points, min(start, 0.5), budgets
    )


def count_affordable_rounds(
    sampling_probabilities: Array,
    budgets: Array,
    noise_multiplier: float,
    local_steps: int,
    client_sampling: float,
    delta: float,
    most: int,
    book: ChargingMode = "planned",
) -> NDArray[np.int64]:
    """Count the rounds (n,) that each record may stay in, at most `most`; then it retires.

    A function of the record's (q, ε) alone, in one of two modes fixed beforehand: "planned" counts every round, joined
    or not, each at ln(1 − λ + λe^((α−1)τρ))/(α−1); "realized" counts only rounds that the client joined, each at τρ. By
    Rényi orders: the largest t with min over α of t·ρ(α) + conversion ≤ ε.

    Args:
        sampling_probabilities: (n,) q of every record.
        budgets: (n,) ε of every record.
        noise_multiplier: σ.
        local_steps: τ.
        client_sampling: λ.
        delta: δ.
        most: an upper limit of the answer.
        book: "planned" or "realized".

    Raises:
        SilodpError: a parameter is out of range.
    """
    check_choice("book", book, get_args(ChargingMode))
    Whole().check("most", most)
    run = TwoStage(noise_multiplier, local_steps, client_sampling, delta)
    q, eps = np.asarray(sampling_probabilities, float), check_budgets(budgets)
    if q.shape != eps.shape or not ((q >= 0) & (q <= 1)).all():
        raise SilodpError(
            "every budget needs a sampling probability of its own, between 0 and 1.",
            code="argument.value",
            field="sampling_probabilities",
        )
    distinct, which = np.unique(q, return_inverse=True)
    rho = np.empty((len(ORDERS), len(distinct)))
    for part in _chunks(len(distinct), 4096):
        rho[:, part] = run.planned(distinct[part]) if book == "planned" else run.joined(distinct[part])
    room = compute_conversion(ORDERS, delta)
    rounds = np.zeros(len(q), np.int64)
    for part in _chunks(len(q), len(ORDERS)):
        with np.errstate(divide="ignore", invalid="ignore"):
            afford = (eps[part] - room[:, None]) / rho[:, which[part]]
        afford = np.where(np.isnan(afford), 0.0, np.clip(afford, 0.0, most))
        rounds[part] = np.floor(afford.max(axis=0))
    return np.where(q == 0, most, rounds)


def compute_filter_budget(budgets: Array, delta: float) -> Array:
    """Compute what a record may spend in `rpdp-filter`: R = μ²/2 with δ(ε) of one Gaussian release of μ equal to δ.

    R bounds Σ‖g‖²/(2σ²C²) over all steps, g being the record's clipped gradients and σC the standard deviation of every
    step's Gaussian noise. This holds only where every step is an unsampled Gaussian release, and where ‖g‖ is known
    before the step, from the record and the earlier releases, so that a step which would exceed R is not taken. Then
    the whole run costs the record no more than one Gaussian release of μ = √(2R), however the steps were chosen. It
    does not hold for integer noise or sampled batches. Source: Koskela, Tobaben and Honkela 2023; proof in
    docs/privacy.md, section 9.

    Args:
        budgets: (n,) ε of every record, above 0.
        delta: δ.

    Returns:
        (n,) the largest R for each budget.

    Raises:
        SilodpError: a budget or δ is out of range.
    """
    check_value("delta", delta, Delta)
    distinct, which = np.unique(check_budgets(budgets), return_inverse=True)
    limits: Array = _gaussian.solve_mu(distinct, delta) ** 2 / 2 / _MARGIN
    return limits[which]


def group_budgets(budgets: Array) -> Array:
    """Return the distinct budgets, ascending; of more than 20, the largest of each twentieth of the units."""
    distinct = np.unique(budgets)
    if len(distinct) <= MAX_GROUPS:
        return distinct
    shares = np.arange(1, MAX_GROUPS + 1) / MAX_GROUPS
    return np.unique(np.quantile(budgets, shares, method="higher"))


def _geometric(points: int, least: float) -> Array:
    if not (points == int(points) and points >= 2 and 0 < least < 1):
        raise SilodpError(
            f"a curve of {points!r} points from {least!r} to 1: set 2 points or more, and a least parameter "
            "between 0 and 1.",
            code="argument.value",
        )
    grid = np.geomspace(least, 1.0, int(points))
    grid[-1] = 1.0
    return grid


def _between(below: float, above: float, low: float, high: float, budget: float) -> float:
    """Interpolate ln ε linearly in ln x, away from the ends; half way where an end is infinite."""
    share = 0.5
    if low > 0 and high < np.inf:
        share = float(np.log(budget * (1 - _MET / 2) / low) / np.log(high / low))
    return float(below * (above / below) ** min(max(share, 0.02), 0.98))


def _distinct(budgets: Array | None) -> Array | None:
    """Return the distinct budgets where they are few."""
    if budgets is None:
        return None
    distinct = np.unique(check_budgets(budgets))
    return distinct if len(distinct) <= _FEW else None


def _chunks(total: int, width: int) -> list[slice]:
    size = max(1, _AT_ONCE // width)
    return [slice(start, start + size) for start in range(0, total, size)]


def check_budgets(budgets: Array) -> Array:
    """Return budgets (n,) in double precision; raise where one is not a number above 0."""
    budgets = np.asarray(budgets, float)
    if not (budgets > 0).all():
        raise SilodpError(
            "a privacy budget must be a number above 0: look for zeros, negative and missing ones.",
            code="data.budgets",
        )
    return budgets
