"""The schedule of local training: which user trains on which record in which step, by counts and a generator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from silodp.errors import (
    MOST_REAL,
    check_fields,
    check_momentum,
    check_positive,
    check_real,
    check_whole,
    optional,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class LocalTraining:
    """Plain SGD on one user's (or one silo's) records, as `torch.optim.SGD` computes it.

    Attributes:
        learning_rate: η_l > 0.
        epochs: passes over the records, Q ≥ 1.
        batch_size: records per step, reshuffled every epoch; the last batch of an epoch may be smaller, and its loss
            is the mean over the records it has. None: all records in one step.
        momentum: in [0, 1).
        weight_decay: ≥ 0.

    Raises:
        SilodpError: a value out of its range.
    """

    learning_rate: float
    epochs: int = 1
    batch_size: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_fields(
            self,
            learning_rate=check_positive,
            epochs=_check_count,
            batch_size=optional(_check_count),
            momentum=check_momentum,
            weight_decay=partial(check_real, least=0),
        )

    def batches(self, counts: Tensor) -> Tensor:
        """Return the steps per epoch (u,) of users with these numbers of records (u,)."""
        import torch

        if self.batch_size is None:
            return torch.ones_like(counts)
        return -(-counts // self.batch_size)

    def width(self, count: int) -> int:
        """Return the records of the largest step of a user with `count` records."""
        return count if self.batch_size is None else min(count, self.batch_size)


def _check_count(name: str, value: object) -> None:
    check_real(name, value)
    check_whole(name, value, most=int(MOST_REAL))


@dataclass(frozen=True)
class UserBatches:
    """The records of a silo grouped by user, longest work first, so that users of like work are neighbors.

    Attributes:
        ids: (u,) the users that have records.
        counts: (u,) how many each has.
        starts: (u,) where each user's records begin in `order`.
        order: (n,) indices of records, user by user; those of a user keep the order of the table.
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
        """Return the users of a slice, over the same records."""
        return UserBatches(self.ids[chunk], self.counts[chunk], self.starts[chunk], self.order)


def draw_batch_order(counts: Tensor, local: LocalTraining, generator: torch.Generator) -> Tensor:
    """Draw the order in which every user goes through their records, anew for each epoch.

    Users whose records fit one batch keep their order and draw nothing. The generator is consumed user by user, so any
    split of the users into chunks gives the same order.

    Args:
        counts: (r,) records of every user.
        local: SGD's hyperparameters.
        generator: on the CPU.

    Returns:
        (r, epochs, longest) positions: entry [u, e, :counts[u]] lists user u's records 0..counts[u]-1 in the order of
        epoch e; the rest is padding.
    """
    import torch

    longest = int(counts.max())
    shuffled = (counts if local.batch_size is None else local.batches(counts)) > 1
    if local.batch_size is None or not shuffled.any():
        return torch.arange(longest).expand(len(counts), local.epochs, longest)
    real = torch.arange(longest) < counts.unsqueeze(1)
    # One sort shuffles everybody: random keys for the records of users who shuffle, their positions for the others.
    keys = torch.full((len(counts), longest, local.epochs), 2.0, dtype=torch.float64)  # padding sorts last
    position = torch.arange(longest, dtype=torch.float64).div(longest).unsqueeze(1)
    keys = torch.where((real & ~shuffled.unsqueeze(1)).unsqueeze(2), position, keys)
    drawn = real & shuffled.unsqueeze(1)
    keys[drawn] = torch.rand(int(drawn.sum()), local.epochs, dtype=torch.float64, generator=generator)
    return keys.argsort(dim=1, stable=True).transpose(1, 2)


def select_step_records(
    users: UserBatches, order: Tensor, local: LocalTraining, steps: range, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Select the batches of k steps, padded to the same width.

    Args:
        users: r of them.
        order: (r, epochs, longest) as `draw_batch_order` draws it.
        local: SGD's hyperparameters.
        steps: the k steps, counted from the start of training.
        width: of a padded batch, at least the batch size, or all records if these are fewer.

    Returns:
        (k, r, width) record indices, (k, r, width) bool: which are real, (k, r) bool: which users still train.
    """
    import torch

    batches = local.batches(users.counts)
    size = width if local.batch_size is None else local.batch_size
    step = torch.arange(steps.start, steps.stop).unsqueeze(1)
    training = step < local.epochs * batches
    epoch = (step // batches).clamp(max=local.epochs - 1)
    column = torch.arange(width)
    within = (step % batches).unsqueeze(2) * size + column
    real = (within < users.counts.unsqueeze(1)) & (column < size) & training.unsqueeze(2)
    # Padding repeats the first record of the same batch. How much padding there is depends on other users, so it must
    # not hold anything (such as a loss that overflows) that the batch does not hold anyway.
    within = within.clamp(max=order.shape[2] - 1)
    position = order[torch.arange(len(users)).unsqueeze(1), epoch.unsqueeze(2), within]
    records = users.order[users.starts.unsqueeze(1) + torch.where(real, position, position[..., :1])]
    return records, real, training
