"""Distributed noise: a small method, and the counterexample to Theorem 4.6 (docs/decoupled.md)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from silodp.accounting.accountant import compute_delta
from silodp.accounting.views import View
from silodp.data.federation import Federation, SiloData
from silodp.methods.ddp import Ddp
from silodp.training.losses import Loss
from silodp.training.task import Task

DDP = Ddp(
    noise_multiplier=0.8,
    clip=0.5,
    local_steps=4,
    record_sampling=0.4,
    expected_batch_size=8.0,
    local_learning_rate=0.5,
)
TRAJECTORIES = ("decoupled", "local", "paper")
SUM = View("released", 10)
TABLE = [  # DDP, Table 1: steps, parties, σ_total; then ε by RDP and PLD of unrounded σ, hence ±.02
    (1, 1, 0.690, 4.25, 3.67),
    (1, 2, 0.976, 2.23, 1.78),
    (1, 5, 1.544, 0.904, 0.634),
    (1, 10, 2.183, 0.440, 0.311),
    (10, 1, 0.902, 4.25, 3.53),
    (10, 2, 1.276, 2.12, 1.75),
    (10, 5, 2.017, 0.924, 0.788),
    (10, 10, 2.852, 0.545, 0.476),
    (50, 1, 1.179, 4.31, 3.79),
    (50, 2, 1.668, 2.41, 2.15),
    (50, 5, 2.637, 1.269, 1.143),
    (50, 10, 3.730, 0.824, 0.744),
]


class Independent(nn.Module):
    """`copies` independent one-parameter problems side by side."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.state = nn.Parameter(torch.zeros(copies, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.state + 0.0 * x


OTHERS = 100
COPIES = 4000


def counterexample() -> Task:
    """Target records (y = 1) pull the state up by C in each step; the others (y = 0) say in step 2 where it is.

    Every other record's loss is |state − a|. From state 0 all of them, and nobody knows less, push up by C; in step 2
    the sign of their gradients tells whether the state is beyond a = (OTHERS + ½)C, halfway between the two worlds.
    """
    threshold = OTHERS + 0.5

    def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        pulls, tells = -outputs, (outputs - threshold).abs()
        return torch.where(targets.unsqueeze(1) == 1, pulls, tells).sum(dim=1)

    return Task(Independent(COPIES), Loss.per_record("counterexample", losses))


def world(target: bool) -> Federation:
    """Ten clients, of which nine have no records."""

    def silo(name: str, y: list[int]) -> SiloData:
        count = len(y)
        labels = np.array(y, np.int64)
        return SiloData(name, np.zeros((count, 1), np.float32), labels, np.zeros(count, np.int64))

    own = silo("silo0", [0] * OTHERS + [1] * target)
    return Federation((own, *(silo(f"silo{s}", []) for s in range(1, 10))), 1, None)


ONE = Ddp(
    noise_multiplier=1.0,
    clip=1.0,
    local_steps=2,
    record_sampling=1.0,
    expected_batch_size=1.0,
    local_learning_rate=1.0,
)
"""One copy: σ_i = 1, C = 1. All copies at once: a record has COPIES coordinates of size 1, so its norm is √COPIES."""


def violated(method: Ddp, low: float, high: float) -> bool:
    """Whether TPR > e^ε·FPR + δ for some (ε, δ) that the method's own event promises."""
    event = method.dp_event(SUM)
    grid = np.linspace(0, 3, 31)
    return any(low > math.exp(e) * high + compute_delta([(event, 1)], e) for e in grid)
