"""Proofs that a model computes every record by itself, whatever else is in the batch.

A model is traced: its `forward` runs once on placeholders, which record every operation and compute it for batches of
several lengths. A model is per record if each operation is on a closed list and keeps the rows of records apart.
Placeholders have no values, so a `forward` that branches on values or on the number of records is not proven; nor is
one that is not on the list. What is not proven may still be per record, but batches are not padded for it as they are:
each record is then a batch of its own, or only users with equally long batches share a step (`Task.find_padded`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook

from silodp.data.inputs import NamedArrays, get_kind, list_arrays, map_arrays
from silodp.training import model_state
from silodp.training.record_layers import ATTENDS, LAYERS, has_hooks, is_plain, takes_records
from silodp.training.snapshots import Snapshot

if TYPE_CHECKING:
    from silodp.training.task import Task

# The numbers of records for which every operation is computed; one of them alone may be the size of something else.
_COUNTS = (2, 3, 5)
# Those for which the model and its trace are compared: a trace does not see what asks whether x is a tensor.
_COMPARED = (1, 2, 5, 64)

_split = str.split
_POINTWISE = frozenset(
    _split(
        "abs add addcdiv addcmul and_ asin asinh acos acosh atan atan2 atanh bfloat16 bool ceil celu clamp "
        "clamp_max clamp_min clip clone contiguous cos cosh cpu cuda detach div divide double dropout elu eq erf "
        "erfinv exp exp2 expm1 float float_power floor floor_divide floordiv fmod frac full_like ge gelu gt half "
        "hardsigmoid hardswish hardtanh hypot int invert isfinite isinf isnan le leaky_relu lerp log log10 log1p "
        "log2 logaddexp logical_and logical_not logical_or logical_xor logsigmoid long lt masked_fill maximum "
        "minimum mish mod mul multiply nan_to_num ne neg ones_like or_ pos pow radd rand_like randn_like rdiv "
        "reciprocal relu relu6 remainder rmul round rpow rsqrt rsub rtruediv selu sigmoid sign silu sin sinc sinh "
        "softplus softsign sqrt square sub subtract tan tanh tanhshrink to true_divide truediv trunc type type_as "
        "where xlogy xor zeros_like"
    )
)
# The place of the argument that says along which dimension, and its value where it is left out; None: all of them.
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(
        _split(
            "all amax amin any argmax argmin count_nonzero cummax cummin cumprod cumsum flip gather index_select "
            "log_softmax logcumsumexp logsumexp max mean median min movedim narrow nansum permute prod select "
            "softmax softmin squeeze std sum swapaxes swapdims transpose unflatten var"
        ),
        (1, None),
    ),
    **dict.fromkeys(_split("argsort glu sort"), (1, -1)),
    **dict.fromkeys(_split("cat concat stack unbind"), (1, 0)),
    **dict.fromkeys(_split("chunk split tensor_split"), (2, 0)),
    **dict.fromkeys(_split("cosine_similarity normalize"), (2, 1)),
    **dict.fromkeys(_split("diff topk kthvalue"), (2, -1)),
    **dict.fromkeys(_split("norm repeat_interleave roll take_along_dim"), (2, None)),
    "unsqueeze": (1, None),
}
_EVERY_ARGUMENT = ("flip", "movedim", "permute", "swapaxes", "swapdims", "transpose")
_RESHAPED = ("flatten", "ravel", "reshape", "reshape_as", "view", "view_as")
_REPEATED = ("broadcast_to", "expand", "expand_as", "new_ones", "new_zeros", "repeat", "tile")
_MULTIPLIED = ("bmm", "matmul")
# These join tensors along another dimension than the first; or, some tensors with one, so that the result has another
# number of rows, which `_check_rows` refuses.
_JOINED = ("column_stack", "dstack", "hstack")
# The least number of dimensions of the first argument, or with `d` at the end of the name the only one.
_FIRST: dict[str, int] = {
    "embedding": 1, "group_norm": 2, "instance_norm": 3, "interpolate": 3, "layer_norm": 1, "linear": 2, "one_hot": 1,
    "pad": 1, "pixel_shuffle": 4, "prelu": 2, "rms_norm": 1, "scaled_dot_product_attention": 3,
    **{
        f"{name}{places}d": places + 2
        for places in (1, 2, 3)
        for name in ("adaptive_avg_pool", "adaptive_max_pool", "avg_pool", "conv", "conv_transpose", "dropout",
                     "max_pool")
    },
}  # fmt: skip
_NAMED = (*_POINTWISE, *_ALONG, *_RESHAPED, *_REPEATED, *_MULTIPLIED, *_JOINED, *_FIRST, "einsum", "getitem")
_NAMES: dict[Any, str] = {
    getattr(place, name): name for place in (operator, torch, F) for name in _NAMED if hasattr(place, name)
}
# Of nothing but constants, these count or make other constants.
_OF_CONSTANTS = ("arange", "dim", "full", "numel", "ones", "size", "zeros")


class _NotProven(Exception):
    """An operation may mix records, or is not known."""


def is_per_record(task: Task, x: Any) -> bool:
    """Return whether model and loss are proven to compute every record by itself; found out once per kind of records.

    Args:
        task: The model and the loss.
        x: Made-up records (n, ...), n ≥ 1, of the kind to come.
    """
    return task.loss.is_known and is_model_per_record(task, x)


def is_model_per_record(task: Task, x: Any) -> bool:
    """Return whether the model is proven to compute every record by itself; Args as `is_per_record`."""
    return task.engine.get(("per record", get_kind(x)), lambda: _prove(task.model, x))


def _prove(model: nn.Module, x: Any) -> bool:
    """Return whether every operation of a model keeps records apart, in train and in eval mode."""
    if _has_any_global_hook() or any(has_hooks(part) for part in model.modules()):  # type: ignore[no-untyped-call]
        return False
    tensors = (*model.parameters(), *model.buffers())
    if any(type(tensor) not in (Tensor, nn.Parameter) or tensor._backward_hooks for tensor in tensors):
        return False
    device = tensors[0].device
    try:
        copied = model_state.copy_model(model)
        with model_state.seed_torch(device, 0):
            # Where many users are computed at once, in train mode, a model may take other branches.
            for mode, branches in (
                (True, nullcontext),
                (False, nullcontext),
                (True, model_state.choose_value_free_branches),
            ):
                model_state.set_mode(copied, mode)
                before = Snapshot({"model": copied})
                with torch.set_grad_enabled(mode), branches():
                    _prove_mode(copied, x)
                before.refuse_changes()
    except Exception:  # whatever torch or the model raises on placeholders, nothing is proven
        return False
    return True


def _prove_mode(model: nn.Module, x: Any) -> None:
    """Raise unless the model is per record in its present mode, and computes what its trace says."""
    root = _Root(model, x)
    graph = _Tracer(root, [_repeat(x, count) for count in _COUNTS]).prove()
    # Several runs, and all like the one trace: a state that moves would show.
    device = next(model.parameters()).device
    for count in _COMPARED:
        with model_state.seed_torch(device, count):
            found = model_state.call_model(model, _repeat(x, count))
        with model_state.seed_torch(device, count):
            traced = fx.Interpreter(root, graph=graph).run(_repeat(x, count))
        if not torch.allclose(found, traced, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise _NotProven("the model computes something else")


def _repeat(x: Any, count: int) -> Any:
    """Return so many records, copies of those of x in turn."""
    return map_arrays(lambda one: one[torch.arange(count, device=one.device) % len(one)].clone(), x)


class _Root(nn.Module):
    """Calls a model with records as one argument."""

    def __init__(self, model: nn.Module, x: Any) -> None:
        super().__init__()
        self.model, self.names = model, list(list_arrays(x)) if isinstance(x, NamedArrays) else None

    def forward(self, records: Any) -> Any:
        if self.names is None:
            return self.model(records)
        return self.model(**{name: records[name] for name in self.names})


class _Placeholder(fx.Proxy):
    """A value of a trace: `meta["values"]` of its node for each of `_COUNTS`, `meta["rows"]` as `_Tracer` finds it."""

    def __getattr__(self, name: str) -> Any:
        values = self.node.meta["values"]
        if name == "shape":
            return self.size()
        if name == "ndim":
            return values[0].ndim
        if name in ("device", "dtype", "is_cuda", "layout"):
            return getattr(values[0], name)
        if name == "mT" or (name == "T" and values[0].ndim == 2):
            return self.transpose(-2, -1)
        if name in ("values", "indices") and isinstance(values[0], tuple):
            return operator.getitem(self, ("values", "indices").index(name))
        if not hasattr(values[0], name) or not callable(getattr(values[0], name)):
            raise _NotProven(name)
        return super().__getattr__(name)

    def size(self, dim: int | None = None) -> Any:
        """Return a size that is the same for every number of records as a number, and another one as a placeholder."""
        if dim is None:
            return tuple(self.size(place) for place in range(self.node.meta["values"][0].ndim))
        return self.tracer.create_proxy("call_method", "size", (self, dim), {})

    def __iter__(self) -> Any:
        values = self.node.meta["values"]
        if isinstance(values[0], Tensor):
            raise _NotProven("iteration over a tensor")
        return iter([operator.getitem(self, place) for place in range(len(values[0]))])


class _Tracer(fx.Tracer):
    """Traces a model, and checks that every operation keeps records apart.

    `meta["is_size"]` of a node says whether it is a number that depends on that of records. `meta["rows"]` is k ≥ 1
    for a tensor with k rows for each record, one record after the other; 0 for what does not depend on any record's
    values; −k where these rows are in the second dimension, as in the state of a recurrent layer. Of several results it
    is a tuple, and of inputs by name a dictionary.
    """

    proxy_buffer_attributes = True

    def __init__(self, root: _Root, examples: Sequence[Any]) -> None:
        super().__init__()
        self.model, self.examples, self.problem, self._computes = root, examples, "", False

    def prove(self) -> fx.Graph:
        """Return the trace; raise where it is not proven."""
        graph = self.trace(self.model)
        last = next(node for node in reversed(graph.nodes) if node.op == "output").args[0]
        if self.problem or not isinstance(last, fx.Node) or last.meta["rows"] != 1:
            raise _NotProven(self.problem)  # also where the model caught the exception
        graph.lint()
        return graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is on the list, and is not looked into."""
        return type(m) in LAYERS

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the placeholder of a node."""
        return _Placeholder(node, self)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Note the call of a layer, or run it where a value is computed."""
        return forward(*args, **kwargs) if self._computes else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        """Return a parameter or buffer as a placeholder, or itself where a value is computed."""
        return attr_val if self._computes else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Note an operation, with its values and whether it keeps records apart."""
        node = super().create_node(kind, *args, **kwargs)
        if kind == "output":
            return node
        try:
            node.meta["values"] = [self._compute(node, place) for place in range(len(_COUNTS))]
            node.meta["is_size"] = _is_size(node)
            node.meta["rows"] = self._classify(node)
        except Exception as problem:
            self.problem = self.problem or f"{node.target}: {problem}"
            raise
        return node

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        """Return the placeholder of a result, or the result itself where it is no tensor and depends on nothing."""
        made = super().create_proxy(*args, **kwargs)
        first = made.node.meta["values"][0]
        plain = isinstance(first, int | float | str | torch.device | torch.dtype | type(None))
        return first if plain and not made.node.meta["is_size"] else made

    def _compute(self, node: fx.Node, place: int) -> Any:
        """Return the value of a node for one of the numbers of records."""
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: one.meta["values"][place])
        if node.op == "placeholder":
            return self.examples[place]
        self._computes = True
        try:
            if node.op == "get_attr":
                return reduce(getattr, str(node.target).split("."), self.root)
            if node.op == "call_module":
                return self.root.get_submodule(str(node.target))(*args, **kwargs)
            if callable(node.target):
                return node.target(*args, **kwargs)
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        finally:
            self._computes = False

    def _classify(self, node: fx.Node) -> Any:
        """Return what `meta["rows"]` of a node is; raise where records may be mixed."""
        if node.op == "placeholder":
            first = node.meta["values"][0]
            return dict.fromkeys(list_arrays(first), 1) if isinstance(first, NamedArrays) else 1
        if node.op == "get_attr":
            return 0
        if node.op == "call_module":
            return _check_layer(self.root.get_submodule(str(node.target)), node)
        return _check_operation(node)


def _check_layer(layer: nn.Module, node: fx.Node) -> Any:
    """Return the rows of a layer's results."""
    first, *others = node.args or [None]
    if not isinstance(first, fx.Node) or not isinstance(rows := first.meta["rows"], int) or rows < 0:
        raise _NotProven("inputs of another kind")
    if not is_plain(layer) or not takes_records(layer, _count_dims(first)):
        raise _NotProven(f"a layer with {_count_dims(first)} dimensions")
    for other in node.all_input_nodes:
        # Attention also takes keys and values, and masks that are constants.
        is_alike = other.meta["rows"] == rows and other in others[:2] and _count_dims(other) == 3
        if other is not first and not (isinstance(layer, ATTENDS) and (is_alike or other.meta["rows"] == 0)):
            raise _NotProven("several inputs")
    if not isinstance(layer, nn.RNNBase):
        return _check_rows(node.meta["values"], rows)
    if rows > 1:
        raise _NotProven("a state of several rows for each record")
    state = (-rows, -rows) if isinstance(layer, nn.LSTM) else -rows
    return _check_rows([value[0] for value in node.meta["values"]], rows), state


