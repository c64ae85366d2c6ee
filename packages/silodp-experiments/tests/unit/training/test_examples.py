"""Paths, costs and traces are chosen on made-up records: no private record decides what fails, or what is fast."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from silodp import Federation, SiloData, train
from silodp.data.inputs import NamedArrays
from silodp.errors import SilodpError
from silodp.methods import UldpSgd
from silodp.runtime.prepare import prepare_run
from silodp.training import LocalTraining, Loss, Task, cross_entropy, gradients, silo_update, user_updates
from silodp.training import task as tasks
from silodp.training.gradients import select_gradient
from silodp.training.sgd import RecordGradients, _planning, _tracing
from silodp.training.sgd._tracing import TracedGradient
from silodp.training.sgd.isolation import predict_rows
from silodp_experiments.uldp_baselines import UldpGroup, UldpNaive


def partial_likelihood(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """A loss that fails on one record with an event, as that of torchsurv 0.2.0 does."""
    score, event = outputs.squeeze(-1)[mask > 0], targets[:, 0][mask > 0].bool()
    if not event.any():
        return score.sum() * 0
    if len(score) == 1:
        raise TypeError("len() of a 0-d tensor")
    order = targets[:, 1][mask > 0].argsort(descending=True)
    return (event[order] * (score[order].logcumsumexp(0) - score[order])).sum() / len(score)


@pytest.mark.parametrize("event", [0, 1])
def test_the_first_record_does_not_decide_whether_a_loss_fails(event):
    rng = np.random.default_rng(0)
    x, user = rng.normal(size=(40, 6)).astype(np.float32), np.repeat(np.arange(10), 4)
    y = np.stack([np.ones(40), rng.exponential(size=40) + 0.1], 1).astype(np.float32)
    y[0, 0] = event
    parts = ("a", slice(0, 20)), ("b", slice(20, 40)), ("test", slice(4, 40))
    *silos, test = (SiloData(name, x[part], y[part], user[part], labels="survival") for name, part in parts)
    task = Task(nn.Linear(6, 1), Loss("partial", partial_likelihood))
    with pytest.raises(SilodpError) as refused:
        train(
            Federation(tuple(silos), users=10, test=test),
            task,
            UldpSgd(noise_multiplier=5.0, step=0.1),
            rounds=1,
        )
    assert refused.value.code == "loss.raised"


PRIVATE, ID = 7.25, 100_003
"""Numbers that only records of somebody hold."""


SHAPES = ("__get__", "__len__", "dim", "is_floating_point", "size")
"""Functions that look at no value."""


def holds_private(tensor: Tensor) -> bool:
    return bool(((tensor == PRIVATE) | (tensor == ID)).any())


class Spy(torch.overrides.TorchFunctionMode):
    """Looks at all tensors of a computation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        looked_at = () if getattr(func, "__name__", "") in SHAPES else (args, kwargs)
        for tensor in torch.utils._pytree.tree_iter(looked_at):
            if isinstance(tensor, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                assert not holds_private(tensor), func
        return func(*args, **(kwargs or {}))


@pytest.fixture
def spied(monkeypatch):
    """Watch what is measured, traced and tried; return how often each was."""
    seen = dict.fromkeys(("measure", "trace", "select"), 0)
    measure, trace, select = _planning.measure_cost, TracedGradient.__init__, gradients._list_tried

    def watch_measure(computation):
        seen["measure"] += 1
        with Spy():
            return measure(computation)

    def watch_trace(self, gradient, params, data, single_user=False):
        seen["trace"] += 1
        for tensor in torch.utils._pytree.tree_leaves(data):
            assert not holds_private(tensor)
        trace(self, gradient, params, data, single_user)

    def watch_select(*arguments):
        seen["select"] += 1
        tried = select(*arguments)
        assert not any(map(holds_private, torch.utils._pytree.tree_leaves(tried)))
        return tried

    monkeypatch.setattr(gradients, "_list_tried", watch_select)
    for place in (_planning, _tracing, tasks):
        monkeypatch.setattr(place, "measure_cost", watch_measure)
    monkeypatch.setattr(TracedGradient, "__init__", watch_trace)
    return seen


def take_any_class(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets.remainder(8), reduction="none")


@pytest.mark.parametrize(
    ("build", "x"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 8)), torch.full((40, 3), PRIVATE)),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 8)),
            torch.full((40, 1, 3, 3), PRIVATE),
        ),
        (
            lambda: nn.Sequential(nn.Embedding(ID + 1, 1), nn.Flatten(), nn.Linear(2, 8)),
            torch.full((40, 2), ID),
        ),
    ],
)
def test_no_private_record_is_measured_traced_or_tried(build, x, spied):
    y, user = torch.full((40,), ID), torch.arange(5).repeat_interleave(8)
    task = Task(build(), Loss.per_record("any", take_any_class))
    start, generator = task.initial(0), torch.Generator().manual_seed(0)
    list(user_updates(task, start, x, y, user, LocalTraining(0.1, 20, 4), generator))
    silo_update(task, start, x, y, LocalTraining(0.1, 20, 4), generator)
    of_records = RecordGradients(task, x, y, 100, generator)
    list(of_records.of(start, torch.arange(20)))
    list(of_records.of(start, torch.arange(3)))
    predict_rows(task, start, x, isolate_units=False)
    assert spied["measure"] > 3
    assert spied["trace"] > 1
    assert spied["select"] == 3  # for users, for records, and for records each in a batch of its own


