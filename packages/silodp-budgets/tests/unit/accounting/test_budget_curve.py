"""No record spends more than its budget, by an accountant that knows nothing of the calibration."""

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Gaussian, PoissonSampled, RevealedSample
from silodp.errors import SilodpError
from silodp_budgets.budget_curve import EpsilonCurve, compute_filter_budget
from silodp_budgets.two_stage import (
    ORDERS,
    TwoStage,
    compute_conversion,
    compute_two_stage_curve,
    count_affordable_rounds,
    fit_scf,
    search_probabilities,
)
from support.examples import few_or_many
from support.refusals import refused

HEART = {"noise_multiplier": 12.25, "local_steps": 50, "client_sampling": 1.0, "rounds": 15, "delta": 1e-3}
LEVELS = np.array([0.1, 1.0, 5.0])
GRID = 1e-4


def two_stage(rounds=None, **sizes):
    """The arguments (run, rounds) of a calibration; the run alone without a number of rounds."""
    return TwoStage(**sizes) if rounds is None else (TwoStage(**sizes), rounds)


def renyi_cost(q, noise_multiplier, local_steps, client_sampling, rounds, delta, joined=False):
    """ε by dp_accounting's accountant and conversion, the coin put in by hand; `joined`: every round, no coin."""
    accountant = dp_accounting.rdp.RdpAccountant(
        sorted({*rdp_privacy_accountant.DEFAULT_RDP_ORDERS, *ORDERS[ORDERS <= 1024]})
    )
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(noise_multiplier))
    accountant.compose(event, local_steps)
    alpha, rho = np.array(accountant.orders), accountant.rdp
    if not joined and client_sampling < 1:
        exponent = np.log(client_sampling) + (alpha - 1) * rho
        rho = np.logaddexp(math.log1p(-client_sampling), exponent) / (alpha - 1)
    return float(rdp_privacy_accountant.compute_epsilon(alpha, rounds * rho, delta)[0])


def loss_cost(q, noise_multiplier, local_steps, client_sampling, rounds, delta):
    step = library.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=q, value_discretization_interval=GRID
    )
    joined = step.self_compose(local_steps).compute_mixture(library.identity(GRID), client_sampling)
    return joined.self_compose(rounds).get_epsilon_for_delta(delta)


runs = st.fixed_dictionaries(
    {
        "noise_multiplier": st.floats(0.8, 20),
        "local_steps": st.integers(1, 60),
        "client_sampling": st.floats(0.05, 1),
        "rounds": st.integers(1, 40),
        "delta": st.floats(1e-6, 1e-3),
    }
)
some_budgets = st.lists(st.floats(0.05, 15), min_size=1, max_size=3)


@few_or_many(5, 15, run=runs, budgets=some_budgets)
def test_no_record_overspends_and_none_could_get_the_next_grid_point(run, budgets):
    budgets = np.array(budgets)
    curve = compute_two_stage_curve(*two_stage(**run))
    met = curve.parameter_for(budgets)
    assert (curve.spent(met) <= budgets).all()
    for q, budget in zip(met, budgets, strict=True):
        if q == 0:
            assert curve.epsilons[0] > budget
            continue
        assert renyi_cost(q, **run) <= budget * (1 + 1e-9)
        if q < 1:
            above = curve.parameters[np.searchsorted(curve.parameters, q) + 1]
            assert 1 < above / q < 1.01
            assert curve.spent(np.array([above]))[0] > budget


