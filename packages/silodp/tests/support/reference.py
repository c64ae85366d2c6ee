"""What `user_updates` must equal: one loop over users with torch.optim.SGD, on the same order of batches."""

from __future__ import annotations

import numpy as np
import torch

from silodp.training import LocalTraining, Task, user_updates
from silodp.training.sgd._schedule import UserBatches, draw_batch_order


def looped(task: Task, params, x, y, user, local: LocalTraining, seed: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    torch.randint(1 << 62, (), generator=generator)  # the seed of dropout is drawn first
    inputs, targets = task.tensors(x, y)
    users = UserBatches.of(torch.as_tensor(user), local)
    order = draw_batch_order(users, local, generator)
    deltas = {}
    orders = order.split(users.counts.tolist(), dim=1)
    for who, count, own in zip(users.ids, users.counts, orders, strict=True):
        model = task.load(params).train()
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad],
            lr=local.learning_rate,
            momentum=local.momentum,
            weight_decay=local.weight_decay,
        )
        for epoch in range(local.epochs):
            for records in own[epoch].split(local.batch_size or int(count)):
                optimizer.zero_grad()
                everyone = torch.ones(len(records), dtype=task.dtype)
                given = inputs[records]
                outputs = model(given) if isinstance(given, torch.Tensor) else model(**given)
                task.loss.function(outputs, targets[records], everyone).backward()
                optimizer.step()
        deltas[int(who)] = task.flatten(model) - params
    return deltas


def updates(task: Task, params, x, y, user, local, seed: int, **more) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for ids, deltas in user_updates(task, params, x, y, user, local, generator, **more):
        assert ids.dtype == torch.int64
        assert deltas.shape == (len(ids), task.size)
        for who, delta in zip(ids.tolist(), deltas, strict=True):
            assert who not in found
            found[who] = delta.clone()
    return found


def assert_equal_updates(a, b, tolerance: float) -> None:
    """Compare updates by user; numbers above 1, of trainings that diverge, up to the tolerance times their size.

    Two orders of the same terms differ by roundings that training multiplies: on another CPU, or with another torch,
    these are other ones. A tolerance below 1e-6 is therefore for double precision only, whose roundings of 1e-16 stay
    far below it; 0 is for two calls that compute the same operations on tensors of the same shapes.
    """
    assert a.keys() == b.keys()
    for who in a:
        assert tolerance == 0 or tolerance >= 1e-6 or a[who].dtype == b[who].dtype == torch.float64
        assert float(((a[who] - b[who]).abs() / b[who].abs().clamp(min=1)).max()) <= tolerance, who


def ragged(sizes: list[int], seed: int, shape=(3,), classes: int = 2):
    """Records of users with these sizes (0: absent), in a mixed order of rows."""
    rng = np.random.default_rng(seed)
    user = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    x = rng.normal(size=(len(user), *shape)).astype(np.float32)
    return x, rng.integers(0, classes, len(user)), user
