"""Tables as spreadsheet programs and databases write them: separators, encodings, dates, missing cells."""

import base64
import bz2
import csv
import datetime
import gzip
import json
import logging
import random
import re
import sys
import tomllib
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from decimal import Decimal
from io import BytesIO
from itertools import product

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from silodp.config.resolve import load_config
from silodp.data import Federation
from silodp.data.tables.columns import Reader
from silodp.data.tables.draft import draft_config
from silodp.data.tables.reader import Schema, read_inputs
from silodp.errors import SilodpError
from support.refusals import refused

GERMAN = "Fall;Größe;Aufnahme;krank\nMüller 1;1,80;03.02.2020;ja\nZoë 2;1,65;01.01.2020;nein\n"
READER = {"separator": ";", "decimal": ",", "encoding": "cp1252"}


def schema(**changes):
    fields = {
        "user": "Fall",
        "label": "krank",
        "classes": ["nein", "ja"],
        "numeric": {
            "Größe": {"range": (0.0, 2.5), "typical": (1.7, 0.1)},
            "Aufnahme": {"range": (0, 366), "date": "%d.%m.%Y", "since": "2020-01-01"},
        },
        "reader": Reader(**READER),
    }
    return Schema(**{**fields, **changes})


def read(path, **changes):
    return Federation.from_tables({"nord": path}, schema(**changes))


def check(built):
    np.testing.assert_allclose(built.silos[0].x[:, 0], [1, -0.5], atol=1e-6)
    np.testing.assert_allclose(built.silos[0].x[:, 1], [33 / 183 - 1, -1], atol=1e-6)
    assert built.user_keys == ("Müller 1", "Zoë 2")
    np.testing.assert_array_equal(built.silos[0].y, [1, 0])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16", "utf-16-le"])
def test_a_german_export_is_read_in_its_encoding_and_named_in_others(tmp_path, encoding):
    path = tmp_path / "nord.csv"
    path.write_text(GERMAN, encoding=encoding)
    if encoding != "utf-16-le":  # without its mark it is not recognized
        check(read(path, reader={**READER, "encoding": encoding}))
    for other in ("utf-8", "cp1252", "utf-16"):
        if encoding.startswith(other):
            continue
        with refused("data.encoding") as caught:
            read(path, reader={**READER, "encoding": other})
        assert f'encoding = "{encoding.removesuffix("-sig").removesuffix("-le")}"' in str(caught.value)


def read_key(path, key, written, declared):
    path.write_bytes(f"Fall;size;krank\n{key};1;ja\n".encode(written))
    return read(path, reader={**READER, "encoding": declared}, numeric={"size": (0, 2)}).user_keys


@pytest.mark.parametrize("declared", ["cp1252", "latin-1", "cp1251", "mac-roman"])
def test_text_in_utf_8_is_not_read_in_an_encoding_of_one_byte(tmp_path, declared):
    """Mü17 would be another person without an error, as all its bytes are text there."""
    with refused("data.encoding") as caught:
        read_key(tmp_path / "nord.csv", "Mü17", "utf-8", declared)
    assert 'encoding = "utf-8"' in str(caught.value)
    assert read_key(tmp_path / "nord.csv", "Mu17", "utf-8", declared) == ("Mu17",)


@pytest.mark.parametrize("rows", [1, 1_000])
@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_a_zero_byte_is_refused_wherever_it_is(tmp_path, rows, encoding):
    """pandas ends a cell there: Mu17 would be Mu1, another person."""
    keys = "".join(f"A{key};1;ja\n" for key in range(rows))
    with refused("data.unreadable") as caught:
        read_key(tmp_path / "nord.csv", f"Mu1;1;ja\n{keys}Mu1\x007", encoding, encoding)
    assert f"line {rows + 3:,} has a zero byte" in str(caught.value)


STRAY = {
    "both begin a cell": 'P1;"severe;30;ja\nP2;ok;40;nein\nP3;"mild;50;nein\n',
    "an inch mark": 'P1;"severe;30;ja\nP2;ok;40;nein\nP3;height 5";50;nein\n',
    "in keys": '"P1;note;30;ja\nP2;ok;40;nein\nP3";mild;50;nein\n',
    "one alone": 'P1;"severe;30;ja\nP2;ok;40;nein\n',
}


@pytest.mark.parametrize("rows", STRAY.values(), ids=STRAY)
def test_rows_between_stray_quotes_are_not_lost(tmp_path, rows):
    """Before, P1 had the size and the label of P3, and P2 was gone."""
    path = tmp_path / "nord.csv"
    path.write_text(f"Fall;note;size;krank\n{rows}")
    with refused("data.unreadable") as caught:
        read(path, numeric={"size": (0, 100)})
    assert "the row that begins in line 2 " in str(caught.value)


def test_a_stray_quote_is_found_where_the_last_cells_of_lines_are_empty(tmp_path):
    path = tmp_path / "nord.tsv"
    path.write_text('Fall\tnote\tsize\tkrank\tz\nP1\t"a\t30\tja\t\nP2\tb"\t40\tnein\t\nP3\tc\t5\tja\t1\n')
    with refused("data.unreadable"):
        read(path, reader={}, numeric={"size": (0, 100)})


def test_an_address_of_two_lines_is_no_row(tmp_path):
    """Both lines have the separators of a row, but no number where the other rows have one."""
    path = tmp_path / "nord.csv"
    path.write_text('Fall,addr,size,krank\np1,"12 High St, Flat 3, Leeds\nLS1, UK",1,ja\np2,q,2,nein\n')
    built = read(path, reader={}, numeric={"size": (0, 100)})
    assert built.user_keys == ("p1", "p2")


def test_text_with_line_breaks_and_quotes_in_pairs_is_read(tmp_path):
    path = tmp_path / "nord.csv"
    path.write_text('Fall;note;size;krank\nP1;"fell; said ""no""\nthen; slept";30;ja\nP2;5" cut;40;nein\n')
    built = read(path, numeric={"size": (0, 100)})
    assert built.user_keys == ("P1", "P2")
    np.testing.assert_array_equal(built.silos[0].y, [1, 0])


@pytest.mark.parametrize(
    "key",
    [
        "1.2345679E12", "1,2345679E12", "12345678901234568.0", "P1\nP2",
        "'0017", "'A17'", '="0017"', ' "0017"', "M\ufffdller",
        r"\N", "#N/A", "-", "?", "(null)", "NaT", "<NULL>",
        "inf", "-inf", "Infinity", "+INF", "1.#INF", "1.#IND", "-nan", "nan", "-nan(ind)", "1.5E-7", "9.0e+999",
    ],
)  # fmt: skip
def test_keys_that_an_export_has_changed_are_refused(tmp_path, key):
    """They merge persons, or divide one over silos."""
    path = tmp_path / "nord.csv"
    written = f'"{key.replace(chr(34), 2 * chr(34))}"'
    path.write_text(f"Fall;size;krank\n{written};1;ja\n", encoding="utf-8")
    with refused("data.value"):
        read(path, reader={"separator": ";"}, numeric={"size": (0, 2)})


@pytest.mark.parametrize(
    "key",
    ["1E12", "1234567890123456.0", "NAT", "'t Hooft", "O'Brien", "12/345", "1.5", "Nat-1", "info", "1e400"],
)
def test_keys_that_look_like_those_are_read(tmp_path, key):
    assert read_key(tmp_path / "nord.csv", key, "utf-8", "utf-8") == (key.removesuffix(".0"),)


@pytest.mark.parametrize(
    "content", [b"Fall;size;krank\na;1;ja\0\nb;2;ja\n", b"Fall;size;krank\na;1;ja\n" + bytes(99)]
)
def test_zero_bytes_are_not_taken_for_utf_16(tmp_path, content):
    path = tmp_path / "nord.csv"
    path.write_bytes(content)
    with refused("data.unreadable"):
        read(path, reader={"separator": ";"}, numeric={"size": (0, 2)})


def test_chinese_text_in_utf_16_without_its_mark_is_read_where_it_is_declared(tmp_path):
    key = "患者一二三四五六七八九十" * 10
    assert read_key(tmp_path / "nord.csv", key, "utf-16-le", "utf-16-le") == (key,)


