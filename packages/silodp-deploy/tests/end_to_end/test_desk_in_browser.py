"""The desk in a browser: by the keyboard alone, at 320 pixels, in both color schemes, as a screen reader has it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from silodp_deploy.desk._pages import PAGES
from silodp_deploy.desk._server import DeskServer
from support.chromium import CHROMIUM, Tab, start_chromium
from support.desk import Asked, ask_silo, is_accepted, serving_desk, write_answers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]
VIEWS = [name for name, _ in PAGES] + ["table?file=table.csv"]
_CONTRAST = """
(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = color => parse(color).slice(0, 3).map(c => c / 255)
    .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = one => {
    const color = getComputedStyle(one).backgroundColor;
    return parse(color)[3] !== 0 ? color : one.parentElement ? behind(one.parentElement) : 'rgb(255, 255, 255)';
  };
  return [...document.querySelectorAll('body *')]
    .filter(one => [...one.childNodes].some(n => n.nodeType == 3 && n.data.trim()) && one.checkVisibility())
    .map(one => [light(getComputedStyle(one).color), light(behind(one)), one.outerHTML.slice(0, 80)])
    .map(([a, b, told]) => [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), told])
    .sort((a, b) => a[0] - b[0])[0];
})()
"""
"""The least contrast of a text on its background, by the formula of WCAG 2.2, and where."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    asked = ask_silo(tmp_path_factory.mktemp("asked"))
    write_answers(asked.home, 120)
    return asked


@pytest.fixture(scope="module")
def server(asked: Asked) -> Iterator[DeskServer]:
    with serving_desk(asked.home, asked.public) as server:
        yield server


@pytest.fixture(scope="module")
def tab(server: DeskServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with start_chromium(tmp_path_factory.mktemp("chromium")) as tab:
        tab.open(server.link)
        yield tab


def find_address(server: DeskServer, name: str) -> str:
    return f"{server.link.partition('open?')[0]}{name}"


@pytest.mark.parametrize("name", VIEWS)
def test_a_page_fits_into_320_pixels_and_any_other_width(name: str, tab: Tab, server: DeskServer) -> None:
    tab.show(1280)
    tab.open(find_address(server, name))
    for width in (320, 390, 640, 850, 1280):
        tab.show(width)
        wide = "[...document.querySelectorAll('body *')].filter(x => x.getBoundingClientRect().right > innerWidth + 1)"
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, width
        assert tab.evaluate(f"{wide}.map(x => x.outerHTML.slice(0, 80))") == [], width


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", VIEWS)
def test_text_has_a_contrast_of_at_least_4_5(name: str, scheme: str, tab: Tab, server: DeskServer) -> None:
    tab.show(1280, scheme)
    tab.open(find_address(server, name))
    least, where = tab.evaluate(_CONTRAST)
    assert least >= 4.5, where


@pytest.mark.parametrize("width", [320, 1280])
@pytest.mark.parametrize("name", VIEWS)
def test_a_screen_reader_finds_landmarks_headings_labels_and_tables(
    name: str, width: int, tab: Tab, server: DeskServer
) -> None:
    tab.show(width)
    tab.open(find_address(server, name))
    assert tab.evaluate("document.documentElement.lang") == "en"
    nodes = [node for node in tab.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    named = [(node["role"]["value"], str(node.get("name", {}).get("value", "")), node) for node in nodes]
    roles = [role for role, _, _ in named]
    assert [roles.count(role) for role in ("banner", "main", "contentinfo")] == [1, 1, 1]
    assert ("navigation", "Pages of the desk") in [(role, name) for role, name, _ in named]
    levels = [_find_property(node, "level") for role, _, node in named if role == "heading"]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for role in ("textbox", "combobox", "radio", "checkbox", "button", "link", "table", "progressbar"):
        assert all(name for one, name, _ in named if one == role), role
    # Stated, since some browsers take the roles from tables whose cells are laid out as blocks.
    unnamed = (
        "th:not([role][scope]), td:not([role]), tr:not([role]), table:not([role]), table:not(:has(caption))"
    )
    assert tab.evaluate(f"document.querySelectorAll('{unnamed}').length") == 0
    assert roles.count("rowheader") >= roles.count("table")
    assert (roles.count("columnheader") > 0) == (roles.count("table") > 0)


def _find_property(node: dict[str, Any], name: str) -> Any:
    return next(one["value"]["value"] for one in node["properties"] if one["name"] == name)


def test_a_run_is_accepted_by_the_keyboard_alone(tab: Tab, server: DeskServer, asked: Asked) -> None:
    tab.show(1280)
    tab.open(find_address(server, ""))
    tab.press("Tab")
    assert tab.find_focus() == "Skip to the content"
    assert tab.evaluate("document.activeElement.getBoundingClientRect().left") >= 0  # it is seen
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.press("Enter")
    assert tab.find_focus() == "main"
    tab.tab_to("Your decision")
    tab.press_enter_and_wait()
    tab.tab_to("code")
    tab.type("0000")
    tab.tab_to("read")
    tab.press(" ")
    tab.tab_to("choice")
    tab.press(" ")
    tab.tab_to("Confirm the decision")
    tab.press_enter_and_wait()
    # The wrong field has the focus, and what is wrong is read with it.
    assert tab.find_focus() == "code"
    assert tab.evaluate("document.title").startswith("Error: ")
    described = tab.evaluate("document.activeElement.getAttribute('aria-describedby')")
    assert all(tab.evaluate(f"!!document.getElementById('{one}')") for one in described.split())
    assert not is_accepted(asked)
    tab.evaluate("document.activeElement.select()")
    tab.type(asked.code)
    tab.tab_to("Confirm the decision")
    tab.press_enter_and_wait()
    assert "Accepted" in tab.evaluate("document.body.innerText")
    assert asked.code in tab.evaluate("document.body.innerText")
    assert is_accepted(asked)
