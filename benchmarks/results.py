"""Every training run behind docs/results.md: `make results`, or `python benchmarks/results.py [JOB ...]`.

A piece is one run of one method with one seed, on one thread. Each finished piece is one line of
benchmarks/results/JOB.jsonl, so a call that was stopped continues with the first piece that has no line. A piece that
takes more than ten minutes keeps its checkpoints in runs/results/, and continues after its last round. A line names
its settings by a short digest: a changed setting is a new piece. After a change of code that changes results, delete
the lines of the jobs concerned.

    python benchmarks/results.py heart tcga     only jobs whose name begins so
    python benchmarks/results.py --list         finished and missing pieces, and the time that the missing ones take
    python benchmarks/results.py --print JOB    the command of every piece
    python benchmarks/results.py --tables       write the tables of docs/results.md from the lines
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import results_records
import results_users
from results_job import Job, Table

JOBS = [
    *results_users.QUICK,
    *results_records.QUICK,
    *results_users.LONG,
    *results_records.LONG,
    *results_records.TUNING,
]
TABLES = results_users.TABLES | results_records.TABLES
ROOT = Path(__file__).parents[1]
LINES = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "results.md"
UNFINISHED = ROOT / "runs" / "results"
"""Run directories of pieces that take long; each is deleted when its line is written."""
SPENT = "cpu_seconds.json"
"""In such a directory: CPU seconds of all calls."""
LONG_SECONDS = 600
MOST_BYTES = 200
CURVE = (0, 1, 5, 10, 20, 50)
"""Rounds at which a line has the first metric; 0 is the untrained model."""
ADVERSARIES = ("released", "server", "silo")
Line = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """One run: a method of a job, and a seed."""

    job: Job
    label: str
    seed: int

    def overrides(self) -> list[str]:
        """Return what the run sets, as the arguments of --set; data, task and method are replaced whole."""
        job = self.job
        tables = {"data": {"source": source_of(job), **job.data}, "task": job.task}
        tables["method"] = job.methods[self.label]
        if job.budgets is not None:
            tables["budgets"] = job.budgets
        plain = {"rounds": job.rounds, "delta": job.delta, "seed": self.seed, "evaluate_every": job.every}
        return [f"{key}={format_toml(value)}" for key, value in (plain | tables).items()]

    def command(self) -> str:
        """Return the command that makes the run."""
        sets = [part for override in self.overrides() for part in ("--set", override)]
        return shlex.join(["silodp", "run", f"examples/{self.job.example}.toml", *sets])

    @property
    def id(self) -> str:
        """Digest of everything in the configuration that the result depends on, besides the seed."""
        config = self.load().config
        left_out = {"name", "seed", "evaluate_every", "methods"}
        found = config.model_dump(mode="json", exclude_none=True, exclude=left_out)
        # A method in a file is named by its path, which another checkout has elsewhere.
        text = json.dumps(found, sort_keys=True).replace(f"{ROOT}/", "")
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def load(self) -> Any:
        """Load the configuration."""
        from silodp.config.resolve import load_config

        return load_config(ROOT / "examples" / f"{self.job.example}.toml", self.overrides())


def source_of(job: Job) -> str:
    """Return the data set of a job: the one that its data name, or that of the example."""
    return str(job.data.get("source") or _read_source(job.example))


@cache
def _read_source(example: str) -> str:
    from silodp.config.toml_values import read_toml

    return str(read_toml(ROOT / "examples" / f"{example}.toml")["data"]["source"])


def format_toml(value: Any) -> str:
    """Return a value as TOML in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {format_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_toml(item) for item in value) + "]"
    return json.dumps(value)


def pieces_of(job: Job, seeds: int | None = None) -> Iterator[Piece]:
    """Yield the pieces in running order: every method once before the second seed."""
    for seed in range(job.seeds if seeds is None else min(seeds, job.seeds)):
        for label in job.methods:
            yield Piece(job, label, seed)


# --- Running ---


