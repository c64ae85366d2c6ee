"""From a table of values to the arguments of a dataclass or function, and to methods and aggregators.

Names, types and defaults are read from the signature of the dataclass or function itself, so a configuration cannot
differ from the Python API. Everything that does not fit is one sentence that names the field, its value and a remedy.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError

from silodp.aggregators import Aggregator
from silodp.aggregators.registry import AGGREGATORS
from silodp.errors import SilodpError
from silodp.methods import METHODS, Method
from silodp.plugins import check_own_name, find_plugin
from silodp.settings import read_hints
from silodp.text import is_own, join_names, name_class, shorten, suggest_name

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

T = TypeVar("T")


def build(maker: Callable[..., T], values: Mapping[str, Any], what: str, where: str = "") -> T:
    """Call `maker(**values)` after every value is checked against the signature of the maker.

    Args:
        maker: A dataclass or a function; its annotations decide.
        values: The values as TOML gives them; a list may stand for a tuple, a table for a dataclass.
        what: The name of the result for messages, for example "uldp-avg".
        where: The section that the values come from, for example "method"; "" for none.

    Returns:
        What the maker returns.

    Raises:
        SilodpError: an unknown field (with the closest one), a missing one, a wrong type, or anything that the maker
            refuses.
    """
    return maker(**validate_arguments(maker, values, what, where))


def build_method(
    name: str, fields: Mapping[str, Any], where: str, rounds: int | None = None, delta: float | None = None
) -> Method:
    """Make the method of a name or reference from its table of fields.

    Args:
        name: A name in `METHODS`, or a reference to a class.
        fields: The table, without the name.
        where: The section of the configuration, for messages.
        rounds, delta: T and δ of the run: a method, or a table in it, with such a field gets them unless it sets it.

    Raises:
        SilodpError: an unknown name or field, a wrong type, or a value that the method refuses.
    """
    named = "method.name" if where == "method" else where
    maker = find_method_class(name, named)
    # Such a method inherits the field, computes it, and would overwrite a value that somebody relies on.
    if "record_sampling" in fields and maker.samples_by_budget:
        raise SilodpError(
            f"{where}.record_sampling is not a field of {name}: the sampling probability of a record follows from "
            "its privacy budget; take it out ('silodp plan' shows every q).",
            code="config.unknown_field",
            field=f"{where}.record_sampling",
        )
    defaults = {key: value for key, value in (("rounds", rounds), ("delta", delta)) if value is not None}
    # Ledgers and reports show its name, which is checked on the object: a plug-in may set it when it is made.
    method: Method = build(maker, _add_defaults(maker, fields, defaults), name, where)
    check_own_name(method, METHODS, named)
    return method


def find_method_class(name: str, where: str) -> type[Method]:
    """Return the class of a method by its name, or by a reference "file.py:Name".

    Raises:
        SilodpError: there is none.
    """
    return find_plugin(name, METHODS, Method, where)


def _add_defaults(maker: Any, fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with those of `defaults` that a class, or a table in it, has and that are not given."""
    # In the tables below, too: [method.personal] plans the budgets of persons for the rounds of the run.
    tables = {key: get_table_class(maker, key) for key in fields}
    given = {
        key: _add_defaults(tables[key], value, defaults)
        if tables[key] and isinstance(value, Mapping)
        else value
        for key, value in fields.items()
    }
    return {**{key: value for key, value in defaults.items() if key in get_fields(maker)}, **given}


