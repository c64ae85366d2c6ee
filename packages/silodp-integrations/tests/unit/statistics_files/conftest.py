"""Files of statistics packages for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.statistics_files import Write, write_file


@pytest.fixture(autouse=True)
def need_reader() -> None:
    """Skip the tests where what reads such files is not installed."""
    pytest.importorskip("pyreadstat", reason="pip install 'silodp[statistics-files]'")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes columns to a file of a kind: its ending, the columns, and their formats."""

    def write_north(
        ending: str, columns: Mapping[str, Any], formats: Mapping[str, str] | None = None, **options: Any
    ) -> Path:
        return write_file(tmp_path / f"north.{ending}", columns, formats, **options)

    return write_north
