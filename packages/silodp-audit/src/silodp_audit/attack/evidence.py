"""What scores of canaries say against a promise: a verdict, an equivalent ε, and an ε without any assumption.

Three statements, never mixed. The verdict asks whether the scores contradict the trade-off curve that was charged. The
equivalent ε is a lower bound, given the kind of mechanism. The ε of one run is a lower bound without any assumption on
the mechanism, and far smaller. A score is larger for "was in". Canaries that were in and those that were out must be
exchangeable but for their membership.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from silodp.accounting.accountant import EventCount, choose_accountant, compute_epsilon
from silodp.accounting.events import to_continuous
from silodp.accounting.trade_off import FEW_POINTS, POINTS, TradeOff, compose_trade_off, divide_noise
from silodp.errors import SilodpError
from silodp.text import shorten

Array = NDArray[np.float64]

_FINE_SPREAD = 2.0**10
_MOST = 1000.0
_TOLERANCE = 1e-3
_LARGEST = 512.0
_FEWEST = 4
_ROC_POINTS = 60


class NoiseFamily:
    """The mechanisms that differ from the charged one by a factor on all noise.

    Integer noise counts as Gaussian noise of the same multiplier where its grid is fine, since the only curve that is
    known for it is loose.

    Args:
        charges: What was charged against the adversary, (event, count).
    """

    def __init__(self, charges: Iterable[EventCount]) -> None:
        # The excess kurtosis of Skellam noise is one over its variance in grid steps.
        self._charges = [(to_continuous(event, _FINE_SPREAD), count) for event, count in charges]
        self._areas: dict[float, float] = {}

    def compute_trade_off(self, factor: float = 1.0, points: int = POINTS) -> TradeOff:
        """Return the curve with all noise divided by a factor."""
        return compose_trade_off(divide_noise(self._charges, factor), points=points)

    def compute_epsilon(self, delta: float, factor: float = 1.0) -> float:
        """Return ε at δ with all noise divided by a factor; infinity where nothing is promised."""
        charges = divide_noise(self._charges, factor)
        return compute_epsilon(charges, delta, choose_accountant(event for event, _ in charges))

    def find_factor(self, auc: float, *, above: bool = False) -> float:
        """Return the factor by which noise is divided where the curve allows this area.

        Args:
            auc: Area under the ROC curve.
            above: Whether to round up, to a factor that allows at least this area; else down, to one that allows at
                most this.

        Returns:
            A factor between 0 and 1,000, to a thousandth of itself; 0 for an area of at most one half, and 1,000 where
            no factor allows as much.
        """
        if auc <= 0.5:
            return 0.0
        low = high = 1.0
        while low > 1 / _MOST and self._compute_area(low) > auc:
            low, high = low / 2, low
        while high < _MOST and self._compute_area(high) < auc:
            low, high = high, min(high * 2, _MOST)
        if self._compute_area(high) < auc:
            return _MOST
        if self._compute_area(low) > auc:
            return low if above else 0.0
        # The quantile of the area is nearly linear in the factor (√2·Φ⁻¹(AUC) = μ/κ for Gaussian noise), so that few
        # curves are needed.
        while high > low * (1 + _TOLERANCE):
            ends = [special.ndtri(min(self._compute_area(end), 1 - 1e-12)) for end in (low, high)]
            part = (special.ndtri(auc) - ends[0]) / max(ends[1] - ends[0], 1e-12)
            guess = low + (high - low) * float(np.clip(part, 0.0, 1.0))
            # Half a tolerance to either side of the guess; where that is no progress, the middle.
            for candidate in (guess * (1 - _TOLERANCE / 3), guess * (1 + _TOLERANCE / 3), (low + high) / 2):
                if low < candidate < high:
                    below = self._compute_area(candidate) <= auc
                    low, high = (candidate, high) if below else (low, candidate)
        return high if above else low

    def _compute_area(self, factor: float) -> float:
        if factor not in self._areas:
            self._areas[factor] = self.compute_trade_off(factor, FEW_POINTS).auc
        return self._areas[factor]


@dataclass(frozen=True)
class Roc:
    """A measured ROC curve at some false positive rates, with limits of the true positive rate.

    Attributes:
        fpr: The measured false positive rates, at most 60.
        tpr: The measured true positive rates.
        tpr_low: The lower limits, each on its own.
        tpr_high: The upper limits.
        claimed_tpr: The largest true positive rates that were promised; None without a promise.
    """

    fpr: tuple[float, ...]
    tpr: tuple[float, ...]
    tpr_low: tuple[float, ...]
    tpr_high: tuple[float, ...]
    claimed_tpr: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Evidence:
    """What the scores of one adversary's view say.

    Attributes:
        pairs: The number n of disjoint pairs of a member and a non-member.
        wins: In how many of them the member has the larger score.
        auc: The measured area under the ROC curve, over all pairs.
        auc_lower: The exact lower limit of the area, by the disjoint pairs, at the level of one test.
        auc_upper: The exact upper limit.
        accuracy: The measured share of right guesses from even odds; each threshold was chosen on the other half.
        p: The probability of as many wins under what was promised, at most; None without a promise.
        is_violation: Whether p is below level / tests.
        noise_share: The largest factor κ by which noise may be divided such that the curve allows no more than
            `auc_lower`; None without charges.
        epsilon_lower: The equivalent ε, that at κ.
        epsilon_delong: The same by DeLong's limit over all pairs, which is only asymptotic.
        epsilon_one_run: The lower bound without any assumption on the mechanism; None where membership was not tossed
            by fair coins.
        detectable: The largest share of the promised noise that the verdict would have found with 95 % probability.
        roc: The measured ROC curve.
    """

    pairs: int
    wins: int
    auc: float
    auc_lower: float
    auc_upper: float
    accuracy: float
    p: float | None
    is_violation: bool
    noise_share: float | None
    epsilon_lower: float | None
    epsilon_delong: float | None
    epsilon_one_run: float | None
    detectable: float | None
    roc: Roc

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields."""
        return asdict(self)


