"""A command to run, and a small configuration in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import CONFIG, Outcome, Silodp

from silodp.cli import main


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
