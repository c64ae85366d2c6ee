"""Sampling with a sample that no party knows, drawn by server and silos (docs/protocols.md, section 5).

One draw per person and round. i_u is the server's alone, κ_u follows from the run secret R, which every silo knows and
the server does not. Either of them alone says nothing of β_u = [(i_u − κ_u) mod P < k], whose rate is exactly k/P
whatever the other one is. A silo that tells the server R voids it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np

from silodp.crypto.lookup import Lookup
from silodp.crypto.oblivious_transfer import TransferReceiver
from silodp.crypto.streams import Integers, Words, derive_key, draw_words
from silodp.errors import require

SILO_CHOOSES = "silo 0 chooses among the server's entries"  # purpose of the base transfers
MAX_CELLS = 1 << 16  # a table has P entries for every user, all of which are sent


@dataclass(frozen=True)
class SamplingRatio:
    """A sampling rate of k/P: k the `numerator`, P the `denominator`, which is also the number of cells."""

    numerator: int
    denominator: int

    def __post_init__(self) -> None:
        require(
            1 <= self.numerator <= self.denominator and 2 <= self.denominator <= MAX_CELLS,
            f"Hidden sampling: a rate of {self.numerator}/{self.denominator}; set 1 ≤ k ≤ P, 2 ≤ P ≤ {MAX_CELLS:,}.",
            code="argument.value",
        )

    @property
    def rate(self) -> float:
        """The sampling probability."""
        return self.numerator / self.denominator

    def select(self, server_cells: Integers, silo_cells: Integers) -> Words:
        """Return β = [(i − κ) mod P < k], as 0 or 1, from i and κ of shapes that broadcast."""
        return ((server_cells - silo_cells) % self.denominator < self.numerator).astype(np.uint64)


def transfer_counter(round: int) -> int:
    """Return the counter of a round's transfers; counter 0 is the set-up's."""
    require(round >= 0, f"Hidden sampling: round {round}; number the rounds from 0.", code="argument.value")
    return round + 1


def draw_server_cells(users: int, ratio: SamplingRatio) -> Integers:
    """Draw i (users,), exactly uniform below P, from the operating system; once a round, for the server alone."""
    return np.array([secrets.randbelow(ratio.denominator) for _ in range(users)], np.int64)


def derive_silo_cells(
    secret: bytes, session: bytes, users: int, ratio: SamplingRatio, round: int
) -> Integers:
    """Derive κ of a round, the same for all silos.

    Source: docs/protocols.md, section 5; HKDF-Expand (RFC 5869) and ChaCha20 (RFC 8439).

    Args:
        secret: R, 32 bytes.
        session: the session id, 32 bytes.
        users: U.
        ratio: k/P.
        round: counted from 0.

    Returns:
        (U,), each within P·2⁻⁶⁴ of uniform below P (total variation).
    """
    # A 64-bit word modulo P ≤ 2^16 is within 2^-48 of uniform; the rate is exact by the server's cells alone.
    key = derive_key(secret, "hidden sample", session.hex(), transfer_counter(round))
    return (draw_words(key, users, np.uint64) % np.uint64(ratio.denominator)).astype(np.int64)


def ask(
    receiver: TransferReceiver, secret: bytes, session: bytes, users: int, ratio: SamplingRatio, round: int
) -> Lookup:
    """Return silo 0's request for entry κ_u of the tables that the server makes from i_u.

    Keep it durably before it is sent: two requests for one round would show combinations of the choices.

    Args:
        receiver: of the base transfers in which silo 0 chooses.
        secret, session, users, ratio, round: as in `derive_silo_cells`.
    """
    cells = derive_silo_cells(secret, session, users, ratio, round)
    return Lookup.ask(receiver, transfer_counter(round), cells, ratio.denominator)
