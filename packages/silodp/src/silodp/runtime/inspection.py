"""The inspection of a task: whether its model and loss can be trained, and their public facts.

A private record never decides whether a model fails, by which path its gradients are computed, or what a step costs:
all of that is found out on made-up records, whose labels are of every kind (`Task.use_examples`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from silodp.accounting.views import Unit
from silodp.aggregators.run_spec import ModelSpec
from silodp.aggregators.series import Series
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.methods.base import Method
from silodp.settings import check_type
from silodp.text import is_own, join_names

if TYPE_CHECKING:  # a plan does not import torch, which takes seconds
    from silodp.training.task import Task


def inspect_model(data: PublicData, task: Task, method: Method, series: Iterable[Series] = ()) -> ModelSpec:
    """Try a model and its loss on made-up records, once before a run; return the public facts that were found.

    Whatever comes later takes the facts, with the digests of constants and start, from the specification of the run.

    Args:
        data: Public facts of the federation.
        task: Model, loss and metrics; they are tried on made-up records.
        method: The method that trains the model.
        series: The additional series of the run.

    Returns:
        The facts, by which a run is the same for all parties.

    Raises:
        SilodpError: The loss does not fit the labels or the method, the model cannot be trained, or a series can do
            nothing with its outputs (codes loss.*, model.*).
    """
    from silodp.training.losses import suggest_class_loss, suggest_loss
    from silodp.training.made_up import make_up_records
    from silodp.training.task import Task

    check_type("task", task, Task, "Task(model, loss, metrics)")
    if task.loss.most_classes is not None and (data.classes or 0) > task.loss.most_classes:
        learns = f"{task.loss.most_classes} classes" if task.loss.most_classes else "labels that are numbers"
        raise SilodpError(
            f"the loss '{task.loss.name}' is for {learns}, and the labels have {data.classes} classes: use "
            f"{suggest_class_loss(data.classes)}.",
            code="loss.wrong_labels",
            field="task.loss",
        )
    # Where labels are classes, the loss itself refuses: which one fits them depends on the outputs of the model.
    known = task.loss.labels or (data.labels,)
    if data.labels not in ("classes", *known):
        raise SilodpError(
            f"the loss '{task.loss.name}' is for labels of the kind {join_names(known, 'or')}, and these are "
            f"'{data.labels}': use {suggest_loss(data.labels)}.",
            code="loss.wrong_labels",
            field="task.loss",
        )
    if method.clips_records and not task.loss.separable:
        raise SilodpError(
            f"{method.name} clips the gradient of every single record, and the loss '{task.loss.name}' is not a mean "
            "over records: use a loss made by Loss.per_record, or a method that clips per person (uldp-avg).",
            code="loss.not_separable",
            field="task.loss",
        )
    # A failure of a model or loss must not depend on private records, and must appear before any ε is spent.
    x, y = task.tensors(*make_up_records(data))
    task.use_examples(x, y)
    local = getattr(method, "local", None)
    longest = None if local is None else local.batch_size
    # Theirs take two seconds of imports by torch; what the method of a plug-in takes is not known.
    by_record = method.clips_records or not is_own(type(method))
    task.check(x, y, data.classes, longest, by_record)
    for one in series:
        one.check_task(data, task, x, y)
    return describe_model(task)


def describe_loop(data: PublicData, task: Task, method: Method) -> str | None:
    """Return the sentence about a model that trains one unit after another, with its price; None where it does not.

    Nor does a model that fails have one: `inspect_model` says why. The reason is logged.

    Args:
        data: Public facts of the federation.
        task: Model and loss; they are tried on made-up records.
        method: The method that trains the model.
    """
    from silodp.training.gradients import measure_loop
    from silodp.training.made_up import make_up_records

    unit: Unit = "record" if method.clips_records else "user"
    try:
        x, y = task.tensors(*make_up_records(data))
        task.use_examples(x, y)
        price = measure_loop(unit, task, x, y)
    except SilodpError:
        return None
    if price is None:
        return None
    who = "record" if unit == "record" else "person"
    return (
        f"{type(task.model).__name__} with loss '{task.loss.name}' is computed for one {who} after another, which "
        f"takes about {price:.2g} times as long as a pass without privacy over as many records (a measurement on 20 "
        "made-up records, on this machine)"
    )


def describe_model(task: Task) -> ModelSpec:
    """Return the public facts of a task's model and loss."""
    dtype = str(task.dtype).removeprefix("torch.")
    return ModelSpec(
        task.size,
        dtype,
        f"{task.model!r}",
        task.loss.name,
        task.constants_digest,
        task.start_digest,
        task.keeps_values,
        task.has_other_code,
    )
