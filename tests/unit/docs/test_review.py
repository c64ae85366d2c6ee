"""docs/review.md is true: its files and tests exist, and nobody else draws noise, makes a share or charges a ledger."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "review.md").read_text()
CORE = ROOT / "packages" / "silodp" / "src" / "silodp"
SAMPLERS = {"draw_gaussian", "draw_skellam", "draw_poisson_sample"}
SHARES = {"Share", "IntegerShare"}
CHARGES = {"charge"}
MAX_FILES, MAX_LINES = 26, 5000


def list_rows(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without its head."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]


TRUSTED = {row[0].strip("`"): row for row in list_rows("The files")}
EXTENSIONS = [row[0].strip("`") for row in list_rows("Extensions that draw")]
TESTS = sorted(set(re.findall(r"`(test_\w+\.py::test_\w+)`", PAGE)))


def count_code(text: str) -> int:
    """Count lines without docstrings, comments and blank lines."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            prose |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and at not in prose for at, line in lines
    )


def find_uses(text: str) -> set[str]:
    """Return what a file does that only a trusted one may: the samplers, shares and charges that it names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ImportFrom(names=names):
                found |= {name.name for name in names if name.name in SAMPLERS}
            case ast.Attribute(attr=name) if name in SAMPLERS:
                found.add(name)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in SHARES:
                found.add(name)
            case ast.Call(func=ast.Attribute(attr=name)) if name in CHARGES:
                found.add(name)
    return found


def find_path(file: str) -> Path:
    """Return a file of the page: of the core, or of the extension that its path begins with."""
    package = file.partition("/")[0]
    is_extension = package.startswith("silodp_")
    return ROOT / "packages" / package.replace("_", "-") / "src" / file if is_extension else CORE / file


@cache
def list_tests(name: str) -> list[set[str]]:
    """Return the functions of each file of tests with this name."""
    paths = [*ROOT.glob(f"packages/*/tests/**/{name}"), *ROOT.glob(f"tests/**/{name}")]
    return [
        {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        for path in paths
    ]


@pytest.mark.parametrize(
    ("line", "used"),
    [
        ("from silodp.mechanisms.noise import draw_gaussian as draw", {"draw_gaussian"}),
        ("noise.draw_skellam(3, 1.0, stream)", {"draw_skellam"}),
        ("share = clipping.Share(total, 0.0)", {"Share"}),
        ("self.ledger.charge(0, 0, events)", {"charge"}),
        ("from silodp.mechanisms.clipping import Share\ndef charge(self): ...", set()),
    ],
)
def test_a_use_is_found(line: str, used: set[str]) -> None:
    assert find_uses(line) == used


def test_the_set_can_be_read_in_a_day() -> None:
    assert len(TRUSTED) <= MAX_FILES
    lines = {file: count_code(find_path(file).read_text()) for file in TRUSTED}
    assert sum(lines.values()) <= MAX_LINES
    shown = {file: int(row[1]) for file, row in TRUSTED.items()}
    # Not to the line, so that not every change of a file is a change of the page.
    wrong = {
        file: lines[file] for file in lines if abs(lines[file] - shown[file]) > max(5, lines[file] // 10)
    }
    assert wrong == {}


def test_the_list_of_the_budgets_is_that_of_the_page() -> None:
    budgets = tomllib.loads((ROOT / "budgets.toml").read_text())
    assert sorted(budgets.get("trusted", {"files": TRUSTED})["files"]) == sorted(TRUSTED)


def test_every_file_has_a_claim_and_a_test() -> None:
    for file, row in TRUSTED.items():
        assert len(row) == 4, file
        assert row[2].endswith("."), file
        assert re.search(r"test_\w+\.py::test_\w+", row[3]), file


@pytest.mark.parametrize("place", TESTS)
def test_every_test_that_the_page_names_exists(place: str) -> None:
    name, _, function = place.partition("::")
    (functions,) = list_tests(name)
    assert function in functions


def test_only_trusted_files_draw_make_shares_or_charge() -> None:
    uses = {
        path.relative_to(CORE if path.is_relative_to(CORE) else package.parent).as_posix(): find_uses(
            path.read_text()
        )
        for package in ROOT.glob("packages/*/src/silodp*/")
        for path in package.rglob("*.py")
    }
    using = {file for file, found in uses.items() if found}
    assert using - TRUSTED.keys() == {file for file in EXTENSIONS if file in uses}
    # Of extensions, none makes a share or charges a ledger.
    assert {name for file in EXTENSIONS for name in uses.get(file, ())} <= SAMPLERS
    assert uses["mechanisms/clipping.py"] == {"draw_gaussian", "Share"}
