import pytest

from silodp.privacy.accounting import epsilon
from silodp.privacy.events import (
    Composed,
    Each,
    Gaussian,
    Group,
    KnownSample,
    NoGuarantee,
    PoissonSampled,
    Repeated,
    Skellam,
    TwoLooks,
)
from silodp.privacy.persons import for_person


def spent(event, accountant="pld", count=10):
    return epsilon([(event, count)], 1e-5, accountant)


def test_one_record_is_the_record_itself():
    event = Composed((Repeated(PoissonSampled(0.1, Gaussian(2.0)), 4), PoissonSampled(0.1, Gaussian(1.0))))
    assert for_person(event, 1) == event


def test_a_person_in_every_release_moves_it_by_all_her_records():
    assert spent(for_person(Gaussian(6.0), 3)) == pytest.approx(spent(Gaussian(2.0)), rel=1e-9)


def test_records_drawn_each_on_its_own_are_a_group_in_every_step():
    steps = Repeated(PoissonSampled(0.05, TwoLooks(Gaussian(4.0), Gaussian(3.0))), 7)
    merged = Group(4, PoissonSampled(0.05, Gaussian((1 / 16 + 1 / 9) ** -0.5)))
    assert spent(for_person(steps, 4)) == pytest.approx(spent(Repeated(merged, 7)), rel=1e-9)
    assert spent(for_person(steps, 4)) > 2 * spent(steps)


def test_a_silos_coin_covers_no_second_record():
    # Two records in two silos that toss their coins apart: within a round one of the silos takes part with
    # probability 1 − (1 − λ)², and the bound must hold for that.
    step = PoissonSampled(0.2, Gaussian(3.0))
    person = for_person(KnownSample(0.3, Repeated(step, 5)), 2)
    apart = Composed((KnownSample(0.3, Repeated(step, 5)), KnownSample(0.3, Repeated(step, 5))))
    assert person == Repeated(Group(2, step), 5)
    assert spent(person) > spent(apart)


def test_nothing_is_said_where_a_persons_silos_differ_in_cost():
    step = PoissonSampled(0.1, Gaussian(3.0))
    assert isinstance(for_person(Each((step, Repeated(step, 2))), 2), NoGuarantee)
    assert for_person(Each((step, step)), 1) == Each((step, step))


def test_noise_in_integers_is_grouped_by_renyi_orders():
    step = PoissonSampled(0.1, Skellam(3.0, 4096, 10))
    assert for_person(step, 8) == Group(8, step)
    assert spent(for_person(step, 8), "rdp") > 4 * spent(step, "rdp")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_more_records_cost_more(accountant):
    step = Repeated(PoissonSampled(0.05, Gaussian(4.0)), 3)
    costs = [spent(for_person(step, k), accountant) for k in (1, 2, 4, 8)]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]
