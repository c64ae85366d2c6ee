"""Key derivation, and streams of pseudorandom words from a key.

A key is 32 bytes. It is used for one purpose, named when it is derived, and its stream is read once, from the start.
Sources: HKDF, RFC 5869; ChaCha20, RFC 8439.
"""

from __future__ import annotations

import json

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
Integers = NDArray[np.int64]

# 256 bits, as AES-256 and ChaCha20 take them.
KEY_BYTES = 32
_BLOCK = 64  # bytes of one ChaCha20 block
_MAX_BLOCKS = 1 << 32  # the counter's range
# Zeros are encrypted in pieces of 256 KiB, which stay in the processor's cache.
_ZEROS = bytes(1 << 18)


def derive_secret(material: bytes, salt: bytes, *purpose: str | int) -> bytes:
    """Derive a key from material that is secret but not uniform, such as a Diffie-Hellman result, by HKDF-SHA256.

    Source: RFC 5869, sections 2.2 (extract) and 2.3 (expand).

    Args:
        material: the secret.
        salt: public, e.g. a session's transcript.
        purpose: what the key is used for, and nothing else.

    Returns:
        32 bytes.
    """
    return HKDF(SHA256(), KEY_BYTES, salt, _label(purpose)).derive(material)


def derive_key(key: bytes, *purpose: str | int) -> bytes:
    """Derive the key for one purpose by HKDF-Expand: it says nothing about `key`, nor about other purposes.

    Source: RFC 5869, section 2.3. `key` is uniform already, so section 3.3 allows to leave out the extraction.

    Args:
        key: 32 uniform bytes.
        purpose: what the derived key is used for, and nothing else.

    Returns:
        32 bytes.
    """
    return HKDFExpand(SHA256(), KEY_BYTES, _label(purpose)).derive(key)


def keystream(key: bytes, size: int) -> Bytes:
    """Return the first `size` bytes of ChaCha20 (RFC 8439) under `key`, with nonce 0.

    Args:
        key: 32 secret bytes that have no other use, so that a fixed nonce repeats no stream.
        size: number of bytes, at most 2^38.

    Returns:
        (size,) uint8.
    """
    # Beyond its range the counter would begin anew, and the stream would repeat.
    if size > _BLOCK * _MAX_BLOCKS:
        raise ValueError(f"a stream of {size} bytes is longer than ChaCha20's counter")
    out = np.empty(size, np.uint8)
    view = memoryview(out.data)
    # The last 12 of these 16 bytes are the nonce and the first 4 the counter; a key has one use, so both may be 0.
    encryptor = Cipher(ChaCha20(key, bytes(16)), None).encryptor()
    for first in range(0, size, len(_ZEROS)):
        piece = min(len(_ZEROS), size - first)
        encryptor.update_into(memoryview(_ZEROS)[:piece], view[first : first + piece])
    return out


def expand_keys(keys: Bytes, size: int) -> Bytes:
    """Return `size` pseudorandom bytes of each key (n, 32): shape (n, size).

    They are the key's stream; where no more bytes than a key has are needed, they are the key itself, which has no
    other use.
    """
    if size <= KEY_BYTES:
        return keys[:, :size].copy()
    streams = np.empty((len(keys), size), np.uint8)
    for key, stream in zip(keys, streams, strict=True):
        stream[:] = keystream(key.tobytes(), size)
    return streams


def draw_words(key: bytes, count: int, dtype: type[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return `count` uniform words of an unsigned type, little-endian: the stream of `key`."""
    width = np.dtype(dtype).newbyteorder("<")
    return keystream(key, count * width.itemsize).view(width)


def _label(purpose: tuple[str | int, ...]) -> bytes:
    # JSON keeps the parts apart: ("a", "b") and ("ab",), or 1 and "1", give different labels.
    return json.dumps(["silodp", *purpose]).encode()
