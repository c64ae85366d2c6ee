"""Sensitivity and noise of every method, on the path that runs use."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from silodp.aggregators.plain import make_noisy_share
from silodp.data.federation import Federation
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Share
from silodp.mechanisms.noise import Randomness
from silodp.methods import FederationSize, LocalContext, Method, UldpAvg, UldpSgd, roles
from silodp.training.losses import cox
from silodp.training.sgd.local import LocalTraining
from silodp.training.sgd.records import record_gradients
from silodp.training.task import Task
from silodp_experiments.uldp_baselines import Default, UldpGroup, UldpNaive, split_group
from support.oracles import judges_std, logistic_task, small_federation, std_is, without_user
from support.refusals import refused

TRAIN = LocalTraining(learning_rate=0.5, epochs=2, batch_size=3)
RANDOM = Randomness.from_seed(0)


def shares(
    method: Method,
    federation: Federation,
    task: Task,
    randomness: Randomness = RANDOM,
    sample: np.ndarray | None = None,
) -> list[Share]:
    """Every silo's share of one round from x = 0, as the federation computes it."""
    population = FederationSize(len(federation.silos), federation.users)
    counts = federation.counts() if method.needs_counts else None
    all_weights = method.user_weights(counts, population)
    result = []
    for s, silo in enumerate(federation.silos):
        weights = all_weights[s] * (np.ones(federation.users) if sample is None else sample)
        own = randomness.child(silo.name)
        admitted = method.select_records(silo.user, s, population, own.stream("admit"))
        work = LocalContext(
            task,
            torch.zeros(task.size, dtype=task.dtype),
            torch.from_numpy(silo.x[admitted]),
            torch.from_numpy(silo.y[admitted]),
            torch.from_numpy(silo.user[admitted]),
            torch.from_numpy(weights),
            population,
            own,
        )
        result.append(make_noisy_share(method.local_update(work), work.weights, own.stream("noise")))
    return result


def total(method: Method, federation: Federation, task: Task, **arguments: object) -> np.ndarray:
    return sum(share.value for share in shares(method, federation, task, **arguments)).numpy()  # type: ignore


@pytest.mark.parametrize("weighting", ["uniform", "present", "records", "primary_silo"])
@pytest.mark.parametrize("clip", [0.01, 1.0])
def test_emptying_a_person_moves_the_sum_of_uldp_avg_by_at_most_the_clip(weighting, clip):
    federation, task = small_federation(), logistic_task()
    method = UldpAvg(0.0, clip, TRAIN, weighting)
    # One order of batches for everyone's neighbor: full batches draw nothing.
    method = replace(method, local=replace(TRAIN, batch_size=None))
    whole = total(method, federation, task)
    moves = [
        np.linalg.norm(whole - total(method, without_user(federation, user), task))
        for user in range(federation.users)
    ]
    assert max(moves) <= clip * (1 + 1e-5)
    assert max(moves) > 0.3 * clip, "the bound is not vacuous"


@pytest.mark.parametrize("weighting", ["uniform", "present", "records", "primary_silo"])
def test_with_a_step_every_update_is_as_long_as_any(weighting):
    """Normalized updates: each person moves the sum by 1 at most, however short or long their update was."""
    federation, task = small_federation(), logistic_task()
    for rate in (1e-9, 1e9):
        local = replace(TRAIN, learning_rate=rate, batch_size=None)
        method = UldpAvg(0.0, local=local, weighting=weighting, step=1.0)
        whole = total(method, federation, task)
        moves = [
            np.linalg.norm(whole - total(method, without_user(federation, user), task))
            for user in range(federation.users)
        ]
        assert 0.3 < max(moves) <= 1 + 1e-5


def test_a_step_is_the_longest_move_of_a_round():
    """All persons in all silos pull one way: the model moves by the step, by whatever weights."""
    federation = small_federation(silos=3, users=4, features=1, records=12)
    everyone = np.arange(12, dtype=np.int64) % 4
    silos = tuple(
        replace(silo, x=np.ones((12, 1), np.float32), y=np.ones(12, np.int64), user=everyone)
        for silo in federation.silos
    )
    federation, task = replace(federation, silos=silos), logistic_task(features=1)
    population = FederationSize(3, 4)
    for weighting in ("uniform", "present", "records", "primary_silo"):
        for method in (
            UldpSgd(0.0, step=0.7, weighting=weighting),
            UldpAvg(0.0, None, TRAIN, weighting, step=0.7),
        ):
            moved = method.server_scale(population) * method.server_learning_rate
            assert np.linalg.norm(total(method, federation, task)) * moved == pytest.approx(0.7, rel=1e-5)
    papers = UldpAvg(0.0, 0.1, TRAIN, server_learning_rate=21.0)  # long updates: 21·0.1/3
    moved = papers.server_scale(population) * papers.server_learning_rate
    local = replace(TRAIN, learning_rate=10.0)
    assert np.linalg.norm(total(replace(papers, local=local), federation, task)) * moved == pytest.approx(
        0.7, rel=1e-5
    )
    halved = UldpAvg(0.0, step=0.7, user_sampling=0.5)
    assert halved.server_scale(population) == pytest.approx(0.7 / 2)