def _check_operation(node: fx.Node) -> Any:
    """Return the rows of an operation's results."""
    name = str(node.target).strip("_") if str(node.target).startswith("__") else str(node.target)
    if node.op == "call_function":
        name = _NAMES.get(node.target, getattr(node.target, "__name__", ""))
    inputs = node.all_input_nodes
    known = name in _NAMED and (node.op == "call_method" or node.target in _NAMES)
    whole: Any = node.args[0] if node.args else None
    if name == "getitem" and isinstance(whole, fx.Node) and isinstance(whole.meta["rows"], tuple | dict):
        key: Any = node.args[1]
        return whole.meta["rows"][key]
    if "out" in node.kwargs or not (known or name in _OF_CONSTANTS):
        raise _NotProven("an unknown operation")
    of_rows = [one for one in inputs if one.meta["rows"] != 0]
    if name in ("size", "dim", "numel"):
        return 0
    if not of_rows:
        return _check_constant(name, node)
    if any(one.meta["is_size"] for one in inputs) and name not in (*_RESHAPED, *_REPEATED, "unflatten"):
        raise _NotProven("the number of records is used")
    if any(not _is_rows(one.meta["rows"]) for one in of_rows):
        return _check_rows(node.meta["values"], _bring_first(name, node))
    rows = {one.meta["rows"] for one in of_rows}
    if len(rows) > 1 and name not in _REPEATED:
        raise _NotProven("different numbers of rows")
    return _check_rows(node.meta["values"], _apply_rule(name, node, of_rows, rows.pop()))


