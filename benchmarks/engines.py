"""Clipped sums of single records' gradients, beside Opacus: CPU ms for 128 records, and peak memory, in turn.

python benchmarks/engines.py [MODEL ...]

Columns of peers are left out where they are not installed. An environment with them, from the root of the project:

python -m venv peers && peers/bin/pip install -c constraints.txt -e packages/silodp "opacus==1.6.*"
peers/bin/python benchmarks/engines.py

"non-private" is one backward pass over the batch, which clips nothing. Opacus sums in single precision, silodp in
double. Memory is that of new tensors, as multiples of the non-private pass. One thread, medians of 15 turns.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from silodp.mechanisms.clipping import clip_rows, sum_rows
from silodp.training import Task, cross_entropy
from silodp.training.models import cnn_mnist
from silodp.training.sgd import RecordGradients
from silodp.training.sgd._planning import measure_cost
from timing import measure_in_turn, show_help

RECORDS, TURNS, CLIP, CLASSES = 128, 15, 1.0, 10
PEERS = ("Opacus hooks", "Opacus functorch", "Opacus ghost")


class Mlp(nn.Module):
    """Three linear layers in a module of its own."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(features, width),
            nn.Linear(width, width),
            nn.Linear(width, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (n, classes) of numbers (n, features)."""
        out: Tensor = self.last(self.second(self.first(x).relu()).relu())
        return out


class Block(nn.Module):
    """One layer of a transformer with its four projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states (n, places, width) after this layer."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1)
        x = self.first(x + self.project((weights @ value).transpose(1, 2).flatten(2)))
        out: Tensor = self.second(x + self.narrow(nn.functional.gelu(self.wide(x))))
        return out


class Bert(nn.Module):
    """Embeddings of tokens and places, and a few layers of a transformer."""

    def __init__(self, tokens: int = 1000, length: int = 32, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (n, classes) of tokens (n, places)."""
        places = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        h = self.norm(self.embedding(x) + self.places(places))
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(h.mean(1))
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: Mlp(30, 64), lambda: torch.randn(RECORDS, 30)),
    "mlp of 10⁶": (lambda: Mlp(500, 780), lambda: torch.randn(RECORDS, 500)),
    "cnn": (lambda: cnn_mnist(CLASSES), lambda: torch.randn(RECORDS, 1, 28, 28)),
    "bert": (Bert, lambda: torch.randint(1000, (RECORDS, 32))),
}


def sum_with_silodp(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """Return what computes the clipped sum (d,) as DP-SGD does."""
    task = Task(model, cross_entropy(), pretrained=True)
    params, batch = task.flatten(task.model), torch.arange(RECORDS)
    gradients = RecordGradients(task, x, y, 1, torch.Generator())

    def compute() -> Tensor:
        total = torch.zeros(task.size, dtype=torch.float64, device=x.device)
        for owners, rows in gradients.of(params, batch):
            clipped = clip_rows(owners, rows, CLIP)
            total += sum_rows(clipped, clipped.factors)
        return total

    return compute


def sum_with_opacus(model: nn.Module, x: Tensor, y: Tensor, mode: str) -> Callable[[], Tensor]:
    """Return what computes the clipped sum (d,) in one of Opacus' modes."""
    from opacus.grad_sample import (
        GradSampleModule,
        GradSampleModuleExpandedWeights,
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {
        "noise_multiplier": 0.0,
        "max_grad_norm": CLIP,
        "expected_batch_size": RECORDS,
        "loss_reduction": "sum",
    }
    if mode == "ghost":
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=CLIP, use_ghost_clipping=True, loss_reduction="sum"
        )
        private = DPOptimizerFastGradientClipping(optimizer, **options)
        loss = DPLossFastGradientClipping(
            wrapped, private, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum"
        )

        def compute() -> Tensor:
            wrapped.zero_grad(set_to_none=True)
            loss(wrapped(x), y).backward()
            return torch.cat([p.grad.flatten() for p in model.parameters()])

        return compute
    if mode == "ew":
        wrapped = GradSampleModuleExpandedWeights(model, loss_reduction="sum")
    else:
        wrapped = GradSampleModule(model, loss_reduction="sum", force_functorch=mode == "functorch")
    per_record = DPOptimizer(optimizer, **options)

    def compute_rows() -> Tensor:
        per_record.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
        per_record.clip_and_accumulate()
        return torch.cat([p.summed_grad.flatten() for p in model.parameters()])

    return compute_rows


def list_ways(build: Callable[[], nn.Module], x: Tensor, y: Tensor) -> dict[str, Callable[[], Any]]:
    """Return all ways of computing the sum, on the device of x, each on a model with the same parameters."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return build().to(x.device)

    plain = make()

    def step() -> None:
        plain.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(plain(x), y, reduction="sum").backward()

    ways: dict[str, Callable[[], Any]] = {
        "non-private": step,
        "silodp": sum_with_silodp(make(), x, y),
    }
    for name in PEERS:
        with contextlib.suppress(ImportError):
            ways[name] = sum_with_opacus(make(), x, y, name.split()[1])
    return ways


def main(names: list[str]) -> None:
    """Print a line for every model and way."""
    print(f"{'':<14}{'':<18}{'ms':>8}{'memory':>9}{'difference':>12}{'silodp / it':>13}")
    for name in names or MODELS:
        build, draw = MODELS[name]
        torch.manual_seed(1)
        x, y = draw(), torch.randint(CLASSES, (RECORDS,))
        ways = list_ways(build, x, y)
        seconds = measure_in_turn(ways, TURNS)
        peaks = {way: measure_cost(compute).peak for way, compute in ways.items()}
        wanted = ways["silodp"]()
        for way, taken in seconds.items():
            apart = float((ways[way]().double() - wanted).norm() / wanted.norm()) if way in PEERS else 0.0
            print(
                f"{name:<14}{way:<18}{1e3 * taken:>8.2f}{peaks[way] / peaks['non-private']:>9.2f}{apart:>12.1e}"
                f"{seconds['silodp'] / taken:>13.2f}",
                flush=True,
            )


if __name__ == "__main__":
    show_help(__doc__)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    main(sys.argv[1:])
