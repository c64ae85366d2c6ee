"""What a draft says of each kind of field, and what is no data dictionary."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from silodp_integrations.redcap.dictionary import read_choices, read_dictionary
from silodp_integrations.redcap.draft import draft_schema
from support.redcap_dictionaries import API, PAGE, write_dictionary
from support.refusals import refused

VALIDATION = "text_validation_type_or_show_slider_number"
CHOICES = "select_choices_or_calculations"
NEEDED = {"required_field": "y"}


def draft(folder: Path, *fields: dict[str, str], label: str = "ill", **codes: str) -> str:
    dictionary = read_dictionary(write_dictionary(folder / "dictionary.csv", *fields))
    return draft_schema(dictionary, "pseudonym", label, codes)


def read_schema(folder: Path, *fields: dict[str, str], label: str = "ill", **codes: str) -> Any:
    return tomllib.loads(draft(folder, *fields, label=label, **codes))["data"]["schema"]


def field(name: str, kind: str = "text", **cells: str) -> dict[str, str]:
    return {"field_name": name, "field_type": kind, **cells}


def limits(validation: str, low: str = "", high: str = "", **cells: str) -> dict[str, str]:
    return field(
        "x", **{VALIDATION: validation, "text_validation_min": low, "text_validation_max": high, **cells}
    )


@pytest.mark.parametrize(
    ("row", "numeric"),
    [
        (limits("integer", "0", "110", **NEEDED), {"range": [0, 110]}),
        (limits("integer", "0", "110"), {"range": [0, 110], "missing": "indicator"}),
        (
            limits("integer", "0", "110", branching_logic="[ill] = '1'", **NEEDED),
            {"range": [0, 110], "missing": "indicator"},
        ),
        (limits("number_2dp", "-1.5", "2.25", **NEEDED), {"range": [-1.5, 2.25]}),
        (limits("number_1dp_comma_decimal", "0,5", "2", **NEEDED), {"range": [0.5, 2]}),
        (limits("number", "0", **NEEDED), {"range": []}),
        (limits("number", "0", "[ill]", **NEEDED), {"range": []}),
        (limits("number", "5", "5", **NEEDED), {"range": []}),
        (limits("number", "nan", "inf", **NEEDED), {"range": []}),
        (limits("number", "0", "10", **NEEDED) | {"field_type": "slider"}, {"range": [0, 10]}),
        (field("x", "calc", **{CHOICES: "1 + 2"}, **NEEDED), {"range": [], "missing": "indicator"}),
        (limits("date_mdy", "2020-01-01", "today", **NEEDED), {"range": [], "date": "%Y-%m-%d", "since": ""}),
        (limits("datetime_dmy", **NEEDED), {"range": [], "date": "%Y-%m-%d %H:%M", "since": ""}),
        (
            limits("datetime_seconds_ymd", **NEEDED),
            {"range": [], "date": "%Y-%m-%d %H:%M:%S", "since": ""},
        ),
    ],
)
def test_numbers_and_days(row: dict[str, str], numeric: dict[str, Any], tmp_path: Path) -> None:
    assert read_schema(tmp_path, row)["numeric"] == {"x": numeric}


def test_choices_are_codes_and_labels_stand_in_comments(tmp_path: Path) -> None:
    row = field("sex", "radio", **{CHOICES: '1, Female | 2,Male, or "so" |-9 , <b>n/a</b> # 1|'}, **NEEDED)
    text = draft(tmp_path, row)
    assert tomllib.loads(text)["data"]["schema"]["categorical"] == {"sex": ["1", "2", "-9"]}
    comment = re.search(r'^"sex".*?  # (.*)$', text, re.MULTILINE)
    assert comment is not None
    names = {"1": "Female", "2": 'Male, or "so"', "-9": "<b>n/a</b> # 1"}
    assert tomllib.loads(f"sex = {comment[1]}")["sex"] == names


@pytest.mark.parametrize("kind", ["yesno", "truefalse"])
def test_yes_and_no_are_1_and_0(kind: str, tmp_path: Path) -> None:
    assert read_schema(tmp_path, field("x", kind, **NEEDED))["categorical"] == {"x": ["0", "1"]}


def test_a_missing_code_may_stand_in_every_field(tmp_path: Path) -> None:
    rows = [limits("integer", "0", "9", **NEEDED), field("y", "yesno", **NEEDED)]
    schema = read_schema(tmp_path, *rows, NA="not asked")
    assert schema["numeric"] == {"x": {"range": [0, 9], "missing": "indicator"}}
    assert schema["categorical"] == {"y": {"categories": ["0", "1", "missing"], "missing": "missing"}}


def test_an_empty_cell_counts_as_a_category_that_is_no_code(tmp_path: Path) -> None:
    found = read_schema(tmp_path, field("x", "dropdown", **{CHOICES: "Missing, a | b, b"}))["categorical"]
    assert found == {"x": {"categories": ["Missing", "b", "missing_"], "missing": "missing_"}}


def test_a_choice_alone_is_completed_by_people_or_by_the_empty_cell(tmp_path: Path) -> None:
    row = field("x", "radio", **{CHOICES: "1, Consent"})
    assert read_schema(tmp_path, row | NEEDED)["categorical"] == {"x": []}
    both = {"categories": ["1", "missing"], "missing": "missing"}
    assert read_schema(tmp_path, row)["categorical"] == {"x": both}


def test_a_checkbox_is_a_column_for_each_code_as_an_export_names_it(tmp_path: Path) -> None:
    row = field("pain", "checkbox", **{CHOICES: "1, Head | B2, Back | -9, Unknown | c.d, Else"})
    names = ["pain___1", "pain___b2", "pain____9", "pain___c_d"]
    assert read_schema(tmp_path, row)["categorical"] == {name: ["0", "1"] for name in names}
    with_codes = read_schema(tmp_path, row, NA="asked")
    assert with_codes["categorical"]["pain___1"] == {
        "categories": ["0", "1", "missing"],
        "missing": "missing",
    }
    assert with_codes["reader"]["missing"] == ["NA"]
    label = read_schema(tmp_path, row, label="pain___b2")
    assert (label["label"], label["classes"]) == ("pain___b2", ["0", "1"])


@pytest.mark.parametrize(
    "row",
    [
        field("x", "notes"),
        field("x", "file"),
        field("x", "descriptive"),
        field("x", "sql", **{CHOICES: "1, a | 2, b"}),
        field("x"),
        field("x", **{VALIDATION: "ssn"}),
        field("x", "radio", **{CHOICES: "1, Yes | 1.0, No"}),
        field("x", "radio", **{CHOICES: "Yes | No"}),
        field("x", "radio", **{CHOICES: ", Yes | 2, No"}),
        field("x", "radio"),
        field("x", "checkbox", **{CHOICES: "a, Yes | A, No"}),
        field("x", "radio", **{CHOICES: "1, Yes | 2, No"}, identifier="y"),
        limits("integer", "0", "9", identifier="Y"),
        limits("date_ymd", identifier="y"),
    ],
)
def test_left_out_with_a_reason(row: dict[str, str], tmp_path: Path) -> None:
    text = draft(tmp_path, row)
    schema = tomllib.loads(text)["data"]["schema"]
    assert schema["numeric"] == schema["categorical"] == {}
    assert re.search(r'^# "x": .+', text, re.MULTILINE)


def test_identifiers_and_what_is_computed_of_them_are_no_features(tmp_path: Path) -> None:
    """Also the number of a record, the person and the label."""
    rows = [
        field("twice", "calc", **{CHOICES: "2 * [age]"}),
        field("age", "calc", **{CHOICES: "datediff([birth], 'today', 'y')"}),
        limits("date_dmy", identifier="y") | {"field_name": "birth"},
        field("score", "calc", **{CHOICES: "[ill] + 1"}),
        field("row", "calc", **{CHOICES: "[record_id]"}),
        limits("date_ymd", field_annotation="@CALCDATE([birth], 18, 'y')"),
        field("free", "calc", **{CHOICES: "[weight] / 2"}),
    ]
    assert read_schema(tmp_path, *rows)["numeric"].keys() == {"free"}


def test_a_label_that_is_a_number(tmp_path: Path) -> None:
    schema = read_schema(tmp_path, limits("number"), label="x")
    assert (schema["kind"], schema["label_typical"], schema["numeric"]) == ("real", [], {})


@pytest.mark.parametrize(
    ("user", "label", "code", "where"),
    [
        ("nobody", "ill", "data.column", "user"),
        ("ill", "sex", "data.column", "user"),
        ("pseudonym", "nothing", "data.kind", "label"),
        ("pseudonym", "pseudonym", "data.kind", "label"),
        ("record_id", "record_id", "data.kind", "label"),
        ("pseudonym", "name", "data.kind", "label"),
        ("pseudonym", "mark", "data.kind", "label"),
        ("pseudonym", "x", "data.kind", "label"),
        ("pseudonym", "pain", "data.kind", "label"),
    ],
)
def test_no_such_user_or_label(user: str, label: str, code: str, where: str, tmp_path: Path) -> None:
    rows = [
        field("name"),
        field("mark", "yesno", identifier="y"),
        limits("date_ymd"),
        field("pain", "checkbox", **{CHOICES: "1, Head"}),
    ]
    fields = read_dictionary(write_dictionary(tmp_path / "dictionary.csv", *rows))
    with refused(code) as caught:
        draft_schema(fields, user, label, {})
    assert caught.value.field == where


def test_a_record_that_is_counted_is_said_to_be_no_person(tmp_path: Path) -> None:
    fields = read_dictionary(write_dictionary(tmp_path / "dictionary.csv"))
    lines = [draft_schema(fields, user, "ill", {}) for user in ("record_id", "pseudonym")]
    assert ["numbers records anew" in text for text in lines] == [True, False]


def test_texts_of_a_dictionary_cannot_write_settings(tmp_path: Path) -> None:
    """Neither as new lines, nor as the mark for which a configuration is refused, nor as names of columns."""
    nasty = 'a"\nrounds = 9\u2028 \x7f # ROWS: 5'
    text = draft(
        tmp_path,
        field('x"] = 1', "radio", **{CHOICES: f"1, {nasty} | 2, b"}, **NEEDED),
        limits("number", nasty, field_label=nasty, **NEEDED),
        field(nasty, "notes"),
    )
    loaded = tomllib.loads(text)
    assert loaded["rounds"] == 40
    assert "ROWS:" not in text
    assert loaded["data"]["schema"]["categorical"] == {'x"] = 1': ["1", "2"]}


@pytest.mark.parametrize("header", [PAGE, API, PAGE[:-1], API[:-1]])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_both_headers_in_every_form(header: list[str], separator: str, encoding: str, tmp_path: Path) -> None:
    row = field("größe", "radio", **{CHOICES: "1, a; b, c\td | 2, two\nlines"}, identifier="y")
    path = write_dictionary(tmp_path / "d.csv", row, header=header, separator=separator, encoding=encoding)
    found = read_dictionary(path)
    assert [one.name for one in found] == ["record_id", "pseudonym", "ill", "größe"]
    assert (found[3].identifier, found[3].type) == ("y", "radio")
    assert read_choices(found[3].choices) == {"1": "a; b, c\td", "2": "two\nlines"}


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("identifier", "identity"),
        lambda text: text.replace("form_name", "field_name"),
        lambda text: text.replace("pseudonym", "record_id"),
        lambda text: text.replace("pseudonym", " "),
        lambda text: text.replace("ill,f", "ill,f,more"),
        lambda text: text.replace("ill,f", 'ill,"f'),
        lambda text: text.replace("ill,f", 'ill,"f"f'),
        lambda text: text.splitlines()[0],
        lambda text: "record_id,age\n1,2\n",
        lambda text: "",
        lambda text: text + "\udcff",
    ],
)
def test_what_is_no_dictionary(change: Any, tmp_path: Path) -> None:
    path = write_dictionary(tmp_path / "d.csv")
    path.write_text(change(path.read_text()), errors="surrogateescape")
    with refused("data.unreadable"):
        read_dictionary(path)
    with refused("data.no_file"):
        read_dictionary(tmp_path)
