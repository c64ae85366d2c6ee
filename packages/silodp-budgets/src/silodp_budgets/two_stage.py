"""Two-stage sampling of rPDP-FL: what a record with its own sampling probability costs (docs/privacy.md, section 9).

A client takes part in a round with probability λ, and then runs τ steps of DP-SGD, in which each record is drawn with
its own probability q. Everything here computes many q at once, by Rényi orders, unless another accountant is named.

`compute_two_stage_curve` calibrates q exactly. Two published calibrations stand beside it for comparison:
Simulation-CurveFitting (`fit_scf`), and a binary search for every record (`search_probabilities`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import LazyModule
from silodp.accounting.accountant import Accountant, compute_epsilon, find_accountant
from silodp.accounting.events import Event, Gaussian, PoissonSampled, RevealedSample, SelfComposed
from silodp.accounting.rdp import RdpAccountant, compute_mixture_rdp, compute_sampled_moments
from silodp.errors import SilodpError
from silodp.settings import Count, Delta, Positive, Probability, Settings, Whole, check_choice
from silodp_budgets.budget_curve import (
    ROUNDING_MARGIN,
    EpsilonCurve,
    check_budgets,
    list_few_budgets,
    make_geometric_grid,
)

if TYPE_CHECKING:
    from scipy import optimize
else:
    optimize = LazyModule("scipy.optimize")

Array = NDArray[np.float64]
ChargingMode = Literal["planned", "realized"]
Conversion = Literal["paper", "tight"]

_SIMULATED = np.linspace(0.01, 1.0, 100)  # the sampling probabilities at which `fit_scf` computes ε
_MAX_NUMBERS = 1 << 21  # of one array: 16 MiB


def _list_orders() -> Array:
    """Return 2–64, then orders 6 % apart; the best one lies beyond 1,024 only where ε is some thousandths."""
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
    """The public constants of a run of rPDP-FL, and what a round of it costs a record with sampling probability q.

    Attributes:
        noise_multiplier: The standard deviation σ of the noise of every step, in units of the clip.
        local_steps: The number τ of steps of a round.
        client_sampling: The probability λ with which a client takes part in a round.
        delta: The δ of the budgets.

    Source: rPDP-FL (Liu et al.), Lemma 6 and Theorem 1, case 1.
    """

    noise_multiplier: Positive
    local_steps: Count
    client_sampling: Probability
    delta: Delta

    def event(self, q: float, charging: ChargingMode = "planned") -> Event:
        """Return the event of a round: of any, whose coin λ everyone sees, or ("realized") of one that was joined."""
        steps = SelfComposed(PoissonSampled(q, Gaussian(self.noise_multiplier)), self.local_steps)
        return RevealedSample(self.client_sampling, steps) if charging == "planned" else steps

    def compute_rdp(self, q: Array, charging: ChargingMode = "planned") -> Array:
        """Return ρ(α) of a round, (orders, n), for q (n,): ln(1 − λ + λe^((α−1)ρ_τ))/(α−1) with ρ_τ = τ·ρ_PoiSG(α, q).

        Args:
            q: sampling probabilities (n,) in [0, 1].
            charging: "planned": any round, joined or not; "realized": one that the client joined, which costs ρ_τ.

        Source: rPDP-FL, Lemma 6.
        """
        # τ steps add up at every order; the coin λ then mixes what a joined round costs with one that costs nothing.
        joined, rest = (
            self.local_steps * compute_sampled_gaussian(q, self.noise_multiplier),
            ORDERS[:, None] - 1,
        )
        if self.client_sampling == 1 or charging == "realized":
            return joined
        planned: Array = compute_mixture_rdp(self.client_sampling, rest * joined) / rest
        return planned

    def bound_epsilon(
        self, q: Array, rounds: int | NDArray[np.int64], charging: ChargingMode = "planned"
    ) -> Array:
        """Return ε (n,) ≥ 0 of records with sampling probabilities q (n,) after `rounds` rounds, one number or (n,)."""
        # In slices: the series at 4,096 orders would need gigabytes for 10⁵ records at once.
        found, count = np.empty(len(q)), np.broadcast_to(rounds, len(q))
        conversion = compute_conversion(ORDERS, self.delta)[:, None]
        for part in split_records(len(q)):
            rho = count[part] * self.compute_rdp(q[part], charging)
            found[part] = np.maximum((rho + conversion).min(axis=0), 0.0)
        return found


def split_records(total: int, width: int = int(ORDERS[-1])) -> Iterator[slice]:
    """Yield slices of `total` records for arrays of `width` numbers a record; the series at order α has α terms."""
    size = max(1, _MAX_NUMBERS // width)
    return (slice(start, start + size) for start in range(0, total, size))


def compute_conversion(orders: Array, delta: float) -> Array:
    """Return ε − ρ(α) at δ, ln(1 − 1/α) − ln(δα)/(α − 1).

    Source: Canonne, Kamath and Steinke 2020 (The discrete Gaussian for differential privacy), Proposition 12.
    """
    found: Array = np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return found


def compute_sampled_gaussian(q: Array, sigma: float) -> Array:
    """Return ρ_PoiSG(α, q) at ORDERS, (orders, n), for q (n,) in [0, 1]; 0 and 1 have closed forms.

    Source: rPDP-FL, Lemma 6; Mironov, Talwar and Zhang 2019, section 3.3.
    """
    rho = np.zeros((len(ORDERS), len(q)))  # stays 0 at q = 0
    rho[:, q == 1] = ORDERS[:, None] / (2 * sigma**2)
    inner = (q > 0) & (q < 1)
    if inner.any():
        rho[:, inner] = compute_sampled_moments(q[inner], Gaussian(sigma), ORDERS) / (ORDERS[:, None] - 1)
    return rho


def compute_two_stage_curve(
    run: TwoStage,
    rounds: int,
    accountant: Accountant | str = "rdp",
    points: int | None = None,
    least: float = 1e-6,
    budgets: Array | None = None,
) -> EpsilonCurve:
    """Return ε of a record against its sampling probability q after `rounds` rounds of rPDP-FL.

    By Rényi orders 2,048 points, less than 1 % apart, are computed at once. Any other accountant takes some hundredths
    of a second for a point: 96 points, 5 % apart from 1 % on. Between points the next one up is charged.

    Args:
        run: the public constants.
        rounds: T.
        accountant: a name, or an object.
        points: how many points an accountant computes one by one; None for 96.
        least: the smallest q.
        budgets: (n,) where at most 64 are distinct, such points that meet them to a part in a thousand.

    Raises:
        SilodpError: a parameter is out of range.

    Source: rPDP-FL, Theorem 1, case 1.
    """
    accountant = find_accountant(accountant)
    Whole().check("rounds", rounds)
    Whole(least=2).check("points", 96 if points is None else points)
    if accountant == RdpAccountant():
        grid = make_geometric_grid(2048, least)
        return EpsilonCurve.from_costs(grid, run.bound_epsilon(grid, rounds) * ROUNDING_MARGIN)
    few = list_few_budgets(budgets)
    start = max(least, 1e-2) if points is None and few is None else least
    if few is not None and accountant.exact:
        # ε is below that by Rényi orders, so the q of the smallest budget by those is a place to begin.
        by_orders = compute_two_stage_curve(run, rounds, least=least)
        start = max(least, float(by_orders.parameter_for(few[:1])[0]))
    return EpsilonCurve.of(
        run.event, rounds, run.delta, accountant, 96 if points is None else points, min(start, 0.5), few
    )


def count_affordable_rounds(
    run: TwoStage,
    sampling_probabilities: Array,
    budgets: Array,
    most: int,
    charging: ChargingMode = "planned",
) -> NDArray[np.int64]:
    """Count the rounds (n,) that each record may stay in, at most `most`; then it retires.

    A function of the record's (q, ε) alone, in one of two modes fixed beforehand: "planned" counts every round, joined
    or not; "realized" counts only rounds that the client joined (see `TwoStage.compute_rdp`). By Rényi orders: the
    largest t with min over α of t·ρ(α) + conversion ≤ ε.

    Args:
        run: the public constants.
        sampling_probabilities: (n,) q of every record.
        budgets: (n,) ε of every record.
        most: an upper limit of the answer.
        charging: "planned" or "realized".

    Raises:
        SilodpError: a parameter is out of range.
    """
    check_choice("book", charging, get_args(ChargingMode))
    Whole().check("most", most)
    q, eps = np.asarray(sampling_probabilities, float), check_budgets(budgets)
    if q.shape != eps.shape or not ((q >= 0) & (q <= 1)).all():
        raise SilodpError(
            "every budget needs a sampling probability of its own, between 0 and 1.",
            code="argument.value",
            field="sampling_probabilities",
        )
    # Records with one budget have one q, and ρ of a few distinct q is enough.
    distinct, which = np.unique(q, return_inverse=True)
    rho = np.empty((len(ORDERS), len(distinct)))
    for part in split_records(len(distinct)):
        rho[:, part] = run.compute_rdp(distinct[part], charging)
    room = compute_conversion(ORDERS, run.delta)
    rounds = np.zeros(len(q), np.int64)
    for part in split_records(len(q), len(ORDERS)):
        # ρ = 0 at q = 0: room/0 is ±∞ or NaN; that record is never drawn, which the last line puts right.
        with np.errstate(divide="ignore", invalid="ignore"):
            afford = (eps[part] - room[:, None]) / rho[:, which[part]]
        afford = np.where(np.isnan(afford), 0.0, np.clip(afford, 0.0, most))
        # The best order for a record is the one that allows most rounds; it need not be the best for another.
        rounds[part] = np.floor(afford.max(axis=0))
    return np.where(q == 0, most, rounds)


def fit_scf(run: TwoStage, rounds: int, budgets: Array, conversion: Conversion = "paper") -> Array:
    """Fit q (n,) by Simulation-CurveFitting: inexact, a record may cost more than its budget.

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
    if conversion == "paper":
        rho = rounds * run.compute_rdp(_SIMULATED)
        simulated = (rho + math.log(1 / run.delta) / (ORDERS[:, None] - 1)).min(axis=0)
    else:
        simulated = run.bound_epsilon(_SIMULATED, rounds)
    a, b, c = _fit_exponential(simulated)
    inverted = np.full(len(budgets), 0.0)
    above = budgets > c  # below c, e^(aq+b) + c has no inverse
    inverted[above] = np.clip((np.log(budgets[above] - c) - b) / a, 0.0, 1.0)
    return np.where(budgets >= simulated[-1], 1.0, inverted)


def _fit_exponential(simulated: Array) -> tuple[float, float, float]:
    """Return (a, b, c) of e^(aq+b) + c through the simulated ε (100,)."""
    try:
        # A bad start overflows e^(aq+b), and least squares turn back by themselves; what fails is refused below.
        with warnings.catch_warnings(), np.errstate(over="ignore", invalid="ignore"):
            warnings.simplefilter("ignore", optimize.OptimizeWarning)
            (a, b, c), covariance = optimize.curve_fit(
                lambda q, a, b, c: np.exp(a * q + b) + c, _SIMULATED, simulated
            )
    except (RuntimeError, ValueError):
        covariance = np.array([math.inf])
    if not np.isfinite(covariance).all() or a <= 0:
        raise SilodpError(
            "SCF finds no curve e^(aq+b)+c through the simulated epsilons of these settings: use calibration 'exact'.",
            code="accounting.no_fit",
            field="calibration",
        )
    return float(a), float(b), float(c)


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
        # Always the side that costs no more is kept, so that nobody overspends by the tolerance.
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
