"""The table of statistics in a configuration, with its package and without."""

from __future__ import annotations

from typing import Any

import pytest

from silodp.config.resolve import resolve
from silodp.config.schema import parse_config
from support.refusals import refused


def test_without_its_package_a_table_of_statistics_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {
        "name": "made",
        "rounds": 2,
        "data": {"source": "embedded", "users": 20, "silos": 5},
        "method": {"name": "uldp-avg", "noise_multiplier": 5.0},
    }
    values["statistics"] = {"epsilon": 1.0}
    assert resolve(parse_config(values)).config.tables["statistics"] == {"epsilon": 1.0}
    with refused("config.unknown_field"):
        resolve(parse_config({**values, "statistics": {"epsilom": 1.0}}))
    monkeypatch.setattr("silodp._lazy._read_entry_points", lambda group, path: {})
    with refused("extension.missing"):
        resolve(parse_config(values))
