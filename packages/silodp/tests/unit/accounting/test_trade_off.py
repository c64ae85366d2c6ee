"""Trade-off curves against closed forms, against dp_accounting, and against a second way to compute them.

Every number of a curve must be at least the true one: a report would promise too much otherwise, and an attack would
call right code wrong. Far above the true one it would say nothing.
"""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from scipy import integrate, optimize, stats

from silodp.accounting.accountant import Accountant, Composition, find_accountant
from silodp.accounting.charges import ChargeCounts
from silodp.accounting.events import (
    Composed,
    CorrelatedReleases,
    Gaussian,
    Group,
    NonPrivate,
    PoissonSampled,
    RevealedSample,
    SampledReplacement,
    SelfComposed,
    Skellam,
    WorstOf,
    to_continuous,
    to_discrete,
)
from silodp.accounting.trade_off import (
    FEW_POINTS,
    TradeOff,
    compose_trade_off,
    compute_membership_attack,
    divide_noise,
)

PHI, QUANTILE = stats.norm.cdf, stats.norm.ppf
RATES = np.array([1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9])
CHARGES = {
    "gaussian": [(Gaussian(5.0), 20)],
    "sampled": [(PoissonSampled(0.3, Gaussian(2.0)), 20)],
    "seen sample": [(RevealedSample(0.3, Gaussian(2.0)), 20)],
    "replaced": [(SampledReplacement(0.1, Gaussian(3.0)), 10)],
    "group": [(Group(3, PoissonSampled(0.1, Gaussian(6.0))), 20)],
    "kinds": [(WorstOf((Gaussian(5.0), PoissonSampled(0.5, Gaussian(3.0)))), 10)],
}


@pytest.mark.parametrize("mu", [0.05, math.sqrt(20) / 5, 2.0, 5.0])
def test_gaussian_curves_against_the_closed_form(mu):
    """f(α) = Φ(Φ⁻¹(1 − α) − μ), and the area is Φ(μ/√2) (Dong, Roth and Su 2022)."""
    curve = compose_trade_off([(Gaussian(1 / mu), 1)])
    found, exact = curve.compute_tpr(RATES), PHI(QUANTILE(RATES) + mu)
    assert (found >= exact * (1 - 1e-12)).all()
    assert found == pytest.approx(exact, rel=0.01)
    assert PHI(mu / math.sqrt(2)) <= curve.auc <= PHI(mu / math.sqrt(2)) + 3e-5
    assert curve.accuracy == pytest.approx(PHI(mu / 2), rel=1e-9)


@pytest.mark.parametrize(
    ("rounds", "accuracy", "auc", "tpr_1", "tpr_01"),
    [(20, 0.673, 0.737, 0.076, 0.014), (50, 0.761, 0.842, 0.181, 0.047), (100, 0.842, 0.922, 0.373, 0.138)],
)
def test_the_rates_of_the_demo(rounds, accuracy, auc, tpr_1, tpr_01):
    attack = compute_membership_attack([(Gaussian(5.0), rounds)], 4.0)
    found = (attack.accuracy, attack.auc, attack.tpr_1, attack.tpr_01)
    assert found == pytest.approx((accuracy, auc, tpr_1, tpr_01), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHARGES)
def test_a_second_way_to_the_same_curve(name):
    """f is the conjugate of δ in e^ε, over ε of either sign.

    δ(−ε) = 1 − e^(−ε)·(1 − δ(ε)), as both directions are covered, so that one formula replaces the two branches.
    """
    composition = find_accountant("pld").compose(CHARGES[name])
    curve = TradeOff.of(composition)
    epsilons = np.linspace(0, 12, 400)
    deltas = np.array([composition.delta(epsilon) for epsilon in epsilons])
    signed = np.concatenate([-epsilons[::-1], epsilons])
    both = np.concatenate([1 - np.exp(-epsilons[::-1]) * (1 - deltas[::-1]), deltas])
    for rate in RATES:
        expected = max(0.0, float(np.max(1 - both - np.exp(signed) * rate)))
        assert float(curve.compute_fnr(rate)) == pytest.approx(expected, rel=0.02, abs=2e-5)


