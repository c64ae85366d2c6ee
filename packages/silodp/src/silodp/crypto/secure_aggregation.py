"""Secure aggregation: masks and seals by which the server learns only the sum (docs/protocols.md, section 2).

A silo adds to its value, for every other silo on the attempt's roster, a mask that the other one subtracts, and a
*seal*, a mask of its own. The pair masks cancel in the sum over the whole roster; the seals are opened by their silos
only for that sum, so a vector that comes late can be subtracted from nothing.

Source: pairwise masks as in Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning",
CCS 2017, section 4; seals take the place of their secret shares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from silodp.crypto.keys import Session
from silodp.crypto.streams import Integers, keystream

V = TypeVar("V")
Unsigned = NDArray[np.unsignedinteger]


class Group(Protocol[V]):
    """A finite group whose uniform elements hide what is added to them."""

    def zero(self) -> V:
        """Return the neutral element; `add` and `mask` may change it in place."""

    def add(self, value: V, other: V) -> V:
        """Return value + other."""

    def mask(self, value: V, key: bytes, sign: int) -> V:
        """Return value ± the uniform element that belongs to `key`."""


@dataclass(frozen=True)
class WordGroup:
    """Vectors of words modulo a power of two, which need no reduction where the word is exactly as long.

    Source: the vectors modulo R of Bonawitz et al. (CCS 2017), section 4, with R a power of two.

    Attributes:
        size: The number of words.
        bits: The modulus is 2^bits; words have 32 bits where these suffice, else 64.
    """

    size: int
    bits: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The type of the words: the smaller one that holds `bits`."""
        # Little-endian on every machine: the words are sent, and streams are read into them.
        return np.dtype("<u4" if self.bits <= 32 else "<u8")

    def zero(self) -> Unsigned:
        """Return a vector of zeros."""
        return np.zeros(self.size, self.dtype)

    def from_integers(self, value: Integers) -> Unsigned:
        """Return signed integers (size,) modulo 2^bits."""
        return self._reduce(value.astype(self.dtype))

    def add(self, value: Unsigned, other: Unsigned) -> Unsigned:
        """Add `other` to `value` in place, modulo 2^bits."""
        value += other
        return self._reduce(value)

    def mask(self, value: Unsigned, key: bytes, sign: int) -> Unsigned:
        """Add or subtract the stream of `key` in place, modulo 2^bits."""
        # The stream is uniform modulo 2^32 or 2^64, and so are its low bits modulo a smaller power of two.
        stream = keystream(key, self.size * self.dtype.itemsize).view(self.dtype)
        if sign > 0:
            value += stream
        else:
            value -= stream
        return self._reduce(value)

    def center(self, value: Unsigned) -> Integers:
        """Return the representatives in [−2^(bits−1), 2^(bits−1))."""
        rest = np.uint64(64 - self.bits)
        # Shifted to the top of the word, so that the shift back copies the sign bit; in place, since sums are long.
        words = value.astype(np.uint64)
        words <<= rest
        signed: Integers = words.view(np.int64)
        signed >>= rest.astype(np.int64)
        return signed

    def _reduce(self, value: Unsigned) -> Unsigned:
        if self.bits not in (32, 64):
            value &= self.dtype.type((1 << self.bits) - 1)
        return value


@dataclass(frozen=True)
class RoundAttempt:
    """One try to add up the values of `roster`, all of whom must then open it.

    Attributes:
        round, attempt: Their numbers, counted from 0.
        release: The number of the noisy values in the round; it grows when someone may have opened the one before.
        roster: The names of the silos that take part, in the run's order.
        purpose: What the sum is for, so that keys of two sums differ.
        request: SHA-256 (hexadecimal) of what all silos on the roster were asked alike: silos that were asked different
            things share no masks.
    """

    round: int
    attempt: int
    release: int
    roster: tuple[str, ...]
    purpose: str
    request: str = ""

    @property
    def use(self) -> tuple[str | int, ...]:
        """What every key of this attempt is derived for."""
        roster = hashlib.sha256(json.dumps(self.roster).encode()).hexdigest()
        return self.round, self.attempt, self.release, roster, self.purpose, self.request


def apply_pair_masks(value: V, group: Group[V], session: Session, attempt: RoundAttempt) -> V:
    """Return the value under pair masks alone, for what is sent once in a session by all of its silos.

    Source: Bonawitz et al. (CCS 2017), section 4: y_s = x_s + Σ_{t>s} PRG(k_st) − Σ_{t<s} PRG(k_st).
    """
    for peer in attempt.roster:
        if peer != session.name:
            # Of each pair the silo that stands first adds the mask and the other subtracts it.
            sign = 1 if session.roster.index(session.name) < session.roster.index(peer) else -1
            value = group.mask(value, session.mask_key(peer, *attempt.use), sign)
    return value


def apply_masks(value: V, group: Group[V], session: Session, attempt: RoundAttempt, *seal: str | int) -> V:
    """Return the value under pair masks and this silo's seal: uniform to whoever lacks a silo's keys.

    Source: the double masking of Bonawitz et al. (CCS 2017), section 4. Their second mask is shared among the clients
    by Shamir's scheme; the seal is revealed by its own silo.

    Args:
        value: an element of the group; it may be changed in place.
        group: where values are added up.
        session: this silo's.
        attempt: which sum the value is for.
        seal: what the seal is derived for beside the attempt, and must be opened for.
    """
    value = apply_pair_masks(value, group, session, attempt)
    return group.mask(value, session.seal_key(*attempt.use, *seal), 1)


def sum_values(values: Iterable[V], group: Group[V]) -> V:
    """Return the sum over a whole roster, in which pair masks cancel."""
    return reduce(group.add, values, group.zero())


def open_sum(values: Iterable[V], seals: Mapping[str, bytes], group: Group[V]) -> V:
    """Return the sum of the values of a whole roster without its seals.

    Args:
        values: one of each silo on the roster, as `apply_masks` returned it.
        seals: the key of every silo's seal, by its name.
        group: where values are added up.
    """
    # Seals are subtracted from the sum, not from the values: no single value is ever without its seal.
    total = sum_values(values, group)
    for key in seals.values():
        total = group.mask(total, key, -1)
    return total
