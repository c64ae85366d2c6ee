"""ULDP-SGD with the gradient that the published code of ULDP-FL clips (its src/local_trainer.py).

For a row of the tables of RESULTS.md: the privacy is that of `uldp-sgd`, the model is worse.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from silodp.mechanisms import ClippedRowStream, clip_rows
from silodp.methods import LocalContext, UldpSgd
from silodp.training import Task, user_updates
from silodp.training.sgd import LocalTraining

BATCH = 64
"""Its batch size, for this method as for all others."""


@dataclass(frozen=True, repr=False)
class PublishedSgd(UldpSgd):
    """A person's records are cut into batches; each batch's mean gradient is divided by the batch's size once more."""

    name: str = field(default="uldp-sgd-published", init=False)

    def local_update(self, context: LocalContext) -> ClippedRowStream:
        """Compute the gradient of everyone with a positive weight, and clip it."""
        present = context.weights[context.user] > 0
        x, y, user = context.x[present], context.y[present], context.user[present]
        batches = context.randomness.torch("batches")
        users, rows = published_updates(context.task, context.params, x, y, user, self.local, batches)
        clipped = iter([clip_rows(users, rows, self.clip)])
        return ClippedRowStream(clipped, context.task.size, self.bounds(context.population), weighted=True)


def published_updates(
    task: Task,
    params: Tensor,
    x: Tensor,
    y: Tensor,
    user: Tensor,
    local: LocalTraining,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return the users that have records, (r,), and −Σ_b (mean gradient of batch b)/|b| of each, (r, d).

    Args:
        task: model and loss. params: (d,), where gradients are taken. x, y: (n, ...). user: (n,) int64.
        local: one step of size 1 on whole batches, which is minus their mean gradient.
        generator: of the batches; every round has new ones.
    """
    order = torch.randperm(len(user), generator=generator)
    order = order[torch.argsort(user[order], stable=True)]
    users, counts = torch.unique_consecutive(user[order], return_counts=True)
    batches = (counts + BATCH - 1) // BATCH
    owner = torch.arange(len(users)).repeat_interleave(batches)
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    batch = (batches.cumsum(0) - batches).repeat_interleave(counts) + place // BATCH
    sizes = batch.bincount()
    found = torch.zeros(len(users), task.size)
    for ids, updates in user_updates(task, params, x[order], y[order], batch, local, generator):
        found.index_add_(0, owner[ids], updates / sizes[ids].unsqueeze(1))
    return users, found
