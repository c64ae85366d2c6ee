"""Copies of losses that share no state, for units that are computed alone.

A module of its own: a configuration may name what is in `silodp.training.losses`, and so must find no builtins there.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from types import CellType, FunctionType, ModuleType
from typing import Any

from silodp.text import describe_exception
from silodp.training.losses import Loss, loss_error


def copy_loss(loss: Loss) -> Loss:
    """Return a loss that shares no state with another one: objects that its function holds are copied, too.

    Raises:
        SilodpError: one of them cannot be copied.
    """
    if loss.is_known:
        return loss
    try:
        return replace(loss, function=_copy_held(loss.function, {}))
    except Exception as error:
        raise loss_error(
            f"the loss '{loss.name}' holds something that cannot be copied ({describe_exception(error)}): let it hold "
            "numbers, tensors and modules only",
            "loss.not_copyable",
        ) from error


def _copy_held(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy; of a function, too, with the variables that it took from where it was defined."""
    if isinstance(value, ModuleType | type):
        return value
    if not isinstance(value, FunctionType):
        return copy.deepcopy(value, memo)
    if id(value) not in memo:
        cells = tuple(CellType() for _ in value.__closure__ or ())
        made = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        memo[id(value)] = made
        for cell, held in zip(cells, value.__closure__ or (), strict=True):
            try:
                content = held.cell_contents
            except ValueError:  # a variable without a value
                continue
            cell.cell_contents = _copy_held(content, memo)
        vars(made).update({name: _copy_held(one, memo) for name, one in vars(value).items()})
        for name in ("__defaults__", "__kwdefaults__", "__module__", "__qualname__"):
            setattr(made, name, copy.deepcopy(getattr(value, name), memo))
    return memo[id(value)]
