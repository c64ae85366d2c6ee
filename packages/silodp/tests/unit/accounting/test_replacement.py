"""A curious silo that does not see the coin: what it knows of a person is replaced, not removed (docs/privacy.md, W).

The worlds are (1−q)P₀ + qP₁ and (1−q)P₀ + qQ₁, with P₁ and Q₁ one clip from P₀ and two clips from each other. The bound
is compared with this pair itself, summed up without the package, for Gaussian and for Skellam noise, both directions.
"""

import math

import numpy as np
import pytest
from scipy import special, stats

from silodp.accounting import pld, rdp
from silodp.accounting.accountant import compute_epsilon, find_accountant
from silodp.accounting.events import (
    Gaussian,
    Group,
    PoissonSampled,
    RevealedSample,
    SampledReplacement,
    Skellam,
    event_from_dict,
    event_to_dict,
    remove_amplification,
)
from silodp.accounting.views import View
from silodp.errors import SilodpError
from silodp.methods import UldpAvg

ORDERS = (2.0, 3.0, 4.0, 6.0, 9.0, 14.0, 22.0, 35.0, 60.0)
RATES = (1e-4, 0.02, 0.3, 0.9)


def divergences(log_p, log_q, step=1.0):
    """D_α of two tables of log probabilities, or densities, at ORDERS."""
    return np.array(
        [(special.logsumexp(a * log_p + (1 - a) * log_q) + math.log(step)) / (a - 1) for a in ORDERS]
    )


def mixed(q, log_out, log_in):
    return np.logaddexp(math.log1p(-q) + log_out, math.log(q) + log_in)


FEW = [(0.02, 0.5), (0.3, 1.0), (0.9, 3.0)]


@pytest.mark.parametrize(
    ("q", "sigma"),
    [
        pytest.param(q, sigma, marks=() if (q, sigma) in FEW else pytest.mark.slow)
        for sigma in (0.5, 1.0, 3.0, 20.0)
        for q in RATES
    ],
)
def test_gaussian_against_the_pair_itself(q, sigma):
    bound = rdp.compute_rdp(SampledReplacement(q, Gaussian(sigma)), ORDERS)
    # α·P − (α−1)·Q has its mode at up to 2α from 0.
    x = np.linspace(-2 * ORDERS[-1] - 20 * sigma, 2 * ORDERS[-1] + 20 * sigma, 600_001)
    for here, there in ((1.0, -1.0), (1.0, 0.0), (0.0, 1.0), (1.0, 0.3), (0.7, -1.0)):
        p, other = (
            mixed(q, stats.norm.logpdf(x, 0, sigma), stats.norm.logpdf(x, at, sigma)) for at in (here, there)
        )
        exact = divergences(p, other, x[1] - x[0])
        assert (exact <= bound * (1 + 1e-6) + 1e-12).all()
        if (here, there) == (1.0, -1.0):
            assert (bound <= 3.5 * exact + 1e-9).all(), "a bound that is not idle"


@pytest.mark.slow
@pytest.mark.parametrize("angle", [0.5, 1.5, 2.5])
def test_gaussian_in_two_dimensions(angle):
    q, sigma = 0.1, 1.0
    axis = np.linspace(-45, 45, 1501)
    x, y = np.meshgrid(axis, axis)

    def log_at(cx, cy):
        return -((x - cx) ** 2 + (y - cy) ** 2) / (2 * sigma**2) - math.log(2 * math.pi * sigma**2)

    p, other = (
        mixed(q, log_at(0, 0), log_at(*at)).ravel() for at in ((1.0, 0.0), (math.cos(angle), math.sin(angle)))
    )
    few = [place for place, order in enumerate(ORDERS) if order <= 14]
    exact = divergences(p, other, (axis[1] - axis[0]) ** 2)[few]
    assert (exact <= rdp.compute_rdp(SampledReplacement(q, Gaussian(sigma)), ORDERS)[few] * (1 + 1e-6)).all()


EPSILONS = (0.0, 0.01, 0.1, 0.4, 1.0, 2.5, 6.0)


def excesses(log_p, log_q, step=1.0):
    """δ(ε) of two tables of log probabilities, or densities, at EPSILONS."""
    return np.array([np.maximum(np.exp(log_p) - np.exp(eps + log_q), 0).sum() * step for eps in EPSILONS])


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("q", [*RATES, 0.99])
def test_the_distribution_is_that_of_opposite_vectors_and_no_other_pair_loses_more(q, sigma):
    (losses,) = pld.compute_losses(SampledReplacement(q, Gaussian(sigma)), 1e-4)
    bound = np.array([losses.delta(eps) for eps in EPSILONS])
    x = np.linspace(-1 - 12 * sigma, 1 + 12 * sigma, 400_001)
    for here, there in ((1.0, -1.0), (-1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (1.0, 0.3), (0.7, -1.0)):
        p, other = (
            mixed(q, stats.norm.logpdf(x, 0, sigma), stats.norm.logpdf(x, at, sigma)) for at in (here, there)
        )
        exact = excesses(p, other, x[1] - x[0])
        assert (exact <= bound + 1e-9).all()
        if abs(here - there) == 2:
            assert bound == pytest.approx(exact, abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.6, 2.0])
