"""Weights where only some persons' ids are verified: a common share λ for these, (1 − λ)/S in each silo for the others.

    python benchmarks/partly_known.py creditcard --users 200 --silos 6 20 50

A person may have records under one verified id and under other ids that nobody links: they weigh at most
λ + S·(1 − λ)/S = 1 together, so ε is that of uniform weights, which are the only others that need no links. "home" and
"present" are shown for comparison: they weigh a person who has k ids that nobody links up to k times.

Every number is the best of two moves per round (`step` 1 and 3), as for all our settings, and the mean over seeds with
its standard error. ε = 1 at δ = 10⁻⁵ against whoever sees the models, T = 10, everyone in each round.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import silodp
from silodp.data.federation import Federation
from silodp.methods import UldpAvg, roles
from silodp.training import LocalTraining, Task, cross_entropy
from silodp.training.metrics import roc_auc
from silodp_experiments import benchmarks

NOISE, ROUNDS, STEPS = 11.8, 10, (1.0, 3.0)
VERIFIED, SHARES = (0.5, 0.9), (0.5, 0.8, 0.95)


@dataclass(frozen=True, repr=False)
class SharedWeights(UldpAvg):
    """`uldp-avg` with w = λ at home for persons whose ids are verified, and (1 − λ)/S in every silo for the others.

    Attributes:
        share: λ.
        verified: The share of persons whose ids are verified; they are drawn.
    """

    share: float = 0.8
    verified: float = 0.9

    name: str = field(default="shared-weights", init=False)

    def user_weights(self, counts: np.ndarray | None, population: roles.FederationSize) -> np.ndarray:
        """Return w[s,u], (S, U) float64."""
        assert counts is not None
        is_verified = np.random.default_rng(7).random(population.users) < self.verified
        alone = np.where(counts > 0, (1 - self.share) / population.silos, 0.0)
        return roles.validate_weights(np.where(is_verified, self.share * roles.weigh_at_home(counts), alone))

    def check_weights(self, weights: np.ndarray, counts: np.ndarray) -> str | None:
        """Check what every silo checks; those of "home" are other weights."""
        return roles.UserWeights.check_weights(self, weights, counts)


def measure(federation: Federation, seeds: int, **weights: Any) -> tuple[float, float]:
    """Return the area under the ROC curve of the held-out records, the best of `STEPS`, and its standard error."""
    found = []
    for step in STEPS:
        values = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = torch.nn.Linear(federation.silos[0].x.shape[1], 2)
            task = Task(model, cross_entropy(), metrics={"roc_auc": roc_auc})
            make = SharedWeights if "share" in weights else UldpAvg
            method = make(NOISE, step=step, local=LocalTraining(0.1, 5), **weights)
            result = silodp.train(federation, task, method, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS)
            values.append(result.metrics[-1]["metrics"]["roc_auc"])
        found.append((float(np.mean(values)), float(np.std(values, ddof=1) / seeds**0.5)))
    return max(found)


def main() -> None:
    """Print the table of docs/results.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", choices=["creditcard", "embedded"])
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--silos", type=int, nargs="+", default=[6, 20, 50])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    kinds: dict[str, dict[str, Any]] = {name: {"weighting": name} for name in ("uniform", "present", "home")}
    for verified in VERIFIED:
        for share in SHARES:
            settings = {"weighting": "home", "share": share, "verified": verified}
            kinds[f"{verified:.0%}, λ = {share}"] = settings
    print(f"| {given.data}, U = {given.users} | silos of a person | {' | '.join(kinds)} |")
    print("|---" * (len(kinds) + 2) + "|", flush=True)
    for silos in given.silos:
        federation = getattr(benchmarks, given.data)(users=given.users, silos=silos)
        cells = [
            f"{m:.3f} ± {e:.3f}" for m, e in (measure(federation, given.seeds, **k) for k in kinds.values())
        ]
        spread = float((federation.counts() > 0).sum(0).mean())
        print(f"| S = {silos} | {spread:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
