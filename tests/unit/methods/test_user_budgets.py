"""Persons' own budgets: never exceeded, met up to the grid, judged by accountants that had no part in the search."""

import math
from dataclasses import dataclass, replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from dp_accounting.rdp import rdp_privacy_accountant as library
from hypothesis import strategies as st
from scipy import stats
from scipy.special import logsumexp

from silodp.accounting.events import Gaussian, NonPrivate, PoissonSampled, RevealedSample, Skellam
from silodp.accounting.views import View
from silodp.aggregators import Plain
from silodp.aggregators.masked import Masked
from silodp.aggregators.run_spec import RunSpec
from silodp.crypto.sampling import PersonCoins
from silodp.errors import SilodpError
from silodp.methods import FederationSize, UldpAvg, UldpSgd
from silodp.planning.plan import measure_noise
from silodp_budgets.budget_curve import MAX_GROUPS
from silodp_budgets.user_budgets import FullParticipationCost, UserBudgets
from silodp_private.lattice import Lattice
from silodp_private.paillier.aggregator import Paillier
from support.examples import few_or_many
from support.refusals import refused
from support.specs import make_spec

DELTA = 1e-5
SMALL_PAILLIER = Paillier(count_cap=3, key_bits=512, insecure_for_tests=True)


def own(by="sampling", rounds=20, largest=20.0, **more) -> UserBudgets:
    return UserBudgets(by, rounds, largest, mean_sampling=0.3 if by == "sampling" else None, **more)


def spec(method, budgets=(1.0,), aggregator=None, silos=3, size=100) -> RunSpec:
    aggregator = aggregator or Plain()
    population = FederationSize(silos, len(budgets), aggregator.min_silos_for(silos), tuple(budgets))
    names = tuple(f"silo{s}" for s in range(silos))
    return make_spec("", names, method, population, size, delta=DELTA, aggregator=aggregator).calibrate()


def parameters(known: RunSpec) -> np.ndarray:
    return known.method.budget_calibration.parameters(np.array(known.population.budgets))


# --- independent accountants ---


def gaussian_delta(epsilon: float, sigma: float) -> float:
    """Balle and Wang (2018), Theorem 8."""
    a, b = 1 / (2 * sigma), epsilon * sigma
    return float(stats.norm.cdf(a - b) - math.exp(epsilon + stats.norm.logcdf(-a - b)))


def known_coins_delta(epsilon: float, q: float, sigma: float, rounds: int) -> float:
    """Coins that the adversary sees: a public number of Gaussian releases, binomially distributed. Exact."""
    n = np.arange(1, rounds + 1)
    weights = stats.binom.pmf(n, rounds, q)
    return float(
        sum(w * gaussian_delta(epsilon, sigma / math.sqrt(k)) for w, k in zip(weights, n, strict=True))
    )


def least_sampled_epsilon(q: float, sigma: float, rounds: int) -> float:
    """A lower bound of the truth: every loss rounded down (dp_accounting), and what sampling with q ≤ 1e-9 costs."""
    pld = from_gaussian_mechanism(
        sigma, sampling_prob=q, pessimistic_estimate=False, value_discretization_interval=1e-3
    )
    return float(pld.self_compose(rounds).get_epsilon_for_delta(DELTA))


def rdp_sampled_epsilon(q: float, sigma: float, rounds: int) -> float:
    orders = sorted({*library.DEFAULT_RDP_ORDERS, *map(float, range(2, 257))})
    accountant = library.RdpAccountant(orders)
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, gaussian), rounds)
    return float(accountant.get_epsilon(DELTA))


