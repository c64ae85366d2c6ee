"""Gradients of many users, each at their own parameters, or of many records at the same ones.

`torch.func.vmap` computes all of them at once. Where it has no rule for an operation of a model or loss, ordinary
autograd computes them one after another: the same gradients, slower.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import register_pytree_node

from silodp.accounting.views import Unit
from silodp.data.inputs import NamedArrays, get_kind, map_arrays
from silodp.errors import SilodpError
from silodp.text import describe_exception, first_line
from silodp.training import packed
from silodp.training.batching import compute_otherwise, keep_checkpoints
from silodp.training.model_state import (
    call_model,
    choose_value_free_branches,
    copy_model,
    keep_modes,
    model_error,
    seed_torch,
    set_mode,
)

if TYPE_CHECKING:
    from silodp.training.task import Task

Gradient = Callable[..., tuple[Tensor, ...]]
"""Of users: (parameters of each user, x (r, b, ...), y (r, b, ...), mask (r, b)) -> gradients, shaped like the
parameters.

Of records: (parameters, x (r, ...), y (r, ...)) -> gradients (r, shape of each).

The parameters are a sequence of one tensor per name; x is a tensor, or `NamedArrays` of tensors.
"""

GradientBuilder = Callable[["Task"], Gradient]

# torch.func treats several named inputs like one tensor.
register_pytree_node(
    NamedArrays,
    lambda x: ([x[name] for name in x.keys()], list(x.keys())),  # noqa: SIM118
    lambda arrays, names: NamedArrays(dict(zip(names, arrays, strict=True))),
    serialized_type_name="silodp.NamedArrays",
)
_log = logging.getLogger(__name__)
_LOOPED = (
    "torch.func cannot run %s with loss '%s' for many users or records at once, so they are trained one after another: "
    "the results are the same, and training is slower; the reason: %s"
)

# How far gradients that are computed in another way may move, relative to the largest.
_TOLERANCE = 1e-3
# Records of a step of a convolutional model from which users train one after another (`find_min_to_loop`).
_MIN_TO_LOOP = 16
_MOST_OF_LSTM = 64  # numbers of a state, up to which many users run at once (`_has_fused_recurrence`)


def build_user_gradient(task: Task) -> Gradient:
    """Return the gradient of many users at once: autograd of the sum of their losses.

    A user's parameters are in no other user's loss, so the gradient of the sum is that of each. `torch.func.grad` would
    give the same, but imports torch's compiler, which takes seconds in every new process.
    """
    per_user = vmap(task.objective, randomness="different")

    def gradient(params: Sequence[Tensor], *data: Any) -> tuple[Tensor, ...]:
        with vectorizable_kernels(task.model), torch.enable_grad():
            leaves = [p.detach().requires_grad_() for p in params]
            # randomness="different": every user draws their own dropout masks.
            losses = per_user(tuple(leaves), *data)
            # A parameter that no loss depends on (a layer left out at random) has the gradient 0, not None.
            return torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)

    return gradient


def build_traceable_gradient(task: Task) -> Gradient:
    """Return what `build_user_gradient` returns, by `torch.func` alone: its trace is shorter and can be functionalized.

    Interpreted it is slower.
    """
    return _vectorize(task, vmap(grad(task.objective), randomness="different"))


def _vectorize(task: Task, function: Callable[..., tuple[Tensor, ...]]) -> Gradient:
    """Return a function made by `torch.func` that runs with kernels which vmap can take."""

    def gradient(params: Sequence[Tensor], *data: Any) -> tuple[Tensor, ...]:
        with vectorizable_kernels(task.model):
            return function(tuple(params), *data)

    return gradient


def build_plain_gradient(task: Task) -> Gradient:
    """Return the gradient of exactly one user, by ordinary autograd, of tensors without a dimension for users."""
    return partial(_differentiate, task)


def build_single_user_gradient(task: Task) -> Gradient:
    """Return the gradient of exactly one user, by ordinary autograd.

    It multiplies matrices instead of batches of one, and keeps the fused backward operations that `torch.func` takes
    apart.
    """

    def gradient(params: Sequence[Tensor], *data: Any) -> tuple[Tensor, ...]:
        alone = (map_arrays(lambda tensor: tensor.squeeze(0), part) for part in data)
        return tuple(g.unsqueeze(0) for g in _differentiate(task, [p.squeeze(0) for p in params], *alone))

    return gradient


def build_looped_gradient(task: Task) -> Gradient:
    """Return the gradient of many users, one after another, by ordinary autograd; it cannot be traced.

    Users with few records, or none in this step, take little time: padding, which comes last, is left out.
    """

    def gradient(params: Sequence[Tensor], x: Any, y: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        result = tuple(torch.zeros_like(p) for p in params)
        for user, real in enumerate(mask.sum(1).to(torch.int64).tolist()):
            if real:
                data = (x[user, :real], y[user, :real], mask[user, :real])
                own = put_channels_last(task, [p[user] for p in params], data[0])
                gradients = _differentiate(task, own, *data)
                for rows, row in zip(result, gradients, strict=True):
                    rows[user] = row
        return result

    return gradient


def find_min_to_loop(task: Task) -> int | None:
    """Return from how many records a step on users take less time one after another; None if they never do.

    With parameters of their own, convolutions run in groups or as products of small matrices, at once; those of one
    user run as in plain training. On a CPU, 64 images a step take half the time, 16 two thirds, 4 up to three times as
    long (benchmarks/convolutions.py). A rule of public constants, so that every machine adds up the same floats.
    """
    has_any = has_layer(task.model, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return _MIN_TO_LOOP if task.device.type == "cpu" and has_any else None


def _has_fused_recurrence(task: Task) -> bool:
    """Return whether recurrent layers take less time for one user after another, by kernels that vmap does not have.

    On a CPU oneDNN has some for an LSTM, which win where states are large. On a GPU, all layers keep cuDNN's.
    """
    layers = [layer for layer in task.model.modules() if isinstance(layer, nn.RNNBase)]
    if task.device.type != "cpu":
        return bool(layers)
    return any(isinstance(layer, nn.LSTM) and layer.hidden_size > _MOST_OF_LSTM for layer in layers)


def has_layer(model: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a module, or one in it, is of one of these kinds."""
    return any(isinstance(module, kinds) for module in model.modules())


