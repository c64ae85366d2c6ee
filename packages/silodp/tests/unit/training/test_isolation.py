"""Units computed alone: the bits of a row depend on one unit's records and the model, whoever else is there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from silodp.training.losses import binary_cross_entropy, cross_entropy
from silodp.training.sgd import LocalTraining, RecordGradients, user_updates
from silodp.training.sgd.isolation import isolate, predict_isolated
from silodp.training.task import Task
from support.oracles import expand_rows

COUNTS = [3, 17, 5, 9, *[1] * 60, 40]
Data = tuple[Tensor, Tensor, Tensor]


def make_records(shape: tuple[int, ...], classes: int, seed: int) -> Data:
    rng = np.random.default_rng(seed)
    user = torch.from_numpy(np.repeat(np.arange(len(COUNTS)), COUNTS))
    x = torch.from_numpy(rng.normal(size=(len(user), *shape)).astype(np.float32))
    return x, torch.from_numpy(rng.integers(0, classes, len(user))), user


def linear(seed: int) -> tuple[Task, Tensor, Data]:
    """One-hot columns with a large weight each, which the bias cancels."""
    x, y, user = make_records((10,), 2, seed)
    x[:, 4:] = torch.eye(6)[torch.randint(6, (len(x),), generator=torch.Generator().manual_seed(seed))]
    weights = torch.cat([torch.zeros(4), torch.full((6,), 1e8 + 8 * seed), torch.tensor([-1e8 - 8 * seed])])
    return Task(nn.Linear(10, 1), binary_cross_entropy()), weights, (x, y, user)


def mlp(seed: int) -> tuple[Task, Tensor, Data]:
    model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 1))
    outputs = torch.randn(32, generator=torch.Generator().manual_seed(seed)) * 1e8
    bias = -outputs.double().sum().float().reshape(1)
    start = torch.cat([torch.zeros(32 * 30), torch.ones(32), outputs, bias])
    return Task(model, binary_cross_entropy()), start, make_records((30,), 2, seed)


def cnn(seed: int) -> tuple[Task, Tensor, Data]:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 3)
    )
    task = Task(model, cross_entropy())
    return task, task.initial(seed) * 1e4, make_records((1, 8, 8), 3, seed)


def embedding(seed: int) -> tuple[Task, Tensor, Data]:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(40, 3))
    task = Task(model, cross_entropy())
    _, y, user = make_records((1,), 3, seed)
    x = torch.randint(20, (len(user), 5), generator=torch.Generator().manual_seed(seed))
    return task, task.initial(seed) * 1e4, (x, y, user)


KINDS = [linear, mlp, cnn, embedding]


def update(
    task: Task, start: Tensor, data: Data, local: LocalTraining, isolate_units: bool
) -> dict[int, Tensor]:
    found = user_updates(
        task, start, *data, local, torch.Generator().manual_seed(1), isolate_units=isolate_units
    )
    return {int(user): row for users, rows in found for user, row in zip(users, rows, strict=True)}


def count_changed(
    kind: Callable[[int], tuple[Task, Tensor, Data]],
    seed: int,
    local: LocalTraining,
    isolate_units: bool,
    alone: bool = False,
) -> int:
    """Return how many rows of others change when one of three persons is emptied.

    Where `alone`, only the last person has several records.
    """
    task, start, data = kind(seed)
    if alone:
        first = torch.isin(data[2], torch.arange(4), invert=True)
        data = tuple(part[first] for part in data)
    changed = 0
    everyone = update(task, start, data, local, isolate_units)
    for emptied in (0, 1, len(COUNTS) - 1):
        here = data[2] != emptied
        others = update(task, start, tuple(part[here] for part in data), local, isolate_units)
        assert others.keys() == everyone.keys() - {emptied}
        changed += sum(not torch.equal(row, everyone[user]) for user, row in others.items())
    return changed


def skip_unless(depends: bool) -> None:
    """Skip a test that compared what is equal on this CPU also without `isolate_units`: so it has shown little."""
    if not depends:
        pytest.skip("the kernels of this CPU give the same bits whatever is computed beside a record")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "local",
    [
        LocalTraining(0.1, 5),
        pytest.param(
            LocalTraining(0.1, 2, batch_size=4, momentum=0.9, weight_decay=0.01), marks=pytest.mark.slow
        ),
    ],
)
def test_emptying_a_person_changes_no_bit_of_another_row(kind: Callable, local: LocalTraining) -> None:
    assert [count_changed(kind, seed, local, isolate_units=True) for seed in range(2)] == [0, 0]


def test_side_by_side_it_changes_rows_of_others() -> None:
    """The others then train on batches of one record, and on ones padded to 40 beside the last person."""
    assert count_changed(mlp, 0, LocalTraining(0.1, 5), isolate_units=True, alone=True) == 0
    skip_unless(count_changed(mlp, 0, LocalTraining(0.1, 5), isolate_units=False, alone=True) > 0)


def test_the_caller_keeps_its_threads_and_random_numbers() -> None:
    task, start, data = cnn(0)
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    update(task, start, data, LocalTraining(0.1), True)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    task, start, data = mlp(0)
    wanted = update(task, start, data, LocalTraining(0.1, 3), True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = update(task, start, data, LocalTraining(0.1, 3), True)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[user], wanted[user]) for user in wanted)


@pytest.mark.parametrize("kind", [mlp, embedding])
def test_updates_are_those_of_training_side_by_side_up_to_rounding(kind: Callable) -> None:
    task, _, data = kind(0)
    start, local = task.initial(0), LocalTraining(0.1, 5, momentum=0.9, weight_decay=0.01)
    alone, together = (update(task, start, data, local, isolate_units) for isolate_units in (True, False))
    for user, row in together.items():
        assert torch.allclose(alone[user], row, atol=1e-6)


class FlattensByView(nn.Module):
    """What `view` takes depends on the layout of the weights before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3), nn.Linear(144, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.conv(x).relu().view(x.size(0), -1))
        return found


