"""Models that mix records, or whose gradients are not those of autograd, refused on made-up records.

Each of them trained under a printed ε before: what mixes stood behind a weight that starts at zero, showed with many
rows or large numbers alone, or in the backward pass.
"""

import contextlib
import logging
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import FakeQuantize, MinMaxObserver

from silodp.errors import SilodpError
from silodp.training import Loss, Task, cross_entropy, models
from silodp.training.made_up import make_up_labels

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
Y = np.arange(8) % 2
RANDOM = np.random.default_rng()


def refuse(model, x=X, y=Y, loss=None, **options):
    """Return the error of the check of a model."""
    with pytest.raises(SilodpError) as caught:
        Task(model, loss or cross_entropy()).check(x, y, **options)
    assert "\n" not in str(caught.value)
    return caught.value


class Acts(nn.Module):
    """Two layers, with a function of the hidden rows between them."""

    def __init__(self, act, **parts):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(6, 8), act, nn.Linear(8, 2)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.b(self.act(self, torch.tanh(self.a(x))))


def gate(size=8):
    return nn.Parameter(torch.zeros(size))


class MixesBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient + 0.1 * gradient.mean(0)


class ScalesBackward(MixesBackward):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(context, inputs, output):
        pass

    @staticmethod
    def forward(values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient / (1 + len(gradient) // 8)


def whiten(h):
    return (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()


MIXING = {
    "mean behind a gate": lambda: Acts(lambda m, h: h + m.gate * h.mean(0), gate=gate()),
    "attention behind a gate": lambda: Acts(
        lambda m, h: h + m.gate * ((h @ h.T).softmax(-1) @ h), gate=gate(1)
    ),
    "positive gate": lambda: Acts(lambda m, h: h + m.gate.relu() * h.mean(0), gate=gate()),
    "statistics before a head of zeros": lambda: zero_head(Acts(lambda m, h: whiten(h))),
    "number of rows": lambda: Acts(lambda m, h: h / (1 + len(h) // 8)),
    "capacity": lambda: Acts(lambda m, h: h * (torch.arange(len(h)) < 20).unsqueeze(1)),
    "order": lambda: Acts(lambda m, h: h.cumsum(0)),
    "rare": lambda: Acts(lambda m, h: h + (h.abs().amax() > 0.9999) * h.mean(0)),
    "backward mean": lambda: Acts(lambda m, h: MixesBackward.apply(h)),
    "backward rows": lambda: Acts(lambda m, h: ScalesBackward.apply(h)),
    "in evaluation": lambda: Acts(lambda m, h: h if m.training else h + m.gate * h.mean(0), gate=gate()),
    "with noise": lambda: Acts(lambda m, h: h + 0.1 * torch.randn_like(h) + m.gate * h.mean(0), gate=gate()),
}


def zero_head(model):
    nn.init.zeros_(model.b.weight)
    nn.init.zeros_(model.b.bias)
    return model


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_records_is_refused(name):
    assert refuse(MIXING[name]()).code == "model.mixes_records"


def test_torchs_attention_over_rows_before_a_head_of_zeros_is_named():
    model = nn.Sequential(
        nn.Linear(6, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2)
    )
    nn.init.zeros_(model[2].weight)
    assert "layer '1.self_attn' (MultiheadAttention)" in str(refuse(model))


def test_a_layer_whose_inputs_are_mixed_already_is_not_named():
    assert "the forward of Acts mixes" in str(refuse(MIXING["mean behind a gate"]()))
    inside = nn.Sequential(nn.Linear(6, 6), MIXING["mean behind a gate"]())
    assert "layer '1' (Acts) mixes" in str(refuse(inside))


def test_batches_as_long_as_those_of_training_are_tried():
    model = MIXING["capacity"]()
    model.act = lambda m, h: h / (1 + len(h) // 100)
    Task(model, cross_entropy()).check(X, Y)
    assert refuse(model, longest=100).code == "model.mixes_records"


def alias():
    model = Acts(lambda m, h: F.linear(h, m.kept[0]), last=nn.Linear(8, 8))
    model.kept = [model.last.weight]
    model.last.bias = None
    return model


def hooked(where):
    model = Acts(lambda m, h: h)
    model.act = (lambda m, h: guard(h)) if where == "tensor" else model.act
    if where == "module":
        model.b.register_full_backward_hook(lambda m, inputs, outputs: tuple(g * 0 for g in inputs))
    return model


def guard(h):
    if h.requires_grad:
        h.register_hook(lambda g: g * 0)
    return h


@pytest.mark.parametrize("build", [alias, lambda: hooked("module"), lambda: hooked("tensor")])
def test_a_gradient_that_is_not_that_of_autograd_is_refused(build):
    assert refuse(build()).code == "model.gradient_differs"


def test_the_parameter_that_is_kept_elsewhere_too_is_named():
    assert "'last.weight'" in str(refuse(alias()))


def test_hooks_of_parameters_are_refused_at_sight():
    """A copy of the model is without them."""
    model = nn.Linear(6, 2)
    model.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(SilodpError) as caught:
        Task(model, cross_entropy())
    assert caught.value.code == "model.gradient_differs"


def test_observers_of_quantization_are_refused_at_sight():
    observer = FakeQuantize(observer=MinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)
    observer(torch.tensor([-10.0, 10.0]))
    with pytest.raises(SilodpError) as caught:
        Task(nn.Sequential(observer, nn.Linear(6, 2)), cross_entropy())
    assert caught.value.code == "model.running_state"


class RunningMax(nn.Linear):
    """Made-up standard normal records move nothing."""

    def __init__(self, as_buffer):
        super().__init__(6, 2)
        if as_buffer:
            self.register_buffer("top", torch.tensor(10.0))
        else:
            self.top = torch.tensor(10.0)

    def forward(self, x):
        if self.training:
            self.top = torch.maximum(self.top, x.detach().abs().max())
        return super().forward(10 * x / self.top)


@pytest.mark.parametrize("as_buffer", [True, False])
def test_state_that_moves_with_large_numbers_alone_is_refused(as_buffer):
    assert refuse(RunningMax(as_buffer)).code == "model.running_state"


def test_random_numbers_that_torch_does_not_draw_are_refused_as_such():
    def drop(m, h):
        return h * torch.as_tensor(RANDOM.random(h.shape) > 0.2)

    assert refuse(Acts(drop)).code == "model.hidden_random"
    assert refuse(Acts(lambda m, h: h * random.random())).code == "model.hidden_random"


def seeded(m, h):
    torch.manual_seed(0)
    return m.drop(h)


def forked(m, h):
    with torch.random.fork_rng():
        return seeded(m, h)


@pytest.mark.parametrize("act", [seeded, forked])
def test_random_numbers_that_are_the_same_in_every_call_are_refused(act):
    """Which of them a person gets would depend on who is computed beside them."""
    assert refuse(Acts(act, drop=nn.Dropout(0.5))).code == "model.hidden_random"


def drop_outliers(values, limit):
    """Does something else where many are computed at once: no value can be looked at there."""
    large = values.detach().abs() > limit
    with contextlib.suppress(RuntimeError):
        if large.any():
            values = torch.where(large, 0, values)
    return values


def clamp_gradient(values):
    if values.requires_grad:
        values.register_hook(lambda g: g.clamp(-1e-2, 1e-2))
    return values


class DropsOutliers(Acts):
    def forward(self, x):
        return super().forward(drop_outliers(x, 100))


@pytest.mark.parametrize(
    "build",
    [
        lambda: DropsOutliers(lambda m, h: h),
        lambda: Acts(lambda m, h: F.dropout(clamp_gradient(h), 0.1, m.training)),
        lambda: Acts(lambda m, h: clamp_gradient(h) * (torch.rand_like(h) + torch.rand(8))),
        lambda: Acts(lambda m, h: clamp_gradient(h) * torch.bernoulli(torch.full_like(h, 0.9))),
    ],
)
def test_another_gradient_for_many_persons_at_once_is_refused(build):
    """Whether many are computed at once depends on how many others there are."""
    assert refuse(build()).code == "model.gradient_differs"


def entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def weighted_by_chance(outputs, targets):
    torch.manual_seed(0)
    return entropy(outputs * torch.rand(2), targets)


@pytest.mark.parametrize(
    ("loss", "code"),
    [
        (lambda o, t: drop_outliers(entropy(o, t), 20), "model.gradient_differs"),
        (lambda o, t: entropy(clamp_gradient(o), t), "model.gradient_differs"),
        (weighted_by_chance, "model.hidden_random"),
    ],
)
def test_a_loss_that_is_another_one_for_many_persons_at_once_is_refused(loss, code):
    error = refuse(nn.Linear(6, 2), loss=Loss.per_record("mine", loss))
    assert (error.code, error.field) == (code, "task.loss")


def test_writing_into_inputs_is_refused_as_such():
    assert refuse(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 2))).code == "model.writes_inputs"


def test_complex_parameters_are_refused_with_a_remedy():
    with pytest.raises(SilodpError, match="view_as_complex") as caught:
        Task(Acts(lambda m, h: h, w=nn.Parameter(torch.ones(2, dtype=torch.cfloat))), cross_entropy())
    assert caught.value.code == "model.dtype"


@pytest.mark.parametrize(
    "layer",
    [
        nn.RReLU(),
        nn.Dropout(0.5),
        nn.AlphaDropout(0.2),
        nn.ReLU(inplace=True),
        nn.LayerNorm(8),
        nn.GroupNorm(2, 8),
    ],
)
def test_random_and_other_layers_of_single_records_pass(layer):
    Task(nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 2)), cross_entropy()).check(X, Y)


class Noisy(nn.Linear):
    """Draws what does not show with large numbers, where every activation is saturated."""

    def forward(self, x):
        return (super().forward(100 * x) + torch.randn(len(x), 16, dtype=x.dtype)).tanh()


def test_models_that_draw_random_numbers_of_torch_pass():
    Task(Acts(lambda m, h: h + 0.1 * torch.randn_like(h)), cross_entropy()).check(X, Y)
    Task(Acts(lambda m, h: F.dropout(h, 0.5, m.training)), cross_entropy()).check(X, Y)
    Task(nn.Sequential(Noisy(6, 16), nn.Linear(16, 2)), cross_entropy()).check(X, Y)


def test_models_that_compute_in_single_precision_inside_pass():
    constant = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    in_single = lambda m, h: (h.float().repeat(1, 512) @ constant.float()).to(h.dtype)  # noqa: E731
    Task(Acts(in_single), cross_entropy()).check(X, Y)
    Task(Acts(lambda m, h: h @ constant[:8]), cross_entropy()).check(X, Y)  # cannot run in double precision


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(6, 1), nn.LayerNorm(1), nn.Linear(1, 2)),
        nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(8, 8), nn.Linear(8, 2)),
        nn.Sequential(nn.Linear(6, 1), nn.Softmax(1), nn.Linear(1, 2)),
        Acts(lambda m, h: 0 * h),
    ],
)
def test_what_erases_its_inputs_is_refused(model):
    assert refuse(model).code == "model.ignores_inputs"


