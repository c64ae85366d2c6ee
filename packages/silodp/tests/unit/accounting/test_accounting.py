"""ε against the tables of docs/privacy.md, identities, and integrals computed without the package."""

import importlib
import logging
import math
import warnings
from dataclasses import dataclass
from fractions import Fraction

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from silodp.accounting import pld, rdp, steps
from silodp.accounting.accountant import bound_likelier, compute_delta, compute_epsilon, find_accountant
from silodp.accounting.events import (
    Gaussian,
    Group,
    NonPrivate,
    PoissonSampled,
    RevealedSample,
    SelfComposed,
    Skellam,
    WorstOf,
)
from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.ledger import Ledger
from silodp.accounting.steps import flatten_event
from silodp.errors import SilodpError
from support.examples import few_or_many
from support.refusals import refused

DELTA = 1e-5
SIGMA = Gaussian(5.0)


def choose_event_grid(event, count=1):
    """The interval between privacy losses for `count` times this event alone; None where nothing is promised."""
    steps = flatten_event([(event, count)], for_pld=True)
    return pld.choose_grid(steps) if steps else None


# docs/privacy.md, section 3: ε of uldp-avg at σ=5, T=100: q, RDP, PLD, known sample by RDP, known sample by PLD.
ULDP_AVG = [
    (1.0, 10.726, 9.997, 10.726, 9.997),
    (0.7, 7.110, 6.591, 8.788, 8.148),
    (0.5, 4.866, 4.488, 7.324, 6.755),
    (0.3, 2.759, 2.532, 5.618, 5.134),
    (0.1, 0.835, 0.758, 3.340, 2.982),
]


@pytest.mark.parametrize(("q", "rdp", "pld", "known_rdp", "known_pld"), ULDP_AVG)
def test_uldp_avg_has_specs_epsilon(q, rdp, pld, known_rdp, known_pld):
    sampled, known = [(PoissonSampled(q, SIGMA), 100)], [(RevealedSample(q, SIGMA), 100)]
    found = [compute_epsilon(c, DELTA, a) for c in (sampled, known) for a in ("rdp", "pld")]
    assert [round(e, 3) for e in found] == [rdp, pld, known_rdp, known_pld]


# docs/privacy.md, section 4, G, at σ=5, γ=0.01, 10⁵ steps: k, RDP by valid orders, mixture of Gaussians by PLD.
GROUPS = [
    (1, "2.849", "2.63"),
    (2, "7.99", "5.84"),
    (4, "24.5", "13.6"),
    (8, "98.8", "34.2"),
    (16, "545.6", "95.2"),
    (32, "3267", "295.8"),
    (64, "20107", "1011"),
]


@pytest.mark.parametrize(("k", "rdp", "pld"), GROUPS)
def test_groups_have_the_printed_epsilon(k, rdp, pld):
    for accountant, printed in (("rdp", rdp), ("pld", pld)):
        found = compute_epsilon([(Group(k, PoissonSampled(0.01, Gaussian(5.0))), 100_000)], DELTA, accountant)
        decimals = len(printed.partition(".")[2])
        assert f"{found:.{decimals}f}" == printed


def test_1012_for_64_records_is_where_the_library_underflows():
    """By the library's own δ(ε), 1011.04 has δ = 1e-5; only its search for ε, where exp(−745) is 0, misses it."""
    ours = compute_epsilon([(Group(64, PoissonSampled(0.01, Gaussian(5.0))), 100_000)], DELTA)
    weights = stats.binom.pmf(np.arange(65), 64, 0.01)
    step = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        5.0, np.arange(65), weights, value_discretization_interval=1e-3
    )
    run = step.self_compose(100_000)
    assert run.get_epsilon_for_delta(DELTA) == pytest.approx(1012, abs=0.05)
    assert run.get_delta_for_epsilon(ours + 0.02) < DELTA < run.get_delta_for_epsilon(ours - 0.02)


