"""The coin that decides whether a person takes part in a round: all silos toss it alike, and nobody else can.

Every silo computes the coin from a secret R that all silos of the session share and the server does not know, so
nothing about the sample is sent. Two silos that hold records of one person find the same coin without knowing of each
other's records.

Source: docs/protocols.md, section 2, "Who is sampled"; HMAC (RFC 2104), HKDF (RFC 5869), AES (FIPS 197).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from numpy.typing import NDArray

from silodp.crypto.streams import derive_key

_BLOCK = 16


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
        key = derive_key(self._secret, "coin", self._run, round_)
        # Under one key AES permutes its blocks, so the coins of different persons are as good as independent: to tell
        # them from independent ones takes about 2⁶⁴ persons. The pseudonyms are secret and different.
        blocks = Cipher(AES256(key), ECB()).encryptor().update(self._pseudonyms)
        coins = np.frombuffer(blocks, "<u8")[::2]
        rates = np.broadcast_to(np.asarray(rate, np.float64), coins.shape)
        # q·2⁶⁴ is exact, since only the exponent changes; 2⁶⁴ itself does not fit, and everyone is in at q = 1.
        limits = np.floor(np.ldexp(np.where(rates < 1, rates, 0), 64)).astype(np.uint64)
        sampled: NDArray[np.bool_] = (coins < limits) | (rates >= 1)
        return sampled
