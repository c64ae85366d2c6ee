"""The Paillier cryptosystem (Paillier, EUROCRYPT 1999): multiplying ciphertexts mod n² adds plaintexts mod n.

A ciphertext of m is (1 + n·m)·ρⁿ mod n² with ρ uniform mod n. The factor ρⁿ, itself an encryption of zero, is called a
*blank*: multiplied into any ciphertext it makes it a fresh one of the same plaintext.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice

import gmpy2
from gmpy2 import invert, mpz, powmod, powmod_sec

from silodp.crypto.streams import derive_key, keystream
from silodp.errors import SilodpError

SECURE_BITS = 3072
_SMALL_PRIMES = gmpy2.primorial(1 << 16)


@dataclass(frozen=True)
class PublicKey:
    """The modulus n; plaintexts are integers mod n, ciphertexts units mod n²."""

    n: mpz

    @cached_property
    def n_squared(self) -> mpz:
        """The modulus of ciphertexts."""
        return self.n * self.n

    @property
    def bits(self) -> int:
        """Length of n in bits."""
        return int(self.n.bit_length())

    @classmethod
    def from_bytes(cls, data: bytes, bits: int) -> PublicKey:
        """A key another party sent, of exactly `bits` bits: odd, composite, no prime power, no factor below 2^16.

        That gcd(n, φ(n)) = 1 its owner proves (`verify_modulus`).
        """
        n = mpz(int.from_bytes(data, "big"))
        if len(data) * 8 != bits or n.bit_length() != bits:
            raise SilodpError(
                f"the Paillier key has {n.bit_length()} bits, {bits} were agreed: use the run's key_bits",
                code="crypto.paillier_modulus",
            )
        if gmpy2.gcd(n, _SMALL_PRIMES) != 1 or gmpy2.is_power(n) or gmpy2.is_prime(n):
            raise SilodpError(
                "the Paillier key is even, prime, a power or has a small factor: generate another",
                code="crypto.paillier_modulus",
            )
        return cls(n)

    def to_bytes(self) -> bytes:
        """n, big-endian."""
        return residues_to_bytes([self.n], self.bits // 8)

    def plain(self, m: int) -> mpz:
        """The ciphertext of m (any integer) with ρ = 1: hides nothing until a blank is multiplied in."""
        return 1 + self.n * (m % self.n)

    def blank(self) -> mpz:
        """A fresh encryption of zero, uniform among all of them."""
        return powmod(_uniform_unit(self.n), self.n, self.n_squared)

    def ciphertexts_to_bytes(self, ciphertexts: Sequence[mpz]) -> bytes:
        """Fixed width, big-endian."""
        return residues_to_bytes(ciphertexts, self.bits // 4)

    def ciphertexts_from_bytes(self, data: bytes, count: int, sender: str) -> list[mpz]:
        """`count` units mod n² that `sender` sent; anything else is refused."""
        ciphertexts = residues_from_bytes(data, count, self.n_squared, sender)
        if any(gmpy2.gcd(c, self.n) != 1 for c in ciphertexts):
            raise SilodpError(
                f"{sender} sent a number that is no Paillier ciphertext (not coprime to n): repeat the round",
                code="message.malformed",
            )
        return ciphertexts


@dataclass(frozen=True, repr=False)
class PrivateKey:
    """The primes p and q; computes mod p² and q² apart and joins by the Chinese remainder theorem."""

    p: mpz
    q: mpz

    @classmethod
    def generate(cls, bits: int = SECURE_BITS) -> PrivateKey:
        """Two random primes of bits/2 bits from the operating system, n of exactly `bits` bits, gcd(n, φ(n)) = 1."""
        while True:
            p, q = _prime(bits // 2), _prime(bits // 2)
            far_apart = abs(p - q).bit_length() > bits // 2 - 100  # else Fermat's method finds them
            if p != q and far_apart and gmpy2.gcd(p * q, (p - 1) * (q - 1)) == 1:
                return cls(p, q)

    @cached_property
    def public(self) -> PublicKey:
        """The public part."""
        return PublicKey(self.p * self.q)

    def encrypt(self, m: int) -> mpz:
        """A fresh ciphertext of m mod n.

        The blank costs half the exponent: mod p² the nth powers are the x^p with x uniform mod p (gcd(q, p−1) = 1).
        """
        p, q = self.p, self.q
        blank = self._join(powmod_sec(_uniform_unit(p), p, p * p), powmod_sec(_uniform_unit(q), q, q * q))
        return self.public.plain(m) * blank % self.public.n_squared

    def decrypt(self, ciphertext: mpz) -> int:
        """The plaintext in (−n/2, n/2)."""
        p, q, n = self.p, self.q, self.public.n
        m_p, m_q = (
            (powmod_sec(ciphertext % (prime * prime), prime - 1, prime * prime) - 1)
            // prime
            * inverse
            % prime
            for prime, inverse in zip((p, q), self._minus_cofactor_inverses, strict=True)
        )
        m = m_p + p * ((m_q - m_p) * self._p_inverse % q)
        return int(m if m <= n // 2 else m - n)

    @cached_property
    def _minus_cofactor_inverses(self) -> tuple[mpz, mpz]:
        # (1+n)^(p−1) = 1 + (p−1)·n = 1 − p·q mod p², so L of it is −q mod p
        return invert(-self.q, self.p), invert(-self.p, self.q)

    @cached_property
    def _p_inverse(self) -> mpz:
        return invert(self.p, self.q)

    @cached_property
    def _p_squared_inverse(self) -> mpz:
        return invert(self.p * self.p, self.q * self.q)

    def _join(self, mod_p_squared: mpz, mod_q_squared: mpz) -> mpz:
        step = (mod_q_squared - mod_p_squared) * self._p_squared_inverse % (self.q * self.q)
        return mod_p_squared + self.p * self.p * step


_PROOF_ROOTS = 8
"""128 bits: if gcd(n, φ(n)) ≠ 1, a uniform unit has an nth root with probability at most 2^-16, since a prime factor of
n that divides φ(n) is at least 2^16."""


def prove_modulus(key: PrivateKey, context: bytes) -> bytes:
    """Prove that gcd(n, φ(n)) = 1, so that every unit mod n² is a ciphertext and of one plaintext only.

    The proof is the nth root mod n of values hashed from n and `context` (Goldberg, Reyzin, Sagga and Baldimtsi,
    "Efficient Noninteractive Certification of RSA Moduli and Beyond", ASIACRYPT 2019, section 3.2): where a prime p of
    n divides q − 1, only every p-th value has one. With such an n the owner could read a chosen person's row in a
    silo's answer almost free of noise (`tests/attacks/test_paillier_modulus.py`).

    Args:
        key: the private key.
        context: what the proof is bound to, e.g. a session's transcript.

    Returns:
        `proof_bytes(bits)` bytes.
    """
    n, phi = key.public.n, (key.p - 1) * (key.q - 1)
    exponent = invert(n, phi)
    roots = [powmod_sec(value, exponent, n) for value in _challenges(key.public, context)]
    return residues_to_bytes(roots, key.public.bits // 8)


def verify_modulus(public: PublicKey, proof: bytes, context: bytes) -> None:
    """Check the proof of `prove_modulus`; `public` has no prime factor below 2^16 (`PublicKey.from_bytes`).

    Raises:
        SilodpError: it does not hold (code crypto.paillier_modulus).
    """
    n = public.n
    try:
        roots = residues_from_bytes(proof, _PROOF_ROOTS, int(n), "the key's owner")
    except SilodpError:  # another length, or a number beyond n: no proof either
        roots = []
    if [powmod(root, n, n) for root in roots] != _challenges(public, context):
        raise SilodpError(
            "the Paillier key is not proven to be one (gcd(n, φ(n)) = 1): its owner could single out a person; "
            "nothing was sent, and ask who made the key.",
            code="crypto.paillier_modulus",
        )


def proof_bytes(bits: int) -> int:
    """Length of the proof for a modulus of so many bits."""
    return _PROOF_ROOTS * bits // 8


def _challenges(public: PublicKey, context: bytes) -> list[int]:
    """Uniform units mod n that nobody chose: hashed from n and the context. Multiples of a factor are left out, since
    among all residues they would raise the fraction of those that have a root."""
    seed = hashlib.sha256(b"silodp paillier modulus\0" + public.to_bytes() + context).digest()
    values = (value for i in count() for value in draw_residues(derive_key(seed, i), 1, int(public.n)))
    return list(islice((value for value in values if gmpy2.gcd(value, public.n) == 1), _PROOF_ROOTS))


def draw_residues(key: bytes, count: int, modulus: int) -> list[int]:
    """`count` integers mod `modulus` from the key's stream, each from 128 bits more than it needs (bias ≤ 2⁻¹²⁸)."""
    width = (int(modulus).bit_length() + 128 + 7) // 8
    stream = keystream(key, width * count).tobytes()
    return [int.from_bytes(stream[i : i + width], "big") % int(modulus) for i in range(0, len(stream), width)]


