"""Every run behind docs/results.md: `python benchmarks/results.py` (about five hours on two cores).

Each job is one `silodp compare` command, printed before it runs; finished runs are kept, so a stopped call goes on.
`python benchmarks/results.py --print` prints the commands, `--tables` the tables of what is finished, as Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from silodp.config.schema import load_config

ROOT = Path(__file__).parents[1]
OUT = Path("runs/results")
AVG = "uldp-avg:weighting=uniform,uldp-avg:weighting=records"
PER_PERSON = f"uldp-sgd:weighting=uniform,{AVG}"
PAPER = f"uldp-naive,{PER_PERSON}"
FEW = "uldp-group:k=8:record_sampling=0.2:expected_batch_size=32"  # 8 records of each of 100 persons: small silos
THOUSAND = {"data__users": 1000}
SCALING = {"tcga_brca": "none", "mnist_personal": "public"}
"""The papers' scaling where it is not "private"; the examples take public constants."""


def largest(example: str, settings: dict[str, object]) -> int:
    """GROUP-max: the largest number of records of one person, which is private; read here as the paper does."""
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_config(ROOT / "examples" / f"{example}.toml", overrides)
    return int(config.federation().counts().sum(axis=0).max())


def jobs() -> dict[str, list[str]]:
    """Name -> the command, as arguments."""
    found: dict[str, list[str]] = {}

    def add(name: str, example: str, methods: str, seeds: int, **settings: object) -> None:
        settings["data__normalize"] = SCALING.get(example, "private")
        sets = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
        found[name] = [
            *("silodp", "compare", f"examples/{example}.toml", f"--methods={methods}"),
            *(f"--seeds={seeds}", *sets, f"--out={OUT / name}"),
        ]

    # Naive and default train on whole silos, whoever is in them: one number of users is enough.
    shorter: dict[str, object] = {"rounds": 20, "evaluate_every": 1}
    add("creditcard-100", "creditcard", f"{PAPER},{FEW}", 3, data__users=100, **shorter)
    add("creditcard-1000", "creditcard", f"{PER_PERSON},uldp-group:k=8", 2, **THOUSAND, **shorter)
    for labels in ("iid", "two"):
        two = {"data__labels_per_user": 2} if labels == "two" else {}
        add(f"mnist-{labels}", "mnist", f"{PAPER},uldp-group:k=8", 1, rounds=6, evaluate_every=1, **two)
    brief = {"rounds": 10, "evaluate_every": 1, "methods__default__local__epochs": 5}
    for silos in (5, 20, 50):
        add(f"weighting-{silos}", "creditcard", AVG, 1 if silos == 50 else 2, data__silos=silos, **brief)
    rates = ",".join(f"uldp-avg:q={q}" for q in (0.1, 0.3, 0.5, 0.7, 1))
    all_at_once = brief | {"rounds": 15, "method__weighting": "uniform", "method__clip": 1.0}
    add("sampling", "creditcard", rates, 1, **THOUSAND, **all_at_once)
    for users in (50, 200):
        for allocation in ("zipf", "uniform"):
            where = {"data__users": users, "data__allocation": allocation}
            k = largest("heart_disease", {"data.users": users, "data.allocation": allocation})
            groups = f"uldp-group:k=2,uldp-group:k=8,uldp-group:k={k}"
            add(f"heart-{users}-{allocation}", "heart_disease", f"{PAPER},{groups}", 5, **where)
            add(f"tcga-{users}-{allocation}", "tcga_brca", PAPER, 5, **where)
    personal = "rpdp,rpdp:calibration=scf,rpdp:accountant=pld,rpdp-minimum,rpdp-dropout,default"
    for law, mean in (("three-levels", 0.77), ("pareto", 0.47), ("mixture", 0.77)):
        # The paper's Dropout keeps who asks for the mean at least; the mean of these laws, not of the budgets drawn.
        own = {"budgets__distribution": law, "methods__rpdp-dropout__threshold": mean}
        if law != "three-levels":
            own["method__largest_budget"] = 10.0
        add(f"personal-heart-{law}", "heart_disease_personal", personal, 5, **own)
    # Table 2 of rPDP-FL: batch gradient descent on the pooled table; every step is a round.
    batch = {"data__silos": 1, "rounds": 100, "method__local_steps": 1, "method__noise_multiplier": 10.0}
    levels = {"budgets__levels": "[0.9,1.8,4.2]", "method__largest_budget": 4.2}
    step = {
        "method__optimizer": "sgd",
        "method__local_learning_rate": 0.2,
        "method__expected_batch_size": 100.0,
    }
    add(
        "personal-filter",
        "heart_disease_personal",
        "rpdp,rpdp:calibration=scf,rpdp-filter",
        5,
        **batch,
        **levels,
        **step,
    )
    digits: dict[str, object] = {"evaluate_every": 5, "methods__rpdp-dropout__threshold": 0.77}
    add(
        "personal-mnist",
        "mnist_personal",
        "rpdp:accountant=pld,rpdp-minimum,rpdp-dropout,default",
        3,
        **digits,
    )
    return found


