"""Attacks of a curious server on Protocol 1 of the ULDP-FL paper, and on the `paillier` aggregator.

Attacked are the inputs of single silos to an encrypted sum: record counts per person, rows, the signs of parameters,
and who takes part in a round. Each attack succeeds on the protocol as printed and fails on ours. Where one defense
alone stops an attack, the attack also succeeds on ours without that defense: the server would read which person has
records in which silo, and could tell a guess at their row from a wrong one. See docs/protocols.md, section 4.
"""

import math

import gmpy2
import numpy as np
import pytest
from gmpy2 import invert, mpz, powmod

from silodp.errors import SilodpError
from silodp_private.paillier.weighting import PaillierSilo
from support.toys import PaperProtocol, Parties, small_rows

LARGEST = 100


# A. Noise on a sub-lattice: what the sum is mod C has no noise.


def denominator(scaled, scale) -> int:
    """lcm of all N[u], if the sums are multiples of C/N[u]."""
    return scale // math.gcd(scale, *scaled)


def exposed_users(scaled, scale, totals, rows_of_users) -> int:
    """Users whose noiseless row Σ_s n·Δ mod a prime of N[u] alone is read off the sums, up to one factor."""
    exposed, common = 0, denominator(scaled, scale)
    for prime in (p for p in range(11, LARGEST) if gmpy2.is_prime(p)):
        owners = [u for u, total in enumerate(totals) if total % prime == 0]
        if len(owners) != 1 or common % prime or common % prime**2 == 0:
            continue
        seen = [x * common // scale % prime for x in scaled]
        true = [int(x) % prime for x in rows_of_users[owners[0]]]
        factor = next((a * pow(b, -1, prime) for a, b in zip(seen, true, strict=True) if b), 0)
        exposed += all((a - factor * b) % prime == 0 for a, b in zip(seen, true, strict=True))
    return exposed


@pytest.mark.parametrize("users", [1, 2, 5])
@pytest.mark.parametrize("system", ["paper", "ours", "ours without the uniform part"])
def test_a_sums_mod_the_scale(system, users):
    rng = np.random.default_rng(users)
    counts = rng.integers(1, LARGEST // 3 + 1, (3, users))
    counts[:, 0] = [20, 20, 19]  # N = 59
    totals = counts.sum(0)
    rows, noise = small_rows(rng, (3, users, 64), 1 << 16), rng.integers(-300_000, 300_000, (3, 64))
    if system == "paper":
        protocol = PaperProtocol(counts, LARGEST)
        scaled, scale = protocol.run(rows, noise), protocol.scale
    else:
        parties = Parties(counts, dimension=64, count_cap=LARGEST // 3, dummy=False)
        uniform = None if system == "ours" else [[0] * 64] * 3
        scaled, scale = parties.run(rows, noise, uniform), parties.parameters.scale
    succeeds = system != "ours"
    weighted = (counts[:, :, None] * rows).sum(0)
    assert (denominator(scaled, scale) == math.lcm(*totals.tolist())) == succeeds
    assert (exposed_users(scaled, scale, totals, weighted) > 0) == succeeds


# B. No re-randomization: the key owner extracts a ciphertext's randomness and tests guesses at the rows.


def randomness(key, ciphertext) -> mpz:
    """ρ of (1+n·m)·ρⁿ; masks and noise added in the plaintext do not touch it."""
    n = key.public.n
    return powmod(ciphertext % n, invert(n, (key.p - 1) * (key.q - 1)), n)


def vanishing_combination(rows) -> list[int]:
    """λ ≠ 0 with Σ_j λ_j·x[u,j] = 0 for each of three rows of length 4: signed minors."""
    x = np.array(rows, dtype=object)
    return [
        (-1) ** j * int(sum(a * b for a, b in zip(m[0], np.cross(m[1], m[2]), strict=True)))
        for j in range(4)
        for m in [np.delete(x, j, axis=1)]
    ]


def consistent(key, ciphertexts, rows) -> bool:
    """Whether ∏_j ρ_j^λ_j = 1 for λ orthogonal to the guessed rows of both users (and to what all columns share)."""
    n, product = key.public.n, mpz(1)
    for c, k in zip(ciphertexts, vanishing_combination([*rows.tolist(), [1] * 4]), strict=True):
        product = product * powmod(randomness(key, c), k, n) % n
    return product == 1


@pytest.mark.parametrize("system", ["paper", "ours", "ours without fresh randomness"])
def test_b_guesses_at_the_rows(system, monkeypatch):
    rng = np.random.default_rng(5)
    counts = rng.integers(1, 81, (2, 2))
    rows, noise = rng.integers(-30_000, 30_000, (2, 2, 4)), rng.integers(-300_000, 300_000, (2, 4))
    if system == "ours without fresh randomness":
        monkeypatch.setattr(PaillierSilo, "_refresh", lambda silo, c: c % silo.public.n_squared)
    if system == "paper":
        protocol = PaperProtocol(counts, 160)
        key = protocol.key
        answer = protocol.answer(0, protocol.encrypt_inverses(), rows[0], noise[0], [11, 22, 33, 44])
    else:
        parties = Parties(counts, dimension=4, count_cap=80)
        assert parties.parameters.slots == 1
        key = parties.server._key
        answer = key.public.ciphertexts_from_bytes(parties.answers(rows, noise)[0], 4, "silo 0")
    other = np.array([rows[0, 0], rows[0, 1] + [0, 0, 1, 0]])
    encoded, other = (
        guess.astype(object) % key.public.n if system == "paper" else guess for guess in (rows[0], other)
    )
    assert consistent(key, answer, encoded) == (system != "ours")
    assert not consistent(key, answer, other)


def test_b_with_the_blinding_known_the_paper_reveals_who_takes_part():
    """A colluding silo gives r_u: then the randomness is predicted outright."""
    rng = np.random.default_rng(6)
    counts, rows = rng.integers(1, 30, (3, 4)), rng.integers(-30_000, 30_000, (4, 1))
    protocol = PaperProtocol(counts, LARGEST)
    key, n = protocol.key, protocol.n
    inverses = protocol.encrypt_inverses()
    known = [randomness(key, c) for c in inverses]

    def predicted(rows) -> mpz:
        exponents = [
            int(counts[0, u]) * protocol.r[u] * protocol.scale % n * (int(rows[u, 0]) % n) for u in range(4)
        ]
        return math.prod(powmod(x, e, n) for x, e in zip(known, exponents, strict=True)) % n

    (seen,) = protocol.answer(0, inverses, rows, np.array([123]), [456])
    absent = rows * [[1], [1], [0], [1]]
    assert randomness(key, seen) == predicted(rows)
    assert randomness(key, seen) != predicted(absent)


# C. Running time: the length of exponents.


def test_c_the_sign_of_every_parameter_shows_in_the_paper():
    """Ours: test_paillier.test_every_row_costs_the_same_multiplications and no exponent that depends on a row."""
    counts, rows = np.ones((2, 1), np.int64), np.array([[5, -5, 1, -30_000, 7, -1]])
    protocol = PaperProtocol(counts, LARGEST)
    protocol.answer(0, protocol.encrypt_inverses(), rows, np.zeros(6, np.int64), [0] * 6)
    assert [bits > 256 for bits in protocol.exponent_bits] == (rows[0] < 0).tolist()


# D. Counts: beyond the cap, absent users, a setup repeated under the same blinding, answers under the same masks.


def test_d_counts_beyond_the_cap():
    counts = np.array([[6], [5]])  # N = 11 does not divide lcm(1..10)
    rows = np.array([[[1000, 990, 980]], [[970, 1000, 990]]])
    protocol = PaperProtocol(counts, 10)
    weights = [abs(x) / protocol.scale / 1000 for x in protocol.run(rows, np.zeros((2, 3), np.int64))]
    assert min(weights) > 1000  # "weights" that should add to 1, silently
    with pytest.raises(SilodpError, match="raise count_cap or drop records"):
        Parties(counts, dimension=3, count_cap=5)
    within = Parties(counts, dimension=3, count_cap=6, noise_std=0.0, dummy=False)
    sums = within.server.round_sum(within.run(rows, np.zeros((2, 3), np.int64)))
    assert max(abs(sums - (6 * rows[0, 0] + 5 * rows[1, 0]) / 11)) <= 1.5


def test_d_an_absent_user_stops_the_paper_and_shows_to_its_server():
    counts = np.array([[0, 3], [0, 1]])
    protocol = PaperProtocol(counts, LARGEST)
    assert [total == 0 for total in protocol.blinded_totals(range(2))] == [True, False]
    with pytest.raises(ZeroDivisionError):
        protocol.encrypt_inverses()
    parties = Parties(counts, dimension=2)
    rows = np.zeros((2, 2, 2), np.int64)
    assert max(abs(parties.server.round_sum(parties.run(rows, rows[:, 0])))) <= 1.5


def small_ratio(x: int, y: int, n: int, largest: int = 60) -> tuple[int, int] | None:
    """The smallest (a, b) with x/y = a/b mod n."""
    ratio = x * int(invert(y, n)) % n
    pairs = ((a, b) for a in range(1, largest) for b in range(1, largest))
    return next((pair for pair in pairs if (pair[0] - pair[1] * ratio) % n == 0), None)


@pytest.mark.parametrize("system", ["paper", "ours", "ours under the same session"])
def test_d_setup_repeated_without_one_silo(system, monkeypatch):
    counts = np.array([[4, 9], [8, 6], [5, 7]])
    if system == "paper":
        protocol = PaperProtocol(counts, LARGEST)
        totals, n = [protocol.blinded_totals(roster) for roster in (range(3), range(2))], protocol.n
        true = [(17, 12), (22, 15)]
    else:
        second = b"session" if system == "ours under the same session" else b"another session"
        key = Parties(
            counts, dimension=1
        ).server._key  # a server that keeps its key makes it as easy as can be
        monkeypatch.setattr("silodp_private.paillier.scheme.PrivateKey.generate", lambda _: key)
        setups = [
            Parties(counts, secret=bytes(32), dimension=1),
            Parties(counts[:2], second, bytes(32), dimension=1),
        ]
        n = setups[0].n
        totals = [
            [sum(int.from_bytes(m[i : i + 64], "big") for m in parties.blinded) % n for i in (0, 64)]
            for parties in setups
        ]
        true = [(18, 13), (23, 16)]  # with the dummy
    found = [small_ratio(x, y, n) for x, y in zip(*totals, strict=True)]
    assert found == (true if system != "ours" else [None, None])


def test_d_two_rounds_under_the_same_masks():
    rng = np.random.default_rng(7)
    counts, rows = rng.integers(1, 30, (3, 2)), small_rows(rng, (2, 2, 5), 1 << 16)
    noise = rng.integers(-300_000, 300_000, (2, 5))
    protocol = PaperProtocol(counts, LARGEST)
    masks = [protocol.n // k for k in (2, 3, 4, 5, 6)]
    first, second = (
        protocol.answer(0, protocol.encrypt_inverses(), rows[t], noise[t], masks) for t in (0, 1)
    )
    n_squared = protocol.key.public.n_squared
    difference = [protocol.key.decrypt(a * invert(b, n_squared)) for a, b in zip(first, second, strict=True)]
    weights = [int(counts[0, u]) * protocol.scale // int(counts[:, u].sum()) for u in (0, 1)]
    change = [[int(x) for x in row] for row in (rows[0] - rows[1]).T]
    noise_change = [protocol.scale * int(z) for z in noise[0] - noise[1]]
    shares = [
        sum(w * x for w, x in zip(weights, xs, strict=True)) + z
        for xs, z in zip(change, noise_change, strict=True)
    ]
    assert difference == shares  # one silo's, in clear

    parties = Parties(counts, dimension=5)
    request, silo, masks = (
        parties.server.encrypt_inverses(np.ones(2, bool)),
        parties.silos[0],
        parties.masks()[0],
    )
    silo.answer(request, [(np.arange(2), rows[0])], noise[0], masks)
    with pytest.raises(SilodpError, match="masks were used before"):
        silo.answer(request, [(np.arange(2), rows[1])], noise[1], masks)
