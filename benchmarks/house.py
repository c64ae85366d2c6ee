"""How large and how documented the code is, and how much of it a command needs.

python benchmarks/house.py: prints a table.
The first lines of the table are counted in the text of the modules; the last ones start Python. No number is a limit.
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

from timing import show_help

ROOT = Path(__file__).resolve().parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef

ENTERED = """
import inspect, sys, threading
from pathlib import Path
import silodp
root, files = str(Path(silodp.__file__).parent), set()

def note(frame, event, argument):
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # the bodies of modules and classes are not
    name = frame.f_code.co_filename  # of a compiled template, too, which is no module
    if event == "call" and is_function and name.startswith(root) and name.endswith(".py"):
        files.add(name)

threading.setprofile(note)
sys.setprofile(note)
from silodp.cli import main
try:
    main.main(["run", str(Path(main.__file__).with_name("demo.toml")), "--set", "rounds=3", "--out", sys.argv[1]])
except SystemExit as ended:
    sys.setprofile(None)
    print(len(files), file=sys.stderr) if not ended.code else sys.exit(ended.code)
"""
IMPORTED = """
import sys
from silodp.cli import main
try:
    main.main(sys.argv[1:])
except SystemExit as ended:
    ended.code and sys.exit(ended.code)
    own = sum(name.split(".")[0].startswith("silodp") for name in sys.modules)
    print(own, "with" if "torch" in sys.modules else "without", "torch", file=sys.stderr)
"""
EXPORTED = """
import importlib, pkgutil, re, sys
import silodp
found = [found.name for found in pkgutil.iter_modules(silodp.__path__) if found.name != "__main__"]
packages = [importlib.import_module(name) for name in ["silodp", *(f"silodp.{name}" for name in found)]]
packages = [package for package in packages if hasattr(package, "__all__")]
things = {id(thing): thing for package in packages for thing in (getattr(package, n) for n in package.__all__)}
texts = [thing.__doc__ or "" for thing in things.values() if callable(thing)]
source = re.compile(r"et al|[Aa]lgorithm|[Tt]heorem|[Ll]emma|[Pp]roposition|[Ee]quation|arXiv|RFC|[Pp]aper|[Ss]ource:")
sourced = sum(bool(source.search(text)) for text in texts)
members = max(sum(not n.startswith("_") for n in vars(c)) for c in silodp.methods.Method.__mro__)
print(sum(len(p.__all__) for p in packages), len(things), sourced, len(texts), members, file=sys.stderr)
"""
EPSILON = ("epsilon", "--method", "uldp-avg", "--rounds", "10", "--noise-multiplier", "5")


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


def list_tokens(text: str) -> list[tokenize.TokenInfo]:
    """Return the tokens of a module, without comments and docstrings."""
    skipped = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    # A string that is a statement: the docstring of a module, class or function, or the text below a constant.
    docstrings = {
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token for token in tokens if token.type not in skipped and token.start[0] not in docstrings]


def count_code(text: str) -> int:
    """Return the number of lines that hold code: no docstrings, comments or blank lines."""
    return len({row for token in list_tokens(text) for row in range(token.start[0], token.end[0] + 1)})


def take_shares(values: list[bool]) -> str:
    """Return the part of the values that is true, in percent."""
    return f"{100 * sum(values) / max(1, len(values)):.1f} %"


def measure_text(package: Path) -> Iterator[tuple[str, str]]:
    """Yield what the text of all modules shows: a name, and a number."""
    texts = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = sorted(len(text.splitlines()) for text in texts.values())
    code = sum(map(count_code, texts.values()))
    yield "lines / code lines / files", f"{sum(lines):,} / {code:,} / {len(texts)}"
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


def run_python(code: str, *arguments: str) -> list[str]:
    """Run a program on the packages of the checkout; return the last line of its standard error, in words."""
    sources = os.pathsep.join(str(path) for path in ROOT.glob("packages/*/src"))
    environment = {**os.environ, "PYTHONPATH": sources}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=True
    )
    return done.stderr.splitlines()[-1].split()


def measure_runs() -> Iterator[tuple[str, str]]:
    """Yield what Python shows that has imported the package, or run a command of it."""
    listed, things, sourced, callables, members = run_python(EXPORTED)
    yield "names in __all__ of public packages, distinct", f"{listed}, {things}"
    yield "exported classes and functions whose docstring names a source", f"{sourced} of {callables}"
    yield "public members of Method, or of the largest class that it is made of", members
    yield "modules of silodp after `silodp epsilon`", " ".join(run_python(IMPORTED, *EPSILON))
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        yield "files that a three-round demo enters", run_python(ENTERED, run)[0]
        yield "modules after `silodp report`", " ".join(run_python(IMPORTED, "report", run))
        short = ("demo", "--out", str(Path(folder) / "demo"))
        yield "modules after `silodp demo`", " ".join(run_python(IMPORTED, *short))


def main() -> None:
    """Print the table."""
    found = list(measure_text(ROOT / "packages/silodp/src/silodp"))
    for other in sorted(ROOT.glob("packages/silodp-*/src/*/")):
        texts = [path.read_text() for path in other.rglob("*.py")]
        found.append((f"code lines of the extension {other.name}", f"{sum(map(count_code, texts)):,}"))
    found.append(("words of README.md", f"{len((ROOT / 'README.md').read_text().split()):,}"))
    found += measure_runs()
    width = max(len(name) for name, _ in found)
    for name, value in found:
        print(f"{name:{width}}  {value}")


if __name__ == "__main__":
    show_help(__doc__)
    main()
