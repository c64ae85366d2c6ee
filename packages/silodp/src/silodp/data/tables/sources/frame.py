"""Data frames of pandas, polars and others that give their columns to Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from silodp.data.tables.columns import Reader
from silodp.data.tables.sources.source import Source, Values


class Frame(Source):
    """A data frame of pandas, or a table with the Arrow PyCapsule interface, which is read without a copy."""

    def __init__(self, frame: Any, reader: Reader) -> None:
        super().__init__(Path("the data frame"), reader)
        try:
            self._frame = frame if isinstance(frame, pd.DataFrame) else pa.table(frame)
        except (TypeError, ValueError, pa.ArrowException) as error:
            reason = f"a {type(frame).__name__} is no table; give a file, or a data frame of pandas, polars or DuckDB"
            raise self.refuse(reason, field="data") from error

    def list_columns(self) -> list[str]:
        """Return the names of the columns as text."""
        names = self._frame.columns if isinstance(self._frame, pd.DataFrame) else self._frame.column_names
        return list(map(str, names))

    def read_columns(self, names: Sequence[str], key: str | None = None) -> dict[str, Values]:
        """Return columns; those of any objects as they are."""
        header = self.list_columns()
        if not isinstance(self._frame, pd.DataFrame):
            return {name: _plain_texts(self._frame.column(header.index(name))) for name in names}
        columns = {name: self._frame.iloc[:, header.index(name)] for name in names}
        return {name: _take_values(column) for name, column in columns.items()}


def _take_values(column: pd.Series[Any]) -> Values:
    categories = getattr(column.dtype, "categories", column)
    # Of objects of several types Arrow makes one type: a number among days becomes a day.
    if categories.dtype != object:
        with suppress(pa.ArrowException, TypeError, ValueError, OverflowError):  # what Arrow does not have
            # Of an array of numpy, NaN stays the number that it is in a file.
            is_numpy = isinstance(column.dtype, np.dtype)
            return pa.chunked_array([pa.array(column.to_numpy() if is_numpy else column)])
    return column.to_numpy(dtype=object)


def _plain_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of views of texts, as polars gives them, as one of texts: Arrow hashes and casts no views."""
    if column.type == pa.string_view():
        return column.cast(pa.large_string())
    if pa.types.is_dictionary(column.type) and column.type.value_type == pa.string_view():
        return pa.chunked_array(
            [
                pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(pa.large_string()))
                for chunk in column.chunks
            ]
        )
    return column