def put_channels_last(task: Task, params: Sequence[Tensor], x: Any) -> list[Tensor]:
    """Return a model's parameters, with copies of convolution weights that have their channels last.

    Layers follow the layout of their weights, and torch then pools eight times faster. Where that would be wrong, the
    parameters are returned as they are.

    Args:
        task: The task of the model.
        params: One tensor for each name, or none.
        x: Records (n, ...) of the kind to come; no value is looked at.
    """
    key = ("contiguous", get_kind(x))
    if task.engine.get(
        key,
        lambda: _must_be_contiguous(task.model) or _fails_channels_last(task, task.list_example_inputs(x)),
    ):
        return list(params)
    return [p.clone(memory_format=torch.channels_last) if p.ndim == 4 else p for p in params]


def _must_be_contiguous(model: nn.Module) -> bool:
    """Return whether a convolution has one channel and a stride of 1 down and of more than 1 sideways, or may have.

    With channels last, oneDNN 3.12 leaves some of its outputs unwritten on a CPU where they are one number wide: a
    record's gradient would then depend on what other records left in memory.
    """
    safe = {
        id(module.weight)
        for module in model.modules()
        if type(module) is nn.Conv2d
        and isinstance(module.stride, tuple)
        and (module.stride[0] > 1 or module.stride[1] == 1)
    }
    # Of other modules it cannot be seen which strides they use.
    return any(p.ndim == 4 and p.shape[1] == 1 and id(p) not in safe for p in model.parameters())


def _fails_channels_last(task: Task, examples: Any) -> bool:
    """Return whether a model cannot run with channels last, as one that flattens by `view`; tried on a copy of it."""
    model = copy_model(task.model)
    weights = [p for p in model.parameters() if p.ndim == 4]
    for weight in weights:
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    try:
        for count in (1, 3) if weights else ():
            with torch.enable_grad(), seed_torch(task.device, 0):
                call_model(model, examples[torch.arange(count) % len(examples)]).sum().backward()
    except Exception:  # where it also fails without them, the reason is told where that is tried
        return True
    return False


