"""Privacy filters: what one admits against closed forms, and what it refuses; the game is in tests/attacks."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.rdp import rdp_privacy_accountant as library

from silodp.accounting.accountant import compute_epsilon
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
from silodp.accounting.filters import Filter, convert_rdp
from support.refusals import refused

DELTA = 1e-5
KEPT = 0.99  # of δ, for the bounds; the rest is for what ciphertexts disclose


def test_the_gaussian_bound_is_the_closed_form() -> None:
    charges = {Gaussian(8.0): 20, Gaussian(5.0): 3}
    combined = Gaussian((20 / 64 + 3 / 25) ** -0.5)
    expected = compute_epsilon([(combined, 1)], KEPT * DELTA)
    assert Filter(DELTA, ("gaussian",)).epsilon(charges) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("order", [2, 6, 32])
def test_an_order_is_the_conversion_of_dp_accounting(order: int) -> None:
    events = {PoissonSampled(0.1, Gaussian(2.0)): 50, Gaussian(9.0): 4}
    accountant = library.RdpAccountant([float(order)])
    for event, count in events.items():
        is_sampled = isinstance(event, PoissonSampled)
        release = library.dp_event.GaussianDpEvent((event.event if is_sampled else event).noise_multiplier)
        accountant.compose(
            library.dp_event.PoissonSampledDpEvent(0.1, release) if is_sampled else release, count
        )
    expected = accountant.get_epsilon(KEPT * DELTA)
    assert Filter(DELTA, (f"order-{order}",)).epsilon(events) == pytest.approx(expected, rel=1e-9)


def test_a_list_costs_what_its_accountant_says_and_nothing_else_is_a_copy_of_it() -> None:
    plan = {PoissonSampled(0.3, Gaussian(4.8)): 60}
    rule = Filter(DELTA, ("plan",), plan)
    cost = compute_epsilon(plan.items(), KEPT * DELTA)
    (event,) = plan
    assert rule.epsilon(plan) == cost
    assert math.isinf(rule.epsilon({event: 1, Gaussian(100.0): 1}))
    assert math.isinf(Filter(DELTA, ("plan",), {}).epsilon({event: 1}))
    assert not rule.admits(plan, cost - 1e-6)
    assert rule.admits(plan, cost)


@pytest.mark.parametrize(
    ("charges", "listed"),
    [
        ((10, 0), (10, 2)),
        ((20, 3), (20, 3)),
        ((21, 0), (21, 4)),
        ((0, 1), (7, 1)),
        ((0, 4), (27, 4)),
        ((60, 1), (60, 9)),
    ],
)
def test_copies_of_a_list_keep_its_proportions(charges: tuple[int, int], listed: tuple[int, int]) -> None:
    """Which kind is asked for how often may then be chosen, since one list has whatever is chosen."""
    kinds = PoissonSampled(0.1, Gaussian(2.0)), Gaussian(9.0)
    rule = Filter(DELTA, ("plan",), dict(zip(kinds, (20, 3), strict=True)))
    found = rule.epsilon(dict(zip(kinds, charges, strict=True)))
    assert found == compute_epsilon(zip(kinds, listed, strict=True), KEPT * DELTA)


@pytest.mark.parametrize(("noise", "limit", "most"), [(5.0, 2.0, 557), (1.0, 4.0, 23)])
def test_equal_releases_are_composed_exactly(noise: float, limit: float, most: int) -> None:
    """docs/privacy.md, section 12; Rényi divergences of one order admit 340 and 3."""
    event, rule = PoissonSampled(0.1, Gaussian(noise)), Filter(DELTA)
    assert rule.admits({event: most}, limit)
    assert not rule.admits({event: most + 1}, limit)
    by_order = Filter(DELTA, plan={})
    assert by_order.admits({event: {557: 340, 23: 3}[most]}, limit)
    assert not by_order.admits({event: {557: 341, 23: 4}[most]}, limit)
    # By another program, rounded up as well.
    for count, fits in ((most, True), (most + 1, False)):
        accountant = PLDAccountant(value_discretization_interval=1e-4)
        accountant.compose(
            library.dp_event.PoissonSampledDpEvent(0.1, library.dp_event.GaussianDpEvent(noise)), count
        )
        assert (accountant.get_epsilon(KEPT * DELTA / 2) <= limit) == fits


@pytest.mark.parametrize(("noise", "limit", "most"), [(5.0, 2.0, 479), (1.0, 4.0, 12)])
def test_equal_integer_releases_are_composed_at_the_best_order(noise: float, limit: float, most: int) -> None:
    """No loss distribution is known for them; of a fixed number the best order may be taken."""
    event, rule = PoissonSampled(0.1, Skellam(noise, 1 << 16, 1000)), Filter(DELTA)
    for count, fits in ((most, True), (most + 1, False)):
        charges = {event: count}
        assert rule.epsilon(charges) == compute_epsilon(charges.items(), KEPT * DELTA / 2, "rdp")
        assert rule.admits(charges, limit) == fits
        assert not Filter(DELTA, plan={}).admits(charges, limit)


def test_a_release_of_another_kind_must_fit_what_counts_all() -> None:
    many = {PoissonSampled(0.1, Gaussian(5.0)): 400}
    both, rule = {**many, Gaussian(100.0): 1}, Filter(DELTA)
    assert rule.epsilon(both) == Filter(DELTA, plan={}).epsilon(both) > rule.epsilon(many)
    assert rule.admits(many, 2.0)
    assert not rule.admits(both, 2.0)


def test_the_prices_of_the_page() -> None:
    """docs/privacy.md, section 12: the demo's 20 rounds at σ = 5."""
    demo = {Gaussian(5.0): 20}
    rules = [
        Filter(DELTA, plan=demo),
        Filter(DELTA, plan={}),
        Filter(DELTA, ("order-6",)),
        Filter(DELTA, ("gaussian",)),
    ]
    assert [rule.epsilon(demo) for rule in rules] == pytest.approx([3.993, 4.265, 4.164, 3.851], abs=6e-4)
    assert compute_epsilon(demo.items(), DELTA) == pytest.approx(3.849, abs=6e-4)


