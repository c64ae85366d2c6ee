"""What one client of `ddp` pays for integers: `python benchmarks/distributed.py`.

The Fashion-MNIST network of the paper (26,010 parameters), one round of one of ten clients: 11 steps of 512 records in
expectation, of random images. CPU seconds, the compared things interleaved, medians. "gradients" are those of single
records; "integers" all that follows (clip, truncate, add up, noise, masks for nine others and a seal); "large batch" is
the same number of records in ordinary, non-private steps of the fastest size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from silodp.crypto.keys import HandshakeState, Identity
from silodp.crypto.secure_aggregation import RoundAttempt, WordGroup, apply_masks
from silodp.mechanisms.clipping import ClippedRowStream, clip_rows, sum_rows
from silodp.mechanisms.noise import Randomness
from silodp.mechanisms.quantization import Quantizer, choose_ring_bits
from silodp.methods import Ddp, FederationSize, LocalContext
from silodp.training import Task, cross_entropy
from silodp.training.models import cnn_fashion
from silodp.training.sgd import RecordGradients
from timing import measure_in_turn, show_help

CLIENTS, STEPS, BATCH, REPETITIONS = 10, 11, 512, 5
RECORDS = STEPS * BATCH


def _session() -> dict[str, Any]:
    names = [f"silo{s}" for s in range(CLIENTS)]
    openings = [HandshakeState.fresh(Identity.fresh(name), "benchmark") for name in names]
    pins = {opening.identity.name: opening.identity.public for opening in openings}
    hellos = [opening.hello for opening in openings]
    return {"silo0": openings[0].meet(hellos, pins, ""), "names": tuple(names)}


def _ordinary(task: Task, x: torch.Tensor, y: torch.Tensor, batch: int) -> None:
    model = task.load(task.initial(0)).train()
    for first in range(0, RECORDS, batch):
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[first : first + batch]), y[first : first + batch])
        loss.backward()  # type: ignore[no-untyped-call]


def measure() -> list[dict[str, Any]]:
    """One row for each, and the ratios that are aimed at."""
    torch.manual_seed(0)
    task = Task(cnn_fashion(), cross_entropy())
    x, y = torch.randn(RECORDS, 1, 28, 28), torch.randint(0, 10, (RECORDS,))
    params, population = task.initial(0), FederationSize(CLIENTS, 1)
    method = Ddp(0.5, 1.0, STEPS, BATCH / RECORDS, BATCH, 0.1)
    bounds = method.bounds(population)
    grid = Quantizer.from_bounds(bounds)
    ring, met = WordGroup(task.size, choose_ring_bits(bounds, grid, CLIENTS)), _session()
    attempt = RoundAttempt(0, 0, 0, met["names"], "benchmark")
    gradient = RecordGradients(task, x, y, STEPS, torch.Generator())
    kept = list(gradient.of(params, torch.arange(BATCH)))
    weights = torch.ones(1, dtype=torch.float64)

    def gradients() -> None:
        for step in range(STEPS):
            for _ in gradient.of(params, torch.arange(step * BATCH, (step + 1) * BATCH)):
                pass

    def integers() -> None:
        def chunks() -> Any:
            for _ in range(STEPS):
                for owners, rows in kept:
                    clipped = clip_rows(owners, -rows, 1.0)
                    sum_rows(clipped, clipped.factors)  # what moves the local model
                    yield clipped

        stream = ClippedRowStream(chunks(), task.size, bounds, weighted=False)
        share = grid.add_noise(stream, weights, Randomness.secret().stream())
        apply_masks(ring.from_integers(share.value), ring, met["silo0"], attempt)

    def whole() -> None:
        work = LocalContext(
            task, params, x, y, torch.zeros(RECORDS), weights, population, Randomness.secret()
        )
        grid.add_noise(method.local_update(work), weights, work.randomness.stream("share noise"))

    cases: dict[str, Callable[[], None]] = {"gradients": gradients, "integers": integers, "a round": whole}
    for batch in (128, 256, 512, 2048):
        cases[f"large batch {batch}"] = lambda batch=batch: _ordinary(task, x, y, batch)
    found = measure_in_turn(cases, REPETITIONS)
    floor = min(seconds for name, seconds in found.items() if name.startswith("large"))
    rows: list[dict[str, Any]] = [{"case": name, "seconds": seconds} for name, seconds in found.items()]
    rows.append(
        {"ratio": "integers / gradients", "target": "< 1", "is": found["integers"] / found["gradients"]}
    )
    rows.append({"ratio": "gradients / large batch", "target": "≤ 2.5", "is": found["gradients"] / floor})
    return rows


if __name__ == "__main__":
    show_help(__doc__)
    torch.set_num_threads(1)
    for row in measure():
        print(row)
