"""The tables of settings in docs/guides name settings that are declared, and all of an evaluation's."""

from __future__ import annotations

import re
from pathlib import Path

from silodp.config.schema import RunConfig
from silodp.methods import METHODS
from silodp.settings import read_hints
from silodp.training.sgd import LocalTraining
from silodp_analytics.evaluation.series import Evaluation
from support.scripts import load_script

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


def read_settings(page: str, head: str = "| setting | effect | advice |") -> set[str]:
    """The names in the first cells of the table with this head."""
    table = (GUIDES / page).read_text().partition(head)[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def test_the_page_on_choosing_settings_names_fields_that_exist() -> None:
    known: set[str] = {*RunConfig.model_fields, *(f"local.{name}" for name in read_hints(LocalTraining))}
    for method in METHODS.values():
        known |= read_hints(method).keys()
    named = read_settings("settings.md")
    assert {"noise_multiplier", "user_sampling", "weighting"} <= named
    assert named <= known


def test_the_page_on_evaluation_has_every_setting() -> None:
    assert read_settings("evaluation.md") | {"across", "noise_multiplier"} == set(read_hints(Evaluation))


def test_the_table_of_national_numbers_is_that_of_the_rules() -> None:
    numbers = load_script("docs/list_numbers.py")
    text = numbers.PAGE.read_text()
    assert text.count("\n| `SE` | `personnummer` |") == 1
    assert numbers.fill_page(text) == text, "older than the source: run make pages"
