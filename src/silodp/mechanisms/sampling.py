"""Poisson samples: every unit is drawn independently."""

from __future__ import annotations

import numpy as np


def draw_poisson_sample(count: int, q: float | np.ndarray, stream: np.random.Generator) -> np.ndarray:
    """Draw a sample (count,) bool, each True independently with probability q (to within 2⁻⁵³).

    Args:
        count: The number of units.
        q: One probability for all units, or (count,) one for each.
        stream: The random numbers; secret ones where the sample is private.

    Source: the samples ("lots") of Abadi et al. 2016, "Deep Learning with Differential Privacy", section 3.1.
    """
    # One draw for every unit, whatever its q is, so that whether a unit is drawn does not depend on another's q.
    return stream.random(count) < q
