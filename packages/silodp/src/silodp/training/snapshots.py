"""What a model and other code hold, compared with what they held before: a record must not act on others through it.

Looked into are parameters and buffers, attributes (also in `__slots__` and of classes), closures and defaults of
functions, and all that is in lists, mappings, sets and other objects there, as far as they can be copied (counters,
generators of random numbers and files in memory, for example). Globals, what other modules of Python keep, and the
state of compiled code that no copy would have cannot be seen.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from numbers import Number
from types import BuiltinMethodType, CellType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from silodp.errors import SilodpError
from silodp.text import name_package

# They hold nothing that changes, or what is not the model's own.
_OPAQUE = Number | str | bytes | np.generic | Enum | ModuleType | logging.Logger | None
# The attributes of these packages' classes are not looked at: they are no part of a model.
_TRUSTED = {"silodp", "torch", "numpy", *sys.stdlib_module_names} - {"__main__"}
# Of a module, what is in these dictionaries is called by its name alone.
_NAMELESS = ("_parameters", "_buffers", "_modules")
# Objects of torch that people set attributes of; others, such as graphs, refer to thousands of their own.
_OF_TORCH = ("torch.distributions", "torch.optim")
_SEQUENCES = (list, tuple, deque)
_CALLED = (partial, MethodType, BuiltinMethodType, MethodWrapperType, staticmethod, classmethod, property)
_MISSING = object()


class Snapshot:
    """Copies of all that some objects hold.

    Attributes:
        modules: The modules that were found, also those that no other module has registered.
        arrays: The tensors and arrays that were found, with the root that holds them.

    Args:
        roots: What messages call them, such as "model" -> the objects. They are referred to and looked at again later.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self.modules: list[nn.Module] = []
        self.arrays: list[tuple[str, Tensor | np.ndarray]] = []
        # (root, name, what reads the present content, the content as it was)
        self._kept: list[tuple[str, str, Callable[[], Any], Any]] = []
        self._classes: set[type] = set()
        self._seen: dict[
            int, object
        ] = {}  # refers to all objects, so that no other one gets the id of one of them
        for root, value in roots.items():
            self._root = root
            self._visit("", value)

    def find_change(self) -> tuple[str, str] | None:
        """Return the root and the name of something that is not as it was; None where all is."""
        for root, name, read, kept in self._kept:
            value = read()
            if not _are_equal_at_once(value, kept) and not are_same(value, kept):
                return root, _find_place(name, value, kept)
        return None

    def refuse_changes(self) -> None:
        """Refuse what is not as it was.

        Raises:
            SilodpError: the message says what has changed (code model.running_state).
        """
        if found := self.find_change():
            raise SilodpError(
                f"running the {found[0]} changes its state '{found[1]}', which no noise protects: "
                "use what keeps no state instead, and compute constants when the model is built",
                code="model.running_state",
                field=f"task.{found[0].partition(' ')[0]}",
            )

    def _visit(self, name: str, value: object) -> None:
        """Keep what a value holds, and all that is in it, each object once."""
        if isinstance(value, _OPAQUE) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self.arrays.append((self._root, value))
            self._kept.append((self._root, name, partial(_return, value), value.detach().clone()))
            self._visit_all(name, getattr(value, "__dict__", {}))
        elif isinstance(value, np.ndarray):
            self.arrays.append((self._root, value))
            # Of objects, the bytes are addresses.
            self._keep(name, value.tobytes, enumerate(value.flat) if value.dtype.hasobject else ())
            self._visit_attributes(name, value)
        elif isinstance(value, torch.Generator):
            self._keep(name, value.get_state)
        elif isinstance(value, dict):
            self._keep(name, partial(_return, value), value)
            self._visit_attributes(name, value)
        elif isinstance(value, list | set | deque | bytearray):
            self._keep(name, partial(_return, value), enumerate(value))
            self._visit_attributes(name, value)
        elif isinstance(value, tuple | frozenset):
            self._visit_all(name, enumerate(value))
            self._visit_attributes(name, value)
        elif isinstance(value, nn.Module):
            self.modules.append(value)
            self._visit_module(name, value)
            self._visit_slots(name, value)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, _CALLED):
            parts = ("func", "args", "keywords", "__self__", "__func__", "fget")
            self._visit_all(name, {part: getattr(value, part, None) for part in parts})
        elif isinstance(value, FunctionType):
            self._visit_function(name, value)
        elif name_package(type(value)) != "torch" or type(value).__module__.startswith(_OF_TORCH):
            self._visit_attributes(name, value)
            if _has_other_state(value):
                self._keep(name, partial(_read_state, value))
                for part in _read_state(value):
                    self._visit(name, part)

    def _visit_attributes(self, name: str, value: object) -> None:
        """Keep the attributes of an object, of its slots and of its class."""
        if attributes := getattr(value, "__dict__", None):
            computed = _list_computed(type(value)) if name_package(type(value)) == "torch" else ()
            read = partial(_leave_out, attributes, computed) if computed else partial(_return, attributes)
            self._keep(name, read, read())
        self._visit_slots(name, value)

    def _visit_module(self, name: str, module: nn.Module) -> None:
        attributes = vars(module)
        for key in _NAMELESS:
            self._keep(name, partial(_return, attributes[key]), attributes[key])
        # torch.func replaces these lists of a recurrent layer's parameters, which are compared by name.
        left = ("_flat_weights", "_flat_weight_refs") if isinstance(module, nn.RNNBase) else ()
        read = partial(_leave_out, attributes, left) if left else partial(_return, attributes)
        self._keep(name, read, _leave_out(attributes, (*left, *_NAMELESS)))

    def _visit_function(self, name: str, function: FunctionType) -> None:
        if name_package(function) == "torch":
            return
        if cells := dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)):
            self._keep(name, partial(_read_cells, cells))
        defaults = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
        self._visit_all(name, defaults)
        self._visit(name, function.__dict__)

    def _visit_slots(self, name: str, value: object) -> None:
        if slots := _list_slots(type(value)):
            self._keep(name, partial(_read_slots, value, slots))
        self._visit_class(type(value))

    def _visit_class(self, kind: type) -> None:
        """Keep the attributes of a class, and of those that it is derived from."""
        for one in (*kind.__mro__, *type.mro(type(kind))):
            if name_package(one) not in _TRUSTED and one not in self._classes:
                self._classes.add(one)
                self._keep(one.__qualname__, partial(_return, vars(one)), vars(one))

    def _keep(self, name: str, read: Callable[[], Any], parts: Any = None) -> None:
        """Keep a content, and look into its parts, a mapping or pairs; None: into those of the content."""
        content = read()
        kept = content.copy() if hasattr(content, "copy") else content
        self._kept.append((self._root, name, read, kept))
        if parts is None:
            parts = kept if isinstance(kept, dict) else {}
        self._visit_all(name, parts)

    def _visit_all(self, name: str, parts: Any) -> None:
        for key, part in list(parts.items() if isinstance(parts, Mapping) else parts):
            self._visit(_join(name, key), part)


