"""Metrics `f(outputs, targets) -> float`, on outputs as the model gives them (logits, log hazards).

A metric that is undefined on these records (one class only, no comparable pair, scores not finite) is `nan`;
`Task.evaluate` leaves such values out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from silodp._lazy import torch
from silodp.data.public import UNLABELED
from silodp.errors import SilodpError
from silodp.training.dense_labels import average_log_loss, count_classes, has_dense_labels, measure_overlap
from silodp.training.losses import flatten_outputs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


Metric = Callable[["Tensor", "Tensor"], float]


# Pairs compared at a time by `concordance`: 4 million comparisons are 4 MB of booleans.
_PAIRS_AT_ONCE = 4_000_000


def _refuse(problem: str) -> SilodpError:
    return SilodpError(problem, code="metric.wrong_labels", field="task.metrics")


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Compute the share of records that are classified right; of several yes/no labels, the share of right labels.

    Where every place of a record has a class, it is the mean over records of the share of their places.

    Args:
        outputs: The logits (n, K); or one logit (n,) or (n, 1), positive for class 1; or (n, k) of k labels; or
            (n, K, ...) of places.
        targets: The class numbers (n,), or (n, k) of 0/1, or class numbers (n, ...) of places.

    Raises:
        SilodpError: targets that are not class numbers.
    """
    if outputs.shape[0] == 0:
        return float("nan")
    if has_dense_labels(targets):
        confusion = count_classes(outputs, targets)
        return float(confusion.trace() / confusion.sum())
    _check_class_numbers("accuracy", outputs, targets)
    predicted = outputs > 0 if targets.dim() == 2 else find_predicted_classes(outputs)
    return float((predicted == targets.to(predicted.device)).double().mean())


def find_predicted_classes(outputs: Tensor) -> Tensor:
    """Return the class (n,) of the largest of several logits (n, K), or whether one logit (n,), (n, 1) is positive."""
    return outputs.argmax(1) if outputs.dim() == 2 and outputs.shape[1] > 1 else flatten_outputs(outputs) > 0


def dice(outputs: Tensor, targets: Tensor) -> float:
    """Compute the Dice coefficient 2·TP/(2·TP + FP + FN), the mean over all classes but the first (the background).

    Every record counts alike: its labeled places add up to 1. Of images of one size in which every pixel has a label,
    it is the coefficient of all pixels together.

    Args:
        outputs: The logits (n, K, ...), or (n, ...) or (n, 1, ...) of the second of two classes.
        targets: The class numbers (n, ...) of places.

    Returns:
        The coefficient; classes that are neither in labels nor in predictions are left out, and nan if all are.

    Raises:
        SilodpError: targets that are not class numbers.

    Source: Dice 1945, "Measures of the Amount of Ecologic Association Between Species".
    """
    return _measure_overlap("dice", 2.0, outputs, targets)


def iou(outputs: Tensor, targets: Tensor) -> float:
    """Compute intersection over union TP/(TP + FP + FN) (Jaccard); all else is as for `dice`."""
    return _measure_overlap("iou", 1.0, outputs, targets)


def perplexity(outputs: Tensor, targets: Tensor) -> float:
    """Compute e to the mean of −log p of the true tokens: first over the labeled places of a record, then over records.

    A record counts once, however many of its places have a label, and not at all where none has. Of rows that are full
    it is the usual perplexity.

    Args:
        outputs: The logits (n, K, ...).
        targets: The class numbers (n, ...) of places.

    Returns:
        The perplexity; nan without a labeled record.

    Raises:
        SilodpError: targets that are no classes of places.
    """
    if not has_dense_labels(targets):
        raise _refuse(
            "perplexity needs a class in every place of a record, such as the next token of a text: use another metric"
        )
    is_labeled = (targets != UNLABELED).flatten(1).any(1)
    return float(average_log_loss(outputs, targets)[is_labeled].mean().exp())


def _measure_overlap(name: str, weight: float, outputs: Tensor, targets: Tensor) -> float:
    if not has_dense_labels(targets):
        _check_class_numbers(name, outputs, targets)
    return float(measure_overlap(count_classes(outputs, targets.long()), weight).nanmean())