def run(command: list[str]) -> None:
    """One job, on one thread, in the project's folder."""
    print("$ " + shlex.join(command), flush=True)
    program = [sys.executable, "-m", "silodp.cli.main", *command[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout if done.returncode == 0 else done.stderr, flush=True)


def tables() -> str:
    """Every finished job: its command, and per method a few points of the curve, the end, and ε."""
    parts = []
    for name, command in jobs().items():
        path = ROOT / OUT / name / "compare.json"
        if path.exists():
            result = json.loads(path.read_text())
            parts.append(f"**{name}** `{shlex.join(command)}`\n\n{table(result)}")
    return "\n\n".join(parts)


def table(result: dict[str, Any]) -> str:
    """Means over the seeds of the first metric at some rounds, mean ± sd of all at the end, ε, seconds per round."""
    metrics = [name for name in result["quantities"] if name != "loss"]
    rounds = [r for r in (1, 2, 5, 10, 20) if r < result["rounds"]]
    at = [f"{metrics[0]} after {r}" if r == rounds[0] else str(r) for r in rounds]
    end = [f"{name} after {result['rounds']}" for name in metrics]
    head = ["method", *at, *end, "ε released / server / silo", "s per round"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for method in result["methods"]:
        curve = dict(zip(method["rounds"], method["curves"][metrics[0]]["mean"], strict=True))
        points = [f"{curve[r]:.3f}" if curve.get(r) is not None else "–" for r in rounds]
        ends = [spread(method["final"][name]) for name in metrics]
        spent = " / ".join(
            "none" if e is None else f"{math.ceil(100 * e) / 100:.2f}" for e in method["epsilon"].values()
        )
        seconds = f"{method['seconds'] / result['rounds']:.2f}"
        label = method["label"].replace("weighting=", "")
        lines.append(f"| {' | '.join([label, *points, *ends, spent, seconds])} |")
    start = [f"{result['untrained'][name]:.3f}" for name in metrics]
    lines.append(f"| {' | '.join(['untrained', *[''] * len(rounds), *start, '', ''])} |")
    return "\n".join(lines)


def spread(end: dict[str, Any]) -> str:
    """Mean ± standard deviation."""
    return f"{end['mean']:.3f}" + (f" ± {end['sd']:.3f}" if end["sd"] is not None else "")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--print", action="store_true", help="print the commands and stop")
    parser.add_argument("--tables", action="store_true", help="print the tables of finished jobs and stop")
    parser.add_argument("--only", default="", help="run only jobs whose name begins so")
    arguments = parser.parse_args()
    if arguments.print:
        print("\n".join(shlex.join(command) for command in jobs().values()))
    elif arguments.tables:
        print(tables())
    else:
        chosen = [command for name, command in jobs().items() if name.startswith(arguments.only)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, chosen))


if __name__ == "__main__":
    main()