def test_filter_bounds_share_delta() -> None:
    charges = {Gaussian(5.0): 20}
    alone = {name: Filter(KEPT * DELTA / 3, (name,)).epsilon(charges) for name in ("order-4", "order-8")}
    both = Filter(DELTA, ("gaussian", "order-4", "order-8"))
    mu = Gaussian(5.0 / math.sqrt(20))
    assert both.epsilon(charges) == pytest.approx(compute_epsilon([(mu, 1)], KEPT * DELTA / 3), rel=1e-9)
    assert both.epsilon(charges) < min(alone.values())
    # The plan has half, however many others there are.
    with_plan = Filter(DELTA, ("plan", "order-4", "order-8"), charges)
    assert with_plan.epsilon(charges) == compute_epsilon(charges.items(), KEPT * DELTA / 2)


def test_the_order_of_charges_and_how_they_are_written_do_not_matter() -> None:
    events = [(Gaussian(9.0), 3), (PoissonSampled(0.1, Gaussian(2.0)), 30), (Skellam(8.0, 1000, 10), 2)]
    rule = Filter(DELTA)
    found = {rule.epsilon(dict(order)) for order in permutations(events)}
    assert max(found) == pytest.approx(min(found), rel=1e-12)
    written = {SelfComposed(event, count): 1 for event, count in events}
    assert rule.epsilon(written) == pytest.approx(max(found), rel=1e-12)


