"""The behavior that must not change: recompute everything in the golden files and compare.

Numbers of training and digests are compared bit by bit only where the golden files were made on the same kind of
machine with the same packages (see `platform_here`); elsewhere numbers have a tolerance and digests of them are
skipped. After an intended change: python tests/golden/freeze.py --write, and look at the difference in git.
"""

from __future__ import annotations

import os

import cases
import freeze
import pytest

ENTRIES = [
    pytest.param(part, name, id=f"{part}-{name}", marks=pytest.mark.slow if cases.is_slow(name) else ())
    for part, (names, _) in freeze.PARTS.items()
    for name in names
]


@pytest.mark.parametrize(("part", "name"), ENTRIES)
def test_nothing_has_changed(part: str, name: str) -> None:
    freeze.check(part, name, bits=os.environ.get("SILODP_GOLDEN") != "close")


@pytest.mark.parametrize("part", freeze.PARTS)
def test_every_golden_case_is_recomputed(part: str) -> None:
    assert set(freeze.goldens(part)["cases"]) == set(freeze.PARTS[part][0])