def _bring_first(name: str, node: fx.Node) -> int:
    """Return the rows for each record in parts of a tensor that has records in its second dimension."""
    first, rest = node.args[0], node.args[1:]
    rows = first.meta["rows"] if isinstance(first, fx.Node) else 0
    is_part = (name == "getitem" and type(rest[0]) is int) or (name == "unbind" and rest in ((), (0,)))
    if is_part and len(node.all_input_nodes) == 1 and isinstance(rows, int) and rows < 0 and not node.kwargs:
        return -rows
    raise _NotProven("inputs of another kind")


def _apply_rule(name: str, node: fx.Node, of_rows: Sequence[fx.Node], rows: int) -> int:
    """Return the rows for each record in the result of a known operation on records; raise where it may mix them."""
    args, kwargs, first = node.args, node.kwargs, node.args[0] if node.args else None
    dims = max(map(_count_dims, of_rows))
    alike = all(_count_dims(one) == dims for one in of_rows)
    constants = [one for one in node.all_input_nodes if one.meta["rows"] == 0 and _is_tensor(one)]
    broadcasts = all(_count_dims(one) < dims or one.meta["values"][0].shape[0] == 1 for one in constants)
    results = node.meta["values"]
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], fx.Node):
        name = "maximum"
    if name in _POINTWISE:
        is_choice = name == "where" and len(args) + len(kwargs) < 3
        if alike and broadcasts and not is_choice and _count_dims(node) == dims:
            return rows
    elif name in _RESHAPED:
        if first in of_rows:
            return _count_rows(results)  # rows stay in order, so each record's are together
    elif name in _REPEATED:
        if first in of_rows and not name.startswith("new"):
            if _count_dims(node) == _count_dims(first):
                return rows
        elif isinstance(first, fx.Node):
            return _count_rows(results)
    elif name in _ALONG:
        if alike and _keeps_first(name, args, kwargs, dims):
            return rows
        if name == "permute" and not kwargs and _is_second(args[1:], dims):
            return -rows  # queries, keys and values of attention, which are taken apart next
    elif name in _MULTIPLIED:
        if not constants:
            safe = alike and dims >= 3
        else:
            (constant,) = constants
            safe = _count_dims(constant) <= 2 or (_count_dims(constant) == dims and broadcasts)
            safe &= dims >= (2 if first in of_rows else 3)
        if safe:
            return rows
    elif name in _JOINED:
        return rows
    elif name == "einsum":
        if isinstance(first, str) and _keeps_letters(first, args[1:], of_rows):
            return rows
    elif name == "getitem":
        if first in of_rows and len(of_rows) == 1 and _keeps_all(args[1], dims):
            return rows
    elif name in _FIRST and first in of_rows:
        if name == "scaled_dot_product_attention":
            safe = alike and dims >= 3 and broadcasts
        else:
            least, shape = _FIRST[name], _get(args, kwargs, 1, "normalized_shape")
            safe = len(of_rows) == 1 and (dims == least if name[-2:] in ("1d", "2d", "3d") else dims >= least)
            if name in ("layer_norm", "rms_norm"):
                safe &= isinstance(shape, Sequence) and len(shape) < dims
            elif name == "pad":
                pads = _get(args, kwargs, 1, "pad")
                safe &= isinstance(pads, Sequence) and len(pads) < 2 * dims
            elif name in ("embedding", "instance_norm"):  # which may write into weights or running statistics
                written = ("max_norm", "running_mean", "running_var")
                safe &= len(args) <= 3 and all(kwargs.get(one) is None for one in written)
                safe &= name == "embedding" or len(args) == 1
            elif name == "one_hot":
                number = _get(args, kwargs, 1, "num_classes")
                safe &= isinstance(number, int) and number > 0
        if safe:
            return rows
    raise _NotProven("records may be mixed")