@few_or_many(
    4,
    12,
    sigma=st.floats(1.0, 8.0),
    rounds=st.integers(1, 60),
    by=st.sampled_from(["sampling", "clip"]),
    adversary=st.sampled_from(["server", "released", "silo"]),
    accountant=st.sampled_from(["pld", "rdp"]),
    budgets=st.lists(st.floats(0.05, 15.0), min_size=1, max_size=4),
    largest=st.floats(8.0, 20.0),
)
@pytest.mark.slow
def test_nobody_is_charged_more_than_her_budget(sigma, rounds, by, adversary, accountant, budgets, largest):
    personal = own(by, rounds, largest, adversary=adversary, accountant=accountant)
    known = spec(UldpAvg(sigma, 1.0, personal=personal), budgets)
    noise = (
        sigma * math.sqrt(3 / 2) if adversary == "silo" else sigma
    )  # two of three silos, two thirds of the clip
    for budget, x in zip(budgets, parameters(known), strict=True):
        if x == 0:
            continue
        assert 0 < x <= 1
        limit = min(budget, largest)
        if by == "clip":
            assert gaussian_delta(limit, noise / x / math.sqrt(rounds)) <= DELTA * (1 + 1e-9)
        elif adversary in ("released", "server"):  # neither learns who was sampled
            assert least_sampled_epsilon(x, noise, rounds) <= limit
            assert accountant == "pld" or rdp_sampled_epsilon(x, noise, rounds) <= limit * (1 + 1e-9)
        else:
            assert known_coins_delta(limit, x, noise, rounds) <= DELTA * (1 + 1e-9)


@pytest.mark.parametrize("by", ["sampling", "clip"])
@pytest.mark.parametrize("adversary", ["server", "released", "silo"])
def test_budgets_are_met_to_a_part_in_a_thousand(by, adversary):
    """Few distinct ones; a step of one in a thousand further and a budget would be exceeded."""
    budgets = (1.0, 2.0, 3.0, 4.0)
    noise = 5.0 * math.sqrt(3 / 2) if adversary == "silo" else 5.0
    known = spec(UldpAvg(5.0, 1.0, personal=own(by, adversary=adversary)), budgets)
    for budget, x in zip(budgets, parameters(known), strict=True):
        if by == "clip":
            assert gaussian_delta(budget * 0.998, noise / x / math.sqrt(20)) > DELTA * (x < 1)
        elif adversary == "silo":
            assert known_coins_delta(budget * 0.998, x, noise, 20) > DELTA * (x < 1)
        else:
            assert x == 1 or least_sampled_epsilon(x * 1.01, 5.0, 20) > budget * 0.99
    assert (parameters(known) < 1).sum() >= 3, "else this judges nothing"


@pytest.mark.parametrize("by", ["sampling", "clip"])
def test_many_budgets_are_met_on_a_grid_of_one_percent(by):
    budgets = tuple(np.linspace(0.6, 3.0, 150))
    known = spec(UldpAvg(5.0, 1.0, personal=own(by, accountant="rdp", adversary="silo")), budgets)
    x = parameters(known)
    assert (np.diff(x) >= 0).all()
    cost = known.method.budget_calibration.wholes["silo"]
    for budget, parameter in zip(budgets[::10], x[::10], strict=True):
        spent = _rdp([cost.at(by, parameter)], 20)
        assert spent <= budget < _rdp([cost.at(by, parameter * 1.0101)], 20) + 1e-12


def _rdp(found, rounds):
    """By hand: known coins and Gaussian noise, or Skellam noise at integer orders; dp_accounting's conversion."""
    orders = np.arange(2, 400, dtype=float)
    if not any(
        isinstance(event.event if isinstance(event, RevealedSample) else event, Skellam) for event in found
    ):
        orders = np.union1d(orders, library.DEFAULT_RDP_ORDERS)
    total = np.zeros_like(orders)
    for event in found:
        q, inner = (
            (event.sampling_probability, event.event) if isinstance(event, RevealedSample) else (1.0, event)
        )
        rho = orders / (2 * inner.noise_multiplier**2)
        if isinstance(inner, Skellam):
            s, sigma = inner.units, inner.noise_multiplier
            near = min(math.sqrt(inner.dimension), s)
            rho = rho + np.minimum(
                (2 * orders - 1) / (4 * s**2 * sigma**4) + 3 * near / (2 * s**3 * sigma**4),
                3 * near / (2 * s * sigma**2),
            )
        mixed = [
            rho_ if q == 1 else logsumexp([0, (a - 1) * rho_], b=[1 - q, q]) / (a - 1)
            for a, rho_ in zip(orders, rho, strict=True)
        ]
        total += rounds * np.array(mixed)
    return float(library.compute_epsilon(orders, total, DELTA)[0])


