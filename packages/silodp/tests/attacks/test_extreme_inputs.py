"""Inputs near the end of floating point.

Attacked is the bound of a sum: one unit moves it by at most one clip. A sum of products can overflow in one order of
its terms and not in another, and the order depends on how many records are computed at once: one record more, and the
rows of others change from "not finite, counts as zero" to whole clips. Nobody has to choose the model: records alone do
it. Without the rule of `training.sgd.isolation`, one record moves a sum by up to 200 clips, at an ε below 1.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from silodp.mechanisms.clipping import clip_rows
from silodp.training.losses import squared_error
from silodp.training.sgd import LocalTraining, RecordGradients, compute_updates, user_updates
from silodp.training.sgd.isolation import predict_rows
from silodp.training.sgd.persons import PersonGradients
from silodp.training.task import Task
from support.oracles import add_up

ROUNDING = 1e-3
"""What rounding in shared computations may add to a clip (docs/privacy.md, section 7)."""
MAGNITUDES = [1.0, 1e3, 1e6, 1e10, 1e15, 1e19, 1e20, 1e21, 1e25, 1e32, 1e38, 3e38]


class Recurrent(nn.Module):
    """A GRU over sequences of 6 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.last = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.recurrent(x)[0][:, -1])


class Attention(nn.Module):
    """One layer of attention over sequences of 6 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.attention(x, x, x, need_weights=False)
        return self.last(self.norm(x + found).mean(1))


class Looped(nn.Module):
    """A model that `torch.func` cannot run for many users at once: it asks for the value of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.detach().sum().item() == 0.125:
            hidden = hidden + 1
        return self.last(hidden.relu())


class Bag(nn.Module):
    """Embeddings of the signs of numbers, weighted by the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(2, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.table((x > 0).long()) * x.unsqueeze(-1)).sum(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(12, 1), (12,)),
    "dense": (lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1)), (12,)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1)
        ),
        (1, 6, 6),
    ),
    "norm": (
        lambda: nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)),
        (12,),
    ),
    "recurrent": (Recurrent, (6, 4)),
    "attention": (Attention, (6, 4)),
    "embedding": (Bag, (12,)),
    "looped": (Looped, (12,)),
}


def make_task(kind: str) -> tuple[Task, Tensor, tuple[int, ...]]:
    make, shape = MODELS[kind]
    torch.manual_seed(0)
    task = Task(make(), squared_error())
    return task, task.initial(0), shape


def make_records(count: int, shape: tuple[int, ...], magnitude: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, *shape, generator=generator) * 2 - 1
    y = torch.rand(count, generator=generator).round()
    scale = torch.full((count,), magnitude)
    scale[::3] = 1.0  # ordinary records beside large ones
    return x * scale.reshape(-1, *[1] * len(shape)), y


def measure_move(add: Callable[[int], Tensor], count: int) -> float:
    """Return by how much the last of `count` units moves a sum."""
    return float((add(count) - add(count - 1)).norm())


def sum_gradients(task: Task, start: Tensor, x: Tensor, y: Tensor, batches: int) -> Callable[[int], Tensor]:
    def add(count: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        gradients = RecordGradients(task, x[:count], y[:count], batches, generator)
        return add_up(gradients.of(start, torch.arange(count)), task.size)

    return add


def sum_updates(
    task: Task, start: Tensor, x: Tensor, y: Tensor, local: LocalTraining
) -> Callable[[int], Tensor]:
    def add(count: int) -> Tensor:
        user = torch.arange(count)
        generator = torch.Generator().manual_seed(0)
        return add_up(user_updates(task, start, x[:count], y[:count], user, local, generator), task.size)

    return add


@pytest.mark.parametrize("count", [17, pytest.param(65, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MODELS)
def test_one_record_moves_a_sum_of_gradients_by_one_clip_at_any_magnitude(kind: str, count: int) -> None:
    """`batches` = 1: products of matrices, or `vmap`; 50: traced."""
    task, start, shape = make_task(kind)
    for magnitude in MAGNITUDES:
        x, y = make_records(count, shape, magnitude)
        for batches in (1, 50):
            moved = measure_move(sum_gradients(task, start, x, y, batches), count)
            assert moved <= 1 + ROUNDING, (magnitude, batches)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "local",
    [LocalTraining(0.1, 1), pytest.param(LocalTraining(0.1, 3, batch_size=2), marks=pytest.mark.slow)],
    ids=["one step", "several"],
)
def test_one_person_moves_a_sum_of_updates_by_one_clip_at_any_magnitude(
    kind: str, local: LocalTraining
) -> None:
    task, start, shape = make_task(kind)
    for magnitude in MAGNITUDES:
        x, y = make_records(17, shape, magnitude)
        moved = measure_move(sum_updates(task, start, x, y, local), 17)
        assert moved <= 1 + ROUNDING, magnitude


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in ("recurrent", "looped")])
def test_one_person_moves_a_sum_of_steps_by_one_clip_at_any_magnitude(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 persons with 1 to 6 records, by inputs and slopes of layers, and of 4 at parameters for each of them.

    The faster path follows from how many persons there are.
    """
    monkeypatch.setattr(PersonGradients, "is_faster", lambda _, start, owner, local: len(owner.unique()) > 4)
    task, start, shape = make_task(kind)
    counts = torch.tensor([1, 6, 2, 2, 6])
    user = torch.arange(len(counts)).repeat_interleave(counts)
    for magnitude in MAGNITUDES:
        x, y = make_records(len(user), shape, magnitude)

        def add(persons: int, x: Tensor = x, y: Tensor = y) -> Tensor:
            here, local = user < persons, LocalTraining(0.1)
            generator = torch.Generator().manual_seed(0)
            chunks = compute_updates(task, start, x[here], y[here], user[here], local, generator)
            return add_up(chunks, task.size)

        assert PersonGradients.try_build(task, x, y) is not None
        assert measure_move(add, len(counts)) <= 1 + ROUNDING, magnitude


