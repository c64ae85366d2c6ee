"""Statistics of an attack: exact where they say so, never above the truth, and strong enough to find what is wrong."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import special, stats

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Gaussian, PoissonSampled, Skellam
from silodp.accounting.trade_off import TradeOff, compose_trade_off
from silodp_audit.attack.evidence import (
    NoiseFamily,
    bound_auc,
    bound_epsilon_one_run,
    bound_share,
    compute_one_run_p,
    compute_p,
    count_wins,
    find_detectable,
    measure_accuracy,
    measure_roc,
    solve_one_run,
    weigh_evidence,
)
from support.refusals import refused

PHI = stats.norm.cdf
DEMO = [(Gaussian(5.0), 10)]
MU = math.sqrt(10) / 5


def draw(seed, mu, count=1500):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(count) + mu, rng.standard_normal(count)


@pytest.mark.parametrize("auc", [Fraction(1, 2), Fraction(2, 3)])
@pytest.mark.parametrize("pairs", [1, 4, 7])
def test_p_by_counting_every_outcome(pairs, auc):
    for wins in range(pairs + 1):
        exact = sum(
            auc ** sum(outcome) * (1 - auc) ** (pairs - sum(outcome))
            for outcome in itertools.product((0, 1), repeat=pairs)
            if sum(outcome) >= wins
        )
        assert compute_p(wins, pairs, float(auc)) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize("trials", [3, 10])
def test_limits_of_a_share_are_wrong_as_seldom_as_they_say(trials):
    level = 0.05
    limits = [bound_share(count, trials, level) for count in range(trials + 1)]
    for share in np.linspace(0.01, 0.99, 99):
        weights = stats.binom.pmf(np.arange(trials + 1), trials, share)
        assert sum(w for w, (low, _) in zip(weights, limits, strict=True) if low > share) <= level + 1e-12
        assert sum(w for w, (_, high) in zip(weights, limits, strict=True) if high < share) <= level + 1e-12
    assert (limits[0][0], limits[-1][1]) == (0.0, 1.0)
    # P(Bin(n, low) ≥ n) = level: low = level^(1/n)
    assert limits[-1][0] == pytest.approx(level ** (1 / trials))


def test_pairs_are_disjoint_and_ties_are_tossed():
    rng = np.random.default_rng(0)
    assert count_wins(np.array([3.0, 1.0, 5.0]), np.array([2.0, 2.0]), rng) == (2, 1)
    pairs, wins = count_wins(np.ones(4000), np.ones(4000), rng)
    assert pairs == 4000
    assert abs(wins - 2000) < 4 * math.sqrt(1000)


def test_the_limit_of_the_area_covers_it():
    found = [bound_auc(*draw(seed, 0.8, 300), 0.05) for seed in range(300)]
    areas, lows = np.array(found).T
    exact = PHI(0.8 / math.sqrt(2))
    assert np.mean(areas) == pytest.approx(exact, abs=0.004)
    assert 0.02 <= np.mean(lows > exact) <= 0.09  # 5 %, with 300 trials
    # by counting every pair
    members, others = np.array([1.0, 2.0, 2.0, 4.0]), np.array([0.0, 2.0, 3.0])
    counted = np.mean([(a > b) + (a == b) / 2 for a in members for b in others])
    assert bound_auc(members, others, 0.05)[0] == pytest.approx(counted)


def enumerate_theorem(canaries, guesses, right, epsilon, delta):
    """Theorem 5.2 from its text: P(W ≥ v) + α·m·δ with α = max over i in 1..m of (2/i)·P(v > W ≥ v − i)."""
    chance = math.exp(epsilon) / (1 + math.exp(epsilon))
    mass = [math.comb(guesses, k) * chance**k * (1 - chance) ** (guesses - k) for k in range(guesses + 1)]
    alpha = max(
        2 / i * sum(mass[k] for k in range(max(right - i, 0), min(right, guesses + 1)))
        for i in range(1, canaries + 1)
    )
    return min(1.0, sum(mass[right:]) + alpha * canaries * delta)


@pytest.mark.parametrize(
    ("canaries", "guesses", "right"), [(10, 6, 6), (10, 10, 7), (100, 50, 40), (100, 60, 31), (20, 5, 0)]
)
def test_one_run_against_the_theorem_as_printed(canaries, guesses, right):
    for epsilon, delta in itertools.product((0.0, 0.3, 2.0), (0.0, 1e-5, 1e-2)):
        exact = enumerate_theorem(canaries, guesses, right, epsilon, delta)
        assert compute_one_run_p(canaries, guesses, right, epsilon, delta) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "expected"),
    [(100, 50, 40, 0.7735), (1000, 100, 80, 0.9553), (4000, 800, 600, 0.9605)],
)
def test_one_run_against_numbers_of_jax_privacy(canaries, guesses, right, expected):
    """δ = 1e-5 at 95 %, by google-deepmind/jax_privacy 2.0, `auditing`."""
    found = solve_one_run(canaries, guesses, right, 1e-5, 0.05)
    assert found == pytest.approx(expected, abs=6e-5)
    assert compute_one_run_p(canaries, guesses, right, found, 1e-5) <= 0.05
    assert compute_one_run_p(canaries, guesses, right, found + 1e-5, 1e-5) > 0.05


def test_one_run_refutes_no_epsilon_that_holds():
    """Randomized response with ε = 1: the worst mechanism of the theorem, all canaries guessed."""
    rng = np.random.default_rng(4)
    above = 0
    for _ in range(200):
        kept = rng.random(400) < special.expit(1.0)
        is_member = rng.random(400) < 0.5
        score = np.where(kept == is_member, 1.0, -1.0)
        found = bound_epsilon_one_run(score[is_member], score[~is_member], 0.0, 0.05, (0.5,), rng)
        above += found > 1.0
    assert above <= 20  # 5 % of 200 are 10; P(more than 20) < .002
    assert found > 0.3


def test_equal_scores_say_nothing_of_membership():
    assert bound_epsilon_one_run(np.zeros(500), np.zeros(500), 1e-5, 0.05) < 0.2


@pytest.mark.parametrize("sigma", [1.0, 5.0, 30.0])
def test_the_factor_against_the_closed_form(sigma):
    """The area with noise σ/κ is Φ(κ/(σ√2)), so κ = √2·σ·Φ⁻¹(AUC)."""
    family = NoiseFamily([(Gaussian(sigma), 1)])
    for auc in (0.51, 0.6, 0.8, 0.95):
        exact = math.sqrt(2) * sigma * special.ndtri(auc)
        low, high = family.find_factor(auc), family.find_factor(auc, above=True)
        assert exact * (1 - 4e-3) <= low <= exact
        assert low <= high <= low * (1 + 2e-3)
        assert family.compute_trade_off(low, 40).auc <= auc <= family.compute_trade_off(high, 40).auc
    assert family.find_factor(0.5) == 0.0


def test_factors_that_nothing_reaches():
    """A sample that nobody sees hides who was not drawn: with q = .1 no noise allows an area of .9."""
    family = NoiseFamily([(PoissonSampled(0.1, Gaussian(2.0)), 1)])
    found = weigh_evidence(*draw(1, 4.0, 300), family.compute_trade_off(), delta=1e-5, family=family)
    assert found.is_violation
    assert found.noise_share > 1
    assert found.to_dict()["epsilon_lower"] is None or found.epsilon_lower > 3


def test_integer_noise_counts_as_gaussian_noise_where_its_grid_is_fine():
    fine, coarse = (NoiseFamily([(Skellam(5.0, units, 100), 10)]) for units in (10_000, 10))
    exact = compose_trade_off(DEMO).auc
    assert fine.compute_trade_off().auc == pytest.approx(exact, abs=1e-12)
    assert fine.compute_epsilon(1e-5) == compute_epsilon(DEMO, 1e-5)
    assert coarse.compute_trade_off().auc > exact + 0.01


def test_right_code_is_seldom_refused_and_never_has_a_larger_epsilon():
    family = NoiseFamily(DEMO)
    claim, promised = family.compute_trade_off(), family.compute_epsilon(1e-5)
    found = [weigh_evidence(*draw(seed, MU, 400), claim, delta=1e-5) for seed in range(200)]
    assert sum(one.is_violation for one in found) <= 18  # 5 % of 200 are 10; P(more than 18) < .007
    assert sum(one.auc_lower > claim.auc for one in found) <= 18
    # The equivalent ε grows with the limit of the area, and is the promised one where the limit is the promised area.
    lows = sorted(one.auc_lower for one in found)
    epsilons = [family.compute_epsilon(1e-5, family.find_factor(low)) for low in lows[::40]]
    assert epsilons == sorted(epsilons)
    assert family.compute_epsilon(1e-5, family.find_factor(claim.auc)) == pytest.approx(promised, rel=5e-3)
    assert 0.6 * promised < family.compute_epsilon(1e-5, family.find_factor(lows[100])) < promised


@pytest.mark.parametrize("factor", [0.5, 0.75])
def test_too_little_noise_is_found(factor):
    family = NoiseFamily(DEMO)
    found = weigh_evidence(
        *draw(3, MU / factor), family.compute_trade_off(), delta=1e-5, family=family, tests=3
    )
    assert found.is_violation
    assert found.noise_share > 1
    assert found.epsilon_lower > family.compute_epsilon(1e-5)
    assert found.detectable > factor


def test_what_is_called_detectable_is_found_with_that_probability():
    family, level = NoiseFamily(DEMO), 0.05
    claim = family.compute_trade_off()
    for pairs in (500, 1500):
        share = find_detectable(pairs, claim.auc, family, level)
        wins = np.random.default_rng(0).binomial(pairs, PHI(MU / share / math.sqrt(2)), 4000)
        found = np.mean([compute_p(int(w), pairs, claim.auc) < level for w in wins])
        assert 0.94 <= found <= 0.965
    assert find_detectable(500, claim.auc, family, level) == pytest.approx(0.69, abs=0.01)
    assert find_detectable(20_000, claim.auc, family, level) == pytest.approx(0.937, abs=0.005)
    assert find_detectable(4, claim.auc, family, level) == 0.0


def test_accuracy_is_no_better_than_chance_where_nothing_leaks():
    """With the threshold chosen on the scores that it is tested on, the mean would be .56."""
    found = [measure_accuracy(*draw(seed, 0.0, 100)) for seed in range(200)]
    assert np.mean(found) == pytest.approx(0.5, abs=0.01)
    members, others = draw(0, 1.0, 20_000)
    assert measure_accuracy(members, others) == pytest.approx(PHI(0.5), abs=0.01)


def test_the_measured_curve_is_that_of_the_scores():
    members, others = draw(2, 1.0, 4000)
    roc = measure_roc(members, others, TradeOff.of_pair(1.0, 0.0))
    fpr, tpr = np.array(roc.fpr), np.array(roc.tpr)
    assert len(fpr) <= 60
    assert (fpr[0], fpr[-1], tpr[-1]) == (0.0, 1.0, 1.0)
    assert (np.diff(fpr) > 0).all()
    assert (np.diff(tpr) >= 0).all()
    exact = PHI(stats.norm.ppf(fpr[1:-1]) + 1)
    assert np.abs(tpr[1:-1] - exact).max() < 0.05
    assert (np.array(roc.tpr_low) <= tpr).all()
    assert (tpr <= np.array(roc.tpr_high)).all()
    assert roc.claimed_tpr == pytest.approx(np.minimum(math.e * fpr, 1 - (1 - fpr) / math.e))


def test_without_a_promise_only_what_was_measured_is_stated():
    found = weigh_evidence(*draw(2, 1.0), None, delta=1e-5)
    assert (found.p, found.detectable, found.epsilon_lower, found.epsilon_one_run) == (None,) * 4
    assert not found.is_violation
    assert found.auc_lower < PHI(1 / math.sqrt(2)) < found.auc_upper
    assert found.roc.claimed_tpr is None


def test_a_promise_by_epsilon_and_delta_alone():
    claim = TradeOff.of_pair(1.0, 1e-5)
    assert not weigh_evidence(*draw(1, 0.3), claim, delta=1e-5).is_violation
    assert weigh_evidence(*draw(1, 3.0), claim, delta=1e-5).is_violation


def test_the_same_scores_give_the_same_evidence():
    one, again = (weigh_evidence(*draw(1, 0.5), None, delta=1e-5, coins=True) for _ in range(2))
    assert one == again
    assert one.epsilon_one_run > 0


def test_refusals():
    members, others = draw(0, 0.0, 10)
    with refused("argument.shape"):
        weigh_evidence(members[:3], others, None, delta=1e-5)
    with refused("argument.shape"):
        weigh_evidence(members[:, None], others, None, delta=1e-5)
    with refused("argument.value"):
        weigh_evidence(np.append(members, np.nan), others, None, delta=1e-5)
    for level in (0.0, 0.5, math.nan):
        with refused("argument.value"):
            weigh_evidence(members, others, None, delta=1e-5, level=level)
