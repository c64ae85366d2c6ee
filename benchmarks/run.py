"""All benchmarks: `python benchmarks/run.py [PART …]` prints tables and writes runs/benchmarks.json.

Ratios come from one run each, with the compared things interleaved; seconds are this machine's. With parts named, only
these are measured anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import accounting
import distributed
import lattice
import local_training
import paillier
import personal
import private_weighting
import secure_aggregation
from timing import show_help

PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "local-training": local_training.measure,
    "accounting": accounting.measure,
    "secure-aggregation": secure_aggregation.measure,
    "lattice": lattice.measure,
    "lattice-sizes": lattice.measure_sizes,
    "paillier": paillier.measure_all,
    "private-weighting": private_weighting.measure,
    "distributed": distributed.measure,
    "personal": personal.measure,
}


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    values = (
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )
    return "  ".join(values)


def main() -> None:
    """Measure, print, write."""
    torch.set_num_threads(1)
    path = Path("runs/benchmarks.json")
    path.parent.mkdir(exist_ok=True)
    rows = json.loads(path.read_text()) if path.exists() else {}
    for part in sys.argv[1:] or PARTS:
        print(f"\n{part}")
        rows[part] = PARTS[part]()
        for row in rows[part]:
            print(f"  {line(row)}", flush=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    show_help(__doc__)
    main()
