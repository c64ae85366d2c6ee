"""Models and losses that cannot be trained or stored: refused on made-up records, and what is close to them trains."""

import copy
import re
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import nn
from torch.utils.checkpoint import checkpoint

from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.methods import UldpSgd
from silodp.runtime.prepare import prepare_run
from silodp.training import (
    LocalTraining,
    Loss,
    Task,
    binary_cross_entropy,
    cox,
    cross_entropy,
    squared_error,
    user_updates,
)
from silodp.training.made_up import make_up_records
from silodp.training.model_state import serialize
from support.oracles import small_federation

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
Y = np.array([0, 1, 1, 0, 1, 0])


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 1))
    model[2].weight = model[0].weight
    return model


def repeated() -> nn.Sequential:
    """One layer under two names, "0" and "2"."""
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 1))


@pytest.mark.parametrize(("build", "size"), [(tied, 9 + 3 + 3 + 4), (repeated, 9 + 3 + 4)])
def test_tied_parameters_are_trained_as_one(build, size):
    task = Task(build(), binary_cross_entropy())
    assert task.size == size
    task.check(X, Y)
    params = task.initial(0)
    local = LocalTraining(learning_rate=0.5, epochs=3)
    ((_, deltas),) = user_updates(task, params, X, Y, np.zeros(6, np.int64), local, torch.Generator())
    model = task.load(params).train()  # torch's own optimizer, whose gradients of both places add up
    assert model[0].weight is model[2].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = model(torch.tensor(X)).squeeze(1)
        F.binary_cross_entropy_with_logits(outputs, torch.tensor(Y).float()).backward()
        optimizer.step()
    assert torch.allclose(deltas[0], task.flatten(model) - params, atol=1e-6)
    assert float(deltas[0].abs().max()) > 0.1


@pytest.mark.parametrize("build", [tied, repeated])
def test_tied_parameters_are_stored_under_each_name(build):
    task = Task(build(), binary_cross_entropy())
    model = task.load(task.initial(3))
    stored = load(serialize(model, {}))
    assert set(stored) == set(model.state_dict())
    again = build()
    again.load_state_dict(stored)
    assert again[0].weight is again[2].weight
    assert torch.equal(task.flatten(again), task.initial(3))
    assert torch.equal(again(torch.tensor(X)), model(torch.tensor(X)))


@pytest.mark.parametrize("loss", [cross_entropy(), nn.CrossEntropyLoss()])
@pytest.mark.parametrize(("classes", "refused"), [(2, True), (3, False), (4, True), (None, False)])
def test_a_loss_of_classes_takes_one_output_for_each(loss, classes, refused):
    task = Task(nn.Linear(3, 3), loss)
    if not refused:
        task.check(X, Y, classes)
        return
    with pytest.raises(SilodpError, match="a layer of width") as caught:
        task.check(X, Y, classes)
    assert caught.value.code == "loss.output_shape"


def test_a_run_refuses_more_outputs_than_classes_before_it_begins():
    """Such a model trained, and only `silodp predict` refused it."""
    federation, method = small_federation(), UldpSgd(noise_multiplier=1.0, clip=1.0)
    task = Task(nn.Linear(4, 5), cross_entropy())
    with pytest.raises(SilodpError) as caught:
        prepare_run(federation, task, method, rounds=1)
    assert caught.value.code == "loss.output_shape"


def test_a_loss_of_numbers_may_take_any_outputs_of_classes():
    Task(nn.Linear(3, 5), Loss.per_record("mine", by_record)).check(X, Y, 2)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, cross_entropy])
def test_a_loss_that_is_not_called_is_named_with_brackets(loss):
    with pytest.raises(SilodpError, match=rf"loss={loss.__name__}\(\)"):
        Task(nn.Linear(3, 2), loss)


def test_ids_into_a_linear_layer_name_the_embedding():
    with pytest.raises(SilodpError, match=r"nn\.Embedding") as caught:
        Task(nn.Linear(3, 2), cross_entropy()).check(np.arange(12).reshape(4, 3), Y[:4])
    assert caught.value.code == "model.raised"


