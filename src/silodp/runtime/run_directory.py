"""The directory of a run: checkpoint, ledgers and stores of the parties; metrics, guarantees and the model."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.accounting.guarantee import FORMAT, Guarantee
from silodp.accounting.ledger import Ledger
from silodp.accounting.views import Adversary
from silodp.aggregators.registry import AggregatorRecord
from silodp.errors import SilodpError, counted
from silodp.parsing import parse_json, parse_toml, refuse_unsound
from silodp.runtime.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from silodp.runtime.lock import hold_lock
from silodp.runtime.model_description import CODE, DESCRIPTION, WEIGHTS, ModelDescription
from silodp.wire.files import PRIVATE_FILE, append_durably, make_private_folder, write_durably
from silodp.wire.store import DirectoryStore, MemoryStore, Store

if TYPE_CHECKING:  # a report, which reads run directories, does not import torch
    from torch import nn

    from silodp.aggregators.run_spec import RunSpec
    from silodp.runtime.simulation import Parties
    from silodp.training.task import Task

RUN_SPEC = "run_spec.json"
"""The specification of the run; public."""
CONFIG = "config.toml"
"""Of a run of the command line."""
GUARANTEE, METRICS = "guarantee.json", "metrics.jsonl"
LEDGER = Path("checkpoint") / "ledger.jsonl"
LOCK = "lock"
"""In checkpoint/: locked by the process that runs."""
STARTS = "starts.json"
"""In checkpoint/: a random id for every start of the run."""

MetricsRow = dict[str, Any]
"""One row of metrics.jsonl, for one round; round 0 is the untrained model."""
REFUSED_SUM = "(sum)"
"""Key in a row's "refused", which otherwise has names of silos. It means that the sum was not finite, so the
model did not change."""


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run.

    Attributes:
        path: None keeps everything in memory.
    """

    path: Path | None

    def load_state(self, spec: RunSpec, task: Task, resume: bool) -> Checkpoint:
        """Read the state of the run, or make that of a new one; nothing is written.

        Args:
            spec: of the run.
            task: gives the untrained model.
            resume: whether the state is read.

        Raises:
            SilodpError: there is nothing to resume, or more than T rounds are done; or a new run would overwrite files.
        """
        if resume:
            if self.path is None:
                raise SilodpError(
                    "resume needs the output directory of the run to continue: set out.",
                    code="argument.missing",
                    field="out",
                )
            state = load_checkpoint(self._checkpoint(self.path), spec.digest)
            if spec.rounds < state.round:
                raise SilodpError(
                    f"rounds = {spec.rounds}, and the run in {self.path} has done {counted(state.round, 'round')}, "
                    f"which cannot be undone: resume with rounds ≥ {state.round}, or begin another run.",
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
        lock = self.path / "checkpoint" / LOCK  # a run that was killed at its start leaves it
        files = (path for path in self.path.rglob("*") if path.is_file() and path.suffix != ".partial")
        if any(path != lock for path in files):
            raise SilodpError(
                f"output directory {self.path} is not empty: choose another, or resume the run in it.",
                code="run.exists",
                field="out",
            )

    @contextmanager
    def open(
        self, spec: RunSpec, task: Task, state: Checkpoint, resume: bool
    ) -> Iterator[tuple[Checkpoint, Ledger]]:
        """Lock the directory, and yield the state and the open ledger of the run.

        Args:
            spec: of the run.
            task: of the run.
            state: from `load_state`, before the lock was held; it is read again, or the directory found empty again.
            resume: whether the run is resumed.

        Raises:
            SilodpError: as `load_state` and `open_ledger`, or another process uses the directory.
        """
        with ExitStack() as held:
            if self.path is not None:
                make_private_folder(self.path / "checkpoint")
                held.enter_context(hold_lock(self.path / "checkpoint" / LOCK))
            if resume:
                state = self.load_state(spec, task, resume)
            else:
                self._check_empty()
                self.save_state(state)
            ledger = held.enter_context(self.open_ledger(spec, state))
            self._check_config(ledger)
            self._write_spec(spec)
            self._record_start(state)
            yield state, ledger

    def _check_config(self, ledger: Ledger) -> None:
        """Refuse a config.toml that was edited or damaged since the run ended."""
        if self.path is None or ledger.files is None or not (self.path / CONFIG).exists():
            return
        if CONFIG in ledger.files and ledger.files[CONFIG] != digest_config(self.path / CONFIG):
            raise SilodpError(
                f"{self.path / CONFIG} is not the one that the run wrote: restore it, and give changes with --set; or "
                "delete it, and resume with a configuration of your own and --out.",
                code="run.config_changed",
            )

    def _write_spec(self, spec: RunSpec) -> None:
        """Write the specification; that of a resumed run differs at most in T, budget and limits."""
        if self.path is not None:
            write_durably(self.path / RUN_SPEC, spec.to_json().encode())

    def _record_start(self, state: Checkpoint) -> None:
        """Append a random id, which distinguishes copies of this directory that are continued separately."""
        if self.path is not None:
            started = {"id": secrets.token_hex(16), "round": state.round}
            text = json.dumps([*self._read_starts(self.path), started], indent=1) + "\n"
            write_durably(self.path / "checkpoint" / STARTS, text.encode(), PRIVATE_FILE)

    @staticmethod
    def _read_starts(path: Path) -> list[dict[str, Any]]:
        """Return every recorded start of the run; earlier versions recorded none."""
        file = path / "checkpoint" / STARTS
        if not file.exists():
            return []
        with refuse_unsound(f"{file} is damaged: restore it from a copy.", code="checkpoint.damaged"):
            starts = parse_json(file.read_bytes())
            return [{"id": str(start["id"]), "round": int(start["round"])} for start in starts]

    def save_state(self, state: Checkpoint) -> None:
        """Write the state after a round durably."""
        if self.path is not None:
            save_checkpoint(self._checkpoint(self.path), state)

    @contextmanager
    def open_ledger(self, spec: RunSpec, state: Checkpoint) -> Iterator[Ledger]:
        """Open the ledger of the run.

        Raises:
            SilodpError: it is missing, or ledger and state are from different rounds.
        """
        path = None
        if self.path is not None:
            path = self.path / LEDGER
            if state.round and not path.exists():
                raise SilodpError(
                    f"ledger {path} is missing: without it the spent ε is not known; restore it.",
                    code="ledger.missing",
                )
        header = spec.ledger_header
        with Ledger(
            path, spec.noise_delta, spec.accountant, spec.budget, run=state.run, subject=header
        ) as ledger:
            if not state.round <= ledger.rounds <= state.round + 1:
                raise SilodpError(
                    f"ledger {path} has {counted(ledger.rounds, 'round')} and the checkpoint {state.round}: they are "
                    "copies from different rounds, and it is not known what was released: begin a new run, which adds "
                    "its ε to that of this run.",
                    code="checkpoint.mismatch",
                )
            yield ledger

    def make_silo_ledger(self, spec: RunSpec, place: int) -> Ledger:
        """Return the ledger of a silo; `place` is its position in the public order."""
        from silodp.runtime.silo import make_ledger

        return make_ledger(spec, self._find_silo_file("silo_ledgers", place))

    def find_silo_metrics(self, place: int) -> Path | None:
        """Return the file of what a silo measures for itself alone; `place` is its position in the public order."""
        return self._find_silo_file("silo_metrics", place)

    def _find_silo_file(self, kind: str, place: int) -> Path | None:
        if self.path is None:
            return None
        folder = self.path / "checkpoint" / kind
        make_private_folder(folder)
        return folder / f"{place:03}.jsonl"

    def make_store(self, *place: str) -> Store:
        """Return the store of one party."""
        return (
            MemoryStore() if self.path is None else DirectoryStore(self.path.joinpath("checkpoint", *place))
        )

    def load_metrics(
        self,
        resumed_round: int | None,
        spent: Callable[[], Sequence[Mapping[Adversary, float | None]]],
        recorded: str | None = None,
    ) -> Metrics:
        """Return metrics.jsonl with the rows of the rounds done (see `Metrics`)."""
        return Metrics(None if self.path is None else self.path / METRICS, resumed_round, spent, recorded)

    def write(
        self,
        spec: RunSpec,
        ledger: Ledger,
        rows: Sequence[MetricsRow],
        model: nn.Module,
        guarantees: Mapping[Adversary, Guarantee],
        stopped: str,
        parties: Parties,
    ) -> None:
        """Write guarantee.json, and what is needed to use the model elsewhere (see `silodp.runtime.model_description`).

        The digests of all files are in the ledger before the first of them is replaced, so that a reader can tell files
        that were edited, or are of another run or moment.

        Args:
            spec: of the run.
            ledger: of the run.
            rows: of metrics.jsonl.
            model: the final global model.
            guarantees: by adversary.
            stopped: "rounds" or "budget".
            parties: that trained the model; their task and their schema are kept with it.
        """
        if self.path is None:
            return
        method, aggregator, released = spec.method, spec.aggregator, guarantees["released"]
        guarantee = {
            "format": FORMAT,
            "simulation": parties.is_simulation,
            "method": method.name,
            "aggregator": AggregatorRecord.from_aggregator(aggregator).to_dict(),
            "settings": repr(method),
            "rounds": released.rounds,
            "stopped": stopped,
            "private": released.private,
            "run": spec.run,
            "starts": self._read_starts(self.path),
            **({} if spec.evaluation is None else {"evaluation": spec.evaluation.across}),
            "guarantees": [guarantee.to_dict() for guarantee in guarantees.values()],
        }
        stated = (json.dumps(guarantee, indent=2, ensure_ascii=False) + "\n").encode()
        from silodp.training.task import serialize

        weights = serialize(model, {"method": method.name})
        architecture, loss = parties.task.architecture, parties.task.loss
        description = ModelDescription.of_run(
            spec, model, architecture, loss, parties.schema, weights, stated
        )
        contents = {
            GUARANTEE: stated,
            WEIGHTS: weights,
            **({CODE: architecture.code} if architecture.code else {}),
            DESCRIPTION: description.to_json().encode(),
        }
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        digests |= {METRICS: digest_rows(rows), RUN_SPEC: digest_file(self.path / RUN_SPEC)}
        if (self.path / CONFIG).exists():
            digests[CONFIG] = digest_config(self.path / CONFIG)
        ledger.record_files(digests)
        for name, content in contents.items():
            write_durably(self.path / name, content)

    @staticmethod
    def _checkpoint(path: Path) -> Path:
        return path / "checkpoint" / "state.safetensors"


class Metrics:
    """The rows of metrics.jsonl, one line per round, each written durably before the checkpoint of its round.

    So when a process dies, the file can only be ahead of the checkpoint: by a line that was cut off, or by one of a
    round that is repeated. Both are dropped; every other difference is damage, and refused.

    Args:
        path: the file; None keeps the rows in memory.
        resumed_round: the round of the checkpoint; None for a new run.
        spent: returns ε against each adversary after 0, 1, … rounds by the ledger, for rows of a lost file.
        recorded: `digest_rows` of these rows by the ledger; None where it is not known.

    Raises:
        SilodpError: the file is damaged or was edited, or ends before the checkpoint.
    """

    def __init__(
        self,
        path: Path | None,
        resumed_round: int | None,
        spent: Callable[[], Sequence[Mapping[Adversary, float | None]]],
        recorded: str | None = None,
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
            if recorded not in (None, digest_rows(self.rows)):
                raise _damaged(self._path, "a row is not the one that the run wrote")
        elif resumed_round:
            known = spent()[: resumed_round + 1]
            self.rows = [{"round": i, "epsilon": dict(epsilon)} for i, epsilon in enumerate(known)]
        write_durably(self._path, "".join(json.dumps(row) + "\n" for row in self.rows).encode())

    def add(self, row: MetricsRow) -> None:
        """Append a row durably."""
        self.rows.append(row)
        if self._path is not None:
            append_durably(self._path, json.dumps(row).encode())


def digest_file(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_rows(rows: Sequence[MetricsRow]) -> str:
    """Return the SHA-256 (hex) of the rows of metrics.jsonl, however an editor left their lines."""
    return hashlib.sha256("".join(json.dumps(row) + "\n" for row in rows).encode()).hexdigest()


def digest_config(path: Path) -> str:
    """Return the SHA-256 (hex) of the settings in config.toml, without comments; "" where it is not TOML.

    The table [card] is left out: it changes nothing in the run, and its owner may declare more after it.
    """
    try:
        values = parse_toml(path.read_text(encoding="utf-8"))
    except ValueError:
        return ""
    values.pop("card", None)
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def find_changed_file(
    directory: Path, recorded: Mapping[str, str], rows: Sequence[MetricsRow] | None
) -> str | None:
    """Return the name of the first file of a finished run that is not as the run wrote it; None if all are.

    A file that is missing is not changed.

    Args:
        directory: of the run.
        recorded: `Ledger.files`.
        rows: of metrics.jsonl; None leaves them out.
    """
    for name in (WEIGHTS, DESCRIPTION, CODE, GUARANTEE, RUN_SPEC, CONFIG, METRICS):
        path = directory / name
        if name not in recorded or not path.exists() or (name == METRICS and rows is None):
            continue
        if name == METRICS:
            found = digest_rows(rows or ())
        else:
            found = digest_config(path) if name == CONFIG else digest_file(path)
        # The settings of a file that is not TOML ("") are reported as not checked.
        if found not in ("", recorded[name]):
            return name
    return None


def read_metrics(path: Path, *, may_be_cut_off: bool = False) -> list[MetricsRow]:
    """Read metrics.jsonl.

    Args:
        path: the file.
        may_be_cut_off: drop a last line that a crash cut off: without its end, or, after a power cut, with blocks of
            zeros.

    Returns:
        The rows of rounds 0, 1, 2, …, each once and in this order.

    Raises:
        SilodpError: a line is not the row of its round.
    """
    *lines, last = path.read_bytes().split(b"\n")
    rows: list[MetricsRow] = []
    for number, line in enumerate([*lines, last] if last else lines, start=1):
        row = _parse_row(line, len(rows))
        if row is None:
            is_last = number >= len(lines) + bool(last)
            if may_be_cut_off and is_last and (last or b"\0" in line):
                break
            raise _damaged(path, f"line {number} is not the record of round {len(rows)}")
        rows.append(row)
    return rows


def _parse_row(line: bytes, round_: int) -> MetricsRow | None:
    """Return the row of a round; None if the line is anything else."""
    try:
        row = parse_json(line)
    except ValueError:
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
    """Return whether a value from JSON is a number, NaN included, or null."""
    return value is None or isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


def _damaged(path: Path, how: str) -> SilodpError:
    return SilodpError(
        f"{path} is damaged: {how}; restore it from a copy, or delete it and resume the run: of the earlier rounds "
        "then only ε is known.",
        code="run.metrics_damaged",
    )
