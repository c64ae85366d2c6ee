"""Sources: what Arrow parses is what the csv module parses, and numbers are those of their texts."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
import tomllib
from datetime import date
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from silodp.data import Federation
from silodp.data.tables import _values
from silodp.data.tables._values import find_distinct, read_floats
from silodp.data.tables.cells import mark_missing
from silodp.data.tables.columns import Reader
from silodp.data.tables.draft import draft_config
from silodp.data.tables.reader import read_inputs
from silodp.data.tables.schema import find_test_persons
from silodp.data.tables.sources import delimited
from silodp.data.tables.sources.delimited import DelimitedText, is_plain
from silodp.data.tables.sources.frame import Frame
from silodp.errors import SilodpError
from support.places import ROOT
from support.refusals import refused
from support.tables import schema

CHARACTERS = st.sampled_from(
    [*'a1é ";,\t', "\n", "\r\n", "\r", "\0", '""', '"a,b"', '"a\nb"', ",", ",", "\n"]
)


def read_both(path: Path, **reader: str) -> tuple[list[list[str]] | None, list[list[str]] | None]:
    """Return the columns 0 and 1 as Arrow parses them and as the csv module does; None where one does not."""
    source = DelimitedText(path, Reader(**reader))
    try:
        if len(source.list_columns()) < 2:
            return None, None
    except SilodpError:
        return None, None
    plain = source._read_plain([0, 1])
    try:
        rows = source._read_rows([0, 1])
    except SilodpError:
        rows = None
    columns = None if plain is None else [column.to_pylist() for column in plain]
    return columns, None if rows is None else [[row[place] for row in rows] for place in (0, 1)]


@settings(max_examples=600)
@given(
    content=st.lists(CHARACTERS, max_size=40).map("".join),
    codec=st.sampled_from(["utf-8", "cp1252", "utf-16"]),
    above=st.sampled_from(["", "", "\n", '"', " \n"]),
)
@example(content='1,"a\n2",b\n', codec="utf-8", above="")
@example(content='1,a"b"\n"x"",y\n', codec="utf-8", above="")
@example(content="1,2,3\n", codec="utf-8", above="\n")
def test_arrow_parses_a_plain_file_as_the_csv_module_does(tmp_path_factory, content, codec, above) -> None:
    path = tmp_path_factory.mktemp("plain") / "a.csv"
    path.write_bytes((above + "id,age,other\n" + content).encode(codec))
    plain, rows = read_both(path, encoding=codec)
    assert plain is None or plain == rows


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ('a,"b,c"\n"",d\n', True),
        ('a,"b""c"\n', True),
        ('""""\n', True),
        ('a,"b"\r\n"c",d\r\n', True),
        ('"a","b"', True),
        ('a"b\n"c,d\n', False),
        ('a, "b"\n', False),
        ('"a" ,b\n', False),
        ('"a\nb",c\n', False),
        ('"a\n', False),
        ("a\rb\n", False),
        ("a\0b\n", False),
    ],
)
def test_what_is_plain(text: str, plain: bool) -> None:
    assert is_plain(text.encode(), ord(",")) == plain


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
def test_a_large_plain_file_is_parsed_by_arrow_block_by_block(tmp_path, monkeypatch, ending) -> None:
    monkeypatch.setattr(delimited, "_BLOCK", 1000)
    text = io.StringIO()
    rows = [[f"é{row}", f"{row},5", "x" * (row % 50)] for row in range(5000)]
    csv.writer(text).writerows([["id", "age", "other"], *rows])
    path = tmp_path / f"a.{ending}"
    content = text.getvalue().encode()
    path.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    plain, found = read_both(path)
    assert plain == found == [[row[0] for row in rows], [row[1] for row in rows]]


def test_a_fault_far_behind_the_first_block_is_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(delimited, "_BLOCK", 100)
    lines = ["patient,age,sex,ill", *(f"{row},30,f,no" for row in range(500)), '500,30,f,"no" x']
    (tmp_path / "a.csv").write_text("\n".join(lines))
    with refused("data.unreadable") as caught:
        Federation.from_tables([tmp_path / "a.csv"], schema())
    assert "line 502" in str(caught.value)


NUMBERS = st.one_of(
    st.floats(allow_nan=True, width=64).map(repr),
    st.text(alphabet="0123456789+-.,eE xnaifNA_", max_size=9),
    st.sampled_from(
        ["", "NA", "nan", "-9", "-9.0", "-9,00", " 5", "+7", "1e5", "1.", ".5", "1.000", "0x1A", "1_0", "١"]
    ),
)


