"""The lattice round against Python's integers, and every defense against its absence."""

import secrets
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silodp.errors import SilodpError
from silodp_private.crypto.lattice import parameters as lattice_parameters
from silodp_private.crypto.lattice import scheme
from silodp_private.crypto.lattice._verification import VerifiedProducts
from silodp_private.crypto.lattice.noise import add_flooding
from silodp_private.crypto.lattice.parameters import LatticeParameters, search_parameters
from silodp_private.crypto.lattice.ring import FourierTransform
from silodp_private.crypto.lattice.scheme import LatticeServer, LatticeSilo
from support.lattice_rounds import CONTEXT, RUN, Seeds, ask, case, plain, round_of, rows, rows_like, toy

KINDS = ["random", "one coordinate", "one coordinate, minus", "spread", "spread, minus", "nothing"]


@given(
    st.integers(1, 3), st.integers(1, 40), st.integers(1, 700), st.sampled_from(KINDS),
    st.sampled_from(["none", "cap", "any"]), st.booleans(), st.sampled_from([1, 2, 4]), st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(deadline=None, max_examples=25)
def test_the_sum_is_exact_bit_for_bit(silos, users, dimension, kind, count, sampled, packed, seed):
    rng = np.random.default_rng(seed)
    parameters = toy(silos=silos, users=users, dimension=dimension, packed=packed)
    cap = parameters.count_cap
    counts = {"none": 0, "cap": cap}.get(count, rng.integers(0, cap + 1, (silos, users))) + np.zeros(
        (silos, users), int
    )
    weights = rng.integers(0, 1 << parameters.weight_bits, users) * (
        rng.random(users) < 0.5 if sampled else 1
    )
    noise = rng.integers(-(2**20), 2**20, (silos, dimension))
    rows = rows_like(kind, parameters, rng)
    found = round_of(parameters, counts, rows, weights, noise)
    np.testing.assert_array_equal(found, plain(parameters, counts, rows, weights, noise))


@pytest.mark.parametrize(
    "parameters",
    [
        search_parameters(dimension=9_000, users=40, count_cap=50, **RUN),
        search_parameters(dimension=100, users=8, count_cap=50, **RUN | {"silos": 2}),
        LatticeParameters(
            dimension=17_000, users=12, count_cap=400, clip_units=1 << 20, ring_size=16384, limb_bits=15, limbs=12,
            plaintext_bits=48, dropped=6, **RUN,
        ),
    ],
    ids=lambda p: f"{p.ring_size}/{p.modulus_bits}",
)  # fmt: skip
def test_secure_lattices_are_exact_with_every_user_at_the_cap(parameters):
    assert not parameters.insecure_for_tests
    rng = np.random.default_rng(3)
    counts = np.full((parameters.silos, parameters.users), parameters.count_cap)
    rows = rows_like("random", parameters, rng)
    rows[:, ::2] = rows_like("spread", parameters, rng)[:, ::2]
    weights = np.full(
        parameters.users, (1 << parameters.weight_bits) // (parameters.silos * parameters.count_cap)
    )
    noise = rng.integers(-(2**40), 2**40, (parameters.silos, parameters.dimension))
    found = round_of(parameters, counts, rows, weights, noise)
    np.testing.assert_array_equal(found, plain(parameters, counts, rows, weights, noise))


# --- several users in a polynomial


def multiply(one, other):
    """The product of two polynomials modulo X^N + 1, by Python's integers."""
    full = np.convolve(one.astype(object), other.astype(object))
    low, high = full[: len(one)], full[len(one) :]
    low[: len(high)] -= high
    return low


@pytest.mark.parametrize("packed", [1, 2, 4])
def test_outputs_hold_weighted_sums_and_other_coefficients_one_row_with_anothers_weight(packed):
    """Why the others must not leave: they have no noise, and a server that knows its weights would divide."""
    parameters = toy(users=6, dimension=150, packed=packed)
    rng = np.random.default_rng(1)
    counts, rows = np.arange(6) + 1, rng.integers(-9, 10, (6, 150))
    weights = rng.integers(1, 100, 6)
    polynomials = scheme._pack(parameters, weights.astype(np.uint64)).astype(np.int64)
    plaintexts = scheme.Plaintexts(parameters, counts)
    total = np.zeros((parameters.blocks, parameters.ring_size), object)
    order = np.random.default_rng(2).permutation(6)
    for places, multipliers in plaintexts.batches(
        [(order[:4], rows[order[:4]]), (order[4:], rows[order[4:]])]
    ):
        for place, blocks in zip(places, multipliers, strict=True):
            shares = np.zeros(parameters.ring_size, np.int64)
            shares[:packed] = polynomials[place]
            for block, multiplier in enumerate(blocks):
                total[block] += multiply(shares, multiplier)
    outputs = scheme._take_outputs(parameters, total).reshape(-1)
    assert outputs[:150].tolist() == ((weights * counts) @ rows).tolist()
    assert not outputs[150:].any()
    if packed > 1:
        # The last block is not full, so nothing wraps around to X⁰: the weight of the first user of each polynomial
        # times one number of its last user.
        number = (parameters.blocks - 1) * parameters.outputs
        firsts = [first for first in range(0, 6, packed) if first + packed <= 6]
        lasts = [first + packed - 1 for first in firsts]
        alone = sum(
            weights[first] * counts[u] * rows[u, number] for first, u in zip(firsts, lasts, strict=True)
        )
        assert total[-1][0] == alone


@pytest.mark.parametrize("packed", [1, 2, 4])
def test_all_that_is_sent_of_c0_is_an_output_and_was_flooded(monkeypatch, packed):
    parameters, flooded = toy(packed=packed), []

    def flood(element, *others):
        flooded.append(element.shape)
        return add_flooding(element, *others)

    monkeypatch.setattr(scheme, "add_flooding", flood)
    answer = ask(parameters)
    [(blocks, _, outputs)] = flooded
    assert outputs == parameters.ring_size // packed
    assert answer.shape[1] == blocks * (outputs + parameters.ring_size)
    assert len(parameters.digits.to_bytes(answer)) == parameters.digits.size


@pytest.mark.parametrize("packed", [2, 4])
def test_a_polynomial_whose_users_come_in_several_batches_is_exact(monkeypatch, packed):
    monkeypatch.setattr(lattice_parameters, "_BUFFER", 1)
    parameters = toy(users=70 * packed, dimension=40, packed=packed)
    assert parameters.batch_polynomials == 32
    found = round_of(parameters, *case(parameters))
    np.testing.assert_array_equal(found, plain(parameters, *case(parameters)))


# --- exactness


def make_faulty(monkeypatch, times, rows=18):
    """Round one coefficient of the limb rows wrong in the first `times` inverse transforms of products."""
    honest, wrong = FourierTransform.inverse, []

    def inverse(self, spectrum):
        polynomials = honest(self, spectrum)
        if polynomials.shape[1] == rows and len(wrong) < times:
            wrong.append(1)
            polynomials[0, 8, 100] += 1  # in the highest limb of c0, where plaintexts stand
        return polynomials

    monkeypatch.setattr(FourierTransform, "inverse", inverse)
    return wrong


def test_a_wrong_coefficient_is_found_and_mended(monkeypatch):
    parameters = toy()
    wrong = make_faulty(monkeypatch, times=1)
    found = round_of(parameters, *case(parameters))
    assert wrong
    np.testing.assert_array_equal(found, plain(parameters, *case(parameters)))


def test_a_block_that_stays_wrong_is_never_sent(monkeypatch):
    parameters = toy()
    make_faulty(monkeypatch, times=10**9)
    with pytest.raises(SilodpError, match="nothing was sent"):
        round_of(parameters, *case(parameters))


@pytest.mark.parametrize("kind", ["random", "one coordinate", "spread"])
def test_beyond_the_planning_rule_the_pieces_are_exact(kind):
    parameters = toy(users=40, count_cap=1 << 9, clip_units=1 << 20, limb_bits=24, limbs=7, weight_bits=20)
    assert parameters.planning_bits > 55
    assert parameters.pieces == 3
    found = round_of(parameters, *case(parameters, kind))
    np.testing.assert_array_equal(found, plain(parameters, *case(parameters, kind)))


def test_float_products_beyond_the_planning_rule_are_wrong_and_noticed():
    parameters = toy(users=40, count_cap=1 << 9, clip_units=1 << 20, limb_bits=24, limbs=7, weight_bits=20)
    ring, rng = parameters.ring, np.random.default_rng(5)
    multipliers = (rows_like("random", parameters, rng)[0] << 9).astype(np.int32)
    multipliers = np.pad(multipliers, ((0, 0), (0, 212))).reshape(40, 2, 256)
    elements = ring.uniform(bytes(32), 40, 2).reshape(40, 14, 256)
    products = VerifiedProducts(parameters, secrets.token_bytes(32))
    total = np.zeros((2, 2, 7, 256), np.int64)
    products.add_to(total, multipliers, lambda users: elements[users])
    assert products.repeated == 2
    transform = FourierTransform(256)
    rough = transform.inverse(transform.forward(multipliers).swapaxes(1, 2) @ transform.forward(elements))
    assert (ring.balance(rough.reshape(total.shape)) != total).any()


def test_limbs_that_are_nearly_full_are_carried_before_the_next_batch():
    parameters = toy(users=32, dimension=200)
    ring, rng = parameters.ring, np.random.default_rng(6)
    multipliers = rng.integers(-99, 100, (32, 1, 256)).astype(np.int32)
    elements = ring.uniform(bytes(32), 32, 2).reshape(32, -1, 256)
    products = VerifiedProducts(parameters, secrets.token_bytes(32))
    once, total = (np.zeros((1, 2, parameters.limbs, 256), np.int64) for _ in range(2))
    products.add_to(once, multipliers, lambda users: elements[users])
    total += 1 << 62  # as after many batches
    products._row_bits = 62.0
    products.add_to(total, multipliers, lambda users: elements[users])
    np.testing.assert_array_equal(value(total, ring), value(once, ring, 1 << 62))
    assert np.abs(total).max() < 1 << 61


def value(limbs, ring, more=0):
    """Coefficients as Python's integers modulo 2^Q, with `more` added to every limb."""
    whole = sum((limbs[..., k, :].astype(object) + more) << (ring.limb_bits * k) for k in range(ring.limbs))
    return whole % (1 << (ring.limb_bits * ring.limbs))


def test_many_users_are_taken_in_batches(monkeypatch):
    monkeypatch.setattr(lattice_parameters, "_BUFFER", 1)
    parameters = toy(users=70)
    assert parameters.batch_polynomials == 32
    found = round_of(parameters, *case(parameters))
    np.testing.assert_array_equal(found, plain(parameters, *case(parameters)))


# --- what a silo refuses


TOY = toy()
ONE = np.array([0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": np.full(5, 10)}, "public cap of 9"),
        ({"counts": np.full(5, -1)}, "public cap of 9"),
        ({"counts": np.full(4, 1)}, r"array of shape \(5\)"),
        ({"counts": np.full(5, 0.5)}, r"array of shape \(5\)"),
        ({"chunks": [(ONE, rows(TOY, 256, 1))]}, "longer than C/g = 256"),
        ({"chunks": [(ONE, rows(TOY, 2**62, 2**62))]}, "longer than C/g = 256"),
        ({"chunks": [(ONE, rows(TOY)), (ONE, rows(TOY))]}, "one row"),
        ({"chunks": [(ONE + 5, rows(TOY))]}, "common index"),
        ({"chunks": [(ONE, rows(TOY)[:, 1:])]}, "shape"),
        ({"chunks": [(ONE, rows(TOY).astype(float))]}, "integers"),
        ({"shares": np.zeros(4, np.uint64)}, "shares"),
        ({"noise": np.zeros(300)}, "noise"),
    ],
)
def test_inputs_beyond_their_public_bounds_are_refused(changes, message):
    with pytest.raises(SilodpError, match=message):
        ask(TOY, **changes)


def test_a_row_at_the_bound_is_taken():
    ask(TOY, chunks=[(ONE, rows(TOY, 256))])


@pytest.mark.parametrize("name", ["nonce", "public key", "ciphertexts", "unknown"])
def test_malformed_requests_are_refused(name):
    request = LatticeServer(TOY).request(np.zeros(5, np.uint64), CONTEXT)
    with pytest.raises(SilodpError, match="differ in parameters"):
        ask(TOY, request | {name: request.get(name, b"") + b"\0"})
    with pytest.raises(SilodpError, match="differ in parameters"):
        ask(TOY, {key: value for key, value in request.items() if key != "ciphertexts"})


def test_insecure_parameters_are_refused_by_both_parties():
    closed = replace(TOY, insecure_for_tests=False)
    with pytest.raises(SilodpError, match="modulus"):
        LatticeServer(closed)
    with pytest.raises(SilodpError, match="modulus"):
        LatticeSilo(closed, Seeds().claim)
