"""Poisson samples: every unit is drawn independently."""

from __future__ import annotations

import numpy as np


def draw_poisson_sample(count: int, q: float | np.ndarray, stream: np.random.Generator) -> np.ndarray:
    """Draw a sample (count,) bool, each True independently with probability q (to within 2⁻⁵³).

    Args:
        count: number of units.
        q: one probability for all, or (count,) one for each.
        stream: of random numbers.
    """
    return stream.random(count) < q
