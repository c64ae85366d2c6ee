"""The checkpoint of the server: one sealed file, replaced after every round, from which a run is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError, deserialize

from silodp.errors import SilodpError
from silodp.parsing import UNSOUND, parse_json
from silodp.wire.files import read_sealed, write_sealed

if TYPE_CHECKING:  # a report, which reads the fingerprint, does not import torch
    from torch import Tensor

    from silodp.methods.base import Method
    from silodp.methods.roles import FederationSize, MethodState

_METHOD = "method/"
"""Prefix of the names of the method's arrays; those of the server optimizer have none."""
FORMAT = 5
"""The format that is written, and the only one that is read.

5: silos draw the sample of users, and choose their part of a person's records;
4: stores have a namespace for each round, the server optimizer and the method a state;
3: silos have a gate and a ledger;
2: the server forgets past rounds.
"""


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
        optimizer = method.make_server_optimizer().initial_state(params)
        return cls(run, fingerprint, 0, params, optimizer, method.initial_state(population))


def save_checkpoint(path: Path, state: Checkpoint) -> None:
    """Write a checkpoint durably; after a crash the file has this state or the one before it."""
    import torch
    from safetensors.torch import save

    header = {"format": FORMAT, "run": state.run, "fingerprint": state.fingerprint, "round": state.round}
    optimizer = {name: value.cpu() for name, value in state.optimizer.items()}
    method = {_METHOD + name: torch.from_numpy(value) for name, value in state.method.items()}
    tensors = {"params": state.params.cpu(), **optimizer, **method}
    write_sealed(path, save(tensors, metadata={"checkpoint": json.dumps(header)}))


def read_fingerprint(path: Path) -> str:
    """Return the digest of the specification in a checkpoint.

    Raises:
        SilodpError: the checkpoint is damaged.
    """
    return str(_read_header(read_sealed(path, f"checkpoint {path}"), path)["fingerprint"])


def _read_header(data: bytes, path: Path) -> dict[str, Any]:
    try:
        deserialize(data)  # type: ignore[no-untyped-call]
        length = int.from_bytes(data[:8], "little")
        header: dict[str, Any] = parse_json(parse_json(data[8 : 8 + length])["__metadata__"]["checkpoint"])
    except (SafetensorError, *UNSOUND) as error:
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
        SilodpError: it is missing, damaged, of another format, or of a run with other settings.
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
    if header["format"] != FORMAT:
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
    params = tensors.pop("params")
    return Checkpoint(header["run"], fingerprint, header["round"], params, tensors, method)