def test_naive_by_rdp_has_half_the_multiplier():
    assert round(compute_epsilon([(Gaussian(2.5), 100)], DELTA, "rdp"), 2) == 25.93
    assert round(compute_epsilon([(Gaussian(5.0), 100)], DELTA, "rdp"), 2) == 10.73


def test_group_of_three_is_rounded_up_to_four():
    three, four = ([(Group(k, PoissonSampled(0.01, Gaussian(5.0))), 1000)] for k in (3, 4))
    assert compute_epsilon(three, DELTA, "rdp") == compute_epsilon(four, DELTA, "rdp")
    assert compute_epsilon(three, DELTA, "pld") < compute_epsilon(four, DELTA, "pld")


def test_group_orders_are_at_least_two():
    for k in (2, 3, 8, 64):
        steps = [(Group(k, PoissonSampled(0.01, Gaussian(5.0))), 1)]
        orders, rho = rdp.compose_steps(steps)
        c = math.ceil(math.log2(k))
        assert min(orders) == 2.0
        assert set(orders) == {a / 2**c for a in rdp.ORDERS if a >= 2 ** (c + 1)}
        base = rdp.compute_rdp(PoissonSampled(0.01, SIGMA), (2.0 ** (c + 1), 2.0 ** (c + 2)))
        assert rho[list(orders).index(2.0)] == pytest.approx(3**c * base[0])
    # Beside a larger group, a smaller one is asked for orders it has, and one below 2 has no bound.
    assert math.isinf(rdp.compute_rdp(Group(2, PoissonSampled(0.01, Gaussian(5.0))), (1.5, 2.0))[0])


# Identities


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_identities(accountant):
    def cost(*charges):
        return compute_epsilon(charges, DELTA, accountant)

    assert cost((Group(1, PoissonSampled(0.3, Gaussian(2.0))), 10)) == cost(
        (PoissonSampled(0.3, Gaussian(2.0)), 10)
    )
    assert cost((RevealedSample(1.0, SIGMA), 10)) == cost((SIGMA, 10))
    assert cost((PoissonSampled(1.0, SIGMA), 10)) == cost((SIGMA, 10))
    assert cost((Group(4, PoissonSampled(1.0, Gaussian(8.0))), 10)) == cost((Gaussian(2.0), 10))
    assert cost((SelfComposed(PoissonSampled(0.3, SIGMA), 5), 4)) == cost((PoissonSampled(0.3, SIGMA), 20))
    assert cost((SIGMA, 3), (Gaussian(2.0), 1)) == cost((Gaussian(2.0), 1), (SIGMA, 1), (SIGMA, 2))
    assert cost((SIGMA, 100)) == pytest.approx(cost((Gaussian(0.5), 1)), rel=1e-12)


def test_mixture_of_one_is_the_sampled_gaussian():
    group, sampled = Group(1, PoissonSampled(0.3, Gaussian(2.0))), PoissonSampled(0.3, Gaussian(2.0))
    for ours, librarys in zip(
        pld.compute_losses(group, 1e-3), pld.compute_losses(sampled, 1e-3), strict=True
    ):
        for eps in (0.0, 0.1, 0.5, 1.0, 2.0):
            assert ours.delta(eps) == pytest.approx(librarys.delta(eps), rel=1e-6, abs=1e-12)


def test_nothing_costs_nothing_and_no_noise_promises_nothing():
    for accountant in ("pld", "rdp"):
        for free in ([], [(SIGMA, 0)], [(PoissonSampled(0.0, SIGMA), 9)], [(Gaussian(math.inf), 9)]):
            assert compute_epsilon(free, DELTA, accountant) == 0.0
            assert compute_delta(free, 1.0, accountant) == 0.0
        for open_ in ([(Gaussian(0.0), 1)], [(SIGMA, 1), (NonPrivate("counts disclosed"), 1)]):
            assert compute_epsilon(open_, DELTA, accountant) == math.inf
            assert compute_delta(open_, 1.0, accountant) == 1.0
    assert choose_event_grid(Gaussian(0.0)) is None


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_delta_inverts_epsilon(accountant):
    charges = [(PoissonSampled(0.3, Gaussian(2.0)), 30), (RevealedSample(0.5, Gaussian(3.0)), 5), (SIGMA, 3)]
    assert compute_delta(charges, compute_epsilon(charges, DELTA, accountant), accountant) == pytest.approx(
        DELTA, rel=1e-6
    )