def test_sampled_rounds_against_dp_accounting():
    q, sigma, rounds = 0.3, 2.0, 20
    theirs = library.from_gaussian_mechanism(sigma, sampling_prob=q).self_compose(rounds)
    curve = compose_trade_off([(PoissonSampled(q, Gaussian(sigma)), rounds)])
    assert curve.deltas == pytest.approx(theirs.get_delta_for_epsilon(curve.epsilons), rel=1e-3, abs=1e-9)


def test_one_sampled_release_against_its_distributions():
    """(1 − q)·N(0, σ²) + q·N(1, σ²) against N(0, σ²): by Neyman and Pearson a threshold is the best test, both ways."""
    q, sigma = 0.4, 0.7
    curve = compose_trade_off([(PoissonSampled(q, Gaussian(sigma)), 1)])

    def removed(rate):
        return (1 - q) * rate + q * PHI(QUANTILE(rate) + 1 / sigma)

    def added(rate):  # the errors exchanged
        return 1 - optimize.brentq(lambda x: removed(x) - (1 - rate), 1e-15, 1 - 1e-15)

    # δ(ε) is the larger one of both directions, so the curve is the concave hull of both (Dong et al., Prop. 2.12).
    rates = np.sort(np.concatenate([np.geomspace(1e-5, 1 - 1e-5, 600), np.linspace(0.01, 0.99, 400)]))
    corners = [(0.0, 0.0), *((rate, max(removed(rate), added(rate))) for rate in rates), (1.0, 1.0)]
    hull = []
    for x, y in corners:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) <= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    alphas, largest = np.array(hull).T
    asked = np.array([0.003, 0.05, 0.4, 0.8])
    expected, found = np.interp(asked, alphas, largest), curve.compute_tpr(asked)
    assert (found >= expected - 1e-6).all()
    assert found == pytest.approx(expected, rel=2e-3)
    assert curve.auc == pytest.approx(integrate.trapezoid(largest, alphas), abs=2e-4)


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.0, 0.0), (1.0, 1e-5), (1.0, 0.1), (4.0, 1e-5), (50.0, 0.0)]
)
def test_a_single_pair_against_the_region_of_errors(epsilon, delta):
    """The corners of the region of Kairouz, Oh and Viswanath 2015; the area by exact integration of two lines."""
    curve = TradeOff.of_pair(epsilon, delta)
    corner = (1 - delta) / (1 + math.exp(epsilon))
    assert float(curve.compute_fnr(corner)) == pytest.approx(corner, rel=1e-12)
    assert curve.accuracy == pytest.approx(1 - corner, rel=1e-12)
    assert float(curve.compute_fnr(0.0)) == pytest.approx(1 - delta)
    assert float(curve.compute_fnr(1.0)) == 0.0
    exact = 1 - corner * (1 - delta)
    assert exact - 1e-12 <= curve.auc <= exact + 1e-4


def test_nothing_promised_and_nothing_charged():
    nothing = compose_trade_off([(NonPrivate("counts"), 1)])
    assert (nothing.auc, nothing.accuracy) == (1.0, 1.0)
    assert TradeOff.of_pair(math.inf, 1e-5).auc == 1.0
    free = compose_trade_off([])
    assert free.auc == pytest.approx(0.5, abs=1e-9)
    assert free.compute_tpr(RATES) == pytest.approx(RATES, abs=1e-12)


@pytest.mark.parametrize("name", CHARGES)
def test_fewer_points_and_more_charges_only_make_an_attacker_stronger(name):
    charges = CHARGES[name]
    curve = compose_trade_off(charges)
    few = compose_trade_off(charges, points=10)
    assert (few.compute_tpr(RATES) >= curve.compute_tpr(RATES) - 1e-9).all()
    assert curve.auc <= few.auc
    for more in ([*charges, (Gaussian(20.0), 1)], divide_noise(charges, 1.2)):
        found = compose_trade_off(more)
        assert found.auc > curve.auc
        assert (found.compute_tpr(RATES) >= curve.compute_tpr(RATES) * 0.999).all()
    assert compose_trade_off(divide_noise(charges, 0.8)).auc < curve.auc


