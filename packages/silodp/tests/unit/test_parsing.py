"""Untrusted JSON and TOML text: what is nested too deeply is refused as what is no JSON or TOML, with one code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from silodp.parsing import (
    MAX_DEPTH,
    NestedTooDeepError,
    parse_json,
    parse_texts,
    parse_toml,
    refuse_malformed,
)
from support.refusals import refused


def nest(levels: int) -> Any:
    value: Any = 1
    for number in range(levels):
        value = [value] if number % 2 else {"a": value}
    return value


def test_json_of_the_largest_depth_is_read_and_one_level_more_is_refused() -> None:
    assert parse_json(json.dumps(nest(MAX_DEPTH))) == nest(MAX_DEPTH)
    assert parse_json(b"[[1]]", max_depth=2) == [[1]]
    for text, depth in ((json.dumps(nest(MAX_DEPTH + 1)), MAX_DEPTH), ("[[1]]", 1)):
        with pytest.raises(NestedTooDeepError):
            parse_json(text, depth)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 5000 + "]" * 5000])
def test_what_no_parser_can_hold_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)
    with pytest.raises(ValueError, match=r"."):
        parse_toml(f"x = {text}")


def test_dotted_keys_of_toml_are_levels_too() -> None:
    assert parse_toml("a" + ".a" * 20 + " = 1")
    with pytest.raises(NestedTooDeepError):
        parse_toml("a" + ".a" * 500 + " = 1")


@pytest.mark.parametrize("text", [b"", b"5", b"[]", b'{"a": 1}', b'{"a": ["b"]}', b"\xff", b"[" * 4000])
def test_an_object_of_texts_is_nothing_else(text: bytes) -> None:
    assert parse_texts(b'{"a": "b"}') == {"a": "b"}
    with pytest.raises(ValueError, match=r"."):
        parse_texts(text)


def test_unsound_values_are_one_error_with_the_readers_code() -> None:
    def read(text: str) -> int:
        with refuse_malformed(lambda error: f"{type(error).__name__} in it", code="report.damaged"):
            return int(parse_json(text)["a"][0])
        raise AssertionError

    assert read('{"a": [3]}') == 3
    for text in ("", "[", "[" * 5000, "5", "{}", '{"a": 1}', '{"a": []}', '{"a": ["b"]}', '{"a": [1e999]}'):
        with refused("report.damaged"):
            read(text)


def test_other_errors_pass() -> None:
    with pytest.raises(FileNotFoundError), refuse_malformed("damaged", code="report.damaged"):
        raise FileNotFoundError
