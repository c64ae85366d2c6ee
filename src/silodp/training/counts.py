"""Metrics from a public table of counts: every test record falls into one cell, and nothing else about it is kept.

The cells are (true class, bin of the score) for two classes, (true class, predicted class) for more, and (bin of the
time, event or censored, bin of the score) for survival. Accuracy, confusion matrix, area under the ROC curve and
concordance are functions of such counts. They may carry noise: every metric comes with the standard error that
this noise causes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from silodp._lazy import torch
from silodp.errors import SilodpError
from silodp.settings import Settings, Whole
from silodp.training.losses import flatten_outputs

if TYPE_CHECKING:
    from torch import Tensor

TableKind = Literal["scores", "classes", "survival"]
_MIN_CERTAINTY = 3.0
"""Standard deviations of its noise that a count must exceed before a metric is divided by it."""


@dataclass(frozen=True)
class Estimate:
    """A metric computed from counts.

    Attributes:
        value: The metric.
        standard_error: The standard deviation of the value that the noise in the counts causes, to first order.
        low: The smallest value that the metric of the records themselves can have if counts have no noise.
        high: The largest such value. It differs from `low` where a bin holds several records whose order is not known.
    """

    value: float
    standard_error: float
    low: float
    high: float


@dataclass(frozen=True)
class CountTable(Settings):
    """The public cells of a table of counts.

    Attributes:
        kind: "scores" for two classes, "classes" for more, "survival".
        classes: The number K of classes.
        bins: The number B of bins of scores, which is even; they are equal steps of the probability 1/(1 + e^−score).
        times: For survival, the edges between the bins of times in ascending order.
    """

    kind: TableKind
    classes: int = 2
    bins: Annotated[int, Whole(2, limit=1000)] = 10
    times: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bins % 2:
            raise SilodpError(
                f"bins = {self.bins}: set an even number, so that a probability of one half is an edge.",
                code="argument.value",
                field="bins",
            )
        if list(self.times) != sorted(set(self.times)) or not all(map(math.isfinite, self.times)):
            raise SilodpError(
                f"times = {list(self.times)}: set finite times in ascending order, each once.",
                code="argument.value",
                field="times",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of cells in each direction."""
        if self.kind == "survival":
            return len(self.times) + 1, 2, self.bins
        return self.classes, self.bins if self.kind == "scores" else self.classes

    @property
    def size(self) -> int:
        """Number of cells k."""
        return math.prod(self.shape)

    def find_cells(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cell of every record.

        Args:
            outputs: The logits (n,), (n, 1) or (n, K), or the log hazards (n,) or (n, 1); NaN counts as the lowest
                score.
            targets: The class numbers (n,), or the pairs [event, time], (n, 2).

        Returns:
            (n,) int64, in 0..k−1.

        Raises:
            SilodpError: a record has another number of outputs (code evaluation.outputs).
        """
        widths = {"scores": (1, 2), "classes": (self.classes,), "survival": (1,)}[self.kind]
        if (outputs.shape[1] if outputs.dim() == 2 else 1) not in widths or outputs.dim() > 2:
            # The largest of more outputs might be in no cell, or in one of another class.
            raise SilodpError(
                f"the model gives outputs of shape {tuple(outputs.shape)} for {len(targets)} records, and evaluation "
                f"by sums needs {' or '.join(map(str, widths))} for each: end the model in a layer of that width, or "
                'set evaluation.across = "local" or "none".',
                code="evaluation.outputs",
                field="evaluation.across",
            )
        outputs = outputs.detach().double().cpu().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        targets = targets.cpu()
        if self.kind == "classes":
            return targets.long() * self.classes + outputs.argmax(1)
        if outputs.dim() == 2 and outputs.shape[1] == 2:
            # The larger logit decides, also where one is infinite; equal ones are class 0, as for `argmax`.
            zero, one = outputs.unbind(1)
            scores = torch.where(zero == one, torch.zeros(()).double(), one - zero)
        else:
            scores = flatten_outputs(outputs)
        bins = torch.searchsorted(self._score_edges(), scores)  # the number of edges below the score
        if self.kind == "scores":
            return targets.long() * self.bins + bins
        # A time equal to an edge belongs to the bin above it.
        times = torch.searchsorted(
            torch.tensor(self.times, dtype=torch.float64), targets[:, 1].double(), right=True
        )
        return (times * 2 + (targets[:, 0] > 0)) * self.bins + bins

    def _score_edges(self) -> Tensor:
        """Return (B − 1,) float64: the scores with probability b/B; the middle one is exactly 0."""
        # log(b/(B − b)): the logit of the probability b/B, exactly 0 where b is half of B.
        above = torch.arange(1, self.bins, dtype=torch.float64)
        return torch.log(above / (self.bins - above))

    def confusion(self, counts: Tensor) -> Tensor | None:
        """Return the counts (K, K) by true and predicted class; None for survival.

        Args:
            counts: The counts of all cells, (k,) float64.
        """
        if self.kind == "survival":
            return None
        table = counts.reshape(self.shape)
        return table if self.kind == "classes" else table.reshape(2, 2, self.bins // 2).sum(2)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics that are estimated."""
        return tuple(self._measures)

    @property
    def _measures(self) -> dict[str, Callable[[Tensor], _Ratio]]:
        if self.kind == "survival":
            return {"concordance": self._concordance}
        scores = {"roc_auc": self._roc_auc} if self.kind == "scores" else {}
        return {"accuracy": self._accuracy, **scores}

    def estimate(self, counts: Tensor, noise_std: float) -> dict[str, Estimate]:
        """Return the metrics of the counts; those that are not defined, or lost in the noise, are left out.

        Args:
            counts: The counts of all cells, (k,) float64.
            noise_std: The standard deviation of the noise in each count.

        Source: Mann and Whitney 1947 for the area under the ROC curve, Harrell et al. 1982 for concordance; standard
        errors by the delta method.
        """
        found = {name: _estimate(one, counts.double(), noise_std) for name, one in self._measures.items()}
        return {name: estimate for name, estimate in found.items() if estimate is not None}

    def _accuracy(self, counts: Tensor) -> _Ratio:
        confusion: Any = self.confusion(counts)
        right, total = confusion.diagonal().sum(), confusion.sum()
        return _Ratio(right, total, (total,))

    def _roc_auc(self, counts: Tensor) -> _Ratio:
        # The Mann-Whitney statistic: pairs whose positive record is in a higher bin; those in one bin count half.
        negative, positive = counts.reshape(self.shape)
        below = negative.cumsum(0) - negative
        ties = positive @ negative
        every = positive.sum() * negative.sum()
        return _Ratio(positive @ below + ties / 2, every, (positive.sum(), negative.sum()), ties=ties)

    def _concordance(self, counts: Tensor) -> _Ratio:
        censored, event = counts.reshape(self.shape).unbind(1)  # (times, bins) each
        everyone = censored + event
        later = everyone.flip(0).cumsum(0).flip(0) - everyone  # in later bins of time, by score
        lower = later.cumsum(1) - later
        ties = (event * later).sum()
        pairs = (event.sum(1) * later.sum(1)).sum()
        events, others = event.sum(1), censored.sum(1)
        # Counts with noise may be negative, and a number of pairs may not.
        same = torch.clamp(events * (events - 1) / 2 + events * others, min=0).sum()
        # Pairs within one bin of time are unknown: either may be the earlier event.
        return _Ratio(
            (event * lower).sum() + ties / 2, pairs, (event.sum(), counts.sum()),
            ties=ties, unknown=same,
        )  # fmt: skip


@dataclass(frozen=True)
class _Ratio:
    """A metric as a ratio of functions of counts.

    Attributes:
        above: The numerator.
        below: The denominator.
        sums: The counts that the denominator is made of.
        ties: The pairs whose order is not known; half of them are in the numerator.
        unknown: The pairs of which it is not known whether they count; they are in neither.
    """

    above: Tensor
    below: Tensor
    sums: tuple[Tensor, ...]
    ties: Tensor | float = 0.0
    unknown: Tensor | float = 0.0


def _estimate(measure: Callable[[Tensor], _Ratio], counts: Tensor, noise_std: float) -> Estimate | None:
    """Return the ratio with its first-order standard error; None where it divides by what may be zero."""
    ratio = measure(counts)
    # A sum of at most k counts has a noise of at most √k standard deviations of one.
    largest_noise = _MIN_CERTAINTY * noise_std * math.sqrt(len(counts))
    if not all(float(one) > largest_noise for one in ratio.sums) or float(ratio.below) <= 0:
        return None

    def divide(changed: Tensor) -> Tensor:
        again = measure(changed)
        return again.above / again.below

    # The delta method: the noise of the value is that of its linear approximation at these counts.
    gradient = torch.func.grad(divide)(counts)
    above, below, ties, unknown = map(float, (ratio.above, ratio.below, ratio.ties, ratio.unknown))
    # At worst all ties and unknown pairs are in the wrong order; at best all are in the right one.
    low = (above - ties / 2) / (below + unknown)
    high = (above + ties / 2 + unknown) / (below + unknown)
    error = noise_std * float(torch.linalg.vector_norm(gradient))
    # Noise may carry a ratio out of [0, 1], where no metric lies.
    return Estimate(min(max(above / below, 0.0), 1.0), error, max(low, 0.0), min(high, 1.0))
