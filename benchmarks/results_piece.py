"""One piece of benchmarks/results.py: a run of one method of a job with one seed, and the line that is kept of it.

In a module of its own, so that workers on other processes can import it.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from results_job import Job

ROOT = Path(__file__).parents[1]
SPENT = "cpu_seconds.json"
"""In such a directory: CPU seconds of all calls."""
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
        callbacks=() if out is None else [partial(keep, out)],
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


def try_piece(found: tuple[Piece, Path | None]) -> tuple[Piece, Path | None, Line | None, str]:
    """Return the piece and its directory with its line, or with the reason why there is none."""
    from silodp.errors import SilodpError

    piece, out = found
    try:
        return piece, out, run(piece, out), ""
    except SilodpError as error:
        return piece, out, None, str(error)
