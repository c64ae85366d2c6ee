"""The tables of docs/guides/model.md list the models, losses and metrics of silodp, and no others."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from silodp.training.losses import LOSSES
from silodp.training.metrics import METRICS
from silodp.training.models import MODELS

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "model.md").read_text()


def read_rows(head: str) -> list[list[str]]:
    """The cells of the table whose head begins so."""
    table = PAGE.partition(f"| {head} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


@pytest.mark.parametrize(("head", "columns", "registry"), [
    ("`model`", slice(1), MODELS), ("`loss`", slice(1), LOSSES), ("label", slice(1, 3), METRICS)
])  # fmt: skip
def test_every_name_is_in_the_table(head: str, columns: slice, registry: Mapping[str, Any]) -> None:
    cells = " ".join(cell for row in read_rows(head) for cell in row[columns])
    assert set(re.findall(r"`(\w+)`", cells)) == set(registry)


def test_the_options_of_models_are_their_further_arguments() -> None:
    for name, _, options in read_rows("`model`"):
        arguments = inspect.signature(MODELS[name.strip("`")]).parameters.keys()
        of_data = {"features", "record_shape", "classes", "categories", "outputs"}
        assert set(re.findall(r"`(\w+)`", options)) == arguments - of_data
