"""One round of private weighting under ring-LWE: the server learns a weighted sum only.

Server and silos hold additive shares of a weight v_u modulo 2^T. The server sends its shares encrypted, U₁ users in a
polynomial; a silo adds its own shares, multiplies by the vectors n[s,u]·Δ_u, which lie in the coefficients of B
polynomials, adds its noise in clear, hides everything but the sum, and passes the ciphertext itself to secure
aggregation. What the server decrypts is Σ_s (Σ_u v_u·n[s,u]·Δ[s,u] + noise_s) modulo 2^T, exactly.

Sources: docs/protocols.md, section 3. Encryption: Lyubashevsky, Peikert and Regev, "On Ideal Lattices and Learning with
Errors over Rings", EUROCRYPT 2010.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silodp.crypto.streams import KEY_BYTES, Integers, Words, derive_key, derive_secret, keystream
from silodp.errors import require
from silodp.settings import check_shape
from silodp_private.crypto.lattice._verification import VerifiedProducts
from silodp_private.crypto.lattice.noise import add_flooding, draw_centered_binomial, draw_ternary
from silodp_private.crypto.lattice.parameters import LatticeParameters
from silodp_private.crypto.lattice.ring import FourierTransform, LimbGroup

# Polynomials encrypted together: the spectra of a group stay small, whatever U is.
_AT_A_TIME = 32
_PIECE = 1 << 14  # numbers of a row whose squares are added up together

Chunk = tuple[Integers, NDArray[Any]]
"""Owners (r,), and their rows (r, d) of grid units."""


def derive_seed(request: dict[str, bytes], context: bytes) -> bytes:
    """Derive the seed of the uniform halves from the session's transcript, round and attempt, and the server's nonce.

    So the server cannot choose them, and neither a replayed nor another context's nonce repeats a seed unnoticed.

    Args:
        request: the server's; its "nonce" is used.
        context: names session, round and attempt.
    """
    return derive_secret(request["nonce"], hashlib.sha256(context).digest(), "lattice", "uniform halves")


class LatticeServer:
    """The server's side: it holds the secret polynomial, encrypts shares and decrypts the sum.

    Source: the encryption of Lyubashevsky, Peikert and Regev (EUROCRYPT 2010), with the plaintext in the highest bits.

    Its products have one factor in {−1, 0, 1} and are exact by the a-priori bound of docs/protocols.md, section 3
    (error < 2^−4 for every ring and limb that `LatticeParameters` allows).

    Args:
        parameters: public constants.
        key: 32 secret bytes that the secret follows from, to be kept for decryption after a restart; None draws them.
            Make a fresh one for every attempt: a malicious silo can make the server's next model carry its secret (it
            adds a multiple of the plaintext's step to one coefficient of its masked answer), and must learn no other
            attempt.
    """

    def __init__(self, parameters: LatticeParameters, key: bytes | None = None):
        parameters.check()
        self.parameters = parameters
        self._ring = parameters.ring
        self._transform = FourierTransform(parameters.ring_size)
        key = secrets.token_bytes(KEY_BYTES) if key is None else key
        # Ternary, as the limits of STANDARD_128 are for; kept as its spectrum, since it is only multiplied with.
        secret = draw_ternary(derive_key(key, "lattice secret"), 1, 1, parameters.ring_size)
        self._secret = self._transform.forward(secret)

    def request(self, shares: Words, context: bytes, key: bytes | None = None) -> dict[str, bytes]:
        """Encrypt shares, for every silo alike.

        Args:
            shares: (U,) modulo 2^T.
            context: what server and silos agree on: session transcript, round and attempt.
            key: 32 secret bytes for these shares and this context alone, kept to repeat the same bytes; None: every
                call draws afresh.

        Returns:
            "nonce", "public key" and "ciphertexts" (c0 of every U₁ users), of `LatticeParameters.request_bytes`.
        """
        parameters, ring = self.parameters, self._ring
        _validate(shares, "shares", parameters.users)
        key = secrets.token_bytes(KEY_BYTES) if key is None else key
        request = {"nonce": derive_key(key, "nonce")}
        seed, errors = derive_seed(request, context), derive_key(key, "errors")
        public = self._zero(
            ring.uniform(derive_key(seed, "public key"), 1), [self._error(errors, "public key")]
        )
        ciphertexts = []
        packed = _pack(parameters, shares)
        for first in range(0, parameters.polynomials, _AT_A_TIME):
            some = range(first, min(first + _AT_A_TIME, parameters.polynomials))
            halves = np.stack([ring.uniform(derive_key(seed, place)) for place in some])
            c0 = self._zero(halves, [self._error(errors, place) for place in some])
            _add_shares(parameters, ring.balance(c0), packed[some.start : some.stop])
            ciphertexts.append(ring.to_bytes(c0).tobytes())
        request["public key"] = ring.to_bytes(ring.balance(public)).tobytes()
        return request | {"ciphertexts": b"".join(ciphertexts)}

    def decrypt(self, total: Words) -> Integers:
        """Return the sum of all silos' vectors: (d,), centered modulo 2^T.

        Args:
            total: the sum of their digits, unmasked.

        Raises:
            SilodpError: an error is larger than honest parties can make it (code crypto.decryption).
        """
        parameters, phase = self.parameters, self._phase(total)
        step_bits = parameters.sent_bits - parameters.plaintext_bits
        # To the nearest multiple of the step: add half of it, then floor.
        half = np.ones((parameters.blocks, parameters.outputs), np.int64)
        parameters.kept.canonical(parameters.kept.add_shifted(phase, half, step_bits - 1))
        digits = LimbGroup(parameters.sent_bits, half.size)
        numbers = digits.from_limbs(phase, parameters.limb_bits)
        # The 8 bits below the plaintext: the error in units of 1/256 of a step, and the half step that was added above.
        errors = digits.bits_from(numbers, step_bits - 8, 8).astype(np.int64) - 128
        step = 2.0 ** (parameters.modulus_bits - parameters.plaintext_bits)
        require(
            np.abs(errors).max() <= 256 * 2**parameters.room_bits / step + 1,
            "the sum does not decrypt: a mask is left in it, or an answer was altered or belongs to another request",
            code="crypto.decryption",
        )
        plain = digits.bits_from(numbers, step_bits, parameters.plaintext_bits)
        rest = 64 - parameters.plaintext_bits
        # To the top of the word and back, so that the sign is copied.
        return ((plain << np.uint64(rest)).view(np.int64) >> np.int64(rest))[: parameters.dimension]

    def _phase(self, total: Words) -> Integers:
        """Return c0 + c1·secret at the outputs, (B, K − drop, N/U₁): plaintext·2^(Q−T) plus errors; balanced."""
        parameters = self.parameters
        shape = (parameters.blocks, parameters.outputs + parameters.ring_size)
        limbs = parameters.kept.balance(parameters.digits.to_limbs(total, parameters.limb_bits, *shape))
        c0, c1 = limbs[..., : parameters.outputs], limbs[..., parameters.outputs :]
        products = self._transform.inverse(self._transform.forward(np.ascontiguousarray(c1)) * self._secret)
        return parameters.kept.balance(_take_outputs(parameters, products) + c0)

    def _zero(self, halves: NDArray[np.int32], errors: list[Integers]) -> Integers:
        """Return −c1·secret + e for every c1: c0 of encryptions of zero (u, K, N), carries left."""
        c0 = -self._transform.inverse(self._transform.forward(halves) * self._secret)
        c0[:, 0] += np.stack(errors)
        return c0

    def _error(self, key: bytes, user: int | str) -> Integers:
        """Draw an error polynomial (N,) until its spectrum ‖ê‖_∞ is small enough for the flooding to cover it."""
        attempt = 0
        while True:
            error = draw_centered_binomial(derive_key(key, "error", user, attempt), self.parameters.ring_size)
            spectrum = self._transform.forward(error[None, None])
            if float(abs(spectrum).max()) <= self.parameters.error_spectrum:
                return error
            # Drawn anew under another key: the errors that are used are independent of those that were refused.
            attempt += 1


@dataclass(frozen=True)
class Plaintexts:
    """The plaintexts n[s,u]·Δ_u of one silo in one round, in batches and within their public bounds.

    A multiplier M holds those of U₁ users: number j of user i of a polynomial stands at the coefficient
    j·U₁ + U₁ − 1 − i. Multiplied by Σ_i a_i·X^i, it has Σ_i a_i·n_i·Δ_i[j] at j·U₁ + U₁ − 1: all other products fall on
    other residues modulo U₁, also those that wrap around, since U₁ divides N.

    The flooding margin and the sensitivity rest on these bounds, so they are checked here, whoever else checked them.

    Attributes:
        parameters: The public constants.
        counts: The silo's numbers of records n[s,u], shape (U,), each in 0..n_max.

    Raises:
        SilodpError: counts of another shape, or out of range.
    """

    parameters: LatticeParameters
    counts: Integers = field(repr=False)

    def __post_init__(self) -> None:
        counts, cap = self.counts, self.parameters.count_cap
        check_shape("counts", counts, self.parameters.users, kind="iu")
        require(
            counts.min(initial=0) >= 0 and counts.max(initial=0) <= cap,
            f"counts must lie between 0 and the public cap of {cap}; cap them before the first round",
            code="argument.value",
            field="counts",
        )

    def batches(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Integers, NDArray[np.int32]]]:
        """Yield places of polynomials (b,) and their M (b, B, N); each is valid until the next one is asked for.

        A polynomial may come in several batches, each with other users: the product is linear.

        Raises:
            SilodpError: an owner is no user or comes twice; a row is not integer, not (d,), or longer than C/g.
        """
        parameters = self.parameters
        # A batch reuses the same memory, which is why it is valid until the next one.
        numbers = parameters.blocks * parameters.outputs
        held = np.zeros((parameters.batch_polynomials, numbers, parameters.packed), np.int32)
        slots: dict[int, int] = {}  # by the place of the polynomial
        seen = np.zeros(parameters.users, bool)

        def batch() -> tuple[Integers, NDArray[np.int32]]:
            shape = (len(slots), parameters.blocks, parameters.ring_size)
            return np.array([*slots], np.int64), held[: len(slots)].reshape(shape)

        for some, rows in chunks:
            require(
                rows.shape == (len(some), parameters.dimension) and rows.dtype.kind in "iu",
                f"rows must be integers of shape ({len(some)}, {parameters.dimension})",
                code="method.rows",
            )
            for owner, row in zip(some.tolist(), rows, strict=True):
                require(
                    0 <= owner < parameters.users and not seen[owner],
                    "every owner must be a user of the common index, with one row; check the rows",
                    code="method.rows",
                )
                seen[owner] = True
                require(
                    _square(row) <= float(parameters.clip_units) ** 2,
                    f"a row is longer than C/g = {parameters.clip_units}; clip, then round toward zero",
                    code="method.rows",
                )
                place, i = divmod(owner, parameters.packed)
                if place not in slots and len(slots) == len(held):
                    yield batch()
                    slots.clear()
                    held[:] = 0
                into = held[
                    slots.setdefault(place, len(slots)), : parameters.dimension, parameters.packed - 1 - i
                ]
                np.multiply(row, self.counts[owner], out=into, dtype=np.int32, casting="unsafe")
        if slots:
            yield batch()


@dataclass(frozen=True)
class LatticeSilo:
    """A silo's side: it multiplies encrypted shares by its users' vectors.

    Attributes:
        parameters: The public constants.
        claim: A function that stores a seed durably and returns whether it was new. It is called before anything is
            computed, and a seed that is not new is refused: two encryptions under one seed would betray the difference
            of their plaintexts.
    """

    parameters: LatticeParameters
    claim: Callable[[bytes], bool] = field(repr=False)  # a method would print what it belongs to

    def __post_init__(self) -> None:
        self.parameters.check()

    def answer(
        self,
        request: dict[str, bytes],
        context: bytes,
        counts: Integers,
        chunks: Iterable[Chunk],
        shares: Words,
        noise: Integers,
    ) -> Words:
        """Return an encryption of Σ_u v_u·n_u·Δ_u + noise.

        A user without a row costs no time: where it must not show who is absent, pass rows of zeros.

        Source: docs/protocols.md, section 3, step 3.

        Args:
            request: the server's.
            context: as for `LatticeServer.request`.
            counts: n[s,u] (U,), in 0..n_max.
            chunks: owners (r,) and rows (r, d) in grid units; every user at most once, ‖row‖₂ ≤ C/g.
            shares: the silos' shares of the weights (U,), modulo 2^T.
            noise: (d,) from `scale_noise`.

        Returns:
            the digits to be masked and sent, elements of `parameters.digits`.

        Raises:
            SilodpError: the request is malformed (code message.malformed) or its seed was seen (crypto.reused); an
                input is out of its public bounds; a block could not be computed exactly (crypto.parameters).
        """
        parameters = self.parameters
        ring = parameters.ring
        sizes = self.parameters.request_bytes
        require(
            {name: len(value) for name, value in request.items()} == sizes,
            f"the server's request must hold {sizes} bytes; server and silos differ in parameters",
            code="message.malformed",
        )
        _validate(shares, "shares", parameters.users)
        _validate(noise, "noise", parameters.dimension)
        batches = Plaintexts(parameters, counts).batches(chunks)
        seed = derive_seed(request, context)
        require(
            self.claim(seed),
            "the server sent ciphertexts under a seed seen before; refused: begin a new attempt",
            code="crypto.reused",
        )
        key = secrets.token_bytes(KEY_BYTES)
        total = np.zeros((parameters.blocks, 2, parameters.limbs, ring.size), np.int64)  # c0 and c1

        def public_key(_: slice) -> NDArray[np.int32]:
            sent = np.frombuffer(request["public key"], np.uint8)
            return np.concatenate([ring.from_bytes(sent), ring.uniform(derive_key(seed, "public key"))])[None]

        products = VerifiedProducts(parameters, derive_key(key, "tests"))
        ciphertexts = _Ciphertexts(parameters, seed, request["ciphertexts"], _pack(parameters, shares))
        _add_users(products, total, batches, ciphertexts)
        # A fresh encryption of zero, u·public key + errors, hides what c1 tells about the multipliers.
        fresh = draw_ternary(derive_key(key, "ternary"), 1, parameters.blocks, ring.size).astype(np.int32)
        products.add_to(total, fresh, public_key)
        total[:, :, 0] += draw_centered_binomial(derive_key(key, "errors"), parameters.blocks, 2, ring.size)
        # The last block has outputs behind the vector. A server that put a share at another coefficient would find a
        # row there, so they are made uniform.
        behind = parameters.blocks * parameters.outputs - parameters.dimension
        uniform = keystream(derive_key(key, "behind"), 8 * behind).view(np.int64)
        outputs = np.concatenate([noise.view(np.int64), uniform]).reshape(parameters.blocks, -1)
        # Only outputs of c0 ever leave: the others hold products of one user's row with another one's weight, which
        # have no noise.
        c0 = np.ascontiguousarray(_take_outputs(parameters, total[:, 0]))
        # Noise is added in clear to c0, at the place of plaintexts.
        ring.add_shifted(c0, outputs, parameters.modulus_bits - parameters.plaintext_bits)
        # Without flooding the low bits at decryption would be the errors times M, a function of single rows.
        add_flooding(c0, ring, parameters.flooding_bits, derive_key(key, "flooding"))
        # Balanced limbs: to drop the low ones is to round to the nearest.
        kept = ring.balance(np.concatenate([c0, total[:, 1]], axis=-1))[:, parameters.dropped :]
        return parameters.digits.from_limbs(ring.canonical(kept), parameters.limb_bits)


@dataclass(frozen=True, repr=False)  # shares are secret
class _Ciphertexts:
    """Both halves of ciphertexts, c0 as sent and c1 from the seed.

    The silo's own shares are added to c0: times the multipliers they are its part of the sum, at the place of
    plaintexts, and nobody sees c0 with them.

    Attributes:
        parameters: The public constants.
        seed: Of the halves c1.
        sent: The server's halves c0.
        shares: The silo's, by polynomials (⌈U/U₁⌉, U₁).
    """

    parameters: LatticeParameters
    seed: bytes
    sent: bytes
    shares: Words

    def read(self, places: Integers, some: slice) -> NDArray[np.int32]:
        """Return limb rows (b, 2K, N) of some of the places."""
        ring, places = self.parameters.ring, places[some]
        size = ring.limb_bits * ring.limbs * ring.size // 8
        sent = np.frombuffer(self.sent, np.uint8).reshape(-1, size)[places]
        c0 = ring.from_bytes(sent)
        _add_shares(self.parameters, c0, self.shares[places])
        halves = np.stack([ring.uniform(derive_key(self.seed, place)) for place in places.tolist()])
        return np.concatenate([c0, halves], axis=1)


def _add_users(
    products: VerifiedProducts,
    total: Integers,
    batches: Iterator[tuple[Integers, NDArray[np.int32]]],
    ciphertexts: _Ciphertexts,
) -> None:
    """Add the products of all users; at the end the multipliers, the most memory of a round, are given back."""
    for places, multipliers in batches:
        products.add_to(total, multipliers, partial(ciphertexts.read, places))


def _add_shares(parameters: LatticeParameters, c0: NDArray[Any], shares: Words) -> None:
    """Add packed shares (u, U₁) to encryptions (u, K, N) in place: highest T bits of the first U₁ coefficients."""
    ring, low = parameters.ring, c0[..., : parameters.packed].astype(np.int64)
    ring.add_shifted(low, shares.view(np.int64), parameters.modulus_bits - parameters.plaintext_bits)
    c0[..., : parameters.packed] = ring.balance(low)


def _pack(parameters: LatticeParameters, shares: Words) -> Words:
    """Return the shares (U,) by polynomials, (⌈U/U₁⌉, U₁): 0 for users who do not exist."""
    packed = np.zeros(parameters.polynomials * parameters.packed, shares.dtype)
    packed[: parameters.users] = shares
    return packed.reshape(-1, parameters.packed)


def _take_outputs(parameters: LatticeParameters, element: Integers) -> Integers:
    """Return the coefficients (..., N/U₁) of an element (..., N) that hold numbers of the vector."""
    return element[..., parameters.packed - 1 :: parameters.packed]


def _square(row: Integers) -> float:
    """Return ‖row‖², exact up to 2^53, in pieces that stay in the cache."""
    pieces = (row[first : first + _PIECE].astype(np.float64) for first in range(0, len(row), _PIECE))
    return sum(float(piece @ piece) for piece in pieces)


def _validate(vector: NDArray[Any], name: str, size: int) -> None:
    require(
        vector.shape == (size,) and vector.dtype.itemsize == 8 and vector.dtype.kind in "iu",
        f"{name} must be {size} integers of 64 bits, not {vector.dtype} of shape {vector.shape}",
        code="argument.shape",
        field=name,
    )
