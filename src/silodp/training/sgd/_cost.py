"""What a step costs in memory and time, measured once on a small example."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@dataclass(frozen=True)
class StepCost:
    """What some computation used.

    Attributes:
        peak: bytes of tensors alive at once, at most.
        produced: bytes of all new tensors together.
        operations: number of tensor operations.
    """

    peak: int
    produced: int
    operations: int


def measure(computation: Callable[[], Any]) -> StepCost:
    """Run a computation and meter its new tensors; scratch space inside kernels is not seen."""
    meter = _Meter()
    with meter:
        computation()
    return StepCost(meter.peak, meter.produced, meter.operations)


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = self.produced = self.operations = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._known.add(tensor.untyped_storage().data_ptr())  # what came from outside is not ours
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address in self._known:
            return
        self._known.add(address)
        weakref.finalize(storage, self._release, address, size)
        self.alive += size
        self.produced += size
        self.peak = max(self.peak, self.alive)

    def _release(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.alive -= size


class LruCache:
    """The last things built, by key: what a task has measured and traced, bounded so that it cannot grow."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._built: OrderedDict[Hashable, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._built)

    def get(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """The thing under this key, built if it is not there; the one unused for longest makes room."""
        if key not in self._built:
            self._built[key] = build()
            if len(self._built) > self._limit:
                self._built.popitem(last=False)
        self._built.move_to_end(key)
        return self._built[key]

    def __deepcopy__(self, memo: object) -> LruCache:
        return LruCache(self._limit)  # a copy measures and traces its own

    def __reduce__(self) -> tuple[Any, ...]:
        return LruCache, (self._limit,)
