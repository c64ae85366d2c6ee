"""benchmarks/published_sgd.py computes what the published code of ULDP-FL clips, which is not the gradient."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from silodp.training import LocalTraining, Task, binary_cross_entropy, user_updates
from silodp.training.models import logistic

sys.path.insert(0, str(Path(__file__).parents[5] / "benchmarks"))
from published_sgd import BATCH, published_updates

COUNTS = {0: 1, 3: 5, 4: BATCH, 7: BATCH + 2}
WHOLE = LocalTraining(learning_rate=1.0, epochs=1, batch_size=None)


@pytest.fixture
def case():
    """Return a task, its first parameters and the records of four persons, mixed."""
    generator = torch.Generator().manual_seed(0)
    user = torch.tensor([u for u, n in COUNTS.items() for _ in range(n)])
    user = user[torch.randperm(len(user), generator=generator)]
    x, y = torch.randn(len(user), 3, generator=generator), torch.arange(len(user)) % 2
    task = Task(logistic(3), binary_cross_entropy())
    x, y = task.tensors(x, y)
    return task, task.initial(0), x, y, user


def published_gradient(task, params, x, y, batches):
    """Follow the published loop, for one person: add mean gradient over size of one batch after another."""
    total = torch.zeros_like(params)
    for batch in batches:
        model = task.load(params).train()
        task.loss.compute(model(x[batch]), y[batch], torch.ones(len(batch))).backward()
        total += torch.cat([p.grad.reshape(-1) for p in model.parameters()]) / len(batch)
    return total


def test_the_mean_gradient_is_divided_by_the_number_of_records_again(case):
    task, params, x, y, user = case
    ((ids, right),) = user_updates(task, params, x, y, user, WHOLE, torch.Generator())
    users, rows = published_updates(task, params, x, y, user, WHOLE, torch.Generator().manual_seed(1))
    gradients = dict(zip(ids.tolist(), right, strict=True))
    assert users.tolist() == sorted(gradients) == sorted(COUNTS)
    for one, row in zip(users.tolist(), rows, strict=True):
        mine = torch.nonzero(user == one).squeeze(1)
        if len(mine) <= BATCH:  # one batch: its order does not matter
            torch.testing.assert_close(row, -published_gradient(task, params, x, y, [mine]))
            torch.testing.assert_close(row, gradients[one] / len(mine))


@pytest.mark.slow
def test_the_records_of_a_small_last_batch_count_most(case):
    task, params, x, y, user = case
    mine = torch.nonzero(user == 7).squeeze(1)
    users, rows = published_updates(task, params, x, y, user, WHOLE, torch.Generator().manual_seed(1))
    row = rows[users.tolist().index(7)]
    # Which two records are the last batch is drawn: one of all pairs gives the row.
    found = [
        torch.allclose(row, -published_gradient(task, params, x, y, [mine[rest], mine[~rest]]), atol=1e-6)
        for rest in all_but_two(len(mine))
    ]
    assert sum(found) == 1
    _, again = published_updates(task, params, x, y, user, WHOLE, torch.Generator().manual_seed(2))
    assert not torch.allclose(row, again[users.tolist().index(7)])


def all_but_two(count):
    """Yield a mask of all records but two, for each pair."""
    for first in range(count):
        for second in range(first):
            mask = torch.ones(count, dtype=torch.bool)
            mask[[first, second]] = False
            yield mask
