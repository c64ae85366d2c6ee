"""Gradients of single records of a chain of ordinary layers, by one backward pass over a batch.

Where every layer computes each record by itself, the slope of all losses with respect to a layer's outputs, and the
layer's inputs, give the gradient of every record: an outer product for a linear layer (Goodfellow 2015, "Efficient
Per-Example Gradient Computations"), and a product of matrices for a convolution, whose inputs are cut into patches
(Rochette, Manoel and Tramel 2019, "Efficient Per-Example Gradient Computations in Convolutional Neural Networks").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.module import _has_any_global_hook

from silodp.mechanisms.rows import FactoredRows, Products
from silodp.training.gradients import put_channels_last
from silodp.training.model_state import seed_torch
from silodp.training.record_layers import LAYERS, is_plain, takes_records
from silodp.training.task import Task

_TRAINED = (nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.Linear)


class SequentialGradient:
    """The gradients of single records' losses of a model that is `nn.Sequential` and made of known layers.

    Args:
        task: The model and the loss.
        layers: The layers of the model in their order, as `try_build` lists them.
    """

    working_sets = 1

    def __init__(self, task: Task, layers: Sequence[nn.Module]) -> None:
        self._task = task
        self._layers = [(layer, sum(1 for _ in layer.parameters())) for layer in layers]

    @classmethod
    def try_build(cls, task: Task, x: Any, y: Tensor) -> Self | None:
        """Return the gradients, or None where the model or the kind of its inputs is another one.

        Args:
            task: The model and the loss.
            x: Records (n, ...) of the kind to come, of which no value is looked at.
            y: Their targets (n, ...).
        """
        # Hooks for all modules would see, and could change, whole batches.
        hooked = _has_any_global_hook()  # type: ignore[no-untyped-call]
        layers = None if hooked else _list_layers(task.model)
        if layers is None or not isinstance(x, Tensor) or task.dtype != torch.float32:
            return None
        found = [p for layer in layers for p in layer.parameters()]
        # In the order of the layers, each once, and all of them trained: none belongs to two layers, or to none.
        if list(map(id, found)) != list(map(id, task.model.parameters())) or len(found) != len(task.names):
            return None
        # A chain runs on one and on two records first: their kind decides whether its layers take them one by one, and
        # some layers refuse a batch of one record.
        gradient, params = cls(task, layers), task.unflatten(task.flatten(task.model))
        try:
            with seed_torch(task.device, 0):
                sizes = {next(gradient(params, *task.repeat_examples(x, y, count))).size for count in (1, 2)}
        except Exception:  # the general path says what is wrong with the model, or runs it
            return None
        # A layer's weight may have another shape than the layer says.
        return gradient if sizes == {task.size} else None

    def __call__(self, params: Sequence[Tensor], x: Tensor, y: Tensor) -> Iterator[FactoredRows]:
        """Yield the gradients of single records, in one block.

        Args:
            params: The model's parameters, one tensor for each name.
            x: The records (r, ...).
            y: The targets (r, ...).
        """
        inputs, outputs = list[Tensor](), list[Tensor]()
        values = iter(put_channels_last(self._task, params, x))
        with torch.enable_grad():
            for layer, count in self._layers:
                # In every call: a layer may reshape, and the next one take records for places.
                if not takes_records(layer, x.dim()):
                    raise ValueError(f"{type(layer).__name__} would take {x.dim()} dimensions for one record")
                if count == 0:
                    x = layer(x)
                    continue
                if isinstance(layer, nn.GroupNorm | nn.LayerNorm):
                    x = _normalize(layer, x)
                inputs.append(x.detach())
                x = _apply(layer, x, list(islice(values, count)))
                if not outputs:
                    # Only slopes at outputs of trained layers are needed: autograd stops at the first one.
                    x = x.detach().requires_grad_()
                outputs.append(x)
            # Of a copy: a loss may write into its inputs, and slopes are those at what the layers computed.
            losses = vmap(self._loss, randomness="different")(x.clone(), y)
            slopes = torch.autograd.grad(losses.sum(), outputs, materialize_grads=True)
        pieces = list[Tensor | Products]()
        trained = ((layer, count) for layer, count in self._layers if count > 0)
        for (layer, count), inside, slope in zip(trained, inputs, slopes, strict=True):
            pieces += _differentiate(layer, inside, slope)[:count]
        yield FactoredRows(tuple(pieces))

    def _loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        one = torch.ones(1, dtype=self._task.dtype, device=self._task.device)
        return self._task.loss.compute(outputs.unsqueeze(0), target.unsqueeze(0), one)


def _list_layers(model: nn.Module) -> list[nn.Module] | None:
    """Return the layers of a chain in their order, or None for any other model.

    A subclass may compute something else, and so may a module with hooks, with a method of its own, or with a weight
    or bias that is no parameter.
    """
    if not is_plain(model) or any(True for _ in model.buffers()):
        return None
    if type(model) is nn.Sequential:
        parts = [_list_layers(part) for part in model]
        return None if None in parts else [layer for part in parts if part is not None for layer in part]
    parameters = [name for name, _ in model.named_parameters()]
    if parameters:
        plain = type(model) in _TRAINED and parameters == ["weight", "bias"][: len(parameters)]
    else:
        # In place, a layer would replace the outputs of the one before it.
        plain = type(model) in LAYERS and not getattr(model, "inplace", False)
    if isinstance(model, nn.Conv2d):
        plain &= model.groups == 1 and model.dilation == (1, 1) and model.padding_mode == "zeros"
        plain &= not isinstance(model.padding, str)
    return [model] if plain else None


def _normalize(layer: nn.GroupNorm | nn.LayerNorm, x: Tensor) -> Tensor:
    """Return the outputs of a layer that has no weights."""
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(x, layer.num_groups, eps=layer.eps)
    return F.layer_norm(x, layer.normalized_shape, eps=layer.eps)


def _apply(layer: nn.Module, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return a layer's outputs at its weight, and its bias if it has one; x is normalized where the layer does so."""
    if isinstance(layer, nn.GroupNorm):  # a weight for each channel, which is the second dimension
        parameters = [p.reshape(-1, *[1] * (x.dim() - 2)) for p in parameters]
    weight, bias = parameters[0], parameters[1] if len(parameters) > 1 else None
    if isinstance(layer, nn.Conv2d):
        return F.conv2d(x, weight, bias, layer.stride, layer.padding)
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    return x * weight if bias is None else x * weight + bias


