"""What a run keeps on disk: checkpoint, ledger, the parties' stores; metrics, guarantees, the model."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from silodp.accounting.guarantee import FORMAT, Adversary, Guarantee
from silodp.accounting.ledger import Ledger
from silodp.aggregators.registry import AggregatorRecord
from silodp.aggregators.run_spec import RunSpec
from silodp.errors import SilodpError, counted, name_file
from silodp.runtime.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from silodp.runtime.lock import hold_lock
from silodp.runtime.silo import make_ledger
from silodp.training.task import Task, serialize
from silodp.wire.store import (
    PRIVATE_FILE,
    DirectoryStore,
    MemoryStore,
    Store,
    make_private_folder,
    write_durably,
)

RUN_SPEC = "run_spec.json"
"""The run's specification, in its directory; public."""
LOCK = "lock"
STARTS = "starts.json"
"""In checkpoint/: held by the process that runs, and a random id for every time that one began to."""

MetricsRow = dict[str, Any]
"""What is said of one round; of the untrained model as round 0."""


@dataclass(frozen=True)
class RunDirectory:
    """Where one run keeps what must outlive its process; without a path nothing does."""

    path: Path | None

    def state(self, spec: RunSpec, task: Task, resume: bool) -> Checkpoint:
        """The state to go on from, or that of a new run, which is not written yet.

        Raises:
            SilodpError: there is nothing to resume, or more than T rounds were done; or something that a new run would
                overwrite.
        """
        if resume:
            if self.path is None:
                raise SilodpError(
                    "resume needs the output directory of the run to go on with: give out.",
                    code="argument.missing",
                    field="out",
                )
            state = load_checkpoint(self._checkpoint(self.path), spec.digest)
            if spec.rounds < state.round:
                raise SilodpError(
                    f"rounds = {spec.rounds}, and the run in {self.path} has done {counted(state.round, 'round')}, "
                    f"which cannot be taken back: resume with rounds ≥ {state.round}, or begin another run.",
                    code="run.rounds_done",
                    field="rounds",
                )
            return state
        self._check_empty()
        params = task.initial(spec.seed)
        return Checkpoint.initial(secrets.token_hex(16), spec.digest, params, spec.method, spec.population)

    def _check_empty(self) -> None:
        if self.path is None:
            return
        lock = self.path / "checkpoint" / LOCK  # which a run that was killed at once leaves behind
        files = (path for path in self.path.rglob("*") if path.is_file() and path.suffix != ".partial")
        if any(path != lock for path in files):
            raise SilodpError(
                f"output directory {self.path} is not empty: choose another, or resume the run in it.",
                code="run.exists",
                field="out",
            )

    @contextmanager
    def opened(
        self, spec: RunSpec, task: Task, state: Checkpoint, resume: bool
    ) -> Iterator[tuple[Checkpoint, Ledger]]:
        """The run's state and ledger, while no other process can use the directory.

        `state` was read, or the directory found empty, before the lock was held: it is read, or looked at, again.

        Raises:
            SilodpError: as `state` and `ledger`, or another process is in the directory.
        """
        with ExitStack() as held:
            if self.path is not None:
                make_private_folder(self.path / "checkpoint")
                held.enter_context(hold_lock(self.path / "checkpoint" / LOCK))
            if resume:
                state = self.state(spec, task, resume)
            else:
                self._check_empty()
                self.keep(state)
            ledger = held.enter_context(self.ledger(spec, state))
            self._write_spec(spec)
            self._record_start(state)
            yield state, ledger

    def _write_spec(self, spec: RunSpec) -> None:
        """Write the run's specification; a resumed run writes the same one, but for T, budget and limits."""
        if self.path is not None:
            write_durably(self.path / RUN_SPEC, spec.to_json().encode())

    def _record_start(self, state: Checkpoint) -> None:
        """Note a fresh random id, so that copies of this directory that are continued apart can be told apart."""
        if self.path is not None:
            started = {"id": secrets.token_hex(16), "round": state.round}
            text = json.dumps([*self._starts(self.path), started], indent=1) + "\n"
            write_durably(self.path / "checkpoint" / STARTS, text.encode(), PRIVATE_FILE)

    @staticmethod
    def _starts(path: Path) -> list[dict[str, Any]]:
        """Every start of the run that was noted; earlier versions noted none."""
        file = path / "checkpoint" / STARTS
        try:
            return [
                {"id": str(start["id"]), "round": int(start["round"])}
                for start in json.loads(file.read_bytes())
            ]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, KeyError, RecursionError):
            raise SilodpError(
                f"{file} is damaged: restore it from a copy.", code="checkpoint.damaged"
            ) from None

    def keep(self, state: Checkpoint) -> None:
        """The state after a round, on disk when this returns."""
        if self.path is not None:
            save_checkpoint(self._checkpoint(self.path), state)

    @contextmanager
    def ledger(self, spec: RunSpec, state: Checkpoint) -> Iterator[Ledger]:
        """The book of the run, open.

        Raises:
            SilodpError: it is not of the moment that the state is of.
        """
        path = None
        if self.path is not None:
            path = self.path / "checkpoint" / "ledger.jsonl"
            if state.round and not path.exists():
                raise SilodpError(
                    f"ledger {path} is missing: without it nothing is known of the ε spent; restore it.",
                    code="ledger.missing",
                )
        header = spec.ledger_header
        with Ledger(
            path, spec.noise_delta, spec.accountant, spec.budget, run=state.run, subject=header
        ) as ledger:
            if not state.round <= ledger.rounds <= state.round + 1:
                raise SilodpError(
                    f"ledger {path} has {counted(ledger.rounds, 'round')} and the checkpoint {state.round}: they are "
                    "not of one moment, and what was released is not known: begin a new run, which adds its own ε.",
                    code="checkpoint.mismatch",
                )
            yield ledger

    def silo_ledger(self, spec: RunSpec, place: int) -> Ledger:
        """The silo's own ledger, open; `place`: of the silo in the public order."""
        path = None
        if self.path is not None:
            folder = self.path / "checkpoint" / "silo_ledgers"
            make_private_folder(folder)
            path = folder / f"{place:03}.jsonl"
        return make_ledger(spec, path)

    def store(self, *place: str) -> Store:
        """Of one party."""
        return (
            MemoryStore() if self.path is None else DirectoryStore(self.path.joinpath("checkpoint", *place))
        )

    def metrics(
        self, resumed_round: int | None, spent: Callable[[], Sequence[Mapping[Adversary, float | None]]]
    ) -> Metrics:
        """The rows of the rounds before the one to go on with (see `Metrics`)."""
        return Metrics(None if self.path is None else self.path / "metrics.jsonl", resumed_round, spent)

    def write(
        self,
        spec: RunSpec,
        model: nn.Module,
        guarantees: Mapping[Adversary, Guarantee],
        stopped: str,
    ) -> None:
        """Write what a finished run leaves: its guarantees and its model."""
        if self.path is None:
            return
        method, aggregator, released = spec.method, spec.aggregator, guarantees["released"]
        guarantee = {
            "format": FORMAT,
            "simulation": True,  # `train` plays every party in this process
            "method": method.name,
            "aggregator": AggregatorRecord.from_aggregator(aggregator).to_dict(),
            "settings": repr(method),
            "rounds": released.rounds,
            "stopped": stopped,
            "private": released.private,
            "run": spec.run,
            "starts": self._starts(self.path),
            "guarantees": [guarantee.to_dict() for guarantee in guarantees.values()],
        }
        text = json.dumps(guarantee, indent=2, ensure_ascii=False) + "\n"
        write_durably(self.path / "guarantee.json", text.encode())
        write_durably(self.path / "model.safetensors", serialize(model, {"method": method.name}))

    @staticmethod
    def _checkpoint(path: Path) -> Path:
        return path / "checkpoint" / "state.safetensors"


