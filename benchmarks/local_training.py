"""How fast and how large is local training? Ratios measured in one run, repetitions interleaved, medians.

    python benchmarks/local_training.py --json

Every row of `measure()` names a case, its target and what was measured. "loop" is one Python loop over users
with `torch.optim.SGD`, timed on some of the users and scaled by their number; "floor" is the same number of
record gradients as large-batch, non-private passes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from silodp.training import LocalTraining, Task, binary_cross_entropy, cross_entropy, user_updates
from silodp.training.models import cnn_mnist, logistic, mlp
from timing import measure_in_turn

_FLOOR_BATCHES = (256, 1024, 1 << 30)


def consume(updates: Any) -> None:
    for _ids, deltas in updates:
        deltas.sum()


def ours(
    task: Task, params: torch.Tensor, x: Any, y: Any, user: Any, local: LocalTraining, **more: Any
) -> None:
    consume(user_updates(task, params, x, y, user, local, torch.Generator().manual_seed(0), **more))


def loop(task: Task, params: torch.Tensor, x: Any, y: Any, user: Any, local: LocalTraining) -> None:
    """What one writes first: a model, an optimizer and shuffled batches per user."""
    everyone = torch.as_tensor(user)
    for one in everyone.unique():
        records = torch.nonzero(everyone == one).squeeze(1)
        model = task.load(params).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=local.learning_rate)
        for _ in range(local.epochs):
            for batch in records[torch.randperm(len(records))].split(local.batch_size or len(records)):
                optimizer.zero_grad()
                task.loss.function(model(x[batch]), y[batch], torch.ones(len(batch))).backward()
                optimizer.step()
        task.flatten(model) - params


def floor(task: Task, params: torch.Tensor, x: Any, y: Any, epochs: int, batch: int) -> None:
    model = task.load(params).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for xb, yb in zip(x.split(batch), y.split(batch), strict=True):
            optimizer.zero_grad()
            task.loss.function(model(xb), yb, torch.ones(len(xb))).backward()
            optimizer.step()


def equal_users(
    task: Task, shape: tuple[int, ...], users: int, records: int, epochs: int, looped: int
) -> dict[str, float]:
    """Users of equal size, full batches: ours, the loop and the floor (the fastest of three batch sizes)."""
    torch.manual_seed(0)
    x, y = torch.randn(users * records, *shape), torch.randint(0, 2, (users * records,))
    user = torch.arange(users * records) // records
    params, local = task.initial(0), LocalTraining(0.01, epochs)
    some = slice(0, looped * records)
    begin = time.perf_counter()
    ours(task, params, x, y, user, local)
    first = time.perf_counter() - begin
    cases: dict[str, Callable[[], None]] = {
        "ours": lambda: ours(task, params, x, y, user, local),
        "loop": lambda: loop(task, params, x[some], y[some], user[some], local),
    }
    for size in _FLOOR_BATCHES:
        cases[f"floor {size}"] = lambda size=size: floor(task, params, x, y, epochs, size)
    found = measure_in_turn(cases, 3, time.perf_counter)
    least = min(seconds for name, seconds in found.items() if name.startswith("floor"))
    whole_loop = found["loop"] * users / looped
    return {
        "seconds": found["ours"],
        "first_call_seconds": first,
        "loop_seconds_scaled": whole_loop,
        "loop_users_timed": looped,
        "floor_seconds": least,
        "times_faster_than_loop": whole_loop / found["ours"],
        "times_floor": found["ours"] / least,
    }


def zipf_silos(users: int, silos: int, records: int, seed: int = 0) -> list[np.ndarray]:
    """A user per record (∝ rank^-0.5); 80 % of a user's records in one silo, the rest anywhere."""
    rng = np.random.default_rng(seed)
    share = np.arange(1, users + 1) ** -0.5
    user = rng.choice(users, records, p=share / share.sum())
    home = rng.integers(0, silos, users)
    silo = np.where(rng.random(records) < 0.8, home[user], rng.integers(0, silos, records))
    return [user[silo == s] for s in range(silos)]


