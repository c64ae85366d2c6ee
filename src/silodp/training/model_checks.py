"""Checks that the gradient of one user is a function of that user's records only.

User-level clipping bounds a user's influence only if no layer mixes the records of a batch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from itertools import pairwise
from numbers import Number
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from silodp.data.inputs import NamedArrays, get_kind, list_arrays, map_arrays
from silodp.errors import SilodpError, describe_exception
from silodp.training.losses import Loss

# How far another record's output may move, relative to the largest output, before records count as mixed: kernels may
# sum in another order, which moves outputs by far less than layers that mix.
_TOLERANCE = 1e-4
# Of every module, and none of its state: the mode, and what is handled by name. (So is the list of a recurrent layer's
# parameters, which torch.func replaces.)
_OF_MODULES = {"training", "_parameters", "_buffers", "_modules"}
_SCALARS = Number | str | bytes | np.generic | None
_DRAWS = 10  # of random layers, until every parameter has had a gradient
_FEW = 8  # records are enough to see that records mix
# Rows that are added to a batch, to see whether anything depends on them.
_PADDINGS = (1, 3)

_LOOKUP_OPTIONS = {
    "max_norm": "rescales weights while the model runs, in a way that no noise protects",
    "scale_grad_by_freq": "divides gradients by how often an id occurs in a batch, padding included",
    "sparse": "makes sparse gradients, and those that are clipped and noised are dense",
}
_LOOKUP_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.embedding: tuple(signature(F.embedding).parameters),
    F.embedding_bag: tuple(signature(F.embedding_bag).parameters),
}
for _function, _operation in (
    (torch.embedding, torch.ops.aten.embedding),
    (torch.embedding_bag, torch.ops.aten.embedding_bag),
):
    _names = tuple(argument.name for argument in _operation.default._schema.arguments)
    _LOOKUP_ARGUMENTS |= dict.fromkeys((_function, _operation, _operation.default), _names)


def inspect_model(model: nn.Module) -> None:
    """Check all that can be seen without running the model.

    Raises:
        SilodpError: batch statistics, an embedding that changes its weights, a module of torch.jit, no trainable
            parameters, parameters that are not all float32 or all float64 on one device, memory that two parameters
            share, or a state that is not a tensor.
    """
    for name, module in model.named_modules():
        where = (
            f"layer '{name}' ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        )
        if isinstance(module, torch.jit.ScriptModule):
            raise SilodpError(
                f"{where} is compiled by torch.jit, which hides its operations: give the torch.nn.Module that it was "
                "made from",
                code="argument.type",
                field="task.model",
            )
        if (wrapper := _find_wrapper(module)) is not None:
            raise SilodpError(
                f"{where} is a module wrapped by {wrapper[0]}, which silodp cannot run for one person at a time: give "
                f"the module inside it ({wrapper[1]})",
                code="argument.type",
                field="task.model",
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not is_frozen_norm(module):
            raise _refuse_batch_norm(where)
        tracks = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        if tracks and not is_frozen_norm(module):
            raise SilodpError(
                f"{where} keeps running statistics of the records, which no noise protects: "
                "set track_running_stats=False, or use GroupNorm or LayerNorm instead",
                code="model.running_state",
                field="task.model",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _inspect_embedding(module, where)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters(recurse=False)):
            raise SilodpError(
                f"{where} has no shape yet: run the model once on an example before building the task",
                code="model.no_shape",
                field="task.model",
            )
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not any(p.numel() for p in trainable):
        raise SilodpError(
            "the model has no trainable parameters: there is nothing to learn",
            code="model.no_parameters",
            field="task.model",
        )
    kinds = {(p.dtype, p.device) for p in model.parameters()}
    if len(kinds) > 1 or trainable[0].dtype not in (torch.float32, torch.float64):
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise SilodpError(
            f"parameters must all be float32, or all float64, on one device, not {found}",
            code="model.dtype",
            field="task.model",
        )
    _inspect_state(model)


def _find_wrapper(module: nn.Module) -> tuple[str, str] | None:
    """Return what wrapped a module to run it in another way, and where the module is; None where nothing did."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return type(module).__name__, "model.module"
    # By its name: torch imports the compiler when it is used, which takes seconds.
    if type(module).__module__.startswith("torch._dynamo"):
        return "torch.compile", "model._orig_mod, or what torch.compile was given"
    return None


