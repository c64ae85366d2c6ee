"""What a schema declares about one column: public constants, never values computed from rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silodp.data.silo_data import scale_to_range
from silodp.errors import SilodpError, shorten, suggest_name

MOST_SPREADS = 1e6
"""The widest range, in spreads: beyond it a scaled value is not a number that a model can be trained on."""


@dataclass(frozen=True)
class NumericColumn:
    """The public constants by which a numeric column is scaled.

    Attributes:
        range: (low, high); values outside are refused or clipped, as the schema says.
        typical: (center, spread) of ordinary values, in the units of the column. Values become (value − center)/spread.
            Without it the range is mapped to [-1, 1].
    """

    range: tuple[float, float]
    typical: tuple[float, float] | None = None

    def scale(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Clip values to the range and scale them by the public constants; same shape, float32."""
        if self.typical is None:
            return scale_to_range(values, *self.range)
        center, spread = self.typical
        return np.asarray((np.clip(values, *self.range) - center) / spread, dtype=np.float32)


def read_numeric(column: str, declared: Any) -> NumericColumn:
    """Return the column of a pair (low, high) or of a table {range, typical}.

    Args:
        column: its name, for messages.
        declared: the pair or table, or the column itself.

    Raises:
        SilodpError: a wrong type, or constants that do not fit each other.
    """
    where = f"numeric column {column!r}"
    if isinstance(declared, NumericColumn):
        found = declared
    elif isinstance(declared, Mapping):
        known = [field.name for field in fields(NumericColumn)]
        for name in declared:
            if name not in known:
                remedy = suggest_name(str(name), known) or f"use {', '.join(known)}."
                raise _refuse(f"{where} has no setting {shorten(name)}: {remedy}", "data.schema", "numeric")
        found = NumericColumn(**{"range": None, **declared})
    else:
        found = NumericColumn(declared)
    if not _is_pair(found.range) or not found.range[0] < found.range[1]:
        raise _refuse(
            f"{where} has range {found.range!r}; give finite (low, high), low < high",
            "data.schema",
            "numeric",
        )
    if found.typical is not None:
        _check_typical(where, found.range, found.typical)
    return found


def _check_typical(where: str, bounds: tuple[float, float], typical: tuple[float, float]) -> None:
    if not _is_pair(typical) or not typical[1] > 0:
        raise _refuse(
            f"{where} has typical {typical!r}; give finite (center, spread), spread > 0",
            "data.schema",
            "numeric",
        )
    (low, high), (center, spread) = bounds, typical
    if not low <= center <= high:
        raise _refuse(
            f"{where} has the typical center {center:g}, outside its range {low:g}..{high:g}; correct one of them",
            "data.schema",
            "numeric",
        )
    if (high - low) / spread > MOST_SPREADS:
        raise _refuse(
            f"{where} has the typical spread {spread:g}, less than a millionth of its range {low:g}..{high:g}; give "
            "both in the same units",
            "data.schema",
            "numeric",
        )


def _refuse(message: str, code: str, section: str) -> SilodpError:
    return SilodpError(f"schema: {message}", code=code, field=f"data.schema.{section}")


def _is_pair(values: Any) -> bool:
    is_pair = isinstance(values, Sequence | np.ndarray) and len(values) == 2
    return is_pair and all(isinstance(value, Real) for value in values) and bool(np.isfinite(values).all())
