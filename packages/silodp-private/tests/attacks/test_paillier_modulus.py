"""A Paillier modulus whose owner can single out a person: n with a prime p that divides q − 1.

Then gcd(n, φ(n)) is not 1: raising to the power n is not a permutation, so a "fresh" ciphertext of zero is not uniform,
and ciphertexts of no plaintext exist. Without the proof that silos ask for, the owner of such a key would read the row
of a chosen person in the answer of each silo almost free of noise.
"""

from __future__ import annotations

import gmpy2
import pytest
from gmpy2 import invert, mpz, powmod

from silodp_private.paillier.scheme import (
    PrivateKey,
    PublicKey,
    _challenges,
    proof_bytes,
    prove_modulus,
    residues_to_bytes,
    verify_modulus,
)
from silodp_private.paillier.weighting import PaillierServer
from support.private import PAILLIER, run
from support.refusals import refused

BITS = 512
SESSION = bytes(range(32))


def singling_out(small: int = 18) -> PrivateKey:
    """p of `small` bits that divides q − 1, n = p·q of exactly `BITS` bits; every check of `from_bytes` passes."""
    p = gmpy2.next_prime(mpz(1) << (small - 1) | 12345)
    multiplier = (mpz(1) << (BITS - 1)) // (p * p) | 1
    while True:
        multiplier += 1
        q = p * multiplier + 1
        if (p * q).bit_length() == BITS and gmpy2.is_prime(q):
            return PrivateKey(p, q)


def best_proof(key: PrivateKey) -> tuple[bytes, int]:
    """The roots that exist, and how many of the values have one."""
    n, p, q = key.public.n, key.p, key.q
    roots, found = [], 0
    for value in _challenges(key.public, SESSION):
        # Mod p every value is an nth power; mod q those whose (q−1)/p-th power is 1.
        if powmod(value, (q - 1) // p, q) != 1:
            roots.append(mpz(1))
            continue
        found += 1
        root_q = powmod(value, invert(n, (q - 1) // p), q)
        root_p = powmod(value, invert(n, p - 1), p)
        root = root_p + p * ((root_q - root_p) * invert(p, q) % q)
        assert powmod(root, n, n) == value
        roots.append(root)
    return residues_to_bytes(roots, BITS // 8), found


def test_an_honest_modulus_is_proven_for_its_session():
    key = PrivateKey.generate(BITS)
    proof = prove_modulus(key, SESSION)
    assert len(proof) == proof_bytes(BITS)
    verify_modulus(key.public, proof, SESSION)
    with refused("crypto.paillier_modulus"):
        verify_modulus(key.public, proof, bytes(32))
    with refused("crypto.paillier_modulus"):
        verify_modulus(PrivateKey.generate(BITS).public, prove_modulus(key, SESSION), SESSION)


@pytest.mark.parametrize("place", range(8))
def test_every_root_is_checked(place):
    key = PrivateKey.generate(BITS)
    proof = bytearray(prove_modulus(key, SESSION))
    proof[(place + 1) * BITS // 8 - 1] ^= 1
    with refused("crypto.paillier_modulus"):
        verify_modulus(key.public, bytes(proof), SESSION)


def test_a_proof_of_another_length_or_with_a_root_beyond_the_modulus_is_no_proof():
    """A proof for a larger modulus was refused as a malformed message, if one of its roots was beyond this one."""
    key = PrivateKey.generate(BITS)
    proof = prove_modulus(key, SESSION)
    first, n = int.from_bytes(proof[: BITS // 8], "big"), int(key.public.n)
    beyond = (first + n).to_bytes(BITS // 8 + 1, "big")[-(BITS // 8) :]
    for wrong in (proof[:-1], proof + b"\0", b"", beyond + proof[BITS // 8 :], b"\xff" * len(proof)):
        with refused("crypto.paillier_modulus"):
            verify_modulus(key.public, wrong, SESSION)


def test_a_modulus_that_singles_out_a_person_cannot_be_proven():
    key = singling_out()
    PublicKey.from_bytes(key.public.to_bytes(), BITS)  # nothing else is wrong with it
    assert gmpy2.gcd(key.public.n, (key.p - 1) * (key.q - 1)) == key.p
    proof, found = best_proof(key)
    assert found < 8
    with refused("crypto.paillier_modulus"):
        verify_modulus(key.public, proof, SESSION)


def test_one_value_in_p_has_a_root_where_p_divides():
    """What the number of roots asked for rests on, at a p small enough to count."""
    p = mpz(13)
    q = next(x for k in range(10**6, 2 * 10**6) if gmpy2.is_prime(x := p * k + 1))
    values = [mpz(x) for x in range(2, 20_000) if gmpy2.gcd(x, p * q) == 1]
    with_root = sum(powmod(value, (q - 1) // p, q) == 1 for value in values)
    assert abs(with_root / len(values) - 1 / 13) < 0.01


def test_silos_send_nothing_under_a_key_that_is_not_proven(monkeypatch):
    key = singling_out()
    monkeypatch.setattr(PaillierServer, "public_key", lambda self: key.public.to_bytes())
    monkeypatch.setattr(PaillierServer, "key_proof", lambda self, context: best_proof(key)[0])
    with refused("crypto.paillier_modulus"):
        run(PAILLIER)
