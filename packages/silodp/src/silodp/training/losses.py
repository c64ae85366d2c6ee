"""Losses that are a function of one user's records.

A loss takes `(outputs (n, ...), targets (n, ...), mask (n,))` and returns a scalar. The mask is 1 for a record and 0
for padding: users of different sizes train side by side, and batches are padded to few lengths. With a loss that is
neither separable nor of this module, users share a step only where their batches are equally long. A batch with an
all-zero mask has loss 0 and gradient 0.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, get_args

from silodp._lazy import torch
from silodp.errors import SilodpError
from silodp.settings import Positive, check_choice, check_value
from silodp.text import describe_exception
from silodp.training.dense_labels import (
    PlaceMean,
    average_places,
    compute_log_losses,
    flatten_dense_labels,
    has_dense_labels,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from silodp.data.public import LabelKind


# Up to this many records the risk sets of the Cox loss are one (n, n) table, which vmap runs fast; beyond, a sort and a
# running sum take less memory.
_PAIRWISE_LIMIT = 1024


@contextlib.contextmanager
def describe_raised(refuse: Callable[[str], SilodpError]) -> Iterator[None]:
    """Raise `refuse(reason)` in place of whatever a user's code raises, except for a `SilodpError`."""
    try:
        yield
    except SilodpError:
        raise
    except (Exception, SystemExit) as error:
        raise refuse(describe_exception(error)) from error


def loss_error(message: str, code: str) -> SilodpError:
    """Return the error that says what is wrong with the loss of a task."""
    return SilodpError(message, code=code, field="task.loss")


def _check_callable(name: str, function: object, remedy: str) -> None:
    if not callable(function):
        raise SilodpError(
            f"loss '{name}' is of type {type(function).__name__}: {remedy}", code="loss.not_callable"
        )