def by_record(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def by_shares_of_classes(outputs, targets):
    """Weights each class by how many of the batch have it, padding included."""
    shares = torch.bincount(targets, minlength=2) / len(targets)
    return by_record(outputs, targets) / shares[targets].clamp(min=0.1)


def with_noise(outputs, targets):
    return by_record(outputs + 0.1 * torch.randn_like(outputs), targets)


class SteepWithMany(torch.autograd.Function):
    """The value of a record is that of the record alone; its gradient is not."""

    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * len(gradient)


class SparseState(nn.Linear):
    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("pairs", torch.eye(3).to_sparse())


class ExtraState(nn.Linear):
    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        pass


def sharing() -> nn.Sequential:
    model = tied()
    model[2].weight = nn.Parameter(model[0].weight.detach().t())
    return model


def parts_of_one_vector() -> nn.Sequential:
    """As cuDNN lays out the weights of an LSTM: one memory, nothing shared."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False))
    flat = torch.randn(12)
    model[0].weight, model[1].weight = nn.Parameter(flat[:9].view(3, 3)), nn.Parameter(flat[9:].view(1, 3))
    return model


def test_a_model_of_positive_numbers_is_refused_with_the_inputs_it_was_tried_on():
    with pytest.raises(
        SilodpError, match=r"standard normal numbers are made up, also negative ones"
    ) as caught:
        Task(Logarithm(3, 2), cross_entropy()).check(X, Y)
    assert caught.value.code == "model.not_finite"


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_modules_of_torch_jit_are_refused_in_a_sentence():
    x = torch.tensor(X)
    for compile in (torch.jit.script, lambda model: torch.jit.trace(model, x)):
        compiled = compile(nn.Sequential(nn.Linear(3, 2)))
        for model in (compiled, nn.Sequential(nn.Linear(3, 3), compiled)):
            with pytest.raises(SilodpError) as caught:
                Task(model, cross_entropy())
            assert caught.value.code == "argument.type"


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (SparseState(), "model.not_storable"),
        (ExtraState(3, 1), "model.not_storable"),
        (nn.Linear(3, 1, device="meta"), "model.not_storable"),
        (sharing(), "model.shared_memory"),
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "model.batch_norm"),
        (
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval(),
            "model.batch_norm",
        ),
        (nn.Dropout(0.5), "model.no_parameters"),
        (nn.Linear(3, 1).half(), "model.dtype"),
    ],
)
def test_a_model_is_refused_at_sight_with_a_code(model, code):
    with pytest.raises(SilodpError) as caught:
        Task(model, cross_entropy())
    assert caught.value.code == code


def test_parameters_that_lie_side_by_side_in_one_memory_are_fine():
    task = Task(parts_of_one_vector(), binary_cross_entropy())
    task.check(X, Y)
    assert set(load(serialize(task.model, {}))) == {"0.weight", "1.weight"}


class ComplexState(nn.Linear):
    """Dense, copied and run without trouble, and unknown to the format that models are stored in."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("phases", torch.ones(3, dtype=torch.complex128))


class LooksUpAndFails(nn.Module):
    """What fails is not the lookup."""

    def __init__(self):
        super().__init__()
        self.places, self.last = nn.Embedding(3, 1), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(x + self.places(torch.arange(3)).squeeze(1))


class Raises(nn.Linear):
    def forward(self, x):
        raise KeyError("no such layer")


class Logarithm(nn.Linear):
    def forward(self, x):
        return super().forward(x.log())


class Leaves(nn.Linear):
    def forward(self, x):
        raise SystemExit(0)


class Squeezes(nn.Linear):
    """One row per record, but for one record alone."""

    def forward(self, x):
        return super().forward(x).squeeze()


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach()


class Wraps(nn.Linear):
    """Gives its outputs in a container of several things."""

    def __init__(self, wrap):
        super().__init__(3, 2)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x))


class NamedOutputs(NamedTuple):
    hidden: Any
    logits: Any


