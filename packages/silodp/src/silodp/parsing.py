"""Untrusted JSON and TOML text: parsed to plain values of bounded depth, and refused with one code where unsound.

Python's parsers raise RecursionError for deep nesting, which is no ValueError, and so do functions that walk through
nested values. Here text that is nested too deeply is refused as text that is no JSON or TOML is. How many bytes are
read is bounded where they are read.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from silodp.errors import SilodpError

MAX_DEPTH = 64
"""Levels of objects and lists in any text that silodp writes or reads are fewer."""

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
"""What a reader raises where plain values are not of the form that it expects."""


class NestedTooDeepError(ValueError):
    """A text has more levels of nesting than are read."""


def parse_json(text: bytes | str, max_depth: int = MAX_DEPTH) -> Any:
    """Return the plain value of a JSON text.

    Args:
        text: The JSON text.
        max_depth: Most levels of objects and lists around a value.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
    """
    return _parse(json.loads, text, max_depth)


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables and values of a TOML text.

    Raises:
        ValueError: it is no TOML, or nested too deeply (`NestedTooDeepError`).
    """
    values: dict[str, Any] = _parse(tomllib.loads, text, MAX_DEPTH)
    return values


def parse_texts(text: bytes) -> dict[str, str]:
    """Return a JSON object whose values are texts.

    Raises:
        ValueError: it is something else.
    """
    fields = parse_json(text)
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise ValueError("no JSON object of texts")
    return fields


def is_format(stated: object, *known: int) -> bool:
    """Return whether a file states one of the formats that are read; JSON's true is equal to 1 in Python."""
    return type(stated) is int and stated in known


def explain_malformed(error: Exception) -> str:
    """Return in one line what a reader found unsound."""
    if isinstance(error, ValueError) and hasattr(error, "errors"):  # pydantic's, which is not imported for it
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _parse(parse: Callable[[Any], Any], text: bytes | str, max_depth: int) -> Any:
    try:
        value = parse(text)
    except RecursionError:
        raise NestedTooDeepError("nested too deeply") from None
    # Level by level and without recursion, which deep nesting would exhaust: the parser of JSON is written in C and
    # accepts more levels than functions in Python can walk through.
    level = [value]
    for _ in range(max_depth + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise NestedTooDeepError("nested too deeply")


@contextmanager
def refuse_malformed(message: str | Callable[[Exception], str], *, code: str) -> Iterator[None]:
    """Raise one SilodpError where the code inside finds plain values unsound (`MALFORMED`).

    Args:
        message: The message of the error, or a function of the exception that returns it.
        code: The code of the error.
    """
    try:
        yield
    except MALFORMED as error:
        if isinstance(error, SilodpError) and error.code == "extension.missing":
            raise  # the file is sound, and read where a package is not installed
        # `from None`: the chain of exceptions would show what a damaged file holds.
        text = message if isinstance(message, str) else message(error)
        raise SilodpError(text, code=code) from None