# --- views ---


VIEWS = [
    View("released", 5),
    View("server", 5, sees_shares=True, knows_sample=True),
    View("server", 5, noise_sized_for=3, survivors=4, knows_sample=True),
    View("silo", 5, noise_sized_for=3, survivors=4),
    View("silo", 5, colluding=2, knows_sample=True),
]


@pytest.mark.parametrize("view", VIEWS, ids=lambda v: f"{v.adversary}{v.survivors}")
@pytest.mark.parametrize("weighting", ["uniform", "records"])
def test_the_person_with_the_largest_budget_is_what_the_method_with_her_q_or_clip_costs(view, weighting):
    base = UldpAvg(5.0, 1.0, weighting=weighting)
    for by in ("sampling", "clip"):
        method = replace(base, personal=own(by, largest=1.5, adversary="released"))
        method = spec(method, silos=5).method
        x = method.budget_calibration.largest
        assert 0 < x < 1
        alone = (
            replace(base, user_sampling=x)
            if by == "sampling"
            else replace(base, clip=x, noise_multiplier=5.0 / x)
        )
        found, expected = (
            method.budgets.event_for_largest_budget(method.dp_event(view), view),
            alone.dp_event(view),
        )
        assert type(found) is type(expected)
        assert found == expected or found.noise_multiplier == pytest.approx(
            expected.noise_multiplier, rel=1e-12
        )


def test_common_sampling_and_clips_of_ones_own_go_together():
    method = UldpAvg(5.0, 1.0, user_sampling=0.25, personal=own("clip", largest=0.5, adversary="released"))
    method = spec(method).method
    c = method.budget_calibration.largest
    costs = spec(method).round_events()
    assert costs["released"] == PoissonSampled(0.25, Gaussian(pytest.approx(5.0 / c)))
    assert costs["server"] == costs["released"]
    assert costs["silo"] == RevealedSample(0.25, Gaussian(pytest.approx(5.0 * math.sqrt(3 / 2) / c)))


@pytest.mark.parametrize("adversary", ["server", "silo"])
def test_however_many_silos_answer_budgets_hold(adversary):
    """With uniform weights more answers cost more: they move the sum further than their noise hides."""
    masked = Masked(min_silos=3)
    personal = own("clip", largest=1.0, adversary=adversary)
    known = spec(UldpAvg(5.0, 1.0, personal=personal), aggregator=masked, silos=6)
    spent = [_rdp([replace(known, aggregator=masked).round_events(n)[adversary]], 20) for n in range(3, 7)]
    assert max(spent) <= 1.0
    assert max(spent) == pytest.approx(1.0, rel=2e-3)
    assert spent[0] == min(spent)
    assert spent[-1] == max(spent)


def test_with_weights_by_records_the_fewest_answers_cost_most():
    fewest = replace(SMALL_PAILLIER, min_silos=3)
    personal = own("clip", largest=1.0, adversary="server")
    method = UldpAvg(5.0, 1.0, weighting="records", personal=personal)
    known = spec(method, aggregator=fewest, silos=6)
    spent = [_rdp([replace(known, aggregator=fewest).round_events(n)["server"]], 20) for n in range(3, 7)]
    assert spent[0] == max(spent) <= 1.0
    assert spent[0] == pytest.approx(1.0, rel=2e-3)


# --- integers ---


