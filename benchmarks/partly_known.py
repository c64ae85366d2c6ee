"""Weights where only some persons' ids are verified: a common share λ for these, (1 − λ)/S in each silo for the others.

    python benchmarks/partly_known.py DATA --users 200 --silos 6 20 50

DATA is creditcard, embedded (breast cancer), mnist (digits) or acs_income (400 records of each state, allocated to
persons and silos as those of creditcard are). The model is linear; digits are measured by accuracy, the others by the
area under the ROC curve.

A person may have records under one verified id and under other ids that nobody links: they weigh at most
λ + S·(1 − λ)/S = 1 together, so ε is that of uniform weights, which are the only others that need no links.
"primary_silo" and "present" are shown for comparison: they weigh a person who has k ids that nobody links up to k
times.

Every number is the best of two moves per round (`step` 1 and 3), as for all our settings, and the mean over seeds with
its standard error. ε = 1 at δ = 10⁻⁵ against whoever sees the models, T = 10, everyone in each round.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import silodp
from silodp.data.federation import Federation
from silodp.methods import UldpAvg, VerifiedIds
from silodp.training import LocalTraining, Task, cross_entropy
from silodp.training.metrics import accuracy, roc_auc
from silodp_experiments import benchmarks
from silodp_experiments.benchmarks._common import Shares, federate_free
from silodp_experiments.benchmarks.finance import ACS_INCOME

NOISE, ROUNDS, STEPS = 11.8, 10, (1.0, 3.0)
VERIFIED, SHARES = (0.5, 0.9), (0.5, 0.8, 0.95)


def load_states(users: int, silos: int) -> Federation:
    """Return 16,000 training records of the census, allocated to persons and silos; the states are not kept."""
    states = benchmarks.acs_income(max_per_state=400, normalize="public")
    x = np.concatenate([silo.x for silo in states.silos])
    y = np.concatenate([silo.y for silo in states.silos])
    shares = Shares(users, silos, "zipf", seed=0)
    held_out = (states.test.x, states.test.y)
    return federate_free(ACS_INCOME, (x, y), held_out, shares, normalize="public", features=states.features)


def verify_some(federation: Federation, part: float) -> tuple[Federation, int]:
    """Return the federation with a drawn part of its users numbered first, and how many these are."""
    verified = np.random.default_rng(7).random(federation.users) < part
    number = np.argsort(np.argsort(~verified, kind="stable"))
    silos = tuple(replace(silo, user=number[silo.user]) for silo in federation.silos)
    return replace(federation, silos=silos), int(verified.sum())


def measure_step(
    federation: Federation, seeds: int, noise: float = NOISE, rounds: int = ROUNDS, **settings: Any
) -> tuple[float, float]:
    """Return the metric of the held-out records over seeds, and its standard error.

    Args:
        federation: Its records.
        seeds: The number of runs.
        noise: The noise multiplier σ.
        rounds: T.
        settings: Of `UldpAvg`, beside noise and local training.
    """
    method, values = UldpAvg(noise, local=LocalTraining(0.1, 5), **settings), []
    metric = roc_auc if federation.classes == 2 else accuracy
    for seed in range(seeds):
        torch.manual_seed(seed)
        inputs = int(np.prod(federation.silos[0].x.shape[1:]))
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(inputs, federation.classes))
        task = Task(model, cross_entropy(), metrics={"metric": metric})
        result = silodp.train(federation, task, method, rounds=rounds, seed=seed, evaluate_every=rounds)
        values.append(result.metrics[-1]["metrics"]["metric"])
    return float(np.mean(values)), float(np.std(values, ddof=1) / seeds**0.5)


LOADERS: dict[str, Callable[[int, int], Federation]] = {
    "creditcard": lambda users, silos: benchmarks.creditcard(users=users, silos=silos),
    "embedded": lambda users, silos: silodp.data.embedded(users=users, silos=silos),
    "mnist": lambda users, silos: benchmarks.mnist(users=users, silos=silos, normalize="public"),
    "acs_income": load_states,
}


def measure(federation: Federation, seeds: int, **weights: Any) -> tuple[float, float]:
    """Return the best of `STEPS`, as `measure_step` does."""
    return max(measure_step(federation, seeds, step=step, **weights) for step in STEPS)


def main() -> None:
    """Print the table of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", choices=[*LOADERS])
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--silos", type=int, nargs="+", default=[6, 20, 50])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    weightings = ("uniform", "present", "primary_silo")
    kinds = [(part, share) for part in VERIFIED for share in SHARES]
    names = [*weightings, *(f"{part:.0%}, λ = {share}" for part, share in kinds)]
    print(f"| {given.data}, U = {given.users} | silos of a person | {' | '.join(names)} |")
    print("|---" * (len(names) + 2) + "|", flush=True)
    for silos in given.silos:
        federation = LOADERS[given.data](given.users, silos)
        found = [measure(federation, given.seeds, weighting=name) for name in weightings]
        for part, share in kinds:
            renumbered, users = verify_some(federation, part)
            verified = VerifiedIds(users, share)
            found.append(measure(renumbered, given.seeds, weighting="primary_silo", verified=verified))
        cells = [f"{mean:.3f} ± {error:.3f}" for mean, error in found]
        spread = float((federation.counts() > 0).sum(0).mean())
        print(f"| S = {silos} | {spread:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
