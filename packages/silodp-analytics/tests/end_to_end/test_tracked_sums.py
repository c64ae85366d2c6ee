"""A tracker elsewhere is given metrics of noised sums, where the run's ε covers them, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from silodp.methods import UldpAvg
from silodp.runtime.train import train
from silodp.tracking import Tracker
from silodp.training.sgd.local import LocalTraining
from support.oracles import logistic_task, small_federation

METHOD = UldpAvg(5.0, 0.5, LocalTraining(learning_rate=0.1))


class Memory(Tracker):
    """Keeps what is logged."""

    name = "memory"

    def __init__(self, target: str | Path) -> None:
        super().__init__(target)
        self.logged: dict[int, Mapping[str, float]] = {}

    def log(self, run: str, round_: int, numbers: Mapping[str, float]) -> None:
        self.logged[round_] = numbers


def test_metrics_by_noised_sums_are_covered_and_logged_anywhere() -> None:
    tracker = Memory("https://tracking.example.org")
    result = train(
        small_federation(held_out=20),
        logistic_task(),
        METHOD,
        rounds=2,
        callbacks=[tracker],
        evaluation={"across": "sums", "noise_multiplier": 0.5},
    )
    expected = {f"metrics/{name}": value for name, value in result.metrics[2]["metrics"].items()}
    assert expected
    assert expected.items() <= tracker.logged[2].items()
    assert not any(name.startswith("private/") for name in tracker.logged[2])


@pytest.mark.parametrize(
    "changes", [{"seed": 0}, {"method": dataclasses.replace(METHOD, noise_multiplier=0.0)}]
)
def test_metrics_by_noised_sums_stay_here_where_no_epsilon_covers_them(changes: dict[str, Any]) -> None:
    """The noise of a seed can be computed, and without noise in training there is no ε of the run."""
    tracker = Memory("https://tracking.example.org")
    settings: dict[str, Any] = {"method": METHOD, "seed": None, **changes}
    evaluation = {"across": "sums", "noise_multiplier": 0.5}
    federation, method = small_federation(held_out=20), settings.pop("method")
    train(
        federation, logistic_task(), method, rounds=1, callbacks=[tracker], evaluation=evaluation, **settings
    )
    assert all(name.startswith("epsilon/") for numbers in tracker.logged.values() for name in numbers)
