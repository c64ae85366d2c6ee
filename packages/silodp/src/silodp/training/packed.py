"""Recurrent layers on packed sequences, under `torch.func.vmap`.

A packed sequence leaves the steps out that are padding, so its size follows from the lengths in a batch, which differ
from user to user. Under vmap nothing is left out: a layer runs through all steps, and the state of a sequence stays as
it is where the sequence has ended (or, backwards, has not begun). Values are those of packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF, Tensor


class _Lengths(Tensor):
    """Sizes (steps,) of the batches of a packed sequence without padding; `lengths` (n,) are those of its sequences."""

    lengths: Tensor
    count: int

    def __getitem__(self, place: Any) -> Any:
        """Return the number of sequences, as a number: layers ask for it, and a trace has no values."""
        return self.count


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return all steps (steps · n, ...) of sequences, and the sizes of their batches, which hold the lengths."""
    if not torch._C._functorch.is_functorch_wrapped_tensor(lengths):
        packed: tuple[Tensor, Tensor] = _VF._pack_padded_sequence(input, lengths, batch_first)
        return packed
    steps = input.transpose(0, 1) if batch_first else input
    sizes = torch.full((steps.shape[0],), steps.shape[1]).as_subclass(_Lengths)
    sizes.lengths, sizes.count = lengths, steps.shape[1]
    return steps.flatten(0, 1), sizes


def _unpack(
    data: Tensor, sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Return the sequences (steps, n, ...) of a packed sequence, padded after their ends, and their lengths."""
    if not isinstance(sizes, _Lengths):
        padded: tuple[Tensor, Tensor] = _VF._pad_packed_sequence(
            data, sizes, batch_first, padding_value, total_length
        )
        return padded
    steps = data.unflatten(0, (-1, sizes.count))  # type: ignore[no-untyped-call]
    here = _list_running(sizes).reshape(*steps.shape[:2], *[1] * (steps.dim() - 2))
    steps = torch.where(here, steps, padding_value)
    if total_length > len(steps):
        steps = F.pad(steps, (0, 0) * (steps.dim() - 1) + (0, total_length - len(steps)), value=padding_value)
    return steps.transpose(0, 1) if batch_first else steps, sizes.lengths


def _list_running(sizes: _Lengths) -> Tensor:
    """Return which sequences have not ended at each step, (steps, n)."""
    return torch.arange(len(sizes), device=sizes.lengths.device).unsqueeze(1) < sizes.lengths


def _make_layer(kind: str) -> Callable[..., Any]:
    """Return what computes layers of this kind on packed sequences that hold their lengths."""

    def run(data: Tensor, sizes: Any, hidden: Any, weights: Any, *options: Any) -> Any:
        if not isinstance(sizes, _Lengths):
            return getattr(_VF, kind)(data, sizes, hidden, weights, *options)
        return _run_layers(kind, data, sizes, hidden, weights, *options)

    return run


def _run_layers(
    kind: str,
    data: Tensor,
    sizes: _Lengths,
    hidden: Any,
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Return outputs (steps · n, ...) and last states of stacked layers."""
    states = hidden if isinstance(hidden, tuple | list) else (hidden,)
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    if each > 2 + 2 * has_biases:
        raise RuntimeError("vmap: packed sequences have no rule for projections (proj_size)")
    running, x = _list_running(sizes), data.unflatten(0, (-1, sizes.count))  # type: ignore[no-untyped-call]
    last = list[tuple[Tensor, ...]]()
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            own = [*weights[each * place : each * (place + 1)], None, None][:4]
            found, state = _run_layer(kind, x, running, [s[place] for s in states], own, direction == 1)
            outputs.append(found)
            last.append(state)
        x = torch.cat(outputs, -1)
        if layer < layers - 1 and train and dropout > 0:
            x = F.dropout(x, dropout)
    return x.flatten(0, 1), *(torch.stack(parts) for parts in zip(*last, strict=True))


def _run_layer(
    kind: str, x: Tensor, running: Tensor, state: list[Tensor], weights: list[Any], backward: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return outputs (steps, n, h) and the last state of one layer in one direction."""
    into, again, bias, other = weights
    given = F.linear(x, into, bias)  # of all steps at once
    outputs = list[Tensor]()
    for step in reversed(range(len(x))) if backward else range(len(x)):
        recurrent, here = F.linear(state[0], again, other), running[step].unsqueeze(1)
        moved = _step(kind, given[step], recurrent, state)
        state = [torch.where(here, new, old) for new, old in zip(moved, state, strict=True)]
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backward else outputs), tuple(state)


def _step(kind: str, given: Tensor, recurrent: Tensor, state: list[Tensor]) -> list[Tensor]:
    """Return the next state, by the formulas of torch.nn."""
    if kind == "gru":
        (reset, update, new), (a, b, c) = given.chunk(3, -1), recurrent.chunk(3, -1)
        kept = (update + b).sigmoid()
        return [(1 - kept) * (new + (reset + a).sigmoid() * c).tanh() + kept * state[0]]
    if kind == "lstm":
        enter, forget, new, out = (given + recurrent).chunk(4, -1)
        cell = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
        return [out.sigmoid() * cell.tanh(), cell]
    return [(given + recurrent).tanh() if kind == "rnn_tanh" else (given + recurrent).relu()]


REPLACED: dict[Any, Callable[..., Any]] = {
    _VF._pack_padded_sequence: _pack,
    _VF._pad_packed_sequence: _unpack,
    **{getattr(_VF, kind): _make_layer(kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}
"""Functions of torch -> what is called in their place."""
