"""Keys from keys, and streams of uniform words from keys.

A key is 32 bytes. It is used for one purpose, named when it is derived, and its stream is read once, from the start.
"""

from __future__ import annotations

import json

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from numpy.typing import NDArray

KEY_BYTES = 32
_BLOCK = 64  # bytes of one ChaCha20 block
_MOST_BLOCKS = 1 << 32  # the counter's range
_ZEROS = bytes(1 << 18)


def secret_of(material: bytes, salt: bytes, *purpose: str | int) -> bytes:
    """A key from material that is secret but not uniform (a Diffie-Hellman result), by HKDF-SHA256 (RFC 5869)."""
    return HKDF(SHA256(), KEY_BYTES, salt, _label(purpose)).derive(material)


def subkey(key: bytes, *purpose: str | int) -> bytes:
    """The key for one purpose, by HKDF-Expand; whoever is given it learns nothing about `key` or other purposes."""
    return HKDFExpand(SHA256(), KEY_BYTES, _label(purpose)).derive(key)


def keystream(key: bytes, size: int) -> NDArray[np.uint8]:
    """The first `size` bytes of ChaCha20 under `key`, nonce 0 (the key has no other use)."""
    if size > _BLOCK * _MOST_BLOCKS:
        raise ValueError(f"a stream of {size} bytes is longer than ChaCha20's counter")
    out = np.empty(size, np.uint8)
    view = memoryview(out.data)
    encryptor = Cipher(ChaCha20(key, bytes(16)), None).encryptor()
    for first in range(0, size, len(_ZEROS)):
        piece = min(len(_ZEROS), size - first)
        encryptor.update_into(memoryview(_ZEROS)[:piece], view[first : first + piece])
    return out


def words(key: bytes, count: int, dtype: type[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """`count` uniform words of this unsigned type, little-endian."""
    width = np.dtype(dtype).newbyteorder("<")
    return keystream(key, count * width.itemsize).view(width)


def _label(purpose: tuple[str | int, ...]) -> bytes:
    return json.dumps(["silodp", *purpose]).encode()
