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
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import silodp
from silodp.data.federation import Federation
from silodp.methods import UldpAvg, VerifiedIds
from silodp.training import LocalTraining, Task, cross_entropy
from silodp.training.metrics import roc_auc
from silodp_experiments import benchmarks

NOISE, ROUNDS, STEPS = 11.8, 10, (1.0, 3.0)
VERIFIED, SHARES = (0.5, 0.9), (0.5, 0.8, 0.95)


def verify_some(federation: Federation, part: float) -> tuple[Federation, int]:
    """Return the federation with a drawn part of its users numbered first, and how many these are."""
    verified = np.random.default_rng(7).random(federation.users) < part
    number = np.argsort(np.argsort(~verified, kind="stable"))
    silos = tuple(replace(silo, user=number[silo.user]) for silo in federation.silos)
    return replace(federation, silos=silos), int(verified.sum())


def measure_auc(federation: Federation, seeds: int, **settings: Any) -> tuple[float, float]:
    """Return the area under the ROC curve of the held-out records over seeds, and its standard error.

    Args:
        federation: Its records.
        seeds: The number of runs.
        settings: Of `UldpAvg`, beside noise and local training.
    """
    method, values = UldpAvg(NOISE, local=LocalTraining(0.1, 5), **settings), []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = torch.nn.Linear(federation.silos[0].x.shape[1], 2)
        task = Task(model, cross_entropy(), metrics={"roc_auc": roc_auc})
        result = silodp.train(federation, task, method, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS)
        values.append(result.metrics[-1]["metrics"]["roc_auc"])
    return float(np.mean(values)), float(np.std(values, ddof=1) / seeds**0.5)


def measure(federation: Federation, seeds: int, **weights: Any) -> tuple[float, float]:
    """Return the best of `STEPS`, as `measure_auc` does."""
    return max(measure_auc(federation, seeds, step=step, **weights) for step in STEPS)


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
    weightings = ("uniform", "present", "home")
    kinds = [(part, share) for part in VERIFIED for share in SHARES]
    names = [*weightings, *(f"{part:.0%}, λ = {share}" for part, share in kinds)]
    print(f"| {given.data}, U = {given.users} | silos of a person | {' | '.join(names)} |")
    print("|---" * (len(names) + 2) + "|", flush=True)
    for silos in given.silos:
        federation = getattr(benchmarks, given.data)(users=given.users, silos=silos)
        found = [measure(federation, given.seeds, weighting=name) for name in weightings]
        for part, share in kinds:
            renumbered, users = verify_some(federation, part)
            verified = VerifiedIds(users, share)
            found.append(measure(renumbered, given.seeds, weighting="home", verified=verified))
        cells = [f"{mean:.3f} ± {error:.3f}" for mean, error in found]
        spread = float((federation.counts() > 0).sum(0).mean())
        print(f"| S = {silos} | {spread:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
