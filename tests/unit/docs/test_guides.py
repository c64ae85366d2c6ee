"""The quickstart and the guides are run from top to bottom, each in an empty folder, as a reader would do.

The rules for a page:
    A block with a title (```toml title="config.toml") is a file: it is written before anything after it is run.
    ```python without a title is a program, ```sh holds commands (`silodp ...` or `python FILE`), one per line, and
    every page has one of these.
    ```text shows lines of what the block before it printed; "..." stands for what differs from run to run.
    A page that links to "tables.md#the-tables" begins with the tables and the config.toml of that page.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import importlib.util
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from support.places import SOURCES

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "docs" / "quickstart.md",
    ROOT / "docs" / "extending.md",
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
TABLES = ROOT / "docs" / "guides" / "tables.md"
# What a page needs besides silodp and the tools of its tests.
PACKAGES = {"omop": ("duckdb",), "pretrained": ("peft", "transformers"), "statistics-file": ("pyreadstat",)}
ALL_PAGES = sorted((ROOT / "docs").rglob("*.md"))
_BLOCK = re.compile(r"^( *)```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    title: str | None
    text: str


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, without the indentation of a list or tab around them."""
    return [
        Block(language, title or None, re.sub(f"^{indent}", "", text, flags=re.MULTILINE))
        for indent, language, title, text in _BLOCK.findall(page.read_text())
    ]


def runnable_blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page after those of the page of tables that it begins with."""
    begins = blocks_of(TABLES)[:3] if "(tables.md#the-tables)" in page.read_text() else []
    return begins + blocks_of(page)


def find_missing(page: str) -> list[str]:
    """Return the packages that a page needs and that are not installed."""
    return [name for name in PACKAGES.get(page, ()) if importlib.util.find_spec(name) is None]


def commands_of(block: Block) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in block.text.replace("\\\n", " ").splitlines() if line]


def silodp(arguments: list[str]) -> tuple[int, str]:
    """Run the program that pyproject.toml names; return its exit status and everything it printed."""
    module, _, function = tomllib.loads((ROOT / "packages/silodp/pyproject.toml").read_text())["project"][
        "scripts"
    ]["silodp"].partition(":")
    printed = io.StringIO()
    status = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            getattr(importlib.import_module(module), function)(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, printed.getvalue()


def python(arguments: list[str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def assert_shows(shown: str, printed: str) -> None:
    """Every line of `shown` must be a line of `printed`, in this order."""
    lines = iter(line.strip() for line in printed.splitlines())
    for line in filter(None, (line.strip() for line in shown.splitlines())):
        pattern = "*".join(re.sub(r"([*?\[])", r"[\1]", part) for part in line.split("..."))
        assert any(fnmatch.fnmatchcase(found, pattern) for found in lines), f"{line!r} is not in:\n{printed}"


def run_blocks(blocks: Sequence[Block]) -> None:
    """Write the files and run the programs and commands of a page, in the current folder."""
    printed = ""
    for block in blocks:
        if block.title is not None:
            assert block.language in ("python", "toml", "csv", "json", "yaml")
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            status, printed = python(["-c", block.text])
            assert status == 0, printed
        elif block.language == "sh":
            printed = ""
            for program, *arguments in commands_of(block):
                status, text = {"silodp": silodp, "python": python}[program](arguments)
                assert status == 0, (program, *arguments, text)
                printed += text
        elif block.language == "text":
            assert_shows(block.text, printed)
        else:
            pytest.fail(f"a block of type {block.language!r} is not checked by anything")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_everything_on_a_page_runs_and_prints_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := find_missing(page.stem):
        pytest.skip(f"{', '.join(missing)} not installed: make test-{page.stem}")
    monkeypatch.chdir(tmp_path)
    run_blocks(runnable_blocks_of(page))


@pytest.mark.slow
def test_the_trial_of_a_deployment_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Server and three silos as processes of this machine."""
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "trial.md"
    _, _, rest = (ROOT / "docs" / "deployment.md").read_text().partition("\n## Try it on one machine\n")
    page.write_text(rest.partition("\n## ")[0])
    assert {block.language for block in blocks_of(page)} == {"toml", "sh"}
    run_blocks(blocks_of(page))
    assert (tmp_path / "consortium" / "server" / "run" / "report.html").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_complete_and_its_options_exist(page: Path) -> None:
    """A quick check of the same pages: Python and TOML parse, and every option of a command exists."""
    blocks = blocks_of(page)
    assert any(block.language in ("sh", "python") for block in blocks)
    for block in blocks:
        if block.language == "python":
            compile(block.text, str(page), "exec")
        if block.language == "toml":
            tomllib.loads(block.text)
        if block.language == "sh":
            for program, *arguments in commands_of(block):
                assert program in ("silodp", "python")
                if program == "silodp":
                    options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
                    words = (
                        arguments[:2]
                        if arguments[0] in ("cohort", "data", "deploy", "identity", "omop", "table")
                        else arguments[:1]
                    )
                    _, help_text = silodp([*words, "--help"])
                    missing = {option for option in options if not re.search(rf"{option}\b", help_text)}
                    assert not missing, arguments