class Metrics:
    """metrics.jsonl: one line per round, each on disk before the checkpoint of its round is.

    So when a process dies, the file can only be ahead of the checkpoint: by a line that was cut off, or by one of a
    round that is repeated. Both are dropped; anything else that is wrong is damage, and refused.

    Args:
        path: the file; None keeps the rows in memory.
        resumed_round: the round of the checkpoint to go on from; None for a new run.
        spent: ε against each adversary after 0, 1, … rounds, by the ledger: all that is known where the file is lost.

    Raises:
        SilodpError: the file is damaged, or ends before the checkpoint.
    """

    def __init__(
        self,
        path: Path | None,
        resumed_round: int | None,
        spent: Callable[[], Sequence[Mapping[Adversary, float | None]]],
    ) -> None:
        self._path = path
        self.rows: list[MetricsRow] = []
        if self._path is None or resumed_round is None:
            return
        if self._path.exists():
            self.rows = read_metrics(self._path, may_be_cut_off=True)[: resumed_round + 1]
            if len(self.rows) <= resumed_round and (self.rows or resumed_round):
                raise _damaged(
                    self._path,
                    f"has no row of round {len(self.rows)}, and the checkpoint is of {resumed_round}",
                )
        elif resumed_round:
            known = spent()[: resumed_round + 1]
            self.rows = [{"round": i, "epsilon": dict(epsilon)} for i, epsilon in enumerate(known)]
        write_durably(self._path, "".join(json.dumps(row) + "\n" for row in self.rows).encode())

    def add(self, row: MetricsRow, on_round: Callable[[MetricsRow], None] | None) -> None:
        """Append a row, on disk when this returns, and show it to whoever wants to see it."""
        self.rows.append(row)
        if self._path is not None:
            if not self._path.exists():
                write_durably(self._path, b"")  # with its entry in the directory
            with name_file(self._path), self._path.open("ab") as file:
                file.write((json.dumps(row) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        if on_round is not None:
            on_round(row)


def read_metrics(path: Path, *, may_be_cut_off: bool = False) -> list[MetricsRow]:
    """Read metrics.jsonl: the rows of rounds 0, 1, 2, …, each once and in this order.

    Args:
        path: the file.
        may_be_cut_off: drop a last line that a crash cut off: without its end, or, after a power cut, with blocks of
            zeros.

    Raises:
        SilodpError: a line is not the row of its round.
    """
    *lines, last = path.read_bytes().split(b"\n")
    rows: list[MetricsRow] = []
    for number, line in enumerate([*lines, last] if last else lines, start=1):
        row = _row_of(line, len(rows))
        if row is None:
            is_last = number >= len(lines) + bool(last)
            if may_be_cut_off and is_last and (last or b"\0" in line):
                break
            raise _damaged(path, f"line {number} is not the record of round {len(rows)}")
        rows.append(row)
    return rows


def _row_of(line: bytes, round_: int) -> MetricsRow | None:
    """The row of a round, or None if the line is anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # of UTF-8, of JSON; nested a thousand deep
        return None
    if not isinstance(row, dict) or type(row.get("round")) is not int or row["round"] != round_:
        return None
    sound = (
        _is_number(row.get("loss"))
        and _is_number(row.get("seconds"))
        and all(_are_numbers(row.get(name)) for name in ("metrics", "epsilon", "bytes", "refused"))
        and all(value is None or 0 <= value < math.inf for value in (row.get("epsilon") or {}).values())
    )
    return row if sound else None


def _are_numbers(values: Any) -> bool:
    return values is None or (isinstance(values, dict) and all(map(_is_number, values.values())))


def _is_number(value: Any) -> bool:
    """Whether JSON holds a number, NaN included, or null."""
    return value is None or isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


def _damaged(path: Path, how: str) -> SilodpError:
    return SilodpError(
        f"{path} is damaged: {how}; restore it from a copy, or delete it and resume the run, which then knows of the "
        "earlier rounds only what they cost.",
        code="run.metrics_damaged",
    )
