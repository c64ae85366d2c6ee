"""Fictional data dictionaries of REDCap, as its web page or its API writes them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

PAGE = [
    "Variable / Field Name",
    "Form Name",
    "Section Header",
    "Field Type",
    "Field Label",
    "Choices, Calculations, OR Slider Labels",
    "Field Note",
    "Text Validation Type OR Show Slider Number",
    "Text Validation Min",
    "Text Validation Max",
    "Identifier?",
    "Branching Logic (Show field only if...)",
    "Required Field?",
    "Field Annotation",
]
API = [
    "field_name",
    "form_name",
    "section_header",
    "field_type",
    "field_label",
    "select_choices_or_calculations",
    "field_note",
    "text_validation_type_or_show_slider_number",
    "text_validation_min",
    "text_validation_max",
    "identifier",
    "branching_logic",
    "required_field",
    "field_annotation",
]
FIELDS = [
    {"field_name": "record_id", "text_validation_type_or_show_slider_number": "integer"},
    {"field_name": "pseudonym"},
    {"field_name": "ill", "field_type": "yesno"},
]
"""The fields that every dictionary here begins with."""


def write_dictionary(
    path: Path,
    *fields: Mapping[str, str],
    header: Sequence[str] = API,
    separator: str = ",",
    encoding: str = "utf-8",
) -> Path:
    """Write a dictionary whose rows give the columns that they name by the API's names; the type is "text" else."""
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(header)
        for field in (*FIELDS, *fields):
            cells = {"field_type": "text", "form_name": "f", **field}
            writer.writerow([cells.get(name, "") for name in API[: len(header)]])
    return path