def test_every_plugin_of_the_page_can_be_named_in_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick check of docs/extending.md: each command that runs there is planned here."""
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(ROOT / "docs" / "extending.md")
    for block in blocks:
        if block.title is not None:
            Path(block.title).write_text(block.text)
    lines = [command for block in blocks if block.language == "sh" for command in commands_of(block)]
    runs = [arguments for program, *arguments in lines if program == "silodp"]
    assert len(runs) == 11
    for arguments in runs:
        status, printed = silodp(["plan", *arguments[1 : arguments.index("--out")]])
        assert status == 0, printed


def test_tables_of_members_on_the_page_of_plugins_are_those_of_their_classes() -> None:
    """A row that begins with a link to a class names members of it; all of them, with arguments, where it is a role."""
    page = (ROOT / "docs" / "extending.md").read_text()
    row = r"^\| \[`\w+`\]\(reference/(silodp\.\w+)\.md#\1\.(\w+)\) \| (.*?) \|"
    rows = re.findall(row, page, re.MULTILINE)
    roles = {"Sampling", "UserWeights", "PublicState", "ServerStep"}
    assert {name for _, name, _ in rows} == roles | {
        "Bounds",
        "FederationSize",
        "LocalContext",
        "UnitBudgets",
        "View",
    }
    for module, name, text in rows:
        cls = getattr(importlib.import_module(module), name)
        members = {member: getattr(cls, member, None) for member in dir(cls) if not member.startswith("_")}
        members |= dict.fromkeys(getattr(cls, "__dataclass_fields__", ()))
        shown = set(re.findall(r"`(\w+(?:\([\w, ]*\))?)`", text)) - {
            "budgets" if name == "UnitBudgets" else ""
        }
        wanted = {
            f"{member}({', '.join(list(inspect.signature(value).parameters)[1:])})"
            if callable(value)
            else member
            for member, value in members.items()
        }
        assert shown == wanted if name in roles else shown <= wanted, name
        # The arguments of `Bounds` are listed in order, as a method gives them by their places.
        if name == "Bounds":
            order = re.findall(r"`(\w+)`(?:: | = )", text)
            assert order == list(cls.__dataclass_fields__)


def test_pages_that_use_the_made_up_tables_begin_with_them() -> None:
    using = [page for page in PAGES if len(runnable_blocks_of(page)) > len(blocks_of(page))]
    assert len(using) >= 3
    for page in using:
        program, make, config = runnable_blocks_of(page)[:3]
        assert (program.title, config.title) == ("make_tables.py", "config.toml")
        assert commands_of(make) == [["python", "make_tables.py"]]


def test_output_that_is_not_printed_is_noticed() -> None:
    assert_shows("ε = 3 ...\n[end]", "start\nε = 3 or so\n[end]\n")
    with pytest.raises(AssertionError):
        assert_shows("second\nfirst", "first\nsecond")


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_to_files(page: Path) -> None:
    """A check without mkdocs; `make docs` checks anchors as well, and pages that docs/site_hooks.py generates."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")) and not re.match(
            r"(\.\./)?(reference|project)/", target
        ):
            assert (page.parent / target).exists(), target
