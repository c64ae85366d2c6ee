"""Generate the listings in docs/architecture.md from the source: `make listings`.

A listing stands between `<!-- listing: KIND ARGUMENTS -->` and `<!-- end -->`. The source is parsed and never imported,
so that a listing needs none of the package's dependencies. Kinds:

    packages               every package, from the layers that import-linter checks in pyproject.toml
    modules PACKAGE        the modules of a package, with the first line of their docstrings
    class MODULE:NAME ...  the public attributes and methods of classes
    events MODULE          the event classes, the names they are stored under, and their unions
    formats                the versions of stored formats, from the constants that define them
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "architecture.md"
_BLOCK = re.compile(r"<!-- listing: ([^\n]*?) -->\n.*?<!-- end -->", re.DOTALL)
_WIDTH = 92  # what the page shows without a scroll bar

FORMATS = (
    ("`checkpoint/state.safetensors`", "silodp.runtime.checkpoint:FORMAT", "safetensors behind a SHA-256"),
    ("`checkpoint/ledger.jsonl`, `checkpoint/silo_ledgers/*.jsonl`: the file", "silodp.accounting.ledger:FORMAT",
     "JSON lines, each with the hash of the line before"),
    ("the same: the rules from a run to its events", "silodp.accounting.ledger:ACCOUNTING",
     "`subject.accounting` in the first line of the run's ledger"),
    ("`guarantee.json`", "silodp.accounting.guarantee:FORMAT", "JSON"),
    ("`model.json`", "silodp.runtime.model_description:FORMAT", "JSON"),
    ("`run_spec.json`", "silodp.aggregators.run_spec:FORMAT", "JSON"),
    ("`identity.toml`", "silodp.data.identity:FORMAT", "TOML; its digest covers the settings, not the bytes"),
    ("signed messages", "silodp.wire.transport:_MARKER",
     "marker, Ed25519 signature, then safetensors with a JSON header"),
)  # fmt: skip
"""What is stored or sent, the constant with its version, and its encoding."""


def fill_listings(text: str) -> str:
    """Return a page with all its listings generated anew.

    Raises:
        ValueError: a listing of an unknown kind, or of something that does not exist.
    """
    return _BLOCK.sub(
        lambda found: f"<!-- listing: {found[1]} -->\n\n{format_listing(found[1])}\n\n<!-- end -->", text
    )


def format_listing(request: str) -> str:
    """Return the Markdown of one listing, for example of "modules silodp.accounting"."""
    kind, *arguments = request.split()
    makers: dict[str, Callable[..., str]] = {
        "packages": format_packages,
        "modules": format_modules,
        "class": format_classes,
        "events": format_events,
        "formats": format_formats,
    }
    if kind not in makers:
        raise ValueError(f"a listing of kind {kind!r} is not known: use one of {', '.join(makers)}")
    return makers[kind](*arguments)


# --- packages and modules -----------------------------------------------------------------------------------------


def format_packages() -> str:
    """Return a table of the packages, the highest layer first, with what each may import."""
    order, allowed = read_import_rules()
    rows = ["| package | what it is for | may import |", "|---|---|---|"]
    for place, name in enumerate(order):
        rows.append(
            f"| **{name.removeprefix('silodp.')}** | {_link_pages(summarize_module(name))} "
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


def format_modules(package: str) -> str:
    """Return a list of the modules of a package and its sub-packages; private modules are only named."""
    folder = _locate(package).parent
    files = sorted(folder.rglob("*.py"), key=lambda file: (len(file.relative_to(folder).parts), file))
    names = [file.relative_to(folder).as_posix() for file in files]
    shown = [name for name in names if not any(part.startswith("_") for part in name.split("/"))]
    private = [
        name for name in names if name.split("/")[-1].startswith("_") and not name.endswith("__init__.py")
    ]
    rows = [f"- `{folder.name}/{name}`: {_link_pages(_first_line(_parse(folder / name)))}" for name in shown]
    if private:
        rows.append(f"- private: {', '.join(f'`{folder.name}/{name}`' for name in private)}")
    return "\n".join(rows)


def summarize_module(name: str) -> str:
    """Return the first line of the docstring of a module or package."""
    return _first_line(_parse(_locate(name)))


# --- interfaces ---------------------------------------------------------------------------------------------------


_NOTES = {"abstractmethod": "must be defined", "classmethod": "class method", "staticmethod": "static method"}


@dataclass(frozen=True)
class Member:
    """A public attribute or method of a class."""

    name: str
    type: str
    summary: str
    note: str = ""
    is_method: bool = False
    arguments: tuple[str, ...] = ()


def format_classes(*places: str) -> str:
    """Return Python stubs of classes, each given as "package.module:Class"."""
    return _fence("\n\n\n".join("\n".join(_list_class(place)) for place in places))


def _list_class(place: str) -> Iterator[str]:
    module, _, name = place.partition(":")
    path = _locate(module)
    node = _find_class(_parse(path), place)
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield from (f"@{ast.unparse(decorator)}" for decorator in node.decorator_list)
    yield f"class {name}{f'({bases})' if bases else ''}:  # {path.relative_to(SOURCE / 'silodp').as_posix()}"
    yield from _comment(_first_line(node), " " * 4)
    lines = path.read_text().splitlines()
    last = node.lineno
    for member in node.body:
        sections = [re.fullmatch(r"    # --- (.*) ---", line) for line in lines[last : member.lineno]]
        yield from (f"\n    # --- {found[1]} ---" for found in sections if found)
        last = member.end_lineno or member.lineno
        for shown in _read_member(node, member):
            yield from _format_member(shown)


def _read_member(owner: ast.ClassDef, node: ast.stmt) -> Iterator[Member]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        name = node.target.id
        if not name.startswith("_"):
            summary = _read_attributes(owner).get(name) or _docstring_after(owner, node)
            yield Member(name, ast.unparse(node.annotation) + _format_default(node.value), summary)
    elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        yield Member(
            node.name,
            "" if node.returns is None else ast.unparse(node.returns),
            _first_line(node),
            note=next((note for name, note in _NOTES.items() if name in decorators), ""),
            is_method=not {"property", "cached_property"} & set(decorators),
            arguments=_list_arguments(node),
        )


def _format_member(member: Member) -> Iterator[str]:
    note = f"  # {member.note}" if member.note else ""
    line = f"    {member.name}({', '.join(member.arguments)}) -> {member.type}" if member.is_method else ""
    if not member.is_method:
        yield f"    {member.name}: {member.type}{note}"
    elif len(line) + len(note) <= _WIDTH:
        yield line + note
    else:
        yield f"    {member.name}({note}"
        yield from _wrap_arguments(member.arguments, " " * 8)
        yield f"    ) -> {member.type}"
    yield from _comment(member.summary, " " * 8)


def _wrap_arguments(arguments: Sequence[str], indent: str) -> list[str]:
    """Return lines of arguments; none is cut in two."""
    solid = ", ".join(argument.replace(" ", "\0") for argument in arguments)
    lines = textwrap.wrap(
        solid, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False
    )
    return [line.replace("\0", " ") for line in lines]


def _comment(summary: str, indent: str) -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(
        summary, _WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False
    )


def _list_arguments(node: ast.FunctionDef) -> tuple[str, ...]:
    """Return the arguments of a method without `self` or `cls`, each with its type and default."""
    given = node.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    pairs = [*zip(given.args, defaults, strict=True)][0 if _is_static(node) else 1 :]
    texts = [_format_argument(argument, default) for argument, default in pairs]
    if given.kwonlyargs:
        keyword_only = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        texts += ["*", *(_format_argument(argument, default) for argument, default in keyword_only)]
    return tuple(texts)


def _is_static(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)


def _format_argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = (
        argument.arg if argument.annotation is None else f"{argument.arg}: {ast.unparse(argument.annotation)}"
    )
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _format_default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        value = given.get("default")
        if value is None:
            return " = ..." if "default_factory" in given else ""
    return "" if value is None else f" = {ast.unparse(value)}"


def _read_attributes(node: ast.ClassDef) -> dict[str, str]:
    """Return the first sentence on every name in the section "Attributes" of a class's docstring."""
    _, _, section = (ast.get_docstring(node) or "").partition("\nAttributes:\n")
    found: dict[str, str] = {}
    for entry in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
        sentence = re.split(r"(?<=\w)[.](?: |$)", " ".join(entry[1].split()))[0].rstrip(".;")
        found |= dict.fromkeys(entry[0].split(", "), sentence)
    return found


