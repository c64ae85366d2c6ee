"""Lookups of ids: the updates of many users, who train together, are those of each user alone.

`torch.func.vmap` has wrong rules for some options of lookups: there, one person's update depended on who else had
records.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from silodp.errors import SilodpError
from silodp.training import LocalTraining, Task, cross_entropy, gradients, record_gradients
from support.reference import assert_equal_updates, looped, updates


class Lookup(nn.Module):
    """Looks up ids in one table, by any function of table and ids."""

    def __init__(self, look_up, rows=7):
        super().__init__()
        self.table, self.last = nn.Embedding(rows, 4), nn.Linear(4, 2)
        self.look_up = look_up

    def forward(self, x):
        found = self.look_up(self.table.weight, x)
        return self.last(found if found.dim() == 2 else found.mean(1))


class Layer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 2)

    def forward(self, x):
        found = self.layer(x)
        return self.last(found if found.dim() == 2 else found.mean(1))


def tied():
    """The table is the last layer too, which does train the row of padding."""
    model = Lookup(lambda weight, x: F.embedding(x, weight, padding_idx=0).mean(1))
    model.last = nn.Linear(4, 7, bias=False)
    model.last.weight = model.table.weight
    return model


MODELS = {
    "padding": lambda: Layer(nn.Embedding(7, 4, padding_idx=0)),
    "padding at the end": lambda: Layer(nn.Embedding(7, 4, padding_idx=-2)),
    "no padding": lambda: Layer(nn.Embedding(7, 4)),
    "function": lambda: Lookup(lambda weight, x: F.embedding(x, weight, padding_idx=0)),
    "by name": lambda: Lookup(lambda weight, x: F.embedding(input=x, weight=weight, padding_idx=-7)),
    "torch.embedding": lambda: Lookup(lambda weight, x: torch.embedding(weight, x, 0)),
    "operation": lambda: Lookup(lambda weight, x: torch.ops.aten.embedding(weight, x, padding_idx=0)),
    "overload": lambda: Lookup(lambda weight, x: torch.ops.aten.embedding.default(weight, x, 0)),
    "tied": tied,
    "bag": lambda: Layer(nn.EmbeddingBag(7, 4, padding_idx=0)),
    "bag of sums": lambda: Layer(nn.EmbeddingBag(7, 4, mode="sum", padding_idx=0)),
    "bag of maxima": lambda: Layer(nn.EmbeddingBag(7, 4, mode="max", padding_idx=0)),
    "index": lambda: Lookup(lambda weight, x: weight[x]),
}


def records(sizes, padding):
    rng = np.random.default_rng(2)
    user = np.repeat(np.arange(len(sizes)), sizes)
    x = rng.integers(0, 7, (len(user), 5))
    x[:, 3:] = padding
    return x, rng.integers(0, 2, len(user)), user


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("local", [LocalTraining(0.3, 2), LocalTraining(0.3, 20, 2, 0.9, 0.01)])
def test_users_together_get_the_updates_of_each_alone(name, local):
    torch.manual_seed(0)
    task = Task(MODELS[name]().double(), cross_entropy())
    x, y, user = records([3, 1, 6, 2], padding=5 if "end" in name else 0)
    task.check(x, y)
    start = task.initial(1) + 0.1  # also the row of padding
    found = updates(task, start, x, y, user, local, 2)
    assert_equal_updates(found, looped(task, start, x, y, user, local, 2), 1e-12)


@pytest.mark.parametrize("name", ["padding", "function"])
def test_records_together_get_the_gradients_of_each_alone(name):
    task = Task(MODELS[name]().double(), cross_entropy())
    x, y, _ = records([6], padding=0)
    start = task.initial(0)
    found = torch.cat([rows for _, rows in record_gradients(task, start, x, y)])
    tensors = [task.unflatten(start), *task.tensors(x, y)]
    for build in (gradients.build_expanded_record_gradient, gradients.build_looped_record_gradient):
        again = torch.cat([part.flatten(1) for part in build(task)(*tensors)], 1)
        torch.testing.assert_close(found, again, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "look_up",
    [
        lambda weight, x: F.embedding(x, weight, scale_grad_by_freq=True),
        lambda weight, x: F.embedding(x, weight, None, 100.0),
        lambda weight, x: F.embedding(x, weight, sparse=True),
        lambda weight, x: F.embedding_bag(x, weight, scale_grad_by_freq=True),
        lambda weight, x: F.embedding_bag(x, weight, max_norm=100.0),
        lambda weight, x: torch.embedding(weight, x, -1, True),
        lambda weight, x: torch.ops.aten.embedding.default(weight, x, scale_grad_by_freq=True),
    ],
)
def test_options_of_a_function_are_refused_as_those_of_a_layer(look_up):
    """Frequencies count the padding of a batch, which is as long as the other persons' batches make it."""
    with pytest.raises(SilodpError) as caught:
        Task(Lookup(look_up), cross_entropy()).check(*records([3, 3], padding=0)[:2])
    assert caught.value.code == "model.embedding"