def test_a_row_that_is_too_long_is_not_taken_for_a_title_above_it(tmp_path):
    path = tmp_path / "nord.csv"
    path.write_text("Fall;size;krank\na;1;ja;\n")
    with refused("data.unreadable") as caught:
        read(path, reader={"separator": ";"}, numeric={"size": (0, 2)})
    assert "above" not in str(caught.value)


def test_lines_above_the_header_are_named(tmp_path):
    path = tmp_path / "nord.csv"
    path.write_bytes(b"Export 2024\n" + GERMAN.encode("cp1252"))
    with refused("data.unreadable") as caught:
        read(path)
    assert "the header has 1 cell and data row 1 has" in str(caught.value)
    assert "delete the lines above" in str(caught.value)


def test_two_bytes_of_another_encoding_may_be_utf_8_by_accident(tmp_path):
    assert "模".encode("gbk").decode("utf-8") == "ģ"
    assert read_key(tmp_path / "nord.csv", "模", "gbk", "gbk") == ("模",)


@pytest.mark.parametrize("name", ["nord.csv.gz", "nord.tsv.gz", "nord.tsv", "NORD.CSV"])
def test_compressed_and_tab_separated_tables(tmp_path, name):
    is_tab = ".tsv" in name
    content = (GERMAN.replace(";", "\t") if is_tab else GERMAN).encode("cp1252")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    reader = {key: value for key, value in READER.items() if not is_tab or key != "separator"}
    check(read(tmp_path / name, reader=reader))


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(GERMAN.encode("cp1252"), mtime=0)[:-12]])
def test_a_broken_archive_is_refused(tmp_path, content):
    (tmp_path / "nord.csv.gz").write_bytes(content)
    with refused("data.unreadable"):
        read(tmp_path / "nord.csv.gz")


NAMED = [
    ("a.csv", "xlsx"), ("a.csv.gz", "xlsx"), ("a.tsv", "parquet"), ("a.csv.gz", "parquet"), ("a.csv", "gz"),
    ("a.csv", "bz2"), ("a.parquet", "xlsx"), ("a.xlsx", "parquet"), ("a.xlsx", "gz"), ("a.xlsx", "strict"),
    ("a.xlsx", "xls"), ("a.csv", "xls"), ("a.csv", "zip"), ("a.xlsx", "xlsb"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), NAMED)
def test_a_file_of_another_kind_than_its_name_says_is_named(tmp_path, name, kind):
    """A workbook named .csv was said to need another encoding, and a strict one to have no cells."""
    words = {
        "xlsx": "is a workbook; let",
        "strict": "Strict Open XML",
        "xlsb": "of another format",
        "xls": "old format",
    }
    words |= {"parquet": "is a Parquet file", "gz": "by gzip", "bz2": "by bzip2", "zip": "is a zip archive"}
    frame = pd.DataFrame({"Fall": ["a", "b"], "size": [1, 2], "krank": ["ja", "nein"]})
    frame.to_parquet(tmp_path / "sound.parquet")
    parts = {
        "xlsx": "xl/workbook.xml",
        "strict": "xl/workbook.xml",
        "xlsb": "xl/workbook.bin",
        "zip": "a.csv",
    }
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w") as book:
        book.writestr(
            parts.get(kind, "none"), b'<a xmlns="http://purl.oclc.org/ooxml/b">' * (kind == "strict")
        )
    contents = {"gz": gzip.compress(b"Fall,size\n"), "bz2": bz2.compress(b"Fall,size\n")}
    contents |= {"xls": bytes.fromhex("d0cf11e0a1b11ae1") + bytes(600)}
    contents |= {"parquet": (tmp_path / "sound.parquet").read_bytes()}
    content = contents.get(kind, archive.getvalue())
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with refused("data.unreadable") as caught:
        read(path, reader={}, numeric={"size": (0, 3)})
    assert words[kind] in str(caught.value)


def test_a_text_file_may_begin_as_another_kind_of_file(tmp_path):
    (tmp_path / "a.csv").write_text("PAR1,Fall,size,krank\n0,a,1,ja\n")
    assert read(tmp_path / "a.csv", reader={}, numeric={"size": (0, 3)}).user_keys == ("a",)


def write_unused(folder, name):
    """Write a table of two rows with a column, `other`, that nobody declares and that no reader understands."""
    path = folder / name
    rows = {"Fall": ["a", "b"], "size": [1, 2], "krank": ["ja", "nein"]}
    if name.endswith("parquet"):
        others = {
            "days": pa.array([2**31 - 1, 0], pa.int32()).cast(pa.date32()),
            "nanoseconds": pa.array([1, 2], pa.time64("ns")),
            "years": pa.array([2**62, 0], pa.timestamp("us", "Europe/Berlin")),
            "whole": pa.array([1, 2], pa.int64()),
        }
        pq.write_table(pa.table({**rows, "other": others[path.stem]}), path)
        if path.stem == "whole":
            # As polars notes its whole numbers of 128 bits: Arrow then opens no column of the file.
            noted = pq.read_metadata(path).metadata[b"ARROW:schema"]
            plain, bits = base64.b64decode(noted), (64).to_bytes(4, "little")
            place = plain.rindex(bits)
            changed = base64.b64encode(plain[:place] + (128).to_bytes(4, "little") + plain[place + 4 :])
            path.write_bytes(path.read_bytes().replace(noted, changed))
            with pytest.raises(pa.ArrowNotImplementedError):
                pq.ParquetFile(path)
        return path
    cell = {"bytes": b"\xfc\x81", "zero": b"x\0y"}[path.stem]
    path.write_bytes(b"Fall,size,krank,other " + cell + b"\na,1,ja," + cell + b"\nb,2,nein,\n")
    return path


UNUSED = ["days.parquet", "nanoseconds.parquet", "years.parquet", "whole.parquet", "bytes.csv", "zero.csv"]


@pytest.mark.parametrize("name", UNUSED)
def test_a_column_that_nobody_declares_makes_no_file_unreadable(tmp_path, name):
    path, numeric = write_unused(tmp_path, name), {"size": (0, 3)}
    built = read(path, reader={}, numeric=numeric)
    assert built.user_keys == ("a", "b")
    np.testing.assert_allclose(built.silos[0].x[:, 0], [-1 / 3, 1 / 3], atol=1e-6)
    if name.endswith("parquet"):
        assert '"other"' in draft_config(path, "Fall", "krank")
        for use in (
            lambda: draft_config(path, "other", "krank"),
            lambda: read(path, reader={}, numeric={"other": (0, 3)}),
        ):
            # Whole numbers of 64 bits stay readable without the type that their writer noted.
            with nullcontext() if name == "whole.parquet" else refused("data.unreadable", "data.value"):
                use()


def make_workbook(*rows):
    book = pytest.importorskip("openpyxl").Workbook()
    for row in rows:
        book.active.append(row)
    return book


def write_workbook(path, sheets=("Tabelle1",), key="Müller 1"):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name in sheets:
        sheet = book.create_sheet(name)
        sheet.append(["Fall", "Größe", "Aufnahme", "krank"])
        sheet.append([key, 1.8, datetime.datetime(2020, 2, 3), "ja"])
        sheet.append(["Zoë 2", 1.65, datetime.date(2020, 1, 1), "nein"])
    book.save(path)
    return path


def test_a_workbook_is_read_by_its_cells(tmp_path):
    check(read(write_workbook(tmp_path / "nord.xlsx")))
    both = write_workbook(tmp_path / "both.xlsx", ("notes", "stays"))
    check(read(both, reader={**READER, "sheet": "stays"}))
    for reader in (READER, {**READER, "sheet": "Stays"}):
        with refused("data.unreadable") as caught:
            read(both, reader=reader)
        assert caught.value.field == "data.schema.reader.sheet"
        assert "'notes', 'stays'" in str(caught.value)
    many = write_workbook(tmp_path / "many.xlsx", [f"month {number}" for number in range(500)])
    with refused("data.unreadable") as caught:
        read(many)
    assert "'month 9' and 490 more" in str(caught.value)


