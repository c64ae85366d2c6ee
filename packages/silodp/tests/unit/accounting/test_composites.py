"""Events inside events: coins over whole rounds, two looks, groups of anything, kinds of units."""

import json
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from silodp.accounting import pld, rdp
from silodp.accounting.accountant import choose_accountant, compute_delta, compute_epsilon
from silodp.accounting.events import (
    Composed,
    CorrelatedReleases,
    Gaussian,
    Group,
    NonPrivate,
    PoissonSampled,
    RevealedSample,
    SelfComposed,
    Skellam,
    WorstOf,
    event_from_dict,
    event_to_dict,
    find_costliest_event,
    remove_amplification,
    to_discrete,
)
from silodp.accounting.ledger import Budget, Ledger
from silodp.accounting.steps import flatten_event
from silodp.errors import SilodpError
from support.examples import few_or_many
from support.refusals import refused

DELTA = 1e-5
ACCOUNTANTS = ["pld", "rdp"]


def two_stage(client_sampling, q=0.05, sigma=6.0, steps=50):
    return RevealedSample(client_sampling, SelfComposed(PoissonSampled(q, Gaussian(sigma)), steps))


# One coin over a whole round


@pytest.mark.parametrize(("lam", "rdp", "pld"), [(1, 0.795, 0.710), (0.8, 0.721, 0.637), (0.3, 0.480, 0.406)])
def test_two_stage_sampling_has_the_printed_epsilon(lam, rdp, pld):
    found = [compute_epsilon([(two_stage(lam), 15)], 1e-4, accountant) for accountant in ("rdp", "pld")]
    # .480 was found with fewer orders than ours, which give .4795.
    assert found == [pytest.approx(rdp, abs=6e-4), pytest.approx(pld, abs=5e-4)]


@pytest.mark.slow
@pytest.mark.parametrize("lam", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("rounds", [1, 20])
def test_a_coin_over_many_steps_agrees_with_the_librarys_mixture(lam, rounds):
    inner = library.from_gaussian_mechanism(2.0, sampling_prob=0.1).self_compose(8)
    inner = inner.compose(library.from_gaussian_mechanism(5.0))
    reference = inner.compute_mixture(library.identity(), lam).self_compose(rounds)
    event = RevealedSample(
        lam, Composed((SelfComposed(PoissonSampled(0.1, Gaussian(2.0)), 8), Gaussian(5.0)))
    )
    theirs = reference.get_epsilon_for_delta(DELTA)
    assert theirs * (1 - 1e-6) <= compute_epsilon([(event, rounds)], DELTA) <= theirs * (1 + 5e-4)


@pytest.mark.parametrize("lam", [0.02, 0.4])
def test_a_coin_over_gaussian_steps_against_the_closed_form(lam):
    """The coin is seen and independent of the record, so δ averages over it."""
    mu = math.sqrt(7) / 3.0
    event = RevealedSample(lam, SelfComposed(Gaussian(3.0), 7))
    for eps in (0.05, 0.7, 2.0):
        exact = lam * (stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu))
        assert exact - 1e-14 <= compute_delta([(event, 1)], eps) <= exact * (1 + 1e-3) + 1e-13


def test_all_mass_is_scaled_infinity_too():
    grid = 1e-3
    inner = SelfComposed(PoissonSampled(0.3, Gaussian(0.4)), 3)
    without = pld.compose_steps([(inner.event, inner.count)], grid)
    for mixed, plain in zip(pld.compute_losses(RevealedSample(0.25, inner), grid), without, strict=True):
        assert plain.infinite > 0
        assert mixed.infinite == pytest.approx(0.25 * plain.infinite, rel=1e-12, abs=0)
        for eps in (0.0, 1.0, 4.0):
            assert mixed.delta(eps) == pytest.approx(0.25 * plain.delta(eps), rel=1e-9)


@pytest.mark.parametrize("alpha", [2, 3, 7])
def test_two_stage_renyi_by_the_formula(alpha):
    """rPDP-FL, Lemma 6, as printed, in plain floating point."""
    q, sigma, steps, lam = 0.2, 1.5, 4, 0.3
    total = (1 - q) ** (alpha - 1) * (alpha * q - q + 1)
    for l in range(2, alpha + 1):  # noqa: E741
        total += math.comb(alpha, l) * (1 - q) ** (alpha - l) * q**l * math.exp((l - 1) * l / (2 * sigma**2))
    rho = math.log(total) / (alpha - 1)
    rounds = math.log(1 - lam + lam * math.exp((alpha - 1) * steps * rho)) / (alpha - 1)
    found = rdp.compute_rdp(two_stage(lam, q, sigma, steps), (float(alpha),))
    assert found[0] == pytest.approx(rounds, rel=1e-12)


