"""The wording that users read, in one file: error sentences by code, headings of pages, and help texts.

Other tests assert codes, numbers and behavior. After an intended change: `pytest tests/snapshots --update-wording`,
and look at the difference in git.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

import silodp.errors
from silodp.cli.main import app
from silodp.errors import CODES

SOURCE = Path(silodp.errors.__file__).parent
SNAPSHOT = Path(__file__).parent / "wording.txt"


def text_of(node: ast.expr) -> str | None:
    """A string in the source, with {} for each value that is put into it; None for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "{}" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = [text_of(left) or "{}", text_of(right) or "{}"]
            return None if both == ["{}", "{}"] else "".join(both)
    return None


def codes_in(call: ast.Call) -> list[str]:
    """The codes that a call names, by the keyword `code` or as another argument."""
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "code")]
    constants = (node for argument in given for node in ast.walk(argument) if isinstance(node, ast.Constant))
    return [node.value for node in constants if isinstance(node.value, str) and node.value in CODES]


def makers(tree: ast.Module) -> dict[str, list[str]]:
    """The functions that return an error about the reason which they are given, with the codes that it can have."""
    return {
        node.name: [
            inner.value
            for inner in ast.walk(node)
            if isinstance(inner, ast.Constant) and inner.value in CODES
        ]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.returns, ast.Name)
        and node.returns.id == "SilodpError"
    }


def error_sentences() -> Iterator[str]:
    """Code and sentence of every error that is written down where its code is, or given to a maker of errors."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.parent.glob("silodp*/**/*.py")]
    shared = {
        name: codes for tree in trees for name, codes in makers(tree).items() if not name.startswith("_")
    }
    for tree in trees:
        known = {**shared, **makers(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                texts = [text_of(argument) for argument in node.args]
                made_by = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
                for text in (text for text in texts if text and " " in text):
                    yield from (f"{code}: {text}" for code in codes_in(node) or known.get(made_by, ()))


def headings() -> Iterator[str]:
    """The headings and the heads of tables of every page, by the file of its template."""
    for path in (SOURCE / "report").glob("*.html"):
        page = path.read_text(encoding="utf-8")
        for kind, inner in re.findall(r"<(h[1-4]|th|summary)\b[^>]*>(.*?)</\1>", page, re.DOTALL):
            without_tags = re.sub(r"<[^>]*>", "", re.sub(r"\{\{.*?\}\}|\{%.*?%\}", "{}", inner))
            yield f"{path.name} {kind}: {' '.join(without_tags.split())}"


def help_texts(command: click.Command, name: str = "silodp") -> Iterator[str]:
    """What --help says of a command, its options and its subcommands, without the layout."""
    yield f"{name}: {' '.join((command.help or '').split())}"
    for parameter in command.params:
        names = "/".join(parameter.opts) if isinstance(parameter, click.Option) else parameter.name
        yield f"{name} {names}: {' '.join((getattr(parameter, 'help', None) or '').split())}"
    for inner in getattr(command, "commands", {}).values():
        yield from help_texts(inner, f"{name} {inner.name}")


def wording() -> str:
    sections = {
        "Errors": sorted(set(error_sentences())),
        "Headings": sorted(set(headings())),
        "Help": list(help_texts(typer.main.get_command(app))),
    }
    return "\n".join(f"## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items())


def test_the_wording_is_as_it_was(request: pytest.FixtureRequest) -> None:
    now = wording()
    if request.config.getoption("--update-wording"):
        SNAPSHOT.write_text(now, encoding="utf-8")
    before = SNAPSHOT.read_text(encoding="utf-8")
    gone, new = (sorted(set(a.splitlines()) - set(b.splitlines())) for a, b in ((before, now), (now, before)))
    hint = "if intended: pytest tests/snapshots --update-wording"
    assert now == before, "\n".join([hint, *(f"- {line}" for line in gone), *(f"+ {line}" for line in new)])