def test_a_step_stands_alone():
    assert UldpAvg(5.0, 0.5).step is None
    assert replace(UldpAvg(5.0, step=2.0), noise_multiplier=1.0).step == 2.0
    for wrong in ({"clip": 0.5}, {"server_learning_rate": 3.0}):
        with refused("argument.conflict") as error:
            UldpAvg(5.0, step=1.0, **wrong)
        assert error.value.field == "step"
    with refused("argument.value"):
        UldpAvg(5.0, step=-1.0)
    with refused("argument.conflict") as error:
        UldpAvg(5.0, server_learning_rate=3.0)
    assert error.value.field == "clip"


def test_the_text_of_a_method_without_a_step_is_that_of_older_versions():
    """Ledgers and guarantees hold it."""
    assert "step" not in repr(UldpAvg(5.0, 0.5))
    assert repr(UldpAvg(5.0, step=1.0)).endswith("step=1.0)")


def test_naive_moves_by_twice_what_the_paper_charges():
    """A person can turn every silo's clipped update around: 2C per silo, not C (docs/privacy.md, section 4, N)."""
    federation = small_federation(silos=2, users=2, features=1, records=4)
    x = np.array([[1.0], [30.0]], dtype=np.float32)
    silos = tuple(
        replace(silo, x=x, y=np.array([1, 0]), user=np.array([0, 1])) for silo in federation.silos
    )  # user 1's large record outweighs user 0's and points the other way
    federation = replace(federation, silos=silos)
    task = logistic_task(features=1)
    clip = 1e-3
    method = UldpNaive(0.0, clip, LocalTraining(learning_rate=1.0))
    moved = np.linalg.norm(total(method, federation, task) - total(method, without_user(federation, 1), task))
    assert moved > 1.2 * clip * 2, "beyond the paper's C per silo"
    assert moved <= 2 * clip * 2 * (1 + 1e-5), "within the 2C per silo that is charged"


def noise_of(method: Method, quiet: Method, federation: Federation, task: Task) -> list[np.ndarray]:
    """What was added: the noisy shares minus the same shares without noise."""
    noisy, clear = shares(method, federation, task), shares(quiet, federation, task)
    return [(a.value - b.value).numpy() for a, b in zip(noisy, clear, strict=True)]