class Idle(nn.Module):
    """A network whose first layer, or a layer that is never called, gets no gradient."""

    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.last = way, nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2)
        if way == "unused":
            self.later = nn.Linear(4, 9)

    def forward(self, x):
        if self.way in ("reentrant", "not reentrant"):
            hidden = checkpoint(self.first, x, use_reentrant=self.way == "reentrant")
        else:
            hidden = self.first(x).detach() if self.way == "detached" else self.first(x)
        return self.last(hidden)


class LayerDrop(Idle):
    """Leaves a layer out at random, so that a single draw may not use it."""

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden if torch.rand(()) < 0.5 else hidden.detach())


class Embedded(nn.Module):
    """Token ids as a federation would have them: whole numbers in a float table."""

    def __init__(self):
        super().__init__()
        self.tokens, self.last = nn.Embedding(9, 2), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.tokens(x.long()).flatten(1))


class Positions(nn.Module):
    """Looks up whole numbers too, but its own: inputs are real numbers."""

    def __init__(self):
        super().__init__()
        self.places, self.last = nn.Embedding(3, 1), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(x + self.places(torch.arange(3)).squeeze(1))


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (lambda found: {"loss": None, "logits": found}, "outputs['logits']"),
        (lambda found: (found, None), "outputs[0]"),
        (lambda found: SimpleNamespace(hidden=None, logits=found), "outputs.logits"),
        (lambda found: NamedOutputs(None, found), "outputs.logits"),
    ],
)
def test_outputs_in_a_container_are_refused_with_the_place_of_the_tensor(wrap, place):
    model = Wraps(wrap)
    with pytest.raises(SilodpError, match=re.escape(place)) as caught:
        Task(model, cross_entropy()).check(X, Y)
    assert caught.value.code == "model.output_shape"
    # What the sentence names is the tensor.
    assert eval(place, {"outputs": model(torch.tensor(X))}).shape == (len(X), 2)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_a_module_that_is_wrapped_to_run_in_another_way_is_refused_at_sight(wrap):
    with pytest.raises(SilodpError) as caught:
        Task(nn.Sequential(wrap(nn.Linear(3, 2))), cross_entropy())
    assert caught.value.code == "argument.type"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("model", "code"),
    [
        (ComplexState(), "model.not_storable"),
        (LooksUpAndFails(), "model.raised"),
        (Raises(3, 2), "model.raised"),
        (Leaves(3, 2), "model.raised"),
        (Detached(3, 2), "model.no_gradient"),
        (Idle("unused"), "model.no_gradient"),  # noise alone would move these layers
        (Idle("detached"), "model.no_gradient"),
        (Idle("reentrant"), "model.no_gradient"),
        (Embedded(), "model.integer_inputs"),
        (nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(6, 2)), "model.integer_inputs"),
        (nn.LSTM(3, 2), "model.output_shape"),
        (Squeezes(3, 2), "model.output_shape"),  # a person with one record would stop the run
        (nn.Linear(3, 1), "loss.output_shape"),  # cross entropy of one output
    ],
)
def test_a_model_is_refused_on_made_up_records_with_a_code(model, code):
    with pytest.raises(SilodpError) as caught:
        Task(model, cross_entropy()).check(X, Y)
    assert caught.value.code == code


@pytest.mark.parametrize("model", [Idle("not reentrant"), LayerDrop("random")])
def test_a_model_whose_parameters_all_get_gradients_at_times_is_fine(model):
    Task(model, cross_entropy()).check(X, Y)


def test_a_layer_without_gradient_is_fine_if_it_is_frozen():
    model = Idle("detached")
    model.first.requires_grad_(False)
    Task(model, cross_entropy()).check(X, Y)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_model_that_cannot_be_copied_is_refused_at_sight_or_on_made_up_records():
    with pytest.raises(SilodpError) as caught:
        Task(old_weight_norm(), cross_entropy())
    assert caught.value.code == "model.not_copyable"
    model = old_weight_norm()
    with torch.no_grad():
        model(torch.tensor(X))  # afterwards it can be copied, and keeps the weight that it computed last
    task = Task(model, cross_entropy())
    with pytest.raises(SilodpError) as caught:
        task.check(X, Y)
    assert caught.value.code == "model.running_state"
    Task(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), cross_entropy()).check(X, Y)


