"""Each value of a file of SPSS, SAS or Stata arrives as it is, or is refused with its row.

Every rule here was broken by pyreadstat or pandas on valid files, or by a number that only its format explains.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from silodp.errors import SilodpError
from support.refusals import refused
from support.statistics_files import Write, open_file, read, read_one

ENDINGS = ["sav", "zsav", "por", "dta", "xpt", "sas7bdat"]
SAS = ["xpt", "sas7bdat"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_all_kinds_of_files_give_the_same_columns(
    ending: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"WHO": ["0012", "  x", "Ärzte"], "AGE": [71.5, None, -2.0], "WARD": ["a", "b ", "a"]}
    if ending == "por":
        columns["WHO"][2] = "Arzte"
    path = write(ending, columns)
    expected = {**columns, "WARD": ["a", "b " if ending == "dta" else "b", "a"]}
    assert open_file(path).list_columns() == ["WHO", "AGE", "WARD"]
    assert read(path) == read(path, "WHO") == expected
    source = open_file(path)
    assert list(source.read_columns(["WARD", "WHO"])) == ["WARD", "WHO"]
    assert source.read_columns(["AGE"])["AGE"].to_pylist() == expected["AGE"]
    # Rows that are read at once, of which the last part may be full.
    for rows in (1, 2, 3):
        monkeypatch.setattr("silodp_integrations.statistics_files.files._ROWS", rows)
        assert read(path) == expected


@pytest.mark.parametrize("ending", ["sav", "dta", "xpt"])
def test_a_table_without_rows_has_its_columns(ending: str, write: Write) -> None:
    columns = {"WHO": pd.Series([], dtype=str), "AGE": pd.Series([], dtype=float)}
    assert read(write(ending, columns)) == {"WHO": [], "AGE": []}


@pytest.mark.parametrize("rows", [7, 1000])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_whose_end_is_lost_is_refused(
    ending: str, rows: int, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silodp_integrations.statistics_files.files._ROWS", rows)
    columns = {"WHO": [f"p{row:05}" for row in range(50)], "AGE": [float(row) for row in range(50)]}
    path = write(ending, columns)
    whole = path.read_bytes()
    assert read(path) == columns
    cuts = [*range(0, len(whole), len(whole) // 60), len(whole) - 81, len(whole) - 160]
    is_refused = 0
    for cut in cuts:
        path.write_bytes(whole[:cut])
        try:
            found = read(path)
        except SilodpError as error:
            is_refused += error.code in ("data.unreadable", "data.no_records")
        else:  # what fills up the last part of a file may be lost
            assert found == columns or (ending == "xpt" and cut % 80 == 0), cut
    assert is_refused > 55


def test_a_transport_file_that_ends_within_a_row_or_has_two_data_sets_is_refused(write: Write) -> None:
    """pyreadstat gives the rows that are left, and of two data sets the first one."""
    path = write("xpt", {"WHO": [f"p{row:05}" for row in range(50)], "AGE": [1.0] * 50})
    whole = path.read_bytes()
    for cut in (1, 79, 80, 240):  # rows of 14 bytes: at 160 one ends, which nobody can see
        path.write_bytes(whole[:-cut])
        with refused("data.unreadable"):
            read(path)
    wide = write("xpt", {"NOTE": ["x" * 300, ""], "WHO": ["p1", "p2"]})
    wide.write_bytes(wide.read_bytes()[:-80])  # more blanks than those that fill the last record
    with refused("data.unreadable"):
        read(wide)
    path.write_bytes(whole + whole[whole.index(b"HEADER RECORD*******MEMB") :])
    with refused("data.unreadable"):
        read(path)


@pytest.mark.parametrize("ending", ENDINGS)
def test_files_of_another_kind_are_refused(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"north.{ending}"
    for content in (b"", b"a,b\n1,2\n", b"PK\3\4x", b"PAR1 PAR1"):
        path.write_bytes(content)
        with refused("data.unreadable" if content else "data.no_records") as caught:
            open_file(path).list_columns()
        assert (".parquet" in str(caught.value)) == content.startswith(b"PAR1")


def test_names_that_stand_twice_are_listed_twice(tmp_path: Path) -> None:
    path = tmp_path / "north.dta"
    pd.DataFrame({"aa": [1.0], "ab": [3.0], "ac": [5.0], "x": [7.0]}).to_stata(path, write_index=False)
    path.write_bytes(path.read_bytes().replace(b"ab\0", b"aa\0").replace(b"ac\0", b"aa\0"))
    source = open_file(path)
    with warnings.catch_warnings():  # by which pyreadstat says so
        warnings.simplefilter("ignore")
        assert list(source.describe_columns()) == ["x"]
    assert source.list_columns() == ["aa", "aa", "aa", "x"]
    assert source.read_columns(["x"])["x"].to_pylist() == [7]


def test_texts_of_old_files_are_in_the_declared_encoding(tmp_path: Path) -> None:
    path = tmp_path / "north.dta"
    pd.DataFrame({"x": ["Ünal"], "y": [1.0]}).to_stata(path, write_index=False, version=114)
    assert read(path) == {"x": ["Ünal"], "y": [1]}
    written = path.read_bytes()
    path.write_bytes(written.replace("Ünal".encode("latin-1"), "Прив".encode("cp1251")))
    assert read(path, encoding="cp1251") == {"x": ["Прив"], "y": [1]}
    path.write_bytes(written.replace("Ünal".encode("latin-1"), b"\x81nal"))
    with refused("data.unreadable") as caught:
        read(path)
    assert "data.schema.reader.encoding" in str(caught.value)
    assert open_file(path).read_columns(["y"])["y"].to_pylist() == [1]  # other columns are not looked at


def test_an_encoding_of_text_files_is_not_that_of_files_that_state_theirs(write: Write) -> None:
    """With it, a person would have another key than in the other silos."""
    for ending in ("sav", "zsav", "dta", "sas7bdat"):
        path = write(ending, {"X": ["Ünal", "a"]})
        assert read(path, encoding="cp1252") == {"X": ["Ünal", "a"]}
        if ending != "zsav":  # texts of which are compressed
            path.write_bytes(path.read_bytes().replace("Ünal".encode(), b"\xfcnal "))
            with refused("data.unreadable") as caught:
                read(path, encoding="cp1252")
            assert "data.schema.reader.encoding" not in str(caught.value)
    path = write("xpt", {"X": ["Unal", "a"]})
    path.write_bytes(path.read_bytes().replace(b"Unal", b"\xfcnal"))
    assert read(path, encoding="latin-1") == {"X": ["ünal", "a"]}


def test_declared_codes_of_spss_are_missing_and_named(write: Write) -> None:
    path = write(
        "sav",
        {"X": [1.0, 99.0, -9.0, -1.0, np.nan, 0.5], "S": ["a", "Z", "b", "refused by them", "", "c"]},
        missing_ranges={"X": [99, {"lo": -9, "hi": -1}], "S": ["Z", "refused"]},
        variable_value_labels={"X": {1: "one", 99: "refused", -1: "unknown"}, "S": {"Z": "zero", "a": "A"}},
        column_labels=["how many", ""],
    )
    assert read(path) == {
        "X": [1, None, None, None, None, 0.5],
        "S": ["a", None, "b", "refused by them", "", "c"],
    }
    described = open_file(path).describe_columns()
    assert described["X"].labels == {"1": "one"}
    assert described["X"].title == "how many"
    assert described["X"].missing == ["-9 to -1", "-1 (unknown)", "99 (refused)"]
    assert (described["S"].labels, described["S"].missing) == ({"a": "A"}, ["Z (zero)", "refused"])


def test_open_ranges_of_spss_are_missing(write: Write) -> None:
    low, high = -sys.float_info.max, sys.float_info.max
    for ends, left, name in (
        ((low, 0.0), [None, 5.0], "lowest to 0"),
        ((0.0, high), [-3.0, None], "0 to highest"),
    ):
        path = write("sav", {"X": [-3.0, 5.0]}, missing_ranges={"X": [{"lo": ends[0], "hi": ends[1]}]})
        assert read_one(path) == left
        assert open_file(path).describe_columns()["X"].missing == [name]


def test_codes_of_stata_and_sas_are_missing_and_named(write: Write) -> None:
    path = write(
        "dta",
        {"i": pd.Series([1, "a", 3], dtype=object), "x": pd.Series(["z", 2.5, None], dtype=object)},
        missing_user_values={"i": ["a"], "x": ["z"]},
        variable_value_labels={"i": {1: "one", "a": "refused"}},
    )
    assert read(path) == {"i": [1, None, 3], "x": [None, 2.5, None]}
    described = open_file(path).describe_columns()["i"]
    assert (described.labels, described.missing) == ({"1": "one"}, [".a (refused)"])
    assert read_one(write("sas7bdat", {"X": [1.0, "A", "_", "Z", None]})) == [1, None, None, None, None]
    # In a transport file a code is its letter and zeros; two rows of it, found by their numbers.
    path = write("xpt", {"X": [1.0, 2.0, 3.0]})
    written = path.read_bytes().replace(bytes.fromhex("4120000000000000"), b"A" + bytes(7))
    path.write_bytes(written.replace(bytes.fromhex("4130000000000000"), b"_" + bytes(7)))
    assert read_one(path) == [1, None, None]


@pytest.mark.parametrize(
    ("ending", "form"), [("sav", "N8"), ("dta", "%08.0f"), ("xpt", "Z8."), ("sas7bdat", "Z8")]
)
def test_keys_have_the_leading_zeros_that_their_format_shows(ending: str, form: str, write: Write) -> None:
    columns = {"WHO": [123.0, 0.0, 123456789.0], "NR": [123.0, None, 7.0]}
    path = write(ending, columns, {"WHO": form})
    found = read(path, "NR")
    assert found["WHO"] == ["00000123", "00000000", "123456789"]
    assert found["NR"] == [123, None, 7]
    assert [type(cell) for cell in found["NR"]] == [int, type(None), int]
    assert read(path)["NR"] == [123, None, 7]
    # What is no whole number is no code, unless it is to be a key.
    path = write(ending, {"WHO": [1.0, 1.5]}, {"WHO": form})
    assert read_one(path) == [1.0, 1.5]
    path = write(ending, {"WHO": [1.0, -5.0]}, {"WHO": form})
    assert read_one(path) == [1, -5]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    ("number", "is_refused"), [(2.0**53 - 1, False), (2.0**53, True), (-(2.0**53), True), (0.5, True)]
)
def test_keys_that_may_be_rounded_are_refused(
    ending: str, number: float, is_refused: bool, write: Write
) -> None:
    path = write(ending, {"A": [1.0, 2.0], "B": [1.0, number]})
    if not is_refused:
        assert read(path, "B")["B"] == [1, int(number)]
        return
    with refused("data.value") as caught:
        read(path, "B")
    assert caught.value.field == "B"
    assert "data row 2 " in str(caught.value)
    assert list(open_file(path).read_readable(["A", "B"], "B")) == ["A"]
    assert read(path, "A")["B"] == [1, number]


def test_keys_of_short_numbers_are_refused_where_these_end(write: Write, tmp_path: Path) -> None:
    """Stata's float holds 24 binary digits, and a number of SAS with 3 bytes holds 13."""
    path = tmp_path / "south.dta"
    for number, is_refused in ((2**24 - 1, False), (2**24, True)):
        pd.DataFrame({"who": np.array([1, number], dtype="float32")}).to_stata(path, write_index=False)
        if is_refused:
            with refused("data.value"):
                read_one(path, "who")
        else:
            assert read_one(path, "who") == [1, number]
    # A text of 3 bytes that is declared a number: exponent 4, and the digits 1121 and 3040.
    path = write("xpt", {"WHO": ["D\x11!", "D0@"]})
    written = path.read_bytes()
    assert written.count(bytes([0, 2, 0, 0, 0, 3])) == 1
    path.write_bytes(written.replace(bytes([0, 2, 0, 0, 0, 3]), bytes([0, 1, 0, 0, 0, 3])))
    assert read_one(path) == [0x1121, 0x3040]
    with refused("data.value") as caught:
        read_one(path, "WHO")
    assert "data row 2 " in str(caught.value)


