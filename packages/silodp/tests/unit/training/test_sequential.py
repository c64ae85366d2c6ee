"""Gradients of single records of chains of layers are those of `record_gradients`; other models keep theirs."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations

from silodp.data.inputs import NamedArrays
from silodp.mechanisms.rows import FactoredRows
from silodp.training.losses import Loss, cross_entropy
from silodp.training.models import cnn_mnist, cnn_rpdp, hog_linear, mlp
from silodp.training.sgd.records import RecordGradients, record_gradients
from silodp.training.sgd.sequential import SequentialGradient
from silodp.training.task import Task
from support.oracles import expand_rows

IMAGE, TABLE, WORDS = (2, 9, 8), (6,), (5, 6)


def conv(**options: object) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 3, **options), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))


KNOWN = {
    "linear": (nn.Linear(6, 3), TABLE),
    "without bias": (
        nn.Sequential(nn.Linear(6, 4, bias=False), nn.GELU(), nn.Linear(4, 3, bias=False)),
        TABLE,
    ),
    "deep": (
        nn.Sequential(
            nn.Identity(),
            nn.Sequential(nn.Linear(6, 5), nn.SiLU()),
            nn.Sequential(nn.Linear(5, 4), nn.ELU(), nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 3)),
        ),
        TABLE,
    ),
    "sequence": (nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)), WORDS),
    "images": (conv(), IMAGE),
    "stride and padding": (conv(stride=(2, 1), padding=(0, 2), bias=False), IMAGE),
    "pooling": (
        nn.Sequential(
            nn.AvgPool2d(2, stride=1),
            nn.Conv2d(2, 4, (3, 2), stride=2, padding=1),
            nn.LeakyReLU(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(4, 3, 2),
            nn.Sigmoid(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(3, 3),
        ),
        IMAGE,
    ),
    "norms": (
        nn.Sequential(
            nn.LayerNorm(6),
            nn.Linear(6, 4),
            nn.GroupNorm(5, 5),
            nn.LayerNorm((5, 4), bias=False),
            nn.Tanh(),
            nn.LayerNorm(4, elementwise_affine=False),
            nn.Flatten(),
            nn.Linear(20, 12),
            nn.GroupNorm(2, 12),
            nn.Tanh(),
            nn.GroupNorm(3, 12, affine=False),
            nn.Linear(12, 3),
        ),
        WORDS,
    ),
    "norm of images": (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)),
        IMAGE,
    ),
    "mlp": (mlp(6, 3), TABLE),
    "cnn_mnist": (cnn_mnist(3), (1, 28, 28)),
    "cnn_rpdp": (cnn_rpdp(3), (1, 28, 28)),
}


def example(shape: tuple[int, ...], count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, *shape)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(rng.integers(3, size=count))


def build(model: nn.Module, shape: tuple[int, ...], loss: Loss | None = None) -> Task:
    with torch.no_grad():
        model(torch.zeros(2, *shape))  # lazy layers learn their sizes
    return Task(model, loss or cross_entropy())


@pytest.mark.parametrize("name", KNOWN)
def test_products_are_the_gradients_of_single_records(name):
    model, shape = KNOWN[name]
    task, (x, y) = build(model, shape), example(shape)
    params = task.initial(1)
    gradient = SequentialGradient.try_build(task, x, y)
    assert gradient is not None
    (rows,) = gradient(task.unflatten(params), x, y)
    plain = torch.cat([part for _, part in record_gradients(task, params, x, y)])
    torch.testing.assert_close(rows.expand().float(), plain, rtol=1e-4, atol=1e-6)
    (alone,) = gradient(task.unflatten(params), x[7:8], y[7:8])
    torch.testing.assert_close(alone.expand(), rows[torch.tensor([7])].expand(), rtol=1e-4, atol=1e-6)


def test_a_loss_sees_one_record_at_a_time():
    def relative(outputs: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (
            outputs - outputs.mean(0)
        ).square().sum() + outputs.sum()  # of many records, it would mix them

    task, (x, y) = build(nn.Linear(6, 3), TABLE, Loss("relative", relative, separable=True)), example(TABLE)
    gradient = SequentialGradient.try_build(task, x, y)
    assert gradient is not None
    params = task.initial(1)
    plain = torch.cat([part for _, part in record_gradients(task, params, x, y)])
    (rows,) = gradient(task.unflatten(params), x, y)
    torch.testing.assert_close(rows.expand().float(), plain)


def test_a_loss_may_write_into_its_inputs():
    def doubled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.mul_(2), targets, reduction="none")

    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    task, (x, y) = build(model, TABLE, Loss.per_record("doubled", doubled)), example(TABLE)
    gradient = SequentialGradient.try_build(task, x, y)
    assert gradient is not None
    params = task.initial(1)
    plain = torch.cat([part for _, part in record_gradients(task, params, x, y)])
    (rows,) = gradient(task.unflatten(params), x, y)
    torch.testing.assert_close(rows.expand().float(), plain)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("name", KNOWN)
def test_a_record_that_is_not_finite_changes_no_other_row(name, broken):
    model, shape = KNOWN[name]
    task, (x, y) = build(model, shape), example(shape, 8)
    gradient = SequentialGradient.try_build(task, x, y)
    assert gradient is not None
    params, others = task.unflatten(task.initial(1)), torch.arange(8) != 3
    (before,) = gradient(params, x, y)
    x[3] = broken
    (after,) = gradient(params, x, y)
    torch.testing.assert_close(after[others].expand(), before[others].expand())


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 1, 4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, self.weight, None, (1, 2), (3, 0))


NARROW = {
    "one channel": lambda: nn.Conv2d(1, 16, (4, 3), stride=(1, 2), padding=(3, 0)),
    "one channel by another convolution": lambda: nn.Sequential(
        nn.Conv2d(1, 1, 1), nn.Conv2d(1, 16, (4, 3), stride=(1, 2), padding=(3, 0))
    ),
    "another module": Strided,
}


@pytest.mark.parametrize("name", NARROW)
def test_narrow_outputs_of_one_channel_are_those_of_the_record(name):
    # With channels last, oneDNN 3.12 leaves outputs of these convolutions unwritten.
    task = build(nn.Sequential(NARROW[name](), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)), (1, 8, 4))
    params, (x, y) = task.initial(1), example((1, 8, 4), 16)
    leaves, one = [p.detach().requires_grad_() for p in task.unflatten(params)], torch.ones(1)
    losses = [task.objective(tuple(leaves), x[i : i + 1], y[i : i + 1], one) for i in range(16)]
    alone = [torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves)]) for loss in losses]
    gradients = RecordGradients(task, x, y, 1, torch.Generator())
    for _, rows in (*gradients.of(params, torch.arange(16)), *record_gradients(task, params, x, y)):
        torch.testing.assert_close(expand_rows(rows), torch.stack(alone), rtol=1e-4, atol=1e-6)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    model[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def shared() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 3))


def tied() -> nn.Module:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, second, nn.Linear(6, 3))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    model[0].weight.requires_grad_(False)
    return model


def reordered() -> nn.Module:
    layer = nn.Linear(6, 6)
    weight = layer.weight
    del layer.weight
    layer.weight = weight  # now listed after the bias
    return nn.Sequential(layer, nn.Linear(6, 3))


def unused() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3))
    model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    return model


def shared_and_unused() -> nn.Module:
    layer = nn.Linear(6, 6)
    model = nn.Sequential(layer, nn.Tanh(), layer)  # as many parameters as these layers list
    model.register_parameter("unused weight", nn.Parameter(torch.zeros(6, 6)))
    model.register_parameter("unused bias", nn.Parameter(torch.zeros(6)))
    return model


def replaced(method: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    setattr(model[0], method, lambda x: x[:, :3] @ model[0].weight[:, :3].T)
    return model


def replaced_convolution() -> nn.Module:
    layer = nn.Conv2d(2, 3, 3)
    layer._conv_forward = lambda x, weight, bias: nn.functional.conv2d(x, 2 * weight, bias)
    return nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3))


def constant_bias(register: bool) -> nn.Module:
    layer = nn.Linear(6, 4)
    del layer.bias
    if register:
        layer.register_buffer("bias", torch.ones(4))
    else:
        layer.bias = torch.ones(4)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3))


def wrong_kernel_size() -> nn.Module:
    layer = nn.Conv2d(2, 3, 3, stride=8)
    layer.kernel_size = (1, 1)  # torch computes with the weight alone
    return nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3))


OTHERS = {
    "in place": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)), TABLE),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 3)), TABLE),
    "flattened batch": (
        lambda: nn.Sequential(nn.Linear(6, 3), nn.Flatten(0), nn.Unflatten(0, (-1, 3))),
        TABLE,
    ),
    "own features": (lambda: hog_linear(3), (1, 28, 28)),
    "subclass": (lambda: Doubled(6, 3), TABLE),
    "hook": (hooked, TABLE),
    "shared layer": (shared, TABLE),
    "tied weights": (tied, TABLE),
    "frozen": (frozen, TABLE),
    "order": (reordered, TABLE),
    "unused": (unused, TABLE),
    "shared layer and as many unused parameters": (shared_and_unused, TABLE),
    "replaced forward": (lambda: replaced("forward"), TABLE),
    "replaced call": (lambda: replaced("_call_impl"), TABLE),
    "replaced convolution": (replaced_convolution, IMAGE),
    "bias in a buffer": (lambda: constant_bias(True), TABLE),
    "bias in an attribute": (lambda: constant_bias(False), TABLE),
    "wrong kernel size": (wrong_kernel_size, (2, 8, 8)),
    "takes two records or more": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.GroupNorm(4, 4), nn.Linear(4, 3)),
        TABLE,
    ),
    "parametrization": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 3))), TABLE),
    "dilation": (lambda: conv(dilation=2), IMAGE),
    "groups": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.LazyLinear(3)), IMAGE),
    "same": (lambda: conv(padding="same"), IMAGE),
    "reflect": (lambda: conv(padding=1, padding_mode="reflect"), IMAGE),
    "double": (lambda: nn.Linear(6, 3).double(), TABLE),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_computed_in_another_way(name):
    make, shape = OTHERS[name]
    x, y = example(shape)
    try:
        model = make()
        with torch.no_grad():
            model(
                torch.zeros(
                    2, *shape, dtype=next(p for p in model.parameters()).dtype if name == "double" else None
                )
            )
        task = Task(model, cross_entropy())
    except Exception as refusal:
        pytest.fail(f"{name} should make a task: {refusal}")
    assert SequentialGradient.try_build(task, *task.tensors(x, y)) is None
    params = task.initial(1)
    chunks = list(RecordGradients(task, x, y, 1, torch.Generator()).of(params, torch.arange(40)))
    plain = torch.cat([part for _, part in record_gradients(task, params, x, y)]).float()
    found = torch.cat([expand_rows(rows) for _, rows in chunks]).float()
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


def test_images_without_a_channel_are_one_image_to_torch_and_left_to_the_general_path():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.LazyLinear(3))
    with torch.no_grad():
        model(torch.zeros(1, 9, 8))
    x, y = torch.zeros(4, 9, 8), torch.zeros(4, dtype=torch.int64)
    assert SequentialGradient.try_build(Task(model, cross_entropy()), x, y) is None


def test_a_norm_over_two_records_is_never_computed():
    model, (x, y) = nn.Sequential(nn.LayerNorm((2, 6)), nn.Linear(6, 3)), example(TABLE, 2)
    assert SequentialGradient.try_build(Task(model, cross_entropy()), x, y) is None


def test_hooks_for_all_modules_see_single_records():
    task, (x, y) = build(nn.Sequential(nn.Linear(6, 3), nn.Tanh()), TABLE), example(TABLE)
    hook = register_module_forward_hook(lambda module, inputs, output: output - output.mean(0))
    try:
        assert SequentialGradient.try_build(task, x, y) is None
    finally:
        hook.remove()


def test_named_inputs_are_left_to_the_general_path():
    task = Task(nn.Linear(6, 3), cross_entropy())
    x, y = example(TABLE)
    assert SequentialGradient.try_build(task, NamedArrays({"input": x}), y) is None


@pytest.mark.parametrize("count", [0, 1, 39, 40])
def test_chunks_make_up_the_batch_whatever_their_size(count, monkeypatch):
    monkeypatch.setattr("silodp.training.sgd.records.plan_rows", lambda *_: 13)
    model, shape = KNOWN["images"]
    task, (x, y) = build(model, shape), example(shape)
    batch = torch.from_numpy(np.random.default_rng(1).permutation(40)[:count])
    chunks = list(RecordGradients(task, x, y, 1, torch.Generator()).of(task.initial(1), batch))
    assert [len(rows) for _, rows in chunks] == [min(13, count - i) for i in range(0, count, 13)]
    assert all(isinstance(rows, FactoredRows) for _, rows in chunks)
    assert [place for owners, _ in chunks for place in owners.tolist()] == batch.tolist()


def test_large_records_are_measured_two_at_a_time(monkeypatch):
    model, shape = KNOWN["images"]
    task, (x, y) = build(model, shape), example(shape)
    taken, call = [], SequentialGradient.__call__

    def counted(
        self: SequentialGradient, params: object, x: torch.Tensor, y: torch.Tensor
    ) -> Iterator[FactoredRows]:
        taken.append(len(x))
        return call(self, params, x, y)

    monkeypatch.setattr(SequentialGradient, "__call__", counted)
    monkeypatch.setattr("silodp.training.sgd.records.default_memory_budget", lambda _: 1000)
    list(RecordGradients(task, x, y, 1, torch.Generator()).of(task.initial(1), torch.arange(1)))
    assert max(taken) == 2