@pytest.mark.parametrize(
    ("charges", "delta", "accountant", "field"),
    [
        ([], 0.0, "pld", "delta"),
        ([], 1.0, "pld", "delta"),
        ([], math.nan, "pld", "delta"),
        ([], 1e-5, "moments", "accountant"),
        ([(Gaussian(-1.0), 1)], 1e-5, "pld", "noise_multiplier"),
        ([(Gaussian(math.nan), 1)], 1e-5, "pld", "noise_multiplier"),
        ([(SIGMA, -1)], 1e-5, "pld", "count"),
        ([(SelfComposed(SIGMA, -1), 1)], 1e-5, "pld", "count"),
        ([(PoissonSampled(1.5, SIGMA), 1)], 1e-5, "pld", "sampling_probability"),
        ([(Group(2, PoissonSampled(-0.1, Gaussian(1.0))), 1)], 1e-5, "rdp", "sampling_probability"),
        ([(Group(-2, PoissonSampled(0.1, Gaussian(1.0))), 1)], 1e-5, "rdp", "size"),
    ],
)
def test_what_is_out_of_range_is_named(charges, delta, accountant, field):
    with pytest.raises(SilodpError, match=field):
        compute_epsilon(charges, delta, accountant)


def test_negative_epsilon_is_refused():
    with pytest.raises(SilodpError, match="epsilon"):
        compute_delta([(SIGMA, 1)], -1.0)


# Oracles


def gaussian_delta(eps, sigma):
    """The analytic Gaussian mechanism (Balle and Wang 2018)."""
    mu = 1 / sigma
    return stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("eps", [0.05, 0.5, 3.0])
def test_gaussian_against_the_closed_form(sigma, eps):
    exact = gaussian_delta(eps, sigma)
    assert exact - 1e-15 <= compute_delta([(Gaussian(sigma), 1)], eps) <= exact * (1 + 1e-4) + 1e-14


@pytest.mark.parametrize("mu", [1e-4, 0.01, 0.3, 1.0, 8.0, 80.0])
@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-12, 1e-30])
def test_the_epsilon_of_gaussian_releases_is_exact_and_never_below(mu, delta):
    """Against the closed form in sixty digits."""

    def exact(eps):
        with mpmath.workdps(60):
            m, e = mpmath.mpf(mu), mpmath.mpf(eps)
            return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)

    found = compute_epsilon([(Gaussian(2 / mu), 4)], delta)
    assert exact(found) <= delta
    assert found == 0 or exact(found * (1 - 1e-7)) > delta
    assert exact(found) <= compute_delta([(Gaussian(2 / mu), 4)], found) <= delta * (1 + 1e-9)


