"""Write docs/commands.md anew: every command with its arguments and options, as the command line declares them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "commands.md"
_LISTING = re.compile(r"(?<=<!-- listing -->\n).*(?=<!-- end -->)", re.DOTALL)


def fill_page(text: str) -> str:
    """Return the page with its listing made anew."""
    return _LISTING.sub(lambda _: f"\n{format_commands()}\n\n", text)


def format_commands() -> str:
    """Return a table of all commands, and a section for each with its arguments and options."""
    commands = list(list_commands())
    summary = ["| command | what it does |", "|---|---|"]
    for context in commands:
        anchor = context.command_path.replace(" ", "-")
        first = re.split(r"(?<=\.)\s", " ".join((context.command.help or "").split()))[0]
        summary.append(f"| [`{context.command_path}`](#{anchor}) | {_escape(first)} |")
    return "\n\n".join(["\n".join(summary), *(_format_command(context) for context in commands)])


def list_commands() -> Iterator[click.Context]:
    """Yield a context of every command that is no group, in the order in which `--help` lists them."""
    import click
    import typer

    sys.path.insert(0, str(SOURCE))
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


def _format_command(context: click.Context) -> str:
    command = context.command
    usage = command.get_usage(context).removeprefix("Usage: ")
    rows = ["| argument or option | meaning |", "|---|---|"]
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:  # None: a hidden option
            names = record[0].replace("|", "&#124;")
            rows.append(f"| <code>{names}</code> | {_escape(_format_notes(record[1]))} |")
    return "\n\n".join([
        f"### `{context.command_path}`", _escape(command.help or ""), f"```text\n{' '.join(usage.split())}\n```",
        "\n".join(rows),
    ])  # fmt: skip


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
