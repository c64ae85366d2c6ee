"""Clipped sums of single records' gradients: CPU microseconds a record, beside vmap and a plain backward pass, in turn.

python benchmarks/record_gradients.py

"products" is what DP-SGD uses for such models (training/sgd/sequential.py), "vmap" what it uses for models whose layers
are not known (`engines.py` measures other modules); both are clipped and added up. The lower bound is one backward pass
over the batch, with channels last, which clips nothing.
One thread, batches of 512 records, medians of seven turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from silodp.mechanisms.clipping import clip_rows, sum_rows
from silodp.training import Task, cross_entropy, record_gradients
from silodp.training.models import cnn_mnist, cnn_rpdp, logistic, mlp
from silodp.training.sgd import RecordGradients
from timing import measure_in_turn, show_help

BATCH = 512
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "logistic, 784 numbers, 10 classes": (lambda: logistic(784, 10), (784,)),
    "mlp, creditcard": (mlp, (30,)),
    "linear 500-512-512-10": (
        lambda: nn.Sequential(
            nn.Linear(500, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        ),
        (500,),
    ),
    "cnn_rpdp": (cnn_rpdp, (1, 28, 28)),
    "cnn_mnist": (cnn_mnist, (1, 28, 28)),
}


def add_clipped(chunks: Iterable[tuple[Tensor, Any]]) -> Tensor:
    """Return the sum of clipped rows (d,)."""
    total = torch.zeros(())
    for owners, rows in chunks:
        clipped = clip_rows(owners, rows, 1.0)
        total = total + sum_rows(clipped, clipped.factors)
    return total


def measure(model: nn.Module, shape: tuple[int, ...]) -> dict[str, float]:
    """Return microseconds a record of all ways."""
    task = Task(model, cross_entropy())
    params, batch = task.initial(0), torch.arange(BATCH)
    x, y = torch.randn(BATCH, *shape), torch.randint(0, 2, (BATCH,))
    gradients = RecordGradients(task, x, y, 1, torch.Generator())
    plain = task.load(params).train()
    images = x
    if len(shape) == 3:
        plain, images = (
            plain.to(memory_format=torch.channels_last),
            x.contiguous(memory_format=torch.channels_last),
        )
    ways: dict[str, Callable[[], object]] = {
        "products": lambda: add_clipped(gradients.of(params, batch)),
        "vmap": lambda: add_clipped(
            (batch[piece], rows) for piece, rows in record_gradients(task, params, x, y)
        ),
        "lower bound": lambda: nn.functional.cross_entropy(plain(images), y).backward(),
    }
    return {name: 1e6 * seconds / BATCH for name, seconds in measure_in_turn(ways, 7).items()}


if __name__ == "__main__":
    show_help(__doc__)
    torch.set_num_threads(1)
    for name, (build, shape) in MODELS.items():
        row = measure(build(), shape)
        print(f"{name}:", "  ".join(f"{way} {value:.3g}" for way, value in row.items()), flush=True)
