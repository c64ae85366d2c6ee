"""What a run keeps on disk: checkpoint, ledger, the parties' stores; metrics, guarantees, the model."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from torch import nn

from silodp.errors import SilodpError, counted
from silodp.federation.aggregation import Setting
from silodp.federation.checkpoint import Checkpoint, empty_velocity, load_checkpoint, save_checkpoint
from silodp.federation.silo import own_ledger
from silodp.federation.store import (
    DirectoryStore,
    MemoryStore,
    Store,
    make_private_folder,
    write_durably,
)
from silodp.federation.terms import Terms
from silodp.privacy.guarantee import Adversary, Guarantee
from silodp.privacy.ledger import Ledger
from silodp.training.task import serialize

Row = dict[str, Any]
"""What is said of one round; of the untrained model as round 0."""


@dataclass(frozen=True)
class RunDirectory:
    """Where one run keeps what must outlive its process; without a path nothing does."""

    path: Path | None

    def state(self, terms: Terms, resume: bool) -> Checkpoint:
        """The state to go on from, or that of a new run, which is not written yet.

        Raises:
            SilodpError: there is nothing to resume, or something that a new run would overwrite.
        """
        if resume:
            if self.path is None:
                raise SilodpError("resume needs the output directory of the run to go on with: give out.")
            return load_checkpoint(self._checkpoint(self.path), terms.fingerprint)
        if self.path is not None and any(
            path.is_file() and path.suffix != ".partial" for path in self.path.rglob("*")
        ):
            raise SilodpError(
                f"output directory {self.path} is not empty: choose another, or resume the run in it."
            )
        params = terms.task.initial(terms.seed)
        return Checkpoint(secrets.token_hex(16), terms.fingerprint, 0, params, empty_velocity(params))

    def keep(self, state: Checkpoint) -> None:
        """The state after a round, on disk when this returns."""
        if self.path is not None:
            make_private_folder(self.path / "checkpoint")
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

    def silo_ledger(self, terms: Terms, setting: Setting, place: int) -> Ledger:
        """The silo's own ledger, open; `place`: of the silo in the public order."""
        path = None
        if self.path is not None:
            folder = self.path / "checkpoint" / "silo_ledgers"
            make_private_folder(folder)
            path = folder / f"{place:03}.jsonl"
        return own_ledger(terms.aggregator, setting, path)

    def store(self, *place: str) -> Store:
        """Of one party."""
        return (
            MemoryStore() if self.path is None else DirectoryStore(self.path.joinpath("checkpoint", *place))
        )

    def metrics(self, resumed_round: int | None) -> Metrics:
        """What was said of the rounds before the one to go on with; None: nothing yet."""
        return Metrics(None if self.path is None else self.path / "metrics.jsonl", resumed_round)

    def write(
        self, terms: Terms, model: nn.Module, guarantees: Mapping[Adversary, Guarantee], stopped: str
    ) -> None:
        """What a run leaves: its guarantees and its model."""
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
            "guarantees": [guarantee.to_dict() for guarantee in guarantees.values()],
        }
        text = json.dumps(guarantee, indent=2, ensure_ascii=False) + "\n"
        write_durably(self.path / "guarantee.json", text.encode())
        write_durably(self.path / "model.safetensors", serialize(model, {"method": method.name}))

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
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if on_round is not None:
            on_round(row)
