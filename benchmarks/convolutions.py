"""Gradients of many users' convolutions at once or one user after another: CPU microseconds an image, in turn.

python benchmarks/convolutions.py

It is the reason for `find_min_to_loop`. Whole batches of users who train one after another are traced, as users at
once are; the last batches of an epoch are not. One thread, medians of seven turns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from silodp.training import Task, cross_entropy
from silodp.training.gradients import build_plain_gradient, build_traceable_gradient, put_channels_last
from silodp.training.models import cnn_mnist
from silodp.training.sgd._tracing import TracedGradient
from timing import measure_in_turn, show_help


def measure(users: int, batch: int) -> dict[str, float]:
    """Return microseconds an image of all ways."""
    task = Task(cnn_mnist(), cross_entropy())
    rows = [p.expand(users, *p.shape).clone() for p in task.unflatten(task.initial(0))]
    data = (
        torch.randn(users, batch, 1, 28, 28),
        torch.randint(0, 10, (users, batch)),
        torch.ones(users, batch),
    )
    own = [put_channels_last(task, [p[user] for p in rows], data[0][user]) for user in range(users)]
    plain = build_plain_gradient(task)
    at_once = TracedGradient(build_traceable_gradient(task), rows, data)
    alone = TracedGradient(plain, own[0], [part[0] for part in data], single_user=True)
    prepared = at_once.prepare(data)

    def take_turns(gradient: Callable[[int], object]) -> None:
        for user in range(users):
            gradient(user)

    ways: dict[str, Callable[[], object]] = {
        "at once": lambda: at_once.step(rows, prepared),
        "in turn": lambda: take_turns(
            lambda u: alone.step(own[u], alone.prepare([part[u] for part in data]))
        ),
        "in turn, untraced": lambda: take_turns(lambda u: plain(own[u], *(part[u] for part in data))),
    }
    return {name: 1e6 * seconds / users / batch for name, seconds in measure_in_turn(ways, 7).items()}


if __name__ == "__main__":
    show_help(__doc__)
    torch.set_num_threads(1)
    for users, batch in ((8, 64), (8, 32), (16, 16), (50, 4)):
        row = measure(users, batch)
        print(f"{batch} images a step:", "  ".join(f"{k} {v:.0f}" for k, v in row.items()), flush=True)
