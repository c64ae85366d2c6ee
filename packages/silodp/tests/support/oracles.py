"""What several test rooms judge by."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from silodp.data.federation import Federation, SiloData
from silodp.mechanisms.clipping import Bounds, ClippedRowStream, add_weighted_rows, clip_rows
from silodp.mechanisms.rows import FactoredRows
from silodp.training.losses import binary_cross_entropy
from silodp.training.metrics import accuracy
from silodp.training.task import Task


def std_is(samples: np.ndarray, sigma: float, level: float = 1e-6) -> bool:
    """Two-sided chi-square test that independent centered samples have this standard deviation."""
    samples = np.asarray(samples).ravel()
    low, high = stats.chi2.ppf([level / 2, 1 - level / 2], len(samples))
    return bool(low <= np.sum((samples / sigma) ** 2) <= high)


def judges_std(samples: np.ndarray, sigma: float) -> bool:
    """Accepts sigma and rejects 2/3 and 3/2 of it: a test that cannot reject is no test."""
    return (
        std_is(samples, sigma) and not std_is(samples, sigma * 2 / 3) and not std_is(samples, sigma * 3 / 2)
    )


def small_federation(
    silos: int = 3,
    users: int = 12,
    features: int = 4,
    records: int = 60,
    seed: int = 0,
    held_out: int = 0,
    **changes: object,
) -> Federation:
    """A learnable table, spread at random; `held_out`: test records of each silo, two of every person."""
    rng = np.random.default_rng(seed)
    slope = rng.normal(size=features)
    x = rng.normal(size=(records + 200, features)).astype(np.float32)
    y = (x @ slope + 0.3 * rng.normal(size=len(x)) > 0).astype(np.int64)
    silo = rng.integers(silos, size=records)
    user = rng.integers(users, size=records)
    places = [slice(records + s * held_out, records + (s + 1) * held_out) for s in range(silos)]
    tests = [
        SiloData(f"silo{s}", x[place], y[place], np.arange(held_out) // 2) if held_out else None
        for s, place in enumerate(places)
    ]
    parts = tuple(
        SiloData(
            f"silo{s}",
            x[:records][silo == s],
            y[:records][silo == s],
            user[silo == s].astype(np.int64),
            test=tests[s],
        )
        for s in range(silos)
    )
    test = SiloData("test", x[records:], y[records:], np.full(200, -1))
    return Federation(silos=parts, users=users, test=test, classes=2, **changes)  # type: ignore[arg-type]


def without_user(federation: Federation, user: int) -> Federation:
    """The neighboring federation: all records of one person, in all silos, are emptied."""
    parts = []
    for silo in federation.silos:
        keep = silo.user != user
        parts.append(SiloData(silo.name, silo.x[keep], silo.y[keep], silo.user[keep]))
    return Federation(
        silos=tuple(parts), users=federation.users, test=federation.test, classes=federation.classes
    )


def expand_rows(rows: torch.Tensor | FactoredRows) -> torch.Tensor:
    """Gradients of single records as one tensor in single precision."""
    return rows.expand().float() if isinstance(rows, FactoredRows) else rows


def logistic_task(features: int = 4) -> Task:
    """One logit."""
    return Task(torch.nn.Linear(features, 1), binary_cross_entropy(), {"accuracy": accuracy})


def add_up(chunks: Iterator[tuple[Tensor, Tensor]], size: int) -> Tensor:
    rows = (clip_rows(owners, rows, 1.0) for owners, rows in chunks)
    return add_weighted_rows(ClippedRowStream(rows, size, Bounds(1.0, 1.0, 1.0, 1e9), weighted=False)).value
