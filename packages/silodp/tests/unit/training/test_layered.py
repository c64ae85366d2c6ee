"""Gradients of single records by the inputs and slopes of layers, in any module, are those of plain autograd."""

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silodp.data.inputs import NamedArrays, get_kind
from silodp.mechanisms.clipping import clip_rows, sum_rows
from silodp.mechanisms.rows import FactoredRows, Products
from silodp.training.losses import Loss, cox, cross_entropy, exponential_survival
from silodp.training.model_state import seed_torch
from silodp.training.sgd import LocalTraining, RecordGradients, compute_updates, layered, user_updates
from silodp.training.sgd._tracing import TracedGradient
from silodp.training.sgd.layered import LayeredGradient, TracedLayers
from silodp.training.sgd.persons import PersonGradients
from silodp.training.sgd.records import record_gradients
from silodp.training.task import Task
from support.oracles import expand_rows

TABLE, WORDS, TOKENS, IMAGE = (6,), (5, 6), (7,), (2, 8, 9)


class Own(nn.Module):
    """A module that computes a function of itself and its inputs."""

    def __init__(self, function: Callable[..., Tensor], **parts: object) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def chain(*parts: nn.Module) -> nn.Module:
    """Return a chain that is no nn.Sequential."""

    def run(m: Own, x: Tensor) -> Tensor:
        for part in m.parts:
            x = part(x)
        return x

    return Own(run, parts=nn.ModuleList(parts))


def convolution(places: int, **options: object) -> nn.Module:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[places - 1]
    return chain(kind(2, 4, 3, **options), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))


def attend(m: Own, x: Tensor) -> Tensor:
    q, k, v = m.q(x), m.k(x), m.v(x)
    return m.head((F.scaled_dot_product_attention(q, k, v) + x).flatten(1))


def attend_in_heads(kind: str, m: Own, x: Tensor) -> Tensor:
    q, k, v = (part(x).unflatten(-1, (-1, 3)).transpose(1, 2) for part in (m.q, m.k, m.v))
    masks = {
        "all": None,
        "causal": None,
        "records": (x[:, None, None, :, 0] > -1).expand(-1, 1, 5, 5) | torch.eye(5, dtype=torch.bool),
        # Some words see none, and all words of some records.
        "nothing": (x[:, None, :, None, 1] > 0).expand(-1, 1, 5, 5) & (x[:, :1, :1, None] > 0),
        "places": torch.linspace(0, 1, 25).view(5, 5),
    }
    h = F.scaled_dot_product_attention(
        q, k, v, masks[kind], is_causal=kind == "causal", enable_gqa=kind == "all"
    )
    return m.head(h.transpose(1, 2).flatten(1))


def read(m: Own, x: Tensor) -> Tensor:
    h = m.tokens(x) + m.places(torch.arange(x.shape[1]))  # places have no dimension of records
    return m.head(m.norm(h).mean(1))


def tie(m: Own, x: Tensor) -> Tensor:
    return F.linear(m.layer(m.tokens(x)).mean(1), m.tokens.weight)[:, :3]


