"""What the installed frameworks state and do, as JSON: run by the Python of .venv-frameworks, which has no silodp.

`stated` are numbers by their own accountants, `seen` is what their own mechanisms do to made-up updates.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import warnings
from collections import Counter
from typing import Any

import numpy as np

CLIENTS = 20
ROUNDS = 30


def ask_flower() -> dict[str, Any]:
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp.mod import LocalDpMod
    from flwr.serverapp.strategy import (
        DifferentialPrivacyServerSideAdaptiveClipping,
        DifferentialPrivacyServerSideFixedClipping,
        FedAvg,
    )
    from flwr.supercore import privacy_accounting as accounting
    from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    def record(arrays):
        return ArrayRecord({key: Array(np.asarray(value)) for key, value in arrays.items()})

    def ask(arrays):
        return Message(RecordDict({"arrays": record(arrays)}), dst_node_id=1, message_type="train")

    def reply(arrays, weight=1.0):
        # flwr fails where an update is exactly 0.
        content = {"arrays": record({**arrays, "w": arrays["w"] + np.float32(1e-9)})}
        content["metrics"] = MetricRecord({"num-examples": weight})
        return Message(RecordDict(content), reply_to=ask(arrays))

    def release(strategy, start, replies):
        strategy.current_arrays = record(start)
        arrays, _ = strategy.aggregate_train(1, replies)
        return {key: value.numpy() for key, value in arrays.items()}

    def account():
        config = accounting.PrivacyConfig(
            1e-5,
            CLIENTS,
            accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
            accounting.SamplingMethod.NO_AMPLIFICATION,
        )
        return RdpAccountant(config)

    stated = []
    for noise, rounds in [(1.0, 1), (1.0, 10), (10.0, 100), (0.5, 3)]:
        accountant = account()
        accountant.compose(accounting.GaussianPrivacyEvent(noise, CLIENTS, CLIENTS), rounds)
        stated.append([noise, rounds, accountant.get_epsilon(1e-5)])

    start = {
        "w": np.zeros(100_000, np.float32),
        "num_batches_tracked": np.zeros((), np.int64),
        "scale": np.zeros((), np.float32),
    }
    moved = {**start, "num_batches_tracked": np.array(2000), "scale": np.array(2000.0, np.float32)}

    def fixed(**more):
        return DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 10.0, CLIENTS, **more)

    others = [reply(start) for _ in range(CLIENTS - 1)]
    released = release(fixed(), start, [reply(moved), *others])
    entries = {key: float(released[key]) for key in ("num_batches_tracked", "scale")}

    def run_away(norm, update):
        strategy = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 1.0, CLIENTS, norm)
        for _ in range(ROUNDS):
            release(strategy, {"w": np.zeros(4)}, [reply({"w": update}) for _ in range(CLIENTS)])
        return strategy.clipping_norm

    first = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 1.0, CLIENTS, 1.0)
    wide = {"w": np.full(100_000, 1.0)}
    noisy = release(first, {"w": np.zeros(100_000)}, [reply(wide) for _ in range(CLIENTS)])["w"]

    strict = fixed(accountant=account())
    strict._pending_events[1] = accounting.GaussianPrivacyEvent(1.0, CLIENTS, CLIENTS)
    try:
        release(strict, start, [reply(start, 2.0), *others])
        refuses = False
    except ValueError:
        refuses = True

    # A client with LocalDpMod, emptied or moved by one clip.
    mod = LocalDpMod(1.0, 1e-4, 10.0, 1e-5)
    zeros = {"w": np.zeros(100_000)}
    full = {"w": np.zeros(100_000)}
    full["w"][0] = 5.0
    answer = mod(ask(zeros), None, lambda message, context: reply(full))
    sent = next(iter(answer.content.array_records.values()))["w"].numpy()
    return {
        "stated": stated,
        "refuses_unequal_weights": refuses,
        "std": float(released["w"].std()),
        "entries": entries,
        "adaptive_norms": [run_away(0.1, np.full(4, 5.0)), run_away(100.0, np.full(4, 5.0))],
        "adaptive_std": float(noisy.std()) * CLIENTS,
        "adaptive_norm": first.clipping_norm,
        "adaptive_noise": first.noise_multiplier,
        "local": [float(sent[0]), float(sent[1:].std())],
    }


def ask_nvflare() -> dict[str, Any]:
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.app_common.filters.svt_privacy import SVTPrivacy

    stated = []
    for arguments in ({}, {"fraction": 0.5, "epsilon": 1.0, "noise_var": 0.01}, {"epsilon_release": 2.0}):
        svt = SVTPrivacy(**arguments)
        for _ in range(3):
            update = {"w": np.ones(1000), "num_batches_tracked": np.array(100)}
            dxo = DXO(DataKind.WEIGHT_DIFF, update)
            sent = svt.process_dxo(dxo, Shareable(), FLContext()).data
        # The entry without dimensions counts as a weight, and passes.
        stated.append([arguments, 1001, 3, svt.get_privacy_spent()])
    return {"stated": stated, "entry": float(sent["num_batches_tracked"])}


def ask_fl4health() -> dict[str, Any]:
    from fl4health.privacy.fl_accountants import (
        FlClientLevelAccountantPoissonSampling,
        FlInstanceLevelAccountant,
    )

    noisy = importlib.import_module("fl4health.strategies.noisy_aggregate")
    instance = [
        [0.5, 1.0, 1, 100, 1000, 20],
        [0.1, 1.0, 1, 100, 400, 100],
        [1.0, 2.0, 50, 64, 1000, 5],
        [1.0, 0.5, 1, 30, 100, 3],
    ]
    client = [[0.66, 1.0, 20], [0.1, 1.0, 20], [1.0, 3.0, 100]]
    # Two clients of 30 and 10 records, whose updates are one clip.
    updates = [([np.full(1, 1.0)], 30), ([np.full(1, 1.0)], 10)]
    mean = noisy.gaussian_noisy_weighted_aggregate(updates, 0.0, 1.0, 1.0, 40, 1.0)[0]
    empty = [([np.zeros(200_000)], 30), ([np.zeros(200_000)], 10)]
    noise = noisy.gaussian_noisy_weighted_aggregate(empty, 1.0, 1.0, 1.0, 40, 1.0)[0]
    return {
        "instance": [
            [*given, FlInstanceLevelAccountant(q, z, e, [b], [n]).get_epsilon(t, 1e-5)]
            for given in instance
            for q, z, e, b, n, t in [given]
        ],
        "client": [
            [*given, FlClientLevelAccountantPoissonSampling(q, z).get_epsilon(t, 1e-5)]
            for given in client
            for q, z, t in [given]
        ],
        "weighted": [float(mean[0]), float(noise.std())],
    }


def ask_jax_privacy() -> dict[str, Any]:
    os.environ["KERAS_BACKEND"] = "jax"
    from jax_privacy import accounting, keras_api

    def state(interval, method, noise, batch, size, steps):
        config = accounting.PldAccountantConfig(value_discretization_interval=interval)
        params = accounting.DpParams(
            noise_multipliers=noise, batch_size=batch, num_samples=size, delta=1e-5, sampling_method=method
        )
        return accounting.DpsgdTrainingAccountant(config).compute_epsilon(steps, params)

    given = [[1.0, 64, 6400, 1000], [0.7, 100, 1000, 20], [2.0, 50, 50, 10]]
    # Of ε = 1.83 by batches of 64; an update has ten of them.
    merged = keras_api.DPKerasConfig(
        epsilon=1.83,
        delta=1e-5,
        clipping_norm=1.0,
        batch_size=64,
        gradient_accumulation_steps=10,
        train_steps=1000,
        train_size=6400,
        noise_multiplier=1.0,
    )
    return {
        "stated": [
            [interval, method.name, *each, state(interval, method, *each)]
            for each in given
            for interval, method in (
                (1e-3, accounting.SamplingMethod.POISSON),
                (1e-4, accounting.SamplingMethod.POISSON),
                (1e-4, accounting.SamplingMethod.FIXED_BATCH_SIZE),
            )
        ],
        "poisson_by_default": merged.poisson_sampling_in_fit,
        "counted": keras_api.DPKerasConfig._accountant.compute_epsilon(
            1000,
            accounting.DpParams(
                noise_multipliers=1.0, batch_size=merged.effective_batch_size, num_samples=6400, delta=1e-5
            ),
        ),
    }


def ask_pfl() -> dict[str, Any]:
    from pfl.data.sampling import get_user_sampler
    from pfl.privacy import privacy_accountant

    def state(name, mechanism, noise, rate, rounds):
        kind = getattr(privacy_accountant, name)
        return kind(rounds, rate, mechanism, delta=1e-5, noise_parameter=noise).epsilon

    names = ["PLDPrivacyAccountant", "PRVPrivacyAccountant", "RDPPrivacyAccountant"]
    given = [[1.0, 0.01, 1000], [0.5, 0.2, 10], [3.0, 0.1, 2000], [2.0, 1.0, 4]]
    draws = {}
    for sampler in ("random", "minimize_reuse"):
        draw = get_user_sampler(sampler, list(range(100)))
        cohorts = [[draw() for _ in range(10)] for _ in range(95)]
        draws[sampler] = [
            max(Counter(cohort).most_common(1)[0][1] for cohort in cohorts),
            Counter(user for cohort in cohorts for user in cohort).most_common(1)[0][1],
        ]
    return {
        "stated": [[name, *each, state(name, "gaussian", *each)] for name in names for each in given],
        "laplace": {name: state(name, "laplace", 0.2, 1.0, 1) for name in names},
        "draws": draws,
    }


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    np.random.seed(0)  # noqa: NPY002, as the frameworks draw
    print(json.dumps(globals()[f"ask_{sys.argv[1]}"]()))
