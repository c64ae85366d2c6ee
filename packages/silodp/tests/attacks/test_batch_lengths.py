"""Models that use what stands beside a record in its batch, and the clip of every person all the same.

Persons train side by side. Were their batches padded to the longest of them, then the length of a batch would be other
persons' data, and a model that mixes the rows of a batch, or counts them, would carry it into everybody's row: the
removal of one person would move a hundred rows while one clip is charged. Checks before a run may miss such a model (a
gate that starts at 0 opens later). So padding reaches proven models alone (`training.per_record`), and models that
are not proven get every record in a batch of its own, or persons share a step only where their batches are equally
long. Nor may what a model keeps of one unit reach another
one, where units are computed alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from silodp.training import LocalTraining, Loss, Task, cross_entropy
from silodp.training.gradients import build_user_gradient
from silodp.training.sgd import RecordGradients, user_updates
from silodp.training.sgd.isolation import predict_rows
from support.reference import assert_equal_updates, looped, updates

COUNTS = [2, 1, 3] * 4 + [7]
USER = np.repeat(np.arange(len(COUNTS)), COUNTS)
X = (np.random.default_rng(0).normal(size=(len(USER), 6)) + 0.5).astype(np.float32)
Y = (X[:, 0] > 0.5).astype(np.int64)


class Gate(nn.Module):
    """h + gate · mean over the rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gate, self.b = nn.Linear(6, 8), nn.Parameter(torch.zeros(8)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h + self.mix(h))

    def mix(self, h: Tensor) -> Tensor:
        return self.gate * h.mean(0)


class Attention(Gate):
    def mix(self, h: Tensor) -> Tensor:
        return self.gate * ((h @ h.T).softmax(-1) @ h)


