"""Made-up records, on which costs, paths and traces of a task are chosen: never on a record of somebody."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from silodp.data.public import UNLABELED


def make_up_inputs(array: Tensor) -> Tensor:
    """Make up four inputs of the shape and data type of an array (n, ...): numbers that differ, or ids 0 and 1.

    No value is looked at. A run has public facts and better ones (`PublicData.synthetic_batch`); this is for callers
    who have none. Ids are 0 but at the first place: a model may compute lengths from them, and take none of length 0.
    """
    shape = (4, *array.shape[1:])
    if array.is_floating_point():
        return torch.linspace(-1, 1, math.prod(shape), dtype=array.dtype, device=array.device).reshape(shape)
    ids = torch.zeros(shape, dtype=array.dtype, device=array.device)
    ids.view(4, -1)[:, :1] = 1
    return ids


def make_up_labels(y: Tensor) -> Tensor:
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
