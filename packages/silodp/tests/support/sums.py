"""Σ over silos of what a method adds up, without noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from silodp.data.federation import Federation
from silodp.mechanisms.clipping import ClippedRowStream, add_weighted_rows
from silodp.mechanisms.noise import Randomness
from silodp.methods import FederationSize, LocalContext, Method, roles


def list_streams(
    method: Method, federation: Federation, task: Any, skip: int | None = None, **context: Any
) -> Iterator[tuple[ClippedRowStream, torch.Tensor]]:
    """Yield the rows and the weights of each silo; one person's records may be left out."""
    population = FederationSize(len(federation.silos), federation.users)
    records = federation.counts()
    if skip is not None:
        records[:, skip] = 0
    weights = roles.compute_user_weights(method, records if method.needs_counts else None, population)
    for place, silo in enumerate(federation.silos):
        keep = silo.user != skip
        x, y = task.tensors(silo.x[keep], silo.y[keep])
        local = LocalContext(
            task, torch.zeros(0), x, y, torch.from_numpy(silo.user[keep]), torch.from_numpy(weights[place].copy()),
            population, Randomness.from_seed(0), **context,
        )  # fmt: skip
        found = method.local_update(local)
        assert isinstance(found, ClippedRowStream)
        yield found, local.weights


def exact_sum(
    method: Method, federation: Federation, task: Any, skip: int | None = None
) -> np.ndarray[Any, Any]:
    """Return the sum (k,) over all silos."""
    found = [add_weighted_rows(*one).value.numpy() for one in list_streams(method, federation, task, skip)]
    return np.sum(found, axis=0)
