"""Distinct cells of a column: what is one cell, and what is another."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from silodp.data import Federation
from silodp.data.tables.cells import Cells
from silodp.data.tables.draft import draft_config
from support.refusals import refused
from support.tables import make_cells, schema


def cells_of(column: Any, **reader: Any) -> Cells:
    return make_cells(pd.Series(column), "age", **reader)


@pytest.mark.parametrize("kind", ["object", "str", "string[pyarrow]"])
def test_texts_that_differ_after_a_zero_character_are_two(kind: str) -> None:
    column = ["a\0b", "a\0c", "a", "a\0", "a\0b"]
    cells = cells_of(pd.Series(column, dtype=kind))
    assert cells.expand(cells.texts).tolist() == column
    assert cells.rows.tolist() == [0, 1, 2, 3, 0]


def test_persons_whose_keys_differ_after_a_zero_character_are_two(tmp_path: Path) -> None:
    keys = ["a\0b", "a\0c", "a", "a\0b"]
    table = {"patient": keys, "age": [30] * 4, "sex": ["f"] * 4, "ill": ["no"] * 4}
    pd.DataFrame(table).to_parquet(tmp_path / "rome.parquet")
    federation = Federation.from_tables([tmp_path / "rome.parquet"], schema())
    assert federation.users == 3
    shared = Federation.from_tables([tmp_path / "rome.parquet"], schema(test_share=0.5))
    assert len(shared.silos[0].y) + len(shared.silos[0].held_out.y) == 4


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "Float64", "object", "double[pyarrow]"])
def test_the_sign_of_zero_makes_another_text_in_every_type(kind: str) -> None:
    cells = cells_of(pd.Series([0.0, -0.0, 0.0], dtype=kind))
    assert cells.expand(cells.texts).tolist() == ["0", "-0", "0"]


@pytest.mark.parametrize("kind", [">i4", ">f8", np.longdouble, "Int64", "int64[pyarrow]"])
def test_every_type_of_numbers_is_read(kind: Any) -> None:
    column = pd.Series(np.array([3, 5, 3], dtype=kind) if kind in (">i4", ">f8") else [3, 5, 3], dtype=kind)
    assert cells_of(column).expand(cells_of(column).parse_numbers()).tolist() == [3, 5, 3]


def test_equal_cells_of_other_types_are_compared_as_texts() -> None:
    cells = cells_of([1, 1.0, True, "1", Decimal("1.50"), None, np.nan, ""])
    assert cells.expand(cells.texts).tolist() == ["1", "1", "True", "1", "1.50", "", "", ""]
    assert cells.expand(cells.is_text).tolist() == [False] * 3 + [True] + [False] * 3 + [True]
    assert cells.expand(cells.is_missing).tolist() == [False] * 5 + [True] * 3


def test_a_missing_time_is_no_date() -> None:
    cells = cells_of(pd.Series(["02.01.2020", pd.NaT], dtype=object))
    assert cells.is_date.tolist() == [False, False]


def test_the_first_faulty_row_is_named() -> None:
    with refused("data.value") as caught:
        cells_of(["1.000", b"x"], decimal=",")
    assert "data row 1" in str(caught.value)
    with refused("data.value") as caught:
        cells_of(["2", [1], b"x"])
    assert "a list in data row 2" in str(caught.value)


def test_a_draft_of_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    pd.DataFrame({"patient": pd.Series([], dtype="int64"), "ill": pd.Series([], dtype=bool)}).to_parquet(
        tmp_path / "rome.parquet"
    )
    with refused("data.no_records"):
        draft_config(tmp_path / "rome.parquet", "patient", "ill")
