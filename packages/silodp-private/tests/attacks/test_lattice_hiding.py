"""What the randomness of the `lattice` aggregator must hide, tested as distributions.

Attacked are the ciphertexts, by a server that holds the decryption key and by anyone who compares several of them. If
secrets, errors or flooding had another distribution, or were used twice, decryption errors and differences of
ciphertexts would tell parts of single silos or of the server's weights; only the sum may be opened.
"""

import math
import secrets

import numpy as np
import pytest
from scipy import stats

from silodp.crypto.streams import derive_key
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp_private.crypto.lattice import scheme
from silodp_private.crypto.lattice.noise import (
    add_flooding,
    draw_centered_binomial,
    draw_ternary,
    scale_noise,
)
from silodp_private.crypto.lattice.parameters import ERROR_ETA, search_parameters
from silodp_private.crypto.lattice.ring import FourierTransform, Ring
from silodp_private.crypto.lattice.scheme import LatticeServer, LatticeSilo
from support.lattice_rounds import CONTEXT, Seeds, ask, rows, toy

TOY = toy()
KEY = bytes(range(32))
UNLIKELY = 1e-9


def test_ternary_is_uniform_on_three_values():
    drawn = draw_ternary(KEY, 3, 1 << 20)  # enough to see the bias of a byte modulo 3
    assert stats.chisquare([(drawn == x).sum() for x in (-1, 0, 1)]).pvalue > UNLIKELY
    assert (drawn == draw_ternary(KEY, 3, 1 << 20)).all()
    assert (drawn != draw_ternary(bytes(32), 3, 1 << 20)).any()


def test_errors_have_the_law_of_coins():
    drawn = draw_centered_binomial(KEY, 100_000)
    law = stats.binom(2 * ERROR_ETA, 0.5)
    inner = np.arange(-9, 10)
    observed = [(drawn == x).sum() for x in inner]
    expected = law.pmf(inner + ERROR_ETA) * len(drawn)
    observed.append(len(drawn) - sum(observed))
    assert stats.chisquare(observed, [*expected, len(drawn) - expected.sum()]).pvalue > UNLIKELY
    assert drawn.var() == pytest.approx(3.24**2, rel=0.03)


@pytest.mark.parametrize("bits", [5, 16, 23, 40])
def test_flooding_reaches_every_bit_and_no_further(bits):
    ring = Ring(4096, 16, 3)
    element = add_flooding(np.zeros((2, 3, 4096), np.int64), ring, bits, KEY)
    drawn = sum(element[:, k] << (16 * k) for k in range(3))
    assert -(2 ** (bits - 1)) <= drawn.min()
    assert drawn.max() < 2 ** (bits - 1)
    assert drawn.std() == pytest.approx(2**bits / math.sqrt(12), rel=0.03)
    shifted = drawn + 2 ** (bits - 1)
    for bit in range(bits):
        assert abs(float((shifted >> bit & 1).mean()) - 0.5) < 0.05