class Capacity(Gate):
    """Divides by a number that follows from that of the rows, as a mixture of experts does."""

    def mix(self, h: Tensor) -> Tensor:
        return h / (1 + len(h) // 2)


class CountBackward(torch.autograd.Function):
    """The identity, whose gradient is divided by the number of rows."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rows = len(inputs[0])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope / ctx.rows

    generate_vmap_rule = True


class Backward(Gate):
    def mix(self, h: Tensor) -> Tensor:
        return CountBackward.apply(h)


def encode() -> nn.Module:
    """Torch's layers alone: an encoder layer takes (n, 8) for one sequence of n places."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(6, 8), encoder, nn.Linear(8, 2))


def count_rows(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """A loss that leaves out records whose mask is 0, and divides by their number all the same."""
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (mask * losses).sum() / len(mask)


def cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def subtract_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """A "loss of each record" that looks at the others."""
    return cross_entropies(outputs - outputs.mean(0), targets) / len(outputs)


TASKS = {
    "gate": (Gate, cross_entropy()),
    "attention": (Attention, cross_entropy()),
    "capacity": (Capacity, cross_entropy()),
    "backward": (Backward, cross_entropy()),
    "layers of torch": (encode, cross_entropy()),
    "loss": (lambda: nn.Linear(6, 2), Loss("count", count_rows)),
    "loss of each record": (lambda: nn.Linear(6, 2), Loss.per_record("mean", subtract_mean)),
}
LOCALS = [LocalTraining(1.0), LocalTraining(0.2, 2, 2, 0.5)]
TRACED = LocalTraining(0.2, 8)


def make(name: str) -> tuple[Task, Tensor]:
    torch.manual_seed(0)
    build, loss = TASKS[name]
    task = Task(build().double(), loss)
    start = task.initial(0)
    # As after some rounds: what starts at 0 does not stay there.
    return task, start + 0.3 * torch.randn(start.shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("name", "local"), [(name, local) for name in TASKS for local in LOCALS] + [("gate", TRACED)]
)
def test_persons_train_as_if_each_were_alone(name, local):
    task, start = make(name)
    expected = looped(task, start, X, Y, USER, local, 3)
    assert_equal_updates(updates(task, start, X, Y, USER, local, 3), expected, 1e-9)


@pytest.mark.parametrize("name", TASKS)
def test_the_removal_of_a_person_moves_nobody_else(name):
    (task, start), local = make(name), LocalTraining(1.0)
    rest = len(COUNTS) - 1 != USER
    everyone = updates(task, start, X, Y, USER, local, 3)
    others = updates(task, start, X[rest], Y[rest], USER[rest], local, 3)
    assert max(float((everyone[who] - row).abs().max()) for who, row in others.items()) < 1e-9


@pytest.mark.parametrize("name", [name for name in TASKS if name != "loss"])
def test_nor_does_it_where_a_model_escapes_the_comparison_before_padding(name, monkeypatch):
    monkeypatch.setattr("silodp.training.task.computes_alike", lambda *_: True)
    (task, start), local = make(name), LocalTraining(1.0)
    assert task.find_padded(build_user_gradient, *task.tensors(X, Y)) is not None
    rest = len(COUNTS) - 1 != USER
    everyone = updates(task, start, X, Y, USER, local, 3)
    others = updates(task, start, X[rest], Y[rest], USER[rest], local, 3)
    assert max(float((everyone[who] - row).abs().max()) for who, row in others.items()) < 1e-9


@pytest.mark.parametrize("name", TASKS)
def test_a_model_that_mixes_records_is_not_padded(name):
    task, _ = make(name)
    assert task.find_padded(build_user_gradient, *task.tensors(X, Y)) is None


class Asks(nn.Module):
    """Keeps records apart, and asks how many there are, so that nothing is proven."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.ids, self.a, self.drop, self.b = (
            nn.Embedding(9, 4, 0),
            nn.Linear(10, 8),
            nn.Dropout(p),
            nn.Linear(8, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(x.shape[0])
        h = torch.cat([x, self.ids((x[:, 0].abs() * 3).long().clamp(max=8))], 1)
        return self.b(self.drop(torch.tanh(self.a(h)))) if len(x) < 1000 else x[:, :2]


CALLS: list[int] = []


@pytest.mark.parametrize("loss", [cross_entropy(), Loss.per_record("own", cross_entropies)])
@pytest.mark.parametrize("local", [*LOCALS, TRACED])
def test_a_model_that_is_not_proven_trains_persons_of_all_lengths_at_once(local, loss):
    torch.manual_seed(0)
    task = Task(Asks(0.0).double(), loss)
    start = task.initial(0)
    expected = looped(task, start, X, Y, USER, local, 3)
    assert_equal_updates(updates(task, start, X, Y, USER, local, 3), expected, 1e-9)
    updates(task, start, X, Y, USER, LocalTraining(1.0), 3)  # measures what a step takes
    CALLS.clear()
    updates(task, start, X, Y, USER, LocalTraining(1.0), 3)
    assert CALLS == [1]


def test_it_draws_dropout_for_each_record():
    torch.manual_seed(0)
    task = Task(Asks(0.5), cross_entropy())
    x = torch.from_numpy(X[:1]).expand(4, 6)
    with torch.no_grad():
        rows = task.split_records().forward(task.unflatten(task.initial(0)), x)
    assert len(rows.unique(dim=0)) > 1


@pytest.mark.parametrize("build", [Gate, Attention, Capacity, encode])
def test_an_evaluation_by_sums_counts_every_record_by_itself(build):
    torch.manual_seed(0)
    task = Task(build(), cross_entropy())
    start, x = task.initial(0) + 0.3, torch.from_numpy(X)
    everyone, others = (predict_rows(task, start, one, isolate_units=False) for one in (x, x[12:]))
    assert torch.allclose(everyone[12:], others, atol=1e-5)
    alone = torch.cat([task.predict(start, one.unsqueeze(0)) for one in x])
    assert torch.allclose(everyone, alone, atol=1e-5)


class Stateful(nn.Module):
    """Divides by the largest number that it has seen, which it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)
        self.set(torch.tensor(10.0))

    def forward(self, x: Tensor) -> Tensor:
        self.set(torch.maximum(self.get(), x.detach().abs().max()))
        return self.b(torch.tanh(self.a(10 * x / self.get())))

    def get(self) -> Tensor:
        raise NotImplementedError

    def set(self, value: Tensor) -> None:
        raise NotImplementedError


class InBuffer(Stateful):
    def get(self) -> Tensor:
        return self.top

    def set(self, value: Tensor) -> None:
        if not hasattr(self, "top"):
            self.register_buffer("top", value)
        with torch.no_grad():
            self.top.copy_(value)


class InAttribute(Stateful):
    def get(self) -> Tensor:
        return torch.tensor(self.top)

    def set(self, value: Tensor) -> None:
        self.top = float(value)


class Slot:
    __slots__ = ("top",)


class InSlot(Stateful):
    def get(self) -> Tensor:
        return self.slot.top

    def set(self, value: Tensor) -> None:
        self.slot = vars(self).get("slot") or Slot()
        self.slot.top = value


class InList(Stateful):
    def get(self) -> Tensor:
        return max(self.seen)

    def set(self, value: Tensor) -> None:
        vars(self).setdefault("seen", []).append(value)


def remember() -> Loss:
    """A loss that keeps in its closure, and in a module, how large its outputs were."""
    kept, holder = SimpleNamespace(top=1.0), nn.Module()
    holder.top = torch.ones(())

    def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
        kept.top = max(kept.top, float(outputs.detach().abs().max()))
        holder.top = torch.maximum(holder.top, outputs.detach().abs().max())
        losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return losses / (kept.top + holder.top)

    return Loss.per_record("scaled", scaled)


HOLDERS = [InBuffer, InAttribute, InSlot, InList]
STATEFUL = [(holder, cross_entropy) for holder in HOLDERS] + [(lambda: nn.Linear(6, 2), remember)]
LARGE = np.concatenate([np.full((1, 6), 800, np.float32), X[1:]])


@pytest.mark.parametrize(("build", "loss"), STATEFUL)
def test_what_a_model_keeps_of_one_person_reaches_no_other_where_each_is_computed_alone(build, loss):
    def train(rows: np.ndarray) -> dict[int, Tensor]:
        torch.manual_seed(0)
        task = Task(build(), loss())
        data = LARGE[rows], Y[rows], USER[rows]
        found = user_updates(
            task,
            task.initial(0),
            *data,
            LocalTraining(0.5),
            torch.Generator().manual_seed(1),
            isolate_units=True,
        )
        return {int(ids): row for ids, (row,) in found}

    everyone, others = train(USER >= 0), train(USER > 0)
    assert all(torch.equal(everyone[who], row) for who, row in others.items())


@pytest.mark.parametrize(("build", "loss"), STATEFUL)
def test_nor_any_other_record(build, loss):
    def differentiate(x: np.ndarray) -> dict[int, Tensor]:
        torch.manual_seed(0)
        task = Task(build(), loss())
        generator = torch.Generator().manual_seed(1)
        gradients = RecordGradients(task, *task.tensors(x, Y), 2, generator, isolate_units=True)
        found = gradients.of(task.initial(0), torch.arange(8))
        return {int(ids): row for ids, (row,) in found}

    with_large, without = differentiate(LARGE), differentiate(X)
    assert not torch.equal(with_large[0], without[0])
    assert all(torch.equal(with_large[record], without[record]) for record in range(1, 8))


@pytest.mark.parametrize("build", HOLDERS)
def test_nor_any_other_prediction(build):
    torch.manual_seed(0)
    task = Task(build(), cross_entropy())
    start = task.initial(0)
    for isolate_units in (True, False):
        both = [
            predict_rows(task, start, torch.from_numpy(x), isolate_units=isolate_units) for x in (LARGE, X)
        ]
        assert torch.allclose(both[0][1:], both[1][1:], atol=1e-5)
