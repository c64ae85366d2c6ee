"""Write docs/commands.md anew: every command with its arguments and options, as the command line declares them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "commands.md"
_LISTING = re.compile(r"(?<=<!-- listing -->\n).*(?=<!-- end -->)", re.DOTALL)


def fill_page(text: str) -> str:
    """Return the page with its listing made anew."""
    return _LISTING.sub(lambda _: f"\n{format_commands()}\n\n", text)


def format_commands() -> str:
    """Return links to all commands, what three or more of them share, and a section for each with the rest."""
    commands = list(list_commands())
    rows = [_list_parameters(context) for context in commands]
    counts = Counter(chain.from_iterable(rows))
    shared = [row for row, count in counts.items() if count >= 3]
    links = [f"[`{context.command_path}`](#{_anchor(context)})" for context in commands]
    sections = [
        _format_command(context, found, shared) for context, found in zip(commands, rows, strict=True)
    ]
    meanings = "\n".join(map(_format_parameter, shared))
    return "\n\n".join([", ".join(links) + ".", "### Shared by several commands", meanings, *sections])


def list_commands() -> Iterator[click.Context]:
    """Yield a context of every command that is no group, in the order in which `--help` lists them."""
    import click
    import typer

    sys.path[:0] = [str(path) for path in ROOT.glob("packages/*/src")]
    from silodp.cli.main import app

    def visit(command: click.Command, name: str, parent: click.Context | None) -> Iterator[click.Context]:
        context = click.Context(command, info_name=name, parent=parent)
        if not isinstance(command, click.Group):
            yield context
            return
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from visit(found, below, context)

    return visit(typer.main.get_command(app), "silodp", None)


def _anchor(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _list_parameters(context: click.Context) -> list[tuple[str, str]]:
    """Return the name and the help of each argument and option that is not hidden."""
    found = (parameter.get_help_record(context) for parameter in context.command.params)
    return [record for record in found if record is not None]


def _format_command(
    context: click.Context, rows: list[tuple[str, str]], shared: list[tuple[str, str]]
) -> str:
    usage = context.command.get_usage(context).removeprefix(f"Usage: {context.command_path} ").split()
    arguments = "".join(f" `{word}`" for word in usage if word != "[OPTIONS]")
    parts = [
        f"### `{context.command_path}`{arguments} {{ #{_anchor(context)} }}",
        _escape(context.command.help or ""),
    ]
    own = [_format_parameter(row) for row in rows if row not in shared]
    names = [f"`{row[0].partition(' ')[0]}`" for row in rows if row in shared and row[0].startswith("--")]
    parts += ["\n".join(own)] if own else []
    parts += [f"[Shared](#shared-by-several-commands): {', '.join(names)}."] if names else []
    return "\n\n".join(parts)


def _format_parameter(row: tuple[str, str]) -> str:
    return f"- `{row[0]}`: {_escape(_format_notes(row[1]))}"


def _format_notes(text: str) -> str:
    """Return the help of a parameter with click's "[default: 5; x>=1]" and "[required]" as sentences."""
    text, _, notes = " ".join(text.split()).partition(" [default: ")
    if notes:
        value, _, bounds = notes.rstrip("]").partition("; ")
        text += f" Default: {value}{bounds.replace('x>=', ', at least ')}."
    return re.sub(r" \[required\]$", " Required.", text)


def _escape(text: str) -> str:
    """Return help text as Markdown that shows it as it is, in a table too; pages of docs/ become links."""
    text = " ".join(text.split()).replace("|", r"\|").replace("*", r"\*")
    return re.sub(r"\bdocs/(\w+)\.md\b", r"[\1.md](\1.md)", text)


def main() -> None:
    """Write the listing into the page."""
    PAGE.write_text(fill_page(PAGE.read_text()))


if __name__ == "__main__":
    main()
