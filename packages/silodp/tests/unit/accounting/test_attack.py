"""What the best attacker can find out, against closed forms, integration and distributions computed by other means.

Were these numbers too small, a report would promise people more than the noise gives them; too large by much, and it
would say nothing (half of 1 + δ(0) is 67.3 % for the demo, and the bound from ε and δ alone 98.0 %).

The second number was once P(L > ε) of the privacy loss of everything that is seen: 5.77e-5 for the demo. Whoever
reports only whether the loss is above 3.65 makes an event of probability 1.40e-4 that is e^3.85 times likelier in one
world.
"""

import math

import numpy as np
import pytest
from scipy import optimize, special, stats

from silodp.accounting.accountant import compute_epsilon, find_accountant
from silodp.accounting.events import (
    Gaussian,
    Group,
    NonPrivate,
    PoissonSampled,
    RevealedSample,
    Skellam,
    WorstOf,
)
from silodp.accounting.trade_off import compute_membership_attack

PHI = stats.norm.cdf


def total_variation(charges, accountant="pld"):
    return find_accountant(accountant).compose(charges).total_variation()


def probability_above(charges, epsilon, accountant="pld"):
    return find_accountant(accountant).compose(charges).probability_above(epsilon)


def largest_event(likelier, other, epsilon, low, high):
    """P(E) of the threshold at which likelier(t) = e^ε·other(t): ln(likelier/other) grows with t."""
    threshold = optimize.brentq(
        lambda t: math.log(likelier(t)) - math.log(other(t)) - epsilon, low, high, xtol=1e-13
    )
    return likelier(threshold)


def largest_gaussian_event(mu, epsilon):
    """The loss is N(μ²/2, μ²) in the first world, and N(−μ²/2, μ²) in the other."""

    def log_ratio(t):
        return stats.norm.logsf(t / mu - mu / 2) - stats.norm.logsf(t / mu + mu / 2) - epsilon

    return PHI(mu / 2 - optimize.brentq(log_ratio, epsilon - 8 * mu, epsilon, xtol=1e-13) / mu)


def test_the_demo_has_the_numbers_of_the_closed_form():
    """20 Gaussian rounds at σ = 5: the loss is Gaussian with mean μ²/2 and variance μ²."""
    demo = [(Gaussian(5.0), 20)]
    mu = math.sqrt(20) / 5
    spent = compute_epsilon(demo, 1e-5)
    assert spent == pytest.approx(3.8486, abs=1e-4)
    attack = compute_membership_attack(demo, spent)
    assert attack.exact
    assert attack.accuracy == pytest.approx(PHI(mu / 2), rel=1e-9)
    assert attack.accuracy == pytest.approx(0.67264, abs=1e-5)
    assert attack.loss_above_epsilon == pytest.approx(largest_gaussian_event(mu, spent), rel=1e-4)
    assert attack.loss_above_epsilon == pytest.approx(1.400e-4, rel=1e-3)  # and not P(L > ε) = 5.77e-5


@pytest.mark.parametrize("sigma", [0.7, 2.0, 30.0])
@pytest.mark.parametrize("count", [1, 400])
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_gaussian_releases_against_the_closed_form(sigma, count, delta):
    charges = [(Gaussian(sigma), count)]
    mu = math.sqrt(count) / sigma
    spent = compute_epsilon(charges, delta)
    assert total_variation(charges) == pytest.approx(2 * PHI(mu / 2) - 1, rel=1e-8)
    expected = largest_gaussian_event(mu, spent)
    assert expected * (1 - 1e-6) <= probability_above(charges, spent) <= expected * (1 + 1e-3)
    assert expected > PHI(mu / 2 - spent / mu) > delta


@pytest.mark.parametrize(("q", "sigma"), [(0.5, 1.0), (0.1, 2.0), (0.02, 0.8)])
def test_one_sampled_release_against_its_distributions(q, sigma):
    """(1−q)·N(0, σ²) + q·N(1, σ²) against N(0, σ²), both ways."""
    charges = [(PoissonSampled(q, Gaussian(sigma)), 1)]
    assert total_variation(charges) == pytest.approx(q * (2 * PHI(0.5 / sigma) - 1), rel=1e-4)
    for eps in (0.05, 0.4, 1.0):
        removed = largest_event(
            lambda x: (1 - q) * PHI(-x / sigma) + q * PHI((1 - x) / sigma),
            lambda x: PHI(-x / sigma),
            eps,
            -8 * sigma,
            30 * sigma,
        )
        added = 0.0
        if math.exp(-eps) > 1 - q:  # no event is more than 1/(1−q) times likelier
            added = largest_event(
                lambda x: PHI(-x / sigma),
                lambda x: (1 - q) * PHI(-x / sigma) + q * PHI((-x - 1) / sigma),
                eps,
                -8 * sigma,
                30 * sigma,
            )
        assert probability_above(charges, eps) == pytest.approx(max(removed, added), rel=2e-3)


