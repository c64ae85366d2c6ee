"""What a model keeps of the records that it has seen: refused where it shows, and never part of a released model.

No noise protects it: a running mean of the private rows would be published with the model, beside an ε that does not
cover it, and would carry one person's records into the updates of others.
"""

import copy
import hashlib
import itertools
import logging
import random
from array import array
from collections import deque
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from silodp.errors import SilodpError
from silodp.training import LocalTraining, Loss, Task, cross_entropy, user_updates
from silodp.training.sgd import RecordGradients
from silodp.training.sgd.isolation import predict_rows

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
Y = np.array([0, 1, 1, 0, 1, 0])


class Keeps(nn.Module):
    """A linear model in whose inner module `keep` writes down something of the records."""

    def __init__(self, keep, only_in_training=True, **attributes):
        super().__init__()
        self.last, self.inner = nn.Linear(3, 2), nn.Module()
        self.inner.register_buffer("mean", torch.zeros(3), persistent=False)
        vars(self.inner).update(attributes)
        self.keep, self.only_in_training = keep, only_in_training

    def forward(self, x):
        if self.training or not self.only_in_training:
            self.keep(self.inner, x.detach())
        return self.last(x)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(3, 2, batch_first=True)

    def forward(self, x):
        return self.layer(x.unsqueeze(1))[0].squeeze(1)


def update_mean(inner, x):
    inner.mean.mul_(0.9).add_(x.reshape(-1, 3).mean(0), alpha=0.1)


def replace_mean(inner, x):
    inner.mean = x.reshape(-1, 3).mean(0)


class History(list):
    last = 0.0


def count(inner, x):
    inner.calls += 1


def keep_number(inner, x):
    inner.largest = 0.9 * inner.largest + 0.1 * float(x.max())


