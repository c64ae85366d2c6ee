"""Local training beside a loop as in the reference code, and beside a non-private lower bound, measured in turn.

python benchmarks/reference.py [heart] [tcga] [creditcard] [mnist] [--epochs Q] [--profile]

"us a record" are microseconds of silodp a record and epoch, "of records" the part of the computed record gradients that
is no padding.

One process, one thread, CPU seconds of one round of local training over all silos, medians of the turns. "reference" is
a Python loop over silos and users in which each user trains a copy of the model with torch.optim.SGD, as the code that
came with ULDP-FL does, written again here. "floor" is the same number of record gradients without any user: large
batches of all records, convolutions with channels last, the fastest of three batch sizes. Where the reference takes
long, it trains every n-th pair of silo and user and is scaled by records.

With --profile it prints which of torch's operators silodp and the floor spend their time in, instead.

The benchmarks' tables are needed: `silodp data fetch NAME`, and the variable SILODP_DATA.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from silodp.training import LocalTraining, Task, binary_cross_entropy, cox, cross_entropy, user_updates
from silodp.training.models import cnn_mnist, cox_linear, logistic, mlp
from silodp.training.sgd._trainer import Trainer
from silodp_experiments import benchmarks

# name: (federation, model, loss, users, epochs, batch size, pairs of which the reference trains one, turns)
CASES: dict[str, tuple[Any, ...]] = {
    "heart": (benchmarks.heart_disease, lambda: logistic(13), binary_cross_entropy, 50, 50, 4, 1, 3),
    "tcga": (benchmarks.tcga_brca, lambda: cox_linear(39), cox, 50, 50, 8, 1, 3),
    "creditcard": (benchmarks.creditcard, mlp, cross_entropy, 100, 5, 64, 5, 9),
    "mnist": (benchmarks.mnist, cnn_mnist, cross_entropy, 100, 1, 64, 20, 2),
}

Silos = list[tuple[Tensor, Tensor, Tensor]]


def train_all(task: Task, params: Tensor, silos: Silos, local: LocalTraining) -> None:
    """Train with silodp, silo by silo."""
    for x, y, user in silos:
        for _ids, deltas in user_updates(task, params, x, y, user, local, torch.Generator().manual_seed(0)):
            deltas.sum()


def train_in_loop(task: Task, params: Tensor, silos: Silos, local: LocalTraining, every: int) -> float:
    """Train users one after another, every n-th of them; return the part of all records that they have."""
    start, seen, number = task.load(params).train(), 0, 0
    for x, y, user in silos:
        for one in user.unique():
            number += 1
            if number % every:
                continue
            mine = torch.nonzero(user == one).squeeze(1)
            seen += len(mine)
            model = copy.deepcopy(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=local.learning_rate)
            for _ in range(local.epochs):
                for batch in mine[torch.randperm(len(mine))].split(local.batch_size or len(mine)):
                    optimizer.zero_grad()
                    _loss(task, model, x[batch], y[batch]).backward()
                    optimizer.step()
            [p.detach() - q.detach() for p, q in zip(model.parameters(), start.parameters(), strict=True)]
    return seen / sum(len(y) for _, y, _ in silos)


def train_plainly(task: Task, params: Tensor, x: Tensor, y: Tensor, epochs: int, batch: int) -> None:
    """Train on all records in large batches, without users and without clipping."""
    model: nn.Module = task.load(params).train()
    if x.dim() == 4:
        model, x = (
            model.to(memory_format=torch.channels_last),
            x.contiguous(memory_format=torch.channels_last),
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for inputs, targets in zip(x.split(batch), y.split(batch), strict=True):
            optimizer.zero_grad()
            _loss(task, model, inputs, targets).backward()
            optimizer.step()


def _loss(task: Task, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return task.loss.compute(model(x), y, torch.ones(len(y)))


def measure_filling(task: Task, params: Tensor, silos: Silos, local: LocalTraining) -> float:
    """Return the part of the computed record gradients that is of records; the rest is padding."""
    train, computed = Trainer.train, 0

    def count(self: Trainer, users: Any, segments: Any, generator: Any, shapes: Any, block: int) -> Tensor:
        nonlocal computed
        planned = list(segments)
        for segment in planned:
            padded_users, width = shapes.get(segment.shape, segment.shape)
            if self.loops(width):  # one user after another, without padding
                done, counts = segment.done, users.counts[segment.users]
                places = (done + torch.arange(segment.steps).unsqueeze(1)) % local.batches(counts)
                size = local.batch_size or width
                computed += int((counts - places * size).clamp(max=size).sum())
            else:
                computed += segment.steps * width * padded_users
        return train(self, users, planned, generator, shapes, block)

    Trainer.train = count  # type: ignore[method-assign]
    try:
        train_all(task, params, silos, local)
    finally:
        Trainer.train = train  # type: ignore[method-assign]
    return local.epochs * sum(len(y) for _, y, _ in silos) / computed


def load_case(name: str, epochs: int | None) -> tuple[Task, LocalTraining, Silos]:
    """Return the task, the local training and the silos of a case."""
    source, model, loss, users, usual, batch, _, _ = CASES[name]
    federation = source(users=users)
    task, local = Task(model(), loss()), LocalTraining(0.01, epochs or usual, batch)
    silos = [
        (*task.tensors(silo.x, silo.y), torch.tensor(silo.user, dtype=torch.int64))
        for silo in federation.silos
    ]
    return task, local, silos


def profile(name: str, epochs: int | None = None) -> None:
    """Print the operators that take the most time in one silo's training, and in the floor's."""
    task, local, silos = load_case(name, epochs)
    params, (x, y, _) = task.initial(0), silos[0]
    ways = {
        "silodp": lambda: train_all(task, params, silos[:1], local),
        "floor": lambda: train_plainly(task, params, x, y, local.epochs, 4096),
    }
    for way, work in ways.items():
        work()  # traces, and warms up
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            work()
        events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
        total = sum(event.self_cpu_time_total for event in events)
        print(f"{name}, {way}: {total / 1e6:.2f} s; {total / len(y) / local.epochs:.0f} us a record")
        for event in events[:10]:
            part = event.self_cpu_time_total / total
            print(
                f"  {part:6.1%}  {event.self_cpu_time_total / len(y) / local.epochs:6.1f} us a record  {event.key}"
            )


def measure(name: str, epochs: int | None = None) -> dict[str, Any]:
    """Return one case: CPU seconds of silodp, reference and floor, and their ratios."""
    *_, users, _, batch, every, turns = CASES[name]
    task, local, silos = load_case(name, epochs)
    x, y = (torch.cat([silo[part] for silo in silos]) for part in (0, 1))
    params, seconds = task.initial(0), dict[str, list[float]]()
    sizes = {"floor, 64": 64, "floor, 512": 512, "floor, 4096": 4096}
    if name in ("heart", "tcga"):
        sizes = {"floor, all": len(y)}

    def timed(case: str, work: Callable[[], float | None]) -> None:
        begin = time.process_time()
        share = work()
        seconds.setdefault(case, []).append((time.process_time() - begin) / (share or 1.0))

    for turn in range(turns + 1):  # the first one traces, and warms up
        timed("silodp", lambda: train_all(task, params, silos, local))
        if turn:
            timed("reference", lambda: train_in_loop(task, params, silos, local, every))
        for case, size in sizes.items():
            timed(case, lambda size=size: train_plainly(task, params, x, y, local.epochs, size))
    first = seconds["silodp"][0]
    filling = measure_filling(task, params, silos, local)
    found = {k: statistics.median(v if k == "reference" else v[1:]) for k, v in seconds.items()}
    floor = min(value for case, value in found.items() if case.startswith("floor"))
    return {
        "case": f"{name} U={users} Q={local.epochs} B={batch}",
        "reference": found["reference"],
        "silodp": found["silodp"],
        "floor": floor,
        "first call": first,
        "times faster than reference": found["reference"] / found["silodp"],
        "times floor": found["silodp"] / floor,
        "us a record": 1e6 * found["silodp"] / (local.epochs * len(y)),
        "of records": filling,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=[], help=f"some of {', '.join(CASES)}; all by default")
    parser.add_argument("--epochs", type=int, help="Q, instead of the case's")
    parser.add_argument("--profile", action="store_true", help="print operators instead of times")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.cases or CASES:
        if arguments.profile:
            profile(name, arguments.epochs)
            continue
        row = measure(name, arguments.epochs)
        print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else v for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
