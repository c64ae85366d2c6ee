"""Gradients of single records of any module, by one backward pass over a batch ("book-keeping").

The model runs under `vmap`, each record as a batch of one, so that no layer can mix records. Where torch applies a
parameter by a known function (linear, convolution, embedding, norms), wherever in the module, its inputs are kept. One
backward pass gives the slopes of the losses at all outputs; inputs and slopes are the gradients of the records as sums
of outer products, which need not be multiplied out (`mechanisms.rows.Products`).

A parameter that the model also uses in another way, such as a tied weight or a gate, has a copy for each record, of
which autograd takes the gradient. None is missed: the tensor that the model sees of any other parameter is itself
differentiated, and where that gives a gradient, the records are computed in the general way.

Source: Li et al. 2022, "Large Language Models Can Be Strong Differentially Private Learners", section 4; Bu et al.
2023, "Differentially Private Optimization on Large Model at Small Cost" (book-keeping).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from silodp.data.inputs import map_arrays
from silodp.mechanisms.rows import FactoredRows, Products
from silodp.training.gradients import (
    GradientBuilder,
    ReplaceFunctions,
    has_layer,
    is_looped,
    put_channels_last,
    select_gradient,
    vectorizable_kernels,
)
from silodp.training.model_state import copy_model, seed_torch
from silodp.training.sgd._tracing import TracedGradient
from silodp.training.task import Task, flatten_rows

# What a number of a row costs when rows are written, measured and added up, a number of a factor, and a product of
# single-precision numbers, or of those of two places, in products of double-precision numbers in a large matrix.
# Measured on a CPU for 1-576 places and factors of 8-576 numbers, of which the rule takes the better way nearly always.
_PER_ENTRY, _PER_FACTOR, _SINGLE, _PAIR = 25, 20, 1.2, 1.5
# Operations of a row from which on a convolution is differentiated by oneDNN, row after row (one thread).
_MIN_TO_CONVOLVE = 1 << 21
# How far gradients in double precision may be from those of the general path, relative to the largest.
_TOLERANCE = 1e-9

# Bytes of rows that are written at once on a CPU, whose cache holds them until they are added up, and on a GPU.
_BLOCK_BYTES = (24 << 20, 1 << 28)


def count_rows_at_once(device: torch.device, row_bytes: int) -> int:
    """Return how many rows of so many bytes are written at once, at least one."""
    return max(1, _BLOCK_BYTES[device.type == "cuda"] // max(1, row_bytes))


_TRANSPOSE: Callable[[Tensor], Tensor] = Tensor.T.__get__  # type: ignore[attr-defined]
_Differentiate = Callable[[Tensor, Tensor], tuple[Tensor | Products, Tensor | None]]


class _NotKept(ValueError):
    """The inputs or slopes of a layer are not those that its gradient follows from."""


@dataclass(frozen=True)
class _Use:
    """One application of a parameter to all records of a batch.

    Attributes:
        weight: The place of the weight among the model's parameters, or None if it is not known.
        bias: The place of the bias, or None.
        differentiate: (inputs, slopes) -> the gradients of weight and bias.
        inputs: The inputs (r, ...).
        place: The dimension of records in the outputs.
    """

    weight: int | None
    bias: int | None
    differentiate: _Differentiate
    inputs: Tensor
    place: int


@dataclass(frozen=True)
class _Factors:
    """What the gradients of a batch follow from.

    Attributes:
        uses: The uses of parameters.
        slopes: The slopes at their outputs (..., r, ...).
        copies: The place of a parameter -> the gradients of each record's copy (r, ...).
    """

    uses: list[_Use]
    slopes: list[Tensor]
    copies: dict[int, Tensor]

    def list_tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors in an order."""
        return (*(use.inputs for use in self.uses), *self.slopes, *self.copies.values())

    def replace_tensors(self, tensors: Sequence[Tensor]) -> _Factors:
        """Return the factors with other tensors, in the same order."""
        count = len(self.uses)
        uses = [replace(use, inputs=one) for use, one in zip(self.uses, tensors[:count], strict=True)]
        copies = dict(zip(self.copies, tensors[2 * count :], strict=True))
        return _Factors(uses, list(tensors[count : 2 * count]), copies)

    def forget_values(self) -> _Factors:
        """Return the factors with empty tensors."""
        return self.replace_tensors([one.new_empty(0) for one in self.list_tensors()])


