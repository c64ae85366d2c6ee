"""Whole runs of this checkout beside those of another one, for example of an older commit: CPU seconds and their ratio.

git worktree add --detach /tmp/older COMMIT
SILODP_DATA=DATA python benchmarks/against.py /tmp/older [ROW ...] [--turns N]

Every row is a run of an example, shortened, in a process of its own; both checkouts run in turn, on one thread.
"start" is from the import of silodp to the end of the first round (tables, ledger, keys, traces), "next" the median of
later rounds: the least seconds of the other checkout and of this one over all turns, and their ratio. In brackets are
the least and the largest ratio of two runs that follow each other. Both must read the same configurations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PHASES = ("start", "next")

# row: (example, overrides)
ROWS: dict[str, tuple[str, list[str]]] = {
    "heart uldp-avg": ("heart_disease", ["rounds=20"]),
    "heart uldp-avg masked": ("heart_disease", ["rounds=20", "aggregator=masked"]),
    "heart uldp-avg lattice": ("heart_disease_private_weighting", ["rounds=6"]),
    "heart uldp-group": ("heart_disease", ["rounds=20", "method={GROUP, expected_batch_size=6.0}"]),
    "heart rpdp": ("heart_disease_personal", ["rounds=15"]),
    "tcga uldp-avg": ("tcga_brca", ["rounds=8"]),
    "creditcard uldp-avg": ("creditcard", ["rounds=6", "data.users=1000", "method.local.epochs=2"]),
    "creditcard uldp-sgd": ("creditcard", ["rounds=8", "data.users=1000", "method={SGD}"]),
    "mnist uldp-avg": ("mnist", ["rounds=3", "data.users=50", "method.local.epochs=1"]),
    "mnist uldp-sgd": ("mnist", ["rounds=3", "method={SGD}"]),
    "mnist rpdp": ("mnist_personal", ["rounds=3", "method.local_steps=1"]),
    "fashion ddp": ("fashion_mnist_steps", ["rounds=4", "method.local_steps=2"]),
    "fashion ddp masked": ("fashion_mnist_steps", ["rounds=4", "method.local_steps=2", "aggregator=masked"]),
    "acs uldp-sgd": ("acs_income", ["rounds=8"]),
}
METHODS = {
    "SGD": 'name="uldp-sgd", noise_multiplier=5.0, clip=0.1, weighting="records", server_learning_rate=100.0',
    "GROUP": 'name="uldp-group", noise_multiplier=5.0, clip=0.1, group_size=8, record_sampling=0.05, local_steps=50, '
    "local_learning_rate=0.05, server_learning_rate=1.0",
}


def run_row(row: str) -> dict[str, float]:
    """Return the CPU seconds of each phase of a row, in this process."""
    begin = time.process_time()
    import inspect

    import torch

    from silodp import train
    from silodp.config.resolve import load_config

    torch.set_num_threads(1)
    example, changes = ROWS[row]
    for word, text in METHODS.items():
        changes = [change.replace(word, text) for change in changes]
    config = load_config(HERE / "examples" / f"{example}.toml", changes)
    federation, passed = config.load_federation(), list[float]()
    settings = config.settings() | {"evaluate_every": 10**6, "seed": 0}

    def note(_: object) -> None:
        passed.append(time.process_time())

    # Older versions have another name for it.
    name = "callbacks" if "callbacks" in inspect.signature(train).parameters else "on_round"
    settings[name] = [note] if name == "callbacks" else note
    train(federation, config.build_task(federation), config.method, **settings)
    rounds = [after - before for before, after in itertools.pairwise(passed)]
    # The last round also evaluates.
    return {"start": passed[1] - begin, "next": statistics.median(rounds[1:-1])}


def run_in(checkout: Path, row: str) -> dict[str, float]:
    """Return `run_row` of a checkout, from a new process."""
    sources = [*checkout.glob("packages/*/src"), *checkout.glob("src")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", row]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(run_row(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("rows", nargs="*", help=f"some of: {', '.join(ROWS)}; all by default")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    for row in arguments.rows or ROWS:
        turns = [(run_in(arguments.other, row), run_in(HERE, row)) for _ in range(arguments.turns)]
        parts = [row.ljust(24)]
        for phase in PHASES:
            old, new = (min(turn[side][phase] for turn in turns) for side in (0, 1))
            ratios = [turn[1][phase] / turn[0][phase] for turn in turns]
            parts.append(
                f"{phase} {old:7.3f} {new:7.3f} {new / old:5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        print("  ".join(parts), flush=True)


if __name__ == "__main__":
    main()
