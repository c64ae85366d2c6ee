"""Where the checkout has what tests read or run."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
PLUGINS = Path(__file__).parents[1] / "plugins"
VECTORS = Path(__file__).parents[1] / "vectors.json"
SOURCES = os.pathsep.join(str(path) for path in sorted(ROOT.glob("packages/*/src")))
"""For PYTHONPATH: the source of all packages that the checkout has."""