def weigh_evidence(
    members: Array,
    others: Array,
    claim: TradeOff | None,
    *,
    delta: float,
    family: NoiseFamily | None = None,
    level: float = 0.05,
    tests: int = 1,
    coins: bool = False,
    rng: np.random.Generator | None = None,
) -> Evidence:
    """Return what the scores of canaries say against what was promised.

    Args:
        members: The scores (n,) of canaries that were in, larger for "was in".
        others: The scores (m,) of canaries that were out.
        claim: The promised curve; None where nothing is promised.
        delta: δ of the guarantee.
        family: The mechanisms that the equivalent ε is about; None leaves it out.
        level: The probability of a false alarm.
        tests: The number of views and scores that are tested together (Bonferroni).
        coins: Whether a fair coin of its own decided on each canary's membership, as the ε of one run needs.
        rng: Draws pairs, halves and ties; None for a fixed seed.

    Raises:
        SilodpError: there are too few scores, a score is not finite, or level is out of range.
    """
    members, others = _check_scores("members", members), _check_scores("others", others)
    check_level(level)
    rng = rng or np.random.default_rng(0)
    members, others = rng.permutation(members), rng.permutation(others)
    pairs, wins = count_wins(members, others, rng)
    # The level of one test, so that a limit above what was promised is a violation and nothing else is.
    auc_lower, auc_upper = bound_share(wins, pairs, level / tests)
    auc, delong = bound_auc(members, others, level / tests)
    p = None if claim is None else compute_p(wins, pairs, claim.auc)
    exact, asymptotic = (None if family is None else family.find_factor(low) for low in (auc_lower, delong))
    return Evidence(
        pairs=pairs,
        wins=wins,
        auc=auc,
        auc_lower=auc_lower,
        auc_upper=auc_upper,
        accuracy=measure_accuracy(members, others),
        p=p,
        is_violation=p is not None and p < level / tests,
        noise_share=exact,
        epsilon_lower=_find_epsilon(family, exact, delta),
        epsilon_delong=_find_epsilon(family, asymptotic, delta),
        epsilon_one_run=bound_epsilon_one_run(members, others, delta, level, rng=rng) if coins else None,
        detectable=None
        if claim is None or family is None
        else find_detectable(pairs, claim.auc, family, level / tests),
        roc=measure_roc(members, others, claim, level),
    )


def count_wins(members: Array, others: Array, rng: np.random.Generator) -> tuple[int, int]:
    """Return the number of disjoint pairs, in the given order, and in how many the member has the larger score."""
    pairs = min(len(members), len(others))
    one, other = members[:pairs], others[:pairs]
    ties = int((one == other).sum())
    return pairs, int((one > other).sum()) + int(rng.binomial(ties, 0.5))


