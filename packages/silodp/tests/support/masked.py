"""Runs of masked sums, and what they were charged."""

from __future__ import annotations

import json

import numpy as np
from scipy import stats

from silodp.aggregators.run_spec import RunSpec
from silodp.methods import FederationSize, UldpAvg
from silodp.runtime.train import train
from silodp.training.sgd.local import LocalTraining
from support.oracles import logistic_task, small_federation
from support.specs import make_spec

TRAIN = LocalTraining(learning_rate=0.1, epochs=2, batch_size=4)
AVG = UldpAvg(5.0, 0.5, TRAIN, server_learning_rate=20.0)


def run(aggregator="masked", method=AVG, rounds=3, seed: int | None = 1, silos=3, **more):
    federation = small_federation(silos=silos)
    return train(federation, logistic_task(), method, rounds=rounds, seed=seed, aggregator=aggregator, **more)


def spec(method, silos=3, noise_sized_for=None) -> RunSpec:
    names = tuple(f"silo{s}" for s in range(silos))
    return make_spec("", names, method, FederationSize(silos, 12, noise_sized_for), 5)


def charges(directory) -> list[dict]:
    lines = (directory / "checkpoint" / "ledger.jsonl").read_text().splitlines()
    return [fields for fields in map(json.loads, lines) if "events" in fields]


def multipliers(directory) -> list[float]:
    return [charge["events"]["released"]["noise_multiplier"] for charge in charges(directory)]


def uniform(words: np.ndarray) -> bool:
    """Bytes of the words, by chi-square."""
    counts = np.bincount(np.ascontiguousarray(words).view(np.uint8), minlength=256)
    return stats.chisquare(counts).pvalue > 1e-6


def at(silo: str, kind: str, round_: int, when: str):
    return staticmethod(lambda name, m: when if (name, m.kind, m.round) == (silo, kind, round_) else None)
