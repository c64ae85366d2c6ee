"""Sections that packages add to a report, and reports where a package is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from silodp._lazy import Registry
from silodp.config.resolve import load_config
from silodp.report.page import write_report
from silodp.report.run_record import read_run
from silodp.report.sections import ReportSection, merge_json
from support.attacked import make_attack, write_attack
from support.commands import CONFIG, Silodp, assert_sentence
from support.places import PLUGINS
from support.refusals import refused


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    from silodp.cli.run import run_config

    (tmp_path / "small.toml").write_text(CONFIG.replace("seed = 1\n", ""))
    run_config(load_config(tmp_path / "small.toml"), tmp_path / "run")
    return tmp_path / "run"


def test_a_section_of_a_stranger_stands_everywhere(
    silodp: Silodp, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "others-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[silodp.report_sections]\nremark = remark:RemarkSection\n")
    page, card = directory / "report.html", directory / "MODEL_CARD.md"
    before = page.read_text(), card.read_text()
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    assert "remark" not in silodp("report", directory, "--json").json
    assert (page.read_text(), card.read_text()) == before
    remark = directory / "remark.txt"
    remark.write_text("a <b> & c")
    assert silodp("report", directory, "--json").json["remark"] == "a <b> & c"
    assert "Remark: a <b> & c\n" in silodp("report", directory).out
    results = page.read_text().partition('<section id="utility">')[2]
    assert '<section id="remark">a &lt;b&gt; &amp; c<figure><svg' in results
    assert (
        "\n- **Remark**: a <b> & c\n"
        in card.read_text().partition("## Metrics")[2].partition("## Training")[0]
    )
    assert (directory / "plots/remark.svg").exists()
    # An alarm comes first, and the model is not for release.
    remark.write_text("wrong")
    assert silodp("report", directory).out.startswith("wrong\n")
    assert page.read_text().index("<strong>wrong</strong>") < page.read_text().index('id="guarantee"')
    assert card.read_text().index("**wrong** Ask them.") < card.read_text().index("**Not for release.**")
    remark.unlink()
    assert silodp("report", directory).status == 0
    assert (page.read_text(), card.read_text()) == before
    assert not (directory / "plots/remark.svg").exists()


@pytest.mark.parametrize("key", ["report", "error", "first"])
def test_a_section_takes_no_key_of_another(key: str) -> None:
    class First(ReportSection):
        def to_json(self) -> dict[str, int]:
            return {"first": 1}

    class Second(ReportSection):
        def to_json(self) -> dict[str, int]:
            return {key: 2}

    assert merge_json([First()], ["report", "error"]) == {"first": 1}
    with refused("plugin.returned") as caught:
        merge_json([First(), Second()], ["report", "error"])
    assert "Second.to_json" in str(caught.value)


def test_an_attack_does_not_vanish_where_its_package_is_missing(
    silodp: Silodp, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silodp.report.sections.SECTIONS", Registry("nothing", {}))
    text = write_report(directory).read_text()
    assert 'id="attacked"' not in text
    assert 'id="guarantee"' in text
    assert "attack" not in silodp("report", directory, "--json").json
    write_attack(directory, make_attack(directory))
    with refused("extension.missing"):
        read_run(directory)


@pytest.mark.parametrize("options", [("--manifest",), ("--verify", "key.pub"), ("--template", "nist")])
def test_tasks_of_a_missing_package_are_refused(
    silodp: Silodp, directory: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setattr("silodp.cli.report.TASKS", Registry("nothing", {}))
    assert_sentence(silodp("report", directory, *options, "--json"), code="extension.missing")