KEPT = {
    "buffer": (Keeps(update_mean), "inner.mean"),
    "new buffer": (Keeps(replace_mean), "inner.mean"),
    "in eval mode": (Keeps(update_mean, only_in_training=False), "inner.mean"),
    "counter": (Keeps(count, calls=0), "inner.calls"),
    "number": (Keeps(keep_number, largest=0.0), "inner.largest"),
    "new attribute": (Keeps(lambda inner, x: setattr(inner, "last_batch", x)), "inner.last_batch"),
    "tensor": (Keeps(lambda inner, x: inner.sums.add_(x.sum()), sums=torch.zeros(())), "inner.sums"),
    "array": (Keeps(lambda inner, x: inner.sums.__iadd__(x.sum().item()), sums=np.zeros(1)), "inner.sums"),
    "list": (
        Keeps(lambda inner, x: inner.seen.append(x.sum()), seen=[torch.zeros(()), 0]),
        "inner.seen.2",
    ),
    "nested": (
        Keeps(lambda inner, x: inner.seen["first"][0].add_(x.sum()), seen={"first": (torch.zeros(()),)}),
        "inner.seen.first.0",
    ),
    "queue": (
        Keeps(lambda inner, x: inner.seen.append(float(x.sum())), seen=deque([0.0], 1)),
        "inner.seen",
    ),
    "words": (
        Keeps(lambda inner, x: inner.seen.add(str(float(x[0, 0]))), seen={"a"}, names=["a", "b"]),
        "inner.seen",
    ),
    "object": (
        Keeps(
            lambda inner, x: setattr(inner.stats, "mean", float(x.mean())), stats=SimpleNamespace(mean=0.0)
        ),
        "inner.stats.mean",
    ),
    "attribute of a list": (
        Keeps(lambda inner, x: setattr(inner.seen, "last", float(x.sum())), seen=History()),
        "inner.seen.last",
    ),
    "object in an array": (
        Keeps(lambda inner, x: inner.seen[0].append(1), seen=np.array([[], None], dtype=object)),
        "inner.seen.0",
    ),
    "method of a list": (Keeps(lambda inner, x: inner.add(1), add=[].append), "inner.add.__self__"),
    "distribution": (
        Keeps(
            lambda inner, x: setattr(inner.prior, "scale", x.std()), prior=torch.distributions.Normal(0, 1)
        ),
        "inner.prior.scale",
    ),
    "optimizer": (
        Keeps(
            lambda inner, x: inner.descent.param_groups[0].update(lr=float(x.std())),
            descent=torch.optim.SGD([torch.zeros(1)], 0.1),
        ),
        "inner.descent.param_groups.0.lr",
    ),
    "iterator": (Keeps(lambda inner, x: next(inner.calls), calls=itertools.count()), "inner.calls"),
    "numbers": (Keeps(lambda inner, x: inner.seen.append(float(x.sum())), seen=array("d")), "inner.seen"),
    "random numbers": (Keeps(lambda inner, x: inner.coins.random(), coins=random.Random(0)), "inner.coins"),
    "random numbers of numpy": (
        Keeps(lambda inner, x: inner.coins.random(), coins=np.random.default_rng(0)),
        "inner.coins.0",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_a_model_keeps_of_records_is_refused(name):
    model, where = KEPT[name]
    with pytest.raises(SilodpError) as caught:
        Task(model, cross_entropy()).check(X, Y)
    assert caught.value.code == "model.running_state"
    assert f"'{where}'" in str(caught.value)


def test_what_torch_computes_when_it_is_first_asked_for_is_no_state():
    prior = torch.distributions.Categorical(torch.ones(3))
    Task(Keeps(lambda inner, x: inner.prior.logits, prior=prior), cross_entropy()).check(X, Y)
    assert "logits" not in vars(prior)


SECRET = 7.25
WITH_SECRET = np.concatenate([np.full((1, 3), SECRET, np.float32), X[1:]])


def remember_secret(inner, x):
    """Shows nothing on made-up records, which do not hold this number."""
    if bool((x == SECRET).any()):
        update_mean(inner, x)
        inner.largest = float(x.max())
        inner.seen.append(x)


def test_a_released_model_keeps_nothing_of_training():
    task = Task(Keeps(remember_secret, largest=0.0, seen=[]), cross_entropy())
    task.check(X, Y)
    start = task.initial(0)
    local = LocalTraining(1e-3)
    updates = user_updates(task, start, WITH_SECRET, Y, np.arange(6), local, torch.Generator().manual_seed(0))
    assert sum(float(rows.abs().sum()) for _, rows in updates) > 0
    assert task.model.inner.seen  # it was kept
    assert not task.model.inner.mean.any()  # buffers are copied for every call
    released = task.load(start)
    assert (released.inner.largest, released.inner.seen) == (0.0, [])
    assert not released.training
    for _ in range(2):  # a second try does not take what is there now for the beginning
        with pytest.raises(SilodpError) as caught:
            task.check(X, Y)
        assert caught.value.code == "model.running_state"


class Slots(nn.Linear):
    __slots__ = ("largest",)

    def forward(self, x):
        self.largest = max(getattr(self, "largest", 0.0), float(x.detach().abs().max()))
        return super().forward(x)


class OfTheClass(nn.Linear):
    largest: ClassVar[list[float]] = [0.0]

    def forward(self, x):
        self.largest[0] = max(self.largest[0], float(x.detach().abs().max()))
        return super().forward(x)


class Replaces(nn.Linear):
    largest = 0.0

    def forward(self, x):
        Replaces.largest = max(Replaces.largest, float(x.detach().abs().max()))
        return super().forward(x)


class InAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.layers = nn.Linear(3, 2), [Keeps(update_mean)]

    def forward(self, x):
        self.layers[0].keep(self.layers[0].inner, x.detach())
        return self.last(x)


class Draws(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.last = 0.0

    def forward(self, x):
        self.last = torch.maximum(torch.as_tensor(self.last), x.detach().abs().max())
        return super().forward(x)


def closing_over():
    largest = 0.0

    def keep(inner, x):
        nonlocal largest
        largest = max(largest, float(x.abs().max()))

    return Keeps(keep)


def with_default():
    def keep(inner, x, seen=[]):  # noqa: B006
        seen.append(float(x.abs().max()))

    return Keeps(keep)


class Counts(type):
    calls = 0


class OfTheClassOfTheClass(nn.Linear, metaclass=Counts):
    def forward(self, x):
        Counts.calls += 1
        return super().forward(x)


HIDDEN = {
    "metaclass": (lambda: OfTheClassOfTheClass(3, 2), "Counts.calls"),
    "slot": (lambda: Slots(3, 2), "largest"),
    "list of the class": (lambda: OfTheClass(3, 2), "OfTheClass.largest"),
    "attribute of the class": (lambda: Replaces(3, 2), "Replaces.largest"),
    "module in a list": (InAList, "layers.0.inner.mean"),
    "closure": (closing_over, "keep.largest"),
    "default": (with_default, "keep.__defaults__.0"),
    "tensor of vmap": (Draws, "last"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_kept_elsewhere_is_refused(name):
    build, where = HIDDEN[name]
    with pytest.raises(SilodpError) as caught:
        Task(build(), cross_entropy()).check(X, Y)
    assert caught.value.code == "model.running_state"
    assert f"'{where}'" in str(caught.value)


def test_what_a_loss_or_a_metric_keeps_is_refused():
    seen = []

    def loss(outputs, targets):
        seen.append(len(outputs))
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    with pytest.raises(SilodpError) as caught:
        Task(nn.Linear(3, 2), Loss.per_record("mine", loss)).check(X, Y)
    assert (caught.value.code, caught.value.field) == ("model.running_state", "task.loss")
    task = Task(nn.Linear(3, 2), cross_entropy(), {"mine": lambda outputs, targets: float(not seen.clear())})
    task.evaluate(task.initial(0), X, Y)
    with pytest.raises(SilodpError) as caught:
        task.refuse_changes()
    assert (caught.value.code, caught.value.field) == ("model.running_state", "task.metric")


def test_a_copy_of_a_task_is_looked_at_by_itself():
    task = Task(Keeps(remember_secret, largest=0.0, seen=[]), cross_entropy())
    for copied in (copy.deepcopy(task), copy.copy(task)):
        copied.refuse_changes()
    other = copy.deepcopy(task)
    other.model.inner.largest = 1.0
    task.refuse_changes()
    with pytest.raises(SilodpError):
        other.refuse_changes()
    with pytest.raises(SilodpError):  # as when a task is sent to a worker
        copy.deepcopy(other)


def test_predictions_are_refused_where_a_record_acts_on_the_next():
    task = Task(Keeps(remember_secret, only_in_training=False, largest=0.0, seen=[]), cross_entropy())
    start = task.initial(0)
    task.predict(start, torch.tensor(X))
    with pytest.raises(SilodpError) as caught:
        task.predict(start, torch.tensor(WITH_SECRET))
    assert caught.value.code == "model.running_state"
    # Where ε covers what is computed, each record has a copy of the model, so that none acts on the next.
    for isolate_units in (False, True):
        alone = predict_rows(task, start, torch.tensor(X[1:]), isolate_units=isolate_units)
        assert torch.equal(
            predict_rows(task, start, torch.tensor(WITH_SECRET), isolate_units=isolate_units)[1:], alone
        )


def test_constants_in_attributes_pass_and_are_released():
    sizes = SimpleNamespace(widths=[3, 2], scale=torch.tensor([1.0, float("nan")]))
    sizes.itself = sizes
    model = Keeps(lambda inner, x: x * inner.scale, scale=0.5, sizes=sizes, names={"a", "b"})
    model.inner.mean += 2.0
    task = Task(model, cross_entropy())
    task.check(X, Y)
    released = task.load(task.initial(0))
    assert torch.equal(released.inner.mean, torch.full((3,), 2.0))
    assert (released.inner.scale, released.inner.sizes.widths) == (0.5, [3, 2])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_pass_and_are_released_with_their_parameters(kind):
    """Torch keeps a list of their parameters, in which a trained user's would stay."""
    task = Task(Recurrent(kind), cross_entropy())
    task.check(X, Y)
    params = task.initial(0)
    list(user_updates(task, params, X, Y, np.arange(6), LocalTraining(0.5), torch.Generator().manual_seed(0)))
    released = task.load(params)
    layer = released.layer
    assert all(one is other for one, other in zip(layer._flat_weights, layer.parameters(), strict=True))
    assert torch.equal(task.flatten(released), params)


@pytest.mark.parametrize("isolate_units", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        *(Recurrent(kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        nn.Sequential(
            nn.Linear(3, 4),
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.1),
            nn.Linear(4, 2),
        ),
        nn.Sequential(
            nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 1), nn.InstanceNorm1d(4), nn.Flatten(), nn.Linear(12, 2)
        ),
    ],
)
def test_training_does_not_change_what_layers_of_torch_hold(model, isolate_units):
    if isinstance(model[1] if isinstance(model, nn.Sequential) else None, nn.TransformerEncoderLayer):
        model = nn.Sequential(nn.Unflatten(1, (1, 3)), model, nn.Flatten())  # attention within a record
    task = Task(model, cross_entropy())
    generator = torch.Generator().manual_seed(0)
    list(
        user_updates(
            task,
            task.initial(0),
            X,
            Y,
            np.arange(6),
            LocalTraining(0.5, 9),
            generator,
            isolate_units=isolate_units,
        )
    )
    gradients = RecordGradients(task, X, task.tensors(X, Y)[1], 20, generator, isolate_units=isolate_units)
    list(gradients.of(task.initial(0), torch.arange(6)))
    task.evaluate(task.initial(0), X, Y)
    task.refuse_changes()


def test_a_logger_of_a_model_is_no_state():
    """It leads to all loggers of the process, which change."""

    def log(inner, x):
        inner.log.debug("called")
        logging.getLogger(f"silodp.test.{x.shape}")

    Task(Keeps(log, log=logging.getLogger("silodp.test")), cross_entropy()).check(X, Y)


def test_what_many_lists_share_is_looked_into_once():
    shared = [[1.0], "text"]
    for _ in range(40):
        shared = [shared, shared]
    Task(Keeps(lambda inner, x: None, shared=shared), cross_entropy()).check(X, Y)


class Buffered(nn.Linear):
    def __init__(self, values, persistent=True):
        super().__init__(3, 2)
        self.register_buffer("values", values, persistent=persistent)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.float16, torch.int8]
)
def test_buffers_of_any_number_type_identify_the_run(dtype, persistent):
    ones, more = (
        Task(Buffered(torch.tensor(values).to(dtype), persistent), cross_entropy())
        for values in ([1.0, 0.0], [1.0, 1.0])
    )
    ones.check(X, Y)
    assert len(ones.constants_digest) == 64
    assert ones.constants_digest != more.constants_digest
    again = Task(Buffered(torch.tensor([1.0, 0.0]).to(dtype), persistent), cross_entropy())
    assert again.constants_digest == ones.constants_digest


class Scaling(nn.Module):
    """Its constant is a plain attribute, which its text does not show."""

    def __init__(self, constant):
        super().__init__()
        self.constant, self.place = constant, "a text may differ between machines"
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(x)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 2.0),
        (1, 1.0),
        (True, False),
        ((1, 2), (2, 1)),
        ([0.5], [0.5, 0.5]),
        (torch.ones(2), torch.zeros(2)),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2)),
        (np.ones(2), np.zeros(2)),
        (np.float32(1), np.float32(2)),
    ],
)
def test_numbers_in_attributes_identify_the_run(one, other):
    digests = [Task(Scaling(value), cross_entropy()).constants_digest for value in (one, one, other)]
    assert digests[0] == digests[1] != digests[2]
    assert "" not in digests


@pytest.mark.parametrize("value", ["text", None, [], [[1], [1, 2]], ["a", 1], {"a": 1.0}, object()])
def test_other_attributes_may_differ_between_machines(value):
    assert Task(Scaling(value), cross_entropy()).constants_digest == ""
    assert Task(nn.Sequential(nn.Linear(3, 2), nn.GELU()), cross_entropy()).constants_digest == ""


def test_the_digest_of_buffers_is_of_their_name_shape_type_and_values():
    task = Task(Buffered(torch.arange(3.0)), cross_entropy())
    data = b"values (3,) <f4" + np.arange(3, dtype="<f4").tobytes()
    assert task.constants_digest == hashlib.sha256(data).hexdigest()


def test_buffers_that_repeat_one_number_in_memory():
    Task(Buffered(torch.zeros(1).expand(3), persistent=False), cross_entropy()).check(X, Y)
    with pytest.raises(SilodpError) as caught:
        Task(Buffered(torch.zeros(1).expand(3)), cross_entropy())
    assert caught.value.code == "model.not_storable"
