"""Seconds and bytes of a round in one process and between processes over TLS, for the same run.

python benchmarks/deployment.py [DATA]: four hospitals of heart_disease; DATA is the folder of the data sets. Rounds of
both ways follow each other on the same machine, so compare within a row. The first round, with the set-up, is left out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = [sys.executable, "-m", "silodp.cli.main"]
CONFIG = """
name = "speed"
rounds = {rounds}
seed = 7
aggregator = "{aggregator}"
[data]
source = "heart_disease"
users = 50
{root}
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
server_learning_rate = 10.0
weighting = "{weighting}"
[method.local]
learning_rate = 0.001
epochs = 50
batch_size = 4
"""


def measure_rounds(run: Path) -> tuple[float, int, int]:
    """Return the median seconds of a round after the first, and its bytes down and up."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][2:]
    last = rows[-1]["bytes"]
    return statistics.median(row["seconds"] for row in rows), last["down"], last["up"]


def main() -> None:
    """Print a line for each aggregator."""
    root = f'root = "{Path(sys.argv[1]).resolve()}"' if len(sys.argv) > 1 else ""
    print(
        f"{'aggregator':<12}{'in process s':>14}{'https s':>10}{'ratio':>8}{'bytes down':>14}{'bytes up':>12}"
    )
    for aggregator, weighting, rounds in (
        ("plain", "uniform", 20),
        ("masked", "uniform", 20),
        ("lattice", "records", 6),
    ):
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "speed.toml"
            config.write_text(
                CONFIG.format(aggregator=aggregator, weighting=weighting, rounds=rounds, root=root)
            )
            quiet = {"check": True, "capture_output": True}
            subprocess.run([*COMMAND, "run", str(config), "--out", f"{folder}/one"], **quiet)  # type: ignore[call-overload]
            init = [*COMMAND, "deploy", "init", str(config), "--local", "--out", f"{folder}/many"]
            subprocess.run(init, **quiet)  # type: ignore[call-overload]
            subprocess.run([*COMMAND, "deploy", "up", f"{folder}/many"], **quiet)  # type: ignore[call-overload]
            one, _, _ = measure_rounds(Path(folder) / "one")
            many, down, up = measure_rounds(Path(folder) / "many" / "server" / "run")
            print(
                f"{aggregator:<12}{one:>14.3f}{many:>10.3f}{many / one:>8.2f}{down:>14,}{up:>12,}", flush=True
            )


if __name__ == "__main__":
    main()