def build_aggregator(name: str, fields: Mapping[str, Any]) -> Aggregator:
    """Make the aggregator of a name or reference from an [aggregation] table.

    A setting that only other aggregators have is refused, not ignored: it may say how many silos a sum must hide
    among, and a user who changes the aggregator alone (`--set aggregator=plain`) must learn that this is lost.

    Raises:
        SilodpError: an unknown name or setting, or a value that the aggregator refuses.
    """
    maker = find_plugin(name, AGGREGATORS, Aggregator, "aggregator")
    accepted = {field: value for field, value in fields.items() if field in get_fields(maker)}
    for field in (field for field in fields if field not in accepted):
        others = [other for other, its in AGGREGATORS.items() if field in get_fields(its)]
        if others:
            kept = ", ".join(f"{key} = {json.dumps(value)}" for key, value in accepted.items())
            raise SilodpError(
                f"aggregation.{field} is a setting of {join_names(others)}, and the aggregator is {name}: take it "
                f"out of [aggregation], or replace that table by --set 'aggregation={{{kept}}}'.",
                code="config.unknown_field",
                field=f"aggregation.{field}",
            )
    aggregator: Aggregator = build(maker, fields, name, "aggregation")
    check_own_name(aggregator, AGGREGATORS, "aggregator")
    return aggregator


def validate_arguments(
    maker: Callable[..., Any], values: Mapping[str, Any], what: str, where: str = ""
) -> dict[str, Any]:
    """Return the arguments that `build` would pass, without a call of the maker; arguments and errors as there."""
    _check_names(maker, values, what, where)
    # A name that is spelled wrongly is refused before the field that is missing for that reason.
    missing = [name for name, p in get_fields(maker).items() if name not in values and p.default is p.empty]
    if missing:
        more = f", and also {', '.join(missing[1:])}" if missing[1:] else ""
        raise SilodpError(
            f"{_join(where, missing[0])} is missing: {what} needs it{more}.",
            code="config.missing_field",
            field=_join(where, missing[0]),
        )
    hints = _get_hints(maker)
    return {
        name: convert_value(hints.get(name, Any), value, _join(where, name)) for name, value in values.items()
    }


def validate_given(maker: Callable[..., Any], values: Mapping[str, Any], what: str, where: str) -> None:
    """Check names and types of values that others complete: none has to be there, also in the tables below.

    Args:
        maker, values, what, where: See `build`.

    Raises:
        SilodpError: an unknown field, or a value of a wrong type.
    """
    _check_names(maker, values, what, where)
    hints = _get_hints(maker)
    for name, value in values.items():
        table, place = _find_dataclass(hints.get(name)), _join(where, name)
        if table is None or not isinstance(value, Mapping):
            convert_value(hints.get(name, Any), value, place)
        elif not hasattr(table, "registry"):
            validate_given(table, value, place, place)
        elif "name" in value:
            validate_given(*_select_class(table, value, place), place, place)


def _check_names(maker: Callable[..., Any], values: Mapping[str, Any], what: str, where: str) -> None:
    """Raise for the first value that is no argument of the maker, unless it takes arguments of any name."""
    fields = get_fields(maker)
    unknown = [name for name in values if name not in fields]
    # A function with **kwargs may take any name; what it does not know, it refuses itself when it is called.
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in _get_parameters(maker).values()):
        error = make_unknown_error(unknown[0], fields, what, where)
        # A plug-in's author meant it as a setting: without a type, or without the decorator, it is a constant.
        if isinstance(maker, type) and _is_own_constant(maker, unknown[0]):
            error.args = (
                f"{_join(where, unknown[0])} is a constant of {name_class(maker)}: give it a type, as in "
                f"'{unknown[0]}: float = …', in a class under @dataclass(frozen=True).",
            )
        raise error


def _is_own_constant(kind: type, name: str) -> bool:
    """Return whether a name is an attribute that a class outside silodp has and no class of silodp above it."""
    homes = [base for base in kind.__mro__ if name in vars(base)]
    return bool(homes) and not any(map(is_own, homes))