def test_scaled_noise_is_uniform_below_its_scale():
    share = np.random.default_rng(0).integers(-(2**30), 2**30, 20_000)
    noise = scale_noise(share, 12, Randomness.secret().stream())
    dither = noise - (share << 12)
    assert dither.min() >= -2048
    assert dither.max() < 2048
    assert (
        stats.chisquare(np.bincount(noise % 4096 // 64)).pvalue > UNLIKELY
    )  # without it, all of them in one
    assert (scale_noise(share, 0, Randomness.secret().stream()) == share).all()
    with pytest.raises(SilodpError, match="does not fit"):
        scale_noise(share, 40, Randomness.secret().stream())


@pytest.mark.parametrize("size", [8192, 16384])
def test_the_server_draws_errors_again_until_their_spectrum_is_small(size):
    parameters = search_parameters(
        dimension=100,
        users=5,
        silos=3,
        count_cap=5,
        noise_multiplier=5.0,
        attempts=10,
        epsilon=1.0,
        delta=1e-5,
    )
    parameters = type(parameters)(**vars(parameters) | {"ring_size": size})
    server, transform, bound = LatticeServer(parameters), FourierTransform(size), parameters.error_spectrum
    assert bound == pytest.approx(2 ** (10 + (size > 8192) / 2))

    def largest(error):
        return np.abs(transform.forward(error[None, None])).max()

    assert all(largest(server._error(KEY, user)) <= bound for user in range(150))
    above = [
        largest(draw_centered_binomial(derive_key(KEY, "error", user, 0), size)) > bound
        for user in range(150)
    ]
    assert 0 < sum(above) < 20


def test_every_ciphertext_of_a_request_has_its_own_error_and_uniform_half():
    parameters = toy(users=40)
    server, shares = LatticeServer(parameters), np.full(40, 5, np.uint64)
    request = server.request(shares, CONTEXT)
    ring, seed = parameters.ring, scheme.derive_seed(request, CONTEXT)
    sent = np.frombuffer(request["public key"] + request["ciphertexts"], np.uint8).reshape(41, -1)
    halves = [ring.uniform(derive_key(seed, name)) for name in ["public key", *range(40)]]
    c0, c1 = ring.from_bytes(sent), np.stack(halves)
    phase = ring.balance(c0 + server._transform.inverse(server._transform.forward(c1) * server._secret))
    step = 1 << (parameters.modulus_bits - parameters.plaintext_bits)
    value = sum(phase[:, k].astype(object) << (parameters.limb_bits * k) for k in range(parameters.limbs))
    value[1:, 0] -= 5 * step
    errors = value.astype(np.int64)
    assert np.abs(errors).max() <= ERROR_ETA
    assert errors.var() == pytest.approx(ERROR_ETA / 2, rel=0.1)
    assert len({tuple(row) for row in errors.tolist()}) == 41
    assert len({tuple(row) for row in c1[:, 0].tolist()}) == 41


# --- what is sent


def test_outgoing_digits_are_uniform_even_for_no_data_at_all():
    parameters = toy(silos=1, dimension=4096)
    digits = parameters.digits
    vector = ask(parameters)
    both = vector.reshape(digits.words, parameters.blocks, 2, parameters.ring_size)
    for half in range(2):  # without a fresh encryption of zero c1 would be 0 here
        for bit in range(digits.bits):
            word = both[bit // 64, :, half] >> np.uint64(bit % 64) & np.uint64(1)
            assert abs(float(word.mean()) - 0.5) < 6 * 0.5 / 64, (half, bit)
        low = both[0, :, half] & np.uint64(63)
        assert stats.chisquare(np.bincount(low.astype(int).ravel(), minlength=64)).pvalue > UNLIKELY


def test_dropped_limbs_are_rounded_after_everything_was_added(monkeypatch):
    """What is sent is a function of the flooded sum alone, as if it had been sent whole and rounded later."""
    whole, rounded = toy(silos=1, dropped=0), toy(silos=1, dropped=3)
    request = LatticeServer(whole).request(np.zeros(5, np.uint64), CONTEXT)
    monkeypatch.setattr(scheme.secrets, "token_bytes", lambda size: bytes(size))
    answers = [
        (parameters, ask(parameters, request, noise=np.arange(300))) for parameters in (whole, rounded)
    ]
    full, kept = (
        sum(word.astype(object) << (64 * i) for i, word in enumerate(answer)) for _, answer in answers
    )
    rest = (full - (kept << 48)) % (1 << 144)
    rest = np.where(rest >= 1 << 143, rest - (1 << 144), rest)
    assert np.abs(rest).max() < 2**47 * (1 + 2**-14)
    assert np.abs(rest).max() > 2**46


def test_the_same_answer_is_never_sent_twice():
    request = LatticeServer(toy()).request(np.zeros(5, np.uint64), CONTEXT)
    first, second = (ask(toy(), request) for _ in range(2))
    assert (first != second).any(axis=0).mean() > 0.99


def test_both_halves_get_fresh_errors(monkeypatch):
    """Without the multiples of the public key and the flooding, errors are all that is left of no data."""
    parameters = toy(silos=1, dimension=4096, dropped=0)
    request = LatticeServer(parameters).request(np.zeros(5, np.uint64), CONTEXT)
    monkeypatch.setattr(scheme, "draw_ternary", lambda key, *shape: np.zeros(shape, np.int8))
    monkeypatch.setattr(scheme, "add_flooding", lambda *arguments: None)
    limbs = parameters.digits.to_limbs(ask(parameters, request), 16, parameters.blocks, 2, 256)
    errors = parameters.ring.balance(limbs)[:, :, 0]
    for half in range(2):
        assert errors[:, half].var() == pytest.approx(ERROR_ETA / 2, rel=0.15)
    assert abs(np.corrcoef(errors[:, 0].ravel(), errors[:, 1].ravel())[0, 1]) < 0.1


def residual(parameters, changes):
    """Decryption errors (B·N,) as the server sees them."""
    server = LatticeServer(parameters)
    request = server.request(np.zeros(parameters.users, np.uint64), CONTEXT)
    phase = server._phase(ask(parameters, request, **changes))
    return sum(
        phase[:, k].astype(object) << (parameters.limb_bits * k) for k in range(phase.shape[1])
    ).ravel()


@pytest.mark.parametrize("entry", [0, 1 << 20])
def test_decryption_errors_are_flooded_from_the_lowest_bit(entry):
    """The errors' own part, up to 2^29 here, drowns in a uniform that begins at bit 0 and ends at bit F."""
    parameters = toy(silos=1, dimension=4096, dropped=0, clip_units=1 << 20)
    counts = np.full(parameters.users, parameters.count_cap)
    chunks = [(np.array([u]), rows(parameters, entry)) for u in range(parameters.users)]
    errors = residual(parameters, {"counts": counts, "chunks": chunks})
    flooding = parameters.flooding_bits
    assert parameters.log2_leakage - flooding < -30
    scaled = np.array([float(x) / 2.0**flooding for x in errors])
    assert stats.kstest(scaled, stats.uniform(-0.5, 1).cdf).pvalue > UNLIKELY
    for bit in range(flooding - 1):
        share = np.mean([int(x) + (1 << flooding) >> bit & 1 for x in errors])
        assert abs(share - 0.5) < 6 * 0.5 / 64, bit


# --- seeds


def test_two_requests_under_one_seed_betray_shares_and_are_refused(monkeypatch):
    server, shares = LatticeServer(TOY), [np.arange(5, dtype=np.uint64) * 3, np.full(5, 77, np.uint64)]
    with monkeypatch.context() as patch:
        patch.setattr(scheme.secrets, "token_bytes", lambda size: bytes(size))
        requests = [server.request(share, CONTEXT) for share in shares]
    ring = TOY.ring
    first, second = (
        ring.from_bytes(np.frombuffer(request["ciphertexts"], np.uint8).reshape(5, -1)).astype(np.int64)
        for request in requests
    )
    difference = ring.balance(second - first)[:, :, 0]
    total = sum(difference[:, k].astype(object) << (16 * k) for k in range(9)) % (1 << 144)
    found = [int(x) >> (144 - TOY.plaintext_bits) for x in total]
    assert found == [(77 - 3 * u) % (1 << TOY.plaintext_bits) for u in range(5)]
    seeds = Seeds()
    ask(TOY, requests[0], seeds)
    with pytest.raises(SilodpError, match="seed seen before"):
        ask(TOY, requests[1], seeds)


def test_every_request_is_fresh_and_bound_to_its_context():
    server = LatticeServer(TOY)
    first, second = (server.request(np.zeros(5, np.uint64), CONTEXT) for _ in range(2))
    assert scheme.derive_seed(first, CONTEXT) != scheme.derive_seed(second, CONTEXT)
    for other in (CONTEXT + b"2", CONTEXT + b"\0"):
        assert scheme.derive_seed(first, CONTEXT) != scheme.derive_seed(first, other)


def test_a_sum_that_does_not_decrypt_is_noticed():
    key, noise = secrets.token_bytes(32), np.arange(300)
    request = LatticeServer(TOY, key).request(np.arange(5, dtype=np.uint64), CONTEXT)
    answer = ask(TOY, request, noise=noise)
    np.testing.assert_array_equal(LatticeServer(TOY, key).decrypt(answer), noise)  # also after a restart
    counts, chunks = np.ones(5, np.int64), [(np.arange(5), np.ones((5, 300), np.int64))]
    silo = LatticeSilo(TOY, Seeds().claim)
    elsewhere = silo.answer(request, b"another round", counts, chunks, np.zeros(5, np.uint64), noise)
    masked = TOY.digits.mask(answer, key, 1)
    others = ask(TOY)  # of a server that drew its own key
    for server, total in [(key, elsewhere), (key, masked), (None, others)]:
        with pytest.raises(SilodpError, match="does not decrypt"):
            LatticeServer(TOY, server).decrypt(total)
