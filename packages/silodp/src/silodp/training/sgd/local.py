"""Local work of a silo, for all its users at once.

All functions take numpy arrays or tensors, and start vectors `params` (d,) on the task's device. They train in train
mode (dropout draws per user and step). Rows that are not finite are yielded as they are: clipping deals with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silodp.errors import SilodpError
from silodp.mechanisms.rows import FactoredRows
from silodp.training.gradients import build_single_user_gradient
from silodp.training.model_state import draw_seed, seed_torch
from silodp.training.sgd._planning import default_memory_budget, plan_chunks
from silodp.training.sgd._schedule import LocalTraining, UserBatches
from silodp.training.sgd._trainer import BLOCK_BYTES, Trainer
from silodp.training.sgd.isolation import compute_large_alone, find_large_records, train_isolated
from silodp.training.sgd.persons import PersonGradients, takes_one_step
from silodp.training.task import Task

__all__ = ["LocalTraining", "compute_updates", "silo_update", "user_updates"]


def user_updates(
    task: Task,
    params: Tensor,
    x: Any,
    y: Any,
    user: Any,
    local: LocalTraining,
    generator: torch.Generator,
    memory_budget: int | None = None,
    *,
    isolate_units: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Train every user separately on their records, all at once.

    Args:
        task: The model and the loss.
        params: The parameters (d,) where every user starts.
        x: The records (n, ...).
        y: The targets (n, ...).
        user: The integer ids (n,) of the users that the records belong to.
        local: SGD's hyperparameters.
        generator: The CPU generator of batch orders and dropout (never noise).
        memory_budget: The bytes of tensors beyond the records themselves (torch's kernels keep some 10 MB more); None
            takes 1 GiB, or a quarter of a GPU.
        isolate_units: Whether every user is trained alone, so that their row depends, bit for bit, on their records
        alone;
            the budget is then not used. Users with large numbers in records or delta always are, see `sgd.isolation`.

    Yields:
        Chunks (ids (r,) int64 on the CPU, deltas (r, d), local minus start). Every user with records appears
        exactly once; the result does not depend on the budget, except for rounding and for which dropout
        masks are drawn.

    Raises:
        SilodpError: a user does not fit the budget, or the model or loss cannot be trained.

    Source: Kato et al. 2024, "ULDP-FL: Federated Learning with Across-Silo User-Level Differential Privacy",
    Algorithm 3 (ULDP-AVG), the inner loop.
    """
    data = _read_records(task, x, y, user)

    def train(x: Any, y: Tensor, owner: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return _train_together(task, start, x, y, owner, local, generator, memory_budget)

    start = task.validate_params(params)
    yield from _train_apart(task, start, *data, local, generator, isolate_units, train)


def compute_updates(
    task: Task,
    params: Tensor,
    x: Any,
    y: Any,
    user: Any,
    local: LocalTraining,
    generator: torch.Generator,
    *,
    isolate_units: bool = False,
) -> Iterator[tuple[Tensor, Tensor | FactoredRows]]:
    """Train every user as `user_updates` does; what is only clipped and added up needs no row for each user.

    Where all users take one step, deltas may be sums of outer products (`sgd.persons`), which take less time and memory
    than rows. They are those of `user_updates` up to rounding, and with dropout up to which masks are drawn.

    Args and Raises: as `user_updates`.

    Yields:
        Chunks (ids (r,) int64 on the CPU, deltas (r, d), a tensor or `FactoredRows`, which must not be changed).
    """
    data = _read_records(task, x, y, user)
    start = task.validate_params(params)

    def train(x: Any, y: Tensor, owner: Tensor) -> Iterator[tuple[Tensor, Tensor | FactoredRows]]:
        if len(owner) and takes_one_step(local, owner):
            gradients = PersonGradients.try_build(task, x, y)
            if gradients is not None and gradients.is_faster(start, owner, local):
                return gradients.descend(start, owner, local, generator)
        return _train_together(task, start, x, y, owner, local, generator, None)

    yield from _train_apart(task, start, *data, local, generator, isolate_units, train)


def _read_records(task: Task, x: Any, y: Any, user: Any) -> tuple[Any, Tensor, Tensor]:
    """Return records and targets on the task's device, and their owners on the CPU."""
    inputs, targets = task.tensors(x, y)
    # A copy, because torch warns of arrays that are read-only.
    owner = torch.as_tensor(user.copy() if isinstance(user, np.ndarray) else user).to("cpu", torch.int64)
    if not len(inputs) == len(targets) == len(owner):
        raise SilodpError(
            f"x, y and user have {len(inputs)}, {len(targets)} and {len(owner)} rows: they must agree",
            code="argument.shape",
        )
    return inputs, targets, owner


def _train_apart(
    task: Task,
    start: Tensor,
    inputs: Any,
    targets: Tensor,
    owner: Tensor,
    local: LocalTraining,
    generator: torch.Generator,
    isolate_units: bool,
    train: Callable[..., Iterator[tuple[Tensor, Any]]],
) -> Iterator[tuple[Tensor, Any]]:
    """Train users side by side by `train`, which gets their records, and one after another those with large numbers."""
    data = inputs, targets, owner
    large = owner if isolate_units else owner[find_large_records(task, inputs, targets)]

    def train_alone(ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return train_isolated(
            task, start, *_select(*data, torch.isin(owner, ids)), local, draw_seed(generator)
        )

    rest = ~torch.isin(owner, large)
    yield from compute_large_alone(train(*_select(*data, rest)), large, train_alone)


def _select(x: Any, y: Tensor, owner: Tensor, which: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Return the records, targets and owners at these places (n,) bool; all of them without a copy."""
    if bool(which.all()):
        return x, y, owner
    places = which.nonzero().squeeze(1)
    here = places.to(y.device)
    return x[here], y[here], owner[places]


def _train_together(
    task: Task,
    start: Tensor,
    inputs: Any,
    targets: Tensor,
    owner: Tensor,
    local: LocalTraining,
    generator: torch.Generator,
    memory_budget: int | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Train users side by side; Args and Yields as `user_updates`."""
    if len(owner) == 0:
        return
    users = UserBatches.of(owner, local)
    trainer = Trainer(task, start, inputs, targets, local)
    row_bytes = task.size * start.element_size()
    chunks = plan_chunks(users, local, trainer.cost, row_bytes, memory_budget, task.device)
    sizes = zip(chunks.chunks, chunks.step_bytes, strict=True)
    plans, shapes = trainer.plan([(users.counts[chunk], step_bytes) for chunk, step_bytes in sizes])
    seed = draw_seed(generator)
    for number, (chunk, plan) in enumerate(zip(chunks.chunks, plans, strict=True)):
        rows = users.rows(chunk)
        # A seed for each chunk, because `seed_torch` puts torch's generator back after each of them.
        with seed_torch(task.device, seed + number):
            deltas = trainer.train(rows, plan(), generator, shapes, chunks.block_bytes)
        yield rows.ids, deltas
        del deltas  # as in `user_updates`


def silo_update(
    task: Task, params: Tensor, x: Any, y: Any, local: LocalTraining, generator: torch.Generator
) -> Tensor:
    """Train with plain SGD over all records of a silo, as if one user owned them.

    Args:
        task: The model and the loss.
        params: The parameters (d,) where training starts.
        x: The records (n, ...).
        y: The targets (n, ...).
        local: SGD's hyperparameters.
        generator: The CPU generator of batch orders and dropout.

    Returns:
        The delta (d,), local minus start; zeros without records.

    Raises:
        SilodpError: `params` has another length than the model, or the model or loss cannot be trained.

    Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    Algorithm 1 (ClientUpdate).
    """
    inputs, targets = task.tensors(x, y)
    start = task.validate_params(params)
    if len(inputs) == 0:
        return torch.zeros_like(start)
    everyone = UserBatches.of(torch.zeros(len(inputs), dtype=torch.int64), local)
    trainer = Trainer(task, start, inputs, targets, local, build_single_user_gradient)
    (plan,), shapes = trainer.plan([(everyone.counts, default_memory_budget(task.device))])
    with seed_torch(task.device, draw_seed(generator)):
        return trainer.train(everyone, plan(), generator, shapes, BLOCK_BYTES)[0]
