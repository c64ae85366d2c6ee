"""Generate the listings in docs/architecture.md and docs/commands.md: `make listings`.

A listing stands between `<!-- listing: KIND -->` and `<!-- end -->`. Kinds:

    packages    every package, from the layers that import-linter checks in pyproject.toml
    formats     the versions of stored formats, from the constants that define them
    commands    every command with its arguments and options, as the command line declares them

The first two parse the source and do not import it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PAGES = (ROOT / "docs" / "architecture.md", ROOT / "docs" / "commands.md")
_BLOCK = re.compile(r"<!-- listing: (\w+) -->\n.*?<!-- end -->", re.DOTALL)

FORMATS = (
    ("`checkpoint/state.safetensors`", "silodp.runtime.checkpoint:FORMAT", "safetensors behind a SHA-256"),
    ("`checkpoint/ledger.jsonl`, `checkpoint/silo_ledgers/*.jsonl`: the file", "silodp.accounting.ledger:FORMAT",
     "JSON lines, each with the hash of the line before"),
    ("the same: the rules from a run to its events", "silodp.accounting.ledger:ACCOUNTING",
     "`subject.accounting` in the first line of the run's ledger"),
    ("the file of a cohort", "silodp.accounting.cohort:FORMAT", "the same"),
    ("`guarantee.json`", "silodp.accounting.guarantee:FORMAT", "JSON"),
    ("`model.json`", "silodp.runtime.model_description:FORMAT", "JSON"),
    ("`run_spec.json`", "silodp.aggregators.run_spec:FORMAT", "JSON"),
    ("`identity.toml`", "silodp.data.identity.profile:FORMAT", "TOML; its digest covers the settings, not the bytes"),
    ("signed messages", "silodp.wire.transport:_MARKER",
     "marker, Ed25519 signature, then safetensors with a JSON header"),
)  # fmt: skip
"""What is stored or sent, the constant with its version, and its encoding."""


def fill_listings(text: str) -> str:
    """Return a page with all its listings generated anew.

    Raises:
        ValueError: a listing of an unknown kind.
    """
    return _BLOCK.sub(
        lambda found: f"<!-- listing: {found[1]} -->\n\n{format_listing(found[1])}\n\n<!-- end -->", text
    )


def format_listing(kind: str) -> str:
    """Return the Markdown of one listing."""
    makers: dict[str, Callable[[], str]] = {
        "packages": format_packages,
        "formats": format_formats,
        "commands": format_commands,
    }
    if kind not in makers:
        raise ValueError(f"a listing of kind {kind!r} is not known: use one of {', '.join(makers)}")
    return makers[kind]()


# --- packages -----------------------------------------------------------------------------------------------------


def format_packages() -> str:
    """Return a table of the packages, the highest layer first, with what each may import."""
    order, allowed = read_import_rules()
    rows = ["| package | what it is for | may import |", "|---|---|---|"]
    for place, name in enumerate(order):
        summary = (ast.get_docstring(_parse(_locate(name))) or "").split("\n")[0]
        rows.append(
            f"| **{name.removeprefix('silodp.')}** | {summary} "
            f"| {_describe_allowed(order[place + 1 :], allowed[name])} |"
        )
    return "\n".join(rows)


def read_import_rules() -> tuple[list[str], dict[str, list[str]]]:
    """Return the packages from the highest layer down, and what each may import, by the contracts of import-linter."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    rows = [[name.strip() for name in layer.split("|")] for layer in layers]
    allowed = {
        name: [low for row in rows[i + 1 :] for low in row] for i, row in enumerate(rows) for name in row
    }
    for contract in contracts:
        if contract["type"] == "forbidden":
            for source in contract["source_modules"]:
                forbidden = set(contract["forbidden_modules"])
                allowed[source] = [name for name in allowed[source] if name not in forbidden]
    return [name for row in rows for name in row], allowed


def _describe_allowed(below: list[str], allowed: list[str]) -> str:
    names = [f"`{name.removeprefix('silodp.')}`" for name in allowed]
    others = [f"`{name.removeprefix('silodp.')}`" for name in below if name not in allowed]
    if len(names) < 3:
        return ", ".join(names) or "–"
    return "everything below" + (f" except {', '.join(others)}" if others else "")


# --- stored formats -----------------------------------------------------------------------------------------------


def format_formats() -> str:
    """Return a table of the versions of everything that is stored or sent."""
    rows = ["| what | version | constant | encoding |", "|---|---|---|---|"]
    for what, constant, encoding in FORMATS:
        module, _, name = constant.partition(":")
        path = _locate(module)
        value = _read_constant(_parse(path), name)
        version = value.decode() if isinstance(value, bytes) else value
        rows.append(
            f"| {what} | {version} | `{path.relative_to(SOURCE / 'silodp').as_posix()}:{name}` | {encoding} |"
        )
    return "\n".join(rows)


def _read_constant(tree: ast.Module, name: str) -> object:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
    raise ValueError(f"there is no constant {name}")


# --- commands -----------------------------------------------------------------------------------------------------


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


# --- reading the source -------------------------------------------------------------------------------------------


def list_functions(path: Path) -> set[str]:
    """Return the qualified names of all functions and classes of a file, and of those inside them."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef | ast.ClassDef):
                found.add(prefix + inner.name)
                visit(inner, f"{prefix}{inner.name}." if isinstance(inner, ast.ClassDef) else prefix)

    visit(_parse(path), "")
    return found


def _locate(module: str) -> Path:
    """Return the file of a module or package."""
    path = SOURCE / Path(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    raise ValueError(f"there is no module {module}")


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def main() -> None:
    """Write the listings into the pages."""
    for page in PAGES:
        page.write_text(fill_listings(page.read_text()))
        print(f"wrote the listings of {page.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
