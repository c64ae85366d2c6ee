"""Weights of users: how a person's weight of 1 is divided among the silos, and the check that it is no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from silodp.errors import SilodpError

if TYPE_CHECKING:
    from silodp.methods.roles import FederationSize, UserWeights


def compute_user_weights(
    method: UserWeights, counts: np.ndarray | None, population: FederationSize
) -> np.ndarray:
    """Return a method's weights, checked: whoever wrote it, noise is sized for users whose weights add to at most 1.

    Args:
        method: see `UserWeights.user_weights`.
        counts: (S, U) int64, or None.
        population: the public size of the federation.

    Returns:
        w[s,u], (S, U) float64.

    Raises:
        SilodpError: the weights have another shape, one is negative or not finite, or a user's total is above 1.
    """
    weights = np.asarray(method.user_weights(counts, population), dtype=np.float64)
    if np.shape(weights) != (population.silos, population.users):
        raise SilodpError(
            f"{type(method).__name__}.user_weights returns shape {np.shape(weights)}: return one weight for each of "
            f"{population.silos} silos and {population.users} users.",
            code="argument.shape",
            field="weights",
        )
    if weights.strides[1] == 0:
        # The same for all users (`np.broadcast_to`): one column says all, and S·U numbers need not be made.
        return np.broadcast_to(validate_weights(weights[:, :1]), weights.shape)
    return validate_weights(weights)


def uniform_weight(silos: int) -> float:
    """Return w[s,u] = 1/S, which needs to know nothing about anyone (ULDP-FL, Algorithm 3)."""
    return float(validate_weights(np.full((silos, 2), 1.0 / silos))[0, 0])


def weigh_by_records(counts: np.ndarray) -> np.ndarray:
    """Return w[s,u] = n[s,u]/N[u], (S, U), 0 for a person without records (ULDP-FL, Eq. 3, "ULDP-AVG-w").

    Args:
        counts: (S, U) int64, n[s,u].
    """
    totals = counts.sum(axis=0)
    return validate_weights(counts / np.maximum(totals, 1))


def weigh_at_home(counts: np.ndarray) -> np.ndarray:
    """Return w[s,u] = 1 in the silo with most of u's records, the first of equals, else 0: (S, U) float64.

    Args:
        counts: (S, U) int64, n[s,u].
    """
    home = np.zeros(counts.shape)
    home[counts.argmax(axis=0), np.arange(counts.shape[1])] = 1.0
    return validate_weights(np.where(counts > 0, home, 0.0))


def validate_weights(weights: np.ndarray) -> np.ndarray:
    """Return the weights (S, U), scaled down where rounding pushed a person's total above 1.

    Soundness needs Σ_s w[s,u] ≤ 1 for every person u (docs/privacy.md, section 2), since noise is sized for that.

    Raises:
        SilodpError: a weight is negative or not finite, or a person's total is really above 1.
    """
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