@settings(max_examples=800)
@given(texts=st.lists(NUMBERS, max_size=12), decimal=st.sampled_from([".", ","]))
def test_numbers_of_a_column_are_those_of_its_cells(texts: list[str], decimal: str) -> None:
    reader = Reader(decimal=decimal)
    column = pa.chunked_array([pa.array(texts, pa.string())])
    stands_for_none = mark_missing(reader)
    found = read_floats(column, reader, stands_for_none)
    try:
        cells = find_distinct(column, decimal)
    except _values.CellError:
        assert found is None
        return
    slow = _values.parse_numbers(cells.texts, decimal)
    slow[[stands_for_none(text) for text in cells.texts]] = np.nan
    if found is None:
        return  # the cells are then looked at one by one
    np.testing.assert_array_equal(found, slow[cells.rows])


def test_a_column_of_numbers_and_marks_for_no_value_is_read_without_its_cells(monkeypatch) -> None:
    monkeypatch.setattr(_values, "format_cell", None)
    texts = ["1.5", "NA", "", " 2", "+3", "-4e2"] * 2
    found = read_floats(pa.chunked_array([texts]), Reader(), mark_missing(Reader()))
    np.testing.assert_array_equal(found, [1.5, np.nan, np.nan, 2, 3, -400] * 2)


def test_rules_look_at_distinct_cells(tmp_path, monkeypatch) -> None:
    calls = []
    format_cell = _values.format_cell
    monkeypatch.setattr(_values, "format_cell", lambda value: calls.append(value) or format_cell(value))
    rows = 5000
    frame = {"patient": [f"p-{row % 7}" for row in range(rows)], "age": 30.5, "sex": "f ", "ill": "no "}
    pd.DataFrame(frame).to_csv(tmp_path / "a.csv", index=False)
    assert Federation.from_tables([tmp_path / "a.csv"], schema()).users == 7
    assert len(calls) < 20


def test_exact_numbers_of_typed_columns(tmp_path) -> None:
    """As text and back, float32 and decimals had another last digit."""
    decimals = pa.array([1, 3, 7], pa.int64()).cast(pa.decimal128(38, 0))
    table = pa.table({"x": pa.array([0.1, 0.2, 0.3], pa.float32()), "d": decimals})
    none = mark_missing(Reader())
    assert (
        read_floats(table["x"], Reader(), none).tolist() == np.float32([0.1, 0.2, 0.3]).astype(float).tolist()
    )
    assert read_floats(table["d"], Reader(decimal=","), none).tolist() == [1, 3, 7]
    tenth = pa.chunked_array([pa.array(["0.1", "2.30"]).cast(pa.decimal128(20, 18))])
    for decimal in (".", ","):
        found = read_floats(tenth, Reader(decimal=decimal), none)
        assert found is not None
        assert found.tolist() == [0.1, 2.3]


def test_values_of_a_dictionary_that_no_row_has_are_no_cells() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([2, None, 0]), pa.array(["b", "true", "a"]))
    found = find_distinct(pa.chunked_array([array]))
    assert found.texts[found.rows].tolist() == ["a", "", "b"]
    assert sorted(found.texts) == ["", "a", "b"]


@pytest.mark.parametrize("cell", ["0", "0,0", "0,00"])
def test_a_missing_code_with_a_point_beside_decimal_commas_is_its_number(tmp_path, cell) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"patient;age;sex;ill\n1;{cell};f;no\n2;50;f;no\n")
    reader = {"separator": ";", "decimal": ",", "missing": ["0.0"]}
    found = Federation.from_tables(
        [path], schema(reader=reader, numeric={"age": {"range": (20, 80), "missing": 65}})
    )
    assert found.silos[0].x[:, 0].tolist() == [0.5, 0]


def test_objects_of_several_types_stay_what_they_are() -> None:
    """pyarrow 26 makes a day of a number of numpy's longest type beside days."""
    cells = [date(2020, 1, 2), np.longdouble("1.5"), date(2020, 1, 2)]
    for column in (pd.Series(cells, dtype=object), pd.Series(cells, dtype=object).astype("category")):
        values = Frame(column.to_frame("day"), Reader()).read_columns(["day"])["day"]
        assert find_distinct(values).texts.tolist() == ["2020-01-02", "1.5"]