@pytest.mark.parametrize("angle", [0.4, 1.2, 2.0, 2.8])
def test_the_distribution_covers_vectors_at_an_angle(angle, sigma):
    q = 0.2
    (losses,) = pld.compute_losses(SampledReplacement(q, Gaussian(sigma)), 1e-4)
    axis = np.linspace(-1 - 8 * sigma, 1 + 8 * sigma, 1201)
    x, y = np.meshgrid(axis, axis)

    def log_at(cx, cy):
        return -((x - cx) ** 2 + (y - cy) ** 2) / (2 * sigma**2) - math.log(2 * math.pi * sigma**2)

    for length in (1.0, 0.6):
        p, other = (
            mixed(q, log_at(0, 0), log_at(*at)).ravel()
            for at in ((1.0, 0.0), (length * math.cos(angle), length * math.sin(angle)))
        )
        for one, two in ((p, other), (other, p)):
            exact = excesses(one, two, (axis[1] - axis[0]) ** 2)
            assert (exact <= np.array([losses.delta(eps) for eps in EPSILONS]) + 1e-6).all()


def test_two_releases_cost_what_their_joint_distribution_does():
    q, sigma = 0.3, 1.5
    x = np.linspace(-1 - 9 * sigma, 1 + 9 * sigma, 2001)
    p, other = (
        mixed(q, stats.norm.logpdf(x, 0, sigma), stats.norm.logpdf(x, at, sigma)) for at in (1.0, -1.0)
    )
    exact = excesses(np.add.outer(p, p).ravel(), np.add.outer(other, other).ravel(), (x[1] - x[0]) ** 2)
    composed = find_accountant("pld").compose([(SampledReplacement(q, Gaussian(sigma)), 2)])
    assert [composed.delta(eps) for eps in EPSILONS[:5]] == pytest.approx(exact[:5], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.05, 0.5, 5.0, 50.0])
@pytest.mark.parametrize("q", [1e-4, 0.1, 0.9])
def test_the_distribution_costs_less_than_renyi_orders_and_more_than_a_removal(q, sigma):
    for rounds in (1, 200):
        charges = [(SampledReplacement(q, Gaussian(sigma)), rounds)]
        removed = compute_epsilon([(PoissonSampled(q, Gaussian(sigma)), rounds)], 1e-5)
        replaced = compute_epsilon(charges, 1e-5)
        assert removed <= replaced * (1 + 1e-3)  # up to the grid
        assert replaced <= compute_epsilon(charges, 1e-5, "rdp")


def log_skellam(k, variance):
    """ln P(k) of Poisson(V/2) − Poisson(V/2): e^−V·I_|k|(V), the Bessel function scaled so as not to overflow."""
    with np.errstate(divide="ignore"):
        return np.log(special.ive(np.abs(k), variance))


@pytest.mark.parametrize("q", RATES)
@pytest.mark.parametrize(("units", "sigma"), [(8, 1.0), (8, 4.0), (32, 0.6), (64, 2.0)])
def test_skellam_against_the_pair_itself(q, units, sigma):
    bound = rdp.compute_rdp(SampledReplacement(q, Skellam(sigma, units, 1)), ORDERS)
    variance = (units * sigma) ** 2
    k = np.arange(-60 * units - 800, 60 * units + 801)
    logs = {shift: log_skellam(k - shift, variance) for shift in (-units, 0, units)}
    seen = np.all([np.isfinite(log) for log in logs.values()], axis=0)  # the rest underflows, and is left out
    for here, there in ((units, -units), (-units, units), (units, 0), (0, units)):
        p, other = (mixed(q, logs[0][seen], logs[at][seen]) for at in (here, there))
        exact = divergences(p, other)
        assert (exact <= bound * (1 + 1e-6) + 1e-12).all()


@pytest.mark.parametrize(
    "noise", [Gaussian(0.4), Gaussian(5.0), Skellam(1.0, 4096, 10**6), Skellam(5.0, 64, 100)]
)
@pytest.mark.parametrize("q", RATES)
def test_it_costs_more_than_being_removed_and_less_than_a_coin_that_is_seen(noise, q):
    found = rdp.compute_rdp(SampledReplacement(q, noise), ORDERS)
    seen = rdp.compute_rdp(RevealedSample(q, remove_amplification(SampledReplacement(q, noise))), ORDERS)
    once = rdp.compute_rdp(PoissonSampled(q, noise), ORDERS)
    assert (found <= seen * (1 + 1e-12)).all()
    assert (found >= once * (1 - 1e-12)).all()


