"""Every training run behind packages/silodp-experiments/RESULTS.md.

A piece is one run of one method with one seed, on one thread. Each finished piece is one line of
benchmarks/results/JOB.jsonl, so a call that was stopped continues with the first piece that has no line. A piece that
takes more than ten minutes keeps its checkpoints in runs/results/, and continues after its last round. A line names
its settings by a short digest: a changed setting is a new piece. After a change of code that changes results, delete
the lines of the jobs concerned.

    python benchmarks/results.py heart tcga     only jobs whose name begins so
    python benchmarks/results.py --list         finished and missing pieces, and the time that the missing ones take
    python benchmarks/results.py --print JOB    the command of every piece
    python benchmarks/results.py --tables       write the tables of RESULTS.md from the lines
    python benchmarks/results.py --workers 8    the same lines, of eight pieces at a time (needs silodp[ray])

Figure 5 as printed takes weeks (--list says how long). Its jobs begin with "printed" and run only where they are named.
With --cluster, all machines have this checkout, its environment and its runs/ at the same paths.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")

import results_records
import results_users
from results_job import Job, Table
from results_piece import CURVE, ROOT, Line, Piece, pieces_of, try_piece

if TYPE_CHECKING:
    from silodp.runtime.executor import Executor

JOBS = [
    *results_users.QUICK,
    *results_records.QUICK,
    *results_users.LONG,
    *results_records.LONG,
    *results_records.TUNING,
]
PRINTED = results_users.PRINTED
"""Of experiments that take days: only where they are named."""
TABLES = results_users.TABLES | results_records.TABLES
LINES = Path(__file__).parent / "results"
PAGE = ROOT / "packages" / "silodp-experiments" / "RESULTS.md"
UNFINISHED = ROOT / "runs" / "results"
"""Run directories of pieces that take long; each is deleted when its line is written."""
LONG_SECONDS = 600
MOST_BYTES = 200


# --- Running ---


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
    jobs: Iterable[Job],
    folder: Path = LINES,
    at_most: float = math.inf,
    seeds: int | None = None,
    executor: Executor | None = None,
) -> int:
    """Run every piece that has no line; return how many failed.

    Args:
        jobs: in this order.
        folder: of the lines.
        at_most: leave out pieces that take more seconds.
        seeds: only the first seeds of each method; None: all.
        executor: where the pieces are computed; None: here, one after the other.
    """
    from silodp.runtime.executor import THIS_PROCESS

    failed, missing = 0, _find_missing(jobs, folder, at_most, seeds)
    first = next(missing, None)
    if first is None:
        print("nothing is missing")
        return 0
    with (executor or THIS_PROCESS).open_pool() as pool:
        for piece, out, line, problem in pool(try_piece, (), chain([first], missing)):
            name = f"{piece.job.name}: {piece.label}, seed {piece.seed}"
            if line is None:
                failed += 1
                print(f"{name}: failed: {problem}\n  $ {piece.command()}", flush=True)
                continue
            append(folder / f"{piece.job.name}.jsonl", line)
            if out is not None:
                shutil.rmtree(out)
            print(f"{name}: {line['final']} in {line['seconds']} s", flush=True)
    return failed


def _find_missing(
    jobs: Iterable[Job], folder: Path, at_most: float, seeds: int | None
) -> Iterator[tuple[Piece, Path | None]]:
    """Yield each piece that has no line, and the directory in which one that takes long is continued."""
    for job in jobs:
        for piece in pieces_of(job, seeds):
            done = finished(job, folder)  # anew each time: another process may work on the same job
            expected = estimate(piece, done)
            if (piece.label, piece.seed) in done or expected > at_most:
                continue
            print(f"{job.name}: {piece.label}, seed {piece.seed} begins", flush=True)
            yield piece, UNFINISHED / piece.id / str(piece.seed) if expected > LONG_SECONDS else None


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
    """Return a table of RESULTS.md: a row for each label, a column for each place."""
    table: Table = TABLES[name]
    jobs = [job for job in (*JOBS, *PRINTED) if job.table == name]
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", nargs="*", help="only jobs whose name begins so")
    parser.add_argument("--list", action="store_true", help="finished and missing pieces, and what they take")
    parser.add_argument("--print", action="store_true", help="print the command of every piece")
    parser.add_argument("--tables", action="store_true", help="write the tables of RESULTS.md")
    parser.add_argument(
        "--at-most", type=float, default=math.inf, help="only pieces of at most so many seconds"
    )
    parser.add_argument(
        "--seeds", type=int, help="only the first seeds, to see every method once before more"
    )
    parser.add_argument("--workers", type=int, help="pieces that are computed at a time (silodp[ray])")
    parser.add_argument(
        "--cluster", metavar="HOST:PORT", help="Ray cluster of the workers; default: this machine"
    )
    arguments = parser.parse_args()
    named = [job for job in (*JOBS, *PRINTED) if job.name.startswith(tuple(arguments.job))]
    jobs = named if arguments.job else JOBS
    if not jobs:
        sys.exit(f"no job begins with {' or '.join(arguments.job)}: --list prints their names")
    if arguments.list:
        print(list_jobs(jobs))
    elif arguments.print:
        print("\n".join(piece.command() for job in jobs for piece in pieces_of(job)))
    elif arguments.tables:
        PAGE.write_text(write_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        from silodp.errors import SilodpError
        from silodp.runtime.executor import make_executor

        try:
            if arguments.workers is None and arguments.cluster is not None:
                parser.error("--cluster needs --workers")
            executor = make_executor(arguments.workers, cluster=arguments.cluster)
            failed = run_missing(jobs, at_most=arguments.at_most, seeds=arguments.seeds, executor=executor)
        except SilodpError as error:
            sys.exit(f"error: {error} [{error.code}]")
        if failed:
            sys.exit("some pieces failed: see above")


if __name__ == "__main__":
    main()