@few_or_many(2, 4, run=runs, budget=st.floats(0.1, 8))
def test_the_true_cost_lies_below_the_renyi_cost(run, budget):
    q = compute_two_stage_curve(*two_stage(**run)).parameter_for(np.array([budget]))[0]
    if q > 0:
        assert loss_cost(q, **run) <= budget * (1 + 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("client_sampling", [0.3, 1.0])
def test_few_budgets_are_met_by_pld_to_a_thousandth(client_sampling):
    run = {**HEART, "client_sampling": client_sampling}
    curve = compute_two_stage_curve(*two_stage(**run), accountant="pld", budgets=np.tile(LEVELS, 40))
    met = curve.parameter_for(LEVELS)
    assert (met > compute_two_stage_curve(*two_stage(**run)).parameter_for(LEVELS)).all()
    for q, budget in zip(met, LEVELS, strict=True):
        true = loss_cost(q, **run)
        assert true <= budget * (1 + 2e-4)
        assert q == 1 or budget * (1 - 2e-3) <= true
    assert ((met == 1) | (curve.spent(met) >= LEVELS * (1 - 1e-3))).all()


def test_many_budgets_share_a_coarser_curve_by_pld():
    run = {**HEART, "client_sampling": 0.5}
    budgets = np.linspace(0.5, 4, 100)
    curve = compute_two_stage_curve(*two_stage(**run), accountant="pld", points=12, budgets=budgets)
    assert len(curve.parameters) == 12
    met = curve.parameter_for(budgets)
    assert (curve.spent(met) <= budgets).all()
    assert met[-1] > 0
    assert set(met) <= {0.0, *curve.parameters}


def test_the_curve_is_the_accountants_epsilon_up_to_its_orders():
    curve = compute_two_stage_curve(*two_stage(**HEART))
    for i in (900, 1500, 1900):
        q = float(curve.parameters[i])
        steps = RevealedSample(1.0, PoissonSampled(q, Gaussian(12.25)))
        ours = compute_epsilon([(steps, 15 * 50)], 1e-3, "rdp")
        assert ours * (1 - 1e-9) <= curve.epsilons[i] <= ours * 1.005
    assert round(curve.epsilons[-1]) == 10  # the paper's code takes the σ at which q = 1 costs 10


def test_curves_are_read_from_below_and_charged_from_above():
    curve = EpsilonCurve(np.array([0.1, 0.2, 1.0]), np.array([1.0, 2.0, math.inf]))
    np.testing.assert_array_equal(
        curve.parameter_for(np.array([0.9, 1.0, 1.9, 2.0, 1e9, math.inf])), [0, 0.1, 0.1, 0.2, 0.2, 1]
    )
    np.testing.assert_array_equal(
        curve.spent(np.array([0.0, 0.05, 0.1, 0.10001, 0.3, 1.5])), [0, 1, 1, 2, math.inf, math.inf]
    )
    for parameters, epsilons in (
        ([0.2, 0.1], [1, 2]),
        ([0.1, 0.2], [2, 1]),
        ([0.0, 0.2], [1, 2]),
        ([0.1], [math.nan]),
        ([], []),
    ):
        with pytest.raises(SilodpError, match="curve"):
            EpsilonCurve(np.array(parameters, float), np.array(epsilons, float))


@pytest.mark.slow
@few_or_many(2, 6, sigma=st.floats(2, 10), rounds=st.integers(1, 100), budgets=some_budgets)
@pytest.mark.parametrize("by", ["known sample", "hidden sample", "clip"])
def test_no_user_overspends(by, sigma, rounds, budgets):
    """By dp_accounting's own loss distributions."""
    makers = {
        "known sample": lambda x: RevealedSample(x, Gaussian(sigma)),
        "hidden sample": lambda x: PoissonSampled(x, Gaussian(sigma)),
        "clip": lambda x: Gaussian(sigma / x),
    }
    budgets = np.array(budgets)
    curve = EpsilonCurve.of(makers[by], rounds, 1e-5, budgets=budgets)
    for x, budget in zip(curve.parameter_for(budgets), budgets, strict=True):
        if x == 0:
            assert curve.epsilons[0] > budget
            continue
        gaussian = library.from_gaussian_mechanism(sigma, value_discretization_interval=GRID)
        step = {
            "known sample": lambda x=x, g=gaussian: g.compute_mixture(library.identity(GRID), x),
            "hidden sample": lambda x=x: library.from_gaussian_mechanism(
                sigma, sampling_prob=x, value_discretization_interval=GRID
            ),
            "clip": lambda x=x: library.from_gaussian_mechanism(
                sigma / x, value_discretization_interval=GRID
            ),
        }[by]()
        true = step.self_compose(rounds).get_epsilon_for_delta(1e-5)
        assert true <= budget * (1 + 1e-3)
        assert x == 1 or true >= budget * (1 - 3e-3)


# The book


@few_or_many(8, 25, run=runs, q=st.floats(0.001, 1), budget=st.floats(0.05, 15))
@pytest.mark.parametrize("book", ["planned", "realized"])
def test_a_record_stays_as_long_as_its_budget_lasts(book, run, q, budget):
    most = 60
    step = two_stage(**{**run, "rounds": None})
    rounds = int(count_affordable_rounds(step, np.array([q]), np.array([budget]), most, book)[0])

    def cost(rounds):
        return renyi_cost(q, **{**run, "rounds": rounds}, joined=book == "realized")

    if rounds > 0:
        assert cost(rounds) <= budget * (1 + 1e-9)
    if rounds < most:
        assert step.bound_epsilon(np.array([q]), rounds + 1, book)[0] > budget * (1 - 1e-9)


def test_a_record_calibrated_for_all_rounds_stays_in_all_of_them():
    run = {**HEART, "client_sampling": 0.6}
    step = two_stage(**{**run, "rounds": None})
    budgets = np.concatenate(
        [np.linspace(0.1, 9, 500), compute_two_stage_curve(*two_stage(**run)).epsilons[1200::40]]
    )
    q = compute_two_stage_curve(*two_stage(**run)).parameter_for(budgets)
    planned = count_affordable_rounds(step, q, budgets, 40)
    realized = count_affordable_rounds(step, q, budgets, 40, "realized")
    kept = (q > 0) & (q < 1)
    assert (planned[kept] == 15).all()
    assert (planned[q == 1] >= 15).all()
    assert (realized <= planned).all()  # fewer, but only rounds that were joined count
    assert (realized[kept] >= 5).all()
    assert (realized[kept] < 15).any()
    assert (
        count_affordable_rounds(step, np.array([0.0]), np.array([0.1]), 40)[0] == 40
    )  # never drawn, never spent


# Individual filters


def exact_delta(mu, eps):
    """δ of N(μ, 1) against N(0, 1) in fifty digits (Balle and Wang 2018, Theorem 8)."""
    with mpmath.workdps(50):
        mu, eps = mpmath.mpf(float(mu)), mpmath.mpf(float(eps))
        return mpmath.ncdf(mu / 2 - eps / mu) - mpmath.exp(eps) * mpmath.ncdf(-mu / 2 - eps / mu)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-12])
