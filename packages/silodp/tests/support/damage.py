"""Damaged copies of a file that a party reads: every field in turn, and the bytes of the whole.

Whoever reads the file uses it or raises `SilodpError`; it never ends in another exception.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import tomli_w

JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 70_000, 2**63, 10**400, 0.5, -0.5, 1e300, float("nan"), float("inf"), "", "x",
    "0" * 64, "\ud800", "a/b", "../x", "x" * 10_000, "2026-02-30", [], [1], ["x"], [None], [[[]]], {}, {"a": 1},
    {"name": "x"}, [{}], [True, "x"],
)  # fmt: skip
DEEP = b"[" * 100_000


def list_places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a plain value, the first two of a list."""
    found = [path] if path else []
    if isinstance(value, dict):
        found += [place for key, inner in value.items() for place in list_places(inner, (*path, key))]
    if isinstance(value, list):
        found += [place for i, inner in enumerate(value[:2]) for place in list_places(inner, (*path, i))]
    return found


def damage_value(value: Any) -> Iterator[Any]:
    """Plain values with one place replaced, wrapped, deleted, renamed, or with one more beside it."""
    yield from JUNK
    for *way, last in list_places(value):
        for junk in [*JUNK, "wrapped", "deleted", "renamed", "more"]:
            changed = deepcopy(value)
            inner = changed
            for key in way:
                inner = inner[key]
            if junk == "wrapped":
                inner[last] = [inner[last]]
            elif junk == "deleted":
                del inner[last]
            elif junk == "renamed" and isinstance(inner, dict):
                inner[f"{last}x"] = inner.pop(last)
            elif junk == "more":
                if isinstance(inner, dict):
                    inner["more"] = inner[last]
                else:
                    inner.append(inner[last])
            else:
                inner[last] = junk
            yield changed


def damage_bytes(content: bytes, generator: random.Random) -> Iterator[bytes]:
    """The bytes cut off, flipped, exchanged for others, doubled, nested, or in another encoding."""
    yield from (b"", b"\0" * 64, DEEP, b'{"a":' * 50_000, b"\xff\xfe", content * 2, b"\xef\xbb\xbf" + content)
    yield content.decode(errors="replace").encode("utf-16")
    for _ in range(40):
        place = generator.randrange(max(1, len(content)))
        yield content[:place]
        yield content[place:]
        bit = 1 << generator.randrange(8)
        yield content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :] if content else b"x"
        other = generator.choice([b"\xff", b"\xc3", b"\0", b"\n", b'"', b"{", b"1e999", b"1" * 5000])
        yield content[:place] + other + content[place:]


def damage_file(path: Path, generator: random.Random) -> Iterator[bytes]:
    """Damaged contents of a file, by its ending: of JSON, lines of JSON and TOML also every field."""
    content = path.read_bytes()
    yield from damage_bytes(content, generator)
    if path.suffix == ".toml":
        for value in damage_value(tomllib.loads(content.decode())):
            try:
                yield tomli_w.dumps(value).encode()
            except (TypeError, ValueError, AttributeError):  # TOML has no such value
                continue
    elif path.suffix == ".jsonl":
        lines = content.splitlines()
        for number, line in enumerate(lines[:4]):
            for value in damage_value(json.loads(line)):
                yield b"\n".join([*lines[:number], json.dumps(value).encode(), *lines[number + 1 :], b""])
    else:
        try:
            whole = json.loads(content)
        except ValueError:
            return
        for value in damage_value(whole):
            yield json.dumps(value).encode()
        text = json.dumps(whole)
        for key in whole if isinstance(whole, dict) else ():  # twice: a reader takes one of both
            yield text.replace(f'"{key}":', f'"{key}": null, "{key}":', 1).encode()
            yield (text[:-1] + f', "{key}": [true]}}').encode()
