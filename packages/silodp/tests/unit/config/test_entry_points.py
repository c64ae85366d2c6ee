"""Parts that an installed distribution adds by an entry point, by their names in a configuration."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

from silodp._lazy import Registry, load_extension
from silodp.aggregators.registry import AGGREGATORS, AggregatorRecord
from silodp.cli.main import app
from silodp.config.resolve import ResolvedRun, resolve
from silodp.config.schema import parse_config
from silodp.errors import lookup
from silodp.methods import METHODS, Method
from silodp.plugins import find_plugin
from support.oracles import small_federation
from support.places import PLUGINS
from support.refusals import refused

ENTRY_POINTS = """
[silodp.aggregators]
trimmed-mean = trimmed:Trimmed
[silodp.methods]
by-clip = adaptive_clipping:AdaptiveClipping
not-there = no_such_module:Method
no-method = trimmed:Trimmed
"""


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with the classes of tests/plugins."""
    about = tmp_path / "others-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)


def configured(method: str, aggregator: str = "plain", **fields: Any) -> ResolvedRun:
    data = {"source": "embedded", "users": 20, "silos": 5}
    table = {"name": method, **fields}
    values = {"name": "made", "rounds": 2, "data": data, "aggregator": aggregator, "method": table}
    return resolve(parse_config(values))


@pytest.mark.usefixtures("_installed")
def test_an_installed_part_is_found_by_its_name() -> None:
    fields = {"noise_multiplier": 5.0, "clip": 0.1, "local": {"learning_rate": 0.1}}
    run = configured("uldp-avg", "trimmed-mean", **fields)
    aggregator = run.aggregator
    assert type(aggregator).__module__ == "trimmed"
    assert not AggregatorRecord.from_aggregator(aggregator).registered
    assert resolve(parse_config(run.config.model_dump(exclude_none=True))).aggregator == aggregator
    assert find_plugin("by-clip", METHODS, Method, "method.name").__module__ == "adaptive_clipping"


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("name", "code"),
    [("by-click", "argument.value"), ("not-there", "config.not_importable"), ("no-method", "config.value")],
)
def test_what_is_no_method_is_refused(name: str, code: str) -> None:
    with refused(code):
        configured(name)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("name", "also"), [("not-thre", "not-there"), ("by_clip", "by-clip"), ("zzz", "by-clip")]
)
def test_installed_parts_are_suggested_without_an_import(name: str, also: str) -> None:
    with refused("argument.value") as caught:
        find_plugin(name, METHODS, Method, "method.name")
    assert also in str(caught.value)
    # Where no plug-in may stand, none is suggested.
    with refused("argument.value") as caught:
        lookup(name, METHODS, "method.name")
    assert also not in str(caught.value)


def test_parts_are_listed_without_an_import() -> None:
    unknown: Registry[Any] = Registry("parts", {"a": "no_such_module:A", "b": "math:pi"})
    assert list(unknown) == ["a", "b"]
    assert len(unknown) == 2
    assert "a" in unknown
    assert unknown.find_reference("a") is None
    with pytest.raises(ImportError):
        unknown["a"]
    with pytest.raises(KeyError):
        unknown["c"]
    assert all(AGGREGATORS[name].name == name for name in AGGREGATORS)


def test_without_their_package_budgets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    personal = {"by": "clip", "largest_budget": 2.0}
    assert configured("uldp-avg", noise_multiplier=5.0).method.personal is None
    monkeypatch.setattr("silodp._lazy._read_entry_points", lambda group, path: {})
    assert configured("uldp-avg", noise_multiplier=5.0).method.personal is None
    with refused("extension.missing"):
        configured("uldp-avg", noise_multiplier=5.0, personal=personal)
    with refused("extension.missing"):
        small_federation().with_budgets("three-levels")
    with refused("argument.value"):
        configured("rpdp")


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, entry_points: str) -> None:
    about = folder / "extension-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: extension\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(folder)


def test_a_part_of_an_extension_package_is_an_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "silodp_budgets"
    package.mkdir()
    (package / "__init__.py").write_text("found = 5\n")
    parts: Registry[Any] = Registry("methods", {"a": "math:pi"})
    assert "other" not in parts
    _install(
        tmp_path, monkeypatch, "[silodp.methods]\nother = silodp_budgets:found\na = silodp_budgets:found\n"
    )
    monkeypatch.delitem(sys.modules, "silodp_budgets", raising=False)
    assert {"a", "other"} <= {*parts}
    assert parts["other"] == 5
    assert parts["a"] == math.pi  # a name of the core stays the core's
    assert parts.find_reference("other") is None
    sys.modules.pop("silodp_budgets", None)


def test_a_stranger_takes_no_name_of_an_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    _install(first, monkeypatch, "[silodp.methods]\npart-a = silodp_budgets:found\n")
    about = second / "stranger-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[silodp.methods]\npart-a = zzz:A\npart_a = zzz:A\nnew = zzz:A\n")
    monkeypatch.syspath_prepend(second)
    parts: Registry[Any] = Registry("methods", {})
    assert parts.places["part-a"] == "silodp_budgets:found"
    assert parts.find_reference("part-a") is None
    assert parts.find_reference("part_a") is None
    assert parts.find_reference("new") == "zzz:A"


@pytest.mark.parametrize(
    "content", ["def broken(:", "raise RuntimeError('none')", "raise SystemExit(3)", "other = 1"]
)
def test_a_command_that_cannot_be_imported_leaves_the_others(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _install(tmp_path, monkeypatch, "[silodp.commands]\napprove = broken_command:approve\n")
    (tmp_path / "broken_command.py").write_text(content)
    monkeypatch.delitem(sys.modules, "broken_command", raising=False)
    group = typer.main.get_command(app)
    group.main(["--help"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert any("approve" in line and "cannot be imported" in line for line in lines)
    assert any("predict" in line for line in lines)
    for arguments in ([], ["--help"], ["runs/a", "--by", "x"]):
        with refused("config.not_importable") as caught:
            group.main(["approve", *arguments], standalone_mode=False)
        assert "broken_command:approve" in str(caught.value)


def test_an_extension_that_is_not_installed_is_named() -> None:
    with refused("extension.missing"):
        load_extension("nothing", "module:name")


def test_an_unknown_name_may_be_of_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `method = "rpdp"` in the core alone would be no more than a misspelled name."""
    of_extensions: Registry[Any] = Registry("parts", {"a": "math:pi"})
    monkeypatch.setattr("silodp.text.find_spec", lambda name: None if name == "silodp_budgets" else object())
    with refused("argument.value") as caught:
        lookup("c", of_extensions, "part")
    assert "silodp-budgets" in str(caught.value)
    assert "silodp-audit" not in str(caught.value)
    with pytest.raises(click.UsageError) as usage:
        typer.main.get_command(app).main(["no-such-command"], standalone_mode=False)
    assert "silodp-budgets" in str(usage.value)
    with refused("extension.missing"):
        of_extensions.load_required("c", "budgets")
    assert of_extensions.load_required("a", "budgets") == math.pi
