"""rPDP-FL and its baselines, on the path that silos run: noise, sampling rates, retirement, charges, the filter."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.rdp import rdp_privacy_accountant as library
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Gaussian, PoissonSampled, RevealedSample, SelfComposed
from silodp.accounting.views import View
from silodp.data.federation import SiloData
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import LocallyNoisedUpdate
from silodp.mechanisms.noise import Randomness
from silodp.methods import METHODS, FederationSize, LocalContext
from silodp.methods import dp_sgd as steps
from silodp.methods.dp_sgd import DpSgd
from silodp.training.sgd.records import RecordGradients
from silodp.training.task import Task
from silodp_budgets.rpdp.method import Rpdp, RpdpDropout, RpdpMinimum
from silodp_budgets.rpdp.renyi_filter import RpdpFilter
from silodp_budgets.two_stage import ORDERS
from silodp_experiments.uldp_baselines import UldpGroup
from support.examples import few_or_many
from support.oracles import judges_std, logistic_task, small_federation
from support.refusals import refused

RANDOM = Randomness.from_seed(0)
VIEW = View("released", 3)
SETTINGS = {
    "noise_multiplier": 4.0,
    "clip": 0.5,
    "local_steps": 5,
    "rounds": 4,
    "delta": 1e-3,
    "expected_batch_size": 8.0,
    "local_learning_rate": 0.5,
}
RPDP = Rpdp(**SETTINGS, largest_budget=3.0)
FILTER = RpdpFilter(**{k: v for k, v in SETTINGS.items() if k != "rounds"}, largest_budget=3.0)


def silo_of(n: int, budgets: np.ndarray, features: int = 4, seed: int = 0) -> SiloData:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, features)).astype(np.float32)
    return SiloData("one", x, (x.sum(1) > 0).astype(np.int64), np.arange(n), budgets)


def work_of(task: Task, silo: SiloData, **changes: object) -> LocalContext:
    work = LocalContext(
        task,
        torch.zeros(task.size),
        torch.from_numpy(silo.x),
        torch.from_numpy(silo.y),
        torch.from_numpy(silo.user),
        torch.ones(len(silo), dtype=torch.float64),
        FederationSize(3, len(silo)),
        RANDOM,
        budget=None if silo.budget is None else torch.from_numpy(silo.budget),
    )
    return replace(work, **changes)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The record numbers of every batch that DP-SGD takes gradients of."""
    batches: list[np.ndarray] = []
    plain = RecordGradients.of

    def spied(self: RecordGradients, params: torch.Tensor, batch: torch.Tensor) -> object:
        batches.append(batch.numpy().copy())
        return plain(self, params, batch)

    monkeypatch.setattr(RecordGradients, "of", spied)
    return batches


# --- noise and sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [RPDP, FILTER], ids=lambda method: method.name)
def test_every_step_adds_the_noise_that_is_charged(method):
    """With x = 0 the gradients of the weights vanish: what is left in the update is lr/L·σC·√τ of noise."""
    task, silo = logistic_task(1500), silo_of(40, np.full(40, 2.0), 1500)
    update = method.local_update(work_of(task, replace(silo, x=np.zeros_like(silo.x))))
    assert isinstance(update, LocallyNoisedUpdate)
    assert judges_std(update.value[:1500].numpy(), 0.5 / 8 * 4.0 * 0.5 * math.sqrt(5))


def test_a_step_that_draws_nobody_adds_its_noise_too():
    update = DpSgd.of(RPDP).train(work_of(logistic_task(1500), silo_of(40, np.full(40, 2.0), 1500)), 0.0)
    assert judges_std(update.value.numpy(), 0.5 / 8 * 4.0 * 0.5 * math.sqrt(5))


@pytest.mark.slow
def test_every_record_is_drawn_as_often_as_its_own_budget_allows(drawn):
    budgets = np.repeat([0.3, 1.0, 2.0, 9.0], 25)
    method = replace(RPDP, local_steps=1500, noise_multiplier=60.0)
    method.local_update(work_of(logistic_task(), silo_of(100, budgets)))
    counts = np.bincount(np.concatenate(drawn), minlength=100)
    q, _ = method.budgets.rates_and_retirement(budgets)
    assert len(drawn) == 1500
    assert (np.diff(q[::25]) > 0).sum() == 3, "four rates"
    for group, rate in enumerate(q[::25]):
        hits = int(counts[25 * group : 25 * group + 25].sum())
        assert stats.binomtest(hits, 1500 * 25, rate).pvalue > 1e-6
        assert stats.binomtest(hits, 1500 * 25, rate * 0.9).pvalue < 1e-6, "a test that can reject"
    single = [stats.binomtest(int(n), 1500, float(rate)).pvalue for n, rate in zip(counts, q, strict=True)]
    assert min(single) > 1e-6


