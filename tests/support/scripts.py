"""Import scripts that lie in no package, such as those of docs/ and packaging/."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load_script(path: str, name: str = "") -> ModuleType:
    """Return the module of a script at a path from the root of the project, under a name or that of its file."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(name or file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module
