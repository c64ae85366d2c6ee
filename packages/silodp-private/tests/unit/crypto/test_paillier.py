import math
import secrets

import gmpy2
import numpy as np
import pytest
from gmpy2 import mpz
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from silodp.errors import SilodpError
from silodp_private.paillier import scheme
from silodp_private.paillier.scheme import MultiExponentiation, PrivateKey, PublicKey, draw_residues

KEY = PrivateKey.generate(512)
PUBLIC = KEY.public
TINY = PrivateKey(mpz(11), mpz(17))


def test_a_key_has_the_length_asked_for_and_fit_primes():
    for _ in range(5):
        key = PrivateKey.generate(512)
        assert key.public.bits == 512
        assert key.p.bit_length() == key.q.bit_length() == 256
        assert gmpy2.is_prime(key.p)
        assert gmpy2.is_prime(key.q)


@pytest.mark.parametrize(
    ("unfit", "bits"),
    [((11, 23), 16), ((13, 13), 16), ((2**255 + 95, gmpy2.next_prime(2**255 + 95)), 512)],
    ids=["n and φ(n) have a factor in common", "equal", "close"],
)
def test_unfit_primes_are_drawn_again(monkeypatch, unfit, bits):
    fit = (KEY.p, KEY.q)
    draws = iter([*map(mpz, unfit), *fit])
    monkeypatch.setattr(scheme, "_prime", lambda _: next(draws))
    assert (PrivateKey.generate(bits).p, next(draws, None)) == (KEY.p, None)


@given(st.integers(-(2**510), 2**510), st.integers(-(2**508), 2**508), st.integers(-(2**20), 2**20))
@settings(max_examples=30, deadline=None)
def test_ciphertexts_add_and_scale(a, b, k):
    n_squared = PUBLIC.n_squared
    assert KEY.decrypt(KEY.encrypt(a)) == a
    total = KEY.encrypt(b) * PUBLIC.plain(a) * PUBLIC.blank() % n_squared
    assert (KEY.decrypt(total) - a - b) % PUBLIC.n == 0
    assert (KEY.decrypt(gmpy2.powmod(KEY.encrypt(b), k, n_squared)) - k * b) % PUBLIC.n == 0


def test_ciphertext_by_the_definition():
    n = PUBLIC.n
    by_hand = pow(1 + n, 12345, n * n) * pow(mpz(678), n, n * n) % (n * n)
    assert KEY.decrypt(by_hand) == 12345
    assert PUBLIC.plain(12345) == pow(1 + n, 12345, n * n)


@pytest.mark.parametrize("draw", [TINY.public.blank, lambda: TINY.encrypt(0)], ids=["blank", "encrypt"])
def test_encryptions_of_zero_are_uniform_among_all(draw):
    n = 11 * 17
    every = sorted({pow(x, n, n * n) for x in range(n) if math.gcd(x, n) == 1})
    assert len(every) == 160
    draws = [int(draw()) for _ in range(8000)]
    assert set(draws) <= set(every)
    assert stats.chisquare([draws.count(x) for x in every]).pvalue > 1e-6