@pytest.mark.parametrize("unit", ["user", "record"])
def test_a_path_that_fails_on_one_kind_of_label_is_not_taken_for_others(unit):
    """The fast path of this loss fails where a label is 2, which vmap finds in no other example."""

    def fails_on_two(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        raw = targets
        while torch._C._functorch.is_functorch_wrapped_tensor(raw):
            raw = torch._C._functorch.get_unwrapped(raw)
        if raw is not targets and bool((raw == 2).any()):
            raise RuntimeError("vmap: no rule")
        return (mask * nn.functional.cross_entropy(outputs, targets, reduction="none")).sum()

    x, y = torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)
    found = []
    for labels in ([0, 1], [0, 1, 2]):
        task = Task(nn.Linear(3, 3), Loss("fails", fails_on_two, separable=True))
        task.use_examples(torch.zeros(len(labels), 3), torch.tensor(labels))
        found.append("looped" in select_gradient(unit, task, x, y).__name__)
    assert found == [False, True]


def test_examples_of_another_kind_are_not_used():
    task = Task(nn.Linear(3, 2), cross_entropy())
    task.use_examples(torch.full((2, 3), 5.0), torch.tensor([0, 1]))
    engine = task.engine
    task.use_examples(torch.full((2, 3), 5.0), torch.tensor([0, 1]))
    assert task.engine is engine
    inputs, labels = task.list_examples(torch.zeros(9, 3), torch.zeros(9, dtype=torch.int64))
    assert inputs.unique().tolist() == [5.0]
    inputs, labels = task.list_examples(torch.zeros(9, 3), torch.zeros(9, 2))
    assert labels.tolist() == [[0, 1], [1, 1]] * 2  # an event and none, at time 1
    task.use_examples(torch.zeros(2, 3), torch.tensor([0, 1]))
    assert task.engine is not engine  # what was found out on others is of no use


def test_made_up_ids_are_in_every_embedding():
    """One column has one category, so no other id than 0."""
    task = Task(nn.Sequential(nn.Embedding(1, 2), nn.Flatten(), nn.Linear(4, 2)), cross_entropy())
    x = torch.zeros(9, 2, dtype=torch.int64)
    assert task.list_example_inputs(x).tolist() == [[0, 0]] * 4
    named = Task(Named(), cross_entropy())
    made = named.list_example_inputs(NamedArrays({"ids": x, "numbers": torch.zeros(9, 3)}))
    assert made["ids"].tolist() == [[1, 0]] * 4


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(2, 3), nn.Linear(3, 2)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        return self.head(self.table(ids).sum(1) + numbers)


def test_a_size_that_follows_from_values_is_in_no_trace():
    """How many labels are 1 differs from batch to batch; a trace would keep the number of its examples."""

    def count_ones(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        chosen = outputs.squeeze(1)[targets > 0]
        return outputs.square().mean() + chosen.sum() / max(len(chosen), 1)

    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, generator=rng), torch.randint(2, (40,), generator=rng)
    local, found = LocalTraining(0.1, 5, 8), []
    task = Task(nn.Linear(3, 1), Loss("ones", count_ones))
    found = silo_update(task, task.initial(0), x, y, local, torch.Generator().manual_seed(1))
    (alone,) = (
        row
        for _, (row,) in user_updates(
            task, task.initial(0), x, y, torch.zeros(40), local, torch.Generator().manual_seed(1)
        )
    )
    assert torch.allclose(found, alone, atol=1e-6)


@pytest.mark.parametrize(
    "method",
    [
        UldpNaive(noise_multiplier=1.0, clip=1.0, local=LocalTraining(0.1, 9, 4)),
        UldpGroup(
            group_size=4, noise_multiplier=1.0, clip=1.0, record_sampling=0.5, local_steps=20,
            expected_batch_size=4.0, local_learning_rate=0.1,
        ),
    ],
)  # fmt: skip
def test_a_run_states_its_examples(method):
    """A silo knows the kinds of labels from public facts, in whatever process it is."""
    rng = np.random.default_rng(0)
    x, y, user = rng.normal(size=(40, 3)).astype(np.float32), np.zeros(40, np.int64), np.arange(40) % 10
    parts = (("a", slice(20)), ("b", slice(20, 40)))
    silos = tuple(SiloData(name, x[part], y[part], user[part]) for name, part in parts)
    federation = Federation(silos, users=10, test=silos[0], classes=7)
    for step in (prepare_run, train):
        task = Task(nn.Linear(3, 7), cross_entropy())
        step(federation, task, method, rounds=1)
        _, labels = task.list_examples(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))
        assert {0, 6} <= set(labels.tolist())
