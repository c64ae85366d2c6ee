"""The Paillier cryptosystem: multiplying ciphertexts mod n² adds plaintexts mod n.

A ciphertext of m is (1 + n·m)·ρⁿ mod n² with ρ uniform mod n. The factor ρⁿ, itself an encryption of zero, is called a
*blank*: multiplied into any ciphertext it makes it a fresh one of the same plaintext.

Source: Paillier, "Public-Key Cryptosystems Based on Composite Degree Residuosity Classes", EUROCRYPT 1999; with
decryption by the Chinese remainder theorem, section 7.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import Literal

import gmpy2
import numpy as np
from gmpy2 import invert, mpz, powmod, powmod_sec

from silodp.crypto.streams import Integers, derive_key, keystream
from silodp.errors import SilodpError, require

SECURE_BITS = 3072  # 128 bits of security: NIST SP 800-57 part 1, table 2
_SMALL_PRIMES = gmpy2.primorial(1 << 16)


@dataclass(frozen=True)
class PublicKey:
    """The public key of Paillier (EUROCRYPT 1999, scheme 1) with g = 1 + n.

    Attributes:
        n: The modulus; plaintexts are integers mod n, ciphertexts units mod n².
    """

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
        """Return a key that another party sent; that gcd(n, φ(n)) = 1 its owner proves (`verify_modulus`).

        Args:
            data: n, big-endian.
            bits: the length that n must have.

        Raises:
            SilodpError: n has another length, is prime or a prime power, or has a factor below 2^16.
        """
        # Another party's key: whatever is wrong with it must be found before something is encrypted under it.
        n = mpz(int.from_bytes(data, "big"))
        require(
            len(data) * 8 == bits and n.bit_length() == bits,
            f"the Paillier key has {n.bit_length()} bits, {bits} were agreed: use the run's key_bits",
            code="crypto.paillier_modulus",
        )
        require(
            gmpy2.gcd(n, _SMALL_PRIMES) == 1 and not gmpy2.is_power(n) and not gmpy2.is_prime(n),
            "the Paillier key is even, prime, a power or has a small factor: generate another",
            code="crypto.paillier_modulus",
        )
        return cls(n)

    def to_bytes(self) -> bytes:
        """Return n, big-endian."""
        return residues_to_bytes([self.n], self.bits // 8)

    def plain(self, m: int) -> mpz:
        """Return the ciphertext of m (any integer) with ρ = 1: it hides nothing until a blank is multiplied in."""
        # (1+n)^m = 1 + n·m mod n², by the binomial theorem: no exponentiation is needed.
        return 1 + self.n * (m % self.n)

    def blank(self) -> mpz:
        """Return a fresh encryption of zero, uniform among all of them."""
        return powmod(_uniform_unit(self.n), self.n, self.n_squared)

    def ciphertexts_to_bytes(self, ciphertexts: Sequence[mpz]) -> bytes:
        """Return the numbers in fixed width, big-endian."""
        return residues_to_bytes(ciphertexts, self.bits // 4)

    def ciphertexts_from_bytes(self, data: bytes, count: int, sender: str) -> list[mpz]:
        """Return `count` units mod n² that `sender` sent.

        Raises:
            SilodpError: they are no ciphertexts; the sender is named (code message.malformed).
        """
        ciphertexts = residues_from_bytes(data, count, self.n_squared, sender)
        require(
            all(gmpy2.gcd(c, self.n) == 1 for c in ciphertexts),
            f"{sender} sent a number that is no Paillier ciphertext (not coprime to n): repeat the round",
            code="message.malformed",
        )
        return ciphertexts


@dataclass(frozen=True, repr=False)
class PrivateKey:
    """The private key: it computes mod p² and q² apart, and joins by the Chinese remainder theorem.

    Attributes:
        p, q: The prime factors of n, of equal length.
    """

    p: mpz
    q: mpz

    @classmethod
    def generate(cls, bits: int = SECURE_BITS) -> PrivateKey:
        """Draw two primes of bits/2 bits from the operating system, so that n has `bits` bits and gcd(n, φ(n)) = 1."""
        while True:
            p, q = _prime(bits // 2), _prime(bits // 2)
            # gcd(n, φ(n)) = 1 follows from equal lengths, and is checked all the same, as it will be proven to silos.
            far_apart = abs(p - q).bit_length() > bits // 2 - 100  # else Fermat's method finds them
            if p != q and far_apart and gmpy2.gcd(p * q, (p - 1) * (q - 1)) == 1:
                return cls(p, q)

    @cached_property
    def public(self) -> PublicKey:
        """The public part."""
        return PublicKey(self.p * self.q)

    def encrypt(self, m: int) -> mpz:
        """Return a fresh ciphertext of m mod n."""
        # `powmod_sec` takes the same time for every exponent and base of a length, which p and q need.
        # A blank costs half the exponent: mod p² the nth powers are the x^p with x uniform mod p (gcd(q, p−1) = 1).
        p, q = self.p, self.q
        blank = self._join(powmod_sec(_uniform_unit(p), p, p * p), powmod_sec(_uniform_unit(q), q, q * q))
        return self.public.plain(m) * blank % self.public.n_squared

    def decrypt(self, ciphertext: mpz) -> int:
        """Return the plaintext in (−n/2, n/2).

        Source: Paillier, EUROCRYPT 1999, section 7: decryption using Chinese remaindering.
        """
        p, q, n = self.p, self.q, self.public.n
        m_p, m_q = (
            (powmod_sec(ciphertext % (prime * prime), prime - 1, prime * prime) - 1)
            // prime
            * inverse
            % prime
            for prime, inverse in zip((p, q), self._minus_cofactor_inverses, strict=True)
        )
        # Garner's form of the Chinese remainder theorem; then centered, since sums have a sign.
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
    # The nth root mod n, which exists for every unit if gcd(n, φ(n)) = 1.
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
    """Return the length of the proof for a modulus of so many bits."""
    return _PROOF_ROOTS * bits // 8


def _challenges(public: PublicKey, context: bytes) -> list[int]:
    """Return uniform units mod n that nobody chose: hashed from n and the context."""
    # Multiples of a factor are left out: among all residues they would raise the fraction of those that have a root.
    seed = hashlib.sha256(b"silodp paillier modulus\0" + public.to_bytes() + context).digest()
    values = (value for i in count() for value in draw_residues(derive_key(seed, i), 1, int(public.n)))
    return list(islice((value for value in values if gmpy2.gcd(value, public.n) == 1), _PROOF_ROOTS))


def draw_residues(key: bytes, count: int, modulus: int) -> list[int]:
    """Return `count` integers mod `modulus` from the stream of `key`; see `reduce_bytes`."""
    return reduce_bytes(keystream(key, wide_bytes(modulus) * count).tobytes(), modulus, "big")


def wide_bytes(modulus: int) -> int:
    """Return the bytes of a number with at least 128 bits more than `modulus`."""
    return (int(modulus).bit_length() + 128 + 7) // 8


def reduce_bytes(drawn: bytes, modulus: int, order: Literal["big", "little"]) -> list[int]:
    """Return integers mod `modulus` from uniform bytes, `wide_bytes(modulus)` for each.

    Args:
        drawn: uniform bytes.
        modulus: m.
        order: of the bytes of a number.
    """
    # Uniform below 2^b, reduced modulo m, is within m/2^b of uniform: with 128 bits more nobody sees the difference.
    width = wide_bytes(modulus)
    return [int.from_bytes(drawn[i : i + width], order) % int(modulus) for i in range(0, len(drawn), width)]


@dataclass(frozen=True)
class Residues:
    """Lists of integers modulo n: the group that masks Paillier plaintexts.

    Attributes:
        count: The number of integers of a list.
        modulus: n.
    """

    count: int
    modulus: int

    def zero(self) -> list[int]:
        """Return zeros."""
        return [0] * self.count

    def add(self, value: list[int], other: list[int]) -> list[int]:
        """Return value + other modulo n."""
        return [(a + b) % self.modulus for a, b in zip(value, other, strict=True)]

    def mask(self, value: list[int], key: bytes, sign: int) -> list[int]:
        """Return value ± the residues of `key`."""
        drawn = draw_residues(key, self.count, self.modulus)
        return [(a + sign * b) % self.modulus for a, b in zip(value, drawn, strict=True)]


def residues_to_bytes(residues: Sequence[int], width: int) -> bytes:
    """Return each number in `width` bytes, big-endian."""
    return b"".join(int(x).to_bytes(width, "big") for x in residues)


def residues_from_bytes(data: bytes, count: int, modulus: int, sender: str) -> list[mpz]:
    """Return `count` numbers in [0, modulus), each as wide as the modulus.

    Raises:
        SilodpError: `data` are none; `sender` is named (code message.malformed).
    """
    width = (int(modulus).bit_length() + 7) // 8
    require(
        len(data) == count * width,
        f"{sender} sent {len(data)} bytes where {count} numbers of {width} bytes belong: check its constants",
        code="message.malformed",
    )
    residues = [mpz(int.from_bytes(data[i : i + width], "big")) for i in range(0, len(data), width)]
    require(
        all(x < modulus for x in residues),
        f"{sender} sent a number beyond the modulus: check that it uses the session's key",
        code="message.malformed",
    )
    return residues


def _uniform_unit(modulus: mpz) -> mpz:
    while gmpy2.gcd(x := mpz(secrets.randbelow(int(modulus))), modulus) != 1:
        pass
    return x


def _prime(bits: int) -> mpz:
    """Draw a prime with its two highest bits set, so that the product of two has exactly twice the length."""
    return gmpy2.next_prime(mpz(secrets.randbits(bits)) | mpz(3) << (bits - 2))


class MultiExponentiation:
    """∏_u base_u^(x[u,j]) mod m for d columns j, `slots` of them to a residue: ∏_k (column k)^(2^(slot_bits·k)).

    Users come one after the other. A user's columns share one table of powers (Straus, "Addition Chains of Vectors",
    American Mathematical Monthly 71, 1964). Rows are offset by the bound, so every digit costs one multiplication by an
    entry of the table, whatever its sign or size, and the offset is taken out once for all users. Tables start at
    `blank`, an encryption of zero, so that no entry is 1: a zero is multiplied like any other number.

    Slots are shifted in whichever there is less of: the residues at the end, or every user's base, which then needs a
    table for each slot. Memory: a residue for each digit of each column (of each residue, if bases are shifted).

    Args:
        modulus: m.
        blank: an encryption of zero.
        shape: users, and d.
        bound: |x| ≤ bound.
        slots, slot_bits: as above; 2·bound < 2^slot_bits.
    """

    def __init__(
        self, modulus: mpz, blank: mpz, shape: tuple[int, int], bound: int, slots: int, slot_bits: int
    ):
        users, size = shape
        self._modulus, self._blank, self._bound, self._slot_bits = modulus, blank, bound, slot_bits
        residues = -(-size // slots)
        # With more residues than users it is cheaper to shift each user's base once for a slot than each residue.
        self._slots_of_base, self._slots_of_end = (slots, 1) if residues > users else (1, slots)
        columns = residues * self._slots_of_end
        bits = (2 * bound).bit_length()
        # A wider window makes tables larger and exponents shorter: the sum is the multiplications of one table.
        self._window = min(range(1, 17), key=lambda w: (1 << w) + columns * -(-bits // w))
        # One list for each digit, lowest first.
        self._columns = [[mpz(1)] * columns for _ in range(-(-bits // self._window))]
        self._bases = mpz(1)
        self._padding = residues * slots - size

    def multiply(self, base: mpz, row: Integers) -> None:
        """Multiply one user's part into the products: its base to the powers of its row (d,)."""
        for k, exponents in enumerate(np.pad(row, (0, self._padding)).reshape(-1, self._slots_of_base).T):
            base = self._shift(base, self._slot_bits) if k else base
            self._multiply(base, exponents + self._bound)

    def _multiply(self, base: mpz, exponents: Integers) -> None:
        table, digit = [self._blank], (1 << self._window) - 1
        for _ in range(digit):
            table.append(table[-1] * base % self._modulus)
        for i, column in enumerate(self._columns):
            digits = (exponents >> (i * self._window) & digit).tolist()
            pairs = zip(column, digits, strict=True)
            self._columns[i] = [value * table[k] % self._modulus for value, k in pairs]
        self._bases = self._bases * base % self._modulus

    def residues(self) -> list[mpz]:
        """Return the products, packed: ⌈d/slots⌉ residues."""
        # Every exponent was x + bound, so the product has one factor base^bound of every user too many.
        offset = powmod(invert(self._bases, self._modulus), self._bound, self._modulus)
        *lower, highest = self._columns
        gap = self._slot_bits - self._window * len(lower)
        out = []
        for first in range(0, len(highest), self._slots_of_end):
            product = mpz(1)
            for j in reversed(range(first, first + self._slots_of_end)):  # Horner over slots, then digits
                product = self._shift(product, gap) * highest[j] % self._modulus
                for column in reversed(lower):
                    product = self._shift(product, self._window) * column[j] % self._modulus
                product = product * offset % self._modulus
            out.append(product)
        return out

    def _shift(self, x: mpz, bits: int) -> mpz:
        """Return x^(2^bits)."""
        for _ in range(0 if x == 1 else bits):
            x = x * x % self._modulus
        return x
