"""Plain values from a configuration to Python objects, by the signature of what is made.

Names, types and defaults are read off the dataclass or function itself, so a configuration cannot drift from
the Python API; whatever does not fit is one sentence that names field, value and remedy.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from functools import partial
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from silodp.config.plugins import find_plugin
from silodp.errors import SilodpError, shorten, suggest_name

T = TypeVar("T")


def build(maker: Callable[..., T], values: Mapping[str, Any], what: str, where: str = "") -> T:
    """`maker(**values)`, every value checked against the maker's signature first.

    Args:
        maker: a dataclass or a function; its annotations decide.
        values: as TOML gives them (a list may stand for a tuple, a table for a dataclass).
        what: what is made, for messages: "uldp-avg".
        where: the section the values come from: "method"; empty for none.

    Raises:
        SilodpError: an unknown field (with the closest one), a missing one, a wrong type, or what the maker
            refuses.
    """
    return maker(**validate_arguments(maker, values, what, where))


def validate_arguments(
    maker: Callable[..., Any], values: Mapping[str, Any], what: str, where: str = ""
) -> dict[str, Any]:
    """The arguments `build` would pass, without making anything."""
    fields = fields_of(maker)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in _parameters(maker).values())
    for name in values:
        if name not in fields and not takes_any:
            raise SilodpError(
                describe_unknown(name, fields, what, where),
                code="config.unknown_field",
                field=_at(where, name),
            )
    for name, parameter in fields.items():
        if name not in values and parameter.default is parameter.empty:
            raise SilodpError(
                f"{_at(where, name)} is missing: {what} needs it.",
                code="config.missing_field",
                field=_at(where, name),
            )
    hints = _hints(maker)
    return {name: _value(hints.get(name, Any), value, _at(where, name)) for name, value in values.items()}


def fields_of(maker: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters that may be given by name, without those that collect the rest (`*args`, `**kwargs`)."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in _parameters(maker).items() if p.kind in by_name}


def _parameters(maker: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(maker).parameters
    except ValueError:  # a function written in C, which keeps its signature to itself
        name = getattr(maker, "__name__", repr(maker))
        raise SilodpError(
            f"'{name}' does not say which arguments it takes: wrap it in a Python function.",
            code="config.no_signature",
        ) from None


def table_of(maker: Callable[..., Any], field: str) -> type | None:
    """The dataclass that a field is a table of; None where it is none, or no field."""
    return _dataclass_in(_hints(maker).get(field))


def describe_unknown(name: str, known: Iterable[str], what: str, where: str = "") -> str:
    """The sentence about a field that is not there."""
    known = list(known)
    remedy = suggest_name(name, known) or f"use {', '.join(known) or 'none'}."
    return f"{_at(where, shorten(name)[1:-1])} is not a field of {what}: {remedy}"


def format_validation_error(error: ValidationError, where: str = "") -> SilodpError:
    """The first complaint of pydantic as one sentence."""
    first = error.errors()[0]
    field = _at(where, ".".join(str(part) for part in first["loc"]))
    if first["type"] == "value_error":
        inner = first["ctx"]["error"]
        return (
            inner
            if isinstance(inner, SilodpError)
            else SilodpError(str(inner), code="config.value", field=field or None)
        )
    if first["type"] == "missing":
        return SilodpError(f"{field} is missing: set it.", code="config.missing_field", field=field)
    if first["type"] in ("model_type", "dict_type"):
        return SilodpError(
            f"{field} = {shorten(first['input'])}: it should be a table of its own fields.",
            code="config.value",
            field=field,
        )
    return SilodpError(
        f"{field} = {shorten(first['input'])}: {_expected(error)}.", code="config.value", field=field
    )


def _expected(error: ValidationError) -> str:
    return re.sub(r"^\w+ should", "it should", error.errors()[0]["msg"])


def _hints(maker: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(maker.func if isinstance(maker, partial) else maker)
    except (NameError, AttributeError, TypeError):
        # A user's function whose annotations are names imported for type checkers only: its values go unchecked.
        return {}


def _value(hint: Any, value: Any, where: str) -> Any:
    table = _dataclass_in(hint)
    if table is not None and not (value is None and table is not hint):
        if isinstance(value, table):
            return value
        if not isinstance(value, Mapping):
            raise SilodpError(
                f"{where} = {shorten(value)}: it should be a table of its own fields.",
                code="config.value",
                field=where,
            )
        if hasattr(table, "registry"):  # a base class: the table's `name` says which class it makes
            table, value = _named_class(table, value, where)
        return build(table, value, where, where)
    if hint is Any:
        return value
    try:
        # As JSON a list may stand for a tuple, while "5" is still no number and true not 1.
        return TypeAdapter(hint).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        raise SilodpError(
            f"{where} = {shorten(value)}: {_expected(error)}.", code="config.value", field=where
        ) from None
    except PydanticUserError:  # a type of somebody else's that pydantic knows nothing of
        return value


def _named_class(base: Any, table: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """Return the class that a table names, in the registry of its base class or by reference; and the other fields."""
    rest = dict(table)
    name = rest.pop("name", None)
    if not isinstance(name, str):
        raise SilodpError(
            f"{where}.name is missing: use one of {', '.join(base.registry())}, or 'file.py:Name'.",
            code="config.missing_field",
            field=f"{where}.name",
        )
    return find_plugin(name, base.registry(), base, f"{where}.name"), rest


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass that a table makes, also where the hint allows None instead."""
    choices = [choice for choice in get_args(hint) if choice is not type(None)]
    if isinstance(hint, UnionType) and len(choices) == 1:
        return _dataclass_in(choices[0])
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where and name else where or name
