"""From the [task] section to a task: models, losses and metrics by name, or one's own by reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp.config.construct import fields_of, validate_arguments
from silodp.config.plugins import refer
from silodp.data.dataset import Dataset
from silodp.data.public import PublicData
from silodp.errors import SilodpError, describe_exception, lookup
from silodp.training.losses import LOSSES, Loss
from silodp.training.metrics import METRICS, Metric
from silodp.training.model_checks import inspect_model, inspect_on
from silodp.training.models import MODELS
from silodp.training.task import Task

if TYPE_CHECKING:
    from torch import nn


def task_for(
    public: PublicData,
    dataset: Dataset | None = None,
    model: str | None = None,
    options: Mapping[str, Any] | None = None,
    loss: str | None = None,
    metrics: tuple[str, ...] | None = None,
    seed: int | None = None,
) -> Task:
    """Build the task of a configuration; what is None follows from the data set, else from the kind of label.

    Args:
        public: facts of the data: shape of a record, number of classes, kind of label.
        dataset: its defaults of model, loss and metrics.
        model: a name in `MODELS`, or a reference ("package.module:function", "file.py:function") to a
            function that gives a `torch.nn.Module`; it gets `features` and `classes` if it takes them.
        options: further arguments of the model's function.
        loss: a name in `LOSSES` or a reference to a `Loss` (or to an f(outputs, targets) -> (n,)).
        metrics: names in `METRICS` or references.
        seed: for parameters that no layer re-initializes.

    Raises:
        SilodpError: a name or a reference that is not found, or a model that cannot be built.
    """
    survival = public.labels == "survival"
    if dataset is not None:
        model = dataset.model if model is None else model
        loss = dataset.loss if loss is None else loss
        metrics = dataset.metrics if metrics is None else metrics
    if model is None:
        model = "logistic" if public.classes else "cox_linear"
    network = _model(model, options or {}, public, seed)
    if loss is None:
        if public.classes:
            loss = "binary_cross_entropy" if _width(network, public) == 1 else "cross_entropy"
        else:
            loss = "cox" if survival else "squared_error"
    if metrics is None:
        metrics = ("concordance",) if survival else _usual_metrics(public.classes)
    return Task(network, _loss(loss), {_label(name): _metric(name) for name in metrics})


def _usual_metrics(classes: int | None) -> tuple[str, ...]:
    if classes is None:
        return ()
    return ("accuracy", "roc_auc") if classes == 2 else ("accuracy",)


def _model(name: str, options: Mapping[str, Any], data: PublicData, seed: int | None) -> nn.Module:
    import torch
    from torch import nn

    builder = _lookup(name, MODELS, "task.model")
    if isinstance(builder, nn.Module):
        return builder
    if not callable(builder):
        raise SilodpError(
            f"task.model = '{name}' is of type {type(builder).__name__}: refer to a function or a module.",
            code="model.not_a_module",
            field="task.model",
        )
    public = {"features": int(np.prod(data.record_shape)), "classes": data.classes}
    taken = {key: value for key, value in public.items() if key in fields_of(builder) and value is not None}
    arguments = validate_arguments(builder, {**taken, **options}, f"the model '{name}'", "task.options")
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            network = builder(**arguments)
        except SilodpError:
            raise
        except (Exception, SystemExit) as error:
            raise SilodpError(
                f"task.model = '{name}' raised {describe_exception(error)}: correct it, or its task.options.",
                code="model.raised",
                field="task.model",
            ) from error
    if not isinstance(network, nn.Module):
        raise SilodpError(
            f"task.model = '{name}' returned an object of type {type(network).__name__}: "
            "let it return a torch.nn.Module.",
            code="model.not_a_module",
            field="task.model",
        )
    return network


def _width(network: nn.Module, public: PublicData) -> int:
    """Return the number of outputs that the model has per record, counted on made-up records."""
    import torch

    inspect_model(network)
    example = torch.from_numpy(public.synthetic_batch()[0]).to(next(network.parameters()))
    inspect_on(network, example)
    with torch.no_grad():
        return int(network(example)[0].numel())


def _loss(name: str) -> Loss:
    found = _lookup(name, LOSSES, "task.loss")
    if isinstance(found, Loss):
        return found
    if name.replace("-", "_") in LOSSES:
        return LOSSES[name.replace("-", "_")]()
    return Loss.per_record(_label(name), found)


def _metric(name: str) -> Metric:
    metric: Metric = _lookup(name, METRICS, "task.metrics")
    return metric


def _label(name: str) -> str:
    return name.rpartition(":")[2].replace("-", "_")


def _lookup(name: str, registry: Mapping[str, Callable[..., Any]], where: str) -> Any:
    return refer(name, where) if ":" in name else lookup(name, registry, where)