def test_numbers_of_stata_are_taken_exactly(tmp_path: Path) -> None:
    path = tmp_path / "north.dta"
    frame = pd.DataFrame({name: np.array([1, 100], dtype=name) for name in ("int8", "int16", "int32")})
    frame["float32"], frame["float64"] = np.array([0.1, 3], dtype="float32"), [0.1, 2.0**60]
    frame.to_stata(path, write_index=False)
    found = read(path)
    assert found["float32"] == [0.10000000149011612, 3]
    assert found["float64"] == [0.1, 2.0**60]
    for name in ("int8", "int16", "int32"):
        assert found[name] == [1, 100]
        assert {type(cell) for cell in found[name]} == {int}


@pytest.mark.parametrize("ending", [*SAS, "por", "sav", "dta"])
def test_numbers_keep_all_digits(ending: str, write: Write) -> None:
    random = np.random.default_rng(1)
    numbers = [
        *(random.normal(size=500) * 10.0 ** random.integers(-9, 9, 500)),
        *random.integers(2**52, 2**53, 500),
    ]
    assert read_one(write(ending, {"X": [float(number) for number in numbers]})) == numbers


def test_names_of_codes_with_leading_zeros(write: Write) -> None:
    path = write(
        "sav", {"X": [1.0, 12.0]}, {"X": "N3"}, variable_value_labels={"X": {1: "one", 12: "twelve"}}
    )
    assert read_one(path) == ["001", "012"]
    assert open_file(path).describe_columns()["X"].labels == {"001": "one", "012": "twelve"}