@pytest.mark.parametrize("q", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_known_sample_against_integration(q, sigma):
    """The coin is seen and independent of the person, so δ averages over it: q ∫ (p − e^ε p′)₊ dx, ε ≥ 0."""
    p, other = stats.norm(1, sigma).pdf, stats.norm(0, sigma).pdf
    for eps in (0.01, 0.3, 1.0, 4.0):
        threshold = sigma**2 * eps + 0.5
        seen, _ = integrate.quad(
            lambda x, e=eps: p(x) - math.exp(e) * other(x), threshold, threshold + 40 * sigma
        )
        found = compute_delta([(RevealedSample(q, Gaussian(sigma)), 1)], eps)
        assert q * seen * (1 - 1e-7) - 1e-12 <= found <= q * seen * (1 + 1e-3) + 1e-12


def test_known_sample_keeps_its_infinite_mass():
    step = pld.Losses(1e-3, 5, np.array([0.5, 0.3]), 0.2)
    mixed = pld._with_atom_at_zero(step, 0.25)
    assert mixed.infinite == pytest.approx(0.05)
    assert mixed.probabilities.sum() + mixed.infinite == pytest.approx(1)
    assert mixed.delta(0.0055) == pytest.approx(0.25 * step.delta(0.0055))


@pytest.mark.parametrize(
    ("k", "gamma", "sigma"), [(2, 0.3, 1.0), (5, 0.1, 2.0), (9, 0.5, 4.0), (3, 0.01, 0.7)]
)
def test_group_step_against_integration(k, gamma, sigma):
    weights = stats.binom.pmf(np.arange(k + 1), k, gamma)

    directions = pld.compute_losses(Group(k, PoissonSampled(gamma, Gaussian(sigma))), 1e-3)
    xs = np.linspace(-12 * sigma, k + 12 * sigma, 100_001)
    p = weights @ stats.norm.pdf(xs[None], np.arange(k + 1)[:, None], sigma)
    q = stats.norm.pdf(xs, 0, sigma)
    for upper, lower, direction in ((p, q, directions[0]), (q, p, directions[1])):
        for eps in (0.01, 0.1, 0.5, 1.5):
            exact = np.trapezoid(np.maximum(upper - math.exp(eps) * lower, 0), xs)
            assert direction.delta(eps) == pytest.approx(exact, rel=2e-3, abs=1e-9)
            assert direction.delta(eps) >= exact - 1e-8


@pytest.mark.parametrize(
    ("k", "gamma", "sigma"),
    [(2, 0.01, 5.0), (7, 0.5, 1.0), pytest.param(16, 0.9, 3.0, marks=pytest.mark.slow)],
)
def test_mixture_agrees_with_the_librarys(k, gamma, sigma):
    grid = 1e-2
    theirs = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        sigma,
        np.arange(k + 1),
        stats.binom.pmf(np.arange(k + 1), k, gamma),
        value_discretization_interval=grid,
    )
    ours = pld.compute_losses(Group(k, PoissonSampled(gamma, Gaussian(sigma))), grid)
    for eps in (0.0, 0.1, 1.0, 5.0):
        assert max(d.delta(eps) for d in ours) == pytest.approx(
            theirs.get_delta_for_epsilon(eps), rel=1e-9, abs=1e-14
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "event", [PoissonSampled(0.5, SIGMA), PoissonSampled(0.02, Gaussian(1.0)), RevealedSample(0.3, SIGMA)]
)
@pytest.mark.parametrize("count", [1, 10, 1000])
def test_grid_costs_two_parts_in_ten_thousand_at_most(event, count):
    """Against dp_accounting's own composition and search, at its default grid."""
    q, sigma = event.sampling_probability, event.event.noise_multiplier
    build = privacy_loss_distribution
    if isinstance(event, RevealedSample):
        step = build.from_gaussian_mechanism(sigma).compute_mixture(build.identity(), q)
    else:
        step = build.from_gaussian_mechanism(sigma, sampling_prob=q)
    reference = step.self_compose(count).get_epsilon_for_delta(DELTA)
    found = compute_epsilon([(event, count)], DELTA)
    assert reference * (1 - 1e-6) <= found <= reference * (1 + 2e-4)


@pytest.mark.parametrize(("sigma", "count"), [(300.0, 100_000), (30.0, 1000), (3.0, 100)])
@pytest.mark.parametrize("deviations", [4.5, 6.5, 7.5])
def test_one_transform_is_as_exact_as_it_says(sigma, count, deviations):
    """Gaussian steps through the transform, against the one Gaussian they are; what it may err is charged."""
    composed = pld._convolve([(pld.compute_losses(Gaussian(sigma), 1e-4)[0], count)])
    mu = math.sqrt(count) / sigma
    eps = mu**2 / 2 + deviations * mu
    exact = gaussian_delta(eps, 1 / mu)
    assert composed.infinite >= 1e-16 * count
    assert exact <= composed.delta(eps) <= exact * (1 + 2e-2) + 2 * composed.infinite