@pytest.mark.parametrize(
    ("method", "std_per_silo"),
    [
        (UldpAvg(5.0, 0.2, TRAIN), 5.0 * 0.2 / np.sqrt(3)),
        (UldpAvg(5.0, 0.2, TRAIN, "records", user_sampling=0.5), 5.0 * 0.2 / np.sqrt(3)),
        (UldpSgd(5.0, 0.2), 5.0 * 0.2 / np.sqrt(3)),
        (UldpSgd(5.0, step=0.3), 5.0 / np.sqrt(3)),
        (UldpAvg(5.0, local=TRAIN, weighting="primary_silo", step=7.0), 5.0 / np.sqrt(3)),
        (UldpNaive(5.0, 0.2, TRAIN), 2 * 5.0 * 0.2 * np.sqrt(3)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_each_silo_adds_its_share_and_the_shares_add_up(method, std_per_silo):
    federation, task = small_federation(features=1500), logistic_task(1500)
    added = noise_of(method, replace(method, noise_multiplier=0.0), federation, task)
    for noise in added:
        assert judges_std(noise, std_per_silo)
    assert judges_std(sum(added), std_per_silo * np.sqrt(3))
    assert abs(np.corrcoef(added[0], added[1])[0, 1]) < 0.15, "silos' shares are independent"


def test_dp_sgd_inside_group_adds_its_noise_every_step():
    """Batches are drawn with γ so small that they are empty: what remains is lr/L·σC·√steps of noise."""
    federation, task = small_federation(features=1500), logistic_task(1500)
    method = UldpGroup(
        3.0,
        0.5,
        group_size=2,
        record_sampling=1e-9,
        local_steps=4,
        expected_batch_size=8,
        local_learning_rate=2.0,
    )
    for share in shares(method, federation, task):
        # float32 parameters take the noise in; the std is what DP-SGD's equation says
        assert judges_std(share.value.numpy(), 2.0 / 8 * 3.0 * 0.5 * np.sqrt(4))


def test_dp_sgd_moves_along_the_clipped_gradients():
    federation, task = small_federation(silos=1), logistic_task()
    silo = federation.silos[0]
    method = UldpGroup(0.0, 0.1, 1000, 1.0, local_steps=1, expected_batch_size=7.0, local_learning_rate=0.5)
    (share,) = shares(method, federation, task)
    zero = torch.zeros(task.size)
    gradients = torch.cat([g for _, g in record_gradients(task, zero, silo.x, silo.y)]).double()
    clipped = gradients * torch.clamp(0.1 / gradients.norm(dim=1, keepdim=True), max=1)
    torch.testing.assert_close(share.value, -0.5 / 7.0 * clipped.sum(0), rtol=1e-4, atol=1e-6)


def test_clipping_rows_of_a_cox_gradient_does_not_bound_a_record():
    """What the reference code does on TCGA-BRCA: Opacus' "per-sample gradients" of a Cox loss are each sample's part in
    the gradient of one joint loss, so emptying a record moves the others' parts too, and the clipped sum by far more
    than the clip its noise was sized for. Here uldp-group refuses such a loss.
    """
    clip, n = 1.0, 50
    x = torch.full((n, 1), 1e4)  # every part is clipped
    time = torch.arange(n, dtype=torch.float32)
    event = torch.zeros(n)
    event[0] = 1  # one early event; everyone else was at risk then, and is in nobody else's sum

    def clipped_sum(keep: torch.Tensor) -> torch.Tensor:
        score = torch.zeros(int(keep.sum()), requires_grad=True)
        targets = torch.stack([event[keep], time[keep]], 1)
        loss = cox().function(score, targets, torch.ones(len(score)))
        (slope,) = torch.autograd.grad(loss, score)
        return (torch.clamp((slope[:, None] * x[keep]), -clip, clip)).sum()

    everyone = torch.ones(n, dtype=torch.bool)
    without = everyone.clone()
    without[0] = False
    assert abs(clipped_sum(everyone) - clipped_sum(without)) > 40 * clip


def test_one_silo_and_one_record_per_person_is_record_level_dp_sgd():
    """Identity: then uldp-sgd is a step of DP-SGD with C per record."""
    federation = small_federation(silos=1, users=60)
    silo = replace(federation.silos[0], user=np.arange(60))
    federation, task = replace(federation, silos=(silo,)), logistic_task()
    gradients = torch.cat(
        [g for _, g in record_gradients(task, torch.zeros(task.size), silo.x, silo.y)]
    ).double()
    clipped = gradients * torch.clamp(0.3 / gradients.norm(dim=1, keepdim=True), max=1)
    np.testing.assert_allclose(
        total(UldpSgd(0.0, 0.3), federation, task), -clipped.sum(0).numpy(), rtol=1e-4, atol=1e-5
    )


def test_uldp_sgd_is_uldp_avg_with_one_full_step_of_unit_size():
    federation, task = small_federation(), logistic_task()
    avg = UldpAvg(0.0, 0.3, LocalTraining(learning_rate=1.0, epochs=1, batch_size=None))
    np.testing.assert_array_equal(total(UldpSgd(0.0, 0.3), federation, task), total(avg, federation, task))


def test_those_not_sampled_leave_no_trace():
    federation, task = small_federation(), logistic_task()
    method = UldpAvg(0.0, 0.3, TRAIN, "records", user_sampling=0.5)
    sample = np.ones(federation.users, dtype=bool)
    sample[3] = False
    method = replace(method, local=replace(TRAIN, batch_size=None))
    # Emptied with the others' weights unchanged: person 3's records do not enter anyone else's weight.
    np.testing.assert_allclose(
        total(method, federation, task, sample=sample),
        total(method, without_user(federation, 3), task, sample=sample),
        rtol=1e-6,
    )
    nobody = total(method, federation, task, sample=np.zeros(federation.users, dtype=bool))
    assert (nobody == 0).all()


def test_server_scales():
    population = FederationSize(silos=5, users=100)
    assert Default().server_scale(population) == 1 / 5
    assert UldpNaive(1, 1).server_scale(population) == 1 / 5
    assert UldpAvg(1, 1).server_scale(population) == 1 / 500
    assert UldpAvg(1, 1, user_sampling=0.1).server_scale(population) == pytest.approx(1 / 50)


@given(st.integers(1, 8), st.integers(1, 30), st.integers(0, 2**31))
def test_weights_add_to_at_most_one(silos, users, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 50, size=(silos, users)) * (rng.random((silos, users)) < 0.5)
    population = FederationSize(silos, users)
    uniform = UldpAvg(1.0, 1.0).user_weights(None, population)
    present = UldpAvg(1.0, 1.0, weighting="present").user_weights(counts, population)
    primary = UldpAvg(1.0, 1.0, weighting="primary_silo").user_weights(counts, population)
    for weights in (uniform, present, primary, roles.weigh_by_records(counts)):
        assert weights.shape == (silos, users)
        assert weights.sum(axis=0).max() <= 1 + 1e-15
        assert (weights >= 0).all()
    assert (uniform == roles.uniform_weight(silos)).all()
    assert roles.uniform_weight(silos) == pytest.approx(1 / silos, rel=1e-15)
    totals = counts.sum(axis=0)
    for weights in (present, primary, roles.weigh_by_records(counts)):
        np.testing.assert_allclose(weights.sum(axis=0), totals > 0)
        assert (weights[counts == 0] == 0).all()
    assert (present == (counts > 0) / np.maximum((counts > 0).sum(axis=0), 1)).all()
    for user in np.flatnonzero(totals):
        assert primary[:, user].tolist().index(1.0) == counts[:, user].tolist().index(counts[:, user].max())


def test_a_silo_checks_the_weights_it_is_given():
    """Weights where it has no records, above 1, or parts of a person who counts in their primary silo only."""
    counts = np.array([3, 0, 1])
    for weighting, sent, problem in [
        ("present", [0.5, 0.0, 1.0], None),
        ("present", [0.5, 0.1, 1.0], "no record"),
        ("present", [1.5, 0.0, 1.0], "between 0 and 1"),
        ("primary_silo", [1.0, 0.0, 0.0], None),
        ("primary_silo", [0.5, 0.0, 1.0], "neither"),
        ("primary_silo", [1.0, 1.0, 1.0], "no record"),
    ]:
        found = UldpAvg(1.0, weighting=weighting).check_weights(np.array(sent), counts, FederationSize(2, 3))
        assert (found is None) == (problem is None)
        assert problem is None or problem in str(found)


def test_where_only_presence_matters_a_silo_says_no_counts():
    counts = np.array([3, 0, 1])
    assert UldpAvg(1.0, weighting="present").count_for_weights(counts).tolist() == [1, 0, 1]
    for weighting in ("records", "primary_silo"):
        assert UldpAvg(1.0, weighting=weighting).count_for_weights(counts).tolist() == [3, 0, 1]


def test_weights_above_one_are_refused():
    with pytest.raises(SilodpError, match="add to"):
        roles.validate_weights(np.full((3, 2), 0.5))


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**31))
def test_group_admits_at_most_k_records_of_everyone(k, seed):
    federation = small_federation(records=80, users=6, seed=seed)
    method = UldpGroup(1.0, 1.0, k, 0.5, 1, 1.0, 0.1)
    parts = split_group(k, 3)
    kept = np.zeros((3, 6), dtype=np.int64)
    for s, silo in enumerate(federation.silos):
        mask = method.select_records(silo.user, s, FederationSize(3, 6), RANDOM.stream("admit", s, seed))
        kept[s] = np.bincount(silo.user[mask], minlength=6)
    # Each silo uses as many as it may, whatever the others hold.
    np.testing.assert_array_equal(kept, np.minimum(federation.counts(), np.array(parts)[:, None]))
    assert kept.sum(axis=0).max() <= k


@given(st.integers(1, 4096), st.integers(1, 200))
def test_the_parts_of_k_add_to_k_and_differ_by_one_at_most(k, silos):
    parts = split_group(k, silos)
    assert (len(parts), sum(parts)) == (silos, k)
    assert parts[0] - parts[-1] <= 1
    assert list(parts) == sorted(parts, reverse=True)


def test_group_admits_every_record_of_a_silo_equally_often():
    """k_s of n[s,u], uniformly: no position in the silo's table is favored, and nobody else's records matter."""
    method = UldpGroup(1.0, 1.0, 3, 0.5, 1, 1.0, 0.1)
    user = np.array([0, 1, 0, 0, 1, 0, 0, 0])
    trials = 4000
    for place, part in ((0, 2), (1, 1)):
        hits = np.zeros(8)
        for trial in range(trials):
            stream = RANDOM.stream("admit", place, trial)
            hits += method.select_records(user, place, FederationSize(2, 2), stream)
        for count, person in ((6, 0), (2, 1)):
            rate = min(part / count, 1)
            error = 5 * np.sqrt(rate * (1 - rate) / trials)
            assert abs(hits[user == person] / trials - rate).max() <= error


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: UldpAvg(-1.0, 1.0), "noise_multiplier"),
        (lambda: UldpAvg(float("nan"), 1.0), "noise_multiplier"),
        (lambda: UldpAvg(1.0, 0.0), "clip"),
        (lambda: UldpAvg(1.0, float("inf")), "clip"),
        (lambda: UldpAvg(1.0, 1.0, user_sampling=0.0), "user_sampling"),
        (lambda: UldpAvg(1.0, 1.0, user_sampling=1.5), "user_sampling"),
        (lambda: UldpAvg(1.0, 1.0, weighting="best"), "weighting"),  # type: ignore[arg-type]
        (lambda: UldpAvg(1.0, 1.0, server_learning_rate=0.0), "server_learning_rate"),
        (lambda: UldpAvg(1.0, 1.0, server_momentum=1.0), "server_momentum"),
        (lambda: UldpNaive(1.0, -2.0), "clip"),
        (lambda: UldpGroup(1.0, 1.0, 0, 0.5, 1, 1.0, 0.1), "group_size"),
        (lambda: UldpGroup(1.0, 1.0, 2, 0.0, 1, 1.0, 0.1), "record_sampling"),
        (lambda: UldpGroup(1.0, 1.0, 2, 0.5, 0, 1.0, 0.1), "local_steps"),
        (lambda: UldpGroup(1.0, 1.0, 2, 0.5, 1, 0.0, 0.1), "expected_batch_size"),
    ],
)
def test_constants_that_make_no_sense_are_refused_by_name(make, word):
    with pytest.raises(SilodpError, match=word):
        make()


