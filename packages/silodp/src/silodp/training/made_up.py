"""Made-up records, on which models and losses are tried, and costs and paths are chosen.

What breaks a model, or how long it takes, must not depend on anyone's record, so it is tried on these first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from silodp.data.inputs import Input, NamedArrays
from silodp.data.public import UNLABELED, LabelKind, PublicData


def make_up_records(public: PublicData, count: int = 8) -> tuple[Any, NDArray[Any]]:
    """Make up records of a federation by its public facts.

    Args:
        public: The facts.
        count: The number n of records, at least 2.

    Returns:
        x (n, ...) and y (n, ...), see `make_up_inputs` and `make_up_labels`.
    """
    inputs = public.inputs or (Input("", public.record_shape),)
    labels = make_up_labels(public.labels, count, public.classes, public.targets, public.label_shape)
    return make_up_inputs(inputs, count), labels


def make_up_inputs(inputs: Sequence[Input], count: int, magnitude: float = 1.0, seed: int = 0) -> Any:
    """Make up inputs, in every call the same.

    Args:
        inputs: The arrays of a record.
        count: The number n of records.
        magnitude: The standard deviation of numbers; ids are any of the public ones.
        seed: Other seeds give other records.

    Returns:
        One array (n, ...) where its name is "", else `NamedArrays`: normal numbers (float32), or ids (int64), the
        largest of every place among them.
    """
    random = np.random.default_rng(seed)
    arrays = {one.name: _draw(one, count, magnitude, random) for one in inputs}
    return arrays[""] if list(arrays) == [""] else NamedArrays(arrays)


def _draw(one: Input, count: int, magnitude: float, random: np.random.Generator) -> NDArray[Any]:
    shape = (count, *one.shape)
    if one.categories is None:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(magnitude)
    # The largest id is there, so that an embedding with too few rows fails here and not on a record.
    largest = np.broadcast_to(np.asarray(one.categories) - 1, one.shape)
    ids = random.integers(0, largest + 1, shape)
    # At every other place of two records, so that no record consists of one id (such as padding) alone.
    for record in range(min(2, count)):
        ids[record].reshape(-1)[record::2] = largest.reshape(-1)[record::2]
    return ids


def make_up_labels(
    kind: LabelKind,
    count: int,
    classes: int | None = None,
    targets: int | None = None,
    label_shape: tuple[int, ...] = (),
) -> NDArray[Any]:
    """Make up labels of every kind that records may have; neighbors differ.

    Args:
        kind: The kind of the labels.
        count: The number n of records, at least 2.
        classes: The number of classes; the first and the last one are among the labels.
        targets: The number of yes/no labels, or of numbers, where a record has several.
        label_shape: The places of a record that have a class each. One place of the second record has none, and from
            three records on the last record has no label at all.

    Returns:
        y (n, ...): classes (int64), numbers, yes/no labels, or pairs of event and time, the second one censored
        (float32).
    """
    if kind == "survival":
        return np.stack([np.arange(count) != 1, np.arange(count) + 1], axis=1).astype(np.float32)
    if kind == "multilabel":
        return (np.add.outer(np.arange(count), np.arange(targets or 2)) % 2).astype(np.float32)
    if kind == "real":
        numbers = np.linspace(0, 1, count, dtype=np.float32)
        return numbers if targets is None else np.stack([numbers] * targets, axis=1)
    # The first and the last class: a model with too few outputs fails on the last one.
    most = (classes or 2) - 1
    distinct = np.linspace(0, most, min(count, most + 1)).round().astype(np.int64)
    if not label_shape:
        return np.resize(distinct, count)
    # Shifted from record to record: places and neighbors differ.
    shifted = np.add.outer(np.arange(count), np.arange(math.prod(label_shape)))
    found = distinct[shifted % len(distinct)]
    # Of private records nobody knows whether they have such places.
    found[1, -1] = UNLABELED
    if count > 2:
        found[-1] = UNLABELED
    places: NDArray[Any] = found.reshape(count, *label_shape)
    return places


def make_up_inputs_like(array: Tensor) -> Tensor:
    """Make up four inputs of the shape and data type of an array (n, ...): numbers that differ, or ids 0 and 1.

    No value is looked at. A run has public facts and better ones (`make_up_records`); this is for callers
    who have none. Ids are 0 but at the first place: a model may compute lengths from them, and take none of length 0.
    """
    shape = (4, *array.shape[1:])
    if array.is_floating_point():
        return torch.linspace(-1, 1, math.prod(shape), dtype=array.dtype, device=array.device).reshape(shape)
    ids = torch.zeros(shape, dtype=array.dtype, device=array.device)
    ids.view(4, -1)[:, :1] = 1
    return ids


def make_up_labels_like(y: Tensor) -> Tensor:
    """Make up four labels of the shape and data type of y (n, ...): 0 and 1 in turn, or an event and none at time 1.

    Of several places one has no label.
    """
    labels = torch.ones(4, *y.shape[1:], dtype=y.dtype, device=y.device)
    if y.dim() > 1 and y.is_floating_point():
        labels[::2, 0] = 0
    else:
        labels[::2] = 0
        labels.view(4, -1)[0, 1:2] = UNLABELED
    return labels


def repeat_examples(x: Any, *shape: int) -> Any:
    """Return records (*shape, ...), those of x (n, ...) in turn."""
    return x[torch.arange(math.prod(shape)).remainder(len(x)).reshape(shape)]
