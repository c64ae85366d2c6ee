"""Silos whose records differ: the shared model, a model of each silo alone, and the shared model with a head.

    SILODP_DATA=DIR python benchmarks/silo_heads.py heart --seeds 5
    SILODP_DATA=DIR python benchmarks/silo_heads.py states --records 100 --seeds 3
    SILODP_DATA=DIR python benchmarks/silo_heads.py states --records 2000 --seeds 3 --counts-noise 4

The shared model is logistic regression by `uldp-sgd`, 20 rounds, σ = 5, step 1, everyone in each round, weights by
primary silo: ε = 3.85 at δ = 10⁻⁵ against whoever sees the models. A model of a silo alone and a head are trained
without noise, as they do not leave the silo, both by the search of `silodp fine-tune` for the number of epochs. Printed
are the area under the ROC curve and the log loss on the held-out records, means over silos, ± the standard error over
seeds.

With `--counts-noise` the shared model is recalibrated by noisy counts of half of the held-out records, in place of own
parts, and measured on the other half; ε is then that of the run and its counts together.
"""

from __future__ import annotations

import argparse
import copy
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.metrics import log_loss
from torch import nn

import silodp
from silodp.training import binary_cross_entropy
from silodp.training.metrics import roc_auc
from silodp_analytics.decisions.decisions import find_decisions
from silodp_analytics.evaluation.report import find_evaluation
from silodp_analytics.silo_head.head import SiloHead, train_silo_head
from silodp_experiments import benchmarks

WAYS = ("shared", "alone", "shared, own outputs", "shared, all parameters own")
COUNTED_WAYS = (
    "always the frequency of the class",
    "shared",
    "shared, recalibrated",
    "shared, recalibrated with a shift for each silo",
)


def measure(model: nn.Module, held_out: silodp.SiloData) -> tuple[float, float]:
    """Return the area under the ROC curve and the log loss."""
    task = silodp.Task(model, binary_cross_entropy(), {"roc_auc": roc_auc}, pretrained=True)
    found = task.evaluate(task.flatten(task.model), held_out.x, held_out.y)
    return found["roc_auc"], found["loss"]


def train(
    federation: silodp.Federation, seed: int, evaluation: dict[str, Any] | None = None
) -> silodp.Result:
    """Train the shared model."""
    torch.manual_seed(seed)
    task = silodp.Task(nn.Linear(federation.silos[0].x.shape[1], 1), binary_cross_entropy())
    method = silodp.methods.UldpSgd(5.0, step=1.0, weighting="primary_silo")
    every = {"evaluate_every": 20} if evaluation is None else {"evaluation": evaluation}
    return silodp.train(federation, task, method, rounds=20, seed=seed, **every)


def compare(federation: silodp.Federation, seed: int) -> np.ndarray:
    """Return both metrics of all ways in each silo, (silos, ways, 2)."""
    shared = train(federation, seed).model
    nothing = copy.deepcopy(shared)
    for parameter in nothing.parameters():
        nn.init.zeros_(parameter)
    found = []
    for silo in federation.silos:
        if len(np.unique(silo.held_out.y)) < 2 or len(np.unique(silo.user)) < 5:
            continue
        row = [measure(shared, silo.held_out)]
        for model, names in ((nothing, ["*"]), (shared, []), (shared, ["*"])):
            records = silo.x, silo.y, silo.user
            tensors, epochs = train_silo_head(model, binary_cross_entropy(), records, names, seed=seed)
            row.append(measure(SiloHead("", "", epochs, tensors).apply(model), silo.held_out))
        found.append(row)
    return np.array(found)


def halve(silo: silodp.SiloData, seed: int) -> tuple[silodp.SiloData, silodp.SiloData]:
    """Return a silo with one half of its held-out records, and the other half."""
    held_out = silo.held_out
    order = np.random.default_rng(seed).permutation(len(held_out))
    first, second = (
        replace(held_out, x=held_out.x[part], y=held_out.y[part], user=held_out.user[part])
        for part in np.array_split(order, 2)
    )
    return replace(silo, test=first), second


def compare_counted(
    federation: silodp.Federation, seed: int, sigma: float, bins: int
) -> tuple[np.ndarray, float | None]:
    """Return both metrics in each silo, (silos, ways, 2), of the shared model and its recalibrations, and ε."""
    halves = [halve(silo, seed) for silo in federation.silos]
    federation = replace(federation, silos=tuple(counted for counted, _ in halves))
    evaluation = {"across": "sums", "noise_multiplier": sigma, "bins": bins, "by_silo": True}
    result = train(federation, seed, evaluation)
    decisions = find_decisions(find_evaluation(result.metrics), None)
    assert decisions is not None
    often = float(np.concatenate([silo.y for silo in federation.silos]).mean())
    found = []
    for silo, held_out in halves:
        if len(np.unique(held_out.y)) < 2:
            continue
        common = decisions.recalibration
        constant = log_loss(held_out.y, np.full(len(held_out), often), labels=[0, 1])
        row = [(0.5, constant), measure(result.model, held_out)]
        for fix in (common, decisions.silos.get(silo.name, common)):
            if isinstance(fix, str):  # the model stays as it is
                row.append(row[1])
                continue
            head = SiloHead.of_recalibration("", "", fix.scale, fix.shift, fix.limits)
            row.append(measure(head.apply(result.model), held_out))
        found.append(row)
    return np.array(found), result.epsilon


def main() -> None:
    """Print the table of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", choices=["heart", "states"])
    parser.add_argument(
        "--records", type=int, default=100, help="records of a state, a fifth of them held out"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--counts-noise", type=float, help="σ of the counts; recalibrates in place of heads")
    parser.add_argument("--bins", type=int, default=10, help="steps of the probability, with --counts-noise")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    means = []
    for seed in range(given.seeds):
        if given.data == "heart":
            federation = benchmarks.heart_disease(users=200, normalize="public", seed=seed)
        else:
            federation = benchmarks.acs_income(max_per_state=given.records, normalize="public", seed=seed)
        if given.counts_noise is None:
            found = compare(federation, seed)
        else:
            found, epsilon = compare_counted(federation, seed, given.counts_noise, given.bins)
            print(f"seed {seed}: ε = {epsilon:.3f}")
        means.append(found.mean(0))
        if given.data == "heart" and given.counts_noise is None:
            print(f"seed {seed}, log loss by hospital:\n{found[..., 1].round(3)}")
    errors = (
        np.std(means, 0, ddof=1) / len(means) ** 0.5 if given.seeds > 1 else np.full(means[0].shape, np.nan)
    )
    ways = WAYS if given.counts_noise is None else COUNTED_WAYS
    print("| model | area under the ROC curve | log loss |\n|---|---|---|")
    for way, mean, error in zip(ways, np.mean(means, 0), errors, strict=True):
        print(f"| {way} | {mean[0]:.3f} ± {error[0]:.3f} | {mean[1]:.3f} ± {error[1]:.3f} |")


if __name__ == "__main__":
    main()
