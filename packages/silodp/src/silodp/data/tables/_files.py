"""The silos' files as frames of cells: CSV and its relatives, Parquet, and spreadsheets."""

from __future__ import annotations

import csv
import gzip
import zipfile
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from io import BytesIO, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from silodp.data.tables._text import name_setting
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
_DAY = 86_400
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799
"""The years 1 to 9999, in seconds since 1970."""
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_STRICT = b"http://purl.oclc.org/ooxml/"
"""The names of elements begin so in workbooks of the strict variant of ISO/IEC 29500, which openpyxl does not know."""
_SIGNATURES = {
    b"\x1f\x8b": "is compressed by gzip; let its name end in .gz",
    b"BZh91AY&SY": "is compressed by bzip2; unpack it",
    b"\xfd7zXZ\0": "is compressed by xz; unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; unpack it",
    b"7z\xbc\xaf\x27\x1c": "is a 7z archive; unpack it",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "is a workbook in the old format .xls, or has a password; save it as .xlsx, "
    "without one",
    b"ARROW1\0\0": "is an Arrow file; save it as .parquet",
    b"SQLite format 3\0": "is an SQLite database; export the table as CSV",
    b"%PDF-": "is a PDF; export the table as CSV",
}
"""First bytes of files that are no text, what such a file is, and the remedy."""


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
    """Return the cells of the columns that are used, and the header of the file.

    Args:
        path: the path of the file.
        reader: how it is written.
        columns: those that are used: no other one is looked at, so none of them makes a file unreadable; None: all that
            can be read.

    Returns:
        The cells, and the names of all columns in the order of the file.

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
    needed = None if columns is None else set(map(header_text, columns))
    try:
        _check_content(path, ending)
        if ending == ".parquet":
            frame, header = _read_parquet(path, needed)
        elif ending == ".xlsx":
            frame, header = _read_sheet(path, reader, needed)
        else:
            frame, header = _read_csv(path, reader, needed)
    except (SilodpError, PermissionError):
        raise
    except Exception as error:  # parsers of damaged files raise exceptions of any type
        raise _make_error(
            path, f"not readable as {ending[1:]} ({first_line(error)}); export it again"
        ) from error
    frame.columns = pd.Index(map(header_text, frame.columns))
    return frame, list(map(header_text, header))


def _is_used(name: object, needed: AbstractSet[str] | None) -> bool:
    return needed is None or header_text(name) in needed


def _check_content(path: Path, ending: str) -> None:
    """Raise for a file that is of another kind than its name says: an error of its parser would name another fault."""
    start = _read_start(path)
    found = next((what for mark, what in _SIGNATURES.items() if start.startswith(mark)), "")
    is_archive = start.startswith(b"PK\x03\x04")
    if is_archive or (start.startswith(b"PAR1") and ending != ".parquet"):
        with _open_bytes(path) as file:
            content = file.read()
        # A text file may begin with this name of a column, so its end is looked at, too.
        is_parquet = content.endswith(b"PAR1")
        found = "is a Parquet file; let its name end in .parquet" if is_parquet else ""
        found = _describe_archive(content, ending) if is_archive else found
    if found:
        raise _make_error(path, f"the name ends in {ending}, and the file {found}")


def _describe_archive(content: bytes, ending: str) -> str:
    """Return what a zip archive is and the remedy; "" for a workbook that can be read, and for a damaged one."""
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            parts = archive.namelist()
            is_workbook = "xl/workbook.xml" in parts
            is_strict = is_workbook and _STRICT in archive.read("xl/workbook.xml")
    except Exception:  # damaged archives raise exceptions of any type
        return "" if ending == ".xlsx" else "is a damaged zip archive; export the table again"
    if is_strict:
        return "is a workbook of the variant 'Strict Open XML'; save it as an ordinary one ('Excel Workbook')"
    if is_workbook:
        return "" if ending == ".xlsx" else "is a workbook; let its name end in .xlsx"
    is_other = "xl/workbook.bin" in parts or "content.xml" in parts
    return "is a workbook of another format; save it as .xlsx" if is_other else "is a zip archive; unpack it"


def _read_parquet(path: Path, needed: AbstractSet[str] | None) -> tuple[pd.DataFrame, list[str]]:
    """Read columns one by one, so that one that cannot be read stands in the way of no other."""
    source: Path | BytesIO = path
    try:
        pq.ParquetFile(path).close()
    except pa.ArrowNotImplementedError:
        source = _hide_types(path)
    found: list[tuple[str, pd.Series[Any]]] = []
    with (
        pq.ParquetFile(source, coerce_int96_timestamp_unit="us") as file,
        pq.ParquetFile(source, coerce_int96_timestamp_unit="s") as in_seconds,
    ):
        names = file.schema_arrow.names
        parts = [file.schema.column(place) for place in range(len(file.schema))]
        # Seconds hold all that INT96 does. In finer units times of far years become others, without an error.
        has_int96 = {part.path for part in parts if part.physical_type == "INT96"}
        for name in dict.fromkeys(name for name in names if _is_used(name, needed)):
            try:
                for times in _take_columns(in_seconds if name in has_int96 else file, name):
                    if pa.types.is_date(times.type) or pa.types.is_timestamp(times.type):
                        _check_years(path, name, times)
                for column in _take_columns(file, name):
                    if source is not path and getattr(column.type, "tz", None):
                        raise ValueError("its time zone is not known")
                    found.append((name, _to_pandas(column)))
            except Exception as error:  # damaged files, and types that pandas does not have
                if needed is None:
                    continue
                if isinstance(error, SilodpError):
                    raise
                why = f"column {name!r} cannot be read ({first_line(error)}); export it as text"
                raise _make_error(path, why) from error
    frame = pd.DataFrame({place: cells for place, (_, cells) in enumerate(found)})
    return frame.set_axis([name for name, _ in found], axis=1), names


def _hide_types(path: Path) -> BytesIO:
    """Return a Parquet file without the types that its writer has noted beside those of Parquet.

    Arrow reads no column of a file in which they name one that it does not have, such as whole numbers of 128 bits.
    """
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    # As long as before: the footer has lengths.
    footer = content[start:].replace(b"ARROW:schema", b"other:schema")
    return BytesIO(content[:start] + footer)


def _take_columns(file: pq.ParquetFile, name: str) -> list[pa.ChunkedArray]:
    """Return the columns of a name: there may be two of them, and a.b may also be a part of another column, a."""
    table = file.read(columns=[name])
    columns = [table.column(place) for place, other in enumerate(table.column_names) if other == name]
    # Rules look at the type of the values, not at how they are stored.
    return [x.cast(x.type.value_type) if pa.types.is_dictionary(x.type) else x for x in columns]


def _count_seconds(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return seconds since 1970 of days and times, by UTC where they have a zone; 0 where a cell is missing."""
    kind = column.type
    is_day = pa.types.is_date32(kind)
    numbers: NDArray[np.int64] = column.cast(pa.int32() if is_day else pa.int64()).fill_null(0).to_numpy()
    return numbers.astype(np.int64) * _DAY if is_day else numbers // _PER_SECOND[getattr(kind, "unit", "ms")]