@pytest.mark.parametrize("counts", [(1, 1), (3, 2), (0, 2)])
def test_infinite_losses_add_up_and_what_a_transform_cuts_off_is_charged(counts):
    """Exact to 1e-16, a tenth of what is charged for the cut."""
    masses = (0.01, 0.02)
    parts = [
        (pld.Losses(1e-3, 5, np.array([0.5, 0.5 - mass]), mass), count)
        for mass, count in zip(masses, counts, strict=True)
    ]
    exact = 1 - math.prod((1 - Fraction(mass)) ** count for mass, count in zip(masses, counts, strict=True))
    added = float(Fraction(pld._convolve(parts).infinite) - exact)
    assert 1e-15 <= added <= 1e-15 + 1e-16 * (sum(counts) + 1)


def test_a_mixed_run_is_composed_in_both_directions():
    steps = [
        (PoissonSampled(0.2, Gaussian(1.0)), 3),
        (RevealedSample(0.5, Gaussian(2.0)), 2),
        (Gaussian(3.0), 1),
    ]
    library = privacy_loss_distribution
    grid = 1e-4
    sampled = library.from_gaussian_mechanism(1.0, sampling_prob=0.2, value_discretization_interval=grid)
    known = library.from_gaussian_mechanism(2.0).compute_mixture(library.identity(), 0.5)
    whole = (
        sampled.self_compose(3).compose(known.self_compose(2)).compose(library.from_gaussian_mechanism(3.0))
    )
    found = compute_epsilon(steps, DELTA)
    reference = whole.get_epsilon_for_delta(DELTA)
    assert reference * (1 - 1e-6) <= found <= reference * (1 + 2e-4)
    # The larger ε is that of removal here; for other events it is that of addition.
    expected = (whole._pmf_remove.get_delta_for_epsilon(1.0), whole._pmf_add.get_delta_for_epsilon(1.0))
    assert [losses.delta(1.0) for losses in pld.compose_steps(tuple(steps), grid)] == pytest.approx(expected)
    assert expected[1] < 0.9 * expected[0]


def test_rdp_of_a_sampled_gaussian_is_the_librarys():
    accountant = dp_accounting.rdp.RdpAccountant(rdp.ORDERS)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(5.0)), 100)
    found = compute_epsilon([(PoissonSampled(0.1, SIGMA), 100)], DELTA, "rdp")
    assert found == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)


@pytest.mark.parametrize(
    ("event", "count"),
    [
        (Gaussian(5.0), 10),
        (Gaussian(0.3), 1),
        (Gaussian(1e9), 1),  # ρ below the last digit of 1
        (PoissonSampled(0.01, Gaussian(1.0)), 1000),
        (Skellam(2.0, 4096, 100), 7),
    ],
)
def test_deltas_of_many_epsilons_are_the_librarys_one_by_one(event, count):
    composition = find_accountant("rdp").compose([(event, count)])
    (kind,) = getattr(composition, "kinds", (composition,))
    epsilons = [0.0, 1e-9, 0.1, 1.0, 3.0, 30.0, 690.0]
    orders, rho = rdp.compose_steps(kind.steps, kind.orders)
    expected = [
        rdp_privacy_accountant.compute_delta(orders, np.maximum(rho, 1e-15), one)[0] for one in epsilons
    ]
    assert composition.deltas(epsilons) == pytest.approx(expected, rel=1e-13)


