"""The longest sums that the server takes: honest ones are refused with probability below 1e-18, and most are near."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy import stats

from silodp.aggregators import Masked, Plain
from silodp.aggregators.limits import bound_noise_norm, check_sum, find_longest_sum
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.mechanisms.quantization import IntegerSum, Quantizer
from silodp.methods import Ddp, FederationSize, Method, UldpAvg
from silodp.methods.participation import Participation, Poisson
from silodp.runtime.train import train
from silodp.training.sgd.local import LocalTraining
from support.masked import AVG
from support.oracles import logistic_task
from support.refusals import refused
from support.specs import make_spec

CHANCE = 1e-18
NAMES = ("silo0", "silo1", "silo2")


def spec_of(method, aggregator=None, size: int = 5, users: int = 12):
    return make_spec("run", NAMES, method, FederationSize(3, users), size, aggregator=aggregator or Plain())


@pytest.mark.parametrize("size", [1, 2, 10, 10**3, 10**6])
def test_gaussian_noise_is_longer_with_a_chance_below_the_stated_one(size):
    squared = (bound_noise_norm(size, 3.0) / 3.0) ** 2
    assert stats.chi2.sf(squared, size) < CHANCE
    # Not far above the noise that is usual: .01 of it for a million numbers.
    assert math.sqrt(squared) < math.sqrt(size) + 9.4


@pytest.mark.parametrize("variance", [0.1, 3.0, 30.0, 1000.0, 1e6, 1e11])
def test_skellam_noise_in_one_number_is_larger_with_a_chance_below_the_stated_one(variance):
    largest = math.floor(bound_noise_norm(1, math.sqrt(variance), 1.0))
    assert 2 * stats.skellam.sf(largest, variance / 2, variance / 2) < CHANCE


def masses(values: np.ndarray, variance: float) -> np.ndarray:
    """P(|Z| = value) for whole values from 0."""
    return stats.skellam.pmf(values, variance / 2, variance / 2) * np.where(values == 0, 1, 2)


@pytest.mark.parametrize("variance", [3.0, 30.0, 1000.0, 3e4])
def test_skellam_noise_in_two_numbers_is_longer_with_a_chance_below_the_stated_one(variance):
    """All pairs that are too long, one by one, and those of which one number alone is."""
    longest = bound_noise_norm(2, math.sqrt(variance), 1.0)
    values = np.arange(math.floor(longest) + 1)
    mass = masses(values, variance)
    too_long = values[:, None] ** 2 + values**2 > longest**2
    pairs = float((mass[:, None] * mass)[too_long].sum())
    alone = 4 * stats.skellam.sf(math.floor(longest), variance / 2, variance / 2)
    assert 0 <= pairs + alone < CHANCE


@pytest.mark.parametrize(("size", "variance"), [(40, 1000.0), (400, 1200.0), (10**4, 5000.0)])
def test_skellam_noise_in_many_numbers_is_longer_with_a_chance_below_the_stated_one(size, variance):
    """By Chernoff's inequality, with the exact moment of e^(t·Z²) where no number alone is too long by far."""
    longest = bound_noise_norm(size, math.sqrt(variance), 1.0)
    values = np.arange(math.ceil(15 * math.sqrt(variance)))
    mass, alone = (
        masses(values, variance),
        2 * size * stats.skellam.sf(values[-1], variance / 2, variance / 2),
    )
    tilts = np.linspace(0.001, 0.999, 400) / (2 * variance)
    exponents = [size * math.log(float((mass * np.exp(t * values**2)).sum())) - t * longest**2 for t in tilts]
    assert math.exp(min(exponents)) + alone < CHANCE


def test_noise_that_is_drawn_is_near_the_limit():
    stream = np.random.default_rng(1)
    drawn = stream.poisson(5e7, 10**6) - stream.poisson(5e7, 10**6)
    assert 0.98 < np.linalg.norm(drawn) / bound_noise_norm(10**6, 1e4, 1.0) < 1


def test_of_a_large_variance_the_bound_is_that_of_gaussian_noise_and_does_not_cancel():
    for size, std in ((10**6, 1e7), (10**6, 1e12), (1, 1e-300)):
        step = std / 2.56e9
        assert bound_noise_norm(size, std, step) == pytest.approx(bound_noise_norm(size, std), rel=1e-12)


def test_a_finer_grid_and_no_noise_have_no_longer_bound():
    bounds = [bound_noise_norm(7, 0.3, step) for step in (0.5, 0.1, 0.01, 0.0)]
    assert bounds == sorted(bounds, reverse=True)
    assert bound_noise_norm(7, 0.0, 0.5) == 0


class Rounding(Masked):
    """One that does not say what noise it adds, and may round."""

    def noise_step(self, spec):
        return None