GROUP = {
    "noise_multiplier": 1.0,
    "clip": 1.0,
    "group_size": 2,
    "record_sampling": 0.5,
    "local_steps": 1,
    "expected_batch_size": 1.0,
    "local_learning_rate": 0.1,
}
AVG = {"noise_multiplier": 1.0, "clip": 1.0, "user_sampling": 0.5}


@pytest.mark.parametrize("wrong", ["a", None, True, [1.0], np.ones((30, 30))], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize(
    ("maker", "fields", "name"),
    [
        *[(UldpGroup, GROUP, name) for name in GROUP],
        *[(UldpAvg, AVG, name) for name in AVG],
        (UldpNaive, {"noise_multiplier": 1.0, "clip": 1.0}, "clip"),
        (Default, {}, "server_learning_rate"),
        (Default, {}, "server_momentum"),
    ],
)
def test_what_is_no_number_is_refused_in_one_sentence(maker, fields, name, wrong):
    maker(**fields)
    if wrong is None and (maker, name) == (UldpAvg, "clip"):
        return  # then it is 1, with a step
    with refused("argument.type", "argument.value") as error:
        maker(**{**fields, name: wrong})
    assert error.value.field == name


@pytest.mark.parametrize("number", [2.0, 2.5, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["group_size", "local_steps"])
def test_counts_of_group_are_whole_numbers(name, number):
    """2.0 would get through to a loop over 2.0 steps."""
    with pytest.raises(SilodpError, match=f"{name} = .*: set a whole number"):
        UldpGroup(**{**GROUP, name: number})


def test_numbers_of_numpy_are_numbers():
    method = UldpAvg(np.float32(1.0), np.float64(2.0), user_sampling=np.float64(0.5))
    assert (method.noise_multiplier, method.clip) == (1.0, 2.0)
    assert UldpGroup(**{**GROUP, "group_size": np.int64(3)}).group_size == 3


@pytest.mark.parametrize("wrong", [0.1, None, {"learning_rate": 0.1}])
@pytest.mark.parametrize(
    "maker", [Default, lambda **more: UldpNaive(1.0, 1.0, **more), lambda **more: UldpAvg(1.0, 1.0, **more)]
)
def test_local_training_is_local_training(maker, wrong):
    with pytest.raises(SilodpError, match=f"^local is a {type(wrong).__name__}: set a LocalTraining"):
        maker(local=wrong)


def test_the_std_oracle_can_reject():
    draws = np.random.default_rng(0).normal(size=1000)
    assert std_is(draws, 1.0)
    assert not std_is(draws, 2 / 3)
    assert not std_is(draws, 1.5)


def test_weights_that_add_to_a_little_more_than_one_are_scaled_down():
    weights = np.full((2, 3), 0.5) + 2.5e-10
    assert (weights.sum(axis=0) > 1).all()
    assert (roles.validate_weights(weights).sum(axis=0) <= 1).all()