@pytest.mark.slow
@pytest.mark.parametrize("q", [0.001, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0, 5.0, 20.0])
def test_no_epsilon_is_larger_than_by_the_doubled_shift(q, sigma):
    """What was charged before: a sampled release of twice the shift, by Rényi orders."""
    for rounds in (1, 100, 10_000):
        before = compute_epsilon([(PoissonSampled(q, Skellam(sigma / 2, 4096, 1000)), rounds)], 1e-5, "rdp")
        now = compute_epsilon([(SampledReplacement(q, Skellam(sigma, 4096, 1000)), rounds)], 1e-5, "rdp")
        assert now <= before * (1 + 1e-9)


def test_the_doubled_shift_does_not_dominate_the_pair():
    """Removed from a sample, a person makes nothing more than 1/(1−q) times as likely; replaced they do.

    So composing the distributions of a sampled release of twice the shift is no bound of the composed pairs.
    """
    q, sigma, eps = 0.1, 1.0, 0.5
    x = np.linspace(-15, 15, 300_001)
    p, other, twice = (
        np.exp(mixed(q, stats.norm.logpdf(x, 0, sigma), stats.norm.logpdf(x, at, sigma))) for at in (1, -1, 2)
    )
    none = stats.norm.pdf(x, 0, sigma)
    replaced = np.trapezoid(np.maximum(other - math.exp(eps) * p, 0), x)
    added = np.trapezoid(np.maximum(none - math.exp(eps) * twice, 0), x)
    assert added == 0.0
    assert replaced > 1e-3


def test_what_it_saves():
    """q=.02, σ=1, T=500, δ=1e-5: by Rényi orders the doubled shift said 20.2."""
    event = SampledReplacement(0.02, Gaussian(1.0))
    assert round(compute_epsilon([(PoissonSampled(0.02, Gaussian(0.5)), 500)], 1e-5, "rdp"), 1) == 20.2
    assert compute_epsilon([(event, 500)], 1e-5, "rdp") == pytest.approx(5.506, abs=0.005)
    assert compute_epsilon([(event, 500)], 1e-5) <= compute_epsilon([(event, 500)], 1e-5, "rdp")
    exact = exact_epsilon(0.02, 1.0, 500, 1e-5)
    assert 4.1 < exact < 4.4 < compute_epsilon([(event, 500)], 1e-5, "rdp")


def exact_epsilon(q, sigma, rounds, delta):
    """ε of P₁ = N(1), Q₁ = N(−1) in one dimension: losses rounded to the nearest of a grid, and convolved."""
    step = 1e-4
    x = np.linspace(-1 - 12 * sigma, 1 + 12 * sigma, 2_000_001)
    p, other = (
        mixed(q, stats.norm.logpdf(x, 0, sigma), stats.norm.logpdf(x, at, sigma)) for at in (1.0, -1.0)
    )
    mass = np.exp(p) * (x[1] - x[0])
    place = np.round((p - other) / step).astype(int)
    low, size = place.min(), 1 << 21
    table = np.bincount(place - low, weights=mass, minlength=size)
    table = np.fft.irfft(np.fft.rfft(table) ** rounds, size)
    offset = rounds * low % size
    losses = ((np.arange(size) + offset + size // 2) % size - size // 2) * step
    table, losses = table[np.argsort(losses)], np.sort(losses)
    low_eps, high_eps = 0.0, 50.0
    while high_eps - low_eps > 1e-4:
        middle = (low_eps + high_eps) / 2
        above = losses > middle
        found = float(table[above] @ -np.expm1(middle - losses[above]))
        low_eps, high_eps = (middle, high_eps) if found > delta else (low_eps, middle)
    return high_eps


def test_who_is_charged_so():
    """A silo under `lattice` or `paillier`, where it sees neither counts nor who was sampled."""
    method = UldpAvg(5.0, 1.0, weighting="records", user_sampling=0.1)
    hidden = method.dp_event(View("silo", 5, noise_sized_for=4, survivors=4))
    assert hidden == SampledReplacement(0.1, Gaussian(pytest.approx(5 / math.sqrt(4) * math.sqrt(3))))
    assert remove_amplification(hidden) == Gaussian(pytest.approx(5 / math.sqrt(4) * math.sqrt(3) / 2))
    known = method.dp_event(View("silo", 5, knows_sample=True))
    assert known == RevealedSample(0.1, Gaussian(pytest.approx(5 * math.sqrt(4 / 5) / 2))), (
        "a coin that it sees"
    )
    assert isinstance(method.dp_event(View("released", 5)), PoissonSampled)


def test_it_is_stored_as_it_is_and_has_no_group():
    event = SampledReplacement(0.1, Skellam(5.0, 4096, 10))
    assert event_from_dict(event_to_dict(event)) == event
    always = SampledReplacement(1.0, Gaussian(5.0))
    assert compute_epsilon([(always, 10)], 1e-5) == compute_epsilon([(Gaussian(2.5), 10)], 1e-5)
    assert compute_epsilon([(SampledReplacement(0.0, Gaussian(5.0)), 10)], 1e-5) == 0.0
    with pytest.raises(SilodpError):
        compute_epsilon([(Group(2, SampledReplacement(0.1, Gaussian(5.0))), 1)], 1e-5, "rdp")  # type: ignore[arg-type]
