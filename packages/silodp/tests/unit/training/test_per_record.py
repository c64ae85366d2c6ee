"""The proof that a model computes every record by itself: what it accepts, and what it must not accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silodp.data.inputs import NamedArrays
from silodp.training import Loss, Task, models, squared_error
from silodp.training.losses import LOSSES
from silodp.training.per_record import is_model_per_record, is_per_record

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A model of 6 numbers whose `forward` is given."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.a, self.b = function, nn.Linear(6, 8), nn.Linear(8, 2)
        self.gate, self.w = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8, 2))
        self.register_buffer("top", torch.tensor(10.0))
        self.calls, self.kept = 0, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def is_proven(model: nn.Module, x: Any = X) -> bool:
    return is_model_per_record(Task(model, squared_error()), x)


def count(net: Any, x: Tensor) -> Tensor:
    net.calls += 1
    return net.b(net.a(x)) * net.calls


def catch(net: Any, x: Tensor) -> Tensor:
    try:
        h = net.a(x) - net.a(x).mean(0)
    except Exception:
        h = net.a(x)
    return net.b(h)


def add_to_buffer(net: Any, x: Tensor) -> Tensor:
    net.top.add_(1)
    return net.b(net.a(x))


def ask_for_tensors(net: Any, x: Tensor) -> Tensor:
    """A trace has no tensors, so it sees the last line alone."""
    if isinstance(x, Tensor) and len(x) > 5:
        return net.b(net.a(x)) + net.gate[:2] + x.mean()
    return net.b(net.a(x))


def unbind(net: Any, x: Tensor) -> Tensor:
    one, two = net.a(x).view(x.shape[0], 2, 4).permute(1, 0, 2).unbind(0)
    return net.b(torch.cat([one, two], 1))


MIXED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean behind a gate at 0": lambda net, x: net.b((h := net.a(x)) + net.gate * h.mean(0)),
    "attention": lambda net, x: net.b((h := net.a(x)) + net.gate * ((h @ h.transpose(0, 1)).softmax(-1) @ h)),
    "batch statistics": lambda net, x: ((h := net.a(x)) - h.mean(0)) @ net.w,
    "len": lambda net, x: net.b(net.a(x)) / len(x),
    "size": lambda net, x: net.b(net.a(x)) / x.shape[0],
    "a number that is 1 in small batches": lambda net, x: net.b(net.a(x)) * (1 + x.size(0) // 8),
    "a size that is constant in small batches": lambda net, x: net.b(net.a(x).repeat(1, 1 + x.size(0) // 600)[:, -8:]),
    "a size that is the number in small batches": lambda net, x: (
        net.b(net.a(x).view(x.size(0) - x.size(0) // 600, -1))
    ),
    "a quotient with a remainder": lambda net, x: net.b(net.a(x).view(x.size(0) * 11 // 10, -1)),
    "a branch in large batches": lambda net, x: net.b(net.a(x)) if x.shape[0] < 99 else net.b(net.a(x)).cumsum(0),
    "running sum": lambda net, x: net.b(net.a(x).cumsum(0)),
    "sum of all": lambda net, x: net.b(net.a(x)) + x.sum(),
    "largest of all": lambda net, x: net.b(net.a(x / x.abs().max())),
    "softmax over records": lambda net, x: net.b(net.a(x).softmax(-2)),
    "deviation of all": lambda net, x: net.b(net.a(x) / x.std()),
    "True is no dimension": lambda net, x: net.b(net.a(x) / x.var(True)),
    "mean of a flat view": lambda net, x: net.b(net.a(x) - net.a(x).reshape(-1).mean()),
    "pairs of records": lambda net, x: net.b((net.a(x).unsqueeze(0) - net.a(x).unsqueeze(1)).mean(0)),
    "broadcast over records": lambda net, x: net.b(net.a(x)) + (x[:, :1] + x[:, 1]).mean(1, keepdim=True),
    "a constant counted": lambda net, x: net.b(net.a(x)) * net.gate[:1].expand(x.size(0), x.size(0)).sum(1, True),
    "reversed": lambda net, x: net.b(net.a(x.flip(0))),
    "shifted": lambda net, x: net.b(net.a(x.roll(1))),
    "sorted": lambda net, x: net.b(net.a(x.sort(0)[0])),
    "the first record": lambda net, x: net.b(net.a(x) + net.a(x)[0:1]),
    "two letters": lambda net, x: net.b(torch.einsum("nd,md->nd", net.a(x), net.a(x))),
    "transposed": lambda net, x: net.b(net.a(x).permute(1, 0).softmax(-1).permute(1, 0)),
    "a part of a record": lambda net, x: net.b(
        net.a(x) + net.a(x).view(-1, 2, 4).permute(1, 0, 2).unbind(1)[0].reshape(1, 8)
    ),
    "a sum of parts": lambda net, x: net.b(net.a(x) + net.a(x).view(-1, 2, 4).permute(1, 0, 2).sum(1).view(1, 8)),
    "third": lambda net, x: net.b(net.a(x) + net.a(x).view(-1, 2, 4).permute(1, 2, 0)[0].sum()),
    "records as places": lambda net, x: net.b(F.avg_pool1d(net.a(x).transpose(0, 1), 3, 1, 1).transpose(0, 1)),
    "records as channels": lambda net, x: net.b(F.conv1d(net.a(x), torch.ones(2, 2, 1))),
    "padded with a record": lambda net, x: net.b(F.pad(net.a(x), (0, 0, 1, 0))[:-1]),
    "normalized over records": lambda net, x: net.b(F.normalize(net.a(x), dim=0)),
    "a result that is not used": lambda net, x: (net.kept.append(x.abs().max()), net.b(net.a(x)))[1],
    "a record is kept": lambda net, x: (net.kept.append(x), net.b(net.a(x)))[1],
    "a counter": count,
    "a written buffer": add_to_buffer,
    "an exception that is caught": catch,
    "asks whether x is a tensor": ask_for_tensors,
}  # fmt: skip

APART: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "residual": lambda net, x: net.b((h := net.a(x)) + net.gate * torch.relu(h)),
    "product": lambda net, x: net.a(x) @ net.w,
    "heads": lambda net, x: net.b(net.a(x).view(x.size(0), 2, 4).transpose(1, 2).reshape(x.shape[0], -1)),
    "heads of a product": lambda net, x: net.b(net.a(x).view(x.size(0) * 4, 2).view(x.size(0) * 4 // 4, 8)),
    "windows": lambda net, x: net.b(net.a(x).view(x.size(0) * 2, 4).softmax(-1).view(-1, 8)),
    "a class token": lambda net, x: net.b(
        torch.cat([net.gate.view(1, 1, 8).expand(x.size(0), -1, -1), net.a(x).unsqueeze(1)], 1)[:, 0]
    ),
    "places": lambda net, x: net.b(net.a(x) + torch.arange(8, device=x.device) / x.shape[1] ** 0.5),
    "one letter": lambda net, x: net.b(torch.einsum("nd,ed->ne", x, net.a.weight)),
    "mean of a record": lambda net, x: net.b(net.a(x - x.mean(-1, keepdim=True))),
    "attention in a record": lambda net, x: net.b(
        F.scaled_dot_product_attention(*[net.a(x).view(x.shape[0], 1, 2, 4)] * 3).flatten(1)
    ),
    "parts": unbind,
    "parts by place": lambda net, x: net.b(
        torch.cat([net.a(x).view(-1, 2, 4).permute(1, 0, 2)[place] for place in (0, 1)], 1)
    ),
    "columns": lambda net, x: net.b(torch.stack([net.a(x)[:, place] for place in range(8)], 1)[..., :8]),
    "a choice": lambda net, x: net.b(torch.where(net.a(x) > 0, net.a(x), net.top)),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_what_may_mix_records_is_not_proven(name):
    assert not is_proven(Net(MIXED[name]))


@pytest.mark.parametrize("name", APART)
def test_what_keeps_records_apart_is_proven(name):
    assert is_proven(Net(APART[name]))


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.ids, self.body, self.head = (
            nn.Embedding(9, 4),
            kind(4, 3, batch_first=batch_first),
            nn.Linear(3, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.body(self.ids(x))
        return self.head((state[0] if isinstance(self.body, nn.LSTM) else state)[-1] + outputs.max(1).values)


def encode(*, batch_first: bool = True, activation: Any = "relu") -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 8, batch_first=batch_first, activation=activation)


IDS = torch.randint(9, (4, 5), generator=torch.Generator().manual_seed(0))
IMAGES = torch.zeros(4, 1, 28, 28)
ROWS = NamedArrays({"codes": torch.tensor([[0, 1], [2, 3]]), "numeric": torch.zeros(2, 2)})


@pytest.mark.parametrize(
    ("model", "x", "proven"),
    [
        (models.logistic(6), X, True),
        (models.mlp(30), torch.zeros(4, 30), True),
        (models.cnn_mnist(dropout=0.5), IMAGES, True),
        (models.cnn_fashion(), IMAGES, True),
        (models.hog_linear(), torch.rand(4, 1, 28, 28), True),
        (models.unet((1, 8, 8), 2), torch.zeros(4, 1, 8, 8), True),
        (models.embedding([3, 4], 2), ROWS, True),
        (models.causal_lm(9, (5,), 8, 1, 2), IDS, True),
        (Recurrent(True, nn.GRU), IDS, True),
        (Recurrent(True, nn.LSTM), IDS, True),
        (Recurrent(False, nn.GRU), IDS, False),
        (nn.Sequential(encode(), nn.Flatten(), nn.Linear(30, 1)), torch.zeros(4, 5, 6), True),
        (nn.Sequential(encode(batch_first=False), nn.Flatten(), nn.Linear(30, 1)), torch.zeros(4, 5, 6), False),
        (nn.Sequential(encode(activation=lambda h: h - h.mean()), nn.Flatten(), nn.Linear(30, 1)),
         torch.zeros(4, 5, 6), False),
        (nn.Sequential(encode(), nn.Linear(6, 1)), X, False),  # records as places of one sequence
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(6, 1)), torch.zeros(4, 2, 3), False),
        (nn.Sequential(nn.Linear(6, 2), nn.Softmax(0)), X, False),
        (nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 2))), X, False),
    ],
)  # fmt: skip
def test_models_of_silodp_and_layers_of_torch(model, x, proven):
    assert is_proven(model, x) == proven


@pytest.mark.parametrize("where", ["module", "backward", "parameter", "forward", "tensor"])
def test_a_layer_with_code_of_somebody_else_is_not_proven(where):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    task = Task(model, squared_error())
    task.model[1].register_forward_hook(lambda *_: None) if where == "module" else None
    task.model[1].register_full_backward_hook(lambda *_: None) if where == "backward" else None
    task.model[0].weight.register_hook(lambda slope: slope) if where == "parameter" else None
    if where == "forward":
        task.model[1].forward = lambda x: x - x.mean(0)
    if where == "tensor":
        task.model[1].kept = torch.zeros(3)
    assert not is_model_per_record(task, X)


def test_a_hook_for_all_modules_proves_nothing():
    task = Task(nn.Linear(6, 2), squared_error())
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not is_model_per_record(task, X)
    finally:
        hook.remove()
    assert not is_per_record(task, X)  # found out once
    assert is_per_record(Task(nn.Linear(6, 2), squared_error()), X)


def test_the_losses_of_silodp_and_torch_are_known_and_those_of_others_are_not():
    options = {"exponential_survival": {"typical_time": 1.0}}
    assert all(build(**options.get(name, {})).is_known for name, build in LOSSES.items())
    hooked, replaced = nn.MSELoss(), nn.MSELoss()
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = lambda outputs, targets: (outputs - targets) / len(outputs)
    for given, known in ((nn.MSELoss(), True), (hooked, False), (replaced, False)):
        assert Task(nn.Linear(6, 1), given).loss.is_known == known
    own = Loss.per_record("own", lambda outputs, targets: outputs.squeeze(1) - targets)
    assert not own.is_known
    assert not Loss("sum", lambda outputs, targets, mask: (mask * outputs.squeeze(1)).sum()).is_known
    assert not is_per_record(Task(nn.Linear(6, 1), own), X)
