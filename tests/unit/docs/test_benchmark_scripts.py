"""Every benchmark can be imported: a number of the documentation has a command that still runs.

One of them named a function that had been renamed, and nothing noticed.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As `python benchmarks/NAME.py` finds its neighbors.
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    # Dataclasses look up their module.
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_shows_its_help_and_does_not_run(path: Path) -> None:
    _, is_program, program = path.read_text().partition('if __name__ == "__main__":\n')
    if is_program:
        assert program.startswith("    show_help(__doc__)\n") or "ArgumentParser" in path.read_text()