@pytest.mark.slow
@pytest.mark.parametrize("feature", [1e20, 1e21, 3e38])
@pytest.mark.parametrize("kind", ["linear", "dense"])
def test_one_large_feature_where_one_record_more_changes_the_path(kind: str, feature: float) -> None:
    """Small batches are traced, larger ones are products of factors, whose norms are taken in double precision."""
    task, start, shape = make_task(kind)
    for count in (1025, 2049, 4097, 8193):
        x, y = make_records(count, shape, 1.0)
        x[::40, 0] = feature
        moved = measure_move(sum_gradients(task, start, x, y, batches=50), count)
        assert moved <= 1 + ROUNDING, count


@pytest.mark.parametrize("epochs", [2, 20])
@pytest.mark.parametrize("magnitude", [1e10, 1e19, 1e20, 1e25])
def test_one_person_with_many_images_changes_the_path_of_others(magnitude: float, epochs: int) -> None:
    """Users with steps of many images are trained one after another, others side by side.

    A variance that overflows makes the outputs of a norm zero, which is finite: 5.3 clips without the rule.
    """
    task, start, shape = make_task("convolution")
    counts = torch.tensor([*[12] * 12, 40])
    user = torch.arange(len(counts)).repeat_interleave(counts)
    x, y = make_records(len(user), shape, magnitude)
    local = LocalTraining(0.1, epochs)

    def add(persons: int) -> Tensor:
        here = user < persons
        generator = torch.Generator().manual_seed(0)
        return add_up(user_updates(task, start, x[here], y[here], user[here], local, generator), task.size)

    assert measure_move(add, len(counts)) <= 1 + ROUNDING


@pytest.mark.parametrize("target", [1e7, 1e20, 1e38])
@pytest.mark.parametrize("kind", ["linear", "dense"])
def test_large_targets(kind: str, target: float) -> None:
    task, start, shape = make_task(kind)
    x, y = make_records(65, shape, 1.0)
    y[::2] = target
    for batches in (1, 50):
        assert measure_move(sum_gradients(task, start, x, y, batches), 65) <= 1 + ROUNDING


@pytest.mark.parametrize("count", [17, 33])
@pytest.mark.parametrize("kind", MODELS)
def test_outputs_of_a_record_at_any_magnitude_do_not_depend_on_others(kind: str, count: int) -> None:
    """Counts of cells are made of outputs: one that is finite or not by who is beside it is in another cell."""
    task, start, shape = make_task(kind)
    for magnitude in MAGNITUDES[1:]:
        x, _ = make_records(count, shape, magnitude)
        with_all = predict_rows(task, start, x, isolate_units=False)[:-1]
        without = predict_rows(task, start, x[:-1], isolate_units=False)
        torch.testing.assert_close(with_all, without, equal_nan=True, rtol=1e-3, atol=1e-3)


def test_a_row_that_overflows_is_refused_by_its_own_numbers_alone() -> None:
    """A product of factors is finite in double precision where the gradient itself is not."""
    task, start, shape = make_task("linear")
    x, y = make_records(9, shape, 1.0)
    x[4, 0] = 3e38
    refused = []
    for first in (0, 4):
        gradients = RecordGradients(task, x[first:], y[first:], 1, torch.Generator().manual_seed(0))
        rows = {
            int(owner) + first: factor
            for owners, chunk in gradients.of(start, torch.arange(len(x) - first))
            for owner, factor in zip(owners, clip_rows(owners, chunk, 1.0).factors, strict=True)
        }
        refused.append(rows[4] == 0)
    assert refused == [True, True]
