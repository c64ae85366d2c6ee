"""How large and how documented the code is, and how much of it a run or a report needs.

python benchmarks/house.py [SRC]: prints a table; SRC is a folder that holds a package `silodp` (by default src/).
Docstrings, comments and functions are counted without running anything; the last three lines of the table start Python.
"""

from __future__ import annotations

import ast
import io
import os
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef

ENTERED = """
import sys, threading
from pathlib import Path
import silodp
root, files = str(Path(silodp.__file__).parent), set()

def note(frame, event, argument):
    if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename.startswith(root):
        files.add(frame.f_code.co_filename)

threading.setprofile(note)
sys.setprofile(note)
from silodp.cli import main
from silodp.config.resolve import load_config
try:
    main.main(["run", str(Path(main.__file__).with_name("demo.toml")), "--set", "rounds=3", "--out", sys.argv[1]])
except SystemExit as ended:
    sys.setprofile(None)
    print(len(files), file=sys.stderr) if not ended.code else sys.exit(ended.code)
"""
IMPORTED = """
import sys
import silodp.report.page
print(sum(name.split(".")[0] == "silodp" for name in sys.modules), file=sys.stderr)
"""
EXPORTED = """
import importlib, pkgutil, sys
import silodp
names = ["silodp", *(f"silodp.{found.name}" for found in pkgutil.iter_modules(silodp.__path__))]
packages = [package for package in map(importlib.import_module, names) if hasattr(package, "__all__")]
things = {id(getattr(package, name)) for package in packages for name in package.__all__}
print(sum(len(package.__all__) for package in packages), len(things), file=sys.stderr)
"""


class Documented(NamedTuple):
    """A public function, method, property or class: its docstring, and the node."""

    text: str | None
    node: Function | ast.ClassDef


def is_public(name: str) -> bool:
    """Return whether a name does not begin with an underscore."""
    return not name.startswith("_")


def list_functions(tree: ast.AST) -> Iterator[Function]:
    """Yield all functions, those inside others too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def list_public(body: list[ast.stmt]) -> Iterator[Documented]:
    """Yield the public definitions of a module or class, without those inside functions."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and is_public(node.name):
            yield Documented(ast.get_docstring(node), node)
            if isinstance(node, ast.ClassDef):
                yield from list_public(node.body)


def count_comments(text: str) -> int:
    """Return the number of lines that hold a comment and nothing else."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and token.line.lstrip().startswith("#") for token in tokens)


def take_shares(values: list[bool]) -> str:
    """Return the part of the values that is true, in percent."""
    return f"{100 * sum(values) / max(1, len(values)):.1f} %"


def measure_text(package: Path) -> Iterator[tuple[str, str]]:
    """Yield what the text of all modules shows: a name, and a number."""
    texts = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = sorted(len(text.splitlines()) for text in texts.values())
    yield "lines", f"{sum(lines):,}"
    yield "files", str(len(texts))
    yield "file lines, median / longest", f"{statistics.median(lines):.0f} / {lines[-1]}"
    long = [
        (node.end_lineno or 0) - node.lineno + 1 for tree in trees.values() for node in list_functions(tree)
    ]
    ninth = statistics.quantiles(long, n=10)[-1]
    yield "functions", f"{len(long):,}"
    yield "function lines, median / 90th percentile", f"{statistics.median(long):.0f} / {ninth:.0f}"
    public = [found for tree in trees.values() for found in list_public(tree.body)]
    functions = [found for found in public if isinstance(found.node, Function)]
    yield "public functions with a docstring", take_shares([found.text is not None for found in functions])
    docs = [found.text for found in public if found.text is not None]
    yield "words in a docstring, median", f"{statistics.median(len(text.split()) for text in docs):.0f}"
    sections = ("Args:", "Returns:", "Attributes:", "Raises:")
    yield (
        "docstrings with Args or Returns",
        take_shares(["Args:" in text or "Returns:" in text for text in docs]),
    )
    yield (
        "docstrings with any section",
        take_shares([any(name in text for name in sections) for text in docs]),
    )
    comments = sum(map(count_comments, texts.values()))
    yield "comment lines", f"{comments:,} ({100 * comments / sum(lines):.1f} %)"
    top = [node for tree in trees.values() for node in tree.body if isinstance(node, Function | ast.ClassDef)]
    named = [node for node in top if is_public(node.name)]
    classes = sum(isinstance(node, ast.ClassDef) for node in named)
    yield "public classes / public top-level definitions", f"{classes} / {len(named)}"
    modules = [path for path in texts if path.name != "__init__.py"]
    private = sum(not is_public(path.name) for path in modules)
    yield "modules that start with an underscore", f"{private} of {len(modules)}"


def run_python(source: Path, code: str, *arguments: str) -> list[str]:
    """Run a program on the package in `source`; return the last line of its standard error, in words."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=True
    )
    return done.stderr.splitlines()[-1].split()


def main() -> None:
    """Print the table."""
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src"
    found = list(measure_text(source / "silodp"))
    listed, things = run_python(source, EXPORTED)
    found.append(("names in __all__ of public packages, distinct", f"{listed}, {things}"))
    with tempfile.TemporaryDirectory() as folder:
        (entered,) = run_python(source, ENTERED, str(Path(folder) / "run"))
    found.append(("files that a three-round demo enters", entered))
    (imported,) = run_python(source, IMPORTED)
    found.append(("silodp modules that silodp.report.page imports", imported))
    width = max(len(name) for name, _ in found)
    for name, value in found:
        print(f"{name:{width}}  {value}")


if __name__ == "__main__":
    main()
