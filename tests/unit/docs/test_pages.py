"""Whoever follows a reference finds something: from the code to the pages, from the pages to the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))
CODE = [
    path for folder in ("packages", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))
]
TESTS = "\n".join(path.read_text() for path in CODE if "tests" in path.relative_to(ROOT).parts)
REFERENCE = re.compile(
    r'docs/(\w+)\.md`?(?:, sections? ((?:\d+(?:, [A-Z]\b)?(?:, | and |$)?)+))?(?:, "([^"]+)")?'
)


def missing(text: str) -> list[str]:
    """References to pages, sections and lettered corrections that are not there."""
    found = []
    for name, sections, words in REFERENCE.findall(" ".join(text.split())):
        path = ROOT / "docs" / f"{name}.md"
        page = path.read_text() if path.exists() else ""
        wanted = [rf"^## {number}\. " for number in re.findall(r"\d+", sections)]
        wanted += [rf"^\*\*{letter}: " for letter in re.findall("[A-Z]", sections)]
        wanted += [rf"^\*\*{re.escape(words)}\*\*"] if words else []
        found += [f"{name}: {each}" for each in wanted if not re.search(each, page, re.MULTILINE)]
        found += [] if page else [name]
    return found


def test_what_is_not_there_is_missed() -> None:
    assert (
        missing(
            "(docs/privacy.md, section 4, N), docs/privacy.md, sections 3 and 4, G, or docs/decoupled.md."
        )
        == []
    )
    assert missing("docs/protocols.md,\n    sections 3 and 8") == [r"protocols: ^## 8\. "]
    assert missing("docs/protocols.md, section 99.") == [r"protocols: ^## 99\. "]
    assert missing("docs/privacy.md, section 4, Z)") == [r"privacy: ^\*\*Z: "]
    assert missing('docs/decoupled.md, "The proof"') == [r"decoupled: ^\*\*The\ proof\*\*"]
    assert missing("docs/specification.md") == ["specification"]


@pytest.mark.parametrize("folder", ["packages", "tests", "benchmarks"])
def test_sections_that_the_code_refers_to_exist(folder: str) -> None:
    texts = {p: p.read_text() for p in CODE if p.is_relative_to(ROOT / folder) and p != Path(__file__)}
    lost = {str(path.relative_to(ROOT)): missing(text) for path, text in texts.items()}
    assert {path: names for path, names in lost.items() if names} == {}
    assert sum(len(REFERENCE.findall(text)) for text in texts.values()) > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in TESTS
    for name in re.findall(r"`(?:tests/[\w/]+/)?(test_\w+\.py)`", text):
        assert any(path.name == name for path in CODE)
    for name in re.findall(r"`((?:tests|benchmarks|examples)/[\w/]+\.\w+)`", text):
        assert (ROOT / name).exists()


def test_a_command_for_a_checkout_keeps_the_editable_install_and_its_versions() -> None:
    """Without `-e` it would be replaced by a copy, which runs old code after the next git pull."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("packages/*/src/**/*.py")]
    commands = [
        (page.name, command)
        for page in pages
        for command in re.findall(
            r"(?:\S+ ){0,5}`?'packages/silodp[\w-]*\[\w", " ".join(page.read_text().split())
        )
    ]
    assert len(commands) > 2
    kept = re.compile(r".*-c constraints.txt (-e packages/silodp )?-e '.*")
    assert [found for found in commands if not kept.match(found[1])] == []
