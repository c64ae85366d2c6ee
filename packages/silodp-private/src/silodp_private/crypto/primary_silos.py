"""Shares of every person's primary silo: the silo that holds most of their records, of which nobody learns which it is.

Of every user the server comes to hold a word η_u of S bits and the silos a word θ_u, uniform each; bit s of η_u ⊕ θ_u
is 1 for one silo alone, the primary silo of u. Counts are compared by classes: 0; 1; 2; 3 to 4; 5 to 8; 9 to 16; 17 to
32; 33 and more. Of equal classes that silo is first which a public order says, drawn for each user from S and U alone.
Who has no records anywhere has some primary silo, and contributes nothing.

Set-up: the server gets every silo's classes under masks of the silos. For each pair of silos it looks up which of the
two wins, and for each silo whether it has won against all others; silo 0 offers the tables, and every entry that the
server opens is masked. So the server learns nothing, and no silo gets an answer that depends on anybody's counts.

Sources: docs/protocols.md, section 7; Naor and Pinkas, "Oblivious Transfer and Polynomial Evaluation" (STOC 1999), for
the lookups.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from silodp.crypto.streams import KEY_BYTES, Bytes, Words, derive_key, draw_words
from silodp.errors import require
from silodp_private.crypto.lookup import Lookup
from silodp_private.crypto.oblivious_transfer import MAX_TRANSFERS
from silodp_private.crypto.shares import FirstSilo, ShareParameters, ShareServer, SiloShares

CLASSES = 8
MAX_SILOS = 64  # one bit of a word for each
_COMPARISONS, _PRIMARY_SILOS = 0, 1  # the transfer counters of the set-up

Bits = NDArray[np.bool_]


def compute_max_users(silos: int) -> int:
    """Return for how many users primary silos can be found among S silos: all pairs of silos are compared at once."""
    # A comparison is one lookup among CLASSES² entries: a transfer for each bit of the index. The lookups of primary
    # silos, ⌈log₂ S⌉ transfers for each silo, are fewer.
    levels = (CLASSES**2 - 1).bit_length()
    return MAX_TRANSFERS // (levels * (silos * (silos - 1) // 2))


def classify_counts(counts: NDArray[np.integer]) -> Bytes:
    """Return the classes of numbers of records: 0; 1; 2; 3 to 4; 5 to 8; 9 to 16; 17 to 32; 33 and more."""
    # frexp's exponent of n − 1 is its number of bits: 0 for 1, 1 for 2, 2 for 3 and 4.
    exponents = np.frexp(np.maximum(counts, 1) - 1.0)[1]
    return np.where(counts > 0, np.minimum(1 + exponents, CLASSES - 1), 0).astype(np.uint8)


@dataclass(frozen=True)
class PrimarySiloParameters(ShareParameters):
    """Public constants of the shares of primary silos; shares are added bit by bit modulo 2.

    Attributes:
        session: The session's id, 32 bytes.
        users: U, the number of users.
        silos: S, from 2 to 64.
    """

    silos: int

    label: ClassVar[str] = "primary silos"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            2 <= self.silos <= MAX_SILOS,
            f"Shares of primary silos: {self.silos} silos; set 2 to {MAX_SILOS}.",
            code="argument.value",
        )

    def reduce(self, values: Words) -> Words:
        """Return the lowest S bits of the values."""
        return values & np.uint64((1 << self.silos) - 1)

    def add(self, values: Words, others: Words) -> Words:
        """Return the exclusive or."""
        return values ^ others

    def subtract(self, values: Words, others: Words) -> Words:
        """Return the exclusive or."""
        return values ^ others

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The pairs (i, j) of silos with i < j, in order."""
        return tuple(combinations(range(self.silos), 2))

    @property
    def wins(self) -> int:
        """The smallest power of two that is at least S: numbers of wins are shared modulo it."""
        return 1 << (self.silos - 1).bit_length()

    def order(self) -> Words:
        """Return the public order (S, U) of each user's silos among equal classes; the largest wins."""
        # Public, random for each user, and the same in every session: a run that is repeated finds the same.
        key = derive_key(bytes(KEY_BYTES), "order of primary silos", self.silos, self.users)
        drawn = draw_words(key, self.silos * self.users, np.uint64).reshape(self.silos, self.users)
        # The last bits tell the silos apart, so that no two numbers of a user are equal.
        return drawn >> np.uint64(6) << np.uint64(6) | np.arange(self.silos, dtype=np.uint64)[:, None]

    def find_primary_silos(self, counts: NDArray[np.integer]) -> Bits:
        """Return in clear what the shares add up to, (S, U) bool, from the counts n[s,u] (S, U)."""
        ranks = np.lexsort((self.order(), classify_counts(counts)), axis=0)
        return np.asarray(np.arange(self.silos)[:, None] == ranks[-1])

    def unpack(self, words: Words) -> Bits:
        """Return the bits (S, U) of words (U,)."""
        return (words >> np.arange(self.silos, dtype=np.uint64)[:, None] & np.uint64(1)).astype(bool)

    # --- the silos ---

    def mask_classes(self, silo: SiloShares, place: int, counts: NDArray[np.integer]) -> Bytes:
        """Return the classes (U,) of silo `place` under masks: what it sends to the server."""
        return (classify_counts(counts) + self._class_masks(silo, place)) % np.uint8(CLASSES)

    def offer_comparisons(self, zero: FirstSilo, request: bytes) -> bytes:
        """Answer, as silo 0, which silo of each pair wins, masked by r: once in a session.

        Args:
            zero: silo 0.
            request: of `ask_comparisons`.
        """
        order, entries = self.order(), np.arange(CLASSES, dtype=np.uint8)
        # Row p·U + u is the table of pair p and user u; at masked classes (x, y) lie the classes (x − ρ, y − ρ').
        masks = [self._class_masks(zero.silo, place)[:, None] for place in range(self.silos)]
        classes = [(entries - mask) % np.uint8(CLASSES) for mask in masks]
        tables = np.empty((len(self.pairs), self.users, CLASSES, CLASSES), np.uint8)
        for table, masked, (i, j) in zip(tables, self._win_masks(zero.silo), self.pairs, strict=True):
            one, other = classes[i][:, :, None], classes[j][:, None, :]
            first = (order[i] > order[j])[:, None, None]
            table[:] = (one > other) | (one == other) & first
            table -= masked[:, None, None]
        return zero.offer(_COMPARISONS, request, tables.reshape(-1, CLASSES**2) % np.uint8(self.wins))

    def offer_primary_silos(self, zero: FirstSilo, request: bytes) -> bytes:
        """Answer, as silo 0, whether each silo has won against all others, masked by θ: once in a session.

        Args:
            zero: silo 0.
            request: of `ask_primary_silos`.
        """
        shares, masks = self.unpack(zero.silo.shares()), self._win_masks(zero.silo)
        # The silos' share of the wins of each silo: r where it stands first in the pair, −r where it stands second.
        own = np.zeros((self.silos, self.users, 1), np.uint8)
        for masked, (i, j) in zip(masks, self.pairs, strict=True):
            own[i, :, 0] += masked
            own[j, :, 0] -= masked
        total = (np.arange(self.wins, dtype=np.uint8) + own) % np.uint8(self.wins)
        tables = (total == self.silos - 1) ^ shares[:, :, None]
        return zero.offer(_PRIMARY_SILOS, request, tables.reshape(-1, self.wins).astype(np.uint8))

    def _class_masks(self, silo: SiloShares, place: int) -> Bytes:
        """Return ρ (U,) of silo `place`, uniform modulo the number of classes."""
        return (silo.words("class masks", place) % np.uint64(CLASSES)).astype(np.uint8)

    def _win_masks(self, silo: SiloShares) -> Bytes:
        """Return r (pairs, U), uniform modulo `wins`."""
        drawn = [silo.words("comparisons", i, j) % np.uint64(self.wins) for i, j in self.pairs]
        return np.stack(drawn).astype(np.uint8)

    # --- the server ---

    def ask_comparisons(self, server: ShareServer, masked: Bytes) -> Lookup:
        """Ask which silo of each pair wins.

        Args:
            server: the server, which chooses.
            masked: what the silos sent, (S, U) below `CLASSES`.
        """
        require(
            masked.shape == (self.silos, self.users) and int(masked.max(initial=0)) < CLASSES,
            f"Shares of primary silos: masked classes are not {self.silos} times {self.users} numbers below {CLASSES}; "
            "correct them.",
            code="argument.value",
        )
        places = np.stack([masked[i] * np.uint8(CLASSES) + masked[j] for i, j in self.pairs])
        return Lookup.ask(server.receiver, _COMPARISONS, places.ravel(), CLASSES**2)

    def ask_primary_silos(self, server: ShareServer, comparisons: Bytes) -> Lookup:
        """Ask whether each silo has won against all others.

        Args:
            server: the server, which chooses.
            comparisons: what was opened of the comparisons, (pairs·U, 1).
        """
        won = np.zeros((self.silos, self.users), np.uint8)
        # The server's share of the wins of each silo: what it opened, and 1 − that for the silo that stands second.
        for opened, (i, j) in zip(comparisons.reshape(-1, self.users), self.pairs, strict=True):
            won[i] += opened
            won[j] += 1 - opened
        return Lookup.ask(server.receiver, _PRIMARY_SILOS, (won % np.uint8(self.wins)).ravel(), self.wins)

    def pack(self, opened: Bytes) -> Words:
        """Return the server's words η (U,) from the bits that it opened of the primary silos, (S·U, 1)."""
        bits = opened.reshape(self.silos, self.users).astype(np.uint64)
        words: Words = (bits << np.arange(self.silos, dtype=np.uint64)[:, None]).sum(axis=0, dtype=np.uint64)
        return self.reduce(words)