def test_a_rate_is_that_of_the_budget_and_never_above_the_largest():
    budgets = np.array([0.2, 1.0, 3.0, 7.0])
    q, last = RPDP.budgets.rates_and_retirement(budgets)
    assert q[2] == q[3] == RPDP.budgets.most, "who asks for more than largest_budget is protected at it"
    assert (last >= RPDP.rounds).all()
    assert (last <= RPDP.budgets.last).all()
    for rate, budget in zip(q[:3], budgets[:3], strict=True):
        spent = true_epsilon(RPDP, rate, RPDP.rounds, planned=True)
        assert budget * 0.98 < spent <= budget, "met, never exceeded"


@pytest.mark.slow
def test_by_the_tighter_accountant_records_are_drawn_more_often_and_budgets_still_hold():
    method = replace(RPDP, accountant="pld", local_steps=12)
    budgets = np.array([0.5, 1.0, 3.0, 7.0])
    q, last = method.budgets.rates_and_retirement(budgets)
    assert (q > replace(method, accountant="rdp").budgets.rates_and_retirement(budgets)[0]).all()
    assert (q <= method.budgets.most).all()
    assert (last >= 4).all(), "a looser book does not cut short what the tighter one allows"
    for rate, budget in zip(q[:3], budgets[:3], strict=True):
        assert 0.99 * budget < compute_epsilon([(method.budgets.run.event(float(rate)), 4)], 1e-3) <= budget


def test_equal_budgets_and_one_record_per_person_are_uldp_group_with_one_record():
    """Identity: the same DP-SGD under the same streams, to the last bit."""
    task, silo = logistic_task(), silo_of(60, np.full(60, 1.0))
    method = replace(RPDP, local_steps=30)
    q = float(method.budgets.rates_and_retirement(np.array([1.0]))[0][0])
    group = UldpGroup(4.0, 0.5, 1, q, 30, 8.0, 0.5)
    work = work_of(task, silo)
    ours, theirs = method.local_update(work), group.local_update(work)
    assert isinstance(ours, LocallyNoisedUpdate)
    assert isinstance(theirs, LocallyNoisedUpdate)
    assert torch.equal(ours.value, theirs.value)
    assert ours.value.abs().max() > 0
    assert compute_epsilon([(method.dp_event(VIEW), 1)], 1e-3) >= compute_epsilon(
        [(group.dp_event(VIEW), 1)], 1e-3
    )


def test_adam_is_torchs_adam_on_the_noisy_mean_gradients():
    task = logistic_task()
    silo = silo_of(40, np.full(40, 3.0))
    mean, seen = torch.nn.Parameter(torch.zeros(task.size, dtype=torch.float64)), []
    make = steps._STEPS["adam"]

    def spied(rate: float) -> object:
        step = make(rate)
        return lambda total, divisor: (seen.append(total / divisor), step(total, divisor))[1]

    steps._STEPS["adam"] = spied  # type: ignore[assignment]
    try:
        update = replace(RPDP, local_steps=40, optimizer="adam").local_update(work_of(task, silo))
    finally:
        steps._STEPS["adam"] = make
    adam = torch.optim.Adam([mean], lr=0.5)
    for gradient in seen:
        mean.grad = gradient
        adam.step()
    assert len(seen) == 40
    assert isinstance(update, LocallyNoisedUpdate)
    torch.testing.assert_close(update.value, mean.detach(), rtol=1e-4, atol=1e-5)


def test_the_server_divides_by_the_expected_number_of_silos():
    assert replace(RPDP, client_sampling=0.8).server_scale(FederationSize(10, 5)) == pytest.approx(1 / 8)
    assert RPDP.server_scale(FederationSize(4, 5)) == FILTER.server_scale(FederationSize(4, 5)) == 0.25


