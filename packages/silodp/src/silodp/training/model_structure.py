"""Checks of a model that need not run it: what its layers are, and whether its state can be trained and stored."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from silodp.training.model_state import is_frozen_norm, model_error

_LOOKUP_OPTIONS = {
    "max_norm": "rescales weights while the model runs, in a way that no noise protects",
    "scale_grad_by_freq": "divides gradients by how often an id occurs in a batch, padding included",
    "sparse": "makes sparse gradients, and those that are clipped and noised are dense",
}
# The names of the arguments of every function that looks rows up: a call may give options by place.
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


def inspect_structure(model: nn.Module) -> None:
    """Check all that can be seen of a model without running it.

    Raises:
        SilodpError: batch statistics, an observer of records, an embedding that changes its weights, a hook of a
            parameter, a module of torch.jit, no trainable parameters, parameters that are not all float32 or all
            float64 on one device, memory that two parameters share, or a state that is not a tensor.
    """
    for name, module in model.named_modules():
        where = describe_layer(name, module)
        if isinstance(module, torch.jit.ScriptModule):
            raise model_error(
                f"{where} is compiled by torch.jit, which hides its operations: give the torch.nn.Module that it was "
                "made from",
                "argument.type",
            )
        if (wrapper := _find_wrapper(module)) is not None:
            raise model_error(
                f"{where} is a module wrapped by {wrapper[0]}, which silodp cannot run for one person at a time: give "
                f"the module inside it ({wrapper[1]})",
                "argument.type",
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not is_frozen_norm(module):
            raise model_error(
                f"{where} normalizes over the batch, so one person's records change another's gradient: use GroupNorm "
                "or LayerNorm instead, or call .eval() on it where its running statistics are public",
                "model.batch_norm",
            )
        tracks = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        if tracks and not is_frozen_norm(module):
            raise model_error(
                f"{where} keeps running statistics of the records, which no noise protects: "
                "set track_running_stats=False, or use GroupNorm or LayerNorm instead",
                "model.running_state",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _refuse_lookup_options(where, {option: getattr(module, option) for option in _LOOKUP_OPTIONS})
        if _is_observer(module):
            raise model_error(
                f"{where} keeps the range of the records that it has seen, which no noise protects: quantize the model "
                "after training, and train without torch.ao.quantization",
                "model.running_state",
            )
        for key, parameter in module.named_parameters(recurse=False):
            # A copy of the model would be without them.
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise model_error(
                    f"parameter '{key}' of {where} has a hook, which changes its gradient in plain training alone: "
                    "write what it does into the forward (a mask: weight * mask), or freeze the parameter",
                    "model.gradient_differs",
                )
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters(recurse=False)):
            raise model_error(
                f"{where} has no shape yet: run the model once on an example before building the task",
                "model.no_shape",
            )
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not any(p.numel() for p in trainable):
        raise model_error(
            "the model has no trainable parameters: there is nothing to learn", "model.no_parameters"
        )
    # One vector holds all parameters, so they need one data type and device.
    kinds = {(p.dtype, p.device) for p in model.parameters()}
    if len(kinds) > 1 or trainable[0].dtype not in (torch.float32, torch.float64):
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        remedy = ""
        if any(dtype.is_complex for dtype, _ in kinds):
            remedy = (
                ": hold real and imaginary parts in one real parameter (torch.view_as_complex in the forward)"
            )
        raise model_error(
            f"parameters must all be float32, or all float64, on one device, not {found}{remedy}",
            "model.dtype",
        )
    # Last: a lazy module has no memory to look at before it is run.
    _inspect_state(model)


def describe_layer(name: str, module: nn.Module) -> str:
    """Return how messages call a module of this name; '' is the model itself."""
    return f"layer '{name}' ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def _find_wrapper(module: nn.Module) -> tuple[str, str] | None:
    """Return what wraps a module to run it in another way, and where the module itself is; None without a wrapper."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return type(module).__name__, "model.module"
    # By its name: torch imports the compiler when it is used, which takes seconds.
    if type(module).__module__.startswith("torch._dynamo"):
        return "torch.compile", "model._orig_mod, or what torch.compile was given"
    return None


def _is_observer(module: nn.Module) -> bool:
    """Return whether a module belongs to torch's quantization in training, which observes what it is given."""
    names = {one.__module__ for one in type(module).__mro__}
    return any(
        name.startswith(("torch.ao.quantization", "torch.ao.nn.qat", "torch.ao.nn.intrinsic.qat"))
        for name in names
    )


def _refuse_lookup_options(where: str, options: Mapping[str, Any]) -> None:
    """Refuse a lookup whose gradient is not a function of one person's records, or that changes weights."""
    for option, why in _LOOKUP_OPTIONS.items():
        if options.get(option):
            raise model_error(
                f"{where} has {option}={options[option]}, which {why}: leave {option} out", "model.embedding"
            )


class RefuseLookups(TorchFunctionMode):
    """Refuses the options that embedding layers may not have, where a forward calls the function itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LOOKUP_ARGUMENTS:
            named = dict(zip(_LOOKUP_ARGUMENTS[func], args, strict=False)) | (kwargs or {})
            _refuse_lookup_options("an embedding that the forward of the model calls", named)
        return func(*args, **(kwargs or {}))


def _inspect_state(model: nn.Module) -> None:
    """Check that the state can be copied and stored as it is, and that no two parameters share memory."""
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
            kind = (
                type(value).__name__ if not isinstance(value, Tensor) else f"{value.layout} on {value.device}"
            )
            raise model_error(
                f"the model's state '{name}' ({kind}) cannot be stored: keep only dense tensors with values in the "
                "state of a model",
                "model.not_storable",
            )
        if any(size > 1 and step == 0 for size, step in zip(value.shape, value.stride(), strict=True)):
            raise model_error(
                f"the model's state '{name}' repeats one number in memory (.expand), so no stored values can be loaded "
                "into it: append .clone()",
                "model.not_storable",
            )
    # Sorted by where they begin in memory, tensors that overlap are neighbors.
    named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    # Tied parameters are listed once, so two names for one memory are two parameters or a buffer.
    spans = sorted(
        (*_memory_span(tensor), name, tensor.requires_grad) for name, tensor in named if tensor.numel()
    )
    for (storage, _, end, name, trained), (other, begin, _, second, also) in pairwise(spans):
        if storage == other and begin < end and (trained or also):
            raise model_error(
                f"'{name}' and '{second}' of the model share memory but are not one parameter, so training would move "
                "them apart: assign one parameter to both (b.weight = a.weight), or give each its own (.clone())",
                "model.shared_memory",
            )


def _memory_span(tensor: Tensor) -> tuple[int, int, int]:
    """Return a tensor's storage, and the bytes in it from the first to beyond the last element."""
    # Strides may leave gaps and swap dimensions; the last element is where all indices are largest.
    extent: int = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), begin, begin + extent * tensor.element_size()
