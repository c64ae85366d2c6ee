"""Fixtures: a command to run, a small configuration in an empty folder, and the real data sets."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from silodp.cli import main
from silodp.data.federation import Federation
from silodp.errors import SilodpError
from silodp.report.figures import make_panel
from support.commands import CONFIG, UNDRAWN, Outcome, Silodp

# How long an example takes says something about the machine, not about the code.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With SILODP_PART=k/n, run the k-th of n parts of the tests, which their names divide."""
    number, _, parts = os.environ.get("SILODP_PART", "0/1").partition("/")
    others = [one for one in items if (zlib.crc32(one.nodeid.encode()) - int(number)) % int(parts)]
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [one for one in items if one not in left_out]


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
    """Pages have their figures made, but not drawn, which takes longer than a small run; `pictures` has them drawn.

    All of them are made on one panel, since an empty one takes a third of a small run.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("pictures") is None:
            patch.setattr("silodp.report.page.render_svg", lambda figure, name: UNDRAWN)
            patch.setattr("silodp.report.plots.make_panel", _reuse_panel)
            with suppress(ImportError):  # the package of statistics need not be installed
                patch.setattr("silodp_analytics.statistics.report.figures.make_panel", _reuse_panel)
        yield


@functools.cache
def _make_panel() -> tuple[Figure, Axes]:
    return make_panel("", "")


def _reuse_panel(x: str, y: str, size: tuple[float, float] = (1, 1)) -> tuple[Figure, Axes]:
    """Return the one panel, without what was drawn on it before."""
    figure, axes = _make_panel()
    for artist in (*axes.lines, *axes.collections, *axes.patches, *axes.texts, *axes.images, *figure.legends):
        artist.remove()
    axes.containers.clear()
    # Limits and scales that a plot has set would be those of the next one.
    axes.relim()
    axes.set(xscale="linear", yscale="linear", xlim=(0.1, 1), ylim=(0.1, 1), xlabel=x, ylabel=y)
    axes.autoscale(True)
    return figure, axes


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
    benchmarks = pytest.importorskip("silodp_experiments.benchmarks")
    try:
        return benchmarks.data_root()
    except SilodpError as error:
        pytest.skip(f"needs the shared data: {error}")


@pytest.fixture(scope="session")
def heart(data: Path) -> Federation:
    """The heart disease data set, of 50 made-up persons."""
    return pytest.importorskip("silodp_experiments.benchmarks").heart_disease(users=50)