def heart_like() -> dict[str, float]:
    task = Task(logistic(13), binary_cross_entropy())
    torch.manual_seed(0)
    silos = [
        (torch.randn(len(u), 13), torch.randint(0, 2, (len(u),)), torch.as_tensor(u))
        for u in zipf_silos(50, 4, 486)
    ]
    params, local = task.initial(0), LocalTraining(0.001, 50, 4)
    begin = time.perf_counter()
    for x, y, u in silos:
        ours(task, params, x, y, u, local)
    first = time.perf_counter() - begin

    def everyone(work: Callable[..., None]) -> Callable[[], None]:
        def all_silos() -> None:
            for x, y, u in silos:
                work(task, params, x, y, u, local)

        return all_silos

    found = measure_in_turn({"ours": everyone(ours), "loop": everyone(loop)}, 3, time.perf_counter)
    return {
        "pairs": sum(len(u.unique()) for _, _, u in silos),
        "seconds": found["ours"],
        "first_call_seconds": first,
        "loop_seconds": found["loop"],
        "times_faster_than_loop": found["loop"] / found["ours"],
    }


def growth() -> list[dict[str, Any]]:
    """Creditcard-like MLP, zipf sizes, 5 records a user on average, Q=10 epochs of at most 64."""
    task = Task(mlp(), cross_entropy())
    params, local = task.initial(0), LocalTraining(0.01, 10, 64)
    rows = []
    for users, silos in ((100, 1), (1000, 1), (10000, 1), (1000, 5), (1000, 20)):
        torch.manual_seed(0)
        tables = [
            (torch.randn(len(u), 30), torch.randint(0, 2, (len(u),)), u)
            for u in zipf_silos(users, silos, 5 * users)
        ]

        def all_silos(tables: list[Any] = tables) -> None:
            for table in tables:
                ours(task, params, *table, local)

        seconds = measure_in_turn({"ours": all_silos}, 3, time.perf_counter)["ours"]
        pairs = sum(len(np.unique(u)) for _, _, u in tables)
        rows.append(
            {"case": "growth", "users": users, "silos": silos, "pairs": pairs, "seconds": seconds}
            | {"milliseconds_per_pair": 1e3 * seconds / pairs}
        )
    return rows


_CHILD = """
import pathlib, re, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {here!r})
import local_training as b
from silodp.training import LocalTraining, Task, cross_entropy
from silodp.training.models import cnn_mnist
task = Task(cnn_mnist(), cross_entropy())
x, y, u = torch.randn(1600, 1, 28, 28), torch.randint(0, 10, (1600,)), torch.arange(1600) // 4
few = slice(0, 8)
b.ours(task, task.initial(0), x[few], y[few], u[few], LocalTraining(0.01, 30))  # traced: all code is loaded
def status(name):  # ru_maxrss would count the parent process too
    return int(re.search(name + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
b.ours(task, task.initial(0), x, y, u, LocalTraining(0.01, {epochs}), memory_budget={budget})
print(status("VmHWM") - before)
"""


def memory() -> list[dict[str, Any]]:
    """What a process grows by (peak resident size, in a subprocess), 400 CNN users, several budgets.

    5 epochs run interpreted, 30 traced.
    """
    rows = []
    for budget, epochs in ((8 << 20, 5), (16 << 20, 5), (64 << 20, 5), (64 << 20, 30), (256 << 20, 5)):
        code = _CHILD.format(here=str(Path(__file__).parent), budget=budget, epochs=epochs)
        child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        grown = int(child.stdout)
        row = {"case": "memory", "target": "share ≤ 1", "budget": budget, "epochs": epochs, "grown": grown}
        rows.append(row | {"share": grown / budget})
    return rows


def measure() -> list[dict[str, Any]]:
    """All cases; each a dict with `case`, `target` and numbers (seconds unless named otherwise)."""
    rows: list[dict[str, Any]] = [
        {"case": "mlp", "target": "≥ 25 × the loop, ≤ 2.5 × the floor"}
        | equal_users(Task(mlp(), cross_entropy()), (30,), 5000, 5, 30, 50),
        {"case": "cnn", "target": "≤ 2.5 × the floor"}
        | equal_users(Task(cnn_mnist(), cross_entropy()), (1, 28, 28), 400, 4, 5, 100),
        {"case": "heart", "target": "tens of times the loop"} | heart_like(),
    ]
    return rows + growth() + memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = measure()
    if arguments.json:
        print(json.dumps({"benchmark": "local_training", "threads": arguments.threads, "rows": rows}))
        return
    for row in rows:
        print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