def test_no_curve_is_below_a_looser_one():
    """Rényi orders bound the same curve from above, and a disclosure only adds to it."""
    charges = CHARGES["gaussian"]
    curve = compose_trade_off(charges)
    loose = compose_trade_off(charges, find_accountant("rdp"))
    assert loose.auc > curve.auc
    assert (loose.compute_tpr(RATES) > curve.compute_tpr(RATES)).all()
    composition = find_accountant("pld").compose(charges)
    disclosed = TradeOff.of(composition, disclosure=0.01)
    # Both worlds move by at most TV: the true positive rate is 1 − f(α + TV) + TV.
    shifted = curve.compute_tpr(RATES + 0.01) + 0.01
    assert disclosed.compute_tpr(RATES) == pytest.approx(np.minimum(shifted, 1), rel=1e-3)


class EpsilonAlone(Composition):
    """The composition of a plug-in that only writes `epsilon`."""

    def __init__(self, charges):
        self.charges = charges

    def epsilon(self, delta):
        return find_accountant("pld").compose(self.charges).epsilon(delta)


class Plugin(Accountant):
    name = "plugin"

    def supports(self, event):
        return True

    def compose(self, charges):
        return EpsilonAlone(list(charges))


def test_the_curve_of_a_plugin_follows_from_its_epsilon():
    charges = [(Gaussian(5.0), 20)]
    curve = compose_trade_off(charges, Plugin(), FEW_POINTS)
    exact = PHI(math.sqrt(20) / 5 / math.sqrt(2))
    assert exact <= curve.auc <= exact + 1e-3


@pytest.mark.parametrize("name", CHARGES)
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_many_deltas_are_those_of_single_questions(name, accountant):
    composition = find_accountant(accountant).compose(CHARGES[name])
    epsilons = [0.0, 1e-3, 0.5, 2.0, 30.0, 600.0]
    assert composition.deltas(epsilons) == pytest.approx([composition.delta(e) for e in epsilons], rel=1e-12)


def test_rates_are_left_out_where_only_loose_bounds_are_known():
    integers = [(Skellam(5.0, 10**6, 1000), 20)]
    attack = compute_membership_attack(integers, 4.0)
    assert not attack.exact
    assert (attack.auc, attack.tpr_1, attack.tpr_01) == (None, None, None)


def test_what_ciphertexts_disclose_is_in_the_rates():
    """bound_attack adds the part of δ that is kept for ciphertexts; with a large one every rate must grow."""
    charged = {"server": {Gaussian(5.0): 20}}
    counts = ChargeCounts(1e-5, find_accountant("pld"), 20, charged, {}, ())
    plain, disclosed = (counts.bound_attack("server", 3.0, delta) for delta in (1e-5, 0.2))
    tv = (0.2 - 1e-5) / (1 + math.exp(3.0))
    assert disclosed.tpr_01 - plain.tpr_01 > tv
    assert disclosed.tpr_1 == pytest.approx(PHI(QUANTILE(0.01 + tv) + math.sqrt(20) / 5) + tv, rel=1e-3)
    assert disclosed.auc > plain.auc


def test_integer_noise_as_gaussian_noise_of_the_same_multiplier():
    inner = SelfComposed(PoissonSampled(0.1, CorrelatedReleases(Gaussian(3.0), Gaussian(4.0))), 5)
    event = Composed((WorstOf((inner, inner)), RevealedSample(0.5, Group(2, Gaussian(3.0))), Gaussian(2.0)))
    assert to_continuous(to_discrete(event, 5000, 10)) == event
    coarse = Skellam(2.0, 100, 10)
    assert to_continuous(coarse, least_spread=200.0) == Gaussian(2.0)
    assert to_continuous(coarse, least_spread=201.0) == coarse
