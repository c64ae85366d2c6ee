"""Settings chosen for `lattice`, whose silos never give a person all their weight in one silo."""

from __future__ import annotations

from pathlib import Path

import pytest

from silodp.config.resolve import load_config
from support.tuned import check_tuning, configured, shrink_grid


def test_the_chosen_settings_meet_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_grid(monkeypatch)
    path = configured(tmp_path, "lattice", "[aggregation]\ncount_cap = 3")
    chosen = check_tuning(load_config(path, ["method.weighting=records"]))
    assert chosen["weighting"] != "primary_silo"
