"""Every benchmark can be imported: a number of the documentation has a command that still runs.

One of them named a function that had been renamed, and nothing noticed.
"""

import sys
from pathlib import Path

import pytest

from support.benchmark_scripts import FOLDER, load_benchmark


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_can_be_imported(path: Path) -> None:
    before = set(sys.modules)
    load_benchmark(path.stem)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_shows_its_help_and_does_not_run(path: Path) -> None:
    _, is_program, program = path.read_text().partition('if __name__ == "__main__":\n')
    if is_program:
        assert program.startswith("    show_help(__doc__)\n") or "ArgumentParser" in path.read_text()
