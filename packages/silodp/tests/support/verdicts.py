"""Made-up tables with a label that depends on age by so much, a run on them, and what it says of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from support.commands import Silodp

CONFIG = """
name = "wards"
rounds = {rounds}
seed = 3
[data]
source = "tables"
files = {{ north = "north.csv", south = "south.csv" }}
[data.schema]
user = "patient"
label = "ill"
classes = ["no", "yes"]
test_share = 0.3
numeric = {{ age = {{ range = [0, 100], typical = [50, 20] }}, dose = {{ range = [0, 10], typical = [5, 3] }} }}
[method]
name = "uldp-sgd"
noise_multiplier = {noise}
step = {step}
{more}
"""


def write_tables(folder: Path, persons: int, slope: float) -> None:
    """Two tables whose label depends on age by so much; a fifth of the persons are ill."""
    rng = np.random.default_rng(7)
    age, dose = rng.normal(50, 20, persons).clip(0, 100), rng.uniform(0, 10, persons)
    ill = rng.random(persons) < 1 / (1 + np.exp(1.5 + 0.3 * slope - slope * (age - 50) / 20))
    rows = pd.DataFrame({"patient": [f"p{n}" for n in range(persons)], "age": age, "dose": dose})
    rows["ill"] = np.where(ill, "yes", "no")
    for number, name in enumerate(("north", "south")):
        rows[rng.random(persons) < (0.6, 0.5)[number]].round(2).to_csv(folder / f"{name}.csv", index=False)


def train(silodp: Silodp, persons: int = 1500, slope: float = 0.0, **settings: Any) -> Any:
    write_tables(Path(), persons, slope)
    filled = {"rounds": 5, "noise": 5.0, "step": 1.0, "more": "", **settings}
    Path("wards.toml").write_text(CONFIG.format(**filled))
    done = silodp("run", "wards.toml", "--out", "run", "--json")
    assert done.status == 0, done.err
    return done.json


def banner(page: str) -> str:
    """What the report says of the model before anything else."""
    return page[page.index('id="verdict"') - 30 : page.index('id="guarantee"')]


def predict(silodp: Silodp) -> Any:
    Path("found.csv").unlink(missing_ok=True)
    return silodp("predict", "run", "north.csv", "--out", "found.csv", "--json").json["skill"]
