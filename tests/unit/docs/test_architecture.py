"""docs/architecture.md agrees with the code: the places it names, and the order of its three walks."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from types import FrameType, ModuleType

import pytest

from support.commands import Silodp
from support.scripts import load_script

ROOT = Path(__file__).parents[3]
CORE = ROOT / "packages" / "silodp" / "src" / "silodp"
EXTENSIONS = {path.parent.name: path.parent for path in ROOT.glob("packages/silodp-*/src/silodp_*/py.typed")}
PAGE = ROOT / "docs" / "architecture.md"
PLACE = re.compile(r"\b((?:\w+/)*\w+\.py)(?::([\w.]*\w))?")
TABLE = """id,age,weight,sick,part
p1,30,70,0,train
p2,50,80,1,train
p3,40,60,0,train
p1,31,71,1,test
p2,51,81,0,test
"""
CONFIG = """
rounds = 1
[data]
source = "tables"
files = ["a.csv", "b.csv", "c.csv"]
[data.schema]
user = "id"
label = "sick"
kind = "classes"
classes = [0, 1]
split = "part"
numeric = {age = [0, 100], weight = [0, 200]}
[method]
name = "uldp-avg"
noise_multiplier = 5.0
[method.local]
learning_rate = 0.1
"""


@pytest.fixture(scope="module")
def commands() -> ModuleType:
    return load_script("docs/list_commands.py")


def walks() -> list[list[str]]:
    """Return the functions of each diagram in the section "Three walks"."""
    section = PAGE.read_text().partition("\n## Three walks\n")[2].partition("\n## ")[0]
    return [
        [f"{file}:{name}" for file, name in PLACE.findall(block)]
        for block in re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    ]


# --- commands ---


def test_the_page_of_commands_is_that_of_the_source(commands: ModuleType) -> None:
    text = commands.PAGE.read_text()
    assert commands.fill_page(text) == text, "older than the source: run make pages"


def test_the_page_of_commands_has_every_command_with_every_option(
    commands: ModuleType, silodp: Silodp
) -> None:
    """Compared with what `--help` prints, which another part of click writes."""
    shown = commands.format_commands()
    before = shown.partition("### `silodp ")[0]
    sections = dict(re.findall(r"^### `silodp (.+?)`.*?\n(.*?)(?=^### |\Z)", shown, re.MULTILINE | re.DOTALL))
    assert {"run", "plan", "data list", "deploy init", "table averaged-models"} <= sections.keys()
    for command, section in sections.items():
        printed = silodp(*command.split(), "--help").out
        options = set(re.findall(r"^  (--[\w-]+)", printed, re.MULTILINE)) - {"--help"}
        listed = set(re.findall(r"^- `(--[\w-]+)", section, re.MULTILINE))
        shared = set(re.findall(r"`(--[\w-]+)`", section.partition("[Shared]")[2]))
        assert options == listed | shared, command
        assert shared <= set(re.findall(r"^- `(--[\w-]+)", before, re.MULTILINE)), command
        assert f"(#silodp-{command.replace(' ', '-')})" in before
    assert "Runs of each method. Default: 5." in sections["compare"]
    assert "computing and sending count. Default: 300.0, at least 1.0." in sections["server"]


# --- places ---


def list_functions(path: Path) -> set[str]:
    """Return the qualified names of all functions and classes of a file, and of those inside them."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef | ast.ClassDef):
                found.add(prefix + inner.name)
                visit(inner, f"{prefix}{inner.name}." if isinstance(inner, ast.ClassDef) else prefix)

    visit(ast.parse(path.read_text()), "")
    return found


def find_file(place: str) -> Path:
    """Return where a file of the page lies: those of extensions begin with the import name of their package."""
    package, _, rest = place.partition("/")
    if package.startswith("silodp_"):
        return EXTENSIONS.get(package, ROOT / package) / rest
    return CORE / place