def no_grad(m: Own, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.first(x)
    return m.last(torch.cat([h, m.second(x).detach(), m.third(x)], 1))


def lin(m: int = 6, n: int = 6, **options: object) -> nn.Linear:
    return nn.Linear(m, n, **options)


# name -> the model, the shape of a record, and the parameters of which every record has a copy
KNOWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "linear": (lambda: chain(lin(), nn.Tanh(), lin(6, 3, bias=False)), TABLE, set()),
    "words": (lambda: chain(lin(), nn.GELU(), nn.Flatten(), lin(30, 3)), WORDS, set()),
    "twice": (lambda: Own(lambda m, x: m.b(m.a(m.a(x).tanh())), a=lin(), b=lin(6, 3)), TABLE, set()),
    "twice on words": (
        lambda: Own(lambda m, x: m.b(m.a(m.a(x).tanh()).mean(1)), a=lin(), b=lin(6, 3)), WORDS, set()),
    "functional": (
        lambda: Own(lambda m, x: F.linear(F.layer_norm(x, (6,), m.n.weight, m.n.bias), m.a.weight), a=lin(6, 3),
                    n=nn.LayerNorm(6)), TABLE, set()),
    "gate": (
        lambda: Own(lambda m, x: m.b(x + m.gate * m.a(x)), a=lin(), b=lin(6, 3), gate=nn.Parameter(torch.ones(6))),
        TABLE, {"gate"}),
    "weight that is also used otherwise": (
        lambda: Own(lambda m, x: m.c(m.b(m.a(x)) * m.a.weight.mean()), a=lin(), b=lin(6, 16), c=lin(16, 3)), TABLE,
        {"a.weight", "a.bias"}),
    "products of matrices": (
        lambda: Own(lambda m, x: ((x @ m.a.weight.T).tanh() @ m.w + m.a.bias) @ m.b.weight.t(), a=lin(),
                    b=lin(6, 3, bias=False), w=nn.Parameter(torch.randn(6, 6) / 3)), WORDS[1:], {"a.bias"}),
    "transposed and used otherwise": (
        lambda: Own(lambda m, x: m.c(x @ m.a.weight.T * m.a.weight.T.mean()), a=lin(6, 6, bias=False), c=lin(6, 16)),
        TABLE, {"a.weight"}),
    "residual": (lambda: Own(lambda m, x: m.b(x + m.a(x).tanh()), a=lin(), b=lin(6, 3)), TABLE, set()),
    "first dimensions flattened": (
        lambda: Own(lambda m, x: m.b(m.a(x.reshape(-1, 6)).tanh().reshape(len(x), -1)), a=lin(), b=lin(30, 3)),
        WORDS, set()),
    "transposed": (
        lambda: Own(lambda m, x: m.b(m.a(x.transpose(1, 2)).transpose(0, 2)[:, 0].T), a=lin(5, 4), b=lin(4, 3)),
        WORDS, set()),
    "norms": (
        lambda: chain(nn.LayerNorm(6), lin(), nn.RMSNorm((5, 6)), nn.GroupNorm(5, 5), nn.LayerNorm(6, bias=False),
                      nn.Flatten(), lin(30, 3)), WORDS, set()),
    "norm of images": (
        lambda: chain(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)), IMAGE,
        set()),
    "attention": (lambda: Own(attend, q=lin(), k=lin(), v=lin(), head=lin(30, 3)), WORDS, set()),
    **{f"attention in heads, {kind}": (
        lambda kind=kind: Own(partial(attend_in_heads, kind), q=lin(), k=lin(6, 3 if kind == "all" else 6),
                              v=lin(6, 3 if kind == "all" else 6), head=lin(30, 3)), WORDS, set())
       for kind in ("all", "causal", "records", "nothing", "places")},
    "torch's attention": (
        lambda: Own(lambda m, x: m.head(m.a(x, x, x)[0].flatten(1)), a=nn.MultiheadAttention(6, 2, batch_first=True),
                    head=lin(30, 3)), WORDS, set()),
    "torch's transformer": (
        lambda: chain(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), nn.Flatten(), lin(30, 3)), WORDS,
        set()),
    "tokens": (
        lambda: Own(read, tokens=nn.Embedding(9, 6, padding_idx=0), places=nn.Embedding(7, 6), norm=nn.LayerNorm(6),
                    head=lin(6, 3)), TOKENS, set()),
    "tied": (lambda: Own(tie, tokens=nn.Embedding(9, 6), layer=lin()), TOKENS, set()),
    "parts without gradients": (lambda: Own(no_grad, first=lin(6, 2), second=lin(6, 2), third=lin(6, 2),
                                            last=lin(6, 3)), TABLE, set()),
    "signal": (lambda: convolution(1, stride=2, padding=1), (2, 9), set()),
    "image": (lambda: convolution(2), IMAGE, set()),
    "options of images": (lambda: convolution(2, stride=(2, 1), padding=(0, 2), dilation=(1, 2), bias=False), IMAGE,
                          set()),
    "same": (lambda: convolution(2, padding="same", dilation=(2, 1)), IMAGE, set()),
    "reflect": (lambda: convolution(2, padding=1, padding_mode="reflect"), IMAGE, set()),
    "groups": (lambda: convolution(2, groups=2), IMAGE, set()),
    "same of two": (lambda: chain(nn.Conv2d(2, 4, 2, padding="same"), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)),
                    IMAGE, set()),
    "kernel of two": (lambda: chain(nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)), IMAGE, set()),
    "volume": (lambda: convolution(3, padding=1), (2, 4, 5, 3), set()),
    "channels without records": (
        lambda: Own(lambda m, x: torch.stack([m.head(m.c(one).flatten()) for one in x.unbind()]),
                    c=nn.Conv2d(2, 4, 3), head=nn.LazyLinear(3)), IMAGE, set()),
}  # fmt: skip