def test_silos_toss_one_coin_a_round_and_an_empty_round_is_one():
    method = replace(RPDP, client_sampling=0.3)
    rounds = np.stack(
        [method.sample_silos(FederationSize(10, 5), RANDOM.stream("c", r)) for r in range(2000)]
    )
    assert stats.binomtest(int(rounds.sum()), rounds.size, 0.3).pvalue > 1e-6
    assert (~rounds.any(axis=1)).any(), "nobody joined, and nobody was drawn again"
    assert RPDP.sample_silos(FederationSize(10, 5), RANDOM.stream("c")) is None


# --- retirement and charges ---------------------------------------------------------------------------------


def test_records_retire_by_the_round_in_one_book_and_by_rounds_joined_in_the_other(drawn):
    silo = silo_of(40, np.repeat([0.5, 3.0], 20))
    planned = replace(RPDP, client_sampling=0.5, local_steps=60)
    realized = replace(planned, ledger="realized")
    last = planned.budgets.last
    assert last >= planned.rounds
    for round_, expected in ((0, True), (last - 1, True), (last, False), (last + 5, False)):
        drawn.clear()
        planned.local_update(work_of(logistic_task(), silo, round=round_))
        assert (sum(map(len, drawn)) > 0) == expected
    memory, used = None, []
    for round_ in range(realized.budgets.last + 3):  # it joins every other round
        drawn.clear()
        update = realized.local_update(work_of(logistic_task(), silo, round=2 * round_, memory=memory))
        memory = update.memory
        used.append(set(np.concatenate(drawn).tolist()))
    _, last = realized.budgets.rates_and_retirement(silo.budget)
    for record, rounds in enumerate(last):
        assert not any(record in batch for batch in used[rounds:])
    assert any(0 <= record < 20 for record in used[last[0] - 1])
    assert used[last[-1] - 1]
    assert not used[last[-1]]


def test_asked_again_for_a_round_a_silo_hands_out_what_it_had(drawn):
    """Secure aggregation asks again when others fail: a fresh update would be a second look at the records."""
    work = work_of(logistic_task(), silo_of(40, np.full(40, 2.0)), round=2)
    first = RPDP.local_update(work)
    drawn.clear()
    again = RPDP.local_update(replace(work, memory=first.memory, randomness=Randomness.from_seed(9)))
    assert torch.equal(first.value, again.value)
    assert not drawn
    drawn.clear()
    RPDP.local_update(replace(work, memory=first.memory, round=3))
    assert drawn, "the next round is another one"


@lru_cache(maxsize=1000)
def rho_of_a_step(q: float, sigma: float) -> np.ndarray:
    """dp_accounting's ρ(α) at the orders that the calibration looks at, up to 512."""
    one = library.RdpAccountant(tuple(ALPHA))
    one.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)))
    return np.asarray(one.rdp)


ALPHA = ORDERS[ORDERS <= 512]
LOOSE = 1.5e-2  # what the fewer orders of this oracle cost


def true_epsilon(method: Rpdp, q: float, rounds: float, planned: bool) -> float:
    """By dp_accounting and Lemma 6, not by the code that calibrates."""
    if q == 0 or rounds == 0:
        return 0.0
    rho = method.local_steps * rho_of_a_step(q, method.noise_multiplier)
    if planned and method.client_sampling < 1:
        exponent = (ALPHA - 1) * rho
        rho = np.logaddexp(math.log1p(-method.client_sampling), math.log(method.client_sampling) + exponent)
        rho = rho / (ALPHA - 1)
    return float(library.compute_epsilon(ALPHA, rounds * rho, method.delta)[0])


