"""Plain values as TOML has them: read and check them, set one, merge two tables, make paths absolute."""

from __future__ import annotations

import codecs
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from silodp.errors import SilodpError
from silodp.parsing import NestedTooDeepError, parse_toml
from silodp.text import shorten

TomlTable = dict[str, Any]

MAX_BYTES = 4 << 20
"""The largest configuration; a vocabulary of 100,000 codes is half of it."""
MAX_CHARACTERS = 100_000
"""The longest text or name in a configuration."""
MAX_DEPTH = 32
"""The deepest nesting of tables and arrays; no setting needs more."""


def read_toml(path: Path) -> TomlTable:
    """Read a TOML file.

    Args:
        path: The path of a configuration.

    Returns:
        Its tables and values.

    Raises:
        SilodpError: no such file, unreadable, too long, not UTF-8, or not TOML.
    """
    try:
        if path.is_dir():
            raise _refuse_file(
                path, f"cannot be read, it is a directory: {_name_file_in(path)}", "config.path"
            )
        with path.open("rb") as file:
            # A longer file is refused without being read whole.
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SilodpError(
            f"there is no configuration at {path}: name a TOML file, such as {_EXAMPLE}.", code="config.path"
        ) from None
    except OSError as error:
        remedy = f"cannot be read ({error.strerror}): name a readable TOML file"
        raise _refuse_file(path, remedy, "config.path") from None
    if len(content) > MAX_BYTES:
        remedy = f"has more than {MAX_BYTES >> 20} MiB: name a TOML file of settings, not of data"
        raise _refuse_file(path, remedy, "config.too_large")
    return _parse(content, path)


_EXAMPLE = "examples/heart_disease.toml"


def _name_file_in(directory: Path) -> str:
    """Return what to name in place of a directory, which may be that of a run."""
    if not (directory / "config.toml").exists():
        return f"name a TOML file, such as {_EXAMPLE}"
    resume = f"silodp run {shlex.quote(str(directory))} --resume"
    return f"name a TOML file, here {directory / 'config.toml'}; to continue the run there: {resume}"


def _refuse_file(path: Path, problem: str, code: str = "config.not_toml") -> SilodpError:
    return SilodpError(f"configuration {path} {problem}.", code=code)


def _parse(content: bytes, path: Path) -> TomlTable:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise _refuse_file(path, "is UTF-16: save it as UTF-8")
    try:
        # Windows editors begin with a byte order mark.
        text = content.decode("utf-8-sig")
        values = parse_toml(text)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise _refuse_file(path, f"is not UTF-8 in line {line}: save it as UTF-8") from None
    except NestedTooDeepError:
        raise _too_deep() from None
    except ValueError as error:  # also a number of more digits than Python reads
        remedy = "correct it there"
        found = re.search(r"line (\d+)", str(error))
        if found and re.search(r"=\s*[+-]?\d+,\d", text.splitlines()[int(found[1]) - 1 :][:1][0]):
            remedy = "write decimal numbers with a point, 0.5"
        raise _refuse_file(path, f"is not TOML ({error}): {remedy}") from None
    # The mark with which data.tables.draft writes what it read off private rows.
    if draft := re.search(r"#[^\n]*ROWS:", text):
        line = text[: draft.start()].count("\n") + 1
        problem = f"has comments of a draft, which were read off private rows, in line {line}"
        raise _refuse_file(path, f"{problem}: delete all comments with ROWS", "config.draft")
    return values


def check_plain(values: Mapping[str, Any]) -> None:
    """Check that every key and value is of a type, size and depth that a setting can have.

    Raises:
        SilodpError: a date or time, a whole number beyond 64 bits, text that is too long, has a NUL character or is no
            Unicode, or tables that are nested too deep.
    """
    # No recursion: the depth is what is checked.
    left: list[tuple[str, int, Any]] = [("", 0, values)]
    while left:
        where, depth, value = left.pop()
        if depth > MAX_DEPTH:
            raise _too_deep()
        if isinstance(value, Mapping):
            for key, below in value.items():
                _check_text(f"the name {shorten(key)}", key)
                left.append((f"{where}.{key}" if where else key, depth + 1, below))
        elif isinstance(value, list | tuple):
            left += [(where, depth + 1, below) for below in value]
        elif isinstance(value, str):
            _check_text(where, value)
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            remedy = "set a whole number below 2^63, the largest that TOML has"
            raise _refuse(where, f" = {shorten(value)}: {remedy}", "config.too_large")
        elif not isinstance(value, int | float | None):
            remedy = "no setting is a date or a time; put it in quotes if it is a name"
            raise _refuse(where, f" = {value}: {remedy}", "config.type")


def _refuse(where: str, problem: str, code: str) -> SilodpError:
    return SilodpError(f"{where}{problem}.", code=code, field=where)