def _check_constant(name: str, node: fx.Node) -> Any:
    """Return the rows of what is computed from constants and numbers of records."""
    if not any(one.meta["is_size"] for one in node.all_input_nodes):
        return _check_rows(node.meta["values"], 0)
    if not _is_tensor(node):
        _check_size(name, node)
        return 0
    if name not in _REPEATED:
        raise _NotProven("the number of records is used")
    return _check_rows(node.meta["values"], _count_rows(node.meta["values"]))


def _check_size(name: str, node: fx.Node) -> None:
    """Raise unless a number is a multiple of that of records, whatever this is: 1 + n // 600 is constant only here."""
    args: Sequence[Any] = node.args
    size, divisor = node.meta["values"], 1
    if name == "floordiv" and isinstance(args[0], fx.Node) and isinstance(args[1], int) and args[1] > 0:
        # A quotient that has no remainder, for any number of records.
        size, divisor = args[0].meta["values"], args[1]
    elif name != "mul":
        raise _NotProven("the number of records is used")
    factor = size[0] // _COUNTS[0]
    if factor < 1 or factor % divisor or size != [factor * count for count in _COUNTS]:
        raise _NotProven("the number of records is used")


def _check_rows(values: Sequence[Any], rows: int) -> Any:
    """Return `rows`, of every tensor in a result; raise unless each has so many rows for each record.

    Args:
        values: The result for each of `_COUNTS`.
        rows: Rows for each record; 0 where the result must be the same for every number of records.
    """
    if isinstance(values[0], tuple | list):
        return tuple(_check_rows(parts, rows) for parts in zip(*values, strict=True))
    if not isinstance(values[0], Tensor):
        return 0
    place = 0 if rows >= 0 else 1
    for value, count in zip(values, _COUNTS, strict=True):
        shape = list(values[0].shape)
        if rows:
            shape[place] = abs(rows) * count
        # No other dimension may grow with the number of records: a sum over it would count them.
        if list(value.shape) != shape:
            raise _NotProven("a dimension is not that of records")
    return rows


