"""Who takes part in a round: drawn by all silos alike (`PersonCoins`), or by server and silos so that nobody knows it.

Coins: every silo computes them from a secret R that all silos of the session share and the server does not know, so
nothing about the sample is sent. Two silos that hold records of one person find the same coin without knowing of each
other's records.

Hidden sample: one draw per person and round. i_u is the server's alone, κ_u follows from R. Either of them alone says
nothing of β_u = [(i_u − κ_u) mod P < k], whose rate is exactly k/P whatever the other one is. A silo that tells the
server R voids it.

Source: docs/protocols.md, section 2, "Who is sampled", and section 5; HMAC (RFC 2104), HKDF (RFC 5869), AES (FIPS 197).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from numpy.typing import NDArray

from silodp.crypto.streams import Integers, Words, derive_key, draw_words
from silodp.errors import require

_BLOCK = 16
SILO_CHOOSES = "silo 0 chooses among the server's entries"  # purpose of the base transfers
MAX_CELLS = 1 << 16  # a table has P entries for every user, all of which are sent


class PersonCoins:
    """The coins of the persons of one silo, in one run.

    The coin of a person in a round is the first half of AES-256, under the key of the round, of the person's pseudonym;
    the pseudonym is HMAC-SHA256 of the identifier. Neither leaves the silo.

    Args:
        secret: R, 32 uniform bytes that all silos share.
        run: the run's id.
        profile: the digest of the identity profile, "" where persons are numbered by a public list.
        identifiers: of the persons, each the same text in all silos.
    """

    def __init__(self, secret: bytes, run: str, profile: str, identifiers: Iterable[str]) -> None:
        # Pseudonyms are of this run alone: coins of two runs, under equal secrets, would be independent too.
        key = derive_key(secret, "person", run, profile)
        pseudonyms = (hmac.digest(key, text.encode(), "sha256")[:_BLOCK] for text in identifiers)
        # One string of blocks, so that a round is one call of AES for all persons.
        self._pseudonyms = b"".join(pseudonyms)
        self._secret, self._run = secret, run

    def __repr__(self) -> str:
        return f"PersonCoins({len(self._pseudonyms) // _BLOCK} persons)"

    def toss(self, round_: int, rate: float | NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return who takes part in a round.

        A person's coin is the same for every attempt and every release of the round. Coins of different persons or
        rounds are independent.

        Args:
            round_: counted from 0.
            rate: the probability q of taking part, one for all persons or (persons,) one each, in [0, 1]; it is rounded
                down to a multiple of 2⁻⁶⁴.

        Returns:
            (persons,) bool, in the order of the identifiers.
        """
        coins = self.draw("coin", round_)
        rates = np.broadcast_to(np.asarray(rate, np.float64), coins.shape)
        # q·2⁶⁴ is exact, since only the exponent changes; 2⁶⁴ itself does not fit, and everyone is in at q = 1.
        limits = np.floor(np.ldexp(np.where(rates < 1, rates, 0), 64)).astype(np.uint64)
        sampled: NDArray[np.bool_] = (coins < limits) | (rates >= 1)
        return sampled

    def draw(self, purpose: str, number: int) -> NDArray[np.uint64]:
        """Return a word, uniform below 2⁶⁴, of every person; words of other purposes or numbers are independent."""
        key = derive_key(self._secret, purpose, self._run, number)
        # Under one key AES permutes its blocks, so the coins of different persons are as good as independent: to tell
        # them from independent ones takes about 2⁶⁴ persons. The pseudonyms are secret and different.
        blocks = Cipher(AES256(key), ECB()).encryptor().update(self._pseudonyms)
        # The first 8 of a block's 16 bytes: more would change no rate by more than 2⁻⁶⁴.
        return np.frombuffer(blocks, "<u8")[::2]


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
        # numpy's % of a negative number is not negative, as the difference modulo P must be.
        return ((server_cells - silo_cells) % self.denominator < self.numerator).astype(np.uint64)


def transfer_counter(round: int) -> int:
    """Return the counter of a round's transfers; counters 0 and 1 are the set-up's."""
    require(round >= 0, f"Hidden sampling: round {round}; number the rounds from 0.", code="argument.value")
    return round + 2


def draw_server_cells(users: int, ratio: SamplingRatio) -> Integers:
    """Draw i (users,), exactly uniform below P, from the operating system; once a round, for the server alone."""
    # `randbelow` refuses and draws again, so that these cells are exactly uniform and the rate is exactly k/P.
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