def get_fields(maker: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters that can be given by name, without `*args` and `**kwargs`."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in _get_parameters(maker).items() if p.kind in by_name}


def get_table_class(maker: Callable[..., Any], field: str) -> type | None:
    """Return the dataclass that a field is a table of; None where it is none, or no field."""
    return _find_dataclass(_get_hints(maker).get(field))


def make_unknown_error(name: str, known: Iterable[str], what: str, where: str = "") -> SilodpError:
    """Return the error about an unknown field, whose sentence names the closest known one."""
    known = list(known)
    remedy = suggest_name(name, known) or f"use {', '.join(known) or 'none'}."
    return SilodpError(
        f"{_join(where, shorten(name)[1:-1])} is not a field of {what}: {remedy}",
        code="config.unknown_field",
        field=_join(where, name),
    )


def split_name(table: Mapping[str, Any], where: str, remedy: str) -> tuple[str, dict[str, Any]]:
    """Return the `name` in a table, which selects a class, and the other fields.

    Args:
        table: The table.
        where: Its place in the configuration, for example "method".
        remedy: A clause on what to do where there is no name, for the message.

    Raises:
        SilodpError: there is no name, or it is no text.
    """
    rest = dict(table)
    name = rest.pop("name", None)
    if name is None:
        raise SilodpError(
            f"{where}.name is missing: {remedy}.", code="config.missing_field", field=f"{where}.name"
        )
    if not isinstance(name, str):
        raise _make_value_error(f"{where}.name", name, "it should be text in quotes")
    return name, rest


def convert_validation_error(error: ValidationError, model: type[BaseModel]) -> SilodpError:
    """Return the first complaint of pydantic as one sentence.

    Args:
        error: The error about a table of settings.
        model: The model that the table was read as.
    """
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    # pydantic reports a wrong key of a table with a fixed list of keys as (table, key, "[key]").
    if first["loc"][-1:] == ("[key]",):
        table, name = ".".join(str(part) for part in first["loc"][:-2]), str(first["loc"][-2])
        known = re.findall(r"'([^']+)'", first.get("ctx", {}).get("expected", ""))
        return make_unknown_error(name, known, f"[{table}]", table)
    match first["type"]:
        case "value_error":  # an exception that a validator of ours raised is wrapped by pydantic
            inner = first["ctx"]["error"]
            if isinstance(inner, SilodpError):
                return inner
            return SilodpError(str(inner), code="config.value", field=field or None)
        case "missing":
            return SilodpError(
                f"{field} is missing: {_describe_missing(first['loc'], model)}.",
                code="config.missing_field",
                field=field,
            )
        case kind if _KINDS.get(kind) == _TABLE:
            return _make_no_table_error(field, first["input"])
    same = [one for one in error.errors() if one["loc"] == first["loc"]]
    return _make_type_error(field, first["input"], same)


def _describe_missing(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """Return what to write for a missing setting of a model, by its type."""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    found = fields.get(str(loc[0])) if len(loc) == 1 else None
    if found is None or found.annotation is None:
        return "set it"
    try:
        # What pydantic says of a value that fits no type tells which type the setting has.
        TypeAdapter(found.annotation).validate_json("null", strict=True)
    except ValidationError as error:
        kinds = [_KINDS.get(one["type"]) for one in error.errors()]
        if kinds == [_TABLE]:
            return f"add a table [{loc[0]}] with its settings"
        if kinds[0] is not None:
            return f"set it to {kinds[0]}"
    return "set it"


def _make_value_error(field: str, value: object, remedy: str) -> SilodpError:
    return SilodpError(f"{field} = {shorten(value)}: {remedy}.", code="config.value", field=field)


def _make_no_table_error(field: str, value: object) -> SilodpError:
    remedy = f"it should be a table, [{field}] with its settings in the lines below"
    return _make_value_error(field, value, remedy)


_TABLE, _LIST = "a table", "a list"
_KINDS = {
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "dataclass_type"), _TABLE),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "is_sequence_of"), _LIST),
    **dict.fromkeys(("string_type", "path_type"), "text in quotes"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
}
"""Type of a complaint of pydantic -> the value that TOML needs there."""


def _make_type_error(
    field: str, value: object, complaints: Sequence[ErrorDetails], hint: Any = Any
) -> SilodpError:
    """Return the error about a value of another type or range.

    Args:
        field: The setting at fault.
        value: The value of the setting.
        complaints: What pydantic says; several where the setting may be of several types.
        hint: The annotation of the setting, for an example that fits it.
    """
    # Complaints about a part of the value are more exact than those about all of it.
    inner = [one for one in complaints if one["input"] != value]
    part = f"{shorten(inner[0]['input'])} in it" if inner else "it"
    expected = dict.fromkeys(_describe_expected(field, one, value, hint) for one in inner or complaints)
    remedy = f"{part} should {', or '.join(expected).replace(', or be ', ', or ')}"
    return _make_value_error(field, value, remedy)


