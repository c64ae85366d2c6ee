"""Days and times of SPSS, SAS and Stata, beside values computed by hand, by Python's calendar and by pandas."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from support.refusals import refused
from support.statistics_files import Write, open_file, read, read_one

DAYS = [
    date(1582, 10, 15),
    date(1899, 12, 31),
    date(1960, 1, 1),
    date(2000, 2, 29),
    date(2300, 3, 1),
    date(9999, 12, 31),
]
SAS = ["xpt", "sas7bdat"]
SINCE_1582, SINCE_1960 = date(1582, 10, 14), date(1960, 1, 1)


def count_days(days: list[date], since: date) -> list[float | None]:
    """Return days since a day, and at the end none."""
    return [*(float((day - since).days) for day in days), None]


def count_sas_days(days: list[date]) -> list[float | None]:
    """Return days as SAS counts them, for which 4000 and 8000 are no leap years, and at the end none."""
    lacking = [(day >= date(4000, 2, 29)) + (day >= date(8000, 2, 29)) for day in days]
    found = count_days(days, SINCE_1960)
    return [
        *(number - skipped for number, skipped in zip(found, lacking, strict=False) if number is not None),
        None,
    ]


@pytest.mark.parametrize(
    "form", ["DATE11", "ADATE10", "EDATE10", "JDATE7", "SDATE10", "MOYR8", "QYR8", "WKYR10"]
)
def test_days_of_spss(form: str, write: Write) -> None:
    seconds = [day and day * 86_400 for day in count_days(DAYS, SINCE_1582)]
    assert read_one(write("sav", {"D": seconds}, {"D": form})) == [*DAYS, None]
    assert read_one(write("por", {"D": seconds}, {"D": form})) == [*DAYS, None]


def test_a_time_in_a_column_of_days_is_not_lost(write: Write) -> None:
    """The package shows the day alone."""
    found = read_one(write("sav", {"D": [86_400.0 * 200_000, 86_400.0 * 200_000 + 60]}, {"D": "DATE11"}))
    assert found == [datetime(2130, 5, 14), datetime(2130, 5, 14, 0, 1)]
    assert read_one(write("dta", {"d": [1.0, 1.5]}, {"d": "%td"})) == [
        datetime(1960, 1, 2),
        datetime(1960, 1, 2, 12),
    ]


@pytest.mark.parametrize("form", ["DATETIME20", "YMDHMS19"])
def test_times_of_spss(form: str, write: Write) -> None:
    """At 2000, numbers of seconds since 1582 are two millionths apart, and their millionths no whole numbers."""
    times = [
        datetime(1582, 10, 15),
        datetime(2000, 2, 29, 23, 59, 59, 500_000),
        datetime(9999, 12, 31, 23, 59, 59),
    ]
    seconds = [(time - datetime(1582, 10, 14)) / timedelta(seconds=1) for time in times]
    assert read_one(write("sav", {"D": [*seconds, None]}, {"D": form})) == [*times, None]
    number = 13_167_446_399.7
    (found,) = read_one(write("sav", {"D": [number]}, {"D": form}))
    exact = datetime(1582, 10, 14) + timedelta(seconds=int(number), microseconds=round(number % 1 * 1e6))
    assert found == exact


@pytest.mark.parametrize("form", ["TIME8", "DTIME12", "WKDAY3", "MONTH3", "F8.2"])
def test_lengths_of_time_of_spss_are_numbers(form: str, write: Write) -> None:
    assert read_one(write("sav", {"D": [7.0, 90_061.5]}, {"D": form})) == [7, 90_061.5]


@pytest.mark.parametrize("ending", SAS)
@pytest.mark.parametrize(
    "form",
    ["DATE9", "DDMMYY10", "DDMMYYP8", "MMDDYY10", "YYMMDD10", "YYMMDDN8", "MONYY7", "MMYY7", "YYMM7", "YYMON7", "YYQ6",
     "YYQR8", "YEAR4", "MONTH2", "DAY2", "QTR1", "WEEKDATE29", "WEEKDATX29", "WEEKV5", "WORDDATE18", "WORDDATX18",
     "JULIAN7", "JULDAY3", "E8601DA10", "B8601DA8", "IS8601DA10", "NLDATE20", "EURDFDD8", "DOWNAME9"],
)  # fmt: skip
def test_days_of_sas(form: str, ending: str, write: Write) -> None:
    """SAS has no 29 February in 4000 and 8000; pyreadstat and pandas give 29 December for the last day of 9999."""
    days = [*DAYS[:-1], date(4000, 2, 28), date(4000, 3, 1), date(8000, 2, 28), date(8000, 3, 1), DAYS[-1]]
    numbers = count_sas_days(days)
    assert numbers[-2] == 2_936_547  # '31DEC9999'd
    if ending == "sas7bdat" and form not in ("DATE9", "YEAR4"):
        numbers = numbers[-2:]  # the same formats, once
    assert read_one(write(ending, {"D": numbers}, {"D": form})) == [*days, None][-len(numbers) :]


@pytest.mark.parametrize("ending", SAS)
def test_times_of_sas(ending: str, write: Write) -> None:
    times = [
        datetime(1582, 10, 15),
        datetime(2000, 2, 29, 23, 59, 59, 500_000),
        datetime(4000, 3, 1),
        datetime(9999, 12, 31),
    ]
    numbers = [-11_903_673_600.0, 1_267_487_999.5, 64_381_305_600.0, 253_717_660_800.0]
    for form in ("DATETIME20", "E8601DT19", "NLDATM30", "DATEAMPM22", "B8601DT15"):
        assert read_one(write(ending, {"D": [*numbers, None]}, {"D": form})) == [*times, None]
    # They show the day of a time. Read as days, 600 seconds would be 600 days.
    for form in ("DTDATE9", "DTMONYY7", "DTYEAR4", "E8601DN10", "B8601DN8"):
        assert read_one(write(ending, {"D": [0.0, 86_400.0]}, {"D": form})) == [
            date(1960, 1, 1),
            date(1960, 1, 2),
        ]
        assert read_one(write(ending, {"D": [600.0]}, {"D": form})) == [datetime(1960, 1, 1, 0, 10)]


@pytest.mark.parametrize("form", ["TIME8", "HHMM5", "TOD8", "MMSS5", "BEST12", "DATER5", "MYDATE", "F8.2"])
def test_times_of_a_day_and_other_numbers_of_sas_are_numbers(form: str, write: Write) -> None:
    assert read_one(write("xpt", {"D": [1.0, 3600.5]}, {"D": form})) == [1, 3600.5]


@pytest.mark.parametrize("form", ["%td", "%d", "%-td", "%tdCCYY-NN-DD", "%tdD_m_Y", "%dD_m_Y"])
def test_days_of_stata(form: str, write: Write) -> None:
    days = [date(100, 1, 1), *DAYS]
    assert read_one(write("dta", {"d": count_days(days, SINCE_1960)}, {"d": form})) == [*days, None]


@pytest.mark.parametrize("form", ["%tc", "%tcDDmonCCYY_HH:MM:SS", "%tcHH:MM", "%-tc"])
def test_times_of_stata(form: str, write: Write) -> None:
    times = [
        datetime(100, 1, 1),
        datetime(1959, 12, 31, 23, 59, 59, 1000),
        datetime(9999, 12, 31, 23, 59, 59, 999_000),
    ]
    numbers = [(time - datetime(1960, 1, 1)) / timedelta(milliseconds=1) for time in times]
    assert read_one(write("dta", {"d": [*numbers, None]}, {"d": form})) == [*times, None]


@pytest.mark.parametrize("code", ["tw", "tm", "tq", "th"])
def test_periods_of_stata_are_their_first_days(code: str, tmp_path: Path) -> None:
    """As numbers, 240 would stand for January 1980. The file is written by pandas, by its own arithmetic."""
    months = {"tw": [1], "tm": range(1, 13), "tq": (1, 4, 7, 10), "th": (1, 7)}[code]
    days = [
        datetime(year, month, 1) for year in (1678, 1899, 1959, 1960, 1980, 2000, 2261) for month in months
    ]
    if code == "tw":  # 52 weeks in each year, of which the last one is longer
        days = [day + timedelta(weeks=week) for day in days for week in (0, 1, 30, 51)]
    path = tmp_path / "north.dta"
    pd.DataFrame({"d": pd.Series(days)}).to_stata(path, convert_dates={"d": code}, write_index=False)
    assert read_one(path) == [day.date() for day in days]


def test_first_and_last_periods_of_stata(write: Write) -> None:
    columns = {
        "w": [240.0, 51.5, -1.0],
        "m": [240.0, 96_479.0, -1.0],
        "q": [80.0, 0.0, -1.0],
        "h": [40.0, 0.5, -1.0],
    }
    found = read(write("dta", columns, {name: f"%t{name}" for name in columns}))
    assert found["w"] == [date(1964, 8, 12), date(1960, 12, 23), date(1959, 12, 24)]
    assert found["m"] == [date(1980, 1, 1), date(9999, 12, 1), date(1959, 12, 1)]
    assert found["q"] == [date(1980, 1, 1), date(1960, 1, 1), date(1959, 10, 1)]
    assert found["h"] == [date(1980, 1, 1), date(1960, 1, 1), date(1959, 7, 1)]


def test_years_of_stata_are_numbers_and_business_days_are_refused(write: Write) -> None:
    path = write("dta", {"y": [1980.0, 2024.0], "b": [1.0, 2.0]}, {"y": "%ty", "b": "%tbnyse"})
    source = open_file(path)
    assert source.read_columns(["y"])["y"].to_pylist() == [1980, 2024]
    with refused("data.value") as caught:
        read(path)
    assert caught.value.field == "b"
    assert list(source.read_readable(["b", "y"])) == ["y"]


def test_leap_seconds_of_stata_are_subtracted(write: Write) -> None:
    """%tC counts 27 leap seconds, of which pandas and pyreadstat make 27 seconds of the next days."""
    times = [
        datetime(1960, 1, 1),
        datetime(1972, 6, 30, 23, 59, 59, 999_000),
        datetime(1972, 7, 1),
        datetime(1990, 1, 1),
    ]
    times += [datetime(2016, 12, 31, 23, 59, 59), datetime(2017, 1, 1), datetime(2024, 5, 6, 7, 8, 9)]
    leaps = [0, 0, 1, 15, 26, 27, 27]
    numbers = [
        (time - datetime(1960, 1, 1)) / timedelta(milliseconds=1) + 1000 * leap
        for time, leap in zip(times, leaps, strict=True)
    ]
    assert read_one(write("dta", {"d": [*numbers, None]}, {"d": "%tC"})) == [*times, None]
    for offset in (1000, 1):  # 23:59:60.000 and 23:59:60.999
        path = write("dta", {"d": [0.0, None, numbers[2] - offset]}, {"d": "%tC"})
        with refused("data.value") as caught:
            read_one(path)
        assert "data row 3 " in str(caught.value)


@pytest.mark.parametrize(
    ("ending", "form", "largest"),
    [
        ("sav", "DATE11", 265_621_680_000.0),
        ("sav", "DATETIME20", 265_621_680_000.0),
        ("xpt", "DATE9", 2_936_548.0),
        ("xpt", "DATETIME20", 253_717_747_200.0),
        ("dta", "%td", 2_936_550.0),
        ("dta", "%tc", 253_717_920_000_000.0),
        ("dta", "%tm", 96_480.0),
        ("dta", "%tw", 418_080.0),
    ],
)
def test_times_outside_the_years_of_python_are_refused(
    ending: str, form: str, largest: float, write: Write
) -> None:
    name = "d" if ending == "dta" else "D"
    for number in (largest, 1e15, 1e300, -1e300, -1e14):
        path = write(ending, {name: [1.0, None, number]}, {name: form})
        with refused("data.value") as caught:
            read_one(path)
        assert caught.value.field == name
        assert "data row 3 " in str(caught.value)
    assert read_one(write(ending, {name: [np.nextafter(largest, 0) // 1 - 1]}, {name: form}))[0].year == 9999


def test_days_are_no_keys(write: Write) -> None:
    """They arrive as days, which the rules for keys refuse."""
    assert read_one(write("dta", {"d": [1.0]}, {"d": "%td"}), "d") == [date(1960, 1, 2)]
