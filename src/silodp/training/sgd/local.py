"""Local work of a silo, for all its users at once.

All functions take numpy arrays or tensors, and start vectors `params` (d,) on the task's device. They train
in train mode (dropout draws per user and step). Rows that are not finite are yielded as they are: clipping
deals with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silodp.errors import SilodpError
from silodp.training.sgd._planning import WORTH_TRACING, plan_chunks
from silodp.training.sgd._schedule import LocalTraining, UserBatches
from silodp.training.sgd._tracing import gradient_of_one
from silodp.training.sgd._trainer import BLOCK_BYTES, Trainer, seed_from, seeded, start_of
from silodp.training.task import Task

__all__ = ["LocalTraining", "silo_update", "user_updates"]


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
    """Every user trains alone on their own records: the inner loop of ULDP-AVG (ULDP-FL, Alg. 3), for all at
    once.

    Args:
        task: model and loss.
        params: (d,) where everyone starts.
        x: (n, ...) records. y: (n, ...) targets. user: (n,) integer ids of whom they belong to.
        local: SGD's hyperparameters.
        generator: CPU generator of batch orders and dropout (never noise).
        memory_budget: bytes of tensors beyond the records themselves (torch's kernels keep some 10 MB more);
            None: 1 GiB, or a quarter of a GPU.

    Yields:
        Chunks (ids (r,) int64 on the CPU, deltas (r, d), local minus start). Every user with records appears
        exactly once; the result does not depend on the budget, except for rounding and for which dropout
        masks are drawn.

    Raises:
        SilodpError: a user does not fit the budget, or the model or loss cannot run for many users at once.
    """
    inputs, targets = task.tensors(x, y)
    # A copy, because torch warns of arrays that are read-only.
    owner = torch.as_tensor(user.copy() if isinstance(user, np.ndarray) else user).to("cpu", torch.int64)
    if not len(inputs) == len(targets) == len(owner):
        raise SilodpError(
            f"x, y and user have {len(inputs)}, {len(targets)} and {len(owner)} rows: they must agree",
            code="argument.shape",
        )
    start = start_of(task, params)
    if len(owner) == 0:
        return
    users = UserBatches.of(owner, local)
    trainer = Trainer(task, start, inputs, targets, local)
    row_bytes = task.size * start.element_size()
    chunks = plan_chunks(users, local, trainer.cost, row_bytes, memory_budget, task.device)
    steps: dict[tuple[int, int], int] = {}  # how often each shape of step will run
    for chunk in chunks.chunks:
        shape = trainer.shape(users.rows(chunk))
        steps[shape] = steps.get(shape, 0) + int(local.epochs * local.batches(users.counts[chunk]).max())
    seed = seed_from(generator)
    for number, chunk in enumerate(chunks.chunks):
        rows = users.rows(chunk)
        worth = steps[trainer.shape(rows)] >= WORTH_TRACING
        with seeded(task, seed + number):
            deltas = trainer.train(rows, generator, worth, chunks.block_bytes)
        yield rows.ids, deltas
        del deltas  # the caller's alone now: no second chunk stays alive here


def silo_update(
    task: Task, params: Tensor, x: Any, y: Any, local: LocalTraining, generator: torch.Generator
) -> Tensor:
    """Plain SGD over all records of a silo, reshuffled every epoch: the delta (d,), local minus start.

    The silo is one user who owns every record. `generator` (CPU) draws batch orders and dropout.
    """
    inputs, targets = task.tensors(x, y)
    start = start_of(task, params)
    if len(inputs) == 0:
        return torch.zeros_like(start)
    everyone = UserBatches.of(torch.zeros(len(inputs), dtype=torch.int64), local)
    trainer = Trainer(task, start, inputs, targets, local, gradient_of_one)
    worth = int(local.epochs * local.batches(everyone.counts).max()) >= WORTH_TRACING
    with seeded(task, seed_from(generator)):
        return trainer.train(everyone, generator, worth, BLOCK_BYTES)[0]
