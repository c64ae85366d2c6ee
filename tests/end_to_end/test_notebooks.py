"""The notebooks are run from top to bottom in a fresh kernel, as a reader does; they are stored without results."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.places import SOURCES

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_results(path):
    stored = json.loads(path.read_text())
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 3
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert path.stat().st_size < 20_000


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} >= {"own-tables", "own-model", "survival", "odds-ratios"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import nbformat

    # The kernel imports this checkout, and finds no file by being in it.
    paths = [SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in ran] == list(range(1, len(ran) + 1))