def run(piece: Piece, out: Path | None = None) -> Line:
    """Train, and return the line of the piece; with `out`, continue the run in this directory if there is one."""
    import torch

    from silodp.runtime.train import train

    torch.set_num_threads(1)
    resolved = piece.load()
    federation = _load_federation(json.dumps(dict(piece.job.data), sort_keys=True), piece)
    task = resolved.build_task(federation)
    resume = out is not None and (out / "checkpoint" / "state.safetensors").exists()
    if out is not None and not resume:
        shutil.rmtree(out, ignore_errors=True)  # a run that ended before its first checkpoint
    earlier = json.loads((out / SPENT).read_text()) if out is not None and resume else 0.0
    started = time.process_time()

    def spent() -> float:
        return earlier + time.process_time() - started

    def keep(directory: Path, _: object) -> None:
        (directory / SPENT).write_text(json.dumps(spent()))

    result = train(
        federation,
        task,
        resolved.method,
        **resolved.settings(),
        evaluate_every=resolved.config.evaluate_every,
        out=out,
        resume=resume,
        on_round=None if out is None else partial(keep, out),
    )
    measured = {row["round"]: row["metrics"] for row in result.metrics if "metrics" in row}
    last = max(measured)
    epsilon = [result.guarantees[adversary].epsilon for adversary in ADVERSARIES]
    first = next(iter(measured[last]))
    return {
        "method": piece.label,
        "seed": piece.seed,
        "rounds": last,
        "curve": [_round(measured[r][first], 3) if r in measured else None for r in CURVE if r < last],
        "final": [_round(value, 4) for value in measured[last].values()],
        # Upwards: a bound must not become smaller by rounding.
        "epsilon": [None if e is None else math.ceil(1000 * e) / 1000 for e in epsilon],
        "seconds": round(spent(), 1),
        "id": piece.id,
    }


_loaded: dict[str, Any] = {}


def _load_federation(key: str, piece: Piece) -> Any:
    """Load the data of a piece; those of the last one are kept, since neighbors share them."""
    key += f"{source_of(piece.job)} {piece.job.budgets}"
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = piece.load().load_federation()
    return _loaded[key]


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