def test_a_filters_budget_is_that_of_one_gaussian_release(delta):
    """Steps of norm C at multiplier σ add 1/(2σ²) to R each, and all of R is one release of μ = √(2R)."""
    budgets = np.geomspace(0.01, 50, 12)
    for budget, most in zip(budgets, compute_filter_budget(budgets, delta), strict=True):
        assert exact_delta(math.sqrt(2 * most), budget) <= delta
        assert exact_delta(math.sqrt(2 * most) * (1 + 1e-8), budget) > delta


def test_a_filters_budget_is_larger_than_one_renyi_order_allows():
    """At ε = 1 and δ = 1e-4 the best order gives R = .0406."""
    orders = 1 + np.geomspace(1e-3, 1e5, 4000)
    by_one_order = ((1.0 - compute_conversion(orders, 1e-4)) / orders).max()
    assert round(by_one_order, 4) == 0.0406
    assert round(float(compute_filter_budget(np.array([1.0]), 1e-4)[0]), 4) == 0.0493


@pytest.mark.parametrize("eps", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("threshold", [-1.0, 0.5, 2.0])
@pytest.mark.parametrize("stop", ["high", "low"])
def test_steps_chosen_by_what_was_seen_cost_no_more_than_one_release_of_all(eps, threshold, stop):
    """Two steps: the second takes all that is left, or nothing, by the first one's outcome (by integration)."""
    whole, first = 1.0, 0.6
    left = math.sqrt(whole**2 - first**2)

    def second(loss, goes_on):
        """δ of the second step at ε − loss; below 0 as above."""
        return float(exact_delta(left, eps - loss)) if goes_on else max(0.0, 1 - math.exp(eps - loss))

    def integrand(x, mean, sign):
        loss = sign * (first * x - first**2 / 2)  # ln of the density with the record over that without
        goes_on = (x < threshold) == (stop == "high")
        return stats.norm.pdf(x, mean) * second(loss, goes_on)

    for mean, sign in ((first, 1), (0.0, -1)):  # both directions
        split = [
            integrate.quad(integrand, low, high, args=(mean, sign), limit=200)[0]
            for low, high in ((-9, threshold), (threshold, 9))
        ]
        assert sum(split) <= exact_delta(whole, eps) * (1 + 1e-7)
        assert sum(split) > exact_delta(first, eps), "the second step costs something"


# The papers' calibrations


def simulate_and_fit(run, rounds):
    """ε at q = .01, .02, …, 1 by the paper's conversion, and (a, b, c) of the least squares by e^(aq+b) + c."""
    q = np.linspace(0.01, 1, 100)
    orders = ORDERS[:, None] - 1
    epsilons = (rounds * run.compute_rdp(q) + math.log(1 / run.delta) / orders).min(axis=0)
    return q, epsilons, optimize.curve_fit(lambda q, a, b, c: np.exp(a * q + b) + c, q, epsilons)[0]


def count_overspent(found, run, rounds, budgets):
    """How many records cost more than their budget, by the tight conversion."""
    return (run.bound_epsilon(found, rounds) > budgets).sum()


def test_scf_overspends():
    sizes = {"noise_multiplier": 1.0, "local_steps": 5, "client_sampling": 0.5, "rounds": 20, "delta": 1e-3}
    run, rounds = two_stage(**sizes)
    budgets = np.linspace(0.5, 5, 300)
    found = fit_scf(run, rounds, budgets)
    true = np.array([renyi_cost(q, **sizes) for q in found[::60] if q > 0])
    assert (true > budgets[::60][found[::60] > 0]).mean() > 0.5
    q, epsilons, (a, b, c) = simulate_and_fit(run, rounds)
    assert 1 - np.var(epsilons - np.exp(a * q + b) - c) / np.var(epsilons) > 0.99
    assert count_overspent(found, run, rounds, budgets) > 0.7 * len(budgets)
    costs = run.bound_epsilon(found, rounds)
    assert (costs / budgets).max() > 2
    exact = compute_two_stage_curve(run, rounds)
    assert (costs <= exact.spent(found) * (1 + 1e-9)).all()
    assert (exact.spent(exact.parameter_for(budgets)) <= budgets).all()


def test_scf_is_what_the_paper_fits():
    """Where the curve goes through the points the inverse gives the q back, and costs beyond ε(1) give 1."""
    run, rounds = two_stage(**HEART)
    found = fit_scf(run, rounds, np.array([0.5, 3.0, 9.0, 50.0]))
    _, _, (a, b, c) = simulate_and_fit(run, rounds)
    np.testing.assert_allclose(np.exp(a * found[:3] + b) + c, [0.5, 3.0, 9.0], rtol=1e-9)
    assert found[3] == 1.0
    tight = fit_scf(run, rounds, LEVELS, conversion="tight")
    paper = fit_scf(run, rounds, LEVELS)
    assert count_overspent(tight, run, rounds, LEVELS) > count_overspent(paper, run, rounds, LEVELS) == 0


def test_scf_says_that_its_fit_fails():
    with pytest.raises(SilodpError, match="use calibration 'exact'"):
        fit_scf(TwoStage(0.3, 50, 1.0, 1e-5), 200, LEVELS)


def test_binary_search_is_the_exact_calibration_with_a_tolerance():
    found = search_probabilities(*two_stage(**HEART), LEVELS)
    exact = compute_two_stage_curve(*two_stage(**HEART)).parameter_for(LEVELS)
    np.testing.assert_allclose(found, exact, rtol=0.02)
    for q, budget in zip(found, LEVELS, strict=True):
        assert budget * 0.985 <= renyi_cost(q, **HEART) <= budget * (1 + 1e-9)
    assert search_probabilities(*two_stage(**HEART), np.array([50.0]))[0] == 1.0


# Mistakes


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"local_steps": 0}, "local_steps"),
        ({"local_steps": 1.5}, "local_steps"),
        ({"client_sampling": 0.0}, "client_sampling"),
        ({"client_sampling": 1.2}, "client_sampling"),
        ({"rounds": 0}, "rounds"),
        ({"delta": 1.0}, "delta"),
        ({"points": 1}, "points"),
        ({"least": 0.0}, "least"),
        ({"accountant": "moments"}, "accountant"),
    ],
)
def test_what_is_out_of_range_is_named(change, field):
    changed = {**HEART, **change}
    with pytest.raises(SilodpError, match=field):
        compute_two_stage_curve(*two_stage(**{name: changed.pop(name) for name in HEART}), **changed)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan])
def test_budgets_are_numbers_above_zero(wrong):
    budgets = np.array([1.0, wrong])
    for use in (
        compute_two_stage_curve(*two_stage(**HEART), points=10).parameter_for,
        lambda b: compute_filter_budget(b, 1e-5),
        lambda b: fit_scf(*two_stage(**HEART), b),
        lambda b: count_affordable_rounds(TwoStage(1.0, 1, 1.0, 1e-5), np.array([0.1, 0.1]), b, 9),
    ):
        with pytest.raises(SilodpError, match="budget"):
            use(budgets)


def test_books_are_planned_or_realized():
    with refused("argument.value"):
        count_affordable_rounds(TwoStage(1.0, 1, 1.0, 1e-5), np.array([0.1]), np.array([1.0]), 9, "both")
    with refused("argument.value"):
        count_affordable_rounds(TwoStage(1.0, 1, 1.0, 1e-5), np.array([1.1]), np.array([1.0]), 9)


def test_orders_go_to_1024_and_beyond():
    assert ORDERS.max() >= 1024
    assert (np.floor(ORDERS) == ORDERS).all()
    assert ORDERS.min() == 2