def compute_p(wins: int, pairs: int, auc: float) -> float:
    """Return P(W ≥ wins) for W ~ Binomial(pairs, auc), exactly.

    No score has P(member > other) + ½·P(tie) above the area that the promised curve allows, so it bounds the
    probability of as many wins under what was promised.
    """
    return float(stats.binom.sf(wins - 1, pairs, auc))


def bound_share(count: int, trials: int, level: float) -> tuple[float, float]:
    """Return exact limits of a probability, each of which is wrong with a probability of at most `level`.

    Source: Clopper and Pearson 1934.
    """
    low = 0.0 if count == 0 else float(stats.beta.ppf(level, count, trials - count + 1))
    high = 1.0 if count == trials else float(stats.beta.isf(level, count + 1, trials - count))
    return low, high


def bound_auc(members: Array, others: Array, level: float) -> tuple[float, float]:
    """Return the area under the ROC curve over all pairs, and its lower limit, which is asymptotic.

    Source: DeLong, DeLong and Clarke-Pearson 1988.
    """
    lost = _share_below(others, members)
    kept = 1 - _share_below(members, others)
    auc = float(lost.mean())
    error = math.sqrt(lost.var(ddof=1) / len(lost) + kept.var(ddof=1) / len(kept))
    return auc, auc + float(special.ndtri(level)) * error


def _share_below(values: Array, points: Array) -> Array:
    """Return the share of values below each point; equal ones count half."""
    ordered = np.sort(values)
    sides = np.searchsorted(ordered, points, "left") + np.searchsorted(ordered, points, "right")
    share: Array = sides / (2 * len(values))
    return share


def find_detectable(pairs: int, auc: float, family: NoiseFamily, level: float, power: float = 0.95) -> float:
    """Return the largest share of the promised noise with which the best score is found, with this probability.

    Args:
        pairs: The number n of disjoint pairs.
        auc: The area that the promised curve allows.
        family: The mechanisms with less noise.
        level: The level of one test.
        power: The probability of finding it.
    """
    # The fewest wins that are a violation, and the smallest area that has as many with that probability.
    wins = int(stats.binom.isf(level, pairs, auc)) + 1
    if wins > pairs:
        return 0.0
    return 1 / family.find_factor(float(stats.beta.ppf(power, wins, pairs - wins + 1)), above=True)