def _check_years(path: Path, name: str, column: pa.ChunkedArray) -> None:
    """Raise for a time outside the years of Python, by UTC where it has a zone."""
    seconds = _count_seconds(column)
    outside = (seconds < _FIRST_SECOND) | (seconds > _LAST_SECOND)
    if outside.any():
        raise _make_error(
            path,
            f"column {name!r} has in data row {np.argmax(outside) + 1} a time outside the years 1 to 9999; correct "
            "the cell, or leave it empty",
            code="data.value",
            field=name,
        )


def _to_pandas(column: pa.ChunkedArray) -> pd.Series[Any]:
    """Return the cells of a column of a Parquet file, each as the value that it holds."""
    # Before this second pandas looks for the offset of a zone outside of its table, and crashes.
    if (
        getattr(column.type, "tz", None)
        and (_count_seconds(column) < np.iinfo(np.int64).min // 10**9 + _DAY).any()
    ):
        column = pc.local_timestamp(column)
    # Without it whole numbers with a gap among them would become floats, and lose digits.
    cells: pd.Series[Any] = column.to_pandas(integer_object_nulls=True)
    return cells


def _open(path: Path, encoding: str, errors: str = "strict") -> TextIOWrapper:
    """Open a text file, compressed or not; the ends of its lines stay as they are."""
    # newline="": within quotes, the ends of lines are part of a cell, and the csv module must see them.
    return TextIOWrapper(_open_bytes(path), encoding=encoding, errors=errors, newline="")


def _read_csv(path: Path, reader: Reader, needed: AbstractSet[str] | None) -> tuple[pd.DataFrame, list[str]]:
    """Read cells as text, the first line as header.

    The csv module makes the cells, rather than pandas: pandas would rename repeated columns, take the first column for
    an index where rows are longer than the header, and fill up a short row, each cell a column away from its place.
    """
    separator = reader.separator or TEXT[_find_ending(path).removesuffix(".gz")]
    _check_width(path, reader)
    try:
        # What is no text in the encoding may stand in a column that is not used; surrogates stand for it until then.
        with _allow_long_cells(), _open(path, reader.codec, "surrogateescape") as file:
            header, rows = _check_shape(path, _read_rows(path, file, separator, needed), separator, needed)
    except SilodpError:
        if not _is_text(path, reader.codec):  # named first: it may be the cause
            raise _refuse_encoding(path, reader) from None
        raise
    except UnicodeError as error:
        raise _refuse_encoding(path, reader) from error
    names = [name for name in header if _is_used(name, needed)]
    is_complete = needed is not None and needed <= set(map(header_text, header))
    # A name in another encoding looks like a column that is missing.
    _check_texts(path, reader, names if is_complete else header, rows)
    shown = [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in header]
    return pd.DataFrame(rows, columns=pd.Index(names)), shown


@contextmanager
def _allow_long_cells() -> Iterator[None]:
    """Lift the limit of the csv module, which holds for the whole process, until the end of the block."""
    before = csv.field_size_limit(_MAX_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _read_sheet(
    path: Path, reader: Reader, needed: AbstractSet[str] | None
) -> tuple[pd.DataFrame, list[str]]:
    """Read the cells of one sheet of a workbook, the first row as header.

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
    header = [str(name) for name in cells.iloc[0]]
    used = [place for place, name in enumerate(header) if _is_used(name, needed)]
    frame = cells.iloc[1:, used].reset_index(drop=True)
    if ((frame == "") | frame.isna()).to_numpy().any():
        _check_empty_cells(path, reader.sheet or sheets[0], {place + 1 for place in used})
    return frame.set_axis([header[place] for place in used], axis=1), header


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


def _check_shape(
    path: Path, rows: Iterator[list[str]], separator: str, needed: AbstractSet[str] | None
) -> tuple[list[str], list[list[str]]]:
    """Return the header, and of each data row the cells that are needed; all rows are of one length.

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
    used = [place for place, name in enumerate(header) if _is_used(name, needed)]
    found, known = list[list[str]](), dict[str, str]()
    for row in rows:
        if len(header) > 1 and len(row) < 2 and (not row or (row[0] and not row[0].strip(" \t"))):
            continue  # an empty line, or one of white space alone
        if row and len(row) != len(header):
            is_title = not found and sum(bool(cell.strip()) for cell in header) == 1
            above = ", or delete the lines above the names of the columns" if is_title else ""
            raise _make_error(
                path,
                f"the header has {pluralize(len(header), 'cell')} and data row {len(found) + 1} has {len(row)}; "
                f"correct the row, and put text that holds a comma in quotes (numbers take a decimal point){above}",
            )
        cells = [row[place] for place in used] if row else []
        found.append(list(map(known.setdefault, cells, cells)))  # equal cells share their memory
    empty = [""] * len(used)
    while found and not found[-1]:
        found.pop()
    return header, [row or empty for row in found]


def _read_rows(
    path: Path, file: TextIOWrapper, separator: str, needed: AbstractSet[str] | None
) -> Iterator[list[str]]:
    """Yield the cells of each row, the header first.

    Raises for a zero character in a cell that is used, or in a row of another length, and for quotes that are not in
    pairs. Two of them in different rows can make one row of all lines between. So a row of several lines is refused,
    each of which could be a row: by its separators, and by numbers in the columns where every other row has them.
    """
    lines: list[str] = []
    suspects: list[tuple[int, list[list[str]]]] = []

    def keep_lines() -> Iterator[str]:
        for line in file:
            lines.append(line)
            yield line

    # strict: without it, text after a closing quote would become part of the cell in silence.
    rows = csv.reader(keep_lines(), delimiter=separator, strict=True)
    width, used = 0, list[int]()
    while True:
        lines.clear()
        start = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise _refuse_quotes(path, start, first_line(error)) from error
        if row is None:
            break
        if not width:  # the header decides how many cells a line has if it is a row
            width, used = len(row), [place for place, name in enumerate(row) if _is_used(name, needed)]
        is_lost = any(
            "\0" in line for line in lines
        )  # other programs end a text there: two persons could become one
        if is_lost and (len(row) != width or any("\0" in row[place] for place in used)):
            what = f"line {start:,} has a zero byte, which is no text; delete it, or export the table again"
            raise _make_error(path, what)
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


def _check_width(path: Path, reader: Reader) -> None:
    """Raise for a file in UTF-16 that is read in another encoding, and for one that is not and is read in UTF-16."""
    is_other = _looks_like_utf_16(path)
    if reader.codec.startswith("utf-16"):
        start = _read_start(path)
        # Chinese text without the mark has few zeros, but one beside the end of each line.
        is_other = start[:2] not in _MARKS and b"\0" not in start
    if is_other:
        raise _refuse_encoding(path, reader)


def _check_texts(path: Path, reader: Reader, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Raise where names or cells that are used are of another encoding than declared."""
    texts = set(names).union(chain.from_iterable(rows))
    others = "\n".join(text for text in texts if not text.isascii())
    try:
        others.encode()  # a surrogate, which stands for a byte that is no text, has no form in UTF-8
    except UnicodeError as error:
        raise _refuse_encoding(path, reader) from error
    if others and _has_one_byte(reader.codec):  # any bytes are text in such an encoding
        with suppress(UnicodeError):
            # Text that is valid UTF-8 and not ASCII is hardly ever meant otherwise, and ü would be read as two
            # characters.
            others.encode(reader.codec).decode()
            raise _refuse_encoding(path, reader)


def _has_one_byte(codec: str) -> bool:
    """Return whether an encoding has one byte for each character; some bytes may stand for none."""
    return not codec.startswith("utf") and len(bytes(range(256)).decode(codec, "replace")) == 256


def _is_text(path: Path, encoding: str) -> bool:
    """Return whether a whole file is text in an encoding."""
    try:
        with _open(path, encoding) as text:
            while text.read(1 << 20):  # in parts, as tables may be larger than memory
                pass
    except UnicodeError:
        return False
    return True


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
    # cp1252: Windows in western Europe and America.
    found = found or next((encoding for encoding in ("utf-8", "cp1252") if _is_text(path, encoding)), "")
    guess = f"it looks like {found}: set {name_setting('encoding', found)}"
    guess = guess if found else f"it is no text in UTF-8, UTF-16 or cp1252: set {name_setting('encoding')}"
    return _make_error(
        path,
        f"not text in the encoding {reader.encoding}; {guess}, or export it as UTF-8 (in "
        "spreadsheet programs 'CSV UTF-8')",
        code="data.encoding",
    )
