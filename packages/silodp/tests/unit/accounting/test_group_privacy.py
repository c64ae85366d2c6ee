"""What a guarantee about records is worth to a person with several of them."""

import math

import numpy as np
import pytest
from scipy import stats

from silodp.accounting.accountant import compute_delta, compute_epsilon
from silodp.accounting.charges import scale_to_person
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
)


def spent(event, accountant="pld", count=10):
    return compute_epsilon([(event, count)], 1e-5, accountant)


def test_one_record_is_the_record_itself():
    event = Composed(
        (SelfComposed(PoissonSampled(0.1, Gaussian(2.0)), 4), PoissonSampled(0.1, Gaussian(1.0)))
    )
    assert scale_to_person(event, 1) == event


def test_a_person_in_every_release_moves_it_by_all_her_records():
    assert spent(scale_to_person(Gaussian(6.0), 3)) == pytest.approx(spent(Gaussian(2.0)), rel=1e-9)


def test_records_drawn_each_on_its_own_are_a_group_in_every_step():
    steps = SelfComposed(PoissonSampled(0.05, CorrelatedReleases(Gaussian(4.0), Gaussian(3.0))), 7)
    merged = Group(4, PoissonSampled(0.05, Gaussian((1 / 16 + 1 / 9) ** -0.5)))
    assert spent(scale_to_person(steps, 4)) == pytest.approx(spent(SelfComposed(merged, 7)), rel=1e-9)
    assert spent(scale_to_person(steps, 4)) > 2 * spent(steps)


def test_a_silos_coin_covers_no_second_record():
    # Two records in two silos that toss their coins apart: within a round one of the silos takes part with
    # probability 1 − (1 − λ)², and the bound must hold for that.
    step = PoissonSampled(0.2, Gaussian(3.0))
    person = scale_to_person(RevealedSample(0.3, SelfComposed(step, 5)), 2)
    apart = Composed((RevealedSample(0.3, SelfComposed(step, 5)), RevealedSample(0.3, SelfComposed(step, 5))))
    assert person == SelfComposed(Group(2, step), 5)
    assert spent(person) > spent(apart)


def test_where_silos_differ_every_release_is_charged_with_its_least_noise():
    def kind(look, noise):
        sampled = PoissonSampled(0.1, CorrelatedReleases(Gaussian(look), Gaussian(noise)))
        return Composed((SelfComposed(sampled, 3), PoissonSampled(0.1, Gaussian(noise))))

    kinds = WorstOf((kind(9.0, 3.0), kind(7.0, 4.0)))
    assert scale_to_person(kinds, 1) == kinds
    assert scale_to_person(kinds, 4) == scale_to_person(kind(7.0, 3.0), 4)
    for by in ("pld", "rdp"):
        assert spent(scale_to_person(kinds, 4), by) >= max(
            spent(scale_to_person(one, 4), by) for one in kinds.alternatives
        )


@pytest.mark.parametrize("records", [2, 4])
@pytest.mark.parametrize(("one", "other"), [(3.0, 5.0), (1.0, 1.2), (0.8, 4.0)])
def test_records_in_silos_that_differ_are_covered_however_they_are_split(records, one, other):
    """The exact δ of one release, k' records of one silo and k'' of another drawn on their own (by integration)."""
    q, x = 0.2, np.linspace(-40, 60, 400_001)
    cover = scale_to_person(
        WorstOf((PoissonSampled(q, Gaussian(one)), PoissonSampled(q, Gaussian(other)))), records
    )
    for first in range(records + 1):
        shifts = np.add.outer(np.arange(first + 1) / one, np.arange(records - first + 1) / other)
        weights = np.outer(
            stats.binom.pmf(np.arange(first + 1), first, q),
            stats.binom.pmf(np.arange(records - first + 1), records - first, q),
        )
        mixed = sum(
            w * stats.norm.pdf(x, shift) for w, shift in zip(weights.ravel(), shifts.ravel(), strict=True)
        )
        alone = stats.norm.pdf(x)
        for eps in (0.1, 0.5, 2.0):
            allowed = compute_delta([(cover, 1)], eps)
            for p, q_ in ((mixed, alone), (alone, mixed)):
                assert np.trapezoid(np.maximum(p - math.exp(eps) * q_, 0), x) <= allowed * (1 + 1e-6) + 1e-12


def test_nothing_is_said_where_a_persons_silos_take_different_numbers_of_steps():
    step = PoissonSampled(0.1, Gaussian(3.0))
    assert isinstance(scale_to_person(WorstOf((step, SelfComposed(step, 2))), 2), NonPrivate)
    assert isinstance(scale_to_person(WorstOf((SelfComposed(step, 3), SelfComposed(step, 2))), 2), NonPrivate)
    assert scale_to_person(WorstOf((step, step)), 1) == WorstOf((step, step))


def test_noise_in_integers_is_grouped_by_renyi_orders():
    step = PoissonSampled(0.1, Skellam(3.0, 4096, 10))
    assert scale_to_person(step, 8) == Group(8, step)
    assert spent(scale_to_person(step, 8), "rdp") > 4 * spent(step, "rdp")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_more_records_cost_more(accountant):
    step = SelfComposed(PoissonSampled(0.05, Gaussian(4.0)), 3)
    costs = [spent(scale_to_person(step, k), accountant) for k in (1, 2, 4, 8)]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]
