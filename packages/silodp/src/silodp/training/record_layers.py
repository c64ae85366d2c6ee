"""Layers of torch that compute each record of a batch by itself.

The list is closed: a layer that is not on it may mix the records of a batch, which would break the guarantee.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from silodp.training import model_state


def _has_places(places: int) -> Callable[[Any, int], bool]:
    """Return the check of a layer of channels with so many dimensions of places; with one less, it takes one record."""
    return lambda _, dims: dims == places + 2


def _has_least(least: int) -> Callable[[Any, int], bool]:
    return lambda _, dims: dims >= least


def _has_other_dimension(layer: Any, dims: int) -> bool:
    """Check that the dimension of a layer is given, and is not that of records."""
    dim = getattr(layer, "start_dim", getattr(layer, "dim", None))
    return isinstance(dim, int) and dim % dims != 0


def _has_normalized(layer: Any, dims: int) -> bool:
    return dims > len(layer.normalized_shape)


def _is_frozen(layer: nn.Module, dims: int) -> bool:
    return dims >= 2 and model_state.is_frozen_norm(layer)


def _is_sequence_first(layer: Any, dims: int) -> bool:
    """Check that a layer of sequences takes the first of three dimensions for records, with all layers inside it."""
    parts = [part for part in layer.modules() if type(part) not in _INSIDE]
    return dims == 3 and all(type(part) in LAYERS and getattr(part, "batch_first", True) for part in parts)


_ANY = _has_least(1)
ATTENDS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
_INSIDE = (nn.ModuleList, nn.modules.linear.NonDynamicallyQuantizableLinear)

LAYERS: dict[type[nn.Module], Callable[[Any, int], bool]] = {
    **dict.fromkeys(
        (
            nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU,
            nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh,
            nn.Tanhshrink, nn.Embedding,
        ),
        _ANY,
    ),
    **dict.fromkeys((nn.Linear, nn.GroupNorm, nn.PReLU), _has_least(2)),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), _has_normalized),
    **dict.fromkeys((nn.Flatten, nn.Softmax, nn.LogSoftmax, nn.GLU, nn.Unflatten), _has_other_dimension),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _is_frozen),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), _is_sequence_first),
    **dict.fromkeys(ATTENDS, _is_sequence_first),
    nn.Upsample: _has_least(3),
    nn.PixelShuffle: _has_least(4),
    **{
        getattr(nn, f"{name}{places}d"): _has_places(places)
        for places in (1, 2, 3)
        for name in (
            "AdaptiveAvgPool", "AdaptiveMaxPool", "AvgPool", "Conv", "ConstantPad", "ConvTranspose", "Dropout",
            "InstanceNorm", "MaxPool", "ReflectionPad", "ReplicationPad", "ZeroPad",
        )
    },
}  # fmt: skip
"""Layers that compute each record by itself -> whether they do on inputs of so many dimensions, records first."""


def takes_records(layer: nn.Module, dims: int) -> bool:
    """Return whether a layer computes each record by itself on inputs of so many dimensions, records first."""
    check = LAYERS.get(type(layer))
    return check is not None and dims >= 1 and check(layer, dims)


def has_hooks(module: nn.Module) -> bool:
    """Return whether something else runs beside the `forward` of a module's class."""
    own = vars(module)
    hooked = any(hooks for name, hooks in own.items() if name.endswith("_hooks"))
    return hooked or "forward" in own or type(module).__call__ is not nn.Module.__call__


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer of torch, and all in it, is as torch made it: no hooks, functions or tensors of others."""
    added = (value for part in layer.modules() for value in vars(part).values())
    added = (value for value in added if callable(value) or isinstance(value, Tensor))
    return not any(map(has_hooks, layer.modules())) and all(value in (F.relu, F.gelu) for value in added)