def build_record_gradient(task: Task) -> Gradient:
    """Return the gradients of many single records' losses at once, by `torch.func`.

    All records share the parameters, so vmap leaves their dimension out, and layers run as products of matrices.

    Source: Subramani, Vadivelu and Kamath 2021 (Enabling Fast Differentially Private SGD via Just-in-Time Compilation
    and Vectorization).
    """
    one = torch.ones(1, dtype=task.dtype, device=task.device)

    def record_loss(p: tuple[Tensor, ...], record: Any, target: Tensor) -> Tensor:
        alone = map_arrays(lambda tensor: tensor.unsqueeze(0), record)
        return task.objective(p, alone, target.unsqueeze(0), one)

    # Each record is a batch of one, so no layer can mix it with another.
    per_record = vmap(grad(record_loss), in_dims=(None, 0, 0), randomness="different")

    return _vectorize(task, lambda params, x, y: per_record(tuple(put_channels_last(task, params, x)), x, y))


def build_expanded_record_gradient(task: Task) -> Gradient:
    """Return the gradients of many single records' losses, as those of users with one record and the same parameters.

    Recurrent layers write in place, which vmap allows only if the parameters, too, differ from user to user.
    """
    per_user = build_user_gradient(task)

    def gradient(params: Sequence[Tensor], x: Any, y: Tensor) -> tuple[Tensor, ...]:
        rows = [p.expand(len(y), *p.shape) for p in params]
        alone = map_arrays(lambda tensor: tensor.unsqueeze(1), x)
        return per_user(
            rows, alone, y.unsqueeze(1), torch.ones_like(rows[0], dtype=task.dtype).flatten(1)[:, :1]
        )

    return gradient


def call_each_record(model: nn.Module, x: Any) -> Tensor:
    """Return the outputs (n, ...) of a model for inputs (n, ...), each of which is a batch of one."""

    def call(record: Any) -> Tensor:
        outputs: Tensor = call_model(model, map_arrays(lambda tensor: tensor.unsqueeze(0), record))
        return outputs.squeeze(0)

    with vectorizable_kernels(model):
        found: Tensor = vmap(call, randomness="different")(x)
        return found


def build_looped_record_gradient(task: Task) -> Gradient:
    """Return the gradients of single records' losses, one after another, by ordinary autograd; it cannot be traced."""
    one = torch.ones(1, dtype=task.dtype, device=task.device)

    def gradient(params: Sequence[Tensor], x: Any, y: Tensor) -> tuple[Tensor, ...]:
        each = [_differentiate(task, params, x[i : i + 1], y[i : i + 1], one) for i in range(len(y))]
        return tuple(torch.stack(rows) for rows in zip(*each, strict=True))

    return gradient


# The fastest first; the last ones run whatever ordinary autograd can differentiate.
_BUILDERS: dict[Unit, tuple[GradientBuilder, ...]] = {
    "user": (build_user_gradient, build_looped_gradient),
    "record": (build_record_gradient, build_expanded_record_gradient, build_looped_record_gradient),
}


def is_looped(builder: GradientBuilder) -> bool:
    """Return whether a builder's gradients are computed one after another, which cannot be traced."""
    return builder in (build_looped_gradient, build_looped_record_gradient)


def select_gradient(unit: Unit, task: Task, x: Any, y: Tensor) -> GradientBuilder:
    """Return the fastest builder of gradients that can run the model and loss; found out once per kind of records.

    Args:
        unit: Whether gradients are those of users, or of single records.
        task: The model and the loss.
        x: Records (n, ...) of the kind to come; made-up ones of that kind are tried, and no value is looked at.
        y: Their targets (n, ...).

    Raises:
        SilodpError: ordinary autograd cannot take the gradient of one user or record either.
    """

    def select() -> GradientBuilder:
        tried = _list_tried(unit, task, x, y)
        *fast, slow = _BUILDERS[unit]
        is_slower = _has_fused_recurrence(task)
        fast, reason = [] if is_slower else fast, ""
        with seed_torch(task.device, 0):
            for builder in fast:
                try:
                    for example in tried:
                        builder(task)(*example)
                    return builder
                except Exception as problem:
                    # What the model raised, and not the sentence about it: nothing in the model is to be corrected.
                    reason = describe_exception(problem.__cause__ or problem)
            try:
                for example in tried:
                    slow(task)(*example)
            except SilodpError:
                raise
            except Exception as error:
                raise model_error(
                    f"the gradient of {type(task.model).__name__} with loss '{task.loss.name}' cannot be computed "
                    f"({first_line(error)}): use operations that torch.autograd can differentiate.",
                    "model.no_gradient",
                ) from error
        shown = type(task.model).__name__, task.loss.name, reason
        if not is_slower:
            task.engine.get("announced", lambda: _log.warning(_LOOPED, *shown))
        return slow

    return task.engine.get(("gradient", unit, get_kind(x), get_kind(y)), select)


