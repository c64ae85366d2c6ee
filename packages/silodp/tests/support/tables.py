"""Tables on disk, their schema, and what is read of them."""

from __future__ import annotations

from datetime import date
from typing import Any

import pandas as pd

from silodp.data import Federation
from silodp.data.tables.cells import Cells, Refusals, find_distinct_cells
from silodp.data.tables.columns import Reader
from silodp.data.tables.schema import Schema
from silodp.data.tables.sources.frame import Frame


def schema(**changes):
    fields = {
        "user": "patient",
        "label": "ill",
        "classes": ["no", "yes"],
        "numeric": {"age": (20, 80)},
        "categorical": {"sex": ["f", "m", "x"]},
    }
    return Schema(**{**fields, **changes})


def write(folder, **tables):
    paths = {}
    for name, text in tables.items():
        paths[name] = folder / f"{name}.csv"
        paths[name].write_text(text)
    return paths


def read(folder, *, options=None, **tables):
    return Federation.from_tables(write(folder, **tables), schema(**(options or {})))


def make_cells(column: pd.Series[Any], name: str, **reader: Any) -> Cells:
    """Return the cells of a column of a data frame."""
    source = Frame(column.to_frame(name), Reader(**reader))
    found = find_distinct_cells(source, name, source.read_columns([name])[name])
    refusals = Refusals(source.path)
    return Cells(name, name, found.texts, found.mark(str), found.mark(date), found.rows, source, refusals)
