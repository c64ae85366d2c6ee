"""One column of a table as its distinct cells, and the refusals of a table.

Rules look at distinct cells, never at rows: most columns have few different texts, and a table of millions of rows is
then read in seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from silodp.data.identity.spellings import MISSING
from silodp.data.tables._text import AS_TRAINED, shorten_whole
from silodp.data.tables._values import CellError, Distinct, LazyTexts, Strings, find_distinct, parse_numbers
from silodp.data.tables.columns import Reader, text_of
from silodp.data.tables.sources.source import Source, Values
from silodp.errors import SilodpError
from silodp.text import pluralize

_log = logging.getLogger(__name__)

_MAX_FAULTS = 20
"""The most faults that a message lists."""


@dataclass
class Refusals:
    """What is refused in one table: raised at once, or collected into one error.

    Attributes:
        path: the path of the file.
        is_fixed: whether the schema is that of a trained model, so that only the table can be corrected.
    """

    path: Path
    is_fixed: bool = False
    _faults: list[SilodpError] | None = field(default=None, init=False, repr=False)
    _faulty_rows: dict[str, NDArray[np.bool_]] = field(default_factory=dict, init=False, repr=False)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Raise what is refused inside as one error at the end; what is computed from refused cells has no meaning.

        Raises:
            SilodpError: a cell was refused; code and field are those of the first fault.
        """
        self._faults, self._faulty_rows = [], {}
        try:
            # Refused cells go on through the arithmetic, so that the faults of later columns are found as well.
            with np.errstate(over="ignore", invalid="ignore"):
                yield
        except Exception as error:
            if not self._faults:
                raise
            if isinstance(error, SilodpError):  # others may follow from cells that are refused
                self._faults.append(error)
        finally:
            found, self._faults = self._faults, None
        if found:
            raise join_faults(self.path, found)

    def refuse(self, cells: Cells, bad: NDArray[np.bool_], why: str, remedy: str) -> None:
        """Raise for the bad rows (n,) of a column, or note them; a row is reported once for each column."""
        known = self._faulty_rows.get(cells.column, np.zeros_like(bad))
        rows = bad if self._faults is None else bad & ~known
        if not rows.any():
            return
        row, others = int(np.argmax(rows)), int(rows.sum()) - 1
        more = f" (wrong in {pluralize(others, 'other row')}, too)" if others else ""
        shown = short(cells.texts[cells.place(row)])
        fault = SilodpError(
            f"{self.path}: column {cells.name!r} is {shown} in data row {row + 1}{more}, which {why}; {remedy}",
            code="data.value",
            field=cells.column,
        )
        if self._faults is None:
            raise fault
        self._faults.append(fault)
        self._faulty_rows[cells.column] = bad | known

    def has_refused(self, column: str) -> bool:
        """Return whether a row of a column was noted."""
        return column in self._faulty_rows


def join_faults(path: Path, faults: list[SilodpError]) -> SilodpError:
    """Return one error about the first faults of a table."""
    if len(faults) == 1:
        return faults[0]
    # The path stands once, before the list.
    shown = [str(fault).removeprefix(f"{path}: ") for fault in faults[:_MAX_FAULTS]]
    listed = "; ".join(f"({number}) {text}" for number, text in enumerate(shown, start=1))
    more = f"; and {len(faults) - len(shown):,} more" if len(faults) > len(shown) else ""
    return SilodpError(
        f"{path}: {len(faults):,} faults: {listed}{more}", code=faults[0].code, field=faults[0].field
    )


