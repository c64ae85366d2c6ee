"""Text files whose cells are separated by a character: CSV and its relatives."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from io import RawIOBase, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from silodp.data.tables._text import name_setting
from silodp.data.tables.sources.content import find_other_kind, open_bytes, read_start
from silodp.data.tables.sources.source import Source, Values, find_ending
from silodp.errors import SilodpError
from silodp.text import first_line, pluralize

_SEPARATORS = {"csv": ",", "tsv": "\t"}
"""What separates cells unless a reader says otherwise."""
_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of UTF-16."""
_MAX_CELL = 2**31 - 1
"""The most characters of a cell that the csv module can count on every system."""
_LONG_CELL = 2**17
"""Characters of a cell from which on a line break in it is taken for a stray quote."""
_BLOCK = 1 << 22
"""Bytes that are looked at and given to Arrow at once."""
_QUOTE, _LINE_FEED, _CARRIAGE_RETURN = 34, 10, 13


class DelimitedText(Source):
    """A text file. Its first row is the header, and all cells are text.

    A plain file is parsed by Arrow. In a plain file every quote begins or ends a cell, or stands twice within quotes,
    all rows have the cells of the header, and no cell has a line break: then there is one way to read it. All others
    are read by the csv module, more slowly, and by rules that find out what is wrong with them.
    """

    is_text: ClassVar[bool] = True

    @property
    def _separator(self) -> str:
        return self.reader.separator or _SEPARATORS[find_ending(self.path).removesuffix(".gz")]

    @cached_property
    def _header(self) -> list[str]:
        """The cells of the first row; surrogates stand for what is no text in the encoding.

        Raises:
            SilodpError: The file is of another kind or in another encoding, or it has no header.
        """
        ending = find_ending(self.path)
        if found := find_other_kind(self.path, ending):
            raise self.refuse(f"the name ends in .{ending}, and the file {found}")
        self._check_width()
        with self._iterate_rows(()) as rows:
            header = next((row for row in rows if not _is_blank(row)), None)
            if header is None:
                raise self.refuse_empty()
            # The comma last: it is the one that also stands in names of columns.
            for other in (";", "\t", "|", ","):
                if len(header) == 1 and other != self._separator and other in header[0]:
                    decimal = ', and decimal = "," for decimal commas' if other == ";" else ""
                    setting = name_setting("separator", other, decimal)
                    raise self.refuse(
                        f"the columns are separated by {other!r}; set {setting}, or export the table with "
                        f"{self._separator!r} between columns"
                    )
        return header

    def list_columns(self) -> list[str]:
        """Return the names of all columns, � where a name is no text in the encoding."""
        return [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in self._header]

    def check_names(self, found: Sequence[str]) -> None:
        """Raise where the file is in another encoding, or its first row is no header."""
        header = self.list_columns()
        self._read_rows([header.index(name) for name in found])
        self._check_texts(self._header)

    def read_columns(self, names: Sequence[str], key: str | None = None) -> dict[str, Values]:
        """Return columns of text, "" where a cell is empty."""
        header = self.list_columns()
        places = [header.index(name) for name in names]
        columns = self._read_plain(places)
        if columns is None:
            rows = self._read_rows(places)
            cells = zip(*rows, strict=True) if rows else [()] * len(places)
            columns = [pa.chunked_array([pa.array(column, pa.string())]) for column in cells]
        return dict(zip(names, columns, strict=True))

    # --- plain files ---

    def _read_plain(self, places: Sequence[int]) -> list[pa.ChunkedArray] | None:
        """Return the columns at these places, as Arrow parses them; None where the file is not plain."""
        header, separator = self._header, self._separator
        # In a table of one column an empty line is a cell.
        if len(header) == 1 or len(separator.encode()) != 1 or not places:
            return None
        labels = list(map(str, range(len(header))))
        included = [labels[place] for place in places]
        with _PlainText(self.path, self.reader.codec, separator) as text:
            try:
                table = pa.csv.read_csv(
                    pa.PythonFile(text, mode="r"),
                    pa.csv.ReadOptions(use_threads=False, block_size=2 * _BLOCK, column_names=labels),
                    pa.csv.ParseOptions(delimiter=separator),
                    # Which text stands for no value is not decided here.
                    pa.csv.ConvertOptions(
                        include_columns=included,
                        column_types=dict.fromkeys(included, pa.string()),
                        strings_can_be_null=False,
                    ),
                )
            except (pa.ArrowInvalid, UnicodeError):
                return None
        if not text.is_plain:
            return None
        # Without the header: an empty line above it is no row for Arrow either.
        columns = [column.slice(1) for column in table.columns]
        if _has_one_byte(self.reader.codec):
            texts = chain.from_iterable(_list_other(column) for column in columns)
            self._check_texts([header[place] for place in places], texts)
        return columns

    # --- all others ---

    def _open(self, encoding: str, errors: str = "strict") -> TextIOWrapper:
        """Open the file, unpacked; the ends of its lines stay as they are."""
        # newline="": within quotes, the ends of lines are part of a cell, and the csv module must see them.
        return TextIOWrapper(open_bytes(self.path), encoding=encoding, errors=errors, newline="")

    @contextmanager
    def _iterate_rows(self, places: Sequence[int]) -> Iterator[Iterator[list[str]]]:
        """Yield the rows of the file, the header first.

        Args:
            places: Those of the columns that are used: nothing in other ones makes the file unreadable.
        """
        try:
            # What is no text in the encoding may stand in a column that is not used; surrogates stand for it.
            with _allow_long_cells(), self._open(self.reader.codec, "surrogateescape") as file:
                yield self._parse_rows(file, places)
        except SilodpError:
            if not self._is_text(self.reader.codec):  # named first: it may be the cause
                raise self._refuse_encoding() from None
            raise
        except UnicodeError as error:
            raise self._refuse_encoding() from error

    def _read_rows(self, places: Sequence[int]) -> list[list[str]]:
        """Return of each data row the cells at these places; all rows have as many cells as the header.

        An empty line is no row. In a table of one column it is an empty cell, except before the header and at the end.

        Raises:
            SilodpError: A row is too short or too long, or cannot be read.
        """
        found, known = list[list[str]](), dict[str, str]()
        with self._iterate_rows(places) as rows:
            header = next(row for row in rows if not _is_blank(row))
            for row in rows:
                if len(header) > 1 and len(row) < 2 and (not row or (row[0] and not row[0].strip(" \t"))):
                    continue  # an empty line, or one of white space alone
                if row and len(row) != len(header):
                    is_title = not found and sum(bool(cell.strip()) for cell in header) == 1
                    above = ", or delete the lines above the names of the columns" if is_title else ""
                    raise self.refuse(
                        f"the header has {pluralize(len(header), 'cell')} and data row {len(found) + 1} has "
                        f"{len(row)}; correct the row, and put text that holds a comma in quotes (numbers take a "
                        f"decimal point){above}"
                    )
                cells = [row[place] for place in places] if row else []
                found.append(list(map(known.setdefault, cells, cells)))  # equal cells share their memory
            self._check_texts([header[place] for place in places], chain.from_iterable(found))
        while found and not found[-1]:
            found.pop()
        return [row or [""] * len(places) for row in found]

    def _parse_rows(self, file: TextIOWrapper, used: Sequence[int]) -> Iterator[list[str]]:
        """Yield the cells of each row, the header first.

        Raises for a zero character in a cell that is used, or in a row of another length, and for quotes that are not
        in pairs. Two of them in different rows can make one row of all lines between. So a row of several lines is
        refused, each of which could be a row: by its separators, and by numbers in the columns where every other row
        has them.
        """
        lines: list[str] = []
        suspects: list[tuple[int, list[list[str]]]] = []

        def keep_lines() -> Iterator[str]:
            for line in file:
                lines.append(line)
                yield line

        # strict: without it, text after a closing quote would become part of the cell in silence.
        rows = csv.reader(keep_lines(), delimiter=self._separator, strict=True)
        width = 0
        while True:
            lines.clear()
            start = rows.line_num + 1
            try:
                row = next(rows, None)
            except csv.Error as error:
                raise self._refuse_quotes(start, first_line(error)) from error
            if row is None:
                break
            width = width or len(row)  # the header decides how many cells a line has if it is a row
            # Other programs end a text at a zero character: two persons could become one.
            is_lost = any("\0" in line for line in lines)
            if is_lost and (len(row) != width or any("\0" in row[place] for place in used)):
                raise self.refuse(
                    f"line {start:,} has a zero byte, which is no text; delete it, or export the table again"
                )
            if len(lines) > 1 and max(map(len, row)) > _LONG_CELL:
                raise self._refuse_quotes(start, f"a quote there makes one cell of {len(lines):,} lines")
            # In a table of one column every line could be a row, and texts of several lines are usual.
            if len(lines) > 1 and width > 1:
                cells = [_split_line(line, self._separator) for line in lines]
                if all(len(each) == width for each in cells):
                    suspects.append((start, cells))
            yield row
        if not suspects:
            return
        numeric = _find_numeric(file, self._separator, width)
        for start, cells in suspects:
            if all(_is_number(line[column]) for line in cells for column in numeric):
                what = f"a quote there makes one row of {len(cells):,} lines, each of which could be a row"
                raise self._refuse_quotes(start, what)

    # --- encodings ---

    def _check_width(self) -> None:
        """Raise for a file in UTF-16 that is read in another encoding, and for one that is not and is read in it."""
        is_other = self._looks_like_utf_16()
        if self.reader.codec.startswith("utf-16"):
            start = read_start(self.path)
            # Chinese text without the mark has few zeros, but one beside the end of each line.
            is_other = start[:2] not in _MARKS and b"\0" not in start
        if is_other:
            raise self._refuse_encoding()

    def _check_texts(self, names: Sequence[str], cells: Iterable[str] = ()) -> None:
        """Raise where names or cells that are used are of another encoding than declared."""
        others = "\n".join(text for text in {*names, *cells} if not text.isascii())
        try:
            others.encode()  # a surrogate, which stands for a byte that is no text, has no form in UTF-8
        except UnicodeError as error:
            raise self._refuse_encoding() from error
        if others and _has_one_byte(self.reader.codec):  # any bytes are text in such an encoding
            with suppress(UnicodeError):
                # Text that is valid UTF-8 and not ASCII is hardly ever meant otherwise, and ü would be read as two
                # characters.
                others.encode(self.reader.codec).decode()
                raise self._refuse_encoding()

    def _is_text(self, encoding: str) -> bool:
        """Return whether the whole file is text in an encoding."""
        try:
            with self._open(encoding) as text:
                while text.read(1 << 20):  # in parts, as tables may be larger than memory
                    pass
        except UnicodeError:
            return False
        return True

    def _looks_like_utf_16(self) -> bool:
        """Return whether the file begins with the mark of UTF-16, or is half zeros as plain text in it is.

        These are first or second bytes of all characters. A zero byte elsewhere is an error.
        """
        start = read_start(self.path)
        # ASCII in UTF-16 has a zero at every other place, all on one side: first bytes or second ones.
        zeros = sorted((start[::2].count(0), start[1::2].count(0)))
        return start[:2] in _MARKS or (zeros[1] > len(start) / 10 and zeros[0] < zeros[1] / 10)

    def _refuse_encoding(self) -> SilodpError:
        """Return the error about a file that is not in the declared encoding."""
        found = "utf-16" if self._looks_like_utf_16() else ""
        # cp1252: Windows in western Europe and America.
        found = found or next((encoding for encoding in ("utf-8", "cp1252") if self._is_text(encoding)), "")
        guess = f"it looks like {found}: set {name_setting('encoding', found)}"
        guess = (
            guess if found else f"it is no text in UTF-8, UTF-16 or cp1252: set {name_setting('encoding')}"
        )
        return self.refuse(
            f"not text in the encoding {self.reader.encoding}; {guess}, or export it as UTF-8 (in spreadsheet programs "
            "'CSV UTF-8')",
            code="data.encoding",
        )

    def _refuse_quotes(self, line: int, what: str) -> SilodpError:
        """Return the error about a row in which quotes are not in pairs."""
        return self.refuse(
            f"the row that begins in line {line:,} cannot be read ({what}); write a quote that belongs to a text "
            "twice, within quotes around the cell, or export the table without line breaks in texts"
        )


