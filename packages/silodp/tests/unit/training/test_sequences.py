"""Recurrent networks, transformers, tied weights and embeddings beside numbers are trained like a loop over users with
ordinary autograd, the independent oracle."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from silodp.errors import SilodpError
from silodp.training import LocalTraining, Task, cross_entropy, record_gradients, silo_update
from silodp.training.sgd import RecordGradients
from support.reference import assert_equal_updates, looped, updates
from support.sequences import LENGTH, TOKENS, Mixed, Recurrent, Tied, Transformer, mixed, tokens


class Bag(nn.Module):
    """An average of embeddings, for which vmap has no rule."""

    def __init__(self):
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(TOKENS, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.bag(x))


MODELS = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "deep lstm": lambda: Recurrent(nn.LSTM, 2),
    "gru": lambda: Recurrent(nn.GRU),
    "transformer": Transformer,
    "norm first": lambda: Transformer(norm_first=True),
    "tied": Tied,
    "bag": Bag,
    "mixed": Mixed,
}


def task_of(name: str, dtype=torch.float64) -> Task:
    torch.manual_seed(0)
    return Task(MODELS[name]().to(dtype), cross_entropy())


def records(name: str):
    user = np.array([0, 2, 2, 1, 2, 0, 4, 4, 2])
    x = mixed(len(user)) if name == "mixed" else tokens(len(user))
    return x, np.random.default_rng(1).integers(0, 2, len(user)), user


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "local",
    [LocalTraining(0.3, 2), pytest.param(LocalTraining(0.05, 15, 2, 0.9, 0.01), marks=pytest.mark.slow)],
    ids=["whole", "traced"],
)
def test_users_equal_a_loop_with_ordinary_autograd(name, local):
    task = task_of(name)
    x, y, user = records(name)
    task.check(x, y)
    start = task.initial(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = updates(task, start, x, y, user, local, 2)
    assert_equal_updates(found, looped(task, start, x, y, user, local, 2), 1e-9)
    everyone = np.zeros(len(y), dtype=np.int64)
    whole = silo_update(task, start, x, y, local, torch.Generator().manual_seed(2))
    assert_equal_updates({0: whole}, looped(task, start, x, y, everyone, local, 2), 1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_records_equal_ordinary_autograd(name):
    task = task_of(name)
    x, y, _ = records(name)
    params = task.initial(0)
    inputs, targets = task.tensors(x, y)
    wanted = []
    for i in range(len(y)):
        model, record = task.load(params).train(), inputs[i : i + 1]
        outputs = model(record) if isinstance(record, torch.Tensor) else model(**record)
        nn.functional.cross_entropy(outputs, targets[i : i + 1]).backward()
        wanted.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    found = torch.cat([rows for _, rows in record_gradients(task, params, x, y)])
    assert torch.allclose(found, torch.stack(wanted), atol=1e-12)
    many = RecordGradients(task, inputs, targets, 1000, torch.Generator())
    ((_, rows),) = many.of(params, torch.tensor([3, 5]))
    assert torch.allclose(rows, torch.stack([wanted[3], wanted[5]]), atol=1e-12)


def test_a_padding_row_is_not_trained():
    task = task_of("gru")
    x, y, user = records("gru")
    start = task.initial(1)
    before = task.load(start).embedding.weight[0]
    assert torch.equal(before, torch.zeros(4, dtype=torch.float64))
    for delta in updates(task, start, x, y, user, LocalTraining(0.3, 30, 2), 2).values():
        assert torch.equal(task.load(start + delta).embedding.weight[0], before)


@pytest.mark.parametrize("changes", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_change_weights_or_count_ids_are_refused(layer, changes):
    model = nn.Sequential(layer(TOKENS, 4, **changes), nn.Flatten(), nn.Linear(4 * LENGTH, 2))
    with pytest.raises(SilodpError) as caught:
        Task(model, cross_entropy())
    assert caught.value.code == "model.embedding"
    assert next(iter(changes)) in str(caught.value)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Embedding(TOKENS, 4), nn.Flatten(), nn.Linear(4 * LENGTH, 2)),
        nn.Sequential(nn.EmbeddingBag(TOKENS, 4), nn.Linear(4, 2)),
    ],
)
def test_ids_beyond_the_rows_of_an_embedding_are_refused_on_made_up_records(model):
    task = Task(model, cross_entropy())
    ids = tokens(4)
    task.check(ids, np.array([0, 1, 1, 0]))
    ids[2, 1] = TOKENS
    with pytest.raises(SilodpError) as caught:
        task.check(ids, np.array([0, 1, 1, 0]))
    assert caught.value.code == "data.categories"


@pytest.mark.parametrize(
    "model", [Transformer(batch_first=False), nn.Sequential(nn.Embedding(TOKENS, 4), nn.LSTM(4, 2))]
)
def test_layers_that_take_the_first_dimension_for_time_are_refused_with_the_mend(model):
    if isinstance(model, nn.Sequential):

        class Last(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = model

            def forward(self, x):
                return self.layers(x)[0][:, -1]

        model = Last()
    ids = np.random.default_rng(0).integers(0, TOKENS, (4, LENGTH))
    with pytest.raises(SilodpError, match="batch_first=True") as caught:
        Task(model, cross_entropy()).check(ids, np.array([0, 1, 1, 0]))
    assert caught.value.code == "model.mixes_records"
