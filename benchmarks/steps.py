"""Do more local steps help, soundly accounted for? `python benchmarks/steps.py` (about four CPU hours).

DDP on Fashion-MNIST (10 clients, ε=1) with one step or one epoch (11 steps) a round, and on ACS income (one client for
each state), behind docs/results.md. Settings are tuned on a tuning split: of Fashion-MNIST without any record of the
final test data, of ACS income on another draw of the same states. Finished trials are kept in runs/steps, so a stopped
call goes on. `--tables` prints what is finished.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

OUT = Path("runs/steps")
DELTA, EPSILON = 1e-5, 1.0
STEPS = {1: 128, 11: 512}  # J -> batch size, of 5,600 records
RATIOS = {"decoupled": (0.5, 1.0, 3.0), "local": (2.0,), "none": (2.0,)}
Grid = tuple[tuple[float, ...], tuple[float, ...]]  # learning rates and clips to try
ARRANGEMENTS: dict[str, dict[int, dict[str, Grid]]] = {  # J -> with noise, and without
    "fashion_mnist": {
        1: {
            "private": ((1.0, 2.0, 4.0, 8.0, 16.0), (0.3, 1.0)),
            "none": ((0.1, 0.25, 1.0, 4.0), (1.0, 10.0)),
        },
        11: {"private": ((0.5, 1.5, 4.5), (1.0,)), "none": ((0.15, 0.5, 1.5), (1.0, 10.0))},
    },
    "acs_income": {
        1: {"private": ((1.0, 4.0, 16.0, 64.0), (0.3, 1.0)), "none": ((1.0, 4.0, 16.0), (10.0,))},
        20: {"private": ((0.2, 1.0, 5.0), (1.0,)), "none": ((0.2, 1.0, 5.0), (10.0,))},
    },
}
LENGTHS = {"fashion_mnist": (20,), "acs_income": (10, 20, 40, 80, 160)}
MANY_STEPS = {
    "fashion_mnist": 20,
    "acs_income": 40,
}  # of more steps, longer runs than this are made with one seed


@dataclass(frozen=True)
class Trial:
    """One run; `trajectory` "none" is without noise. The noise is for `rounds`, of which `played` are run."""

    source: str
    steps: int
    trajectory: str
    rate: float
    clip: float
    ratio: float
    rounds: int
    played: int
    seed: int = 0
    tuning: bool = False

    @property
    def path(self) -> Path:
        """Where its result is kept."""
        return OUT / f"{hashlib.sha256(repr(self).encode()).hexdigest()[:20]}.json"


@lru_cache(maxsize=2)
def data(source: str, tuning: bool) -> tuple[Any, Any]:
    """Federation and task."""
    from silodp.config.build import build_task
    from silodp.data import benchmarks
    from silodp.data.benchmarks.finance import ACS_INCOME
    from silodp.data.benchmarks.images import FASHION_MNIST

    if source == "fashion_mnist":
        split = "tuning" if tuning else "pooled"
        federation = benchmarks.fashion_mnist(silos=10, allocation="own", split=split, normalize="public")
        return federation, build_task(federation.public(), FASHION_MNIST)
    federation = benchmarks.acs_income(max_per_state=2500, seed=1 if tuning else 0)
    return federation, build_task(federation.public(), ACS_INCOME)


def method(trial: Trial, clients: int, records: int) -> Any:
    """The method at ε=1; σ_i by the tight accountant, towards whoever sees the models."""
    from silodp.methods.ddp.calibration import calibrate_ddp
    from silodp.methods.ddp.method import Ddp

    q = STEPS[trial.steps] / 5600 if trial.source == "fashion_mnist" else 0.05
    made = Ddp(
        noise_multiplier=1.0,
        clip=trial.clip,
        local_steps=trial.steps,
        record_sampling=q,
        expected_batch_size=q * records,
        local_learning_rate=trial.rate,
        trajectory="decoupled" if trial.trajectory == "none" else trial.trajectory,  # type: ignore[arg-type]
        trajectory_ratio=trial.ratio,
    )
    if trial.trajectory == "none":
        return replace(made, noise_multiplier=0.0)
    return calibrate_ddp(made, EPSILON, trial.rounds, clients, DELTA)


def run(trial: Trial) -> dict[str, Any]:
    """The metrics at the end, ε, σ_i and seconds; kept."""
    if trial.path.exists():
        found: dict[str, Any] = json.loads(trial.path.read_text())
        return found
    import torch

    from silodp.runtime.train import train

    torch.set_num_threads(1)
    federation, task = data(trial.source, trial.tuning)
    records = round(statistics.fmean(len(silo) for silo in federation.silos))
    chosen = method(trial, len(federation.silos), records)
    began = time.perf_counter()
    result = train(
        federation,
        task,
        chosen,
        rounds=trial.played,
        seed=trial.seed,
        delta=DELTA,
        evaluate_every=trial.played,
    )
    row = result.metrics[-1]
    found = {
        "trial": asdict(trial),
        "metrics": row["metrics"],
        "epsilon": result.epsilon,
        "sigma": chosen.noise_multiplier,
        "seconds": time.perf_counter() - began,
    }
    OUT.mkdir(parents=True, exist_ok=True)
    trial.path.write_text(json.dumps(found))
    print(json.dumps(found), flush=True)
    return found


def tuning(source: str) -> list[Trial]:
    """At most 20 trials for each arrangement: learning rate × clip (× R, the trajectory's noise), on the tuning split.

    One step is cheap: it is tuned for every number of rounds, with two seeds where one seed's result says little. Of
    many steps six rounds are played, with the noise of the least number of rounds.
    """
    found = []
    for steps, (trajectory, ratios) in itertools.product(ARRANGEMENTS[source], RATIOS.items()):
        if steps == 1 and trajectory == "local":
            continue  # with one step, all trajectories are one
        rates, clips = ARRANGEMENTS[source][steps]["none" if trajectory == "none" else "private"]
        lengths = LENGTHS[source] if steps == 1 else LENGTHS[source][:1]
        seeds = range(2 if steps == 1 and source == "acs_income" else 1)
        options = itertools.product(rates, clips, ratios if steps > 1 else (2.0,), lengths, seeds)
        for rate, clip, ratio, rounds, seed in options:
            played = rounds if steps == 1 else 6
            found.append(
                Trial(source, steps, trajectory, rate, clip, ratio, rounds, played, seed=seed, tuning=True)
            )
    return found


def best(trials: list[Trial]) -> dict[tuple[int, str, int], Trial]:
    """(J, trajectory, T) -> the setting with the highest accuracy on the tuning split, in the mean over seeds."""
    found: dict[Trial, list[float]] = {}
    for trial in trials:
        if trial.path.exists():
            accuracy = json.loads(trial.path.read_text())["metrics"]["accuracy"]
            found.setdefault(replace(trial, seed=0), []).append(accuracy)
    chosen: dict[tuple[int, str, int], Trial] = {}
    for trial in sorted(found, key=lambda trial: statistics.fmean(found[trial])):
        chosen[trial.steps, trial.trajectory, trial.rounds] = trial
    return chosen


def finals(source: str, tuned: list[Trial], seeds: int) -> list[Trial]:
    """The chosen settings on the final split, seed after seed."""
    chosen = best(tuned)
    least = LENGTHS[source][0]
    return [
        replace(
            chosen.get((steps, trajectory, rounds), trial),
            tuning=False,
            rounds=rounds,
            played=rounds,
            seed=seed,
        )
        for seed in range(seeds)
        for rounds in LENGTHS[source]
        for (steps, trajectory, tuned_for), trial in chosen.items()
        if tuned_for == least and (steps == 1 or seed == 0 or rounds <= MANY_STEPS[source])
    ]


def table(source: str, trials: list[Trial]) -> str:
    """Accuracy, mean ± sd over seeds, for each arrangement and T."""
    done = [json.loads(trial.path.read_text()) for trial in trials if trial.path.exists()]
    lines = [
        f"**{source}**",
        "",
        "| steps | trajectory | T | rate, clip, R | σ of a client | accuracy | AUC | seeds | ε | s per run |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = sorted({(d["trial"]["steps"], d["trial"]["trajectory"], d["trial"]["rounds"]) for d in done})
    for steps, trajectory, rounds in keys:
        same = [
            d
            for d in done
            if (d["trial"]["steps"], d["trial"]["trajectory"], d["trial"]["rounds"])
            == (steps, trajectory, rounds)
        ]
        values = [d["metrics"]["accuracy"] for d in same]
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        areas = [d["metrics"]["roc_auc"] for d in same if "roc_auc" in d["metrics"]]
        area = f"{statistics.fmean(areas):.3f}" if areas else "–"
        one = same[0]["trial"]
        spent = same[0]["epsilon"]
        lines.append(
            f"| {steps} | {trajectory} | {rounds} | {one['rate']:g}, {one['clip']:g}, {one['ratio']:g} "
            f"| {same[0]['sigma']:.3f} | {statistics.fmean(values):.3f}{spread} | {area} | {len(values)} "
            f"| {'none' if spent is None else f'{spent:.3f}'} "
            f"| {statistics.fmean(d['seconds'] for d in same):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tables", action="store_true", help="print the tables of finished runs and stop")
    parser.add_argument("--source", default="fashion_mnist,acs_income", help="which data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    for source in arguments.source.split(","):
        trials = tuning(source)
        if not arguments.tables:
            with ProcessPoolExecutor(arguments.jobs) as pool:
                list(pool.map(run, trials))
                list(pool.map(run, finals(source, trials, arguments.seeds)))
        print(table(source, finals(source, trials, arguments.seeds)))


if __name__ == "__main__":
    main()
