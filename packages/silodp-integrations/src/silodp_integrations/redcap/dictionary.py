"""The data dictionary of a REDCap project, as its web page or its API writes it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from silodp.data.tables.columns import text_of
from silodp.errors import SilodpError

_HEADERS = {
    "name": ("Variable / Field Name", "field_name"),
    "type": ("Field Type", "field_type"),
    "title": ("Field Label", "field_label"),
    "choices": ("Choices, Calculations, OR Slider Labels", "select_choices_or_calculations"),
    "validation": (
        "Text Validation Type OR Show Slider Number",
        "text_validation_type_or_show_slider_number",
    ),
    "low": ("Text Validation Min", "text_validation_min"),
    "high": ("Text Validation Max", "text_validation_max"),
    "identifier": ("Identifier?", "identifier"),
    "branching": ("Branching Logic (Show field only if...)", "branching_logic"),
    "required": ("Required Field?", "required_field"),
}
"""Attribute of a field → its header on the web page, and in the API."""
_ANNOTATION = ("Field Annotation", "field_annotation")
"""The header of a column that old versions do not have."""


@dataclass(frozen=True)
class Field:
    """A row of a data dictionary; the attributes are its cells, without blanks around them.

    Attributes:
        choices: the choices of a field that has some, the formula of a calculated one, else the labels of a slider.
        low, high: the ends of the validation range: numbers, dates, "today", or "[field]".
        identifier: "y", or empty; anything else counts as "y".
        branching: the condition under which the field is shown.
        annotation: action tags, which may compute the value, as in "@CALCDATE([birth], 18, 'y')".
    """

    name: str
    type: str
    title: str
    choices: str
    validation: str
    low: str
    high: str
    identifier: str
    branching: str
    required: str
    annotation: str = ""

    @property
    def may_be_empty(self) -> bool:
        """Whether a record can lack a value; a hidden field has none, also where it is required."""
        return self.required.lower() != "y" or bool(self.branching)


def read_dictionary(path: Path) -> list[Field]:
    """Return the fields of a data dictionary, in its order.

    Raises:
        SilodpError: the file is no data dictionary, or not as REDCap writes it.
    """
    if not path.is_file():
        raise SilodpError(
            f"there is no file {path}: check its path.", code="data.no_file", field="DICTIONARY"
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
        # The separator is a preference of the REDCap user who downloads the file.
        for mark in ",;\t":
            places = _find_columns(next(csv.reader(io.StringIO(text, newline=""), delimiter=mark), []))
            if places:
                break
        else:
            needed = ", ".join(repr(page) for page, _ in _HEADERS.values())
            raise _refuse(
                path, f"is no data dictionary, whose header has {needed} (by the API: field_name, ...)"
            )
        header, *rows = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
    except (UnicodeDecodeError, csv.Error) as error:
        raise _refuse(path, f"is not readable as CSV in UTF-8 ({error})") from None
    fields: dict[str, Field] = {}
    for number, row in enumerate(rows, 2):
        if not any(map(str.strip, row)):
            continue
        # A cell too many would move the mark of an identifier to another column.
        if len(row) != len(header):
            raise _refuse(path, f"has {len(row)} cells in record {number}, and {len(header)} in its header")
        field = Field(**{name: row[place].strip() for name, place in places.items()})
        if not field.name or field.name in fields:
            raise _refuse(path, f"names no field, or {field.name!r} for the second time, in record {number}")
        fields[field.name] = field
    if not fields:
        raise _refuse(path, "has no fields")
    return list(fields.values())


def read_choices(text: str) -> dict[str, str]:
    """Return code → label of choices such as "1, Yes | 2, No, or not yet".

    Raises:
        ValueError: a choice has no code, or a code stands there twice; the text says which.
    """
    choices: dict[str, str] = {}
    for choice in filter(None, map(str.strip, text.split("|"))):
        code, comma, label = choice.partition(",")
        code = text_of(code)
        if not comma or not code:
            raise ValueError(f"the choice {choice!r} has no code")
        if code in choices:
            raise ValueError(f"the code {code!r} stands there twice")
        choices[code] = label.strip()
    if not choices:
        raise ValueError("there are no choices")
    return choices


def name_checkbox(field: str, code: str) -> str:
    """Return the column of a choice of a checkbox field in an export: -9 of `pain` is `pain____9`."""
    return f"{field}___{re.sub('[^a-z0-9_]', '_', code.lower())}"


def _find_columns(header: Sequence[str]) -> dict[str, int]:
    """Return attribute → the place of its column; nothing where one of them is missing, or there twice."""
    places = {
        name: [place for place, cell in enumerate(header) if cell.strip() in names]
        for name, names in (_HEADERS | {"annotation": _ANNOTATION}).items()
    }
    if not places["annotation"]:
        del places["annotation"]
    return {name: found[0] for name, found in places.items() if all(len(x) == 1 for x in places.values())}


def _refuse(path: Path, problem: str) -> SilodpError:
    remedy = "download the data dictionary of the project from REDCap again"
    return SilodpError(f"{path} {problem}: {remedy}.", code="data.unreadable", field="DICTIONARY")
