"""What methods with a budget per record ask of the records."""

from __future__ import annotations

import math

import numpy as np

from silodp.data.federation import Federation
from silodp.errors import SilodpError, check_real, counted
from silodp.methods.base import LocalContext


def require_record_budgets(name: str, work: LocalContext) -> np.ndarray:
    """(n,) the budgets of a silo's records; refused where there are none."""
    if work.budget is None:
        raise without_budgets(name)
    budgets: np.ndarray = work.budget.numpy()
    return budgets


def without_budgets(name: str) -> SilodpError:
    """What is wrong where budgets are missing."""
    return SilodpError(
        f"{name} needs a privacy budget for every record: none were given.", code="data.budgets"
    )


def check_budget(name: str, value: float) -> None:
    """Refuse a public budget that is none."""
    check_real(name, value)
    if not (math.isfinite(value) and value > 0):
        raise SilodpError(f"{name} = {value}: set a finite ε > 0.", code="argument.value", field=name)


def check_batch(federation: Federation, batch: float) -> None:
    """Refuse a silo with some records, but fewer than a batch.

    The number of records is public where records are the unit: emptied, a record leaves its slot behind.
    """
    for silo in federation.silos:
        if 0 < len(silo) < batch:
            raise SilodpError(
                f"silo '{silo.name}' has {counted(len(silo), 'record')}, fewer than expected_batch_size = {batch:g}: "
                "lower that, or leave the silo out.",
                code="data.too_few_records",
                field="expected_batch_size",
            )


def check_records(name: str, federation: Federation, own_delta: float, delta: float, batch: float) -> None:
    """Refuse records without budgets, a silo with fewer records than a batch, and two different δ."""
    for silo in federation.silos:
        if silo.budget is None:
            raise SilodpError(
                f"{name} needs a privacy budget for every record, and silo '{silo.name}' has none: name the column "
                "(schema: budget = ...), or draw them with Federation.with_budgets.",
                code="data.budgets",
            )
    check_batch(federation, batch)
    if own_delta != delta:
        raise SilodpError(
            f"the run's delta = {delta:g} differs from {name}'s delta = {own_delta:g}: set both to the same value.",
            code="argument.conflict",
            field="delta",
        )