def _docstring_after(owner: ast.ClassDef, node: ast.stmt) -> str:
    after = owner.body[owner.body.index(node) + 1 :][:1]
    match after:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return text.split("\n")[0]
    return ""


def format_events(module: str) -> str:
    """Return stubs of the event classes, with the names they are stored under, and their unions."""
    tree = _parse(_locate(module))
    stored = _read_stored_kinds(tree)
    parts: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            fields = [ast.unparse(f) for f in node.body if isinstance(f, ast.AnnAssign)]
            name = stored.get(node.name, node.name)
            note = f'  # stored as "{name}"' if name != node.name else ""
            lines = [f"{node.name}({', '.join(fields)}){note}"]
            if len(lines[0]) > _WIDTH:
                lines = [f"{node.name}({note}", *_wrap_arguments(fields, " " * 4), ")"]
            parts.append("\n".join([*lines, *_comment(_first_line(node), " " * 4)]))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            parts.append(ast.unparse(node))
    return _fence("\n\n".join(parts))


def _read_stored_kinds(tree: ast.Module) -> dict[str, str]:
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "STORED_KINDS":
            assert isinstance(node.value, ast.Dict)
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {ast.unparse(value): ast.literal_eval(key) for key, value in pairs if key is not None}
    raise ValueError("the module has no STORED_KINDS")


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


def _find_class(tree: ast.Module, place: str) -> ast.ClassDef:
    name = place.partition(":")[2]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise ValueError(f"there is no class {place}")


def _first_line(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").split("\n")[0]


def _link_pages(text: str) -> str:
    return re.sub(r"\bdocs/(\w+)\.md\b", r"[\1.md](\1.md)", text)


def _fence(text: str) -> str:
    return f"```python\n{text}\n```"


def main() -> None:
    """Write the listings into the page."""
    PAGE.write_text(fill_listings(PAGE.read_text()))
    print(f"wrote the listings of {PAGE.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
