"""The gradient of many users at once, as a short flat list of tensor operations.

`torch.func` interprets every operation of `vmap(grad(loss))` through two layers of Python-driven dispatch,
which for small models costs many times the arithmetic. Traced once per shape with `make_fx`, the same operations run
directly, without those that change nothing, and those that do not depend on the parameters run once per batch of data
and not once per step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from silodp.data.inputs import list_arrays, map_arrays
from silodp.text import join_names
from silodp.training.gradients import Gradient
from silodp.training.model_state import seed_torch
from silodp.training.sgd._planning import measure_cost

_log = logging.getLogger(__name__)
_aten = torch.ops.aten


def _find_operation(name: str) -> Any:
    """Return torch's operation of this name, with its overload, for example "add.Tensor"."""
    operation, _, overload = name.partition(".")
    return getattr(getattr(_aten, operation), overload or "default")


_VIEWS = {_find_operation(name) for name in (
    "alias", "detach", "expand", "permute", "squeeze.dim", "squeeze.dims", "t", "transpose.int", "unsqueeze", "view",
    "_unsafe_view",
)}  # fmt: skip
# Up to this many steps are prepared one by one: `vmap` costs a quarter of a millisecond.
_MAX_STEPS_IN_TURN = 2
# Torch's functions and methods run the same kernels as its registry of operations, and calling them takes about half as
# long: that is most of a small step.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _find_operation(name): getattr(torch, name.partition(".")[0]) for name in (
        "add.Scalar", "add.Tensor", "bmm", "div.Scalar", "div.Tensor", "exp", "gather", "logsumexp",
        "masked_fill.Scalar", "mm", "mul.Scalar", "mul.Tensor", "native_layer_norm", "neg", "permute", "relu",
        "sigmoid", "squeeze.dim", "squeeze.dims", "sub.Tensor", "sum.dim_IntList", "t", "tanh", "transpose.int",
        "unsqueeze", "where.self",
    )
}  # fmt: skip
_METHODS: dict[Any, str] = {_aten.expand.default: "expand", _aten.view.default: "view"}
# How far the numbers of a trace may be from those that are interpreted, relative to the largest.
_TOLERANCE = 1e-3
_CHANGES_SIZE = torch.Tag.dynamic_output_shape
_FILLED = {_aten.ones_like.default: 1.0, _aten.zeros_like.default: 0.0}


