"""Local work of a silo, for all its users or records at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from silodp.training.schedule import LocalTraining, UserRecords, batch_order, step_records
from silodp.training.task import Task

__all__ = ["LocalTraining", "record_gradients", "silo_update", "user_updates"]


def user_updates(
    task: Task,
    params: Tensor,
    x: Any,
    y: Any,
    user: Any,
    local: LocalTraining,
    generator: torch.Generator,
    memory_budget: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every user trains alone on their own records of this silo: chunks (user ids (r,), deltas (r, d))."""
    inputs, targets = task.tensors(x, y)
    users = UserRecords.of(torch.as_tensor(user), local)
    gradient = vmap(grad(task.objective), randomness="different")
    for start in range(0, len(users), 100):
        chunk = users.rows(slice(start, start + 100))
        order = batch_order(chunk.counts, local, generator)
        rows = tuple(p.expand(len(chunk), *p.shape).clone() for p in task.unflatten(params))
        velocity = [torch.zeros_like(p) for p in rows]
        for step in range(int(local.epochs * local.batches(chunk.counts).max())):
            records, real, training = (t[0] for t in step_records(chunk, order, local, range(step, step + 1)))
            g = gradient(rows, inputs[records], targets[records], real.to(task.dtype))
            for p, q, v in zip(rows, g, velocity, strict=True):
                q = q + local.weight_decay * p
                v.mul_(local.momentum).add_(q)
                rate = (local.learning_rate * training.to(task.dtype)).reshape(-1, *[1] * (p.dim() - 1))
                p.addcmul_(v, rate, value=-1)
        yield chunk.ids, torch.cat([p.flatten(1) for p in rows], 1) - params


def silo_update(
    task: Task, params: Tensor, x: Any, y: Any, local: LocalTraining, generator: torch.Generator
) -> Tensor:
    """Plain SGD over all records of a silo: the delta (d,)."""
    inputs, targets = task.tensors(x, y)
    users = UserRecords.of(torch.zeros(len(inputs), dtype=torch.int64), local)
    return next(user_updates(task, params, inputs, targets, torch.zeros(len(inputs), dtype=torch.int64), local, generator))[1][0]


def record_gradients(
    task: Task, params: Tensor, x: Any, y: Any, memory_budget: int | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Gradients of each record's own loss: chunks (slice of records, gradients (r, d))."""
    inputs, targets = task.tensors(x, y)
    one = torch.ones(1, dtype=task.dtype, device=task.device)

    def single(p: tuple[Tensor, ...], a: Tensor, b: Tensor) -> Tensor:
        return task.objective(p, a.unsqueeze(0), b.unsqueeze(0), one)

    gradient = vmap(grad(single), in_dims=(None, 0, 0), randomness="different")
    for start in range(0, len(inputs), 256):
        piece = slice(start, min(start + 256, len(inputs)))
        rows = gradient(task.unflatten(params), inputs[piece], targets[piece])
        yield piece, torch.cat([g.flatten(1) for g in rows], 1)
