"""A DuckDB file of a folder of CSV files, with the types that the Common Data Model declares."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
from pyarrow import csv as arrow_csv

from silodp.errors import SilodpError
from silodp.text import first_line, join_names, name_extra
from silodp.wire.files import PRIVATE_FILE
from silodp_integrations.omop.definition import Column, Definition, Row
from silodp_integrations.omop.tables import ANCESTOR_COLUMNS, PERIOD_COLUMNS, PERSON_COLUMNS

_TYPES = {
    "_id": pa.int64(),
    "_of_birth": pa.int32(),
    "_date": pa.date32(),
    "_datetime": pa.timestamp("us"),
    # NUMERIC, which the Common Data Model writes, has three decimals in DuckDB.
    "_as_number": pa.float64(),
}
"""Types by the end of a column's name; all others are text, in which leading zeros stay."""

Tables = Mapping[str, Mapping[str, pa.DataType]]
"""Names of tables → names of columns → their types."""


def list_tables(definition: Definition, silo: str) -> Tables:
    """Return the tables and columns that the query of a silo reads."""
    schema, person = definition.find_silo(silo)
    of_person = [*PERSON_COLUMNS, *([person] if isinstance(person, str) else [])]
    found = {"person": of_person}
    asked: list[Row | Column] = [definition.row, *definition.columns.values()]
    for events in (one.events for one in asked):
        if events is not None:
            found[events.name] = events.list_columns()
    if definition.row.observed:
        found["observation_period"] = list(PERIOD_COLUMNS)
    if any(one.descendants for one in asked):
        found["concept_ancestor"] = list(ANCESTOR_COLUMNS)
    tables = {
        f"{schema}{name}": {column: _find_type(column) for column in columns}
        for name, columns in found.items()
    }
    if isinstance(person, str):
        tables[f"{schema}person"][person] = pa.string()
        return tables
    return {**tables, person.table: {person.key: pa.int64(), person.column: pa.string()}}


def load_folder(folder: Path, tables: Tables, out: Path) -> dict[str, int]:
    """Write a DuckDB file, which its owner alone may read.

    Args:
        folder: The folder of the files: measurement.csv, in upper or lower case, with commas or tabs.
        tables: The tables and columns to load.
        out: The file to write.

    Returns:
        The rows of each table.

    Raises:
        SilodpError: A file or column is missing, a cell is not of its type, or `out` is there.
    """
    try:
        import duckdb
    except ImportError:
        raise SilodpError(
            f"{out}: writing it needs duckdb, which is not installed; {name_extra('duckdb', __name__)}.",
            code="data.no_reader",
        ) from None
    if out.exists():
        raise SilodpError(f"{out} is there already: name another file.", code="run.exists", field="--out")
    if out.stem.casefold() in {name.partition(".")[0].casefold() for name in tables if "." in name}:
        raise SilodpError(
            f"{out} has the name of a schema, and DuckDB cannot tell them apart: name another file.",
            code="argument.value",
            field="--out",
        )
    files = _find_files(folder, list(tables))
    # Beside the file, so that it appears whole or not at all, in a folder that nobody else may enter.
    with TemporaryDirectory(dir=out.parent, prefix=".silodp-") as private:
        made = Path(private) / out.name
        with closing(duckdb.connect(str(made))) as connection:
            for name, columns in tables.items():
                if "." in name:
                    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {name.rpartition('.')[0]}")
                with _explain(files[name]):
                    connection.register("incoming", _read(files[name], columns))
                    connection.execute(f"CREATE TABLE {name} AS SELECT * FROM incoming")
            counted = {
                name: connection.execute(f"SELECT COUNT(*) FROM {name}").fetchall()[0][0] for name in tables
            }
        made.chmod(PRIVATE_FILE)
        made.replace(out)
    return counted


def _find_type(column: str) -> pa.DataType:
    # "_datetime" does not end in "_date".
    return next((kind for end, kind in _TYPES.items() if column.endswith(end)), pa.string())


def _find_files(folder: Path, tables: list[str]) -> dict[str, Path]:
    there = {path.name.casefold(): path for path in sorted(folder.glob("*"))} if folder.is_dir() else {}
    files = {name: there.get(f"{name.rpartition('.')[2]}.csv".casefold()) for name in tables}
    if lacking := [name.rpartition(".")[2] for name, path in files.items() if path is None]:
        listed = join_names(f"{name}.csv" for name in lacking)
        raise SilodpError(
            f"{folder} lacks {listed}, which the definition needs; export them, a header alone where a table is empty.",
            code="data.no_file",
            field=lacking[0],
        )
    return {name: path for name, path in files.items() if path is not None}


def _read(path: Path, columns: Mapping[str, pa.DataType]) -> pa.RecordBatchReader:
    """Return the columns of a file, in parts."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        separator = "\t" if "\t" in first else ","
        header = {
            name.strip().casefold(): name for name in next(csv.reader([first], delimiter=separator), [])
        }
    if lacking := [name for name in columns if name.casefold() not in header]:
        raise SilodpError(
            f"{path} lacks the column {join_names(lacking)}; export the table as the Common Data Model has it.",
            code="data.column",
            field=lacking[0],
        )
    names = {header[name.casefold()]: name for name in columns}
    schema = pa.schema(list(columns.items()))

    def stream() -> Iterator[pa.RecordBatch]:
        with (
            _explain(path),
            arrow_csv.open_csv(
                path,
                parse_options=arrow_csv.ParseOptions(delimiter=separator, newlines_in_values=True),
                convert_options=arrow_csv.ConvertOptions(
                    include_columns=list(names),
                    column_types={written: columns[name] for written, name in names.items()},
                    null_values=[""],
                    strings_can_be_null=True,
                ),
            ) as reader,
        ):
            for batch in reader:
                yield batch.rename_columns(schema.names)

    return pa.RecordBatchReader.from_batches(schema, stream())


@contextmanager
def _explain(path: Path) -> Iterator[None]:
    """Turn errors of Arrow, of which DuckDB has the text, into one sentence about the file."""
    try:
        yield
    except SilodpError:
        raise
    except (
        Exception
    ) as error:  # an empty file, no text of UTF-8, a cell of another type, a row that is too long
        told = first_line(error)
        raise SilodpError(
            f"{path}: a table with cells of the declared types was expected ({told}); export it again.",
            code="data.unreadable",
            field=path.stem,
        ) from None
