"""The silos' files as frames of cells: CSV and its relatives, Parquet, and spreadsheets."""

from __future__ import annotations

import csv
import gzip
import json
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import IO, cast

import pandas as pd
import pyarrow.parquet as pq

from silodp.data.tables.columns import Reader, header_text
from silodp.errors import SilodpError, counted, first_line, name_extra

TEXT = {".csv": ",", ".tsv": "\t"}
"""Endings of text files, and what separates their cells unless a reader says otherwise."""
ENDINGS = (*TEXT, *(f"{ending}.gz" for ending in TEXT), ".parquet", ".xlsx")


_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of UTF-16."""
_LONGEST = 2**31 - 1
"""Characters of a cell, at most: what the csv module can count on every system."""
_LONG = 2**17
"""Characters of a cell from which on a line break in it is taken for a stray quote."""
_MOST_SHEETS = 10
"""Names of sheets in a message."""


def is_text_file(path: Path) -> bool:
    """Return whether cells of the file are text, of which the reader knows the decimal mark."""
    return _find_ending(path).removesuffix(".gz") in TEXT


def is_workbook(path: Path) -> bool:
    """Return whether cells of the file are those of a spreadsheet program."""
    return _find_ending(path) == ".xlsx"


def _find_ending(path: Path) -> str:
    name = path.name.lower()
    return next((ending for ending in reversed(ENDINGS) if name.endswith(ending)), "")


def read_frame(
    path: Path, reader: Reader | None = None, columns: Collection[str] | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """Return all cells of a file and its header.

    Args:
        path: of the file.
        reader: how it is written.
        columns: those that are used: formulas of others may have errors; None: all.

    Raises:
        SilodpError: no such file, or unreadable.
    """
    if path.is_dir():
        raise SilodpError(
            f"{path}: a folder, not a table; give the silo's file, for example a .csv",
            code="data.no_file",
            field="data.files",
        )
    if not path.is_file():
        raise SilodpError(
            f"{path}: no such file; check the path of the table",
            code="data.no_file",
            field="data.files",
        )
    ending = _find_ending(path)
    if not ending:
        raise SilodpError(
            f"{path}: unknown extension {path.suffix!r}; give a file that ends in {', '.join(ENDINGS)}",
            code="data.unreadable",
            field="data.files",
        )
    reader = Reader() if reader is None else reader
    try:
        if ending == ".parquet":
            # pandas' own call would make floats of whole numbers with a gap among them, and round large ones; its
            # metadata would take columns for an index.
            frame = pq.read_table(path).to_pandas(integer_object_nulls=True, ignore_metadata=True)
        elif ending == ".xlsx":
            frame = _read_sheet(path, reader, columns)
        else:
            frame = _read_csv(path, reader)
    except SilodpError:
        raise
    except Exception as error:  # parsers of damaged files raise exceptions of any type
        raise SilodpError(
            f"{path}: not readable as {ending[1:]} ({first_line(error)}); export it again",
            code="data.unreadable",
            field="data.files",
        ) from error
    header = [header_text(column) for column in frame.columns]
    frame.columns = pd.Index(header)
    return frame, header


def _open(path: Path, encoding: str, newline: str | None = "") -> TextIOWrapper:
    """Open a text file, compressed or not."""
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding=encoding, newline=newline)
    return path.open(encoding=encoding, newline=newline)


def _read_csv(path: Path, reader: Reader) -> pd.DataFrame:
    """Read all cells as text, the first line as header.

    header=None keeps pandas from renaming repeated columns and from taking the first column for an index when
    rows are longer than the header; dtype=str keeps a missing key from turning 17 into 17.0.
    """
    separator = reader.separator or TEXT[_find_ending(path).removesuffix(".gz")]
    try:
        _check_encoding(path, reader)
        with _allow_long_cells():
            width, has_returns = _check_shape(path, reader, separator)
            if width == 1:
                return _take_header(_read_single(path, reader, separator))
        # After an empty line that ends in a carriage return alone pandas would leave out an empty first cell.
        with _open(path, reader.codec, newline=None if has_returns else "") as file:
            cells = pd.read_csv(file, header=None, dtype=str, keep_default_na=False, sep=separator)
    except UnicodeError as error:
        raise _refuse_encoding(path, reader) from error
    return _take_header(cells)


@contextmanager
def _allow_long_cells() -> Iterator[None]:
    """Lift the limit of the csv module, which holds for the whole process, until the end of the block."""
    before = csv.field_size_limit(_LONGEST)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _read_single(path: Path, reader: Reader, separator: str) -> pd.DataFrame:
    """Read a single column, where an empty line is an empty cell, which pandas would leave out.

    Before the header and at the end of the file an empty line is no row.
    """
    with _open(path, reader.codec) as file:
        rows = list(csv.reader(file, delimiter=separator))
    while not rows[-1]:
        rows.pop()
    cells = ["".join(row) for row in rows]
    start = next(place for place, cell in enumerate(cells) if cell.strip())
    return pd.DataFrame(cells[start:])


def _read_sheet(path: Path, reader: Reader, columns: Collection[str] | None) -> pd.DataFrame:
    """Read all cells of one sheet of a workbook, the first row as header.

    Raises:
        SilodpError: openpyxl is not installed, or there is no such sheet.
    """
    try:
        import openpyxl
    except ImportError:
        raise SilodpError(
            f"{path}: reading .xlsx needs openpyxl; {name_extra('excel')}, or export the table as CSV",
            code="data.no_reader",
            field="data.files",
        ) from None
    workbook = openpyxl.load_workbook(path, read_only=True, data_only=True)
    sheets = [sheet.title for sheet in workbook.worksheets]  # a chart on a sheet of its own has no cells
    workbook.close()
    if not sheets:
        raise SilodpError(
            f"{path}: the workbook has charts alone and no sheet with cells; export the table again",
            code="data.unreadable",
            field="data.files",
        )
    if reader.sheet is None and len(sheets) > 1:
        raise SilodpError(
            f"{path}: the workbook has {len(sheets)} sheets, {_list_sheets(sheets)}; name the one with the table as "
            f"{name_setting('sheet')}",
            code="data.unreadable",
            field="data.schema.reader.sheet",
        )
    if reader.sheet is not None and reader.sheet not in sheets:
        raise SilodpError(
            f"{path}: the workbook has no sheet {reader.sheet!r}, only {_list_sheets(sheets)}; correct "
            f"{name_setting('sheet')}",
            code="data.unreadable",
            field="data.schema.reader.sheet",
        )
    cells = pd.read_excel(
        path, sheet_name=reader.sheet or 0, header=None, dtype=object, na_filter=False, engine="openpyxl"
    )
    if cells.empty:
        raise _refuse_empty(path)
    if ((cells == "") | cells.isna()).to_numpy().any():
        names = [header_text(name) for name in cells.iloc[0]]
        used = {place for place, name in enumerate(names, 1) if columns is None or name in columns}
        _check_empty_cells(path, reader.sheet or sheets[0], used)
    return _take_header(cells)


def _list_sheets(sheets: Sequence[str]) -> str:
    """Return the names of the sheets, the first ten of a longer list."""
    more = len(sheets) - _MOST_SHEETS
    named = ", ".join(map(repr, sheets[:_MOST_SHEETS]))
    return f"{named} and {more:,} more" if more > 0 else named


def _check_empty_cells(path: Path, sheet: str, columns: Collection[int]) -> None:
    """Raise for cells that would count as missing: formulas of which no value is stored, and errors but #N/A.

    Args:
        path: of the workbook.
        sheet: its name.
        columns: numbers of the columns that are used, from 1.
    """
    import openpyxl

    written, stored = (openpyxl.load_workbook(path, read_only=True, data_only=only) for only in (False, True))
    for book in (written, stored):
        # Some programs write wrong dimensions, and cells beyond them would be left out.
        book[sheet].reset_dimensions()
    for formulas, values in zip(written[sheet].iter_rows(), stored[sheet].iter_rows(), strict=True):
        for formula, value in zip(formulas, values, strict=True):
            if formula.data_type not in ("f", "e") or formula.column not in columns:
                continue
            # A stored text may be empty, and has the type str.
            if formula.data_type == "f" and value.value is None and value.data_type != "str":
                raise SilodpError(
                    f"{path}: cell {formula.coordinate} has a formula without a stored value; open the workbook in a "
                    "spreadsheet program and save it, or export it as CSV",
                    code="data.unreadable",
                    field="data.files",
                )
            if value.data_type == "e" and value.value != "#N/A":
                raise SilodpError(
                    f"{path}: cell {value.coordinate} is the error {value.value}; correct its formula, or empty the "
                    "cell",
                    code="data.unreadable",
                    field="data.files",
                )
    written.close()
    stored.close()


def _take_header(cells: pd.DataFrame) -> pd.DataFrame:
    frame = cells.iloc[1:].reset_index(drop=True)
    frame.columns = pd.Index(cells.iloc[0].astype(str))
    return frame


def _check_shape(path: Path, reader: Reader, separator: str) -> tuple[int, bool]:
    """Return the number of columns, and whether a line ends in a carriage return alone, as on old Macintoshes.

    Raises for no header, another separator, or a row too short or too long: pandas would fill a short row up with empty
    cells, each a column away from where its value belongs.
    """
    with _open(path, reader.codec) as file:
        rows = _read_rows(path, file, separator)
        rows_kept = (row for row in rows if any(cell.strip() for cell in row) or len(row) > 1)
        header = next(rows_kept, None)
        if header is None:
            raise _refuse_empty(path)
        for other in (";", "\t", "|", ","):
            if len(header) == 1 and other != separator and other in header[0]:
                decimal = ', and decimal = "," for decimal commas' if other == ";" else ""
                setting = name_setting("separator", other, decimal)
                raise SilodpError(
                    f"{path}: the columns are separated by {other!r}; set {setting}, or export the table with "
                    f"{separator!r} between columns",
                    code="data.unreadable",
                    field="data.files",
                )
        for number, row in enumerate(rows_kept, start=1):
            if len(row) != len(header):
                is_title = number == 1 and sum(bool(cell.strip()) for cell in header) == 1
                above = ", or delete the lines above the names of the columns" if is_title else ""
                raise SilodpError(
                    f"{path}: the header has {counted(len(header), 'cell')} and data row {number} has {len(row)}; "
                    "correct the row, and put text that holds a comma in quotes (numbers take a decimal point)"
                    f"{above}",
                    code="data.unreadable",
                    field="data.files",
                )
        ends = (file.newlines,) if isinstance(file.newlines, str) else file.newlines or ()
        return len(header), "\r" in ends


def _read_rows(path: Path, file: TextIOWrapper, separator: str) -> Iterator[list[str]]:
    """Yield the cells of each row, the header first.

    Raises for quotes that are not in pairs. Two of them in different rows can make one row of all lines between. So a
    row of several lines is refused, each of which could be a row: by its separators, and by numbers in the columns
    where every other row has them.
    """
    lines: list[str] = []
    suspects: list[tuple[int, list[list[str]]]] = []

    def keep_lines() -> Iterator[str]:
        for line in file:
            lines.append(line)
            yield line

    rows = csv.reader(keep_lines(), delimiter=separator, strict=True)
    width = 0
    while True:
        lines.clear()
        start = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise _refuse_quotes(path, start, first_line(error)) from error
        if row is None:
            break
        width = width or len(row)
        if len(lines) > 1 and max(map(len, row)) > _LONG:
            raise _refuse_quotes(path, start, f"a quote there makes one cell of {len(lines):,} lines")
        if len(lines) > 1 and width > 1:
            cells = [_split_line(line, separator) for line in lines]
            if all(len(each) == width for each in cells):
                suspects.append((start, cells))
        yield row
    if not suspects:
        return
    numeric = _find_numeric(file, separator, width)
    for start, cells in suspects:
        if all(_is_number(line[column]) for line in cells for column in numeric):
            what = f"a quote there makes one row of {len(cells):,} lines, each of which could be a row"
            raise _refuse_quotes(path, start, what)


def _split_line(line: str, separator: str) -> list[str]:
    """Return the cells of a line without regard to quotes; of a table with tabs the last ones may be empty."""
    return line.rstrip("\r\n").split(separator)


def _find_numeric(file: TextIOWrapper, separator: str, width: int) -> list[int]:
    """Return the columns that hold numbers in all rows of one line each; none without such a row."""
    file.seek(0)
    next(file, None)  # the header
    numeric, has_rows = list(range(width)), False
    for line in file:
        cells = _split_line(line, separator)
        if len(cells) == width and '"' not in line:
            numeric, has_rows = [column for column in numeric if _is_number(cells[column])], True
    return numeric if has_rows else []


def _is_number(cell: str) -> bool:
    """Return whether a cell is a number with either decimal mark, or empty."""
    try:
        float(cell.strip('" ').replace(",", ".") or 0)
    except ValueError:
        return False
    return True


def _refuse_quotes(path: Path, line: int, what: str) -> SilodpError:
    return SilodpError(
        f"{path}: the row that begins in line {line:,} cannot be read ({what}); write a quote that belongs to a text "
        "twice, within quotes around the cell, or export the table without line breaks in texts",
        code="data.unreadable",
        field="data.files",
    )


def _refuse_empty(path: Path) -> SilodpError:
    return SilodpError(
        f"{path}: the file is empty; export the silo's table again",
        code="data.no_records",
        field="data.files",
    )


def _check_encoding(path: Path, reader: Reader) -> None:
    """Raise for a file of another encoding than declared; the sentence names the one that its bytes look like."""
    if reader.codec.startswith("utf-16"):
        start = _read_start(path)
        # Chinese text without the mark has few zeros, but one beside the end of each line.
        is_other = start[:2] not in _MARKS and b"\0" not in start
    else:
        is_other = _looks_like_utf_16(path)
    if is_other:
        raise _refuse_encoding(path, reader)
    _decode(path, reader.codec)
    if _has_one_byte(reader.codec):  # any bytes are text in such an encoding
        with suppress(UnicodeError):
            if not _decode(path, "utf-8"):
                raise _refuse_encoding(path, reader)


def _has_one_byte(codec: str) -> bool:
    """Return whether an encoding has one byte for each character; some bytes may stand for none."""
    return not codec.startswith("utf") and len(bytes(range(256)).decode(codec, "replace")) == 256


def _decode(path: Path, encoding: str) -> bool:
    """Read a text file to its end, and return whether it is plain ASCII; raise UnicodeError for another encoding.

    Raises:
        SilodpError: it has a zero character, where pandas would end the cell: two persons could become one.
    """
    is_ascii, lines = True, 1
    with _open(path, encoding) as text:
        while part := text.read(1 << 20):
            is_ascii = is_ascii and part.isascii()
            if (zero := part.find("\0")) >= 0:
                lines += part.count("\n", 0, zero)
                raise SilodpError(
                    f"{path}: line {lines:,} has a zero byte, which is no text; delete it, or export the table again",
                    code="data.unreadable",
                    field="data.files",
                )
            lines += part.count("\n")
    return is_ascii


def _looks_like_utf_16(path: Path) -> bool:
    """Return whether a file begins with the mark of UTF-16, or is half zeros as plain text in it is.

    These are first or second bytes of all characters. A zero byte elsewhere is an error.
    """
    start = _read_start(path)
    zeros = sorted((start[::2].count(0), start[1::2].count(0)))
    return start[:2] in _MARKS or (zeros[1] > len(start) / 10 and zeros[0] < zeros[1] / 10)


def _read_start(path: Path) -> bytes:
    with _open_bytes(path) as file:
        return file.read(4096)


def _open_bytes(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else path.open("rb")


def _refuse_encoding(path: Path, reader: Reader) -> SilodpError:
    """Return the error about a file that is not in the declared encoding."""
    found = ""
    if _looks_like_utf_16(path):
        found = "utf-16"
    else:
        for encoding in ("utf-8", "cp1252"):  # cp1252: Windows in western Europe and America
            try:
                _decode(path, encoding)
            except UnicodeError:
                continue
            found = encoding
            break
    guess = f"it looks like {found}: set {name_setting('encoding', found)}"
    guess = guess if found else f"it is no text in UTF-8, UTF-16 or cp1252: set {name_setting('encoding')}"
    return SilodpError(
        f"{path}: not text in the encoding {reader.encoding}; {guess}, or export it as UTF-8 (in "
        "spreadsheet programs 'CSV UTF-8')",
        code="data.encoding",
        field="data.files",
    )


def name_setting(name: str, value: str | list[str] = "", other: str = "") -> str:
    """Return where a setting of the reader is made, for messages; `other` is a setting that may go with it."""
    setting = f"{name} = {quote(value)}" if value else name
    given = value if isinstance(value, str) else value[0]
    option = f"--{name} {_quote_for_shell(given)}" if value else f"--{name}"
    return (
        f"{setting}{other} in [data.schema.reader] or, for one silo alone, [data.schema.readers] (in commands that "
        f"read one table: {option})"
    )


def name_date(column: str) -> str:
    """Return where the layout of a column of dates is set, for messages."""
    return f"date, or for one silo alone dates = {{ {quote(column)} = LAYOUT }} in [data.schema.readers]"


def name_date_option(column: str) -> str:
    """Return the option of predict that gives the layout of a column of dates, for messages."""
    return f"--date {_quote_for_shell(f'{column}=LAYOUT')}"


def name_missing_option(text: str) -> str:
    """Return the option of predict that says which text stands for no value, for messages."""
    return f"--missing {_quote_for_shell(text)}"


def quote(value: str | list[str]) -> str:
    """Return text, or a list of texts, as TOML has it, in a comment too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _quote_for_shell(text: str) -> str:
    return shlex.quote(text.replace("\t", r"\t"))
