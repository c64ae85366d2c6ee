"""Tables on disk, their schema, and what is read of them."""

from __future__ import annotations

from silodp.data import Federation
from silodp.data.tables.reader import Schema


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