@pytest.mark.parametrize(
    "aggregator", [Lattice(count_cap=3, attempts=20), SMALL_PAILLIER], ids=lambda a: a.name
)
@pytest.mark.parametrize("part", [1.0, 0.3, 0.003])
def test_a_shorter_row_moves_integers_by_what_truncation_adds_besides(aggregator, part):
    """Of c·C/g + √d steps in all, √d stay however short the rows are (docs/protocols.md, sections 3 and 4)."""
    known = spec(UldpAvg(5.0, 1.0, weighting="records"), aggregator=aggregator)
    view = aggregator.views(known.method, 3)["released"]
    p = aggregator.parameters(known)
    shift = math.sqrt(known.size)
    clip = p.sensitivity - shift
    event = aggregator.event(known, view)
    found = FullParticipationCost.of(event, known.method.dp_event(view), view).at("clip", part)
    moved = part * clip + shift
    assert found.noise_multiplier == pytest.approx(5.0 * clip / moved, rel=1e-9)
    assert found.units <= moved < found.units + 2
    assert found.dimension == known.size


class SampleKnown:
    """An aggregator whose server learns who was sampled, as that of `lattice` does without hidden_sample."""

    def views(self, method, silos, survivors=None):
        views = super().views(method, silos, survivors)  # type: ignore[misc]
        return {**views, "server": replace(views["server"], knows_sample=True)}


@dataclass(frozen=True)
class PlainSampleKnown(SampleKnown, Plain):
    pass


@dataclass(frozen=True)
class MaskedSampleKnown(SampleKnown, Masked):
    pass


@pytest.mark.parametrize("by", ["sampling", "clip"])
@pytest.mark.parametrize(
    "aggregator",
    [MaskedSampleKnown(), Lattice(count_cap=3, attempts=20), SMALL_PAILLIER],
    ids=lambda a: a.name,
)
def test_integer_noise_costs_more_and_is_paid_by_smaller_rates_and_clips(by, aggregator):
    budgets = (0.7, 1.0, 2.0)
    weighting = "uniform" if aggregator.name == "masked" else "records"
    method = UldpAvg(5.0, 1.0, weighting=weighting, personal=own(by))
    known = spec(method, budgets, aggregator)
    at_delta = replace(known, delta=DELTA).delta * aggregator.delta_share
    plain = spec(replace(method, weighting="uniform"), budgets, PlainSampleKnown())
    for budget, x, real in zip(budgets, parameters(known), parameters(plain), strict=True):
        event = known.method.budget_calibration.wholes["server"].at(by, x)
        assert isinstance(event.event if by == "sampling" else event, Skellam)
        assert _rdp([event], 20) <= budget
        assert at_delta <= DELTA
        assert x < real


# --- what is public ---


def test_the_scale_is_of_a_public_constant():
    method = UldpAvg(5.0, 1.0, personal=own("sampling"))
    known = spec(method, (0.7, 3.0))
    assert known.method.server_scale(known.population) == 1 / (0.3 * 2 * 3)
    # Of two persons with one clip each, three in ten take part: noise of five clips in each of d numbers, once.
    ratio = 5 * math.sqrt(known.size / known.rounds) / (0.3 * 2)
    assert measure_noise(known) == pytest.approx(ratio)
    clips = spec(UldpAvg(5.0, 1.0, user_sampling=0.5, personal=own("clip")), (0.7, 3.0))
    assert clips.method.server_scale(clips.population) == 1 / (0.5 * 2 * 3)


def test_the_guarantee_says_who_learns_what():
    sampling, clip = (
        [one.text for one in UldpAvg(5.0, 1.0, personal=own(by)).assumptions] for by in ("sampling", "clip")
    )
    assert "budget is public" in sampling[0]
    assert "every round's sample is drawn with these rates" in sampling[0]
    assert "every silo clips their rows" in clip[0]
    assert "against 'server', over 20 rounds" in clip[1]
    assert UldpAvg(5.0, 1.0).assumptions == ()


def test_everyone_above_the_largest_budget_is_treated_as_it():
    known = spec(UldpAvg(5.0, 1.0, personal=own("clip", largest=1.0)), (0.5, 1.0, 1.5, 100.0))
    half, one, more, most = parameters(known)
    assert half < one == more == most == known.method.budget_calibration.largest