@pytest.mark.parametrize("aggregator", [Plain(), Masked(), Rounding()], ids=["plain", "masked", "rounding"])
def test_rows_that_all_have_the_length_of_the_clip_and_one_direction_are_taken(aggregator):
    """Without noise: all 12 persons have the same records in all silos, and the limit is reached, not passed."""
    x = np.full((12, 4), 30, np.float32)
    silos = tuple(SiloData(name, x, np.zeros(12, np.int64), np.arange(12)) for name in NAMES)
    local, clip = LocalTraining(0.1, batch_size=None), 0.5
    method = UldpAvg(0.0, clip, local, server_learning_rate=12 * 3.0)
    result = train(
        Federation(silos, 12, None, classes=2),
        logistic_task(),
        method,
        rounds=1,
        seed=1,
        aggregator=aggregator,
    )
    # The server moves the model by the sum itself.
    moved = (result.params - logistic_task().initial(1)).norm().item()
    assert moved == pytest.approx(12 * clip, rel=1e-4)
    spec = spec_of(method, aggregator)
    rounded = 2 * math.sqrt(5) * clip / 256 if isinstance(aggregator, Rounding) else 0
    assert find_longest_sum(spec, 3, is_share=False) == pytest.approx(12 * clip + rounded)
    assert find_longest_sum(spec, 1, is_share=True) == pytest.approx(4 * clip + rounded / 2)


def test_the_limit_of_masked_sums_is_that_of_noise_on_its_own_grid():
    """Little noise in many numbers: a coarse grid would admit over twenty times more."""
    size, clip, users, stream = 10**5, 0.5, 1, np.random.default_rng(1)
    spec = spec_of(UldpAvg(0.001 * math.sqrt(3), clip), Masked(), size, users)
    grid = Quantizer.from_bounds(spec.bounds)
    rows = np.zeros((3, size), np.int64)
    rows[:, 0] = grid.units // 3
    shares = [IntegerSum(row, grid, spec.bounds).add_noise(stream) for row in rows]
    value = np.sum([share.value for share in shares], axis=0) * grid.step
    check_sum(spec, value, 0, 3)
    longest = find_longest_sum(spec, 3, is_share=False)
    exact = 0.001 * clip * math.sqrt(3) * (math.sqrt(size) + math.sqrt(2 * math.log(1e19)))
    assert longest == pytest.approx(users * clip + exact, rel=1e-3)
    coarse = find_longest_sum(spec_of(spec.method, Rounding(), size, users), 3, is_share=False)
    assert longest < coarse / 20


def test_a_sum_at_the_limit_is_taken_and_the_next_one_refused():
    spec = spec_of(replace(AVG, noise_multiplier=0.0))
    longest = find_longest_sum(spec, 1, is_share=True)
    value = np.array([0, 0, longest * (1 - 1e-12), 0, 0])
    check_sum(spec, value, 0, 1, "silo0")
    for wrong in (value * 1.001, value * math.nan, value + math.inf, value * 1e305):
        with refused("run.long_sum"):
            check_sum(spec, wrong, 0, 1, "silo0")


@pytest.mark.parametrize(("users", "q"), [(10**5, 0.01), (1000, 0.1), (50, 0.5), (12, 0.1)])
def test_a_sample_is_larger_than_the_limit_with_a_chance_below_the_stated_one(users, q):
    size = FederationSize(3, users)
    _, longest = UldpAvg(1.0, 1.0, user_sampling=q).longest_sums(size, None)
    assert stats.binom.sf(math.floor(longest), users, q) < CHANCE
    assert longest <= users
    _, of_all = UldpAvg(1.0, 1.0).longest_sums(size, None)
    assert of_all == users


class Together(Participation):
    """One coin for all persons."""

    drawn_by_coins = True
    rate = 0.01

    def sample_event(self, release, view):
        return release


class TogetherByPoisson(Poisson):
    """The same, by somebody who needed the fields of `Poisson`: its rate says nothing of how many are drawn."""


@pytest.mark.parametrize("rule", [Together(), TogetherByPoisson(0.01)], ids=["own", "subclass"])
def test_of_a_rule_of_somebody_else_everyone_may_be_sampled_together(rule):
    size = FederationSize(3, 1000)
    assert UldpAvg(1.0, 1.0, participation=rule).longest_sums(size, None)[1] == 1000
    assert UldpAvg(1.0, 1.0, participation=Poisson(0.01)).longest_sums(size, None)[1] < 100


def test_clients_of_ddp_may_draw_all_their_records_in_every_step():
    """`most_batch`, an assumption for the ring, bounds nothing: a sample may be larger."""
    method = Ddp(1.0, 0.5, 3, 1.0, 1.0, (0.1, 0.2, 0.1), most_batch=1)
    population = FederationSize(3, 12)
    assert method.longest_sums(population, (10, 20, 30)) == pytest.approx((30.0, 7.5 + 30 + 22.5))
    assert method.longest_sums(population, None) == (math.inf, math.inf)


def test_where_the_number_of_rows_is_not_public_any_finite_sum_is_taken():
    spec = spec_of(Ddp(1.0, 0.5, 3, 1.0, 1.0, 0.1))
    check_sum(spec, np.full(5, 1e200), 0, 3)
    for wrong in (math.nan, math.inf, -math.inf):
        with refused("run.long_sum"):
            check_sum(spec, np.array([0, 0, wrong, 0, 0]), 0, 3)


def test_where_silos_add_the_noise_themselves_anything_is_taken():
    """Their local training may honestly diverge; `Server.step` leaves the model as it is."""

    @dataclass(frozen=True, repr=False)
    class Inside(UldpAvg):
        def bounds(self, population):
            return None

        def longest_sums(self, population, record_counts):
            return Method.longest_sums(self, population, record_counts)

    check_sum(spec_of(Inside(1.0, 1.0)), np.full(5, math.nan), 0, 3)
