"""Tables of a million rows: seconds and memory beside polars and pandas, and beside one training.

    python benchmarks/tables.py                                 # 10⁶ rows × 17 columns, in a few minutes
    python benchmarks/tables.py --rows 10000000 --train 10      # and ten rounds of uldp-sgd on them
    python benchmarks/tables.py --peers /path/of/an/environment/bin/python

Two tables with the same cells, CSV and Parquet: a key of persons, a label, ten numbers with four decimals, five columns
of five categories. Every row is a process of its own with one thread: CPU seconds after its imports (the least of the
repetitions), the same as a multiple of polars, and the peak of its memory. polars and pandas make the same arrays
(numbers, one-hot columns, numbers of persons), with no rule for what a cell may be. `--peers` is a Python that has
polars; without it polars is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NUMBERS, CATEGORIES = [f"x{place}" for place in range(10)], [f"c{place}" for place in range(5)]
VALUES = ["a", "b", "c", "d", "e"]

COMMON = f"""
import json, resource, sys, time
path, NUMBERS, CATEGORIES, VALUES = sys.argv[1], {NUMBERS!r}, {CATEGORIES!r}, {VALUES!r}
def report(began, **more):
    seconds = time.process_time() - began
    print(json.dumps({{"seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, **more}}))
"""
SCHEMA = """
import logging
logging.disable()
import numpy, pandas, pyarrow.csv, pyarrow.parquet, silodp
from silodp.data.tables import reader
schema = silodp.Schema(
    user="pid", label="label", classes=["no", "yes"], test_share=0.2,
    numeric={name: {"range": (-5, 5), "typical": (0, 1)} for name in NUMBERS},
    categorical={name: VALUES for name in CATEGORIES},
)
"""
MAKE = """
import numpy as np, pandas as pd
rows, rng = int(sys.argv[2]), np.random.default_rng(0)
columns = {"pid": np.char.add("P", rng.integers(0, rows // 5, rows).astype(str))}
columns["label"] = np.where(rng.random(rows) < 0.3, "yes", "no")
columns |= {name: rng.normal(0, 1, rows).round(4).clip(-5, 5) for name in NUMBERS}
columns |= {name: np.array(VALUES)[rng.integers(0, 5, rows)] for name in CATEGORIES}
frame = pd.DataFrame(columns)
frame.to_csv(f"{path}.csv", index=False)
frame.to_parquet(f"{path}.parquet")
"""
POLARS = """
import numpy, polars as pl
began = time.process_time()
frame = pl.read_csv(path) if path.endswith("csv") else pl.read_parquet(path)
numbers = [pl.col(name).cast(pl.Float32) for name in NUMBERS]
hot = [(pl.col(name) == value).cast(pl.Float32).alias(name + value) for name in CATEGORIES for value in VALUES]
x = frame.select(numbers + hot).to_numpy()
persons = frame["pid"].cast(pl.Categorical).to_physical().to_numpy()
report(began)
"""
PANDAS = """
import numpy as np, pandas as pd
began = time.process_time()
frame = pd.read_csv(path, dtype=str) if path.endswith("csv") else pd.read_parquet(path)
hot = [(frame[name] == value).astype("float32") for name in CATEGORIES for value in VALUES]
x = np.column_stack([*(frame[name].astype("float32") for name in NUMBERS), *hot])
persons = pd.factorize(frame["pid"])[0]
report(began)
"""
READ = (
    SCHEMA
    + """
began = time.process_time()
federation = silodp.Federation.from_tables({"a": path}, schema)
report(began)
"""
)
INSPECT = """
from pathlib import Path
import numpy, pandas, pyarrow.csv, pyarrow.parquet
from silodp.data.tables.draft import draft_config
began = time.process_time()
draft_config(Path(path), "pid", "label")
report(began)
"""
IDENTITY = """
import numpy, pandas, pyarrow.csv, pyarrow.parquet
from silodp.data.identity import IdentityProfile
from silodp.data.identity.check import check_table
layouts = tuple("@" + "#" * digits for digits in range(1, 9))
profile = IdentityProfile(study="speed", kind="code", layouts=layouts, population=10**8)
began = time.process_time()
check_table(profile, path, "pid")
report(began)
"""
INPUTS = (
    SCHEMA
    + """
began = time.process_time()
reader.read_inputs(path, schema, ["pid"])
report(began)
"""
)
TRAIN = (
    SCHEMA
    + """
import torch
torch.set_num_threads(2)
rounds = int(sys.argv[2])
began, start = time.process_time(), time.perf_counter()
federation = silodp.Federation.from_tables({"a": path}, schema)
read = time.perf_counter() - start
model = torch.nn.Linear(len(schema.features), 2)
task, times = silodp.Task(model, silodp.training.cross_entropy()), [time.perf_counter()]
class Clock(silodp.Callback):
    def after_round(self, result):
        times.append(time.perf_counter())
method = silodp.methods.UldpSgd(noise_multiplier=5.0, step=1.0)
silodp.train(federation, task, method, rounds=rounds, delta=1e-5, seed=0, callbacks=[Clock()])
silo = federation.silos[0]
x, y = torch.from_numpy(silo.x), torch.from_numpy(silo.y)
start = time.perf_counter()
model.zero_grad()
torch.nn.functional.cross_entropy(model(x), y).backward()
plain = time.perf_counter() - start
each = [after - before for before, after in zip(times[1:], times[2:])]  # the first one is the untrained model
report(began, read=read, first=each[0], round=sorted(each[1:])[len(each[1:]) // 2], plain=plain)
"""
)

OPERATIONS = {"polars": POLARS, "pandas": PANDAS, "silodp: tables": READ, "silodp: data inspect": INSPECT,
              "silodp: identity check": IDENTITY, "silodp: inputs of predict": INPUTS}  # fmt: skip


def run(python: str, code: str, *arguments: str) -> dict[str, float]:
    """Return what a process prints in its last line, {} for none."""
    threads = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    found = subprocess.run(
        [python, "-c", COMMON + code, *arguments],
        env={**os.environ, **threads}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if found.returncode:
        raise SystemExit(found.stderr[-2000:])
    lines = found.stdout.splitlines()
    return dict(json.loads(lines[-1])) if lines else {}


def main() -> None:
    """Make the tables, and print the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peers", default="", help="Python of an environment with polars")
    parser.add_argument("--train", type=int, default=0, help="rounds of uldp-sgd on the CSV file")
    given = parser.parse_args()
    operations = {name: code for name, code in OPERATIONS.items() if given.peers or name != "polars"}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "table")
        run(sys.executable, MAKE, path, str(given.rows))
        print(f"{given.rows:,} rows × {2 + len(NUMBERS) + len(CATEGORIES)} columns, one thread")
        for ending in ("csv", "parquet"):
            least: dict[str, dict[str, float]] = {}
            for _ in range(given.repeat):  # in turn: other work on the machine slows down all alike
                for name, code in operations.items():
                    found = run(given.peers if name == "polars" else sys.executable, code, f"{path}.{ending}")
                    least[name] = min(least.get(name, found), found, key=lambda one: one["seconds"])
            for name, found in least.items():
                times = found["seconds"] / least["polars"]["seconds"] if "polars" in least else float("nan")
                print(
                    f"{ending:8} {name:26} {found['seconds']:7.2f} s {times:6.2f} × polars {found['peak']:6.0f} MB",
                    flush=True,
                )
        if given.train:
            found = run(sys.executable, TRAIN, f"{path}.csv", str(given.train))
            print(
                f"{given.train} rounds: reading {found['read']:.1f} s, first round {found['first']:.1f} s, a round "
                f"{found['round']:.2f} s ({found['round'] / found['plain']:.1f} × one pass of the same gradients "
                f"without privacy, {found['plain']:.2f} s), peak {found['peak']:,.0f} MB"
            )


if __name__ == "__main__":
    main()