@pytest.mark.parametrize(
    ("n", "problem"),
    [
        (PUBLIC.n - 1, "even"),
        (
            next(65521 * m for m in range((2**511 // 65521) | 1, 2**512, 2) if 65521 * m > 2**511),
            "small factor",
        ),
        (gmpy2.next_prime(2**511), "prime"),
        (gmpy2.next_prime(2**256 - 2**200) ** 2, "power"),
        (PUBLIC.n >> 1, "511 bits"),
    ],
    ids=["even", "small factor", "prime", "square", "short"],
)
def test_a_silo_refuses_a_bad_public_key(n, problem):
    with pytest.raises(SilodpError, match=problem):
        PublicKey.from_bytes(int(n).to_bytes(64, "big"), 512)
    assert PublicKey.from_bytes(PUBLIC.to_bytes(), 512) == PUBLIC


def test_a_key_of_another_width_is_refused():
    with pytest.raises(SilodpError, match="512 bits, 528 were agreed"):
        PublicKey.from_bytes(PUBLIC.to_bytes(), 528)
    with pytest.raises(SilodpError, match="use the run's key_bits"):
        PublicKey.from_bytes(b"\0" + PUBLIC.to_bytes(), 512)


def test_bad_ciphertexts_are_refused_by_sender():
    good = [KEY.encrypt(1), KEY.encrypt(2)]
    data = PUBLIC.ciphertexts_to_bytes(good)
    assert len(data) == 2 * 128
    assert PUBLIC.ciphertexts_from_bytes(data, 2, "silo 3") == good
    for wrong in (data[:-1], data + b"\0", data[:128], b""):
        with pytest.raises(
            SilodpError, match=rf"silo 3 sent {len(wrong)} bytes where 2 numbers of 128 bytes"
        ):
            PUBLIC.ciphertexts_from_bytes(wrong, 2, "silo 3")
    with pytest.raises(SilodpError, match="silo 3 sent a number beyond the modulus"):
        PUBLIC.ciphertexts_from_bytes(data[:128] + b"\xff" * 128, 2, "silo 3")
    for not_a_unit in (0, PUBLIC.n, KEY.p, 5 * KEY.q):
        with pytest.raises(SilodpError, match="silo 3 sent a number that is no Paillier ciphertext"):
            PUBLIC.ciphertexts_from_bytes(PUBLIC.ciphertexts_to_bytes([good[0], not_a_unit]), 2, "silo 3")


@given(st.data(), st.integers(1, 2**40), st.integers(1, 3), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_power_products_are_products_of_powers(data, bound, users, size, slots):
    entries = st.lists(st.integers(-bound, bound), min_size=size, max_size=size)
    rows = np.array(data.draw(st.lists(entries, min_size=users, max_size=users)), np.int64)
    modulus = PUBLIC.n_squared
    bases = [mpz(secrets.randbelow(int(modulus))) for _ in range(users)]
    slot_bits = (2 * bound).bit_length() + 3
    products = MultiExponentiation(modulus, mpz(1), (users, size), bound, slots, slot_bits)
    for base, row in zip(bases, rows, strict=True):
        products.multiply(base, row)
    expected = []
    for first in range(0, size, slots):
        packed = [
            sum(int(x) << (k * slot_bits) for k, x in enumerate(row[first : first + slots])) for row in rows
        ]
        expected.append(
            math.prod(gmpy2.powmod(b, e, modulus) for b, e in zip(bases, packed, strict=True)) % modulus
        )
    assert products.residues() == expected


class Traced:
    """A residue that notes the length of what it is multiplied with."""

    trace: list[tuple[int, int]] = []  # noqa: RUF012

    def __init__(self, value):
        self.value = value

    def __mul__(self, other):
        Traced.trace.append((self.value.bit_length() // 64, other.value.bit_length() // 64))
        return Traced(self.value * other.value)

    def __rmul__(self, other):
        return Traced(other * self.value)  # the first factor of each column, and of the bases, is 1

    def __mod__(self, modulus):
        return Traced(self.value % modulus)


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_every_row_costs_the_same_multiplications(slots):
    """No sign, no zero and no size shows in what is multiplied (docs/protocols.md, section 4)."""
    bound, size = 1 << 10, 50
    rng = np.random.default_rng(0)
    traces = []
    for row in (
        np.zeros(size),
        np.full(size, bound),
        np.full(size, -bound),
        rng.integers(-bound, bound + 1, size),
    ):
        products = MultiExponentiation(PUBLIC.n_squared, Traced(PUBLIC.blank()), (2, size), bound, slots, 20)
        Traced.trace = []
        for _ in range(2):
            products.multiply(Traced(PUBLIC.blank()), row.astype(np.int64))
        traces.append(sorted(Traced.trace))
    assert {len(trace) for trace in traces} == {len(traces[0])}
    assert all(
        min(min(pair) for pair in trace) >= 14 for trace in traces
    )  # none with a short number, such as 1


def test_residues_from_a_key_are_uniform_and_repeat():
    modulus = 3 << 6  # bytes mod 192 would favor the first 64 by two to one
    draws = draw_residues(bytes(32), 20_000, modulus)
    assert stats.chisquare(np.bincount(draws, minlength=modulus)).pvalue > 1e-6
    assert draws == draw_residues(bytes(32), 20_000, modulus)
    assert max(draw_residues(bytes(32), 100, PUBLIC.n)).bit_length() > 500
