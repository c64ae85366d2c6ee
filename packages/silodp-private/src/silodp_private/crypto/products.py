"""Products of the server's bits and a silo's rows, as additive shares: neither learns the other's factor.

Of every row x_u the silo has, and a bit a_u that the server has, both come to hold a share of a_u·x_u. The silo learns
nothing of a_u, and the server nothing of x_u. One transfer a row: the server chooses the key k_a. The silo sends the
correction x + G(k_0) − G(k_1), which is as good as uniform to whoever lacks one of the keys, and keeps −G(k_0). The
server takes G(k_a) + a·correction, which is a·x + G(k_0). Numbers are words modulo 2^b; G is a stream of a key.

A pair of keys serves one row: two corrections under the same keys would show the difference of two rows. Keys are bound
to the request that is answered, so that a silo whose store was set back, and is asked something else under the same
transfers, sends a row under other keys.

Sources: docs/protocols.md, section 7; Gilboa, "Two Party RSA Key Generation" (CRYPTO 1999), section 4.1, by correlated
transfers as in Asharov, Lindell, Schneider and Zohner, "More Efficient Oblivious Transfer" (CCS 2013), section 5.1.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from silodp.crypto.secure_aggregation import Unsigned, WordGroup
from silodp.crypto.streams import Bytes, expand_keys
from silodp.errors import require

_AT_ONCE = 1 << 20  # bytes of streams that are expanded together


def bind_keys(keys: Bytes, request: str) -> Bytes:
    """Return the keys (..., 32) of transfers hashed with the digest (hex) of the request that chose among them."""
    prefix = hashlib.sha256(b"request\0" + bytes.fromhex(request))
    bound = []
    for key in keys.reshape(-1, keys.shape[-1]):
        one = prefix.copy()
        one.update(key.tobytes())
        bound.append(one.digest())
    return np.frombuffer(b"".join(bound), np.uint8).reshape(keys.shape)


@dataclass(frozen=True)
class MaskedRows:
    """A silo's side for n rows, which are 0 until they are added.

    Attributes:
        corrections: What goes to the server, shape (n, d): rows under both streams.
        share: The silo's share of the sum of all products, shape (d,).
    """

    corrections: Unsigned = field(repr=False)
    share: Unsigned = field(repr=False)

    @classmethod
    def begin(cls, keys: Bytes, group: WordGroup) -> MaskedRows:
        """Return rows of 0 under the streams of their keys.

        Args:
            keys: both keys of each row's transfer by `bind_keys`, shape (2, n, 32).
            group: of the words, with `size` = d.
        """
        # Every row is masked, whether the silo has anything to add to it or not, so that all look alike.
        count = keys.shape[1]
        corrections, share = np.empty((count, group.size), group.dtype), group.zero()
        for some in _blocks(count, group):
            zeros, ones = (_expand(half[some], group) for half in keys)
            np.subtract(zeros, ones, out=corrections[some])
            share -= zeros.sum(axis=0, dtype=group.dtype)
        return cls(corrections, share)

    def add(self, places: NDArray[np.integer], rows: Unsigned) -> None:
        """Add rows (r, d) to those at some different places (r,), modulo the word."""
        self.corrections[places] += rows


def add_products(keys: Bytes, bits: NDArray[np.bool_], corrections: bytes, group: WordGroup) -> Unsigned:
    """Return the server's share of Σ_u a_u·x_u, shape (d,).

    Args:
        keys: the chosen key of each row's transfer by `bind_keys`, shape (n, 32).
        bits: a_u (n,), the choices.
        corrections: `MaskedRows.corrections` in bytes, as received.
        group: of the words.

    Raises:
        SilodpError: the corrections are not n rows of d words (code message.malformed).
    """
    count = len(keys)
    require(
        len(corrections) == count * group.size * group.dtype.itemsize,
        f"Products: {len(corrections)} bytes correct {count} rows of {group.size} numbers; repeat the exchange.",
        code="message.malformed",
    )
    received = np.frombuffer(corrections, group.dtype).reshape(count, group.size)
    # Every correction is read, whatever its bit: the time that this takes tells nothing of the bits.
    taken = (-bits.astype(group.dtype))[:, None]
    share = group.zero()
    for some in _blocks(count, group):
        share += _expand(keys[some], group).sum(axis=0, dtype=group.dtype)
        share += (received[some] & taken[some]).sum(axis=0, dtype=group.dtype)
    return share


def _blocks(count: int, group: WordGroup) -> list[slice]:
    """Return slices of rows whose streams fit the cache."""
    step = max(1, _AT_ONCE // (group.size * group.dtype.itemsize))
    return [slice(first, first + step) for first in range(0, count, step)]


def _expand(keys: Bytes, group: WordGroup) -> Unsigned:
    return expand_keys(keys, group.size * group.dtype.itemsize).view(group.dtype)
