"""What a run costs persons with several ids, and whoever learns the samples: golden numbers and rules.

Source: docs/privacy.md, sections 3 and 10.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize, stats

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import (
    CorrelatedReleases,
    Gaussian,
    Group,
    NonPrivate,
    PoissonSampled,
    RevealedSample,
    SampledReplacement,
    SelfComposed,
    Skellam,
    replace_unit,
    reveal_samples,
    scale_shift,
)
from silodp.accounting.guarantee import Guarantee, format_epsilon
from silodp.accounting.ledger import Ledger
from silodp.accounting.views import View
from silodp.aggregators import Aggregator, Plain
from silodp.aggregators.masked import Masked
from silodp.methods import FederationSize, Method, UldpAvg
from silodp.runtime.guarantees import derive_guarantees
from silodp_experiments.uldp_baselines import Default, UldpGroup, UldpNaive
from silodp_private.lattice import Lattice
from support.specs import make_spec

AVG = UldpAvg(5.0, 1.0)
DELTA, ROUNDS, SILOS = 1e-5, 100, 4
LATTICE = Lattice(count_cap=3, attempts=200)


def guarantees(method: Method, aggregator: Aggregator, accountant: str = "rdp") -> dict[str, Guarantee]:
    """Of a hundred rounds that everyone answered."""
    names = tuple(f"silo{s}" for s in range(SILOS))
    population = FederationSize(SILOS, 100, aggregator.min_silos_for(SILOS))
    spec = make_spec("run", names, method, population, 100, delta=DELTA, aggregator=aggregator)
    ledger = Ledger(None, DELTA * aggregator.delta_share, accountant, run="run")
    events = spec.round_events()
    for round_ in range(ROUNDS):
        ledger.charge(round_, 0, events)
    derived = derive_guarantees(spec, ledger.to_counts())
    return {adversary: one.to_guarantee(lambda rounds: np.zeros(0)) for adversary, one in derived.items()}


def cases(guarantee: Guarantee) -> dict[str, float]:
    return {row["case"]: row["epsilon"] for row in guarantee.linkage}


def gaussian_epsilon(sigma: float) -> float:
    """ε of ROUNDS Gaussian releases by the closed form of Balle and Wang (2018), Theorem 8, without the package."""
    mu = math.sqrt(ROUNDS) / sigma

    def excess(epsilon: float) -> float:
        a, b = mu / 2, epsilon / mu
        return stats.norm.cdf(a - b) - math.exp(epsilon + stats.norm.logcdf(-a - b)) - DELTA

    return optimize.brentq(excess, 0, 200)


@pytest.mark.parametrize(
    ("adversary", "printed", "moved"),
    [
        ("released", 13.207, 5 / 4),
        ("server", 14.191, math.sqrt(7 / 4)),
        ("silo", 11.953, math.sqrt(3) / 2 * 4 / 3),
    ],
)
def test_golden_numbers_of_a_second_id_in_one_silo(adversary, printed, moved):
    """σ = 5, T = 100, S = 4, `plain`, nobody sampled: how far two ids in one silo, and one in the others, move.

    In the sum 2/4 + 3/4 of a clip; of the shares, each with a fourth of the noise, √(4 + 3) parts of a fourth, over
    √4 of them; of the three silos that a curious one does not know, 2/4 + 2/4, with three fourths of the noise.
    """
    found = cases(guarantees(AVG, Plain(), "pld")[adversary])["two ids in one silo"]
    assert float(format_epsilon(found)) == pytest.approx(printed, abs=1.5e-3)
    assert found == pytest.approx(printed, abs=6e-4)
    assert found == pytest.approx(gaussian_epsilon(5.0 / moved), rel=1e-4)


@pytest.mark.parametrize("case", ["two ids in every silo", "records filed under another person's id"])
def test_golden_numbers_of_what_moves_twice_as_far(case):
    found = guarantees(AVG, Plain(), "pld")
    for adversary in ("released", "server"):
        assert round(cases(found[adversary])[case], 3) == 24.382
    assert cases(found["released"])[case] == pytest.approx(gaussian_epsilon(5.0 / 2), rel=1e-4)
    assert cases(found["silo"])[case] == pytest.approx(gaussian_epsilon(5.0 / math.sqrt(3)), rel=1e-4)


def test_with_weights_by_records_every_id_weighs_as_much_as_a_person():
    found = cases(guarantees(replace(AVG, weighting="records"), LATTICE)["released"])
    assert list(found) == [
        "2 ids over all silos", "3 ids over all silos", "4 ids over all silos",
        "records filed under another person's id",
    ]  # fmt: skip
    values = list(found.values())
    assert values[:3] == sorted(values[:3])
    assert values[3] == pytest.approx(values[0], rel=1e-3)


def test_no_case_costs_less_than_a_person_who_is_recognized():
    for aggregator in (Plain(), Masked(), Masked(min_silos=3)):
        for q in (1.0, 0.1):
            for guarantee in guarantees(replace(AVG, user_sampling=q), aggregator).values():
                assert len(guarantee.linkage) == 3
                assert all(row["epsilon"] > guarantee.epsilon for row in guarantee.linkage)


def test_the_fewer_silos_may_be_in_a_sum_the_more_a_second_id_counts():
    """Where 3 of 4 silos suffice, a second id moves a sum by 4/3 of what one id does, and by 5/4 if all must answer."""
    for aggregator, factor in ((Masked(min_silos=3), 4 / 3), (Masked(), 5 / 4)):
        released = aggregator.views(AVG, SILOS)["released"]
        names = tuple(f"silo{s}" for s in range(SILOS))
        population = FederationSize(SILOS, 100, aggregator.min_silos_for(SILOS))
        spec = make_spec("run", names, AVG, population, 100, aggregator=aggregator)
        event = scale_shift(aggregator.event(spec, released), factor)
        found = cases(guarantees(AVG, aggregator)["released"])["two ids in one silo"]
        assert found == pytest.approx(compute_epsilon([(event, ROUNDS)], DELTA, "rdp"), rel=1e-9)


def test_where_persons_are_sampled_several_coins_are_an_estimate_and_one_is_not():
    """Renyi divergences are believed to be convex in what several coins move; an unproven number is said to be one."""
    found = guarantees(replace(AVG, user_sampling=0.1), Plain(), "pld")["server"]
    rows = {row["case"]: row for row in found.linkage}
    assert [row["estimate"] for row in rows.values()] == [True, True, False]
    moved = PoissonSampled(0.1, Gaussian(5.0 / 2))
    assert rows["two ids in every silo"]["epsilon"] == pytest.approx(
        compute_epsilon([(moved, ROUNDS)], DELTA, "rdp"), rel=1e-9
    )
    assert not any(row["estimate"] for row in guarantees(AVG, Plain())["server"].linkage)


@pytest.mark.parametrize("aggregator", [Plain(), Masked()], ids=lambda a: a.name)
def test_the_server_is_amplified_and_what_it_would_be_if_it_learned_the_sample_stands_beside(aggregator):
    """σ = 5, q = .1, T = 100. Without the secret of the silos it would be a known sample, as it was before."""
    method = replace(AVG, user_sampling=0.1)
    found = guarantees(method, aggregator)
    assert round(found["server"].epsilon, 3) == 0.835
    known = replace(aggregator.views(method, SILOS)["server"], knows_sample=True)
    names = tuple(f"silo{s}" for s in range(SILOS))
    spec = make_spec("run", names, method, FederationSize(SILOS, 100), 100, aggregator=aggregator)
    event = aggregator.event(spec, known)
    assert isinstance(event, RevealedSample)
    assert found["server"].sample_known == pytest.approx(
        compute_epsilon([(event, ROUNDS)], DELTA, "rdp"), rel=1e-9
    )
    if aggregator.name == "masked":
        assert format_epsilon(found["server"].sample_known) == "3.343"
    assert f"{format_epsilon(found['server'].sample_known)} if it learns" in str(found["server"])
    assert found["silo"].sample_known is None
    assert found["released"].sample_known is None


def test_where_nobody_is_sampled_or_the_server_draws_there_is_no_second_number():
    assert guarantees(AVG, Plain())["server"].sample_known is None
    server_draws = guarantees(replace(AVG, weighting="records", user_sampling=0.5), LATTICE)["server"]
    assert server_draws.epsilon is not None
    assert server_draws.sample_known is None


def test_group_charges_every_id_its_part_of_k():
    method = UldpGroup(5.0, 1.0, 8, 0.01, 10, 64.0, 0.1)
    step = PoissonSampled(0.01, Gaussian(5.0))
    for view in (View("released", 4), View("server", 4, sees_shares=True)):
        (case,) = method.linkage_cases(method.dp_event(view), view)
        assert case.event == SelfComposed(Group(4, step), 40)
        assert not case.is_estimate
    (row,) = guarantees(method, Plain())["released"].linkage
    assert row["epsilon"] > guarantees(method, Plain())["released"].epsilon


@pytest.mark.parametrize("method", [Default(), UldpNaive(5.0, 1.0)], ids=lambda m: m.name)
def test_methods_without_cases_state_none(method):
    assert all(guarantee.linkage == () for guarantee in guarantees(method, Plain()).values())


def test_no_noise_no_case():
    quiet = replace(AVG, noise_multiplier=0.0)
    view = View("released", 4)
    assert quiet.linkage_cases(NonPrivate("noise_multiplier is 0"), view) == ()


# --- events ---


def test_a_shift_is_scaled_and_a_unit_replaced_where_noise_is():
    inner = Gaussian(6.0)
    assert scale_shift(PoissonSampled(0.1, inner), 2) == PoissonSampled(0.1, Gaussian(3.0))
    assert scale_shift(RevealedSample(0.1, Skellam(6.0, 100, 5)), 3) == RevealedSample(
        0.1, Skellam(2.0, 100, 5)
    )
    both = CorrelatedReleases(Gaussian(6.0), Gaussian(4.0))
    assert scale_shift(both, 2) == CorrelatedReleases(Gaussian(3.0), Gaussian(2.0))
    assert replace_unit(inner) == Gaussian(3.0)
    assert replace_unit(PoissonSampled(0.1, inner)) == SampledReplacement(0.1, inner)
    assert replace_unit(RevealedSample(0.1, inner)) == RevealedSample(0.1, Gaussian(3.0))
    assert replace_unit(SampledReplacement(0.1, inner)) == SampledReplacement(0.1, Gaussian(3.0))
    assert replace_unit(SelfComposed(inner, 7)) == SelfComposed(Gaussian(3.0), 7)


def test_samples_are_revealed_wherever_they_are_inside():
    inner = Gaussian(6.0)
    assert reveal_samples(PoissonSampled(0.1, inner)) == RevealedSample(0.1, inner)
    assert reveal_samples(SampledReplacement(0.1, inner)) == RevealedSample(0.1, Gaussian(3.0))
    assert reveal_samples(SelfComposed(PoissonSampled(0.1, inner), 3)) == SelfComposed(
        RevealedSample(0.1, inner), 3
    )
    assert reveal_samples(RevealedSample(0.1, inner)) == RevealedSample(0.1, inner)
    charged = Counter([PoissonSampled(0.1, inner)] * 3)
    assert {reveal_samples(event): count for event, count in charged.items()} == {
        RevealedSample(0.1, inner): 3
    }
