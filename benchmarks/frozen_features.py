"""A linear head on frozen features against a convolutional network that is trained privately, for the same ε.

The features are those of `hog_linear`, computed once for each image, a formula with no constant taken from any data
set. The private records are MNIST, of persons in five silos; both models are trained by the same method with
the same noise, and both with several steps, of which the best is judged on the held-out records.

    SILODP_DATA=DIR python benchmarks/frozen_features.py --users 100 --seeds 3
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import silodp
from silodp.training import accuracy, cross_entropy
from silodp.training.models import cnn_mnist, hog_linear
from silodp_experiments.benchmarks import mnist


def embed(body: nn.Module, federation: silodp.Federation) -> silodp.Federation:
    """Return the federation with features (n, 128) in place of images: each record is embedded once."""

    def convert(part: silodp.SiloData) -> silodp.SiloData:
        with torch.no_grad():
            batches = torch.from_numpy(part.x.copy()).split(1000)
            x = torch.cat([body(batch) for batch in batches]).numpy() if len(part.x) else part.x[:0, 0, 0]
        test = None if part.test is None else convert(part.test)
        return replace(part, x=x, test=test)

    return replace(federation, silos=tuple(map(convert, federation.silos)), test=convert(federation.test))


def main() -> None:
    """Print accuracy, ε and seconds of both models, for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=float, nargs="+", default=[0.1, 0.3, 1.0, 3.0, 10.0])
    parser.add_argument("--models", nargs="+", default=["head", "network"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--users", type=int, default=100)
    given = parser.parse_args()
    body, _ = hog_linear()
    for model in given.models:
        for step in given.steps:
            found = []
            for seed in range(given.seeds):
                images = mnist(users=given.users, normalize="public", seed=seed)
                began = time.perf_counter()
                federation = images if model == "network" else embed(body, images)
                network = cnn_mnist() if model == "network" else hog_linear()[1]
                method = silodp.methods.UldpSgd(noise_multiplier=5.0, step=step, weighting="records")
                task = silodp.Task(network, cross_entropy(), {"accuracy": accuracy})
                result = silodp.train(
                    federation, task, method, rounds=given.rounds, seed=seed, evaluate_every=given.rounds
                )
                epsilon = result.guarantees["released"].epsilon
                value = result.metrics[-1]["metrics"]["accuracy"]
                found.append((value, time.perf_counter() - began))
            values, seconds = zip(*found, strict=True)
            print(
                f"{model} d={task.size} eps={np.ceil(1000 * epsilon) / 1000:g} step={step:g} "
                f"accuracy={np.mean(values):.3f} ± {np.std(values):.3f} seconds={np.mean(seconds):.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
