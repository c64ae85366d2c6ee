"""Dense labels: a class for each of many places of a record, pixels, voxels or tokens.

However many places a record has, it stays one record: its loss is a mean over its places, and in a count every place
adds its share of 1. A place without a label (−100) is in neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from silodp._lazy import torch
from silodp.data.public import UNLABELED
from silodp.errors import SilodpError

if TYPE_CHECKING:
    from torch import Tensor

PlaceMean = Literal["labeled", "all"]
"""Over which places a record's loss is a mean: those with a label, or all, where one without a label has loss 0."""
MOST_CLASSES = 20
"""Up to so many classes a table of all pairs of true and predicted ones is counted. Of more, such as the tokens of a
vocabulary, right and wrong places are, and how probable the right classes were: every count has noise of its own."""


def has_dense_labels(targets: Tensor) -> bool:
    """Return whether targets are class numbers (n, ...) of places; several yes/no labels (n, k) are real numbers."""
    return targets.dim() > 1 and not targets.is_floating_point()


def flatten_dense_labels(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and class numbers with all places of a record in one dimension.

    Args:
        outputs: The logits (n, K, ...) of K classes, or (n, ...) or (n, 1, ...) of the second of two.
        targets: The class numbers (n, ...).

    Returns:
        Logits (n, K, P), or (n, P) where a place has one, and class numbers (n, P).

    Raises:
        SilodpError: outputs and targets do not have the same places.
    """
    if outputs.shape == targets.shape:
        return outputs.flatten(1), targets.flatten(1)
    if outputs.dim() == targets.dim() + 1 and outputs.shape[2:] == targets.shape[1:]:
        logits = outputs.flatten(2)
        return (logits.squeeze(1) if logits.shape[1] == 1 else logits), targets.flatten(1)
    places = ", ".join(map(str, targets.shape[1:]))
    raise SilodpError(
        f"the model gives outputs of shape {tuple(outputs.shape[1:])} for a record, and the labels have the places "
        f"({places}): let it return (classes, {places}), or ({places}) where one logit decides between two classes.",
        code="loss.output_shape",
        field="task.loss",
    )


def average_places(losses: Tensor, targets: Tensor, mean: PlaceMean) -> Tensor:
    """Return the losses (n,) of records, from those of their places, (n, P), with class numbers (n, P)."""
    is_labeled = targets != UNLABELED
    total = torch.where(is_labeled, losses, torch.zeros_like(losses)).sum(1)
    return total / (is_labeled.sum(1).clamp(min=1) if mean == "labeled" else targets.shape[1])


def predict_places(logits: Tensor) -> Tensor:
    """Return the predicted classes (n, P), of logits (n, K, P), or (n, P) of the second of two classes."""
    return logits.argmax(1) if logits.dim() == 3 else (logits > 0).long()


def share_places(targets: Tensor) -> Tensor:
    """Return what the places (n, P) of records count for: (n, P) float64, the same share of 1 for each with a label."""
    is_labeled = (targets != UNLABELED).double()
    return is_labeled / is_labeled.sum(1, keepdim=True).clamp(min=1)


def count_classes(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the records by true and predicted class, (K, K) float64; the places of one add up to 1.

    Args:
        outputs: The logits (n, K) or (n, K, ...), or (n,), (n, 1), (n, ...) or (n, 1, ...) of the second of two.
        targets: The class numbers (n,) or (n, ...).

    Raises:
        SilodpError: outputs and targets do not have the same places, or a class has no output.
    """
    if targets.dim() == 1:  # a record is one place
        outputs, targets = outputs.unsqueeze(-1), targets.unsqueeze(-1)
    logits, true = flatten_dense_labels(outputs, targets)
    classes = logits.shape[1] if logits.dim() == 3 else 2
    if bool((true >= classes).any()):
        raise SilodpError(
            f"the model gives outputs for {classes} classes, and a label is of another one: use another metric.",
            code="metric.wrong_labels",
            field="task.metrics",
        )
    cells = true.clamp(min=0) * classes + predict_places(logits)
    shares = share_places(true)
    return torch.bincount(cells.flatten().cpu(), shares.flatten().cpu(), classes**2).reshape(classes, classes)


def compute_log_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return −log p of the class of every place, (n, P), of logits (n, K, P) and class numbers (n, P).

    That of a place without a label means nothing: `average_places` leaves it out.
    """
    # Not torch's cross entropy, which `torch.func` takes apart: a row is picked.
    return -logits.log_softmax(1).gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)


def average_log_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of −log p of the true classes over the labeled places of each record, (n,) float64.

    Args:
        outputs: The logits (n, K, ...), or (n, ...) or (n, 1, ...) of the second of two classes.
        targets: The class numbers (n, ...).

    Raises:
        SilodpError: outputs and targets do not have the same places.
    """
    logits, true = flatten_dense_labels(outputs, targets)
    if logits.dim() == 2:
        logits = torch.stack([torch.zeros_like(logits), logits], 1)
    return average_places(compute_log_losses(logits.double(), true), true, "labeled")


def measure_overlap(confusion: Tensor, weight: float) -> Tensor:
    """Return how well every class but the first is found: (K − 1,), NaN for classes that are in no place.

    Args:
        confusion: Counts by true and predicted class, (K, K).
        weight: What agreement counts for, beside places that are in one of both alone: 2 for Dice, 1 for IoU.
    """
    both = confusion.diagonal()
    one = confusion.sum(0) + confusion.sum(1) - 2 * both
    return (weight * both / (weight * both + one))[1:]