class TracedGradient:
    """A gradient traced for one set of shapes: `prepare` once per batch of data, `step` once per update.

    Random operations (dropout) are part of `step` and draw anew in every call.

    Attributes:
        prepared_bytes: The bytes that `prepare` gives to one step besides the data.
        prepare_peak_bytes: The bytes that `prepare` has in memory at once for one step.
    """

    def __init__(
        self, gradient: Gradient, params: Sequence[Tensor], data: Sequence[Any], single_user: bool = False
    ) -> None:
        """Trace on examples as `gradient` takes them.

        Args:
            gradient: The gradient to trace.
            params: Parameters of the shapes to come, one tensor per name.
            data: Data of the shapes to come: x, y and, for users, the mask.
            single_user: Whether `build_single_user_gradient` made the gradient. Autograd cannot be functionalized, so a
                model that writes in place is refused there (the caller then runs it as it is).

        Raises:
            Exception: whatever the model or torch raises.
        """
        flat, structure = tree_flatten((tuple(params), *data))

        def call_flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            return gradient(*tree_unflatten(tensors, structure))

        with (
            seed_torch(flat[0].device, 0),
            # Without it, torch sets one up for each tensor that it notes, which takes half of the time of a trace.
            tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))),
        ):
            graph = make_fx(call_flat if single_user else functionalize(call_flat))(*flat).graph
        for node in graph.nodes:
            _write_anew(node)
        if single_user and any(_writes(node) for node in graph.nodes):
            raise ValueError("the model writes in place")
        # Such a size would be that of the examples in every step.
        if any(_has_size_of_values(node) for node in graph.nodes):
            raise ValueError("the size of a tensor depends on values")
        for node in list(graph.nodes):
            _simplify(graph, node)
        graph.eliminate_dead_code()
        self._prepare, self._body, self.prepared_bytes = _split(graph, len(params))
        with torch.no_grad():  # a frozen part of a model is computed here, with all that its layers compute
            self.prepare_peak_bytes = measure_cost(lambda: self._prepare(*flat[len(params) :])).peak
        self._compare_on_others(gradient, params, data)

    @classmethod
    def try_trace(
        cls, gradient: Gradient, params: Sequence[Tensor], data: Sequence[Any], single_user: bool = False
    ) -> Self | None:
        """Trace a gradient, or return None where the model can only be interpreted, which is slower.

        The reason is logged. RuntimeError is what torch raises for all that it cannot trace; whatever else a model
        raises is passed on, as it would be without tracing.
        """
        try:
            return cls(gradient, params, data, single_user)
        except (RuntimeError, ValueError) as reason:
            _log.info(
                "training steps on records %s run untraced, with the same results but slower, because the model cannot "
                "be traced: %s",
                join_names(str(tuple(x.shape)) for x in list_arrays(data[0]).values()),
                str(reason).strip().partition("\n")[0],
            )
            return None

    def _compare_on_others(self, gradient: Gradient, params: Sequence[Tensor], data: Sequence[Any]) -> None:
        """Raise unless the trace computes what the gradient does at other parameters and on other records.

        What torch does not see, such as what a class of tensors of somebody else's computes, would stay as it was for
        the examples.
        """
        device = params[0].device
        with seed_torch(device, 1):
            moved = [p + torch.randn_like(p) / max(1, p.shape[-1] if p.dim() else 1) ** 0.5 for p in params]
            others = [map_arrays(_change_numbers, data[0]), *(torch.roll(part, 1, 0) for part in data[1:])]
        with seed_torch(device, 2):
            wanted = gradient(moved, *others)
        with seed_torch(device, 2):
            found = self.step(moved, self.prepare(others))
        largest = max((float(w.abs().max()) for w in wanted if w.numel()), default=0.0)
        for mine, other in zip(found, wanted, strict=True):
            scale = float(other.abs().max()) if other.numel() else 0.0
            least = _TOLERANCE * scale + _TOLERANCE**2 * largest
            if not torch.allclose(mine, other, rtol=0, atol=least, equal_nan=True):
                raise ValueError("a part of it is a constant in the trace")

    def prepare(self, data: Sequence[Any]) -> tuple[Tensor, ...]:
        """Compute all that a step needs besides the parameters, from x (r, b, ...), y (r, b, ...), mask (r, b)."""
        with torch.no_grad():
            flat = _flatten(data)
            return (*flat, *self._prepare(*flat))

    def prepare_many(self, data: Sequence[Any]) -> list[tuple[Tensor, ...]]:
        """Run `prepare` for k steps at once: x (k, r, b, ...) and so on; one entry per step."""
        if len(data[1]) <= _MAX_STEPS_IN_TURN:
            return [self.prepare([part[k] for part in data]) for k in range(len(data[1]))]
        with torch.no_grad():
            flat = _flatten(data)
            stacked = (*flat, *vmap(self._prepare)(*flat))
        return list(zip(*(tensor.unbind(0) for tensor in stacked), strict=True))

    def step(self, params: Sequence[Tensor], prepared: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of every user, shaped like the parameters."""
        result: tuple[Tensor, ...] = self._body(*params, *prepared)
        return result


def _change_numbers(values: Tensor) -> Tensor:
    """Return other records of the same kind: in another order, and real numbers multiplied by 1-2."""
    moved = torch.roll(values, 1, 0)
    return moved * (1 + torch.rand_like(moved)) if moved.is_floating_point() else moved


def _flatten(data: Sequence[Any]) -> list[Tensor]:
    """Return the tensors of x (one, or several by name), y and, for users, the mask."""
    return [*list_arrays(data[0]).values(), *data[1:]]


def _simplify(graph: fx.Graph, node: fx.Node) -> None:
    """Drop one node if it changes nothing; make one that only fills a shape independent of its input."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return
    value, target = node.meta["val"], node.target
    if target in _FILLED:
        with graph.inserting_before(node):
            constant = graph.call_function(
                _aten.full.default,
                (list(value.shape), _FILLED[target]),
                {"dtype": value.dtype, "device": value.device},
            )
            constant.meta["val"] = value
            node.replace_all_uses_with(constant)
        return
    if target in (_aten.mul.Scalar, _aten.mul.Tensor) and node.args[1:] == (1,):
        source = node.args[0]
        if isinstance(source, fx.Node) and _get_layout(source) == _get_layout(node):
            node.replace_all_uses_with(source)
        return
    # Views of views that end in the layout of an earlier tensor are that tensor.
    source = node
    while source.target in _VIEWS and isinstance(source.args[0], fx.Node):
        source = source.args[0]
        if _get_layout(source) == _get_layout(node):
            node.replace_all_uses_with(source)
            return


def _get_layout(node: fx.Node) -> object:
    """Return what two nodes must share to be the same tensor, if one is a view of the other."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return node
    return value.dtype, value.shape, value.stride(), value.storage_offset()


def _split(graph: fx.Graph, parameters: int) -> tuple[Callable[..., Any], Callable[..., Any], int]:
    """Split a graph: what depends on data only is computed once per batch, and the rest in every step.

    Returns:
        The part that depends on data only; the part that needs parameters or randomness; bytes that go from one to the
        other.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    data = inputs[parameters:]
    needs: set[fx.Node] = set(inputs[:parameters])
    # Random operations run in every step, or all steps would share one dropout mask.
    for node in graph.nodes:
        late = _is_random_or_writes(node) or needs & set(node.all_input_nodes)
        if node.op == "output" or (node.op == "call_function" and late):
            needs.add(node)
    early = [n for n in graph.nodes if n not in needs and n.op == "call_function"]
    crossing = [n for n in early if isinstance(n.meta.get("val"), Tensor) and needs & set(n.users)]

    # The first half: from data to what crosses over.
    precomputed = fx.Graph()
    copies = {node: precomputed.placeholder(node.name) for node in data}
    for node in (n for n in graph.nodes if n not in needs and n not in data):
        copies[node] = precomputed.node_copy(node, copies.__getitem__)
    precomputed.output(tuple(copies[node] for node in crossing))

    # The second half: from parameters, data and what crosses over to the gradients.
    body = fx.Graph()
    copies = {node: body.placeholder(node.name) for node in (*inputs, *crossing)}
    for node in graph.nodes:
        if node not in copies and (node in needs or node.op == "get_attr"):
            copies[node] = body.node_copy(node, copies.__getitem__)
    for half in (precomputed, body):
        # Each half was copied with nodes that only the other one needs.
        half.eliminate_dead_code()
        for node in half.nodes:
            _call_directly(node)
    # Constants of the trace (`get_attr`) are attributes of its module.
    owner = graph.owning_module if graph.owning_module is not None else torch.nn.Module()
    size = sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in crossing)
    return fx.GraphModule(owner, precomputed).forward, fx.GraphModule(owner, body).forward, size


