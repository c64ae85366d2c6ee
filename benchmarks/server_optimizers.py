"""Server optimizers on the same noisy sums: plain steps, momentum, Adam, and DP-FedSOFIM's preconditioner.

    python benchmarks/server_optimizers.py heart embedded creditcard

All are post-processing, so ε is the same: 1 at δ = 10⁻⁵ against whoever sees the models (T = 10, σ = 11.8, everyone in
each round, `uldp-avg` with weights "uniform"). Every number is that of the best settings of a small grid, chosen by the
same held-out records (so slightly too good, for the larger grids more), and the mean over seeds ± its standard error.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import silodp
from partly_known import measure_step
from silodp.data.federation import Federation
from silodp.methods import Move, ServerAdam, ServerOptimizer, ServerSgd
from silodp.methods.server_optimizer import State
from silodp.settings import Momentum, Positive
from silodp_experiments import benchmarks

STEPS = (0.3, 1.0, 3.0, 10.0)
TABLES: dict[str, Callable[[], Federation]] = {
    "heart": lambda: benchmarks.heart_disease(users=50),
    "embedded": lambda: silodp.data.embedded(users=100, silos=5),
    "creditcard": lambda: benchmarks.creditcard(users=100, silos=5),
}


@dataclass(frozen=True)
class Sofim(ServerOptimizer):
    """M ← βM + (1−β)Δ and x ← x + η_g·ρ·(M Mᵀ + ρI)⁻¹Δ for the mean update Δ, by the formula of Sherman and Morrison.

    ρ(M Mᵀ + ρI)⁻¹ leaves what is orthogonal to M as it is and shortens the rest, so that a step is not longer than a
    plain one.

    Attributes:
        damping: ρ above 0, in units of the squared mean update.
        beta: The factor β in [0, 1) of the mean of updates that is kept from round to round.

    Source: DP-FedSOFIM, with one direction for the Fisher information.
    """

    damping: Positive = 0.1
    beta: Momentum = 0.9

    def initial_state(self, params: Tensor) -> dict[str, Tensor]:
        """Return no updates yet: {"mean": (d,) float64}."""
        return {"mean": torch.zeros(params.numel(), dtype=torch.float64)}

    def step(
        self, params: Tensor, total: Tensor, state: State, move: Move
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one step (see `ServerOptimizer.step`)."""
        update = move.scale * total
        mean = self.beta * state["mean"] + (1 - self.beta) * update
        step = update - mean * (mean @ update) / (self.damping + mean @ mean)
        return params + (move.learning_rate * step).to(params), {"mean": mean}


@dataclass(frozen=True)
class ScaledAdam(ServerAdam):
    """Adam with a rate: with `step` the method has none of its own."""

    rate: Positive = 0.1

    def step(
        self, params: Tensor, total: Tensor, state: State, move: Move
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one step (see `ServerOptimizer.step`)."""
        return super().step(params, total, state, replace(move, learning_rate=self.rate))


GRIDS: dict[str, list[ServerOptimizer]] = {
    "plain": [ServerSgd()],
    "momentum": [ServerSgd(0.5), ServerSgd(0.9)],
    "Adam": [
        ScaledAdam(adaptivity=adaptivity, rate=rate)
        for adaptivity in (0.1, 0.001)
        for rate in (0.03, 0.1, 0.3)
    ],
    "SOFIM": [Sofim(damping, beta) for damping in (0.001, 0.01, 0.1, 1.0) for beta in (0.5, 0.9)],
}


def main() -> None:
    """Print the table of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", choices=list(TABLES))
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print(f"| table | {' | '.join(GRIDS)} |")
    print("|---" * (len(GRIDS) + 1) + "|", flush=True)
    for name in given.tables:
        federation = TABLES[name]()
        cells = []
        for kind, optimizers in GRIDS.items():
            # Adam's moves do not depend on the length of the sum.
            steps = (1.0,) if kind == "Adam" else STEPS
            found = []
            for optimizer, step in itertools.product(optimizers, steps):
                measured = measure_step(federation, given.seeds, server_optimizer=optimizer, step=step)
                found.append((*measured, (optimizer, step)))
            mean, error, (optimizer, step) = max(found, key=lambda one: one[0])
            cells.append(f"{mean:.3f} ± {error:.3f} ({optimizer}, step {step:g})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
