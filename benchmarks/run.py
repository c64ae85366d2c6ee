"""All benchmarks: `python benchmarks/run.py` prints a table and writes runs/benchmarks.json.

Ratios come from one run each, with the compared things interleaved; seconds are this machine's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import accounting
import local_training


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    values = (
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )
    return "  ".join(values)


def main() -> None:
    """Measure, print, write."""
    torch.set_num_threads(1)
    rows = {"local training": local_training.measure(), "accounting": accounting.measure()}
    for part, measured in rows.items():
        print(f"\n{part}")
        for row in measured:
            print(f"  {line(row)}")
    path = Path("runs/benchmarks.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
