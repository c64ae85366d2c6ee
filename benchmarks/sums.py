"""Norms and sums of clipped rows, in nanoseconds a number: blocks of columns against whole rows, measured in turn.

python benchmarks/sums.py

One thread, CPU time, medians of five. "whole rows" is the same arithmetic without cutting columns. The last table
varies the width of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from silodp.mechanisms import quantization
from silodp.mechanisms import rows as row_sums
from silodp.mechanisms.clipping import Bounds, ClippedRowStream, clip_rows, sum_rows
from silodp.mechanisms.quantization import Quantizer
from silodp.mechanisms.rows import compute_norms
from timing import measure_in_turn, show_help

SHAPES = ((1000, 5_012), (200, 21_840), (50, 10**6), (10, 10**7))
WIDTHS = (12, 13, 14, 15, 16, 17)
TURNS = 5


def _with_columns(columns: int, case: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        before = row_sums._COLUMNS, quantization._COLUMNS
        row_sums._COLUMNS = quantization._COLUMNS = columns
        try:
            case()
        finally:
            row_sums._COLUMNS, quantization._COLUMNS = before

    return run


def measure() -> list[dict[str, Any]]:
    """Return one row per shape: nanoseconds a number of norms, of sums and of sums on the integer grid."""
    found = []
    for count, size in SHAPES:
        rows = torch.randn(count, size, generator=torch.Generator().manual_seed(0))
        clipped = clip_rows(torch.arange(count), rows, 1.0)
        weights = torch.full((count,), 1 / count, dtype=torch.float64)
        grid = Quantizer(1.0, 1 << 20)
        bounds = Bounds(1.0, 1.0, 0.0, 1.0)
        work: dict[str, Callable[[], Any]] = {
            "norms": lambda rows=rows: compute_norms(rows),
            "sums": lambda c=clipped, w=weights: sum_rows(c, c.factors * w),
            "integers": lambda c=clipped, w=weights, b=bounds, g=grid, d=size: g.fold(
                ClippedRowStream([c], d, b, True), w
            ),
        }
        cases = {}
        for name, case in work.items():
            cases[name] = case
            cases[f"{name}, whole rows"] = _with_columns(1 << 60, case)
        seconds = measure_in_turn(cases, TURNS)
        found.append(
            {"case": f"{count} rows of {size}"} | {k: 1e9 * v / count / size for k, v in seconds.items()}
        )
    count, size = 20, 10**6
    rows = torch.randn(count, size)
    clipped = clip_rows(torch.arange(count), rows, 1.0)
    for name, case in (
        ("norms", lambda: compute_norms(rows)),
        ("sums", lambda: sum_rows(clipped, clipped.factors)),
    ):
        seconds = measure_in_turn({f"2^{w}": _with_columns(1 << w, case) for w in WIDTHS}, TURNS)
        found.append({"case": f"{name} by columns"} | {k: 1e9 * v / count / size for k, v in seconds.items()})
    return found


if __name__ == "__main__":
    show_help(__doc__)
    torch.set_num_threads(1)
    for row in measure():
        print(
            "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}:" for k, v in row.items()), flush=True
        )
