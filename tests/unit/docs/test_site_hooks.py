"""The generated part of the documentation site; nothing here needs mkdocs."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from support.scripts import load_script

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return load_script("docs/site_hooks.py")


def test_the_reference_names_every_export_of_every_public_package(hooks: ModuleType) -> None:
    packages = hooks.public_packages()
    assert packages[0].__name__ == "silodp"
    assert "silodp.methods" in {package.__name__ for package in packages}
    index = hooks.format_index(packages)
    for package in packages:
        page = hooks.format_package(package)
        for name in package.__all__:
            assert re.search(rf"^(::: {package.__name__}\.{name}|## {name})$", page, re.MULTILINE), name
            assert f"`{name}`" in index


def test_links_of_root_pages_lead_into_the_site(hooks: ModuleType) -> None:
    for file in hooks.PROJECT_PAGES.values():
        targets = re.findall(r"\]\(([^)#]+)", hooks.format_project_page(file))
        for target in targets:
            assert (
                target.startswith("http")
                or (ROOT / "docs" / "project" / target).resolve().exists()
                or (target.removesuffix(".md") in hooks.PROJECT_PAGES)
            ), (file, target)


def test_a_page_of_a_package_that_was_deleted_is_still_a_page(hooks: ModuleType) -> None:
    assert hooks.format_project_page("packages/deleted/RESULTS.md").startswith("# RESULTS\n")


def test_no_group_of_the_navigation_has_more_than_eight_entries(hooks: ModuleType) -> None:
    config = SimpleNamespace(nav=yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    groups = [list(config.nav)]
    for group in groups:
        sections = [entry for entry in group if isinstance(entry, dict)]
        groups += [value for entry in sections for value in entry.values() if isinstance(value, list)]
        assert 1 <= len(group) <= 8, group
    hooks.on_config(config)
    assert {"silodp.methods": "reference/silodp.methods.md"} in groups[-1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.html", '<script src="https://cdn.example/x.js"></script>'),
        ("page.html", '<link rel="stylesheet" href="//fonts.example/css">'),
        ("page.html", '<img alt="" src="http://example/x.png">'),
        ("page.html", '<pre class="mermaid">'),
        ("style.css", "@import url(https://example/x.css);"),
    ],
)
def test_a_page_that_loads_from_the_network_is_refused(
    hooks: ModuleType, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RuntimeError, match="loads from the network"):
        hooks.on_post_build(config=SimpleNamespace(site_dir=str(tmp_path)))


def test_outbound_links_and_local_files_are_allowed(hooks: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '<a href="https://example.org">paper</a> <script src="../x.js"></script> '
        '<link rel="canonical" href="https://example.org/page.html">'
    )
    hooks.on_post_build(config=SimpleNamespace(site_dir=str(tmp_path)))
