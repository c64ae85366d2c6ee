"""Methods and aggregators from the tables of a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from silodp.aggregators import Aggregator
from silodp.aggregators.registry import AGGREGATORS
from silodp.config.arguments import build, get_fields, get_table_class
from silodp.config.plugins import check_own_name, find_plugin
from silodp.errors import SilodpError
from silodp.methods import METHODS, Method


def build_method(
    name: str, fields: Mapping[str, Any], where: str, rounds: int | None = None, delta: float | None = None
) -> Method:
    """Make the method of a name or reference from its table of fields.

    Args:
        name: a name in `METHODS`, or a reference to a class.
        fields: the table, without the name.
        where: section of the configuration, for messages.
        rounds, delta: of the run; a method that has such fields, or a table with them, gets these unless it sets them.

    Raises:
        SilodpError: an unknown name or field, a wrong type, or a value that the method refuses.
    """
    named = "method.name" if where == "method" else where
    maker = find_method_class(name, named)
    if "record_sampling" in fields and maker.samples_by_budget:
        raise SilodpError(
            f"{where}.record_sampling is not a field of {name}: the sampling probability of a record follows from "
            "its privacy budget; take it out ('silodp plan' shows every q).",
            code="config.unknown_field",
            field=f"{where}.record_sampling",
        )
    defaults = {key: value for key, value in (("rounds", rounds), ("delta", delta)) if value is not None}
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
                f"aggregation.{field} is a setting of {' and '.join(others)}, and the aggregator is {name}: take it "
                f"out of [aggregation], or replace that table by --set 'aggregation={{{kept}}}'.",
                code="config.unknown_field",
                field=f"aggregation.{field}",
            )
    aggregator: Aggregator = build(maker, fields, name, "aggregation")
    check_own_name(aggregator, AGGREGATORS, "aggregator")
    return aggregator