def test_many_sampled_releases_against_a_simulation():
    q, sigma, rounds, trials = 0.3, 1.2, 30, 400_000
    generator = np.random.default_rng(5)
    total = np.zeros(trials)
    for _ in range(rounds):
        x = generator.standard_normal(trials) * sigma + (generator.random(trials) < q)
        total += np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2)))
    charges = [(PoissonSampled(q, Gaussian(sigma)), rounds)]
    distance = float(np.mean(np.maximum(-np.expm1(-total), 0.0)))
    assert total_variation(charges) == pytest.approx(distance, abs=4 * 0.5 / math.sqrt(trials))
    falling = np.sort(total)[::-1]
    ratios = np.arange(1, trials + 1) / np.cumsum(np.exp(-falling))  # P(E)/Q(E) of the largest losses
    for eps in (1.0, 3.0):
        share = float(np.count_nonzero(ratios >= math.exp(eps)) / trials)
        assert share > 1.5 * np.mean(total > eps)
        assert probability_above(charges, eps) == pytest.approx(share, rel=8 / math.sqrt(share * trials))


def test_a_known_sample_against_the_mixture_over_how_often_the_person_was_in():
    q, sigma, rounds = 0.2, 1.5, 25
    charges = [(RevealedSample(q, Gaussian(sigma)), rounds)]
    k = np.arange(1, rounds + 1)
    never, often, mu = (1 - q) ** rounds, stats.binom.pmf(k, rounds, q), np.sqrt(k) / sigma
    assert total_variation(charges) == pytest.approx(float(often @ (2 * PHI(mu / 2) - 1)), rel=1e-4)
    for eps in (0.5, 2.0):
        expected = largest_event(
            lambda t: never * (t < 0) + float(often @ PHI(mu / 2 - t / mu)),
            lambda t: never * (t < 0) + float(often @ PHI(-mu / 2 - t / mu)),
            eps,
            -3.0,
            8.0,
        )
        assert probability_above(charges, eps) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("sigma", [0.6, 2.0, 8.0])
@pytest.mark.parametrize("units", [1, 4])
def test_integer_noise_is_bounded_and_said_to_be(sigma, units):
    """By Rényi orders, above the exact values of one coordinate that moves by `units` steps."""
    charges = [(Skellam(sigma, units, 1), 1)]
    variance = (sigma * units) ** 2
    reach = int(14 * math.sqrt(variance) + 20 * units + 30)
    x = np.arange(-reach, reach + 1)
    still, moved = special.ive(abs(x), variance), special.ive(abs(x - units), variance)  # exact in the tails
    spent = compute_epsilon(charges, 1e-5, "rdp")
    attack = compute_membership_attack(charges, spent)
    assert not attack.exact
    exact = (1 + float(np.maximum(moved - still, 0).sum())) / 2
    assert exact <= attack.accuracy < exact + 0.2
    falling = moved[::-1].cumsum()  # the loss grows with x
    for eps in (spent / 8, spent / 2, spent):
        above = falling[falling >= math.exp(eps) * still[::-1].cumsum()].max(initial=0.0)
        assert above <= probability_above(charges, eps, "rdp")
    assert attack.loss_above_epsilon == probability_above(charges, spent, "rdp") < 1e-2


@pytest.mark.parametrize(
    "charges",
    [
        [(Gaussian(0.4), 3)],
        [(Gaussian(5.0), 20)],
        [(Gaussian(50.0), 1)],
        [(PoissonSampled(0.1, Gaussian(1.0)), 50)],
        [(RevealedSample(0.3, Gaussian(2.0)), 50)],
        [(Group(4, PoissonSampled(0.05, Gaussian(2.0))), 10)],
    ],
)
def test_renyi_orders_bound_what_distributions_say(charges):
    assert total_variation(charges) <= total_variation(charges, "rdp") <= 1
    for delta in (1e-3, 1e-7):
        spent = compute_epsilon(charges, delta)
        exact = probability_above(charges, spent)
        assert exact <= probability_above(charges, spent, "rdp") <= 1


@pytest.mark.parametrize(
    ("event", "largest"),
    [
        (Gaussian(0.5), 0.892),  # Bretagnolle and Huber; χ² alone says .982
        (Gaussian(1.0), 0.525),  # Pinsker; without it .560
        (Gaussian(5.0), 0.102),  # χ² at most 1; without it .105
        (Skellam(0.6, 4, 1), 0.965),  # χ² above 1; without it .982
    ],
)
def test_each_way_of_bounding_the_distance_is_needed(event, largest):
    assert total_variation([(event, 1)], "rdp") < largest


def test_nothing_told_and_nothing_promised():
    assert compute_membership_attack([], 0.0).accuracy == 0.5
    assert compute_membership_attack([(Gaussian(math.inf), 3)], 0.0).loss_above_epsilon == 0.0
    none = compute_membership_attack([(NonPrivate("no noise"), 1), (Skellam(1.0, 1, 1), 1)], 1.0)
    assert (none.accuracy, none.loss_above_epsilon) == (1.0, 1.0)


def test_the_worst_kind_of_unit_counts():
    kinds = [(WorstOf((Gaussian(2.0), Gaussian(1.0))), 4)]
    assert total_variation(kinds) == pytest.approx(2 * PHI(1.0) - 1, rel=1e-6)


def test_what_ciphertexts_disclose_is_added():
    assert compute_membership_attack([(Gaussian(5.0), 1)], 1.0, 0.01).accuracy == pytest.approx(
        PHI(0.1) + 0.005, rel=1e-9
    )
    assert compute_membership_attack([(Gaussian(0.02), 1)], 1.0, 0.9).accuracy == 1.0
    # What is seen may be an event of its own that tells all: at probability .01, whatever the sums tell.
    disclosing = compute_membership_attack([(Gaussian(50.0), 1)], 1.0, 0.01)
    assert 0.01 / -math.expm1(-1.0) <= disclosing.loss_above_epsilon < 0.017