class LayeredGradient:
    """The gradients of single records' losses of any model that `vmap` can run.

    Args:
        task: The model and the loss.
        copied: The places of the parameters of which every record has a copy.
        general: Computes the same gradients in the general way.
    """

    # Rows are written block by block, so that less than usual of a step's memory is used again and again.
    working_sets = 2

    def __init__(self, task: Task, copied: Sequence[int], general: Callable[..., tuple[Tensor, ...]]) -> None:
        self._task, self._copied, self._general = task, tuple(copied), general
        self._at_once = sys.maxsize  # records of a block
        self._one = torch.ones(1, dtype=task.dtype, device=task.device)
        self._cloned = [(task.names.index(name), attrgetter(name)) for name in task.cloned]

    @classmethod
    def try_build(cls, task: Task, x: Any, y: Tensor, build: GradientBuilder | None = None) -> Self | None:
        """Return the gradients, or None where the general path is needed.

        Args:
            task: The model and the loss.
            x: Records (n, ...) of the kind to come, of which no value is looked at.
            y: Their targets (n, ...).
            build: Builds the general path; None chooses the fastest one.
        """
        if task.dtype != torch.float32:
            return None
        try:
            build = build or select_gradient("record", task, x, y)
            if is_looped(build):
                return None
            params = task.unflatten(task.flatten(task.model))
            example = task.list_examples(x, y)
            copied: list[int] = []
            with seed_torch(task.device, 0):
                # Where a weight is a copy, no function is known, and so its bias becomes one, too.
                while escaped := cls(task, copied, build(task))._find_escaped(params, *example):
                    copied += escaped
            if 2 * sum(task.sizes[place] for place in copied) > task.size:
                return None
            found = cls(task, copied, build(task))
            double = task.replace_model(copy_model(task.model).double(), task.loss)
            checked = cls(double, copied, build(double))
            if not checked._equals_general(*double.tensors(*example)):
                return None
            with seed_torch(task.device, 0):
                (pieces,) = found._compute_blocks(params, *example)
            written = sum(piece[0].nbytes for piece in pieces if isinstance(piece, Tensor))
            found._at_once = count_rows_at_once(task.device, written)
            return found
        except Exception:  # the general path says what is wrong with the model, or runs it
            return None

    def _find_escaped(self, params: Sequence[Tensor], x: Any, y: Tensor) -> list[int]:
        """Return the places of the parameters that are used in another way than by known functions."""
        *_, escaped = self._differentiate(params, x, y)
        return [place for place, slope in escaped.items() if slope is not None]

    def _equals_general(self, x: Any, y: Tensor) -> bool:
        """Return whether the gradients at random parameters are those of the general path, with the same draws."""
        with seed_torch(self._task.device, 0):
            drawn = [
                torch.randn_like(p) / max(1, math.prod(p.shape[1:])) ** 0.5
                for p in self._task.unflatten(self._task.flatten(self._task.model))
            ]
        with seed_torch(self._task.device, 1):
            wanted = flatten_rows(self._general(drawn, x, y))
        with seed_torch(self._task.device, 1):
            (pieces,) = self._compute_blocks(drawn, x, y)
        found = torch.cat([p.expand() if isinstance(p, Products) else p for p in pieces], 1)
        least = _TOLERANCE * float(wanted.abs().max())
        return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=0, atol=least)

    def __call__(self, params: Sequence[Tensor], x: Any, y: Tensor) -> Iterator[FactoredRows]:
        """Yield the gradients of single records, block after block.

        Args:
            params: The model's parameters, one tensor for each name.
            x: The records (r, ...).
            y: The targets (r, ...).
        """
        try:
            yield from map(FactoredRows, self._compute_blocks(params, x, y))
        except _NotKept:
            yield FactoredRows((flatten_rows(self._general(params, x, y)),))

    def _compute_blocks(
        self, params: Sequence[Tensor], x: Any, y: Tensor
    ) -> Iterator[tuple[Tensor | Products, ...]]:
        yield from self._write_blocks(params, self._find_factors(params, x, y), len(y))

    def _write_blocks(
        self, params: Sequence[Tensor], factors: _Factors, count: int
    ) -> Iterator[tuple[Tensor | Products, ...]]:
        """Yield the gradients of the first `count` records, block after block."""
        for first in range(0, count, self._at_once):
            yield self._multiply_slopes(params, factors, slice(first, min(first + self._at_once, count)), 1)

    def sum_groups(
        self, params: Sequence[Tensor], x: Any, y: Tensor, weights: Tensor, groups: Sequence[tuple[int, int]]
    ) -> Iterator[FactoredRows]:
        """Yield weighted sums of the gradients of single records, over groups of consecutive records.

        A sum over records is one over more places, so no record's gradient is made.

        Args:
            params: The model's parameters, one tensor for each name.
            x: The records (r, ...).
            y: The targets (r, ...).
            weights: The weights (r,).
            groups: For each block that is yielded, the number of its groups and of the records of each.
        """
        try:
            factors = self._find_factors(params, x, y, weights)
        except _NotKept:
            factors = None
        first = 0
        for count, each in groups:
            some = slice(first, first + count * each)
            if factors is None:
                rows = flatten_rows(self._general(params, x[some], y[some])) * weights[some].unsqueeze(1)
                yield FactoredRows((_add_groups(rows, each),))
            else:
                yield FactoredRows(self._multiply_slopes(params, factors, some, each))
            first = some.stop

    def _find_factors(
        self, params: Sequence[Tensor], x: Any, y: Tensor, weights: Tensor | None = None
    ) -> _Factors:
        """Return what gradients follow from; Args as `_differentiate`."""
        factors, escaped = self._differentiate(params, x, y, weights)
        if any(slope is not None for slope in escaped.values()):
            raise _NotKept("a parameter is used in another way")
        return factors

    def _multiply_slopes(
        self, params: Sequence[Tensor], factors: _Factors, some: slice, each: int
    ) -> tuple[Tensor | Products, ...]:
        """Return the gradients of some records, added up over groups of `each` consecutive ones."""
        parts: list[list[Tensor | Products]] = [[] for _ in params]
        for use, slope in zip(factors.uses, factors.slopes, strict=True):
            inputs, slope = (_group(v[some], each) for v in (use.inputs, slope.movedim(use.place, 0)))
            weight, bias = use.differentiate(inputs, slope)
            for place, part in ((use.weight, weight), (use.bias, bias)):
                if place is not None and part is not None:
                    parts[place].append(part)
        for place, rows in factors.copies.items():
            parts[place].append(_add_groups(rows[some].flatten(1), each))
        return tuple(
            _join(part) if part else p.new_zeros((some.stop - some.start) // each, p.numel())
            for part, p in zip(parts, params, strict=True)
        )

    def trace(self, params: Sequence[Tensor], x: Any, y: Tensor) -> TracedLayers | None:
        """Return the gradients traced for as many records, or None where they can only be interpreted.

        Args:
            params: Parameters of the shapes to come, one tensor for each name.
            x: Made-up records (r, ...).
            y: Their targets (r, ...).
        """
        noted: list[_Factors] = []

        def differentiate(given: Sequence[Tensor], records: Any, targets: Tensor) -> tuple[Tensor, ...]:
            noted.append(self._find_factors(given, records, targets))
            return noted[-1].list_tensors()

        traced = TracedGradient.try_trace(differentiate, params, (x, y), single_user=True)
        return None if traced is None else TracedLayers(self, traced, noted[0].forget_values())

    def _differentiate(
        self, params: Sequence[Tensor], x: Any, y: Tensor, weights: Tensor | None = None
    ) -> tuple[_Factors, dict[int, Any]]:
        """Return what gradients follow from, and the gradients of what the model saw of parameters without a copy.

        Args:
            params: The model's parameters, one tensor for each name.
            x: The records (r, ...).
            y: The targets (r, ...).
            weights: Factors (r,) of the losses; None: 1.
        """
        task, keeper = self._task, _Keeper(len(y))
        # Groups of channels are normalized as rows, which lie together where channels do not come last.
        is_grouped = has_layer(task.model, nn.GroupNorm)
        values = params if is_grouped else put_channels_last(task, params, x)
        with vectorizable_kernels(task.model), torch.enable_grad():
            # What the model sees is another tensor than what known functions compute with.
            seen = [p.detach().requires_grad_() for p in params]
            copies = tuple(
                params[place].detach().expand(len(y), *params[place].shape).requires_grad_()
                for place in self._copied
            )
            applied = {
                place: value.detach() for place, value in enumerate(values) if place not in self._copied
            }

            def compute_loss(own: tuple[Tensor, ...], zero: Tensor, record: Any, target: Tensor) -> Tensor:
                given = list(seen)
                for place, copy in zip(self._copied, own, strict=True):
                    given[place] = copy

                def run() -> Tensor:
                    named = [(place, given[place]) for place in applied]
                    # `call_with` gives the model clones of these.
                    named += [(place, get(task.model)) for place, get in self._cloned if place in applied]
                    known = {id(tensor): (place, applied[place]) for place, tensor in named}
                    with keeper.keep(known, zero):
                        alone = map_arrays(lambda tensor: tensor.unsqueeze(0), record)
                        outputs: Tensor = task.call(task.model, alone)
                        return outputs

                outputs = task.call_with(tuple(given), run)
                return task.loss.compute(outputs, target.unsqueeze(0), self._one)

            zeros = torch.zeros(len(y), dtype=task.dtype, device=task.device, requires_grad=True)
            losses = vmap(compute_loss, randomness="different")(copies, zeros, x, y)
            others = list(applied)
            sources: list[Any] = [*keeper.take_edges(), *copies, *(seen[place] for place in others)]
            total = losses.sum() if weights is None else losses @ weights
            found = torch.autograd.grad(total, sources, allow_unused=True)
        slopes, own = found[: len(keeper.uses)], found[len(keeper.uses) :]
        # No loss depends on outputs that have no slope.
        kept = [(use, slope) for use, slope in zip(keeper.uses, slopes, strict=True) if slope is not None]
        rows = {place: row for place, row in zip(self._copied, own, strict=False) if row is not None}
        factors = _Factors([use for use, _ in kept], [slope for _, slope in kept], rows)
        return factors, dict(zip(others, own[len(copies) :], strict=True))


class TracedLayers:
    """The gradients of `LayeredGradient`, traced for batches of one size.

    Args:
        gradient: Writes the rows.
        traced: Computes the factors, one tensor after another.
        factors: What the factors belong to.
    """

    def __init__(self, gradient: LayeredGradient, traced: TracedGradient, factors: _Factors) -> None:
        self._gradient, self._traced, self._factors = gradient, traced, factors

    def __call__(self, params: Sequence[Tensor], x: Any, y: Tensor, count: int) -> Iterator[FactoredRows]:
        """Yield the gradients of the first `count` records, block after block; Args as `LayeredGradient`."""
        tensors = self._traced.step(params, self._traced.prepare((x, y)))
        factors = self._factors.replace_tensors(tensors)
        del tensors
        yield from map(FactoredRows, self._gradient._write_blocks(params, factors, count))


class _Keeper:
    """Runs known functions, and keeps what their gradients need.

    Args:
        count: The number of records.
    """

    def __init__(self, count: int) -> None:
        self.uses = list[_Use]()
        self._count = count
        self._written = list[tuple[Tensor, int]]()  # inputs and outputs, and how often each had been written
        self._known: Mapping[int, tuple[int | None, Tensor | None]] = {}
        self._zero = torch.zeros(())
        self._transposed = dict[int, tuple[Tensor, Tensor]]()  # identity of W.T -> W.T and W
        convolutions = {f: partial(self._convolve, f) for f in (F.conv1d, F.conv2d, F.conv3d)}
        self._replaced: dict[Any, Callable[..., Any]] = {
            F.linear: self._apply_linear,
            **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), self._apply_product),
            **{get: partial(self._transpose, get) for get in (_TRANSPOSE, Tensor.t, torch.t)},
            F.embedding: self._look_up,
            F.layer_norm: self._normalize,
            F.rms_norm: self._normalize_squares,
            F.group_norm: self._normalize_groups,
            F.multi_head_attention_forward: self._attend,
            F.scaled_dot_product_attention: self._weigh_values,
            **convolutions,
        }

    def keep(self, known: Mapping[int, tuple[int | None, Tensor | None]], zero: Tensor) -> ReplaceFunctions:
        """Return the mode in which known functions are kept.

        Args:
            known: The identity of a tensor that the model sees -> its place, and the tensor to compute with.
            zero: A number 0 of each record, seen from inside of vmap.
        """
        self._known, self._zero = known, zero
        return ReplaceFunctions(self._replaced)

    def take_edges(self) -> list[GradientEdge]:
        """Return where the slopes at the outputs of all uses arrive; the outputs themselves are held no longer."""
        # A layer's gradient follows from what it computed, and not from what was written there later.
        if any(tensor._version != version for tensor, version in self._written):
            raise _NotKept("inputs or outputs of a layer were written into")
        edges = [get_gradient_edge(outputs) for outputs, _ in self._written[1::2]]
        self._written.clear()
        return edges

    def _find(self, *tensors: Tensor | None) -> list[tuple[int | None, Tensor | None]]:
        """Return the place of each parameter, None where it is not known, and the tensor to compute with."""
        known = self._known if torch.is_grad_enabled() else {}
        return [known.get(id(tensor), (None, tensor)) for tensor in tensors]

    def _note(
        self,
        weight: int | None,
        bias: int | None,
        differentiate: _Differentiate,
        inputs: Tensor,
        outputs: Tensor,
    ) -> Tensor:
        """Keep inputs and outputs, as they are outside of vmap; return the outputs."""
        inside, inside_place = self._unwrap(inputs)
        outside, place = self._unwrap(outputs)
        if place is None or not outside.requires_grad:
            # Outputs that are the same for all records have slopes of each, and the first layer has slopes, too.
            outputs = outputs + self._zero
            outside, place = self._unwrap(outputs)
        if place is None or not outside.requires_grad:
            raise _NotKept("outputs of a layer without a gradient")
        if inside_place is None:
            inside, inside_place = inside.expand(self._count, *inside.shape), 0
        inside = inside.detach().movedim(inside_place, 0)
        self._written += [(inside, inside._version), (outside, outside._version)]
        self.uses.append(_Use(weight, bias, differentiate, inside, place))
        return outputs

    def _unwrap(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """Return a tensor as it is outside of vmap, and the dimension of records, None if it has none."""
        place: int = _functorch.maybe_get_bdim(tensor)
        whole: Tensor = _functorch.get_unwrapped(tensor) if place >= 0 else tensor
        level = _functorch.maybe_get_level(self._zero)
        if _functorch.is_functorch_wrapped_tensor(whole) or (
            place >= 0 and _functorch.maybe_get_level(tensor) != level
        ):
            raise _NotKept("a layer runs in a transformation of the model's own")
        return whole, place if place >= 0 else None

    def _apply_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        (place, w), (bias_place, b) = self._find(weight, bias)
        if place is None or w is None:
            return F.linear(input, weight, bias)
        inside, dim = self._unwrap(input)
        if dim is None or (b is not None and self._unwrap(b)[1] is not None):
            outputs = F.linear(input, w, b)
        else:
            # Outside of vmap, which would take the sum with the bias apart.
            inside = inside.movedim(dim, 0)
            whole = F.linear(inside.reshape(-1, inside.shape[-1]), w, b)
            whole = whole.view(*inside.shape[:-1], -1)
            outputs = _functorch._add_batch_dim(whole, 0, _functorch.maybe_get_level(self._zero))
        return self._note(place, bias_place, _differentiate_linear, input, outputs)

    def _transpose(self, function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        """Return Wᵀ, and remember of which matrix."""
        found = function(tensor)
        if id(tensor) in self._known and tensor.dim() == 2:
            self._transposed[id(found)] = found, tensor
        return found

    def _apply_product(self, input: Tensor, other: Tensor) -> Tensor:
        """Compute input @ other, where the other one may be a weight or its transpose."""
        if id(other) in self._transposed:
            return self._apply_linear(input, self._transposed[id(other)][1])
        ((place, w),) = self._find(other)
        if place is None or w is None or w.dim() != 2:
            return torch.matmul(input, other)
        return self._note(place, None, _differentiate_product, input, torch.matmul(input, w))

    def _convolve(
        self,
        function: Callable[..., Tensor],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        (place, w), (bias_place, b) = self._find(weight, bias)
        options = (stride, padding, dilation, groups)
        if place is None:
            return function(input, weight, bias, *options)
        window = _Window.make(weight, *options)
        return self._note(place, bias_place, window.differentiate, input, function(input, w, b, *options))

    def _look_up(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        ((place, w),) = self._find(weight)
        if place is None or w is None or max_norm is not None or scale_grad_by_freq or sparse:
            return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        height = len(weight)
        padding = None if padding_idx is None else padding_idx % height
        return self._note(
            place, None, partial(_differentiate_lookup, height, padding), input, F.embedding(input, w)
        )

    def _normalize(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        normal = F.layer_norm(input, normalized_shape, eps=eps)
        return self._scale(normal, weight, bias, partial(_sum_over_vectors, math.prod(normalized_shape)))

    def _normalize_squares(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        normal = F.rms_norm(input, normalized_shape, eps=eps)
        return self._scale(normal, weight, None, partial(_sum_over_vectors, math.prod(normalized_shape)))

    def _normalize_groups(
        self,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        normal = F.group_norm(input, num_groups, eps=eps)
        return self._scale(
            normal, weight, bias, partial(_sum_over_channels, input.dim() - 2), (-1, *[1] * (input.dim() - 2))
        )

    def _scale(
        self,
        normal: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        add_up: Callable[[Tensor], Tensor],
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Return normalized numbers times a weight, plus a bias, both in a shape that broadcasts to them."""
        (weight_place, w), (bias_place, b) = self._find(weight, bias)
        scale, shift = (t if t is None or shape is None else t.reshape(shape) for t in (w, b))
        outputs = normal if scale is None else normal * scale
        outputs = outputs if shift is None else outputs + shift
        if weight_place is None and bias_place is None:
            return outputs

        def differentiate(x: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
            return add_up(x * slope), add_up(slope)

        return self._note(weight_place, bias_place, differentiate, normal, outputs)

    def _weigh_values(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Compute attention of all records as one batch, outside of vmap, which would take its kernel apart."""
        options |= {"is_causal": is_causal}
        given = (query, key, value, *(() if attn_mask is None else (attn_mask,)))
        parts = [self._flatten_records(each) for each in given]
        if attn_mask is not None and self._unwrap(attn_mask)[1] is None and attn_mask.shape[:-2].numel() == 1:
            parts[3] = attn_mask  # the same for all records
        flat = [part for part in parts if part is not None]
        if dropout_p or len(flat) < len(given):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            attend: Callable[..., Tensor] = F.scaled_dot_product_attention
            outputs = attend(*flat, **options)
        outputs = outputs.unflatten(0, (self._count, -1))  # type: ignore[no-untyped-call]
        return _functorch._add_batch_dim(outputs, 0, _functorch.maybe_get_level(self._zero))

    def _flatten_records(self, values: Tensor) -> Tensor | None:
        """Return heads (r·k, heads, ...) of all records, from (k, heads, ...) of one; None for other values."""
        whole, place = self._unwrap(values)
        return None if place is None or values.dim() != 4 else whole.movedim(place, 0).flatten(0, 1)

    def _attend(self, *args: Any, **options: Any) -> Any:
        with ReplaceFunctions(self._replaced):
            return _attend_with_heads(*args, **options)


# The same function without the question whether a mode replaces it, so that those that it calls can be replaced.
_attend_with_heads = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def _group(values: Tensor, each: int) -> Tensor:
    """Return values (r, ...) as (r / each, each, ...); as they are where each is alone."""
    return values if each == 1 else values.unflatten(0, (-1, each))  # type: ignore[no-untyped-call]


def _add_groups(rows: Tensor, each: int) -> Tensor:
    """Return the sums of groups of consecutive rows."""
    return rows if each == 1 else _group(rows, each).sum(1)


def _sum_over_vectors(size: int, values: Tensor) -> Tensor:
    """Return the sums (r, size) over all but the last numbers of each record, from values (r, ...)."""
    return values.reshape(len(values), -1, size).sum(1)


def _sum_over_channels(dims: int, values: Tensor) -> Tensor:
    """Return the sums (r, channels) over all but channels, from values (r, ..., channels, places of `dims`)."""
    places = values.shape[values.dim() - dims :]
    return values.reshape(len(values), -1, values.shape[-dims - 1], math.prod(places)).sum((1, 3))


def _differentiate_linear(x: Tensor, slope: Tensor) -> tuple[Tensor | Products, Tensor]:
    """Return the gradients of weight and bias of a linear layer."""
    x, slope = (values.reshape(len(values), -1, values.shape[-1]) for values in (x, slope))
    return _multiply(slope, x)


def _differentiate_product(x: Tensor, slope: Tensor) -> tuple[Tensor | Products, None]:
    """Return the gradient of a weight W of x @ W."""
    return _differentiate_linear(slope, x)[0], None


def _differentiate_lookup(
    height: int, padding: int | None, x: Tensor, slope: Tensor
) -> tuple[Products, None]:
    """Return the gradient of the weight of an embedding, whose row of padding has none."""
    x, slope = x.reshape(len(x), -1), slope.reshape(len(x), -1, slope.shape[-1])
    if padding is not None:
        slope = slope.masked_fill((x == padding).unsqueeze(-1), 0)
    return Products(x.long(), slope.contiguous(), height), None


@dataclass(frozen=True)
class _Window:
    """How a convolution cuts its inputs into patches; a number for each dimension of places.

    Attributes:
        size: The size of the kernel.
        stride: The step from patch to patch.
        padding: The zeros before and after.
        dilation: The distance of neighbors in a patch.
        groups: The number of groups of channels.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def make(cls, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Self:
        """Return the window of a convolution's weight and options."""
        size = tuple(weight.shape[2:])

        def spread(value: Any) -> tuple[int, ...]:
            values = (value,) if isinstance(value, int) else tuple(value)
            return values * len(size) if len(values) == 1 else values

        dilation = spread(dilation)
        if padding == "same":
            both = [step * (length - 1) for step, length in zip(dilation, size, strict=True)]
            pads = tuple((one // 2, one - one // 2) for one in both)
        else:
            pads = tuple((one, one) for one in spread(0 if padding == "valid" else padding))
        return cls(size, spread(stride), pads, dilation, groups)

    def differentiate(self, x: Tensor, slope: Tensor) -> tuple[Tensor | Products, Tensor]:
        """Return the gradients of weight and bias of a convolution."""
        count, dims = len(x), len(self.size)
        x, slope = (values.reshape(-1, *values.shape[-dims - 1 :]) for values in (x, slope))
        if self._convolves(x, slope, count):
            return self._convolve(x, slope, count), slope.flatten(2).sum(2).view(
                count, -1, slope.shape[1]
            ).sum(1)
        slope = slope.flatten(2).transpose(1, 2).reshape(count, -1, slope.shape[1])
        patches = self.cut(x).reshape(count, slope.shape[1], self.groups, -1)
        if self.groups == 1:
            return _multiply(slope, patches.squeeze(2))
        apart = slope.view(*slope.shape[:2], self.groups, -1)
        return torch.einsum("rtgo,rtgc->rgoc", apart, patches).flatten(1), slope.sum(1)

    def _convolves(self, x: Tensor, slope: Tensor, count: int) -> bool:
        """Return whether oneDNN takes less time for one row after another than one product of patches.

        Each patch is written, which costs as much as some products; of one channel, oneDNN is slow.
        """
        patches = slope.numel() // slope.shape[1] // count * x.shape[1] * math.prod(self.size)
        operations = patches * (slope.shape[1] // self.groups + _PER_FACTOR)
        return x.device.type == "cpu" and x.shape[1] > self.groups and operations >= _MIN_TO_CONVOLVE

    def _convolve(self, x: Tensor, slope: Tensor, count: int) -> Tensor:
        """Return the gradients of the weight (count, ...), as ordinary autograd computes them."""
        if any(before != after for before, after in self.padding):
            x = F.pad(x, [one for pair in reversed(self.padding) for one in pair])
            pads = [0] * len(self.size)
        else:
            pads = [before for before, _ in self.padding]
        weight = x.new_empty(1).expand(slope.shape[1], x.shape[1] // self.groups, *self.size)
        options = (
            self.stride,
            pads,
            self.dilation,
            False,
            [0] * len(pads),
            self.groups,
            [False, True, False],
        )
        found = [
            torch.ops.aten.convolution_backward(own, inputs, weight, None, *options)[1]
            for own, inputs in zip(slope.chunk(count), x.chunk(count), strict=True)
        ]
        return torch.stack(found).flatten(1)

    def cut(self, x: Tensor) -> Tensor:
        """Return what each output is computed from: (n, places, channels · kernel), from inputs (n, channels, ...)."""
        dims = len(self.size)
        x = F.pad(x, [one for pair in reversed(self.padding) for one in pair])
        for place, (size, stride, step) in enumerate(zip(self.size, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + place, step * (size - 1) + 1, stride)[..., ::step]
        # (n, channels, places, kernel) -> (n, places, channels, kernel)
        x = x.permute(0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims))
        return x.flatten(1 + dims).flatten(1, dims)


def _multiply(left: Tensor, right: Tensor) -> tuple[Tensor | Products, Tensor]:
    """Return Σ over t of left[i, t] ⊗ right[i, t], for factors (r, t, m) and (r, t, n), and Σ left[i, t].

    The products are multiplied out where that takes less time.
    """
    (_, t, m), n = left.shape, right.shape[2]
    if t == 1:
        left = left.squeeze(1)
        return Products(left, right.squeeze(1)), left
    written = m * n * (_SINGLE * t + _PER_ENTRY)
    kept = _PAIR * t * t * (m + n) + t * m * n + _PER_FACTOR * t * (m + n)
    whole = Products(left, right) if kept < written else torch.bmm(left.transpose(1, 2), right).flatten(1)
    return whole, left.sum(1)


def _join(parts: list[Tensor | Products]) -> Tensor | Products:
    """Return the sum of gradients of one parameter: products side by side, or multiplied out if one is not kept so."""
    if len(parts) == 1:
        return parts[0]
    kept = [part for part in parts if isinstance(part, Products)]
    if len(kept) == len(parts) and len({part.height for part in kept}) == 1:
        several = [_with_places(part) for part in kept]
        left, right = (torch.cat(factors, 1) for factors in zip(*several, strict=True))
        return Products(left, right, kept[0].height)
    whole = [part.expand().to(part.right.dtype) if isinstance(part, Products) else part for part in parts]
    return torch.stack(whole).sum(0)


def _with_places(part: Products) -> tuple[Tensor, Tensor]:
    """Return the factors with a dimension of places."""
    is_one = part.right.dim() == 2
    return (part.left.unsqueeze(1), part.right.unsqueeze(1)) if is_one else (part.left, part.right)
