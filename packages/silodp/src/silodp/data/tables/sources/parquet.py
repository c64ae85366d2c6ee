"""Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from silodp.data.tables.sources.content import find_other_kind
from silodp.data.tables.sources.source import Source, Values
from silodp.data.tables.sources.types import is_text, mark_outside_years
from silodp.errors import SilodpError
from silodp.text import first_line


class Parquet(Source):
    """A Parquet file."""

    column_faults: ClassVar[tuple[str, ...]] = ("data.unreadable", "data.value")

    @cached_property
    def _place(self) -> Path | BytesIO:
        if found := find_other_kind(self.path, "parquet"):
            raise self.refuse(f"the name ends in .parquet, and the file {found}")
        try:
            pq.ParquetFile(self.path).close()
        except pa.ArrowNotImplementedError:
            return _hide_types(self.path)
        return self.path

    def list_columns(self) -> list[str]:
        """Return the names of all columns."""
        with pq.ParquetFile(self._place) as file:
            return list(file.schema_arrow.names)

    def read_columns(self, names: Sequence[str], key: str | None = None) -> dict[str, Values]:
        """Return columns as they are stored; texts as a dictionary.

        Raises:
            SilodpError: A column cannot be read, or has a time outside the years of Python.
        """
        with pq.ParquetFile(self._place) as file:
            texts = [field.name for field in file.schema_arrow if is_text(field.type)]
            parts = [file.schema.column(place) for place in range(len(file.schema))]
            noted = (file.schema_arrow.pandas_metadata or {}).get("columns", [])
        # INT96 has no zone; pandas notes it elsewhere, and reads it from there.
        zones = {one.get("name"): (one.get("metadata") or {}).get("timezone") for one in noted}
        # Seconds hold all that INT96 does. In finer units times of far years become others, without an error.
        has_int96 = {part.path for part in parts if part.physical_type == "INT96"}
        found = dict[str, Values]()
        with (
            pq.ParquetFile(
                self._place,
                read_dictionary=[name for name in names if name in texts],
                coerce_int96_timestamp_unit="us",
            ) as file,
            pq.ParquetFile(self._place, coerce_int96_timestamp_unit="s") as in_seconds,
        ):
            for name in names:
                try:
                    column = _take_column(file, name)
                    self._check_years(name, _take_column(in_seconds, name) if name in has_int96 else column)
                    if name in has_int96 and zones.get(name) and getattr(column.type, "tz", None) is None:
                        column = pc.assume_timezone(column, "UTC").cast(pa.timestamp("us", zones[name]))
                    if self._place is not self.path and getattr(column.type, "tz", None):
                        raise ValueError("its time zone is not known")
                except SilodpError:
                    raise
                except Exception as error:  # damaged files, and types that Arrow does not read
                    why = f"column {name!r} cannot be read ({first_line(error)}); export it as text"
                    raise self.refuse(why) from error
                found[name] = column
        return found

    def _check_years(self, name: str, column: pa.ChunkedArray) -> None:
        """Raise for a time outside the years of Python, by UTC where it has a zone."""
        if not (pa.types.is_date(column.type) or pa.types.is_timestamp(column.type)):
            return
        outside = mark_outside_years(column)
        if outside.any():
            what, remedy = "a time outside the years 1 to 9999", "correct the cell, or leave it empty"
            raise self.refuse_cell(name, int(np.argmax(outside)), what, remedy)


def _hide_types(path: Path) -> BytesIO:
    """Return a Parquet file without the types that its writer has noted beside those of Parquet.

    Arrow reads no column of a file in which they name one that it does not have, such as whole numbers of 128 bits.
    """
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    # As long as before: the footer has lengths.
    footer = content[start:].replace(b"ARROW:schema", b"other:schema")
    return BytesIO(content[:start] + footer)


def _take_column(file: pq.ParquetFile, name: str) -> pa.ChunkedArray:
    """Return the column of a name; a.b may also be a part of another column, a."""
    table = file.read(columns=[name], use_threads=False)
    return next(table.column(place) for place, other in enumerate(table.column_names) if other == name)
