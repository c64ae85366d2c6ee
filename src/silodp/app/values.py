"""Plain values, as TOML has them: set one, merge two tables, make paths absolute."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silodp.errors import SilodpError

Plain = dict[str, Any]


def assigned(values: Mapping[str, Any], text: str) -> Plain:
    """The values with "a.b=1" carried out; a value that is no TOML is text."""
    key, equals, value = text.partition("=")
    for candidate in (value, json.dumps(value.strip())) if equals else ():
        try:
            new = tomllib.loads(f"value = {candidate}")["value"]
            return dict(_put(values, tomllib.loads(f"{key} = 0"), new))
        except ValueError:  # no TOML, or (from `_put`) no key
            continue
    raise SilodpError(f"'{text}' sets nothing: write KEY=VALUE with a dotted key, for example rounds=20.")


def _put(values: Mapping[str, Any], path: Any, value: Any) -> Any:
    """`values` with `value` where `path`, nested tables of one key each, leads."""
    if not isinstance(path, dict):
        return value
    ((key, rest),) = path.items()
    below = values.get(key)
    return {**values, key: _put(below if isinstance(below, dict) else {}, rest, value)}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Plain:
    """`base` with the values of `over`, tables merged."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return result


def without_empty(values: Plain) -> Plain:
    """Without empty tables: a header with nothing below it only puzzles."""
    tables = {
        key: without_empty(value) if isinstance(value, dict) else value for key, value in values.items()
    }
    return {key: value for key, value in tables.items() if value != {}}


def absolute(values: Mapping[str, Any], folder: Path) -> Plain:
    """The values with every path absolute, so that a run's config.toml means the same anywhere."""

    def at(path: Any) -> Any:
        return str(folder / Path(path).expanduser()) if isinstance(path, str) else path

    def reference(name: Any) -> Any:
        return (
            at(name) if isinstance(name, str) and ".py:" in name and not name.startswith("python:") else name
        )

    data, task = values.get("data"), values.get("task")
    result = dict(values)
    if isinstance(data, dict):
        data = result["data"] = dict(data)
        if "root" in data:
            data["root"] = at(data["root"])
        if isinstance(data.get("files"), dict):
            data["files"] = {name: at(path) for name, path in data["files"].items()}
        elif isinstance(data.get("files"), list):
            data["files"] = [at(path) for path in data["files"]]
        if isinstance(data.get("schema"), dict) and isinstance(data["schema"].get("users"), str):
            data["schema"] = {**data["schema"], "users": at(data["schema"]["users"])}
    if isinstance(task, dict):
        task = result["task"] = {
            **task,
            **{key: reference(task[key]) for key in ("model", "loss") if key in task},
        }
        if isinstance(task.get("metrics"), list):
            task["metrics"] = [reference(metric) for metric in task["metrics"]]
    return result
