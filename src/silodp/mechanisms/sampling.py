"""Poisson samples: every unit tosses its own coin."""

from __future__ import annotations

import numpy as np

from silodp.errors import SilodpError, check_real


def check_probability(name: str, q: float) -> None:
    """Refuse a sampling probability outside (0, 1]."""
    check_real(name, q)
    if not 0 < q <= 1:
        raise SilodpError(
            f"{name} = {q} is not a sampling probability: set a number in (0, 1].",
            code="argument.value",
            field=name,
        )


def draw_poisson_sample(count: int, q: float | np.ndarray, stream: np.random.Generator) -> np.ndarray:
    """Who is in the sample: (count,) bool, each True with probability q (to within 2⁻⁵³) independently.

    q: one probability for all, or (count,) everyone's own.
    """
    return stream.random(count) < q
