"""A small language model on the docstrings of Python: without privacy, and at the level of persons in two ways.

    python benchmarks/text.py --seeds 2

Modules stand for persons: about 117 of them with 6,500 rows of 64 characters, in three silos. `uldp-avg` clips what a
person changes in a local training (user-level sampling of Charles et al. 2025). `uldp-group` takes up to k rows of a
person and clips the gradient of each (their example-level sampling), and pays for k by group privacy. ε is for all rows
of a person, at δ = 10⁻⁵ against whoever sees the models. Printed is the perplexity of the rows of held-out persons, the
best of the steps, and its range over the seeds. `text_adapters.py` has a larger model, adapters, and equal compute.

Source: Charles et al., "Fine-Tuning Large Language Models with User-Level Differential Privacy" (SaTML 2025).
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence

import torch

import silodp
from silodp.methods import UldpAvg
from silodp.training import LocalTraining, cross_entropy
from silodp.training.metrics import perplexity
from silodp.training.models import causal_lm
from silodp_experiments.benchmarks import docstrings
from silodp_experiments.uldp_baselines import Default, UldpGroup

ROUNDS = 20
LOCAL = LocalTraining(learning_rate=0.5, epochs=1, batch_size=16)


def measure(
    federation: silodp.Federation, methods: Sequence[silodp.methods.Method], seeds: int
) -> tuple[list[float], float, float]:
    """Return the perplexities of the best method, by seed, its ε, and the seconds of a round."""
    best: tuple[list[float], float, float] = ([float("inf")], float("nan"), 0.0)
    for method in methods:
        found, epsilon, began = [], float("nan"), time.perf_counter()
        for seed in range(seeds):
            torch.manual_seed(seed)
            network = causal_lm(97, (64,), width=32, layers=1, heads=2)
            task = silodp.Task(network, cross_entropy(), {"perplexity": perplexity})
            result = silodp.train(
                federation, task, method, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS, delta=1e-5
            )
            found.append(result.metrics[-1]["metrics"].get("perplexity", float("inf")))
            epsilon = result.epsilon or float("inf")
        seconds = (time.perf_counter() - began) / seeds / ROUNDS
        if sum(found) / len(found) < sum(best[0]) / len(best[0]):
            best = sorted(found), epsilon, seconds
    return best


def main() -> None:
    """Print the table of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    federation = docstrings()
    ways: dict[str, list[silodp.methods.Method]] = {"no privacy": [Default(local=LOCAL)]}
    for noise in (2.7, 6.0):
        ways[f"uldp-avg, σ = {noise}"] = [UldpAvg(noise, local=LOCAL, step=step) for step in (0.3, 1.0, 3.0)]
    for size, noise in ((4, 3.0), (8, 5.0)):
        ways[f"uldp-group, k = {size}, σ = {noise}"] = [
            UldpGroup(
                group_size=size,
                noise_multiplier=noise,
                clip=1.0,
                record_sampling=0.1,
                local_steps=10,
                expected_batch_size=20.0,
                local_learning_rate=rate,
                server_learning_rate=1.0,
            )
            for rate in (0.1, 0.5)
        ]
    print("| method | ε | perplexity | s a round |\n|---|---|---|---|")
    for name, methods in ways.items():
        found, epsilon, seconds = measure(federation, methods, given.seeds)
        print(f"| {name} | {epsilon:.2f} | {found[0]:.1f} to {found[-1]:.1f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
