"""Models chosen by the server: what one person's records move in a sum that others are in, too.

Attacked is the bound of a sum: one person moves it by at most one clip. Silos compute the updates of many persons (or
records) side by side, so whether one of them is there decides shapes and code paths of the computation, and with them
the last bits of all others' updates. A model with large weights that cancel each other turns last bits into whole
updates: every value is finite, and the shape is right, so a silo's gate admits it. Then ε, which is charged for one
clip, is not what the server learns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from silodp.mechanisms.clipping import clip_rows
from silodp.training.counts import CountTable
from silodp.training.losses import binary_cross_entropy
from silodp.training.sgd import LocalTraining, RecordGradients, user_updates
from silodp.training.task import Task

FEATURES, HIDDEN = 30, 32


def mlp(hidden: int = HIDDEN) -> Task:
    model = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    return Task(model, binary_cross_entropy())


def cancelling_weights(hidden: int = HIDDEN, seed: int = 0) -> Tensor:
    """Return parameters of `mlp`: hidden units that are 1 for every record, and outputs of them that add up to 0."""
    weights = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed)) * 1e8
    bias = -weights.double().sum().float()
    return torch.cat([torch.zeros(hidden * FEATURES), torch.ones(hidden), weights.flatten(), bias.reshape(1)])


def records(counts: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    user = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    x = torch.from_numpy(rng.normal(size=(len(user), FEATURES)).astype(np.float32))
    return x, torch.from_numpy(rng.integers(0, 2, len(user))), user


def add_updates(task: Task, params: Tensor, data: tuple[Tensor, ...], local: LocalTraining) -> Tensor:
    """Return the sum of all users' updates, each clipped to 1."""
    total = torch.zeros(task.size, dtype=torch.float64)
    for users, rows in user_updates(task, params, *data, local, torch.Generator().manual_seed(1)):
        total += clip_rows(users, rows, 1.0).factors @ rows.double()
    return total


def test_one_person_moves_a_sum_of_updates_by_many_clips() -> None:
    task, local = mlp(), LocalTraining(0.1, 5)
    x, y, user = records([1] * 128 + [17])
    others = user != 128
    with_person = add_updates(task, cancelling_weights(), (x, y, user), local)
    without = add_updates(task, cancelling_weights(), (x[others], y[others], user[others]), local)
    moved = float((with_person - without).norm())
    print(f"one person of 129, training: the sum of updates moves by {moved:.2f} clips")
    assert moved > 2


def test_one_record_moves_a_sum_of_gradients_by_more_than_a_clip() -> None:
    task = mlp(16)
    x, y, _ = records([400])

    def add_gradients(batch: int, seed: int) -> Tensor:
        total = torch.zeros(task.size, dtype=torch.float64)
        gradients = RecordGradients(task, x, y, 1, torch.Generator())
        for rows, values in gradients.of(cancelling_weights(16, seed), torch.arange(batch)):
            total += clip_rows(rows, values, 1.0).factors @ values.double()
        return total

    moved = max(
        float((add_gradients(n, seed) - add_gradients(n - 1, seed)).norm())
        for n in (4, 8, 16, 28, 32, 64)
        for seed in range(4)
    )
    print(f"one record of a batch, DP-SGD: the sum of gradients moves by {moved:.2f} clips")
    assert moved > 1.5


def test_one_persons_held_out_record_moves_a_sum_of_counts_by_several_clips() -> None:
    task, table = mlp(16), CountTable("scores")
    x, y, _ = records([40])

    def add_counts(first: int, seed: int) -> Tensor:
        cells = table.find_cells(task.predict(cancelling_weights(16, seed), x[first:]), y[first:])
        return torch.bincount(cells, minlength=table.size).double()

    moved = max(float((add_counts(0, seed) - add_counts(1, seed)).norm()) for seed in range(4))
    print(f"one held-out record of 40, evaluation by sums: the sum of counts moves by {moved:.2f} clips")
    assert moved > 2


def test_a_step_turns_last_bits_of_honest_updates_into_whole_ones() -> None:
    """Updates scaled to one norm, of persons whose gradient is zero or one last bit: no chosen model is needed."""
    features = 6
    task = Task(nn.Linear(features, 1), binary_cross_entropy())
    rng = np.random.default_rng(0)
    rows, labels, counts = [], [], []
    for _ in range(200):  # every person has as many labels 0 as 1 in each category
        words = rng.integers(0, 3, rng.integers(2, 16))
        x = np.zeros((2 * len(words), features), np.float32)
        x[np.arange(len(x)), np.tile(words, 2)] = 1
        x[:, 3], x[:, 4] = rng.choice([-1, 1]), 0.3
        order = rng.permutation(len(x))
        rows.append(x[order])
        labels.append(np.repeat([0, 1], len(words))[order])
        counts.append(len(x))
    person = rng.normal(size=(40, features)).astype(np.float32)
    data = (
        torch.from_numpy(np.concatenate([*rows, person])),
        torch.from_numpy(np.concatenate([*labels, np.arange(40) % 2])),
        torch.from_numpy(np.repeat(np.arange(201), [*counts, 40])),
    )
    others = data[2] != 200

    def add_directions(x: Tensor, y: Tensor, user: Tensor) -> Tensor:
        total = torch.zeros(task.size, dtype=torch.float64)
        one = LocalTraining(1.0, 1)
        for users, updates in user_updates(task, torch.zeros(task.size), x, y, user, one, torch.Generator()):
            total += clip_rows(users, updates, 1.0, normalize=True).factors @ updates.double()
        return total

    moved = float((add_directions(*data) - add_directions(*(part[others] for part in data))).norm())
    print(f"one person of 201, `step`, start at zero: the sum of updates moves by {moved:.2f} clips")
    assert moved > 2