def measure_loop(unit: Unit, task: Task, x: Any, y: Tensor) -> float | None:
    """Return the price of gradients that are computed one after another; None where they are computed at once.

    It is their time on made-up records, as a multiple of that of one pass without privacy over the same records: four
    users with five records each, or twenty records.

    Args:
        unit: Whether gradients are those of users, or of single records.
        task: The model and the loss.
        x: Records (n, ...) of the kind to come, of which no value is looked at.
        y: Their targets (n, ...).

    Raises:
        SilodpError: ordinary autograd cannot take the gradient of one user or record either.
    """
    builder = select_gradient(unit, task, x, y)
    if not is_looped(builder):
        return None
    users, records = 4, 5
    params = task.unflatten(task.flatten(task.model))
    everyone = torch.ones(users * records, dtype=task.dtype, device=task.device)
    whole = (*task.repeat_examples(x, y, users * records), everyone)
    each: Sequence[Any] = (params, *whole[:2])
    if unit == "user":
        rows = [p.expand(users, *p.shape) for p in params]
        each = (rows, *task.repeat_examples(x, y, users, records), everyone.reshape(users, records))
    separate, together = builder(task), build_plain_gradient(task)
    with seed_torch(task.device, 0):
        times = [_time(lambda: separate(*each)), _time(lambda: together(params, *whole))]
    return times[0] / times[1]


def _time(compute: Callable[[], Any]) -> float:
    """Return the seconds of a computation: the least of two, after one that is not counted."""
    found = []
    for _ in range(3):
        begin = time.perf_counter()
        compute()
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def computes_alike(task: Task, other: Task, x: Any, y: Tensor) -> bool:
    """Return whether another task of the same model computes the gradients of this one, for many users and for one.

    They are compared in eval mode, at parameters drawn at random: random layers draw other numbers at once than alone.

    Args:
        task: The model and the loss.
        other: The same model, called in another way.
        x: Records (n, ...) of the kind to come; made-up ones of that kind are tried, and no value is looked at.
        y: Their targets (n, ...).
    """
    many, alone, expected = (
        build_user_gradient(other),
        build_plain_gradient(other),
        build_plain_gradient(task),
    )
    try:
        with seed_torch(task.device, 0), keep_modes(task.model):
            for rows, *data in _list_tried("user", task, x, y):
                many(rows, *data)
                alone([p[0] for p in rows], *(part[0] for part in data))
            set_mode(task.model, training=False)
            drawn = [torch.randn_like(p) / max(1, math.prod(p.shape[2:])) ** 0.5 for p in rows]
            found, first = many(drawn, *data), ([p[0] for p in drawn], *(part[0] for part in data))
            wanted, single = expected(*first), alone(*first)
    except Exception:  # whatever torch has no rule for
        return False
    least = _TOLERANCE * max(float(g.abs().max()) for g in wanted if g.numel())
    return all(
        torch.allclose(g, w, rtol=0, atol=least, equal_nan=True)
        for w, *others in zip(wanted, single, (part[0] for part in found), strict=True)
        for g in others
    )


def _list_tried(unit: Unit, task: Task, x: Any, y: Tensor) -> list[Sequence[Any]]:
    """Return the arguments on which a gradient is tried: every kind of made-up record alone, and all together.

    A path that fails on one kind would fail, or be left, by what somebody's record holds.
    """
    params = task.unflatten(task.flatten(task.model))
    records, labels = task.list_examples(x, y)
    if unit == "record":
        return [(params, records, labels)]
    kinds = len(labels)
    rows = [torch.stack([p] * kinds) for p in params]
    mixed = torch.arange(kinds).expand(kinds, kinds)
    tried = list[Sequence[Any]]()
    for places in (
        torch.arange(kinds).unsqueeze(1),
        torch.arange(kinds).unsqueeze(1).expand(kinds, 2),
        mixed,
    ):
        mask = torch.ones(places.shape, dtype=task.dtype, device=task.device)
        tried.append((rows, records[places], labels[places], mask))
    return tried