def test_a_formula_without_a_stored_value_is_not_taken_for_a_missing_cell(tmp_path):
    path, stored = tmp_path / "nord.xlsx", tmp_path / "stored.xlsx"
    book = make_workbook(["Fall", "Größe", "krank"], ["a", "=1+0.8", "ja"], ["b", None, "nein"])
    book.save(path)
    numeric = {"Größe": {"range": (0, 2.5), "typical": (1.7, 0.1), "missing": "indicator"}}
    with refused("data.unreadable") as caught:
        read(path, numeric=numeric)
    assert "cell B2" in str(caught.value)
    # As spreadsheet programs save it: with a number, or with an empty text, which is a missing cell.
    for cell, is_missing in (
        (b'<c r="B2"><f>1+0.8</f><v>1.8</v>', 0),
        (b'<c r="B2" t="str"><f>1+0.8</f><v></v>', 1),
    ):
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(stored, "w") as new:
            for name in old.namelist():
                content = old.read(name)
                changed = re.sub(rb'<c r="B2"><f>1\+0.8</f><v ?/?>(</v>)?', cell, content)
                assert (changed != content) == name.endswith("sheet1.xml")
                new.writestr(name, changed)
        x = read(stored, numeric=numeric).silos[0].x
        np.testing.assert_allclose(x, [[1 - is_missing, is_missing], [0, 1]], atol=1e-6)


@pytest.mark.parametrize("error", ["#DIV/0!", "#REF!", "#N/A"])
def test_errors_of_formulas_are_no_missing_cells(tmp_path, error):
    book = make_workbook(["Fall", "Größe", "krank"], ["a", 1.8, "ja"], ["b", error, "nein"])
    book.save(tmp_path / "nord.xlsx")
    numeric = {"Größe": {"range": (0, 2.5), "typical": (1.7, 0.1), "missing": "indicator"}}
    if error == "#N/A":
        np.testing.assert_allclose(read(tmp_path / "nord.xlsx", numeric=numeric).silos[0].x[1], [0, 1])
        return
    with refused("data.unreadable") as caught:
        read(tmp_path / "nord.xlsx", numeric=numeric)
    assert f"cell B3 is the error {error}" in str(caught.value)
    book.active["D1"], book.active["D2"], book.active["B3"] = "bmi", error, 1.7
    book.save(tmp_path / "nord.xlsx")
    read(tmp_path / "nord.xlsx", numeric=numeric)  # no column of the schema has an error


