"""The schedule of local training: which user trains on which record in which step, by counts and a generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from silodp.settings import MAX_REAL, Momentum, Positive, Range, Settings, Whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_Count = Annotated[int, Range(), Whole(limit=int(MAX_REAL))]  # by Range(), a text is of a wrong type


@dataclass(frozen=True)
class LocalTraining(Settings):
    """Plain SGD on one user's (or one silo's) records, as `torch.optim.SGD` computes it.

    Attributes:
        learning_rate: The step size η_l > 0.
        epochs: The number Q ≥ 1 of passes over the records.
        batch_size: The records per step, reshuffled every epoch. The last batch of an epoch may be smaller, and its
            loss is the mean over the records it has. None takes all records in one step.
        momentum: The factor in [0, 1) of the velocity that is kept from step to step.
        weight_decay: The factor ≥ 0 of the parameters that is added to their gradient.

    Raises:
        SilodpError: a value out of its range.

    Source: local training of McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized
    Data", Algorithm 1 (ClientUpdate).
    """

    learning_rate: Positive
    epochs: _Count = 1
    batch_size: _Count | None = None
    momentum: Momentum = 0.0
    weight_decay: Annotated[float, Range(least=0)] = 0.0

    def batches(self, counts: Tensor) -> Tensor:
        """Return the steps per epoch (u,) of users with these numbers of records (u,)."""
        import torch

        if self.batch_size is None:
            return torch.ones_like(counts)
        return -(-counts // self.batch_size)

    def step(self, params: Sequence[Tensor], velocity: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Take one step in place, as torch.optim.SGD with dampening 0 does."""
        # Decay before momentum, as torch does: the velocity includes the decay.
        if self.weight_decay:
            gradients = [g.add(p, alpha=self.weight_decay) for g, p in zip(gradients, params, strict=True)]
        if self.momentum:
            gradients = [v.mul_(self.momentum).add_(g) for v, g in zip(velocity, gradients, strict=True)]
        for p, direction in zip(params, gradients, strict=True):
            p.sub_(direction, alpha=self.learning_rate)


@dataclass(frozen=True)
class UserBatches:
    """The records of a silo grouped by user, longest work first, so that users of like work are neighbors.

    Attributes:
        ids: The users that have records, (u,).
        counts: The number of records of each, (u,).
        starts: Where each user's records begin in `order`, (u,).
        order: The indices of records, (n,), user by user; those of a user keep the order of the table.
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
        # Two stable sorts: by steps, and among users of as many steps by records.
        work = by_count[local.batches(counts)[by_count].argsort(stable=True, descending=True)]
        return cls(ids[work], counts[work], starts[work], order)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, chunk: slice) -> UserBatches:
        """Return the users of a slice, over the same records."""
        return UserBatches(self.ids[chunk], self.counts[chunk], self.starts[chunk], self.order)


def draw_batch_order(users: UserBatches, local: LocalTraining, generator: torch.Generator) -> Tensor:
    """Draw the order in which every user goes through their records, anew for each epoch.

    Users whose records fit one batch keep their order and draw nothing. The generator is consumed user by user, so any
    split of the users into chunks gives the same order.

    Args:
        users: The r users of a chunk.
        local: SGD's hyperparameters.
        generator: The CPU generator of the order.

    Returns:
        (epochs, n) record indices: user after user, each with all of their records.
    """
    import torch

    counts = users.counts
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    place = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    records = users.order[users.starts[owner] + place]
    shuffled = (local.batches(counts) > 1)[owner]
    if not shuffled.any():
        return records.expand(local.epochs, -1)
    # Sorting random keys shuffles everybody at once; the positions of those who keep their order are sorted already.
    keys = place.to(torch.float64).repeat(local.epochs, 1)
    keys[:, shuffled] = torch.rand(
        int(shuffled.sum()), local.epochs, dtype=torch.float64, generator=generator
    ).T
    # Two stable sorts shuffle within each user: by key, then by whose record it is.
    mixed = keys.argsort(dim=1, stable=True)
    by_owner = owner[mixed].argsort(dim=1, stable=True)
    return records[mixed.gather(1, by_owner)]


def select_step_records(
    counts: Tensor, first: Tensor, order: Tensor, local: LocalTraining, done: Tensor, steps: int, width: int
) -> tuple[Tensor, Tensor]:
    """Select the batches of k steps, padded to the same width.

    Args:
        counts: The number of records of every user, (r,).
        first: Where each user's records begin in a row of `order`, (r,).
        order: The record indices (epochs, n) as `draw_batch_order` draws them.
        local: SGD's hyperparameters.
        done: The steps that each user took before, (r,).
        steps: The number k of steps.
        width: The records of a padded batch, at least the length of each batch.

    Returns:
        (k, r, width) record indices, and bool: which are real.
    """
    import torch

    batches = local.batches(counts)
    size = width if local.batch_size is None else local.batch_size
    step = done + torch.arange(steps).unsqueeze(1)
    column = torch.arange(width)
    # The place of a record in the user's epoch: whole batches before it, and its column.
    within = (step % batches).unsqueeze(2) * size + column
    real = (within < counts.unsqueeze(1)) & (column < size)
    # Padding repeats the first record of the same batch. How much padding there is depends on other users, so it must
    # not hold anything (such as a loss that overflows) that the batch does not hold anyway.
    within = torch.where(real, within, within[..., :1])
    return order[(step // batches).unsqueeze(2), first.unsqueeze(1) + within], real
