"""Everything that a run refuses, found out for every method of a comparison before the first of them trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from silodp.data.federation import Federation
from silodp.errors import SilodpError
from silodp.methods import Method
from silodp.runtime.train import MetricsRow, train
from silodp.training.task import Task


class _Ready(Exception):
    """`train` has accepted everything and measured the untrained model; no silo has been asked for anything."""


def rehearse(
    label: str, federation: Federation, task: Task, method: Method, settings: Mapping[str, Any]
) -> None:
    """Go with `train` as far as its first row, which comes before any training; budgets are fitted by then.

    settings: the keyword arguments that the run will get; nothing is written.

    Raises:
        SilodpError: what the run would refuse; the sentence begins with the method's `label`.
    """

    def stop(row: MetricsRow) -> None:
        raise _Ready

    try:
        train(federation, task, method, **settings, on_round=stop)
    except _Ready:
        pass
    except SilodpError as error:
        raise SilodpError(f"method '{label}': {error}", code=error.code, field=error.field) from None