def test_more_never_needs_less() -> None:
    rule = Filter(DELTA, plan={Gaussian(6.0): 10})
    needed = [
        rule.epsilon({Gaussian(6.0): n, RevealedSample(0.1, Gaussian(3.0)): m})
        for m in range(4)
        for n in range(0, 15)
    ]
    by_other = np.array(needed).reshape(4, 15)
    assert (np.diff(by_other, axis=0) >= 0).all()
    assert (np.diff(by_other, axis=1) >= 0).all()


def test_two_releases_of_one_sum_are_one_gaussian() -> None:
    both = CorrelatedReleases(Gaussian(6.0), Gaussian(8.0))
    rule = Filter(DELTA, ("gaussian",))
    assert rule.epsilon({both: 5}) == pytest.approx(rule.epsilon({Gaussian(4.8): 5}), rel=1e-12)


def test_every_kind_of_unit_must_fit() -> None:
    cheap, dear = Gaussian(50.0), PoissonSampled(0.2, Gaussian(1.5))
    rule = Filter(DELTA)
    assert rule.epsilon({WorstOf((cheap, dear)): 10}) == rule.epsilon({dear: 10}) > rule.epsilon({cheap: 10})


@pytest.mark.parametrize(
    ("filter_bounds", "charges"),
    [
        (("gaussian",), {PoissonSampled(0.1, Gaussian(2.0)): 1}),
        (("gaussian",), {Skellam(8.0, 1000, 10): 1}),
        (("order-4",), {Gaussian(0.0): 1}),
        (("plan",), {Gaussian(5.0): 1, Gaussian(6.0): 1}),
        (("plan", "gaussian", "order-4"), {NonPrivate("counts in clear"): 1}),
    ],
)
def test_what_no_bound_covers_needs_an_infinite_limit(filter_bounds, charges) -> None:
    assert math.isinf(Filter(DELTA, filter_bounds).epsilon(charges))
    assert not Filter(DELTA, filter_bounds).admits(charges, 1e6)


def test_nothing_costs_nothing() -> None:
    assert Filter(DELTA).epsilon({}) == Filter(DELTA).epsilon({Gaussian(5.0): 0}) == 0.0
    plan = {Gaussian(5.0): 20}
    rule = Filter(DELTA, ("plan",), plan)
    assert rule.epsilon({Composed(()): 3}) == 0.0
    assert rule.epsilon({**plan, Composed(()): 3}) == rule.epsilon(plan)


def test_groups_are_covered_at_whole_orders() -> None:
    grouped = {Group(4, PoissonSampled(0.05, Gaussian(6.0))): 10}
    assert math.isfinite(Filter(DELTA, ("order-2",)).epsilon(grouped))


def test_what_ciphertexts_disclose_has_a_part_of_delta_of_its_own() -> None:
    charges = {Gaussian(5.0): 20}
    rule = Filter(DELTA, ("gaussian",))
    needed = rule.epsilon(charges)
    most = 0.01 * DELTA / (1 + math.exp(needed))
    assert rule.epsilon(charges, disclosure=0.999 * most) == needed
    assert math.isinf(rule.epsilon(charges, disclosure=1.001 * most))
    assert rule.admits(charges, needed, 0.999 * most)
    # A larger limit makes the same disclosure dearer, since its part of δ grows with e^ε.
    assert not rule.admits(charges, needed + 1, 0.999 * most)


def test_conversion_is_never_negative() -> None:
    assert convert_rdp(64.0, 1e-9, 0.5) == 0.0


@pytest.mark.parametrize(
    "filter_bounds",
    [(), ("order-4", "order-4"), ("order-1",), ("order-2.5",), ("pld",), ("order-",), (4,), ("order-²",)],
)
def test_filter_bounds_are_checked(filter_bounds) -> None:
    with refused("argument.value") as caught:
        Filter(DELTA, filter_bounds)
    assert caught.value.field == "filter_bounds"


@pytest.mark.parametrize("delta", [math.nan, 0.0, 1.0, 2.0, -1.0])
def test_a_delta_that_is_none_is_refused(delta: float) -> None:
    with refused("argument.value"):
        Filter(delta)
