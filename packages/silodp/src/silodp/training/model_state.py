"""How a model is run, and its state: modes, values and attributes, which training and checks must leave as they are."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from numbers import Number
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from silodp.data.inputs import NamedArrays
from silodp.errors import SilodpError
from silodp.text import first_line
from silodp.training.losses import describe_raised
from silodp.training.snapshots import view_bytes


def model_error(message: str, code: str) -> SilodpError:
    """Return the error that says what is wrong with the model of a task."""
    return SilodpError(message, code=code, field="task.model")


def call_model(model: nn.Module, x: Any) -> Any:
    """Return the outputs of a model: several named inputs are its keyword arguments."""
    return model(**x) if isinstance(x, NamedArrays) else model(x)


@contextmanager
def choose_value_free_branches() -> Iterator[None]:
    """Let models take the branches that they have for compilers, which look at no value of a tensor.

    Many leave an attention mask out where it hides nothing, which only a look at it can say. Whoever wrote such a
    branch asks `torch.compiler.is_compiling`, and computes the same where it is so.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def describe_failures(model: nn.Module) -> AbstractContextManager[None]:
    """Raise an error that names the model in place of whatever it raises, except for a `SilodpError`."""
    return describe_raised(
        lambda reason: model_error(
            f"the model ({type(model).__name__}) raised {reason}: correct its forward.", "model.raised"
        )
    )


def draw_seed(generator: torch.Generator) -> int:
    """Draw a seed for `seed_torch`."""
    return int(torch.randint(1 << 62, (), generator=generator))


@contextmanager
def seed_torch(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's global generators for the time of the context, because dropout takes no generator.

    Args:
        device: The device that the model is on.
        seed: The seed of the CPU's generator, and of the device's.
    """
    if device.type == "cuda":
        with torch.random.fork_rng(devices=[device]):
            torch.manual_seed(seed)
            yield
        return
    # torch.manual_seed also records, with a stack trace, that GPUs used later are to be seeded, which takes longer than
    # a small step: seed the CPU's generator directly.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def get_random_state(device: torch.device) -> Tensor:
    """Return the state of the generator that `seed_torch` seeds."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.default_generator.get_state()


def is_frozen_norm(module: nn.Module) -> bool:
    """Return whether a layer normalizes by constants: running statistics, in the eval mode that it was given in."""
    norms = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    return isinstance(module, norms) and not module.training and module.running_mean is not None


def set_mode(model: nn.Module, training: bool) -> None:
    """Set train or eval mode; frozen parts that are in eval mode, and all that is in them, stay as they are."""
    constant = [part for part in model.modules() if is_frozen_norm(part) or _is_frozen_part(part)]
    # `train` sets every module; what is frozen in eval mode is put back afterwards.
    kept = [module for part in constant for module in part.modules() if not module.training]
    model.train(training)
    for module in kept:
        module.training = False


def _is_frozen_part(module: nn.Module) -> bool:
    """Return whether a part of a model has parameters, trains none of them, and is in eval mode."""
    trained = [p.requires_grad for p in module.parameters()]
    return not module.training and bool(trained) and not any(trained)


@contextmanager
def keep_modes(model: nn.Module) -> Iterator[None]:
    """Put every module back into its present mode at the end of the context."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in before:  # not set_mode: it keeps what is in eval mode now
            module.training = mode


def has_frozen_parts(model: nn.Module) -> bool:
    """Return whether a model has a parameter that is not trained, or a layer that normalizes by constants."""
    frozen = (not p.requires_grad for p in model.parameters())
    return any(frozen) or any(is_frozen_norm(module) for module in model.modules())


def copy_model(model: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of a model, whose objects with the ids of `shared` are those given there."""
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise model_error(
            f"the model cannot be copied ({first_line(error)}): keep only modules, parameters and buffers in it "
            "(torch.nn.utils.parametrizations instead of older hooks).",
            "model.not_copyable",
        ) from error


def list_numeric_attributes(model: nn.Module) -> dict[str, Tensor]:
    """Return the numbers that modules of a user's classes hold as plain attributes, by name, as tensors.

    These are numbers, tensors, arrays, and lists and tuples of numbers. Modules of torch show theirs in their text, as
    does a class derived from one, and objects and texts may differ between machines (paths, versions of libraries).
    """
    known = {*vars(nn.Module()), "_flat_weights"}
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


def list_places(model: nn.Module) -> dict[str, str]:
    """Return, for every place of a parameter or buffer, the name that it is listed under; each module counts once."""
    listed = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return {
        f"{prefix}.{key}".lstrip("."): listed[id(tensor)]
        for prefix, module in model.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


def serialize(model: nn.Module, metadata: Mapping[str, str]) -> bytes:
    """Return the model's state as a safetensors file that `load_state_dict` can read.

    Tied parameters, of which the format allows only one, are written as a copy under each of their names.

    Raises:
        SilodpError: the format does not know such a tensor.
    """
    tensors: dict[str, Tensor] = {}
    written: set[int] = set()
    for name, value in model.state_dict().items():
        tensor = value.detach().contiguous().cpu()
        # safetensors refuses two names for one memory, which would also be written twice.
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in written else tensor
        written.add(storage)
    try:
        return bytes(save(tensors, metadata=dict(metadata)))
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise SilodpError(
            f"the model cannot be stored ({first_line(error)}): keep only dense tensors of numbers in its state.",
            code="model.not_storable",
            field="model",
        ) from error


def digest_tensors(tensors: Mapping[str, Tensor], *more: str) -> str:
    """Return the SHA-256 (hex) of tensors with their names, and of further texts."""
    hasher = hashlib.sha256()
    # Sorted: the order in which a model lists its tensors is not part of what it computes.
    for name, value in sorted(tensors.items()):
        try:
            dtype = torch.empty(0, dtype=value.dtype).numpy().dtype.str
        except TypeError:  # numpy has no such type, for example bfloat16
            dtype = str(value.dtype)
        hasher.update(f"{name} {tuple(value.shape)} {dtype}".encode())
        hasher.update(view_bytes(value).cpu().numpy().tobytes())
    for text in more:
        hasher.update(text.encode())
    return hasher.hexdigest()