def is_frozen_norm(module: nn.Module) -> bool:
    """Return whether a layer normalizes by constants: running statistics, in the eval mode that it was given in."""
    norms = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    return isinstance(module, norms) and not module.training and module.running_mean is not None


def set_mode(model: nn.Module, training: bool) -> None:
    """Set train or eval mode; frozen parts that are in eval mode, and all that is in them, stay as they are."""
    constant = [part for part in model.modules() if is_frozen_norm(part) or _is_frozen_part(part)]
    kept = [module for part in constant for module in part.modules() if not module.training]
    model.train(training)
    for module in kept:
        module.training = False


def _is_frozen_part(module: nn.Module) -> bool:
    """Return whether a part of a model has parameters, trains none of them, and is in eval mode."""
    trained = [p.requires_grad for p in module.parameters()]
    return not module.training and bool(trained) and not any(trained)


def _refuse_batch_norm(where: str) -> SilodpError:
    return SilodpError(
        f"{where} normalizes over the batch, so one person's records change another's gradient: use GroupNorm or "
        "LayerNorm instead, or call .eval() on it where its running statistics are public",
        code="model.batch_norm",
        field="task.model",
    )


def _inspect_embedding(layer: nn.Embedding | nn.EmbeddingBag, where: str) -> None:
    """Refuse an embedding whose training is not a function of one person's records, or changes weights in forward."""
    _refuse_options(where, {option: getattr(layer, option) for option in _LOOKUP_OPTIONS})


def _refuse_options(where: str, options: Mapping[str, Any]) -> None:
    for option, why in _LOOKUP_OPTIONS.items():
        if options.get(option):
            raise SilodpError(
                f"{where} has {option}={options[option]}, which {why}: leave {option} out",
                code="model.embedding",
                field="task.model",
            )


class _RefuseLookups(TorchFunctionMode):
    """Refuses what `_inspect_embedding` does, where a forward calls the function and has no layer."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LOOKUP_ARGUMENTS:
            named = dict(zip(_LOOKUP_ARGUMENTS[func], args, strict=False)) | (kwargs or {})
            _refuse_options("an embedding that the forward of the model calls", named)
        return func(*args, **(kwargs or {}))


def _inspect_state(model: nn.Module) -> None:
    """Check that the state can be copied and stored as it is, and that no two parameters share memory."""
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
            kind = (
                type(value).__name__ if not isinstance(value, Tensor) else f"{value.layout} on {value.device}"
            )
            raise SilodpError(
                f"the model's state '{name}' ({kind}) cannot be stored: keep only dense tensors with values in the "
                "state of a model",
                code="model.not_storable",
                field="task.model",
            )
        if any(size > 1 and step == 0 for size, step in zip(value.shape, value.stride(), strict=True)):
            raise SilodpError(
                f"the model's state '{name}' repeats one number in memory (.expand), so no stored values can be loaded "
                "into it: append .clone()",
                code="model.not_storable",
                field="task.model",
            )
    named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    spans = sorted(
        (*_memory_span(tensor), name, tensor.requires_grad) for name, tensor in named if tensor.numel()
    )
    for (storage, _, end, name, trained), (other, begin, _, second, also) in pairwise(spans):
        if storage == other and begin < end and (trained or also):
            raise SilodpError(
                f"'{name}' and '{second}' of the model share memory but are not one parameter, so training would move "
                "them apart: assign one parameter to both (b.weight = a.weight), or give each its own (.clone())",
                code="model.shared_memory",
                field="task.model",
            )


def _memory_span(tensor: Tensor) -> tuple[int, int, int]:
    """Return a tensor's storage, and the bytes in it from the first to beyond the last element."""
    extent: int = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), begin, begin + extent * tensor.element_size()


def call_model(model: nn.Module, x: Any) -> Any:
    """Return the outputs of a model: several named inputs are its keyword arguments."""
    return model(**x) if isinstance(x, NamedArrays) else model(x)


