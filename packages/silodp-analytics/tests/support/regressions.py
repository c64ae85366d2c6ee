"""Regressions in one process: of tables, and of arrays alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from silodp.config.resolve import ResolvedRun, load_config
from silodp.runtime.train import train
from silodp_analytics.regression.config import derive_regression
from silodp_analytics.regression.families import Family
from silodp_analytics.regression.newton import Fit, Rounds
from silodp_analytics.regression.result import RegressionResult, read_rows
from support.clinics import write_clinics

Floats = Any


def derive(folder: Path, frame: pd.DataFrame, **changes: str) -> ResolvedRun:
    return derive_regression(load_config(write_clinics(folder, frame, **changes)))


def fit(resolved: ResolvedRun, **changes: Any) -> RegressionResult:
    """The result of a run in one process."""
    federation = resolved.load_federation()
    task = resolved.build_task(federation)
    result = read_rows(train(federation, task, resolved.method, **{**resolved.settings(), **changes}).metrics)
    assert result is not None
    return result


def at_home(frame: pd.DataFrame) -> pd.DataFrame:
    """The records in the hospital with most of a patient's records, the first of equals."""
    counts = frame.groupby(["patient", "hospital"]).size().rename("here").reset_index()
    counts["place"] = counts.hospital.map({"north": 0, "south": 1, "west": 2})
    home = (
        counts.sort_values(["patient", "here", "place"], ascending=[True, False, True])
        .groupby("patient")
        .first()
    )
    return frame[frame.hospital == frame.patient.map(home.hospital)]


def make_rounds(terms: int, family: Family, iterations: int = 4) -> Rounds:
    return Rounds(len(family.baselines) + terms, terms, family, iterations)


def iterate(
    rounds: Rounds,
    features: Floats,
    outcome: Floats,
    person: Floats,
    noise_std: float = 0.0,
    rng: np.random.Generator | None = None,
) -> Fit:
    """The result of all iterations for the records of one silo."""
    sums, theta, found = np.zeros((0, rounds.sum_size)), np.zeros(rounds.size), None
    for round_ in range(rounds.iterations):
        total = rounds.make_rows(features, outcome, person, theta, round_).sum(0)
        noise = 0.0 if rng is None else rng.normal(0, noise_std, len(total))
        sums = np.vstack([sums, total + noise])
        path = rounds.follow(sums, noise_std)
        theta, found = path.theta, path.fit
    assert found is not None
    return found
