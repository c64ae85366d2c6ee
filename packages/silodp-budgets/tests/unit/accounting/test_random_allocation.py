"""Random allocation: costs against oracles from its definition, in both directions; who bears them; and refusals.

X = (Y₁ + … + Y_b)/b under Q, with Y the likelihood ratio of a release. The oracles here are sums and integrals of that
definition: binomials for randomized response, quadrature for Gaussian noise, and E[X^(−s)] by the transform of the very
law of Y. Numbers of another program are those of PLD_accounting 2.0 (`gaussian_allocation_epsilon_range`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.polynomial.hermite_e import hermegauss
from scipy import special, stats

from silodp._lazy import Registry
from silodp.accounting import compute_delta, compute_epsilon, events, rdp
from silodp.accounting.accountant import find_accountant
from silodp.accounting.events import (
    Composed,
    Gaussian,
    Group,
    PoissonSampled,
    RevealedSample,
    SelfComposed,
    Skellam,
    event_from_dict,
    event_to_dict,
    remove_amplification,
    replace_unit,
    reveal_samples,
)
from silodp.accounting.ledger import Ledger
from silodp.crypto.sampling import PersonCoins
from silodp.errors import SilodpError
from silodp.methods import FederationSize, UldpAvg
from silodp_budgets import random_allocation
from silodp_budgets.random_allocation import AllocatedRelease, RandomAllocation
from support.specs import make_spec

DELTA = 1e-5
SECRET = bytes(range(32))


def gaussian_rdp(sigma):
    return lambda orders: orders / (2 * sigma**2)


def logs_of(release_rdp, most=40):
    orders = np.arange(2.0, most + 1)
    return np.concatenate([[0.0, 0.0], (orders - 1) * release_rdp(orders)])


def true_addition(b, sigma, powers):
    """ln E[X^(−s)] = ln ∫ t^(s−1) φ(t/b)^b dt/Γ(s), with φ of ln Y ~ N(−1/(2σ²), 1/σ²) by quadrature."""
    nodes, weights = hermegauss(150)
    y = np.exp(nodes / sigma - 0.5 / sigma**2)
    log_t = np.linspace(-14, 11, 4000)
    log_phi = special.logsumexp(-np.multiply.outer(np.exp(log_t) / b, y), b=weights / weights.sum(), axis=1)
    width = log_t[1] - log_t[0]
    return np.array(
        [special.logsumexp(s * log_t + b * log_phi) + math.log(width) - special.gammaln(s) for s in powers]
    )


def randomized_response(b, a, alpha):
    """ln E[X^(1−α)] and ln E[X^α] for Y = a with probability 1/(1+a), else 1/a: symmetric, and with the least χ²."""
    number = np.arange(b + 1)
    chance, x = stats.binom.logpmf(number, b, 1 / (1 + a)), (number * a + (b - number) / a) / b
    return special.logsumexp(chance + (1 - alpha) * np.log(x)), special.logsumexp(chance + alpha * np.log(x))


def response_rdp(a):
    """ρ(α) of randomized response."""
    return lambda orders: (
        (np.logaddexp(orders * math.log(a), (1 - orders) * math.log(a)) - math.log1p(a)) / (orders - 1)
    )


CASES = [(2, 2.0), (2, 0.8), (4, 5.0), (10, 1.0), (10, 5.0), (20, 0.7), (100, 2.0), (1000, 1.0)]


@pytest.mark.parametrize(("b", "sigma"), CASES)
def test_moments_of_gaussian_noise_cover_both_directions(b, sigma):
    logs, powers = logs_of(gaussian_rdp(sigma)), np.arange(1, 20)
    removed = random_allocation._bound_removal(b, logs)
    # The second moment is known: E[X²] = 1 + χ²/b.
    assert removed[2] == pytest.approx(math.log1p(math.expm1(sigma**-2) / b), rel=1e-9)
    assert removed[1] == pytest.approx(0, abs=1e-12)
    bound, true = random_allocation._bound_addition(b, logs, powers), true_addition(b, sigma, powers)
    # The transforms are integrated on a grid: as exact as nine digits.
    assert (bound >= true - 1e-9).all()
    if sigma >= 2:
        assert (bound[:8] <= 1.25 * removed[2:10] + 1e-9).all(), "a bound that is not idle"


@pytest.mark.parametrize("b", [2, 3, 10, 40, 300])
@pytest.mark.parametrize("a", [1.02, 1.3, 2.0, 5.0, 50.0])
def test_moments_cover_noise_that_is_not_gaussian(b, a):
    orders = np.array([2.0, 3.0, 5.0, 9.0, 17.0, 33.0])
    bound = random_allocation.compute_moments(b, response_rdp(a), orders)
    exact = np.array([max(randomized_response(b, a, order)) for order in orders])
    assert (bound >= exact).all()
    # Of all laws with this χ² it is the worst for small orders: no bound by χ² is below it.
    added = random_allocation._bound_addition(b, logs_of(response_rdp(a)), np.array([1, 2]))
    worst = [randomized_response(b, a, order)[0] for order in (2, 3)]
    if b >= 10 and a <= 2:
        assert added == pytest.approx(worst, rel=0.03, abs=1e-7)


def test_adding_costs_more_than_removing_for_some_noise():
    # So the published fact that removing decides, which is about Gaussian noise, is not enough here.
    added, removed = randomized_response(10, 2.0, 6)
    assert added > 1.05 * removed


def test_releases_that_depend_on_earlier_ones_are_covered():
    # Of two releases the second moves only if the first one looked as if the unit were in it.
    rng, sigma, alpha = np.random.default_rng(0), 1.0, 4
    first = rng.normal(size=400_000) * sigma
    reach = np.where(first > 0, 1.0, 0.2)
    second = rng.normal(size=len(first)) * sigma
    y = [np.exp((r * z - r**2 / 2) / sigma**2) for r, z in ((np.ones_like(first), first), (reach, second))]
    x = (y[0] + y[1]) / 2
    bound = random_allocation.compute_moments(2, gaussian_rdp(sigma), np.array([float(alpha)]))[0]
    for moments in (x**alpha, x ** (1 - alpha)):
        assert math.log(moments.mean()) < bound


@pytest.mark.parametrize("sigma", [0.4, 1.0, 4.0])
def test_losses_of_two_rounds_are_those_of_their_integral(sigma):
    """δ of both directions, by a sum over the plane."""
    axis = np.linspace(-10, 10, 4001)
    p = stats.norm.pdf(axis)
    y = np.exp(axis / sigma - 0.5 / sigma**2)
    x, weight = np.add.outer(y, y) / 2, np.multiply.outer(p, p) * (axis[1] - axis[0]) ** 2
    law = random_allocation.allocate_gaussian(2, sigma)
    assert law.masses.sum() == pytest.approx(1, abs=1e-12)
    assert law.masses @ law.ratios + law.infinite == pytest.approx(1, abs=1e-12)
    for epsilon in (0.0, 0.1, 0.5, 1.5):
        removed = float((weight * np.maximum(x - math.exp(epsilon), 0)).sum())
        added = float((weight * np.maximum(1 - math.exp(epsilon) * x, 0)).sum())
        found = compute_delta([(AllocatedRelease(2, Gaussian(sigma)), 1)], epsilon)
        assert max(removed, added) * (1 - 1e-5) <= found <= max(removed, added) * 1.004 + 1e-9


def test_tails_that_are_cut_off_are_charged(monkeypatch):
    exact = random_allocation.allocate_gaussian(8, 1.0)
    monkeypatch.setattr(random_allocation, "_TAIL", 1e-3)
    cut = random_allocation.allocate_gaussian(8, 1.0)
    assert cut.zero > 1e-4
    assert cut.infinite > 1e-4
    # Both worlds keep all their probability, and no δ falls.
    assert cut.masses.sum() + cut.zero >= 1 - 1e-12
    assert cut.masses @ cut.ratios + cut.infinite >= 1 - 1e-12
    for x in (0.3, 0.8, 1.0, 1.5, 4.0):
        of_cut, of_exact = (
            (
                law.infinite + float(law.masses @ np.maximum(law.ratios - x, 0)),
                law.zero + float(law.masses @ np.maximum(1 - law.ratios * x, 0)),
            )
            for law in (cut, exact)
        )
        assert all(np.array(of_cut) >= np.array(of_exact) - 1e-12)
    removed, added = random_allocation.AllocatedRelease(8, Gaussian(1.0)).compute_losses(1e-3)
    assert removed.infinite >= cut.infinite
    assert added.infinite >= cut.zero
    for losses in (removed, added):
        assert losses.probabilities.sum() + losses.infinite >= 1 - 1e-12


# T, k, σ, and the upper and the lower bound of PLD_accounting 2.0 at δ = 10⁻⁵.
OTHERS = [
    (20, 1, 1.0, 1.631, 1.587),
    (20, 2, 2.0, 0.917, 0.871),
    (20, 2, 5.0, 0.312, 0.298),
    (100, 5, 1.0, 3.034, 2.958),
    (100, 10, 2.0, 2.185, 2.098),
    (200, 10, 0.8, 6.811, 6.728),
    (1000, 10, 0.6, 6.878, 6.790),
]


@pytest.mark.parametrize(("rounds", "times", "sigma", "upper", "lower"), OTHERS)
def test_epsilon_lies_between_the_bounds_of_another_program(rounds, times, sigma, upper, lower):
    charges = [(AllocatedRelease(rounds // times, Gaussian(sigma)), times)]
    epsilon = compute_epsilon(charges, DELTA)
    assert lower < epsilon < upper
    assert epsilon < compute_epsilon([(PoissonSampled(times / rounds, Gaussian(sigma)), rounds)], DELTA)
    assert epsilon < compute_epsilon(charges, DELTA, "rdp")


def test_integer_noise_costs_as_gaussian_noise_by_orders():
    gaussian, integer = (
        compute_epsilon([(AllocatedRelease(10, release), 2)], DELTA, "rdp")
        for release in (Gaussian(2.0), Skellam(2.0, 2**16, 1000))
    )
    assert gaussian <= integer <= gaussian * 1.0001
    coarse = compute_epsilon([(AllocatedRelease(10, Skellam(2.0, 4, 1000)), 2)], DELTA, "rdp")
    assert coarse > integer * 1.01


def test_more_rounds_share_the_cost_and_more_allocations_add_to_it():
    for accountant in ("pld", "rdp"):
        found = [
            compute_epsilon([(AllocatedRelease(b, Gaussian(1.5)), 1)], DELTA, accountant)
            for b in (1, 2, 5, 20, 100)
        ]
        assert found == sorted(found, reverse=True)
        assert found[0] == compute_epsilon([(Gaussian(1.5), 1)], DELTA, accountant)
        again = [
            compute_epsilon([(AllocatedRelease(5, Gaussian(1.5)), n)], DELTA, accountant) for n in range(4)
        ]
        assert again == sorted(again)
        assert again[0] == 0


def test_the_first_round_bears_the_cost_of_all():
    first, later = AllocatedRelease(5, Gaussian(2.0)), AllocatedRelease(5, Gaussian(2.0), is_first=False)
    one = compute_epsilon([(first, 1)], DELTA)
    assert compute_epsilon([(later, 4)], DELTA) == 0
    assert compute_epsilon([(first, 1), (later, 4)], DELTA) == one
    # Two halves of two allocations cost more than one allocation: a unit may be in both.
    assert compute_epsilon([(first, 2), (later, 3)], DELTA) > 1.2 * one
    # A later round is charged in full where it is released again.
    assert remove_amplification(later) == remove_amplification(first) == Gaussian(2.0)
    # A parameter out of range is refused in a round that costs nothing, too.
    for event in (AllocatedRelease(0, Gaussian(2.0), is_first=False), AllocatedRelease(2.5, Gaussian(2.0))):
        with pytest.raises(SilodpError, match="rounds is"):
            compute_epsilon([(event, 1)], DELTA)
    assert compute_epsilon([(AllocatedRelease(5, Gaussian(0.0)), 1)], DELTA) == math.inf


def test_whoever_sees_the_round_is_charged_one_release_for_all():
    event = AllocatedRelease(5, Gaussian(2.0))
    seen = reveal_samples(event)
    assert compute_epsilon([(seen, 3)], DELTA) == compute_epsilon([(Gaussian(2.0), 3)], DELTA)
    # With a coin for each round, a unit may be drawn more often.
    coins = [(RevealedSample(0.2, Gaussian(2.0)), 15)]
    assert compute_epsilon([(seen, 3)], DELTA) < compute_epsilon(coins, DELTA)
    # What is replaced moves twice as far, and is charged as if its round were seen.
    replaced = compute_epsilon([(replace_unit(event), 1)], DELTA)
    assert replaced == compute_epsilon([(Gaussian(1.0), 1)], DELTA)


def test_it_composes_with_other_steps_and_is_stored():
    event = AllocatedRelease(5, Gaussian(2.0))
    for accountant in ("pld", "rdp"):
        alone = compute_epsilon([(event, 2)], DELTA, accountant)
        mixed = compute_epsilon([(Composed((SelfComposed(event, 2), Gaussian(4.0))), 1)], DELTA, accountant)
        assert alone < mixed < alone + compute_epsilon([(Gaussian(4.0), 1)], DELTA / 2, accountant) + 1
    for one in (event, AllocatedRelease(7, Skellam(1.0, 100, 5), is_first=False, is_seen=True)):
        stored = json.loads(json.dumps(event_to_dict(one)))
        assert event_from_dict(stored) == one
    with pytest.raises(SilodpError, match="no rule for a Group"):
        compute_epsilon([(Group(2, event), 1)], DELTA)


@pytest.mark.parametrize("sigma", [0.05, 0.1, 50.0, 5000.0, 1e6])
@pytest.mark.parametrize("b", [2, 5000])
def test_extreme_settings_have_a_bound(b, sigma):
    for accountant in ("pld", "rdp"):
        epsilon = compute_epsilon([(AllocatedRelease(b, Gaussian(sigma)), 3)], DELTA, accountant)
        one = compute_epsilon([(Gaussian(sigma), 3)], DELTA, accountant)
        # Orders below 2, which are the best for an ε in the hundreds, are bounded by those at 2.
        assert 0 <= epsilon <= one * (1.01 if accountant == "pld" else 1.6) + 1e-6


@pytest.mark.parametrize("sigma", [0.5, 5.0, 100.0])
def test_many_rounds_cost_what_their_chi_squared_says(sigma):
    b = 100_000
    moments = random_allocation.compute_moments(b, gaussian_rdp(sigma), np.array([2.0, 4.0]))
    leading = math.expm1(sigma**-2) / b * np.array([1.0, 6.0])
    assert (moments <= 1.1 * leading + 1e-9).all()
    # The law keeps its grid when it narrows: the cost of a thousand allocations falls with b.
    few, many = (compute_epsilon([(AllocatedRelease(n, Gaussian(2.0)), 1000)], DELTA) for n in (b // 100, b))
    assert many < few / 8


def test_orders_between_integers_are_bounded_by_their_neighbors():
    event = AllocatedRelease(10, Gaussian(2.0))
    orders = (1.5, 2.0, 2.5, 3.0, 256.0, 512.0)
    rho = rdp.compute_rdp(event, orders)
    moments = (np.array(orders) - 1) * rho
    assert moments[0] == pytest.approx(moments[1] / 2)
    assert moments[2] == pytest.approx((moments[1] + moments[3]) / 2)
    # Beyond the orders that are computed, one release covers all.
    assert rho[5] == 512 / (2 * 2.0**2)
    assert rho[4] < 256 / (2 * 2.0**2)


# --- Who takes part, and which events are trusted ---


@pytest.mark.parametrize("b", [2, 7, 60])
def test_everyone_is_in_one_round_of_each_allocation(b):
    persons = 20_000
    coins = PersonCoins(SECRET, "run", "p", map(str, range(persons)))
    drawn = np.array([RandomAllocation(b).draw(coins, round_, 1 / b) for round_ in range(3 * b)])
    assert (drawn.reshape(3, b, persons).sum(axis=1) == 1).all()
    # Each round is as likely as any other, and allocations are independent of each other and of single coins.
    places = drawn.reshape(3, b, persons).argmax(axis=1)
    for place in places:
        assert stats.chisquare(np.bincount(place, minlength=b)).pvalue > 1e-6
    for one, other in ((0, 1), (1, 2), (0, 2)):
        same = int((places[one] == places[other]).sum())
        assert stats.binomtest(same, persons, 1 / b).pvalue > 1e-6
    both = int((drawn[0] & coins.toss(0, 0.5)).sum())
    assert stats.binomtest(both, persons, 0.5 / b).pvalue > 1e-6
    # A silo that holds the last person alone finds the same round.
    alone = PersonCoins(SECRET, "run", "p", [str(persons - 1)])
    assert [bool(RandomAllocation(b).draw(alone, round_, 1 / b)[0]) for round_ in range(3 * b)] == drawn[
        :, -1
    ].tolist()


def test_the_places_of_persons_are_known_answers():
    coins = PersonCoins(SECRET, "run", "", [str(number) for number in range(64)])
    for round_, b in ((0, 2), (7, 5), (10**6, 12)):
        words = coins.draw("allocation", round_ // b).tolist()
        assert RandomAllocation(b).draw(coins, round_, 1 / b).tolist() == [
            word % b == round_ % b for word in words
        ]
    allocated = np.packbits(RandomAllocation(2).draw(coins, 3, 0.5)).tobytes().hex()
    assert allocated == "6bf2e9bbf86d3a4e"


@dataclass(frozen=True)
class Free(AllocatedRelease):
    """An event of a stranger that costs nothing."""

    def simplify(self, release):
        return None


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_an_event_of_a_stranger_has_no_cost(accountant):
    with pytest.raises(SilodpError) as raised:
        compute_epsilon([(Free(5, Gaussian(2.0)), 1)], DELTA, accountant)
    assert raised.value.code == "accounting.event"
    assert not find_accountant("pld").supports(Free(5, Gaussian(2.0)))


def test_a_stored_event_without_its_package_is_refused(monkeypatch, tmp_path):
    """Of an event and of a whole ledger, which is not damaged: with the package it is read with the same ε."""
    event, path = AllocatedRelease(5, Gaussian(2.0)), tmp_path / "ledger.jsonl"
    stored = event_to_dict(event)
    with Ledger(path, DELTA, run="a") as ledger:
        ledger.charge(0, 0, {"server": event})
        spent = ledger.epsilon("server")
    with Ledger(path, DELTA, run="a") as ledger:
        assert ledger.epsilon("server") == spent
    monkeypatch.setattr(events, "EVENTS", Registry("nothing", {}))
    for read in (lambda: event_from_dict(stored), lambda: Ledger(path, DELTA, run="a")):
        with pytest.raises(SilodpError) as raised:
            read()
        assert raised.value.code == "extension.missing"


@dataclass(frozen=True)
class Anyone(RandomAllocation):
    """A rule of a stranger."""


def test_the_rule_of_a_stranger_makes_a_run_one_with_plugins():
    """Else its guarantee would not assume that other code draws what its event says."""
    for rule, is_other in ((RandomAllocation(2), False), (Anyone(2), True)):
        method = UldpAvg(5.0, 0.1, participation=rule)
        spec = make_spec("", ("a", "b"), method, FederationSize(2, 50), 10, delta=DELTA, rounds=4)
        assert spec.has_plugins == is_other


def test_the_sample_of_an_allocation_is_measured_once_it_has_ended():
    rule = RandomAllocation(rounds=2)
    drawn = np.array([[True, False, True], [False, True, True], [True, False, False]])
    assert rule.measure_sample(drawn[:1]) == {}
    assert rule.measure_sample(drawn) == {"in one round of each allocation": 2 / 3}