def make(name: str, count: int = 9) -> tuple[Task, Tensor, Tensor]:
    build, shape, _ = KNOWN[name]
    torch.manual_seed(0)
    rng, model = np.random.default_rng(0), build()
    if shape == TOKENS:
        x = torch.from_numpy(rng.integers(9, size=(count, *shape)))
    else:
        x = torch.from_numpy(rng.normal(size=(count, *shape)).astype(np.float32))
    with torch.no_grad():
        model(x[:2])  # lazy layers learn their sizes
    return Task(model, cross_entropy()), x, torch.from_numpy(rng.integers(3, size=count))


def draw(task: Task) -> Tensor:
    return task.initial(1) + 0.1 * torch.randn(task.size, generator=torch.Generator().manual_seed(2))


def differentiate(task: Task, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradients of one record after the other, by plain autograd in double precision."""
    double, rows = task.replace_model(copy.deepcopy(task.model).double(), task.loss), []
    x = x.double() if x.is_floating_point() else x
    for i in range(len(x)):
        leaves = [p.detach().double().requires_grad_() for p in task.unflatten(params)]
        loss = double.objective(tuple(leaves), x[i : i + 1], y[i : i + 1], torch.ones(1, dtype=torch.float64))
        found = torch.autograd.grad(loss, leaves, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def compute(gradient: LayeredGradient, task: Task, params: Tensor, x: object, y: Tensor) -> Tensor:
    return torch.cat([rows.expand() for rows in gradient(task.unflatten(params), x, y)])


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_gradients_and_clipped_sums_are_those_of_plain_autograd(name, kept, monkeypatch):
    monkeypatch.setattr(layered, "_PER_ENTRY", 1e9 if kept else 0)  # keep products, or multiply them out
    task, x, y = make(name)
    params = draw(task)
    gradient = LayeredGradient.try_build(task, x, y)
    assert gradient is not None
    assert {task.names[place] for place in gradient._copied} == KNOWN[name][2]
    found = compute(gradient, task, params, x, y)
    gradient._at_once = 4
    blocks = list(gradient(task.unflatten(params), x, y))
    assert [len(rows) for rows in blocks] == [4, 4, 1]
    wanted = differentiate(task, params, x, y)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))
    total, clip = torch.zeros(task.size, dtype=torch.float64), float(wanted.norm(dim=1).median())
    for rows in blocks:
        clipped = clip_rows(torch.arange(len(rows)), rows, clip)
        total += sum_rows(clipped, clipped.factors)
    factors = (clip / wanted.norm(dim=1)).clamp(max=1)
    torch.testing.assert_close(total, factors @ wanted, rtol=0, atol=1e-6 * float(total.norm()))


@pytest.mark.parametrize("name", KNOWN)
def test_traced_gradients_are_those_of_plain_autograd(name):
    task, x, y = make(name)
    gradient, params = LayeredGradient.try_build(task, x, y), task.unflatten(draw(task))
    assert gradient is not None
    traced = gradient.trace(task.unflatten(task.initial(0)), *task.repeat_examples(x, y, 16))
    assert traced is not None
    places = torch.cat([torch.arange(9), torch.zeros(7, dtype=torch.int64)])
    gradient._at_once = 4
    blocks = list(traced(params, x[places], y[places], 9))
    assert [len(rows) for rows in blocks] == [4, 4, 1]
    wanted = differentiate(task, draw(task), x, y)
    found = torch.cat([rows.expand() for rows in blocks])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize(("name", "is_factored"), [("residual", True), ("functional", False)])
def test_many_batches_take_the_way_of_least_work(name, is_factored):
    """Whole gradients of a hundred thousand numbers cost more than those of layers, and of twenty numbers less."""
    task, x, y = make(name)
    if is_factored:
        wide = Own(lambda m, x: m.b(x + m.a(x).tanh() @ x.new_ones(300, 6)), a=lin(6, 300), b=lin(6, 3))
        task = Task(wide, cross_entropy())
    x, y, params = x.repeat(30, 1), y.repeat(30), draw(task)
    traces = RecordGradients(task, x, y, 100, torch.Generator())
    found = list(traces.of(params, torch.arange(200)))
    assert isinstance(found[0][1], FactoredRows) == is_factored
    assert isinstance(traces._trace(256), TracedLayers if is_factored else TracedGradient)
    plain = dict(RecordGradients(task, x, y, 1, torch.Generator()).of(params, torch.arange(200)))
    assert torch.cat([batch for batch, _ in found]).tolist() == list(range(200))
    rows, wanted = (torch.cat([expand_rows(part) for part in parts])
                    for parts in ([part for _, part in found], plain.values()))  # fmt: skip
    torch.testing.assert_close(rows, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


def test_named_inputs_and_constant_parts_are_taken():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.frozen, self.last = nn.Embedding(9, 4), nn.Linear(6, 6), nn.Linear(10, 3)
            self.frozen.requires_grad_(False)

        def forward(self, codes: Tensor, numeric: Tensor) -> Tensor:
            return self.last(torch.cat([self.tokens(codes).sum(1), self.frozen(numeric).tanh()], 1))

    task, y = Task(Named(), cross_entropy()), torch.arange(8) % 3
    x = NamedArrays({"codes": torch.arange(24).reshape(8, 3) % 9, "numeric": torch.randn(8, 6)})
    gradient, params = LayeredGradient.try_build(task, x, y), draw(task)
    assert gradient is not None
    plain = torch.cat([part for _, part in record_gradients(task, params, x, y)])
    torch.testing.assert_close(compute(gradient, task, params, x, y).float(), plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["all", "causal", "records", "nothing", "places"])
def test_attention_in_heads_runs_outside_of_vmap_as_one_batch(kind, monkeypatch):
    """Under vmap, torch takes attention apart, which takes twice the time."""
    task, x, y = make(f"attention in heads, {kind}")
    gradient, asked, choose = LayeredGradient.try_build(task, x, y), [], layered.sdpa_kernel
    monkeypatch.setattr(layered, "sdpa_kernel", lambda kinds: asked.append(kinds) or choose(kinds))
    compute(gradient, task, draw(task), x, y)
    assert len(asked) == 1


def test_dropout_draws_as_in_the_general_path():
    model = chain(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3), nn.Dropout(0.1))
    task, (x, y) = Task(model, cross_entropy()), make("linear")[1:]
    gradient, params = LayeredGradient.try_build(task, x, y), draw(task)
    assert gradient is not None
    with seed_torch(task.device, 5):
        found = compute(gradient, task, params, x, y).float()
    with seed_torch(task.device, 5):
        wanted = layered.flatten_rows(gradient._general(task.unflatten(params), x, y))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert len(torch.unique(compute(gradient, task, params, x[:1].expand(9, 6), y[:1].expand(9)), dim=0)) == 9
    traced = gradient.trace(task.unflatten(params), x, y)
    with seed_torch(task.device, 5):
        (rows,) = traced(task.unflatten(params), x, y, 9)
    torch.testing.assert_close(rows.expand().float(), wanted, rtol=1e-4, atol=1e-6)


def overwrite_outputs(m: Own, x: Tensor) -> Tensor:
    return m.b(m.a(x).relu_())


def overwrite_inputs(m: Own, x: Tensor) -> Tensor:
    h = x + 1
    out = m.a(h)
    h.mul_(2)
    return m.b(out + h)


def use_otherwise(m: Own, x: Tensor) -> Tensor:
    return m.b(m.a(x) @ m.a.weight + m.a.bias)


def use_bias_otherwise(m: Own, x: Tensor) -> Tensor:
    return m.b(m.a(x) * m.a.bias)


def differentiate_inside(m: Own, x: Tensor) -> Tensor:
    return m.b(torch.func.vmap(m.a)(x))


AT_RUN = (overwrite_outputs, use_otherwise, use_bias_otherwise, differentiate_inside)


def switch_to(function: Callable[..., Tensor]) -> tuple[LayeredGradient, Task, Tensor, Tensor]:
    """Return gradients of a model that computes another function since they were built."""

    def switched(m: Own, x: Tensor) -> Tensor:
        return function(m, x) if m.switch["on"] else m.b(m.a(x).tanh())

    _, x, y = make("linear")
    task = Task(Own(switched, a=lin(), b=lin(6, 3), switch={"on": False}), cross_entropy())
    gradient = LayeredGradient.try_build(task, x, y)
    assert gradient is not None
    task.model.switch["on"] = True
    return gradient, task, x, y


@pytest.mark.parametrize("function", AT_RUN)
def test_what_does_not_follow_from_inputs_and_slopes_is_computed_in_the_general_way(function):
    gradient, task, x, y = switch_to(function)
    params = draw(task)
    (rows,) = gradient(task.unflatten(params), x, y)
    assert isinstance(rows.pieces[0], Tensor)
    wanted = differentiate(task, params, x, y)
    torch.testing.assert_close(rows.expand(), wanted, rtol=1e-4, atol=1e-6)
    assert gradient.trace(task.unflatten(params), x, y) is None
    built = LayeredGradient.try_build(Task(task.model, cross_entropy()), x, y)
    if built is not None:
        torch.testing.assert_close(compute(built, task, params, x, y), wanted, rtol=1e-4, atol=1e-6)


def test_inputs_that_are_overwritten_are_refused_as_by_autograd():
    gradient, task, x, y = switch_to(overwrite_inputs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        next(gradient(task.unflatten(draw(task)), x, y))


def test_gradients_that_differ_from_the_general_path_are_not_taken(monkeypatch):
    task, x, y = make("words")
    differentiate_linear = layered._differentiate_linear
    monkeypatch.setattr(
        layered, "_differentiate_linear", lambda a, b: differentiate_linear(a, b * (1 + 1e-6))
    )
    assert LayeredGradient.try_build(task, x, y) is None
    chunks = list(RecordGradients(task, x, y, 1, torch.Generator()).of(task.initial(0), torch.arange(9)))
    assert all(isinstance(rows, Tensor) for _, rows in chunks)


OTHERS = {
    "most of it is used otherwise": lambda: Own(lambda m, x: (x.unsqueeze(-1) * m.w).sum(1),
                                                w=nn.Parameter(torch.randn(6, 3))),
    "double": lambda: chain(lin(6, 3)).double(),
    "recurrent": lambda: Own(lambda m, x: m.b(m.a(x.unsqueeze(1))[0][:, 0]), a=nn.LSTM(6, 4, batch_first=True),
                             b=lin(4, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_left_to_the_general_path(name):
    _, x, y = make("linear")
    task = Task(OTHERS[name](), cross_entropy())
    assert LayeredGradient.try_build(task, *task.tensors(x, y)) is None


@pytest.mark.parametrize("batches", [1, 100])
@pytest.mark.parametrize("broken", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", [name for name in KNOWN if KNOWN[name][1] != TOKENS])
def test_a_record_that_is_not_finite_changes_no_other_row_and_counts_as_everywhere(name, broken, batches):
    task, x, y = make(name)
    params, others = draw(task), torch.arange(9) != 3
    gradients = RecordGradients(task, x, y, 1, torch.Generator())
    assert isinstance(gradients._by_layers, LayeredGradient)
    before = compute(gradients._by_layers, task, params, x, y)[others]
    x[3] = broken
    after = compute(gradients._by_layers, task, params, x, y)[others]
    torch.testing.assert_close(after, before)
    rows = {}
    for batch, found in RecordGradients(task, x, y, batches, torch.Generator()).of(params, torch.arange(9)):
        clipped = clip_rows(batch, found, 1.0)
        rows |= dict(zip(batch.tolist(), clipped.factors.tolist(), strict=True))
    alone = RecordGradients(task, x, y, 1, torch.Generator(), isolate_units=True)
    for batch, found in alone.of(params, torch.arange(9)):
        clipped = clip_rows(batch, found, 1.0)
        for unit, factor in zip(batch.tolist(), clipped.factors.tolist(), strict=True):
            assert (rows[unit] == 0) == (factor == 0)


def test_rows_are_kept_as_products_where_that_is_faster():
    wide, deep = torch.randn(2, 3, 200), torch.randn(2, 300, 20)
    assert isinstance(layered._multiply(wide, wide)[0], Products)
    assert isinstance(layered._multiply(deep, deep)[0], Tensor)


def test_dp_sgd_takes_them(monkeypatch):
    task, x, y = make("attention")
    for _, rows in RecordGradients(task, x, y, 1, torch.Generator()).of(draw(task), torch.arange(9)):
        assert isinstance(rows, FactoredRows)
        assert expand_rows(rows).shape == (9, task.size)


# Persons: 7 records, 2, 1, 18 (padded by 0, 0, 0 and 2), 0 of person 3, and one of weight 0 below.
OWNER = torch.tensor([*[4] * 7, *[0] * 2, 9, *[5] * 17])[
    torch.randperm(27, generator=torch.Generator().manual_seed(3))
]
STEP = LocalTraining(0.5)


def take_step(
    gradients: PersonGradients, params: Tensor, owner: Tensor, local: LocalTraining = STEP
) -> dict[int, Tensor]:
    chunks = gradients.descend(params, owner, local, torch.Generator().manual_seed(1))
    return {int(one): row for ids, rows in chunks for one, row in zip(ids, rows.expand(), strict=True)}


def build_persons(task: Task, x: Tensor, y: Tensor) -> PersonGradients:
    gradients = PersonGradients.try_build(task, x, y)
    assert gradients is not None
    return gradients


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_steps_of_persons_and_clipped_sums_are_those_of_plain_autograd(name, kept, monkeypatch):
    monkeypatch.setattr(layered, "_PER_ENTRY", 1e9 if kept else 0)
    task, x, y = make(name, len(OWNER))
    params, gradients = draw(task), build_persons(*make(name, len(OWNER)))
    each = differentiate(task, params, x, y)
    wanted = torch.stack([-0.5 * each[one == OWNER].mean(0) for one in (0, 4, 5, 9)])
    clip, weights = float(wanted.norm(dim=1).median()), torch.linspace(0, 1, 10, dtype=torch.float64)
    total = torch.zeros(task.size, dtype=torch.float64)
    for at_once in (100, 8):
        gradients._at_once = at_once
        found = take_step(gradients, params, OWNER)
        assert sorted(found) == [0, 4, 5, 9]
        rows = torch.stack([found[one] for one in (0, 4, 5, 9)])
        torch.testing.assert_close(rows, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))
    for ids, rows in gradients.descend(params, OWNER, STEP, torch.Generator()):
        clipped = clip_rows(ids, rows, clip)
        assert isinstance(rows, FactoredRows)
        total += sum_rows(clipped, clipped.factors * weights[ids])
    factors = weights[[0, 4, 5, 9]] * (clip / wanted.norm(dim=1)).clamp(max=1)
    torch.testing.assert_close(total, factors @ wanted, rtol=0, atol=1e-6 * float(total.norm()))


@pytest.mark.parametrize(
    "name", [name for name in KNOWN if KNOWN[name][1] == IMAGE or "signal volume".count(name)]
)
def test_convolutions_of_one_row_after_another_are_those_of_plain_autograd(name, monkeypatch):
    found = []
    for least in (1e9, 1):
        monkeypatch.setattr(layered, "_MIN_TO_CONVOLVE", least)
        task, x, y = make(name, len(OWNER))
        found.append(take_step(build_persons(task, x, y), draw(task), OWNER))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_large_convolutions_are_differentiated_by_one_row_after_another(monkeypatch):
    asked, convolve = [], layered._Window._convolve
    monkeypatch.setattr(layered._Window, "_convolve", lambda *args: asked.append(1) or convolve(*args))
    for size, channels in ((8, 16), (32, 16), (128, 1)):
        window = layered._Window.make(torch.empty(16, channels, 3, 3), 1, 1, 1, 1)
        window.differentiate(torch.randn(2, 1, channels, size, size), torch.randn(2, 1, 16, size, size))
    assert len(asked) == 1


def test_persons_of_one_block_are_cut_where_their_rows_would_be_large(monkeypatch):
    task, x, y = make("words", 12)
    owner, gradients = torch.arange(12) // 2, build_persons(task, x, y)
    whole = take_step(gradients, draw(task), owner)
    monkeypatch.setattr("silodp.training.sgd.layered._BLOCK_BYTES", (4 * task.size * 4, 0))
    blocks = list(gradients.descend(draw(task), owner, STEP, torch.Generator()))
    assert [len(ids) for ids, _ in blocks] == [4, 2]
    torch.testing.assert_close(take_step(gradients, draw(task), owner), whole)


@pytest.mark.parametrize("broken", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", [name for name in KNOWN if KNOWN[name][1] != TOKENS])
def test_a_person_who_is_not_finite_changes_no_other_row_and_counts_as_everywhere(name, broken, monkeypatch):
    monkeypatch.setattr(PersonGradients, "is_faster", lambda *_: True)
    task, x, y = make(name, len(OWNER))
    params = draw(task)
    before = take_step(build_persons(task, x, y), params, OWNER)
    x[(OWNER == 4).nonzero()[2, 0]] = broken
    after = take_step(build_persons(task, x, y), params, OWNER)
    before.pop(4), after.pop(4)
    torch.testing.assert_close(after, before)
    refused = []
    for isolated in (False, True):
        chunks = compute_updates(task, params, x, y, OWNER, STEP, torch.Generator(), isolate_units=isolated)
        factors = {}
        for ids, rows in chunks:
            factors |= dict(zip(ids.tolist(), clip_rows(ids, rows, 1.0).factors.tolist(), strict=True))
        refused.append({one for one, factor in factors.items() if factor == 0})
        assert len(factors) == 4
    assert refused[0] == refused[1]


@pytest.mark.parametrize("function", AT_RUN)
def test_steps_that_do_not_follow_from_inputs_and_slopes_are_computed_in_the_general_way(function):
    gradient, task, x, y = switch_to(function)
    params, owner = draw(task), torch.tensor([0] * 4 + [1] * 4 + [2])
    task.engine.get(("persons", get_kind(x), get_kind(y)), lambda: gradient)
    found = take_step(build_persons(task, x, y), params, owner)
    each = differentiate(task, params, x, y)
    for one, row in found.items():
        torch.testing.assert_close(row, -0.5 * each[owner == one].mean(0), rtol=1e-4, atol=1e-6)


def center(m: Own, x: Tensor) -> Tensor:
    return m.b(m.a(x) - m.a(x).mean(0))


LOSSES = {
    "mean": cross_entropy(),
    "not separable": Loss("largest", lambda o, y, mask: (F.cross_entropy(o, y, reduction="none") * mask).amax()),
    "separable in name": Loss("squared", lambda o, y, mask: (o[:, 0] * mask).sum().square(), separable=True),
}  # fmt: skip


@pytest.mark.parametrize(("function", "loss"), [(center, "mean"), *((None, name) for name in LOSSES)])
def test_models_and_losses_that_mix_records_of_a_person_train_as_before(function, loss, monkeypatch):
    monkeypatch.setattr(PersonGradients, "is_faster", lambda *_: True)
    x, y = make("linear", len(OWNER))[1:]
    model = Own(function or (lambda m, x: m.b(m.a(x).tanh())), a=lin(), b=lin(6, 3))
    task = Task(model, LOSSES[loss])
    assert (PersonGradients.try_build(task, x, y) is not None) == (function is None and loss == "mean")
    params, rows = draw(task), {}
    for compute_rows in (user_updates, compute_updates):
        for ids, chunk in compute_rows(task, params, x, y, OWNER, STEP, torch.Generator()):
            rows.setdefault(compute_rows, {}).update(zip(ids.tolist(), expand_rows(chunk), strict=True))
    torch.testing.assert_close(rows[compute_updates], rows[user_updates], rtol=1e-3, atol=1e-6)


def test_a_loss_that_compares_records_of_a_person_is_left_to_the_general_path():
    """It is silodp's own, and the model is proven per record: only the loss itself says that it is no mean."""
    x, times = make("linear", len(OWNER))[1], torch.rand(len(OWNER), 2).round(decimals=1)
    times[:, 0] = times[:, 0].round()
    for loss, taken in ((cox(), False), (exponential_survival(1.0), True)):
        gradients = PersonGradients.try_build(
            Task(nn.Sequential(lin(), nn.Tanh(), lin(6, 1)), loss), x, times
        )
        assert (gradients is not None) == taken


@pytest.mark.parametrize(
    ("local", "taken"),
    [
        (STEP, True),
        (LocalTraining(0.1, momentum=0.9), True),
        (LocalTraining(0.1, batch_size=17), True),
        (LocalTraining(0.1, batch_size=16), False),
        (LocalTraining(0.1, epochs=2), False),
        (LocalTraining(0.1, weight_decay=0.1), False),
    ],
)
def test_one_step_of_every_person_is_taken_from_layers_and_no_other(local, taken, monkeypatch):
    monkeypatch.setattr(PersonGradients, "is_faster", lambda *_: True)
    task, x, y = make("attention", len(OWNER))
    found, wanted = {}, {}
    for ids, rows in compute_updates(task, draw(task), x, y, OWNER, local, torch.Generator().manual_seed(1)):
        assert isinstance(rows, FactoredRows) == taken
        found |= dict(zip(ids.tolist(), expand_rows(rows), strict=True))
    for ids, rows in user_updates(task, draw(task), x, y, OWNER, local, torch.Generator().manual_seed(1)):
        wanted |= dict(zip(ids.tolist(), rows, strict=True))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)


