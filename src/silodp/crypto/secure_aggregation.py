"""Sums of which the server learns nothing but the result (docs/protocols.md, section 2).

A silo adds to its value, for every other silo on the attempt's roster, a mask that the other one subtracts, and a
*seal* of its own. The masks cancel in the sum over the whole roster; the seals are opened by their silos only for that
sum, so a vector that comes late can be subtracted from nothing.
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
from silodp.crypto.streams import keystream
from silodp.errors import SilodpError

V = TypeVar("V")
Unsigned = NDArray[np.unsignedinteger]


class Group(Protocol[V]):
    """A finite group whose uniform elements hide what is added to them."""

    def zero(self) -> V:
        """The neutral element; `add` and `subtract` may change it in place."""

    def add(self, value: V, other: V) -> V:
        """value + other."""

    def mask(self, value: V, key: bytes, sign: int) -> V:
        """value ± the uniform element that belongs to `key`."""


@dataclass(frozen=True)
class Words:
    """Vectors of `size` words modulo 2^32 or 2^64, or modulo a smaller power of two inside such words."""

    size: int
    bits: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Of the words: the smaller one that holds them."""
        return np.dtype("<u4" if self.bits <= 32 else "<u8")

    def zero(self) -> Unsigned:
        """All zeros."""
        return np.zeros(self.size, self.dtype)

    def of(self, value: NDArray[np.int64]) -> Unsigned:
        """Signed integers modulo 2^bits."""
        return self.reduced(value.astype(self.dtype))

    def reduced(self, value: Unsigned) -> Unsigned:
        """Modulo 2^bits, in place."""
        if self.bits not in (32, 64):
            value &= self.dtype.type((1 << self.bits) - 1)
        return value

    def add(self, value: Unsigned, other: Unsigned) -> Unsigned:
        """Wraps around, in place."""
        value += other
        return self.reduced(value)

    def mask(self, value: Unsigned, key: bytes, sign: int) -> Unsigned:
        """In place."""
        stream = keystream(key, self.size * self.dtype.itemsize).view(self.dtype)
        if sign > 0:
            value += stream
        else:
            value -= stream
        return self.reduced(value)

    def centered(self, value: Unsigned) -> NDArray[np.int64]:
        """The representative nearest to zero."""
        rest = 64 - self.bits
        signed: NDArray[np.int64] = (value.astype(np.uint64) << np.uint64(rest)).view(np.int64) >> np.int64(
            rest
        )
        return signed

    def checked(self, value: Unsigned, sender: str) -> Unsigned:
        """The value, if it is one.

        Raises:
            SilodpError: its length or type is wrong; `sender` is named.
        """
        if value.shape != (self.size,) or value.dtype != self.dtype:
            raise SilodpError(
                f"silo '{sender}' sent {value.dtype} of shape {value.shape} where {self.size} words of {self.bits} "
                "bits were due: it runs another version, or was altered; nothing was used.",
                code="message.malformed",
            )
        return value


@dataclass(frozen=True)
class RoundAttempt:
    """One try to add up the values of `roster`, all of whom must then open it.

    `release` counts the noisy values of a round: it grows when someone may have opened the one before. `request` is the
    digest of what all silos on the roster were asked alike: silos that were asked different things share no masks.
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


def pair_masked(value: V, group: Group[V], session: Session, attempt: RoundAttempt) -> V:
    """The value under pair masks alone, for what is sent once in a session by all of its silos."""
    for peer in attempt.roster:
        if peer != session.name:
            sign = 1 if session.roster.index(session.name) < session.roster.index(peer) else -1
            value = group.mask(value, session.mask_key(peer, *attempt.use), sign)
    return value


def masked(value: V, group: Group[V], session: Session, attempt: RoundAttempt, *seal: str | int) -> V:
    """The value under pair masks and this silo's seal: uniform to whoever lacks a silo's keys.

    `seal`: what the seal is derived for beside the attempt, and must be opened for.
    """
    return group.mask(pair_masked(value, group, session, attempt), session.seal_key(*attempt.use, *seal), 1)


def summed(values: Iterable[V], group: Group[V]) -> V:
    """The sum over a whole roster, in which pair masks cancel."""
    return reduce(group.add, values, group.zero())


def opened(values: Iterable[V], seals: Mapping[str, bytes], group: Group[V]) -> V:
    """The sum of the values of a whole roster, whose seals are all here."""
    total = summed(values, group)
    for key in seals.values():
        total = group.mask(total, key, -1)
    return total
