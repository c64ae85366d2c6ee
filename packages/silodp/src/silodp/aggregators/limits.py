"""The longest sums that honest silos send, by public constants alone: the server refuses longer ones.

A silo that departs from the protocol can send any numbers. Nothing proves that they come from records, but clip,
persons and noise say how long an honest sum can be (docs/malicious_silo.md). Of a sum over silos the check reads what
was charged, so it is post-processing, and costs no ε. Under `plain` a refusal is a function of one share, for which
`released` is not charged: for honest shares its probability is below 1e-18, far below δ.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from silodp.errors import SilodpError
from silodp.methods.base import REFUSAL_LOG_CHANCE
from silodp.text import pluralize

if TYPE_CHECKING:
    from silodp.aggregators.run_spec import RunSpec

_ROUNDING = 1e-9
"""Room for floating point: sums of 2^33 rows round by less."""
_COARSEST = 1 << 8
"""The fewest steps to the clip of integer noise where an aggregator does not say them (`lattice`)."""
_REACH, _FEWEST = 27.0, 1000.0


def bound_noise_norm(size: int, std: float, step: float = 0.0) -> float:
    """Return a norm that noise exceeds with probability below 1e-18.

    Gaussian noise: P(‖z‖ > σ·(√d + √(2x))) ≤ e^(-x) (Laurent and Massart 2000, "Adaptive estimation of a quadratic
    functional by model selection", Lemma 1: P(‖z‖² > σ²·(d + 2√(dx) + 2x)) ≤ e^(-x)); here x = ln 10¹⁹.

    Skellam noise of variance V = (std/step)² in steps, at most 10¹⁰ numbers: the same with σ² = κ·V, κ = 2(cosh a −
    1)/a², a = 27/√V. *Proof.* A variable Z of it has E e^(tZ) = e^(V·(cosh t − 1)) ≤ e^(κVt²/2) for |t| ≤ a, as (cosh
    t − 1)/t² grows with |t|. By t = 15/(κ√V), P(|Z| > 15√V) ≤ 2e^(−112/κ). Let s² < 1/(κV), |z| ≤ 15√V, and g be a
    standard normal variable: e^(s²z²/2)·P(|g + sz| ≤ 27) = E[e^(sgz); |g| ≤ 27], and that probability is at least 1 −
    η, η = P(|g| > 12) < 10⁻³². So E[e^(s²Z²/2); |Z| ≤ 15√V] ≤ E[e^(V·(cosh(sg) − 1)); |g| ≤ 27]/(1 − η) ≤ (1 −
    κVs²)^(-1/2)/(1 − η), for s·27 ≤ a: up to 1 − η the moment of a Gaussian of variance κV, from which the lemma
    follows. Below V = 1000, V = 1000 is taken: to add independent symmetric noise at most halves P(‖Z‖ > r). Together
    at most 2·(10⁻¹⁹·e^(2dη) + 2d·e^(−112/κ)) < 10⁻¹⁸, as κ < 1.07. ∎ On a finer grid V is larger at the same `std`,
    and the bound smaller.

    Args:
        size: d, how many numbers have noise.
        std: The standard deviation of one.
        step: The grid step of Skellam noise, or a coarser one, in units of `std`; 0: the noise is Gaussian.
    """
    if std > 0 and step > 0:
        variance = max((std / step) ** 2, _FEWEST)
        reach = _REACH / math.sqrt(variance)
        # 2(cosh a − 1) = (2·sinh(a/2))², which does not cancel where a is small.
        std = step * math.sqrt(variance) * 2 * math.sinh(reach / 2) / reach
    return std * (math.sqrt(size) + math.sqrt(2 * REFUSAL_LOG_CHANCE))


def find_longest_sum(spec: RunSpec, shares: int, is_share: bool) -> float | None:
    """Return the longest noisy sum of so many honest silos: longer ones have probability below 1e-18.

    Args:
        spec: The public constants of the run.
        shares: The number of silos in the sum.
        is_share: Whether it is the share of one silo, which anyone may be.

    Returns:
        A 2-norm in the units of the update; infinity where rows are clipped and their number is not public; None where
        silos add the noise themselves, and honest values may be anything.
    """
    longest, bounds = spec.method.longest_sums(spec.population, spec.data.record_counts), spec.bounds
    if longest is None or bounds is None:
        return None
    std = bounds.noise_multiplier * bounds.sensitivity * math.sqrt(shares)
    step = spec.aggregator.noise_step(spec) if spec.aggregator.adds_integers else 0.0
    rounded = 0.0
    if step is None:
        step = bounds.clip / _COARSEST
        # Under encryption uniform noise of one step is added to that of a silo, and the sum is rounded.
        rounded = (shares + 1) / 2 * step * math.sqrt(spec.sum_size)
    noise = bound_noise_norm(spec.sum_size, std, step) + rounded
    return (longest[0 if is_share else 1] + noise) * (1 + _ROUNDING)


def check_sum(spec: RunSpec, value: np.ndarray, round_: int, shares: int, silo: str | None = None) -> None:
    """Refuse a sum that is not finite, or longer than honest silos send.

    Args:
        spec: The public constants of the run.
        value: The noisy sum (d,) float64.
        round_: The number of the round, counted from 0.
        shares: The number of silos in the sum.
        silo: Who sent it; None: it is of several silos, and nobody can be named.

    Raises:
        SilodpError: It is not finite, or too long (code run.long_sum).
    """
    longest = find_longest_sum(spec, shares, silo is not None)
    if longest is None:
        return
    largest = float(np.abs(value).max(initial=0.0))
    # Divided first: squares of large numbers overflow.
    norm = largest * float(np.linalg.norm(value / largest)) if 0 < largest < math.inf else largest
    if norm <= longest and math.isfinite(norm):
        return
    who, remedy = (
        f"the sums of {pluralize(shares, 'silo')} add to one",
        "one of them at least is wrong: have all checked",
    )
    if silo is not None:
        who, remedy = f"silo '{silo}' sent a sum", "have it checked"
    raise SilodpError(
        f"{who} of norm {norm:.4g} in round {round_ + 1}, where honest ones are finite and at most {longest:.4g}: "
        f"{remedy}, then resume, or begin a new run, which adds its own ε; the model did not change, and the round "
        "stays charged.",
        code="run.long_sum",
    )