@few_or_many(
    4,
    12,
    sigma=st.floats(1.0, 30.0),
    tau=st.integers(1, 40),
    coin=st.sampled_from([0.2, 0.7, 1.0]),
    rounds=st.integers(1, 20),
    book=st.sampled_from(["planned", "realized"]),
    budgets=st.lists(st.floats(0.05, 12.0), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
)
@pytest.mark.slow
def test_no_record_spends_more_than_its_budget_however_the_silos_are_drawn(
    sigma, tau, coin, rounds, book, budgets, seed
):
    """Over more rounds than were planned for, with the coins as they fall."""
    method = replace(
        RPDP,
        noise_multiplier=sigma,
        local_steps=tau,
        client_sampling=coin,
        rounds=rounds,
        ledger=book,
        largest_budget=8.0,
    )
    budgets = np.array(budgets)
    q, last = method.budgets.rates_and_retirement(method.cap_budgets(budgets))
    population = FederationSize(1, 1)
    joined = [
        coin == 1 or bool(method.sample_silos(population, RANDOM.stream("c", seed, r))[0])  # type: ignore[index]
        for r in range(2 * rounds + 3)
    ]
    for rate, until, budget in zip(q, last, budgets, strict=True):
        used = len(joined) if book == "planned" else sum(joined)
        spent = true_epsilon(method, float(rate), min(used, int(until)), planned=book == "planned")
        assert spent <= budget * (1 + 1e-6)
    run = [(method.dp_event(replace(VIEW, round=r)), 1) for r in range(2 * rounds + 3)]
    whole = compute_epsilon(run, method.delta, "rdp")
    for rate, until in zip(q, last, strict=True):
        own = method.budgets.run.event(float(rate), book)
        assert compute_epsilon([(own, min(len(joined), int(until)))], method.delta, "rdp") <= whole * (
            1 + 1e-9
        )
    assert whole <= 8.0 * (1 + 1e-6), "the run's ε covers everyone, and ends at the largest budget"


def test_the_event_is_the_two_stage_one_of_the_largest_budget_for_everyone_who_looks():
    method = replace(RPDP, client_sampling=0.7)
    q = method.budgets.most
    steps_ = SelfComposed(PoissonSampled(q, Gaussian(4.0)), 5)
    for adversary in ("released", "server", "silo"):
        assert method.dp_event(View(adversary, 3, knows_sample=True)) == RevealedSample(0.7, steps_)
    assert replace(method, ledger="realized").dp_event(VIEW) == steps_
    charged = compute_epsilon([(method.dp_event(VIEW), 4)], 1e-3, "rdp")
    assert charged == pytest.approx(true_epsilon(method, q, 4, planned=True), rel=LOOSE)


@pytest.mark.parametrize("calibration", ["exact", "binary-search", "scf"])
def test_groups_tell_what_each_budget_was_charged_and_scf_where_it_overspent(calibration):
    method = replace(
        RPDP, noise_multiplier=6.0, local_steps=50, rounds=15, calibration=calibration, client_sampling=0.8
    )
    budgets = [np.array([0.3, 0.3, 1.0]), np.array([1.0, 5.0])]
    groups = method.budgets.report(VIEW, budgets, np.array([13, 9]), 15, 1e-3, "rdp")
    assert [(g["budget"], g["units"]) for g in groups] == [(0.3, 2), (1.0, 2), (5.0, 1)]
    for entry, joined in zip(groups, (13, 13, 9), strict=True):
        assert entry["planned"] == pytest.approx(
            true_epsilon(method, entry["q"], 15, planned=True), rel=LOOSE
        )
        assert entry["realized"] == pytest.approx(
            true_epsilon(method, entry["q"], joined, planned=False), rel=LOOSE
        )
        if calibration != "scf":
            assert 0.97 * min(entry["budget"], 3.0) <= entry["planned"] <= min(entry["budget"], 3.0)
    run = compute_epsilon([(method.dp_event(VIEW), 15)], 1e-3, "rdp")
    assert run == pytest.approx(max(g["planned"] for g in groups), rel=2e-3), (
        "the true cost, never the budget"
    )
    if calibration == "scf":
        over = [g["planned"] > g["budget"] for g in groups]
        assert [g["overspent"] for g in groups] == [
            g["units"] * wrong for g, wrong in zip(groups, over, strict=True)
        ]
        assert method.assumptions[-1].id == "fitted-curve"


@pytest.mark.slow
def test_many_budgets_are_reported_in_bins_that_hold_everyone():
    budgets = [np.linspace(0.1, 2, 300), np.linspace(2.1, 9, 100)]
    groups = RPDP.budgets.report(VIEW, budgets, np.array([4, 4]), 4, 1e-3, "rdp")
    assert len(groups) == 10
    assert sum(g["units"] for g in groups) == 400
    assert all(g["from"] < g["budget"] and g["planned"] <= g["budget"] for g in groups)


def test_a_budget_too_small_for_any_rate_is_drawn_never_and_seen_in_the_books(drawn):
    """ε = .1 is out of reach at σ = 1: counted by its group, named only in its silo's own book."""
    method = replace(RPDP, noise_multiplier=1.0, local_steps=50, rounds=15, delta=1e-9, largest_budget=9.0)
    budgets = np.array([1e-4, 9.0] * 20)
    update = method.local_update(work_of(logistic_task(), silo_of(40, budgets)))
    assert set(np.concatenate(drawn) % 2) == {1}
    small = method.budgets.report(VIEW, [budgets], np.array([15]), 15, 1e-9, "rdp")[0]
    assert (small["units"], small["q"], small["planned"]) == (20, 0.0, 0.0)
    book = method.budgets.record_accounts(budgets, 1, update.memory)
    assert (book["sampling"][::2] == 0).all()
    assert (book["spent"][::2] == 0).all()
    assert (book["spent"][1::2] > 0).all()


def test_the_silos_book_grows_with_the_rounds_of_its_ledger_up_to_the_budget():
    budgets = np.array([0.2, 1.0, 3.0, 9.0])
    planned = replace(RPDP, client_sampling=0.5)
    after = [planned.budgets.record_accounts(budgets, rounds, None)["spent"] for rounds in (0, 1, 4, 50)]
    assert (after[0] == 0).all()
    assert (after[1] > 0).all()
    assert (after[2] > after[1]).all()
    assert (after[3] <= np.minimum(budgets, 3.0)).all()
    assert (after[3] >= after[2]).all()
    q = planned.budgets.rates_and_retirement(budgets)[0]
    for rate, spent in zip(q, after[1], strict=True):
        assert spent == pytest.approx(true_epsilon(planned, float(rate), 1, planned=True), rel=1e-2)
    memory = np.array([7.0, 2.0, 0.0])  # last round 7, two joined
    realized = replace(planned, ledger="realized").budgets.record_accounts(budgets, 8, memory)["spent"]
    for rate, spent in zip(q, realized, strict=True):
        assert spent == pytest.approx(true_epsilon(planned, float(rate), 2, planned=False), rel=1e-2)


# --- baselines ----------------------------------------------------------------------------------------------


def test_minimum_protects_everyone_at_one_budget_and_dropout_those_above_a_threshold(drawn):
    budgets = np.repeat([0.3, 1.0, 2.0], 20)
    silo = silo_of(60, budgets)
    minimum, dropout = RpdpMinimum(**SETTINGS, budget=0.3), RpdpDropout(**SETTINGS, threshold=1.0)
    q = minimum.budgets.rates_and_retirement(minimum.cap_budgets(budgets))[0]
    assert len(set(q)) == 1
    assert q[0] == RPDP.budgets.rates_and_retirement(np.array([0.3]))[0][0]
    admitted = dropout.select_records(silo.user, 0, FederationSize(3, 60), RANDOM.stream("a"), budgets)
    np.testing.assert_array_equal(admitted, budgets >= 1.0)
    q = dropout.budgets.rates_and_retirement(dropout.cap_budgets(budgets[admitted]))[0]
    assert len(set(q)) == 1
    assert q[0] == RPDP.budgets.rates_and_retirement(np.array([1.0]))[0][0]
    groups = dropout.budgets.report(VIEW, [budgets], np.array([4]), 4, 1e-3, "rdp")
    assert [g["planned"] > 0 for g in groups] == [False, True, True]
    assert groups[1]["planned"] == groups[2]["planned"] <= 1.0


# --- the filter ---------------------------------------------------------------------------------------------


def test_the_filter_is_gradient_descent_on_those_who_can_still_pay():
    """Against a loop over records and steps, written from Feldman and Zrnic's Algorithm 3, with the same noise."""
    n, rounds = 30, 3
    silo = silo_of(n, np.random.default_rng(5).uniform(0.3, 3.0, n))
    silo = replace(silo, x=silo.x * np.geomspace(0.03, 1.0, n)[:, None].astype(np.float32))
    task, method = logistic_task(), replace(FILTER, local_steps=8, noise_multiplier=5.0, clip=1.0)
    limits = method.limits(silo.budget)
    memory, params = None, torch.zeros(task.size)
    spent, inside, state = np.zeros(n), np.ones(n, bool), np.zeros(5)
    x, y = np.hstack([silo.x, np.ones((n, 1))]).astype(np.float64), silo.y
    left = []
    for round_ in range(rounds):
        randomness = RANDOM.child("round", round_)
        update = method.local_update(
            work_of(task, silo, params=params, memory=memory, randomness=randomness, round=round_)
        )
        memory, params = update.memory, params + update.value.float()
        noise = randomness.stream("noise")
        for _ in range(8):
            total = np.zeros(5)
            for j in range(n):
                gradient = (1 / (1 + np.exp(-x[j] @ state)) - y[j]) * x[j]
                gradient *= min(1, 1.0 / np.linalg.norm(gradient))
                cost = gradient @ gradient / (2 * 5.0**2 * 1.0**2)
                inside[j] &= spent[j] + cost <= limits[j]
                if inside[j]:
                    spent[j] += cost
                    total += gradient
            state -= 0.5 / 8 * (total + 5.0 * 1.0 * noise.standard_normal(5))
        left.append(int(inside.sum()))
    torch.testing.assert_close(params.double(), torch.from_numpy(state), rtol=1e-3, atol=1e-4)
    book = method.budgets.record_accounts(silo.budget, 0, memory)
    np.testing.assert_allclose(book["spent"], spent, rtol=1e-4)
    np.testing.assert_array_equal(book["active"], inside)
    assert 0 < left[-1] < left[0], "some have left, some have not"


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31), sigma=st.floats(0.5, 5.0), rounds=st.integers(1, 4))
def test_no_record_of_the_filter_goes_beyond_its_limit(seed, sigma, rounds):
    rng = np.random.default_rng(seed)
    silo = silo_of(25, rng.uniform(0.05, 9.0, 25), seed=seed)
    method, memory = replace(FILTER, noise_multiplier=sigma, largest_budget=5.0), None
    task, params = logistic_task(), torch.zeros(5)
    for round_ in range(rounds):
        update = method.local_update(work_of(task, silo, params=params, memory=memory, round=round_))
        book, before = (
            method.budgets.record_accounts(silo.budget, 0, update.memory),
            method.budgets.record_accounts(silo.budget, 0, memory),
        )
        assert (book["spent"] <= method.limits(silo.budget)).all()
        assert (book["spent"] >= before["spent"]).all()
        assert (book["active"] <= before["active"]).all()
        memory, params = update.memory, params + update.value.float()
    room = compute_epsilon(
        [(Gaussian(float((2 * method.limits(np.array([5.0]))[0]) ** -0.5)), 1)], 1e-3, "pld"
    )
    assert room <= 5.0, "an R costs no more than the ε it stands for, by the other accountant"