@dataclass(frozen=True, eq=False)
class Cells:
    """The distinct cells of one column, and which row has which.

    A rule computes something for each distinct cell, (d,) or (d, k), and `expand` gives it to the rows. In a column
    whose cells are all numbers every row has a cell of its own, since most numbers are different anyway.

    Attributes:
        column: the name of the column in the schema.
        name: its name in the table.
        texts: (d,) the distinct cells as text, stripped and in Unicode's form NFC; "" where a cell is empty.
        is_text, is_date: (d,) bool, whether a cell is a text or a date in the file; in a text file all are texts. A
            text and a date of one spelling are two distinct cells.
        rows: (n,) int, the position of each row's cell in `texts`; None where every row has its own.
        source: where the table lies.
        refusals: what is refused in this table.
        role: what the column is for; "number" is a time or a budget.
        is_number: whether a listed missing code also counts where it is written as another spelling of the number.
        out_of_range: what is done with a number outside its public range.
        numbers: (d,) the numbers of the cells, NaN where one is missing; None where they stand in `texts` alone.
    """

    column: str
    name: str
    texts: Strings | LazyTexts = field(repr=False)
    is_text: NDArray[np.bool_] = field(repr=False)
    is_date: NDArray[np.bool_] = field(repr=False)
    rows: NDArray[Any] | None = field(repr=False)
    source: Source = field(repr=False)
    refusals: Refusals
    role: Literal["feature", "label", "number", "other"] = "other"
    is_number: bool = False
    out_of_range: Literal["refuse", "clip"] = "refuse"
    numbers: NDArray[np.float64] | None = field(default=None, repr=False)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.refusals.path

    @cached_property
    def reader(self) -> Reader:
        """How the column is written."""
        return self.source.reader.narrow(self.column)

    @property
    def in_text_file(self) -> bool:
        """Whether all cells are text, of which the reader knows the decimal mark."""
        return self.source.is_text

    @property
    def in_workbook(self) -> bool:
        """Whether the cells are those of a spreadsheet program."""
        return self.source.rounds_numbers

    @property
    def size(self) -> int:
        """The number n of rows."""
        return len(self.texts if self.rows is None else self.rows)

    def place(self, row: int) -> int:
        """Return the position in `texts` of a row's cell."""
        return row if self.rows is None else int(self.rows[row])

    def expand(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values of the distinct cells, (d, ...), as values of the rows, (n, ...)."""
        return values if self.rows is None else values[self.rows]

    def map(self, function: Callable[[str], Any], kind: type) -> NDArray[Any]:
        """Return (d,) results of a function of each text."""
        return np.array([function(text) for text in self.texts], dtype=kind)

    def mark(self, test: Callable[[str], object]) -> NDArray[np.bool_]:
        """Return (d,) bool, True where a test holds for the text."""
        return self.map(lambda text: bool(test(text)), bool)

    def refuse(self, bad: NDArray[np.bool_], why: str, remedy: str) -> None:
        """Refuse the rows of bad cells (d,).

        Args:
            bad: which distinct cells are refused.
            why: what is wrong with them, as the end of "... is 'x' in data row 3, which".
            remedy: what to do.

        Raises:
            SilodpError: a row has such a cell (code data.value), at once or when all faults are collected.
        """
        if bad.any():
            self.refusals.refuse(self, self.expand(bad), why, remedy)

    @property
    def is_refused(self) -> bool:
        """Whether a row was refused, so that what is computed has no meaning."""
        return self.refusals.has_refused(self.column)

    def advise(self, remedy: str, fixed: str = AS_TRAINED) -> str:
        """Return a remedy that changes the schema, or `fixed` where a trained model fixes the schema."""
        return fixed if self.refusals.is_fixed else remedy

    def find_first(self, bad: NDArray[np.bool_]) -> int:
        """Return the position in `texts` of the cell of the first row that has one of the bad cells (d,)."""
        return self.place(int(np.argmax(self.expand(bad))))

    @cached_property
    def is_missing(self) -> NDArray[np.bool_]:
        """(d,) bool, True where a cell stands for no value: by its text, in columns of numbers by its number."""
        found = np.isnan(self.numbers) if self.numbers is not None else self.mark(mark_missing(self.reader))
        if self.reader.missing and self.is_number:
            # As numbers, too: a listed -9 may be written -9.0 or, with a decimal comma, -9,00.
            found |= np.isin(self._parse(), list_missing_numbers(self.reader))
        if found.all() and self.role == "feature":
            _log.warning(
                "%s: column %r has no value in any row: a model cannot learn from it", self.path, self.column
            )
        return found

    def parse_numbers(self) -> NDArray[np.float64]:
        """Return (d,) numbers, NaN where a cell is missing or no number."""
        values = self._parse()
        # Also where a number such as -9 is declared to stand for no value.
        values[self.is_missing] = np.nan
        return values

    def _parse(self) -> NDArray[np.float64]:
        """Return (d,) numbers, those of text by the decimal mark of the file, NaN where the text is no number."""
        if self.numbers is not None:
            return self.numbers.copy()
        texts = np.asarray(self.texts)
        values = parse_numbers(texts, ".")
        if self.reader.decimal != ".":  # in a workbook some cells may be numbers, and some text
            values[self.is_text] = parse_numbers(texts[self.is_text], self.reader.decimal)
        return values


def mark_missing(reader: Reader) -> Callable[[str], bool]:
    """Return the test whether a text stands for no value in a file."""
    listed = {shorten_whole(text_of(text), reader).lower() for text in reader.missing}
    texts = MISSING | listed
    return lambda text: shorten_whole(text, reader).lower() in texts


def list_missing_numbers(reader: Reader) -> NDArray[np.float64]:
    """Return the numbers that stand for no value in a file; NaN for a text that is none."""
    # With a decimal comma, too, "9.0" is the text 9.
    listed = [form for text in reader.missing for form in (text.strip(), text_of(text))]
    return parse_numbers(np.array(listed, dtype=object), reader.decimal)


def find_distinct_cells(source: Source, name: str, values: Values, decimal: str = "") -> Distinct:
    """Return the distinct cells of a column, by the decimal mark of the reader unless another one is given.

    Raises:
        SilodpError: a cell is no text, number, date or truth value.
    """
    try:
        return find_distinct(values, decimal or source.reader.decimal)
    except CellError as error:
        raise source.refuse(f"column '{name}' {error}", "data.value", name) from None