@pytest.mark.parametrize("count", [1, 20])
def test_a_large_number_of_one_person_stops_no_model_that_flattens_by_view(count: int) -> None:
    """It is computed alone, and so are many records of an image: whether a silo answers would depend on a record."""
    user = torch.arange(6).repeat_interleave(count)
    x = torch.randn(6 * count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, 0] = 2000.0
    task, y = Task(FlattensByView(), cross_entropy()), user % 2
    for isolate_units in (False, True):
        generator = torch.Generator().manual_seed(0)
        updates = user_updates(
            task, task.initial(0), x, y, user, LocalTraining(0.1), generator, isolate_units=isolate_units
        )
        assert sum(len(units) for units, _ in updates) == 6
        gradients = RecordGradients(task, x, y, 1, generator, isolate_units=isolate_units).of(
            task.initial(0), torch.arange(len(x))
        )
        assert sum(len(records) for records, _ in gradients) == len(x)


def test_batches_are_those_of_torch() -> None:
    """Plain torch.optim.SGD on the same shuffled batches."""
    task, _, (x, y, user) = mlp(0)
    start, local = task.initial(0), LocalTraining(0.1, 3, batch_size=4, momentum=0.9, weight_decay=0.01)
    master = int(torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(1)))
    found = update(task, start, (x, y, user), local, True)
    for person in (2, 3):
        model = task.load(start)
        model.requires_grad_().train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
        records = torch.nonzero(user == person).flatten()
        with isolate(task, master, person) as generator:
            for _ in range(3):
                for batch in records[torch.randperm(len(records), generator=generator)].split(4):
                    optimizer.zero_grad()
                    outputs = model(x[batch])[:, 0]
                    nn.functional.binary_cross_entropy_with_logits(outputs, y[batch].float()).backward()
                    optimizer.step()
        wanted = torch.cat([p.detach().flatten() for p in model.parameters()]) - start
        assert torch.allclose(found[person], wanted, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 50])
def test_a_records_gradient_does_not_depend_on_its_batch(kind: Callable, steps: int) -> None:
    task, start, (x, y, _) = kind(0)

    def differentiate(batch: Tensor, isolate_units: bool) -> dict[int, Tensor]:
        gradients = RecordGradients(
            task, x, y, steps, torch.Generator().manual_seed(1), isolate_units=isolate_units
        )
        found = gradients.of(start, batch)
        return {
            int(one): row for some, rows in found for one, row in zip(some, expand_rows(rows), strict=True)
        }

    everyone = differentiate(torch.arange(33), True)
    for batch in (torch.arange(1, 33), torch.arange(16), torch.tensor([7]), torch.arange(32, -1, -3)):
        for record, row in differentiate(batch, True).items():
            assert torch.equal(row, everyone[record])
    together = differentiate(torch.arange(33), False)
    ordinary = task.initial(0)
    if kind is mlp and steps == 1:
        depends = any(
            not torch.equal(row, together[record])
            for size in (1, 16, 32)
            for record, row in differentiate(torch.arange(size), False).items()
        )
        start = ordinary
        alone, together = (differentiate(torch.arange(33), isolate_units) for isolate_units in (True, False))
        assert all(torch.allclose(alone[record], together[record], atol=1e-6) for record in alone)
        skip_unless(depends)


@pytest.mark.parametrize("kind", KINDS)
def test_a_records_output_does_not_depend_on_other_records(kind: Callable) -> None:
    task, start, (x, _, _) = kind(0)
    outputs = predict_isolated(task, start, x)
    for first in (1, 2, 50):
        assert torch.equal(predict_isolated(task, start, x[first:]), outputs[first:])
    assert torch.allclose(
        predict_isolated(task, task.initial(0), x), task.predict(task.initial(0), x), atol=1e-5
    )
    if kind is mlp:
        skip_unless(
            any(not torch.equal(task.predict(start, x[first:]), outputs[first:]) for first in range(4))
        )