def _differentiate(
    task: Task, params: Sequence[Tensor], x: Any, y: Tensor, mask: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradient of one user's loss by ordinary autograd."""
    leaves = [p.detach().requires_grad_() for p in params]

    def differentiate() -> tuple[Tensor, ...]:
        loss = task.objective(tuple(leaves), x, y, mask)
        return torch.autograd.grad(loss, leaves, materialize_grads=True)

    with torch.enable_grad():
        # The model carries the values in the backward pass, too: gradient checkpointing runs its layers again there.
        found: tuple[Tensor, ...] = task.call_with(tuple(leaves), differentiate)
        return found


class ReplaceFunctions(TorchFunctionMode):
    """Calls other functions in place of some of torch's."""

    def __init__(self, replacements: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._replacements = replacements

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._replacements.get(func, func)(*args, **(kwargs or {}))


class _ReplaceKernels(ReplaceFunctions):
    """Calls functions that vmap can run in place of those that it cannot."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError as problem:
            return compute_otherwise(problem, func, args, kwargs or {})


def _look_up(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *options: Any, **named: Any
) -> Tensor:
    """Return what `F.embedding` does, whose row of padding gets no gradient.

    Under vmap, torch leaves out the gradient of that row for the first of many users alone, so that the update of a
    person would depend on who stands before them.
    """
    # Looked up without the padding index, whose rule for vmap is wrong; its gradient is stopped below.
    rows = F.embedding(input, weight, None, *options, **named)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), rows.detach(), rows)


def _look_up_directly(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, *options: Any, **named: Any
) -> Tensor:
    """Return what `torch.embedding` does, as `_look_up`; a negative `padding_idx` is none."""
    rows = torch.embedding(weight, indices, -1, *options, **named)
    return torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """Return what `F.scaled_dot_product_attention` does, whose dropout vmap cannot run inside another vmap."""
    options |= {"is_causal": is_causal, "enable_gqa": enable_gqa}
    if dropout_p == 0:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    # Of the identity, attention returns its weights.
    same = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], key.shape[-2])
    weights = F.scaled_dot_product_attention(query, key, same, attn_mask, **options)
    if enable_gqa:  # several heads of queries share one of keys
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return F.dropout(weights, dropout_p) @ value


_REPLACED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attend,
    F.embedding: _look_up,
    torch.embedding: _look_up_directly,
    torch.ops.aten.embedding: _look_up_directly,
    torch.ops.aten.embedding.default: _look_up_directly,
}


def _normalize_groups(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalize groups of channels as `layer_norm` does each row, then scale and shift channels.

    Under vmap, `group_norm` is taken apart into some twenty operations, `layer_norm` without affine parameters into
    few: a step of ULDP-FL's creditcard network takes two thirds of the time. The values are the same up to rounding.

    Source: Wu and He 2018 (Group Normalization).
    """
    groups = x.reshape(x.shape[0], num_groups, -1)
    normal = F.layer_norm(groups, groups.shape[2:], eps=eps).reshape(x.shape)
    per_channel = (1, -1) + (1,) * (x.dim() - 2)
    if weight is not None:
        normal = normal * weight.reshape(per_channel)
    return normal if bias is None else normal + bias.reshape(per_channel)


@contextmanager
def vectorizable_kernels(model: nn.Module) -> Iterator[None]:
    """Choose kernels that vmap has right and fast rules for: it would call the fused ones of attention in a loop.

    A trace keeps the kernels with which it was made.
    """
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(isinstance(mode, _ReplaceKernels) for mode in modes):
        yield  # they are chosen already
        return
    groups = {F.group_norm: _normalize_groups} if has_layer(model, nn.GroupNorm) else {}
    replaced = _ReplaceKernels(_REPLACED | packed.REPLACED | groups)
    with (
        ExitStack() as kernels,
        warnings.catch_warnings(),
        sdpa_kernel(SDPBackend.MATH),
        choose_value_free_branches(),
        keep_checkpoints(),
        replaced,
    ):
        warnings.filterwarnings("ignore", "There is a performance drop|TF32 acceleration", UserWarning)
        # oneDNN's and cuDNN's fused recurrent layers have no rule for vmap.
        if has_layer(model, nn.LSTM):
            kernels.enter_context(torch.backends.mkldnn.flags(enabled=False))
            kernels.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield
