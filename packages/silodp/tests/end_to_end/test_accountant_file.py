"""A run that a config accounts by a class in a user's file: trained, resumed, and reported with ε as not checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.commands import CONFIG, Silodp, assert_sentence

FILE = """
from silodp.accounting.rdp import RdpAccountant


class FewOrders(RdpAccountant):
    def __init__(self):
        super().__init__("few-orders", (2.0, 4.0, 8.0, 16.0))
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "few.py").write_text(FILE)
    path = tmp_path / "config.toml"
    path.write_text(f'accountant = "{tmp_path / "few.py"}:FewOrders"\n{CONFIG}')
    return path


def test_train_resume_and_report(config: Path, silodp: Silodp) -> None:
    out = config.parent / "run"
    done = silodp("run", config, "--out", out, "--set", "rounds=1", "--json")
    assert done.status == 0, done
    assert silodp("run", config, "--out", out, "--resume", "--json").status == 0
    (released,) = [
        said
        for said in json.loads((out / "guarantee.json").read_text())["guarantees"]
        if said["adversary"] == "released"
    ]
    assert released["accountant"] == "few-orders"
    assert released["rounds"] == 2
    told = silodp("report", out)
    assert told.status == 0, told
    page = (out / "report.html").read_text()
    assert "every ε (the accountant 'few-orders' is not part of silodp)" in page.replace("&#39;", "'")
    # With another accountant the run is not continued.
    assert_sentence(
        silodp("run", config, "--out", out, "--resume", "--set", "rounds=3", "--set", "accountant=rdp"),
        code="checkpoint.setup",
    )
    planned = silodp("plan", config, "--json")
    assert planned.json["accountant"] == "few-orders"


def test_a_guarantee_with_another_name_than_the_ledger_is_contradicted(config: Path, silodp: Silodp) -> None:
    out = config.parent / "run"
    assert silodp("run", config, "--out", out).status == 0
    path = out / "guarantee.json"
    path.write_text(path.read_text().replace("few-orders", "rdp"))
    assert_sentence(silodp("report", out), code="report.contradicted")