def test_rare_sampling_loses_no_digits():
    """To second order in q, ρ(α) is α·q²(e^(1/σ²) − 1)/2."""
    for q in (1e-5, 1e-7):
        found = rdp.compute_rdp(PoissonSampled(q, Gaussian(3.0)), (2.0, 4.0))
        expected = np.array([2, 4]) * q**2 * math.expm1(1 / 9) / 2
        np.testing.assert_allclose(found, expected, rtol=1e-4)


@few_or_many(
    5,
    15,
    lam=st.floats(0.01, 1),
    q=st.floats(0.01, 1),
    sigma=st.floats(1, 8),
    steps=st.integers(1, 20),
    more=st.floats(1.1, 3),
)
def test_a_coin_costs_less_than_none_and_pld_less_than_rdp(lam, q, sigma, steps, more):
    event = two_stage(lam, q, sigma, steps)
    cost = compute_epsilon([(event, 5)], DELTA)
    assert cost <= compute_epsilon([(two_stage(min(1, lam * more), q, sigma, steps), 5)], DELTA) * (1 + 1e-6)
    assert cost <= compute_epsilon([(event, 5)], DELTA, "rdp") * (1 + 1e-3) + 1e-6


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_coins_that_change_nothing_are_left_out(accountant):
    def cost(event):
        return compute_epsilon([(event, 3)], DELTA, accountant)

    step = PoissonSampled(0.2, Gaussian(2.0))
    assert cost(RevealedSample(1.0, SelfComposed(step, 4))) == cost(SelfComposed(step, 4))
    assert cost(RevealedSample(0.0, SelfComposed(step, 4))) == 0.0 == cost(RevealedSample(0.5, Composed(())))
    assert cost(RevealedSample(0.5, RevealedSample(0.4, step))) == cost(RevealedSample(0.2, step))
    assert cost(RevealedSample(0.5, Composed((step, step)))) == cost(
        RevealedSample(0.5, SelfComposed(step, 2))
    )
    assert cost(Composed((step, SelfComposed(Gaussian(3.0), 2)))) == compute_epsilon(
        [(step, 3), (Gaussian(3.0), 6)], DELTA, accountant
    )
    assert cost(RevealedSample(0.5, Composed((step, NonPrivate("why"))))) == math.inf
    assert cost(RevealedSample(0.5, SelfComposed(Gaussian(0.0), 2))) == math.inf


# Two looks


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_two_gaussian_looks_are_one(accountant):
    looks, one = CorrelatedReleases(Gaussian(3.0), Gaussian(4.0)), Gaussian(1 / math.sqrt(1 / 9 + 1 / 16))
    for wrap in (lambda e: e, lambda e: PoissonSampled(0.1, e), lambda e: Group(3, PoissonSampled(0.1, e))):
        assert compute_epsilon([(wrap(looks), 9)], DELTA, accountant) == compute_epsilon(
            [(wrap(one), 9)], DELTA, accountant
        )
    assert flatten_event([(CorrelatedReleases(Gaussian(math.inf), Gaussian(4.0)), 1)], for_pld=True) == (
        (Gaussian(4.0), 1),
    )
    assert (
        compute_epsilon([(CorrelatedReleases(Gaussian(0.0), Gaussian(4.0)), 1)], DELTA, accountant)
        == math.inf
    )


def divergence_of_two_looks(q, a, sigma, units, alpha):
    """D_α of both looks together, the worse direction, summed over the integers and the reals."""
    variance = (sigma * units) ** 2
    reach = int(12 * math.sqrt(variance) + 15 * units + 20)
    k = np.arange(-reach, reach + 1)
    x, step = np.linspace(-14 * a - 12, 14 * a + 12, 3001, retstep=True)
    first = [stats.norm.logpdf(x, shift, a) for shift in (0, 1)]
    second = [stats.skellam.logpmf(k - shift, variance / 2, variance / 2) for shift in (0, units)]
    with np.errstate(invalid="ignore", divide="ignore"):
        still, moved = (f[:, None] + s[None] for f, s in zip(first, second, strict=True))
        mixed = np.logaddexp(math.log1p(-q) + still, math.log(q) + moved)
        found = []
        for p, o in ((mixed, still), (still, mixed)):
            terms = alpha * p + (1 - alpha) * o
            found.append(np.logaddexp.reduce(terms[np.isfinite(terms)]) + math.log(step))
    return max(found) / (alpha - 1)