class _PlainText(RawIOBase):
    """The text of a file in UTF-8, for Arrow; it ends where it is not plain.

    Attributes:
        is_plain: Whether all that was read is plain.
    """

    def __init__(self, path: Path, codec: str, separator: str) -> None:
        self.is_plain = True
        self._file, self._separator = open_bytes(path), ord(separator)
        # Arrow itself checks that columns that are used are UTF-8.
        self._decoder = None if codec.startswith("utf-8") else codecs.getincrementaldecoder(codec)()
        self._given, self._rest = b"", b""

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, fewer than `size` at times; none at the end, and from a block that is not plain on."""
        if not self._given and self.is_plain:
            block = self._read_lines()
            self.is_plain = is_plain(block, self._separator)
            self._given = block if self.is_plain else b""
        end = len(self._given) if size < 0 else size
        given, self._given = self._given[:end], self._given[end:]
        return given

    def _read_lines(self) -> bytes:
        """Return whole lines, about a block of them; the last one may have no end."""
        while True:
            read = self._file.read(_BLOCK)
            self._rest += read if self._decoder is None else self._decoder.decode(read, not read).encode()
            end = self._rest.rfind(b"\n") + 1 if read else len(self._rest)
            if end or not read:
                lines, self._rest = self._rest[:end], self._rest[end:]
                return lines


def is_plain(block: bytes, separator: int) -> bool:
    """Return whether there is one way to read the cells of whole lines: see `DelimitedText`."""
    if b"\0" in block or block.count(b"\r") != block.count(b"\r\n"):
        return False
    if b'"' not in block:
        return True
    characters = np.frombuffer(block, dtype=np.uint8)
    quotes = np.flatnonzero(characters == _QUOTE)
    if len(quotes) % 2:
        return False
    opening, closing = quotes[::2], quotes[1::2]
    is_double = opening[1:] == closing[:-1] + 1  # written twice, it is part of the cell
    before = np.where(opening == 0, _LINE_FEED, characters[opening - 1])
    begins = (before == separator) | (before == _LINE_FEED)
    begins[1:] |= is_double
    last = len(characters) - 1
    after = np.where(closing == last, _LINE_FEED, characters[np.minimum(closing + 1, last)])
    ends = (after == separator) | (after == _LINE_FEED) | (after == _CARRIAGE_RETURN)
    ends[:-1] |= is_double
    # An odd number of quotes before the end of a line: it is within a cell.
    breaks = np.searchsorted(quotes, np.flatnonzero(characters == _LINE_FEED)) % 2
    return bool(begins.all() and ends.all() and not breaks.any())


def _is_blank(row: Sequence[str]) -> bool:
    """Return whether a row before the header is none."""
    return len(row) < 2 and not any(map(str.strip, row))


def _list_other(column: pa.ChunkedArray) -> list[str]:
    """Return the different texts of a column that are not ASCII."""
    others: list[str] = pc.unique(column.filter(pc.invert(pc.string_is_ascii(column)))).to_pylist()
    return others


@contextmanager
def _allow_long_cells() -> Iterator[None]:
    """Lift the limit of the csv module, which holds for the whole process, until the end of the block."""
    before = csv.field_size_limit(_MAX_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


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


def _has_one_byte(codec: str) -> bool:
    """Return whether an encoding has one byte for each character; some bytes may stand for none."""
    return not codec.startswith("utf") and len(bytes(range(256)).decode(codec, "replace")) == 256
