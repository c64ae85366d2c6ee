"""Made-up tables of three hospitals that share patients, and a configuration that counts them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

TIMES = [60.0, 120.0, 240.0, 480.0, 720.0]
HOSPITALS = ("north", "south", "west")
CONFIG = """
name = "wards"
rounds = 5
{head}
[data]
source = "tables"
files = {{ north = "north.csv", south = "south.csv", west = "west.csv" }}
[data.schema]
user = "patient"
users = "patients.txt"
kind = "survival"
event = "dead"
time = "days"
numeric = {{ age = {{ range = [20, 90], missing = "indicator" }}, dose = {{ range = [0, 10], typical = [4, 2] }} }}
categorical = {{ ward = ["A", "B"], kind = {{ categories = ["x", "y", "z"], codes = true }} }}
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
{method}
[method.local]
learning_rate = 0.01
[task]
model = "embedding"
loss = "cox"
[statistics]
{noise}
histogram = {{ age = 7, dose = 5 }}
mean = ["age", "dose"]
count = ["ward", "kind"]
survival = {{ times = [60, 120, 240, 480, 720], by = "ward" }}
"""


def draw_wards(persons: int = 300, seed: int = 0, most_silos: int = 3, records: int = 1) -> pd.DataFrame:
    """One row per record; a person has up to `records` of them in each of 1 to `most_silos` hospitals."""
    rng = np.random.default_rng(seed)
    rows = []
    for person in range(persons):
        silos = rng.choice(3, rng.integers(1, most_silos + 1), replace=False)
        for silo in np.repeat(silos, rng.integers(1, records + 1)):
            ward = rng.choice(["A", "B"])
            died, left = rng.exponential(400 if ward == "A" else 800), rng.uniform(0, 1500)
            rows.append(
                {
                    "hospital": HOSPITALS[silo],
                    "patient": f"p{person}",
                    "age": round(rng.uniform(20, 90)) if rng.random() < 0.9 else np.nan,
                    "dose": round(rng.uniform(0, 10), 2),
                    "ward": ward,
                    "kind": rng.choice(["x", "y", "z"], p=[0.2, 0.3, 0.5]),
                    "dead": int(died <= left),
                    "days": round(min(died, left), 1),
                }
            )
    return pd.DataFrame(rows)


def write_tables(folder: Path, frame: pd.DataFrame) -> None:
    """Write a table per hospital, and the public list of patients."""
    for hospital in HOSPITALS:
        part = frame[frame.hospital == hospital].drop(columns="hospital")
        part.to_csv(folder / f"{hospital}.csv", index=False)
    (folder / "patients.txt").write_text("".join(f"p{n}\n" for n in range(2 * frame.patient.nunique())))


def write_wards(
    folder: Path, frame: pd.DataFrame, *, head: str = "", method: str = "", noise: str = "epsilon = 1.0"
) -> Path:
    """Write the tables and the configuration; return its path."""
    write_tables(folder, frame)
    path = folder / "wards.toml"
    path.write_text(CONFIG.format(head=head, method=method, noise=noise))
    return path