@pytest.mark.parametrize(("q", "a", "sigma"), [(0.05, 1.0, 1.2), (0.3, 2.0, 1.5)])
def test_two_looks_at_one_sample_are_one_sampled_event(q, a, sigma):
    units, orders = 4, (2.0, 4.0, 8.0)
    looks = CorrelatedReleases(Gaussian(a), Skellam(sigma, units, 1))
    together = rdp.compute_rdp(PoissonSampled(q, looks), orders)
    apart = sum(rdp.compute_rdp(PoissonSampled(q, look), orders) for look in (looks.first, looks.second))
    for alpha, bound, composed in zip(orders, together, apart, strict=True):
        true = divergence_of_two_looks(q, a, sigma, units, alpha)
        assert true <= bound * (1 + 1e-6)
        assert bound <= 1.5 * true
        if alpha > 2:
            assert composed < true  # two sampled events would promise what does not hold


def test_two_looks_by_the_formula():
    a, skellam = 3.0, Skellam(2.0, 4096, 1000)
    found = rdp.compute_rdp(CorrelatedReleases(Gaussian(a), skellam), (2.0, 16.0))
    alpha = np.array([2.0, 16.0])
    np.testing.assert_allclose(
        found, alpha / (2 * a**2) + rdp.compute_skellam_rdp(skellam, alpha), rtol=1e-12
    )


# Groups


@pytest.mark.parametrize(
    "inner", [PoissonSampled(0.1, CorrelatedReleases(Gaussian(4.0), Skellam(3.0, 64, 10))), two_stage(0.5)]
)
def test_group_privacy_by_renyi_orders_of_anything(inner):
    orders = (2.0, 5.0)
    for size, c in ((2, 1), (3, 2), (4, 2), (5, 3)):
        expected = 3.0**c * rdp.compute_rdp(inner, tuple(2.0**c * a for a in orders))
        np.testing.assert_allclose(rdp.compute_rdp(Group(size, inner), orders), expected, rtol=1e-12)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_groups_of_what_is_not_sampled_move_further(accountant):
    def cost(event):
        return compute_epsilon([(event, 2)], DELTA, accountant)

    assert cost(Group(3, Gaussian(6.0))) == cost(Gaussian(2.0))
    assert cost(Group(3, CorrelatedReleases(Gaussian(6.0), Gaussian(9.0)))) == pytest.approx(
        cost(CorrelatedReleases(Gaussian(2.0), Gaussian(3.0)))
    )
    parts = Composed((Gaussian(6.0), PoissonSampled(0.1, Gaussian(6.0))))
    assert cost(Group(3, parts)) == cost(Composed(tuple(Group(3, part) for part in parts.parts)))
    assert cost(Group(0, Gaussian(6.0))) == 0.0
    assert cost(Group(1, two_stage(0.5))) == cost(two_stage(0.5))
    assert cost(Group(500, Gaussian(4.9))) == math.inf


def test_a_group_moves_integers_by_as_many_units():
    found = flatten_event([(Group(3, CorrelatedReleases(Gaussian(6.0), Skellam(9.0, 64, 10))), 1)])
    assert found == ((CorrelatedReleases(Gaussian(2.0), Skellam(3.0, 192, 10)), 1),)


def test_by_pld_a_group_forgoes_the_coins_of_its_silos():
    """Of several coins one falls more often than a single one does."""
    inside = two_stage(0.5).event
    assert compute_epsilon([(Group(3, two_stage(0.5)), 4)], DELTA) == compute_epsilon(
        [(Group(3, inside), 4)], DELTA
    )
    sigma = (
        0.05  # each release tells all: two records in two silos are seen with probability 1 − (1 − λ)² = .75
    )
    assert compute_delta([(Group(2, RevealedSample(0.5, Gaussian(sigma))), 1)], 1.0) >= 0.75


