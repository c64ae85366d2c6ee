"""Metrics from a public table of counts: every test record falls into one cell, and nothing else about it is kept.

The cells are (true class, bin of the score) for two classes, (true class, predicted class) for more, and (bin of the
time, event or censored, bin of the score) for survival. Where labels are numbers there are two rows of cells: bins of
the error, and bins of the label. Where every place of a record has a class, its places share the record's 1. Accuracy,
confusion matrix, area under the ROC curve, concordance, overlap and errors are functions of such counts. They may carry
noise: every metric comes with the standard error that this noise causes, and with that of the sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from silodp._lazy import torch
from silodp.errors import SilodpError
from silodp.report.estimates import Estimate
from silodp.settings import Settings, Whole
from silodp.text import join_names
from silodp.training.dense_labels import (
    average_log_loss,
    flatten_dense_labels,
    measure_overlap,
    predict_places,
    share_places,
)
from silodp.training.losses import flatten_outputs

if TYPE_CHECKING:
    from torch import Tensor

TableKind = Literal["scores", "classes", "survival", "numbers", "dense_labels", "tokens"]
REACH = 4.0
"""Errors and labels beyond so many public spreads count as that many."""
MOST_LOG_LOSS = 2.0
"""A mean of −log p beyond so many times log K, that of a model that knows nothing, counts as that much."""
MIN_CERTAINTY = 3.0
"""Standard deviations of its noise that a count must exceed before it is shown as a number, or divided by."""


@dataclass(frozen=True)
class CountTable(Settings):
    """The public cells of a table of counts.

    Attributes:
        kind: "scores" for two classes, "classes" for more, "survival", "numbers", "dense_labels" for classes of places,
            "tokens" for many of them.
        classes: The number K of classes.
        bins: The number B of bins, which is even: equal steps of the probability 1/(1 + e^−score), or for numbers of
            −4 to 4 spreads, to which two bins for values beyond are added.
        times: For survival, the edges between the bins of times in ascending order.
        spread: For numbers, what labels were divided by; errors are in its unit.
    """

    kind: TableKind
    classes: int = 2
    bins: Annotated[int, Whole(2, limit=1000)] = 10
    times: tuple[float, ...] = ()
    # A run has it among the facts of its data, and so in its digest.
    spread: float = field(default=1.0, repr=False)

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
        if self.kind == "numbers":
            return 2, self.bins + 2
        if self.kind == "tokens":
            return (self.bins + 2,)
        return self.classes, self.bins if self.kind == "scores" else self.classes

    @property
    def size(self) -> int:
        """Number of cells k."""
        return math.prod(self.shape)

    @property
    def entries(self) -> int:
        """The number of cells e that every record adds 1 to."""
        return 2 if self.kind in ("numbers", "tokens") else 1

    def find_shares(self, targets: Tensor) -> Tensor | None:
        """Return what records add to their cells (`find_cells`), (n, e) float64; None: 1 to each.

        What a record adds is not negative, and at most 1 in each of e parts of the table, so the 2-norm of its row is
        at most √e.
        """
        if self.kind not in ("dense_labels", "tokens"):
            return None
        shares = share_places(targets.cpu().flatten(1))
        # A record without any label adds nothing.
        return shares if self.kind == "dense_labels" else torch.cat([shares.sum(1, keepdim=True), shares], 1)

    def find_cells(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cells of every record.

        Args:
            outputs: The logits (n,), (n, 1) or (n, K), or the log hazards or numbers (n,) or (n, 1); NaN counts as the
                lowest. For places (n, K, ...), or (n, ...) or (n, 1, ...) of the second of two classes.
            targets: The class numbers (n,), the pairs [event, time], (n, 2), or the scaled numbers (n,); for places the
                class numbers (n, ...).

        Returns:
            (n, e) int64, in 0..k−1; for places (n, P), and for tokens (n, 1 + P): B bins of the mean of −log p over a
            record's places, from 0 to 2·log K, then right and wrong places.

        Raises:
            SilodpError: a record has another number of outputs (code evaluation.outputs).
        """
        if self.kind in ("dense_labels", "tokens"):
            return self._find_place_cells(outputs, targets)
        widths = {"scores": (1, 2), "classes": (self.classes,), "survival": (1,), "numbers": (1,)}[self.kind]
        if (outputs.shape[1] if outputs.dim() == 2 else 1) not in widths or outputs.dim() > 2:
            # The largest of more outputs might be in no cell, or in one of another class.
            raise SilodpError(
                f"the model gives outputs of shape {tuple(outputs.shape)} for {len(targets)} records, and evaluation "
                f"by sums needs {join_names(map(str, widths), 'or')} for each: end the model in a layer of that width, "
                'or set evaluation.across = "local" or "none".',
                code="evaluation.outputs",
                field="evaluation.across",
            )
        outputs = outputs.detach().double().cpu().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        targets = targets.cpu()
        if self.kind == "classes":
            return (targets.long() * self.classes + outputs.argmax(1))[:, None]
        if self.kind == "numbers":
            labels = targets.double()
            error, value = (self._find_bins(one) for one in (labels - flatten_outputs(outputs), labels))
            return torch.stack([error, self.bins + 2 + value], dim=1)
        if outputs.dim() == 2 and outputs.shape[1] == 2:
            # The larger logit decides, also where one is infinite; equal ones are class 0, as for `argmax`.
            zero, one = outputs.unbind(1)
            scores = torch.where(zero == one, torch.zeros(()).double(), one - zero)
        else:
            scores = flatten_outputs(outputs)
        bins = torch.searchsorted(self._score_edges(), scores)  # the number of edges below the score
        if self.kind == "scores":
            return (targets.long() * self.bins + bins)[:, None]
        from silodp_analytics.times import find_bins  # a report counts no times

        times = torch.from_numpy(find_bins(targets[:, 1].numpy(), self.times))
        return ((times * 2 + (targets[:, 0] > 0)) * self.bins + bins)[:, None]

    def _find_place_cells(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits, true = flatten_dense_labels(
            outputs.detach().double().cpu().nan_to_num(nan=-math.inf), targets.cpu()
        )
        width = logits.shape[1] if logits.dim() == 3 else 2
        if width != self.classes:
            raise SilodpError(
                f"the model gives {width} outputs for every place, and evaluation by sums needs {self.classes}: end "
                'the model in a layer of that width, or set evaluation.across = "local" or "none".',
                code="evaluation.outputs",
                field="evaluation.across",
            )
        found = predict_places(logits)
        if self.kind == "dense_labels":
            return true.clamp(min=0) * self.classes + found
        # NaN, of infinite logits, counts as the largest.
        log_loss = average_log_loss(logits, true).nan_to_num(nan=math.inf)
        bins = (log_loss / self._most_log_loss * self.bins).clamp(0, self.bins - 1).long()
        return torch.cat([bins[:, None], self.bins + (found != true).long()], 1)

    def _find_bins(self, values: Tensor) -> Tensor:
        """Return 0 or B + 1 for values beyond ±4 spreads, and 1 to B for bins between (NaN cannot occur)."""
        edges = torch.linspace(-REACH, REACH, self.bins + 1, dtype=torch.float64)
        return torch.searchsorted(edges, values, right=True).clamp(0, self.bins + 1)

    def _score_edges(self) -> Tensor:
        """Return (B − 1,) float64: the scores with probability b/B; the middle one is exactly 0."""
        # log(b/(B − b)): the logit of the probability b/B, exactly 0 where b is half of B.
        above = torch.arange(1, self.bins, dtype=torch.float64)
        return torch.log(above / (self.bins - above))

    def confusion(self, counts: Tensor) -> Tensor | None:
        """Return the counts (K, K) by true and predicted class; None where labels are no classes.

        Args:
            counts: The counts of all cells, (k,) float64.
        """
        if self.kind in ("survival", "numbers", "tokens"):
            return None
        table = counts.reshape(self.shape)
        return table if self.kind != "scores" else table.reshape(2, 2, self.bins // 2).sum(2)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics that are estimated."""
        return tuple(self._measures)

    @property
    def _measures(self) -> dict[str, Callable[[Tensor], _Measured]]:
        if self.kind == "survival":
            return {"concordance": self._concordance}
        if self.kind == "numbers":
            return {"r2": self._r2, "mean_absolute_error": self._mean_absolute_error}
        if self.kind == "tokens":
            return {"accuracy": self._token_accuracy, "perplexity": self._perplexity}
        of_kind: dict[TableKind, dict[str, Callable[[Tensor], _Measured]]] = {
            "scores": {"roc_auc": self._roc_auc},
            "dense_labels": {"dice": partial(self._overlap, 2.0), "iou": partial(self._overlap, 1.0)},
        }
        return {"accuracy": self._accuracy, **of_kind.get(self.kind, {})}

    def estimate(self, counts: Tensor, noise_std: float) -> dict[str, Estimate]:
        """Return the metrics of the counts; those that are not defined, or lost in the noise, are left out.

        Args:
            counts: The counts of all cells, (k,) float64.
            noise_std: The standard deviation of the noise in each count.

        Source: Mann and Whitney 1947 for the area under the ROC curve, Hanley and McNeil 1982 for its error as a
        sample's, Harrell et al. 1982 for concordance; all other errors by the delta method, those of concordance as the
        ratio of two U-statistics (Hoeffding 1948).
        """
        found = {name: _estimate(one, counts.double(), noise_std) for name, one in self._measures.items()}
        return {name: estimate for name, estimate in found.items() if estimate is not None}

    def count_records(self, counts: Tensor) -> float:
        """Return the number of records, by noisy counts (k,): of e cells of a record, each counts as 1/e."""
        return float(counts.sum()) / self.entries

    def count_std(self, noise_std: float) -> float:
        """Return the standard deviation of `count_records`, of counts whose noise has this standard deviation."""
        return noise_std * math.sqrt(self.size) / self.entries

    def _accuracy(self, counts: Tensor) -> _Measured:
        confusion: Any = self.confusion(counts)
        right, total = confusion.diagonal().sum(), confusion.sum()
        share = (right / total).clamp(0, 1)
        return _divide(right, total, (total,), variance=share * (1 - share) / total)

    def _token_accuracy(self, counts: Tensor) -> _Measured:
        right, wrong = counts[self.bins :]
        share = (right / (right + wrong)).clamp(0, 1)
        return _divide(right, right + wrong, (right + wrong,), variance=share * (1 - share) / (right + wrong))

    @property
    def _most_log_loss(self) -> float:
        return MOST_LOG_LOSS * math.log(self.classes)

    def _perplexity(self, counts: Tensor) -> _Measured:
        width = self._most_log_loss / self.bins
        middles = (torch.arange(self.bins, dtype=torch.float64) + 0.5) * width
        records = counts[: self.bins]
        total = records.sum()
        mean = records @ middles / total
        # The delta method: of e^mean, the variance is that of the mean times e^(2·mean).
        variance = (records @ middles**2 / total - mean**2).clamp(min=0) / total * (2 * mean).exp()
        low, high = (mean - width / 2).exp(), (mean + width / 2).exp()
        return _Measured(mean.exp(), (total,), total, low, high, limits=(1.0, math.inf), variance=variance)

    def _overlap(self, weight: float, counts: Tensor) -> _Measured:
        confusion = counts.reshape(self.shape)
        overlaps = measure_overlap(confusion, weight)
        # Noise may carry a class out of its limits, and Dice then below IoU; the error is that of what is not cut off.
        value = (overlaps + (overlaps.clamp(0, 1) - overlaps).detach()).mean()
        either = (confusion.sum(0) + confusion.sum(1))[1:]
        # No count says how far records differ in it, so its error as a sample's is not known.
        return _Measured(value, tuple(either), either.min(), value, value)

    def _roc_auc(self, counts: Tensor) -> _Measured:
        # The Mann-Whitney statistic: pairs whose positive record is in a higher bin; those in one bin count half.
        negative, positive = counts.reshape(self.shape)
        below = negative.cumsum(0) - negative
        ties = positive @ negative
        negatives, positives = negative.sum(), positive.sum()
        above = positive @ below + ties / 2
        area = (above / (negatives * positives)).clamp(0, 1)
        # Hanley and McNeil, "The meaning and use of the area under a ROC curve", Radiology 143: exponential scores.
        variance = (
            area * (1 - area)
            + (positives - 1) * (area / (2 - area) - area**2)
            + (negatives - 1) * (2 * area**2 / (1 + area) - area**2)
        ) / (negatives * positives)
        return _divide(above, negatives * positives, (positives, negatives), ties=ties, variance=variance)

    def _concordance(self, counts: Tensor) -> _Measured:
        censored, event = counts.reshape(self.shape).unbind(1)  # (times, bins) each
        everyone = censored + event
        later = everyone.flip(0).cumsum(0).flip(0) - everyone  # in later bins of time, by score
        lower = later.cumsum(1) - later
        ties = (event * later).sum()
        pairs = (event.sum(1) * later.sum(1)).sum()
        events, others = event.sum(1), censored.sum(1)
        # Counts with noise may be negative, and a number of pairs may not.
        same = torch.clamp(events * (events - 1) / 2 + events * others, min=0).sum()
        in_order = (event * lower).sum() + ties / 2
        value = in_order / pairs
        # A record changes the ratio of two U-statistics by (its pairs in order − value · its pairs) / pairs.
        earlier = event.cumsum(0) - event
        higher = earlier.flip(1).cumsum(1).flip(1) - earlier
        as_later = higher + earlier / 2 - value * earlier.sum(1, keepdim=True)
        as_earlier = lower + later / 2 - value * later.sum(1, keepdim=True)
        squares = censored * as_later**2 + event * (as_later + as_earlier) ** 2
        # Pairs within one bin of time are unknown: either may be the earlier event.
        return _divide(
            in_order, pairs, (event.sum(), counts.sum()),
            ties=ties, unknown=same, variance=squares.sum() / pairs**2,
        )  # fmt: skip

    @property
    def _middles(self) -> Tensor:
        """The middle of every bin of a number, (B + 2,) in spreads; values beyond count as ±4."""
        half = REACH / self.bins
        inner = torch.linspace(half - REACH, REACH - half, self.bins, dtype=torch.float64)
        return torch.cat([inner.new_tensor([-REACH]), inner, inner.new_tensor([REACH])])

    def _mean_absolute_error(self, counts: Tensor) -> _Measured:
        error = counts.reshape(self.shape)[0]
        total, sizes = error.sum(), self._middles.abs()
        mean = error @ sizes / total
        variance = (error @ sizes**2 / total - mean**2).clamp(min=0) / total
        # Every value is within half a bin of the middle of its bin, and so is their mean.
        half = REACH / self.bins
        return _Measured(
            self.spread * mean, (total,), total,
            self.spread * (mean - half).clamp(min=0), self.spread * (mean + half),
            limits=(0.0, math.inf), variance=self.spread**2 * variance,
        )  # fmt: skip

    def _r2(self, counts: Tensor) -> _Measured:
        error, label = counts.reshape(self.shape)
        half, middles = REACH / self.bins, self._middles
        mean = label @ middles / label.sum()
        # Root mean squares of values that are within half a bin of these differ by at most half a bin.
        square, variance = error @ middles**2 / error.sum(), label @ middles**2 / label.sum() - mean**2
        of_error, of_label = (one.clamp(min=0).sqrt() for one in (square, variance))
        # No count says how the squares go together: standard deviations add up at most.
        ratio, spread = square / variance, middles - mean
        spreads = (
            error @ middles**4 / error.sum() - square**2,
            label @ spread**4 / label.sum() - variance**2,
        )
        first, second = (one.clamp(min=0).sqrt() for one in spreads)
        return _Measured(
            1 - square / variance, (error.sum(), label.sum()), of_label - half,
            1 - ((of_error + half) / (of_label - half)) ** 2,
            1 - ((of_error - half).clamp(min=0) / (of_label + half)) ** 2,
            limits=(-math.inf, 1.0),
            variance=((first + ratio * second) / variance) ** 2 / label.sum(),
        )  # fmt: skip


@dataclass(frozen=True)
class _Measured:
    """A metric as a function of counts.

    Attributes:
        value: The metric.
        sums: The counts that are divided by.
        below: What must be positive for the metric to be defined.
        low: The smallest value of the records that these counts could be of.
        high: The largest such value.
        limits: Between which every value lies; noise may carry it out.
        variance: That of the value because records are a sample; None where it is not known.
    """

    value: Tensor
    sums: tuple[Tensor, ...]
    below: Tensor
    low: Tensor
    high: Tensor
    limits: tuple[float, float] = (0.0, 1.0)
    variance: Tensor | None = None


def _divide(
    above: Tensor,
    below: Tensor,
    sums: tuple[Tensor, ...],
    ties: Tensor | float = 0.0,
    unknown: Tensor | float = 0.0,
    variance: Tensor | None = None,
) -> _Measured:
    """Return a metric that is a ratio in [0, 1].

    Args:
        above: The numerator.
        below: The denominator.
        sums: The counts that the denominator is made of.
        ties: The pairs whose order is not known; half of them are in the numerator.
        unknown: The pairs of which it is not known whether they count; they are in neither.
        variance: See `_Measured`.
    """
    # At worst all ties and unknown pairs are in the wrong order; at best all are in the right one.
    low, high = (above - ties / 2) / (below + unknown), (above + ties / 2 + unknown) / (below + unknown)
    return _Measured(above / below, sums, below, low.clamp(min=0), high.clamp(max=1), variance=variance)


def _estimate(measure: Callable[[Tensor], _Measured], counts: Tensor, noise_std: float) -> Estimate | None:
    """Return the metric with its errors; None where it divides by what may be zero."""
    found = measure(counts)
    # A sum of at most k counts has a noise of at most √k standard deviations of one.
    largest_noise = MIN_CERTAINTY * noise_std * math.sqrt(len(counts))
    if not all(float(one) > largest_noise for one in found.sums) or not float(found.below) > 0:
        return None
    # The delta method: the noise of the value is that of its linear approximation at these counts.
    gradient = torch.func.grad(lambda changed: measure(changed).value)(counts)
    error = noise_std * float(torch.linalg.vector_norm(gradient))
    # Noise may carry a metric out of its limits, and a variance below 0.
    smallest, largest = found.limits
    value = min(max(float(found.value), smallest), largest)
    sampling = None if found.variance is None else math.sqrt(max(float(found.variance), 0.0))
    return Estimate(value, error, float(found.low), float(found.high), sampling)
