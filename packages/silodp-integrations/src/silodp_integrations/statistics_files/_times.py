"""Days and times as statistics packages count them: since 1582 or 1960, in seconds, days, months or weeks."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from silodp.data.tables.sources.source import FaultyCell
from silodp.data.tables.sources.types import mark_outside_years


class Unit(Enum):
    """What a number counts."""

    DAY = "days"
    SECOND = "seconds"
    MILLISECOND = "milliseconds"
    LEAP_MILLISECOND = "milliseconds, those of leap seconds, too"
    WEEK = "weeks, 52 in each year"
    MONTH = "months"
    QUARTER = "quarters of years"
    HALF = "halves of years"
    BUSINESS_DAY = "days of a business calendar, which is not in the file"


class Clock(NamedTuple):
    """How a column counts.

    Attributes:
        unit: What it counts.
        epoch: The day of 0, as in "1960-01-01".
        lacks_leap_days: Whether 4000 and 8000 are no leap years, as in SAS.
    """

    unit: Unit
    epoch: str
    lacks_leap_days: bool = False


_DAY = 86_400_000_000
_MICROSECONDS = {Unit.DAY: _DAY, Unit.SECOND: 1_000_000, Unit.MILLISECOND: 1_000}
_MONTHS = {Unit.MONTH: 1, Unit.QUARTER: 3, Unit.HALF: 6}
_MOST_MONTHS, _MOST_MICROSECONDS = 12 * 12_000, 4e17
"""More than 12,000 years: numbers beyond are out of the range of Python's years, and some of that of integers."""
_LEAPS = (
    "1972-07 1973-01 1974-01 1975-01 1976-01 1977-01 1978-01 1979-01 1980-01 1981-07 1982-07 1983-07 1985-07 1988-01 "
    "1990-01 1991-01 1992-07 1993-07 1994-07 1996-01 1997-07 1999-01 2006-01 2009-01 2012-07 2015-07 2017-01"
)
"""The months that begin after a leap second (IERS, Bulletin C)."""


def read_times(numbers: NDArray[np.float64], clock: Clock) -> pa.Array:
    """Return times of numbers (n,), NaN where a cell is missing; days where all are midnight.

    Raises:
        FaultyCell: A time is outside the years 1 to 9999, or within a leap second.
    """
    is_missing = np.isnan(numbers)
    numbers, unit = np.where(is_missing, 0, numbers), clock.unit
    if unit is Unit.WEEK:
        numbers, unit = np.floor(numbers), Unit.DAY
        numbers = _find_month(numbers // 52 * 12) + 7 * (numbers % 52)
    elif unit in _MONTHS:
        numbers, unit = _find_month(np.floor(numbers) * _MONTHS[unit]), Unit.DAY
    elif unit is Unit.LEAP_MILLISECOND:
        numbers, unit = _subtract_leaps(numbers), Unit.MILLISECOND
    scale = _MICROSECONDS[unit]
    is_far = np.abs(numbers) > _MOST_MICROSECONDS / scale
    numbers = np.where(is_far, 0, numbers)
    # In two parts: microseconds since 1582 have more digits than a floating-point number.
    whole = np.floor(numbers)
    moments = whole.astype(np.int64) * scale + np.rint((numbers - whole) * scale).astype(np.int64)
    epoch = np.datetime64(clock.epoch, "us")
    if clock.lacks_leap_days:
        # Where a leap day would be, their count has the next day already.
        first, second = (np.array(["4000-02-29", "8000-02-29"], "M8[us]") - epoch).astype(np.int64)
        moments = moments + _DAY * (moments >= first) + _DAY * (moments >= second - _DAY)
    moments += epoch.astype(np.int64)
    times = pa.array(moments, mask=is_missing).cast(pa.timestamp("us"))
    outside = is_far | mark_outside_years(pa.chunked_array([times]))
    if outside.any():
        raise FaultyCell(int(np.argmax(outside)), "a time outside the years 1 to 9999")
    # A format that shows days may hide the time of day.
    return times if (moments % _DAY).any() else times.cast(pa.date32())


def _find_month(months: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return days since 1960 of the first days of months since 1960; infinity where they are far from it."""
    is_far = np.abs(months) > _MOST_MONTHS
    counted = np.where(is_far, 0, months).astype(np.int64)
    days = (np.datetime64("1960-01", "M") + counted).astype("M8[D]") - np.datetime64("1960-01-01")
    return np.where(is_far, np.inf, days.astype(np.int64))


def _subtract_leaps(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return milliseconds without those of leap seconds (n,)."""
    ends = (np.array(_LEAPS.split(), "M8[ms]") - np.datetime64("1960-01-01", "ms")).astype(np.int64)
    starts = ends + 1000 * np.arange(len(ends))
    passed = np.searchsorted(starts, numbers, side="right")
    is_inside = (passed > 0) & (numbers < starts[passed - 1] + 1000)
    if is_inside.any():
        raise FaultyCell(int(np.argmax(is_inside)), "a leap second, which no calendar of Python has")
    return numbers - 1000.0 * passed
