"""A draft of a configuration for raw exports of a REDCap project. What is public in it comes from the dictionary."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from silodp.errors import SilodpError
from silodp.text import quote
from silodp_integrations.redcap.dictionary import Field, name_checkbox, read_choices

_NUMBER = re.compile(r"[+-]?[0-9]+([.,][0-9]+)?")
_REFERENCE = re.compile(r"\[([A-Za-z0-9_]+)")
_FIXED = {"yesno": {"0": "No", "1": "Yes"}, "truefalse": {"0": "False", "1": "True"}}
_LAYOUTS = {
    "date": "%Y-%m-%d",
    "datetime": "%Y-%m-%d %H:%M",
    "datetime_seconds": "%Y-%m-%d %H:%M:%S",
}
"""Raw exports write days as ISO 8601 does, whatever order a form shows."""


@dataclass(frozen=True)
class _Column:
    """A column of an export: its choices (code → label), or how its numbers or days are drafted."""

    name: str
    field: Field
    choices: Mapping[str, str] | None = None
    number: str = ""
    note: str = ""


def draft_schema(fields: Sequence[Field], user: str, label: str, missing_codes: Mapping[str, str]) -> str:
    """Return a draft of a configuration, as TOML with comments.

    Args:
        fields: the fields of the data dictionary.
        user: the field that names the person.
        label: the column to be predicted; of a checkbox field `field___code`.
        missing_codes: code → label of the project's Missing Data Codes.

    Raises:
        SilodpError: there is no such field, or it cannot be the user or the label.
    """
    if user not in {field.name for field in fields if field.type == "text"}:
        problem = f"the dictionary has no text field {user!r}: name the field that names persons"
        raise SilodpError(f"{problem}.", code="data.column", field="user")
    drafts = [(field, *_list_columns(field)) for field in fields]
    found = [x for field, columns, _ in drafts for x in columns if not field.identifier]
    labels = [column for column in found if column.name == label]
    if not labels or label == user or "date" in labels[0].number:
        remedy = (
            "name a field of choices or numbers that is no identifier (for times until an event: survival)"
        )
        raise SilodpError(f"the label cannot be {label!r}: {remedy}.", code="data.kind", field="label")
    hidden = _find_hidden(fields, user, labels[0].field.name)
    numeric: list[str] = []
    categorical: list[str] = []
    left_out: list[str] = []
    for field, columns, fault in drafts:
        if reason := hidden.get(field.name) or fault:
            left_out.append(f"# {_write(field.name)}: {reason}")
            continue
        for column in columns:
            lines = categorical if column.choices else numeric
            lines.append(_draft_column(column, bool(missing_codes)))
    is_counted = user == fields[0].name
    return "\n".join(
        [
            *_HEAD.splitlines(),
            f"user = {_write(user)}  # {_COUNTED if is_counted else 'names the person, equally in all silos'}",
            *_draft_label(labels[0]),
            *_READER.splitlines(),
            f"missing = {_write(list(missing_codes))}  # {_name_codes(missing_codes)}",
            *_NUMERIC.splitlines(),
            *numeric,
            *_CATEGORICAL.splitlines(),
            *categorical,
            "# Left out:",
            *left_out,
            *_METHOD.splitlines(),
            "",
        ]
    )


def _list_columns(field: Field) -> tuple[list[_Column], str]:
    """Return the columns of an export that a field has, and why there are none that can be used."""
    kind, title = re.sub("_[dmy]{3}$", "", field.validation), _write(field.title)
    if field.type in ("radio", "dropdown", "checkbox", *_FIXED):
        try:
            choices = _FIXED.get(field.type) or read_choices(field.choices)
        except ValueError as error:
            return [], _write(str(error))
        if field.type != "checkbox":
            return [_Column(field.name, field, choices)], ""
        names = {name_checkbox(field.name, code): {"0": "no", "1": label} for code, label in choices.items()}
        if len(names) < len(choices):
            return [], "two of its codes give the same column of an export"
        return [_Column(name, field, ticks) for name, ticks in names.items()], ""
    limits = f"; validation: {_write(field.low)} to {_write(field.high)}" if field.low or field.high else ""
    if field.type == "text" and kind in _LAYOUTS:
        number = f'range = [], date = "{_LAYOUTS[kind]}", since = ""'
        note = f"FILL IN a public day, and the range in days since then. {title}{limits}"
    elif field.type == "calc":
        number, note = "range = []", f"FILL IN. {title}; computed: {_write(field.choices)}"
    elif field.type == "slider" or (field.type == "text" and kind.startswith(("number", "integer"))):
        ends = _draft_range(field.low, field.high)
        number, note = f"range = {ends}", title if ends != "[]" else f"FILL IN. {title}{limits}"
        note += "; decimal commas: export all numbers with points" if "comma" in kind else ""
    else:
        return [], f"of the type {_write(f'{field.type} {field.validation}'.strip())}"
    return [_Column(field.name, field, number=number, note=note)], ""


def _find_hidden(fields: Sequence[Field], user: str, label: str) -> dict[str, str]:
    """Return name → reason of the fields that must be no features, among them what is computed of such fields."""
    hidden = {fields[0].name: "numbers the records", user: "names the person", label: "has the label"}
    hidden |= {field.name: "marked as an identifier" for field in fields if field.identifier}
    size = 0
    while size < len(hidden):  # a formula may use the result of a later one
        size = len(hidden)
        for field in fields:
            formula = field.choices if field.type == "calc" else field.annotation
            used = [name for name in _REFERENCE.findall(formula) if name in hidden]
            if used:
                hidden.setdefault(field.name, f"computed of {_write(used[0])}")
    return hidden


def _draft_column(column: _Column, has_missing_codes: bool) -> str:
    """Return the line of a column; a cell may be empty, or have a missing code, which counts as an empty one."""
    name, kind = _write(column.name), column.field.type
    may_be_empty = has_missing_codes or kind == "calc" or column.field.may_be_empty
    if not column.choices:
        missing = ', missing = "indicator"' if may_be_empty else ""
        return f"{name} = {{ {column.number}{missing} }}  # {column.note}"
    codes, note = list(column.choices), _name_codes(column.choices)
    # A box that nobody ticked, or saw, is 0; where a missing code was chosen, its cell is empty.
    if not (has_missing_codes if kind == "checkbox" else may_be_empty):
        return f"{name} = {_write(codes if len(codes) > 1 else [])}  # {'FILL IN ' * (len(codes) < 2)}{note}"
    empty = "missing"
    while empty in map(str.lower, codes):
        empty += "_"
    listed = _write([*codes, empty])
    return f'{name} = {{ categories = {listed}, missing = "{empty}" }}  # {note}'


def _draft_label(column: _Column) -> list[str]:
    name = f"label = {_write(column.name)}  # export no rows without it"
    if column.choices:
        return [name, f"classes = {_write(list(column.choices))}  # {_name_codes(column.choices)}"]
    spread = "label_typical = []  # FILL IN center and spread of ordinary values."
    return [name, 'kind = "real"', f"{spread} {_write(column.field.title)}"]


def _draft_range(low: str, high: str) -> str:
    """Return the range of a validation; "[]" where it is open, or an end is "today" or another field."""
    if not _NUMBER.fullmatch(low) or not _NUMBER.fullmatch(high):
        return "[]"
    ends = [float(end.replace(",", ".")) for end in (low, high)]
    return f"[{', '.join(repr(end).removesuffix('.0') for end in ends)}]" if ends[0] < ends[1] else "[]"


def _name_codes(choices: Mapping[str, str]) -> str:
    return _write(choices) if choices else "none given"


def _write(value: str | list[str] | Mapping[str, str]) -> str:
    """Return texts as TOML has it; a label must not look like the mark of private rows in other drafts."""
    return quote(value).replace("ROWS:", r"ROWS\u003a")


_COUNTED = "REDCap numbers records anew in each project: name a pseudonym that all silos share"
_HEAD = """\
# A DRAFT for raw exports of a REDCap project, from its data dictionary alone: no record was read.
# Fill in every {}, [] and "" behind which stands FILL IN, from public knowledge (codebooks, textbooks, definitions):
# silodp refuses them. In a project with several events or repeated forms, cells are empty in the rows of the others:
# export one of them, or declare missing for all columns.
rounds = 40
delta = 1e-5

[data]
source = "tables"
files = {}  # FILL IN the export of each silo, as in { north = "north.csv" }

[data.schema]"""

_READER = """\
test_share = 0.2  # of the persons, by a public function of their keys; their records measure the model
# out_of_range = "clip"  # REDCap only warns of a number outside its validation range

[data.schema.reader]
# The project's Missing Data Codes (Project Setup, Additional Customizations), which no dictionary has:"""

_NUMERIC = """
[data.schema.numeric]
# typical = [center, spread] of ordinary values may be added to each, by textbooks or definitions."""

_CATEGORICAL = """
[data.schema.categorical]
# Behind the codes: their labels. To use labels, list them as categories, and map the codes in each silo:
# [data.schema.silos.NAME.values], with lines such as "sex" = { "1" = "female", "2" = "male" }."""

_METHOD = """
[method]
name = "uldp-sgd"
noise_multiplier = 10.0  # or: silodp run --target-epsilon 3"""
