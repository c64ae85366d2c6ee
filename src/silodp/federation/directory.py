"""What a run keeps on disk: checkpoint, ledger, the parties' stores; metrics, guarantees, the model."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from safetensors.torch import save
from torch import nn

from silodp.errors import SilodpError, counted, name_file
from silodp.federation.checkpoint import Checkpoint, empty_velocity, load_checkpoint, save_checkpoint
from silodp.federation.lock import hold_lock
from silodp.federation.store import DirectoryStore, MemoryStore, Store, write_durably
from silodp.federation.terms import Terms
from silodp.privacy.guarantee import Adversary, Guarantee
from silodp.privacy.ledger import Ledger

LOCK = "lock"
STARTS = "starts.json"
"""In checkpoint/: held by the process that runs, and a random id for every time that one began to."""

Row = dict[str, Any]
"""What is said of one round; of the untrained model as round 0."""


@dataclass(frozen=True)
class RunDirectory:
    """Where one run keeps what must outlive its process; without a path nothing does."""

    path: Path | None

    def state(self, terms: Terms, resume: bool, rounds: int) -> Checkpoint:
        """The state to go on from, or that of a new run, which is not written yet.

        Raises:
            SilodpError: there is nothing to resume, or more than `rounds` were done; or something that a new run would
                overwrite.
        """
        if resume:
            if self.path is None:
                raise SilodpError(
                    "resume needs the output directory of the run to go on with: give out.", field="out"
                )
            state = load_checkpoint(self._checkpoint(self.path), terms.fingerprint)
            if rounds < state.round:
                raise SilodpError(
                    f"rounds = {rounds}, and the run in {self.path} has done {counted(state.round, 'round')}, which "
                    f"cannot be taken back: resume with rounds ≥ {state.round}, or begin another run.",
                    code="run.rounds_done",
                    field="rounds",
                )
            return state
        self._check_empty()
        params = terms.task.initial(terms.seed)
        return Checkpoint(secrets.token_hex(16), terms.fingerprint, 0, params, empty_velocity(params))

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
        self, terms: Terms, state: Checkpoint, resume: bool, rounds: int
    ) -> Iterator[tuple[Checkpoint, Ledger]]:
        """The run's state and ledger, while no other process can use the directory.

        `state` was read, or the directory found empty, before the lock was held: it is read, or looked at, again.

        Raises:
            SilodpError: as `state` and `ledger`, or another process is in the directory.
        """
        with ExitStack() as held:
            if self.path is not None:
                held.enter_context(hold_lock(self.path / "checkpoint" / LOCK))
            if resume:
                state = self.state(terms, resume, rounds)
            else:
                self._check_empty()
                self.keep(state)
            ledger = held.enter_context(self.ledger(terms, state))
            self._record_start(state)
            yield state, ledger

    def _record_start(self, state: Checkpoint) -> None:
        """Note a fresh random id, so that copies of this directory that are continued apart can be told apart."""
        if self.path is not None:
            started = {"id": secrets.token_hex(16), "round": state.round}
            text = json.dumps([*self._starts(self.path), started], indent=1) + "\n"
            write_durably(self.path / "checkpoint" / STARTS, text.encode())

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
    def ledger(self, terms: Terms, state: Checkpoint) -> Iterator[Ledger]:
        """The book of the run, open.

        Raises:
            SilodpError: it is not of the moment that the state is of.
        """
        path = None
        if self.path is not None:
            path = self.path / "checkpoint" / "ledger.jsonl"
            if state.round and not path.exists():
                raise SilodpError(
                    f"ledger {path} is missing: without it nothing is known of the ε spent; restore it."
                )
        accountant, budget, subject = terms.accountant, terms.budget, terms.subject
        with Ledger(path, terms.noise_delta, accountant, budget, run=state.run, subject=subject) as ledger:
            if not state.round <= ledger.rounds <= state.round + 1:
                raise SilodpError(
                    f"ledger {path} has {counted(ledger.rounds, 'round')} and the checkpoint {state.round}: they are "
                    "not of one moment, and what was released is not known: begin a new run, which adds its own ε."
                )
            yield ledger

    def store(self, *place: str) -> Store:
        """Of one party."""
        return (
            MemoryStore() if self.path is None else DirectoryStore(self.path.joinpath("checkpoint", *place))
        )

    def metrics(self, resumed_round: int | None) -> Metrics:
        """What was said of the rounds before the one to go on with; None: nothing yet."""
        return Metrics(None if self.path is None else self.path / "metrics.jsonl", resumed_round)

    def write(
        self,
        terms: Terms,
        run: str,
        model: nn.Module,
        guarantees: Mapping[Adversary, Guarantee],
        stopped: str,
    ) -> None:
        """What a run of this id leaves: its guarantees and its model."""
        if self.path is None:
            return
        method, aggregator, released = terms.method, terms.aggregator, guarantees["released"]
        public = {
            f.name: getattr(aggregator, f.name) for f in fields(cast(Any, aggregator)) if f.init and f.compare
        }
        guarantee = {
            "method": method.name,
            "aggregator": {"name": aggregator.name, **{n: v for n, v in public.items() if v is not None}},
            "settings": repr(method),
            "rounds": released.rounds,
            "stopped": stopped,
            "private": released.private,
            "run": run,
            "starts": self._starts(self.path),
            "guarantees": [guarantee.to_dict() for guarantee in guarantees.values()],
        }
        text = json.dumps(guarantee, indent=2, ensure_ascii=False) + "\n"
        write_durably(self.path / "guarantee.json", text.encode())
        tensors = {name: value.detach().contiguous().cpu() for name, value in model.state_dict().items()}
        write_durably(self.path / "model.safetensors", save(tensors, metadata={"method": method.name}))

    @staticmethod
    def _checkpoint(path: Path) -> Path:
        return path / "checkpoint" / "state.safetensors"


class Metrics:
    """metrics.jsonl: a line per round. Lines beyond the checkpoint are of a round that will be repeated."""

    def __init__(self, path: Path | None, resumed_round: int | None) -> None:
        self._path = path
        self.rows: list[Row] = []
        if self._path is not None and resumed_round is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    break  # the line being written when the process died; its round is repeated
                if row["round"] <= resumed_round:
                    self.rows.append(row)
            write_durably(self._path, "".join(json.dumps(row) + "\n" for row in self.rows).encode())

    def add(self, row: Row, on_round: Callable[[Row], None] | None) -> None:
        """One more, shown to whoever wants to see it."""
        self.rows.append(row)
        if self._path is not None:
            with name_file(self._path), self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if on_round is not None:
            on_round(row)