def _check_text(where: str, text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        limit = f" has {len(text):,} characters: at most {MAX_CHARACTERS:,} are read"
        raise _refuse(where, limit, "config.too_large")
    try:
        text.encode()
    except UnicodeEncodeError:
        wrong = "bytes that are not UTF-8"
    else:
        if "\0" not in text:
            return
        wrong = "a NUL character"
    raise _refuse(where, f" = {shorten(text)} has {wrong}: take them out", "config.type")


def _too_deep() -> SilodpError:
    return SilodpError(
        f"tables or arrays are nested more than {MAX_DEPTH} deep: no setting needs that; write them flat.",
        code="config.too_large",
    )


def apply_override(values: Mapping[str, Any], text: str) -> TomlTable:
    """Return the values with one setting replaced.

    Args:
        values: Tables and values.
        text: "a.b=1"; a value that is not TOML is text.

    Raises:
        SilodpError: the text is not of this form.
    """
    key, equals, value = text.partition("=")
    # First as TOML, then as text: nobody quotes method.name=uldp-avg on a command line.
    for candidate in (value, json.dumps(value.strip())) if equals else ():
        try:
            # More than one value: the text has a second line, whose setting would be lost.
            (new,) = parse_toml(f"value = {candidate}").values()
            return dict(_put(values, parse_toml(f"{key} = 0"), new))
        except NestedTooDeepError:
            raise _too_deep() from None
        except ValueError:  # no TOML, or (from `_put`) no key
            continue
    raise SilodpError(
        f"'{shorten(text)[1:-1]}' sets nothing: write KEY=VALUE with a dotted key, for example rounds=20.",
        code="cli.usage",
        field="--set",
    )


def _put(values: Mapping[str, Any], path: Any, value: Any) -> Any:
    """Return `values` with `value` at a path, which is nested tables of one key each."""
    if not isinstance(path, dict):
        return value
    ((key, rest),) = path.items()
    below = values.get(key)
    return {**values, key: _put(below if isinstance(below, dict) else {}, rest, value)}


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> TomlTable:
    """Return `base` with the values of `over`, tables merged."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return result


def to_plain(value: Any) -> Any:
    """Return a dataclass of settings as a table, and what is in it; settings without a value are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items() if item is not None}
    return [to_plain(item) for item in value] if isinstance(value, tuple | list) else value


def drop_empty_tables(values: TomlTable) -> TomlTable:
    """Return the values without empty tables."""
    tables = {
        key: drop_empty_tables(value) if isinstance(value, dict) else value for key, value in values.items()
    }
    return {key: value for key, value in tables.items() if value != {}}


def put_tables_last(values: Any) -> Any:
    """Return the values in the order of a TOML file, in which the tables of a table follow its other values.

    The order of features is that of the file, so a configuration must not change it when it is written and read again.
    """
    if isinstance(values, list | tuple):
        return [put_tables_last(value) for value in values]
    if not isinstance(values, Mapping):
        return values
    return {
        key: put_tables_last(values[key]) for key in sorted(values, key=lambda key: _rank_value(values[key]))
    }


def _rank_value(value: Any) -> int:
    """Return 0 for what stands in a line, 1 for an array of tables and 2 for a table."""
    is_array = (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(one, Mapping) for one in value)
    )
    return 2 if isinstance(value, Mapping) else int(is_array)


_PATHS = ("data.root", "data.files.*", "data.schema.users", "data.schema.identity")
"""Settings that are paths."""
_REFERENCES = (
    *("data.source", "aggregator", "accountant", "task.model", "task.loss", "task.metrics.*"),
    "callbacks.*.name",
)
"""Settings that may refer to a file of code, besides the names of methods and of what is in a method."""


def resolve_paths(values: Mapping[str, Any], folder: Path) -> TomlTable:
    """Return the values with every path absolute, so that config.toml of a run does not depend on where it is read.

    Args:
        values: The values of a configuration.
        folder: The folder that paths are relative to.
    """

    def make_absolute(path: Any) -> Any:
        return str(folder / Path(path).expanduser()) if isinstance(path, str) else path

    def resolve_reference(name: Any) -> Any:
        # "python:" marks a module, whose name may end in ".py".
        is_file = isinstance(name, str) and ".py:" in name and not name.startswith("python:")
        return make_absolute(name) if is_file else name

    # By place, as only these settings are paths; a name of a column may well look like one.
    result: Any = dict(values)
    for places, change in ((_PATHS, make_absolute), (_REFERENCES, resolve_reference)):
        for place in places:
            result = _map_values(result, place.split("."), change)
    for section in ("method", "methods"):
        if section in result:
            result[section] = _map_names(result[section], resolve_reference)
    for section in ("methods", "statistics"):  # whose keys may be references
        if isinstance(result.get(section), dict):
            result[section] = {resolve_reference(name): table for name, table in result[section].items()}
    return dict(result)


def _map_values(values: Any, place: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """Return the values, those at a place changed; "*" stands for every key of a table, and every item of a list."""
    if not place:
        return change(values)
    key, *below = place
    if isinstance(values, list) and key == "*":
        return [_map_values(value, below, change) for value in values]
    if not isinstance(values, Mapping):
        return values
    return {
        name: _map_values(value, below, change) if key in (name, "*") else value
        for name, value in values.items()
    }


def _map_names(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a table with every `name` in it changed, and in the tables below."""
    if isinstance(value, list):
        return [_map_names(below, change) for below in value]
    if not isinstance(value, dict):
        return value
    return {
        key: change(below) if key == "name" else _map_names(below, change) for key, below in value.items()
    }
