"""Where one silo's table lies: a source gives columns with their types, and no rule looks at a cell before that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from numpy.typing import NDArray

from silodp._lazy import Registry
from silodp.data.tables.columns import Reader
from silodp.errors import SilodpError
from silodp.plugins import find_plugin
from silodp.text import first_line

if TYPE_CHECKING:
    import pyarrow as pa

Values: TypeAlias = "pa.ChunkedArray | NDArray[Any]"
"""One column, (n,): of Arrow, or an object array where the cells have several types, as in a workbook."""


@dataclass(frozen=True)
class Description:
    """What a file says of a column beside its cells: for people who agree on a schema, and without effect on cells.

    Attributes:
        title: what the column is.
        labels: text of a cell → what it stands for.
        missing: codes that stand for no value, such as "99 (refused)"; their cells are missing already.
    """

    title: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()


class FaultyCell(Exception):
    """A cell that cannot be given as it is.

    Args:
        row: The number of its row in the column, from 0.
        what: What it is, as the end of "column 'x' has in data row 3".
    """

    def __init__(self, row: int, what: str) -> None:
        super().__init__(what)
        self.row, self.what = row, what


class Source(ABC):
    """One table. A subclass reads one kind of file; its entry point in "silodp.table_sources" is the file's ending.

    It gives what is there, and changes nothing: which text stands for no value, which number is out of range and which
    key names nobody is decided by the rules, for all sources alike. What would change a value on its way (a driver that
    rounds, a time out of range) is refused here.

    Args:
        path: The file; for a database, the private file that says how to connect.
        reader: How the cells are written.
        query: The query whose result is the table, for databases; None for all others.
    """

    is_text: ClassVar[bool] = False
    """Whether numbers are text with the decimal mark of the reader."""
    column_faults: ClassVar[tuple[str, ...]] = ()
    """Codes of the errors of `read_columns` that are about one column, so that others can be read."""
    rounds_numbers: ClassVar[bool] = False
    """Whether a spreadsheet program has written the cells: numbers then have 15 digits, and days before March 1900 are
    not the same in all of them."""

    takes_query: ClassVar[bool] = False
    """Whether the table is the result of a query."""

    def __init__(self, path: Path, reader: Reader, query: str | None = None) -> None:
        self.path, self.reader, self.query = path, reader, query

    @abstractmethod
    def list_columns(self) -> list[str]:
        """Return the names of all columns as they are written there, in their order.

        Raises:
            SilodpError: It cannot be read.
        """

    @abstractmethod
    def read_columns(self, names: Sequence[str], key: str | None = None) -> Mapping[str, Values]:
        """Return columns, and look at no other one.

        Args:
            names: Names that stand once each in `list_columns`.
            key: The one of them that names the person. A source that may change keys, as databases do, asks for it as
                text.

        Returns:
            The columns (n,) by these names, the rows of all in the same order, and in the same one at every call.

        Raises:
            SilodpError: One cannot be read.
        """

    def describe_columns(self) -> Mapping[str, Description]:
        """Return what the file says of columns, by the names in `list_columns`; most kinds of files say nothing."""
        return {}

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Raise errors of parsers, which are of any type where a file is damaged, as one sentence about the table."""
        try:
            yield
        except (SilodpError, PermissionError):
            raise
        except Exception as error:
            reason = f"not readable as {find_ending(self.path)} ({first_line(error)}); export it again"
            raise self.refuse(reason) from error

    def check_names(self, found: Sequence[str]) -> None:  # noqa: B027  most sources have nothing to check
        """Raise where the table cannot be read as it is meant, which is why a column seems to be missing.

        Args:
            found: The names of the columns that are there.
        """

    def read_readable(self, names: Sequence[str], key: str | None = None) -> Mapping[str, Values]:
        """Return `read_columns`, without the columns that have a fault of `column_faults`."""
        try:
            return self.read_columns(names, key)
        except SilodpError as error:
            if error.code not in self.column_faults:
                raise
        found = dict[str, Values]()
        for name in names:
            with suppress(SilodpError):
                found.update(self.read_columns([name], key if name == key else None))
        return found

    def refuse(self, reason: str, code: str = "data.unreadable", field: str = "data.files") -> SilodpError:
        """Return, for the caller to raise, the error about this table."""
        return SilodpError(f"{self.path}: {reason}", code=code, field=field)

    def refuse_cell(self, column: str, row: int, what: str, remedy: str) -> SilodpError:
        """Return, for the caller to raise, the error about a cell; `row` is counted from 0."""
        return self.refuse(
            f"column {column!r} has in data row {row + 1} {what}; {remedy}", "data.value", column
        )

    def refuse_empty(self) -> SilodpError:
        """Return, for the caller to raise, the error about a table without a header."""
        return self.refuse("the file is empty; export the silo's table again", "data.no_records")


SOURCES: Registry[type[Source]] = Registry(
    "table_sources",
    {
        "csv": "silodp.data.tables.sources.delimited:DelimitedText",
        "tsv": "silodp.data.tables.sources.delimited:DelimitedText",
        "csv.gz": "silodp.data.tables.sources.delimited:DelimitedText",
        "tsv.gz": "silodp.data.tables.sources.delimited:DelimitedText",
        "parquet": "silodp.data.tables.sources.parquet:Parquet",
        "xlsx": "silodp.data.tables.sources.workbook:Workbook",
    },
)
"""The kinds of tables, by the ending of the file's name."""


def find_ending(path: Path) -> str:
    """Return the ending of a file's name, in lower case and without the dot; "" where no source has it."""
    name = path.name.lower()
    fitting = [ending for ending in (*SOURCES, *SOURCES.references) if name.endswith(f".{ending}")]
    return max(fitting, key=len, default="")


def open_source(path: Path, reader: Reader | None = None, query: str | None = None) -> Source:
    """Return the source of a table.

    Args:
        path: The file.
        reader: How the cells are written; None takes the defaults.
        query: The query whose result is the table, for databases.

    Raises:
        SilodpError: There is no such file, no source for its ending, or a query for something that is no database.
    """
    if path.is_dir():
        reason = "a folder, not a table; give the silo's file, for example a .csv"
        raise SilodpError(f"{path}: {reason}", code="data.no_file", field="data.files")
    if not path.is_file():
        reason = "no such file; check the path of the table"
        raise SilodpError(f"{path}: {reason}", code="data.no_file", field="data.files")
    ending = find_ending(path)
    if not ending:
        listed = ", ".join(f".{known}" for known in (*SOURCES, *SOURCES.references))
        reason = f"unknown extension {path.suffix!r}; give a file that ends in {listed}"
        raise SilodpError(f"{path}: {reason}", code="data.unreadable", field="data.files")
    kind = find_plugin(ending, SOURCES, Source, "data.files")
    if query is not None and not kind.takes_query:
        reason = (
            f"{path} is no database, and a query says how to read it; take the query out, or give a database"
        )
        raise SilodpError(reason, code="data.query", field="data.schema.silos")
    return kind(path, Reader() if reader is None else reader, query)
