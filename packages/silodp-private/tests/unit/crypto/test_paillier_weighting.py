import numpy as np
import pytest
from gmpy2 import mpz
from scipy import stats

from silodp.crypto import sampling
from silodp.crypto.sampling import SamplingRatio
from silodp_private.paillier import weighting
from silodp_private.paillier.parameters import PaillierParameters
from silodp_private.paillier.scheme import MultiExponentiation
from silodp_private.paillier.weighting import PaillierServer
from support.toys import Parties, cancelling_masks, small_rows

SMALL = {"silos": 2, "users": 3, "dimension": 4, "count_cap": 2, "row_bound": 100, "noise_std": 1.0}
TEST_KEY = {"key_bits": 512, "insecure_for_tests": True}


def plainly(parties: Parties, counts, rows, noise, uniform, sampled) -> list[int]:
    """The same sum in Python integers."""
    scale, dummy = parties.parameters.scale, parties.parameters.dummy
    weights = [
        [scale // max(1, int(n.sum()) + dummy) * int(c) * bool(t) for c in n]
        for n, t in zip(counts.T, sampled, strict=True)
    ]
    return [
        sum(weights[u][s] * int(rows[s, u, j]) for s in range(rows.shape[0]) for u in range(rows.shape[1]))
        + sum(scale * int(noise[s, j]) + uniform[s][j] for s in range(rows.shape[0]))
        for j in range(rows.shape[2])
    ]


def a_round(parties: Parties, rng: np.random.Generator):
    """Random rows, noise and uniform parts that fit the parties' constants."""
    p = parties.parameters
    rows = small_rows(rng, (p.silos, p.users, p.dimension), p.row_bound)
    noise = np.rint(rng.normal(0, p.noise_std, (p.silos, p.dimension))).astype(np.int64)
    uniform = [[int(x * p.scale) - p.scale // 2 for x in rng.random(p.dimension)] for _ in range(p.silos)]
    return rows, noise, uniform


@pytest.mark.parametrize(
    ("shape", "constants"),
    [
        ((3, 6, 20), {"count_cap": 6}),
        ((3, 6, 20), {"count_cap": 6, "dummy": False}),
        ((2, 1, 1), {"count_cap": 1, "row_bound": 1, "noise_std": 0.0}),
        ((2, 4, 3), {"count_cap": 80}),  # one coordinate to a ciphertext
        ((5, 9, 70), {"count_cap": 3, "row_bound": 1 << 30}),
        pytest.param((2, 3, 16), {"count_cap": 60, "key_bits": 3072}, id="3072 bits"),
    ],
)
def test_the_decrypted_integers_are_the_plain_sum(shape, constants):
    rng = np.random.default_rng(1)
    silos, users, dimension = shape
    counts = rng.integers(0, constants["count_cap"] + 1, (silos, users))
    counts[:, 0] = 0  # somebody without any record
    parties = Parties(counts, dimension=dimension, **constants)
    for _ in range(2):
        rows, noise, uniform = a_round(parties, rng)
        sampled = rng.random(users) < 0.6
        got = parties.run(rows, noise, uniform, sampled)
        assert got == plainly(parties, counts, rows, noise, uniform, sampled)
        exact = np.array(plainly(parties, counts, rows, noise, [[0] * dimension] * silos, sampled), object)
        rounded = parties.server.round_sum(got)
        assert rounded.dtype == np.int64
        scale = parties.parameters.scale
        assert all(
            2 * abs(int(r) * scale - x) <= (silos + 1) * scale for r, x in zip(rounded, exact, strict=True)
        )


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("cap", [3, 80])
def test_the_largest_sums_there_can_be_still_fit(sign, cap):
    counts = np.array([[cap] * 5, [0] * 5])
    parties = Parties(counts, dimension=40, row_bound=1000, noise_std=0.0, count_cap=cap, dummy=False)
    p = parties.parameters
    rows = np.zeros((2, 5, 40), np.int64)
    rows[0, :, :2] = [[0, sign * 1000]]
    noise = np.full((2, 40), sign * p.noise_bound)
    uniform = [[sign * (p.scale // 2)] * 40] * 2
    assert parties.run(rows, noise, uniform) == plainly(parties, counts, rows, noise, uniform, [True] * 5)


def test_the_result_rounds_half_up():
    server = PaillierServer(PaillierParameters(**SMALL, **TEST_KEY))
    assert server.parameters.scale == 60
    assert server.round_sum([29, 30, -30, -31, 60 * 7 + 1]).tolist() == [0, 1, 0, -1, 7]


def test_rows_may_come_in_chunks_in_any_order_or_not_at_all():
    rng = np.random.default_rng(2)
    counts = np.full((2, 4), 2)
    parties = Parties(counts, dimension=5)
    rows, noise, uniform = a_round(parties, rng)
    rows[1, 2] = 0
    request = parties.server.encrypt_inverses(np.ones(4, bool))
    masks = parties.masks()
    first = parties.silos[0].answer(request, [(np.arange(4), rows[0])], noise[0], masks[0], uniform[0])
    chunks = [(np.array([3]), rows[1, [3]]), (np.array([1, 0]), rows[1, [1, 0]])]
    second = parties.silos[1].answer(request, iter(chunks), noise[1], masks[1], uniform[1])
    assert parties.server.compute_scaled_sum([first, second]) == plainly(
        parties, counts, rows, noise, uniform, [True] * 4
    )


def test_the_uniform_part_is_uniform_and_centered():
    """Repair 1: without it every residue mod C would be 0."""
    counts = np.ones((2, 2), np.int64)
    parties = Parties(counts, dimension=3000, count_cap=2, noise_std=0.0)
    scale = parties.parameters.scale
    request = parties.server.encrypt_inverses(np.ones(2, bool))
    none = np.zeros(3000, np.int64)
    part = parties.server.compute_scaled_sum(
        [parties.silos[0].answer(request, [], none, [0] * parties.parameters.ciphertexts)]
    )
    assert (min(part), max(part), scale) == (-30, 29, 60)
    assert stats.chisquare(np.bincount(np.array(part) + 30, minlength=60)).pvalue > 1e-6


def test_requests_are_fresh_and_unsampled_users_look_like_the_others():
    parties = Parties(np.ones((2, 6), np.int64), dimension=2)
    public, seen = parties.silos[0].public, set()
    for sampled in (np.ones(6, bool), np.zeros(6, bool), np.ones(6, bool)):
        request = public.ciphertexts_from_bytes(parties.server.encrypt_inverses(sampled), 6, "server")
        seen |= set(request)
        assert all(c % parties.n != 1 for c in request)  # the randomness is not 1
    assert len(seen) == 18


@pytest.mark.parametrize("key_bits", [272, 512], ids=["entries that are no whole words", "whole words"])
def test_what_silo_0_chooses_is_a_request_with_a_sample_that_nobody_knows(key_bits):
    """Every entry decrypts to β(i, κ)·inverse; the chosen ones make the sum of the sample that i and κ decide."""
    rng, law = np.random.default_rng(3), SamplingRatio(3, 10)
    counts = rng.integers(0, 3, (3, 8))
    parties = Parties(counts, dimension=3, key_bits=key_bits, row_bound=100, noise_std=1.0)
    p, server = parties.parameters, parties.server
    places, shifts = sampling.draw_server_cells(8, law), rng.integers(0, 10, 8)
    tables = server.tables(law, places, server.encrypt_pairs())
    assert tables.shape == (8, 10, p.key_bits // 4)
    for u, i in enumerate(places.tolist()):
        for shift in range(10):
            entry = tables[u, shift].tobytes()
            plain = server._key.decrypt(mpz(int.from_bytes(entry, "big"))) % parties.n
            assert plain == ((i - shift) % 10 < 3) * server._inverses[u]
    sampled = law.select(places, shifts).astype(bool)
    request = tables[np.arange(8), shifts].tobytes()
    rows, noise, uniform = a_round(parties, rng)
    answers = [
        silo.answer(request, [(np.arange(8), rows[s])], noise[s], masks, uniform[s])
        for s, (silo, masks) in enumerate(zip(parties.silos, parties.masks(), strict=True))
    ]
    assert server.compute_scaled_sum(answers) == plainly(parties, counts, rows, noise, uniform, sampled)


def test_pairs_are_fresh_and_say_nothing_of_who_is_sampled():
    """No ciphertext comes twice, in a round or over rounds; nor do they differ in size or form."""
    parties = Parties(np.ones((2, 6), np.int64), dimension=2)
    public = parties.silos[0].public
    seen = [public.ciphertexts_from_bytes(parties.server.encrypt_pairs(), 12, "server") for _ in range(3)]
    assert len({c for pairs in seen for c in pairs}) == 36
    assert all(c % parties.n != 1 for pairs in seen for c in pairs)


def test_answers_are_fresh():
    parties = Parties(np.ones((2, 1), np.int64), dimension=1)
    silo = parties.silos[0]
    request = parties.server.encrypt_inverses(np.ones(1, bool))
    zero = np.zeros(1, np.int64)
    answers = {silo.answer(request, [], zero, masks, [0]) for masks in ([1], [2], [3])}
    randomness = {int.from_bytes(a, "big") % parties.n for a in answers}
    assert len(randomness) == 3


def test_no_count_shows_in_the_exponent_or_the_base(monkeypatch):
    """Repair 4: a user without records costs what any other does."""
    parties = Parties(np.array([[0, 1, 50], [50, 0, 0]]), dimension=3, count_cap=50)
    bits, bases, exponents = [], [], set()
    power = weighting.powmod

    def recorded(base, exponent, modulus):
        bits.append(exponent.bit_length())
        exponents.add(int(exponent))
        bases.append(power(base, exponent, modulus))
        return bases[-1]

    monkeypatch.setattr(weighting, "powmod", recorded)
    rows = np.zeros((2, 3, 3), np.int64)
    parties.run(rows, rows[:, 0], sampled=np.array([True, False, True]))
    assert len(bits) == 6
    assert len(exponents) == 6, "all users without records would have one exponent"
    assert max(bits) - min(bits) <= 1
    assert min(bits) >= 512 + 63
    assert all(base.bit_length() > 900 for base in bases)


def test_without_the_dummy_an_absent_user_shows_and_with_it_not():
    counts = np.array([[0, 2], [0, 1]])
    shown = {}
    for dummy in (True, False):
        parties = Parties(counts, dimension=1, dummy=dummy)
        total = [
            sum(int.from_bytes(m[i : i + 64], "big") for m in parties.blinded) % parties.n for i in (0, 64)
        ]
        shown[dummy] = [x == 0 for x in total]
    assert shown == {True: [False, False], False: [True, False]}


def test_survivors_of_an_attempt_keep_session_and_weights():
    counts = np.array([[1, 2], [3, 0], [2, 2]])
    parties = Parties(counts, dimension=2)
    rows, noise, uniform = a_round(parties, np.random.default_rng(3))
    request = parties.server.encrypt_inverses(np.ones(2, bool))
    answers = [
        parties.silos[s].answer(request, [(np.arange(2), rows[s])], noise[s], masks, uniform[s])
        for s, masks in zip((0, 2), parties.masks(2), strict=True)
    ]
    rows[1], noise[1], uniform[1] = 0, 0, [0, 0]
    assert parties.server.compute_scaled_sum(answers) == plainly(
        parties, counts, rows, noise, uniform, [True, True]
    )


def test_masked_answers_and_counts_look_uniform_to_the_server():
    """One silo's message decrypts to its mask plus something: uniform mod n, whatever the counts and rows."""
    silo_sees, counts = [], np.zeros((2, 2), np.int64)
    parties = Parties(counts, dimension=1, count_cap=1)
    request, zero = parties.server.encrypt_inverses(np.ones(2, bool)), np.zeros(1, np.int64)
    for mask in cancelling_masks(parties.n, 200, 1)[:199]:
        answer = parties.silos[1].answer(request, [], zero, mask)
        silo_sees.append(
            parties.server._key.decrypt(mpz(int.from_bytes(answer, "big"))) % parties.n / mpz(parties.n)
        )
    assert stats.kstest([float(x) for x in silo_sees], "uniform").pvalue > 1e-6


def test_the_blinding_changes_with_the_key():
    """Else two moduli give the server r·N in the integers, by the Chinese remainder theorem, and so factors of N."""
    setups = [Parties(np.ones((2, 1), np.int64), b"session", bytes(32), dimension=1) for _ in range(2)]
    (x, n), (y, m) = [(sum(int.from_bytes(b, "big") for b in s.blinded) % s.n, s.n) for s in setups]
    assert (x + n * ((y - x) * pow(n, -1, m) % m)).bit_length() > 512 + 136 + 32


def test_every_user_is_multiplied_in_with_a_row_or_without(monkeypatch):
    """Else the number of a silo's users shows in its running time."""
    multiplied, multiply = [], MultiExponentiation.multiply
    monkeypatch.setattr(
        MultiExponentiation, "multiply", lambda *args: (multiplied.append(args[1]), multiply(*args))
    )
    parties = Parties(np.array([[0, 1, 2], [2, 0, 0]]), dimension=2)
    request, zero = parties.server.encrypt_inverses(np.ones(3, bool)), np.zeros(2, np.int64)
    for owners in ([], [1], [0, 1, 2]):
        multiplied.clear()
        masks = parties.masks()[0]
        parties.silos[0].answer(
            request, [(np.array(owners, int), np.ones((len(owners), 2), np.int64))], zero, masks
        )
        assert len(multiplied) == 3
