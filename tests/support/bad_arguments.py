"""Calls of the public interface with one argument of any type and value: each returns, or raises `SilodpError`."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from silodp import Budget, Federation, LocalTraining, Schema, SiloData, Task, load, train
from silodp.accounting import compute_delta, compute_epsilon
from silodp.accounting.events import Gaussian
from silodp.aggregators import Masked
from silodp.data import embedded, load_profile
from silodp.methods import METHODS, FederationSize, ServerAdam, ServerSgd, TailAverage, UldpAvg, VerifiedIds
from silodp.training import binary_cross_entropy, cross_entropy, exponential_survival
from silodp_analytics.evaluation.series import Evaluation
from silodp_budgets.user_budgets import UserBudgets
from silodp_experiments.model_averaging import average_models
from silodp_private.lattice import Lattice
from silodp_private.paillier.aggregator import Paillier
from support.oracles import logistic_task, small_federation

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 2**63, 10**400, 0.5, -0.5, 3.0, float("inf"), float("nan"), 1j, "", "x", "\0",
    "a:b", "\udcff", b"x", [], [1], ["x"], [None], [[1, 2]], (), (1, 2), {}, {"x": 1}, {1: 2}, {"x": None}, set(),
    object(), int, len, np.zeros(3), np.zeros((2, 2)), np.array("x"), np.array([None]), np.float32(1), np.int64(2),
    torch.zeros(3), torch.zeros(()), datetime.date(2020, 1, 1), Path("nowhere"), nn.Linear(1, 1), range(3),
)  # fmt: skip

Call = tuple[Callable[..., Any], dict[str, Any]]


def list_calls(folder: Path) -> dict[str, Call]:
    """Return functions and classes that users call, with arguments that are right."""
    x, y = np.zeros((8, 4), np.float32), np.array([0, 1] * 4)
    noise = {"noise_multiplier": 5.0, "clip": 1.0}
    steps = {**noise, "local_steps": 2, "expected_batch_size": 4.0, "local_learning_rate": 0.1}
    public = {
        "rounds": 2,
        "delta": 1e-5,
        "accountant": "pld",
    }
    own: dict[str, dict[str, Any]] = {
        "default": {},
        "statistics": {"noise_multiplier": 5.0},
        "regression": {"noise_multiplier": 5.0},
        "uldp-group": {**steps, "group_size": 8, "record_sampling": 0.1},
        "ddp": {**steps, "record_sampling": 0.1},
        "rpdp": {**steps, "largest_budget": 5.0},
        "rpdp-filter": {**steps, "largest_budget": 5.0},
        "rpdp-minimum": {**steps, "budget": 1.0},
        "rpdp-dropout": {**steps, "threshold": 1.0},
    }
    calls: dict[str, Call] = {
        name: (method, {k: v for k, v in own.get(name, noise).items()}) for name, method in METHODS.items()
    }
    for name in ("rpdp", "rpdp-filter", "rpdp-minimum", "rpdp-dropout"):
        known = inspect.signature(METHODS[name]).parameters
        calls[name][1].update({k: v for k, v in public.items() if k in known})
    table = folder / "a.csv"
    (folder / "b.csv").write_text(
        "person,age,label\n" + "".join(f"p{i},{30 + i},{i % 2}\n" for i in range(12))
    )
    table.write_text("person,age,label\n" + "".join(f"p{i},{20 + i},{i % 2}\n" for i in range(12)))
    schema = {"user": "person", "label": "label", "classes": [0, 1], "numeric": {"age": [0, 100]}}
    federation = small_federation()
    calls |= {
        "SiloData": (SiloData, {"name": "a", "x": x, "y": y, "user": np.arange(8)}),
        "LocalTraining": (LocalTraining, {"learning_rate": 0.1}),
        "Budget": (Budget, {"epsilon": 1.0, "delta": 1e-5}),
        "Task": (Task, {"model": nn.Linear(4, 1), "loss": binary_cross_entropy()}),
        "Schema": (Schema, schema),
        "Federation": (Federation, {"silos": federation.silos, "users": federation.users, "test": None}),
        "from_tables": (
            Federation.from_tables,
            {"files": {"a": table, "b": folder / "b.csv"}, "schema": Schema(**schema)},
        ),
        "average_models": (
            average_models,
            {
                "models": [np.zeros(3), np.ones(3)],
                "noise_multiplier": 5.0,
                "local_steps": 2,
                "record_sampling": 0.1,
                "delta": 1e-5,
            },
        ),
        "load": (load, {"directory": folder}),
        "load_profile": (load_profile, {"path": folder / "identity.toml"}),
        "embedded": (embedded, {"users": 12, "silos": 3}),
        "Evaluation": (Evaluation, {"across": "sums", "noise_multiplier": 5.0}),
        "Lattice": (Lattice, {}),
        "Masked": (Masked, {}),
        "Paillier": (Paillier, {}),
        "ServerAdam": (ServerAdam, {}),
        "ServerSgd": (ServerSgd, {}),
        "TailAverage": (TailAverage, {"last": 2}),
        "VerifiedIds": (VerifiedIds, {"users": 2}),
        "UserBudgets": (UserBudgets, {"by": "clip", "rounds": 2, "largest_budget": 2.0}),
        "FederationSize": (FederationSize, {"silos": 3, "users": 12}),
        "compute_epsilon": (compute_epsilon, {"charges": [(Gaussian(5.0), 3)], "delta": 1e-5}),
        "compute_delta": (compute_delta, {"charges": [(Gaussian(5.0), 3)], "epsilon": 1.0}),
        "binary_cross_entropy": (binary_cross_entropy, {}),
        "cross_entropy": (cross_entropy, {}),
        "exponential_survival": (exponential_survival, {"typical_time": 1.0}),
        "train": (
            train,
            {
                "federation": federation,
                "task": logistic_task(),
                "method": UldpAvg(5.0, 1.0),
                "rounds": 1,
                "seed": 0,
                "delta": 1e-5,
            },
        ),
    }
    return calls


def list_cases(calls: dict[str, Call]) -> Iterator[tuple[str, str, Any]]:
    """Yield the name of a call, an argument of it, and a value to give it."""
    for name, (function, _) in calls.items():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                yield from ((name, parameter.name, value) for value in VALUES)
