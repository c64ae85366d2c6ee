"""The part of a configuration that a definition stands for: the query of each silo, and what its columns mean."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from silodp.errors import SilodpError
from silodp.text import quote
from silodp_integrations.omop.definition import MISSING, OTHER, PERSON, Column, Definition
from silodp_integrations.omop.query import write_query

_HEAD = "# Written by 'silodp omop query': change the definition, not this part."
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def write_config(definition: Definition, base: str = "") -> str:
    """Return a configuration as TOML.

    Args:
        definition: A definition that `read_definition` has checked.
        base: The rest of the configuration; "" gives the part alone.

    Raises:
        SilodpError: The rest has a [data.schema] (code argument.conflict).
    """
    found = describe(definition)
    lines = [
        _HEAD,
        "[data.schema]",
        *(_write_setting(*one) for one in found.items() if not isinstance(one[1], dict)),
    ]
    for kind in ("numeric", "categorical"):
        if found[kind]:
            lines += [
                "",
                f"[data.schema.{kind}]",
                *(_write_setting(*column) for column in found[kind].items()),
            ]
    for name, silo in found["silos"].items():
        lines += ["", f"[data.schema.silos.{_write_key(name)}]", f"query = {_write_long(silo['query'])}"]
    text = "\n".join([*([f"{base.rstrip()}\n"] if base else []), *lines, ""])
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SilodpError(
            f"the configuration says already what the definition says ({error}): take [data.schema] out of it, and "
            "write what else belongs there into [settings] of the definition.",
            code="argument.conflict",
            field="data.schema",
        ) from None
    return text


def describe(definition: Definition) -> dict[str, Any]:
    """Return the table data.schema of a definition."""
    features = {name: column for name, column in definition.columns.items() if name != definition.label}
    return {
        "user": PERSON,
        **_describe_label(definition),
        **definition.settings,
        "numeric": {
            name: _describe_numbers(column) for name, column in features.items() if not column.answers
        },
        "categorical": {
            name: _describe_answers(column) for name, column in features.items() if column.answers
        },
        "silos": {name: {"query": write_query(definition, name)} for name in definition.silos},
    }


def _describe_label(definition: Definition) -> dict[str, Any]:
    column = definition.columns[definition.label]
    if column.answers:
        return {"label": definition.label, "classes": _list_categories(column)}
    if column.take == "any":
        return {"label": definition.label, "classes": [0, 1]}
    typical = {} if column.typical is None else {"label_typical": column.typical}
    return {"label": definition.label, "kind": "real", **typical}


def _describe_numbers(column: Column) -> dict[str, Any]:
    # In most rows nobody measured most things; counts, and ages of known years, are always there.
    is_always_there = column.take in ("any", "count") or column.of == "age" or column.needed
    missing = column.missing if column.missing is not None or is_always_there else "indicator"
    found = {"range": column.limits, "typical": column.typical, "missing": missing}
    return {name: value for name, value in found.items() if value is not None}


def _describe_answers(column: Column) -> dict[str, Any]:
    categories = _list_categories(column)
    if column.events is None or column.needed:
        return {"categories": categories}
    return {"categories": [*categories, MISSING], "missing": MISSING}


def _list_categories(column: Column) -> list[str]:
    return list(dict.fromkeys([*column.answers.values(), OTHER]))


def _write_setting(name: str, value: Any) -> str:
    return f"{_write_key(name)} = {_write_value(value)}"


def _write_key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _write_value(name)


def _write_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(_write_setting(*one) for one in value.items())} }}"
    return quote(value)


def _write_long(text: str) -> str:
    """Return a text of several lines, as it is where it can be."""
    if "'''" not in text:
        return f"'''\n{text}'''"
    return '"""\n' + text.replace("\\", "\\\\").replace('"', '\\"') + '"""'