def test_pairs_of_which_a_sign_is_left_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        Task(nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(4, 8), nn.Linear(8, 2)), cross_entropy()).check(X, Y)
    assert [record.args for record in caplog.records] == [("layer '1' (GroupNorm)",)]


@pytest.mark.parametrize(("width", "groups"), [(6, 6), (6, 3)])
def test_the_network_of_a_table_leaves_groups_enough_numbers(width, groups):
    with pytest.raises(SilodpError) as caught:
        models.mlp(6, width=width, groups=groups)
    assert (caught.value.code, caught.value.field) == ("argument.value", "width")
    assert models.mlp(6, width=3 * groups, groups=groups)(torch.tensor(X)).std() > 0


def partial_likelihood(outputs, targets, mask):
    """Fails on one record with an event, as a loss of another package does."""
    score, event = outputs.squeeze(-1)[mask > 0], targets[:, 0][mask > 0].bool()
    if not event.any():
        return score.sum() * 0
    if len(score) == 1:
        raise TypeError("len() of a 0-d tensor")
    return (score.logsumexp(0) - score[event]).sum() / len(score)


@pytest.mark.parametrize(
    ("function", "code"),
    [
        (partial_likelihood, "loss.raised"),
        (lambda o, t, mask: o.sum() * 0 if t[:, 0].any() else torch.zeros(()), "loss.no_gradient"),
    ],
)
def test_a_loss_that_fails_on_one_kind_of_label_is_refused(function, code):
    y = make_up_labels("survival", 8)
    assert refuse(nn.Linear(6, 1), X, y, Loss("mine", function)).code == code
