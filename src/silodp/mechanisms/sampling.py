"""Poisson samples: every unit tosses its own coin."""

from __future__ import annotations

import numpy as np


def draw_poisson_sample(count: int, q: float | np.ndarray, stream: np.random.Generator) -> np.ndarray:
    """Who is in the sample: (count,) bool, each True with probability q (to within 2⁻⁵³) independently.

    q: one probability for all, or (count,) everyone's own.
    """
    return stream.random(count) < q
