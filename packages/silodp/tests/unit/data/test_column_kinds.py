"""A kind of column that is one class of an installed distribution: docs/extending.md."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from silodp.cli.run import run_config
from silodp.config.resolve import load_config, read_table_schema
from silodp.data.federation import Federation
from silodp.data.tables.kinds.column import Column
from silodp.data.tables.kinds.numeric import NumericColumn
from silodp.data.tables.reader import read_inputs
from silodp.data.tables.schema import Schema
from silodp.plugins import refuse_plugins
from silodp.report.page import write_report
from silodp.settings import Positive
from support.places import ROOT
from support.refusals import refused

BLOCKS = dict(
    re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', (ROOT / "docs/extending.md").read_text(), re.M | re.S)
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page; its distribution is installed, but for what is not about columns."""
    for name in ("ordinal.py", "stages.toml", "north.csv", "south.csv"):
        (tmp_path / name).write_text(BLOCKS[name])
    points = tomllib.loads(BLOCKS["pyproject.toml"])["project"]["entry-points"]["silodp.column_kinds"]
    about = tmp_path / "approvals-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: approvals\nVersion: 1.0\n")
    lines = "".join(f"{name} = {place}\n" for name, place in points.items())
    (about / "entry_points.txt").write_text(f"[silodp.column_kinds]\n{lines}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ordinal", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(**changes: Any) -> Federation:
    given = tomllib.loads(Path("stages.toml").read_text())["data"]
    return Federation.from_tables(given["files"], Schema(**{**given["schema"], **changes}))


@pytest.mark.usefixtures("folder")
def test_a_kind_of_another_distribution_makes_features_and_its_code_is_stated() -> None:
    federation = read()
    assert federation.schema is not None
    assert federation.schema.features == ("age", "stage")
    assert federation.silos[0].x[:, 1].tolist() == [0.5, 1.0]
    assert federation.silos[1].x[:, 1].tolist() == [1.0, 0.0]
    assert [one.id for one in federation.assumptions if one.id == "column-code"] == ["column-code"]


@pytest.mark.usefixtures("folder")
def test_its_refusals_are_collected_with_those_of_other_columns() -> None:
    Path("north.csv").write_text("patient,age,stage,relapse\np1,17,II,no\np2,71,IV,yes\np3,40,IV,no\n")
    with refused("data.value") as caught:
        read()
    assert "2 faults" in str(caught.value)
    assert "'IV' in data row 2 (wrong in 1 other row, too)" in str(caught.value)


def test_a_run_states_the_code_and_its_report_runs_none_of_it(folder: Path) -> None:
    run_config(load_config(folder / "stages.toml"), folder / "run")
    stated = json.loads((folder / "run" / "guarantee.json").read_text())["guarantees"]
    assert all(any(one["id"] == "column-code" for one in each["assumptions"]) for each in stated)
    assert json.loads((folder / "run" / "model.json").read_text())["inputs"] is None
    (folder / "ordinal.py").write_text("raise RuntimeError('imported')\n")
    write_report(folder / "run")


@pytest.mark.parametrize("kind", ["ordinal.py:Ordinal", "ordinal:Ordinal", 3, None])
@pytest.mark.usefixtures("folder")
def test_a_kind_is_named_by_an_entry_point_alone(kind: Any) -> None:
    with refused("data.schema") as caught:
        read(other={"stage": {"kind": kind, "levels": ["I", "II"]}})
    assert "silodp.column_kinds" in str(caught.value)
    assert ("not taken from a file" in str(caught.value)) == isinstance(kind, str)
    with refused("argument.value") as caught:
        read(other={"stage": {"kind": "hour"}})
    assert "silodp.column_kinds" in str(caught.value)


@pytest.mark.usefixtures("folder")
def test_strangers_code_is_not_run_where_it_is_refused(folder: Path) -> None:
    described = {"other": {"stage": {"kind": "ordinal", "levels": ["I", "II"]}}}
    with refused("report.foreign_code"):
        Schema.from_inputs(described)
    with refused("report.foreign_code"):
        read_table_schema(load_config(folder / "stages.toml").config)
    with refuse_plugins(), refused("report.foreign_code"):
        read()


@pytest.mark.parametrize(
    "wrong", ["np.zeros((1, 2))", "np.full((len(cells.texts), 1), np.nan)", "np.zeros(len(cells.texts))"]
)
def test_features_of_another_shape_are_refused(wrong: str, folder: Path) -> None:
    code = re.sub(r"return cells\.map.*", f"return {wrong}", BLOCKS["ordinal.py"])
    (folder / "ordinal.py").write_text(code)
    with refused("plugin.returned"):
        read()


@dataclass(frozen=True)
class Hour(Column):
    """A plug-in whose fields have checks of their own."""

    period: Positive
    names: Sequence[str] = ()
    codes: Literal["hour"] = "hour"

    def list_features(self, name: str) -> list[str]:
        return [name]

    def encode(self, cells: Any) -> Any:
        return cells.parse_numbers()[:, None] / self.period

    def describe(self, quote: Any) -> tuple[str, str]:
        return "hours", "refused"


class Unfrozen(Hour):
    """Its field would be a constant of the class."""

    other: Positive = 3.0


@pytest.mark.parametrize(
    ("settings", "code", "field"),
    [
        ({"period": -3}, "argument.value", "period"),
        ({"period": "a"}, "argument.type", "period"),
        ({"period": 24, "names": "a"}, "argument.type", "names"),
        ({}, "data.schema", None),
    ],
)
def test_fields_of_a_plug_in_are_checked_by_their_annotations(
    settings: dict[str, Any], code: str, field: str | None
) -> None:
    with refused(code) as caught:
        Hour.read("at", settings)
    assert caught.value.field == ("data.schema.other" if field is None else f"data.schema.other.at.{field}")
    with refused("plugin.not_frozen"):
        Unfrozen.read("at", {"period": 24})


def test_a_field_codes_of_a_plug_in_says_nothing_of_the_array_of_codes() -> None:
    table = {"user": "u", "label": "l", "kind": "real"}
    coded = {"b": {"categories": ["x", "y"], "codes": True}}
    schema = Schema(**table, categorical=coded, other={"at": Hour(24)})
    assert schema.features == ("at", "b=x|y")
    assert [one.shape for one in schema.list_inputs()] == [(1,), (1,)]


def test_an_unknown_setting_and_kind_are_refused_and_near_names_suggested() -> None:
    table = {"user": "u", "label": "l", "kind": "real"}
    with refused("data.schema") as caught:
        Schema(**table, other={"a": {"kind": "numeric", "rang": [0, 1]}})
    assert "'range'" in str(caught.value)
    with refused("argument.value") as caught:
        Schema(**table, other={"a": {"kind": "numerc", "range": [0, 1]}})
    assert "'numeric'" in str(caught.value)


def test_a_kind_of_silodp_is_described_and_read_back(tmp_path: Path) -> None:
    schema = Schema(
        user="u", label="l", kind="real", categorical={"b": ["x", "y"]}, other={"a": NumericColumn((0, 2))}
    )
    assert schema.features == ("b=x", "b=y", "a")
    again = Schema.from_inputs(json.loads(json.dumps(schema.describe_inputs())))
    assert again.features == schema.features
    assert schema.describe_inputs()["other"] == {"a": {"kind": "numeric", "range": [0, 2]}}
    (tmp_path / "t.csv").write_text("a,b\n0.5,y\n2,x\n")
    x, _ = read_inputs(tmp_path / "t.csv", again)
    assert np.asarray(x).tolist() == [[0, 1, -0.5], [1, 0, 1]]
