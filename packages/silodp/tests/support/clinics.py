"""Made-up tables of three hospitals that share patients, and a configuration of a regression on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from support.wards import HOSPITALS, write_tables

LABELS = {
    "logistic": 'label = "readmitted"\nclasses = ["no", "yes"]',
    "linear": 'label = "days"\nkind = "real"\nlabel_typical = [4, 3]',
    "poisson": 'label = "days"\nkind = "real"',
    "survival": 'event = "died"\ntime = "months"\nkind = "survival"',
}
KINDS = {
    "logistic": '"logistic"',
    "linear": '{{ name = "linear", residual = {residual}, typical = 3.0 }}',
    "poisson": '{{ name = "poisson", largest = 40, typical = 3.0 }}',
    "survival": '{{ name = "survival", cuts = [6, 12.3], horizon = 30, largest_hazard = {hazard}, typical = 0.4 }}',
}
OUTCOMES = {"logistic": "readmitted", "linear": "days", "poisson": "days", "survival": "died"}
CONFIG = """
name = "clinics"
rounds = 5
{head}
[data]
source = "tables"
files = {{ north = "north.csv", south = "south.csv", west = "west.csv" }}
[data.schema]
user = "patient"
users = "patients.txt"
{label}
numeric = {{ age = [18, 98], dose = {{ range = [0, 10], typical = [4, 2] }} }}
categorical = {{ sex = ["f", "m"], stage = {{ categories = ["I", "II", "III"], codes = true }} }}
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.05
[regression]
outcome = "{outcome}"
family = {family}
terms = ["age", "sex", "stage", "dose", "age:sex"]
{asked}
"""


def draw_clinics(persons: int, seed: int = 0, records: int = 1, most_silos: int = 1) -> pd.DataFrame:
    """One row per record; a person has up to `records` of them in each of 1 to `most_silos` hospitals."""
    rng, clock = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    rows = []
    for person in range(persons):
        silos = rng.choice(3, rng.integers(1, most_silos + 1), replace=False)
        age, male = round(rng.uniform(18, 98)), rng.random() < 0.5
        for silo in np.repeat(silos, rng.integers(1, records + 1)):
            stage, dose = rng.integers(3), round(rng.uniform(0, 10), 2)
            eta = -0.3 + 0.02 * (age - 58) + 0.4 * male + (-0.4, 0.0, 0.6)[stage] + 0.05 * (dose - 5)
            died, left = clock.exponential(40 * np.exp(-eta)), clock.uniform(0, 45)
            rows.append(
                {
                    "hospital": HOSPITALS[silo],
                    "patient": f"p{person}",
                    "age": age,
                    "sex": "m" if male else "f",
                    "stage": ("I", "II", "III")[stage],
                    "dose": dose,
                    "readmitted": "yes" if rng.random() < 1 / (1 + np.exp(-eta)) else "no",
                    "days": int(rng.poisson(np.exp(1 + 0.3 * eta))),
                    "died": int(died <= left),
                    "months": max(round(min(died, left), 1), 0.1),
                }
            )
    return pd.DataFrame(rows)


def write_clinics(
    folder: Path,
    frame: pd.DataFrame,
    *,
    asked: str,
    head: str = "",
    family: str = "logistic",
    residual: str = "100.0",
    hazard: str = "1.0",
) -> Path:
    """Write the tables and the configuration; return its path."""
    write_tables(folder, frame)
    path = folder / "clinics.toml"
    kind = KINDS[family].format(residual=residual, hazard=hazard)
    path.write_text(
        CONFIG.format(head=head, label=LABELS[family], outcome=OUTCOMES[family], family=kind, asked=asked)
    )
    return path
