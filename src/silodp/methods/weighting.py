"""Clipping weights w[s,u]: how one person's unit of influence is split over silos.

Soundness needs Σ_s w[s,u] ≤ 1 for every person u (docs/privacy.md, section 2); all weightings go through `checked`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from silodp.errors import SilodpError

Weighting = Literal["uniform", "records"]


def weigh_uniformly(silos: int, users: int) -> np.ndarray:
    """w[s,u] = 1/S, (S, U): needs to know nothing about anyone (ULDP-FL, Algorithm 3)."""
    return checked(np.full((silos, users), 1.0 / silos))


def weigh_by_records(counts: np.ndarray) -> np.ndarray:
    """w[s,u] = n[s,u]/N[u], (S, U), 0 for a person without records (ULDP-FL, Eq. 3: "ULDP-AVG-w")."""
    totals = counts.sum(axis=0)
    return checked(counts / np.maximum(totals, 1))


def checked(weights: np.ndarray) -> np.ndarray:
    """The weights, scaled down where rounding pushed a person's total above 1; refused where it is really above."""
    totals = weights.sum(axis=0)
    if (weights < 0).any() or (totals > 1 + 1e-9).any() or not np.isfinite(weights).all():
        user = int(np.argmax(np.where(np.isfinite(totals), totals, np.inf)))
        raise SilodpError(
            f"weights of user {user} add to {totals[user]} over the silos: scale them to add to at most 1, "
            "since noise is sized for that.",
            code="argument.value",
            field="weights",
        )
    scaled: np.ndarray = weights / np.maximum(totals, 1.0)
    return scaled
