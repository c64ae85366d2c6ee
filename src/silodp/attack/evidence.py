"""What scores of canaries say against a promise: a verdict, an equivalent ε, and an ε without any assumption.

Three statements, never mixed. The verdict asks whether the scores contradict the trade-off curve that was charged. The
equivalent ε is a lower bound, given the kind of mechanism. The ε of one run is a lower bound without any assumption on
the mechanism, and far smaller. A score is larger for "was in". Canaries that were in and those that were out must be
exchangeable but for their membership.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silodp.accounting.accountant import EventCount
from silodp.accounting.trade_off import TradeOff

Array = NDArray[np.float64]


class NoiseFamily:
    """The mechanisms that differ from the charged one by a factor on all noise.

    Integer noise counts as Gaussian noise of the same multiplier where its grid is fine, since the only curve that is
    known for it is loose.

    Args:
        charges: What was charged against the adversary, (event, count).
    """

    def __init__(self, charges: Iterable[EventCount]) -> None:
        raise NotImplementedError

    def compute_trade_off(self, factor: float = 1.0) -> TradeOff:
        """Return the curve with all noise divided by a factor."""
        raise NotImplementedError

    def compute_epsilon(self, delta: float, factor: float = 1.0) -> float:
        """Return ε at δ with all noise divided by a factor."""
        raise NotImplementedError

    def find_factor(self, auc: float, *, above: bool = False) -> float:
        """Return the factor by which noise is divided where the curve allows this area.

        Args:
            auc: Area under the ROC curve.
            above: Whether to round up, to a factor that allows at least this area; else down, to one that allows at
                most this.
        """
        raise NotImplementedError


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
    raise NotImplementedError