def roc_auc(outputs: Tensor, targets: Tensor) -> float:
    """Compute the area under the ROC curve of a two-class model (scikit-learn).

    Args:
        outputs: The logits (n,), (n, 1) or (n, 2); or (n, k) of k yes/no labels.
        targets: The labels (n,) of 0/1, or (n, k).

    Returns:
        The area; nan if only one class is present, or a score is not finite. Of several labels the mean of the areas
        that are not nan.

    Raises:
        SilodpError: more than two classes, or targets that are not class numbers.
    """
    from sklearn.metrics import roc_auc_score  # half a second to import, needed only here

    return _measure_two_classes(roc_auc_score, outputs, targets)


def average_precision(outputs: Tensor, targets: Tensor) -> float:
    """Compute the average precision of a two-class model (scikit-learn); all else is as for `roc_auc`."""
    from sklearn.metrics import average_precision_score

    return _measure_two_classes(average_precision_score, outputs, targets)


def concordance(outputs: Tensor, targets: Tensor) -> float:
    """Compute Harrell's C-index: how often the higher log hazard has the earlier event.

    A pair is comparable if the earlier of both times is an event; of two equal times, if just one is an event (it
    counts as the earlier). Equal scores count half.

    Args:
        outputs: The log hazards (n,) or (n, 1).
        targets: The pairs [event, time], (n, 2).

    Returns:
        The share of comparable pairs in the right order; nan without a comparable pair, or where an output is not
        finite.

    Raises:
        SilodpError: targets of another shape.

    Source: Harrell et al. 1982, "Evaluating the Yield of Medical Tests".
    """
    if targets.dim() != 2 or targets.shape[1] != 2:
        raise _refuse(
            f"concordance needs pairs of event and time, and the labels are of shape {tuple(targets.shape[1:])}: use "
            "another metric, or set the table's kind of label (schema.kind) to 'survival'"
        )
    hazard = flatten_outputs(outputs).detach().double().cpu()
    event, time = targets[:, 0].cpu() > 0, targets[:, 1].cpu()
    usable, half_wins = 0, 0  # whole numbers: sums of halves would round
    # A table of events by records, some rows at a time, so that memory does not grow with the square of the records.
    rows = max(1, _PAIRS_AT_ONCE // max(1, len(time)))
    for first in torch.nonzero(event).squeeze(1).split(rows):  # type: ignore[no-untyped-call]
        # An event at the time of a censored record came first: that record lasted at least as long.
        later = (time[first, None] < time) | ((time[first, None] == time) & ~event)
        higher, equal = hazard[first, None] > hazard, hazard[first, None] == hazard
        usable += int(later.sum())
        half_wins += 2 * int((later & higher).sum()) + int((later & equal).sum())
    return half_wins / (2 * usable) if usable and hazard.isfinite().all() else float("nan")


def mean_absolute_error(outputs: Tensor, targets: Tensor, spread: float | Sequence[float] = 1.0) -> float:
    """Compute the mean absolute error of a model of real numbers (scikit-learn).

    Args:
        outputs: The real numbers (n,) or (n, 1), or (n, k).
        targets: The real numbers (n,), or (n, k).
        spread: The number by which the label was divided (`label_typical` of a schema), or one for each label: the
            error is then in the unit of the label. A configured task sets it.

    Returns:
        The error, of several numbers the mean of theirs; nan without records, or where an output is not finite.

    Raises:
        SilodpError: outputs or targets of another shape.
    """
    from sklearn.metrics import mean_absolute_error as measure

    return _measure_numbers("mean_absolute_error", measure, outputs, targets, spread)


def r2(outputs: Tensor, targets: Tensor) -> float:
    """Compute the coefficient of determination R² of a model of real numbers (scikit-learn).

    Args:
        outputs: The real numbers (n,) or (n, 1), or (n, k).
        targets: The real numbers (n,), or (n, k).

    Returns:
        1 minus the squared error divided by that of the mean of these targets; nan for fewer than two records, for
        targets that are all equal, or where an output is not finite. Of several numbers the mean of those that are not
        nan.

    Raises:
        SilodpError: outputs or targets of another shape.
    """
    from sklearn.metrics import r2_score

    def score(wanted: NDArray[np.float64], found: NDArray[np.float64]) -> float:
        return float("nan") if (wanted == wanted[0]).all() else float(r2_score(wanted, found))

    return _measure_numbers("r2", score, outputs, targets)


def _measure_numbers(
    name: str,
    metric: Callable[..., float],
    outputs: Tensor,
    targets: Tensor,
    spread: float | Sequence[float] = 1.0,
) -> float:
    """Return scikit-learn's `metric(targets, outputs)` of finite numbers times their spread, else nan."""
    if targets.dim() == 2 and outputs.shape == targets.shape:
        # Each label has its own unit, and is measured in it.
        spreads = [spread] * targets.shape[1] if isinstance(spread, int | float) else spread
        columns = zip(outputs.unbind(1), targets.unbind(1), spreads, strict=True)
        return _average(_measure_numbers(name, metric, *column) for column in columns)
    if targets.dim() != 1 or outputs.numel() != len(targets) or not isinstance(spread, int | float):
        raise _refuse(
            f"{name} needs one output for each number of a record, and the outputs are of shape "
            f"{tuple(outputs.shape[1:])} and the labels of {tuple(targets.shape[1:])}: use another metric."
        )
    found, wanted = (one.detach().double().cpu() for one in (outputs.reshape(-1), targets))
    if len(wanted) == 0 or not bool(found.isfinite().all()):
        return float("nan")
    return spread * float(metric(wanted.numpy(), found.numpy()))


def _average(values: Iterable[float]) -> float:
    """Return the mean of the values that are not nan; nan where there are none."""
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else float("nan")


def _measure_two_classes(metric: Callable[..., float], outputs: Tensor, targets: Tensor) -> float:
    """Return scikit-learn's `metric(positive, score)` where it is defined, else nan."""
    if targets.dim() == 2:
        _check_class_numbers("roc_auc or average_precision", outputs, targets)
        columns = zip(outputs.unbind(1), targets.unbind(1), strict=True)
        return _average(_measure_two_classes(metric, *column) for column in columns)
    if outputs.dim() == 2 and outputs.shape[1] == 2:
        outputs = outputs[:, 1] - outputs[:, 0]  # the logit of class 1: softmax is a function of differences
    elif outputs.dim() == 2 and outputs.shape[1] > 2:
        raise _refuse(f"roc_auc and average_precision need two classes, not {outputs.shape[1]}: use accuracy")
    _check_class_numbers("roc_auc or average_precision", outputs, targets)
    # In float64 on the CPU, as scikit-learn wants it; float32 scores keep their order.
    score, positive = flatten_outputs(outputs).detach().double().cpu(), (targets > 0).cpu()
    # scikit-learn warns or raises where one class is missing, or a score is not finite.
    if not (0 < positive.sum() < len(positive) and bool(score.isfinite().all())):
        return float("nan")
    return float(metric(positive.numpy(), score.numpy()))


def _check_class_numbers(name: str, outputs: Tensor, targets: Tensor) -> None:
    """Raise for targets that are not class numbers (n,) or yes/no labels (n, k), such as real numbers or survival."""
    if (
        targets.dim() == 2
        and targets.shape == outputs.shape
        and bool(((targets == 0) | (targets == 1)).all())
    ):
        return
    if targets.dim() != 1 or (targets.is_floating_point() and bool((targets != targets.round()).any())):
        raise _refuse(
            f"{name} needs one class number per record, and the labels are of shape {tuple(targets.shape[1:])} and "
            f"{targets.dtype}: use another metric, or declare the classes of the label (schema.classes)"
        )


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "roc_auc": roc_auc,
    "average_precision": average_precision,
    "dice": dice,
    "iou": iou,
    "perplexity": perplexity,
    "concordance": concordance,
    "r2": r2,
    "mean_absolute_error": mean_absolute_error,
}
"""Name in a config -> metric."""
ERRORS = frozenset({"mean_absolute_error", "perplexity"})
"""Names of the metrics of which a smaller value is better."""
