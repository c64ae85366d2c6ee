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
from silodp.errors import SilodpError
from silodp.text import first_line, name_extra, pluralize

TEXT = {".csv": ",", ".tsv": "\t"}
"""Endings of text files, and what separates their cells unless a reader says otherwise."""
ENDINGS = (*TEXT, *(f"{ending}.gz" for ending in TEXT), ".parquet", ".xlsx")

_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of UTF-16."""
_MAX_CELL = 2**31 - 1
"""The most characters of a cell that the csv module can count on every system."""
_LONG_CELL = 2**17
"""Characters of a cell from which on a line break in it is taken for a stray quote."""
_MAX_SHEETS = 10
"""The most names of sheets that a message lists."""


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
        path: the path of the file.
        reader: how it is written.
        columns: those that are used: formulas of others may have errors; None: all.

    Raises:
        SilodpError: no such file, or unreadable.
    """
    if path.is_dir():
        raise _make_error(
            path, "a folder, not a table; give the silo's file, for example a .csv", code="data.no_file"
        )
    if not path.is_file():
        raise _make_error(path, "no such file; check the path of the table", code="data.no_file")
    ending = _find_ending(path)
    if not ending:
        raise _make_error(
            path, f"unknown extension {path.suffix!r}; give a file that ends in {', '.join(ENDINGS)}"
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
    except (SilodpError, PermissionError):
        raise
    except Exception as error:  # parsers of damaged files raise exceptions of any type
        raise _make_error(
            path, f"not readable as {ending[1:]} ({first_line(error)}); export it again"
        ) from error
    header = [header_text(column) for column in frame.columns]
    frame.columns = pd.Index(header)
    return frame, header


def _open(path: Path, encoding: str) -> TextIOWrapper:
    """Open a text file, compressed or not; the ends of its lines stay as they are."""
    # newline="": within quotes, the ends of lines are part of a cell, and the csv module must see them.
    return TextIOWrapper(_open_bytes(path), encoding=encoding, newline="")


def _read_csv(path: Path, reader: Reader) -> pd.DataFrame:
    """Read all cells as text, the first line as header.

    The csv module makes the cells, rather than pandas: pandas would rename repeated columns, take the first column for
    an index where rows are longer than the header, and fill up a short row, each cell a column away from its place.
    """
    separator = reader.separator or TEXT[_find_ending(path).removesuffix(".gz")]
    try:
        _check_encoding(path, reader)
        with _allow_long_cells(), _open(path, reader.codec) as file:
            header, *rows = _check_shape(path, _read_rows(path, file, separator), separator)
    except UnicodeError as error:
        raise _refuse_encoding(path, reader) from error
    return pd.DataFrame(rows, columns=pd.Index(header))


@contextmanager
def _allow_long_cells() -> Iterator[None]:
    """Lift the limit of the csv module, which holds for the whole process, until the end of the block."""
    before = csv.field_size_limit(_MAX_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _read_sheet(path: Path, reader: Reader, columns: Collection[str] | None) -> pd.DataFrame:
    """Read all cells of one sheet of a workbook, the first row as header.

    Raises:
        SilodpError: openpyxl is not installed, or there is no such sheet.
    """
    try:
        import openpyxl
    except ImportError:
        raise _make_error(
            path,
            f"reading .xlsx needs openpyxl; {name_extra('excel')}, or export the table as CSV",
            code="data.no_reader",
        ) from None
    # read_only: else all cells of all sheets would be in memory only to list the names.
    workbook = openpyxl.load_workbook(path, read_only=True, data_only=True)
    sheets = [sheet.title for sheet in workbook.worksheets]  # a chart on a sheet of its own has no cells
    workbook.close()
    if not sheets:
        raise _make_error(
            path, "the workbook has charts alone and no sheet with cells; export the table again"
        )
    fault = ""
    if reader.sheet is None and len(sheets) > 1:
        fault = f"has {len(sheets)} sheets, {_list_sheets(sheets)}; name the one with the table as"
    elif reader.sheet is not None and reader.sheet not in sheets:
        fault = f"has no sheet {reader.sheet!r}, only {_list_sheets(sheets)}; correct"
    if fault:
        reason = f"the workbook {fault} {name_setting('sheet')}"
        raise _make_error(path, reason, field="data.schema.reader.sheet")
    # Nothing counts as missing here (na_filter): which texts stand for no value is declared, and "NA" may be a
    # category.
    cells = pd.read_excel(
        path, sheet_name=reader.sheet or 0, header=None, dtype=object, na_filter=False, engine="openpyxl"
    )
    if cells.empty:
        raise _refuse_empty(path)
    if ((cells == "") | cells.isna()).to_numpy().any():
        names = [header_text(name) for name in cells.iloc[0]]
        needed = names if columns is None else set(map(header_text, columns))
        used = {place for place, name in enumerate(names, 1) if name in needed}
        _check_empty_cells(path, reader.sheet or sheets[0], used)
    frame = cells.iloc[1:].reset_index(drop=True)
    frame.columns = pd.Index(cells.iloc[0].astype(str))
    return frame


def _list_sheets(sheets: Sequence[str]) -> str:
    """Return the names of the sheets, the first ten of a longer list."""
    more = len(sheets) - _MAX_SHEETS
    named = ", ".join(map(repr, sheets[:_MAX_SHEETS]))
    return f"{named} and {more:,} more" if more > 0 else named


def _check_empty_cells(path: Path, sheet: str, columns: Collection[int]) -> None:
    """Raise for cells that would count as missing: formulas of which no value is stored, and errors but #N/A.

    Args:
        path: the path of the workbook.
        sheet: its name.
        columns: numbers of the columns that are used, from 1.
    """
    import openpyxl

    # openpyxl gives either formulas or the values that are stored for them, so both are read.
    written, stored = (openpyxl.load_workbook(path, read_only=True, data_only=only) for only in (False, True))
    for book in (written, stored):
        # Some programs write wrong dimensions, and cells beyond them would be left out.
        book[sheet].reset_dimensions()
    for formulas, values in zip(written[sheet].iter_rows(), stored[sheet].iter_rows(), strict=True):
        for formula, value in zip(formulas, values, strict=True):
            if formula.data_type not in ("f", "e") or formula.column not in columns:
                continue
            fault = ""
            # A stored text may be empty, and has the type str.
            if formula.data_type == "f" and value.value is None and value.data_type != "str":
                fault = (
                    "has a formula without a stored value; open the workbook in a spreadsheet program and save it, or "
                    "export it as CSV"
                )
            elif value.data_type == "e" and value.value != "#N/A":
                fault = f"is the error {value.value}; correct its formula, or empty the cell"
            if fault:
                raise _make_error(path, f"cell {formula.coordinate} {fault}")
    written.close()
    stored.close()


def _check_shape(path: Path, rows: Iterator[list[str]], separator: str) -> list[list[str]]:
    """Return the header and the data rows, all of one length.

    An empty line is no row. In a table of one column it is an empty cell, except before the header and at the end.

    Raises:
        SilodpError: there is no header, the separator is another one, or a row is too short or too long.
    """
    header = next((row for row in rows if len(row) > 1 or any(map(str.strip, row))), None)
    if header is None:
        raise _refuse_empty(path)
    # The comma last: it is the one that also stands in names of columns.
    for other in (";", "\t", "|", ","):
        if len(header) == 1 and other != separator and other in header[0]:
            decimal = ', and decimal = "," for decimal commas' if other == ";" else ""
            setting = name_setting("separator", other, decimal)
            raise _make_error(
                path,
                f"the columns are separated by {other!r}; set {setting}, or export the table with {separator!r} "
                "between columns",
            )
    found, known = [header], dict[str, str]()
    for row in rows:
        if len(header) > 1 and len(row) < 2 and (not row or (row[0] and not row[0].strip(" \t"))):
            continue  # an empty line, or one of white space alone
        if row and len(row) != len(header):
            is_title = len(found) == 1 and sum(bool(cell.strip()) for cell in header) == 1
            above = ", or delete the lines above the names of the columns" if is_title else ""
            raise _make_error(
                path,
                f"the header has {pluralize(len(header), 'cell')} and data row {len(found)} has {len(row)}; correct "
                f"the row, and put text that holds a comma in quotes (numbers take a decimal point){above}",
            )
        found.append(list(map(known.setdefault, row, row)))  # equal cells share their memory
    while not found[-1]:
        found.pop()
    return [row or [""] for row in found]


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

    # strict: without it, text after a closing quote would become part of the cell in silence.
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
        # The header decides how many cells a line has if it is a row.
        width = width or len(row)
        if len(lines) > 1 and max(map(len, row)) > _LONG_CELL:
            raise _refuse_quotes(path, start, f"a quote there makes one cell of {len(lines):,} lines")
        # In a table of one column every line could be a row, and texts of several lines are usual.
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
    # Rows of several lines are left out: they are what is in doubt.
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


def _make_error(
    path: Path, reason: str, code: str = "data.unreadable", field: str = "data.files"
) -> SilodpError:
    """Return, for the caller to raise, the error about a file."""
    return SilodpError(f"{path}: {reason}", code=code, field=field)


def _refuse_quotes(path: Path, line: int, what: str) -> SilodpError:
    return _make_error(
        path,
        f"the row that begins in line {line:,} cannot be read ({what}); write a quote that belongs to a text "
        "twice, within quotes around the cell, or export the table without line breaks in texts",
    )


def _refuse_empty(path: Path) -> SilodpError:
    return _make_error(path, "the file is empty; export the silo's table again", code="data.no_records")


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
            # Text that is valid UTF-8 and not ASCII is hardly ever meant otherwise, and ü would be read as two
            # characters.
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
        # In parts, as tables may be larger than memory.
        while part := text.read(1 << 20):
            is_ascii = is_ascii and part.isascii()
            if (zero := part.find("\0")) >= 0:
                lines += part.count("\n", 0, zero)
                raise _make_error(
                    path,
                    f"line {lines:,} has a zero byte, which is no text; delete it, or export the table again",
                )
            lines += part.count("\n")
    return is_ascii


def _looks_like_utf_16(path: Path) -> bool:
    """Return whether a file begins with the mark of UTF-16, or is half zeros as plain text in it is.

    These are first or second bytes of all characters. A zero byte elsewhere is an error.
    """
    start = _read_start(path)
    # ASCII in UTF-16 has a zero at every other place, all on one side: first bytes or second ones.
    zeros = sorted((start[::2].count(0), start[1::2].count(0)))
    return start[:2] in _MARKS or (zeros[1] > len(start) / 10 and zeros[0] < zeros[1] / 10)


def _read_start(path: Path) -> bytes:
    with _open_bytes(path) as file:
        return file.read(4096)


def _open_bytes(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else path.open("rb")


def _refuse_encoding(path: Path, reader: Reader) -> SilodpError:
    """Return the error about a file that is not in the declared encoding."""
    found = "utf-16" if _looks_like_utf_16(path) else ""
    for encoding in () if found else ("cp1252", "utf-8"):  # cp1252: Windows in western Europe and America
        with suppress(UnicodeError):
            _decode(path, encoding)
            found = encoding
    guess = f"it looks like {found}: set {name_setting('encoding', found)}"
    guess = guess if found else f"it is no text in UTF-8, UTF-16 or cp1252: set {name_setting('encoding')}"
    return _make_error(
        path,
        f"not text in the encoding {reader.encoding}; {guess}, or export it as UTF-8 (in "
        "spreadsheet programs 'CSV UTF-8')",
        code="data.encoding",
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
