"""Files of SPSS, SAS and Stata as sources of tables."""

from __future__ import annotations

import codecs
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from mmap import ACCESS_READ, mmap
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from silodp.data.tables.columns import Reader, text_of
from silodp.data.tables.sources.content import find_other_kind, read_start
from silodp.data.tables.sources.source import Description, FaultyCell, Source, Values, find_ending
from silodp.text import first_line, name_extra
from silodp_integrations.statistics_files._times import Clock, Unit, read_times

_ROWS, _PARTS = 262_144, 16
"""Rows that are read at once, as Python objects: at least so many, and at least this part of all rows, since the rows
before a part are skipped one by one."""
_RENAMED = re.compile(r"column '(.*)' is duplicated, renamed to '(.*)'")
_LOWEST, _HIGHEST = -1.7e308, 1.7e308
_TYPES = {"string": pa.string(), "float": pa.float64(), "double": pa.float64()}


class StatisticsFile(Source):
    """A file of a statistics package.

    A subclass says which formats are days and times, and which write leading zeros.
    """

    column_faults: ClassVar[tuple[str, ...]] = ("data.value",)
    function: ClassVar[str]
    """The function of pyreadstat that reads it."""
    asks_missing: ClassVar[Mapping[str, bool]] = {"user_missing": True}
    """The option by which it lists codes for no value."""
    clocks: ClassVar[Mapping[str, Clock]]
    """Pattern of formats → how columns of these formats count time."""
    zeros: ClassVar[str]
    """Pattern of formats that write leading zeros; its group is the width."""

    def list_columns(self) -> list[str]:
        """Return the names of all columns."""
        return list(self._metadata.column_names)

    def describe_columns(self) -> dict[str, Description]:
        """Return the titles of columns, the names of their values, and their codes for no value."""
        names = self.list_columns()
        return {name: self._describe(name) for name in names if names.count(name) == 1}

    def read_columns(self, names: Sequence[str], key: str | None = None) -> dict[str, Values]:
        """Return columns: declared codes for no value are missing cells, and days and times are such.

        Raises:
            SilodpError: The file is damaged, a time is out of range, or a key may be rounded.
        """
        parts: dict[str, list[pa.Array]] = {name: [] for name in names}
        size, rows, is_more = max(_ROWS, (self._metadata.number_rows or 0) // _PARTS), 0, bool(names)
        while is_more:
            with self._explain():
                cells, _ = self._parse(usecols=list(names), row_offset=rows, row_limit=size)
            count = len(cells[names[0]])
            for name in names:
                type_ = _TYPES.get(self._metadata.readstat_variable_types[name], pa.int64())
                parts[name].append(pa.array(cells.pop(name), type_))
            rows, is_more = rows + count, count == size
        return {
            name: self._convert(name, pa.chunked_array(part), name == key) for name, part in parts.items()
        }

    def _convert(self, name: str, column: pa.ChunkedArray, is_key: bool) -> Values:
        """Return a column as what its format shows."""
        if pa.types.is_string(column.type):
            return column
        try:
            if (clock := self._find_clock(name)) is not None:
                return pa.chunked_array([read_times(_to_floats(column), clock)])
            return self._restore_digits(name, column, is_key)
        except FaultyCell as error:
            remedy = "export the key as text" if is_key else "correct the cell, or leave it empty"
            raise self.refuse_cell(name, error.row, error.what, remedy) from None

    def _find_clock(self, name: str) -> Clock | None:
        format_ = self._get_format(name)
        clock = next((one for form, one in self.clocks.items() if re.fullmatch(form, format_)), None)
        if clock is None or clock.unit is not Unit.BUSINESS_DAY:
            return clock
        reason = f"column {name!r} has the format {format_}: {clock.unit.value}; convert it to days (%td)"
        raise self.refuse(reason, "data.value", name)

    def _restore_digits(self, name: str, column: pa.ChunkedArray, is_key: bool) -> Values:
        """Return a column of numbers; keys, and what is written with leading zeros, as the digits that are shown.

        Raises:
            FaultyCell: A key has decimals, or so many digits that it may be rounded.
        """
        width = self._find_width(name)
        if not is_key and not width:
            return column
        numbers = _to_floats(column)
        is_large = np.abs(numbers) >= 2.0 ** self._count_digits(name)
        if (bad := is_large | (numbers % 1 > 0)).any():
            if not is_key:
                return column
            row = int(np.argmax(bad))
            raise FaultyCell(
                row, "a key so large that it may be rounded" if is_large[row] else "a key with decimals"
            )
        is_missing = np.isnan(numbers)
        whole = pa.array(np.where(is_missing, 0, numbers).astype(np.int64), mask=is_missing)
        if width and not (numbers < 0).any():
            return pa.chunked_array([pc.utf8_lpad(whole.cast(pa.string()), width, "0")])
        return pa.chunked_array([whole])

    def _count_digits(self, name: str) -> int:
        """Return up to how many binary digits every whole number is kept."""
        return 24 if self._metadata.readstat_variable_types[name] == "float" else 53

    def _get_format(self, name: str) -> str:
        return self._metadata.original_variable_types[name] or ""

    def _find_width(self, name: str) -> int:
        """Return how many digits a format writes at least; 0 where it writes no leading zeros."""
        found = re.fullmatch(self.zeros, self._get_format(name))
        return int(found[1]) if found else 0

    def _describe(self, name: str) -> Description:
        found, is_text = self._metadata, self._metadata.readstat_variable_types[name] == "string"
        labels = dict(found.variable_value_labels.get(name, {}))
        missing = []
        for ends in found.missing_ranges.get(name, []):
            low, high = ends["lo"], ends["hi"]
            inside = [code for code in labels if low <= code <= high]
            named = [self._write_named(name, code, labels.pop(code)) for code in inside]
            if low == high:
                missing += named or [self._write(name, low)]
                continue
            first = "lowest" if not is_text and low < _LOWEST else self._write(name, low)
            last = "highest" if not is_text and high > _HIGHEST else self._write(name, high)
            missing += [f"{first} to {last}", *named]
        # Tags such as .a, which SAS and Stata have beside numbers.
        tags = [code for code in labels if not is_text and isinstance(code, str)]
        missing += [self._write_named(name, code, labels.pop(code), ".") for code in tags]
        title = found.column_names_to_labels.get(name) or ""
        return Description(title, {self._write(name, code): text for code, text in labels.items()}, missing)

    def _write(self, name: str, value: Any) -> str:
        """Return the text of a cell that has this code."""
        if isinstance(value, str):
            return text_of(value)
        return text_of(value).zfill(self._find_width(name))

    def _write_named(self, name: str, value: Any, label: str, mark: str = "") -> str:
        return f"{mark}{self._write(name, value)} ({label})"

    @cached_property
    def _metadata(self) -> Any:
        """What the file says of its columns, as pyreadstat gives it."""
        ending = find_ending(self.path)
        if found := find_other_kind(self.path, ending):
            raise self.refuse(f"the name ends in .{ending}, and the file {found}")
        if not self.path.stat().st_size:
            raise self.refuse_empty()
        with self._explain(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            metadata = self._parse(metadataonly=True, **self.asks_missing)[1]
        # A second column of one name is renamed, with a warning.
        pairs = [pair.groups() for one in caught if (pair := _RENAMED.fullmatch(str(one.message)))]
        written = {new: old for old, new in pairs}
        metadata.column_names = [written.get(name, name) for name in metadata.column_names]
        self._check_size(metadata)
        return metadata

    def _check_size(self, metadata: Any) -> None:
        """Raise where the end of the file is lost, and pyreadstat does not see it."""

    def _states_encoding(self) -> bool:
        """Return whether the file states the encoding of its texts, so that the one of text files is not for it."""
        return True

    def _parse(self, **options: Any) -> tuple[dict[str, list[Any]], Any]:
        """Return cells and metadata as pyreadstat gives them, without its days and times."""
        import pyreadstat

        encoding = codecs.lookup(self.reader.encoding).name
        if encoding != Reader.encoding and not self._states_encoding():
            options["encoding"] = encoding
        # Lists take half the time of its arrays.
        found: tuple[dict[str, list[Any]], Any] = getattr(pyreadstat, self.function)(
            str(self.path), disable_datetime_conversion=True, output_format="dict", **options
        )
        return found

    @contextmanager
    def _explain(self) -> Iterator[None]:
        """Turn errors of pyreadstat into one sentence each."""
        ending = find_ending(self.path)
        try:
            yield
        except ImportError:
            remedy = f"{name_extra('statistics-files', __name__)}, or export the table as CSV"
            raise self.refuse(f"reading .{ending} needs pyreadstat; {remedy}", "data.no_reader") from None
        except Exception as error:  # it raises exceptions of several types
            remedy = "export it again"
            if "requested encoding" in str(error):
                remedy = "set data.schema.reader.encoding to the encoding of its texts, for example 'cp1252'"
                remedy = "save it again with texts in UTF-8" if self._states_encoding() else remedy
            raise self.refuse(f"not readable as {ending} ({first_line(error)}); {remedy}") from error


def _to_floats(column: pa.ChunkedArray) -> Any:
    """Return numbers (n,), NaN where a cell is missing."""
    return column.cast(pa.float64()).to_numpy()


class SPSS(StatisticsFile):
    """A file of SPSS. Lengths of time (TIME, DTIME) are numbers, in seconds."""

    function = "read_sav"
    clocks: ClassVar[Mapping[str, Clock]] = {
        r"([AEJS]?DATE|MOYR|QYR|WKYR)\d*": Clock(Unit.SECOND, "1582-10-14"),
        r"(DATETIME|YMDHMS)[\d.]*": Clock(Unit.SECOND, "1582-10-14"),
    }
    zeros = r"N(\d+)(\.0)?"


class PortableSPSS(SPSS):
    """A portable file of SPSS."""

    function = "read_por"
    asks_missing: ClassVar[Mapping[str, bool]] = {}


_SAS_TIMES = (
    "DATETIME|DATEAMPM|MDYAMPM|[BE]8601(DT|DZ|DX|LX)|IS8601(DT|DZ)|TWMDY|NLDATM(AP|DT|L|M|MD|MDL|MDM|MDS|MN|S|TZ|W|WN|"
    "WZ|YM|YML|YMM|YMS|YQ|YR|YW|Z)?"
)
_SAS_DAYS_OF_TIMES = r"DT(DATE|MONYY|WKDATX|YEAR|YYQC)|[BEI]S?8601DN"
_SAS_DAYS = (
    "DATE|DAY|(DDMMYY|MMDDYY|YYMMDD)[BCDNPS]?|DOWNAME|EURDF(DD|DE|DN|DWN|MN|MY|WDX|WKX)|HDATE|HEBDATE|[BE]8601DA|"
    "IS8601DA|JULDAY|JULIAN|MINGUO|(MMYY|YYMM|YYQ|YYQR)[CDNPS]?|MONNAME|MONTH|MONYY|NENGO|NLDATE[A-Z]*|PDJUL[GI]|QTRR?|"
    "WEEKDATE|WEEKDATX|WEEKDAY|WEEK[UVW]|WORDDATE|WORDDATX|XYYMMDD|YEAR|YYMON"
)


class SAS(StatisticsFile):
    """A data set of SAS. Times of a day and lengths of time (TIME) are numbers, in seconds."""

    function = "read_sas7bdat"
    clocks: ClassVar[Mapping[str, Clock]] = {
        rf"({_SAS_TIMES})[\d.]*": Clock(Unit.SECOND, "1960-01-01", lacks_leap_days=True),
        rf"({_SAS_DAYS_OF_TIMES})[\d.]*": Clock(Unit.SECOND, "1960-01-01", lacks_leap_days=True),
        rf"({_SAS_DAYS})[\d.]*": Clock(Unit.DAY, "1960-01-01", lacks_leap_days=True),
    }
    zeros = r"Z(\d+)(\.0?)?"

    def _count_digits(self, name: str) -> int:
        # Numbers of 3 to 7 bytes have lost the last digits of their mantissa.
        return 8 * int(self._metadata.variable_storage_width[name]) - 11


_RECORD, _MEMBER, _OBSERVATIONS = 80, b"HEADER RECORD*******MEMB", b"HEADER RECORD*******OBS"
"""A transport file consists of records of 80 bytes, and these begin a data set and its rows."""


class TransportSAS(SAS):
    """A transport file of SAS (XPORT)."""

    function = "read_xport"
    asks_missing: ClassVar[Mapping[str, bool]] = {}

    def _states_encoding(self) -> bool:
        return False

    def _check_size(self, metadata: Any) -> None:
        length = sum(metadata.variable_storage_width.values())
        with self.path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            if content.find(_MEMBER, content.find(_MEMBER) + 1) >= 0:
                raise self.refuse("the file has several data sets, of which one is a table; export it alone")
            start = content.find(_OBSERVATIONS) + _RECORD
            rest = content[len(content) - (len(content) - start) % length :]
            # The format has no number of rows: only blanks fill the last record.
            if len(content) % _RECORD or len(rest) >= _RECORD or rest.strip(b" "):
                raise self.refuse("the file ends within a row, so its end is lost; export it again")


class Stata(StatisticsFile):
    """A file of Stata. Of a week, month, quarter or half of a year it gives the first day; a year (%ty) is a number."""

    function = "read_dta"
    clocks: ClassVar[Mapping[str, Clock]] = {
        r"%-?t?d.*": Clock(Unit.DAY, "1960-01-01"),
        r"%-?tc.*": Clock(Unit.MILLISECOND, "1960-01-01"),
        r"%-?tC.*": Clock(Unit.LEAP_MILLISECOND, "1960-01-01"),
        r"%-?tw.*": Clock(Unit.WEEK, "1960-01-01"),
        r"%-?tm.*": Clock(Unit.MONTH, "1960-01-01"),
        r"%-?tq.*": Clock(Unit.QUARTER, "1960-01-01"),
        r"%-?th.*": Clock(Unit.HALF, "1960-01-01"),
        r"%-?tb.*": Clock(Unit.BUSINESS_DAY, "1960-01-01"),
    }
    zeros = r"%0(\d+)\.0[fg]c?"

    def _states_encoding(self) -> bool:
        start = b"<stata_dta><header><release>"
        return read_start(self.path).startswith((start + b"118", start + b"119"))
