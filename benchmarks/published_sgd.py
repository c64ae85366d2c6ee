"""ULDP-SGD with the gradient that the published code of ULDP-FL clips (its src/local_trainer.py).

For a row of the tables of docs/results.md: the privacy is that of `uldp-sgd`, the model is worse.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        gradients = published_updates(
            context.task, context.params, x, y, user, context.randomness.torch("batches")
        )
        rows = (clip_rows(users, each, self.clip) for users, each in gradients)
        return ClippedRowStream(rows, context.task.size, self.bounds(context.population), weighted=True)


def published_updates(
    task: Task, params: Tensor, x: Tensor, y: Tensor, user: Tensor, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the users that have records, and −Σ_b (mean gradient of batch b)/|b| of each, (r, d).

    Args:
        task: model and loss. params: (d,), where gradients are taken. x, y: (n, ...). user: (n,) int64.
        generator: of the batches; every round has new ones.
    """
    if not len(user):
        return
    order = torch.randperm(len(user), generator=generator)
    order = order[torch.argsort(user[order], stable=True)]
    users, counts = torch.unique_consecutive(user[order], return_counts=True)
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    owner = torch.arange(len(users)).repeat_interleave(counts)
    _, batch, sizes = torch.unique(
        torch.stack([owner, place // BATCH]), dim=1, return_inverse=True, return_counts=True
    )
    owner_of_batch = torch.empty(len(sizes), dtype=torch.int64).index_put_((batch,), owner)
    found = torch.zeros(len(users), task.size)
    # One step of size 1 on the whole of a batch is minus its mean gradient.
    step = LocalTraining(learning_rate=1.0, epochs=1, batch_size=None)
    for batches, updates in user_updates(task, params, x[order], y[order], batch, step, generator):
        found.index_add_(0, owner_of_batch[batches], updates / sizes[batches].unsqueeze(1))
    yield users, found