def are_same(a: object, b: object) -> bool:
    """Return whether two values are the same, tensors and arrays bit by bit (a NaN is equal to itself)."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and _are_tensors_same(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(are_same(a[key], b[key]) for key in a)
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, _SEQUENCES) and isinstance(b, _SEQUENCES):
        return len(a) == len(b) and all(map(are_same, a, b))
    return (isinstance(a, float) and a != a and b != b) or _are_equal_at_once(a, b)


def _are_tensors_same(a: Tensor, b: Tensor) -> bool:
    if torch._C._functorch.is_functorch_wrapped_tensor(
        a
    ):  # left behind by torch.func: it has no values of its own
        return False
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(view_bytes(a), view_bytes(b))


def view_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes (n,) of the elements of a tensor of any data type; a meta tensor has none."""
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    if dense.is_meta:
        return torch.zeros(0, dtype=torch.uint8)
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _are_equal_at_once(value: Any, kept: Any) -> bool:
    """Return whether two contents are equal, by the fast comparison of their kind; False also where it has none."""
    try:
        if isinstance(kept, Tensor):
            return value.dtype == kept.dtype and torch.equal(value, kept)
        # Of two containers, Python compares parts that are one object by that alone.
        return bool(value == kept)
    except Exception:  # tensors of several numbers are neither equal nor different
        return False


def _find_place(name: str, value: Any, kept: Any) -> str:
    """Return the name of the first part of a container that has changed, or its own."""
    if isinstance(value, Mapping) and isinstance(kept, Mapping):
        changed = [
            key
            for key in {**kept, **value}
            if not are_same(value.get(key, _MISSING), kept.get(key, _MISSING))
        ]
        return _join(name, changed[0]) if changed else name
    if isinstance(value, list | deque) and isinstance(kept, list | deque):
        for place in range(max(len(value), len(kept))):
            old, new = (part[place] if place < len(part) else None for part in (kept, value))
            if not are_same(old, new):
                return name if isinstance(old, _OPAQUE) and isinstance(new, _OPAQUE) else _join(name, place)
    return name


def _join(name: str, key: object) -> str:
    return f"{name}.{key}".lstrip(".")


def _return(value: Any) -> Any:
    return value


def _leave_out(parts: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in parts.items() if key not in names}


def _list_slots(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a class that its author has given it."""
    given = [vars(one).get("__slots__", ()) for one in kind.__mro__ if name_package(one) not in _TRUSTED]
    names = [name for slots in given for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _read_slots(value: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(value, name, _MISSING) for name in names}


def _read_cells(cells: Mapping[str, CellType]) -> dict[str, Any]:
    """Return the variables of a closure; one that is not set yet has no content."""
    found = {}
    for name, cell in cells.items():
        try:
            found[name] = cell.cell_contents
        except ValueError:
            found[name] = _MISSING
    return found


def _list_computed(kind: type) -> set[str]:
    """Return the names of attributes that are computed when they are first asked for, and then kept."""
    return {key for one in kind.__mro__ for key, part in vars(one).items() if hasattr(part, "__get__")}


def _has_other_state(value: object) -> bool:
    """Return whether the class of an object says by itself what a copy is made from: it may be more than attributes."""
    names = ("__reduce__", "__reduce_ex__", "__getstate__")
    return any(getattr(type(value), name, None) is not getattr(object, name, None) for name in names)


def _read_state(value: object) -> tuple[Any, ...]:
    """Return what a copy of an object is made from; () where it cannot be copied."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the iterators of itertools
            parts = value.__reduce_ex__(4)
    except Exception:  # whatever the class raises: no model can be copied that holds it
        return ()
    return tuple(parts[1:]) if isinstance(parts, tuple) else ()
