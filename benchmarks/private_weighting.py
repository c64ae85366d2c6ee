"""Private weighting inside whole runs: `python benchmarks/private_weighting.py`.

Everything is counted: keys, sessions, transfers, encoded and signed messages, verification, decryption. CPU seconds of
all parties in one process. The first round of a run includes the set-up; the next one is the median of the others.
Bytes are those of one round over all silos, both ways, with signatures and the model.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from silodp.aggregators import Aggregator, Masked, Plain
from silodp.data.federation import Federation, SiloData
from silodp.methods import UldpAvg
from silodp.runtime.train import train
from silodp.training.losses import binary_cross_entropy, cross_entropy
from silodp.training.models import cnn_mnist
from silodp.training.sgd.local import LocalTraining
from silodp.training.task import Task
from silodp_experiments import benchmarks
from silodp_private.lattice import Lattice
from silodp_private.paillier.aggregator import Paillier
from silodp_private.select import Select
from timing import show_help

DATA = Path("../shared/data")
METHOD = UldpAvg(5.0, 0.1, LocalTraining(learning_rate=0.01, epochs=1, batch_size=8), weighting="records")

ROUNDS = 4


def zipf_federation(users: int, silos: int, features: int, records: int) -> Federation:
    """Made-up records of two classes: persons ∝ rank^−½, silos of a person ∝ rank^−2 in a random order."""
    rng = np.random.default_rng(0)
    of_user, of_silo = np.arange(1, users + 1) ** -0.5, np.arange(1, silos + 1) ** -2.0
    order = np.array([rng.permutation(silos) for _ in range(users)])
    user = rng.choice(users, records, p=of_user / of_user.sum())
    silo = order[user, rng.choice(silos, records, p=of_silo / of_silo.sum())]
    x = rng.standard_normal((records, features), dtype=np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    tables = [SiloData(f"silo{s}", x[silo == s], y[silo == s], user[silo == s]) for s in range(silos)]
    return Federation(tuple(tables), users, None, classes=2)


def phases(federation: Federation, task: Task, method: UldpAvg, aggregator: Aggregator) -> dict[str, float]:
    """Seconds of the first round with the set-up, and of one more round after the first."""
    passed = [(time.process_time(), time.perf_counter())]

    def note(_: object) -> None:
        passed.append((time.process_time(), time.perf_counter()))

    result = train(federation, task, method, rounds=ROUNDS, aggregator=aggregator, seed=0, callbacks=[note])
    cpu, wall = np.diff(passed, axis=0)[-ROUNDS:].T
    return {
        "set-up and first round, CPU s": float(passed[-ROUNDS][0] - passed[0][0]),
        "next round, CPU s": float(np.median(cpu[1:])),
        "next round, wall s": float(np.median(wall[1:])),
        **{f"bytes {way} a round": size for way, size in result.metrics[-1].get("bytes", {}).items()},
    }


def heart() -> list[dict[str, Any]]:
    """Logistic regression on real tables of four hospitals, 50 persons: the smallest models that people train."""
    if not (DATA / "heart_disease").exists():
        return []
    federation = replace(benchmarks.heart_disease(root=DATA, users=50), test=None)
    task = Task(torch.nn.Linear(federation.silos[0].x.shape[1], 1), binary_cross_entropy())
    primary = replace(METHOD, weighting="primary_silo")
    cases: list[tuple[Aggregator, UldpAvg]] = [(Masked(), primary), (Select(), primary), (Lattice(), METHOD)]
    return [
        {
            "run": f"heart, d = {task.size}, U = 50, S = 4, weights {method.weighting}",
            "aggregator": aggregator.name,
        }
        | phases(federation, task, method, aggregator)
        for aggregator, method in cases
    ]


def select() -> list[dict[str, Any]]:
    """Primary silos against weights by records, where U·d grows: 1.4·10⁵, 2·10⁶, 10⁷."""
    rows = []
    for users, features in ((1_000, 69), (100, 10_000), (1_000, 5_000)):
        federation = zipf_federation(users, 5, features, 5 * users)
        task = Task(torch.nn.Linear(features, 2), cross_entropy())
        for aggregator, weighting in ((Select(), "primary_silo"), (Lattice(count_cap=50), "records")):
            rows.append(
                {"run": f"linear, d = {task.size}, U = {users}, S = 5", "aggregator": aggregator.name}
                | phases(federation, task, replace(METHOD, weighting=weighting), aggregator)
            )
    return rows


def linear() -> list[dict[str, Any]]:
    """d = 20,002, U = 100, S = 5: what each aggregator adds to the same round."""
    federation = zipf_federation(100, 5, 10_000, 1_000)
    task = Task(torch.nn.Linear(10_000, 2), cross_entropy())
    cases: list[Aggregator] = [Plain(), Masked(), Lattice(count_cap=50)]
    return [
        {"run": f"linear, d = {task.size}, U = 100, S = 5", "aggregator": aggregator.name}
        | phases(federation, task, METHOD, aggregator)
        for aggregator in cases
    ]


def mnist() -> list[dict[str, Any]]:
    """The paper's CNN on real images, one local epoch (it trains for 5 to 50)."""
    if not (DATA / "mnist").exists():
        return []
    federation = benchmarks.mnist(root=DATA, silos=5, users=100)
    task = Task(cnn_mnist(), cross_entropy())
    method = replace(METHOD, local=replace(METHOD.local, batch_size=64))
    return [
        {"run": f"MNIST, d = {task.size}, U = 100, S = 5, Q = 1", "aggregator": aggregator.name}
        | phases(replace(federation, test=None), task, method, aggregator)
        for aggregator in (Plain(), Lattice(count_cap=400))
    ]


def small() -> list[dict[str, Any]]:
    """Paillier at 3072 bits: 3 silos, 20 persons, 16 parameters."""
    federation = zipf_federation(20, 3, 7, 200)
    task = Task(torch.nn.Linear(7, 2), cross_entropy())
    return [
        {"run": f"linear, d = {task.size}, U = 20, S = 3", "aggregator": aggregator.name}
        | phases(federation, task, METHOD, aggregator)
        for aggregator in (Paillier(count_cap=50), Lattice(count_cap=50))
    ]


def measure() -> list[dict[str, Any]]:
    """All of them."""
    return heart() + small() + select() + linear() + mnist()


if __name__ == "__main__":
    show_help(__doc__)
    torch.set_num_threads(1)
    for row in measure():
        print(row)