def _describe_expected(field: str, complaint: ErrorDetails, value: object, hint: Any) -> str:
    """Return what a value should be, in words of TOML, for example 'be a list, such as ["a"]'."""
    kind = _KINDS.get(complaint["type"])
    if kind is None:
        return re.sub(r"^\w+ should ", "", complaint["msg"])
    if complaint["input"] != value or kind not in (_TABLE, _LIST):
        return f"be {kind}"
    example = _find_example(kind, value, hint)
    if example is None and kind == _TABLE:
        return f"be {kind}, [{field}] with its settings in the lines below"
    return f"be {kind}, such as {example}" if example else f"be {kind}"


def _find_example(kind: str, value: object, hint: Any) -> str | None:
    """Return a table or list that an annotation takes, if possible of the value that was given; None for others."""
    examples: list[Any] = [["a", "b"], [1.0, 2.0]] if kind == _LIST else []
    if kind == _LIST and isinstance(value, str | int | float):
        examples.insert(0, [value])
    elif isinstance(value, str):
        examples.insert(0, {"name": value})
    for example in examples:
        written = json.dumps(example, ensure_ascii=False)
        with suppress(ValidationError):
            TypeAdapter(hint).validate_json(written, strict=True)
            written = re.sub(r'^{"name": (.*)}$', r"{ name = \1 }", written, flags=re.DOTALL)
            return written if len(written) <= 80 else None
    return None


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
    if isinstance(maker, type):
        return read_hints(maker)
    try:
        return get_type_hints(maker)
    except (NameError, AttributeError, TypeError):
        # A user's function may have annotations that are imported for type checkers only: no checks of types then.
        return {}


def convert_value(hint: Any, value: Any, where: str) -> Any:
    """Return a value as the annotation wants it; a table becomes the dataclass that it stands for."""
    table = _find_dataclass(hint)
    # None stands for no table only where the annotation is not the dataclass itself, but allows None, too.
    if table is not None and not (value is None and table is not hint):
        if isinstance(value, table):
            return value
        if not isinstance(value, Mapping):
            raise _make_no_table_error(where, value)
        # A base class: the `name` in the table selects the class.
        if hasattr(table, "registry"):
            table, value = _select_class(table, value, where)
        return build(table, value, where, where)
    if hint is Any:
        return value
    item = _find_item(hint)
    if item is not None and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(convert_value(item, one, f"{where}[{place}]") for place, one in enumerate(value))
    try:
        # As JSON a list may stand for a tuple, while "5" is still no number and true not 1.
        return TypeAdapter(hint).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        raise _make_type_error(where, value, error.errors(), hint) from None
    except (PydanticUserError, NameError):
        # pydantic does not know the type: the class itself checks the value, or nobody does.
        return value


def _select_class(base: Any, table: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """Return the class that a table names, in the registry of its base class or by reference; and the other fields."""
    registry = base.registry()
    name, rest = split_name(table, where, f"use one of {', '.join(registry)}, or 'file.py:Name'")
    return find_plugin(name, registry, base, f"{where}.name"), rest


def _find_dataclass(hint: Any) -> type | None:
    """Return the dataclass that a table becomes, also where the hint allows None instead."""
    choices = [choice for choice in get_args(hint) if choice is not type(None)]
    if isinstance(hint, UnionType) and len(choices) == 1:
        return _find_dataclass(choices[0])
    # A base class whose one implementation is a part of an extension package.
    if isinstance(hint, type) and hasattr(hint, "implementation"):
        return cast("type", hint.implementation())
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def _find_item(hint: Any) -> type | None:
    """Return the dataclass that each table of a list becomes, where the hint is a tuple of any number of them."""
    items = get_args(hint) if get_origin(hint) is tuple else ()
    return _find_dataclass(items[0]) if items[1:] == (Ellipsis,) else None


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where and name else where or name
