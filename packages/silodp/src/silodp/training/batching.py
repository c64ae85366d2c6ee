"""Operations that `torch.func.vmap` cannot run, computed by others that it can.

Rules are for kinds of operations, not for libraries: what torch composes of other operations is taken apart, what is
written in place into a tensor that all users share is written into a tensor of each, and layers that gradient
checkpointing would run again in the backward pass, outside of vmap, keep what they computed. Whatever has no rule
raises as before, and users are then trained one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

_NO_RULE = "Batching rule not implemented"
_IN_PLACE = ("is not possible because there exists a Tensor `other`", "doesn't match the broadcast shape")
_ASKS_FOR_GRADIENT = "attempting to call Tensor.requires_grad_()"


def compute_otherwise(problem: RuntimeError, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function would have returned that failed under vmap; raise what it raised where no rule helps.

    Args:
        problem: What it raised.
        func: The function of torch, or the method of a tensor.
        args: Its arguments by place.
        kwargs: Its arguments by name.
    """
    if _NO_RULE in str(problem) and (operation := _find_composite(func, args, kwargs)) is not None:
        return operation.decompose(*args, **kwargs)
    if any(sign in str(problem) for sign in _IN_PLACE) and _widen(func, args, kwargs):
        return func(*args, **kwargs)
    if _ASKS_FOR_GRADIENT in str(problem) and args[1:] in ((), (True,)) and kwargs.get("requires_grad", True):
        return args[0]  # it is differentiated as far as parameters reach it
    raise problem


def _find_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return torch's operation behind a function, if torch composes it of others; else None.

    vmap has rules for these others, but takes apart only those operations that torch lists for it.
    """
    packet: Any = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    try:
        overload = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    except (AttributeError, RuntimeError):  # no operation, or arguments of none of its overloads
        return None
    operation = getattr(packet, overload)
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        operation.name(), "CompositeImplicitAutograd"
    )
    return operation if is_composite else None


def _widen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Give a tensor that is written into, and that all users share, a copy for each user; return whether it got them.

    It is the same object afterwards. Nothing else may look at its memory, which would not see what is written.
    """
    name, target = getattr(func, "__name__", ""), args[0] if args else None
    writes = name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.startswith("_")
    )
    others = [one for one in tree_leaves((args[1:], kwargs)) if isinstance(one, Tensor)]
    if not (writes and type(target) is Tensor and others) or _is_shared(target):
        return False
    # A truth of each user: sums over nothing.
    each = reduce(torch.logical_and, [one.flatten()[:0].sum() == 0 for one in others])
    torch.utils.swap_tensors(target, torch.where(each, target, target))  # type: ignore[no-untyped-call]
    return True


def _is_shared(target: Tensor) -> bool:
    """Return whether another tensor or array may lie in the memory of this one."""
    storage = target.untyped_storage()  # which counts as one, and the tensor as another
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


@contextmanager
def keep_checkpoints() -> Iterator[None]:
    """Let gradient checkpointing keep what layers compute: it would compute it again where vmap has ended."""
    before = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = _run_once
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = before


def _run_once(*_: Any, **__: Any) -> Iterator[None]:
    yield
