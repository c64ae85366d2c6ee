"""From a table of values to the arguments of a dataclass or function.

Names, types and defaults are read from the signature of the dataclass or function itself, so a configuration cannot
differ from the Python API. Everything that does not fit is one sentence that names the field, its value and a remedy.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from functools import lru_cache, partial
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from silodp.config.plugins import find_plugin
from silodp.errors import SilodpError, shorten, suggest_name

T = TypeVar("T")


def build(maker: Callable[..., T], values: Mapping[str, Any], what: str, where: str = "") -> T:
    """Call `maker(**values)` after every value is checked against the signature of the maker.

    Args:
        maker: a dataclass or a function; its annotations decide.
        values: as TOML gives them (a list may stand for a tuple, a table for a dataclass).
        what: name of the result for messages, for example "uldp-avg".
        where: section that the values come from, for example "method"; "" for none.

    Returns:
        What the maker returns.

    Raises:
        SilodpError: an unknown field (with the closest one), a missing one, a wrong type, or anything that the maker
            refuses.
    """
    return maker(**validate_arguments(maker, values, what, where))


def validate_arguments(
    maker: Callable[..., Any], values: Mapping[str, Any], what: str, where: str = ""
) -> dict[str, Any]:
    """Return the arguments that `build` would pass, without a call of the maker; arguments and errors as there."""
    fields = get_fields(maker)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in _get_parameters(maker).values())
    for name in values:
        if name not in fields and not takes_any:
            raise SilodpError(
                describe_unknown(name, fields, what, where),
                code="config.unknown_field",
                field=_join(where, name),
            )
    missing = [name for name, p in fields.items() if name not in values and p.default is p.empty]
    if missing:
        more = f", and also {', '.join(missing[1:])}" if missing[1:] else ""
        raise SilodpError(
            f"{_join(where, missing[0])} is missing: {what} needs it{more}.",
            code="config.missing_field",
            field=_join(where, missing[0]),
        )
    hints = _get_hints(maker)
    return {name: _convert(hints.get(name, Any), value, _join(where, name)) for name, value in values.items()}


def get_fields(maker: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters that can be given by name, without `*args` and `**kwargs`."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in _get_parameters(maker).items() if p.kind in by_name}


def get_table_class(maker: Callable[..., Any], field: str) -> type | None:
    """Return the dataclass that a field is a table of; None where it is none, or no field."""
    return _find_dataclass(_get_hints(maker).get(field))


def describe_unknown(name: str, known: Iterable[str], what: str, where: str = "") -> str:
    """Return the sentence about an unknown field, with the closest known one."""
    known = list(known)
    remedy = suggest_name(name, known) or f"use {', '.join(known) or 'none'}."
    return f"{_join(where, shorten(name)[1:-1])} is not a field of {what}: {remedy}"


def convert_validation_error(error: ValidationError) -> SilodpError:
    """Return the first complaint of pydantic as one sentence."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "value_error":
            inner = first["ctx"]["error"]
            if isinstance(inner, SilodpError):
                return inner
            return SilodpError(str(inner), code="config.value", field=field or None)
        case "missing":
            return SilodpError(f"{field} is missing: set it.", code="config.missing_field", field=field)
        case "model_type" | "dict_type":
            return _no_table(field, first["input"])
    return _wrong_value(field, first["input"], error)


def _no_table(field: str, value: object) -> SilodpError:
    return SilodpError(
        f"{field} = {shorten(value)}: it should be a table of fields.", code="config.value", field=field
    )


def _wrong_value(field: str, value: object, error: ValidationError) -> SilodpError:
    expected = re.sub(r"^\w+ should", "it should", error.errors()[0]["msg"])
    return SilodpError(f"{field} = {shorten(value)}: {expected}.", code="config.value", field=field)


def _get_parameters(maker: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(maker).parameters
    except ValueError:  # a function written in C without a signature
        name = getattr(maker, "__name__", repr(maker))
        raise SilodpError(
            f"'{name}' does not say which arguments it takes: wrap it in a Python function.",
            code="config.no_signature",
        ) from None


def _get_hints(maker: Callable[..., Any]) -> Mapping[str, Any]:
    maker = maker.func if isinstance(maker, partial) else maker
    try:
        return _evaluate_hints(maker) if isinstance(maker, type) else get_type_hints(maker)
    except (NameError, AttributeError, TypeError):
        # A user's function may have annotations that are imported for type checkers only: no checks of types then.
        return {}


@lru_cache(maxsize=64)  # asked for some 30 times while one configuration is read
def _evaluate_hints(maker: type) -> Mapping[str, Any]:
    return MappingProxyType(get_type_hints(maker))


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Return a value as the annotation wants it; a table becomes the dataclass that it stands for."""
    table = _find_dataclass(hint)
    if table is not None and not (value is None and table is not hint):
        if isinstance(value, table):
            return value
        if not isinstance(value, Mapping):
            raise _no_table(where, value)
        if hasattr(table, "registry"):  # a base class: the `name` in the table selects the class
            table, value = _select_class(table, value, where)
        return build(table, value, where, where)
    if hint is Any:
        return value
    try:
        # As JSON a list may stand for a tuple, while "5" is still no number and true not 1.
        return TypeAdapter(hint).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        raise _wrong_value(where, value, error) from None
    except PydanticUserError:  # a type that pydantic does not know
        return value


def _select_class(base: Any, table: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
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


def _find_dataclass(hint: Any) -> type | None:
    """Return the dataclass that a table becomes, also where the hint allows None instead."""
    choices = [choice for choice in get_args(hint) if choice is not type(None)]
    if isinstance(hint, UnionType) and len(choices) == 1:
        return _find_dataclass(choices[0])
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where and name else where or name