# Kinds of units


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_each_kind_pays_its_own_and_the_dearest_counts(accountant):
    def cost(*charges):
        return compute_epsilon(charges, DELTA, accountant)

    cheap, dear, shared = Gaussian(6.0), PoissonSampled(0.5, Gaussian(2.0)), Gaussian(9.0)
    both = WorstOf((cheap, dear))
    assert cost((both, 3)) == cost((dear, 3)) == cost((WorstOf((dear, cheap)), 3)) > cost((cheap, 3))
    assert cost((both, 3), (shared, 2)) == cost((dear, 3), (shared, 2))
    crossed = cost((both, 3), (WorstOf((dear, cheap)), 3))
    assert crossed == cost((cheap, 3), (dear, 3)) < cost((dear, 6))
    assert cost((SelfComposed(WorstOf((cheap, Composed((dear, shared)))), 2), 1)) == cost(
        (dear, 2), (shared, 2)
    )
    assert cost((WorstOf((cheap, NonPrivate("why"))), 1)) == math.inf
    assert compute_delta([(both, 3)], 1.0, accountant) == compute_delta([(dear, 3)], 1.0, accountant)


def test_kinds_must_be_the_same_ones_everywhere():
    two, three = WorstOf((Gaussian(1.0),) * 2), WorstOf((Gaussian(1.0),) * 3)
    for charges in ([(two, 1), (three, 1)], [(Composed((two, three)), 1)], [(WorstOf(()), 1)]):
        with pytest.raises(SilodpError, match="alternatives"):
            compute_epsilon(charges, DELTA)
    spent = Ledger(None, DELTA, run="r")
    spent.charge(0, 0, {"released": two})
    with refused("accounting.event"):
        spent.charge(1, 0, {"released": three})
    assert spent.epsilon("released") == compute_epsilon([(two, 1)], DELTA)


# The book, and what the other rooms do with events


def test_a_budget_names_what_is_promised_nowhere():
    ledger = Ledger(None, DELTA, budget=Budget(1.0, DELTA), run="r")
    with pytest.raises(SilodpError, match="counts disclosed"):
        ledger.affords({"released": WorstOf((Gaussian(9.0), Composed((NonPrivate("counts disclosed"),))))})
    ledger.charge(0, 0, {"released": RevealedSample(0.5, Composed((NonPrivate("counts disclosed"),)))})
    assert ledger.epsilon("released") is None
    assert ledger.to_counts().compute_cost("released").reason == "counts disclosed"


def test_integer_noise_reaches_every_release_and_no_first_look():
    coin = RevealedSample(
        0.5,
        Composed(
            (
                SelfComposed(PoissonSampled(0.1, CorrelatedReleases(Gaussian(8.0), Gaussian(4.0))), 3),
                Gaussian(4.0),
            )
        ),
    )
    made = to_discrete(WorstOf((coin, Group(2, Gaussian(4.0)))), 64, 10, reach=2.0)
    integer = Skellam(2.0, 64, 10)
    first = RevealedSample(
        0.5,
        Composed((SelfComposed(PoissonSampled(0.1, CorrelatedReleases(Gaussian(8.0), integer)), 3), integer)),
    )
    assert made == WorstOf((first, Group(2, integer)))
    assert to_discrete(made, 8, 10) == made
    assert choose_accountant([made]).name == "rdp"
    assert choose_accountant([coin]).name == "pld"
    for event in (made, CorrelatedReleases(Gaussian(1.0), integer), Group(2, PoissonSampled(0.1, integer))):
        with pytest.raises(SilodpError, match="choose 'rdp'"):
            compute_epsilon([(event, 1)], DELTA, "pld")


def test_a_second_release_of_the_same_samples_has_no_amplification():
    step = CorrelatedReleases(Gaussian(8.0), Gaussian(4.0))
    event = WorstOf(
        (
            RevealedSample(0.5, Composed((SelfComposed(PoissonSampled(0.1, step), 3), Gaussian(4.0)))),
            Gaussian(1.0),
        )
    )
    assert remove_amplification(event) == WorstOf(
        (Composed((SelfComposed(step, 3), Gaussian(4.0))), Gaussian(1.0))
    )


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (Group(1.5, Gaussian(1.0)), "size"),
        (Group(2, RevealedSample(1.5, Gaussian(1.0))), "sampling_probability"),
        (Group(2, Group(2, Gaussian(1.0))), "Group"),
        (RevealedSample(-0.1, Gaussian(1.0)), "sampling_probability"),
        (RevealedSample(0.5, SelfComposed(Gaussian(1.0), 1.5)), "count"),
        (RevealedSample(0.0, SelfComposed(Gaussian(-1.0), 2)), "noise_multiplier"),
        (CorrelatedReleases(Gaussian(1.0), Gaussian(math.nan)), "noise_multiplier"),
        (CorrelatedReleases(Skellam(1.0, 4, 4), Gaussian(1.0)), "release"),
        (PoissonSampled(0.5, RevealedSample(0.5, Gaussian(1.0))), "release"),
        (PoissonSampled(0.5, NonPrivate("why")), "release"),
        (SelfComposed(3, 2), "release"),
        (Composed((Gaussian(1.0), "Gaussian")), "release"),
    ],
)
@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_what_cannot_be_is_named(event, field, accountant):
    with pytest.raises(SilodpError, match=field):
        compute_epsilon([(event, 1)], DELTA, accountant)


