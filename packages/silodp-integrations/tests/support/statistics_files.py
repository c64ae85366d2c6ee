"""Files of SPSS, SAS and Stata for tests, and what our sources read of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from silodp.data.tables.columns import Reader
from silodp.data.tables.sources.source import Source, open_source

Write = Callable[..., Path]

_TEXT, _DOUBLE = 0, 5
_POINTER = ctypes.c_void_p
_WRITE = ctypes.CFUNCTYPE(ctypes.c_ssize_t, _POINTER, ctypes.c_size_t, _POINTER)


def open_file(path: Path, **settings: Any) -> Source:
    """Return the source of a file, with these settings of the reader."""
    return open_source(path, Reader(**settings))


def read(path: Path, key: str | None = None, **settings: Any) -> dict[str, list[Any]]:
    """Return all columns of a file."""
    source = open_file(path, **settings)
    found = source.read_columns(source.list_columns(), key)
    return {name: values.to_pylist() for name, values in found.items()}


def read_one(path: Path, key: str | None = None) -> list[Any]:
    """Return the only column of a file."""
    (column,) = read(path, key).values()
    return column


def write_file(
    path: Path, columns: Mapping[str, Any], formats: Mapping[str, str] | None = None, **options: Any
) -> Path:
    """Write columns to a file of the kind that its name says, with options of pyreadstat."""
    import pyreadstat

    ending = path.suffix[1:]
    if ending == "sas7bdat":
        _write_sas(path, columns, formats or {})
        return path
    function = {"zsav": "sav", "xpt": "xport"}.get(ending, ending)
    if ending == "zsav":
        options["compress"] = True
    if formats:
        options["variable_format"] = formats
    getattr(pyreadstat, f"write_{function}")(pd.DataFrame(columns), str(path), **options)
    return path


def _write_sas(path: Path, columns: Mapping[str, Sequence[Any]], formats: Mapping[str, str]) -> None:
    """Write a data set of SAS by the C library within pyreadstat, which pyreadstat itself does not ask to do that.

    Columns have texts or numbers; in one of numbers None is missing, and a text such as "A" is the code .A.
    """
    import pyreadstat._readstat_writer as module

    library = ctypes.CDLL(module.__file__)
    parts = []

    def keep(data: int, size: int, _: Any) -> int:
        parts.append(ctypes.string_at(data, size))
        return size

    def call(name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
        function = getattr(library, f"readstat_{name}")
        function.restype = result
        found = function(*arguments)
        assert result is not ctypes.c_int or name.startswith(("set", "variable")) or found == 0, name
        return found

    writer, kept = _POINTER(call("writer_init", result=_POINTER)), _WRITE(keep)
    call("set_data_writer", writer, kept)
    variables = {}
    for name, cells in columns.items():
        is_text = all(isinstance(cell, str) for cell in cells)
        width = ctypes.c_size_t(max(len(cell.encode()) for cell in cells) if is_text else 8)
        kind = _TEXT if is_text else _DOUBLE
        made = _POINTER(call("add_variable", writer, name.encode(), kind, width, result=_POINTER))
        variables[name] = made, is_text
        if name in formats:
            call("variable_set_format", made, formats[name].encode(), result=None)
    size = len(next(iter(columns.values())))
    call("begin_writing_sas7bdat", writer, None, ctypes.c_long(size))
    for row in range(size):
        call("begin_row", writer)
        for name, (made, is_text) in variables.items():
            cell = columns[name][row]
            if is_text:
                call("insert_string_value", writer, made, cell.encode())
            elif cell is None:
                call("insert_missing_value", writer, made)
            elif isinstance(cell, str):
                call("insert_tagged_missing_value", writer, made, ctypes.c_char(cell.encode()))
            else:
                call("insert_double_value", writer, made, ctypes.c_double(cell))
        call("end_row", writer)
    call("end_writing", writer)
    path.write_bytes(b"".join(parts))