def inspect_on(model: nn.Module, example: Any) -> None:
    """Check a model on an example: no records mixed, no state changed, outputs finite.

    One record of a batch is replaced, and then rows of padding are added; outputs of the others must not move, in train
    and in eval mode. One record alone must give an output of the same shape.

    Args:
        model: left in the mode and state that it came with.
        example: (n, ...) records, n ≥ 1, a tensor or `NamedArrays`.

    Raises:
        SilodpError: the model fails one of these, or raises.
    """
    if len(example) == 0:
        raise SilodpError("checking a model needs at least one example record", code="data.no_records")
    batch = example[:_FEW] if len(example) >= 3 else example[[0, 0, 0]]
    changed = map_arrays(_replace_record, batch)
    state, tensors = take_snapshot(model), _list_tensors(model)
    kept = [tensor.clone() for tensor in tensors]
    try:
        for mode in (True, False):
            with _in_mode(model, mode):
                before = _run_layers(model, batch)
                refuse_changes(model, state)
                _inspect_runs(model, batch, before, _run_layers(model, changed))
                _inspect_one_record(model, batch, before[""])
                _inspect_padding(model, batch, before)
                refuse_changes(model, state)
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                if not _are_equal(tensor, value):
                    tensor.copy_(value)


def _list_tensors(model: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


def take_snapshot(model: nn.Module) -> dict[str, object]:
    """Return copies of all that a model holds, by name: parameters, buffers, and attributes of its modules.

    Of attributes these are numbers, texts, tensors and arrays, also in lists, mappings and plain objects.
    """
    found: dict[str, object] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        left = _OF_MODULES | ({"_flat_weights"} if isinstance(module, nn.RNNBase) else set())
        attributes = {key: value for key, value in vars(module).items() if key not in left}
        for key, value in (tensors | attributes).items():
            _collect(f"{name}.{key}".lstrip("."), value, found, seen)
    return found


def has_tensor_attributes(model: nn.Module) -> bool:
    """Return whether a module holds a tensor or an array that is neither a parameter nor a buffer."""
    named = {
        f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        for key in (*module._parameters, *module._buffers)
    }
    return any(
        isinstance(value, Tensor | bytes) for name, value in take_snapshot(model).items() if name not in named
    )


def list_numeric_attributes(model: nn.Module) -> dict[str, Tensor]:
    """Return the numbers that modules of a user's classes hold as plain attributes, by name, as tensors.

    These are numbers, tensors, arrays, and lists and tuples of numbers. Modules of torch show theirs in their text, as
    does a class derived from one, and objects and texts may differ between machines (paths, versions of libraries).
    """
    known = {*vars(nn.Module()), *_OF_MODULES, "_flat_weights"}
    found = {}
    for name, module in model.named_modules():
        shown = {*known, *getattr(module, "__constants__", ())}
        if type(module).__module__.partition(".")[0] == "torch":
            continue
        for key, value in vars(module).items():
            if key not in shown and (tensor := _make_numbers(value)) is not None:
                found[f"{name}.{key}".lstrip(".")] = tensor
    return found


def _make_numbers(value: object) -> Tensor | None:
    """Return numbers as a tensor; None where a value is anything else."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Number | np.generic | np.ndarray | list | tuple):
        try:
            array = np.array(value)
            return torch.from_numpy(array) if array.dtype.kind in "biufc" and array.size else None
        except (ValueError, TypeError, RuntimeError):  # lists of different lengths, or of tensors elsewhere
            return None
    return None


def _collect(name: str, value: object, found: dict[str, object], seen: set[int]) -> None:
    """Add copies of a value, and of what is in it, to those found; `seen` are the objects that were looked into."""
    if isinstance(value, Tensor):
        found[name] = value.detach().clone()
        return
    if isinstance(value, np.ndarray):
        found[name] = value.tobytes()
        return
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple | deque | set | frozenset):
        parts = list(enumerate(value))
    elif not isinstance(value, nn.Module | type | ModuleType | logging.Logger) and not callable(value):
        is_torchs = type(value).__module__.partition(".")[0] == "torch"
        parts = () if is_torchs else getattr(value, "__dict__", {}).items()
    is_plain = isinstance(value, _SCALARS | list | tuple | deque | set | frozenset | dict)
    if is_plain and all(isinstance(part, _SCALARS) for _, part in parts):  # a vocabulary is long
        found[name] = repr(value)
        return
    found[name] = type(value)
    if id(value) not in seen:
        seen.add(id(value))
        for key, part in parts:
            _collect(f"{name}.{key}", part, found, seen)


def refuse_changes(model: nn.Module, before: Mapping[str, object]) -> None:
    """Refuse a model that is not as it was when the snapshot `before` was taken.

    Raises:
        SilodpError: its name says what has changed (code model.running_state).
    """
    after = take_snapshot(model)
    for name in [*before, *(after.keys() - before.keys())]:
        if not _are_equal(before.get(name), after.get(name)):
            raise SilodpError(
                f"running the model changes its state '{name}', which no noise protects: "
                "use a layer without running state instead, and compute constants when the model is built",
                code="model.running_state",
                field="task.model",
            )


def inspect_loss(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Tensor,
    classes: int | None = None,
) -> None:
    """Check that a loss can train this model, and that it leaves out records whose mask is 0.

    Args:
        model: in any mode; its outputs are taken in eval mode.
        loss: to be inspected.
        x: (n, ...) made-up records, n ≥ 3.
        y: (n, ...) made-up labels of the right kind.
        classes: their number; None: not known, or labels of another kind.

    Raises:
        SilodpError: it cannot, or does not.
    """
    with _in_mode(model, training=False), torch.enable_grad():
        outputs = call_model(model, x)
    if not outputs.requires_grad:
        raise SilodpError(
            f"the outputs of {type(model).__name__} have no gradient with respect to its parameters: write its forward "
            "with differentiable torch operations only (no argmax, no .detach(), no numpy)",
            code="model.no_gradient",
            field="task.model",
        )
    if loss.per_class and classes is not None and outputs.dim() > 1 and 1 < outputs.shape[1] != classes:
        raise SilodpError(
            f"the model gives {outputs.shape[1]} outputs for a record, and the labels have {classes} classes: end it "
            f"in a layer of width {classes}, because the loss '{loss.name}' takes one output per class",
            code="loss.output_shape",
            field="task.model",
        )
    outputs = outputs.detach().requires_grad_()
    everyone = torch.ones(len(x), dtype=outputs.dtype, device=outputs.device)
    if not _compute_repeatably(loss, outputs, y, everyone).requires_grad:
        raise SilodpError(
            f"the loss '{loss.name}' has no gradient with respect to the model's outputs: write it with differentiable "
            "torch operations only (no argmax, no .detach(), no numpy)",
            code="loss.no_gradient",
            field="task.loss",
        )
    if _counts_masked_records(loss, outputs, y):
        raise SilodpError(
            f"the loss '{loss.name}' of some records changes with records that are left out (mask 0): give every "
            "record a loss of its own, or leave records of mask 0 out of every sum, mean and count",
            code="loss.counts_masked_records",
            field="task.loss",
        )


def inspect_parameters(model: nn.Module, x: Any) -> None:
    """Refuse trainable parameters that get no gradient: noise alone would move them, and it adds to that of the others.

    Args:
        model: left as it came, and such that autograd can differentiate it.
        x: (n, ...) made-up records.

    Raises:
        SilodpError: the outputs do not depend on a parameter, or its gradient is lost on the way (model.no_gradient).
    """
    idle = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    count = len(idle)
    devices = [p.device for p in idle.values() if p.is_cuda][:1]
    with _in_mode(model, training=True), torch.enable_grad(), torch.random.fork_rng(devices=devices):
        for seed in range(_DRAWS):  # a model may leave layers out at random
            torch.manual_seed(seed)
            found = torch.autograd.grad(call_model(model, x).sum(), list(idle.values()), allow_unused=True)
            idle = {name: p for (name, p), g in zip(idle.items(), found, strict=True) if g is None}
            if not idle:
                return
    shown = ", ".join(f"'{name}'" for name in list(idle)[:3]) + (" and others" if len(idle) > 3 else "")
    raise SilodpError(
        f"{len(idle)} of the {count} trainable parameters of {type(model).__name__} get no gradient, so noise alone "
        f"would move them: {shown}. Freeze or remove what the forward does not use (requires_grad_(False)), take "
        ".detach() out, and set use_reentrant=False where torch.utils.checkpoint runs a layer.",
        code="model.no_gradient",
        field="task.model",
    )


def _counts_masked_records(loss: Loss, outputs: Tensor, y: Tensor) -> bool:
    """Return whether loss or gradient of some records differ where other records, with mask 0, stand beside them.

    How many do depends on other persons: users train side by side, padded to the longest.
    """
    outputs, y = outputs[:_FEW].detach().requires_grad_(), y[:_FEW]
    everyone = list(range(len(outputs)))
    # Padding repeats the first record of a batch. Any other record must not count either, whatever its label.
    other = next((i for i in everyone if not torch.equal(y[i], y[1])), 0)
    swapped, left = [other if i == 1 else i for i in everyone], [i for i in everyone if i != 1]
    every, no_second = [1.0] * len(y), [float(i != 1) for i in everyone]
    whole = _differentiate(loss, outputs, y, everyone, every)
    if not torch.equal(whole[0], _differentiate(loss, outputs, y, everyone, every, seed=1)[0]):
        # Other numbers of records draw other random numbers.
        expected = _differentiate(loss, outputs, y, everyone, no_second)
        return _differs(expected, _differentiate(loss, outputs, y, swapped, no_second), whole)
    padded = [(everyone + [0] * count, every + [0.0] * count, everyone) for count in _PADDINGS]
    only_second = [float(i == 1) for i in everyone]
    masked = [(everyone, no_second, left), (swapped, no_second, left), (everyone, only_second, [1])]
    return any(
        _differs(
            _differentiate(loss, outputs, y, kept, [1.0] * len(kept)),
            _differentiate(loss, outputs, y, rows, mask),
            whole,
        )
        for rows, mask, kept in padded + masked
    )


def _differs(expected: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor], whole: Sequence[Tensor]) -> bool:
    """Return whether a loss or its gradient is not what it should be, as far as that is finite."""
    for wanted, value, scale in zip(expected, found, whole, strict=True):
        largest = torch.cat([wanted.flatten(), scale.nan_to_num().flatten()]).abs().max().clamp(min=1e-6)
        if torch.isfinite(wanted).all() and not ((wanted - value).abs() <= _TOLERANCE * largest).all():
            return True
    return False


def _differentiate(
    loss: Loss, outputs: Tensor, y: Tensor, rows: list[int], mask: list[float], seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the loss of these records, and its gradient with respect to all outputs."""
    value = _compute_repeatably(loss, outputs[rows], y[rows], outputs.new_tensor(mask), seed)
    try:
        (gradient,) = torch.autograd.grad(value, outputs, materialize_grads=True)
    except Exception:  # no derivative: refused where the gradient of the model is tried
        gradient = torch.zeros_like(outputs)
    return value.detach(), gradient


def _compute_repeatably(loss: Loss, outputs: Tensor, targets: Tensor, mask: Tensor, seed: int = 0) -> Tensor:
    """Return the loss, with the same random numbers in every call."""
    with torch.random.fork_rng(devices=[outputs.device] if outputs.is_cuda else []):
        torch.manual_seed(seed)
        return loss.compute(outputs, targets, mask)


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    set_mode(model, training)
    try:
        yield
    finally:
        for module, mode in before:  # not set_mode: it keeps what is in eval mode now
            module.training = mode


def _inspect_runs(model: nn.Module, batch: Any, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Check outputs on a batch, and that replacing its second record moved no other's."""
    final = before[""]
    if final.dim() == 0 or final.shape[0] != len(batch):
        raise SilodpError(
            f"the model turns {len(batch)} records into an output of shape {tuple(final.shape)}: "
            "it must give one row per record",
            code="model.output_shape",
            field="task.model",
        )
    if (
        all(torch.isfinite(part).all() for part in list_arrays(batch).values())
        and not torch.isfinite(final).all()
    ):
        raise SilodpError(
            "the model gives outputs that are not finite on a finite example (before a run, standard normal numbers "
            "are made up, also negative ones): scale the inputs, and bound them where a function needs it, for example "
            "x.clamp(min=1e-6) before a logarithm",
            code="model.not_finite",
            field="task.model",
        )
    others = [i for i in range(len(batch)) if i != 1]
    if not _have_moved(final, after[""], others):
        return
    name = _find_layer(before, after, others)
    if name:
        layer = model.get_submodule(name)
        remedy = "use a layer that works on each record alone"
        if getattr(layer, "batch_first", True) is False:
            remedy = "set batch_first=True, because here the first dimension of its inputs is the record"
        raise SilodpError(
            f"layer '{name}' ({type(layer).__name__}) mixes the records of a batch, so one person's "
            f"records change another's gradient: {remedy}",
            code="model.mixes_records",
            field="task.model",
        )
    raise SilodpError(
        f"the forward of {type(model).__name__} mixes the records of a batch, so one person's records change "
        "another's gradient: work on each record alone",
        code="model.mixes_records",
        field="task.model",
    )


def _inspect_one_record(model: nn.Module, batch: Any, outputs: Tensor) -> None:
    """Refuse outputs of another shape where a batch has one record, as a person may have: squeeze() drops its row."""
    alone = _run_layers(model, batch[[0]])[""]
    if alone.shape != (1, *outputs.shape[1:]):
        raise SilodpError(
            f"the model turns {len(batch)} records into outputs of shape {tuple(outputs.shape)}, and one record into "
            f"{tuple(alone.shape)}: give one row per record, for example by squeeze(-1) in place of squeeze()",
            code="model.output_shape",
            field="task.model",
        )


def _find_layer(before: dict[str, Tensor], after: dict[str, Tensor], rows: list[int]) -> str:
    """Return the innermost layer, first in order of execution, whose outputs of some rows have moved; '' for none."""
    for name, output in before.items():
        if name and len(output) > max(rows) and _have_moved(output, after[name], rows):
            return name
    return ""


def _inspect_padding(model: nn.Module, batch: Any, outputs: dict[str, Tensor]) -> None:
    """Refuse outputs that depend on how many rows a batch has: users train side by side, padded to the longest."""
    real = list(range(len(batch)))
    for rows in (real + [0] * count for count in _PADDINGS):
        padded = batch[rows]
        before, after = outputs, _run_layers(model, padded)
        if _have_moved(before[""], after[""], real) and _is_random(model, batch):
            # Another number of rows draws other random numbers: compare without dropout, if that leaves none.
            with _without_dropout(model):
                before, after = _run_layers(model, batch), _run_layers(model, padded)
                if _is_random(model, batch):
                    continue
        if _have_moved(before[""], after[""], real):
            name = _find_layer(before, after, real)
            where = (
                f"layer '{name}' ({type(model.get_submodule(name)).__name__})"
                if name
                else f"the forward of {type(model).__name__}"
            )
            raise SilodpError(
                f"the outputs of {where} change with the number of rows in a batch, which is padded to the longest of "
                "other persons: work on each record alone, without the length of the batch",
                code="model.mixes_records",
                field="task.model",
            )


def _is_random(model: nn.Module, batch: Any) -> bool:
    first, second = (_run_layers(model, batch, seed)[""] for seed in (0, 1))
    return not torch.equal(first.nan_to_num(), second.nan_to_num())


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    layers = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    try:
        for layer in layers:
            layer.training = False
        yield
    finally:
        for layer in layers:
            layer.training = True


def _have_moved(before: Tensor, after: Tensor, rows: list[int]) -> bool:
    """Return whether these rows differ; `after` may have more rows, of padding."""
    if before.shape[1:] != after.shape[1:] or len(after) < len(before):
        return True
    scale = before.abs().max().clamp(min=1e-12)
    return bool(((before[rows] - after[rows]).abs().max() > _TOLERANCE * scale).item())


def _run_layers(model: nn.Module, batch: Any, seed: int = 0) -> dict[str, Tensor]:
    """Return floating outputs by layer name in order of completion, '' for the model; same dropout in every call."""
    found: dict[str, Tensor] = {}

    def keep(name: str):  # type: ignore[no-untyped-def]
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 0:
                found[name] = first.detach()

        return hook

    with (
        _hooks([(m, keep(name)) for name, m in model.named_modules() if name]),
        _watch_embeddings(model) as unfinished,
        _RefuseLookups(),
        torch.no_grad(),
    ):
        inputs = list_arrays(batch)
        devices = [part.device for part in inputs.values() if part.device.type == "cuda"][:1]
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            try:
                final = call_model(model, batch)
            except SilodpError:
                raise
            except (Exception, SystemExit) as problem:
                if unfinished:
                    name, asked = unfinished[0]
                    refusal = _refuse_lookup(name, model.get_submodule(name), asked, inputs)
                    if refusal is not None:
                        raise refusal from problem
                shapes = " and ".join(f"{name} {shape}".strip() for name, shape, _ in get_kind(batch))
                reason, kinds = describe_exception(problem), [kind for _, _, kind in get_kind(batch)]
                if "Long" in reason and "torch.int64" in kinds:
                    reason += "; look ids (int64) up in an nn.Embedding, or give numbers as float32"
                called = f", given as the arguments {', '.join(inputs)}" if "" not in inputs else ""
                raise SilodpError(
                    f"the model fails on records of shape {shapes} (tried with made-up numbers{called}): {reason}",
                    code="model.raised",
                    field="task.model",
                ) from problem
    if not isinstance(final, Tensor):
        raise SilodpError(
            f"the model must return one tensor, not {type(final).__name__}: {_suggest_output(final)}",
            code="model.output_shape",
            field="task.model",
        )
    found[""] = final
    return found


def _suggest_output(outputs: object) -> str:
    """Return how a forward gives one tensor in place of a container of several things."""
    if isinstance(outputs, Mapping):  # as the outputs of transformers are, too
        names, place = list(outputs), "outputs[{!r}]"
    elif isinstance(outputs, tuple | list) and not hasattr(outputs, "_fields"):
        names, place = [0], "outputs[{}]"
    else:
        names, place = (
            list(getattr(outputs, "_fields", getattr(outputs, "__dict__", ()))),
            "outputs.{}",
        )
    if not names:
        return "return the logits alone in its forward"
    return f"return {place.format('logits' if 'logits' in names else names[0])} in its forward"


def _refuse_lookup(
    name: str, layer: nn.Module, asked: Tensor, inputs: dict[str, Tensor]
) -> SilodpError | None:
    """Return the refusal of an embedding layer that failed on made-up records; None where the ids are not at fault."""
    where = f"layer '{name}' ({type(layer).__name__})" if name else f"the model ({type(layer).__name__})"
    if all(part.is_floating_point() for part in inputs.values()):
        return SilodpError(
            f"{where} looks up ids, and the inputs are real numbers: give ids as int64, with their public number "
            "(categories)",
            code="model.integer_inputs",
            field="task.model",
        )
    rows = int(getattr(layer, "num_embeddings", 0))
    if asked.is_floating_point() or not len(asked) or int(asked.max()) < rows:
        return None
    return SilodpError(
        f"{where} has {rows} rows and is asked for row {int(asked.max())}, which the public number of ids allows "
        "(categories): set num_embeddings to at least that number",
        code="data.categories",
        field="task.model",
    )


@contextmanager
def _watch_embeddings(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the embedding layers that have begun and not ended: name and ids."""
    unfinished: list[tuple[str, Tensor]] = []
    with ExitStack() as handles:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                begin = module.register_forward_pre_hook(
                    lambda _, args, name=name: unfinished.append((name, args[0] if args else torch.zeros(0)))
                )
                end = module.register_forward_hook(lambda *_: unfinished.clear())
                handles.callback(begin.remove)
                handles.callback(end.remove)
        yield unfinished


@contextmanager
def _hooks(pairs: list) -> Iterator[None]:  # type: ignore[type-arg]
    handles = [module.register_forward_hook(hook) for module, hook in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _replace_record(batch: Tensor) -> Tensor:
    """Return the batch with another second record: a distant one, or other ids among those seen."""
    changed = batch.clone()
    if batch.is_floating_point():
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(batch[1].shape, generator=generator, dtype=torch.float64).to(batch)
        changed[1] = batch[1] + (1 + batch.abs().max().nan_to_num(0, 0)) * noise
    else:
        # At every place an id that another record has there, and this one has not, if there is one.
        other = (batch != batch[1]).int().argmax(0, keepdim=True)
        changed[1] = batch.gather(0, other)[0]
    return changed


def _are_equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(view_bytes(a), view_bytes(b))
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


def view_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes (n,) of the elements of a tensor of any data type; a meta tensor has none."""
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    if dense.is_meta:
        return torch.zeros(0, dtype=torch.uint8)
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
