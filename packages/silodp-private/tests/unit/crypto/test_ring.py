"""Negacyclic products, carries, packing, and vectors modulo 2^bits, against Python's integers."""

import secrets

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silodp.errors import SilodpError
from silodp_private.crypto.lattice.ring import FourierTransform, LimbGroup, Ring, pack, unpack


def negacyclic(a, b):
    """The product modulo X^N+1, term by term."""
    size = len(a)
    product = [0] * size
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            sign = -1 if i + j >= size else 1
            product[(i + j) % size] += sign * int(x) * int(y)
    return product


def value(limbs, ring):
    """Coefficients (..., K, N) as Python integers modulo 2^(wK)."""
    total = sum(limbs[..., k, :].astype(object) << (ring.limb_bits * k) for k in range(ring.limbs))
    return total % (1 << (ring.limb_bits * ring.limbs))


@pytest.mark.parametrize("size", [8, 64])
def test_matrices_of_polynomials_multiply_like_polynomials(size):
    rng = np.random.default_rng(0)
    left, right = rng.integers(-9999, 9999, (2, 3, size)), rng.integers(-9999, 9999, (3, 2, size))
    transform = FourierTransform(size)
    found = transform.inverse(transform.forward(left) @ transform.forward(right))
    for i in range(2):
        for j in range(2):
            expected = np.sum([negacyclic(left[i, m], right[m, j]) for m in range(3)], axis=0)
            np.testing.assert_array_equal(found[i, j], expected)


def test_conjugate_spectrum_is_the_adjoint():
    rng = np.random.default_rng(1)
    a, b, c = rng.integers(-99, 99, (3, 1, 1, 16))
    transform = FourierTransform(16)
    product = transform.inverse(transform.forward(a) @ transform.forward(b))
    adjoint = transform.inverse(transform.forward(a).conj() @ transform.forward(c))
    assert np.sum(product * c) == np.sum(b * adjoint)


@given(st.integers(2, 24), st.integers(1, 6), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_carries_and_shifts_keep_the_value(limb_bits, limbs, seed):
    rng, ring = np.random.default_rng(seed), Ring(64, limb_bits, limbs)
    element = rng.integers(-(2**60), 2**60, (2, limbs, 64))
    before = value(element, ring)
    balanced = ring.balance(element.copy())
    assert -ring.half <= balanced.min()
    assert balanced.max() < ring.half
    canonical = ring.canonical(element.copy())
    assert canonical.min() >= 0
    assert canonical.max() <= ring.mask
    assert (value(balanced, ring) == before).all()
    assert (value(canonical, ring) == before).all()
    integers, shift = rng.integers(-(2**62), 2**62, (2, 64)), int(rng.integers(0, limb_bits * limbs))
    added = ring.add_shifted(balanced.copy(), integers, shift)
    modulus = 1 << (limb_bits * limbs)
    assert (value(added, ring) == (before + (integers.astype(object) << shift)) % modulus).all()


def test_elements_take_exactly_their_bits_and_are_uniform_from_their_key():
    ring = Ring(128, 18, 9)
    key = secrets.token_bytes(32)
    element = ring.uniform(key, 3)
    assert (element == ring.uniform(key, 3)).all()
    assert (element != ring.uniform(bytes(32), 3)).mean() > 0.9
    assert element.min() < -ring.half * 0.99
    assert element.max() > ring.half * 0.99
    packed = ring.to_bytes(element)
    assert packed.shape == (3, 128 * 162 // 8)
    np.testing.assert_array_equal(ring.from_bytes(packed), element)
    np.testing.assert_array_equal(ring.from_bytes(packed[1]), element[1])


@given(st.integers(1, 64), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_packing_round_trips(bits, groups, seed):
    values = np.random.default_rng(seed).integers(0, 2**64, 64 * groups, np.uint64) >> np.uint64(64 - bits)
    packed = pack(values, bits)
    assert len(packed) == 8 * bits * groups
    np.testing.assert_array_equal(unpack(packed, bits), values)
    with pytest.raises(ValueError, match="size"):
        unpack(packed[1:], bits)


def numbers(vector):
    """Words (words, count) as Python integers."""
    return sum(word.astype(object) << (64 * i) for i, word in enumerate(vector))


@given(st.integers(1, 200), st.integers(0, 2**32 - 1), st.booleans())
@settings(deadline=None, max_examples=60)
def test_vectors_add_modulo_any_power_of_two(bits, seed, extreme):
    digits = LimbGroup(bits, 64)
    key = np.random.default_rng(seed).bytes(32)
    a, b = digits.uniform(key), digits.uniform(key[::-1])
    if extreme:  # every carry runs through all words
        a, b = digits.subtract(digits.zero(), a >> np.uint64(63)), a >> np.uint64(63)
    modulus = 1 << bits
    assert (numbers(a) < modulus).all()
    assert (numbers(digits.add(a, b)) == (numbers(a) + numbers(b)) % modulus).all()
    assert (numbers(digits.subtract(a, b)) == (numbers(a) - numbers(b)) % modulus).all()
    assert (digits.mask(digits.mask(a, key, 1), key, -1) == a).all()
    packed = digits.to_bytes(a)
    assert len(packed) == digits.size == 64 * bits // 8
    np.testing.assert_array_equal(digits.from_bytes(packed), a)
    first = bits // 3
    width = min(64, bits - first)
    assert (digits.bits_from(a, first, width) == (numbers(a) >> first) % (1 << width)).all()


@pytest.mark.parametrize(("limb_bits", "limbs"), [(18, 4), (15, 5), (21, 3), (24, 8), (16, 4)])
def test_limbs_become_vectors_and_back(limb_bits, limbs):
    ring = Ring(64, limb_bits, limbs)
    element = ring.canonical(ring.uniform(bytes(32), 2, 2).astype(np.int64))
    digits = LimbGroup(limb_bits * limbs, 2 * 2 * 64)
    vector = digits.from_limbs(element, limb_bits)
    assert (numbers(vector) == value(element, ring).reshape(-1)).all()
    np.testing.assert_array_equal(digits.to_limbs(vector, limb_bits, 2, 2, 64), element)


def test_a_vector_of_another_length_is_refused():
    with pytest.raises(SilodpError, match="same parameters"):
        LimbGroup(72, 64).from_bytes(bytes(575))


def test_masks_are_uniform_over_all_bits():
    vector = LimbGroup(75, 1 << 14).uniform(secrets.token_bytes(32))
    for bit in range(75):
        share = float((vector[bit // 64] >> np.uint64(bit % 64) & np.uint64(1)).mean())
        assert abs(share - 0.5) < 6 * 0.5 / 2**7
