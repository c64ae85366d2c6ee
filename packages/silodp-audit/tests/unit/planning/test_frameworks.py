"""Settings of other frameworks: each bound against numbers that were computed in another way.

What the frameworks state is compared with the installed packages in tests/end_to_end/test_installed_frameworks.py;
Opacus is installed here (test_stated.py).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from silodp.accounting.guarantee import format_epsilon
from silodp.errors import SilodpError
from silodp_audit.frameworks import FRAMEWORKS, Finding, check_framework
from silodp_audit.frameworks.base import RELEASED, SERVER
from support.commands import Silodp, assert_sentence
from support.refusals import refused

FLIP = {"clipping_norm": 1.0, "sensitivity": 1e-4, "epsilon": 10.0, "delta": 1e-5, "rounds": 1}
CENTRAL = {"noise_multiplier": 1.0, "clipping_norm": 10.0, "num_sampled_clients": 20, "rounds": 10}
INSTANCE = {"client_noise_multiplier": 1.0, "batch_size": 100, "local_epochs": 1}
SERVER_NOISE = {"server_noise_multiplier": 1.0, "n_server_rounds": 20}
DP_SGD = {"noise_multiplier": 1.0, "batch_size": 64, "dataset_size": 6400, "epochs": 10}


def check(framework: str, values=(), delta=None, **more) -> Finding:
    merged = {**dict(values), **more}
    return check_framework(framework, [f"{key}={json.dumps(value)}" for key, value in merged.items()], delta)


def epsilons(finding: Finding, adversary: str = SERVER) -> dict[str, float | None]:
    return {bound.unit: bound.epsilon for bound in finding.bounds if bound.adversary == adversary}


def gaussian_delta(epsilon: float, sigma: float) -> float:
    return norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * norm.cdf(
        -0.5 / sigma - epsilon * sigma
    )


# --- Flower ---


def test_noise_for_a_free_sensitivity_protects_nobody():
    found = check("flower", FLIP)
    units = epsilons(found)
    std = 1e-4 * math.sqrt(2 * math.log(1.25e5)) / 10
    assert std == pytest.approx(4.8448e-5, rel=1e-4)
    # With probability 1 - δ the loss exceeds no more than its mean and 4.26 standard deviations of it.
    for unit, sigma in {"a client": std, "a record": std / 2, "a person with 4 records": std / 4}.items():
        mean = 0.5 / sigma**2
        assert mean < units[unit] <= mean + 4.265 / sigma
    assert units["a client"] == pytest.approx(2.13e8, rel=0.01)
    assert found.stated == 10.0
    assert len(found.differences) == 3


def test_the_formula_of_the_noise_is_wrong_for_a_large_epsilon_even_with_the_right_sensitivity():
    found = check("flower", FLIP, sensitivity=1.0)
    epsilon = epsilons(found)["a client"]
    sigma = math.sqrt(2 * math.log(1.25e5)) / 10
    assert epsilon > 10
    assert gaussian_delta(epsilon, sigma) == pytest.approx(1e-5, rel=1e-6)
    assert gaussian_delta(10.0, sigma) > 1.5e-5
    small = check("flower", FLIP, sensitivity=2.0, epsilon=0.5)
    assert epsilons(small)["a record"] < 0.5
    assert small.differences == ()
    assert check("flower", FLIP, sensitivity=2.0, epsilon=0.5, rounds=2).differences


def test_rounds_of_local_noise_add_up():
    one, four = (epsilons(check("flower", FLIP, sensitivity=20.0, rounds=n)) for n in (1, 4))
    twice = epsilons(check("flower", FLIP, sensitivity=10.0, rounds=1))
    for unit in one:
        assert four[unit] == pytest.approx(twice[unit], rel=1e-9)
        assert four[unit] > one[unit]


def clipped(update: np.ndarray, clip: float) -> np.ndarray:
    return update * min(1.0, clip / np.linalg.norm(update))


def test_a_record_moves_a_clipped_update_by_twice_the_clip():
    with_record, without = np.array([100.0, 0.0]), np.array([-100.0, 0.0])
    assert np.linalg.norm(clipped(with_record, 1.0) - clipped(without, 1.0)) == 2.0
    units = epsilons(check("flower", CENTRAL, equal_weights=True), RELEASED)
    assert gaussian_delta(units["a client"], 1 / math.sqrt(10)) == pytest.approx(1e-5, rel=1e-6)
    assert gaussian_delta(units["a record"], 0.5 / math.sqrt(10)) == pytest.approx(1e-5, rel=1e-6)
    assert gaussian_delta(units["a person with 2 records"], 0.25 / math.sqrt(10)) == pytest.approx(
        1e-5, rel=1e-6
    )


def test_the_weights_of_fedavg_let_one_client_move_the_average_by_twice_the_clip():
    clients, clip = 20, 10.0
    updates = np.zeros((clients, 2))
    updates[0, 0], updates[1:, 0] = clip, -clip
    averages = [np.average(updates, axis=0, weights=[w, *[1] * (clients - 1)]) for w in (10**6, 0)]
    moved = np.linalg.norm(averages[0] - averages[1])
    assert 1.99 * clip < moved <= 2 * clip
    assert moved > 39 * clip / clients  # and the noise is for clip / clients
    units = epsilons(check("flower", CENTRAL), RELEASED)
    expected = 1.0 / (2 * clients) / math.sqrt(10)
    assert units["a client"] == pytest.approx(0.5 / expected**2 + 4.26489 / expected, rel=1e-3)
    assert len(set(units.values())) == 1


def test_central_noise_promises_nothing_against_the_server():
    for found in (check("flower", CENTRAL), check("fl4health", SERVER_NOISE)):
        assert set(epsilons(found, SERVER).values()) == {None}
    found = check("flower", CENTRAL, equal_weights=True, rounds=1)
    assert found.stated == pytest.approx(4.728507, abs=1e-6)  # flwr 1.42.0
    assert epsilons(found, RELEASED)["a client"] == pytest.approx(4.378, abs=0.001)
    assert check("flower", CENTRAL).stated is None  # its accountant refuses unequal weights


def test_sampling_of_clients_counts_as_seen():
    """A bound by Poisson sampling would be smaller; but who knows the sample can tell the rounds of a client."""
    all_, some = (
        epsilons(check("flower", CENTRAL, equal_weights=True, **more), RELEASED)
        for more in ({}, {"num_clients": 40})
    )
    assert some["a client"] < all_["a client"]
    # Ten rounds in which a client is drawn with probability 1/2: in all ten with 2⁻¹⁰ > δ.
    assert (
        some["a client"]
        > epsilons(check("flower", CENTRAL, equal_weights=True, rounds=5), RELEASED)["a client"]
    )
    assert some["a person with 2 records"] == all_["a person with 2 records"]


def test_adaptive_clipping_has_no_guarantee():
    flower = check(
        "flower", noise_multiplier=0.5, num_sampled_clients=20, initial_clipping_norm=0.1, rounds=1
    )
    fl4health = check("fl4health", SERVER_NOISE, adaptive_clipping=True)
    weighted = check("fl4health", SERVER_NOISE, weighted_averaging=True)
    for found in (flower, fl4health, weighted):
        assert all(bound.epsilon is None and bound.reason for bound in found.bounds)
    assert len(flower.differences) == 1  # the norm runs away from its quantile


ENTRIES = [
    ("flower", {**CENTRAL, "equal_weights": True}, "scalar_entries"),
    ("flower", FLIP, "scalar_entries"),
    ("nvflare", {"dimension": 10, "rounds": 1}, "scalar_entries"),
    ("opacus", DP_SGD, "buffers"),
    ("fl4health", {**INSTANCE, "client_data_sizes": 1000, "n_server_rounds": 1}, "buffers"),
    ("jax_privacy", {"noise_multiplier": 1.0, "batch_size": 1, "train_size": 9, "train_steps": 9}, "buffers"),
    ("fedbiomed", {"sigma": 1.0, "batch_size": 64, "dataset_size": 640, "epochs": 1, "rounds": 1}, "buffers"),
    (
        "appfl",
        {"dp_mechanism": "gaussian", "epsilon": 1.0, "clip_value": 1.0, "clip_norm": 2, "clip_grad": True}
        | {"num_local_steps": 1, "rounds": 1},
        "buffers",
    ),
]


@pytest.mark.parametrize(("framework", "given", "name"), ENTRIES)
def test_entries_that_no_noise_covers_are_assumed_away_or_end_the_guarantee(framework, given, name):
    assumed, denied, declared = (
        check(framework, given, **more) for more in ({}, {name: False}, {name: True})
    )
    assert any(name in text for text in assumed.assumptions)
    assert denied == assumed
    assert any(bound.epsilon is not None for bound in assumed.bounds)
    assert all(bound.epsilon is None and bound.reason for bound in declared.bounds)
    assert len(declared.bounds) == len(assumed.bounds)


def test_settings_of_an_app_are_read(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.flwr.app.config]\nnum-server-rounds = 3\nname = 'x'\ndp-clipping-norm = 1.0\n"
        "dp-sensitivity = 1e-4\ndp-epsilon = 10.0\ndp-delta = 1e-5\n"
    )
    found = check_framework("flower", [str(tmp_path / "pyproject.toml")])
    assert found == replace(check("flower", FLIP, rounds=3), unread=("name",))
    for name in ("num_server_rounds", "rounds"):
        changed = check_framework("flower", [str(tmp_path / "pyproject.toml"), f"{name}=1"])
        assert replace(changed, unread=()) == check("flower", FLIP)


# --- FL4Health ---


@pytest.mark.parametrize(
    ("coin", "size", "rounds", "steps", "stated", "holds"),
    [(0.5, 1000, 20, 10, 5.371115, 7.49), (0.1, 400, 100, 4, 3.620343, 12.83)],
)
def test_one_coin_of_a_client_is_for_all_steps_of_its_round(coin, size, rounds, steps, stated, holds):
    found = check("fl4health", INSTANCE, client_sampling=coin, client_data_sizes=size, n_server_rounds=rounds)
    assert f"{steps} steps" in found.mechanism
    assert found.stated == pytest.approx(stated, abs=1e-6)
    assert epsilons(found)["a record"] == pytest.approx(holds, abs=0.006)
    assert epsilons(found)["a client"] is None
    assert found.differences
    persons = [value for unit, value in epsilons(found).items() if "person" in unit]
    assert persons == sorted(persons)
    assert persons[0] > epsilons(found)["a record"]


def test_central_noise_of_fl4health_is_counted_without_the_number_of_clients():
    found = check("fl4health", SERVER_NOISE, client_sampling=0.66)
    assert found.stated == pytest.approx(21.146918, abs=1e-6)
    assert epsilons(found, RELEASED)["a client"] > found.stated


def test_the_coin_of_one_client_is_not_that_of_a_person_in_two():
    """Each of two clients tosses its coin, so one of them is drawn more often than either."""
    units = [
        epsilons(check("fl4health", SERVER_NOISE, client_sampling=coin), RELEASED) for coin in (0.66, 1.0)
    ]
    assert units[0]["a client"] < units[1]["a client"]
    assert units[0]["a person with 2 records"] == units[1]["a person with 2 records"]


def test_sizes_of_several_clients_are_asked_one_by_one():
    with refused("argument.value") as caught:
        check("fl4health", INSTANCE, client_data_sizes=[1000, 500], n_server_rounds=5)
    assert caught.value.field == "client_data_sizes"
    assert "[1000, 500]" in str(caught.value)
    assert "once for each client" in str(caught.value)


def test_without_a_coin_the_accountant_of_fl4health_is_right():
    found = check("fl4health", INSTANCE, client_data_sizes=1000, n_server_rounds=5)
    assert len(found.differences) == 1
    assert epsilons(found)["a record"] <= found.stated <= 1.2 * epsilons(found)["a record"]


# --- NVIDIA FLARE ---


def test_the_defaults_of_the_sparse_vector_filter():
    found = check("nvflare", dimension=7_033_290, rounds=1)
    spent = epsilons(found)["a client"]
    assert pytest.approx(703_329 * 0.1 + 0.1, abs=0.5) == 70_333  # what nvflare's own accountant states
    # Its choice of weights goes on after the 703,329 that it pays for: at most ten times as many.
    assert 70_333 <= spent <= 70_333 + 10 * 0.1
    assert epsilons(found)["a person with 4 records"] == pytest.approx(4 * spent)
    assert epsilons(check("nvflare", dimension=7_033_290, rounds=3))["a client"] == pytest.approx(3 * spent)
    assert found.stated == pytest.approx(703_329 * 0.1 + 0.1)


def accept(rng: np.random.Generator, weights: np.ndarray, wanted: int) -> int:
    """Return how many weights the filter accepts before it stops, as nvflare 2.9 does: in whole passes."""
    scale, threshold, done = 2.0 * wanted / 0.1, rng.laplace(scale=1.0), np.zeros(len(weights), bool)
    while done.sum() < wanted:
        answers = weights + rng.laplace(scale=scale, size=len(weights))
        done |= ~done & (answers >= threshold)
    return int(done.sum())


def test_the_sparse_vector_filter_accepts_more_than_it_pays_for():
    accepted = [accept(np.random.default_rng(seed), np.ones(1000), 100) for seed in range(20)]
    assert (
        min(accepted) > 400
    )  # so the cost of the choice, by which 100 are paid, is more than four times larger


@pytest.mark.parametrize("name", ["PercentilePrivacy", "ExcludeVars"])
def test_filters_without_noise_promise_nothing(tmp_path, name):
    path = tmp_path / "config_fed_client.json"
    filters = [{"path": f"nvflare.app_common.filters.x.{name}", "args": {"gamma": 0.01}}]
    path.write_text(json.dumps({"task_result_filters": [{"tasks": ["train"], "filters": filters}]}))
    found = check_framework("nvflare", [str(path), "rounds=1"])
    assert {bound.epsilon for bound in found.bounds} == {None}
    filters.append({"path": "nvflare.app_common.filters.svt_privacy.SVTPrivacy", "args": {"noise_var": 1e-4}})
    path.write_text(json.dumps({"task_result_filters": [{"tasks": ["train"], "filters": filters}]}))
    found = check_framework("nvflare", [str(path), "dimension=1000", "rounds=1"])
    threshold = 0.1 / (1 + 200 ** (2 / 3))
    assert epsilons(found)["a client"] == pytest.approx(threshold + 10 * (0.1 - threshold) + 100 * 1e-4)


SVT = {"path": "nvflare.app_common.filters.svt_privacy.SVTPrivacy", "args": {"fraction": 0.5}}
SCOPES = [
    {"name": "public", "task_result_filters": [{"name": "ExcludeVars"}]},
    {"name": "private", "task_result_filters": [{"name": "BadModelDetector"}, SVT]},
]


@pytest.mark.parametrize(
    ("content", "given", "protects"),
    [
        ({"task_result_filters": [{"tasks": ["train"], "filters": [SVT]}]}, [], True),
        ({"task_result_filters": [{"tasks": ["*"], "filters": [SVT]}]}, [], True),
        ({"task_result_filters": [{"tasks": ["validate"], "filters": [SVT]}]}, [], False),
        ({"task_result_filters": [{"tasks": ["fit"], "filters": [SVT]}]}, ["task=fit"], True),
        ({"task_result_filters": [{"tasks": ["train"], "filters": [SVT | {"direction": "in"}]}]}, [], None),
        ({"task_data_filters": [{"tasks": ["train"], "filters": [SVT]}]}, [], None),
        ({"scopes": SCOPES, "default_scope": "public"}, [], False),
        ({"scopes": SCOPES, "default_scope": "private"}, [], True),
        ({"scopes": SCOPES}, [], None),
    ],
)
def test_a_filter_protects_the_results_that_it_is_applied_to(tmp_path, content, given, protects):
    """A filter of validation results, of what comes in, or of another scope adds no noise to updates."""
    path = tmp_path / "filters.json"
    path.write_text(json.dumps(content))
    settings = [str(path), "dimension=100", "rounds=1", *given]
    if protects is None:
        with refused("config.value"):
            check_framework("nvflare", settings)
        return
    found = check_framework("nvflare", settings)
    assert all((bound.epsilon is not None) == protects for bound in found.bounds)
    assert ("BadModelDetector" in found.unread) == (content.get("default_scope") == "private")


# --- Opacus ---


def test_a_generator_that_is_not_secure_is_named():
    (text,) = (text for text in check("opacus", DP_SGD).assumptions if "secure_mode" in text)
    (other,) = (
        text for text in check("opacus", DP_SGD, secure_mode=False).assumptions if "secure_mode" in text
    )
    assert other.startswith(text)
    assert "no bound holds" in other


def test_poisson_samples_cost_what_opacus_says():
    found = check("opacus", DP_SGD)
    assert epsilons(found)["a record"] == pytest.approx(1.8282, abs=0.001)
    assert found.stated == pytest.approx(1.838372, abs=1e-6)
    assert check("opacus", DP_SGD, accountant="rdp").stated == pytest.approx(2.101365, abs=1e-6)


def test_a_limit_is_stated_beside_what_holds():
    """GDP accounting of Opacus states less than the smallest ε that holds."""
    found = check("opacus", noise_multiplier=0.5, sample_rate=0.01, steps=10, accountant="gdp")
    assert found.stated == pytest.approx(0.851525, abs=1e-6)
    exact = bound_pair_from_below(1, 0, 0.01, 0.5, 10)
    assert 4.3 < exact <= epsilons(found)["a record"]
    assert found.differences
    with refused("argument.value"):
        check("opacus", DP_SGD, accountant="gpd")


def bound_pair_from_below(first: float, second: float, rate: float, noise: float, steps: int) -> float:
    """Return an ε that the releases exceed at δ = 1e-5: each is (1-q)N(0) + qN(a) or (1-q)N(0) + qN(b)."""
    x, step = np.linspace(-12 * noise - 2, 12 * noise + 3, 100_001, retstep=True)

    def ratio(shift: float) -> np.ndarray:
        return np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * shift * x - shift**2) / (2 * noise**2))

    loss = ratio(first) - ratio(second)
    mass = np.exp(ratio(first) - x**2 / (2 * noise**2)) * step / (noise * math.sqrt(2 * math.pi))
    mesh, size = 4e-4, 2**18  # losses are rounded down
    once = np.bincount(np.floor(loss / mesh).astype(int) % size, weights=mass, minlength=size)
    total = np.fft.irfft(np.fft.rfft(once) ** steps, size)[: size // 2]
    losses = np.arange(size // 2) * mesh
    low, high = 0.0, losses[-1]
    for _ in range(40):
        middle = (low + high) / 2
        is_exceeded = total @ np.clip(-np.expm1(middle - losses), 0.0, None) > 1e-5
        low, high = (middle, high) if is_exceeded else (low, middle)
    return low


def test_adaptive_clipping_of_opacus_has_no_guarantee():
    found = check("opacus", DP_SGD, clipping="adaptive")
    assert set(epsilons(found).values()) == {None}
    assert epsilons(check("opacus", DP_SGD, clipping="per_layer")) == epsilons(check("opacus", DP_SGD))


def test_a_shuffled_table_is_no_poisson_sample():
    found = check("opacus", DP_SGD, poisson_sampling=False)
    assert found.stated == check("opacus", DP_SGD).stated
    # Once in each of ten epochs, and everything else is the same.
    assert gaussian_delta(epsilons(found)["a record"], 1 / math.sqrt(10)) == pytest.approx(1e-5, rel=1e-6)
    assert gaussian_delta(epsilons(found)["a person with 2 records"], 0.5 / math.sqrt(10)) == pytest.approx(
        1e-5, rel=1e-6
    )


@pytest.mark.parametrize(("size", "rate", "steps"), [(127, 1.0, 10), (191, 0.5, 20), (10, 1.0, 10)])
def test_a_loader_that_drops_its_last_batch_has_fewer_and_draws_more(size, rate, steps):
    given = {"noise_multiplier": 1.0, "batch_size": 64, "dataset_size": size, "epochs": 10, "drop_last": True}
    by_rate = {"noise_multiplier": 1.0, "sample_rate": rate, "steps": steps}
    assert epsilons(check("opacus", given)) == epsilons(check("opacus", by_rate))
    shuffled = check("opacus", given, poisson_sampling=False)
    assert epsilons(shuffled) == epsilons(check("opacus", by_rate, poisson_sampling=False))


def test_a_dropped_last_batch_counts_in_fl4health():
    given = {"client_noise_multiplier": 1.0, "n_server_rounds": 1, "local_epochs": 10, "batch_size": 64}
    found = check("fl4health", given, client_data_size=127, drop_last=True)
    one_batch = check("fl4health", given, client_data_size=64)
    assert epsilons(found)["a record"] == epsilons(one_batch)["a record"]


def test_every_round_begins_a_new_epoch():
    """A loader that is read from its start in every round can give the same first batch twenty times."""
    settings = {"noise_multiplier": 0.5, "sample_rate": 0.05, "steps": 1, "rounds": 20}
    found = check("opacus", settings, poisson_sampling=False)
    assert gaussian_delta(epsilons(found)["a record"], 0.5 / math.sqrt(20)) == pytest.approx(1e-5, rel=1e-6)
    assert epsilons(found)["a record"] > epsilons(check("opacus", settings))["a record"]


def test_engines_of_ten_rounds_add_up():
    found = check("opacus", DP_SGD, epochs=1, rounds=10)
    whole = check("opacus", DP_SGD)
    assert epsilons(found) == epsilons(whole)
    assert found.stated == check("opacus", DP_SGD, epochs=1).stated
    assert len(found.differences) == len(whole.differences) + 1


# --- jax_privacy ---

KERAS = {"noise_multiplier": 1.0, "batch_size": 64, "train_size": 6400, "train_steps": 1000}


def test_a_fit_that_shuffles_costs_an_epoch_as_a_step():
    found = check("jax_privacy", KERAS)
    assert found.stated == pytest.approx(1.828934, abs=1e-6)
    assert gaussian_delta(epsilons(found)["a record"], 1 / math.sqrt(10)) == pytest.approx(1e-5, rel=1e-6)
    poisson = check("jax_privacy", KERAS, poisson_sampling_in_fit=True)
    assert epsilons(poisson) == epsilons(check("opacus", DP_SGD))
    assert poisson.differences == ()
    assert epsilons(check("jax_privacy", KERAS, batch_selection="CyclicPoissonSampling")) == epsilons(poisson)


def test_a_batch_of_a_fixed_size_replaces_records():
    """A record that is drawn takes the place of another: emptying it moves the batch from 2 clips to 1, not 1 to 0."""
    found = check("jax_privacy", KERAS, batch_selection="FixedBatchSampling")
    exact = bound_pair_from_below(2, 1, 0.01, 1.0, 1000)
    assert exact > 10 > 5 * found.stated
    assert exact <= bound_pair_from_below(2, 0, 0.01, 1.0, 1000) <= epsilons(found)["a record"]
    replaced = check(
        "jax_privacy", KERAS, batch_selection="FixedBatchSampling", sampling_method="FIXED_BATCH_SIZE"
    )
    assert replaced.stated == pytest.approx(13.361, abs=0.001)
    assert epsilons(replaced) == epsilons(found)
    whole = check("jax_privacy", KERAS, batch_size=6400, batch_selection="FixedBatchSampling", train_steps=10)
    assert epsilons(whole)["a record"] == pytest.approx(epsilons(check("jax_privacy", KERAS))["a record"])


def test_an_update_of_several_batches_is_no_batch():
    """A record is in j of 10 batches of an update and moves it by j clips; DPKerasConfig counts one batch."""
    found = check("jax_privacy", KERAS, poisson_sampling_in_fit=True, gradient_accumulation_steps=10)
    one = check("jax_privacy", KERAS, poisson_sampling_in_fit=True)
    assert found.stated == one.stated
    # Of one batch of ten times the size at least.
    larger = check("jax_privacy", KERAS, poisson_sampling_in_fit=True, batch_size=640, train_steps=100)
    assert epsilons(found)["a record"] > epsilons(larger)["a record"] > 2.5 * found.stated
    shuffled = check("jax_privacy", KERAS, gradient_accumulation_steps=10)
    assert epsilons(shuffled) == epsilons(check("jax_privacy", KERAS))  # 100 batches are 10 updates
    torn = check("jax_privacy", KERAS, gradient_accumulation_steps=8)  # an update with batches of two epochs
    assert epsilons(torn)["a record"] > epsilons(shuffled)["a record"]


# --- pfl ---

USERS = {
    "noise_parameter": 1.0,
    "sampling_probability": 0.01,
    "num_compositions": 1000,
    "mechanism": "gaussian",
}


def test_users_of_pfl_that_are_drawn_in_turn_are_no_poisson_sample():
    found = check("pfl", USERS, user_sampler="minimize_reuse")
    assert set(epsilons(found).values()) == {None}
    units = epsilons(found, RELEASED)
    assert gaussian_delta(units["a client"], 1 / math.sqrt(10)) == pytest.approx(1e-5, rel=1e-6)
    assert gaussian_delta(units["a record"], 0.5 / math.sqrt(10)) == pytest.approx(1e-5, rel=1e-6)
    assert gaussian_delta(units["a person with 2 records"], 0.25 / math.sqrt(10)) == pytest.approx(
        1e-5, rel=1e-6
    )
    poisson = check("pfl", USERS, user_sampler="poisson")
    assert found.stated == poisson.stated == pytest.approx(1.8282436, abs=1e-6)
    assert epsilons(poisson, RELEASED)["a client"] == pytest.approx(1.8282, abs=0.001)
    assert epsilons(poisson, RELEASED)["a record"] > 1.3 * poisson.stated
    assert set(epsilons(check("pfl", USERS, user_sampler="random"), RELEASED).values()) == {None}
    with refused("argument.missing"):
        check("pfl", USERS)


def test_noise_of_a_simulated_cohort_is_the_noise_that_is_added():
    found = check("pfl", USERS, user_sampler="poisson", noise_scale=0.5)
    as_added = check("pfl", USERS, user_sampler="poisson", noise_parameter=0.5)
    assert epsilons(found, RELEASED) == epsilons(as_added, RELEASED)
    assert found.stated < as_added.stated


def test_a_user_of_pfl_always_sends_its_bit():
    """With adaptive clipping, an emptied user says that nothing was clipped: its bit changes its sign."""
    fixed, adaptive = (
        epsilons(check("pfl", USERS, user_sampler="poisson", **more), RELEASED)
        for more in ({}, {"initial_clipping_bound": 0.1})
    )
    assert fixed["a client"] < adaptive["a client"] == adaptive["a record"] == fixed["a record"]


def test_laplace_noise_of_pfl_adds_up():
    once = {**USERS, "mechanism": "laplace", "noise_parameter": 0.2, "sampling_probability": 1.0}
    once |= {"num_compositions": 1, "user_sampler": "poisson"}
    found = check("pfl", once, accountant="PRVPrivacyAccountant")
    assert epsilons(found, RELEASED)["a client"] == pytest.approx(5.0)
    assert epsilons(found, RELEASED)["a record"] == pytest.approx(10.0)
    assert found.stated is None  # pfl 0.6.0 states .196
    assert len(found.differences) == 1
    half = check("pfl", once, sampling_probability=0.5, num_compositions=3)
    assert epsilons(half, RELEASED)["a client"] == pytest.approx(3 * math.log1p(0.5 * math.expm1(5)))
    in_turn = check("pfl", once, sampling_probability=0.5, num_compositions=3, user_sampler="minimize_reuse")
    assert epsilons(in_turn, RELEASED)["a client"] == pytest.approx(2 * 5.0)


# --- Fed-BioMed and APPFL ---


def test_local_noise_of_fedbiomed_is_that_of_opacus():
    given = {"sigma": 1.0, "clip": 1.0, "batch_size": 64, "dataset_size": 6400, "epochs": 1}
    found = check("fedbiomed", given, round_limit=10)
    assert epsilons(found) == epsilons(check("opacus", DP_SGD))
    assert found.stated is None
    central = check("fedbiomed", sigma=1.0, clip=1.0, type="central", round_limit=10)
    assert set(epsilons(central).values()) == {None}
    with refused("argument.missing"):
        check("fedbiomed", given)
    with refused("argument.value"):
        check("fedbiomed", given, type="global", round_limit=1)


OUTPUT = {
    "use_dp": True,
    "epsilon": 0.5,
    "clip_value": 1.0,
    "clip_grad": True,
    "num_local_steps": 10,
    "rounds": 3,
}


def test_noise_of_appfl_is_for_one_step():
    laplace = epsilons(check("appfl", OUTPUT, clip_norm=1))
    assert laplace["a record"] == pytest.approx(0.5 * 10 * 3)
    assert laplace["a client"] == pytest.approx(0.5 * 10 * 3 / 2)
    assert laplace["a person with 4 records"] == pytest.approx(4 * laplace["a record"])
    gaussian = check("appfl", OUTPUT, clip_norm=2, dp_mechanism="gaussian")
    std = 2 * math.sqrt(2 * math.log(1.25e5)) / 0.5  # in units of clip_value · lr
    for unit, moved in {"a client": 10, "a record": 20}.items():
        sigma = std / moved / math.sqrt(3)
        assert gaussian_delta(epsilons(gaussian)[unit], sigma) == pytest.approx(1e-5, rel=1e-6)
    assert gaussian.stated == 0.5
    one = check("appfl", OUTPUT, clip_norm=2, dp_mechanism="gaussian", num_local_steps=1, rounds=1)
    assert epsilons(one)["a record"] < 0.5
    assert one.differences == ()


@pytest.mark.parametrize(
    "more", [{"clip_grad": False}, {"clip_norm": 2}, {"clip_norm": 1, "dp_mechanism": "gaussian"}, {"use_dp": False}]
)  # fmt: skip
def test_noise_of_appfl_without_its_clip_protects_nobody(more):
    """use_dp asks for clip_value, and clips nothing unless clip_grad is true; each noise has a norm of its own."""
    given = {
        key: value for key, value in OUTPUT.items() if more.get("use_dp", True) or key in ("use_dp", "rounds")
    }
    assert set(epsilons(check("appfl", given, **more)).values()) == {None}


def test_one_privacy_engine_of_appfl_counts_all_rounds():
    given = {"dp_mechanism": "opacus", "noise_multiplier": 1.0, "train_batch_size": 64, "dataset_size": 6400}
    found = check("appfl", given, num_local_epochs=1, rounds=10)
    assert epsilons(found) == epsilons(check("opacus", DP_SGD))
    assert found.stated == check("opacus", DP_SGD).stated


# --- reading and printing ---


@pytest.mark.parametrize(
    ("framework", "given", "code"),
    [
        ("pysyft", [], "argument.value"),
        ("flower", [], "argument.missing"),
        ("flower", ["sensitivity=1", "clipping_norm=1", "epsilon=1"], "argument.missing"),
        ("flower", ["sensitivity=-1", "clipping_norm=1", "epsilon=1", "delta=0.1"], "argument.value"),
        ("flower", ["noise_multiplier=1", "clipping_norm=1", "num_sampled_clients=2.5"], "argument.value"),
        ("flower", ["noise_multiplier=x", "clipping_norm=1", "num_sampled_clients=2"], "argument.value"),
        ("flower", ["nothing.toml"], "config.path"),
        ("flower", ["settings"], "config.path"),
        ("nvflare", [], "argument.missing"),
        ("nvflare", ["dimension=10", "rounds=1", "fraction=2"], "argument.value"),
        ("nvflare", ["dimension=10", "rounds=1", "epsilon_query=5"], "argument.conflict"),
        ("opacus", ["noise_multiplier=1"], "argument.missing"),
        ("opacus", ["noise_multiplier=1", "sample_rate=0.1", "epochs=1", "poisson_sampling=1"], "argument.value"),
        ("fl4health", ["n_server_rounds=3"], "argument.missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_checked_is_one_sentence(framework, given, code):
    with pytest.raises(SilodpError) as caught:
        check_framework(framework, given)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.toml", "[tool]\n", "config.value"),
        ("a.toml", "x = [", "config.value"),
        ("a.json", "{", "config.value"),
        ("a.txt", "", "config.path"),
    ],
)
def test_files_without_settings_are_refused(tmp_path, name, text, code):
    (tmp_path / name).write_text(text)
    with pytest.raises(SilodpError) as caught:
        check_framework("flower", [str(tmp_path / name)])
    assert caught.value.code == code


def test_a_flat_yaml_is_read(tmp_path):
    path: Path = tmp_path / "config.yaml"
    path.write_text(
        "# Server\nn_server_rounds: 20 # rounds\nadaptive_clipping: True\nname: x\nserver_noise_multiplier: 1.0\n"
    )
    found = check_framework("fl4health", [str(path)])
    assert found.unread == ("name",)
    assert replace(found, unread=()) == check("fl4health", SERVER_NOISE, adaptive_clipping=True)
    assert found.format_lines()[-1] == "  not read: name"


@pytest.mark.parametrize("text", ["010", "+010", "0_10", "08"])
def test_a_number_with_a_leading_zero_is_none(tmp_path, text):
    """PyYAML reads 010 as 8, and YAML 1.2 as 10."""
    path: Path = tmp_path / "config.yaml"
    path.write_text(f"n_server_rounds: {text}\nserver_noise_multiplier: 1.0\n")
    with refused("argument.value"):
        check_framework("fl4health", [str(path)])


@pytest.mark.parametrize(
    ("framework", "given", "names"),
    [
        (
            "opacus",
            ["target_epsilon=8", "batch_size=64", "dataset_size=6400", "epochs=1"],
            "optimizer.noise_",
        ),
        ("flower", ["max-grad-norm=1", "target-delta=1e-5", "num-server-rounds=3"], "--framework opacus"),
    ],
)
def test_noise_that_opacus_chooses_is_asked_for(framework, given, names):
    with pytest.raises(SilodpError, match=names) as caught:
        check_framework(framework, given)
    assert caught.value.code == "argument.missing"


@pytest.mark.parametrize("flag", ["yes", "On", "TRUE", "true # since June"])
@pytest.mark.parametrize("rounds", ["20", "20.", "2_0"])
def test_truth_and_numbers_of_yaml_are_read(tmp_path, flag, rounds):
    path: Path = tmp_path / "config.yaml"
    path.write_text(f'"n_server_rounds": {rounds}\nadaptive_clipping: {flag}\nserver_noise_multiplier: .5\n')
    found = check_framework("fl4health", [str(path)])
    assert (found.rounds, "noise 0.5 " in found.mechanism) == (20, True)
    assert {bound.epsilon for bound in found.bounds} == {None}


def test_a_value_of_yaml_that_cannot_be_read_is_not_left_out(tmp_path):
    path: Path = tmp_path / "config.yaml"
    path.write_text("n_server_rounds: 20\nadaptive_clipping: maybe\nserver_noise_multiplier: 1.0\n")
    with refused("argument.value"):
        check_framework("fl4health", [str(path)])


@pytest.mark.parametrize(
    ("framework", "given", "hint"),
    [
        ("opacus", {**DP_SGD, "num_epochs": 50}, "num_epochs"),
        ("flower", {**CENTRAL, "num_round": 100}, "num_rounds"),
        ("fl4health", {**SERVER_NOISE, "adaptive_cliping": True}, "adaptive_clipping"),
        ("fl4health", {**INSTANCE, "client_data_sizes": 1000, "n_server_rounds": 1, "local_step": 3}, "local_steps"),
        ("nvflare", {"dimension": 10, "rounds": 1, "epsilon_values": 1.0}, "epsilon_values"),
    ],
)  # fmt: skip
def test_a_typed_setting_that_is_not_known_is_refused(framework, given, hint):
    """A setting left out in silence would make ε too small: of 50 epochs one would be counted."""
    with refused("argument.value") as caught:
        check(framework, given)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("framework", "given"),
    [
        ("flower", FLIP),
        ("flower", CENTRAL),
        ("flower", {"noise_multiplier": 1.0, "initial_clipping_norm": 1.0, "rounds": 1}),
        ("nvflare", {"dimension": 10, "rounds": 1}),
        ("fl4health", {**INSTANCE, "client_data_sizes": 1000, "n_server_rounds": 1}),
    ],
)
def test_rounds_and_local_work_are_never_assumed(framework, given):
    for name in ("rounds", "n_server_rounds", "local_epochs"):
        if name in given:
            with refused("argument.missing"):
                check(framework, {key: value for key, value in given.items() if key != name})


def test_a_bound_for_two_is_a_bound_for_one():
    """Noise so small that accountants promise nothing, with and without a coin."""
    found = check("fl4health", server_noise_multiplier=0.01, n_server_rounds=3, client_sampling=0.4)
    values = list(epsilons(found, RELEASED).values())
    assert None not in values
    assert values == sorted(values)


def test_steps_of_opacus_are_of_a_round():
    ten = check("opacus", noise_multiplier=1.0, sample_rate=0.01, steps=100, rounds=10)
    assert epsilons(ten) == epsilons(check("opacus", noise_multiplier=1.0, sample_rate=0.01, steps=1000))


GUIDE = Path(__file__).parents[5] / "docs" / "guides" / "check-settings.md"
ROWS = re.findall(
    r"^\| (\w+) [\d.]+ \| `([^`]+)` \|.*\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", GUIDE.read_text(), re.MULTILINE
)


def test_the_table_of_the_guide_has_all_frameworks():
    assert {framework for framework, *_ in ROWS} == set(FRAMEWORKS)


@pytest.mark.parametrize(("framework", "settings", "stated", "proven"), ROWS)
def test_the_table_of_the_guide_is_what_the_command_prints(framework, settings, stated, proven):
    found = check_framework(framework, settings.split())
    assert stated == ("–" if found.stated is None else f"{found.stated:.5g}")
    known = {bound.unit: bound.epsilon for bound in found.bounds if bound.epsilon is not None}
    if proven == "none":
        assert known == {}
        return
    for unit, epsilon in (part.split() for part in proven.split(", ")):
        assert format_epsilon(known[f"a {unit}"]) == epsilon


def test_a_filter_of_nvflare_may_be_typed():
    assert check("nvflare", filter="SVTPrivacy", tau=1e-6, dimension=10, rounds=1) == check(
        "nvflare", dimension=10, rounds=1
    )


def test_epochs_of_opacus_are_never_assumed():
    with refused("argument.missing"):
        check("opacus", noise_multiplier=1.0, sample_rate=0.01)
    assert check("opacus", noise_multiplier=1.0, sample_rate=0.01, steps=1000) == check("opacus", DP_SGD)


def test_local_steps_of_fl4health_count_as_steps():
    more = {"client_data_sizes": 1000, "n_server_rounds": 3}
    by_steps = {key: value for key, value in INSTANCE.items() if key != "local_epochs"}
    assert check("fl4health", by_steps, local_steps=500, **more) == check(
        "fl4health", by_steps, local_epochs=50, **more
    )
    with refused("argument.conflict"):
        check("fl4health", INSTANCE, local_steps=500, **more)


def test_settings_that_contradict_each_other_are_refused():
    with refused("argument.conflict"):
        check("flower", CENTRAL, num_clients=100, fraction_train=1.0)
    check("flower", CENTRAL, num_clients=100, fraction_train=0.2)
    for least in ({"min_fit_clients": 50}, {"fraction_fit": 0.2, "min_train_nodes": 50}):
        with refused("argument.conflict"):
            check("flower", CENTRAL, num_clients=100, **least)
    check("flower", CENTRAL, num_clients=100, fraction_fit=0.01, min_fit_clients=20)
    two = {**CENTRAL, "num_sampled_clients": 2}
    check("flower", two, num_clients=10, fraction_fit=0.1)  # Flower never draws fewer than two
    with refused("argument.conflict"):
        check("flower", CENTRAL, num_rounds=1)


def test_the_command_prints_what_holds(silodp: Silodp):
    given = [f"{key}={value}" for key, value in FLIP.items()]
    outcome = silodp("epsilon", "--framework", "flower", *given)
    assert outcome.status == 0
    assert outcome.out.splitlines() == check("flower", FLIP).format_lines()
    assert silodp("epsilon", "--framework", "flower", *given, "--json").json["stated"] == 10.0
    other = silodp("epsilon", "--framework", "flower", *given, "--delta", "1e-6", "--json").json
    assert other["delta"] == 1e-6
    assert_sentence(silodp("epsilon", "x=1", "--method", "ddp", "--rounds", "1"), code="cli.usage")
    assert_sentence(silodp("epsilon", "--method", "ddp"), code="cli.usage")
    added = {"jax_privacy", "pfl", "fedbiomed", "appfl"}
    assert {"flower", "nvflare", "opacus", "fl4health"} | added <= set(FRAMEWORKS)


@pytest.mark.parametrize("option", ["--rounds", "--steps", "--noise-multiplier", "--silos"])
def test_an_option_that_would_not_be_used_is_refused(silodp: Silodp, option: str):
    given = [f"{key}={value}" for key, value in DP_SGD.items()]
    told = silodp("epsilon", "--framework", "opacus", *given, option, 10)
    assert_sentence(told, code="cli.usage")