def test_known_sample_by_rdp_at_one_order():
    """E over the coin of e^((α−1)·loss), at α = 3."""
    q, sigma, alpha = 0.3, 2.0, 3.0
    moment = 1 - q + q * math.exp((alpha - 1) * alpha / (2 * sigma**2))
    found = rdp.compute_rdp(RevealedSample(q, Gaussian(sigma)), (alpha,))
    assert found[0] == pytest.approx(math.log(moment) / (alpha - 1))


def test_the_librarys_loud_warnings_are_held_back(caplog):
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        rdp.compute_rdp(PoissonSampled(0.517, Gaussian(5.0)), rdp.ORDERS)
    assert not caplog.records


@pytest.mark.parametrize("sigma", [0.02, 0.05, 0.2, 50.0, 2000.0])
@pytest.mark.parametrize(
    "make",
    [
        Gaussian,
        lambda s: PoissonSampled(0.01, Gaussian(s)),
        lambda s: Group(5, PoissonSampled(0.1, Gaussian(s))),
    ],
)
def test_extreme_noise_neither_overflows_nor_takes_long(sigma, make):
    charges = [(make(sigma), 3)]
    pld, rdp = compute_epsilon(charges, DELTA), compute_epsilon(charges, DELTA, "rdp")
    assert 0 <= pld <= rdp


# Monotony


events = st.one_of(
    st.builds(lambda q: lambda s: PoissonSampled(q, Gaussian(s)), st.floats(0.01, 1)),
    st.builds(lambda q: lambda s: RevealedSample(q, Gaussian(s)), st.floats(0.01, 1)),
    st.builds(
        lambda k, g: lambda s: Group(k, PoissonSampled(g, Gaussian(s))), st.integers(1, 6), st.floats(0.01, 1)
    ),
    st.just(Gaussian),
)
LITTLE_LESS = 1 - 1e-9


@few_or_many(
    4, 15, make=events, sigma=st.floats(0.7, 8), factor=st.floats(1.05, 2), rounds=st.integers(1, 200)
)
def test_more_noise_and_fewer_rounds_cost_less(make, sigma, factor, rounds):
    cost = compute_epsilon([(make(sigma), rounds)], DELTA)
    assert compute_epsilon([(make(sigma * factor), rounds)], DELTA) * LITTLE_LESS <= cost
    assert cost * LITTLE_LESS <= compute_epsilon([(make(sigma), math.ceil(rounds * factor))], DELTA)


@few_or_many(
    4,
    15,
    q=st.floats(0.01, 0.5),
    factor=st.floats(1.05, 2),
    sigma=st.floats(0.7, 8),
    rounds=st.integers(1, 200),
)
@pytest.mark.parametrize("kind", [PoissonSampled, RevealedSample])
def test_more_sampling_costs_more_and_knowing_the_sample_most(kind, q, factor, sigma, rounds):
    cost = compute_epsilon([(kind(q, Gaussian(sigma)), rounds)], DELTA)
    assert cost * LITTLE_LESS <= compute_epsilon([(kind(min(1, q * factor), Gaussian(sigma)), rounds)], DELTA)
    assert cost * LITTLE_LESS <= compute_epsilon([(RevealedSample(q, Gaussian(sigma)), rounds)], DELTA)


@given(make=events, sigma=st.floats(1, 8), rounds=st.integers(1, 100))
def test_rdp_is_above_pld(make, sigma, rounds):
    charges = [(make(sigma), rounds)]
    assert compute_epsilon(charges, DELTA) <= compute_epsilon(charges, DELTA, "rdp")


# Where distributions on a grid are loose


TINY = [
    (
        PoissonSampled(0.01, Gaussian(5.0)),
        10_000,
        1e-12,
    ),  # the transform's allowance, 1e-16 a step, is all of δ
    (PoissonSampled(0.01, Gaussian(5.0)), 10_000, 1.5e-12),  # and most of it
    (PoissonSampled(0.5, Gaussian(300.0)), 1_000_000, 1e-10),
    (Group(3, PoissonSampled(1e-4, Gaussian(60.0))), 20_000, 1e-5),
    (RevealedSample(1e-3, Gaussian(2.0)), 10, 1e-14),
]


