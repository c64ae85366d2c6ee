"""The law by which simulated persons' records lie in silos, for benchmarks.

Source: ULDP-FL, section 5.1.1.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from silodp.settings import Range, Whole, check_choice

Scheme = Literal["uniform", "zipf", "own"]
Indices = NDArray[np.int64]

USER_EXPONENT = 0.5
"""Records per user ∝ rank^-0.5."""

SILO_EXPONENT = 2.0
"""Share of a user's records in a silo ∝ rank^-2; the silos are ranked in a random order for each user."""


def zipf_weights(size: int, exponent: float) -> NDArray[np.float64]:
    """Return (size,) probabilities ∝ rank^-exponent, rank 1..size."""
    weights = np.arange(1, size + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum())


def deal(
    scheme: str, records: int, users: int, silos: int, generator: np.random.Generator
) -> tuple[Indices, Indices]:
    """Give every record a user and a silo.

    Args:
        scheme: "uniform" draws user and silo of a record independently; "zipf" as `zipf`; "own" makes every record a
            user, and distributes the records over the silos at random in equal shares.
        records: n.
        users: U; unused by "own".
        silos: S.
        generator: the source of all draws.

    Returns:
        user (n,) and silo (n,), int64.

    Raises:
        SilodpError: an unknown scheme, or a count below 1.
    """
    check_choice("allocation", scheme, get_args(Scheme))
    Whole().check("silos", silos)
    if scheme == "own":
        silo = np.empty(records, np.int64)
        silo[generator.permutation(records)] = np.arange(records) % silos
        return np.arange(records), silo
    Range().check("users", users)
    Whole().check("users", users)
    if scheme == "zipf":
        return zipf(records, users, silos, generator)
    user = generator.choice(users, size=records, p=np.full(users, 1 / users))
    return user, generator.integers(silos, size=records)


def zipf(records: int, users: int, silos: int, generator: np.random.Generator) -> tuple[Indices, Indices]:
    """Draw every record's user with probability ∝ rank^-0.5, then its silo with probability ∝ rank^-2.

    For each user, the silos are ranked in a separate random order. User 0 has the most records in expectation.

    Args:
        records: n.
        users: U.
        silos: S.
        generator: the source of all draws; the same state gives the same allocation.

    Returns:
        user (n,) in 0..users-1 and silo (n,) in 0..silos-1.

    Source: ULDP-FL, section 5.1.1, "zipf" for Creditcard and MNIST.
    """
    user = generator.choice(users, size=records, p=zipf_weights(users, USER_EXPONENT))
    return user, draw_silos(user, users, silos, generator)


def draw_silos(user: Indices, users: int, silos: int, generator: np.random.Generator) -> Indices:
    """Return (n,) silos of records, drawn ∝ rank^-2 in an order of the silos that is drawn for each user.

    Args:
        user: (n,) the user of every record.
        users: U.
        silos: S.
        generator: the source of all draws.
    """
    # One shuffled row of silos for each user, all at once.
    order = generator.permuted(np.tile(np.arange(silos), (users, 1)), axis=1)
    rank = generator.choice(silos, size=len(user), p=zipf_weights(silos, SILO_EXPONENT))
    return np.asarray(order[user, rank])
