"""Import scripts of benchmarks/, which are no package."""

from __future__ import annotations

import sys
from types import ModuleType

from support.scripts import ROOT, load_script

FOLDER = ROOT / "benchmarks"


def load_benchmark(name: str) -> ModuleType:
    """Return the module of benchmarks/NAME.py, which finds its neighbors as `python benchmarks/NAME.py` does."""
    sys.path.insert(0, str(FOLDER))
    try:
        return load_script(f"benchmarks/{name}.py", f"benchmark_{name}")
    finally:
        sys.path.remove(str(FOLDER))
