"""Types of Arrow that sources and rules ask for."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_DAY = 86_400
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799
"""The years 1 to 9999, in seconds since 1970."""
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def is_text(kind: pa.DataType) -> bool:
    """Return whether cells of a type are texts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def count_seconds(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return seconds since 1970 of days and times, by UTC where they have a zone; 0 where a cell is missing."""
    kind = column.type
    is_day = pa.types.is_date32(kind)
    numbers: NDArray[np.int64] = column.cast(pa.int32() if is_day else pa.int64()).fill_null(0).to_numpy()
    return numbers.astype(np.int64) * _DAY if is_day else numbers // _PER_SECOND[getattr(kind, "unit", "ms")]


def mark_outside_years(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Return (n,) bool, True for days and times outside the years of Python, 1 to 9999."""
    seconds = count_seconds(column)
    return np.asarray((seconds < _FIRST_SECOND) | (seconds > _LAST_SECOND))
