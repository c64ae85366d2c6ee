"""Fixtures: a command to run, a small configuration in an empty folder, and the real data sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from silodp.cli import main
from silodp.data.benchmarks import data_root
from silodp.errors import SilodpError
from support.commands import CONFIG, Outcome, Silodp


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-wording", action="store_true", help="write tests/snapshots/wording.txt anew from the source"
    )


@pytest.fixture
def silodp(capfd: pytest.CaptureFixture[str]) -> Silodp:
    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main.main([str(argument) for argument in arguments])
        return Outcome(left.value.code, *capfd.readouterr())  # type: ignore[arg-type]

    return run


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="session")
def data() -> Path:
    """The real data sets; a test that asks for them is skipped where they are not."""
    try:
        return data_root()
    except SilodpError as error:
        pytest.skip(f"needs the shared data: {error}")
