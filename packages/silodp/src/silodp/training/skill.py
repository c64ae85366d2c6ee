"""What a model predicts better than one constant for everybody, record by record.

The constant is the best one in hindsight: the frequencies of the classes, the mean of the numbers, equal hazards. A
model that knows nothing of a record can do as much, so a metric says something only beside that of the constant, and
only as far as the difference is larger than chance explains. So every metric comes with what each record contributes to
the difference: sums over the records of a person, who may have several, give its standard error.

Source: Murphy 1988, "Skill Scores Based on the Mean Square Error", for scores relative to a reference; DeLong et al.
1988 for the contributions to an area under the ROC curve, Obuchowski 1997 for their sums over clusters of records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import torch
from silodp.training.dense_labels import average_log_loss, flatten_dense_labels, predict_places, share_places
from silodp.training.losses import flatten_outputs

if TYPE_CHECKING:
    from torch import Tensor

    from silodp.data.public import LabelKind

Floats = NDArray[np.float64]

_EQUAL = 1e-5
"""Outputs that differ by less than this part of their size are equal: batches round differently."""
_PAIRS_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Gain:
    """A metric of a model beside that of the constant.

    Attributes:
        metric: Its name; "log_loss" is the mean of −log p of the true class.
        value: That of the model.
        constant: That of the constant.
        influence: (n,) what each record contributes to the error of the difference in favor of the model, to first
            order; they add up to 0.
    """

    metric: str
    value: float
    constant: float
    influence: Floats


@dataclass(frozen=True)
class Balance:
    """What is predicted on average, beside what is true on average.

    Attributes:
        label: The number of the class, or of the label.
        predicted: The mean of the predicted probabilities, or numbers.
        observed: The share of the records that have the class, or the mean of the labels.
        spread: The standard deviation of labels that are numbers; None for probabilities, of which the ratio counts.
        influence: (n,) what each record contributes to the error of predicted − observed.
    """

    label: int
    predicted: float
    observed: float
    spread: float | None
    influence: Floats


@dataclass(frozen=True)
class RecordSkill:
    """What outputs say more than a constant.

    Attributes:
        gains: How well records are told apart, and how good probabilities are.
        balances: One for each class but the first of two, or for each label; () for survival and places.
        is_equal: Whether the outputs of all records are equal.
        event: (n,) which records have the second of two classes, or an event; None for other labels. Few of them, or of
            the others, can be ordered right by chance.
    """

    gains: tuple[Gain, ...]
    balances: tuple[Balance, ...] = ()
    is_equal: bool = False
    event: NDArray[np.bool_] | None = None


def measure_skill(
    outputs: Tensor, targets: Tensor, labels: LabelKind, typical: Sequence[Sequence[float]] = ()
) -> RecordSkill | None:
    """Measure a model that predicts labels beside the best constant.

    Args:
        outputs: The logits (n,), (n, 1), (n, K) or (n, K, ...), the numbers (n,), (n, 1) or (n, k), or the log hazards
            (n,) or (n, 1).
        targets: The class numbers (n,) or (n, ...) of places, the yes/no labels (n, k), the numbers (n,) or (n, k), or
            the pairs [event, time] (n, 2).
        labels: What the targets are.
        typical: (center, spread) by which each number was scaled; () where they were not.

    Returns:
        None where there is no record, an output is not finite, or outputs do not fit the labels.
    """
    outputs, targets = outputs.detach().double().cpu(), targets.detach().cpu()
    if len(outputs) == 0 or not bool(outputs.isfinite().all()):
        return None
    flat = outputs.reshape(len(outputs), -1)
    if targets.dim() == 1 or labels in ("multilabel", "real"):
        width = (
            max(2, int(targets.max()) + 1)
            if labels == "classes"
            else targets.reshape(len(targets), -1).shape[1]
        )
        if flat.shape[1] < width and not (labels == "classes" and width == 2 and flat.shape[1] == 1):
            return None
    is_equal = bool((flat.amax(0) - flat.amin(0)).max() <= _EQUAL * flat.abs().max())
    if labels == "survival":
        gain = _compare_concordance(flatten_outputs(outputs), targets)
        event = (targets[:, 0] > 0).numpy()
        return RecordSkill(() if gain is None else (gain,), is_equal=is_equal, event=event)
    if labels == "classes" and targets.dim() > 1:
        return RecordSkill(tuple(_compare_places(outputs, targets)), is_equal=is_equal)
    columns = targets.numpy().reshape(len(targets), -1)
    if labels == "classes":
        of_second = columns[:, 0] == 1 if flat.shape[1] < 3 else None
        return RecordSkill(*_compare_classes(flat.numpy(), columns[:, 0]), is_equal, of_second)
    if labels == "multilabel":
        return RecordSkill(*_compare_answers(flat.numpy(), columns), is_equal)
    return RecordSkill(*_compare_numbers(flat.numpy(), columns.astype(float), typical), is_equal)


def _compare_classes(logits: Floats, true: NDArray[np.int64]) -> tuple[tuple[Gain, ...], tuple[Balance, ...]]:
    """Return the gains, and the balance of each class, of two that of the second."""
    if logits.shape[1] == 1:
        logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
    classes = logits.shape[1]
    log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    share = np.bincount(true, minlength=classes) / len(true)
    at = np.arange(len(true))
    gains = [
        _compare("accuracy", log_p.argmax(1) == true, true == share.argmax()),
        _compare("log_loss", -log_p[at, true], -np.log(share[true]), is_loss=True),
    ]
    if classes == 2 and 0 < share[1] < 1:
        gains.insert(0, _compare_auc(logits[:, 1] - logits[:, 0], true == 1))
    balances = (
        _weigh(label, np.exp(log_p[:, label]), true == label) for label in range(classes == 2, classes)
    )
    return tuple(gains), tuple(balances)


def _compare_answers(
    logits: Floats, answers: NDArray[np.floating]
) -> tuple[tuple[Gain, ...], tuple[Balance, ...]]:
    """Return the gains of k yes/no labels, each the mean of theirs, and their balances."""
    yes = answers > 0
    share = yes.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):  # log 0 of an answer that nobody has
        constant = -np.where(yes, np.log(share), np.log(1 - share)).mean(1)
    losses = np.logaddexp(0, np.where(yes, -logits, logits)).mean(1)
    gains = [
        _compare("accuracy", ((logits > 0) == yes).mean(1), (yes == (share > 0.5)).mean(1)),
        _compare("log_loss", losses, constant, is_loss=True),
    ]
    mixed = [column for column in range(yes.shape[1]) if 0 < share[column] < 1]
    if mixed:
        areas = [_compare_auc(logits[:, column], yes[:, column]) for column in mixed]
        gains.insert(0, _average("roc_auc", areas))
    balances = (
        _weigh(label, 1 / (1 + np.exp(-np.clip(logits[:, label], -700, 700))), yes[:, label])
        for label in range(yes.shape[1])
    )
    return tuple(gains), tuple(balances)


def _compare_numbers(
    found: Floats, true: Floats, typical: Sequence[Sequence[float]]
) -> tuple[tuple[Gain, ...], tuple[Balance, ...]]:
    """Return R² beside that of the mean, 0, and the balance of every number in its unit."""
    gains, balances = [], []
    for label in range(true.shape[1]):
        error, from_mean = found[:, label] - true[:, label], true[:, label] - true[:, label].mean()
        whole = float((from_mean**2).sum())
        if whole == 0:  # all equal: R² is not defined
            continue
        ratio = float((error**2).sum()) / whole
        gains.append(Gain("r2", 1 - ratio, 0.0, (ratio * from_mean**2 - error**2) / whole))
        center, spread = typical[label] if typical else (0.0, 1.0)
        unit = spread * float(from_mean.std())
        balances.append(
            _weigh(label, center + spread * found[:, label], center + spread * true[:, label], unit)
        )
    return ((_average("r2", gains),) if gains else ()), tuple(balances)


def _compare_places(outputs: Tensor, targets: Tensor) -> Iterator[Gain]:
    """Yield the gains of classes of places: every record counts alike, and one without a label does not count."""
    logits, true = flatten_dense_labels(outputs, targets)
    labeled = share_places(true).sum(1) > 0
    logits, true, outputs, targets = logits[labeled], true[labeled], outputs[labeled], targets[labeled]
    if len(true) == 0:
        return
    weight, classes = share_places(true), logits.shape[1] if logits.dim() == 3 else 2
    of_class = true.clamp(min=0)
    share = torch.bincount(of_class.flatten(), weight.flatten(), classes) / len(true)
    right = (weight * (predict_places(logits) == true)).sum(1)
    often = (weight * (of_class == share.argmax())).sum(1)
    yield _widen(_compare("accuracy", right.numpy(), often.numpy()), labeled)
    log_share = share.clamp(min=1e-300).log()
    constant_loss = -(weight * log_share[of_class]).sum(1)
    losses = average_log_loss(outputs, targets)
    yield _widen(_compare("log_loss", losses.numpy(), constant_loss.numpy(), is_loss=True), labeled)


def _widen(gain: Gain, labeled: Tensor) -> Gain:
    """Return the gain with an influence of 0 for the records that do not count."""
    influence = np.zeros(len(labeled))
    influence[labeled.numpy()] = gain.influence
    return Gain(gain.metric, gain.value, gain.constant, influence)


def _compare(metric: str, ours: NDArray[Any], constant: NDArray[Any], is_loss: bool = False) -> Gain:
    """Return the gain in a mean over records."""
    difference = (constant - ours.astype(float)) if is_loss else (ours.astype(float) - constant)
    influence = (difference - difference.mean()) / len(difference)
    return Gain(metric, float(ours.mean()), float(constant.mean()), influence)


def _weigh(label: int, predicted: Floats, observed: NDArray[Any], spread: float | None = None) -> Balance:
    difference = predicted - observed
    influence = (difference - difference.mean()) / len(difference)
    return Balance(label, float(predicted.mean()), float(observed.mean()), spread, influence)


def _average(metric: str, gains: Sequence[Gain]) -> Gain:
    """Return the gain in the mean of a metric over labels."""
    values, constants = [one.value for one in gains], [one.constant for one in gains]
    influence: Floats = np.mean([one.influence for one in gains], axis=0)
    return Gain(metric, float(np.mean(values)), float(np.mean(constants)), influence)


def _compare_auc(score: Floats, positive: NDArray[np.bool_]) -> Gain:
    """Return the area under the ROC curve beside 1/2; both classes must be there.

    Source: DeLong et al. 1988, with the midranks of Sun and Xu 2014.
    """
    everyone, ours, others = (_rank(score), _rank(score[positive]), _rank(score[~positive]))
    number, rest = int(positive.sum()), int((~positive).sum())
    # Of each record, the share of records of the other class that it is ordered right with.
    of_positive = (everyone[positive] - ours) / rest
    of_negative = 1 - (everyone[~positive] - others) / number
    area = float(of_positive.mean())
    influence = np.empty(len(score))
    influence[positive] = (of_positive - area) / number
    influence[~positive] = (of_negative - area) / rest
    return Gain("roc_auc", area, 0.5, influence)


def _rank(values: Floats) -> Floats:
    """Return midranks: equal values share the mean of their places."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[inverse]
    return ranks


def _compare_concordance(hazard: Tensor, targets: Tensor) -> Gain | None:
    """Return the C-index, as `metrics.concordance` counts pairs, beside 1/2; None without a comparable pair.

    Source: Hoeffding 1948 for the contribution of a record to the ratio of two U-statistics.
    """
    event, time = targets[:, 0] > 0, targets[:, 1]
    usable, right = (torch.zeros(len(time), dtype=torch.float64) for _ in range(2))
    rows = max(1, _PAIRS_AT_ONCE // max(1, len(time)))
    for first in torch.nonzero(event).squeeze(1).split(rows):  # type: ignore[no-untyped-call]
        later = (time[first, None] < time) | ((time[first, None] == time) & ~event)
        higher, equal = hazard[first, None] > hazard, hazard[first, None] == hazard
        for found, pairs, part in (
            (usable, later, 1.0),
            (right, later & higher, 1.0),
            (right, later & equal, 0.5),
        ):
            found[first] += part * pairs.sum(1)
            found += part * pairs.sum(0)
    number = float(usable.sum()) / 2  # each pair was counted for both of its records
    if number == 0:
        return None
    share = float(right.sum()) / 2 / number
    return Gain("concordance", share, 0.5, ((right - share * usable) / number).numpy())