def test_lengths_are_few_where_blocks_take_longer_than_padding():
    counts = [40, 33, 21, 20, 18, 11, 9, 7, 6, 5, 3, 2, 1]
    x, y = make("linear", 60)[1:]
    small = build_persons(Task(chain(lin(), nn.ReLU(), lin(6, 3)), cross_entropy()), x, y)
    wide = Task(chain(lin(6, 20_000), nn.ReLU(), lin(20_000, 3)), cross_entropy())
    found = [gradients._choose_lengths(counts) for gradients in (small, build_persons(wide, x, y))]
    assert len(set(found[0])) == 1
    assert len(set(found[1])) > 6
    assert all(length >= count for lengths in found for length, count in zip(lengths, counts, strict=True))


def test_the_path_of_less_counted_time_is_taken():
    owner = torch.arange(60) // 3
    large = Task(chain(lin(6, 500), nn.ReLU(), lin(500, 500), nn.ReLU(), lin(500, 3)), cross_entropy())
    deep = Task(chain(*(lin() for _ in range(8)), lin(6, 3)), cross_entropy())
    x, y = make("linear", 60)[1:]
    taken = [build_persons(task, x, y).is_faster(draw(task), owner, STEP) for task in (large, deep)]
    assert taken == [True, False]


def test_a_step_of_persons_does_not_import_the_compiler_of_torch():
    """It takes a second of every new process, which is more than a round of small models."""
    lines = (
        "import sys, torch",
        "from silodp.training import LocalTraining, Task, cross_entropy",
        "from silodp.training.models import mlp",
        "from silodp.training.sgd import compute_updates, persons",
        "task, owner = Task(mlp(), cross_entropy()), torch.arange(20) // 4",
        "x, y, generator = torch.randn(20, 30), torch.arange(20) % 2, torch.Generator()",
        "assert persons.PersonGradients.try_build(task, x, y) is not None",
        "list(compute_updates(task, task.initial(0), x, y, owner, LocalTraining(1.0), generator))",
        "sys.exit('torch._dynamo' in sys.modules)",
    )
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)]).returncode == 0
