"""A server optimizer outside the package, in one file.

Source: Reddi et al., Adaptive Federated Optimization, 2021, Algorithm 2 (FedYogi).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from silodp.methods import Move, ServerOptimizer
from silodp.methods.server_optimizer import State


@dataclass(frozen=True)
class Yogi(ServerOptimizer):
    """m ← β₁m + (1−β₁)Δ, v ← v − (1−β₂)Δ²·sign(v − Δ²), x ← x + η_g·m/(√v + τ)."""

    beta1: float = 0.9
    beta2: float = 0.99
    adaptivity: float = 1e-3

    def initial_state(self, params: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros(params.numel(), dtype=torch.float64)
        return {"mean": zeros, "square": torch.full_like(zeros, self.adaptivity**2)}

    def step(
        self, params: Tensor, total: Tensor, state: State, move: Move
    ) -> tuple[Tensor, dict[str, Tensor]]:
        update, square = move.scale * total, state["square"]
        mean = self.beta1 * state["mean"] + (1 - self.beta1) * update
        square = square - (1 - self.beta2) * update**2 * torch.sign(square - update**2)
        step = move.learning_rate * mean / (square.sqrt() + self.adaptivity)
        return params + step.to(params), {"mean": mean, "square": square}
