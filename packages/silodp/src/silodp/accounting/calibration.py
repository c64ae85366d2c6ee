"""Calibration: the noise, the rounds or the sampling probability that meet a target ε without exceeding it.

ε is an upper bound by any accountant, and each returned value was checked against the target itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from silodp.accounting.accountant import Accountant, EventCount, compute_epsilon
from silodp.accounting.events import explain_not_private
from silodp.errors import SilodpError
from silodp.settings import Delta, Epsilon, check_value
from silodp.text import pluralize

_TOLERANCE = 0.9e-4  # of ln(parameter): the functions promise 1e-4
_MIN_NOISE, _MAX_NOISE = 1e-2, 1e6
_MIN_SAMPLING = 1e-8


def calibrate_noise_multiplier(
    make_charges: Callable[[float], Iterable[EventCount]],
    target: float,
    delta: float,
    accountant: Accountant | str = "pld",
) -> float:
    """Return the smallest noise multiplier with which all rounds cost at most the target.

    Args:
        make_charges: σ -> (event, count) of all rounds.
        target: ε at `delta`.
        delta: δ.
        accountant: a name or an object.

    Returns:
        σ, to 1e-4 of itself, never below 0.01.

    Raises:
        SilodpError: no σ up to 10⁶ meets the target.
    """
    excess = _excess(lambda log: make_charges(math.exp(log)), target, delta, accountant)
    # ε falls with σ, so from σ = 1 on, in factors of 4, one end of a bracket meets the target and the other does not.
    fits, least, most = 0.0, math.log(_MIN_NOISE), math.log(_MAX_NOISE)
    while excess(fits) > 0:
        if fits >= most:
            most_noise = f"a noise multiplier of {_MAX_NOISE:g}"
            raise _unreachable(most_noise, make_charges(_MAX_NOISE), target, delta)
        fits = min(fits + math.log(4), most)
    fails = fits
    while excess(fails) <= 0:
        if fails <= least:
            return _MIN_NOISE
        fits, fails = fails, max(fails - math.log(4), least)
    return math.exp(_edge(excess, fits, fails, _TOLERANCE))


def calibrate_sampling_probability(
    make_charges: Callable[[float], Iterable[EventCount]],
    target: float,
    delta: float,
    accountant: Accountant | str = "pld",
) -> float:
    """Return the largest sampling probability with which all rounds cost at most the target.

    Args:
        make_charges: q -> (event, count) of all rounds.
        target: ε at `delta`.
        delta: δ.
        accountant: a name or an object.

    Returns:
        q, to 1e-4 of itself.

    Raises:
        SilodpError: even q = 1e-8 costs more than `target`.
    """
    excess = _excess(lambda log: make_charges(math.exp(log)), target, delta, accountant)
    # ε rises with q, so from q = 1 (ln q = 0) down, in factors of 4, to the first q that meets the target.
    fits = fails = 0.0
    while excess(fits) > 0:
        if fits <= math.log(_MIN_SAMPLING):
            least = f"a sampling probability of {_MIN_SAMPLING:g}"
            raise _unreachable(least, make_charges(_MIN_SAMPLING), target, delta)
        fits, fails = max(fits - math.log(4), math.log(_MIN_SAMPLING)), fits
    return 1.0 if fits == 0.0 else math.exp(_edge(excess, fits, fails, _TOLERANCE))


def calibrate_rounds(
    make_charges: Callable[[int], Iterable[EventCount]],
    target: float,
    delta: float,
    accountant: Accountant | str = "pld",
    most: int = 10**7,
) -> int:
    """Return the largest T ≤ `most` for which the first T rounds cost at most `target`; 0 if there is none.

    Args:
        make_charges: T -> (event, count) of the first T rounds; more rounds never cost less.
        target: ε at `delta`.
        delta: δ.
        accountant: a name or an object.
        most: where the search ends.

    Raises:
        SilodpError: nothing is promised even for one round.
    """
    at_once = _excess(lambda log: make_charges(1), target, delta, accountant)
    if most < 1 or at_once(0.0) > 0:
        return 0
    # A later round without a guarantee ends the rounds that fit, and is no reason to refuse those before it.
    excess = _excess(lambda log: make_charges(_whole(log)), target, delta, accountant, refuse=False)
    fits, fails = 0.0, min(math.log(4), math.log(most))
    while excess(fails) <= 0:
        if _whole(fails) >= most:
            return most
        fits, fails = fails, min(fails + math.log(4), math.log(most))
    # Half a round apart, the two whole numbers below are neighbors.
    return _whole(_edge(excess, fits, fails, 0.5 * math.exp(-fails)))


def _whole(log: float) -> int:
    return math.floor(math.exp(log) + 1e-6)  # exp(ln 1000) is a little less than 1000


def _excess(
    charge: Callable[[float], Iterable[EventCount]],
    target: float,
    delta: float,
    accountant: Accountant | str,
    refuse: bool = True,
) -> Callable[[float], float]:
    """Return ln(ε / target) as a function of ln(parameter), within ±3 so that infinity and 0 spoil no secant.

    Args:
        charge: ln(parameter) -> (event, count) of all rounds.
        target: ε at `delta`.
        delta: δ.
        accountant: a name or an object.
        refuse: whether a round without a guarantee raises an error; otherwise it costs infinity.
    """
    check_value("delta", delta, Delta)
    check_value("target", target, Epsilon)

    def excess(log: float) -> float:
        charges = list(charge(log))
        why = next((why for event, _ in charges if (why := explain_not_private(event)) is not None), None)
        if why is not None and refuse:
            raise SilodpError(
                f"no epsilon can be met against this adversary, because {why}.",
                code="accounting.no_guarantee",
            )
        cost = compute_epsilon(charges, delta, accountant) if why is None else math.inf
        if cost > target:  # even where the quotient rounds to 1
            return min(max(math.log(cost / target), 1e-300), 3.0)
        return max(math.log(cost / target), -3.0) if cost > 0 else -3.0

    return excess


def _edge(excess: Callable[[float], float], fits: float, fails: float, tolerance: float) -> float:
    """Return a point within `tolerance` of where the excess turns positive, on the side that fits.

    Two evaluations just either side of the secant's root shrink the bracket to `tolerance` once the secant is
    good; a bisection follows whenever they did not halve it.
    """
    inside, outside = excess(fits), excess(fails)
    # ln(ε/target) is nearly linear in ln(parameter), so a secant comes close in a few steps; each takes the
    # accountant up to a second.
    while abs(width := fails - fits) > tolerance:
        root = fits + width * -inside / (outside - inside)
        nudge = math.copysign(0.4 * tolerance, width)
        for point in (root - nudge, root + nudge, None):
            if point is None:  # bisection
                if abs(fails - fits) <= abs(width) / 2:
                    continue
                point = (fits + fails) / 2
            if not min(fits, fails) < point < max(fits, fails):
                continue  # a point outside the bracket says nothing new
            value = excess(point)
            if value > 0:
                fails, outside = point, value
            else:
                fits, inside = point, value
    return fits


def _unreachable(best: str, charges: Iterable[EventCount], target: float, delta: float) -> SilodpError:
    rounds = sum(count for _, count in charges)
    return SilodpError(
        f"epsilon {target:g} at delta {delta:g} is out of reach in {pluralize(rounds, 'round')}, even with {best}: "
        f"allow a larger epsilon or delta, or fewer rounds.",
        code="budget.out_of_reach",
    )
