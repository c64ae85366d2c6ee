"""A U-Net for images in which every pixel has a class, trained without privacy and under three ε.

    python benchmarks/segmentation.py digit_masks --users 200 --seeds 2

The private rows are `uldp-avg` with 20 rounds and everyone in each of them; ε is against whoever sees the models, at
δ = 10⁻⁵. Printed is the Dice coefficient of held-out images, the best of the steps and its range over the seeds.
"""

from __future__ import annotations

import argparse
import logging
import time

import torch

import silodp
from silodp.methods import UldpAvg
from silodp.training import LocalTraining, cross_entropy
from silodp.training.metrics import dice
from silodp.training.models import unet
from silodp_experiments import benchmarks
from silodp_experiments.uldp_baselines import Default

ROUNDS, STEPS, NOISES = 20, (0.3, 1.0, 3.0), (2.7, 6.0, 16.0)
LOCAL = LocalTraining(learning_rate=0.1, epochs=5, batch_size=8)


def measure(
    federation: silodp.Federation, method: silodp.methods.Method, seeds: int
) -> tuple[list[float], float, float]:
    """Return Dice of each seed, ε, and the seconds of a round."""
    found, epsilon, began = [], 0.0, time.perf_counter()
    for seed in range(seeds):
        torch.manual_seed(seed)
        network = unet(federation.silos[0].x.shape[1:], 3, width=4)
        task = silodp.Task(network, cross_entropy(), {"dice": dice})
        result = silodp.train(
            federation, task, method, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS, delta=1e-5
        )
        found.append(result.metrics[-1]["metrics"]["dice"])
        epsilon = result.epsilon
    return sorted(found), epsilon, (time.perf_counter() - began) / seeds / ROUNDS


def main() -> None:
    """Print the table of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", choices=["digit_masks", "digit_volumes"])
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    federation = getattr(benchmarks, given.data)(users=given.users, silos=4)
    plain = Default(local=LocalTraining(learning_rate=0.1, epochs=1, batch_size=16))
    print("| weights | σ | ε | Dice | s a round |\n|---|---|---|---|---|")
    dices, _, seconds = measure(federation, plain, given.seeds)
    print(f"| no privacy | – | – | {dices[0]:.3f} to {dices[-1]:.3f} | {seconds:.1f} |", flush=True)
    for weighting in ("uniform", "primary_silo"):
        for noise in NOISES:
            method = {step: UldpAvg(noise, local=LOCAL, step=step, weighting=weighting) for step in STEPS}
            runs = {step: measure(federation, method[step], given.seeds) for step in STEPS}
            step = max(STEPS, key=lambda step: sum(runs[step][0]))
            dices, epsilon, seconds = runs[step]
            print(
                f"| {weighting}, step {step} | {noise} | {epsilon:.2f} | {dices[0]:.3f} to {dices[-1]:.3f} | "
                f"{seconds:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
