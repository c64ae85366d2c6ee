"""docs/review.md is true: its files and tests exist, and nobody else draws noise, makes a share or charges a ledger.

Names are searched for, so that an accident is found; code that hides what it calls is not.
"""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from support.benchmark_scripts import load_benchmark

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "review.md").read_text()
CORE = ROOT / "packages" / "silodp" / "src" / "silodp"
SAMPLERS = {
    "draw_gaussian",
    "draw_skellam",
    "draw_poisson_sample",
    "scale_noise",
    "draw_centered_binomial",
}
SHARES = {"Share", "IntegerShare"}
CLIPPED = {"clip_rows", "ClippedRows", "ClippedRowStream", "LocallyNoisedUpdate"}
LOGS = {"AppendOnlyLog"}
CALLED = SHARES | CLIPPED | LOGS
CHARGES = {"charge"}
MAX_FILES, MAX_LINES = 26, 5000


def list_rows(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without its head."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]


def list_files(heading: str) -> list[str]:
    """Return the files of the table under a heading, of which a row may name several."""
    return [file for row in list_rows(heading) for file in row[0].strip("`").split("`, `")]


TRUSTED = {row[0].strip("`"): row for row in list_rows("The files")}
EXTENSIONS = list_files("Extensions that draw or clip")
DECIDING = list_files("What else decides a printed epsilon")
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
    """Return what a file does that only a trusted one may: the samplers, shares, clips, logs and charges it names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ImportFrom(names=names):
                # Under a name of its own, what is called cannot be told from anything else.
                found |= {n.name for n in names if n.name in SAMPLERS or (n.asname and n.name in CALLED)}
            case ast.Attribute(attr=name) | ast.FunctionDef(name=name) if name in SAMPLERS:
                found.add(name)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in CALLED:
                found.add(name)
            case ast.Call(func=ast.Attribute(attr=name)) if name in CHARGES:
                found.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                found |= {name} & (SAMPLERS | CALLED | CHARGES)
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
        ("from silodp.mechanisms.clipping import Share as S", {"Share"}),
        ('getattr(noise, "draw_gaussian")(3, 1.0, stream)', {"draw_gaussian"}),
        ("log = AppendOnlyLog(path, header, take)", {"AppendOnlyLog"}),
        ("return clipping.LocallyNoisedUpdate(value)", {"LocallyNoisedUpdate"}),
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
        assert len(row) == 5, file
        assert row[2].endswith("."), file
        assert "](" in row[3] or row[3] == "–", file
        assert re.search(r"test_\w+\.py::test_\w+", row[4]), file


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
    using = {file for file, found in uses.items() if found} - TRUSTED.keys()
    assert using >= {file for file in EXTENSIONS if file in uses}
    assert {file for file in using if file.startswith("silodp_")} <= set(EXTENSIONS)
    # Of other files, none draws, makes a share or charges a ledger, and of extensions none keeps a log.
    assert {file: uses[file] for file in using - set(EXTENSIONS)} == {
        "accounting/cohort.py": LOGS,
        "runtime/local_work.py": {"ClippedRowStream"},
    }
    assert {name for file in EXTENSIONS for name in uses.get(file, ())} <= SAMPLERS | CLIPPED
    assert uses["mechanisms/clipping.py"] == {"draw_gaussian", "Share", "ClippedRows"}


def test_what_else_decides_is_outside_the_set() -> None:
    assert len(DECIDING) > 10
    assert [file for file in DECIDING if file in TRUSTED or not find_path(file).exists()] == []


def test_every_claim_that_can_be_broken_has_its_line_and_is_on_the_page() -> None:
    claims = load_benchmark("broken_claims").CLAIMS
    section = PAGE.partition("\n## Break a claim\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "`" in line]
    assert sorted(re.findall(r"`([a-z-]+)`", "".join(rows))) == sorted(claims)
    for change in claims.values():
        assert (ROOT / change.file).read_text().count(change.line) == 1, change
        assert change.test in TESTS
