"""What the held-out records of a simulation say of its model: by silo and subgroup, confusion and calibration. Private.

No ε covers any of it. It is measured at the end of a run whose metrics are those of pooled held-out records, and kept
in DIR/plots/held_out.json, from which the report is drawn. Where silos evaluate by themselves, or by noised sums,
nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import FiniteFloat

from silodp.errors import SilodpError
from silodp.report.run_record import HELD_OUT, keep_private, read_private
from silodp.report.skill import Skill, assess_records

if TYPE_CHECKING:
    from torch import Tensor

    from silodp.data.federation import Federation
    from silodp.data.silo_data import SiloData
    from silodp.data.tables.subgroups import Groups
    from silodp.training.task import Task

BINS = 10
"""Of the calibration, equal steps of the probability."""


@dataclass(frozen=True)
class Part:
    """Metrics on a part of the held-out records.

    Attributes:
        of: "silo", or the column of a subgroup.
        name: The name of the silo or subgroup.
        records: Number of records.
        persons: Number of persons whose records they are.
        metrics: The metrics that are defined on them, by name.
    """

    of: str
    name: str
    records: int
    persons: int
    metrics: dict[str, FiniteFloat]


@dataclass(frozen=True)
class CalibrationBin:
    """Records whose predicted probability lies in one step.

    Attributes:
        predicted: Their mean probability.
        observed: The share of them that has the class.
        records: Number of records; may be noisy.
        error: Standard error of `observed`.
    """

    predicted: FiniteFloat
    observed: FiniteFloat
    records: FiniteFloat
    error: FiniteFloat


@dataclass(frozen=True)
class HeldOut:
    """Everything that is measured on the held-out records.

    Attributes:
        round: The round after which it was measured.
        persons: Number of persons whose records were held out.
        parts: Silos, then subgroups.
        classes: Names of the classes; () where labels are no classes.
        confusion: Records by true and predicted class; () where labels are no classes. Where places have classes, those
            of a record add up to 1.
        calibration: Calibration of the second class, where there are two; else ().
        skill: The model beside one constant for everybody; None where outputs are no predictions of the labels.
    """

    round: int
    persons: int
    parts: tuple[Part, ...]
    classes: tuple[str, ...] = ()
    confusion: tuple[tuple[float, ...], ...] = ()
    calibration: tuple[CalibrationBin, ...] = ()
    skill: Skill | None = None

    def list_parts(self, of_silos: bool) -> tuple[Part, ...]:
        """Return the silos, or the subgroups."""
        return tuple(part for part in self.parts if (part.of == "silo") == of_silos)


def measure_held_out(
    federation: Federation, task: Task, params: Tensor, rounds: int, groups: Groups | None = None
) -> HeldOut | None:
    """Measure a model on the held-out records, pooled, by silo and by subgroup.

    Args:
        federation: The federation, with the held-out records.
        task: Model, loss and metrics.
        params: (d,), the model.
        rounds: The number of rounds that led to it.
        groups: Subgroups by columns of features.

    Returns:
        What was measured; None where there are no held-out records.
    """
    # Imported here: a report, which reads what was measured, needs none of them.
    from silodp.data.tables.schema import name_classes
    from silodp.data.tables.subgroups import find_groups
    from silodp.training.dense_labels import count_classes

    test, classes = federation.test, federation.classes
    if test is None or len(test.x) == 0:
        return None
    silos = [(silo.name, silo.held_out) for silo in federation.silos if len(silo.held_out)]
    parts = [_measure_part(task, params, "silo", name, one.x, one.y, [one.user]) for name, one in silos]
    numbered = _list_numbered(federation, test)
    grouped = [find_groups(one.x, federation.schema, groups or {}) for one in (test, *numbered)]
    for (column, name, chosen), *rows in zip(*grouped, strict=True):
        users = [one.user[mask] for one, (_, _, mask) in zip(numbered, rows, strict=True)]
        parts.append(_measure_part(task, params, column, name, test.x[chosen], test.y[chosen], users))
    users = [one.user for one in numbered]
    inputs, targets = task.tensors(test.x, test.y)
    outputs = task.predict(params, inputs).double().cpu()
    skill = _assess(federation, task, outputs, targets.cpu(), users)
    found = HeldOut(rounds, _count_persons(users), parts=tuple(parts), skill=skill)
    if classes is None:
        return found
    if not federation.label_shape:
        outputs = outputs.reshape(len(test.x), -1)
    names = name_classes(federation.schema, classes)
    try:
        confusion = count_classes(outputs, targets.cpu())
    except SilodpError:
        confusion = None
    if confusion is None or len(confusion) != classes:
        # Outputs of another shape predict no class: they are those of a loss of the user's own.
        return found
    counts = tuple(map(tuple, confusion.tolist()))
    if federation.label_shape:
        return replace(found, classes=names, confusion=counts)
    # One output is the log-odds of the second class; of two, their difference is.
    scores = outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, -1] - outputs[:, 0]
    calibration = () if classes != 2 else _calibrate(scores.numpy(), test.y)
    return replace(found, classes=names, confusion=counts, calibration=calibration)


def measure_skill_of(federation: Federation, task: Task, params: Tensor) -> Skill | None:
    """Return the verdict on a model by pooled held-out records; None without any.

    Args:
        federation: The federation, with the held-out records.
        task: Model and loss.
        params: (d,), the model.
    """
    test = federation.test
    if test is None or len(test.x) == 0:
        return None
    inputs, targets = task.tensors(test.x, test.y)
    outputs = task.predict(params, inputs)
    users = [one.user for one in _list_numbered(federation, test)]
    return _assess(federation, task, outputs, targets.cpu(), users)


def _list_numbered(federation: Federation, test: SiloData) -> list[SiloData]:
    """Return the held-out records where all persons have a number: pooled, or those of all silos in the same order."""
    # In `test`, persons of tables without training records have none.
    if federation.user_keys is None:
        return [test]
    return [silo.held_out for silo in federation.silos if len(silo.held_out)]


def _assess(
    federation: Federation, task: Task, outputs: Tensor, targets: Tensor, users: Sequence[NDArray[np.int64]]
) -> Skill | None:
    from silodp.data.tables.schema import name_classes
    from silodp.training.skill import measure_skill

    public = federation.public()
    typical = public.label_typical or ()
    if typical and public.targets is None:
        typical = (typical,)
    measured = measure_skill(outputs, targets, federation.labels, typical)
    if measured is None:
        return None
    if not task.loss.predicts_labels:
        # What outputs mean is not known, but a larger one still stands for more of the class, or of the risk.
        gains = tuple(one for one in measured.gains if one.metric not in ("log_loss", "r2"))
        measured = replace(measured, gains=gains, balances=())
    person = np.concatenate(users)
    if len(person) != len(targets):  # of a program that gave other records for the test than its silos have
        person = np.full(len(targets), -1)
    if federation.classes is not None:
        names = name_classes(federation.schema, federation.classes)
    else:
        columns = () if federation.schema is None else federation.schema.label_columns
        names = columns or ("",) * (federation.targets is None)
    return assess_records(measured, person, names)


def _measure_part(
    task: Task, params: Tensor, of: str, name: str, x: Any, y: Any, users: Sequence[NDArray[np.int64]]
) -> Part:
    try:
        metrics = task.evaluate(params, x, y) if len(x) else {}
    except SilodpError:
        # All records together were measured; a metric may fail on few of them, for example on one class alone.
        metrics = {}
    # JSON has no NaN; a metric without a value on these records is not shown.
    finite = {key: value for key, value in metrics.items() if np.isfinite(value)}
    return Part(of, name, len(x), _count_persons(users), metrics=finite)


def _count_persons(users: Sequence[NDArray[np.int64]]) -> int:
    """Count the persons of records; one without a number (-1), of no simulated user, is a person of its own."""
    user = np.concatenate(users)
    return len(np.unique(user[user >= 0])) + int((user < 0).sum())


def _calibrate(scores: NDArray[np.float64], labels: NDArray[Any]) -> tuple[CalibrationBin, ...]:
    """Return the predicted probability of class 1 and its share, by steps of the probability."""
    # Clipped, as e^710 is beyond a float.
    probability = 1 / (1 + np.exp(-np.clip(scores, -700, 700)))
    # A probability of 1 belongs to the last step.
    bins = np.minimum((probability * BINS).astype(int), BINS - 1)
    found = []
    for step in range(BINS):
        chosen = bins == step
        if records := int(chosen.sum()):
            share = float(labels[chosen].mean())
            error = compute_error(share, records)
            found.append(CalibrationBin(float(probability[chosen].mean()), share, records, error))
    return tuple(found)


def compute_error(share: float, records: float) -> float:
    """Return the standard error of a share of few records; one of each kind is added, so that it is never 0."""
    # Laplace's rule of succession: ten of ten records are no proof of a share of exactly 1.
    smoothed = (share * records + 1) / (records + 2)
    return float(np.sqrt(smoothed * (1 - smoothed) / (records + 2)))


def keep_held_out(directory: Path, found: HeldOut) -> None:
    """Write DIR/plots/held_out.json, which is private."""
    keep_private(directory, HELD_OUT, asdict(found))


def read_held_out(directory: Path) -> HeldOut | None:
    """Read DIR/plots/held_out.json; None where it is not there.

    Raises:
        SilodpError: it is damaged.
    """
    return read_private(directory, HELD_OUT, HeldOut)
