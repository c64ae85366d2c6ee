"""What the server must know to go on after its process died: one sealed file, replaced after every round."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from silodp.errors import SilodpError
from silodp.wire.store import PRIVATE_FILE, seal, unseal, write_durably

FORMAT = 4
"""4: stores have a namespace for each round; 3: silos have a gate and a ledger; 2: the server forgets past rounds."""


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after `round` rounds; `fingerprint` says of which run set-up."""

    run: str
    fingerprint: str
    round: int
    params: Tensor
    velocity: Tensor


def save_checkpoint(path: Path, state: Checkpoint) -> None:
    """Write durably; after a crash the file holds this state or the one before it."""
    header = {"format": FORMAT, "run": state.run, "fingerprint": state.fingerprint, "round": state.round}
    tensors = {"params": state.params.cpu(), "velocity": state.velocity.cpu()}
    write_durably(path, seal(save(tensors, metadata={"checkpoint": json.dumps(header)})), PRIVATE_FILE)


def load_checkpoint(path: Path, fingerprint: str) -> Checkpoint:
    """Read and check.

    Raises:
        SilodpError: when it is missing, damaged, of another format, or belongs to another set-up.
    """
    try:
        sealed = path.read_bytes()
    except FileNotFoundError:
        raise SilodpError(
            f"there is no checkpoint at {path}: begin the run without --resume.",
            code="run.nothing_to_resume",
            field="out",
        ) from None
    data = unseal(sealed, f"checkpoint {path}")
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["checkpoint"])
    except (SafetensorError, ValueError, KeyError) as error:
        raise SilodpError(
            f"checkpoint {path} cannot be read ({error}): it is not one of silodp's.",
            code="checkpoint.damaged",
        ) from None
    if header["format"] != FORMAT:
        raise SilodpError(
            f"checkpoint {path} has format {header['format']}, this silodp reads {FORMAT}: go on with the version of "
            "silodp that began the run, or begin a new one, which adds its own ε.",
            code="checkpoint.format",
        )
    if header["fingerprint"] != fingerprint:
        raise SilodpError(
            f"checkpoint {path} belongs to another set-up (data, task, method, seed, δ or aggregator differ; "
            "where budgets are laid out over a number of rounds, this number is a part of the method): resume with "
            "the configuration it was made with, or choose another output directory.",
            code="checkpoint.setup",
        )
    return Checkpoint(header["run"], fingerprint, header["round"], tensors["params"], tensors["velocity"])


def empty_velocity(params: Tensor) -> Tensor:
    """No momentum yet."""
    return torch.zeros(params.numel(), dtype=torch.float64)