def test_a_record_with_small_gradients_lasts_longer_and_a_broken_one_costs_nothing():
    n = 20
    silo = silo_of(n, np.full(n, 0.5))
    x = (
        silo.x
        / np.linalg.norm(silo.x, axis=1, keepdims=True)
        * np.where(np.arange(n) % 2, 0.01, 10.0)[:, None]
    )
    method, task = (
        replace(FILTER, local_steps=60, noise_multiplier=3.0),
        Task(torch.nn.Linear(4, 1, bias=False), logistic_task().loss, {}),
    )
    work = work_of(task, replace(silo, x=x.astype(np.float32)))
    update = method.local_update(work)
    active = method.budgets.record_accounts(silo.budget, 0, update.memory)["active"]
    assert (active == np.arange(n) % 2).all(), "only those with small gradients are still in"
    broken = work.x.clone()
    broken[0] = torch.inf
    update = method.local_update(replace(work, x=broken))
    assert update.refused == 60
    assert method.budgets.record_accounts(silo.budget, 0, update.memory)["spent"][0] == 0
    assert torch.isfinite(update.value).all()


def test_the_filters_charges_add_up_to_the_largest_budget_and_never_lag_behind():
    """After any number of rounds they cover min(R, rounds·τ/2σ²), which no record can exceed."""
    method = replace(FILTER, noise_multiplier=8.0)
    limit, spent = float(method.limits(np.array([3.0]))[0]), 0.0
    for round_ in range(300):
        event = method.dp_event(replace(VIEW, round=round_))
        assert isinstance(event, Gaussian)
        spent += 1 / (2 * event.noise_multiplier**2)
        assert spent == pytest.approx(min(limit, (round_ + 1) * 5 / (2 * 8.0**2)))
    assert method.dp_event(replace(VIEW, round=300)) == Gaussian(math.inf)
    whole = [(method.dp_event(replace(VIEW, round=r)), 1) for r in range(300)]
    assert compute_epsilon(whole, 1e-3) == pytest.approx(3.0, rel=1e-6)
    assert compute_epsilon(whole, 1e-3) <= 3.0
    assert compute_epsilon(whole, 1e-3, "pld") <= 3.0