def _call_directly(node: fx.Node) -> None:
    """Let a node call torch's function or method instead of the operation in the registry."""
    if node.op != "call_function":
        return
    if node.target in _METHODS:
        node.op, node.target = "call_method", _METHODS[node.target]
    elif node.target in _FUNCTIONS:
        node.target = _FUNCTIONS[node.target]


def _is_random_or_writes(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False  # getitem of an operation with several results: follows its input
    return torch.Tag.nondeterministic_seeded in target.tags or _writes(node)


def _has_size_of_values(node: fx.Node) -> bool:
    """Return whether the size of a result depends on values, as that of an index of booleans does."""
    if node.target == _aten._pack_padded_sequence.default:  # torch does not tag it
        return True
    if node.target == _aten.index.Tensor:
        return any(one.meta["val"].dtype == torch.bool for one in node.all_input_nodes[1:])
    return isinstance(node.target, torch._ops.OpOverload) and _CHANGES_SIZE in node.target.tags


def _write_anew(node: fx.Node) -> None:
    """Let a node return a new tensor where it writes into a result of no other use, as dropout under vmap does."""
    source = node.args[0] if _writes(node) else None
    if not isinstance(source, fx.Node) or len(source.users) > 1:
        return
    made, written = source.target, node.target
    if not isinstance(made, torch._ops.OpOverload) or any(one.alias_info for one in made._schema.returns):
        return  # the result of `made` may be a view of another one
    name, _, overload = str(written).removeprefix("aten.").partition(".")
    other = getattr(getattr(_aten, name.removesuffix("_"), None), overload, None)
    if name.endswith("_") and other is not None:
        node.target = other


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
