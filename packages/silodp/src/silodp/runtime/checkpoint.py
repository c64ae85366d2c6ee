"""What a server continues from: its checkpoint, one sealed file, and which silos took part, in its store.

The checkpoint is replaced after every round. Which silos take part in a round is drawn once, stored, and counted for
the guarantees. The ledger of the run lists the digests of both before anything of the round is visible, and they are
compared with it: all three must be of one moment.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from safetensors import SafetensorError, deserialize

from silodp.accounting.ledger import Ledger
from silodp.errors import SilodpError
from silodp.methods.server_optimizer import start_state
from silodp.parsing import MALFORMED, is_format, parse_json
from silodp.text import pluralize
from silodp.wire.files import read_sealed, write_sealed
from silodp.wire.messages import Message
from silodp.wire.store import RoundStore, Store, get_or_make

if TYPE_CHECKING:  # a report, which reads the fingerprint, does not import torch
    from torch import Tensor

    from silodp.aggregators.run_spec import RunSpec
    from silodp.mechanisms.noise import Randomness
    from silodp.methods.base import Method
    from silodp.methods.roles import FederationSize, MethodState

_METHOD = "method/"
"""Prefix of the names of the method's arrays; those of the server optimizer have none."""
FORMAT = 1
"""Of a checkpoint."""