def append(path: Path, line: Line) -> None:
    """Write one line at the end of a file.

    Raises:
        ValueError: it is too long.
    """
    text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
    if len(text.encode()) > MOST_BYTES:
        raise ValueError(f"a line of {len(text.encode())} bytes, at most {MOST_BYTES} are allowed: {text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def read_lines(job: Job, folder: Path = LINES) -> list[Line]:
    """Return all lines of a job."""
    path = folder / f"{job.name}.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def finished(job: Job, folder: Path = LINES) -> dict[tuple[str, int], Line]:
    """Return (label, seed) -> line of the pieces that are finished with the settings of today."""
    ids = {label: Piece(job, label, 0).id for label in job.methods}
    lines = read_lines(job, folder)
    return {(line["method"], line["seed"]): line for line in lines if line["id"] == ids.get(line["method"])}


def run_missing(
    jobs: Iterable[Job], folder: Path = LINES, at_most: float = math.inf, seeds: int | None = None
) -> int:
    """Run every piece that has no line; return how many failed.

    Args:
        jobs: in this order.
        folder: of the lines.
        at_most: leave out pieces that take more seconds.
        seeds: only the first seeds of each method; None: all.
    """
    from silodp.errors import SilodpError

    failed = 0
    for job in jobs:
        for piece in pieces_of(job, seeds):
            done = finished(job, folder)  # anew each time: another process may work on the same job
            expected = estimate(piece, done)
            if (piece.label, piece.seed) in done or expected > at_most:
                continue
            print(f"{job.name}: {piece.label}, seed {piece.seed}", flush=True)
            out = UNFINISHED / piece.id / str(piece.seed) if expected > LONG_SECONDS else None
            try:
                line = run(piece, out)
            except SilodpError as error:
                failed += 1
                print(f"  failed: {error}\n  $ {piece.command()}", flush=True)
                continue
            append(folder / f"{job.name}.jsonl", line)
            if out is not None:
                shutil.rmtree(out)
            print(f"  {line['final']} in {line['seconds']} s", flush=True)
    return failed


def estimate(piece: Piece, done: Mapping[tuple[str, int], Line]) -> float:
    """Return the seconds that a piece takes: the mean of finished ones, else the job's estimate."""
    known = [line["seconds"] for (label, _), line in done.items() if label == piece.label]
    return statistics.fmean(known) if known else piece.job.estimate(piece.label)


def list_jobs(jobs: Iterable[Job], folder: Path = LINES) -> str:
    """Return a line for each job: pieces finished and missing, hours left, the longest missing piece, old lines."""
    rows, total = [], 0.0
    for job in jobs:
        done = finished(job, folder)
        left = [estimate(p, done) for p in pieces_of(job) if (p.label, p.seed) not in done]
        old = len(read_lines(job, folder)) - len(done)
        total += sum(left)
        longest = f", a piece up to {max(left) / 60:.0f} min" if left and max(left) > 600 else ""
        rows.append(
            f"{job.name:28} {len(done):3} finished {len(left):3} missing {sum(left) / 3600:6.2f} h{longest}"
            + (f", {old} lines of older settings" if old else "")
        )
    return "\n".join([*rows, f"{total / 3600:.1f} hours on one thread are missing"])


# --- Tables ---


def render(name: str, folder: Path = LINES) -> str:
    """Return a table of docs/results.md: a row for each label, a column for each place."""
    table: Table = TABLES[name]
    jobs = [job for job in JOBS if job.table == name]
    columns = list(dict.fromkeys(job.column for job in jobs))
    cells: dict[str, dict[str, list[Line]]] = {}
    wanted: dict[str, dict[str, int]] = {}
    for job in jobs:
        done = finished(job, folder)
        for label in job.methods:
            lines = [done[label, seed] for seed in range(job.seeds) if (label, seed) in done]
            cells.setdefault(label, {})[job.column] = lines
            wanted.setdefault(label, {})[job.column] = job.seeds
    head = ["method", "T", "ε released / server / silo", *columns, "seeds", "s a run"]
    rows = [head, ["---"] * len(head)]
    for label in sorted(cells, key=lambda label: label.startswith("ours")):
        by_column = cells[label]
        some = [line for lines in by_column.values() for line in lines]
        if not some:
            continue
        shown = [format_cell(by_column.get(column, []), table.after) for column in columns]
        found = [by_column.get(column, []) for column in columns]
        counts = join_equal([str(len(lines)) if lines else None for lines in found])
        spent = join_equal([format_epsilon(lines[0]) if lines else None for lines in found])
        rounds = join_equal([str(lines[0]["rounds"]) if lines else None for lines in found])
        seconds = statistics.fmean(line["seconds"] for line in some)
        rows.append(
            [label, rounds, spent, *shown, counts, f"{seconds:.2g}" if seconds < 100 else f"{seconds:.0f}"]
        )
    if len(rows) == 2 and not table.published:
        return "No run of this table has been made yet."
    for label, values in table.published.items():
        rows.append([label, "", values.get("ε", ""), *(values.get(c, "") for c in columns), "", ""])
    return "\n".join(f"| {' | '.join(row)} |".replace("  ", " ") for row in rows)


def format_cell(lines: list[Line], after: int | None) -> str:
    """Return "metric after some rounds → at the end ± sd / other metrics"; nothing where no piece is finished."""
    if not lines:
        return ""
    ends = [format_spread([line["final"][i] for line in lines]) for i in range(len(lines[0]["final"]))]
    place = CURVE.index(after) if after is not None else len(CURVE)
    early = [line["curve"][place] for line in lines if len(line["curve"]) > place]
    start = f"{format_share(statistics.fmean(early))} → " if early and None not in early else ""
    return start + " / ".join(ends)


def format_spread(values: list[float | None]) -> str:
    """Return mean ± standard deviation, or how many runs have no finite value."""
    good = [value for value in values if value is not None]
    if len(good) < len(values):
        return f"{len(values) - len(good)} not finite"
    spread = f" ± {format_share(statistics.stdev(good))}" if len(good) > 1 else ""
    return format_share(statistics.fmean(good)) + spread


def format_share(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def format_epsilon(line: Line) -> str:
    found = ["none" if e is None else f"{math.ceil(round(100 * e, 6)) / 100:.2f}" for e in line["epsilon"]]
    return found[0] if len(set(found)) == 1 else " / ".join(found)


def join_equal(values: list[str | None]) -> str:
    """Return the value of all columns, or one of each; None where a column has no run."""
    different = {value for value in values if value is not None}
    return different.pop() if len(different) == 1 else "; ".join(value or "–" for value in values)


def write_tables(page: str, folder: Path = LINES) -> str:
    """Return the page with the tables between its markers written anew."""
    pattern = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}\n{render(found[2], folder)}\n\n{found[3]}", page)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", nargs="*", help="only jobs whose name begins so")
    parser.add_argument("--list", action="store_true", help="finished and missing pieces, and what they take")
    parser.add_argument("--print", action="store_true", help="print the command of every piece")
    parser.add_argument("--tables", action="store_true", help="write the tables of docs/results.md")
    parser.add_argument(
        "--at-most", type=float, default=math.inf, help="only pieces of at most so many seconds"
    )
    parser.add_argument(
        "--seeds", type=int, help="only the first seeds, to see every method once before more"
    )
    arguments = parser.parse_args()
    jobs = [job for job in JOBS if not arguments.job or job.name.startswith(tuple(arguments.job))]
    if not jobs:
        sys.exit(f"no job begins with {' or '.join(arguments.job)}: --list prints their names")
    if arguments.list:
        print(list_jobs(jobs))
    elif arguments.print:
        print("\n".join(piece.command() for job in jobs for piece in pieces_of(job)))
    elif arguments.tables:
        PAGE.write_text(write_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    elif run_missing(jobs, at_most=arguments.at_most, seeds=arguments.seeds):
        sys.exit("some pieces failed: see above")


if __name__ == "__main__":
    main()
