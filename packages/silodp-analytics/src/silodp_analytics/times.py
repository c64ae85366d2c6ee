"""Times of records beside public edges, in single precision as records hold them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def round_times(times: ArrayLike) -> NDArray[np.float32]:
    """Return times, or edges between them, in single precision.

    Only then is a time of 6.1 in a record equal to an edge of 6.1: as a double the edge is above it.
    """
    return np.asarray(times, np.float32)


def find_bins(times: ArrayLike, edges: ArrayLike) -> NDArray[np.int64]:
    """Return the bin of every time, from 0 to the number of edges; a time equal to an edge is in the bin above it.

    Args:
        times: of records (n,).
        edges: between bins, ascending (k,).
    """
    return np.searchsorted(round_times(edges), round_times(times), side="right")
