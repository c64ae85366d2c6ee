"""What training does on a GPU: sums and runs of the CPU, one clip at any magnitude, and how long it takes.

    PYTHONPATH=packages/silodp/tests python benchmarks/gpu.py
    PYTHONPATH=packages/silodp/tests python benchmarks/gpu.py --device cpu --small

The first needs less than ten minutes beside 16 cores; the second, to try the program, 90 CPU seconds. Where the
packages are not installed, add every packages/*/src to PYTHONPATH.

The tables of single records' and of persons' gradients are those of engines.py, whose models of packages are left out
where these are not installed. In the last table "loop" is one optimizer per user, timed
on 20 users and scaled by their number; "floor" is the same number of record gradients in batches of 4,096 or smaller,
the fastest of three sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import engines
import silodp
from attacks.test_extreme_inputs import (
    MAGNITUDES,
    MODELS,
    make_records,
    measure_move,
    sum_gradients,
    sum_updates,
)
from silodp.mechanisms.clipping import clip_rows
from silodp.methods import Ddp, Method, UldpAvg, UldpSgd
from silodp.training import LocalTraining, Task, user_updates
from silodp.training import cross_entropy as make_cross_entropy
from silodp.training.losses import squared_error
from silodp.training.models import cnn_mnist
from silodp.training.sgd import RecordGradients
from support.oracles import small_federation
from timing import measure_in_turn

SEVERAL = LocalTraining(0.02, 3, batch_size=2, momentum=0.9)
METHODS: dict[str, Method] = {
    "uldp-avg": UldpAvg(1.0, 0.5, LocalTraining(0.1, 2, 4)),
    "uldp-sgd": UldpSgd(1.0, 0.5),
    "ddp": Ddp(1.0, 0.5, 2, 0.5, 4.0, 0.5),
}


def make_dense() -> nn.Module:
    """Return a network of two layers for images of 28 × 28."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {
    "cnn_mnist, 1,000 users of 20, 2 epochs": (cnn_mnist, 1000, 20, 2),
    "cnn_mnist, 2,000 users of 30, 5 epochs": (cnn_mnist, 2000, 30, 5),
    "784-300-10, 500 users of 40, 2 epochs": (make_dense, 500, 40, 2),
}


def build(make: Callable[[], nn.Module], device: str, loss: object) -> Task:
    """Return a task whose model has the same parameters on every device."""
    torch.manual_seed(0)
    return Task(make().to(device), loss)


def compare_sums(kind: str, device: str) -> dict[str, float]:
    """Return by how much sums of updates and of gradients differ from those of the CPU, relative to these."""
    make, shape = MODELS[kind]
    x, y = make_records(60, shape, 3.0)
    sums: dict[str, list[torch.Tensor]] = {}
    for where in ("cpu", device):
        task = build(make, where, squared_error())
        arguments = task, task.initial(0), x.to(where), y.to(where)
        found = {
            "updates, one step": sum_updates(*arguments, LocalTraining(0.1, 1)),
            "updates, batches": sum_updates(*arguments, SEVERAL),
            "gradients, at once": sum_gradients(*arguments, 1),
            "gradients, traced": sum_gradients(*arguments, 50),
        }
        for name, add in found.items():
            sums.setdefault(name, []).append(add(60).cpu())
    return {name: float((there - here).norm() / here.norm()) for name, (here, there) in sums.items()}


def find_largest_move(kind: str, device: str) -> float:
    """Return by how many clips one person or record of any magnitude moves a sum, at most."""
    make, shape = MODELS[kind]
    task, moves = build(make, device, squared_error()), []
    start = task.initial(0)
    for magnitude in MAGNITUDES:
        for count in (17, 65):
            x, y = (array.to(device) for array in make_records(count, shape, magnitude))
            moves += [measure_move(sum_gradients(task, start, x, y, batches), count) for batches in (1, 50)]
            if count == 17:
                moves += [
                    measure_move(sum_updates(task, start, x, y, local), count)
                    for local in (LocalTraining(0.1, 1), LocalTraining(0.1, 3, batch_size=2))
                ]
    return max(moves)


def compare_runs(name: str, aggregator: str, device: str) -> tuple[float, bool, bool]:
    """Return how far a run's model is from the CPU's, whether a repetition is equal, and whether ε are."""
    federation = small_federation(held_out=30)
    width, found = federation.silos[0].x.shape[1], []

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 2))

    for where in ("cpu", device, device):
        task = build(make, where, make_cross_entropy())
        result = silodp.train(federation, task, METHODS[name], rounds=5, seed=1, aggregator=aggregator)
        found.append((result.params.cpu().double(), [one.epsilon for one in result.guarantees.values()]))
    (cpu, epsilon), (first, same), (second, _) = found
    return float((first - cpu).norm() / cpu.norm()), torch.equal(first, second), epsilon == same