def test_the_filter_tells_nothing_of_what_was_spent():
    entries = FILTER.budgets.report(VIEW, [np.array([0.5, 3.0])], np.array([4]), 4, 1e-3, "rdp")
    assert [entry["realized"] for entry in entries] == [None, None]
    assert entries[0]["planned"] <= 0.5 * 1.005


# --- what is refused ----------------------------------------------------------------------------------------

WHOLE = small_federation(records=300).with_budgets("three-levels")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"noise_multiplier": 0.0}, "without noise"),
        ({"clip": 0.0}, "clip"),
        ({"client_sampling": 0.0}, "client_sampling"),
        ({"client_sampling": 1.2}, "client_sampling"),
        ({"local_steps": 0}, "local_steps"),
        ({"local_steps": 2.5}, "local_steps"),
        ({"rounds": 0}, "rounds"),
        ({"delta": 0.0}, "delta"),
        ({"delta": "x"}, "delta"),
        ({"expected_batch_size": 0.0}, "expected_batch_size"),
        ({"local_learning_rate": -1.0}, "local_learning_rate"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"calibration": "guess"}, "calibration"),
        ({"accountant": "gdp"}, "accountant"),
        ({"ledger": "both"}, "ledger"),
        ({"server_learning_rate": 0.0}, "server_learning_rate"),
        ({"largest_budget": 0.0}, "largest_budget"),
        ({"largest_budget": math.inf}, "largest_budget"),
    ],
)
def test_constants_that_make_no_sense_are_refused_by_name(changes, word):
    with pytest.raises(SilodpError, match=word):
        replace(RPDP, **changes)