def _count_rows(values: Sequence[Tensor]) -> int:
    """Return the rows for each record in a result; `_check_rows` looks whether it has so many."""
    rows = values[0].shape[0] // _COUNTS[0] if values[0].ndim else 0
    if rows == 0:
        raise _NotProven("the first dimension is not that of records")
    return rows


def _is_rows(rows: Any) -> bool:
    return isinstance(rows, int) and rows >= 1


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["values"][0], Tensor)


def _is_size(node: fx.Node) -> bool:
    """Return whether a node is no tensor and may depend on the number of records, also where it did not differ here."""
    values, inputs = node.meta["values"], node.all_input_nodes
    differs = isinstance(values[0], int) and len(set(values)) > 1
    return not _is_tensor(node) and (differs or any(one.meta["is_size"] for one in inputs))


def _count_dims(node: Any) -> int:
    value = node.meta["values"][0]
    return value.ndim if isinstance(value, Tensor) else -1


def _get(args: Sequence[Any], kwargs: Any, place: int, *names: str) -> Any:
    """Return an argument that is given by place or by one of its names, or None."""
    return (
        args[place] if len(args) > place else next((kwargs[name] for name in names if name in kwargs), None)
    )


def _keeps_first(name: str, args: Sequence[Any], kwargs: Any, dims: int) -> bool:
    """Return whether an operation along some dimensions leaves the first one, that of records, where it is."""
    place, default = _ALONG[name]
    given = _get(args, kwargs, place, "dim", "dims", "axis", "dim0", "source")
    if name in _EVERY_ARGUMENT:
        given = [*args[place:], *kwargs.values()]
        given = given[0] if len(given) == 1 and isinstance(given[0], Sequence) else given
    if name == "repeat_interleave" and not isinstance(_get(args, kwargs, 1, "repeats"), int):
        return False
    chosen = [default if given is None else given] if not isinstance(given, Sequence) else given
    found = [dim % (dims + (name in ("stack", "unsqueeze"))) for dim in chosen if type(dim) is int]
    if not found or len(found) < len(chosen):
        return False
    return found[0] == 0 and 0 not in found[1:] if name == "permute" else 0 not in found


def _is_second(order: Sequence[Any], dims: int) -> bool:
    """Return whether an order of so many dimensions has the first one, that of records, in the second place."""
    order = order[0] if len(order) == 1 and isinstance(order[0], Sequence) else order
    return all(type(dim) is int for dim in order) and [dim % dims for dim in order].index(0) == 1


def _keeps_all(index: Any, dims: int) -> bool:
    """Return whether an index takes all rows of a tensor with so many dimensions."""
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(one, fx.Node) and not _is_tensor(one) for one in index) or not index:
        return False
    if index[0] is Ellipsis:
        return sum(one is not None for one in index[1:]) < dims
    return isinstance(index[0], slice) and index[0] == slice(None)


def _keeps_letters(equation: str, operands: Sequence[Any], of_rows: Sequence[fx.Node]) -> bool:
    """Return whether one letter of an einsum stands for records alone, first in their tensors and in the result."""
    given, _, result = equation.replace(" ", "").partition("->")
    letters = given.split(",")
    if "." in equation or not result or len(letters) != len(operands):
        return False
    return all(
        (part[0] == result[0] and part.count(result[0]) == 1) if one in of_rows else result[0] not in part
        for part, one in zip(letters, operands, strict=True)
    )
