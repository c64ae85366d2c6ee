"""The method and the aggregator that a configuration names, from their tables of settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from silodp.config.construct import build, fields_of, table_of
from silodp.config.plugins import check_own_name, find_plugin
from silodp.errors import SilodpError

if TYPE_CHECKING:
    from silodp.aggregators import Aggregator
    from silodp.methods import Method


def build_method(name: str, fields: Mapping[str, Any], where: str) -> Method:
    """The method of this name with these fields, checked against its dataclass."""
    from silodp.methods import METHODS

    named = f"{where}.name" if where == "method" else "method"
    method: Method = build(find_method_class(name, named), fields, name, where)
    check_own_name(method, METHODS, named)
    return method


def find_method_class(name: str, where: str) -> type[Method]:
    """Return the class of a method by its name, or by a reference "file.py:Name".

    Raises:
        SilodpError: there is none.
    """
    from silodp.methods import METHODS, Method

    return find_plugin(name, METHODS, Method, where)


def with_defaults(name: str, fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, and those of `own` that the method of this name has, itself or in a table, and that are not given."""
    return _with_defaults(find_method_class(name, "method.name"), fields, own)


def _with_defaults(maker: Any, fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    below = {key: table_of(maker, key) for key in fields}
    given = {
        key: _with_defaults(below[key], value, own) if below[key] and isinstance(value, Mapping) else value
        for key, value in fields.items()
    }
    return {**{key: value for key, value in own.items() if key in fields_of(maker)}, **given}


def build_aggregator(name: str, fields: Mapping[str, Any]) -> Aggregator:
    """The aggregator of this name with the settings of an [aggregation] table.

    A setting that only other aggregators have is refused, not passed over: it may say how many silos a sum must hide
    among, and whoever changes the aggregator alone (`--set aggregator=plain`) should know that this is gone.

    Raises:
        SilodpError: an unknown name or setting, or a value that the aggregator refuses.
    """
    from silodp.aggregators import Aggregator
    from silodp.aggregators.registry import AGGREGATORS

    maker = find_plugin(name, AGGREGATORS, Aggregator, "aggregator")
    own = {field: value for field, value in fields.items() if field in fields_of(maker)}
    for field in (field for field in fields if field not in own):
        others = [other for other, its in AGGREGATORS.items() if field in fields_of(its)]
        if others:
            kept = ", ".join(f"{key} = {json.dumps(value)}" for key, value in own.items())
            raise SilodpError(
                f"aggregation.{field} is a setting of {' and '.join(others)}, and the aggregator is {name}: take it "
                f"out of [aggregation], or replace that table by --set 'aggregation={{{kept}}}'.",
                code="config.unknown_field",
                field=f"aggregation.{field}",
            )
    aggregator: Aggregator = build(maker, fields, name, "aggregation")
    check_own_name(aggregator, AGGREGATORS, "aggregator")
    return aggregator