def test_every_file_and_function_that_the_page_names_exists() -> None:
    found = PLACE.findall(PAGE.read_text())
    assert len(found) > 60
    missing = [file for file, _ in found if not find_file(file).is_file()]
    assert not missing, f"files that the page names do not exist: {missing}"
    missing = [
        f"{file}:{name}" for file, name in found if name and name not in list_functions(find_file(file))
    ]
    assert not missing, f"functions that the page names do not exist: {missing}"


def list_rows(heading: str) -> list[list[str]]:
    """Return the rows of the table under a heading, without its head, as lists of cells."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_page_lists_every_package_and_what_its_contract_lets_it_import() -> None:
    listed = {row[0]: row[1].strip("`") for row in list_rows("Packages")}
    assert listed == {name.replace("_", "-"): name for name in ["silodp", *EXTENSIONS]}
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    assert [set(layer.split(" | ")) for layer in contract["layers"]] == [set(EXTENSIONS), {"silodp"}]


def test_the_page_lists_every_seam() -> None:
    """A seam is read by a `Registry`, or filled by an entry point of one of our packages."""
    listed = {row[0].strip("`") for row in list_rows("Seams")}
    kinds = {
        f"silodp.{kind}"
        for package in [CORE, *EXTENSIONS.values()]
        for path in package.rglob("*.py")
        for kind in re.findall(r"\bRegistry\(\s*\"(\w+)\"", path.read_text())
    }
    groups = {
        group
        for path in ROOT.glob("packages/*/pyproject.toml")
        for group in tomllib.loads(path.read_text())["project"].get("entry-points", {})
    }
    assert groups <= kinds
    assert listed == kinds


def test_the_page_lists_the_layers_of_the_contract_in_their_order() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][1]
    wanted = [name.removeprefix("silodp.") for layer in contract["layers"] for name in layer.split(" | ")]
    assert [
        name for row in list_rows("Layers of the core") for name in re.findall(r"\*\*(\w+)", row[0])
    ] == wanted


# --- walks ---


def find_gap(steps: list[str], calls: list[str]) -> str | None:
    """Return the first step that is not called after those before it; None if some stretch of calls has them all.

    A stretch begins with the first step and ends before its next call, so that a walk is that of one message or run.
    """
    starts = [place for place, call in enumerate(calls) if call == steps[0]]
    furthest = 0
    for start, end in pairwise([*starts, len(calls)]):
        stretch = iter(calls[start:end])
        reached = next((i for i, step in enumerate(steps) if step not in stretch), len(steps))
        furthest = max(furthest, reached)
    return None if furthest == len(steps) else steps[furthest]


def test_a_gap_is_found() -> None:
    assert find_gap(["a", "b", "c"], list("abxaybcd")) is None
    assert find_gap(["a", "b", "c"], list("abac")) == "c"
    assert find_gap(["a", "c", "b"], list("abc")) == "b"
    assert find_gap(["a"], []) == "a"


def test_a_run_makes_the_calls_of_the_walks_in_their_order(
    silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_text(CONFIG)
    for name in ("a", "b", "c"):
        Path(f"{name}.csv").write_text(TABLE)
    calls: list[str] = []
    root = f"{CORE}/"

    def note(frame: FrameType, _event: str, _argument: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(root):
            calls.append(f"{code.co_filename.removeprefix(root)}:{code.co_qualname}")

    before = sys.gettrace()
    sys.settrace(
        note
    )  # called for every Python function; a profiler would be called for those written in C too
    try:
        outcome = silodp("run", "config.toml", "--out", "out")
    finally:
        sys.settrace(before)
    assert outcome.status == 0, outcome.err
    assert len(walks()) == 3
    for steps in walks():
        assert len(steps) > 15
        gap = find_gap(steps, calls)
        assert gap is None, (
            f"the walk of docs/architecture.md that begins with {steps[0]} does not get to {gap}"
        )