@pytest.mark.parametrize(("event", "rounds", "delta"), TINY)
def test_pld_is_never_above_rdp_though_its_arithmetic_be_too_coarse(event, rounds, delta):
    pld, rdp = (compute_epsilon([(event, rounds)], delta, by) for by in ("pld", "rdp"))
    assert 0 < pld <= rdp < math.inf
    assert compute_delta([(event, rounds)], pld, "pld") <= delta * (1 + 1e-9)
    assert compute_delta([(event, rounds)], rdp, "pld") <= compute_delta([(event, rounds)], rdp, "rdp")


def test_an_epsilon_where_pld_was_infinite():
    event = PoissonSampled(0.01, Gaussian(5.0))
    by_grid = pld.compose_steps(((event, 10_000),), choose_event_grid(event, 10_000))
    assert max(direction.epsilon(1e-12) for direction in by_grid) == math.inf
    assert round(compute_epsilon([(event, 10_000)], 1e-12), 3) == 1.403


def test_each_kind_of_unit_takes_the_smaller_bound_for_itself():
    """The largest of the kinds' smaller bounds, not the smaller of the largest."""
    one, other = PoissonSampled(0.01, Gaussian(5.0)), Gaussian(400.0)
    both = compute_epsilon([(WorstOf((one, other)), 10_000)], 1e-12)
    assert both == max(compute_epsilon([(kind, 10_000)], 1e-12) for kind in (one, other))
    assert compute_epsilon([(other, 10_000)], 1e-12) < compute_epsilon([(other, 10_000)], 1e-12, "rdp")


@pytest.mark.parametrize(
    ("q", "sigma", "rounds"), [(1e-3, 50.0, 10_000), (1e-3, 50.0, 300), (0.01, 30.0, 1000)]
)
def test_small_steps_get_a_grid_of_their_own(q, sigma, rounds):
    """Against a bound from below that needs no grid: composition is close to the Gaussian of the same variance.

    χ² = q²(e^(1/σ²) − 1) is the variance of one loss; by the central limit the composition's ε is that of a Gaussian
    mechanism with μ = √(T·χ²), up to terms far below 1 % for steps as small as these. The usual grid gives 120 % more.
    """
    mu = math.sqrt(rounds * q**2 * math.expm1(1 / sigma**2))
    limit = optimize.brentq(lambda eps: gaussian_delta(eps, 1 / mu) - DELTA, 1e-12, 10)
    found = compute_epsilon([(PoissonSampled(q, Gaussian(sigma)), rounds)], DELTA)
    assert limit * (1 - 2e-3) <= found <= limit * 1.03


# What has been spent


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_spent_rises_with_every_round_and_is_what_a_fresh_count_says(accountant):
    spent, charges, last = Ledger(None, DELTA, accountant, run="r"), [], 0.0
    plan = [PoissonSampled(0.3, SIGMA), PoissonSampled(0.3, SIGMA), SIGMA, PoissonSampled(1e-4, SIGMA)]
    for round_, event in enumerate(plan * 3):
        expected = spent.epsilon_after({"released": event}, "released")
        spent.charge(round_, 0, {"released": event})
        charges.append((event, 1))
        now = spent.epsilon("released")
        assert now == expected >= last
        assert now == pytest.approx(compute_epsilon(charges, DELTA, accountant), rel=1e-5)
        assert now >= compute_epsilon(charges, DELTA, accountant)
        last = now


def test_asking_what_would_be_spent_charges_nothing():
    spent = Ledger(None, DELTA, run="r")
    spent.charge(0, 0, {"released": SIGMA})
    before = spent.epsilon("released")
    assert spent.epsilon_after({"released": SIGMA}, "released") > before == spent.epsilon("released")
    with refused("argument.value"):
        spent.charge(1, 0, {"released": Gaussian(-1.0)})
    assert spent.epsilon("released") == before