def read_clock(device: str) -> float:
    """Return seconds of the wall, when all work on the device is done."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def list_record_ways(model: str, device: str) -> dict[str, Callable[[], Any]]:
    """Return the ways of engines.py for its batch of records."""
    make, draw = engines.MODELS[model]
    torch.manual_seed(1)
    x, y = draw(), torch.randint(engines.CLASSES, (engines.RECORDS,))
    return engines.list_ways(make, x.to(device), y.to(device))


def print_ways(model: str, list_ways: Callable[[str, str], dict[str, Callable[[], Any]]], given: Any) -> None:
    """Print the milliseconds of every way on the CPU and the device, and how far silodp's sums (d,) are apart.

    With dropout each device draws its own.
    """
    wanted = None
    for where in dict.fromkeys(("cpu", given.device)):
        ways = list_ways(model, where)
        taken = measure_in_turn(
            ways, 1 if given.small else engines.TURNS, lambda where=where: read_clock(where)
        )
        total = ways["silodp"]().cpu()
        wanted = total if wanted is None else wanted
        apart = "–" if model in engines.DROPPING else f"{float((total - wanted).norm() / wanted.norm()):.1e}"
        for way, seconds in taken.items():
            ratio = taken["silodp"] / seconds
            print(f"| {model}, {where} | {way} | {1e3 * seconds:.3g} | {ratio:.2f} | {apart} |", flush=True)


def measure(work: Callable[[], None], device: str, repetitions: int = 3) -> float:
    """Return the median of the seconds that some work takes, after it was done once."""
    seconds = []
    for _ in range(repetitions + 1):
        begin = read_clock(device)
        work()
        seconds.append(read_clock(device) - begin)
    return float(np.median(seconds[1:]))


def measure_case(case: str, device: str, small: bool) -> dict[str, float]:
    """Return the seconds of one case on a device."""
    make, users, records, epochs = CASES[case]
    users = 40 if small else users
    task, local = build(make, device, make_cross_entropy()), LocalTraining(0.01, epochs)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(users * records, 1, 28, 28, generator=generator).to(device)
    y = torch.randint(0, 10, (users * records,), generator=generator).to(device)
    user, start = torch.arange(users * records) // records, task.initial(0)
    steps = RecordGradients(task, x, y, 4, torch.Generator().manual_seed(0))

    def train_together() -> None:
        for _, updates in user_updates(task, start, x, y, user, local, torch.Generator().manual_seed(0)):
            updates.sum()

    def clip_gradients() -> None:
        for owners, rows in steps.of(start, torch.arange(min(2000, len(x)))):
            clip_rows(owners, rows, 1.0).factors.sum()

    def train(parts: list[slice]) -> None:
        model = task.load(start).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for part in parts * epochs:
            optimizer.zero_grad()
            cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()

    def train_in_turn() -> None:
        for one in range(20):
            train([slice(one * records, (one + 1) * records)])

    def cut(size: int) -> list[slice]:
        return [slice(first, first + size) for first in range(0, len(x), size)]

    return {
        "together": measure(train_together, device),
        "loop": measure(train_in_turn, device, 1) * users / 20,
        "floor": min(measure(lambda size=size: train(cut(size)), device, 1) for size in (256, 1024, 4096)),
        "2,000 clipped gradients": measure(clip_gradients, device),
    }


def main() -> None:
    """Print the tables of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="40 users, to try the program")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = given.device
    # The products of TensorFloat-32 have ten bits: sums would be compared with those of another precision.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    name = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    print(f"{name}, torch {torch.__version__}, {os.cpu_count()} cores")
    print("| model | largest difference of sums | clips moved, at most |\n|---|---|---|")
    for kind in MODELS:
        print(
            f"| {kind} | {max(compare_sums(kind, device).values()):.1e} | {find_largest_move(kind, device):.6f} |"
        )
    print("| run | difference of models | repeats its bits | same ε |\n|---|---|---|---|")
    for method in METHODS:
        for aggregator in ("plain", "masked"):
            moved, repeats, same = compare_runs(method, aggregator, device)
            print(f"| {method}, {aggregator} | {moved:.1e} | {repeats} | {same} |")
    print(f"| clipped sum of {engines.RECORDS} records' gradients | way | ms | silodp / it | difference |")
    print("|---|---|---|---|---|", flush=True)
    for model in engines.MODELS:
        print_ways(model, list_record_ways, given)
    print(f"| clipped sum of {engines.PERSONS} persons' steps | way | ms | silodp / it | difference |")
    print("|---|---|---|---|---|", flush=True)
    for model in engines.PERSON_MODELS:
        with contextlib.suppress(ImportError):
            print_ways(model, engines.list_steps, given)
    print(
        "| seconds | together | loop | floor | 2,000 clipped gradients |\n|---|---|---|---|---|", flush=True
    )
    for case in CASES:
        for where in dict.fromkeys(("cpu", device)):
            row = measure_case(case, where, given.small).values()
            print(f"| {case}, {where} | {' | '.join(f'{one:.3g}' for one in row)} |", flush=True)


if __name__ == "__main__":
    main()
