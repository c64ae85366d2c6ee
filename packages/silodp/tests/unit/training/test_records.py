"""Per-record gradients of many small batches: the traced ones are the plain ones."""

import numpy as np
import pytest
import torch
from torch import nn

from silodp.training.losses import cross_entropy
from silodp.training.sgd.records import RecordGradients, record_gradients
from silodp.training.task import Task
from support.oracles import expand_rows, logistic_task


def records(n: int = 70, features: int = 4, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, features)).astype(np.float32)
    return x, rng.integers(classes, size=n)


def mlp() -> Task:
    return Task(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), cross_entropy(), {})


def many(task: Task, x: np.ndarray, y: np.ndarray, batches: int = 50, seed: int = 0) -> RecordGradients:
    return RecordGradients(task, x, y, batches, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("task", [logistic_task(), mlp()], ids=["logistic", "mlp"])
@pytest.mark.parametrize("batches", [1, 50])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 70])
def test_traced_gradients_are_the_gradients(task, batches, size):
    x, y = records(classes=2)
    params = task.initial(1)
    batch = torch.from_numpy(np.random.default_rng(1).permutation(70)[:size])
    chunks = list(many(task, x, y, batches).of(params, batch))
    owners = torch.cat([owner for owner, _ in chunks]) if chunks else torch.empty(0)
    assert owners.tolist() == batch.tolist()
    if size:
        plain = torch.cat(
            [rows for _, rows in record_gradients(task, params, x[batch.numpy()], y[batch.numpy()])]
        )
        torch.testing.assert_close(torch.cat([expand_rows(rows) for _, rows in chunks]), plain)


def test_many_small_batches_share_few_traces_and_few_or_large_ones_none():
    x, y = records()
    task, params = logistic_task(), logistic_task().initial(0)
    gradients = many(task, x, y)
    for size in range(1, 65):
        list(gradients.of(params, torch.arange(size)))
    traces = [key for key in task.engine._built if key[0] == "records"]
    assert sorted(key[-1] for key in traces) == [16, 32, 64]
    wide = Task(nn.Linear(50_000, 1), logistic_task().loss, {})
    x, y = records(features=50_000)
    list(many(wide, x, y).of(wide.initial(0), torch.arange(64)))
    list(many(task, *records(), batches=3).of(params, torch.arange(65)))
    assert not any(key[0] == "records" for key in wide.engine._built)
    assert len([key for key in task.engine._built if key[0] == "records"]) == 3


@pytest.mark.parametrize("batches", [1, 50])
def test_dropout_draws_for_each_record_and_batch_and_repeats_with_the_generator(batches):
    task = Task(nn.Sequential(nn.Linear(4, 40), nn.Dropout(0.5), nn.Linear(40, 2)), cross_entropy(), {})
    x, y = np.ones((20, 4), np.float32), np.zeros(20, np.int64)  # all alike: only dropout tells them apart
    params, batch = task.initial(0), torch.arange(20)
    before = torch.get_rng_state()
    first, second = [dict(enumerate(many(task, x, y, batches).of(params, batch)))[0][1] for _ in range(2)]
    gradients = many(task, x, y, batches)
    (_, one), (_, two) = *gradients.of(params, batch), *gradients.of(params, batch)
    first, second, one, two = map(expand_rows, (first, second, one, two))
    assert torch.equal(first, second)
    assert torch.equal(first, one)
    assert not torch.equal(one, two)
    assert len(torch.unique(one, dim=0)) == 20
    assert torch.equal(torch.get_rng_state(), before), "torch's own generator is put back"