@dataclass(frozen=True)
class Residues:
    """Lists of `count` integers modulo n: the group that masks Paillier plaintexts."""

    count: int
    modulus: int

    def zero(self) -> list[int]:
        """All zeros."""
        return [0] * self.count

    def add(self, value: list[int], other: list[int]) -> list[int]:
        """Modulo n."""
        return [(a + b) % self.modulus for a, b in zip(value, other, strict=True)]

    def mask(self, value: list[int], key: bytes, sign: int) -> list[int]:
        """value ± residues drawn with 128 bits to spare."""
        drawn = draw_residues(key, self.count, self.modulus)
        return [(a + sign * b) % self.modulus for a, b in zip(value, drawn, strict=True)]


def residues_to_bytes(residues: Sequence[int], width: int) -> bytes:
    """Each number in `width` bytes, big-endian."""
    return b"".join(int(x).to_bytes(width, "big") for x in residues)


def residues_from_bytes(data: bytes, count: int, modulus: int, sender: str) -> list[mpz]:
    """`count` numbers in [0, modulus), each as wide as the modulus; `sender` is named where they are not."""
    width = (int(modulus).bit_length() + 7) // 8
    if len(data) != count * width:
        raise SilodpError(
            f"{sender} sent {len(data)} bytes where {count} numbers of {width} bytes belong: check its constants",
            code="message.malformed",
        )
    residues = [mpz(int.from_bytes(data[i : i + width], "big")) for i in range(0, len(data), width)]
    if any(x >= modulus for x in residues):
        raise SilodpError(
            f"{sender} sent a number beyond the modulus: check that it uses the session's key",
            code="message.malformed",
        )
    return residues


def _uniform_unit(modulus: mpz) -> mpz:
    while gmpy2.gcd(x := mpz(secrets.randbelow(int(modulus))), modulus) != 1:
        pass
    return x


def _prime(bits: int) -> mpz:
    """A random prime with its two highest bits set, so that the product of two has exactly twice the length."""
    return gmpy2.next_prime(mpz(secrets.randbits(bits)) | mpz(3) << (bits - 2))
