"""Tests of noise, shifts and samples: right ones pass as often as they say, and each fault is found by its test.

Without these tests a fault that exceeds no ε, as a coin of its own in every silo, would stay in the program.
"""

import math

import numpy as np
import pytest

from silodp_audit.attack.noise import Samples, run_noise_tests
from support.refusals import refused

SILOS, ROUNDS, SIZE, RATE = 3, 6, 1000, 0.3


def draw_noise(rng, silos=SILOS):
    return {f"silo {silo}": rng.standard_normal((ROUNDS, SIZE)) for silo in range(silos)}


def draw_samples(rng):
    drawn = rng.random((ROUNDS, SIZE)) < RATE
    return Samples(np.repeat(drawn[None], SILOS, 0), RATE)


def draw_shifts(rng):
    return 1 + 5 * rng.standard_normal((ROUNDS, SIZE // 2))


def find_failed(noise, **others):
    return {one.test for one in run_noise_tests(noise, **others) if not one.passed}


def test_right_code_fails_as_seldom_as_it_says():
    """200 plays at 5 %, all tests together."""
    rng = np.random.default_rng(11)
    failed = [
        find_failed(draw_noise(rng), shifts=draw_shifts(rng), samples=draw_samples(rng)) for _ in range(200)
    ]
    assert sum(map(bool, failed)) <= 18  # 5 % are 10; P(more than 18) < .007
    assert sum(map(bool, failed)) >= 2


def test_each_kind_of_test_uses_up_its_level():
    """At a level of 30 % for a single part, the tests that are exact fail about as often as they say."""
    rng = np.random.default_rng(3)
    tests = {}
    for _ in range(300):
        part = {"the sum": rng.standard_normal((1, SIZE))}
        for one in run_noise_tests(part, samples=Samples(rng.random((1, 1, SIZE)) < RATE, RATE), level=0.3):
            tests.setdefault(one.test, []).append(not one.passed)
    assert {*tests} == {"noise of the sum", "normal distribution", "sampling rate"}
    for found in tests.values():
        assert 0.04 <= np.mean(found) <= 0.16  # .1 by Bonferroni


def scale(factor, silos=range(SILOS), rounds=range(ROUNDS)):
    def change(noise, rng):
        for silo in silos:
            noise[f"silo {silo}"][list(rounds)] *= factor

    return change


def copy_silo(noise, rng):
    noise["silo 1"] = noise["silo 0"].copy()


def copy_round(noise, rng):
    noise["silo 2"][4] = noise["silo 2"][1]


def replace_by_uniform(noise, rng):
    for values in noise.values():
        values[:] = rng.uniform(-math.sqrt(3), math.sqrt(3), values.shape)


def shift_mean(noise, rng):
    noise["silo 0"] += 0.1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (scale(0.9), "noise of silo 1"),
        (scale(1.1), "noise of silo 1"),
        (scale(math.sqrt(3)), "noise of silo 0"),
        (scale(0.0, [0]), "noise of silo 0"),
        (scale(0.5, [2], [3]), "noise of silo 2, worst round"),
        (scale(0.0, [2], [3]), "noise of silo 2, worst round"),
        (copy_silo, "correlation between silos"),
        (copy_round, "correlation between rounds"),
        (replace_by_uniform, "normal distribution"),
        (shift_mean, "normal distribution"),
    ],
)
def test_wrong_noise_is_found(change, expected):
    rng = np.random.default_rng(7)
    noise = draw_noise(rng)
    assert find_failed(noise) == set()
    change(noise, rng)
    assert expected in find_failed(noise)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (copy_silo, {"correlation between silos"}),
        (copy_round, {"correlation between rounds"}),
    ],
)
def test_copied_noise_is_found_by_its_correlation_alone(change, expected):
    rng = np.random.default_rng(7)
    noise = draw_noise(rng)
    change(noise, rng)
    assert find_failed(noise) == expected


def test_a_longer_shift_fails_and_a_shorter_one_does_not():
    rng = np.random.default_rng(5)
    noise, shifts = draw_noise(rng), draw_shifts(rng)
    assert find_failed(noise, shifts=shifts + 1) == {"shift of members"}
    assert find_failed(noise, shifts=shifts - 1) == set()
    (found,) = (one for one in run_noise_tests(noise, shifts=shifts) if one.test == "shift of members")
    assert found.low < 1 < found.high
    assert found.value == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("rate", [2 * RATE, RATE / 2])
def test_a_wrong_rate_is_found(rate):
    rng = np.random.default_rng(5)
    drawn = np.repeat((rng.random((ROUNDS, SIZE)) < rate)[None], SILOS, 0)
    assert "sampling rate" in find_failed({}, samples=Samples(drawn, RATE))


def test_a_coin_for_each_silo_is_found():
    rng = np.random.default_rng(5)
    failed = find_failed({}, samples=Samples(rng.random((SILOS, ROUNDS, SIZE)) < RATE, RATE))
    assert {"same sample in all silos", "sampling rate"} <= failed
    one_differs = draw_samples(rng).drawn
    one_differs[1, 2, 3] ^= True
    assert find_failed({}, samples=Samples(one_differs, RATE)) == {"same sample in all silos"}


@pytest.mark.parametrize("period", [1, 2])
def test_a_repeated_sample_is_found(period):
    """The rate is right, and there is no amplification from round to round."""
    rng = np.random.default_rng(8)
    few = rng.random((ROUNDS, SIZE)) < RATE
    few[1::2] = few[::2] if period == 1 else few[1::2] & ~few[::2]
    assert "sampled in two rounds" in find_failed({}, samples=Samples(few[None], RATE))


def test_the_width_of_an_interval_is_that_of_the_distribution():
    """χ² of n values: the ratio of standard deviations is known to z/√(2n), here 1.4 % for one test of 6,000."""
    rng = np.random.default_rng(1)
    (overall, worst, *_) = run_noise_tests({"the sum": rng.standard_normal((ROUNDS, SIZE))})
    assert overall.test == "noise of the sum"
    assert (overall.high - overall.low) / 2 == pytest.approx(2.5 / math.sqrt(2 * ROUNDS * SIZE), rel=0.03)
    assert worst.high - worst.low > overall.high - overall.low
    assert overall.to_dict()["expected"] == 1.0


def test_one_round_of_one_part_has_no_correlations():
    rng = np.random.default_rng(1)
    found = run_noise_tests({"the sum": rng.standard_normal((1, SIZE))}, shifts=rng.standard_normal(50) + 1)
    assert [one.test for one in found] == ["noise of the sum", "normal distribution", "shift of members"]


def test_refusals():
    good = np.random.default_rng(0).standard_normal((2, 50))
    with refused("argument.shape"):
        run_noise_tests({"silo 0": good[0]})
    with refused("argument.shape"):
        run_noise_tests({"silo 0": good, "silo 1": good[:, 1:]})
    with refused("argument.value"):
        run_noise_tests({"silo 0": np.full((2, 50), np.inf)})
    with refused("argument.shape"):
        run_noise_tests({"silo 0": good}, shifts=np.ones(1))
    with refused("argument.value"):
        run_noise_tests({"silo 0": good}, level=0.7)
