"""The rules of docs/protocols.md, section 3: five lattices by its formulas, each rule alone, and the search."""

import math
from dataclasses import replace

import pytest

from silodp.errors import SilodpError
from silodp_private.crypto.lattice.parameters import STANDARD_128, LatticeParameters, search_parameters

RUN = {"silos": 5, "noise_multiplier": 5.0, "attempts": 100, "epsilon": 10.0, "delta": 1e-5}


def preset(d, users, cap, size, limb_bits, limbs, plaintext, grid, dropped, **more):
    return LatticeParameters(
        dimension=d, users=users, count_cap=cap, clip_units=1 << grid, ring_size=size, limb_bits=limb_bits,
        limbs=limbs, plaintext_bits=plaintext, dropped=dropped, **RUN | more,
    )  # fmt: skip


TABLE = [  # the preset, and log2 TV, planning, bytes up as printed (log2 TV there with ‖ê‖ ≤ 2^10.2, here 2^10)
    (preset(20_000, 100, 50, 8192, 18, 9, 49, 20, 5), -49.3, 46.97, 22.1),
    (preset(20_000, 100, 400, 8192, 18, 9, 46, 17, 5), -52.3, 46.97, 22.1),
    (preset(20_000, 100, 400, 8192, 15, 12, 49, 20, 7), -64.3, 46.97, 23.0),
    (preset(10**6, 1_000, 50, 8192, 18, 9, 50, 18, 5), -44.3, 46.63, 18.1),
    (preset(10**6, 1_000, 400, 8192, 17, 10, 48, 16, 6), -53.3, 46.63, 17.1),
]
GOOD = TABLE[0][0]


@pytest.mark.parametrize(("parameters", "log2_tv", "planning", "bytes_up"), TABLE)
def test_the_table_of_the_protocol(parameters, log2_tv, planning, bytes_up):
    parameters.check()
    assert parameters.log2_tv == pytest.approx(log2_tv - 0.2, abs=0.06)
    assert parameters.planning_bits == pytest.approx(planning, abs=0.006)
    assert parameters.bytes_up == pytest.approx(bytes_up, abs=0.06)
    smallest = replace(parameters, plaintext_bits=parameters.plaintext_bits - 1)
    with pytest.raises(SilodpError, match="sum"):
        smallest.check()


def test_what_the_noise_is_charged_for():
    assert GOOD.noise_shift == 23
    assert GOOD.sensitivity / 2**17 == pytest.approx(1.0011, abs=1e-4)
    assert TABLE[3][0].sensitivity / 2**17 == pytest.approx(1.0076, abs=1e-4)


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("modulus bits", {"limb_bits": 18, "limbs": 13}),
        ("modulus bits", {"ring_size": 4096}),
        ("planning", {"count_cap": 100}),
        ("planning", {"clip_units": 1 << 21, "plaintext_bits": 50}),
        ("test products", {"limb_bits": 26, "limbs": 8, "count_cap": 1, "clip_units": 1 << 14}),
        ("flooding, log2 of TV", {"limbs": 8}),
        ("flooding, log2 of TV", {"attempts": 10**6}),
        (r"flooding, log2 of \(1", {"epsilon": 30.0}),
        (r"flooding, log2 of \(1", {"delta": 1e-9, "attempts": 10**4}),
        ("sum", {"noise_multiplier": 50.0}),
        ("plaintext bits", {"plaintext_bits": 63, "limbs": 11, "limb_bits": 18}),
        ("decryption room", {"dropped": 6}),
        ("dropped bits", {"dropped": 7}),
    ],
)
def test_every_rule_is_enforced_by_name(rule, change):
    GOOD.check()
    with pytest.raises(SilodpError, match=f"rule '{rule}"):
        replace(GOOD, **change).check()


@pytest.mark.parametrize(
    "change",
    [{"limbs": 40, "limb_bits": 26, "clip_units": 1 << 24}, {"clip_units": 1 << 26, "plaintext_bits": 55}],
)
def test_the_door_for_tests_waives_security_but_not_correctness(change):
    small = replace(GOOD, ring_size=1024, insecure_for_tests=True)
    small.check()
    with pytest.raises(SilodpError, match="modulus bits"):
        replace(small, insecure_for_tests=False).check()
    with pytest.raises(SilodpError, match=r"sum|multipliers|limb rows|plaintext"):
        replace(small, **change).check()


@pytest.mark.parametrize("bits", [(8192, 20, 9, 64), (8192, 18, 8, 64), (4096, 16, 6, 36)])
def test_the_prototypes_presets_are_refused(bits):
    size, limb_bits, limbs, plaintext = bits
    with pytest.raises(SilodpError):
        preset(20_000, 100, 50, size, limb_bits, limbs, plaintext, 20, 3).check()


@pytest.mark.parametrize(
    "scenario", [(20_000, 100, 50), (20_000, 100, 400), (10**6, 1_000, 50), (10**6, 1_000, 400)]
)
def test_the_search_finds_what_passes_and_packs_users(scenario):
    dimension, users, cap = scenario
    found = search_parameters(dimension=dimension, users=users, count_cap=cap, **RUN)
    found.check()
    assert found.modulus_bits <= STANDARD_128[found.ring_size]
    alone = replace(found, packed=1)
    assert found.bytes < 0.53 * alone.bytes
    assert alone.bytes_up <= 25  # without packing
    assert found.planning_bits <= alone.planning_bits + 0.1
    assert found.log2_tv <= alone.log2_tv
    assert found.clip_units >= 64 * dimension**0.5
    with pytest.raises(SilodpError, match=r"room|dropped"):
        replace(found, dropped=found.dropped + 1).check()  # it drops all it can
    assert not found.insecure_for_tests


def test_the_search_keeps_a_given_grid_and_refuses_what_cannot_be():
    assert (
        search_parameters(dimension=20_000, users=100, count_cap=400, clip_units=1 << 20, **RUN).clip_units
        == 1 << 20
    )
    with pytest.raises(SilodpError, match=r"no lattice holds 1,000,000 users.*planning"):
        search_parameters(dimension=10**6, users=10**6, count_cap=10**5, **RUN)
    with pytest.raises(SilodpError, match="positive"):
        search_parameters(dimension=0, users=1, count_cap=1, **RUN)


@pytest.mark.parametrize(
    ("norm", "pieces"), [(2**13, 1), (2**13 + 1, 2), (2**27, 2), (2**27 + 1, 3), (400 * 2**20, 3)]
)
def test_pieces_reach_the_largest_multiplier(norm, pieces):
    assert replace(GOOD, count_cap=1, clip_units=norm).pieces == pieces


def test_a_batch_of_multipliers_fits_in_memory():
    for parameters, *_ in TABLE:
        held = 4 * parameters.batch_polynomials * parameters.blocks * parameters.ring_size
        assert parameters.batch_polynomials % 32 == 0
        assert held <= 5 << 28


@pytest.mark.parametrize("size", STANDARD_128)
def test_the_servers_products_with_ternary_factors_are_exact_a_priori(size):
    """The a-priori bound with one factor of norm √N at most, limbs of at most 26 bits: more fails "test products"."""
    steps = 24 * (math.log2(size / 2) + 1) + 1.5 * (68 + 1 / 32)
    assert steps * 2.0**-53 * math.sqrt(size) * 2 ** (26 + 6.7) < 2**-4
    wide = replace(GOOD, ring_size=size, limb_bits=27, limbs=3, count_cap=1, clip_units=1 << 14)
    with pytest.raises(SilodpError):
        wide.check()
