"""Gradients of many users' convolutions at once or one user after another: CPU microseconds an image, in turn.

python benchmarks/convolutions.py

It is the reason for `find_least_to_loop`. One thread, medians of five turns.
"""

from __future__ import annotations

import statistics
import time

import torch

from silodp.training import Task, cross_entropy
from silodp.training.gradients import build_looped_gradient, build_user_gradient
from silodp.training.models import cnn_mnist


def measure(users: int, batch: int) -> dict[str, float]:
    """Return microseconds an image of both ways."""
    task = Task(cnn_mnist(), cross_entropy())
    rows = [p.expand(users, *p.shape).clone() for p in task.unflatten(task.initial(0))]
    data = (
        torch.randn(users, batch, 1, 28, 28),
        torch.randint(0, 10, (users, batch)),
        torch.ones(users, batch),
    )
    ways = {"at once": build_user_gradient(task), "in a loop": build_looped_gradient(task)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(6):
        for name, gradient in ways.items():
            begin = time.process_time()
            gradient(*rows, *data)
            if turn:
                seconds[name].append(time.process_time() - begin)
    return {name: 1e6 * statistics.median(values) / users / batch for name, values in seconds.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for users, batch in ((8, 64), (8, 32), (16, 16), (50, 4)):
        row = measure(users, batch)
        print(f"{batch} images a step:", "  ".join(f"{k} {v:.0f}" for k, v in row.items()), flush=True)