def test_what_was_calibrated_is_forgotten_with_the_noise_it_was_for():
    method = spec(UldpSgd(5.0, 1.0, personal=own("clip"))).method
    assert isinstance(method, UldpSgd)
    assert method.budget_calibration is not None
    changed = replace(method, noise_multiplier=1.0)
    assert changed.budget_calibration is None
    view = View("released", 3)
    assert changed.budgets.event_for_largest_budget(changed.dp_event(view), view) == Gaussian(
        pytest.approx(1.0)
    ), "of anyone, at most"
    with pytest.raises(SilodpError, match="sampling probabilities or clips"):
        replace(method, personal=own("sampling")).sampling_rates(FederationSize(3, 1, budgets=(1.0,)))


# --- what a guarantee shows ---


def test_groups_are_budgets_or_twentieths_of_the_persons():
    budgets = np.array([0.3] * 3 + [1.0] * 2 + [50.0] + [2.0])
    known = spec(UldpAvg(5.0, 1.0, personal=own("clip", rounds=4)), budgets)
    entries = known.method.budgets.report(View("server", 3), [budgets], np.array([]), 2, DELTA, "pld")
    assert [(e["budget"], e["units"]) for e in entries] == [(0.3, 3), (1.0, 2), (2.0, 1), (50.0, 1)]
    for entry in entries:
        assert entry["realized"] < entry["planned"] <= entry["budget"]
        assert ("underspends" in entry.get("note", "")) == (entry["planned"] < 0.99 * entry["budget"])
        planned = gaussian_delta(entry["planned"] * (1 - 1e-3), 5.0 / entry["clip"] / math.sqrt(4))
        assert planned > DELTA * (1 - 1e-3)
    many = np.linspace(0.5, 2.0, 200)
    known = spec(UldpAvg(5.0, 1.0, personal=own("clip", rounds=4)), many)
    entries = known.method.budgets.report(View("server", 3), [many], np.array([]), 4, DELTA, "pld")
    assert len(entries) == MAX_GROUPS
    assert sum(e["units"] for e in entries) == 200
    assert all(e["least"] < e["budget"] for e in entries)


def test_groups_of_another_adversary_say_that_the_budget_was_not_for_it():
    budgets = np.array([1.0, 2.0])
    known = spec(UldpAvg(5.0, 1.0, personal=own("sampling", adversary="released")), budgets)
    view = View("silo", 3, knows_sample=True)
    entries = known.method.budgets.report(view, [budgets], np.array([]), 20, DELTA, "pld")
    assert all(e["planned"] > e["budget"] and "'released'" in e["note"] for e in entries)


def test_who_has_too_small_a_budget_never_takes_part_and_the_guarantee_says_so():
    budgets = (1e-4, 1.0)
    known = spec(UldpAvg(5.0, 1.0, personal=own("sampling", adversary="silo")), budgets)
    assert parameters(known)[0] == 0
    rates = known.method.sampling_rates(known.population)
    np.testing.assert_array_equal(rates, parameters(known))
    coins = PersonCoins(bytes(32), "run", "", ["0", "1"])
    drawn = np.array([coins.toss(round_, rates) for round_ in range(200)])
    assert not drawn[:, 0].any()
    assert drawn[:, 1].any()
    entries = known.method.budgets.report(
        View("silo", 3, knows_sample=True), [np.array(budgets)], np.array([]), 20, DELTA, "pld"
    )
    assert entries[0]["planned"] == 0
    assert "never take part" in entries[0]["note"]


# --- refusals ---


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"by": "weights"}, "personal.by"),
        ({"adversary": "everyone"}, "personal.adversary"),
        ({"rounds": 0}, "personal.rounds"),
        ({"rounds": True}, "personal.rounds"),
        ({"largest_budget": math.nan}, "personal.largest_budget"),
        ({"largest_budget": 0.0}, "personal.largest_budget"),
        ({"mean_sampling": None}, "personal.mean_sampling"),
        ({"mean_sampling": 0.0}, "personal.mean_sampling"),
        ({"by": "clip"}, "personal.mean_sampling"),
        ({"accountant": "moments"}, "accountant"),
    ],
    ids=lambda w: str(w),
)
def test_constants_out_of_range_are_named(wrong, names):
    with pytest.raises(SilodpError, match=names):
        UserBudgets(**{"by": "sampling", "rounds": 5, "largest_budget": 1.0, "mean_sampling": 0.5, **wrong})


