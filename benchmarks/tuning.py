"""What settings chosen by `silodp plan --tune` lose against the best settings found on the real records.

`python benchmarks/tuning.py` prints a line per cell (data set, ε): the metric with the best of 36 settings (T 2, 10,
40; six steps; weights by records and primary silo; judged on the held-out records, which is slightly optimistic), with
the settings that the tuner chose without a row, and with T = 10, step 1, weights by records. Means over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from itertools import product

import numpy as np
import torch

from silodp.accounting.calibration import calibrate_noise_multiplier
from silodp.config.resolve import load_config
from silodp.data.allocation import zipf
from silodp.data.federation import Federation
from silodp.data.silo_data import SiloData
from silodp.mechanisms.noise import Randomness
from silodp.methods import UldpSgd
from silodp.planning.synthetic import SyntheticSettings
from silodp.planning.tuning import (
    DEFAULT_ROUNDS,
    DEFAULT_STEP,
    STEPS,
    Candidate,
    measure,
    train_without_parties,
    tune,
)
from silodp.training.task import Task

CELLS = {
    "heart 50": ("heart_disease", {"data.users": 50}, 10.0, (1.0, 3.0)),
    "heart 200": ("heart_disease", {"data.users": 200}, 2.5, (1.0, 3.0)),
    "acs 200": ("acs_income", {"data.max_per_state": 100}, 20.0, (1.0, 3.0)),
    "creditcard 100": ("creditcard", {"data.users": 100, "task.model": "logistic"}, 250.0, (1.0, 3.85)),
    "creditcard 1000": ("creditcard", {"data.users": 1000, "task.model": "logistic"}, 25.0, (1.0, 3.85)),
}
"""Name -> example, settings, the public guess of records per person, and ε."""

WEIGHTINGS = ("records", "primary_silo")
ROUNDS = (2, 10, 40)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="cells whose name begins so")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    losses: dict[str, list[float]] = {"tuned": [], "default": []}
    print(
        "| cell | ε | metric | best of 36 | tuned | T = 10, step 1 | chosen |\n|---|---|---|---|---|---|---|"
    )
    for name, (example, settings, records, targets) in CELLS.items():
        if not name.startswith(arguments.only):
            continue
        overrides = [f"{key}={value}" for key, value in settings.items()]
        overrides += ["data.normalize=public", "method={name='uldp-sgd', noise_multiplier=5.0, step=1.0}"]
        config = load_config(f"examples/{example}.toml", overrides)
        spec, _ = config.build_public_spec()
        federation = config.load_federation()
        if (
            example == "acs_income"
        ):  # there every record is a person: give the records to 200 persons in 10 silos
            federation = allocate(federation, 200, 10)
            spec = replace(spec, data=federation.public())
        task = config.build_task(spec.data)
        for target in targets:
            found = tune(config, spec, target, guess=SyntheticSettings(records))
            chosen = Candidate(
                found["chosen"]["rounds"],
                found["chosen"]["step"],
                found["chosen"]["weighting"],
                found["chosen"]["local_epochs"] or 0,
            )
            grid = [Candidate(t, s, w) for t, s, w in product(ROUNDS, STEPS, WEIGHTINGS)]
            plain = Candidate(DEFAULT_ROUNDS, DEFAULT_STEP, "records")
            sigmas = {t: find_sigma(t, target, spec.noise_delta) for t in {*ROUNDS, chosen.rounds}}
            values = {
                c: average(c, sigmas[c.rounds], task, federation, found["metric"], arguments.seeds)
                for c in {*grid, chosen, plain}
            }
            best = max(values[c] for c in grid)
            losses["tuned"].append(best - values[chosen])
            losses["default"].append(best - values[plain])
            how = f"T={chosen.rounds} step={chosen.step:g} {chosen.weighting} epochs={chosen.epochs}"
            cells = [
                name,
                f"{target:g}",
                found["metric"],
                *(f"{v:.3f}" for v in (best, values[chosen], values[plain])),
            ]
            print(f"| {' | '.join([*cells, how])} |", flush=True)
    for which, lost in losses.items():
        print(f"loss of {which}: mean {statistics.fmean(lost):.3f}, largest {max(lost):.3f}")


def allocate(federation: Federation, users: int, silos: int) -> Federation:
    """Return the records of a federation given to users and silos by the law of ULDP-FL."""
    x, y = (np.concatenate([getattr(silo, name) for silo in federation.silos]) for name in ("x", "y"))
    user, place = zipf(len(x), users, silos, np.random.default_rng(0))
    parts = [SiloData(f"silo-{s + 1}", x[place == s], y[place == s], user[place == s]) for s in range(silos)]
    return replace(federation, silos=tuple(parts), users=users, user_keys=None)


def find_sigma(rounds: int, target: float, delta: float) -> float:
    """Return σ of `uldp-sgd` for the target, against whoever sees the models."""
    from silodp.accounting.views import View

    view = View("released", 1)
    return calibrate_noise_multiplier(lambda sigma: [(UldpSgd(sigma).dp_event(view), rounds)], target, delta)


def average(
    candidate: Candidate, sigma: float, task: Task, federation: Federation, metric: str, seeds: int
) -> float:
    """Return the mean of the metric over the seeds, on the real records."""
    found = []
    for seed in range(seeds):
        params = train_without_parties(
            candidate.method(sigma), task, federation, candidate.rounds, Randomness.from_seed(seed)
        )
        found.append(measure(task, params, federation, metric))
    return statistics.fmean(found)


if __name__ == "__main__":
    main()
