"""The multiplier of every view (docs/privacy.md, section 3)."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import (
    Composed,
    Gaussian,
    Group,
    NonPrivate,
    PoissonSampled,
    RevealedSample,
    SelfComposed,
)
from silodp.accounting.views import View
from silodp.methods import UldpAvg, roles
from silodp.planning.epsilon import compute_epsilon_for
from silodp_experiments.uldp_baselines import Default, UldpGroup, UldpNaive
from support.refusals import refused

UNIFORM, RECORDS = UldpAvg(5.0, 1.0), UldpAvg(5.0, 1.0, weighting="records")


def multiplier(method, view):
    event = method.dp_event(view)
    assert isinstance(event, Gaussian), event
    return event.noise_multiplier


@pytest.mark.parametrize(("m", "n"), [(5, 5), (4, 5), (4, 4), (5, 4)])
def test_the_sum_carries_the_noise_of_those_who_answered(m, n):
    """With weights by records one silo may carry the whole clip; with uniform weights n of S silos carry n/S of it."""
    for adversary in ("released", "server"):
        view = View(adversary, 5, noise_sized_for=m, survivors=n)
        assert multiplier(RECORDS, view) == pytest.approx(5 * math.sqrt(n / m))
        assert multiplier(UNIFORM, view) == pytest.approx(5 * math.sqrt(n / m) * 5 / n)


def gaussian_epsilon(mu, delta):
    """ε of N(μ, 1) against N(0, 1) by its closed form, without the package (Balle and Wang 2018, Theorem 8)."""

    def excess(eps):
        a, b = mu / 2, eps / mu
        return stats.norm.cdf(a - b) - math.exp(eps + stats.norm.logcdf(-a - b)) - delta

    return optimize.brentq(excess, 0, 100)


@pytest.mark.parametrize(("n", "printed"), [(5, 4.377), (6, 4.866), (8, 5.759), (10, 6.573)])
def test_golden_numbers_with_dropouts(n, printed):
    """S = 10, m = 5, σ = 5, T = 100, uniform weights, released, δ = 1e-5, with n survivors in every round."""
    view = View("released", 10, noise_sized_for=5, survivors=n)
    event = UldpAvg(5.0, 1.0).dp_event(view)
    assert round(compute_epsilon([(event, 100)], 1e-5, "pld"), 3) == printed
    # n silos move by n/10 of a clip together, and each adds noise of 5/√5 clips.
    moved, noise = n / 10, math.sqrt(n) * 5 / math.sqrt(5)
    assert gaussian_epsilon(math.sqrt(100) * moved / noise, 1e-5) == pytest.approx(printed, abs=6e-4)


@pytest.mark.parametrize("n", [5, 6, 8, 10])
def test_however_dropouts_are_chosen_a_round_costs_no_more_than_with_everyone(n):
    share = 5 / math.sqrt(5)
    for adversary, t, cap in (("released", 1, share * math.sqrt(10)), ("silo", 2, share * 10 / math.sqrt(8))):
        view = View(adversary, 10, noise_sized_for=5, survivors=n, colluding=t)
        assert multiplier(UNIFORM, view) >= cap * (1 - 1e-12)
    everyone = View("released", 10, noise_sized_for=5, survivors=10)
    assert multiplier(UNIFORM, everyone) == pytest.approx(share * math.sqrt(10)), "the bound is met"


def test_shares_show_a_person_once_per_silo():
    assert multiplier(UNIFORM, View("server", 5, sees_shares=True)) == pytest.approx(5.0)
    assert multiplier(RECORDS, View("server", 5, sees_shares=True)) == pytest.approx(5 / math.sqrt(5))


@pytest.mark.parametrize("t", [1, 2, 4])
def test_colluding_silos_subtract_their_noise(t):
    view = View("silo", 5, colluding=t)
    assert multiplier(RECORDS, view) == pytest.approx(5 * math.sqrt((5 - t) / 5) / 2)
    assert multiplier(UNIFORM, view) == pytest.approx(5 * math.sqrt(5 / (5 - t)))
    assert multiplier(UldpNaive(5.0, 1.0), view) == pytest.approx(5 * math.sqrt(5 / (5 - t)))


def test_with_hidden_weights_emptying_the_other_silos_moves_the_sum_by_nearly_two_clips():
    """A silo knows its own update of a person, not its weight, and that weight is 1 when she is nowhere else.

    One clip would be too little (docs/privacy.md, section 4, W).
    """
    counts = np.array([[1], [99]])  # the curious silo, and another
    update = np.array([1.0, -1.0])  # clipped to 1, one parameter
    with_others = float((roles.weigh_by_records(counts)[:, 0] * update).sum())
    without = float((roles.weigh_by_records(np.array([[1], [0]]))[:, 0] * update).sum())
    moved = abs(with_others - without)
    assert moved == pytest.approx(1.98)
    view = View("silo", 2)
    share = RECORDS.share_multiplier(2)
    assert share / multiplier(RECORDS, view) >= moved, "noise it does not know, over how far the sum moves"


@pytest.mark.parametrize("n", [3, 4, 5])
def test_a_curious_silo_that_dropped_out_still_sees_the_models(n):
    view = View("silo", 5, noise_sized_for=3, survivors=n)
    others = min(n, 4)
    assert multiplier(UNIFORM, view) == pytest.approx(5 / math.sqrt(3) * math.sqrt(others) / (others / 5))
    assert multiplier(UldpNaive(5.0, 1.0), view) == pytest.approx(5 * math.sqrt(5) / math.sqrt(others))
    assert multiplier(RECORDS, view) == pytest.approx(5 / math.sqrt(3) * math.sqrt(n - 1) / 2)


@pytest.mark.parametrize("method", [UNIFORM, RECORDS, UldpNaive(5.0, 1.0)])
def test_nothing_is_promised_against_everyone_else_together(method):
    assert isinstance(method.dp_event(View("silo", 1)), NonPrivate)
    assert isinstance(method.dp_event(View("silo", 5, colluding=5)), NonPrivate)


def test_naive_is_its_multiplier_to_released_and_server():
    for view in (View("released", 5), View("server", 5, sees_shares=True)):
        assert multiplier(UldpNaive(5.0, 1.0), view) == pytest.approx(5.0)


def test_sampling_amplifies_only_for_those_who_do_not_know_the_sample():
    method = UldpAvg(5.0, 1.0, user_sampling=0.3)
    assert method.dp_event(View("released", 5)) == PoissonSampled(0.3, Gaussian(pytest.approx(5.0)))
    known = method.dp_event(View("server", 5, sees_shares=True, knows_sample=True))
    assert known == RevealedSample(0.3, Gaussian(pytest.approx(5.0)))


def test_counts_in_clear_void_the_guarantee_for_who_receives_them():
    view = View("server", 5, sees_shares=True, counts_disclosed=True)
    event = RECORDS.dp_event(view)
    assert isinstance(event, NonPrivate)
    assert "counts disclosed" in event.reason
    assert isinstance(UNIFORM.dp_event(view), Gaussian)


STEP = PoissonSampled(0.01, Gaussian(5.0))


def group(k: int, local_steps: int = 100) -> UldpGroup:
    return UldpGroup(5.0, 1.0, k, 0.01, local_steps, 64.0, 0.1)


def test_group_is_every_silos_part_of_k_and_the_same_for_all_who_see_a_sum_or_shares():
    for view in (
        View("released", 5),
        View("server", 5, sees_shares=True),
        View("server", 5, noise_sized_for=3),
    ):
        assert group(10).dp_event(view) == SelfComposed(Group(2, STEP), 500)
        assert group(8).dp_event(view) == Composed(
            (SelfComposed(Group(2, STEP), 300), SelfComposed(Group(1, STEP), 200))
        )
        # Silos that may use nothing add nothing.
        assert group(3).dp_event(view) == SelfComposed(Group(1, STEP), 300)


def test_silos_that_pool_are_charged_for_the_largest_parts_of_the_others():
    assert group(8).dp_event(View("silo", 5)) == Composed(
        (SelfComposed(Group(2, STEP), 300), SelfComposed(Group(1, STEP), 100))
    )
    assert group(8).dp_event(View("silo", 5, colluding=2)) == SelfComposed(Group(2, STEP), 300)
    assert isinstance(group(8).dp_event(View("silo", 5, colluding=5)), NonPrivate)


@pytest.mark.parametrize(
    ("k", "adversary", "printed"),
    [(4, "released", 5.832), (8, "released", 13.586), (16, "released", 34.153), (8, "silo", 11.341)],
)
def test_golden_numbers_of_group(k, adversary, printed):
    """σ = 5, γ = .01, 10⁵ steps in each of S = 4 silos, δ = 1e-5."""
    event = group(k, local_steps=1000).dp_event(View(adversary, 4))
    assert round(compute_epsilon([(event, 100)], 1e-5, "pld"), 3) == printed


def test_all_records_in_one_silo_would_cost_more_than_twice_as_much():
    """Any 8 records of a person, in whatever silo: what was charged before silos chose their parts by themselves."""
    in_one = SelfComposed(Group(8, STEP), 10**5)
    assert round(compute_epsilon([(in_one, 1)], 1e-5, "pld"), 1) == 34.2


@pytest.mark.parametrize(
    "method", [Default(), UldpAvg(0.0, 1.0), UldpNaive(0.0, 1.0), UldpGroup(0.0, 1.0, 8, 0.01, 1, 1.0, 0.1)]
)
def test_no_noise_no_guarantee(method):
    assert isinstance(method.dp_event(View("released", 5)), NonPrivate)


def test_known_draws_of_several_records_of_a_person_are_refused() -> None:
    fields = {"noise_multiplier": 3.0, "group_size": 6, "record_sampling": 0.1, "local_steps": 4}
    with refused("argument.conflict") as caught:
        compute_epsilon_for("uldp-group", fields, rounds=30, silos=3, knows_sample=True)
    assert caught.value.field == "knows_sample"