def _differentiate(layer: nn.Module, x: Tensor, slope: Tensor) -> list[Tensor | Products]:
    """Return the gradients of a layer's weight and bias, from its inputs and the slope at its outputs (r, ...).

    A layer without a bias leaves out the second one.
    """
    weight: Tensor | Products
    if isinstance(layer, nn.GroupNorm | nn.LayerNorm):
        weight, bias = (_sum_over_places(layer, values) for values in (x * slope, slope))
    else:
        if isinstance(layer, nn.Conv2d):
            x, slope = _cut_patches(layer, x), slope.flatten(2).transpose(1, 2)
        if x.dim() > 2:  # the layer computes many vectors of a record: (r, vectors, numbers)
            x, slope = x.flatten(1, -2), slope.flatten(1, -2)
            # The gradient is a sum over vectors, hence no outer product: multiply out, one matrix per record.
            weight, bias = torch.bmm(slope.transpose(1, 2), x).flatten(1), slope.sum(1)
        else:
            # y = Wx + b: dL/dW = (dL/dy)·xᵀ and dL/db = dL/dy. The factors are kept apart (`FactoredRows`).
            weight, bias = Products(slope, x), slope
    return [weight, bias]


def _sum_over_places(layer: nn.GroupNorm | nn.LayerNorm, values: Tensor) -> Tensor:
    """Return the sums (r, weights) of what lies at the same weight, from values (r, ...)."""
    if isinstance(layer, nn.GroupNorm):
        return values.flatten(2).sum(2) if values.dim() > 2 else values
    return values.reshape(len(values), -1, math.prod(layer.normalized_shape)).sum(1)


def _cut_patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Return what each output of a convolution is computed from: (r, places, channels · height · width).

    `F.unfold` does the same and takes twice as long.
    """
    pad, stride, size = (cast("tuple[int, int]", n) for n in (layer.padding, layer.stride, layer.kernel_size))
    x = F.pad(x, (pad[1], pad[1], pad[0], pad[0])).unfold(2, size[0], stride[0])
    return x.unfold(3, size[1], stride[1]).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