COMPLETED_ROUNDS_KEY = "rounds over"
"""Key in the store of the server: the number of completed rounds, and in how many each silo took part, (S,)."""


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after `round` rounds.

    Attributes:
        run: The id of the run.
        fingerprint: The digest of the settings that a resumed run must share (`RunSpec.digest`).
        round: The number of rounds done.
        params: The parameters (d,) of the model.
        optimizer: The state of the server optimizer, tensors by name.
        method: The state of the method, arrays by name.
    """

    run: str
    fingerprint: str
    round: int
    params: Tensor
    optimizer: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    method: MethodState = field(default_factory=dict, repr=False)

    @classmethod
    def initial(
        cls, run: str, fingerprint: str, params: Tensor, method: Method, population: FederationSize
    ) -> Self:
        """Return the state before the first round of an untrained model, (d,)."""
        optimizer = start_state(method.make_server_optimizer(), params)
        return cls(run, fingerprint, 0, params, optimizer, method.initial_state(population))


def encode_checkpoint(state: Checkpoint) -> bytes:
    """Return a checkpoint as bytes."""
    import torch
    from safetensors.torch import save

    # One file for model, optimizer and method: a crash cannot leave the parts of two rounds.
    header = {"format": FORMAT, "run": state.run, "fingerprint": state.fingerprint, "round": state.round}
    # Copies: safetensors writes no tensors that share memory, such as a model that an optimizer keeps in its state.
    optimizer = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in state.optimizer.items()
    }
    method = {_METHOD + name: torch.from_numpy(value) for name, value in state.method.items()}
    tensors = {"params": state.params.cpu(), **optimizer, **method}
    return save(tensors, metadata={"checkpoint": json.dumps(header)})


def save_checkpoint(path: Path, content: bytes) -> None:
    """Write an encoded checkpoint durably; after a crash the file has it, or the one before it."""
    write_sealed(path, content)


def check_checkpoint(content: bytes, round_: int, ledger: Ledger, where: str) -> None:
    """Check that a checkpoint and the ledger of the run are of one moment.

    Args:
        content: The encoded checkpoint.
        round_: The number of rounds that it has done.
        ledger: The ledger of the run.
        where: What the user has, for the message.

    Raises:
        SilodpError: They are copies of different moments (code checkpoint.mismatch).
    """
    completed = ledger.progress.completed
    # The ledger may have one round more: then the process died before the checkpoint was replaced, and the round is
    # repeated. Or it lists none, where the process died when it began.
    known = completed.get(round_)
    is_same = known is not None and known.checkpoint == hashlib.sha256(content).hexdigest()
    done = max(completed, default=0)
    if done - round_ in (0, 1) and (is_same or not completed):
        return
    raise SilodpError(
        f"{where} has done {pluralize(round_, 'round')}, and by the ledger {pluralize(done, 'round')} were completed, "
        "or with another result: they are copies of different moments, and it is not known what was "
        "released; restore the newest of both, or begin a new run, which adds its ε to that of this run.",
        code="checkpoint.mismatch",
    )


def read_fingerprint(path: Path) -> str:
    """Return the digest of the specification in a checkpoint.

    Raises:
        SilodpError: The checkpoint is damaged.
    """
    return str(_read_header(read_sealed(path, f"checkpoint {path}"), path)["fingerprint"])


def check_checkpoint_file(path: Path, ledger: Ledger) -> None:
    """Check that the file of a checkpoint and the ledger of the run are of one moment.

    Raises:
        SilodpError: As `check_checkpoint`, or the checkpoint is damaged.
    """
    content = read_sealed(path, f"checkpoint {path}")
    check_checkpoint(content, int(_read_header(content, path)["round"]), ledger, f"checkpoint {path}")


def _read_header(data: bytes, path: Path) -> dict[str, Any]:
    try:
        # safetensors checks lengths and offsets, and hides the metadata: 8 bytes with the length of the header, the
        # header in JSON, then the tensors.
        deserialize(data)  # type: ignore[no-untyped-call]
        length = int.from_bytes(data[:8], "little")
        header: dict[str, Any] = parse_json(parse_json(data[8 : 8 + length])["__metadata__"]["checkpoint"])
    except (SafetensorError, *MALFORMED) as error:
        raise SilodpError(
            f"checkpoint {path} cannot be read ({error}): silodp has not written it.",
            code="checkpoint.damaged",
        ) from None
    return header


def load_checkpoint(path: Path, fingerprint: str) -> Checkpoint:
    """Read a checkpoint.

    Args:
        path: The path of the file.
        fingerprint: Digest of the specification of the run.

    Raises:
        SilodpError: The checkpoint is missing, damaged, of another format, or of a run with other settings.
    """
    from safetensors.torch import load

    try:
        data = read_sealed(path, f"checkpoint {path}")
    except FileNotFoundError:
        raise SilodpError(
            f"there is no checkpoint at {path}: begin the run without --resume.",
            code="run.nothing_to_resume",
            field="out",
        ) from None
    header = _read_header(data, path)
    tensors = load(data)
    # Before the fingerprint, which other versions compute in another way.
    if not is_format(header["format"], FORMAT):
        raise SilodpError(
            f"checkpoint {path} has format {header['format']}, this silodp reads {FORMAT}: continue with the version "
            "of silodp that began the run, or begin a new run, which adds its ε to that of this run.",
            code="checkpoint.format",
        )
    if header["fingerprint"] != fingerprint:
        raise SilodpError(
            f"checkpoint {path} is of a run with other settings (data, task, method, seed, δ or aggregator differ; "
            "where privacy budgets are planned for a number of rounds, it is a part of the method): resume with "
            "the configuration of that run, or choose another output directory.",
            code="checkpoint.setup",
        )
    method = {
        name[len(_METHOD) :]: tensors.pop(name).numpy() for name in list(tensors) if name.startswith(_METHOD)
    }
    # What is left has no prefix: the state of the server optimizer.
    params = tensors.pop("params")
    return Checkpoint(header["run"], fingerprint, header["round"], params, tensors, method)


@dataclass(frozen=True)
class Participation:
    """The silos that take part in each round.

    Attributes:
        spec: The specification of the run.
        store: The store of the server for this run.
        randomness: The random streams of the server.
    """

    spec: RunSpec
    store: RoundStore
    randomness: Randomness

    def load_completed(self) -> tuple[int, np.ndarray]:
        """Return the number of completed rounds, and in how many of them each silo took part, (S,)."""
        stored = self.store.run.get(COMPLETED_ROUNDS_KEY)
        if stored is None:
            return 0, np.zeros(len(self.spec.names), np.int64)
        kept = Message.decode(stored)
        return kept.round, kept.arrays["joined"]

    def complete(self, rounds: int) -> None:
        """Store durably that this many rounds are completed, and in how many of them each silo took part."""
        arrays = {"joined": self.count(rounds)}
        self.store.run.put(
            COMPLETED_ROUNDS_KEY, Message("over", self.spec.run, rounds, arrays=arrays).encode()
        )

    def digest(self, round_: int) -> str:
        """Return SHA-256 (hex) of what is stored of a round's draws, counted from 0; "" before it was begun."""
        store = self.store.round(round_)
        joined = store.get("clients")
        return "" if joined is None else hashlib.sha256(joined + (store.get("sample") or b"")).hexdigest()

    def draw(self, round_: int) -> np.ndarray:
        """Return the silos that take part in a round, (S,) bool; empty where the method samples none."""

        # An empty array is stored too: it says that the round was begun (`Server.check_store_version`).
        def sample() -> np.ndarray:
            stream = self.randomness.stream("clients", round_)
            silos = self.spec.method.sample_silos(self.spec.population, stream)
            return np.empty(0, dtype=bool) if silos is None else silos

        return get_or_draw(self.store.round(round_), "clients", self.spec.run, sample)

    def count(self, rounds: int) -> np.ndarray:
        """Return in how many of the first `rounds` rounds each silo took part, (S,)."""
        over, joined = self.load_completed()
        # What was drawn for completed rounds is deleted, so these are counted already.
        for round_ in range(over, rounds):
            silos = self.draw(round_)
            joined = joined + (silos if silos.size else 1)
        return joined


def get_or_draw(store: Store, key: str, run: str, draw: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the array that is stored under a key; draw and store it durably if there is none.

    Args:
        store: Store of the round or of the run.
        key: Key in the store.
        run: Id of the run.
        draw: Returns a new array.
    """
    stored = get_or_make(store, key, lambda: Message("kept", run, arrays={"value": draw()}).encode())
    return Message.decode(stored).arrays["value"]