def test_a_formula_without_a_value_is_found_beyond_the_dimensions_that_the_file_states(tmp_path):
    book = make_workbook(["Fall", "Größe", "krank"], ["a", "=1+0.8", "ja"])
    book.save(tmp_path / "whole.xlsx")
    with (
        zipfile.ZipFile(tmp_path / "whole.xlsx") as old,
        zipfile.ZipFile(tmp_path / "nord.xlsx", "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, re.sub(rb'<dimension ref="[^"]*"', b'<dimension ref="A1"', old.read(name)))
    with refused("data.unreadable"):
        read(tmp_path / "nord.xlsx", numeric={"Größe": {"range": (0, 2), "missing": "indicator"}})


DAYS = {"range": (-80_000, 80_000), "since": "2020-01-01"}


@pytest.mark.parametrize(
    ("layout", "good", "bad"),
    [
        ("%d%m%Y", "01122020", "1122020"),
        ("%m%d%Y", "01122020", "1122020"),
        ("%y%m%d", "010203", "10203"),
        ("%Y%m%d", "01010101", "2020111"),
        ("%Y%m%d %H:%M", "20200101 9:05", "202011 9:05"),
        ("%d.%m.%Y", "1.2.2020", "1.2020"),
        ("%d%b%Y", "3FEB2020", "3FEBR2020"),
    ],
)
def test_dates_that_have_lost_a_zero_are_refused(tmp_path, layout, good, bad):
    """1122020 would be 11 February, where it was 1 December."""
    path, numeric = tmp_path / "nord.csv", {"day": {**DAYS, "range": (-800_000, 80_000), "date": layout}}
    path.write_text(f"Fall;day;krank\na;{good};ja\n")
    read(path, numeric=numeric)
    path.write_text(f"Fall;day;krank\na;{good};ja\nb;{bad};ja\n")
    with refused("data.value"):
        read(path, numeric=numeric)


@pytest.mark.parametrize(
    ("cells", "days"),
    [
        ((datetime.date(2020, 3, 2), "13/02/2020"), None),
        ((datetime.date(2020, 3, 2), "2020-02-13"), (61, 43)),
        (("03/02/2020", "13/02/2020"), (33, 43)),
        (("2020-03-02", "2020-02-13"), (61, 43)),
        (("03/02/2020", "2020-02-13"), None),
        ((datetime.date(2020, 3, 2), "13/02/1890"), (61, -47438)),
    ],
)
def test_a_workbook_whose_dates_a_program_has_half_converted_is_refused(tmp_path, cells, days):
    book = make_workbook(["Fall", "day", "krank"], ["a", cells[0], "ja"], ["b", cells[1], "nein"])
    book.save(tmp_path / "nord.xlsx")
    numeric = {"day": {**DAYS, "date": "%d/%m/%Y"}}
    if days is None:
        with refused("data.value"):
            read(tmp_path / "nord.xlsx", numeric=numeric)
        return
    x = read(tmp_path / "nord.xlsx", numeric=numeric).silos[0].x[:, 0]
    np.testing.assert_allclose(x * 80_000, days, atol=0.01)


def test_another_spelling_of_the_category_none_is_not_a_missing_cell(tmp_path):
    path = tmp_path / "nord.csv"
    columns = {"pain": {"categories": ["none", "mild", "unknown"], "missing": "unknown"}}
    for cell, place in (("none", 0), ("", 2), ("NA", 2), ("None", None)):
        path.write_text(f"Fall;pain;krank\na;{cell};ja\nb;mild;ja\n")
        if place is None:
            with refused("data.value"):
                read(path, numeric={}, categorical=columns)
        else:
            assert read(path, numeric={}, categorical=columns).silos[0].x[0].argmax() == place
    declared = {**READER, "missing": ["None"]}
    path.write_text("Fall;pain;krank\na;None;ja\nb;mild;ja\n")
    assert read(path, reader=declared, numeric={}, categorical=columns).silos[0].x[0].argmax() == 2


def test_hours_of_twelve_need_their_half_of_the_day():
    for layout, fits in (("%d.%m.%Y %I:%M", False), ("%d.%m.%Y %I:%M %p", True)):
        with nullcontext() if fits else refused("data.schema"):
            schema(numeric={"day": {**DAYS, "date": layout}})


def test_a_title_above_the_header_of_a_workbook_is_named(tmp_path):
    book = make_workbook(
        ["Report 2024"], ["Fall", "Größe", "Aufnahme", "krank"], ["a", 1.8, "01.01.2020", "ja"]
    )
    book.active.merge_cells("A1:D1")
    book.save(tmp_path / "nord.xlsx")
    for use in (read, lambda path: draft_config(path, "Fall", "krank")):
        with refused("data.column"):
            use(tmp_path / "nord.xlsx")


def test_a_table_without_a_header_does_not_show_its_first_row(tmp_path):
    path = tmp_path / "nord.csv"
    path.write_text("Müller 1;1,80;ja;Falle\nZoë 2;1,65;nein;Falle\n", encoding="cp1252")
    reader = Reader(**READER)
    model = Schema.from_inputs(schema(numeric={"Größe": (0, 2)}).describe_inputs())
    for use in (
        read,
        lambda path: draft_config(path, "Fall", "krank", reader),
        lambda path: read_inputs(path, model),
    ):
        with refused("data.column") as caught:
            use(path)
        assert not any(cell in str(caught.value) for cell in ("Müller 1", "1,80", "ja", "Falle"))


def test_a_workbook_does_not_join_persons_whose_numbers_it_rounds(tmp_path):
    with refused("data.value"):
        read(write_workbook(tmp_path / "nord.xlsx", key=1_234_567_890_123_456))


def test_a_workbook_without_the_extra_names_it(tmp_path, monkeypatch):
    path = tmp_path / "nord.xlsx"
    path.write_bytes(b"PK")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with refused("data.no_reader"):
        read(path)


def test_a_file_that_is_no_workbook_is_refused(tmp_path):
    pytest.importorskip("openpyxl")
    (tmp_path / "nord.xlsx").write_bytes(b"PK no archive")
    with refused("data.unreadable"):
        read(tmp_path / "nord.xlsx")


def test_a_workbook_of_charts_alone_is_refused_and_a_chart_beside_a_sheet_is_no_table(tmp_path):
    book = make_workbook(["Fall", "Größe", "krank"], ["a", 1.8, "ja"])
    book.create_chartsheet("Bild", 0).add_chart(pytest.importorskip("openpyxl.chart").BarChart())
    book.save(tmp_path / "both.xlsx")
    numeric = {"Größe": (0, 2)}
    assert read(tmp_path / "both.xlsx", numeric=numeric).user_keys == ("a",)
    book.remove(book.worksheets[0])
    book.save(tmp_path / "chart.xlsx")
    with refused("data.unreadable"):
        read(tmp_path / "chart.xlsx", numeric=numeric)


def write_damaged(path, content, generator):
    """Change up to four bytes, of a workbook those of one of its parts."""
    archive = zipfile.ZipFile(BytesIO(content)) if path.suffix == ".xlsx" else None
    parts = {"": content} if archive is None else {name: archive.read(name) for name in archive.namelist()}
    part = generator.choice(sorted(name for name, content in parts.items() if content))
    changed = bytearray(parts[part])
    for _ in range(generator.randint(1, 4)):
        changed[generator.randrange(len(changed))] = generator.choice([*b'<>/="09', generator.randrange(256)])
    if archive is None:
        path.write_bytes(changed)
        return
    with zipfile.ZipFile(path, "w") as book:
        for name, content in {**parts, part: bytes(changed)}.items():
            book.writestr(name, content)


@pytest.mark.filterwarnings("ignore")  # openpyxl's own, about parts that it leaves out
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.parquet", "a.xlsx"])
def test_a_damaged_table_is_read_or_refused(tmp_path, name):
    """Parsers raise ParseError, AttributeError, TypeError and ArrowException for damaged bytes."""
    frame = pd.DataFrame({"Fall": ["a", "b"] * 20, "Größe": [1.5, None] * 20, "krank": ["ja", "nein"] * 20})
    path = tmp_path / name
    if name.endswith("xlsx"):
        pytest.importorskip("openpyxl")
        frame.to_excel(path, index=False)
    else:
        frame.to_parquet(path) if name.endswith("parquet") else frame.to_csv(path, index=False)
    content, generator, codes = path.read_bytes(), random.Random(0), set()
    numeric = {"Größe": {"range": (0, 2), "missing": "indicator"}}
    assert read(path, reader={}, numeric=numeric).users == 2
    for _ in range(150):
        write_damaged(path, content, generator)
        try:
            read(path, reader={}, numeric=numeric)
        except SilodpError as error:
            codes.add(error.code)
    assert "data.unreadable" in codes


def test_parquet_has_its_index_as_columns(tmp_path):
    """pandas writes the index as a column that its metadata take out of the table again."""
    frame = pd.DataFrame({"Fall": ["a", "b"], "nr": [1, 2], "Größe": [1.5, 1.8], "krank": ["ja", "nein"]})
    for index in (["Fall"], ["Fall", "nr"]):
        frame.set_index(index).to_parquet(tmp_path / "a.parquet")
        built = read(tmp_path / "a.parquet", numeric={"Größe": (0, 2), "nr": (0, 9)})
        assert built.user_keys == ("a", "b")
        np.testing.assert_allclose(built.silos[0].x[:, 1], [1 / 4.5 - 1, 2 / 4.5 - 1])


@pytest.mark.parametrize("columns", [1, 4])
def test_a_long_cell_of_one_line_is_read(tmp_path, columns):
    """The csv module alone takes 131,072 characters of a cell, and for the whole process."""
    before = csv.field_size_limit()
    path, note = tmp_path / "nord.csv", "x" * 200_000
    if columns == 1:
        path.write_text(f"{note}\na\n")
        with refused("data.column"):
            read(path)
    else:
        path.write_text(f'Fall;note;size;krank\nP1;"{note}";30;ja\nP2;ok;40;nein\n')
        assert read(path, numeric={"size": (0, 100)}).user_keys == ("P1", "P2")
    assert csv.field_size_limit() == before


def test_stray_quotes_far_from_each_other_are_not_one_long_cell(tmp_path):
    lines = "".join(
        f"P{n};ok, and so on;{n % 90}\n" for n in range(2, 10_000)
    )  # no line has the cells of a row
    path = tmp_path / "nord.csv"
    path.write_text(f'Fall;note;size;krank\nP1;"severe;30;ja\n{lines}P0;height 5";50;nein\n')
    with refused("data.unreadable"):
        read(path, numeric={"size": (0, 100)})


def test_silos_may_write_their_tables_in_different_ways(tmp_path):
    (tmp_path / "nord.csv").write_text(GERMAN, encoding="cp1252")
    english = GERMAN.replace(",", ".").replace(";", ",").replace("Müller 1", "Ann 3")
    (tmp_path / "sud.csv").write_text(english, encoding="utf-8")
    files = {"nord": tmp_path / "nord.csv", "sud": tmp_path / "sud.csv"}
    built = Federation.from_tables(files, schema(reader=Reader(), readers={"nord": READER}))
    np.testing.assert_array_equal(built.silos[0].x, built.silos[1].x)
    assert built.users == 3
    misspelled = schema(reader=Reader(), readers={"nord": READER, "süd": {"missing": ["-9"]}})
    with refused("data.schema"):
        Federation.from_tables(files, misspelled)


def test_a_category_that_is_a_number_may_have_a_decimal_comma(tmp_path):
    (tmp_path / "nord.csv").write_text("id;grade;ill\n1;0,0;no\n2;1,0;yes\n3;1,5;no\n")
    given = Schema(
        user="id",
        label="ill",
        classes=["no", "yes"],
        categorical={"grade": [0, 1, 1.5]},
        reader={"separator": ";", "decimal": ","},
    )
    x = Federation.from_tables([tmp_path / "nord.csv"], given).silos[0].x
    np.testing.assert_array_equal(x, np.eye(3))
    with refused("data.value"):
        Federation.from_tables([tmp_path / "nord.csv"], replace(given, reader=Reader(separator=";")))


@pytest.mark.parametrize(
    ("missing", "cells"),
    [
        ("-9", ["-9", "-9,0", "-9,00"]),
        ("-9,0", ["-9", "-9,0"]),
        ("99,9", ["99,9", "99,90", "099,9"]),
        ("?", ["?"]),
    ],
)
def test_a_number_that_stands_for_no_value_may_have_a_decimal_comma(tmp_path, missing, cells):
    reader = {"separator": ";", "decimal": ",", "missing": [missing]}
    numeric = {"crp": {"range": (-10, 100), "typical": (0, 1), "missing": "indicator"}}
    grade = {"categories": ["1,5", "unknown"], "missing": "unknown"}
    given = Schema(
        user="id", label="ill", classes=[0, 1], numeric=numeric, categorical={"grade": grade}, reader=reader
    )
    rows = [f"{n};{cell};{cell if cell == missing else ''};1" for n, cell in enumerate([*cells, "1,5"])]
    (tmp_path / "a.csv").write_text("\n".join(["id;crp;grade;ill", *rows]))
    x = Federation.from_tables([tmp_path / "a.csv"], given).silos[0].x
    np.testing.assert_array_equal(x[:, :2], [*[[0, 1]] * len(cells), [1.5, 0]])
    np.testing.assert_array_equal(x[:, 2:], [[0, 1]] * (len(cells) + 1))
    (tmp_path / "a.csv").write_text(f"id;crp;grade;ill\n{cells[-1]};1;1,5;1\n")
    if missing != "99,9":  # a key is compared as text
        with refused("data.value"):
            Federation.from_tables([tmp_path / "a.csv"], given)


def test_a_key_that_is_a_number_may_have_a_decimal_comma(tmp_path):
    (tmp_path / "a.csv").write_text("id;size;ill\n17,0;1,5;1\n18,00;2,5;0\nM-1,0;3;0\n17.0;3;0\n")
    (tmp_path / "b.csv").write_text("id,size,ill\n17,1.5,1\n18,2.5,0\n")
    given = Schema(
        user="id",
        label="ill",
        classes=[0, 1],
        numeric={"size": (0, 10)},
        readers={"a": {"separator": ";", "decimal": ","}},
    )
    built = Federation.from_tables([tmp_path / "a.csv", tmp_path / "b.csv"], given)
    assert built.user_keys == ("17", "18", "M-1,0")


@pytest.mark.parametrize("row", ["1.000;5;no;no", "7;1.000;no;no", "7;5;1.000;no", "7;5;no;1.000"])
@pytest.mark.parametrize("ending", ["csv", "xlsx"])
def test_a_point_before_three_zeros_is_not_dropped_beside_a_decimal_comma(tmp_path, row, ending):
    """1.000 would become the person, number, category or class 1."""
    path = tmp_path / f"a.{ending}"
    if ending == "xlsx":
        pytest.importorskip("openpyxl")
        pd.DataFrame([row.split(";")], columns=["id", "size", "stage", "ill"]).to_excel(path, index=False)
    else:
        path.write_text(f"id;size;stage;ill\n{row}\n")
    given = Schema(
        user="id",
        label="ill",
        classes=["no", 1],
        numeric={"size": (0, 2000)},
        categorical={"stage": ["no", 1]},
        reader={"separator": ";", "decimal": ","},
    )
    with refused("data.value"):
        Federation.from_tables([path], given)
    built = Federation.from_tables([path], replace(given, reader=Reader(separator=";")))
    assert built.users == 1


def test_text_of_a_workbook_is_read_by_the_decimal_mark_and_its_numbers_are_not(tmp_path):
    numeric = {"Größe": (0, 2)}
    for cell, decimal, size in (
        ("1,5", ",", 1.5),
        ("1.234", ",", None),
        ("1,5", ".", None),
        ("1.5", ".", 1.5),
    ):
        book = make_workbook(
            ["Fall", "Größe", "krank"], ["a", cell, "ja"], ["b", 1.25, "nein"], ["c", 1.75, "ja"]
        )
        book.save(tmp_path / "nord.xlsx")
        reader = {"decimal": decimal, "separator": ";"}
        drafted = draft_config(tmp_path / "nord.xlsx", "Fall", "krank", Reader(**reader))
        assert ('"Größe" = { range' in drafted) is (size is not None)
        if size is None:
            with refused("data.value"):
                read(tmp_path / "nord.xlsx", numeric=numeric, reader=reader)
            continue
        built = read(tmp_path / "nord.xlsx", numeric=numeric, reader=reader)
        np.testing.assert_allclose(built.silos[0].x[:, 0], [size - 1, 0.25, 0.75])


@pytest.mark.parametrize("cell", ["1.234", "1.234,5", "1,2,3"])
def test_a_number_that_may_have_separators_of_thousands_is_refused(tmp_path, cell):
    (tmp_path / "nord.csv").write_text(GERMAN.replace("1,80", cell), encoding="cp1252")
    with refused("data.value") as caught:
        read(tmp_path / "nord.csv")
    assert caught.value.field == "Größe"


def test_the_decimal_mark_and_the_separator_are_named_where_they_differ(tmp_path):
    (tmp_path / "nord.csv").write_text(GERMAN, encoding="cp1252")
    with refused("data.unreadable"):
        read(tmp_path / "nord.csv", reader={"encoding": "cp1252"})
    with refused("data.value"):
        read(tmp_path / "nord.csv", reader={"encoding": "cp1252", "separator": ";"})


@pytest.mark.parametrize(
    ("cell", "first"),
    [("1,234", "thousands"), ("1,234,567.5", "thousands"), ("0,234", "decimal"), ("1,23", "decimal")],
)
def test_a_comma_that_may_stand_for_thousands_is_not_called_decimal(tmp_path, cell, first):
    """1,234 read with a decimal comma is 1.234."""
    (tmp_path / "nord.csv").write_text(
        GERMAN.replace("1,80", cell).replace("1,65", "1.65"), encoding="cp1252"
    )
    with refused("data.value") as caught:
        read(tmp_path / "nord.csv", reader={**READER, "decimal": "."})
    message = str(caught.value)
    assert (first == "thousands") == ("thousands" in message)
    assert 'decimal = ","' in message


@pytest.mark.parametrize("cell", ["2020-02-03", "31.02.2020", "", "03.02.20", "today"])
def test_a_cell_that_is_no_date_of_the_layout_is_refused(tmp_path, cell):
    (tmp_path / "nord.csv").write_text(GERMAN.replace("03.02.2020", cell), encoding="cp1252")
    with refused("data.value") as caught:
        read(tmp_path / "nord.csv")
    assert caught.value.field == "Aufnahme"


def test_dates_of_parquet_need_no_layout(tmp_path):
    frame = pd.DataFrame(
        {
            "Fall": ["Müller 1", "Zoë 2"],
            "Größe": [1.8, 1.65],
            "Aufnahme": pd.to_datetime(["2020-02-03", "2020-01-01"]),
            "krank": ["ja", "nein"],
        }
    )
    frame.to_parquet(tmp_path / "nord.parquet")
    check(read(tmp_path / "nord.parquet"))


def read_days(folder, days, **changes):
    frame = pd.DataFrame({"Fall": [f"F{n}" for n in range(len(days))], "Aufnahme": days, "krank": "ja"})
    frame.to_parquet(folder / "nord.parquet")
    column = {"range": (-200_000, 3_000_000), "typical": (0, 4), "date": "%Y-%m-%d", "since": "2020-01-01"}
    built = read(folder / "nord.parquet", numeric={"Aufnahme": {**column, **changes}})
    return built.silos[0].x


@pytest.mark.parametrize(
    ("zone", "days"),
    [
        ("Europe/Berlin", ["2020-01-02 12:00", "2020-07-01 00:00", "2020-07-02 06:00"]),
        ("Europe/Berlin", ["2020-01-02 12:00", "2020-01-03 06:00"]),
        ("UTC", ["2020-01-02 12:00", "2020-01-03 00:00"]),
        (None, ["2020-01-02 12:00", "2020-01-03 00:00"]),
    ],
)
def test_a_time_with_a_zone_counts_as_the_cell_shows_it(tmp_path, zone, days):
    local = pd.to_datetime(days)
    x = read_days(tmp_path, local.tz_localize(zone))
    expected = (local - pd.Timestamp("2020-01-01")) / pd.Timedelta(days=1)
    np.testing.assert_array_equal(4 * x[:, 0], expected)
    x = read_days(tmp_path, [*local.tz_localize(zone), None], missing="indicator")
    np.testing.assert_array_equal(x[:, 1], [*np.zeros(len(days)), 1])


@pytest.mark.parametrize("layout", ["%Y-%d-%m", "%d.%m.%Y"])
def test_a_cell_that_is_a_date_is_not_read_by_a_layout(tmp_path, layout):
    """By the layout %Y-%d-%m 3 February would be 2 March."""
    for days in (
        pd.to_datetime(["2020-02-03", "2020-02-20"]),
        [datetime.date(2020, 2, 3), datetime.date(2020, 2, 20)],
    ):
        np.testing.assert_array_equal(4 * read_days(tmp_path, days, date=layout)[:, 0], [33, 50])
    texts = [day.strftime(layout) for day in days]
    np.testing.assert_array_equal(4 * read_days(tmp_path, texts, date=layout)[:, 0], [33, 50])


def test_days_far_off_are_dates(tmp_path):
    """Registers write 31.12.9999 for an open end."""
    since = datetime.date(2020, 1, 1)
    days = [datetime.date(9999, 12, 31), datetime.date(1520, 6, 1), datetime.date(2020, 2, 3)]
    expected = [(day - since).days for day in days]
    np.testing.assert_array_equal(4 * read_days(tmp_path, days)[:, 0], expected)
    for ending in ("csv", "tsv"):
        separator = "," if ending == "csv" else "\t"
        rows = [
            ["Fall", "Aufnahme", "krank"],
            *([f"F{day.year}", f"{day:%d.%m.}{day.year}", "ja"] for day in days),
        ]
        path = tmp_path / f"nord.{ending}"
        path.write_text("\n".join(separator.join(row) for row in rows))
        column = {"range": (0, 20_000), "date": "%d.%m.%Y", "since": "2020-01-01"}
        built = read(path, numeric={"Aufnahme": column}, out_of_range="clip", reader=Reader())
        np.testing.assert_allclose(built.silos[0].x[:, 0], [1, -1, 33 / 10_000 - 1], atol=1e-6)
        assert "1520-06-01 to 9999-12-31" in draft_config(path, "Fall", "krank")


FAR = {"range": (-4e6, 4e6), "typical": (0, 8), "date": "%Y-%m-%d", "since": "1970-01-01"}
TIMES = [("INT96", None), ("day", None), *product(("ms", "us"), (None, "Europe/Berlin", "Pacific/Auckland"))]


@pytest.mark.parametrize(("unit", "zone"), TIMES)
def test_times_outside_the_years_of_python_are_refused(tmp_path, unit, zone):
    """INT96 made 1816 of 9999 in silence, and pandas crashes at times of a zone before September 1677."""
    kind = pa.date32() if unit == "day" else pa.timestamp("ms" if unit == "INT96" else unit, zone)
    per_day = {"INT96": 86_400_000, "ms": 86_400_000, "us": 86_400_000_000, "day": 1}[unit]
    # In microseconds, 213,503,983 days are 2^64 more than an afternoon of 1970.
    last = {"INT96": 213_503_983, "day": 2**31 - 1}.get(unit, 2**62 // per_day)
    evening = (2_932_896.75, zone == "Pacific/Auckland")  # there it is the year 10000 by then
    for number, is_refused in (
        (-719_160, 0),
        (2_932_894, 0),
        evening,
        (2_932_898, 1),
        (-719_164, 1),
        (last, 1),
    ):
        days = pa.array([0, int(number * per_day), None], pa.int32() if unit == "day" else pa.int64()).cast(
            kind
        )
        table = pa.table({"Fall": ["a", "b", "c"], "Aufnahme": days, "krank": ["ja"] * 3})
        pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=unit == "INT96")
        with refused("data.value") if is_refused else nullcontext() as caught:
            built = read(tmp_path / "a.parquet", reader={}, numeric={"Aufnahme": {**FAR, "missing": 0}})
            np.testing.assert_allclose(built.silos[0].x[:, 0], [0, number / 8, 0], atol=0.8 / 8)
        if caught:
            assert (caught.value.field, "data row 2" in str(caught.value)) == ("Aufnahme", True)


@pytest.mark.parametrize("zone", ["America/New_York", None])
def test_int96_times_have_the_zone_that_pandas_notes(tmp_path, zone):
    """In New York it is the evening before."""
    frame = pd.DataFrame(
        {"Fall": ["a"], "Aufnahme": pd.to_datetime(["1970-01-10T01:30"]).tz_localize("UTC"), "krank": "ja"}
    )
    frame["Aufnahme"] = frame["Aufnahme"].dt.tz_convert(zone)
    found = []
    for is_int96 in (False, True):
        frame.to_parquet(tmp_path / "a.parquet", use_deprecated_int96_timestamps=is_int96)
        built = read(tmp_path / "a.parquet", reader={}, numeric={"Aufnahme": FAR})
        found.append(float(built.silos[0].x[0, 0]) * 8)
    assert found == pytest.approx([9 + 1.5 / 24 - (5 / 24 if zone else 0)] * 2, abs=1e-3)


WHOLE = {"int8": -(2**7), "int64": -(2**63), "uint8": 2**8 - 1, "uint64": 2**64 - 1}
DECIMALS = [Decimal(text) for text in ("1.50", "-0.01", "9999999.99")]
TEXTS = ["1.5", "-3", "1e3", None]
TYPED = {
    **{kind: pa.array([number, 7, None, 1], getattr(pa, kind)()) for kind, number in WHOLE.items()},
    **{
        f"{bits} bits": pa.array([*DECIMALS, None], getattr(pa, f"decimal{bits}")(9, 2))
        for bits in (32, 64, 128)
    },
    "38 digits": pa.array([Decimal(10**37 + 1), None, Decimal(7), Decimal(1)], pa.decimal128(38, 0)),
    "codes": pa.array([2**64 - 1, 7, None, 7], pa.uint64()).dictionary_encode(),
    "float16": pa.array(np.array([0.1, 65_000, -2.5, 7], np.float16)),
    "float32": pa.array(np.array([0.1, 3e38, -1e-30, 7], np.float32)),
    "float64": pa.array([0.1, 2.0**53 + 2, -1e37, None]),
    **{str(kind): pa.array(TEXTS, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())},
    "dictionary": pa.array(TEXTS).dictionary_encode(),
    "bool": pa.array([True, False, True, None]),
    "binary": pa.array([b"1", b"2", b"3", None]),
    "time": pa.array([1, 2, 3, None], pa.time64("us")),
    "duration": pa.array([1, 2, 3, None], pa.duration("us")),
    "list": pa.array([[1], [2], [3], None]),
}


@pytest.mark.parametrize("kind", TYPED)
def test_a_number_of_any_type_is_read_as_it_is_or_refused(tmp_path, kind):
    """The values of pyarrow decide: of what is accepted, no value changes by more than float32 rounds it."""
    column, spread = TYPED[kind], 8e32
    pq.write_table(pa.table({"Fall": list("abcd"), "n": column, "krank": ["ja"] * 4}), tmp_path / "a.parquet")
    numeric = {"n": {"range": (-4e38, 4e38), "typical": (0, spread), "missing": 0}}
    is_refused = kind in ("bool", "binary", "time", "duration", "list")
    with refused("data.value") if is_refused else nullcontext():
        built = read(tmp_path / "a.parquet", reader={}, numeric=numeric)
        expected = [0.0 if value is None else float(value) / spread for value in column.to_pylist()]
        np.testing.assert_allclose(built.silos[0].x[:, 0], np.float32(expected), rtol=1e-6)


def test_a_day_of_a_workbook_that_programs_read_differently_is_refused(tmp_path):
    """Day 59 of Excel is 28 February 1900, and of LibreOffice the 27th; both write 1 March as day 61."""
    pytest.importorskip("openpyxl")
    for day, is_refused in (("1900-02-27", True), ("1900-01-01", True), ("1900-03-01", False)):
        days = [datetime.date.fromisoformat(day), datetime.date(2020, 1, 2)]
        pd.DataFrame({"Fall": ["a", "b"], "Aufnahme": days, "krank": ["ja"] * 2}).to_excel(
            tmp_path / "a.xlsx", index=False
        )
        column = {**FAR, "date": "%d.%m.%Y", "since": "2020-01-01", "missing": 0}
        with refused("data.value") if is_refused else nullcontext():
            built = read(tmp_path / "a.xlsx", numeric={"Aufnahme": column})
            np.testing.assert_array_equal(built.silos[0].x[:, 0], [-43_770 / 8, 1 / 8])
        built = read(tmp_path / "a.xlsx", numeric={"Aufnahme": column}, reader=Reader(missing=[day]))
        np.testing.assert_array_equal(built.silos[0].x[:, 0], [0, 1 / 8])


@pytest.mark.parametrize("ending", ["xlsx", "parquet"])
def test_a_draft_knows_dates_that_are_no_text_and_their_gaps(tmp_path, ending):
    days = pd.to_datetime(["2020-02-03", "2020-01-01", None])
    frame = pd.DataFrame({"Fall": ["a", "b", "c"], "Aufnahme": days, "krank": ["ja", "nein", "ja"]})
    path = tmp_path / f"nord.{ending}"
    if ending == "xlsx":
        pytest.importorskip("openpyxl")
        frame.to_excel(path, index=False)
    else:
        frame.to_parquet(path)
    text = draft_config(path, "Fall", "krank")
    drafted = tomllib.loads(text)["data"]["schema"]
    assert drafted["numeric"] == {"Aufnahme": {"range": [], "date": "%Y-%m-%d", "since": ""}}
    assert "ROWS: 2020-01-01 to 2020-02-03, 1 of 3 missing" in text


GAPS = "id,crp,stage,ill\n1,,II,yes\n2,30,?,no\n3,NA,I,No\n4,10,II,TRUE\n"


def read_gaps(folder, crp, stage, **changes):
    (folder / "gaps.csv").write_text(GAPS)
    fields = {"user": "id", "label": "ill", "classes": [False, True], "reader": Reader(missing=["?"])}
    numeric, categorical = {"crp": crp}, {"stage": stage}
    given = Schema(**{**fields, "numeric": numeric, "categorical": categorical, **changes})
    return Federation.from_tables([folder / "gaps.csv"], given)


def test_missing_cells_follow_the_declared_policy(tmp_path):
    stages = {"categories": ["I", "II", "unknown"], "missing": "unknown"}
    built = read_gaps(tmp_path, {"range": (0, 100), "typical": (20, 10), "missing": 5}, stages)
    np.testing.assert_array_equal(built.silos[0].x[:, 0], [-1.5, 1, -1.5, -1])
    np.testing.assert_array_equal(built.silos[0].x[:, 3], [0, 1, 0, 0])
    np.testing.assert_array_equal(built.silos[0].y, [1, 0, 0, 1])
    built = read_gaps(tmp_path, {"range": (0, 100), "typical": (20, 10), "missing": "indicator"}, stages)
    assert built.features[:2] == ("crp", "crp is missing")
    np.testing.assert_array_equal(built.silos[0].x[:, :2], [[0, 1], [1, 0], [0, 1], [-1, 0]])
    built = read_gaps(tmp_path, {"range": (0, 100), "missing": "indicator"}, stages)
    np.testing.assert_allclose(built.silos[0].x[:, 0], [0, -0.4, 0, -0.8], atol=1e-6)


def test_true_and_false_may_have_a_third_beside_them(tmp_path):
    (tmp_path / "a.csv").write_text("id,c,ill\n1,true,no\n2,,no\n3,FALSE,yes\n4,0,yes\n5,Yes,no\n")
    third = {"categories": [True, False, "unknown"], "missing": "unknown"}
    fields = {"user": "id", "label": "ill", "classes": ["no", "yes"], "categorical": {"c": third}}
    built = Federation.from_tables([tmp_path / "a.csv"], Schema(**fields))
    assert built.silos[0].x.argmax(1).tolist() == [0, 2, 1, 1, 0]
    fields["categorical"] = {"c": {"categories": [False, "Yes", True, "unknown"], "missing": "unknown"}}
    built = Federation.from_tables([tmp_path / "a.csv"], Schema(**fields))
    assert built.silos[0].x.argmax(1).tolist() == [2, 3, 0, 0, 1]  # a declared text is that text


@pytest.mark.parametrize(
    ("crp", "stage", "column"),
    [
        ((0, 100), {"categories": ["I", "II", "unknown"], "missing": "unknown"}, "crp"),
        ({"range": (0, 100), "missing": 0}, ["I", "II", "unknown"], "stage"),
    ],
)
def test_missing_cells_are_refused_where_nothing_is_declared(tmp_path, crp, stage, column):
    with refused("data.value") as caught:
        read_gaps(tmp_path, crp, stage)
    assert caught.value.field == column
    assert "missing" in str(caught.value)


def test_a_missing_label_is_never_filled_in(tmp_path):
    with refused("data.value") as caught:
        read_gaps(tmp_path, {"range": (0, 100), "missing": 0}, ["I", "II", "?"], label="crp", kind="real",
                  classes=None, numeric={}, categorical={"stage": ["I", "II", "?"]})  # fmt: skip
    assert caught.value.field == "crp"


@pytest.mark.parametrize(
    ("column", "changes"),
    [
        ("size", {}),
        ("size", {"label": "size", "kind": "real", "classes": None, "numeric": {"age": (0, 99)}}),
        ("size", {"budget": "size", "numeric": {"age": (0, 99)}}),
        ("day", {"numeric": {"day": {"range": (0, 1e7), "date": "%Y-%m-%d", "since": "2020-01-01"}}}),
    ],
)
def test_a_number_or_day_that_stands_for_no_value_is_not_taken_for_one(tmp_path, column, changes):
    (tmp_path / "a.csv").write_text("id,size,age,day,ill\n1,3,4,2020-01-02,no\n2,9,5,9999-12-31,no\n")
    fields = {"user": "id", "label": "ill", "classes": ["no", "yes"], "numeric": {"size": (0, 10)}, **changes}
    with refused("data.value", "data.budgets") as caught:
        Federation.from_tables(
            [tmp_path / "a.csv"], Schema(**fields, reader=Reader(missing=["9", "9999-12-31"]))
        )
    assert column in str(caught.value)
    assert Federation.from_tables([tmp_path / "a.csv"], Schema(**fields)).users == 2


def test_events_may_be_true_and_false(tmp_path):
    (tmp_path / "a.csv").write_text("id,size,died,months\n1,3,TRUE,4\n2,5,no,7.5\n")
    given = Schema(user="id", kind="survival", event="died", time="months", numeric={"size": (0, 10)})
    built = Federation.from_tables([tmp_path / "a.csv"], given)
    np.testing.assert_array_equal(built.silos[0].y, [[1, 4], [0, 7.5]])


@pytest.mark.parametrize(
    ("events", "is_odd"), [("1" * 12, True), ("0" * 12, True), ("1" * 11 + "0", False), ("11", False)]
)
def test_a_silo_whose_records_are_all_events_is_named(tmp_path, caplog, events, is_odd):
    rows = "".join(f"P{row},3,{event},4\n" for row, event in enumerate(events))
    (tmp_path / "a.csv").write_text(f"id,size,died,months\n{rows}")
    given = Schema(user="id", kind="survival", event="died", time="months", numeric={"size": (0, 10)})
    with caplog.at_level(logging.WARNING):
        Federation.from_tables([tmp_path / "a.csv"], given)
    assert any("'died'" in record.message for record in caplog.records) == is_odd


@pytest.mark.parametrize(
    "changes",
    [
        {"reader": {"separator": ";;"}},
        {"reader": {"decimal": ";"}},
        {"reader": {"separator": ",", "decimal": ","}},
        {"reader": {"encoding": "utf-88"}},
        {"reader": {"encoding": "base64"}},
        {"reader": {"missing": "?"}},
        {"reader": {"seperator": ";"}},
        {"readers": {"nord": {"seperator": ";"}}},
        {"readers": {"nord": ";"}},
        {"numeric": {"age": {"range": (0, 10), "missing": 11}}},
        {"numeric": {"age": {"range": (0, 10), "missing": "mean"}}},
        {"numeric": {"age": {"range": (0, 10), "missing": True}}},
        {"numeric": {"day": {"range": (0, 10), "date": "%d.%m.%Y"}}},
        {"numeric": {"day": {"range": (0, 10), "since": "2020-01-01"}}},
        {"numeric": {"day": {"range": (0, 10), "date": "%d.%m.", "since": "2020-01-01"}}},
        {"numeric": {"day": {"range": (0, 10), "date": "%d.%m.%Y", "since": "1.1.2020"}}},
        {"categorical": {"ward": {"categories": ["a", "b"], "missing": "c"}}},
        {"categorical": {"ward": {"categories": ["a", "b"], "mising": "a"}}},
    ],
)
def test_wrong_settings_are_refused(changes):
    with refused("data.schema") as caught:
        schema(**changes)
    assert caught.value.field == f"data.schema.{next(iter(changes))}"


@pytest.mark.parametrize(
    "ends", [["2018-01-01", "2023-01-01"], [datetime.date(2018, 1, 1), datetime.date(2023, 1, 1)]]
)
def test_a_range_of_dates_is_refused_with_the_numbers_that_it_stands_for(ends):
    column = {"range": ends, "date": "%d.%m.%Y", "since": "2020-01-01"}
    with refused("data.schema") as caught:
        schema(numeric={"Aufnahme": column})
    assert "[-730, 1096]" in str(caught.value)
    schema(numeric={"Aufnahme": {**column, "range": [-730, 1096]}})
    for undeclared in (ends, {"range": ends}, {"range": ends, "date": "%d.%m.%Y"}):
        with refused("data.schema"):
            schema(numeric={"Aufnahme": undeclared})


def test_a_configuration_has_the_same_settings(tmp_path):
    (tmp_path / "nord.csv").write_text(GERMAN, encoding="cp1252")
    (tmp_path / "config.toml").write_text(
        """
rounds = 1
[data]
source = "tables"
files = ["nord.csv"]
[data.schema]
user = "Fall"
label = "krank"
classes = ["nein", "ja"]
[data.schema.reader]
encoding = "cp1252"
[data.schema.readers]
nord = { separator = ";", decimal = "," }
[data.schema.numeric]
"Größe" = { range = [0, 2.5], typical = [1.7, 0.1] }
Aufnahme = { range = [0, 366], date = "%d.%m.%Y", since = "2020-01-01" }
[method]
name = "uldp-sgd"
noise_multiplier = 1.0
clip = 1.0
""",
        encoding="utf-8",
    )
    check(load_config(tmp_path / "config.toml").load_federation())
    with refused("data.schema"):
        load_config(tmp_path / "config.toml", ["data.schema.readers={nrod = {}}"]).read_public_data()


TWO_LAYOUTS = """
rounds = 1
[data]
source = "tables"
files = { nord = "nord.csv", west = "west.csv" }
[data.schema]
user = "id"
label = "ill"
classes = [false, true]
[data.schema.readers]
west = { dates = { "day in" = "%m/%d/%Y" } }
[data.schema.numeric]
"day in" = { range = [0, 366], date = "%d.%m.%Y", since = "2020-01-01", missing = 0 }
[method]
name = "uldp-sgd"
noise_multiplier = 1.0
"""


def test_a_silo_keeps_the_common_settings_that_it_does_not_set():
    """With `missing` lost, -9 of that silo would be read as a number."""
    common = {"missing": ["-9"], "separator": ";"}
    given = schema(reader=common, readers={"nord": {"decimal": ","}, "sud": {"missing": ["?"]}})
    assert given.readers["nord"] == Reader(separator=";", decimal=",", missing=["-9"])
    assert given.readers["sud"] == Reader(separator=";", missing=["?"])
    assert schema(reader=common, readers={"west": Reader()}).readers["west"] == Reader()


def test_a_reader_that_does_not_fit_the_common_one_is_named() -> None:
    """A file with commas beside a common decimal comma: the setting in the way is not in the silo's table."""
    common = Reader(separator=";", decimal=",")
    with pytest.raises(
        SilodpError, match=r"readers\.west, with the settings of reader.* are both ','"
    ) as caught:
        schema(reader=common, readers={"west": {"separator": ","}})
    assert (caught.value.code, caught.value.field) == ("data.schema", "data.schema.readers")


def test_a_silo_names_its_layouts_of_dates(tmp_path):
    (tmp_path / "nord.csv").write_text("id,day in,ill\na,03.02.2020,yes\nb,,no\n")
    (tmp_path / "west.csv").write_text("id,day in,ill\nc,02/03/2020,yes\nd,02/29/2020,no\n")
    (tmp_path / "config.toml").write_text(TWO_LAYOUTS)
    config = load_config(tmp_path / "config.toml")
    (tmp_path / "again.toml").write_text(config.config.to_toml())  # as a deployment hands it to the silos
    for name in ("config.toml", "again.toml"):
        config = load_config(tmp_path / name)
        nord, west = (silo.x[:, 0] for silo in config.load_federation().silos)
        np.testing.assert_allclose(nord, [33 / 183 - 1, -1], atol=1e-6)
        np.testing.assert_allclose(west, [33 / 183 - 1, 59 / 183 - 1], atol=1e-6)
    schema = config.table_schema
    assert "dates" not in schema.describe_inputs()["reader"]  # it is empty there
    for dates in ({"dai": "%Y"}, {"day in": "%d.%m."}, {"ill": "%d.%m.%Y"}, "%d.%m.%Y"):
        with refused("data.schema"):
            replace(schema, readers={"west": {"dates": dates}})


def test_a_split_of_rows_warns(tmp_path, caplog):
    (tmp_path / "a.csv").write_text("id,size,ill,part\n1,3,no,train\n1,5,yes,test\n2,3,no,train\n")
    given = Schema(user="id", label="ill", classes=["no", "yes"], numeric={"size": (0, 10)}, split="part")
    with caplog.at_level(logging.WARNING):
        Federation.from_tables([tmp_path / "a.csv"], given)
    assert "test_share" in caplog.text
    caplog.clear()
    (tmp_path / "a.csv").write_text("id,size,ill,part\n1,3,no,train\n3,5,yes,test\n2,3,no,train\n")
    with caplog.at_level(logging.WARNING):
        Federation.from_tables([tmp_path / "a.csv"], given)
    assert "test_share" not in caplog.text


def test_a_prediction_reads_files_dates_and_missing_cells_as_training_does(tmp_path):
    (tmp_path / "nord.csv").write_text(GERMAN, encoding="cp1252")
    stages = {"categories": ["ja", "nein"], "missing": "ja"}
    given = schema(label="Fall", kind="real", classes=None, user="x", categorical={"krank": stages})
    restored = Schema.from_inputs(json.loads(json.dumps(given.describe_inputs())))
    assert restored.features == given.features
    x, _ = read_inputs(tmp_path / "nord.csv", restored)
    np.testing.assert_allclose(x, [[1, 33 / 183 - 1, 1, 0], [-0.5, -1, 0, 1]], atol=1e-6)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\r\r\n"])
def test_an_empty_line_moves_no_cell(tmp_path, end):
    rows = ["crp,age,id,ill", "5,61,7,0", "", ",62,8,1", ' ,63,9,"a\r\nb"', ""]
    (tmp_path / "a.csv").write_text(end.join(rows), newline="")
    numeric = {name: {"range": (0, 99), "typical": (0, 1), "missing": "indicator"} for name in ("crp", "age")}
    given = Schema(user="id", label="ill", classes=[0, 1], numeric=numeric)
    x, kept = read_inputs(tmp_path / "a.csv", given, ["id", "ill"])
    np.testing.assert_array_equal(x, [[5, 0, 61, 0], [0, 1, 62, 0], [0, 1, 63, 0]])
    assert kept["id"].tolist() == ["7", "8", "9"]
    if end in ("\n", "\r\n"):
        assert kept["ill"].tolist() == ["0", "1", "a\r\nb"]


def test_copied_whole_numbers_with_a_gap_are_not_rounded(tmp_path):
    numbers = pa.array([12345678901234561, None, 7], pa.int64())
    pq.write_table(pa.table({"id": numbers, "size": [1.5, 2, None]}), tmp_path / "a.parquet")
    numeric = {"size": {"range": (0, 10), "typical": (0, 1), "missing": "indicator"}}
    given = Schema(user="id", label="ill", classes=[0, 1], numeric=numeric)
    x, kept = read_inputs(tmp_path / "a.parquet", given, ["id"])
    assert kept.to_csv(index=False).split() == ["id", "12345678901234561", '""', "7"]
    np.testing.assert_array_equal(x, [[1.5, 0], [2, 0], [0, 1]])
    kept.to_parquet(tmp_path / "b.parquet")
    assert pq.read_table(tmp_path / "b.parquet")["id"].to_pylist() == numbers.to_pylist()


@pytest.mark.parametrize(
    "text",
    [
        "stage\nI\n\nII\n",
        "\n \nstage\r\nI\r\n\r\nII\r\n\r\n\r\n",
        'stage\nI\n""\nII',
    ],
)
def test_an_empty_line_of_a_single_column_is_a_row(tmp_path, text):
    (tmp_path / "new.csv").write_text(text, newline="")
    stages = {"categories": ["I", "II", "unknown"], "missing": "unknown"}
    given = Schema(user="id", label="ill", classes=["no", "yes"], categorical={"stage": stages})
    x, kept = read_inputs(tmp_path / "new.csv", given, ["stage"])
    np.testing.assert_array_equal(x, [[1, 0, 0], [0, 0, 1], [0, 1, 0]])
    assert kept["stage"].tolist() == ["I", "", "II"]
    (tmp_path / "new.csv").write_text(text.rstrip() + '\n""\n', newline="")  # as pandas writes an empty cell
    x, _ = read_inputs(tmp_path / "new.csv", given)
    np.testing.assert_array_equal(x[2:], [[0, 1, 0], [0, 0, 1]])
