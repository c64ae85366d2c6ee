"""The random draws of `lattice`: secrets, errors, flooding, and integer noise at the scale of weights.

Every function reads the whole stream of one key, which has no other use.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from silodp.crypto.streams import Integers, derive_key, draw_words, keystream
from silodp.errors import require
from silodp_private.crypto.lattice.parameters import ERROR_ETA
from silodp_private.crypto.lattice.ring import Ring

_COINS = np.uint64((1 << ERROR_ETA) - 1)


def draw_ternary(key: bytes, *shape: int) -> NDArray[np.int8]:
    """Return integers of this shape, uniform in {−1, 0, 1}."""
    count = int(np.prod(shape, dtype=np.int64))
    # Of 256 values of a byte 255 are used, so that each of the three results has 85: exactly uniform.
    drawn = keystream(key, count + count // 64 + 64)  # one byte in 256 is refused: 1.6 % and 64 spare suffice
    kept = drawn[drawn < 255][:count]
    if len(kept) < count:
        return draw_ternary(derive_key(key, "again"), *shape)
    return (kept % 3).astype(np.int8).reshape(shape) - np.int8(1)


def draw_centered_binomial(key: bytes, *shape: int) -> Integers:
    """Return integers of this shape, each the sum of η fair coins less η others: mean 0, variance η/2.

    Source: the error distribution of Alkim, Ducas, Pöppelmann and Schwabe, "Post-Quantum Key Exchange: a New Hope"
    (USENIX Security 2016).
    """
    # Each half of 42 bits of a word is 21 coins; their sum is the number of ones.
    bits = draw_words(key, int(np.prod(shape, dtype=np.int64)), np.uint64)
    ones: Integers = np.bitwise_count(bits & _COINS).astype(np.int64)
    ones -= np.bitwise_count((bits >> np.uint64(ERROR_ETA)) & _COINS)
    return ones.reshape(shape)


def add_flooding(element: Integers, ring: Ring, bits: int, key: bytes) -> Integers:
    """Add uniform integers in [−2^(bits−1), 2^(bits−1)) to every coefficient in place; carries are left.

    They reach from the lowest bit to bit `bits`, so that none of the errors below shows.

    Source: docs/protocols.md, section 3; the smudging lemma of Asharov, Jain, López-Alt, Tromer, Vaikuntanathan and
    Wichs, "Multiparty Computation with Low Communication, Computation and Interaction via Threshold FHE" (EUROCRYPT
    2012).

    Args:
        element: limbs (..., K, n) of n coefficients.
        ring: the ring that the element is in.
        bits: F.
        key: secret, of this use alone.
    """
    shape = (*element.shape[:-2], element.shape[-1])
    for limb in range(-(-bits // ring.limb_bits)):
        # The last limb takes what is left of the bits, so that the whole is uniform below 2^bits.
        width = min(ring.limb_bits, bits - limb * ring.limb_bits)
        drawn = draw_words(derive_key(key, "flooding", limb), int(np.prod(shape, dtype=np.int64)), np.uint32)
        element[..., limb, :] += (drawn & np.uint32((1 << width) - 1)).reshape(shape)
    # What was drawn lies in [0, 2^bits); half of the range is taken off to center it.
    top, offset = divmod(bits - 1, ring.limb_bits)
    element[..., top, :] -= 1 << offset
    return element


def scale_noise(share: Integers, shift: int, stream: np.random.Generator) -> Integers:
    """Return 2^shift·share + centered Uniform of width 2^shift.

    Without the uniform part the sum modulo 2^shift would be free of noise.

    Source: docs/protocols.md, section 3.

    Args:
        share: integer noise (d,), in units of 2^shift.
        shift: r.
        stream: of the uniform part.

    Raises:
        SilodpError: the scaled share does not fit into 62 bits (code argument.grid).
    """
    require(
        shift >= 0 and np.abs(share).max(initial=0) < 1 << (61 - shift),
        f"integer noise does not fit at the scale 2^{shift}; check the noise multiplier and the grid",
        code="argument.grid",
    )
    if not shift:
        return share.astype(np.int64)
    # Together with the integers times 2^shift it is spread over all residues modulo 2^shift.
    uniform = stream.integers(-(1 << (shift - 1)), 1 << (shift - 1), share.shape)
    return (share.astype(np.int64) << shift) + uniform
