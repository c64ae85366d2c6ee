"""Building blocks of differential privacy: clipped sums, quantization, noise and sampling.

What a method returns from `local_update` is built with the names that are exported here; see docs/extending.md.
"""

from silodp.mechanisms.clipping import (
    Bounds,
    ClippedRows,
    ClippedRowStream,
    LocallyNoisedUpdate,
    MultiStepUpdate,
    clip_rows,
)

__all__ = [
    "Bounds",
    "ClippedRowStream",
    "ClippedRows",
    "LocallyNoisedUpdate",
    "MultiStepUpdate",
    "clip_rows",
]