@pytest.mark.parametrize(("kind", "bits"), [("float16", 11), ("float32", 24), ("float64", 53)])
def test_keys_are_rounded_from_where_their_type_skips_whole_numbers(tmp_path, kind, bits) -> None:
    def read(key: float) -> Federation:
        frame = {
            "patient": np.array([key, 3], dtype=kind),
            "age": [30, 40],
            "sex": ["f", "m"],
            "ill": ["no", "no"],
        }
        pd.DataFrame(frame).to_parquet(tmp_path / "a.parquet")
        return Federation.from_tables([tmp_path / "a.parquet"], schema())

    assert read(2.0**bits - 1).user_keys[-1] == str(2**bits - 1)
    with refused("data.value") as caught:
        read(2.0**bits)
    assert "rounded number" in str(caught.value)


def test_a_table_with_the_arrow_interface_is_predicted_from() -> None:
    table = pa.table({"age": pa.array([30, None], pa.int16()), "sex": ["f", "m"], "id": [2**60 + 1, 5]})
    with refused("data.value") as caught:
        read_inputs(table, schema())
    assert "column 'age' is '' in data row 2" in str(caught.value)
    x, kept = read_inputs(table.slice(0, 1), schema(), ["id"])
    assert x.tolist() == [[pytest.approx(-2 / 3), 1, 0, 0]]
    assert kept["id"].tolist() == [2**60 + 1]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.csv", "id,ill,town\n1,no,Köln\n2,yes,Bonn\n".encode(), "data.encoding"),
        ("b.csv", b"id,ill,town\n1,no\n", "data.unreadable"),
    ],
)
def test_a_fault_of_a_whole_file_is_no_fault_of_one_column_of_a_draft(tmp_path, name, content, code) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(code):
        draft_config(tmp_path / name, "id", "ill", Reader(encoding="cp1252"))


def test_views_of_texts_are_texts() -> None:
    """As polars 2.1 gives them, with and without categories."""
    texts = pa.array(["f", None, "m", "f"], pa.string_view())
    codes = pa.DictionaryArray.from_arrays(
        pa.array([0, None, 1, 0], pa.uint32()), pa.array(["f", "m"], pa.string_view())
    )
    table = pa.table(
        {"age": pa.array(["30.5", "40", "50", "60"], pa.string_view()), "sex": texts, "other": codes}
    )
    columns = Frame(table, Reader()).read_columns(["age", "sex", "other"])
    assert read_floats(columns["age"], Reader(), mark_missing(Reader())).tolist() == [30.5, 40, 50, 60]
    for name in ("sex", "other"):
        found = find_distinct(columns[name])
        assert found.texts[found.rows].tolist() == ["f", "", "m", "f"]


def test_what_is_no_table_is_refused_in_one_sentence() -> None:
    class Other:
        columns = ("age", "sex")

    with refused("data.unreadable") as caught:
        read_inputs(Other(), schema())
    assert "a Other is no table" in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_of_test_persons_is_that_of_their_hashes(share: float) -> None:
    keys = [f"p{number}" for number in range(500)]
    hashes = [hashlib.sha256(f"silodp test person {key}".encode()).digest()[:8] for key in keys]
    assert find_test_persons(keys, share) == [int.from_bytes(one, "big") < share * 2.0**64 for one in hashes]


def test_a_source_of_another_distribution_is_found_by_the_ending(tmp_path, monkeypatch) -> None:
    """docs/extending.md"""
    page = (ROOT / "docs/extending.md").read_text()
    blocks = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', page, re.M | re.S))
    points = tomllib.loads(blocks["pyproject.toml"])["project"]["entry-points"]["silodp.table_sources"]
    (tmp_path / "json_lines.py").write_text(blocks["json_lines.py"])
    about = tmp_path / "approvals-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: approvals\nVersion: 1.0\n")
    lines = "".join(f"{name} = {place}\n" for name, place in points.items())
    (about / "entry_points.txt").write_text(f"[silodp.table_sources]\n{lines}")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [
        {"patient": "p1", "age": 50, "sex": "f", "ill": "no"},
        {"patient": "p2", "age": 65.0, "sex": "m", "ill": "yes"},
    ]
    path = tmp_path / "rome.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    federation = Federation.from_tables([path], schema())
    assert federation.user_keys == ("p1", "p2")
    np.testing.assert_allclose(federation.silos[0].x, [[0, 1, 0, 0], [0.5, 0, 1, 0]])
    path.write_text("{")
    with refused("data.unreadable") as caught:
        Federation.from_tables([path], schema())
    assert "not readable as jsonl" in str(caught.value)
    with refused("data.unreadable") as caught:
        Federation.from_tables([tmp_path / "json_lines.py"], schema())
    assert ".jsonl" in str(caught.value)
