"""Sampling that nobody knows (docs/protocols.md, section 5): (i − κ) mod P decides, i the server's, κ the silos'.

One draw per person and round. i_u is the server's alone, κ_u follows from the run secret R, which every silo knows and
the server does not. Either of them alone says nothing of β_u = [(i_u − κ_u) mod P < k], whose rate is exactly k/P
whatever the other one is. A silo that tells the server R voids it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from silodp.crypto.lookup import Lookup
from silodp.crypto.oblivious_transfer import TransferReceiver
from silodp.crypto.streams import Words, derive_key, draw_words
from silodp.errors import SilodpError

SILO_CHOOSES = "silo 0 chooses among the server's entries"  # purpose of the base transfers
MOST_PLACES = 1 << 16


@dataclass(frozen=True)
class SamplingRatio:
    """A user is drawn when a number uniform below `draw_server_cells` P is below `drawn` k."""

    drawn: int
    places: int

    def __post_init__(self) -> None:
        if not (1 <= self.drawn <= self.places and 2 <= self.places <= MOST_PLACES):
            raise SilodpError(
                f"Hidden sampling: a rate of {self.drawn}/{self.places}; set 1 ≤ drawn ≤ places, "
                f"2 ≤ places ≤ {MOST_PLACES:,}.",
                code="argument.value",
            )

    @property
    def rate(self) -> float:
        """The sampling probability."""
        return self.drawn / self.places

    def sampled(self, places: NDArray[np.int64], shifts: NDArray[np.int64]) -> Words:
        """β = [(i − κ) mod P < k], as 0 or 1, from i and κ."""
        return ((places - shifts) % self.places < self.drawn).astype(np.uint64)


def transfer_counter(round: int) -> int:
    """The counter of a round's transfers; counter 0 is the set-up's."""
    if round < 0:
        raise SilodpError(f"Hidden sampling: round {round}; number the rounds from 0.", code="argument.value")
    return round + 1


def draw_server_cells(users: int, law: SamplingRatio) -> NDArray[np.int64]:
    """i (U,), exactly uniform below P, from the operating system: drawn once a round, and kept by the server alone."""
    return np.array([secrets.randbelow(law.places) for _ in range(users)], np.int64)


def derive_silo_cells(
    secret: bytes, session: bytes, users: int, law: SamplingRatio, round: int
) -> NDArray[np.int64]:
    """κ (U,) of this round, the same for all silos: within P·2⁻⁶⁴ of uniform below P (total variation, each user)."""
    key = derive_key(secret, "hidden sample", session.hex(), transfer_counter(round))
    return (draw_words(key, users, np.uint64) % np.uint64(law.places)).astype(np.int64)


def ask(
    receiver: TransferReceiver, secret: bytes, session: bytes, users: int, law: SamplingRatio, round: int
) -> Lookup:
    """Silo 0's request for entry κ_u of the table that the server makes from i_u.

    Keep it durably before it is sent: two requests for one round would show combinations of the choices.
    """
    chosen = derive_silo_cells(secret, session, users, law, round)
    return Lookup.ask(receiver, transfer_counter(round), chosen, law.places)
