"""Workers: the same model for any number of them, how much faster a round gets, and what a worker costs.

python benchmarks/workers.py TASK [WORKERS ...]; TASK is a function below. WORKERS are 0 (this process), 1 and 2, unless
others are named. Run it with OMP_NUM_THREADS=1: workers compute with one thread, and so must the process they are
compared with. Data sets come from ../shared/data, or from SILODP_DATA.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import psutil

import silodp
from silodp.aggregators.run_spec import RunSpec
from silodp.config.resolve import load_config
from silodp.methods import UldpAvg
from silodp.runtime.executor import make_executor
from silodp.runtime.prepare import prepare_run
from silodp.runtime.simulation import Simulation
from silodp.runtime.train import run
from silodp.training import binary_cross_entropy
from silodp.training.models import logistic
from timing import show_help

EXAMPLES = Path(__file__).parents[1] / "examples"
DATA = Path(os.environ.get("SILODP_DATA", "../shared/data")).resolve()

Problem = tuple[RunSpec, silodp.Federation, silodp.Task]


def example(name: str, rounds: int, *changes: str) -> Problem:
    """Return a run of examples/, with a seed."""
    settings = [f"data.root={DATA}", "seed=0", f"rounds={rounds}", f"evaluate_every={rounds}", *changes]
    resolved = load_config(EXAMPLES / f"{name}.toml", settings)
    federation = resolved.load_federation()
    task = resolved.build_task(federation)
    return resolved.prepare(federation, task), federation, task


def heart() -> Problem:
    """4 silos of some hundred records."""
    return example("heart_disease", 20)


def creditcard() -> Problem:
    """5 silos."""
    return example("creditcard", 6)


def mnist(silos: int = 5) -> Problem:
    """60,000 images, and the network of 21,000 parameters."""
    return example("mnist", 4, f"data.silos={silos}")


def mnist100() -> Problem:
    """The same in 100 silos."""
    return mnist(100)


def million() -> Problem:
    """10^6 persons, each with three records of 20 features in five silos."""
    generator = np.random.default_rng(0)
    users, silos, records = 1_000_000, 5, 3
    user = np.repeat(np.arange(users), records)
    x = generator.standard_normal((len(user), 20), dtype=np.float32)
    y, place = (x[:, 0] > 0).astype(np.int64), generator.integers(silos, size=len(user))
    tables = tuple(
        silodp.SiloData(f"silo-{s}", x[place == s], y[place == s], user[place == s]) for s in range(silos)
    )
    federation = silodp.Federation(tables, users, None, classes=2)
    task = silodp.Task(logistic(20), binary_cross_entropy())
    method = UldpAvg(5.0, 0.1, silodp.LocalTraining(learning_rate=0.1, epochs=2, batch_size=2))
    return prepare_run(federation, task, method, rounds=3, aggregator="masked", seed=0), federation, task


def nothing() -> Problem:
    """Two silos of one record: what is left is the cost of asking workers."""
    tables = tuple(
        silodp.SiloData(
            f"silo-{s}", np.zeros((1, 2), np.float32), np.zeros(1, np.int64), np.zeros(1, np.int64)
        )
        for s in range(2)
    )
    federation = silodp.Federation(tables, 1, None, classes=2)
    task = silodp.Task(logistic(2), binary_cross_entropy())
    method = UldpAvg(5.0, 0.1, silodp.LocalTraining(learning_rate=0.1))
    return prepare_run(federation, task, method, rounds=30, seed=0), federation, task


def main() -> None:
    """Print a row for each number of workers."""
    problem, *counts = sys.argv[1:]
    spec, federation, task = globals()[problem]()
    print(f"{problem}: {len(federation.silos)} silos, {federation.users:,} persons, d = {task.size:,}")
    print("workers  first round s  later rounds s  start s  MB a worker  digest of the model")
    for count in map(int, counts or (0, 1, 2)):
        sizes: list[float] = []

        def measure(_: object, sizes: list[float] = sizes) -> None:
            workers = [
                one
                for one in psutil.Process().children(recursive=True)
                if "_Worker" in " ".join(one.cmdline())
            ]
            sizes.extend(one.memory_full_info().uss / 2**20 for one in workers)

        started = time.perf_counter()
        result = run(
            spec, Simulation(federation, task, make_executor(count or None)), callbacks=[measure],
            evaluate_every=spec.rounds,
        )  # fmt: skip
        whole = time.perf_counter() - started
        seconds = [row["seconds"] for row in result.metrics if row.get("seconds") is not None]
        digest = hashlib.sha256(result.params.numpy().tobytes()).hexdigest()[:16]
        print(
            f"{count:7}  {seconds[0]:13.2f}  {median(seconds[2:]):14.4f}  {whole - sum(seconds):7.1f}  "
            f"{max(sizes, default=0):11.0f}  {digest}",
            flush=True,
        )


if __name__ == "__main__":
    show_help(__doc__)
    main()
