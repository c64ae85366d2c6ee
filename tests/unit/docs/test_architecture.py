"""docs/architecture.md agrees with the code: its listings, the places it names, and the order of its three walks."""

from __future__ import annotations

import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType, ModuleType

import pytest

from support.commands import Silodp

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "silodp"
PAGE = ROOT / "docs" / "architecture.md"
ADDITIONS = ROOT / "docs" / "additions.md"
PLACE = re.compile(r"\b((?:\w+/)+\w+\.py)(?::([\w.]*\w))?")
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
clip = 0.1
[method.local]
learning_rate = 0.1
"""


@pytest.fixture(scope="module")
def listings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("listings", ROOT / "docs" / "listings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own_text() -> str:
    """Return the page without its generated listings."""
    return re.sub(r"<!-- listing: .*?<!-- end -->", "", PAGE.read_text(), flags=re.DOTALL)


def walks() -> list[list[str]]:
    """Return the functions of each diagram in the section "Three walks"."""
    section = own_text().partition("\n## Three walks\n")[2].partition("\n## ")[0]
    return [
        [f"{file}:{name}" for file, name in PLACE.findall(block)]
        for block in re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    ]


# --- listings ---


def test_the_listings_are_those_of_the_source(listings: ModuleType) -> None:
    for page in listings.PAGES:
        text = page.read_text()
        assert text.count("<!-- listing: ") == text.count("<!-- end -->") > 0
        assert listings.fill_listings(text) == text, f"{page.name} is older than the source: run make pages"


def test_every_package_has_a_row(listings: ModuleType) -> None:
    order, _ = listings.read_import_rules()
    packages = {f"silodp.{path.parent.name}" for path in SOURCE.glob("*/__init__.py")}
    modules = {f"silodp.{name}" for name in ("bundle", "tracking", "parsing", "settings", "errors", "text")}
    assert packages == set(order) - modules


def test_the_import_rules_are_read_with_their_exceptions(listings: ModuleType) -> None:
    order, allowed = listings.read_import_rules()
    assert allowed["silodp.data"] == ["silodp.parsing", "silodp.settings", "silodp.errors", "silodp.text"]
    assert "silodp.methods" not in allowed["silodp.wire"]
    assert "silodp.wire" not in allowed["silodp.methods"]
    assert allowed["silodp.cli"] == order[1:]


def test_the_page_of_commands_has_every_command_with_every_option(
    listings: ModuleType, silodp: Silodp
) -> None:
    """Compared with what `--help` prints, which another part of click writes."""
    shown = listings.format_commands()
    sections = dict(re.findall(r"^### `silodp (.+?)`\n(.*?)(?=^### |\Z)", shown, re.MULTILINE | re.DOTALL))
    assert {"run", "plan", "data list", "deploy init", "table averaged-models"} <= sections.keys()
    for command, section in sections.items():
        printed = silodp(*command.split(), "--help").out
        options = set(re.findall(r"^  (--[\w-]+)", printed, re.MULTILINE)) - {"--help"}
        assert options == set(re.findall(r"^\| <code>(--[\w-]+)", section, re.MULTILINE)), command
        assert f"(#silodp-{command.replace(' ', '-')})" in shown
    assert "Runs of each method. Default: 5." in sections["compare"]
    assert "computing and sending count. Default: 300.0, at least 1.0." in sections["server"]


def test_a_listing_of_nothing_is_refused(listings: ModuleType) -> None:
    with pytest.raises(ValueError, match="not known"):
        listings.format_listing("poems")


# --- places ---


def test_every_file_and_function_that_the_pages_name_exists(listings: ModuleType) -> None:
    text = own_text() + ADDITIONS.read_text()
    found = [place for place in PLACE.findall(text) if not place[0].startswith(("tests/", "docs/"))]
    assert len(found) > 80
    missing = [file for file, _ in found if not (SOURCE / file).is_file()]
    assert not missing, f"files that the pages name are not in src/silodp: {missing}"
    missing = [
        f"{file}:{name}"
        for file, name in found
        if name and name not in listings.list_functions(SOURCE / file)
    ]
    assert not missing, f"functions that the pages name do not exist: {missing}"


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
    root = f"{SOURCE}/"

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
