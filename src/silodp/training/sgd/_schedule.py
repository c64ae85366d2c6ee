"""Who trains on which record in which step: pure functions of counts and a generator."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from silodp.errors import SilodpError, check_real


@dataclass(frozen=True)
class LocalTraining:
    """Plain SGD on one user's (or one silo's) records, as `torch.optim.SGD` computes it.

    Attributes:
        learning_rate: η_l > 0.
        epochs: passes over the records, Q ≥ 1.
        batch_size: records per step, reshuffled every epoch, the last batch of an epoch may be smaller and
        its loss
            is the mean over the records it has; `None`: all records in one step.
        momentum: in [0, 1).
        weight_decay: ≥ 0.
    """

    learning_rate: float
    epochs: int = 1
    batch_size: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "batch_size" or value is not None:
                check_real(name, value)
        for name, value, fits, wanted in (
            ("learning_rate", self.learning_rate, 0 < self.learning_rate < float("inf"), "above 0"),
            (
                "epochs",
                self.epochs,
                isinstance(self.epochs, Integral) and self.epochs >= 1,
                "a whole number ≥ 1",
            ),
            (
                "batch_size",
                self.batch_size,
                self.batch_size is None or (isinstance(self.batch_size, Integral) and self.batch_size >= 1),
                "a whole number ≥ 1, or None for all records at once",
            ),
            ("momentum", self.momentum, 0 <= self.momentum < 1, "at least 0 and below 1"),
            ("weight_decay", self.weight_decay, 0 <= self.weight_decay < float("inf"), "at least 0"),
        ):
            if not fits:
                raise SilodpError(f"{name} must be {wanted}, not {value}", code="argument.value", field=name)

    def batches(self, counts: Tensor) -> Tensor:
        """Steps per epoch (u,) of users with these numbers of records (u,)."""
        if self.batch_size is None:
            return torch.ones_like(counts)
        return -(-counts // self.batch_size)


@dataclass(frozen=True)
class UserBatches:
    """The records of a silo grouped by user, longest work first, so that users of like work are neighbors.

    Attributes:
        ids: (u,) the users that have records.
        counts: (u,) how many each has.
        starts: (u,) where each user's records begin in `order`.
        order: (n,) indices of records; a user's own keep the order of the table.
    """

    ids: Tensor
    counts: Tensor
    starts: Tensor
    order: Tensor

    @classmethod
    def of(cls, user: Tensor, local: LocalTraining) -> UserBatches:
        """Group by `user` (n,) int64; sorted by steps, then records, both falling, then id."""
        order = user.argsort(stable=True)
        ids, counts = user.unique(return_counts=True)  # type: ignore[no-untyped-call]
        starts = counts.cumsum(0) - counts
        by_count = counts.argsort(stable=True, descending=True)
        work = by_count[local.batches(counts)[by_count].argsort(stable=True, descending=True)]
        return cls(ids[work], counts[work], starts[work], order)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, chunk: slice) -> UserBatches:
        """The same records, seen by the users of a slice only."""
        return UserBatches(self.ids[chunk], self.counts[chunk], self.starts[chunk], self.order)


def batch_order(counts: Tensor, local: LocalTraining, generator: torch.Generator) -> Tensor:
    """For users with `counts` (r,) records: (r, epochs, longest) positions, each epoch a fresh permutation.

    Entry [u, e, :counts[u]] lists user u's records 0..counts[u]-1 in the order of epoch e; what follows is
    padding. Users whose records fit one batch keep their order and draw nothing. The generator is consumed
    user by user, so any split of the users into chunks gives the same order.
    """
    longest = int(counts.max())
    shuffled = (counts if local.batch_size is None else local.batches(counts)) > 1
    if local.batch_size is None or not shuffled.any():
        return torch.arange(longest).expand(len(counts), local.epochs, longest)
    real = torch.arange(longest) < counts.unsqueeze(1)
    keys = torch.full((len(counts), longest, local.epochs), 2.0, dtype=torch.float64)  # padding sorts last
    position = torch.arange(longest, dtype=torch.float64).div(longest).unsqueeze(1)
    keys = torch.where((real & ~shuffled.unsqueeze(1)).unsqueeze(2), position, keys)
    drawn = real & shuffled.unsqueeze(1)
    keys[drawn] = torch.rand(int(drawn.sum()), local.epochs, dtype=torch.float64, generator=generator)
    return keys.argsort(dim=1, stable=True).transpose(1, 2)


def step_records(
    users: UserBatches, order: Tensor, local: LocalTraining, steps: range, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The batches of some steps, padded to `width` records (at least the batch size, or all records if
    smaller).

    Returns (k, r, width) record indices, (k, r, width) which are real, (k, r) who still trains. Padding
    repeats the first record of the same batch: how much padding there is depends on other users, so what it
    holds (a loss that overflows, say) must be what the batch holds anyway.
    """
    batches = local.batches(users.counts)
    size = width if local.batch_size is None else local.batch_size
    step = torch.arange(steps.start, steps.stop).unsqueeze(1)
    training = step < local.epochs * batches
    epoch = (step // batches).clamp(max=local.epochs - 1)
    column = torch.arange(width)
    within = (step % batches).unsqueeze(2) * size + column
    real = (within < users.counts.unsqueeze(1)) & (column < size) & training.unsqueeze(2)
    within = within.clamp(max=order.shape[2] - 1)
    position = order[torch.arange(len(users)).unsqueeze(1), epoch.unsqueeze(2), within]
    records = users.order[users.starts.unsqueeze(1) + torch.where(real, position, position[..., :1])]
    return records, real, training
