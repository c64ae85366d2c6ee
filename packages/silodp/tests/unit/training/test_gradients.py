"""Models that `torch.func` cannot run for many users at once are trained one user, or record, after another, with the
results of plain autograd."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from silodp.errors import SilodpError
from silodp.training import LocalTraining, Loss, Task, cross_entropy, gradients, record_gradients, silo_update
from silodp.training.sgd import RecordGradients
from support.reference import assert_equal_updates, looped, ragged, updates


class WritesInPlace(nn.Module):
    """Fills a part of zeros, which vmap refuses."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        wide = torch.zeros(len(x), 4, dtype=x.dtype)
        part = wide[:, :3]
        part += x
        return self.last(wide)


class Branches(nn.Module):
    """Decides by values, record by record."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        return torch.stack([self.last(r if r[0].item() > 0 else r.square()) for r in x])


def own_loss() -> Loss:
    """A loss that vmap cannot run."""

    def by_record(outputs, targets):
        return torch.stack([o[int(t)].square() + o.sum() for o, t in zip(outputs, targets, strict=True)])

    return Loss.per_record("by record", by_record)


def tasks() -> list[Task]:
    torch.manual_seed(0)
    return [
        Task(WritesInPlace().double(), cross_entropy()),
        Task(Branches().double(), cross_entropy()),
        Task(nn.Linear(3, 2).double(), own_loss()),
    ]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("local", [LocalTraining(0.1, 3), LocalTraining(0.1, 30, 2, 0.9, 0.01)])
def test_users_are_trained_one_after_another_where_vmap_fails(which, local):
    task = tasks()[which]
    x, y, user = ragged([4, 1, 0, 7, 3], 1)
    task.check(x, y)
    start = task.initial(1)
    found = updates(task, start, x, y, user, local, 2)
    assert_equal_updates(found, looped(task, start, x, y, user, local, 2), 1e-10)
    everyone = np.zeros(len(x), dtype=np.int64)
    whole = silo_update(task, start, x, y, local, torch.Generator().manual_seed(2))
    assert_equal_updates({0: whole}, looped(task, start, x, y, everyone, local, 2), 1e-10)


@pytest.mark.parametrize("which", range(3))
def test_gradients_of_records_are_taken_one_after_another_where_vmap_fails(which):
    task = tasks()[which]
    x, y, _ = ragged([9], 1)
    params = task.initial(0)
    inputs, targets = task.tensors(x, y)
    wanted = []
    for i in range(len(x)):
        model = task.load(params).train()
        task.loss.compute(model(inputs[i : i + 1]), targets[i : i + 1], torch.ones(1)).backward()
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        wanted.append(torch.cat([part.flatten() for part in parts]))
    found = torch.cat([rows for _, rows in record_gradients(task, params, x, y)])
    assert torch.allclose(found, torch.stack(wanted), atol=1e-12)
    many = RecordGradients(task, inputs, targets, 1000, torch.Generator())
    ((records, rows),) = many.of(params, torch.tensor([3, 5]))
    assert torch.equal(records, torch.tensor([3, 5]))
    assert torch.allclose(rows, torch.stack([wanted[3], wanted[5]]), atol=1e-12)


def test_it_is_announced_once(caplog):
    task = tasks()[1]
    x, y, user = ragged([4, 1], 1)
    with caplog.at_level(logging.WARNING, logger="silodp"):
        task.check(x, y)
        updates(task, task.initial(0), x, y, user, LocalTraining(0.1), 0)
        list(record_gradients(task, task.initial(0), x, y))
    assert len(caplog.records) == 1
    assert "Branches" in caplog.text


class OneAtATime(nn.Linear):
    def forward(self, x):
        if torch._C._functorch.is_batchedtensor(x):
            raise RuntimeError("one at a time")
        return super().forward(x)


def test_the_announcement_has_the_reason_and_asks_for_no_correction(caplog):
    x, y, _ = ragged([4], 1)
    with caplog.at_level(logging.WARNING, logger="silodp"):
        Task(OneAtATime(3, 2), cross_entropy()).check(x, y)
    assert caplog.messages[0].endswith("the reason: RuntimeError: one at a time")


class BreaksBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1

    @staticmethod
    def backward(context, gradient):
        raise ValueError("no derivative here")


class NoDerivative(nn.Linear):
    def forward(self, x):
        return BreaksBackward.apply(super().forward(x))


def test_what_ordinary_autograd_cannot_differentiate_is_refused_before_training():
    with pytest.raises(SilodpError) as caught:
        Task(NoDerivative(3, 2), cross_entropy()).check(np.ones((4, 3), np.float32), np.array([0, 1, 1, 0]))
    assert caught.value.code == "model.no_gradient"


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.GroupNorm(3, 6), (6,)),
        (nn.GroupNorm(1, 6, affine=False, eps=0.1), (6,)),
        (nn.GroupNorm(2, 6), (6, 5, 4)),
        (nn.GroupNorm(6, 6), (6, 7)),
    ],
)
@pytest.mark.parametrize("steps", [2, 30])
def test_group_norm_of_many_users_is_that_of_one(norm, shape, steps):
    """Of many users it is computed by other operations; a single user's gradient uses torch's."""
    torch.manual_seed(0)
    last = nn.Linear(int(np.prod(shape)), 2)
    task = Task(nn.Sequential(norm, nn.Flatten(), last).double(), cross_entropy())
    x, y = torch.randn(9, *shape, dtype=torch.float64) * 3 + 1, torch.randint(0, 2, (9,))
    user = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
    params = task.initial(0) + 0.1 * torch.randn(task.size, dtype=torch.float64)
    local = LocalTraining(0.05, steps)
    found = updates(task, params, x, y, user, local, seed=0)
    for one in range(3):
        alone = silo_update(task, params, x[user == one], y[user == one], local, torch.Generator())
        torch.testing.assert_close(found[one], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("local", [LocalTraining(0.1, 2), LocalTraining(0.1, 2, 48, 0.9, 0.01)])
def test_large_batches_of_images_train_one_user_after_another_with_equal_results(local, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2))
    task = Task(model.double(), cross_entropy())
    x, y, user = ragged([50, 131, 3, 48], 1, shape=(1, 8, 8))
    params = task.initial(0)
    called = []
    build = gradients.build_plain_gradient
    spy = lambda task: lambda *tensors: called.append(1) or build(task)(*tensors)  # noqa: E731
    monkeypatch.setattr(gradients, "build_plain_gradient", spy)
    found = updates(task, params, x, y, user, local, seed=3)
    assert called
    assert_equal_updates(found, looped(task, params, x, y, user, local, seed=3), 1e-12)
    small = LocalTraining(0.1, 2, 8)  # small batches do not
    called.clear()
    assert_equal_updates(
        updates(task, params, x, y, user, small, seed=3),
        looped(task, params, x, y, user, small, seed=3),
        1e-12,
    )
    assert not called


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.rand(5, 5) > 0.3}])
def test_attention_with_dropout_is_that_of_torch_and_runs_for_users_and_their_records(heads, options):
    query, key, value = (torch.randn(2, 3, *shape) for shape in ((4, 5, 8), (heads, 5, 8), (heads, 5, 3)))
    options = options | {"enable_gqa": heads != 4}
    # So little dropout drops nothing.
    found = gradients._attend(query, key, value, dropout_p=1e-12, **options)
    assert torch.allclose(
        found, nn.functional.scaled_dot_product_attention(query, key, value, **options), equal_nan=True
    )

    def drop(*parts):
        return gradients._attend(*parts, dropout_p=0.5)

    if heads == 4:
        each = torch.func.vmap(torch.func.vmap(drop, randomness="different"), randomness="different")
        same = [part[:1, :1].expand(2, 3, *part.shape[2:]) for part in (query, key, value)]
        assert len(each(*same).flatten(0, 1).unique(dim=0)) == 6


class Spectral(nn.Module):
    """Multiplies frequencies by complex weights, which are pairs of real parameters."""

    def __init__(self):
        super().__init__()
        self.shift, self.weights, self.last = (
            nn.Parameter(torch.zeros(1)),
            nn.Parameter(torch.randn(4, 1, 2)),
            nn.Linear(6, 2),
        )

    def forward(self, x):
        return self.last(
            torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.weights)[:, 0], 6) + self.shift
        )


@pytest.mark.parametrize("local", [LocalTraining(0.1), LocalTraining(0.1, 8, 2)])
def test_parameters_are_pairs_at_even_places_as_complex_numbers_need(local):
    task = Task(Spectral().double(), cross_entropy())
    x, y, user = ragged([2, 1, 3, 5], 0, (6,))
    start = task.initial(0)
    assert task.size % 2
    expected = looped(task, start, x, y, user, local, 3)
    assert_equal_updates(updates(task, start, x, y, user, local, 3), expected, 1e-9)
