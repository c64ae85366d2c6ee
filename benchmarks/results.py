"""Every run behind docs/results.md: `python benchmarks/results.py` (about 75 minutes of one core, two jobs at a time).

Each job is one `silodp compare` command, printed before it runs; finished runs are kept, so a stopped call goes on.
`python benchmarks/results.py --print` prints the commands, `--tables` the tables of what is finished, as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from silodp.app.config import load_config

ROOT = Path(__file__).parents[1]
OUT = Path("runs/results")
AVG = "uldp-avg:weighting=uniform,uldp-avg:weighting=records"
PER_PERSON = f"uldp-sgd:weighting=uniform,{AVG}"
PAPER = f"uldp-naive,{PER_PERSON}"
FEW = "uldp-group:k=8:record_sampling=0.2:expected_batch_size=32"  # 8 records of each of 100 persons: small silos
THOUSAND = {"data__users": 1000}


def largest(example: str, settings: dict[str, object]) -> int:
    """GROUP-max: the largest number of records of one person, which is private; read here as the paper does."""
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_config(ROOT / "examples" / f"{example}.toml", overrides)
    return int(config.federation().counts().sum(axis=0).max())


def jobs() -> dict[str, list[str]]:
    """Name -> the command, as arguments."""
    found: dict[str, list[str]] = {}

    def add(name: str, example: str, methods: str, seeds: int, **settings: object) -> None:
        sets = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
        found[name] = [
            *("silodp", "compare", f"examples/{example}.toml", f"--methods={methods}"),
            *(f"--seeds={seeds}", *sets, f"--out={OUT / name}"),
        ]

    # Naive and default train on whole silos, whoever is in them: one number of users is enough.
    add("creditcard-100", "creditcard", f"{PAPER},{FEW}", 2, rounds=10, evaluate_every=1, data__users=100)
    add(
        "creditcard-1000",
        "creditcard",
        f"{PER_PERSON},uldp-group:k=8",
        2,
        rounds=10,
        evaluate_every=1,
        **THOUSAND,
    )
    for labels in ("iid", "two"):
        two = {"data__labels_per_user": 2} if labels == "two" else {}
        add(f"mnist-{labels}", "mnist", PAPER, 1, rounds=3, evaluate_every=1, **two)
    brief = {"rounds": 8, "evaluate_every": 1, "methods__default__local__epochs": 5}
    for silos in (5, 20, 50):
        add(f"weighting-{silos}", "creditcard", AVG, 2, data__silos=silos, **brief)
    rates = ",".join(f"uldp-avg:q={q}" for q in (0.1, 0.3, 0.5, 0.7, 1))
    add(
        "sampling", "creditcard", rates, 2, method__weighting="uniform", method__clip=1.0, **THOUSAND, **brief
    )
    for users in (50, 200):
        for allocation in ("zipf", "uniform"):
            where = {"data__users": users, "data__allocation": allocation}
            k = largest("heart_disease", {"data.users": users, "data.allocation": allocation})
            groups = f"uldp-group:k=2,uldp-group:k=8,uldp-group:k={k}"
            add(f"heart-{users}-{allocation}", "heart_disease", f"{PAPER},{groups}", 3, **where)
            add(f"tcga-{users}-{allocation}", "tcga_brca", PAPER, 3, **where)
    return found


def run(command: list[str]) -> None:
    """One job, on one thread, in the project's folder."""
    print("$ " + shlex.join(command), flush=True)
    program = [sys.executable, "-m", "silodp.app.cli", *command[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout if done.returncode == 0 else done.stderr, flush=True)


def tables() -> str:
    """The tables of every finished job, with its command and a few points of each curve."""
    parts = []
    for name, command in jobs().items():
        folder = ROOT / OUT / name
        if (folder / "compare.json").exists():
            result = json.loads((folder / "compare.json").read_text())
            table = (folder / "compare.md").read_text().split("\n\n")[0]
            parts.append(f"### {name}\n\n`{shlex.join(command)}`\n\n{table}\n\n{curve(result)}")
    return "\n\n".join(parts)


def curve(result: dict[str, Any]) -> str:
    """The first metric at some rounds, mean over the seeds."""
    metric = next(name for name in result["quantities"] if name != "loss")
    rounds = [r for r in (1, 2, 5, 10, 15, 20, 50) if r <= result["rounds"]]
    lines = [f"| {metric} after round | {' | '.join(map(str, rounds))} |", "|---|" + "---|" * len(rounds)]
    for method in result["methods"]:
        points = dict(zip(method["rounds"], method["curves"][metric]["mean"], strict=True))
        cells = [f"{points[r]:.3f}" if points.get(r) is not None else "–" for r in rounds]
        lines.append(f"| {method['label']} | {' | '.join(cells)} |")
    return "\n".join(lines)


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