def test_the_baselines_refuse_their_own_constants():
    for make in (
        lambda: RpdpMinimum(**SETTINGS, budget=-1.0),
        lambda: RpdpDropout(**SETTINGS, threshold=math.nan),
        lambda: replace(FILTER, largest_budget=0.0),
        lambda: replace(FILTER, noise_multiplier=0.0),
        lambda: replace(FILTER, delta=2.0),
    ):
        with pytest.raises(SilodpError):
            make()


@pytest.mark.parametrize("method", [RPDP, FILTER], ids=lambda method: method.name)
def test_what_a_method_cannot_keep_is_refused_before_anything_runs(method):
    method.check(WHOLE.public(with_records=True), 4, 1e-3)
    with refused("data.budgets"):
        method.check(small_federation(records=300).public(with_records=True), 4, 1e-3)
    with pytest.raises(SilodpError, match=r"has \d+ records, fewer than expected_batch_size = 200"):
        replace(method, expected_batch_size=200).check(WHOLE.public(with_records=True), 4, 1e-3)
    with pytest.raises(SilodpError, match="delta = 1e-05 differs"):
        method.check(WHOLE.public(with_records=True), 4, 1e-5)
    with pytest.raises(SilodpError, match="needs a privacy budget for every record"):
        method.select_records(np.arange(3), 0, FederationSize(3, 3), RANDOM.stream("a"))
    with pytest.raises(SilodpError, match="needs a privacy budget for every record"):
        method.local_update(work_of(logistic_task(), replace(silo_of(40, np.ones(40)), budget=None)))


def test_noise_too_small_for_anyone_and_a_minimum_above_someone_are_refused():
    with pytest.raises(SilodpError, match=r"even the largest ε = 0\.001"):
        replace(RPDP, largest_budget=0.001, noise_multiplier=0.5).check(
            WHOLE.public(with_records=True), 4, 1e-3
        )
    with pytest.raises(
        SilodpError, match=r"210 of 300 records ask for less than budget = 0\.5: set budget = 0\.1"
    ):
        RpdpMinimum(**SETTINGS, budget=0.5).check(WHOLE.public(with_records=True), 4, 1e-3)


