"""Fixtures: a command to run, a small configuration in an empty folder, and the real data sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from silodp.cli import main
from silodp.errors import SilodpError
from silodp_experiments.benchmarks import data_root
from support.commands import CONFIG, Outcome, Silodp

# How long an example takes says something about the machine, not about the code.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-wording", action="store_true", help="write tests/snapshots/wording.txt anew from the source"
    )


_BACKGROUND = '<rect width="100%" height="100%" fill="#ffffff"/>'
UNDRAWN = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1">{_BACKGROUND}</svg>'
"""What stands for a picture where a test is not about pictures."""


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """`os.fsync` does nothing in this process: no test cuts the power, and what is written is read all the same.

    Tests of when it is called replace it, too; processes that are killed have the real one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True)
def _pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pages have their figures made, but not drawn, which takes longer than a small run; `pictures` has them drawn."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("pictures") is None:
            patch.setattr("silodp.report.page.render_svg", lambda figure, name: UNDRAWN)
        yield


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
