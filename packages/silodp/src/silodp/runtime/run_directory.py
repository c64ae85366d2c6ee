"""The directory of a run that is made or continued: its lock, checkpoint, ledgers and stores, and what it leaves."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from silodp.accounting.guarantee import FORMAT, Guarantee
from silodp.accounting.ledger import Ledger
from silodp.accounting.views import Adversary
from silodp.aggregators.registry import AggregatorRecord
from silodp.errors import SilodpError
from silodp.runtime import run_files
from silodp.runtime.checkpoint import (
    Checkpoint,
    check_checkpoint_file,
    encode_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from silodp.runtime.model_description import CODE, DESCRIPTION, WEIGHTS, ModelDescription
from silodp.text import pluralize
from silodp.wire.files import make_private_folder, write_durably
from silodp.wire.store import DirectoryStore, MemoryStore, Store

if TYPE_CHECKING:  # a report, which reads run directories, does not import torch
    from torch import nn

    from silodp.aggregators.run_spec import RunSpec
    from silodp.runtime.simulation import Parties
    from silodp.training.task import Task

LOCK = "lock"
"""In checkpoint/: locked by the process that runs."""
_HELD: set[int] = set()
"""Descriptors of the files that this process has locked."""


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run.

    Attributes:
        path: The path of the directory; None keeps everything in memory.
    """

    path: Path | None

    def load_state(self, spec: RunSpec, task: Task, resume: bool) -> Checkpoint:
        """Read the state of the run, or make that of a new one; nothing is written.

        Args:
            spec: The specification of the run.
            task: Gives the untrained model.
            resume: Whether the state is read.

        Raises:
            SilodpError: There is nothing to resume, or more than T rounds are done; or a new run would overwrite files.
        """
        if resume:
            if self.path is None:
                raise SilodpError(
                    "resume needs the output directory of the run to continue: set out.",
                    code="argument.missing",
                    field="out",
                )
            state = load_checkpoint(self.path / run_files.STATE, spec.digest)
            if spec.rounds < state.round:
                raise SilodpError(
                    f"rounds = {spec.rounds}, and the run in {self.path} has done {pluralize(state.round, 'round')}, "
                    f"which cannot be undone: resume with rounds ≥ {state.round}, or begin another run.",
                    code="run.rounds_done",
                    field="rounds",
                )
            return state
        self._check_empty()
        # A new id also where the seed is fixed: masks and signatures of two runs must not be mixed.
        params = task.initial(spec.seed)
        return Checkpoint.initial(secrets.token_hex(16), spec.digest, params, spec.method, spec.population)

    def _check_empty(self) -> None:
        if self.path is None:
            return
        lock = self.path / "checkpoint" / LOCK
        # A run that was killed at its start leaves its lock, and perhaps a file that was never renamed.
        files = (path for path in self.path.rglob("*") if path.is_file() and path.suffix != ".partial")
        if any(path != lock for path in files):
            raise SilodpError(
                f"output directory {self.path} is not empty: choose another, or resume the run in it (silodp run DIR "
                "--resume).",
                code="run.exists",
                field="out",
            )

    @contextmanager
    def open(
        self, spec: RunSpec, task: Task, state: Checkpoint, resume: bool
    ) -> Iterator[tuple[Checkpoint, Ledger]]:
        """Lock the directory, and yield the state and the open ledger of the run.

        Args:
            spec: The specification of the run.
            task: The task of the run.
            state: The state from `load_state`, read before the lock was held; it is read again, or the directory is
                found empty again.
            resume: Whether the run is resumed.

        Raises:
            SilodpError: As `load_state` and `open_ledger`, or another process uses the directory.
        """
        with ExitStack() as held:
            if self.path is not None:
                make_private_folder(self.path / "checkpoint")
                held.enter_context(hold_lock(self.path / "checkpoint" / LOCK))
            # Another process may have used the directory between the first look and the lock.
            if resume:
                state = self.load_state(spec, task, resume)
            else:
                self._check_empty()
                self.save_state(encode_checkpoint(state))
            ledger = held.enter_context(self.open_ledger(spec, state))
            if self.path is not None:
                self._check_config(self.path / run_files.CONFIG, ledger)
                # The specification of a resumed run differs at most in T, budget and limits.
                write_durably(self.path / run_files.RUN_SPEC, spec.to_json().encode())
            # A random id, which distinguishes copies of a run's directory that are continued separately.
            ledger.note({"kind": "start", "id": secrets.token_hex(16), "round": state.round})
            yield state, ledger

    @staticmethod
    def _check_config(config: Path, ledger: Ledger) -> None:
        """Refuse a config.toml that was edited or damaged since the run ended."""
        recorded = (ledger.files or {}).get(run_files.CONFIG)
        if recorded is not None and config.exists() and recorded != run_files.digest_config(config):
            raise SilodpError(
                f"{config} is not the one that the run wrote: restore it, and give changes with --set; or delete it, "
                "and resume with a configuration of your own and --out.",
                code="run.config_changed",
            )

    def complete(self, state: Checkpoint, ledger: Ledger, drawn: str) -> bytes:
        """List a round as completed in the ledger, before anything of it is visible; return its encoded checkpoint.

        Args:
            state: The state after the round.
            ledger: The ledger of the run.
            drawn: `Participation.digest` of the round.

        Raises:
            SilodpError: As `Ledger.record_completed`.
        """
        # Without a directory nothing is resumed, and nothing is compared.
        content = b"" if self.path is None else encode_checkpoint(state)
        ledger.record_completed(state.round, hashlib.sha256(content).hexdigest(), drawn)
        return content

    def save_state(self, content: bytes) -> None:
        """Write the encoded checkpoint after a round durably."""
        if self.path is not None:
            save_checkpoint(self.path / run_files.STATE, content)

    def open_metrics(
        self,
        ledger: Ledger,
        resumed_round: int | None,
        spent: Callable[[], Sequence[Mapping[Adversary, float | None]]],
    ) -> run_files.Metrics:
        """Open metrics.jsonl, compared with the digest of its rows in the ledger of a finished run; see `Metrics`."""
        path = None if self.path is None else self.path / run_files.METRICS
        return run_files.Metrics(path, resumed_round, spent, (ledger.files or {}).get(run_files.METRICS))

    @contextmanager
    def open_ledger(self, spec: RunSpec, state: Checkpoint) -> Iterator[Ledger]:
        """Open the ledger of the run.

        Raises:
            SilodpError: The ledger is missing, or ledger and checkpoint are copies of different moments.
        """
        path = None if self.path is None else self.path / run_files.LEDGER
        if path is not None and state.round and not path.exists():
            raise SilodpError(
                f"ledger {path} is missing: without it the spent ε is not known; restore it.",
                code="ledger.missing",
            )
        header = spec.ledger_header
        with Ledger(
            path, spec.noise_delta, spec.accountant, spec.budget, run=state.run, subject=header
        ) as ledger:
            if self.path is not None:
                check_checkpoint_file(self.path / run_files.STATE, ledger)
            if not ledger.progress.completed:
                self.complete(state, ledger, "")
            yield ledger

    def make_silo_file(self, kind: Literal["silo_ledgers", "silo_metrics"], place: int) -> Path | None:
        """Return the path of a silo's ledger, or of what it measures for itself alone; its folder is made.

        Args:
            kind: Name of the folder.
            place: Position of the silo in the public order.
        """
        if self.path is None:
            return None
        folder = self.path / "checkpoint" / kind
        make_private_folder(folder)
        return folder / f"{place:03}.jsonl"

    def make_store(self, *place: str) -> Store:
        """Return the store of one party; `place` is the path of its folder in checkpoint/."""
        if self.path is None:
            return MemoryStore()
        return DirectoryStore(self.path.joinpath("checkpoint", *place))

    def write(
        self,
        spec: RunSpec,
        ledger: Ledger,
        rows: Sequence[run_files.MetricsRow],
        model: nn.Module,
        guarantees: Mapping[Adversary, Guarantee],
        stopped: str,
        parties: Parties,
    ) -> None:
        """Write guarantee.json, and what is needed to use the model elsewhere (see `silodp.runtime.model_description`).

        The digests of all files are in the ledger before the first of them is replaced, so that a reader can tell files
        that were edited, or are of another run or moment.

        Args:
            spec: The specification of the run.
            ledger: The ledger of the run.
            rows: The rows of metrics.jsonl.
            model: The final global model.
            guarantees: The guarantees, by adversary.
            stopped: "rounds" or "budget".
            parties: The parties that trained the model; their task and their schema are kept with it.
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
            "weighted": method.needs_counts,
            "sampled": spec.is_sampled,
            "run": spec.run,
            "starts": ledger.progress.starts,
            # Here, and not in the times of files, which a copy changes: a page that is signed states it.
            "finished": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S+00:00}",
            **{one.name: one.stated for one in spec.series},
            "guarantees": [guarantee.to_dict() for guarantee in guarantees.values()],
        }
        stated = (json.dumps(guarantee, indent=2, ensure_ascii=False) + "\n").encode()
        contents = {run_files.GUARANTEE: stated}
        if method.releases_model:
            contents |= _describe_model(spec, model, parties, stated)
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        digests |= {
            run_files.METRICS: run_files.digest_rows(rows),
            run_files.RUN_SPEC: run_files.digest_file(self.path / run_files.RUN_SPEC),
        }
        if (self.path / run_files.CONFIG).exists():
            digests[run_files.CONFIG] = run_files.digest_config(self.path / run_files.CONFIG)
        # Recorded first: after a crash in between, a file that was replaced and not recorded would look edited.
        ledger.record_files(digests)
        for name, content in contents.items():
            write_durably(self.path / name, content)


def _describe_model(spec: RunSpec, model: nn.Module, parties: Parties, guarantee: bytes) -> dict[str, bytes]:
    """Return the files that are needed to use a model elsewhere, by name."""
    from silodp.training.model_state import serialize

    weights, task = serialize(model, {"method": spec.method.name}), parties.task
    description = ModelDescription.of_run(spec, model, task, parties.schema, weights, guarantee)
    return {
        WEIGHTS: weights,
        **({CODE: task.architecture.code} if task.architecture.code else {}),
        DESCRIPTION: description.to_json().encode(),
    }


# --- the lock ---


@contextmanager
def hold_lock(path: Path, folder: Path | None = None) -> Iterator[None]:
    """Hold an exclusive lock on a file until the end of the block.

    The operating system releases it when the process ends, even if it is killed. The file is never deleted: a process
    that deletes it could delete the one that another process has just locked.

    Args:
        path: For example DIR/checkpoint/lock; made, with its folder, if it is not there.
        folder: What it protects; None: the folder above that of the lock.

    Raises:
        SilodpError: Another process holds the lock (code run.in_use).
    """
    file = _open_locked(path, folder or path.parent.parent)
    _HELD.add(file)
    try:
        yield
    finally:
        if file in _HELD:
            _HELD.discard(file)
            os.close(file)


def _open_locked(path: Path, folder: Path) -> int:
    """Open and lock the file; return its descriptor."""
    while True:
        # Only the owner may enter the folder: it holds keys and stored answers.
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Two processes must lock one file: the name may lead to another by now.
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:
            pass  # deleted with its directory (`silodp demo` does so) after it was opened: lock the new one
        except OSError as error:
            os.close(file)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                error.filename = str(path)
                raise
            # The folder of a party has its own lock in it, and no other folder has the party's ledgers.
            advice = "or stop it" if path.parent == folder else "stop it, or choose another directory"
            raise SilodpError(
                f"a run is in progress in {folder}: wait for it, {advice}.",
                code="run.in_use",
                field="out",
            ) from None
        os.close(file)


def _close_after_fork() -> None:
    """Close a forked worker's copies of the files, with which it would keep the lock after a crash of its parent."""
    for file in list(_HELD):
        os.close(file)
    _HELD.clear()


os.register_at_fork(after_in_child=_close_after_fork)
