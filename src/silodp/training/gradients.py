"""Gradients of many users, each at their own parameters, or of many records at the same ones.

`torch.func.vmap` computes all of them at once. Where it has no rule for an operation of a model or loss, ordinary
autograd computes them one after another: the same gradients, slower.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from silodp.errors import SilodpError, first_line

if TYPE_CHECKING:
    from silodp.training.task import Task

Gradient = Callable[..., tuple[Tensor, ...]]
"""(parameters per user…, x (r, b, ...), y (r, b, ...), mask (r, b)) -> gradients, shaped like the parameters.

Of records: (parameters…, x (r, ...), y (r, ...)) -> gradients (r, shape of each).
"""

_log = logging.getLogger(__name__)


def build_user_gradient(task: Task) -> Gradient:
    """Return the gradient of many users at once: autograd of the sum of their losses.

    A user's parameters are in no other user's loss, so the gradient of the sum is that of each. `torch.func.grad` would
    give the same, but imports torch's compiler, which takes seconds in every new process.
    """
    count = len(task.names)
    per_user = vmap(task.objective, randomness="different")

    def gradient(*tensors: Any) -> tuple[Tensor, ...]:
        with _vectorizable_kernels(task.model), torch.enable_grad():
            leaves = [p.detach().requires_grad_() for p in tensors[:count]]
            losses = per_user(tuple(leaves), *tensors[count:])
            return torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)

    return gradient


def build_traceable_gradient(task: Task) -> Gradient:
    """Return what `build_user_gradient` returns, by `torch.func` alone: its trace is shorter and can be functionalized.

    Interpreted it is slower.
    """
    count = len(task.names)
    per_user = vmap(grad(task.objective), randomness="different")

    def gradient(*tensors: Any) -> tuple[Tensor, ...]:
        with _vectorizable_kernels(task.model):
            result: tuple[Tensor, ...] = per_user(tensors[:count], *tensors[count:])
        return result

    return gradient


def build_single_user_gradient(task: Task) -> Gradient:
    """Return the gradient of exactly one user, by ordinary autograd.

    It multiplies matrices instead of batches of one, and keeps the fused backward operations that `torch.func` takes
    apart.
    """
    count = len(task.names)

    def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
        own = [tensor.squeeze(0) for tensor in tensors]
        return tuple(g.unsqueeze(0) for g in _differentiate(task, own[:count], *own[count:]))

    return gradient


def build_looped_gradient(task: Task) -> Gradient:
    """Return the gradient of many users, one after another, by ordinary autograd; it cannot be traced."""
    count = len(task.names)

    def gradient(*tensors: Any) -> tuple[Tensor, ...]:
        x, y, mask = tensors[count:]
        each = []
        for user in range(len(mask)):
            real = max(1, int(mask[user].sum()))  # padding comes last, and takes time here
            data = (x[user, :real], y[user, :real], mask[user, :real])
            each.append(_differentiate(task, [p[user] for p in tensors[:count]], *data))
        return tuple(torch.stack(rows) for rows in zip(*each, strict=True))

    return gradient


def build_record_gradient(task: Task) -> Gradient:
    """Return the gradients of many single records' losses at once, by `torch.func`."""
    one = torch.ones(1, dtype=task.dtype, device=task.device)
    count = len(task.names)

    def record_loss(p: tuple[Tensor, ...], record: Tensor, target: Tensor) -> Tensor:
        return task.objective(p, record.unsqueeze(0), target.unsqueeze(0), one)

    per_record = vmap(grad(record_loss), in_dims=(None, 0, 0), randomness="different")

    def gradient(*tensors: Any) -> tuple[Tensor, ...]:
        # Layers follow the memory layout of their weights, and torch pools eight times faster with channels last.
        weights = [p.clone(memory_format=torch.channels_last) if p.ndim == 4 else p for p in tensors[:count]]
        with _vectorizable_kernels(task.model):
            result: tuple[Tensor, ...] = per_record(tuple(weights), *tensors[count:])
        return result

    return gradient


def build_looped_record_gradient(task: Task) -> Gradient:
    """Return the gradients of single records' losses, one after another, by ordinary autograd; it cannot be traced."""
    one = torch.ones(1, dtype=task.dtype, device=task.device)
    count = len(task.names)

    def gradient(*tensors: Any) -> tuple[Tensor, ...]:
        x, y = tensors[count:]
        each = [_differentiate(task, tensors[:count], x[i : i + 1], y[i : i + 1], one) for i in range(len(y))]
        return tuple(torch.stack(rows) for rows in zip(*each, strict=True))

    return gradient


def is_vectorizable(task: Task, x: Any, y: Tensor) -> bool:
    """Return whether `torch.func` can take the gradient for many users at once; found out once per kind of record.

    Args:
        task: model and loss.
        x: (n, ...) records, n ≥ 1; the first is tried. y: (n, ...) targets.

    Raises:
        SilodpError: ordinary autograd cannot take the gradient of one user either.
    """
    kind = (x.shape[1:], x.dtype, y.shape[1:], y.dtype)
    vectorizable: bool = task.engine.get(("vectorizable", kind), lambda: _try_vectorized(task, x, y))
    return vectorizable


def _try_vectorized(task: Task, x: Any, y: Tensor) -> bool:
    first = torch.zeros(2, 2, dtype=torch.int64, device=task.device)  # two users with two records each
    rows = [torch.stack([p, p]) for p in task.unflatten(task.flatten(task.model))]
    data = (x[first], y[first], torch.ones(2, 2, dtype=task.dtype, device=task.device))
    with torch.random.fork_rng(devices=[task.device] if task.device.type == "cuda" else []):
        try:
            build_user_gradient(task)(*rows, *data)
        except Exception as reason:
            try:
                build_looped_gradient(task)(*rows, *data)
            except SilodpError:
                raise
            except Exception as error:
                raise SilodpError(
                    f"the gradient of {type(task.model).__name__} with loss '{task.loss.name}' cannot be computed "
                    f"({first_line(error)}): use operations that torch.autograd can differentiate.",
                    code="model.no_gradient",
                    field="task.model",
                ) from error
            _log.warning(
                "torch.func cannot run %s with loss '%s' for many users at once, so users (or records) are trained one "
                "after another: the results are the same, and training is slower; the reason: %s",
                type(task.model).__name__,
                task.loss.name,
                first_line(reason),
            )
            return False
    return True


def _differentiate(task: Task, params: Any, x: Any, y: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of one user's loss by ordinary autograd."""
    with torch.enable_grad():
        leaves = [p.detach().requires_grad_() for p in params]
        loss = task.objective(tuple(leaves), x, y, mask)
        return torch.autograd.grad(loss, leaves, materialize_grads=True)


@contextmanager
def _vectorizable_kernels(model: nn.Module) -> Iterator[None]:
    """Choose kernels that vmap has rules for: it would call the fused ones of attention and LSTM in a loop.

    A trace keeps the kernels with which it was made.
    """
    with ExitStack() as kernels:
        kernels.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.LSTM) for module in model.modules()):
            kernels.enter_context(torch.backends.mkldnn.flags(enabled=False))
            kernels.enter_context(torch.backends.cudnn.flags(enabled=False))
        kernels.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        yield