def test_a_lookup_of_the_models_own_positions_is_fine():
    Task(Positions(), cross_entropy()).check(X, Y)


@pytest.mark.parametrize(
    ("loss", "code"),
    [
        (Loss.per_record("mean", lambda o, t: F.cross_entropy(o, t)), "loss.not_per_record"),
        (
            Loss.per_record("centered", lambda o, t: (o - o.mean(0)).square().sum(1)),
            "loss.counts_masked_records",
        ),
        (Loss("unmasked", lambda o, t, mask: F.cross_entropy(o, t)), "loss.counts_masked_records"),
        (
            Loss("mean of all", lambda o, t, mask: (by_record(o, t) * mask).mean()),
            "loss.counts_masked_records",
        ),
        (
            Loss("by length", lambda o, t, mask: (by_record(o, t) * mask).sum() / len(o)),
            "loss.counts_masked_records",
        ),
        (Loss.per_record("shares", by_shares_of_classes), "loss.counts_masked_records"),
        (Loss("noisy", lambda o, t, mask: with_noise(o, t).mean()), "loss.counts_masked_records"),
        (
            Loss.per_record("steep", lambda o, t: by_record(SteepWithMany.apply(o), t)),
            "loss.counts_masked_records",
        ),
        (Loss.per_record("errors", lambda o, t: (o.argmax(1) != t).float()), "loss.no_gradient"),
        (Loss.per_record("raises", lambda o, t: o[:, 0] * {}["scale"]), "loss.raised"),
    ],
)
def test_a_loss_is_refused_on_made_up_records_with_a_code(loss, code):
    task = Task(nn.Linear(3, 2), loss)
    with pytest.raises(SilodpError) as caught:
        task.check(X, Y)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("loss", "labels", "outputs"),
    [
        (cross_entropy(), "classes", 2),
        (cross_entropy([0.2, 5.0]), "classes", 2),
        (binary_cross_entropy(), "classes", 1),
        (binary_cross_entropy([0.2, 5.0]), "classes", 1),
        (squared_error(), "real", 1),
        (cox(), "survival", 1),
        (Loss.per_record("noisy", with_noise), "classes", 2),
        (nn.CrossEntropyLoss(torch.tensor([0.2, 5.0]), label_smoothing=0.1), "classes", 2),
        (nn.CrossEntropyLoss(ignore_index=1), "classes", 2),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(9.0)), "classes", 1),
        (nn.MSELoss(), "real", 1),
        (nn.L1Loss(), "real", 1),
        (nn.SmoothL1Loss(beta=0.3), "real", 1),
        (nn.HuberLoss(delta=0.3), "real", 1),
    ],
)
def test_losses_of_single_records_and_of_one_persons_records_pass(loss, labels, outputs):
    public = PublicData("toy", ("a",), 3, (3,), labels, classes=2 if labels == "classes" else None)
    for count in (4, 11):
        Task(nn.Linear(3, outputs), loss).check(*make_up_records(public, count))


def test_checking_leaves_model_and_random_numbers_as_they_were():
    task = Task(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), cross_entropy())
    before, state = copy.deepcopy(task.model.state_dict()), torch.random.get_rng_state()
    task.check(X, Y)
    assert task.model.training
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())


class ResetsBadly(nn.Linear):
    ready = False

    def reset_parameters(self):
        if self.ready:
            raise LookupError("no")
        super().reset_parameters()


def test_a_reset_that_raises_is_one_sentence():
    task = Task(ResetsBadly(3, 2), cross_entropy())
    task.model.ready = True
    with pytest.raises(SilodpError) as caught:
        task.initial(0)
    assert caught.value.code == "model.raised"
    assert isinstance(caught.value.__cause__, LookupError)