def test_what_cannot_be_met_is_refused():
    with pytest.raises(SilodpError, match="leave user_sampling out"):
        UldpAvg(5.0, 1.0, user_sampling=0.5, personal=own("sampling"))
    with pytest.raises(SilodpError, match="personal is a dict"):
        UldpAvg(5.0, 1.0, personal={"by": "clip"})
    with pytest.raises(SilodpError, match="counts disclosed"):
        spec(UldpAvg(5.0, 1.0, weighting="records", personal=own("clip")))
    with pytest.raises(SilodpError, match="noise_multiplier is 0"):
        spec(UldpAvg(0.0, 1.0, personal=own("clip")))
    with pytest.raises(SilodpError, match="met by no sampling rate"):
        spec(UldpAvg(1.0, 1.0, personal=own("sampling", largest=0.01, adversary="silo")))
    with pytest.raises(SilodpError, match=r"integer \(Skellam\)"):
        spec(UldpAvg(5.0, 1.0, personal=own("clip", accountant="pld")), aggregator=Masked())


@pytest.mark.parametrize(
    ("aggregator", "weighting", "drawn"),
    [
        (Plain(), "uniform", PoissonSampled),
        (Masked(), "uniform", PoissonSampled),
        (Lattice(count_cap=3, attempts=20), "records", RevealedSample),
        (SMALL_PAILLIER, "records", RevealedSample),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_rates_of_ones_own_are_charged_as_the_rate_of_one_to_whom_it_is_secret_or_not(
    aggregator, weighting, drawn
):
    method = UldpAvg(5.0, 1.0, weighting=weighting, personal=own("sampling", largest=2.0))
    aggregator.check(make_spec("", ("a", "b", "c"), method, FederationSize(3, 1), 9))
    known = spec(method, (1.5, 2.0), aggregator)
    least, most = parameters(known)
    assert 0 < least < most < 1
    cost = replace(known, aggregator=aggregator).round_events()["server"]
    assert isinstance(cost, drawn)
    assert cost.sampling_probability == known.method.budget_calibration.largest == most


def test_under_a_hidden_sample_everyone_has_the_same_rate_and_may_have_her_own_clip():
    hidden = Lattice(count_cap=3, attempts=20, hidden_sample=4)
    method = UldpAvg(5.0, 1.0, weighting="records")
    with refused("argument.conflict") as caught:
        hidden.check(
            make_spec("", ("a", "b", "c"), replace(method, personal=own("sampling")), FederationSize(3, 1), 9)
        )
    assert caught.value.field == "personal.by"
    clips = replace(method, user_sampling=0.5, personal=own("clip", largest=0.7))
    known = spec(clips, (0.2, 0.7), hidden)
    server = replace(known, aggregator=hidden).round_events()["server"]
    assert isinstance(server, PoissonSampled)
    assert server.sampling_probability == 0.5
    whole = known.method.budget_calibration.wholes["server"]
    assert whole.at("clip", known.method.budget_calibration.largest) == server
    assert server.event.noise_multiplier > 5.0


def test_where_nothing_is_promised_nothing_is_made_of_it():
    """Records in clear void the server's guarantee; those who only see the models keep theirs."""
    method = UldpAvg(5.0, 1.0, weighting="records", personal=own("clip", adversary="released"))
    known = spec(method)
    assert isinstance(replace(known, aggregator=Plain()).round_events()["server"], NonPrivate)
    entries = known.method.budgets.report(
        View("server", 3), [np.array([1.0])], np.array([]), 20, DELTA, "pld"
    )
    assert entries[0]["planned"] is None
