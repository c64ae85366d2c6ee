"""What is learned: a model, a loss and metrics, with parameters as one flat vector."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from silodp.errors import SilodpError
from silodp.training.cost import Recent
from silodp.training.inspection import inspect_model, inspect_on, inspect_vectorized
from silodp.training.losses import Loss
from silodp.training.metrics import Metric

_EVALUATION_BATCH = 4096
_REMEMBERED = 512  # shapes of steps: 50 silos in one process have hundreds, each up to a second to trace


class Task:
    """A `torch.nn.Module`, a loss of one user's own records, and metrics.

    Parameters travel as one flat vector (d,), the trainable ones in the order of `named_parameters()`; frozen
    ones and buffers are constants of the model. Data type (float32 or float64) and device follow the model's
    parameters. `forward` must be a function of parameters, inputs and torch's random numbers: no counters, no
    Python randomness. The model is copied, so later changes to the caller's module do not matter.

    Raises `SilodpError` for a model whose layers break per-user gradients, says which and what to use
    instead; `check` adds the tests that need an example input.
    """

    def __init__(self, model: nn.Module, loss: Loss, metrics: Mapping[str, Metric] | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise SilodpError(
                f"model is a {type(model).__name__}: give a torch.nn.Module, for example torch.nn.Linear(3, 2)."
            )
        if not isinstance(loss, Loss):
            raise SilodpError(
                f"loss is a {type(loss).__name__}: use one of silodp.training's, or wrap your own in Loss.per_record."
            )
        if metrics is not None and not isinstance(metrics, Mapping):
            raise SilodpError(
                f"metrics is a {type(metrics).__name__}: give a mapping of names to functions, "
                "for example {'accuracy': silodp.training.accuracy}."
            )
        inspect_model(model)
        self.model = copy.deepcopy(model).train()
        self.loss = loss
        self.metrics = dict(metrics or {})
        trainable = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.names = tuple(name for name, _ in trainable)
        self.shapes = tuple(p.shape for _, p in trainable)
        self.sizes = tuple(p.numel() for _, p in trainable)
        self.dtype = trainable[0][1].dtype
        self.device = trainable[0][1].device
        self._constants = {
            name: p.detach() for name, p in self.model.named_parameters() if not p.requires_grad
        }
        self._constants |= dict(self.model.named_buffers())
        self.engine = Recent(_REMEMBERED)  # what `local` has measured and traced for this model

    @property
    def size(self) -> int:
        """d, the number of trainable parameters."""
        return sum(self.sizes)

    def initial(self, seed: int | None) -> Tensor:
        """Fresh parameters (d,), every layer re-initialized by its own `reset_parameters`.

        The same seed gives the same parameters on every device; `None` draws a seed from the operating
        system. Parameters that no layer re-initializes keep the values the model came with.
        """
        model = copy.deepcopy(self.model).cpu()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(np.random.SeedSequence(seed).generate_state(1)[0].item())
            for module in reversed(list(model.modules())):  # children first: a parent's own choice wins
                reset = getattr(module, "reset_parameters", None) or getattr(
                    module, "_reset_parameters", None
                )
                if callable(reset):
                    reset()
        return self.flatten(model).to(self.device)

    def flatten(self, model: nn.Module) -> Tensor:
        """The trainable parameters of a module of this kind as a new vector (d,)."""
        named = dict(model.named_parameters())
        return torch.cat([named[name].detach().reshape(-1) for name in self.names])

    def unflatten(self, params: Tensor) -> tuple[Tensor, ...]:
        """Views of a vector (d,), or of rows (r, d), with the shapes of the model's parameters."""
        parts = params.split(self.sizes, dim=-1)  # type: ignore[no-untyped-call]
        return tuple(
            part.reshape(params.shape[:-1] + shape) for part, shape in zip(parts, self.shapes, strict=True)
        )

    def forward(self, params: tuple[Tensor, ...], x: Tensor) -> Tensor:
        """The model's outputs (n, ...) at the given parameters, one tensor per name; differentiable."""
        outputs: Tensor = functional_call(
            self.model, dict(zip(self.names, params, strict=True)) | self._constants, (x,)
        )
        return outputs

    def objective(self, params: tuple[Tensor, ...], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """The loss (scalar) of one user's records x (n, ...), y (n, ...), mask (n,)."""
        return self.loss.function(self.forward(params, x), y, mask)

    def tensors(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Arrays or tensors x (n, ...), y (n, ...) on this task's device, floating ones in its data type."""
        return self._tensor(x), self._tensor(y)

    def _tensor(self, values: Any) -> Tensor:
        if isinstance(values, np.ndarray) and not values.flags.writeable:
            values = values.copy()  # torch cannot mark a tensor read-only and warns
        tensor = torch.as_tensor(values)
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def load(self, params: Tensor) -> nn.Module:
        """A copy of the model that carries these parameters (d,), in eval mode."""
        if params.shape != (self.size,):
            raise SilodpError(f"the model has {self.size} parameters, the vector {tuple(params.shape)}")
        model = copy.deepcopy(self.model)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in zip(self.names, self.unflatten(params.detach()), strict=True):
                named[name].copy_(value)
        return model.eval()

    def evaluate(self, params: Tensor, x: Any, y: Any) -> dict[str, float]:
        """Loss and metrics on records x (n, ...), y (n, ...), in eval mode; metrics undefined on them are
        left out."""
        inputs, targets = self.tensors(x, y)
        if len(inputs) == 0:
            raise SilodpError("there are no records to evaluate on")
        model = self.load(params)
        with torch.no_grad():
            # The outputs of all batches before the loss: a Cox loss is not a mean over batches.
            outputs = torch.cat([model(batch) for batch in inputs.split(_EVALUATION_BATCH)])  # type: ignore[no-untyped-call]
            everyone = torch.ones(len(outputs), dtype=self.dtype, device=self.device)
            values = {"loss": float(self.loss.function(outputs, targets, everyone))}
        values |= {name: float(metric(outputs, targets)) for name, metric in self.metrics.items()}
        return {name: value for name, value in values.items() if name == "loss" or not math.isnan(value)}

    def check(self, example_x: Any) -> None:
        """Refuse, with a `SilodpError`, a model that mixes records or fails on an example input (n ≥ 1, ...).

        Run it on public or synthetic inputs of the right shape, or on own records: nothing leaves this call.
        """
        example = self._tensor(example_x)
        inspect_on(self.model, example)
        inspect_vectorized(self.forward, tuple(self.unflatten(self.flatten(self.model))), example)