def compute_one_run_p(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of at least so many right guesses under any (ε, δ)-private mechanism.

    Args:
        canaries: The number m of canaries, each in by a fair coin of its own.
        guesses: The number r of canaries whose membership is guessed.
        right: The number v of right guesses.
        epsilon: ε.
        delta: δ.

    Source: Steinke, Nasr and Jagielski 2023 (Privacy auditing with one training run), Theorem 5.2.
    """
    chance = special.expit(epsilon)
    tail = float(stats.binom.sf(right - 1, guesses, chance))
    # Above i = v nothing is added to the tail, while it is divided by more.
    steps = np.arange(1, right + 1)
    added = (stats.binom.sf(right - steps - 1, guesses, chance) - tail) / steps
    return min(1.0, tail + 2 * canaries * delta * float(added.max(initial=0.0)))


def solve_one_run(canaries: int, guesses: int, right: int, delta: float, level: float) -> float:
    """Return the largest ε that so many right guesses refute at a level; 0 where they refute none."""

    def excess(epsilon: float) -> float:
        return compute_one_run_p(canaries, guesses, right, epsilon, delta) - level

    if excess(0.0) >= 0:
        return 0.0
    high = 1.0
    while excess(high) < 0 and high < _LARGEST:
        high *= 2
    if excess(high) < 0:
        return high
    root = float(optimize.brentq(excess, 0.0, high, xtol=1e-9))
    return root if excess(root) <= 0 else max(root - 1e-8, 0.0)


def bound_epsilon_one_run(
    members: Array,
    others: Array,
    delta: float,
    level: float,
    shares: Sequence[float] = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
    rng: np.random.Generator | None = None,
) -> float:
    """Return a lower bound of ε at δ without any assumption on the mechanism, from one run.

    The canaries with the largest and those with the smallest scores are guessed, as many of each.

    Args:
        members: The scores of the canaries that a fair coin let in.
        others: The scores of the others.
        delta: δ.
        level: The probability that the bound is wrong.
        shares: Each share of the canaries that is guessed at either end; the best one counts (Bonferroni).
        rng: Orders equal scores.

    Source: as `compute_one_run_p`.
    """
    is_member = np.arange(len(members) + len(others)) < len(members)
    # Equal scores in an order that knows nothing of membership.
    shuffled = (rng or np.random.default_rng(0)).permutation(len(is_member))
    order = shuffled[np.argsort(np.concatenate([members, others])[shuffled], kind="stable")]
    is_member = is_member[order]
    best = 0.0
    for share in shares:
        ends = min(max(1, int(share * len(is_member))), len(is_member) // 2)
        right = int(is_member[-ends:].sum() + (~is_member[:ends]).sum())
        best = max(best, solve_one_run(len(is_member), 2 * ends, right, delta, level / len(shares)))
    return best


def measure_accuracy(members: Array, others: Array) -> float:
    """Return the share of right guesses from even odds; the threshold of each half is the best one of the other.

    Args:
        members: The scores of members, in random order.
        others: The scores of the others, in random order.
    """
    # A threshold chosen on the scores that it is tested on would look better than it is.
    found = []
    for half in (0, 1):
        threshold = _find_threshold(members[half::2], others[half::2])
        kept, lost = members[1 - half :: 2], others[1 - half :: 2]
        found.append(((kept > threshold).mean() + (lost <= threshold).mean()) / 2)
    return float(np.mean(found))


def _find_threshold(members: Array, others: Array) -> float:
    points = np.unique(np.concatenate([members, others]))
    gained = _share_above(members, points) - _share_above(others, points)
    best = int(np.argmax(gained))
    # Between two scores, so that it favors neither side.
    return float(points[best : best + 2].mean())


def _share_above(values: Array, points: Array) -> Array:
    share: Array = 1 - np.searchsorted(np.sort(values), points, "right") / len(values)
    return share


def measure_roc(members: Array, others: Array, claim: TradeOff | None = None, level: float = 0.05) -> Roc:
    """Return the ROC curve at up to 60 thresholds, which are scores of non-members.

    Args:
        members: The scores of members.
        others: The scores of the others.
        claim: The promised curve.
        level: The probability with which the true positive rate of one threshold lies outside its limits.
    """
    counts = np.unique(np.geomspace(1, len(others), _ROC_POINTS - 2).astype(int))
    falling = np.append(np.sort(others)[::-1], -np.inf)
    thresholds = falling[np.append(0, counts)]
    fpr, tpr = _share_above(others, thresholds), _share_above(members, thresholds)
    hits = np.rint(tpr * len(members)).astype(int)
    limits = [bound_share(int(hit), len(members), level / 2) for hit in hits]
    return Roc(
        tuple(fpr.tolist()),
        tuple(tpr.tolist()),
        tuple(low for low, _ in limits),
        tuple(high for _, high in limits),
        None if claim is None else tuple(claim.compute_tpr(fpr).tolist()),
    )


def check_level(level: float) -> None:
    """Check the probability of a false alarm.

    Raises:
        SilodpError: it is not between 0 and ½ (code argument.value).
    """
    if not 0 < level < 0.5:
        raise SilodpError(
            f"level = {shorten(level)}: set a number between 0 and 0.5.", code="argument.value", field="level"
        )


def _find_epsilon(family: NoiseFamily | None, factor: float | None, delta: float) -> float | None:
    """Return ε at a factor; None without one, or where it is infinite, which is no number in JSON."""
    if family is None or factor is None:
        return None
    epsilon = family.compute_epsilon(delta, factor) if factor > 0 else 0.0
    return epsilon if math.isfinite(epsilon) else None


def _check_scores(name: str, scores: Array) -> Array:
    scores = np.asarray(scores, float)
    if scores.ndim != 1 or len(scores) < _FEWEST:
        raise SilodpError(
            f"{name}: give one score for each canary, at least {_FEWEST}.", code="argument.shape", field=name
        )
    if not np.isfinite(scores).all():
        raise SilodpError(f"{name}: a score is not finite; leave it out.", code="argument.value", field=name)
    return scores