@dataclass(frozen=True)
class Loss:
    """A named loss of `(outputs (n, ...), targets (n, ...), mask (n,) of 0/1) -> scalar`.

    Attributes:
        name: The name in messages and metrics.
        function: A function made of torch operations without data-dependent Python branches (it runs under
            `torch.func.vmap`); it must ignore records whose mask is 0.
        separable: Whether the loss is the mean of a loss of every single record; only then can record-level methods
            clip the gradients of single records.
        most_classes: The largest number of classes that it can learn; 0 for a loss of numbers, None for any number.
        per_class: Whether it needs one output of the model for every class, and no more.
        predicts_labels: Whether a model trained by it gives logits of classes, the label, or a log hazard. For other
            losses this is not known: a Poisson model, for example, gives the logarithm of the expected label.
        labels: The kinds of labels that it can learn; None where they are not known.

    Raises:
        SilodpError: `function` is not callable.
    """

    name: str
    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    separable: bool = False
    most_classes: int | None = None
    per_class: bool = False
    predicts_labels: bool = False
    labels: tuple[LabelKind, ...] | None = None

    def __post_init__(self) -> None:
        _check_callable(self.name, self.function, "give a function.")

    @classmethod
    def per_record(
        cls,
        name: str,
        f: Callable[[Tensor, Tensor], Tensor],
        most_classes: int | None = None,
        per_class: bool = False,
    ) -> Loss:
        """Make the mean over a user's records of an ordinary `f(outputs, targets) -> (n,)`.

        Args:
            name: The name of the loss in messages and metrics.
            f: A function that gets outputs (n, ...) and targets (n, ...), and returns one number per record, (n,).
                Losses of `torch.nn.functional` do so with `reduction="none"`.
            most_classes: See the class.
            per_class: See the class.

        Raises:
            SilodpError: `f` is not a function. Whether it returns (n,) is checked when it is called, the first time on
                made-up records before a run begins.
        """
        _check_callable(name, f, "give a function of outputs and targets.")

        def masked_mean(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
            values = f(outputs, targets)
            # Any other shape broadcasts against the weights to a number that is not a mean over records.
            if not isinstance(values, torch.Tensor) or values.shape != mask.shape:
                raise _refuse_shape(name, values, outputs, targets)
            # The weights 1/n first: they do not depend on the parameters, so a traced step computes them once.
            weights = mask / mask.sum().clamp(min=1)
            return (weights * values).sum()

        masked_mean.__module__ = str(getattr(f, "__module__", ""))  # whose code it is (`Task.has_other_code`)
        return cls(name, masked_mean, separable=True, most_classes=most_classes, per_class=per_class)

    def split_records(self) -> Loss:
        """Return this separable loss as the mean of losses that are computed for each record alone, by vmap."""

        def compute_mean(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
            def compute(output: Tensor, target: Tensor) -> Tensor:
                return self.compute(output.unsqueeze(0), target.unsqueeze(0), mask.new_ones(1))

            values = torch.func.vmap(compute, randomness="different")(outputs, targets)
            found: Tensor = (mask / mask.sum().clamp(min=1) * values).sum()
            return found

        return replace(self, function=compute_mean)

    @property
    def is_known(self) -> bool:
        """Whether it is silodp's own code, which leaves out records whose mask is 0."""
        return type(self) is Loss and getattr(self.function, "__module__", "") == __name__

    def compute(self, outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        """Return the loss (scalar tensor) of records with outputs (n, ...), targets (n, ...) and mask (n,) of 0/1.

        Raises:
            SilodpError: the function raises, or returns anything but one number.
        """
        with describe_raised(
            lambda reason: loss_error(
                f"the loss '{self.name}' raised {reason} (on outputs {tuple(outputs.shape)} and "
                f"targets {tuple(targets.shape)} of {targets.dtype}): correct it, or choose another.",
                "loss.raised",
            )
        ):
            value = self.function(outputs, targets, mask)
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            raise loss_error(
                f"the loss '{self.name}' returned {_describe(value)}: return one number (a tensor without dimensions), "
                "or wrap a function of single records in Loss.per_record.",
                "loss.not_scalar",
            )
        return value


# Metrics and predictions read the outputs of a model of classes as logits.
_REFUSED = {
    "BCELoss": "takes probabilities: end the model in its last linear layer, without the sigmoid, and give "
    "BCEWithLogitsLoss",
    "SoftMarginLoss": "takes labels of -1 and 1, and labels here are 0 and 1: give BCEWithLogitsLoss",
}
# A loss of logits also learns shares between 0 and 1, which are real numbers.
_OF_LOGITS: tuple[LabelKind, ...] = ("classes", "real", "multilabel")
_OF_NUMBERS: tuple[LabelKind, ...] = ("real",)
# Class of torch.nn -> `Loss.most_classes` and `Loss.labels`. The losses with None take class numbers.
_TORCH_LOSSES: dict[str, tuple[int | None, tuple[LabelKind, ...]]] = {
    **dict.fromkeys(("CrossEntropyLoss", "NLLLoss"), (None, ("classes",))),
    "BCEWithLogitsLoss": (2, _OF_LOGITS),
    **dict.fromkeys(("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss"), (0, _OF_NUMBERS)),
}
_OPTIONS = ("weight", "pos_weight", "ignore_index", "label_smoothing", "beta", "delta")


def adapt_torch_loss(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Loss:
    """Make the mean over a user's records of a loss of `torch.nn`, with the module's weights and other constants.

    The mean divides by the number of records, also where the module has class weights (torch divides by the sum of the
    weights) or an `ignore_index` (torch divides by the records that are left). Several outputs of a record are
    averaged, and so are its places, among them those without a label (−100), whose loss is 0.

    Args:
        module: A loss whose reduction is "mean" or "none".
        dtype: The data type of the model's parameters.
        device: The device of the model's parameters.

    Raises:
        SilodpError: another module, one whose outputs are no logits, or the reduction "sum".
    """
    name = type(module).__name__
    if name in _REFUSED:
        raise SilodpError(f"loss = {name} {_REFUSED[name]}.", code="argument.value", field="loss")
    if name not in _TORCH_LOSSES or type(module).__module__ != "torch.nn.modules.loss":
        raise SilodpError(
            f"loss is a module {name}, which silodp cannot take apart by records: wrap a function that returns one "
            "number per record in Loss.per_record, for example Loss.per_record('mine', MyLoss(reduction='none')).",
            code="argument.type",
            field="loss",
        )
    if module.reduction == "sum":
        raise SilodpError(
            f"loss is {name}(reduction='sum'), which grows with the number of a person's records: leave reduction out.",
            code="argument.value",
            field="loss",
        )
    own: Any = copy.deepcopy(module).to(device, dtype)
    own.reduction = "none"  # `Loss.per_record` takes the mean over a user's records
    most_classes, labels = _TORCH_LOSSES[name]
    by_class = most_classes is None

    def values(outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = own(*((outputs, targets) if by_class else _match_targets(name, outputs, targets)))
        if has_dense_labels(targets):
            return average_places(found.flatten(1), targets.flatten(1), "all")
        return found.flatten(1).mean(1) if found.dim() > 1 else found

    if "forward" in vars(own) or any(hooks for name, hooks in vars(own).items() if name.endswith("_hooks")):
        values.__module__ = ""  # code of somebody else runs in it
    # In the name of the loss, because the name is part of the run's identity.
    constants = {key: getattr(own, key) for key in _OPTIONS if getattr(own, key, None) is not None}
    shown = ", ".join(f"{key}={v.tolist() if hasattr(v, 'tolist') else v}" for key, v in constants.items())
    return _mark_predicting(Loss.per_record(f"{name}({shown})", values, most_classes, by_class), *labels)


def _mark_predicting(loss: Loss, *labels: LabelKind) -> Loss:
    return replace(loss, predicts_labels=True, labels=labels)


def _refuse_shape(name: str, values: object, outputs: Tensor, targets: Tensor) -> SilodpError:
    count = outputs.shape[0]
    if isinstance(values, torch.Tensor) and values.dim() == 0:
        remedy = 'return one per record, for example with reduction="none".'
    elif isinstance(values, torch.Tensor) and values.shape[:1] == (count,):
        remedy = (
            "give outputs and targets the same shape (for example outputs.squeeze(1)), and sum over the rest."
        )
    else:
        remedy = "return one number per record."
    return loss_error(
        f"the loss '{name}' returned {_describe(values)} for {count} records (outputs {tuple(outputs.shape)}, targets "
        f"{tuple(targets.shape)}): {remedy}",
        "loss.not_per_record",
    )


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"an object of type {type(value).__name__}"
    return "a single number" if value.dim() == 0 else f"numbers of shape {tuple(value.shape)}"


def cross_entropy(class_weights: Sequence[float] | None = None, places: PlaceMean = "labeled") -> Loss:
    """Make softmax cross entropy: outputs (n, K) logits, targets (n,) int64 classes.

    Where every place of a record (pixel, voxel, token) has a class, outputs are (n, K, ...) and targets (n, ...), and a
    record's loss is a mean over its places.

    Args:
        class_weights: The K weights, **public** constants, never class frequencies of private rows. The mean divides by
            the number of records, not by the sum of their weights.
        places: Over which places of a record the mean is taken. "labeled": those with a label, so that every record
            counts alike. "all": all, and one without a label (−100) has loss 0, so that every label counts alike.

    Raises:
        SilodpError: weights that are not finite numbers ≥ 0, or an unknown mean.
    """
    check_choice("places", places, get_args(PlaceMean))
    weights = None if class_weights is None else _validate_weights(class_weights)

    def softmax_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            raise _refuse_labels("cross_entropy", "class numbers", outputs, targets)
        if outputs.dim() < 2 or outputs.shape[1] < 2:
            raise loss_error(
                f"cross_entropy needs one output per class, and the model gives {tuple(outputs.shape[1:])} per record: "
                "use binary_cross_entropy if there are two classes, or end the model in a layer as wide as there are "
                "classes.",
                "loss.output_shape",
            )
        # Made here: device and data type are those of the outputs.
        weight = None if weights is None else outputs.new_tensor(weights)
        if has_dense_labels(targets):
            return average_places(*_compute_place_losses(outputs, targets, weight), places)
        return torch.nn.functional.cross_entropy(outputs, targets, weight=weight, reduction="none")

    return _mark_predicting(Loss.per_record("cross_entropy", softmax_loss, per_class=True), "classes")


def binary_cross_entropy(class_weights: Sequence[float] | None = None, places: PlaceMean = "labeled") -> Loss:
    """Make the logistic loss: outputs (n,) or (n, 1) logits and targets (n,) of 0/1, integer or float.

    For k yes/no labels (kind "multilabel"), outputs and targets are (n, k), and a record's loss is the mean of theirs.
    Where every place of a record has one of two classes, outputs are (n, ...) or (n, 1, ...), and targets (n, ...).

    Args:
        class_weights: The weights of 0 and of 1, **public** constants.
        places: Over which places of a record the mean is taken (see `cross_entropy`).

    Raises:
        SilodpError: weights that are not two finite numbers ≥ 0, or an unknown mean.
    """
    check_choice("places", places, get_args(PlaceMean))
    zero, one = (1.0, 1.0) if class_weights is None else _validate_weights(class_weights, length=2)

    def logistic_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        is_dense = has_dense_labels(targets)
        if is_dense:
            outputs, targets = flatten_dense_labels(outputs, targets)
        losses = _compute_logistic(outputs, targets)
        if class_weights is not None:
            losses = (zero + (one - zero) * targets.to(outputs.dtype)) * losses
        if is_dense:
            return average_places(losses, targets, places)
        return losses.mean(1) if losses.dim() > 1 else losses  # over the labels of a record

    return _mark_predicting(
        Loss.per_record("binary_cross_entropy", logistic_loss, most_classes=2), *_OF_LOGITS
    )


def squared_error() -> Loss:
    """Make the squared error, summed over a record's outputs: outputs and targets (n,), (n, 1) or (n, k)."""

    def error(outputs: Tensor, targets: Tensor) -> Tensor:
        rows, wanted = _match_targets("squared_error", outputs, targets)
        return (rows - wanted).square().sum(1)

    return _mark_predicting(Loss.per_record("squared_error", error, most_classes=0), *_OF_NUMBERS)


def _match_targets(name: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and targets as rows (n, k) of one type; raise `SilodpError` where their widths differ."""
    rows = outputs.flatten(1) if outputs.dim() > 1 else outputs.unsqueeze(1)
    wanted = targets.flatten(1) if targets.dim() > 1 else targets.unsqueeze(1)
    if rows.shape != wanted.shape:
        width = wanted.shape[1]
        remedy = f"end it in a layer of width {width}, or choose another loss"
        if width == 2:
            remedy = f"use cox if the labels are pairs of event and time; if they are two labels, {remedy}"
        raise loss_error(
            f"{name} needs as many outputs as targets per record, and the model gives {rows.shape[1]} for "
            f"{width}: {remedy}.",
            "loss.output_shape",
        )
    return rows, wanted.to(rows.dtype)


def cox() -> Loss:
    """Make the negative Cox partial log likelihood, divided by the number of records, with ties by Breslow.

    Outputs (n,) or (n, 1) log hazards η, targets (n, 2) = [event, time]:

        loss = (1/n) Σ_{i: event} ( log Σ_{j: t_j ≥ t_i} e^{η_j} − η_i )

    The divisor n (not the number of events) is FLamby's, so its learning rates carry over. A user without an event has
    loss 0 and gradient 0.

    Source: Cox 1972, "Regression Models and Life-Tables"; ties by Breslow 1974, "Covariance Analysis of Censored
    Survival Data"; Ogier du Terrail et al. 2022, "FLamby".
    """
    return _mark_predicting(Loss("cox", _compute_cox), "survival")


def exponential_survival(typical_time: float) -> Loss:
    """Make the negative log likelihood of survival with a constant hazard, a mean over records.

    Outputs (n,) or (n, 1) log hazards η relative to 1/τ, targets (n, 2) = [event, time]; for a record

        loss = e^η·time/τ − event·η

    Unlike Cox's it compares no records with each other: a person with one record is learned from, and methods that clip
    single records take it. The model must have a bias, or hazards have the scale of τ.

    Args:
        typical_time: The time τ, in the unit of the times: a **public** guess of when events are, never computed from
            private rows. The bias of the model corrects it (docs/results.md compares three).

    Raises:
        SilodpError: it is not a finite number above 0.

    Source: the likelihood of Poisson regression; Holford, The Analysis of Rates and of Survivorship Using Log-Linear
    Models, 1980.
    """
    check_value("typical_time", typical_time, Positive)

    def negative_log_likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
        score, event, time = _split_survival("exponential_survival", outputs, targets)
        return score.exp() * (time / typical_time) - event * score

    return _mark_predicting(Loss.per_record("exponential_survival", negative_log_likelihood), "survival")


def _compute_place_losses(outputs: Tensor, targets: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of every place, (n, P), and its class, (n, P)."""
    logits, classes = flatten_dense_labels(outputs, targets)
    if logits.dim() == 2:
        raise loss_error(
            "cross_entropy needs one output per class in every place, and the model gives one: use "
            "binary_cross_entropy if there are two classes.",
            "loss.output_shape",
        )
    losses = compute_log_losses(logits, classes)
    return (losses if weight is None else weight[classes.clamp(min=0)] * losses), classes


def _compute_logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the logistic loss of each label, shaped like `targets`."""
    if targets.dim() > 1 and outputs.shape != targets.shape:
        raise loss_error(
            f"binary_cross_entropy needs one output for each yes/no label, and the model gives "
            f"{tuple(outputs.shape[1:])} for labels of shape {tuple(targets.shape[1:])}: end it in a layer as wide as "
            "there are labels, or use cox if the labels are pairs of event and time.",
            "loss.wrong_labels",
        )
    logit = outputs if targets.dim() > 1 else flatten_outputs(outputs, ", or use cross_entropy")
    # log(1 + e^z) − y·z: the same value as binary_cross_entropy_with_logits in a quarter of the operations.
    return torch.nn.functional.softplus(logit) - targets.to(logit.dtype) * logit


def _compute_cox(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    score, event, time = _split_survival("cox", outputs, targets)
    # Padding has no event and is in no risk set of a real record; a padded row keeps itself, so its sum is never empty.
    hazard = _log_risk_pairwise if score.shape[0] <= _PAIRWISE_LIMIT else _log_risk_sorted
    return (mask * event * (hazard(score, time, mask) - score)).sum() / mask.sum().clamp(min=1)


def _split_survival(name: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log hazards, events and times, (n,) each; raise `SilodpError` for labels of another kind."""
    if targets.dim() != 2 or targets.shape[1] != 2:
        raise _refuse_labels(name, "pairs of event and time", outputs, targets)
    score = flatten_outputs(outputs)
    return score, targets[:, 0].to(score.dtype), targets[:, 1]


def _log_risk_pairwise(score: Tensor, time: Tensor, mask: Tensor) -> Tensor:
    """Return log Σ_{j at risk at t_i} e^{η_j} for every i (n,), through the (n, n) table of risk sets."""
    # The mask keeps padding out of the risk sets of real records; only padding has padding in its own.
    at_risk = (time.unsqueeze(0) >= time.unsqueeze(1)) & (mask.unsqueeze(0) >= mask.unsqueeze(1))
    return score.unsqueeze(0).masked_fill(~at_risk, float("-inf")).logsumexp(1)


def _log_risk_sorted(score: Tensor, time: Tensor, mask: Tensor) -> Tensor:
    """Return the same in O(n log n): a running log-sum-exp, latest first, read at the end of each group of ties."""
    # Padding goes last, so that no real record's running sum includes it.
    # Latest first, so that a running sum holds everyone who is still at risk.
    order = time.masked_fill(mask == 0, float("-inf")).argsort(descending=True)
    running = score[order].logcumsumexp(0)
    time, mask = time[order], mask[order]
    tied = (time[1:] == time[:-1]) & (mask[1:] == mask[:-1])  # with the next one
    # For each record the last of those with an equal time: Breslow counts all of them as at risk.
    last = score.shape[0] - 1
    position = torch.arange(last, device=score.device)
    ends = torch.cat([torch.where(tied, last, position), torch.full_like(order[:1], last)])
    group_end = ends.flip(0).cummin(0).values.flip(0)
    return running[group_end][order.argsort()]


def flatten_outputs(outputs: Tensor, or_else: str = "") -> Tensor:
    """Return outputs (n,) or (n, 1) as (n,); raise `SilodpError` for more columns.

    Args:
        outputs: The outputs of a model.
        or_else: Another remedy, for the message.
    """
    if outputs.dim() == 1:
        return outputs
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        return outputs.squeeze(1)
    raise SilodpError(
        f"the loss or metric needs one output per record but the model gives {tuple(outputs.shape[1:])}: "
        f"end it in a layer of width 1{or_else}",
        code="loss.output_shape",
    )


def _refuse_labels(name: str, needs: str, outputs: Tensor, targets: Tensor) -> SilodpError:
    if targets.dim() > 1:
        other = "cox"
    elif targets.is_floating_point():
        other = "squared_error"
    else:
        is_single = outputs.dim() == 1 or outputs.shape[1] == 1
        other = suggest_class_loss(2 if is_single else None)
    return loss_error(
        f"{name} needs {needs}, and the labels are of shape {tuple(targets.shape[1:])} and {targets.dtype}: use "
        f"{other}, or set the table's kind of label (schema.kind) to what it is.",
        "loss.wrong_labels",
    )


def name_class_loss(outputs: int, label_shape: tuple[int, ...]) -> str:
    """Return the name of the default loss of classes, by the numbers that a model gives for a record and its places."""
    return "binary_cross_entropy" if outputs == math.prod(label_shape) else "cross_entropy"


def suggest_loss(labels: LabelKind) -> str:
    """Return the losses for labels of this kind, for messages."""
    return {
        "classes": suggest_class_loss(None),
        "real": "squared_error, or a loss of torch.nn such as HuberLoss",
        "multilabel": "binary_cross_entropy",
        "survival": "cox or exponential_survival; where two columns are not event and time, declare what they are by "
        "SiloData(labels='multilabel') or 'real'",
    }[labels]


def suggest_class_loss(classes: int | None) -> str:
    """Return the losses for labels that are classes, for messages; None for a number of classes above two."""
    if classes == 2:
        return "binary_cross_entropy where the model has one output, cross_entropy where it has one per class"
    return "cross_entropy, with one output of the model per class"


def _refuse_weights(problem: str, code: str) -> SilodpError:
    return SilodpError(problem, code=code, field="class_weights")


def _validate_weights(weights: Sequence[float], length: int | None = None) -> list[float]:
    try:
        values = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise _refuse_weights(
            f"class_weights are {short(weights)}: give one number per class", "argument.type"
        ) from None
    if length is not None and len(values) != length:
        raise _refuse_weights(
            f"class_weights needs {length} numbers, not {len(values)}: one per class", "argument.shape"
        )
    if not values or any(not 0 <= value < float("inf") for value in values):
        raise _refuse_weights(
            f"class_weights must be finite and at least 0, not {short(values)}", "argument.value"
        )
    return values


LOSSES: dict[str, Callable[..., Loss]] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "squared_error": squared_error,
    "cox": cox,
    "exponential_survival": exponential_survival,
}
"""Name in a config -> builder, which takes [task.loss_options]."""
DEFAULT_LOSSES = {"real": "squared_error", "survival": "cox", "multilabel": "binary_cross_entropy"}
"""Kind of label -> name of the loss where none is named; that of classes follows from the outputs of the model."""