def test_dp_sgd_refuses_an_optimizer_it_does_not_know():
    with pytest.raises(SilodpError, match="optimizer"):
        DpSgd(1.0, 1.0, 1, 1.0, 0.1, "lion")  # type: ignore[arg-type]


def test_the_registry_knows_them_by_name():
    for name in ("rpdp", "rpdp-minimum", "rpdp-dropout", "rpdp-filter"):
        assert METHODS[name].__dataclass_fields__["name"].default == name


def test_the_filter_asked_again_for_a_round_hands_out_the_same_update_and_nobody_spends_twice():
    silo = silo_of(40, np.full(40, 3.0))
    work = work_of(logistic_task(), silo, round=2)
    first = FILTER.local_update(work)
    again = FILTER.local_update(replace(work, memory=first.memory, randomness=Randomness.from_seed(9)))
    assert torch.equal(again.value, first.value)
    np.testing.assert_array_equal(again.memory, first.memory)
    later = FILTER.local_update(replace(work, memory=first.memory, round=3))
    spent = [
        FILTER.budgets.record_accounts(silo.budget, 0, update.memory)["spent"].sum()
        for update in (first, later)
    ]
    assert spent[1] > spent[0] > 0


@pytest.mark.parametrize("whole", [3, np.int64(3), np.float32(3.0)])
def test_a_budget_that_is_a_whole_number_is_the_same_number(whole):
    for method in (RPDP, FILTER):
        other = replace(method, largest_budget=whole)
        assert other.dp_event(VIEW) == method.dp_event(VIEW)
        assert other.dp_event(VIEW) != Gaussian(math.inf)


def test_dropout_with_scf_counts_only_who_takes_part():
    budgets = np.repeat([0.1, 1.0, 5.0], (70, 20, 10))
    method = RpdpDropout(
        **{**SETTINGS, "noise_multiplier": 12.25, "local_steps": 50, "rounds": 15},
        threshold=1.0,
        calibration="scf",
    )
    groups = method.budgets.report(VIEW, [budgets], np.array([15]), 15, 1e-3, "rdp")
    assert [group["units"] for group in groups] == [70, 20, 10]
    assert groups[0]["overspent"] == groups[0]["planned"] == 0


def test_planned_costs_of_the_realized_book_cover_who_is_in_every_round():
    method = replace(
        RPDP, ledger="realized", client_sampling=0.3, rounds=15, noise_multiplier=6.0, local_steps=50
    )
    q, last = method.budgets.rates_and_retirement(np.array([1.0]))
    (group,) = method.budgets.report(VIEW, [np.ones(5)], np.array([int(last[0])]), 45, 1e-3, "rdp")
    event = RevealedSample(0.3, SelfComposed(PoissonSampled(float(q[0]), Gaussian(6.0)), 50))
    assert last[0] < 15
    assert group["planned"] > compute_epsilon([(event, int(last[0]))], 1e-3, "rdp")
    assert group["planned"] >= min(compute_epsilon([(event, 45)], 1e-3, "rdp"), group["realized"]) * (
        1 - 1e-9
    )


def test_what_is_told_of_a_budget_is_the_lesser_of_two_bounds():
    """Over very many steps the grid of loss distributions rounds more than Rényi orders lose."""
    method = replace(RPDP, noise_multiplier=12.25, local_steps=50, rounds=100_000)
    (group,) = method.budgets.report(VIEW, [np.full(3, 0.1)], np.array([100_000]), 100_000, 1e-3, "pld")
    assert 0 < group["planned"] <= 0.1


@pytest.mark.parametrize(
    ("client_sampling", "ledger", "counts_on_it"),
    [(0.5, "planned", True), (0.5, "realized", False), (1.0, "planned", False)],
)
def test_a_ledger_that_averages_over_who_joins_says_that_the_server_draws_them(
    client_sampling, ledger, counts_on_it
):
    """A server that asks one silo in every round spends more than that ledger and its limits see."""
    method = replace(RPDP, client_sampling=client_sampling, ledger=ledger)
    said = "silos-by-chance" in [one.id for one in method.assumptions]
    assert said is counts_on_it