multipliers = st.floats(0, math.inf)
gaussians = st.builds(Gaussian, multipliers)
releases = st.one_of(
    gaussians,
    st.builds(Skellam, multipliers, st.integers(1, 10**6), st.integers(1, 10**6)),
)
additive = st.one_of(releases, st.builds(CorrelatedReleases, gaussians, releases))
steps = st.one_of(additive, st.builds(PoissonSampled, st.floats(0, 1), additive))
composites = st.recursive(
    st.one_of(steps, st.builds(Group, st.integers(0, 99), steps)),
    lambda inner: st.one_of(
        st.builds(SelfComposed, inner, st.integers(0, 10**6)),
        st.builds(RevealedSample, st.floats(0, 1), inner),
        st.builds(Composed, st.lists(inner, max_size=3).map(tuple)),
    ),
    max_leaves=6,
)
anything = st.one_of(
    composites,
    st.builds(WorstOf, st.lists(composites, max_size=3).map(tuple)),
    st.builds(NonPrivate, st.text()),
)


@given(anything)
def test_all_events_survive_json(event):
    read = event_from_dict(json.loads(json.dumps(event_to_dict(event), allow_nan=False)))
    assert read == event
    assert hash(read) == hash(event)


def test_books_of_the_first_version_are_refused():
    fields = {"kind": "GroupSampled", "group_size": 2, "sampling_probability": 0.1, "noise_multiplier": 1.0}
    with pytest.raises(SilodpError, match="another version"):
        event_from_dict(fields)


def test_the_costliest_of_several_events_covers_each_of_them():
    """Less noise and fewer grid steps never cost less, so what has the least of both costs no less than any."""
    fewer = Skellam(7.0, 2048, 100)
    more = Skellam(6.0, 4096, 100)
    assert find_costliest_event([fewer, more]) == Skellam(6.0, 2048, 100)
    for make in (
        lambda release: release,
        lambda release: PoissonSampled(0.2, release),
        lambda release: RevealedSample(0.2, SelfComposed(PoissonSampled(0.1, release), 3)),
        lambda release: Composed((CorrelatedReleases(Gaussian(9.0), release), release)),
        lambda release: WorstOf((release, PoissonSampled(0.5, release))),
    ):
        cover = find_costliest_event([make(fewer), make(more)])
        assert cover == make(Skellam(6.0, 2048, 100))
        for event in (make(fewer), make(more)):
            assert compute_epsilon([(cover, 20)], 1e-5, "rdp") >= compute_epsilon([(event, 20)], 1e-5, "rdp")
    assert find_costliest_event([Gaussian(2.0), Gaussian(1.0)]) == Gaussian(1.0)
    nothing = NonPrivate("counts disclosed")
    assert find_costliest_event([Gaussian(2.0), nothing]) == nothing


@pytest.mark.parametrize(
    "events",
    [
        (Gaussian(1.0), Skellam(1.0, 4, 4)),
        (PoissonSampled(0.1, Gaussian(1.0)), PoissonSampled(0.2, Gaussian(1.0))),
        (Skellam(1.0, 4, 4), Skellam(1.0, 4, 5)),
        (SelfComposed(Gaussian(1.0), 2), SelfComposed(Gaussian(1.0), 3)),
        (Composed((Gaussian(1.0),)), Composed((Gaussian(1.0), Gaussian(1.0)))),
    ],
)
def test_events_that_differ_in_more_than_noise_have_no_cover(events):
    with pytest.raises(SilodpError) as error:
        find_costliest_event(events)
    assert error.value.code == "accounting.events_differ"