@dataclass(frozen=True)
class Laplace:
    """A kind of noise for which no accountant of silodp has a rule."""

    noise_multiplier: float


@pytest.mark.parametrize(
    "wrap", [lambda new: new, lambda new: PoissonSampled(0.1, new), lambda new: Group(2, new)]
)
def test_a_new_kind_of_event_is_refused_until_somebody_adds_a_rule(monkeypatch, wrap):
    """Also by `compose`: a method may have forgotten to ask, and an event that is ignored costs nothing."""
    charges = [(SIGMA, 3), (wrap(Laplace(1.0)), 1)]
    assert pld.PldAccountant().supports(SIGMA)
    assert not pld.PldAccountant().supports(charges[1][0])
    for accountant in (pld.PldAccountant(), rdp.RdpAccountant()):
        with refused("accounting.event", "accounting.unsupported"):
            accountant.compose(charges)
    if isinstance(charges[1][0], Laplace):
        with refused("argument.type"):
            compute_epsilon(charges, DELTA)
    # As if the class were in the unions of events already, and in the steps, but in no accountant.
    monkeypatch.setattr(steps, "_simplify", lambda event: event)
    with refused("accounting.unsupported"):
        pld.PldAccountant().compose(charges)


def test_grids_are_stated():
    assert choose_event_grid(Group(1, PoissonSampled(0.01, Gaussian(5.0))), 100_000) == 5e-5
    assert choose_event_grid(Group(64, PoissonSampled(0.01, Gaussian(5.0))), 100_000) == pytest.approx(8e-4)
    assert choose_event_grid(PoissonSampled(0.5, SIGMA), 100) == pytest.approx(4e-4)


@pytest.mark.parametrize("q", [1e-12, 1e-15, 1e-30])
def test_delta_of_a_release_that_tells_next_to_nothing(q):
    """The library's ln(1 − e^−ρ) is a math domain error there."""
    event = PoissonSampled(q, Gaussian(5.0))
    for accountant in ("rdp", "pld"):
        assert 0 <= compute_delta([(event, 2)], 0.0, accountant) < 1e-6


def test_the_orders_are_those_of_the_library_and_more():
    """They are written down, so that a configuration is refused without importing the library."""
    library = importlib.import_module("dp_accounting.rdp.rdp_privacy_accountant")
    wanted = {*library.DEFAULT_RDP_ORDERS, *range(2, 257), 512, 1024, 2048, 4096}
    assert tuple(float(order) for order in sorted(wanted)) == rdp.ORDERS
    assert all(type(order) is float for order in rdp.ORDERS)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("sigma", [1e76, 1e155, 1e300])
def test_noise_beyond_any_use_has_a_bound(sigma: float, accountant: str) -> None:
    for release in (Gaussian(sigma), PoissonSampled(0.1, Gaussian(sigma))):
        assert 0 <= compute_epsilon([(release, 10)], 1e-5, accountant) < 1e-3


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [
        (0.7030001, "0.704"),
        (12.3401, "12.341"),
        (0.012301, "0.0124"),
        (0.1, "0.1"),
        (1.2301e-7, "1.24e-07"),
        (1_230_001.0, "1.24e+06"),
        (0.0, "0"),
        (math.inf, "none"),
    ],
)
def test_a_shown_epsilon_is_rounded_up(epsilon, shown):
    assert format_epsilon(epsilon) == shown


def test_of_one_delta_for_all_epsilon_the_largest_part_bounds_best():
    """With δ(ε) = 0.1 the bound is 0.1/(1 − e^(−x)), the smallest of which is that of x = ε."""
    assert bound_likelier(lambda epsilon: 0.1, 1.0) == pytest.approx(0.1 / (1 - math.exp(-1)), rel=1e-12)
    assert bound_likelier(lambda epsilon: 0.1, 0.0) == 1
